"""Stand-ins for hardware: CUDA programs run without a GPU (``CALCVM_CUDA_SIMULATOR=1``).  They are imported at first use."""
