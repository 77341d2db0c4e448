"""Numbers at the ends of their range, for rows of either backend: what tests/test_extremes.py and tests/cuda check with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import mpmath
import numpy as np
import pytest

from calcvm.formulas.optimizers import HYPER_SLOTS
from calcvm.kernels_cpu._target import host
from calcvm.ops import OPS, ROWS
from calcvm.ops.epilogues import ACTIVATIONS
from calcvm.ops.spec import Example
from tests.rowrun import Case, run_row

POWERS = (-300.5, -3.0, -2.5, -2.0, -1.0, -0.5, 1e-300, 0.1, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 17.0, 300.5, 1e5)
ATTRS = {"leaky_relu": {"alpha": 0.3}, "elu": {"alpha": 0.7}}


def special(dtype: str) -> np.ndarray:
    """NaN, infinities, zeros and subnormals of either sign, the smallest, the largest, and some plain numbers."""
    info = np.finfo(dtype)
    positive = [
        0.0,
        info.smallest_subnormal,
        info.tiny / 3,
        info.tiny,
        1e-30,
        0.5,
        1.0,
        3.0,
        17.5,
        100.0,
        800.0,
        info.max,
        np.inf,
    ]
    return np.array([np.nan, *positive, *(-np.array(positive))], dtype)


def exact(x: np.ndarray) -> np.ndarray:
    """x in a type wider than float64 (the test is skipped where there is none)."""
    if np.finfo(np.longdouble).nmant < 60:
        pytest.skip("long double is no wider than float64 here: no reference")
    return x.astype(np.longdouble)


def ulps(got: np.ndarray, want: np.ndarray, of: np.ndarray | None = None) -> np.ndarray:
    """How far ``got`` is from exact values in units of the last place (of ``of``); 0 where they are equal or both NaN."""
    dtype = got.dtype
    with np.errstate(all="ignore"):
        rounded = want.astype(dtype)
        size = np.abs(rounded if of is None else of).astype(dtype)
        unit = np.spacing(np.minimum(size, np.finfo(dtype).max)).astype(np.longdouble)
        same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
        error = np.abs(got - want) / unit
    return np.where(same, 0, np.where(np.isfinite(error), error, np.inf)).astype(float)


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    """The same bits, signs of zeros included; NaN is NaN."""
    bits = f"u{a.itemsize}"
    return bool((np.isnan(a) == np.isnan(b)).all() and ((a.view(bits) == b.view(bits)) | np.isnan(a)).all())


def unary(name: str, dtype: str, x: np.ndarray, attrs: dict[str, Any]) -> Case:
    case = Case(OPS[name], Example(shapes=((x.size,),), attrs=attrs), dtype, 1)
    case.values["x"] = x
    return case


# ---------------------------------------------------------------- operators of one element
def _sigmoid(x: Any) -> Any:
    e = np.exp(-abs(x))
    return np.where(x > 0, 1 / (1 + e), e / (1 + e))


def _mpmaths(name: str, x: Any) -> Any:
    """A function that NumPy has not, of x no further from 0 than where it changes no more."""
    with mpmath.workprec(120):
        return np.array([np.longdouble(str(getattr(mpmath, name)(float(v)))) for v in np.clip(x, -140, 140)])


def _normal(x: Any) -> Any:
    return _mpmaths("ncdf", x)


def _density(x: Any) -> Any:
    return np.exp(-x * x / 2) / np.sqrt(2 * np.longdouble(np.pi))


def _by_tanh(x: Any) -> Any:
    return np.sqrt(8 / np.longdouble(math.pi)) * (x + 0.044715 * x**3)


def _mish(x: Any) -> Any:
    return np.tanh(np.logaddexp(np.longdouble(0), x))


SELU = np.longdouble("1.0507009873554804934193349852946"), np.longdouble("1.6732632423543772848170429916717")
# Of each operator, in a type wider than float64: its attributes, y, and dy/dx.
UNARY: dict[str, tuple[dict[str, Any], Callable, Callable | None]] = {
    "neg": ({}, lambda x: -x, lambda x: np.full(x.size, -1)),
    "abs": ({}, abs, np.sign),
    "sqrt": ({}, np.sqrt, lambda x: 1 / (2 * np.sqrt(x))),
    "square": ({}, lambda x: x * x, lambda x: 2 * x),
    "exp": ({}, np.exp, np.exp),
    "log": ({}, np.log, lambda x: 1 / x),
    "expm1": ({}, np.expm1, np.exp),
    "log1p": ({}, np.log1p, lambda x: 1 / (1 + x)),
    "erf": ({}, lambda x: _mpmaths("erf", x), lambda x: 2 / np.sqrt(np.longdouble(np.pi)) * np.exp(-x * x)),
    "sin": ({}, np.sin, np.cos),
    "cos": ({}, np.cos, lambda x: -np.sin(x)),
    "tan": ({}, np.tan, lambda x: 1 / np.cos(x) ** 2),
    "asin": ({}, np.arcsin, lambda x: 1 / np.sqrt((1 - x) * (1 + x))),
    "acos": ({}, np.arccos, lambda x: -1 / np.sqrt((1 - x) * (1 + x))),
    "atan": ({}, np.arctan, lambda x: 1 / (1 + x * x)),
    "sinh": ({}, np.sinh, np.cosh),
    "cosh": ({}, np.cosh, np.sinh),
    "relu": ({}, lambda x: np.maximum(x, 0), lambda x: (x > 0) * 1.0),
    "leaky_relu": ({"alpha": 0.25}, lambda x: np.where(x > 0, x, x / 4), lambda x: np.where(x > 0, 1, 0.25)),
    "sigmoid": ({}, _sigmoid, lambda x: _sigmoid(x) * _sigmoid(-x)),
    "tanh": ({}, np.tanh, lambda x: 4 * _sigmoid(2 * x) * _sigmoid(-2 * x)),
    "gelu": ({"approximate": "none"}, lambda x: x * _normal(x), lambda x: _normal(x) + x * _density(x)),
    "gelu_tanh": (
        {"approximate": "tanh"},
        lambda x: x * _sigmoid(_by_tanh(x)),
        lambda x: (
            _sigmoid(_by_tanh(x))
            * (1 + x * _sigmoid(-_by_tanh(x)) * np.sqrt(8 / np.longdouble(math.pi)) * (1 + 3 * 0.044715 * x * x))
        ),
    ),
    "softplus": ({}, lambda x: np.logaddexp(np.longdouble(0), x), _sigmoid),
    "silu": ({}, lambda x: x * _sigmoid(x), lambda x: _sigmoid(x) * (1 + x * _sigmoid(-x))),
    "elu": ({"alpha": 0.5}, lambda x: np.where(x > 0, x, np.expm1(x) / 2), lambda x: np.where(x > 0, 1, np.exp(x) / 2)),
    "selu": (
        {},
        lambda x: SELU[0] * np.where(x > 0, x, SELU[1] * np.expm1(x)),
        lambda x: SELU[0] * np.where(x > 0, 1, SELU[1] * np.exp(x)),
    ),
    "mish": ({}, lambda x: x * _mish(x), lambda x: _mish(x) + x * _sigmoid(x) * (1 - _mish(x)) * (1 + _mish(x))),
    "hard_sigmoid": ({}, lambda x: np.clip((x + 3) / 6, 0, 1), lambda x: (abs(x) < 3) / np.longdouble(6)),
    "hard_swish": (
        {},
        lambda x: np.where(x <= -3, 0, np.where(x >= 3, x, x * (x + 3) / 6)),
        lambda x: np.where(x <= -3, 0, np.where(x >= 3, 1, x / 3 + 0.5)),
    ),
    "relu6": ({}, lambda x: np.clip(x, 0, 6), lambda x: ((x > 0) & (x < 6)) * 1.0),
    "affine": ({"a": 1.5, "b": -0.25}, lambda x: 1.5 * x - 0.25, lambda x: 1.5 + 0 * np.sign(x)),
    "clip": ({"lo": -1.0, "hi": 0.5}, lambda x: np.clip(x, -1, 0.5), lambda x: ((x >= -1) & (x <= 0.5)) * 1.0),
    "fake_quantize": (
        {"scale": 0.25},
        lambda x: np.rint(np.clip(x, -32, 31.75) * 4) / 4,
        lambda x: ((x >= -32) & (x <= 31.75)) * 1.0,
    ),
    "sign": ({}, np.sign, None),
    "floor": ({}, np.floor, None),
    "ceil": ({}, np.ceil, None),
    "round": ({}, np.rint, None),
}
NO_SLOPE_OF_NAN = {
    "neg",
    "abs",
    "relu",
    "leaky_relu",
    "relu6",
    "hard_sigmoid",
    "affine",
    "clip",
    "fake_quantize",
}  # it is that of one of their pieces
ZERO_STAYS = {
    "sqrt",
    "exp",
    "log",
    "expm1",
    "log1p",
    "asin",
    "acos",
    "sinh",
    "cosh",
}  # a gradient of 0, whatever the slope
NUMPYS = {"sin", "cos", "tan", "atan"}  # of infinities: 1000 and 10000 do not tell


class Bound(NamedTuple):
    """How far y and its slope may be from exact: in ulp, the slope also by ``eps`` of 1, where a formula goes through 0 or by y.

    tails : both also by the smallest normal number, and that times x, where an exponential underflows.
    """

    y: float = 0.5
    slope: float = 0.5
    eps: float = 0.0
    tails: bool = False


BOUNDS = {
    "sqrt": Bound(slope=1.5),
    "exp": Bound(1, 1),
    "log": Bound(1, 0.5),
    "expm1": Bound(2, 3, 2.5),
    "log1p": Bound(2, 1.5),
    "erf": Bound(2.5, 3, tails=True),  # its slope further by x*x: what exp makes of the rounding of its argument
    "sin": Bound(3, 3),
    "cos": Bound(3, 3),
    "tan": Bound(4.5, 9),
    "asin": Bound(2.5, 2.5),
    "acos": Bound(1.5, 2.5),
    "atan": Bound(2, 1.5, tails=True),
    "sinh": Bound(3, 3),
    "cosh": Bound(3, 3),
    "sigmoid": Bound(3, 4, 1, tails=True),
    "tanh": Bound(3, 4, 3),
    "gelu": Bound(6, 8, 2, tails=True),  # further by x*x/2: what exp makes of the rounding of its argument
    "gelu_tanh": Bound(6, 8, 2, tails=True),  # by twice the logistic's argument
    "softplus": Bound(3, 3),
    "silu": Bound(4, 4, 8, tails=True),
    "elu": Bound(2, 1.5),
    "selu": Bound(2.5, 2.5),
    "mish": Bound(6, 6, 2, tails=True),
    "hard_sigmoid": Bound(1.5, 0.5),
    "hard_swish": Bound(1.5, 1.5, 0.5),
}


def _at_any(f: Callable, x: np.ndarray) -> np.ndarray:
    """f in a wider type; of infinities what it tends to."""
    wide, out = exact(x), np.full(x.size, np.nan, np.longdouble)
    finite, infinite = np.isfinite(x), np.isinf(x)
    out[finite] = f(wide[finite])
    near, far = f(np.sign(wide[infinite]) * 1000), f(np.sign(wide[infinite]) * 10000)
    steady = abs(far - near) < 0.01 * abs(near)
    out[infinite] = np.where(steady, far, np.where(abs(far) < 1, 0, np.sign(far) * np.inf))
    return out


def fuses() -> bool:
    """Whether the processor at hand multiplies and adds with one rounding."""
    return not (host().triple.startswith("x86") and host().vectors[0] < 256)


def check_unary(name: str, dtype: str, numpys: bool = False) -> int:
    """Values and gradients of an operator over all magnitudes are within their bounds; returns how many were compared.

    numpys : by the simulator, whose functions are NumPy's and whose fma rounds twice: 2 ulp more.
    """
    attrs, y, slope = UNARY[name]
    bound, x, info = BOUNDS.get(name, Bound()), magnitudes(dtype), np.finfo(dtype)
    case = unary(name.removesuffix("_tanh"), dtype, x, attrs)
    with np.errstate(all="ignore"):
        size = np.where(np.isfinite(x), abs(exact(x)), 0)
        more = {"gelu": size**2 / 2, "gelu_tanh": 2 * abs(_by_tanh(size))}.get(name, 0 * size)
        floor = 2 * (1 + size) * info.tiny if bound.tails else 0 * size
        more = more + 2 * numpys
        if name == "gelu" and (
            info.bits == 64 or numpys
        ):  # whose normal distribution is right to 2 eps, and no further
            floor = 4 * info.eps * (1 + size)
        if name == "affine" and not fuses():  # a*x is rounded, and b may take most of it away
            floor = info.eps / 2 * abs(attrs["a"]) * size + info.tiny
        values = case.forward()
        ends = np.isinf(x) & (name in NUMPYS)
        want = np.where(ends, y(exact(x)), _at_any(y, x))
        _within(name, x, values["y"], want, bound.y + more, floor)
        if slope is None:
            return x.size
        more = more + size**2 * (name == "erf")
        slopes = np.where(ends, slope(exact(x)), _at_any(slope, x))
        slopes[np.isnan(x) & (name in NO_SLOPE_OF_NAN)] = np.nan
        for dy in (1.0, -2.5, 0.0, np.nan):
            dx = case.backward(values | {"dy": np.full(x.size, dy, dtype)})["dx"]
            if dy == 0 and name in ZERO_STAYS:
                assert (dx == 0).all(), f"{name}: a gradient of 0 becomes {dx[dx != 0][0]} at {x[dx != 0][0]}"
            elif dy == 0:
                assert (dx[np.isfinite(slopes)] == 0).all(), f"{name}: a gradient of 0 becomes another"
            elif np.isnan(dy):
                assert (np.isnan(dx) | (slopes == 0) | np.isnan(slopes)).all(), f"{name}: NaN is lost"
            else:
                known = ~(np.isnan(x) & (name in NO_SLOPE_OF_NAN))
                ulp = bound.slope * max(abs(dy), 1) + (0.5 if dy != 1 else 0) + more
                about = abs(dy) * (floor + bound.eps * info.eps)
                _within(f"{dy}*d({name})", x[known], dx[known], (dy * slopes)[known], ulp[known], about[known])
    return 5 * x.size


def _within(what: str, x: np.ndarray, got: np.ndarray, want: np.ndarray, ulp: np.ndarray, floor: np.ndarray) -> None:
    error = ulps(got, want)
    bad = (error > ulp) & ~(abs(got - want) <= floor)
    if bad.any():
        i = int(np.where(bad, error, -1).argmax())
        raise AssertionError(f"{what} at {x[i]!r}: {got[i]!r} is {error[i]:.3g} ulp from {float(want[i])!r}")


def magnitudes(dtype: str) -> np.ndarray:
    """`special`, kinks, tails of exponentials, and numbers between the smallest and the largest."""
    info = np.finfo(dtype)
    ends = np.log10(float(info.smallest_subnormal)), np.log10(float(info.max))
    scales = 10.0 ** np.linspace(*ends, 60)[1:-1]
    tail = np.linspace(0.25, 110 if info.bits == 32 else 760, 90)
    near = np.concatenate([np.linspace(0.01, 12, 60), [1, 3, 6, 0.5]])
    x = np.concatenate([scales, tail, near])
    return np.concatenate([special(dtype), x.astype(dtype), (-x).astype(dtype)])


# ---------------------------------------------------------------- fused activations
def check_fused(name: str, dtype: str, n: int = 8) -> None:
    """An activation and its derivative inside a linear row set the bits of those in rows of their own."""
    s, attrs = special(dtype), ATTRS.get(name, {})
    words = {"rows": s.size, "inner": 1, "N": s.size, "K": 1, "act": 0, "alpha": 0.0}
    fused = words | {"act": ACTIVATIONS.index(name), "alpha": attrs.get("alpha", 0.0)}
    values = {"x": s, "wt": s, "b": s}
    for known in {"x", "wt", "y"}, {"x", "wt", "b", "y"}:
        z = run_row(ROWS["linear_fwd"], words, values, dtype, known=known)["y"]
        got = run_row(ROWS["linear_fwd"], fused, values, dtype, known=known)["y"]
        want = unary(name, dtype, z, attrs).forward()["y"]
        assert same_values(got, want), _first(name, got, want, z)

    if not any(by.kind == "derivative" for row in OPS[name].bwd for by in row.epilogues):
        return
    words, fused = ({**w, "N": 1, "K": s.size} for w in (words, fused))
    y = np.random.default_rng(0).choice(s, (n, s.size * s.size))
    for ya in y:
        values = {"wt": s, "dy": s, "ya": ya}
        d = run_row(ROWS["linear_bwd_x"], words, values, dtype, known={"wt", "dy", "dx"})["dx"]
        got = run_row(ROWS["linear_bwd_x"], fused, values, dtype, known={"wt", "dy", "ya", "dx"})["dx"]
        want = unary(name, dtype, ya, attrs).backward({"y": ya, "dy": d})["dx"]
        assert same_values(got, want), _first(f"the derivative of {name}", got, want, d, ya)


def _first(what: str, got: np.ndarray, want: np.ndarray, *of: np.ndarray) -> str:
    i = next(i for i in range(got.size) if not same_values(got[i : i + 1], want[i : i + 1]))
    return f"{what} of {', '.join(str(v[i]) for v in of)}: fused {got[i]}, alone {want[i]}"


# ---------------------------------------------------------------- binary cross-entropy
def check_binary_cross_entropy(dtype: str, bound: float, n: int = 641) -> None:
    """The loss and its derivative are within ``bound`` ulp, for logits as likely right as wrong."""
    x, t = (v.ravel().astype(dtype) for v in np.meshgrid(np.linspace(-80, 80, n), [0.0, 1.0, 0.5, 0.1, 0.9, 1e-6]))
    loss, dx = _binary_cross_entropy(dtype, x, t)
    wide, target = exact(x), exact(t)
    small = np.exp(-np.abs(wide))
    away = np.where(wide > 0, 1 - target, target)
    want = np.abs(wide) * away + np.log1p(small)
    error = ulps(loss, want)
    worst = int(error.argmax())
    assert error[worst] <= bound, f"{error[worst]:.3g} ulp: loss {loss[worst]} at {x[worst]}, target {t[worst]}"
    p = small / (1 + small)  # of the class that the logit is against
    want = np.where(wide > 0, away - p, p - away)
    error = ulps(dx, want, np.maximum(np.abs(want), np.minimum(p, away)))
    worst = int(error.argmax())
    assert error[worst] <= bound, f"{error[worst]:.3g} ulp: derivative {dx[worst]} at {x[worst]}, target {t[worst]}"


def check_binary_cross_entropy_of_infinities(dtype: str) -> None:
    """A certain and right logit costs nothing, a certain and wrong one everything."""
    x = np.repeat(np.array([np.inf, -np.inf, np.nan], dtype), 3)
    t = np.tile(np.array([0.0, 1.0, 0.25], dtype), 3)
    loss, dx = _binary_cross_entropy(dtype, x, t)
    assert np.array_equal(loss, [np.inf, 0, np.inf, 0, np.inf, np.inf, *[np.nan] * 3], equal_nan=True)
    assert np.array_equal(dx, [1, 0, 0.75, 0, -1, -0.25, *[np.nan] * 3], equal_nan=True)


def _binary_cross_entropy(dtype: str, x: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Loss of each element, and its derivative by x."""
    case = Case(OPS["binary_cross_entropy"], Example(shapes=((x.size, 1), (x.size, 1))), dtype, 1)
    case.values = {"x": x, "t": t}
    each = run_row(OPS["binary_cross_entropy"].fwd[0], case.words, case.values, dtype, known=case.known())
    values = case.values | {"dloss": np.array([x.size], dtype)}  # the loss is a mean
    return each["t_l"], case.backward(values)["dx"]


