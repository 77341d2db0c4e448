"""The product that a block computes: its description in shared memory, and its results on the way to C.

Results.  Sums go through shared memory, so that C, a bias and an activation's output are accessed row by row.
"""

from __future__ import annotations

from calcvm.kernels_cuda._copies import by_minor, itemsize
from calcvm.kernels_cuda._cuda import (
    I64,
    as_f64,
    as_i64,
    at,
    compiled_by,
    device,
    in_global,
    like,
    shared,
    sync,
    thread,
    types,
)
from calcvm.kernels_cuda._epilogues import (
    ELU,
    HARD_SWISH,
    LEAKY_RELU,
    NONE,
    RELU,
    RELU6,
    SIGMOID,
    SILU,
    TANH,
    elu,
    elu_slope,
    hard_swish,
    leaky_relu,
    leaky_relu_slope,
    relu,
    relu6,
    relu6_slope,
    relu_slope,
    sigmoid,
    sigmoid_slope,
    silu,
    tanh,
    tanh_slope,
)
from calcvm.kernels_cuda._reduce import add
from calcvm.kernels_cuda._routines import ints, routine
from calcvm.kernels_cuda._tuples import mapped, stores
from calcvm.kernels_cuda._windows import apart, scratch_bytes

DERIVATIVE = 16  # flag beside an activation: multiply by its derivative instead
SET, FROM_INIT = 0, 1  # modes
# The words of a product's description.
(
    A, A_RS, A_KS, A_GS, B, B_KS, B_CS, B_GS, C, C_RS, INIT, INIT_RS, YA, MODE, ACT, ALPHA, SUMMANDS, BLOCK, REAL, SEEN,
    FIRST,
) = range(21)  # fmt: skip
FIELDS = 32


def shared_bytes(threads: int, itemsize: int) -> int:
    """Shared scratch that kernels may use, for a block of so many threads."""
    return max(min(192 * threads, 47104), 8192)


def _since(tc, base, p):
    def build(ctx, b, sig, args):
        base, p = (b.ptrtoint(x, I64) for x in args)
        return b.ashr(b.sub(p, base), I64({32: 2, 64: 3}[sig.args[0].dtype.bitwidth]))

    return types.int64(base, p), build


@compiled_by(_since)
def since(base, p):
    """The number of elements from one pointer to another."""
    return (p.ctypes.data - base.ctypes.data) // p.itemsize


# ---------------------------------------------------------------- the description
@device
def described(h):
    """The description of the current product: words in shared scratch."""
    return as_i64(shared(h))


@device
def tiles_at(h):
    """The place of tiles in shared scratch, as a pointer of ``h``'s type, and its number of elements."""
    before = 8 * FIELDS // itemsize(h)
    return at(shared(h), before), scratch_bytes() // itemsize(h) - before


@device
def product(
    h, S, kc, real, a, a_rs, a_ks, a_gs, b, b_ks, b_cs, b_gs, c, c_rs, init, init_rs, mode, act, alpha, ya
):  # fmt: skip
    """Describe the product of `gemm` and `partial_sums`: C[i,j] = act(INIT + sum_f A[i,f] * B[f,j]).

    f = g*S + k: A[i,f] = a[g*a_gs + i*a_rs + k*a_ks], B[f,j] = b[g*b_gs + k*b_ks + j*b_cs]; A's rows from ``real`` on
    are 1.  INIT is 0 in mode SET, init[i*init_rs + j] in FROM_INIT.  The rows of C and ya are ``c_rs`` apart; if it is 0,
    a `window` places them.  ``kc`` summands form one chain.  The description is in shared memory, where it takes no
    registers from the tiles.
    """
    p = described(h)
    if thread() == 0:
        p[A], p[A_RS], p[A_KS], p[A_GS] = since(h, a), a_rs, a_ks, a_gs
        p[B], p[B_KS], p[B_CS], p[B_GS] = since(h, b), b_ks, b_cs, b_gs
        p[C], p[C_RS], p[INIT], p[INIT_RS], p[YA] = since(h, c), c_rs, since(h, init), init_rs, since(h, ya)
        p[MODE], p[ACT], p[SUMMANDS], p[BLOCK], p[REAL], p[SEEN] = mode, act, S, kc, real, 0
        as_f64(p)[ALPHA] = alpha
    sync()


@device
def see(h, how, first):
    """Declare A of the described `product` to be an image seen through a `window`: ``how``, from its row ``first`` on."""
    p = described(h)
    if thread() == 0:
        p[SEEN], p[FIRST] = how, first
    sync()


# ---------------------------------------------------------------- results
_cell = device(lambda i, p, row, j: p[i * row + j])
_place = device(lambda i, p, j: at(p, i + j))
_times = device(lambda i, row: i * row)
_or_first = device(lambda i, rows, first: i if i < rows else first)


@routine(lambda h: types.void(h, *ints(7), types.boolean, types.boolean))
def put(h, first, rows, cols, ld, width, off, i_off, again, whole):
    """Set C's elements from ``off`` on to act(init + sum); the sum is in shared memory, and act applies if it is ``whole``.
    ``again``: C already holds a sum, to which this one is added.  Rows that lie `apart` begin with the tile's ``first``.

    A thread reads four rows at once, because reading them one by one would wait for memory four times.  In place of a
    row past the last it reads its first one again.
    """
    h = in_global(h)
    p, s = described(h), tiles_at(h)[0]
    c, c_rs = at(h, p[C] + off), p[C_RS]
    init, init_rs, mode = (c, c_rs, FROM_INIT) if again else (at(h, p[INIT] + i_off), p[INIT_RS], p[MODE])
    act = p[ACT] if whole else NONE
    ya = at(h, p[YA] + off)
    a = like(h, as_f64(p)[ALPHA])
    i_first, di, j, dj = by_minor(width, 1)
    while j < cols:
        i = i_first
        while i < rows:
            four = mapped(_or_first, ((i, i + di, i + 2 * di, i + 3 * di),), rows, i)
            x = mapped(_cell, (four,), s, ld, j)
            to = mapped(_times, (four,), c_rs) if c_rs != 0 else mapped(apart, (four,), h, first)
            if mode == FROM_INIT:
                of = to if again else mapped(_times, (four,), init_rs)
                x = mapped(add, (mapped(_cell, (of,), init, 1, j), x))
            y = mapped(_cell, (to,), ya, 1, j) if act > DERIVATIVE else x
            if act == RELU:
                x = mapped(relu, (x,))
            if act == LEAKY_RELU:
                x = mapped(leaky_relu, (x,), a)
            if act == SIGMOID:
                x = mapped(sigmoid, (x,))
            if act == TANH:
                x = mapped(tanh, (x,))
            if act == ELU:
                x = mapped(elu, (x,), a)
            if act == RELU6:
                x = mapped(relu6, (x,))
            if act == SILU:
                x = mapped(silu, (x,))
            if act == HARD_SWISH:
                x = mapped(hard_swish, (x,))
            if act == RELU + DERIVATIVE:
                x = mapped(relu_slope, (x, y))
            if act == LEAKY_RELU + DERIVATIVE:
                x = mapped(leaky_relu_slope, (x, y), a)
            if act == SIGMOID + DERIVATIVE:
                x = mapped(sigmoid_slope, (x, y))
            if act == TANH + DERIVATIVE:
                x = mapped(tanh_slope, (x, y))
            if act == ELU + DERIVATIVE:
                x = mapped(elu_slope, (x, y), a)
            if act == RELU6 + DERIVATIVE:
                x = mapped(relu6_slope, (x, y))
            stores(mapped(_place, (to,), c, j), x)
            i += 4 * di
        j += dj
