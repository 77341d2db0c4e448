"""random kernels."""
