"""shape kernels."""
