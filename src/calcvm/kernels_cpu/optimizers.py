"""Optimizer updates, step counter and schedule, clipping, penalties (see `calcvm.ops.optimizers`).

An update is a loop of its formula (`calcvm.formulas.optimizers`), compiled for each case of clipping and decay.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from calcvm.formulas.declare import Update
from calcvm.formulas.optimizers import HYPER_SLOTS, UPDATES
from calcvm.formulas.steps import CLIP_NORM, CLIP_SCALE, CLIP_VALUE, WEIGHT_DECAY
from calcvm.kernel import words
from calcvm.kernels_cpu._common import (
    REASSOC,
    WORD,
    Float,
    Ptr,
    at,
    fabs,
    first,
    intrinsic_of,
    kernel,
    kernel_as,
    like,
    maximum,
    minimum,
    njit,
    share,
    sqrt,
)
from calcvm.kernels_cpu._formulas import V
from calcvm.kernels_cpu._math import Lanes, each, rsumsq
from calcvm.kernels_cpu._target import current
from calcvm.kernels_shared.optimizers import register


@njit(inline=True)
def span(me, rows, cols):
    """The elements of the rows that this worker owns."""
    lo, hi = share(me, rows)
    return lo * cols, hi * cols


@njit(inline=True)
def slot(x, hyper, k):
    """A hyperparameter in the dtype of ``x``."""
    return like(x, hyper[k])


# ---------------------------------------------------------------- updates
def _loop(op: Update, clip: bool, decay: bool) -> Any:
    """A loop ``each(n, start, given)``; given : p, g, state, hyper."""

    def new(*values: V) -> tuple[V, ...]:
        """The new values, from p, g, state, the scale, the decay, and the update's further operands."""
        k = 2 + len(op.state)
        return op(values[k] if clip else None, values[k + 1] if decay else None, *values[:k], *values[k + 2 :])

    def typing(n: Any, start: Any, given: Any) -> Any:
        def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            dtype, count = given.types[0].dtype, len(given.types) - 1
            e = Lanes(b, ctx.get_value_type(dtype), current())
            hyper, of_hyper = b.extract_value(args[2], count), given.types[count].dtype

            def slot(name: str) -> V:
                return V(b, b.load(b.gep(hyper, [WORD(HYPER_SLOTS.index(name))])))

            def number(name: str) -> Any:
                return ctx.cast(b, op.coefficient(name, slot).v, of_hyper, dtype)

            reads = [b.gep(b.extract_value(args[2], k), [args[1]]) for k in range(count)]
            writes = [p for k, p in enumerate(reads) if k != 1]
            numbers = map(number, ("clip_scale", "weight_decay", *op.uses))
            each(new, "v" * count, writes=len(writes))(e, args[0], *reads, *writes, *numbers)
            return ctx.get_dummy_value()

        return types.void(types.intp, types.intp, given), codegen

    return intrinsic_of(3, typing)


def add_update(op: Update) -> None:
    """The kernel of an optimizer's update."""
    plain, clipped = _loop(op, False, False), _loop(op, True, False)
    decayed, both = _loop(op, False, op.decay), _loop(op, True, op.decay)

    @kernel_as(op.name, words("rows cols clip", "", ("p", "g", *op.state, "hyper.float64")), op.own)
    def run(me, rows, cols, clip, *given):
        start, stop = span(me, rows, cols)
        if slot(given[0], given[-1], WEIGHT_DECAY) == 0:
            if clip:
                clipped(stop - start, start, given)
            else:
                plain(stop - start, start, given)
        elif clip:
            both(stop - start, start, given)
        else:
            decayed(stop - start, start, given)


for _op in [*UPDATES.values()]:
    add_update(_op)


register(kernel, njit(inline=True), first)


# ---------------------------------------------------------------- clipping
@kernel
def clip_value(me, rows, cols, g: Ptr, hyper: Ptr.float64):
    """g = min(max(g, -clip_value), clip_value), NaN stays."""
    lo, hi = span(me, rows, cols)
    c = slot(g, hyper, CLIP_VALUE)
    for i in range(lo, hi):
        g[i] = minimum(maximum(g[i], -c), c)


SMALL = 2.0**-540  # factor for float64 values whose squares overflow


@njit(fastmath=REASSOC)
def sum_of_squares(x, n, unit):
    """The sum of squares of x*unit, in float64."""
    s = 0.0
    for i in range(n):
        v = x[i] * unit
        s += v * v
    return s


@njit
def norm(x, n):
    """The root of the sum of squares, even if these overflow."""
    squares = sum_of_squares(x, n, 1.0)
    return math.sqrt(squares) if squares < np.inf else math.sqrt(sum_of_squares(x, n, SMALL)) / SMALL


@kernel
def sumsq(me, rows, cols, g: Ptr, s: Ptr):
    """s[r] = sqrt(sum_c g[r,c]^2); rows shared."""
    lo, hi = share(me, rows)
    if cols == 1:
        for r in range(lo, hi):
            s[r] = fabs(g[r])
    else:
        for r in range(lo, hi):
            gr = at(g, r * cols)
            squares = rsumsq(cols, gr)
            s[r] = sqrt(squares) if squares < np.inf else like(g, norm(gr, cols))


@kernel
def clip_norm_scale(me, n, s: Ptr, hyper: Ptr.float64):
    """clip_scale = min(1, clip_norm/(sqrt(sum_i s[i]^2) + 1e-6)); only worker 0.  NaN stays."""
    if not first(me):
        return
    scale = hyper[CLIP_NORM] / (norm(s, n) + 1e-6)
    hyper[CLIP_SCALE] = 1.0 if scale > 1 else scale


# ---------------------------------------------------------------- penalties, zero
@kernel
def penalty(me, rows, cols, l1: Float, l2: Float, p: Ptr, g: Ptr):
    """g += l1*sign(p) + 2*l2*p; sign(0) = 0."""
    lo, hi = span(me, rows, cols)
    a1, a2, none = like(p, l1), like(p, 2 * l2), like(p, 0.0)
    if l1 == 0:
        for i in range(lo, hi):
            g[i] += a2 * p[i]
    else:
        for i in range(lo, hi):
            x = p[i]
            sign = a1 if x > none else (-a1 if x < none else none)
            g[i] += sign + a2 * x


@kernel
def zero(me, rows, cols, g: Ptr):
    """g = 0."""
    lo, hi = span(me, rows, cols)
    for i in range(lo, hi):
        g[i] = like(g, 0.0)
