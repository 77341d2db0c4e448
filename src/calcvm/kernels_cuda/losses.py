"""losses kernels."""
