"""Layers for signals, images and volumes: (N, channels, *sizes)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from calcvm import checks, images
from calcvm.errors import CalcError, ShapeError
from calcvm.graph import Variable
from calcvm.nn.layers import LARGEST_SIZE, Weighted


@dataclass(repr=True)
class _Conv(Weighted):
    """``y = conv(x, weight) + bias``: x (N, C, *sizes), weight (channels, C / groups, *kernel), bias (channels,).

    kernel, stride, dilation : a number, or one an axis.  padding : as of `calcvm.conv2d`.  Other settings as of `Linear`.
    """

    axes: ClassVar[int]
    function: ClassVar[Callable[..., Variable]]
    channels: int
    kernel: Any
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1
    bias: bool = True
    init: Any = field(default=None, kw_only=True)
    bias_init: Any = field(default=None, kw_only=True)
    regularizer: Any = field(default=None, kw_only=True)
    trainable: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        name = type(self).__name__
        self.channels = checks.integer(f"{name}: channels", self.channels, 1, LARGEST_SIZE)
        self.kernel = images.sizes(f"{name}: kernel", self.kernel, self.axes, 1)
        self.groups = checks.integer(f"{name}: groups", self.groups, 1, LARGEST_SIZE)
        self.bias = checks.flag(f"{name}: bias", self.bias)
        if self.channels % self.groups:
            raise CalcError(f"{name}: {self.channels} channels are not divisible by groups={self.groups}")
        self._check_starts()

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        if x.rank != self.axes + 2 or not x.shape[1].constant:
            raise ShapeError(f"{scope}: the input {x} is not (N, channels, {self.axes} sizes)")
        channels = x.shape[1].b
        if channels % self.groups:
            raise ShapeError(f"{scope}: {channels} channels of the input {x} are not divisible by groups={self.groups}")
        weight = (self.channels, channels // self.groups, *self.kernel)
        given = self._parameters(x, scope, weight, self.channels)
        return type(self).function(x, *given, self.stride, self.padding, self.dilation, self.groups)


class Conv1d(_Conv):
    __doc__ = _Conv.__doc__
    axes = 1
    function = staticmethod(images.conv1d)


class Conv2d(_Conv):
    __doc__ = _Conv.__doc__
    axes = 2
    function = staticmethod(images.conv2d)


class Conv3d(_Conv):
    __doc__ = _Conv.__doc__
    axes = 3
    function = staticmethod(images.conv3d)
