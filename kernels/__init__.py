"""Device code: Triton and Gluon kernels. Imports triton only; fusednorm/host/ and fusednorm/columns/ import it."""
