"""The device ``blas``: the BLAS inside SciPy (extra ``blas``) computes matrix products, our kernels everything else.

It serves comparisons, and machines where that BLAS is faster.  Its results may depend on how rows are shared, so
its programs run with one worker; BLAS uses its own threads inside a row.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import get_cython_function_address, intrinsic

from calcvm.kernels_cpu import _native
from calcvm.kernels_cpu._common import DEVICES, I8, I32, at, njit, routine

DEVICES["blas"] = {"gemm": "blas_gemm", "gemv": "blas_gemv"}


def require() -> None:
    """Make SciPy's BLAS known to the linker (ImportError: SciPy is not installed)."""
    for name in ("sgemm", "dgemm"):
        _native.publish(f"calcvm_{name}", get_cython_function_address("scipy.linalg.cython_blas", name))


@intrinsic
def call_gemm(tc, transpose_a, transpose_b, m, n, k, a, lda, b, ldb, beta, c, ldc):
    """Fortran's xGEMM with alpha 1: C = op(A) op(B) + beta C, column-major."""

    def codegen(ctx, builder, sig, values):
        element = ctx.get_value_type(a.dtype)
        letter = "s" if isinstance(element, ir.FloatType) else "d"

        def slot(value):
            return cgutils.alloca_once_value(builder, value)

        def integer(i):
            return slot(builder.trunc(values[i], I32))

        def letter_of(i):
            wanted = builder.icmp_signed("!=", values[i], ir.Constant(values[i].type, 0))
            return slot(builder.select(wanted, ir.Constant(I8, ord("T")), ir.Constant(I8, ord("N"))))

        one = slot(ir.Constant(element, 1.0))
        args = [letter_of(0), letter_of(1), integer(2), integer(3), integer(4), one, values[5], integer(6),
                values[7], integer(8), slot(builder.sitofp(values[9], element)), values[10], integer(11)]  # fmt: skip
        ft = ir.FunctionType(ir.VoidType(), [v.type for v in args])
        builder.call(cgutils.get_or_insert_function(builder.module, ft, f"calcvm_{letter}gemm"), args)
        return ctx.get_dummy_value()

    i = types.int64
    return types.void(i, i, i, i, i, a, i, b, i, i, c, i), codegen


@njit(inline=True)
def layout(rows, cols, rs, cs):
    """Whether a matrix is column-major, and its leading dimension, which BLAS wants to be large enough even for a single column."""
    if cs == 1 or cols == 1:
        return 0, max(rs, cols)
    return 1, max(cs, rows)


@routine("iiipiipiipipiipi")
def blas_gemm(M, N, K, a, a_rs, a_cs, b, b_rs, b_cs, c, c_rs, init, init_rs, mode, ws, wn):
    """As ``gemm``.  A row-major C = A B is the column-major C' = B' A'."""
    if M <= 0 or N <= 0:
        return
    for i in range(M):
        for j in range(N):
            if mode:
                c[i * c_rs + j] = init[i * init_rs + j]
            else:
                c[i * c_rs + j] = 0
    if K > 0:
        tb, ldb = layout(K, N, b_rs, b_cs)
        ta, lda = layout(M, K, a_rs, a_cs)
        call_gemm(tb, ta, N, M, K, b, ldb, a, lda, 1, c, max(c_rs, N))


@routine("iipipiippi")
def blas_gemv(N, K, a, a_cs, b, b_rs, b_cs, c, init, mode):
    """As ``gemv``, by the same BLAS routine."""
    for j in range(N):
        if mode:
            c[j] = init[j]
        else:
            c[j] = 0
    if K > 0 and N > 0:
        tb, ldb = layout(K, N, b_rs, b_cs)
        ta, lda = layout(1, K, 1, a_cs)
        call_gemm(tb, ta, N, 1, K, b, ldb, at(a, 0), lda, 1, c, N)