# ---------------------------------------------------------------- powers
def bases(dtype: str, exponent: float, n: int) -> np.ndarray:
    """Positive numbers of all magnitudes, among them those whose power is just finite and not 0."""
    info, rng = np.finfo(dtype), np.random.default_rng(0)
    least, most = np.log(float(info.smallest_subnormal)), np.log(float(info.max))
    over_all = rng.uniform(least, most, n)
    inside = rng.uniform(least, most, n) / exponent
    with np.errstate(all="ignore"):
        x = np.exp(np.concatenate([over_all, inside, rng.uniform(-1e-3, 1e-3, n)]))
        x = np.concatenate([x, [1.0, 2.0, 0.1, 1e100 if info.bits == 64 else 1e30, info.max, info.tiny]]).astype(dtype)
    return x[np.isfinite(x) & (x > 0)]


def check_pow(dtype: str, exponent: float, bound: float, n: int = 3000) -> None:
    """x**p and its derivative are within ``bound`` ulp, over the whole range."""
    x = bases(dtype, exponent, n)
    wide, p = exact(x), np.longdouble(exponent)
    case = unary("pow", dtype, x, {"exponent": exponent})
    got = case.forward()["y"]
    with np.errstate(all="ignore"):
        want = wide**p
    error = ulps(got, want)
    worst = int(error.argmax())
    assert error[worst] <= bound, f"{x[worst]!r}**{exponent}: {got[worst]!r} is {error[worst]:.3g} ulp off"
    if exponent in (1.0, 2.0):
        assert error.max() <= 0.5, f"x**{exponent} is rounded more than once"

    got = case.backward({"x": x, "dy": np.ones(x.size, dtype)})["dx"]
    with np.errstate(all="ignore"):
        want = p * wide ** (p - 1)
        slope = wide ** (p - 1)  # whose own rounding is the result's, where it is subnormal or too large
        rounded = slope.astype(dtype)
    normal = (np.abs(rounded) >= np.finfo(dtype).tiny) & np.isfinite(rounded)
    error = ulps(got, want)[normal]
    worst = int(error.argmax())
    assert error[worst] <= bound, f"the derivative of {x[normal][worst]!r}**{exponent} is {error[worst]:.3g} ulp off"


