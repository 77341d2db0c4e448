"""optimizers kernels."""
