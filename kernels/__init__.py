"""Device code: Triton and Gluon kernels. Imports triton only; fusednorm/launch.py is its sole importer."""
