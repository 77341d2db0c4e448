"""Residual networks: He et al. 2016, initialized as in He et al. 2015."""

from __future__ import annotations

from collections.abc import Callable

from calcvm.init import HeNormal
from calcvm.nn import BatchNorm, Conv2d, Flatten, GlobalAvgPool, Linear, MaxPool2d, ReLU, Residual, Sequential
from calcvm.zoo._scale import scaled

SMALL = 64  # smaller images keep their size in the first layers, as in He et al. for CIFAR


def resnet18(classes: int = 1000, width: int = 64, size: int = 224) -> Sequential:
    """Eight blocks of two convolutions of 3 by 3."""
    return _resnet("resnet18", (2, 2, 2, 2), _basic, 1, classes, width, size)


def resnet34(classes: int = 1000, width: int = 64, size: int = 224) -> Sequential:
    """Sixteen blocks of two convolutions of 3 by 3."""
    return _resnet("resnet34", (3, 4, 6, 3), _basic, 1, classes, width, size)


def resnet50(classes: int = 1000, width: int = 64, size: int = 224) -> Sequential:
    """Sixteen blocks of 1 by 1, 3 by 3 and 1 by 1.  The 3 by 3 has the stride, as in current implementations."""
    return _resnet("resnet50", (3, 4, 6, 3), _bottleneck, 4, classes, width, size)


def _resnet(
    name: str, depths: tuple[int, ...], branch: Callable, growth: int, classes: int, width: int, size: int
) -> Sequential:
    of = scaled(name, classes, width, 64, size, 8)
    net = _conv(of(64), 3) >> ReLU() if size < SMALL else _conv(of(64), 7, 2) >> ReLU() >> MaxPool2d(3, 2, 1)
    before = of(64)
    for i, depth in enumerate(depths):
        channels = of(64 << i)
        for k in range(depth):
            stride = 2 if i > 0 and k == 0 else 1
            same = stride == 1 and before == growth * channels
            shortcut = None if same else _conv(growth * channels, 1, stride)
            net = net >> Residual(branch(channels, stride), shortcut) >> ReLU()
            before = growth * channels
    return net >> GlobalAvgPool() >> Flatten() >> Linear(classes)


def _conv(channels: int, kernel: int, stride: int = 1) -> Sequential:
    return Conv2d(channels, kernel, stride=stride, padding=kernel // 2, bias=False, init=HeNormal()) >> BatchNorm()


def _basic(channels: int, stride: int) -> Sequential:
    return _conv(channels, 3, stride) >> ReLU() >> _conv(channels, 3)


def _bottleneck(channels: int, stride: int) -> Sequential:
    return _conv(channels, 1) >> ReLU() >> _conv(channels, 3, stride) >> ReLU() >> _conv(4 * channels, 1)