def check_special_powers(dtype: str, exponent: float) -> None:
    """Zeros, infinities, NaN and negative bases give what IEEE 754 says, signs of zeros included."""
    x = special(dtype)
    got = unary("pow", dtype, x, {"exponent": exponent}).forward()["y"]
    with np.errstate(all="ignore"):
        want = np.float_power(x.astype(np.float64), exponent).astype(dtype)
    want[np.isneginf(x) & (exponent == 0.5)] = np.inf  # NumPy's is the square root's
    want[(x == 0) & (exponent == 0.5)] = 0
    ends = ~np.isfinite(want) | (want == 0)
    for i in np.flatnonzero(ends):
        assert same_values(got[i : i + 1], want[i : i + 1]), f"{x[i]}**{exponent}: {got[i]}, and not {want[i]}"


# ---------------------------------------------------------------- normalization of any magnitude
NORMS = ("layer_norm", "rms_norm", "group_norm", "instance_norm", "batch_norm", "local_response_norm")
SCALES = {
    "float32": (1e37, 1e30, 1e25, 1e20, 1e19, 1e18, 1e10, 1e-10, 1e-19, 1e-25, 1e-30),
    "float64": (1e300, 1e200, 1e160, 1e154, 1e100, 1e-100, 1e-154, 1e-200, 1e-300),
}


