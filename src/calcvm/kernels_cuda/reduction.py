"""reduction kernels."""
