"""Optimizer updates, step counter and schedule, clipping, penalties (see `calcvm.ops.optimizers`).

An update is bound by memory.  So a thread takes four elements at a time, one block apart, and starts all their loads
before it computes the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from calcvm.formulas.declare import Update
from calcvm.formulas.number import equal, fma, where
from calcvm.formulas.optimizers import HYPER_SLOTS, UPDATES
from calcvm.formulas.steps import CLIP_NORM, CLIP_SCALE, CLIP_VALUE
from calcvm.kernel import words
from calcvm.kernels_cuda._common import Float, Ptr, first, kernel, kernel_as, share
from calcvm.kernels_cuda._cuda import (
    I64,
    at,
    compiled_by,
    device,
    lane,
    like,
    loaded,
    shared,
    sync,
    thread,
    threads,
    types,
    warp_size,
)
from calcvm.kernels_cuda._formulas import Compiled, Simulated, formula
from calcvm.kernels_cuda._math import sqrt
from calcvm.kernels_cuda._reduce import warp, warp_sum, warps
from calcvm.kernels_cuda._tuples import ats, likes, loads, mapped, stores
from calcvm.kernels_shared.optimizers import register

CHUNKS = 8  # parts of a total, one warp each, whatever the number of warps


@device
def span(me, rows, cols):
    """This thread's first element, and the end of the rows that this worker owns."""
    lo, hi = share(me, rows)
    return lo * cols + thread(), hi * cols


@device
def _loaded(i, xs):
    return loads(ats(xs, i))


@device
def _stored(i, stop, xs, ys):
    if i < stop:
        stores(ats(xs, i), ys)


@device
def _zipped(a, b, c, d):
    return a, b, c, d


def each(of: Callable) -> Callable:
    """A loop ``each(me, rows, cols, reads, writes, params)``: writes[i]... = of(reads[i]..., params...).

    Rows are shared, four elements per thread at a time.  Past the end, the last element is computed again and not stored.
    """

    @device
    def loop(me, rows, cols, reads, writes, params):
        i, stop = span(me, rows, cols)
        step, last = threads(), stop - 1
        while i < stop:
            a, b = _loaded(i, reads), _loaded(min(i + step, last), reads)
            c, d = _loaded(min(i + 2 * step, last), reads), _loaded(min(i + 3 * step, last), reads)
            loaded()
            a, b, c, d = mapped(of, mapped(_zipped, (a, b, c, d)), *params)
            _stored(i, stop, writes, a)
            _stored(i + step, stop, writes, b)
            _stored(i + 2 * step, stop, writes, c)
            _stored(i + 3 * step, stop, writes, d)
            i += 4 * step

    return loop


# ---------------------------------------------------------------- updates
def _numbers(op: Update) -> Callable:
    """A function of hyper: the scale of gradients, the decay, and the update's other numbers, in float64."""
    names = ("clip_scale", "weight_decay", *op.uses)

    def codegen(tc, hyper):
        def build(ctx, b, sig, args):
            def slot(name: str) -> Any:
                return Compiled(b, b.load(b.gep(args[0], [I64(HYPER_SLOTS.index(name))])))

            return ctx.make_tuple(b, sig.return_type, [op.coefficient(name, slot).v for name in names])

        return types.UniTuple(types.float64, len(names))(hyper), build

    @compiled_by(codegen)
    def numbers(hyper):
        return tuple(op.coefficient(name, lambda slot: Simulated(hyper[HYPER_SLOTS.index(slot)])).v for name in names)

    return numbers


def add_update(op: Update) -> None:
    """The kernel of an optimizer's update."""
    n = 2 + len(op.state)

    def new(*values: Any) -> tuple[Any, ...]:
        p, g, *state = values[:n]
        scale, decay, *used = values[n:]
        g = g * scale
        if op.decay:
            g = where(equal(decay, 0), g, fma(decay, p, g))
        return op(None, None, p, g, *state, *used)

    loop, numbers = each(formula(new)), _numbers(op)

    @kernel_as(op.name, words("rows cols clip", "", ("p", "g", *op.state, "hyper.float64")))
    def run(me, rows, cols, clip, p, g, *more):
        given = likes(p, numbers(more[-1]))
        scale = given[0] if clip else like(p, 1.0)
        loop(me, rows, cols, (p, g, *more[:-1]), (p, *more[:-1]), (scale, *given[1:]))


for _op in [*UPDATES.values()]:
    add_update(_op)


register(kernel, device, first)


# ---------------------------------------------------------------- clipping
@device
def clamp(x, c):
    """min(max(x, -c), c), NaN stays."""
    x = -c if x < -c else x
    return c if x > c else x


