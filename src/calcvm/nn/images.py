"""Layers for signals, images and volumes: (N, channels, *sizes)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from calcvm import checks, images
from calcvm import functions as F
from calcvm.errors import CalcError, ShapeError
from calcvm.graph import Variable
from calcvm.nn.layers import LARGEST_SIZE, Applied, Weighted, one_step


def _wanted(x: Variable, axes: int) -> str:
    """The expected shape of images, for errors."""
    return f"(N, channels, {axes} sizes)" + (": with one channel it is (N, 1, ...)" if x.rank == axes + 1 else "")


@dataclass(repr=False, eq=False)
class _Windowed(Weighted):
    """Base of layers whose weight has a window."""

    axes: ClassVar[int]
    function: ClassVar[Callable[..., Variable]]
    channels: int
    kernel: Any
    _: KW_ONLY
    stride: Any = 1
    padding: Any = 0
    init: Any = None
    bias_init: Any = None
    regularizer: Any = None
    trainable: bool = True

    def __post_init__(self: Any) -> None:  # dilation and groups are fields of the subclasses
        name, n = type(self).__name__, self.axes
        self.channels = checks.integer(f"{name}: channels", self.channels, 1, LARGEST_SIZE)
        self.kernel = images.sizes(f"{name}: kernel", self.kernel, n, 1)
        self.groups = checks.integer(f"{name}: groups", self.groups, 1, LARGEST_SIZE)
        self.bias = checks.flag(f"{name}: bias", self.bias)
        if self.channels % self.groups:
            raise CalcError(f"{name}: {self.channels} channels are not divisible by groups={self.groups}")
        images.sizes(f"{name}: stride", self.stride, n, 1)
        images.sizes(f"{name}: dilation", self.dilation, n, 1)
        self._check_starts()

    def _channels(self: Any, x: Variable, scope: str) -> int:
        """The channels of an input, checked."""
        self._given(x)
        if x.rank != self.axes + 2 or not x.shape[1].constant:
            raise ShapeError(f"{scope}: the input {x} is not {_wanted(x, self.axes)}")
        channels: int = x.shape[1].b
        if channels % self.groups:
            raise ShapeError(f"{scope}: {channels} channels of the input {x} are not divisible by groups={self.groups}")
        return channels


@dataclass(repr=False, eq=False, kw_only=True)
class _Conv(_Windowed):
    """``y = conv(x, weight) + bias``: x (N, C, *sizes), weight (channels, C / groups, *kernel), bias (channels,).

    kernel, stride, dilation : a number, or one per axis.  padding : as in `calcvm.conv2d`.  Other settings as in `Linear`.
    """

    dilation: Any = 1
    groups: int = 1
    bias: bool = True

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        weight = (self.channels, self._channels(x, scope) // self.groups, *self.kernel)
        given = self._parameters(x, weight, self.channels)
        return type(self).function(x, *given, self.stride, self.padding, self.dilation, self.groups)


class Conv1d(_Conv):
    __doc__ = _Conv.__doc__
    axes = 1
    function = staticmethod(images.conv1d)


@dataclass(repr=False, eq=False)
class CausalConv1d(Weighted):
    """``y[n,t] = sum_k weight[:,:,k] @ x[n, t - (kernel - 1 - k) * dilation] + bias``: no step of sequences sees later ones.

    x (N, T, C), weight (channels, C, kernel) as of `Conv1d`, y (N, T, channels); before the first step are zeros.

    x (N, C) is the next step of each sample: the layer carries the last ``(kernel - 1) * dilation`` steps, as `Model.stream` needs.

    Examples
    --------
    >>> net = nn.CausalConv1d(8, 3) >> nn.ReLU() >> nn.CausalConv1d(1, 3, dilation=2)
    >>> g = cv.build_graph(net, (20, 4), "mse", cv.Adam(1e-2))
    >>> with g.path("stream") as stream:
    ...     stream.output = net.build(g.placeholder("step", (None, 4)), "", training=False)
    >>> model = cv.Model(g, batch_size=10)
    >>> X, s = np.ones((1, 20, 4)), model.stream()
    >>> np.allclose(model.predict(X)[0], [s(x) for x in X[0]], atol=1e-6)
    True
    """

    channels: int
    kernel: int
    dilation: int = 1
    _: KW_ONLY
    bias: bool = True
    init: Any = None
    bias_init: Any = None
    regularizer: Any = None
    trainable: bool = True

    def __post_init__(self) -> None:
        for name in ("channels", "kernel", "dilation"):
            setattr(self, name, checks.integer(f"CausalConv1d: {name}", getattr(self, name), 1, LARGEST_SIZE))
        self.bias = checks.flag("CausalConv1d: bias", self.bias)
        self._check_starts()

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        step = one_step(x, scope)
        given = self._parameters(x, (self.channels, x.shape[-1].b, self.kernel), self.channels)
        before, steps = (self.kernel - 1) * self.dilation, x
        if step:
            steps = F.expand_dims(x, 1)
            if before:
                past = self.carry(x, "past", (before, *x.shape[1:]))
                steps = F.concat([past, steps], axis=1)
                F.carry(past, steps[:, 1:])
        padding = ((0 if step else before, 0),)
        y = F.channels_last(images.conv1d(F.channels_first(steps), *given, padding=padding, dilation=self.dilation))
        return F.reshape(y, (None, self.channels)) if step else y


class Conv2d(_Conv):
    __doc__ = _Conv.__doc__
    axes = 2
    function = staticmethod(images.conv2d)


class Conv3d(_Conv):
    __doc__ = _Conv.__doc__
    axes = 3
    function = staticmethod(images.conv3d)


@dataclass(repr=False, eq=False, kw_only=True)
class ConvTranspose2d(_Windowed):
    """``y = conv_transpose(x, weight) + bias``: x (N, C, *sizes), weight (C, channels / groups, *kernel), bias (channels,).

    kernel, stride, output_padding, dilation : a number, or one per axis.  padding : as in `calcvm.conv2d`.
    """

    axes = 2
    function = staticmethod(images.conv_transpose2d)
    output_padding: Any = 0
    groups: int = 1
    bias: bool = True
    dilation: Any = 1

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        weight = (self._channels(x, scope), self.channels // self.groups, *self.kernel)
        given = self._parameters(x, weight, self.channels)
        settings = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
        return type(self).function(x, *given, *settings)


class ConvTranspose1d(ConvTranspose2d):
    """As `ConvTranspose2d`, for (N, C, L)."""

    axes = 1
    function = staticmethod(images.conv_transpose1d)


class ConvTranspose3d(ConvTranspose2d):
    """As `ConvTranspose2d`, for (N, C, D, H, W)."""

    axes = 3
    function = staticmethod(images.conv_transpose3d)


# ---------------------------------------------------------------- pooling, sizes
class _Window(Applied):
    """Base of pooling by windows over a fixed number of axes."""

    axes: ClassVar[int]

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        if x.rank != self.axes + 2:
            raise ShapeError(f"{scope}: the input {x} is not {_wanted(x, self.axes)}")
        return super().build(x, scope, training)


@dataclass(repr=False, eq=False)
class MaxPool2d(_Window, function=images.max_pool):
    """The largest element of each window: `calcvm.max_pool`."""

    axes = 2
    kernel: Any
    stride: Any = None
    padding: Any = 0
    dilation: Any = 1
    ceil_mode: bool = False


class MaxPool1d(MaxPool2d):
    """As `MaxPool2d`, for (N, C, L)."""

    axes = 1


class MaxPool3d(MaxPool2d):
    """As `MaxPool2d`, for (N, C, D, H, W)."""

    axes = 3


@dataclass(repr=False, eq=False)
class AvgPool2d(_Window, function=images.avg_pool):
    """The mean of each window: `calcvm.avg_pool`."""

    axes = 2
    kernel: Any
    stride: Any = None
    padding: Any = 0
    ceil_mode: bool = False
    count_include_pad: bool = True


class AvgPool1d(AvgPool2d):
    """As `AvgPool2d`, for (N, C, L)."""

    axes = 1


class AvgPool3d(AvgPool2d):
    """As `AvgPool2d`, for (N, C, D, H, W)."""

    axes = 3


@dataclass(repr=False, eq=False)
class LPPool2d(_Window, function=images.lp_pool):
    """The p-norm of each window: `calcvm.lp_pool`."""

    axes = 2
    p: float
    kernel: Any
    stride: Any = None
    ceil_mode: bool = False


@dataclass(repr=False, eq=False)
class AdaptiveAvgPool(Applied, function=images.adaptive_avg_pool):
    """The mean of each of a given number of windows that cover the image: `calcvm.adaptive_avg_pool`."""

    size: Any


@dataclass(repr=False, eq=False)
class AdaptiveMaxPool(Applied, function=images.adaptive_max_pool):
    """The largest element of each of a given number of windows that cover the image: `calcvm.adaptive_max_pool`."""

    size: Any


class GlobalAvgPool(Applied, function=images.global_avg_pool):
    """The mean of each channel: (N, C, 1, ...)."""


class GlobalMaxPool(Applied, function=images.global_max_pool):
    """The largest element of each channel: (N, C, 1, ...)."""


@dataclass(repr=False, eq=False)
class Upsample(Applied, function=images.upsample):
    """The image with its axes scaled or resized: `calcvm.upsample`."""

    scale: Any = None
    _: KW_ONLY
    size: Any = None
    mode: str = "nearest"
    align_corners: bool = False


@dataclass(repr=False, eq=False)
class Pad(Applied, function=images.pad):
    """The image with elements added around it: `calcvm.pad`."""

    padding: Any
    mode: str = "constant"
    value: float = 0.0
