"""The room of the CUDA kernels: the same families, rows and contract as `kernels_cpu`.  Empty so far."""
