"""A UNet for segmentation: Ronneberger, Fischer and Brox 2015, with instance normalization as in Isensee et al. 2018."""

from __future__ import annotations

from collections.abc import Callable

from calcvm.errors import CalcError
from calcvm.init import HeNormal
from calcvm.nn import Concat, Conv2d, ConvTranspose2d, InstanceNorm, LeakyReLU, MaxPool2d, Sequential
from calcvm.zoo._scale import scaled

LEVELS = 5


def unet(classes: int = 2, width: int = 64, size: int = 256) -> Sequential:
    """Five levels of two convolutions: (N, classes, size, size) from images whose sides are multiples of 16 and at least 32."""
    of = scaled("unet", classes, width, 64, size, 32)
    if size % 16:
        raise CalcError(f"zoo.unet: size must be a multiple of 16, because four levels halve it, not {size}")
    return _level(0, of) >> Conv2d(classes, 1)


def _level(i: int, of: Callable[[int], int]) -> Sequential:
    """One level of the network: its own block, joined with the result of the levels below at half its size."""
    channels = of(64 << i)
    if i == LEVELS - 1:
        return _block(channels)
    below = MaxPool2d(2) >> _level(i + 1, of) >> ConvTranspose2d(channels, 2, stride=2)
    return _block(channels) >> Concat(Sequential(), below) >> _block(channels)


def _block(channels: int) -> Sequential:
    twice = [(Conv2d(channels, 3, padding=1, init=HeNormal()), InstanceNorm(), LeakyReLU(0.01)) for _ in range(2)]
    return Sequential(*twice[0], *twice[1])
