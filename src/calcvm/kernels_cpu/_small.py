"""The device ``small``: products as plain loops, for processors with little memory for code.  Bits differ from those of the tiles."""

from __future__ import annotations

from calcvm.kernels_cpu._common import DEVICES, like, routine

DEVICES["small"] = {"gemm": "small_gemm", "gemv": "small_gemv"}


@routine("iiipiipiipipiipi")
def small_gemm(M, N, K, a, a_rs, a_cs, b, b_rs, b_cs, c, c_rs, init, init_rs, mode, ws, wn):
    """As ``gemm``."""
    for i in range(M):
        for j in range(N):
            total = like(c, 0)
            for k in range(K):
                total += a[i * a_rs + k * a_cs] * b[k * b_rs + j * b_cs]
            if mode:
                total += init[i * init_rs + j]
            c[i * c_rs + j] = total


@routine("iipipiippi")
def small_gemv(N, K, a, a_cs, b, b_rs, b_cs, c, init, mode):
    """As ``gemv``."""
    for j in range(N):
        total = like(c, 0)
        for k in range(K):
            total += a[k * a_cs] * b[k * b_rs + j * b_cs]
        if mode:
            total += init[j]
        c[j] = total
