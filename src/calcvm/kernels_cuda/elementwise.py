"""Elementwise kernels: each is its formula and the operands that it reads.

All are the loops of `_loops` over the worker's rows, so y may be any operand of its size.  ``rows`` are shared; a
broadcast operand is read by every worker.
"""

from __future__ import annotations

import math

import numpy as np

from calcvm.kernels_cuda._common import kernel_from, share  # noqa: F401  (kernels' text uses them)
from calcvm.kernels_cuda._cuda import at, device, like  # noqa: F401
from calcvm.kernels_cuda._loops import axiswise, elementwise, linewise
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
MAP = '''\
def {name}(w, nw, rows, cols{words}, {pointers}):
    """{equation}; rows are shared; in place over any operand."""
    lo, hi = share(rows, w, nw)
    _loop_{name}(lo * cols, hi * cols, {args})
'''


def _map(  # type: ignore[no-untyped-def]
    name: str, formula, reads: str, out: str, params: str = "", ways: int = 2, as_they_are: bool = False
) -> None:
    """``params``: float words beside rows and cols, which the formula gets after the operands, in the heap's dtype or
    ``as_they_are``, in float64; ``ways``: of the loop."""
    operands, over = [*reads.split(), out], params.split()
    globals()[f"_loop_{name}"] = elementwise(formula, len(operands) - 1, len(over), ways=ways)
    kernel_from(
        MAP.format(
            name=name,
            words="".join(f", {p}: Float" for p in over),
            pointers=", ".join(f"{o}: Ptr" for o in dict.fromkeys(operands)),
            equation=f"{out} = {name}({', '.join(operands[:-1])})",
            args=", ".join(operands + [p if as_they_are else f"like(h, {p})" for p in over]),
        ),
        globals(),
    )


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
_map("fill", lambda value: value, "", "y", "value")


CHOICE = '''\
def {name}(w, nw, rows, cols, approximate, {pointers}):
    """{equation}, by erf or by tanh; rows are shared; in place over any operand."""
    lo, hi = share(rows, w, nw)
    if approximate == 1:
        _{name}_tanh(lo * cols, hi * cols, {args})
    else:
        _{name}_erf(lo * cols, hi * cols, {args})
'''
_gelu_fwd_tanh = elementwise(lambda x: x * sigmoid(_gelu_argument(x)), 1, ways=1)
_gelu_fwd_erf = elementwise(lambda x: x * _half_erf(x), 1, ways=1)
_gelu_bwd_tanh = elementwise(_gelu_tanh_bwd, 2, ways=1)
_gelu_bwd_erf = elementwise(_gelu_erf_bwd, 2, ways=1)
for _name, _operands, _equation in (
    ("gelu_fwd", ("x", "y"), "y = x*Phi(x)"),
    ("gelu_bwd", ("dy", "x", "dx"), "dx = dy*(Phi(x) + x*phi(x))"),
):
    kernel_from(
        CHOICE.format(
            name=_name,
            pointers=", ".join(f"{o}: Ptr" for o in _operands),
            equation=_equation,
            args=", ".join(_operands),
        ),
        globals(),
    )


# ---------------------------------------------------------------- broadcasting
BROADCAST = '''\
def {name}(w, nw, d0, d1, d2, d3, d4, d5, {words}, {pointers}):
    """{equation}, strides 0 where an operand is broadcast; d0 is shared; in place over operands of y's size."""
    lo, hi = share(d0, w, nw)
    n = d1 * d2 * d3 * d4 * d5
    {starts}
    if {flat}:  # nothing is broadcast
        _flat_{name}(lo * n, hi * n, {operands})
    elif n == d5:  # a row is one line
        _lines_{name}(hi - lo, n, {lines}, at({out}, lo * n), n)
    else:
        _axes_{name}(hi - lo, (d1, d2, d3, d4, d5), {axes}, at({out}, lo * n))
'''


def _broadcast(name: str, formula, reads: str, strided: str, out: str) -> None:  # type: ignore[no-untyped-def]
    names, over = reads.split(), strided.split()
    globals()[f"_flat_{name}"] = elementwise(formula, len(names))
    globals()[f"_lines_{name}"] = linewise(formula, len(names))
    globals()[f"_axes_{name}"] = axiswise(formula, "".join("s" if x in over else "d" for x in (*names, out)))
    strides = {s: ", ".join(f"{s}{k}" for k in range(6)) for s in over}
    kernel_from(
        BROADCAST.format(
            name=name,
            words=", ".join(strides.values()),
            pointers=", ".join(f"{o}: Ptr" for o in (*names, out)),
            equation=f"{out} = {name}({', '.join(names)})",
            operands=", ".join((*names, out)),
            out=out,
            starts="\n    ".join(f"{x}_lo = at({x}, lo * {f'{x}0' if x in over else 'n'})" for x in names),
            flat=" and ".join(f"{s}0 == n" for s in over),
            lines=", ".join(f"{x}_lo, {x}0, {x}5" if x in over else f"{x}_lo, n, 1" for x in names),
            axes=", ".join(f"{x}_lo, ({strides[x]})" if x in over else f"{x}_lo" for x in names),
        ),
        globals(),
    )


_broadcast("add_fwd", lambda a, b: a + b, "a b", "a b", "y")
_broadcast("sub_fwd", lambda a, b: a - b, "a b", "a b", "y")
_broadcast("mul_fwd", lambda a, b: a * b, "a b", "a b", "y")
_broadcast("div_fwd", lambda a, b: a / b, "a b", "a b", "y")
_broadcast("mul_bwd_a", lambda dy, b: dy * b, "dy b", "b", "da")
_broadcast("mul_bwd_b", lambda dy, a: dy * a, "dy a", "a", "db")
_broadcast("div_bwd_a", lambda dy, b: dy / b, "dy b", "b", "da")
_broadcast("div_bwd_b", lambda dy, y, b: -dy * y / b, "dy y b", "b", "db")
