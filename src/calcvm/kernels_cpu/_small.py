"""The device ``small``, for little memory: products and convolutions are plain loops, without scratch.

Packs for processors without float64 have hyperparameters in float32 (`HYPER`), in the first half of the room of the float64 ones
(`KERNELS`).  In the slots of the powers of Adam's beta are 1 - beta^t: as c = beta*c + (1 - beta) all terms are positive, and no
digits are lost.
"""

from __future__ import annotations

from numba import types
from numba.core import cgutils

from calcvm.formulas import steps as S
from calcvm.kernel import Kernels, Ptr
from calcvm.kernels_cpu._common import DEVICES, Kernel, at, fact, lanes, like, njit, routine, sqrt
from calcvm.kernels_cpu._epilogues import finish
from calcvm.kernels_cpu._simd import Emit
from calcvm.kernels_cpu._vectors import emitted, word
from calcvm.kernels_cpu.convolution import SHAPE, TODO, parts, place, tap_of

HYPER = ("hyper", "scaled")  # operands of hyperparameters
KERNELS = Kernels(Kernel)  # instead of those of the same rows
DEVICES["small"] = {name: f"small_{name}" for name in ("gemm", "gemv", "convolved", "correlated", "adjoint")}

SINE = S.SINE[-5:]  # to 2e-9, for float32

has_floats = fact(lambda target: target.registers > 0, types.boolean)
has_vectors = fact(lambda target: target.lanes(32) > 1, types.boolean)


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


def _columns(vectors):
    """c[j] = init[j] + sum_k a[k*a_cs] * B[k*b_rs + j] for so many vectors of columns."""

    def emit(e, K, a, a_cs, b_ptr, b_rs, c, init, mode):
        b, places = e.b, [e.lanes * j for j in range(vectors)]
        sums = [cgutils.alloca_once_value(b, e.zero) for _ in places]
        with b.if_then(b.icmp_signed("!=", mode, word(0))):
            for j, total in zip(places, sums):
                b.store(e.load(e.at(init, None, j)), total)
        with cgutils.for_range(b, K) as loop:
            x = e.splat(b.load(e.at(a, b.mul(loop.index, a_cs)), align=e.size))
            row = e.at(b_ptr, b.mul(loop.index, b_rs))
            for j, total in zip(places, sums):
                b.store(e.fma(x, e.load(e.at(row, None, j)), b.load(total)), total)
        for j, total in zip(places, sums):
            e.store(b.load(total), e.at(c, None, j))

    return emitted(Emit, "ipipippi", emit)


_columns8, _columns4, _columns2, _columns1 = (_columns(vectors) for vectors in (8, 4, 2, 1))


@routine("iipipiippi")
def small_gemv(N, K, a, a_cs, b, b_rs, b_cs, c, init, mode):
    """As ``gemv``: as many columns at a time as there are registers for, for which an element of a is read once."""
    first, size = 0, lanes(c)
    if has_vectors() and b_cs == 1:
        while first + 8 * size <= N:
            _columns8(K, a, a_cs, at(b, first), b_rs, at(c, first), at(init, first), mode)
            first += 8 * size
        if first + 4 * size <= N:
            _columns4(K, a, a_cs, at(b, first), b_rs, at(c, first), at(init, first), mode)
            first += 4 * size
        if first + 2 * size <= N:
            _columns2(K, a, a_cs, at(b, first), b_rs, at(c, first), at(init, first), mode)
            first += 2 * size
        if first + size <= N:
            _columns1(K, a, a_cs, at(b, first), b_rs, at(c, first), at(init, first), mode)
            first += size
    while has_floats() and first + 4 <= N:
        zero = like(c, 0)
        s, t, u, v = (
            (init[first], init[first + 1], init[first + 2], init[first + 3]) if mode else (zero, zero, zero, zero)
        )
        for k in range(K):
            x, at_k = a[k * a_cs], k * b_rs + first * b_cs
            s += x * b[at_k]
            t += x * b[at_k + b_cs]
            u += x * b[at_k + 2 * b_cs]
            v += x * b[at_k + 3 * b_cs]
        c[first], c[first + 1], c[first + 2], c[first + 3] = s, t, u, v
        first += 4
    for j in range(first, N):
        total = like(c, 0)
        for k in range(K):
            total += a[k * a_cs] * b[k * b_rs + j * b_cs]
        if mode:
            total += init[j]
        c[j] = total


@njit(inline=True)
def seen_by(p, t, I, O, K, S, P, L):
    """The pixel of the input that tap t sees from pixel p of the result; -1 in the padding."""
    n, o0, o1, o2 = place(p, O)
    k0, k1, k2 = tap_of(t, K)
    i0, i1, i2 = o0 * S[0] + k0 * L[0] - P[0], o1 * S[1] + k1 * L[1] - P[1], o2 * S[2] + k2 * L[2] - P[2]
    inside = 0 <= i0 and i0 < I[0] and 0 <= i1 and i1 < I[1] and 0 <= i2 and i2 < I[2]
    return ((n * I[0] + i0) * I[1] + i1) * I[2] + i2 if inside else -1


