"""GoogLeNet: Szegedy et al. 2015, without its auxiliary classifiers."""

from __future__ import annotations

from calcvm.init import XavierUniform
from calcvm.nn import (
    Concat,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool,
    Linear,
    LocalResponseNorm,
    MaxPool2d,
    ReLU,
    Sequential,
)
from calcvm.zoo._scale import scaled

# channels of 1x1, before 3x3, 3x3, before 5x5, 5x5, after the pooling; None: a pooling layer
INCEPTIONS = (
    (64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), None,
    (192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64), (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128), None,
    (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128),
)  # fmt: skip


def googlenet(classes: int = 1000, width: int = 64, size: int = 224) -> Sequential:
    """Nine inception modules: convolutions of 1, 3 and 5 side by side."""
    of = scaled("googlenet", classes, width, 64, size, 31)

    def conv(channels: int, kernel: int, stride: int = 1) -> Sequential:
        return Conv2d(of(channels), kernel, stride=stride, padding=kernel // 2, init=XavierUniform()) >> ReLU()

    def inception(one: int, before_3: int, three: int, before_5: int, five: int, pooled: int) -> Concat:
        return Concat(
            conv(one, 1),
            conv(before_3, 1) >> conv(three, 3),
            conv(before_5, 1) >> conv(five, 5),
            MaxPool2d(3, 1, 1) >> conv(pooled, 1),
        )

    net = conv(64, 7, 2) >> _smaller() >> LocalResponseNorm(5)
    net = net >> conv(64, 1) >> conv(192, 3) >> LocalResponseNorm(5) >> _smaller()
    for channels in INCEPTIONS:
        net = net >> (inception(*channels) if channels else _smaller())
    return net >> GlobalAvgPool() >> Flatten() >> Dropout(0.4) >> Linear(classes)


def _smaller() -> MaxPool2d:
    return MaxPool2d(3, 2, ceil_mode=True)
