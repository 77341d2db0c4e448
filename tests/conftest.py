"""What all tests share: one thread for the peers' libraries, a cache of compiled kernels for the run."""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # idle threads of other libraries would spin against ours
os.environ.setdefault("MPLBACKEND", "Agg")
