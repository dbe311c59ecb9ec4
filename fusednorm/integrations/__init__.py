"""What makes models that know nothing of this package run its kernels. Nothing here is imported unless asked for."""
