"""Operators on signals, images and volumes, by function: shapes are channels-first, (N, channels, *sizes), as in PyTorch.

How they lie in the heap is the compiler's affair (``docs/architecture.md``): arrays that are given and read are as here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calcvm import checks
from calcvm.errors import CalcError, ShapeError
from calcvm.graph import Variable, apply

__all__ = ["conv1d", "conv2d", "conv3d", "pad", "upsample"]

Sizes = int | Sequence[int]
Padding = int | str | Sequence[int] | Sequence[tuple[int, int]]


def sizes(what: str, value: Any, n: int, least: int) -> tuple[int, ...]:
    """A number for each of n spatial axes, of one for all or a sequence."""
    if checks.is_integer(value):
        return (checks.integer(what, value, least, 2**31),) * n
    given = checks.items(what, value, f"a number or {n} of them")
    if len(given) != n:
        raise CalcError(f"{what}: {checks.shown(value)} is not one number for each of the {n} spatial axes")
    return tuple(checks.integer(what, v, least, 2**31) for v in given)


def _pads(what: str, value: Any, window: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Padding before each axis, then after each; ``window`` is what the kernel spans, dilation included."""
    n = len(window)
    if isinstance(value, str):
        if checks.choice(what, value, ("same", "valid")) == "valid":
            return (0,) * 2 * n
        if any(s != 1 for s in stride):
            raise CalcError(f'{what}: "same" is of stride 1: give numbers')
        whole = [k - 1 for k in window]
        return (*(k // 2 for k in whole), *(k - k // 2 for k in whole))
    if isinstance(value, (tuple, list)) and any(isinstance(v, (tuple, list)) for v in value):
        pairs = [sizes(what, v, 2, 0) for v in value]
        if len(pairs) != n:
            raise CalcError(f"{what}: {checks.shown(value)} is not one pair for each of the {n} spatial axes")
        return (*(a for a, _ in pairs), *(b for _, b in pairs))
    return 2 * sizes(what, value, n, 0)


def _conv(
    n: int, x: Variable, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: Any
) -> Variable:
    name = f"conv{n}d"
    checks.one_of(f"{name}: x", x, Variable, "a variable")
    if x.rank != n + 2 or len(weight.shape) != n + 2:
        raise ShapeError(
            f"{name}: x {x} and weight {tuple(weight.shape)} must have {n + 2} axes: (N, channels, {n} sizes) and "
            f"(out channels, channels / groups, {n} sizes)"
        )
    dilated, strides = sizes(f"{name}: dilation", dilation, n, 1), sizes(f"{name}: stride", stride, n, 1)
    window = [k if isinstance(k, int) else k.b for k in weight.shape[2:]]
    pads = _pads(f"{name}: padding", padding, [(k - 1) * d + 1 for k, d in zip(window, dilated)], strides)
    groups = checks.integer(f"{name}: groups", groups, 1, 2**31)
    return apply("conv", x, weight, bias, stride=strides, padding=pads, dilation=dilated, groups=groups)


def conv1d(
    x: Variable, weight: Variable, bias: Variable | None = None, stride: Sizes = 1, padding: Padding = 0,
    dilation: Sizes = 1, groups: int = 1,
) -> Variable:  # fmt: skip
    """As `conv2d`, of x (N, C, L) and weight (F, C / groups, k)."""
    return _conv(1, x, weight, bias, stride, padding, dilation, groups)


def conv2d(
    x: Variable, weight: Variable, bias: Variable | None = None, stride: Sizes = 1, padding: Padding = 0,
    dilation: Sizes = 1, groups: int = 1,
) -> Variable:  # fmt: skip
    """Cross-correlation of x (N, C, H, W) with weight (F, C / groups, kh, kw), plus bias (F,): (N, F, H', W').

    stride, dilation : a number, or one an axis.  padding : of zeros: a number, one an axis, a pair (before, after) an
    axis, "same" (the result has the size of x; stride 1) or "valid" (none).  groups : parts of the channels, each by itself.

    Raises
    ------
    ShapeError : ranks or channels do not fit, or the window is larger than x with its padding.
    CalcError : a setting is none.
    """
    return _conv(2, x, weight, bias, stride, padding, dilation, groups)


def conv3d(
    x: Variable, weight: Variable, bias: Variable | None = None, stride: Sizes = 1, padding: Padding = 0,
    dilation: Sizes = 1, groups: int = 1,
) -> Variable:  # fmt: skip
    """As `conv2d`, of x (N, C, D, H, W) and weight (F, C / groups, kd, kh, kw)."""
    return _conv(3, x, weight, bias, stride, padding, dilation, groups)


def pad(x: Variable, padding: Padding, mode: str = "constant", value: float = 0.0) -> Variable:
    """x with elements before and after its last axes.

    padding : a number for every spatial axis (from the third on), or a pair (before, after) for each of the last axes.
    mode : "constant" (``value``), "reflect" (mirrored at the end elements), "edge" (those) or "wrap" (x again), as NumPy's.

    Raises
    ------
    ShapeError : x is too small to be mirrored so far.
    CalcError : a setting is none.
    """
    checks.one_of("pad: x", x, Variable, "a variable")
    if checks.is_integer(padding):
        if x.rank < 3:
            raise ShapeError(f"pad: x {x} has no spatial axes: give a pair for each of its last axes")
        pairs: list[tuple[int, ...]] = [(checks.integer("pad: padding", padding, 0, 2**31),) * 2] * (x.rank - 2)
    else:
        pairs = [sizes("pad: padding", pair, 2, 0) for pair in checks.items("pad: padding", padding, "pairs")]
        if len(pairs) > x.rank:
            raise ShapeError(f"pad: {len(pairs)} pairs for the {x.rank} axes of x {x}")
    pairs = [(0, 0)] * (x.rank - len(pairs)) + pairs
    checks.choice("pad: mode", mode, ("constant", "reflect", "edge", "wrap"))
    value = checks.number("pad: value", value)
    return apply("pad", x, pads=(*(a for a, _ in pairs), *(b for _, b in pairs)), mode=mode, value=value)


LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}  # by spatial axes


def upsample(
    x: Variable, scale: float | Sequence[float] | None = 2, size: Sizes | None = None, mode: str = "nearest",
    align_corners: bool = False,
) -> Variable:  # fmt: skip
    """x (N, C, *sizes) with its spatial axes scaled, or brought to a ``size``, as PyTorch's ``interpolate``.

    mode : "nearest" or "linear" (of two axes also "bilinear", of three "trilinear").  align_corners : of linear: whether
    the outermost elements lie on each other, and not the ends of axes.
    """
    checks.one_of("upsample: x", x, Variable, "a variable")
    n = x.rank - 2
    if n not in LINEAR:
        raise ShapeError(f"upsample: x {x} is not (N, C, 1 to 3 sizes)")
    mode = "linear" if checks.choice("upsample: mode", mode, ("nearest", "linear", LINEAR[n])) != "nearest" else mode
    given: dict[str, Any] = {"sizes": None, "scales": None}
    if size is not None:
        given["sizes"] = sizes("upsample: size", size, n, 1)
    else:
        several = (
            [scale] * n
            if checks.is_number(scale)
            else checks.items("upsample: scale", scale, "a number, or one an axis,")
        )
        if len(several) != n:
            raise CalcError(f"upsample: scale {checks.shown(scale)} is not one number for each of {n} spatial axes")
        given["scales"] = tuple(checks.number("upsample: scale", v, 0, 2**20, ends="(]") for v in several)
    return apply("upsample", x, **given, mode=mode, align_corners=checks.flag("upsample: align_corners", align_corners))
