"""Elementwise kernels: each is its formula and the operands that it reads.

All are one loop of vectors over the worker's rows (`_math.elementwise`), so y may be any operand of its
size.  ``rows`` are shared; a broadcast operand is read by every worker.
"""

from __future__ import annotations

import math

import numpy as np  # noqa: F401

from calcvm.kernels_cpu import _formulas as F
from calcvm.kernels_cpu._common import at, floor, kernel_from, like, share  # noqa: F401  (kernels' text uses them)
from calcvm.kernels_cpu._formulas import V
from calcvm.kernels_cpu._math import elementwise

SQRT_HALF, INV_SQRT_2PI = math.sqrt(0.5), 1 / math.sqrt(2 * math.pi)


# ---------------------------------------------------------------- formulas that are no single function
def _sign(x: V) -> V:
    """-1, 0 or 1; NaN is 0, as no gradient passes there."""
    return x.const(1.0).where(x > 0, x.const(-1.0).where(x < 0, 0.0))


def _pow(x: V, p: V, odd: V) -> V:
    """x**p by exp(p*log|x|), in float64; ``odd`` is what (-1)**p is: 1, -1, or NaN for no integer p."""
    y = F.exp(p.as_f64() * F.log(F.fabs(x).as_f64())).rounded(x)
    y = (y * odd).where(x < 0, y)
    return x.const(1.0).where(p.equals(0), y)


def _pow_bwd(dy: V, x: V, p: V, odd: V) -> V:
    return dy.const(0.0).where(p.equals(0), dy * p * _pow(x, p - 1, -odd))


def _gelu(x: V, by_tanh: bool) -> V:
    if by_tanh:
        return x * F.sigmoid(2 * _gelu_argument(x))
    return 0.5 * x * (1 + F.erf(x * SQRT_HALF))


def _gelu_argument(x: V) -> V:
    return math.sqrt(2 / math.pi) * F.fma(x * x * x, 0.044715, x)


def _gelu_bwd(dy: V, x: V, by_tanh: bool) -> V:
    if by_tanh:
        s = F.sigmoid(2 * _gelu_argument(x))
        slope = 2 * math.sqrt(2 / math.pi) * F.fma(x * x, 3 * 0.044715, 1.0)
        return dy * (s + x * s * (1 - s) * slope)
    return dy * (0.5 * (1 + F.erf(x * SQRT_HALF)) + x * INV_SQRT_2PI * F.exp(-0.5 * x * x))


# ---------------------------------------------------------------- one row, one formula
MAP = '''\
def {name}(w, nw, rows, cols{words}, {pointers}):
    """{equation}; rows are shared; in place over any operand."""
    lo, hi = share(rows, w, nw)
    i = lo * cols
    {setup}
    {loop}((hi - lo) * cols, {args}{params})
'''


def _map(name: str, formula, reads: str, out: str, words: str = "", setup: str = "", params: str = "") -> None:  # type: ignore[no-untyped-def]
    """``words``: annotated words beside rows and cols; ``params``: what the formula gets after the operands."""
    operands = [*reads.split(), out]
    globals()[f"_loop_{name}"] = elementwise(formula, "v" * len(reads.split()), "f" * len(params.split()))
    kernel_from(
        MAP.format(
            name=name,
            words="".join(f", {w}" for w in words.split()),
            pointers=", ".join(f"{o}: Ptr" for o in dict.fromkeys(operands)),
            equation=f"{out} = {name}({', '.join(operands[:-1])})",
            setup=setup or "# one vector loop",
            loop=f"_loop_{name}",
            args=", ".join(f"at({o}, i)" for o in operands),
            params="".join(f", like(h, {p})" for p in params.split()),
        ),
        globals(),
    )


