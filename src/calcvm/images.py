"""Operators on signals, images and volumes, as functions.  Shapes are channels-first, (N, channels, *sizes), as in PyTorch.

The compiler chooses how they are stored in the heap (``docs/architecture.md``).  Arrays given and read have the shapes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calcvm import checks
from calcvm.errors import CalcError, ShapeError
from calcvm.graph import Variable, apply, as_numbers
from calcvm.ops.resizing import BEYOND

__all__ = [
    "adaptive_avg_pool", "adaptive_max_pool", "avg_pool", "batch_norm", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "global_avg_pool", "global_max_pool", "group_norm",
    "instance_norm", "local_response_norm", "lp_pool", "max_pool", "pad", "random_crop", "random_flip", "upsample",
]  # fmt: skip

Sizes = int | Sequence[int]
Padding = int | str | Sequence[int] | Sequence[tuple[int, int]]


def sizes(what: str, value: Any, n: int, least: int) -> tuple[int, ...]:
    """One number for each of n spatial axes, from one for all or a sequence."""
    if checks.is_integer(value):
        return (checks.integer(what, value, least, 2**31),) * n
    given = checks.items(what, value, f"a number or {n} of them")
    if len(given) != n:
        raise CalcError(f"{what}: {checks.shown(value)} is not one number for each of the {n} spatial axes")
    return tuple(checks.integer(what, v, least, 2**31) for v in given)


def _pads(what: str, value: Any, window: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Padding before each axis, then after each; ``window`` is the extent of the kernel, dilation included."""
    n = len(window)
    if isinstance(value, str):
        if checks.choice(what, value, ("same", "valid")) == "valid":
            return (0,) * 2 * n
        if any(s != 1 for s in stride):
            raise CalcError(f'{what}: "same" needs stride 1: give numbers')
        whole = [k - 1 for k in window]
        return (*(k // 2 for k in whole), *(k - k // 2 for k in whole))
    if isinstance(value, (tuple, list)) and any(isinstance(v, (tuple, list)) for v in value):
        pairs = [sizes(what, v, 2, 0) for v in value]
        if len(pairs) != n:
            raise CalcError(f"{what}: {checks.shown(value)} is not one pair for each of the {n} spatial axes")
        return (*(a for a, _ in pairs), *(b for _, b in pairs))
    if n == 1 and isinstance(value, (tuple, list)) and len(value) == 2:
        raise CalcError(f"{what}: a pair (before, after) per axis is wanted: write ({checks.shown(tuple(value))},)")
    return 2 * sizes(what, value, n, 0)


def _conv(
    op: str, n: int, x: Variable, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: Any,
    **more: Any,
) -> Variable:  # fmt: skip
    name = f"{op}{n}d"
    checks.one_of(f"{name}: x", x, Variable, "a variable")
    weight = weight if isinstance(weight, Variable) else as_numbers(f"{name}: weight", weight)
    if x.rank != n + 2 or len(weight.shape) != n + 2:
        first, second = ("out ", "") if op == "conv" else ("", "out ")
        raise ShapeError(
            f"{name}: x {x} and weight {tuple(weight.shape)} must have {n + 2} axes: (N, channels, {n} sizes) and "
            f"({first}channels, {second}channels / groups, {n} sizes)"
        )
    dilated, strides = sizes(f"{name}: dilation", dilation, n, 1), sizes(f"{name}: stride", stride, n, 1)
    window = [k if isinstance(k, int) else k.b for k in weight.shape[2:]]
    pads = _pads(f"{name}: padding", padding, [(k - 1) * d + 1 for k, d in zip(window, dilated)], strides)
    groups = checks.integer(f"{name}: groups", groups, 1, 2**31)
    more = {what: sizes(f"{name}: {what}", value, n, 0) for what, value in more.items()}
    return apply(op, x, weight, bias, stride=strides, padding=pads, dilation=dilated, groups=groups, **more)


def conv1d(
    x: Variable, weight: Variable, bias: Variable | None = None, stride: Sizes = 1, padding: Padding = 0,
    dilation: Sizes = 1, groups: int = 1,
) -> Variable:  # fmt: skip
    """As `conv2d`, for x (N, C, L) and weight (F, C / groups, k)."""
    return _conv("conv", 1, x, weight, bias, stride, padding, dilation, groups)


def conv2d(
    x: Variable, weight: Variable, bias: Variable | None = None, stride: Sizes = 1, padding: Padding = 0,
    dilation: Sizes = 1, groups: int = 1,
) -> Variable:  # fmt: skip
    """Cross-correlation of x (N, C, H, W) with weight (F, C / groups, kh, kw), plus bias (F,): (N, F, H', W').

    stride, dilation : a number, or one per axis.
    padding : with zeros: a number, one per axis, a pair (before, after) per axis, "same" (the result has the size of x;
        stride 1) or "valid" (none).
    groups : number of groups of channels, convolved separately.

    Raises
    ------
    ShapeError : ranks or channels do not fit, or the window is larger than the padded x.
    CalcError : a setting is invalid.
    """
    return _conv("conv", 2, x, weight, bias, stride, padding, dilation, groups)


def conv3d(
    x: Variable, weight: Variable, bias: Variable | None = None, stride: Sizes = 1, padding: Padding = 0,
    dilation: Sizes = 1, groups: int = 1,
) -> Variable:  # fmt: skip
    """As `conv2d`, for x (N, C, D, H, W) and weight (F, C / groups, kd, kh, kw)."""
    return _conv("conv", 3, x, weight, bias, stride, padding, dilation, groups)


def conv_transpose1d(
    x: Variable, weight: Variable, bias: Variable | None = None, stride: Sizes = 1, padding: Padding = 0,
    output_padding: Sizes = 0, groups: int = 1, dilation: Sizes = 1,
) -> Variable:  # fmt: skip
    """As `conv_transpose2d`, for x (N, C, L) and weight (C, F / groups, k)."""
    return _conv("conv_transpose", 1, x, weight, bias, stride, padding, dilation, groups, output_padding=output_padding)


def conv_transpose2d(
    x: Variable, weight: Variable, bias: Variable | None = None, stride: Sizes = 1, padding: Padding = 0,
    output_padding: Sizes = 0, groups: int = 1, dilation: Sizes = 1,
) -> Variable:  # fmt: skip
    """Transposed convolution of x (N, C, H, W) with weight (C, F / groups, kh, kw), plus bias (F,): (N, F, H', W').

    It is the gradient of `conv2d` with respect to its input, also called fractionally strided convolution:
    H' = (H - 1) * stride - padding before and after + dilation * (kh - 1) + output_padding + 1.

    stride, padding, dilation, groups : those of the transposed convolution, as in `conv2d`.
    output_padding : extra rows and columns at the end, less than stride or dilation.  It selects one of the sizes that the
        convolution maps to H and W.

    Raises
    ------
    ShapeError : ranks or channels do not fit, output_padding is too large, or the result is empty.
    CalcError : a setting is invalid.
    """
    return _conv("conv_transpose", 2, x, weight, bias, stride, padding, dilation, groups, output_padding=output_padding)


def conv_transpose3d(
    x: Variable, weight: Variable, bias: Variable | None = None, stride: Sizes = 1, padding: Padding = 0,
    output_padding: Sizes = 0, groups: int = 1, dilation: Sizes = 1,
) -> Variable:  # fmt: skip
    """As `conv_transpose2d`, for x (N, C, D, H, W) and weight (C, F / groups, kd, kh, kw)."""
    return _conv("conv_transpose", 3, x, weight, bias, stride, padding, dilation, groups, output_padding=output_padding)


# ---------------------------------------------------------------- pooling
def _spatial(name: str, x: Variable) -> int:
    """The number of spatial axes of a variable (ShapeError: none)."""
    checks.one_of(f"{name}: x", x, Variable, "a variable")
    if not 3 <= x.rank <= 5:
        raise ShapeError(f"{name}: x {x} is not (N, C, 1 to 3 sizes)")
    return x.rank - 2


def _pool(
    name: str, x: Variable, kernel: Any, stride: Any, padding: Any, ceil_mode: Any, dilation: Any = None, **more: Any
) -> Variable:
    n = _spatial(name, x)
    kernel = sizes(f"{name}: kernel", kernel, n, 1)
    strides = kernel if stride is None else sizes(f"{name}: stride", stride, n, 1)
    if dilation is not None:
        more["dilation"] = sizes(f"{name}: dilation", dilation, n, 1)
    if padding is not None:
        spans = [(k - 1) * d + 1 for k, d in zip(kernel, more.get("dilation", (1,) * n))]
        more["padding"] = _pads(f"{name}: padding", padding, spans, strides)
    more["ceil_mode"] = checks.flag(f"{name}: ceil_mode", ceil_mode)
    return apply(name, x, kernel=kernel, stride=strides, **more)


def max_pool(
    x: Variable, kernel: Sizes, stride: Sizes | None = None, padding: Padding = 0, dilation: Sizes = 1,
    ceil_mode: bool = False,
) -> Variable:  # fmt: skip
    """The largest element of each window of x (N, C, *sizes), NaN if one is NaN.  The first of equals gets the gradient.

    kernel : sizes of the window, one for all axes or one each.
    stride : default: the kernel.
    padding : as in `conv2d`; padded places are never the largest.
    ceil_mode : include a last window that extends beyond the image.
    """
    return _pool("max_pool", x, kernel, stride, padding, ceil_mode, dilation)


def avg_pool(
    x: Variable, kernel: Sizes, stride: Sizes | None = None, padding: Padding = 0, ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Variable:  # fmt: skip
    """The mean of each window; settings as in `max_pool`.  count_include_pad : count the padding's zeros as elements."""
    count = checks.flag("avg_pool: count_include_pad", count_include_pad)
    return _pool("avg_pool", x, kernel, stride, padding, ceil_mode, count_include_pad=count)


def lp_pool(
    x: Variable, p: float, kernel: Sizes, stride: Sizes | None = None, ceil_mode: bool = False
) -> Variable:  # fmt: skip
    """``(sum of x^p)^(1/p)`` over each window; settings as in `max_pool`."""
    return _pool("lp_pool", x, kernel, stride, None, ceil_mode, p=checks.number("lp_pool: p", p, 0, ends="(]"))


def adaptive_avg_pool(x: Variable, size: Sizes) -> Variable:
    """The mean of each of ``size`` windows that cover x: (N, C, *size)."""
    n = _spatial("adaptive_avg_pool", x)
    return apply("adaptive_avg_pool", x, sizes=sizes("adaptive_avg_pool: size", size, n, 1))


def adaptive_max_pool(x: Variable, size: Sizes) -> Variable:
    """The largest element of each of ``size`` windows that cover x: (N, C, *size)."""
    n = _spatial("adaptive_max_pool", x)
    return apply("adaptive_max_pool", x, sizes=sizes("adaptive_max_pool: size", size, n, 1))


def global_avg_pool(x: Variable) -> Variable:
    """The mean over all spatial axes: (N, C, 1, ...)."""
    _spatial("global_avg_pool", x)
    return apply("global_avg_pool", x)


def global_max_pool(x: Variable) -> Variable:
    """The largest element over all spatial axes: (N, C, 1, ...)."""
    _spatial("global_max_pool", x)
    return apply("global_max_pool", x)


# ---------------------------------------------------------------- normalization
def _eps(name: str, eps: Any) -> float:
    return checks.number(f"{name}: eps", eps, 0, 1e30)


def batch_norm(
    x: Variable, running_mean: Variable, running_var: Variable, scale: Variable | None = None,
    shift: Variable | None = None, momentum: float = 0.1, eps: float = 1e-5, training: bool | None = None,
) -> Variable:  # fmt: skip
    """x (N, C, ...) normalized per channel over the batch, times scale, plus shift, each (C,).

    Parameters
    ----------
    running_mean, running_var : buffers (`CalcGraph.buffer`) of shape (C,).  Each training step moves them by ``momentum``
        towards the statistics of its batch.  A path that does not train normalizes by them.
    training : whether to normalize by the batch; default: whether the path trains.

    Raises
    ------
    ShapeError : a shape is not (C,), or a channel has only one value, even in the largest planned batch.
    """
    checks.one_of("batch_norm: x", x, Variable, "a variable")
    train = x.graph.active.backward if training is None else checks.flag("batch_norm: training", training)
    given, eps = (x, running_mean, running_var, scale, shift), _eps("batch_norm", eps)
    if train:
        return apply("batch_norm", *given, momentum=checks.number("batch_norm: momentum", momentum, 0, 1), eps=eps)
    return apply("batch_norm_inference", *given, eps=eps)


def instance_norm(
    x: Variable, scale: Variable | None = None, shift: Variable | None = None, eps: float = 1e-5
) -> Variable:
    """x (N, C, ...) normalized in each sample and channel; times scale, plus shift, each (C,)."""
    return apply("instance_norm", x, scale, shift, eps=_eps("instance_norm", eps))


def group_norm(
    x: Variable, groups: int, scale: Variable | None = None, shift: Variable | None = None, eps: float = 1e-5
) -> Variable:
    """x (N, C, ...) normalized in each sample and group of channels; times scale, plus shift, each (C,)."""
    groups = checks.integer("group_norm: groups", groups, 1, 2**31)
    return apply("group_norm", x, scale, shift, groups=groups, eps=_eps("group_norm", eps))


def local_response_norm(
    x: Variable, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Variable:  # fmt: skip
    """x / (k + alpha * mean of x^2 over ``size`` adjacent channels)^beta: Krizhevsky et al. 2012."""
    given = {"alpha": alpha, "beta": beta, "k": k}
    numbers: dict[str, Any] = {
        what: checks.number(f"local_response_norm: {what}", v, -1e30, 1e30) for what, v in given.items()
    }
    size = checks.integer("local_response_norm: size", size, 1, 2**20)
    return apply("local_response_norm", x, size=size, **numbers)


# ---------------------------------------------------------------- other sizes
def pad(x: Variable, padding: Padding, mode: str = "constant", value: float = 0.0) -> Variable:
    """x with elements added before and after its last axes.

    padding : a number for all spatial axes (from the third on), before and after alike; one for each of them; or a pair
        (before, after) for each of the last axes, in order: ``((0, 1), (2, 3))`` is PyTorch's ``(2, 3, 0, 1)``.
    mode : "constant" (``value``), "reflect" (mirrored at the end elements), "edge" (those repeated) or "wrap" (periodic), as
        in NumPy.

    Raises
    ------
    ShapeError : x is too small to be mirrored that far.
    CalcError : a setting is invalid.
    """
    checks.one_of("pad: x", x, Variable, "a variable")
    if checks.is_integer(padding):
        if x.rank < 3:
            raise ShapeError(f"pad: x {x} has no spatial axes: give a pair for each of its last axes")
        pairs: list[tuple[int, ...]] = [(checks.integer("pad: padding", padding, 0, 2**31),) * 2] * (x.rank - 2)
    else:
        given = checks.items("pad: padding", padding, "a number, or pairs (before, after)")
        if any(map(checks.is_integer, given)) and len(given) != x.rank - 2:
            raise CalcError(
                f"pad: padding {checks.shown(padding)}: give one number for each of the {max(x.rank - 2, 0)} spatial axes of {x}, "
                "before and after alike, or pairs (before, after), such as ((0, 1), (2, 3)), the last axis last"
            )
        pairs = [sizes("pad: padding", pair, 2, 0) for pair in given]
        if len(pairs) > x.rank:
            raise ShapeError(f"pad: {len(pairs)} pairs for the {x.rank} axes of x {x}")
    pairs = [(0, 0)] * (x.rank - len(pairs)) + pairs
    checks.choice("pad: mode", mode, BEYOND)
    value = checks.number("pad: value", value)
    return apply("pad", x, pads=(*(a for a, _ in pairs), *(b for _, b in pairs)), mode=mode, value=value)


LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}  # by number of spatial axes


def upsample(
    x: Variable, scale: float | Sequence[float] | None = None, size: Sizes | None = None, mode: str = "nearest",
    align_corners: bool = False,
) -> Variable:  # fmt: skip
    """x (N, C, *sizes) with its spatial axes scaled, by default by 2, or resized to ``size``.

    As PyTorch's ``interpolate``.  With "nearest", element o of y is element floor(o / scale) of x.  For small images of two
    axes, PyTorch takes element o if a scale such as 1.1 leaves the axis as long as it is, and o // 2 if one such as 2.1 doubles it.

    mode : "nearest" or "linear" (for two axes also "bilinear", for three "trilinear").
    align_corners : for linear: align the centers of the outermost elements, not the ends of the axes.
    """
    n = _spatial("upsample", x)
    mode = "linear" if checks.choice("upsample: mode", mode, ("nearest", "linear", LINEAR[n])) != "nearest" else mode
    given: dict[str, Any] = {"sizes": None, "scales": None}
    if size is not None:
        if scale is not None:
            raise CalcError(f"upsample: scale {checks.shown(scale)} and size {checks.shown(size)}: give one of them")
        given["sizes"] = sizes("upsample: size", size, n, 1)
    else:
        scale = 2 if scale is None else scale
        several = (
            [scale] * n
            if checks.is_number(scale)
            else checks.items("upsample: scale", scale, "a number, or one per axis,")
        )
        if len(several) != n:
            raise CalcError(f"upsample: scale {checks.shown(scale)} is not one number for each of {n} spatial axes")
        given["scales"] = tuple(checks.number("upsample: scale", v, 0, 2**20, ends="(]") for v in several)
    return apply("upsample", x, **given, mode=mode, align_corners=checks.flag("upsample: align_corners", align_corners))


# ---------------------------------------------------------------- augmentation
def random_crop(
    x: Variable, size: Sizes | None = None, padding: Sizes = 0, mode: str = "constant", training: bool | None = None
) -> Variable:
    """A random crop of each image of x (N, C, *sizes) after padding; without training the center crop.

    The position is a function of the model's seed, the step and the image's number in the batch.  x gets no gradient.

    size : of the crop, one for all axes or one each; None: that of the image, which is then shifted by up to ``padding``.
    padding : elements before and after every axis, or one number per axis.
    mode : as in `pad`; "constant" pads with zeros.
    training : default: whether the path trains.

    Raises
    ------
    ShapeError : the crop is larger than the padded image, or the image is too small to be mirrored that far.
    CalcError : a setting is invalid.
    """
    n, train = _spatial("random_crop", x), _trains("random_crop", x, training)
    whole = x.shape[2:] if size is None else sizes("random_crop: size", size, n, 1)
    pads = sizes("random_crop: padding", padding, n, 0)
    checks.choice("random_crop: mode", mode, BEYOND)
    if size is None and not train:
        return x
    given = {"sizes": tuple(s if isinstance(s, int) else s.b for s in whole), "padding": pads, "flips": (0.0,) * n}
    return _augmented(x, train, **given, mode=mode)


def random_flip(x: Variable, p: float = 0.5, axis: int = -1, training: bool | None = None) -> Variable:
    """Each image of x (N, C, *sizes) mirrored along a spatial axis with probability p; without training x itself.

    The choice, and training, are as in `random_crop`.
    """
    n, train = _spatial("random_flip", x), _trains("random_flip", x, training)
    p = checks.number("random_flip: p", p, 0, 1)
    axis = checks.integer("random_flip: axis", axis, -n, x.rank - 1) % x.rank
    if axis < 2:
        raise CalcError(f"random_flip: axis {axis} of {x} is not a spatial axis")
    if not train or not p:
        return x
    flips = tuple(p if k == axis - 2 else 0.0 for k in range(n))
    return _augmented(x, train, sizes=tuple(s.b for s in x.shape[2:]), padding=(0,) * n, flips=flips)


def _trains(name: str, x: Variable, training: bool | None) -> bool:
    return x.graph.active.backward if training is None else checks.flag(f"{name}: training", training)


def _augmented(x: Variable, train: bool, **given: Any) -> Variable:
    if not train:
        return apply("crop", x, None, **given)
    with x.graph.drawing() as (rng, stream):
        return apply("crop", x, rng, **given, stream=stream)
