"""Convolutions and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calcvm import images
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.building import Building, arranged, given, whole
from calcvm.frontends.keras.activations import activated
from calcvm.frontends.keras.declared import KERAS, image, keras, of_image, spatial
from calcvm.frontends.onnx.layers import Windows
from calcvm.frontends.onnx.layers import windows as windows_of
from calcvm.graph import Variable, apply

AUTO = {"valid": "VALID", "same": "SAME_UPPER"}


def _each(n: int, value: Any) -> list[int]:
    """A number for each axis."""
    return [value] * n if isinstance(value, int) else [int(v) for v in value]


def _windows(x: Variable, kernel: Any, strides: Any, padding: str, dilations: Any = 1) -> Windows:
    """The windows over images."""
    n = x.rank - 2
    kernel, strides, dilations = (_each(n, v) for v in (kernel, strides, dilations))
    of = windows_of(x, kernel, strides, dilations=dilations, auto_pad=AUTO.get(padding, "VALID"))
    return of if padding != "causal" else of._replace(pads=[(span - 1, 0) for span in of.spans])


def _weight(kernel: Arranged) -> Variable:
    """A kernel (*window, C, F) as (F, C, *window): it is stored as rows read it."""
    return apply("window_last", kernel.variable())


def _convolved(
    b: Building, x: Any, kernel: Arranged, bias: Any, *, padding: str = "valid", strides: Any = 1, dilation_rate: Any = 1, groups: int = 1,
    data_format: str | None = None, activation: Any = None, **_: Any,
) -> Arranged:  # fmt: skip
    v = image(arranged(b, x), data_format)
    of = _windows(v, [whole(k) for k in kernel.shape[:-2]], strides, padding, dilation_rate)
    f = getattr(images, f"conv{v.rank - 2}d")
    y = f(v, _weight(kernel), given(b, bias), of.strides, of.pads, of.dilations, groups)
    return activated(b, of_image(y, data_format), activation)


@keras("Conv1D", "Conv2D", "Conv3D")
def conv(b: Building, x: Any, *, kernel: Arranged, bias: Any = None, **how: Any) -> Arranged:
    return _convolved(b, x, kernel, bias, **how)


@keras("DepthwiseConv1D", "DepthwiseConv2D")
def depthwise(b: Building, x: Any, *, kernel: Arranged, bias: Any = None, **how: Any) -> Arranged:
    *window, channels, multiplier = kernel.shape
    apart = kernel.reshaped([*window, 1, channels * multiplier])
    return _convolved(b, x, apart, bias, **{**how, "groups": whole(channels)})


@keras("SeparableConv1D", "SeparableConv2D")
def separable(
    b: Building, x: Any, *, depthwise_kernel: Arranged, pointwise_kernel: Arranged, bias: Any = None, activation: Any = None, **how: Any
) -> Arranged:  # fmt: skip
    y = depthwise(b, x, kernel=depthwise_kernel, **how)
    return _convolved(b, y, pointwise_kernel, bias, data_format=how.get("data_format"), activation=activation)


@keras("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose")
def conv_transpose(
    b: Building, x: Any, *, kernel: Arranged, bias: Any = None, strides: Any = 1, padding: str = "valid", output_padding: Any = None,
    dilation_rate: Any = 1, data_format: str | None = None, activation: Any = None, **_: Any,
) -> Arranged:  # fmt: skip
    v = image(arranged(b, x), data_format)
    n = v.rank - 2
    strides, dilations = _each(n, strides), _each(n, dilation_rate)
    spans = [(whole(k) - 1) * d + 1 for k, d in zip(kernel.shape, dilations)]
    more = [None] * n if output_padding is None else _each(n, output_padding)
    crops = [_crops(span, s, padding, extra) for span, s, extra in zip(spans, strides, more)]
    behind = [max(-after, 0) for _, after in crops]
    f = getattr(images, f"conv_transpose{n}d")
    own = all(extra < max(s, d) for extra, s, d in zip(behind, strides, dilations))
    y = f(
        v, _weight(kernel), given(b, bias) if own else None, strides, [(c, max(after, 0)) for c, after in crops], behind if own else 0, 1,
        dilations,
    )  # fmt: skip
    if not own:  # zeros behind what windows reach, and the bias there, too
        y = images.pad(y, [(0, extra) for extra in behind])
        y = y if bias is None else y + bias.reshaped([-1, *(1,) * n]).variable()
    return activated(b, of_image(y, data_format), activation)


def _crops(span: int, stride: int, padding: str, extra: int | None) -> tuple[int, int]:
    """What is cut off before and behind the whole result, less than zero what is added."""
    if padding == "valid":
        return 0, -(max(stride - span, 0) if extra is None else extra)
    total = stride + span - 2 if extra is None else span + span % 2 - 2 + extra
    before = min(total // 2 + total % 2, span - 1)
    return span - 1 - before, span - 1 - (total - before)


def _pooling(name: str, n: int) -> None:
    """Declare the pooling layers over n axes: Max or Average."""
    f, of_all = (
        (images.max_pool, images.global_max_pool) if name == "Max" else (images.avg_pool, images.global_avg_pool)
    )
    more: dict[str, Any] = {} if name == "Max" else {"count_include_pad": False}

    def pool(
        b: Building, x: Any, *, pool_size: Any, strides: Any = None, padding: str = "valid", data_format: str | None = None, **_: Any
    ) -> Arranged:  # fmt: skip
        v = image(arranged(b, x), data_format)
        of = _windows(v, pool_size, pool_size if strides is None else strides, padding)
        return of_image(f(v, of.kernel, of.strides, of.pads, **more), data_format)

    def of_everything(
        b: Building, x: Any, *, keepdims: bool = False, data_format: str | None = None, **_: Any
    ) -> Arranged:
        v = of_all(image(arranged(b, x), data_format))
        return of_image(v, data_format) if keepdims else Arranged.of(v).without(range(2, v.rank))

    KERAS[f"{name}Pooling{n}D"], KERAS[f"Global{name}Pooling{n}D"] = pool, of_everything


def _adaptive(name: str, n: int) -> None:
    f = images.adaptive_max_pool if name == "Max" else images.adaptive_avg_pool

    def pool(b: Building, x: Any, *, output_size: Any, data_format: str | None = None, **_: Any) -> Arranged:
        return of_image(f(image(arranged(b, x), data_format), tuple(_each(n, output_size))), data_format)

    KERAS[f"Adaptive{name}Pooling{n}D"] = pool


for _n in (1, 2, 3):
    for _name in ("Max", "Average"):
        _pooling(_name, _n)
        _adaptive(_name, _n)


# ---------------------------------------------------------------- other sizes
@keras("UpSampling1D", "UpSampling2D", "UpSampling3D")
def upsampling(
    b: Building, x: Any, *, size: Any, data_format: str | None = None, interpolation: str = "nearest", **_: Any
) -> Arranged:
    from calcvm.frontends.building import Cannot

    modes = {"nearest": "nearest", "bilinear": "linear"}
    if interpolation not in modes:
        raise Cannot(f"its interpolation is {interpolation}: nearest and bilinear have a counterpart")
    v = image(arranged(b, x), data_format)
    scale = tuple(float(s) for s in _each(v.rank - 2, size))
    return of_image(images.upsample(v, scale=scale, mode=modes[interpolation]), data_format)


def _pairs(n: int, value: Any) -> Sequence[tuple[int, int]]:
    """A pair (before, after) for each axis."""
    if isinstance(value, int):
        return [(value, value)] * n
    if n == 1 and all(isinstance(v, int) for v in value):
        return [(value[0], value[1])]
    return [(v, v) if isinstance(v, int) else (v[0], v[1]) for v in value]


@keras("ZeroPadding1D", "ZeroPadding2D", "ZeroPadding3D")
def zero_padding(b: Building, x: Any, *, padding: Any, data_format: str | None = None, **_: Any) -> Arranged:
    v = image(arranged(b, x), data_format)
    return of_image(images.pad(v, tuple(_pairs(v.rank - 2, padding))), data_format)


@keras("Cropping1D", "Cropping2D", "Cropping3D")
def cropping(b: Building, x: Any, *, cropping: Any, data_format: str | None = None, **_: Any) -> Arranged:
    y = arranged(b, x)
    for axis, (before, after) in zip(spatial(y, data_format), _pairs(y.rank - 2, cropping)):
        y = y.part(axis, before, whole(y.shape[axis]) - after)
    return y