_map("neg_fwd", lambda x: -x, "x", "y")
_map("neg_bwd", lambda dy: -dy, "dy", "dx")
_map("abs_fwd", F.fabs, "x", "y")
_map("abs_bwd", lambda dy, x: dy * _sign(x), "dy x", "dx")
_map("sqrt_fwd", F.sqrt, "x", "y")
_map("sqrt_bwd", lambda dy, y: 0.5 * dy / y, "dy y", "dx")
_map("square_fwd", lambda x: x * x, "x", "y")
_map("square_bwd", lambda dy, x: 2 * x * dy, "dy x", "dx")
_map("exp_fwd", F.exp, "x", "y")
_map("exp_bwd", lambda dy, y: dy * y, "dy y", "dx")
_map("log_fwd", F.log, "x", "y")
_map("log_bwd", lambda dy, x: dy / x, "dy x", "dx")
_map("relu_fwd", lambda x: x.const(0.0).where(x < 0, x), "x", "y")
_map("relu_bwd", lambda dy, y: dy.const(0.0).where(y <= 0, dy), "dy y", "dx")
_map("sigmoid_fwd", F.sigmoid, "x", "y")
_map("sigmoid_bwd", lambda dy, y: dy * (y * (1 - y)), "dy y", "dx")
_map("tanh_fwd", F.tanh, "x", "y")
_map("tanh_bwd", lambda dy, y: dy * (1 - y * y), "dy y", "dx")
_map("softplus_fwd", F.softplus, "x", "y")
_map("softplus_bwd", lambda dy, y: -dy * F.expm1(-y), "dy y", "dx")
_map("leaky_relu_fwd", lambda x, a: x.where(x > 0, a * x), "x", "y", "alpha:Float", params="alpha")
_map("leaky_relu_bwd", lambda dy, y, a: dy.where(y > 0, a * dy), "dy y", "dx", "alpha:Float", params="alpha")
_map("elu_fwd", lambda x, a: x.where(x > 0, a * F.expm1(x)), "x", "y", "alpha:Float", params="alpha")
_map("elu_bwd", lambda dy, y, a: dy.where(y > 0, dy * (y + a)), "dy y", "dx", "alpha:Float", params="alpha")
_map("affine_fwd", lambda x, a, b: F.fma(x, a, b), "x", "y", "a:Float b:Float", params="a b")
_map("affine_bwd", lambda dy, a: dy * a, "dy", "dx", "a:Float", params="a")
_ODD = "odd = 1.0 - 4.0 * (0.5 * exponent - floor(0.5 * exponent)) if exponent == floor(exponent) else np.nan"
_map("pow_fwd", _pow, "x", "y", "exponent:Float", _ODD, "exponent odd")
_map("pow_bwd", _pow_bwd, "dy x", "dx", "exponent:Float", _ODD, "exponent odd")
_map("sub_bwd_b", lambda dy: -dy, "dy", "db")
_map("accumulate", lambda x, y: x + y, "x y", "y")
_map("fill", lambda value: value, "", "y", "value:Float", params="value")


CHOICE = '''\
def {name}(w, nw, rows, cols, approximate, {pointers}):
    """{equation}, by erf or by tanh; rows are shared; in place over any operand."""
    lo, hi = share(rows, w, nw)
    i = lo * cols
    if approximate == 1:
        _{name}_tanh((hi - lo) * cols, {args})
    else:
        _{name}_erf((hi - lo) * cols, {args})
'''
_gelu_fwd_tanh = elementwise(lambda x: _gelu(x, True), "v")
_gelu_fwd_erf = elementwise(lambda x: _gelu(x, False), "v")
_gelu_bwd_tanh = elementwise(lambda dy, x: _gelu_bwd(dy, x, True), "vv")
_gelu_bwd_erf = elementwise(lambda dy, x: _gelu_bwd(dy, x, False), "vv")
for _name, _operands, _equation in (
    ("gelu_fwd", ("x", "y"), "y = x*Phi(x)"),
    ("gelu_bwd", ("dy", "x", "dx"), "dx = dy*(Phi(x) + x*phi(x))"),
):
    kernel_from(
        CHOICE.format(
            name=_name,
            pointers=", ".join(f"{o}: Ptr" for o in _operands),
            equation=_equation,
            args=", ".join(f"at({o}, i)" for o in _operands),
        ),
        globals(),
    )


