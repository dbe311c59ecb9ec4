"""Integrations that make unmodified models run this package's kernels. Each is imported only on first use."""
