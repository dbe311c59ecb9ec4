"""Plans and tensors become launches: prepared once, repeated without Triton, in Python or in C++."""
