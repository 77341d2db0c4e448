"""MobileNetV2: Sandler et al. 2018."""

from __future__ import annotations

from calcvm.init import TruncatedNormal
from calcvm.nn import BatchNorm, Conv2d, Dropout, Flatten, GlobalAvgPool, Linear, ReLU6, Residual, Sequential
from calcvm.zoo._scale import scaled

# expansion, channels, blocks, stride of the first
BLOCKS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
START = TruncatedNormal(0.0, 0.09)  # as the authors


def mobilenet_v2(classes: int = 1000, width: int = 32, size: int = 224) -> Sequential:
    """Inverted residuals with linear bottlenecks.  Images below 64 pixels keep their size in the first layer."""
    of = scaled("mobilenet_v2", classes, width, 32, size, 16)
    before = of(32)
    net = _conv(before, 3, 1 if size < 64 else 2) >> ReLU6()
    for expansion, channels, depth, stride in BLOCKS:
        for k in range(depth):
            step = stride if k == 0 else 1
            inner = expansion * before
            branch = Sequential(*(_conv(inner, 1) >> ReLU6() if expansion > 1 else ()))
            branch = branch >> _conv(inner, 3, step, groups=inner) >> ReLU6() >> _conv(of(channels), 1)
            net = net >> (Residual(branch) if step == 1 and before == of(channels) else branch)
            before = of(channels)
    net = net >> _conv(of(1280), 1) >> ReLU6()
    return net >> GlobalAvgPool() >> Flatten() >> Dropout(0.2) >> Linear(classes, init=START)


def _conv(channels: int, kernel: int, stride: int = 1, groups: int = 1) -> Sequential:
    return (
        Conv2d(channels, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False, init=START)
        >> BatchNorm()
    )