@routine("iipppippi" + SHAPE + TODO)
def small_convolved(lo, hi, x, wt, b, biased, y, ws, wn, *more):
    """As ``convolved``."""
    (G, C, F), I, O, K, S, P, L, todo = parts(more)
    columns = G * F
    for p in range(lo, hi):
        for j in range(columns):
            y[p * columns + j] = b[j] if biased else like(y, 0)
        for t in range(K[0] * K[1] * K[2]):
            pixel = seen_by(p, t, I, O, K, S, P, L)
            for j in range(columns if pixel >= 0 else 0):
                total = y[p * columns + j]
                for c in range(C):
                    total += x[(pixel * G + j // F) * C + c] * wt[(t * C + c) * columns + j]
                y[p * columns + j] = total
    finish(hi - lo, columns, columns, y, lo * columns, todo)


@routine("iiiipppp" + SHAPE)
def small_correlated(lo, hi, M, acc, x, dy, dwt, ws, *shape):
    """As ``correlated``."""
    (G, C, F), I, O, K, S, P, L, _ = parts(shape)
    columns = G * F
    for row in range(lo, hi):
        for j in range(0 if acc else columns):
            dwt[row * columns + j] = like(dwt, 0)
        for p in range(M):
            pixel = seen_by(p, row // C, I, O, K, S, P, L)
            for j in range(columns if pixel >= 0 else 0):
                dwt[row * columns + j] += x[(pixel * G + j // F) * C + row % C] * dy[p * columns + j]


@njit(inline=True)
def sent_from(i, k, O, S, P, L):
    """The place along an axis of the result that sees place i by tap k; -1 if none does."""
    o = i + P - k * L
    return o // S if o >= 0 and o % S == 0 and o // S < O else -1


@routine("iiipppipp" + SHAPE + TODO)
def small_adjoint(lo, hi, inner, wt, dy, b, biased, dx, ws, *more):
    """As ``adjoint``."""
    (G, C, F), I, O, K, S, P, L, todo = parts(more)
    columns = G * C
    for p in range(lo * inner, hi * inner):
        n, i0, i1, i2 = place(p, I)
        for j in range(columns):
            dx[p * columns + j] = b[j] if biased else like(dx, 0)
        for t in range(K[0] * K[1] * K[2]):
            k0, k1, k2 = tap_of(t, K)
            o0, o1, o2 = (
                sent_from(i0, k0, O[0], S[0], P[0], L[0]),
                sent_from(i1, k1, O[1], S[1], P[1], L[1]),
                sent_from(i2, k2, O[2], S[2], P[2], L[2]),
            )
            pixel = ((n * O[0] + o0) * O[1] + o1) * O[2] + o2
            for j in range(columns if o0 >= 0 and o1 >= 0 and o2 >= 0 else 0):
                g, c = j // C, j % C
                total = dx[p * columns + j]
                for f in range(F):
                    total += dy[(pixel * G + g) * F + f] * wt[((t * C + c) * G + g) * F + f]
                dx[p * columns + j] = total
    finish((hi - lo) * inner, columns, columns, dx, lo * inner * columns, todo)


@KERNELS.kernel
def tick(me, schedule, hyper: Ptr.float32):
    """As ``tick``."""
    one = like(hyper, 1)
    t = hyper[S.T] + one
    hyper[S.T] = t
    lr = hyper[S.LEARNING_RATE]
    k = t - one - hyper[S.WARMUP_STEPS]
    if k < 0:
        lr = lr * t / hyper[S.WARMUP_STEPS]
    elif schedule == S.COSINE or schedule == S.COSINE_RESTARTS:
        total = hyper[S.TOTAL_STEPS]
        if schedule == S.COSINE_RESTARTS:
            begin, growth = hyper[S.GAMMA_T] - one, hyper[S.GAMMA] - one
            total += begin * growth
            if k - begin >= total - min(k * like(hyper, 5e-7), like(hyper, 0.03)):
                total += (k - begin) * growth
                begin = k
                hyper[S.GAMMA_T] = begin + one
            k -= begin
        part = min(k / total, one)
        near = min(part, one - part)
        z = near * near
        sine = like(hyper, SINE[0]) * z + like(hyper, SINE[1])
        sine = (sine * z + like(hyper, SINE[2])) * z + like(hyper, SINE[3])
        sine = (sine * z + like(hyper, SINE[4])) * near
        share = one - sine * sine if part == near else sine * sine
        lr = hyper[S.MIN_LR] + (lr - hyper[S.MIN_LR]) * share
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
