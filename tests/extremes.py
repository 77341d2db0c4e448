"""Numbers at the ends of their range, for rows of either backend: what tests/test_extremes.py and tests/cuda check with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

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
