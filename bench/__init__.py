"""Benchmarks against PyTorch, JAX, scikit-learn and OpenBLAS, side by side: ``python -m bench all``."""
