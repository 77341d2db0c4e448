"""The device ``small``, for processors with little memory for code and without float64: bits differ from those of other devices.

Products are plain loops.  Hyperparameters are float32 (`HYPER`), in the first half of the room of the float64 ones.  In the slots of
the powers of Adam's beta are 1 - beta^t: as c = beta*c + (1 - beta) all terms are positive, and no digits are lost.
"""

from __future__ import annotations

from calcvm.formulas import steps as S
from calcvm.kernel import Kernels, Ptr
from calcvm.kernels_cpu._common import DEVICES, Kernel, like, routine, sqrt

HYPER = ("hyper", "scaled")  # operands of hyperparameters
KERNELS = Kernels(Kernel)  # instead of those of the same rows
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


@KERNELS.kernel
def tick(me, schedule, hyper: Ptr.float32):
    """As ``tick``, for the schedules that need no cosine."""
    one = like(hyper, 1)
    t = hyper[S.T] + one
    hyper[S.T] = t
    lr = hyper[S.LEARNING_RATE]
    k = t - one - hyper[S.WARMUP_STEPS]
    if k < 0:
        lr = lr * t / hyper[S.WARMUP_STEPS]
    elif schedule != S.CONSTANT:
        if k > 0 and (schedule == S.EXPONENTIAL or k % hyper[S.STEP_SIZE] == 0):
            hyper[S.GAMMA_T] = hyper[S.GAMMA_T] * hyper[S.GAMMA]
        lr = lr * hyper[S.GAMMA_T]
    c1 = hyper[S.BETA1] * hyper[S.BETA1_T] + (one - hyper[S.BETA1])
    c2 = hyper[S.BETA2] * hyper[S.BETA2_T] + (one - hyper[S.BETA2])
    hyper[S.BETA1_T] = c1
    hyper[S.BETA2_T] = c2
    hyper[S.LR_T] = lr
    hyper[S.STEP_SIZE_T] = lr / c1
    hyper[S.INV_SQRT_CORRECTION2_T] = one / sqrt(c2)
