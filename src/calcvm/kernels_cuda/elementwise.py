"""elementwise kernels."""
