"""Elementwise kernels: each is its formula and the operands that it reads.

All are the loops of `_loops` over the worker's rows, so y may be any operand of its size.  ``rows`` are shared; a
broadcast operand is read by every worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from calcvm.kernels_cuda._common import Float, Ptr, kernel_as, share, words
from calcvm.kernels_cuda._cuda import at, device, like
from calcvm.kernels_cuda._loops import axiswise, elementwise, fill, linewise
from calcvm.kernels_cuda._math import (
    elu,
    elu_slope,
    erf,
    exp,
    expm1,
    fabs,
    fma,
    leaky_relu,
    leaky_relu_slope,
    log,
    log1p,
    power,
    relu,
    relu_slope,
    sigmoid,
    sigmoid_slope,
    sqrt,
    tanh,
    tanh_slope,
)
from calcvm.kernels_cuda._tuples import likes, mapped

SQRT_HALF, INV_SQRT_2PI = math.sqrt(0.5), 1 / math.sqrt(2 * math.pi)
SQRT_2_BY_PI, CUBIC = math.sqrt(2 / math.pi), 0.044715


# ---------------------------------------------------------------- formulas that are no single function
@device
def _sign(x):
    """-1, 0 or 1; NaN is 0, as no gradient passes there."""
    return like(x, 1) if x > like(x, 0) else like(x, -1) if x < like(x, 0) else like(x, 0)


@device
def _pow(x, p):
    """x**p of a float64 p: what is something simpler as that, which is rounded less, else in float64."""
    if p == 0.0:
        return like(x, 1)
    if p == 1.0:
        return x
    if p == 2.0:
        return x * x
    if p == -1.0:
        return like(x, 1) / x
    if p == 0.5:  # differs from the square root for -0 and -inf
        return like(x, math.inf) if x == like(x, -math.inf) else fabs(sqrt(x))
    return like(x, power(np.float64(x), p))


def _pow_bwd(dy, x, p):
    if p == 0.0:
        return like(dy, 0)
    y, lost = _pow(x, p - 1.0), p - (p - 1.0 + 1.0)
    if lost != 0.0 and x > like(x, 0) and x < like(x, math.inf):
        y = fma(y, like(x, lost) * log(x), y)
    return dy * like(x, p) * y


@device
def _gelu_argument(x):
    """Twice the argument of the hyperbolic tangent."""
    return like(x, 2 * SQRT_2_BY_PI) * fma(x * x * x, like(x, CUBIC), x)


@device
def _half_erf(x):
    """The normal distribution."""
    return like(x, 0.5) * (like(x, 1) + erf(x * like(x, SQRT_HALF)))


def _gelu_tanh_bwd(dy, x):
    s = sigmoid(_gelu_argument(x))
    slope = like(x, 2 * SQRT_2_BY_PI) * fma(x * x, like(x, 3 * CUBIC), like(x, 1))
    return dy * fma(x * s * (like(x, 1) - s), slope, s)


def _gelu_erf_bwd(dy, x):
    return dy * fma(x * like(x, INV_SQRT_2PI), exp(like(x, -0.5) * x * x), _half_erf(x))


# ---------------------------------------------------------------- one row, one formula
_as_they_are = device(lambda x, numbers: numbers)


def _map(
    name: str, formula: Callable, reads: str, out: str, params: str = "", ways: int = 2, as_they_are: bool = False
) -> None:
    """``params``: float words beside rows and cols, which the formula gets after the operands, in the heap's dtype or
    ``as_they_are``, in float64; ``ways``: of the loop."""
    over, names = params.split(), reads.split()
    loop, numbers = elementwise(formula, ways=ways), _as_they_are if as_they_are else likes
    n, end = len(over), len(over) + len(names)

    @kernel_as(name, words("rows cols", params, dict.fromkeys([*names, out])))
    def run(me, rows, cols, *given):
        lo, hi = share(me, rows)
        loop(lo * cols, hi * cols, given[n:end], given[-1], numbers(me.heap, given[:n]))


_map("neg_fwd", lambda x: -x, "x", "y")
_map("neg_bwd", lambda dy: -dy, "dy", "dx")
_map("abs_fwd", lambda x: fabs(x), "x", "y")
_map("abs_bwd", lambda dy, x: dy * _sign(x), "dy x", "dx")
_map("sqrt_fwd", lambda x: sqrt(x), "x", "y")
_map("sqrt_bwd", lambda dy, y: like(y, 0.5) * dy / y, "dy y", "dx")
_map("square_fwd", lambda x: x * x, "x", "y")
_map("square_bwd", lambda dy, x: like(x, 2) * x * dy, "dy x", "dx")
_map("exp_fwd", lambda x: exp(x), "x", "y")
_map("exp_bwd", lambda dy, y: dy * y, "dy y", "dx")
_map("log_fwd", lambda x: log(x), "x", "y", ways=1)
_map("log_bwd", lambda dy, x: dy / x, "dy x", "dx")
_map("relu_fwd", lambda x: relu(x), "x", "y")
_map("relu_bwd", lambda dy, y: relu_slope(dy, y), "dy y", "dx")
_map("sigmoid_fwd", lambda x: sigmoid(x), "x", "y")
_map("sigmoid_bwd", lambda dy, y: sigmoid_slope(dy, y), "dy y", "dx")
_map("tanh_fwd", lambda x: tanh(x), "x", "y")
_map("tanh_bwd", lambda dy, y: tanh_slope(dy, y), "dy y", "dx")
_map("softplus_fwd", lambda x: relu(x) + log1p(exp(-fabs(x))), "x", "y", ways=1)
_map("softplus_bwd", lambda dy, y: -dy * expm1(-y), "dy y", "dx", ways=1)
_map("leaky_relu_fwd", lambda x, a: leaky_relu(x, a), "x", "y", "alpha")
_map("leaky_relu_bwd", lambda dy, y, a: leaky_relu_slope(dy, y, a), "dy y", "dx", "alpha")
_map("elu_fwd", lambda x, a: elu(x, a), "x", "y", "alpha", ways=1)
_map("elu_bwd", lambda dy, y, a: elu_slope(dy, y, a), "dy y", "dx", "alpha")
_map("affine_fwd", lambda x, a, b: fma(x, a, b), "x", "y", "a b")
_map("affine_bwd", lambda dy, a: dy * a, "dy", "dx", "a")
_map("pow_fwd", lambda x, p: _pow(x, p), "x", "y", "exponent", ways=0, as_they_are=True)
_map("pow_bwd", _pow_bwd, "dy x", "dx", "exponent", ways=0, as_they_are=True)
_map("sub_bwd_b", lambda dy: -dy, "dy", "db")
_map("accumulate", lambda x, y: x + y, "x y", "y")


@kernel_as("fill")
def _fill(me, rows, cols, value: Float, y: Ptr):
    """y = value.  Rows are shared."""
    lo, hi = share(me, rows)
    fill(lo * cols, hi * cols, y, like(y, value))


def _by_erf_or_tanh(name: str, erf: Callable, tanh: Callable, reads: str, out: str) -> None:
    by_erf, by_tanh = elementwise(erf, ways=1), elementwise(tanh, ways=1)

    @kernel_as(name, words("rows cols approximate", "", [*reads.split(), out]))
    def run(me, rows, cols, approximate, *operands):
        lo, hi = share(me, rows)
        if approximate == 1:
            by_tanh(lo * cols, hi * cols, operands[:-1], operands[-1], ())
        else:
            by_erf(lo * cols, hi * cols, operands[:-1], operands[-1], ())


_by_erf_or_tanh("gelu_fwd", lambda x: x * _half_erf(x), lambda x: x * sigmoid(_gelu_argument(x)), "x", "y")
_by_erf_or_tanh("gelu_bwd", _gelu_erf_bwd, _gelu_tanh_bwd, "dy x", "dx")


# ---------------------------------------------------------------- broadcasting
@device
def _begin(x, s, lo, n):
    """A dense operand has no strides."""
    return at(x, lo * n) if s is None else at(x, lo * s[0])


_line = device(lambda s, n: n if s is None else s[0])
_step = device(lambda s: 1 if s is None else s[5])


def _broadcast(name: str, formula: Callable, reads: str, strided: str, out: str) -> None:
    """The formula of ``reads``, of which the last or both are ``strided``: strides 0 where an operand is broadcast."""
    flat, lines, axes = elementwise(formula), linewise(formula), axiswise(formula)

    @device
    def loop(me, d0, d, nothing_is_broadcast, xs, strides, y):
        lo, hi = share(me, d0)
        n = d[0] * d[1] * d[2] * d[3] * d[4]
        if nothing_is_broadcast:
            flat(lo * n, hi * n, xs, y, ())
        else:
            xs, y = mapped(_begin, (xs, strides), lo, n), at(y, lo * n)
            if n == d[4]:  # a row is one line
                lines(hi - lo, n, xs, mapped(_line, (strides,), n), mapped(_step, (strides,)), y, n)
            else:
                axes(hi - lo, d, xs, strides, y, None)

    dense = (None,) * (len(reads.split()) - 1)

    def of_one(me, d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5, *operands):
        s, same = (s0, s1, s2, s3, s4, s5), s0 == d1 * d2 * d3 * d4 * d5
        loop(me, d0, (d1, d2, d3, d4, d5), same, operands[:-1], (*dense, s), operands[-1])

    def of_two(me, d0, d1, d2, d3, d4, d5, a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5, a, b, y):
        s, t, n = (a0, a1, a2, a3, a4, a5), (b0, b1, b2, b3, b4, b5), d1 * d2 * d3 * d4 * d5
        loop(me, d0, (d1, d2, d3, d4, d5), a0 == n and b0 == n, (a, b), (s, t), y)

    sizes = [f"{x}{k}" for x in ("d", *strided.split()) for k in range(6)]
    kernel_as(name, words(" ".join(sizes), "", [*reads.split(), out]))(of_two if len(strided.split()) == 2 else of_one)


_broadcast("add_fwd", lambda a, b: a + b, "a b", "a b", "y")
_broadcast("sub_fwd", lambda a, b: a - b, "a b", "a b", "y")
_broadcast("mul_fwd", lambda a, b: a * b, "a b", "a b", "y")
_broadcast("div_fwd", lambda a, b: a / b, "a b", "a b", "y")
_broadcast("mul_bwd_a", lambda dy, b: dy * b, "dy b", "b", "da")
_broadcast("mul_bwd_b", lambda dy, a: dy * a, "dy a", "a", "db")
_broadcast("div_bwd_a", lambda dy, b: dy / b, "dy b", "b", "da")
_broadcast("div_bwd_b", lambda dy, y, b: -dy * y / b, "dy y b", "b", "db")
