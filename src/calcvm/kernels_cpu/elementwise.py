"""Elementwise kernels: each is its formula and the operands that it reads.

All are one loop of vectors over the worker's rows (`_math.elementwise`), so y may be any operand of its
size.  ``rows`` are shared; a broadcast operand is read by every worker.
"""

from __future__ import annotations

import math
from typing import Any

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


def _pow(x: V, p: V, low: V, odd: V) -> V:
    """x**(p + low) as float64, for float64 p; ``odd`` is what (-1)**p is: 1, -1, or NaN for no integer p."""
    wide = x.as_f64()
    size = F.fabs(wide)
    y = F.power(size, p, low) if x.is_f64 else F.exp(p * F.log(size))  # whose error is far below float32's
    signed = (-y).where(odd < 0, y)  # of -0 and -inf, which have a power by any p
    y = (y * odd).where(wide < 0, signed.where(wide.bits() < 0, y))
    return signed.where(wide.equals(float("-inf")), y)


def _root(x: V) -> V:
    """x**0.5, which differs from the square root for -0 and -inf."""
    return x.const(float("inf")).where(x.equals(float("-inf")), F.fabs(F.sqrt(x)))


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
    {loop}((hi - lo) * cols, {args}{params})
'''


def _map(name: str, formula, reads: str, out: str, words: str = "", params: str = "") -> None:  # type: ignore[no-untyped-def]
    """``words``: annotated words beside rows and cols; ``params``: what the formula gets after the operands."""
    operands = [*reads.split(), out]
    globals()[f"_loop_{name}"] = elementwise(formula, "v" * len(reads.split()), "f" * len(params.split()))
    kernel_from(
        MAP.format(
            name=name,
            words="".join(f", {w}" for w in words.split()),
            pointers=", ".join(f"{o}: Ptr" for o in dict.fromkeys(operands)),
            equation=f"{out} = {name}({', '.join(operands[:-1])})",
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
_map("relu_fwd", F.relu, "x", "y")
_map("relu_bwd", F.relu_slope, "dy y", "dx")
_map("sigmoid_fwd", F.sigmoid, "x", "y")
_map("sigmoid_bwd", F.sigmoid_slope, "dy y", "dx")
_map("tanh_fwd", F.tanh, "x", "y")
_map("tanh_bwd", F.tanh_slope, "dy y", "dx")
_map("softplus_fwd", F.softplus, "x", "y")
_map("softplus_bwd", lambda dy, y: -dy * F.expm1(-y), "dy y", "dx")
_map("leaky_relu_fwd", F.leaky_relu, "x", "y", "alpha:Float", params="alpha")
_map("leaky_relu_bwd", F.leaky_relu_slope, "dy y", "dx", "alpha:Float", params="alpha")
_map("elu_fwd", F.elu, "x", "y", "alpha:Float", params="alpha")
_map("elu_bwd", F.elu_slope, "dy y", "dx", "alpha:Float", params="alpha")
_map("affine_fwd", lambda x, a, b: F.fma(x, a, b), "x", "y", "a:Float b:Float", params="a b")
_map("affine_bwd", lambda dy, a: dy * a, "dy", "dx", "a:Float", params="a")
_map("sub_bwd_b", lambda dy: -dy, "dy", "db")
_map("accumulate", lambda x, y: x + y, "x y", "y")
_map("fill", lambda value: value, "", "y", "value:Float", params="value")


# Powers that are something simpler, which is faster and rounded less; others go by logarithms.
POWERS = {
    0.0: lambda x: x.const(1.0),
    1.0: lambda x: x,
    2.0: lambda x: x * x,
    3.0: lambda x: x * x * x,
    -1.0: lambda x: 1 / x,
    -2.0: lambda x: (1 / x) * (1 / x),
    0.5: _root,
    -0.5: lambda x: 1 / _root(x),
}
POW = '''\
def {name}(w, nw, rows, cols, exponent: Float, {pointers}):
    """{equation}; rows are shared; in place over any operand."""
    lo, hi = share(rows, w, nw)
    i, n = lo * cols, (hi - lo) * cols
    p = exponent - {less}
    low = exponent - (p + {less})  # what the difference has lost
    {cases}
    odd = 1.0 - 4.0 * (0.5 * p - floor(0.5 * p)) if p == floor(p) else np.nan
    _loop_{name}(n, {args}, p, low, odd, exponent)
'''


def _powers(name: str, equation: str, reads: str, out: str, less: float, formula, first: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    """``formula``: of what is read, the power of x, and the exponent; ``first``: results where a condition holds."""
    operands = [*reads.split(), out]
    args, modes = ", ".join(f"at({o}, i)" for o in operands), "v" * len(reads.split())

    def by(power):  # type: ignore[no-untyped-def]
        def whole(*given: V) -> V:
            *read, p, low, odd, exponent = given
            return formula(*read, power(read[-1], p, low, odd).as_f64(), exponent).rounded(read[-1])

        return elementwise(whole, modes, "dddd")

    loops = {condition: elementwise(result, modes, "dddd") for condition, result in first.items()}
    loops |= {f"p == {p}": by(lambda x, *_, f=f: f(x)) for p, f in POWERS.items()}
    globals()[f"_loop_{name}"] = by(_pow)
    globals().update({f"_loop_{name}_{k}": loop for k, loop in enumerate(loops.values())})
    call = "        _loop_{name}_{k}(n, {args}, p, low, p, exponent)\n        return"
    cases = [f"if {c}:\n{call.format(name=name, k=k, args=args)}" for k, c in enumerate(loops)]
    text = POW.format(
        name=name,
        equation=equation,
        pointers=", ".join(f"{o}: Ptr" for o in operands),
        less=less,
        cases="\n    ".join(cases),
        args=args,
    )
    kernel_from(text, globals())


_powers("pow_fwd", "y = x^p", "x", "y", 0.0, lambda x, y, p: y, {})
_SLOPE_OF_1 = {"exponent == 0.0": lambda dy, *_: dy.const(0.0)}
_powers("pow_bwd", "dx = dy*p*x^(p-1)", "dy x", "dx", 1.0, lambda dy, x, y, p: dy.as_f64() * p * y, _SLOPE_OF_1)


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