# ---------------------------------------------------------------- broadcasting
BROADCAST = '''\
def {name}(w, nw, d0, d1, d2, d3, d4, d5, {strides}, {pointers}):
    """{equation}, strides 0 where an operand is broadcast; d0 is shared; in place over operands of y's size."""
    lo, hi = share(d0, w, nw)
    n = d1 * d2 * d3 * d4 * d5
    if n == 0:
        return
    if {flat}:  # nothing is broadcast
        {loop_v}((hi - lo) * n, {flat_args})
        return
    if n == 1{single}:  # one element a row: the rows are the inner loop
        o = lo
        {start_rows}
        {by_rows}
        return
    if n == d5:  # a row is one inner loop
        for i0 in range(lo, hi):
            o = i0 * n
            {start_row}
            {by_row}
        return
    for i0 in range(lo, hi):
        o = i0 * n
        for i1 in range(d1):
            for i2 in range(d2):
                for i3 in range(d3):
                    for i4 in range(d4):
                        {start}
                        {by_d5}
                        o += d5
'''


def _dispatch(name: str, count: str, step: str, operands: list[str], strided: list[str], indent: str) -> str:
    """Calls of the loop variants by which strided operand is an array (stride 1) or one element (0)."""

    def call(modes: dict[str, str]) -> str:
        variant = "".join(modes.get(o, "v") for o in operands[:-1])
        args = ", ".join(f"at({o}, o{o})" if o in strided else f"at({o}, o)" for o in operands)
        return f"_loop_{name}_{variant}({count}, {args})"

    if len(strided) == 1:
        (s,) = strided
        lines = [f"if {s}{step} == 1:", f"    {call({})}", "else:", f"    {call({s: 's'})}"]
    else:
        a, b = strided
        lines = [f"if {a}{step} == 0:", f"    {call({a: 's'})}", f"elif {b}{step} == 0:", f"    {call({b: 's'})}"]
        lines += ["else:", f"    {call({})}"]
    return f"\n{indent}".join(lines)


def _broadcast(name: str, formula, reads: str, strided: str, out: str) -> None:  # type: ignore[no-untyped-def]
    operands, over = [*reads.split(), out], strided.split()
    for s in ("", *over):  # at most one operand is one element throughout an inner loop
        modes = "".join("s" if o == s else "v" for o in reads.split())
        globals()[f"_loop_{name}_{modes}"] = elementwise(formula, modes, outlined=True)
    starts = " + ".join(f"i{k} * {{s}}{k}" for k in range(5))
    kernel_from(
        BROADCAST.format(
            name=name,
            strides=", ".join(f"{s}{k}" for s in over for k in range(6)),
            pointers=", ".join(f"{o}: Ptr" for o in operands),
            equation=f"{out} = {name}({', '.join(reads.split())})",
            flat=" and ".join(f"{s}0 == n" for s in over),
            loop_v=f"_loop_{name}_{'v' * len(reads.split())}",
            flat_args=", ".join(f"at({o}, lo * n)" for o in operands),
            single="".join(f" and {s}0 <= 1" for s in over) + (" and a0 + b0 > 0" if len(over) == 2 else ""),
            start_rows="\n        ".join(f"o{s} = lo * {s}0" for s in over),
            by_rows=_dispatch(name, "hi - lo", "0", operands, over, " " * 8),
            start_row="\n            ".join(f"o{s} = i0 * {s}0" for s in over),
            by_row=_dispatch(name, "d5", "5", operands, over, " " * 12),
            start="\n                        ".join(f"o{s} = " + starts.format(s=s) for s in over),
            by_d5=_dispatch(name, "d5", "5", operands, over, " " * 24),
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