_clip = each(device(lambda g, c: (clamp(g, c),)))


@kernel
def clip_value(me, rows, cols, g: Ptr, hyper: Ptr.float64):
    """g = min(max(g, -clip_value), clip_value), NaN stays."""
    _clip(me, rows, cols, (g,), (g,), (like(g, hyper[CLIP_VALUE]),))


@device
def part_of_sum(x, n, i, step, zero, term):
    """The sum of term(x[i]), term(x[i + step]), ... below n, in four chains."""
    a, b, c, d = zero, zero, zero, zero
    while i + 3 * step < n:
        a += term(x[i])
        b += term(x[i + step])
        c += term(x[i + 2 * step])
        d += term(x[i + 3 * step])
        i += 4 * step
    while i < n:
        a += term(x[i])
        i += step
    return (a + b) + (c + d)


@device
def square(x):
    return x * x


@device
def wide_square(x):
    return float(x) * float(x)


@device
def small(x):
    """The factor for x if its squares overflow, in its own type."""
    unit = like(x, 2.0**-540)
    return unit if unit > like(x, 0) else like(x, 2.0**-80)


@device
def small_square(x):
    return (x * small(x)) * (x * small(x))


@kernel
def sumsq(me, rows, cols, g: Ptr, s: Ptr):
    """s[r] = sqrt(sum_c g[r,c]^2).  Rows are shared: a warp per row, or one thread if the row is shorter than a warp."""
    lo, hi = share(me, rows)
    if cols < warp_size():
        r = lo + thread()
        while r < hi:
            total = part_of_sum(at(g, r * cols), cols, 0, 1, like(g, 0.0), square)
            if total < like(g, math.inf):
                s[r] = sqrt(total)
            else:
                s[r] = sqrt(part_of_sum(at(g, r * cols), cols, 0, 1, like(g, 0.0), small_square)) / small(total)
            r += threads()
    else:
        r = lo + warp()
        while r < hi:
            total = warp_sum(part_of_sum(at(g, r * cols), cols, lane(), warp_size(), like(g, 0.0), square))
            if total < like(g, math.inf):
                norm = sqrt(total)
            else:
                total = warp_sum(part_of_sum(at(g, r * cols), cols, lane(), warp_size(), like(g, 0.0), small_square))
                norm = sqrt(total) / small(total)
            if lane() == 0:
                s[r] = norm
            r += warps()


@device
def sum_of_chunks(x, n, totals, term):
    """The sum of term(x[i]), for all threads: CHUNKS parts by warps, added in order."""
    chunk = warp()
    while chunk < CHUNKS:
        total = warp_sum(part_of_sum(x, n, chunk * warp_size() + lane(), CHUNKS * warp_size(), 0.0, term))
        if lane() == 0:
            totals[chunk] = total
        chunk += warps()
    sync()
    total = 0.0
    for chunk in range(CHUNKS):
        total += totals[chunk]
    sync()
    return total


@kernel
def clip_norm_scale(me, n, s: Ptr, hyper: Ptr.float64):
    """clip_scale = min(1, clip_norm/(sqrt(sum_i s[i]^2) + 1e-6)), NaN stays.

    Only worker 0: warps sum chunks in float64, and one thread adds them in order.
    """
    if me.worker != 0:
        return
    norm = sqrt(sum_of_chunks(s, n, shared(hyper), wide_square))
    if not norm < math.inf:
        norm = sqrt(sum_of_chunks(s, n, shared(hyper), small_square)) / small(norm)
    if thread() == 0:
        scale = hyper[CLIP_NORM] / (norm + 1e-6)
        hyper[CLIP_SCALE] = 1.0 if scale > 1 else scale


# ---------------------------------------------------------------- penalties, zero
@device
def sign(x, one):
    """``one`` with the sign of x, 0 at 0."""
    none = like(x, 0)
    return one if x > none else (-one if x < none else none)


_penalty = each(device(lambda p, g, a1, a2: (g + (sign(p, a1) + a2 * p),)))


@kernel
def penalty(me, rows, cols, l1: Float, l2: Float, p: Ptr, g: Ptr):
    """g += l1*sign(p) + 2*l2*p; sign(0) = 0."""
    _penalty(me, rows, cols, (p, g), (g,), (like(p, l1), like(p, 2 * l2)))


@kernel
def zero(me, rows, cols, g: Ptr):
    """g = 0.  Rows are shared, and their elements among threads."""
    i, stop = span(me, rows, cols)
    while i < stop:
        g[i] = like(g, 0)
        i += threads()
