"""Plans and tensors become launches: built once, repeated without Triton, in Python or in C++."""
