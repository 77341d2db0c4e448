"""Side-by-side workloads against PyTorch, JAX, scikit-learn and OpenBLAS: ``python -m bench all``."""
