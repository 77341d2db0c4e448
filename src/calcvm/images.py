"""Operators on signals, images and volumes, by function: shapes are channels-first, (N, channels, *sizes), as in PyTorch.

How they lie in the heap is the compiler's affair (``docs/architecture.md``): arrays that are given and read are as here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calcvm import checks
from calcvm.errors import CalcError, ShapeError
from calcvm.graph import Variable, apply

__all__ = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]

Sizes = int | Sequence[int]
Padding = int | str | Sequence[int] | Sequence[tuple[int, int]]


def _sizes(what: str, value: Any, n: int, least: int) -> tuple[int, ...]:
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
        pairs = [_sizes(what, v, 2, 0) for v in value]
        if len(pairs) != n:
            raise CalcError(f"{what}: {checks.shown(value)} is not one pair for each of the {n} spatial axes")
        return (*(a for a, _ in pairs), *(b for _, b in pairs))
    return 2 * _sizes(what, value, n, 0)


def _conv(
    op: str, n: int, x: Variable, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: Any,
    **more: Any,
) -> Variable:  # fmt: skip
    name = f"{op}{n}d"
    checks.one_of(f"{name}: x", x, Variable, "a variable")
    if x.rank != n + 2 or len(weight.shape) != n + 2:
        first, second = ("out ", "") if op == "conv" else ("", "out ")
        raise ShapeError(
            f"{name}: x {x} and weight {tuple(weight.shape)} must have {n + 2} axes: (N, channels, {n} sizes) and "
            f"({first}channels, {second}channels / groups, {n} sizes)"
        )
    dilated, strides = _sizes(f"{name}: dilation", dilation, n, 1), _sizes(f"{name}: stride", stride, n, 1)
    sizes = [k if isinstance(k, int) else k.b for k in weight.shape[2:]]
    pads = _pads(f"{name}: padding", padding, [(k - 1) * d + 1 for k, d in zip(sizes, dilated)], strides)
    groups = checks.integer(f"{name}: groups", groups, 1, 2**31)
    more = {what: _sizes(f"{name}: {what}", value, n, 0) for what, value in more.items()}
    return apply(op, x, weight, bias, stride=strides, padding=pads, dilation=dilated, groups=groups, **more)


def conv1d(
    x: Variable, weight: Variable, bias: Variable | None = None, stride: Sizes = 1, padding: Padding = 0,
    dilation: Sizes = 1, groups: int = 1,
) -> Variable:  # fmt: skip
    """As `conv2d`, of x (N, C, L) and weight (F, C / groups, k)."""
    return _conv("conv", 1, x, weight, bias, stride, padding, dilation, groups)


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
    return _conv("conv", 2, x, weight, bias, stride, padding, dilation, groups)


def conv3d(
    x: Variable, weight: Variable, bias: Variable | None = None, stride: Sizes = 1, padding: Padding = 0,
    dilation: Sizes = 1, groups: int = 1,
) -> Variable:  # fmt: skip
    """As `conv2d`, of x (N, C, D, H, W) and weight (F, C / groups, kd, kh, kw)."""
    return _conv("conv", 3, x, weight, bias, stride, padding, dilation, groups)


def conv_transpose1d(
    x: Variable, weight: Variable, bias: Variable | None = None, stride: Sizes = 1, padding: Padding = 0,
    output_padding: Sizes = 0, groups: int = 1, dilation: Sizes = 1,
) -> Variable:  # fmt: skip
    """As `conv_transpose2d`, of x (N, C, L) and weight (C, F / groups, k)."""
    return _conv("conv_transpose", 1, x, weight, bias, stride, padding, dilation, groups, output_padding=output_padding)


def conv_transpose2d(
    x: Variable, weight: Variable, bias: Variable | None = None, stride: Sizes = 1, padding: Padding = 0,
    output_padding: Sizes = 0, groups: int = 1, dilation: Sizes = 1,
) -> Variable:  # fmt: skip
    """Transposed convolution of x (N, C, H, W) with weight (C, F / groups, kh, kw), plus bias (F,): (N, F, H', W').

    It is the gradient of `conv2d` by its input, also called fractionally strided: H' = (H - 1) * stride - padding before
    and after + dilation * (kh - 1) + output_padding + 1.

    stride, padding, dilation, groups : those of the convolution that it transposes, as of `conv2d`.  output_padding : rows
    and columns more at the end, below stride or dilation: of the sizes that the convolution takes to H and W, which.

    Raises
    ------
    ShapeError : ranks or channels do not fit, output_padding is too large, or nothing is left without the padding.
    CalcError : a setting is none.
    """
    return _conv("conv_transpose", 2, x, weight, bias, stride, padding, dilation, groups, output_padding=output_padding)


def conv_transpose3d(
    x: Variable, weight: Variable, bias: Variable | None = None, stride: Sizes = 1, padding: Padding = 0,
    output_padding: Sizes = 0, groups: int = 1, dilation: Sizes = 1,
) -> Variable:  # fmt: skip
    """As `conv_transpose2d`, of x (N, C, D, H, W) and weight (C, F / groups, kd, kh, kw)."""
    return _conv("conv_transpose", 3, x, weight, bias, stride, padding, dilation, groups, output_padding=output_padding)