def check_norm(name: str, dtype: str, examples: int = 99) -> int:
    """Norms of s*x, without eps, are those of x, their gradients by s*x the s-th part, whatever s; returns how many were compared.

    Within 200 eps of the largest, or what subnormal numbers keep.  local_response_norm, with k s^2 times as large, is
    s^(1 - 2*beta) times as large; it is off by a power's rounding of its exponent too, which is as large as s is.
    """
    info, count, bound = np.finfo(dtype), 0, 2000 if name == "local_response_norm" else 200
    for example in OPS[name].examples[:examples]:
        for s in SCALES[dtype] if not example.bench else ():
            if name == "local_response_norm" and s < 1e-150:
                continue  # k s^-2 is no number, and what it is here k alone
            attrs, own = {a.name: a.default for a in OPS[name].attrs} | dict(example.attrs), "eps"
            of_y, of_dx = np.longdouble(1), 1 / np.longdouble(s)
            if name == "local_response_norm":
                own, of_y = "k", np.longdouble(s) ** (1 - 2 * np.longdouble(attrs["beta"]))
                of_dx = of_y / s
            attrs["eps"] = 0.0
            given, plain = (
                Case(OPS[name], replace(example, attrs=example.attrs | {own: number}), kind, example.batch)
                for kind, number in ((dtype, attrs[own]), ("float64", attrs[own] / s / s))
            )
            x = np.random.default_rng(0).standard_normal(given.values["x"].size)
            given.values["x"] = (x * s).astype(dtype)
            plain.values |= {v: given.values[v].astype(float) for v in ("scale", "shift") if v in given.values}
            plain.values["x"] = (given.values["x"].astype(np.longdouble) / s).astype(float)
            got, want, dy = given.forward(), plain.forward(), given.output_gradients()
            pairs = [("y", got["y"], want["y"] * of_y)]
            got, want = given.backward(got | dy), plain.backward(want | {v: d.astype(float) for v, d in dy.items()})
            pairs += [(v, got[v], want[v] * (of_dx if v == "dx" else 1)) for v in got]
            for v, found, right in pairs:
                error, size = float(abs(found - right).max()), float(abs(right).max())
                limit = bound * (info.eps * size + float(info.smallest_subnormal))
                assert size > info.max or error <= limit, (
                    f"{name} {example.shapes[0]} of {s:g}: {v} is {error} off {size}"
                )
                count += found.size
    return count


