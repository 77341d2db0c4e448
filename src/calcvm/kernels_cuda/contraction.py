"""contraction kernels."""