# ---------------------------------------------------------------- sums over very many
def check_long_sums(dtype: str, n: int, ulp: float) -> int:
    """Sums of n equal numbers, whose roundings all go one way, along any axes, are as exact as those of few."""
    count = 0
    value = np.array(0.479, dtype)
    for shape, axes in (
        ((n,), (0,)),
        ((n, 3), (0,)),
        ((3, n), (1,)),
        ((n // 6, 2, 3, 2), (0, 2)),
        ((2, n // 6, 2, 3), (1, 3)),
        ((n // 3, 3), (0, 1)),
        ((2, n // 4, 17), (1,)),
    ):
        for name in ("sum", "mean", "sum_squares"):
            case = Case(OPS[name], Example(shapes=(shape,), attrs={"axes": axes}), dtype, 1)
            case.values["x"] = np.full(case.values["x"].size, value)
            got = case.forward()["y"]
            terms = np.longdouble(np.prod([shape[a] for a in axes]))
            want = np.longdouble(value) ** (2 if name == "sum_squares" else 1) * (1 if name == "mean" else terms)
            error = float(abs(got - want).max() / want / np.finfo(dtype).eps)
            assert error <= ulp, f"{name} of {shape} over {axes}: {error:.3g} eps off"
            count += got.size
    return count


def check_clip_norm(dtype: str) -> int:
    """A step whose gradient's norm is above ``clip_norm`` has that norm, whatever the gradient's magnitude."""
    info, rng, count = np.finfo(dtype), np.random.default_rng(0), 0
    for s in (float(info.max) / 1e3, *SCALES[dtype]):
        for shape in ((7,), (6, 5), (3, 700)):
            g = (rng.uniform(-1, 1, shape) * s).astype(dtype)
            norm = float(np.sqrt(((g.astype(np.longdouble) / s) ** 2).sum()) * s)
            case = Case(OPS["sumsq"], Example(shapes=(shape,)), dtype, 1)
            case.values["g"] = g.reshape(-1)
            hyper = np.zeros(len(HYPER_SLOTS))
            hyper[HYPER_SLOTS.index("clip_norm")] = limit = min(0.5, norm / 2)
            scale = Case(OPS["clip_norm_scale"], Example(shapes=((shape[0],), (len(HYPER_SLOTS),))), dtype, 1)
            scale.values = {"s": case.forward()["s"], "hyper": hyper}
            found = scale.forward()["hyper"][HYPER_SLOTS.index("clip_scale")]
            right = min(1.0, limit / (norm + 1e-6))
            assert abs(found - right) <= 8 * info.eps * right, f"norm {norm:g} of {shape}: {found}, and not {right}"
            count += 1
    return count


# ---------------------------------------------------------------- two operands
def check_binary(name: str, dtype: str) -> int:
    """IEEE 754's result of all pairs of `special`, and a gradient of 0 stays 0 where a slope has a pole."""
    a, b = (v.ravel() for v in np.meshgrid(special(dtype), special(dtype)))
    case = Case(OPS[name], Example(shapes=((a.size,), (a.size,))), dtype, 1)
    case.values = {"a": a, "b": b}
    values = case.forward()
    with np.errstate(all="ignore"):
        want = {
            "add": np.add,
            "sub": np.subtract,
            "mul": np.multiply,
            "div": np.divide,
            "maximum": np.maximum,
            "minimum": np.minimum,
        }[name](a, b)
        wrong = (values["y"] != want) & ~(np.isnan(want) & np.isnan(values["y"]))
        assert not wrong.any(), f"{name}{a[wrong][0], b[wrong][0]} = {values['y'][wrong][0]}, and not {want[wrong][0]}"
        wide, by = exact(a), exact(b)
        slopes = {"div": {"a": 1 / by, "b": -(wide / by / by)}, "mul": {"a": by, "b": wide}}.get(name, {})
        for dy in (1.0, -2.5, 0.0) if slopes else ():
            gradients = case.backward(values | {"dy": np.full(a.size, dy, dtype)})
            for v, slope in slopes.items():
                got = gradients[f"d{v}"]
                if dy == 0 and name == "div":
                    assert (got == 0).all(), f"{name}: a gradient of 0 becomes {got[got != 0][0]}"
                    continue
                rounded = slope.astype(dtype)
                known = np.isfinite(rounded) & ((abs(rounded) >= np.finfo(dtype).tiny) | (slope == 0))
                if (
                    name == "div" and v == "b"
                ):  # by the quotient, which may be no number of the type, or lose its digits
                    known &= np.isfinite(want) & ((abs(want) >= np.finfo(dtype).tiny) | (a == 0))
                error = ulps(got[known], (dy * slope)[known])
                assert error.size and error.max() <= 3, f"{dy}*d{v} of {name}: {error.max():.3g} ulp off"
    return a.size * (1 + 3 * len(slopes))


def check_gradients_of_a_batch(dtype: str, rows: int) -> int:
    """dw and db of linear layers over so many samples: db within 8 eps, dw within 50."""
    eps, x, dy = np.finfo(dtype).eps, np.array(0.1, dtype), np.array(0.3, dtype)
    for K, N in ((8, 4), (3, 1), (1, 5), (2, 19)):
        case = Case(OPS["linear"], Example(shapes=((rows, K), (K, N), (N,))), dtype, 1)
        case.values["x"] = np.full(rows * K, x)
        found = case.backward(case.values | {"dy": np.full(rows * N, dy)})
        for name, want, bound in (("db", rows * exact(dy), 8), ("dwt", rows * exact(x) * exact(dy), 50)):
            error = float(abs(found[name] - want).max() / want / eps)
            assert error <= bound, f"{name} of {K}x{N} over {rows}: {error:.3g} eps off"
    return rows


SQUARES = {
    "mse": lambda d: 2 * d / d.size,
    "square": lambda d: 2 * d,
    "pow": lambda d: 2 * d,
    "huber": lambda d: np.clip(d, -1, 1) / d.size,
    "mae": lambda d: np.sign(d) / d.size,
}


def check_slopes_of_large_errors(name: str, dtype: str) -> int:
    """A gradient that the type has is found, whatever its loss is: of errors up to the largest number."""
    largest = np.finfo(dtype).max
    d = np.array([largest * s for s in (1, -1, 0.9, -0.6, 0.51, 0.3, 1e-20)] + [3.0], dtype)
    pair, attrs = OPS[name].category == "loss", {"exponent": 2.0} if name == "pow" else {}
    case = Case(OPS[name], Example(shapes=((d.size,),) * (2 if pair else 1), attrs=attrs), dtype, 1)
    case.values = {"x": d, "t": np.zeros_like(d)} if pair else {"x": d}
    share = np.array(1.0 if pair else 1 / d.size, dtype)
    got = case.backward(
        case.values | ({"dloss": np.array([share])} if pair else {"y": d, "dy": np.full(d.size, share)})
    )
    want = SQUARES[name](exact(d)) * exact(share)
    error = ulps(got["dx"], want)
    assert error.max() <= 3, f"{name}: {got['dx']}, {want} is right"
    return d.size
