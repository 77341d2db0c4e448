"""Layers that prepare images, and layers that vary them randomly during training: data augmentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from calcvm import checks, images
from calcvm.errors import CalcError, ShapeError
from calcvm.graph import Variable, as_numbers
from calcvm.nn.layers import Layer
from calcvm.ops.resizing import BEYOND


class _Augmented(Layer):
    """Base of layers that draw random numbers during training."""

    stateless: ClassVar[bool] = True
    random = True

    def _check(self, least: int, mode: str, **sizes: Any) -> None:
        """Check the mode, and sizes: each a number, or one per axis."""
        for field, value in sizes.items():
            what = f"{type(self).__name__}: {field}"
            several = [value] if checks.is_integer(value) else checks.items(what, value, "a number, or one per axis,")
            for v in several:
                checks.integer(what, v, least, 2**31)
        checks.choice(f"{type(self).__name__}: mode", mode, BEYOND)


@dataclass(repr=False, eq=False)
class RandomCrop(_Augmented):
    """A random crop of each padded image; without training the center crop: `calcvm.random_crop`."""

    size: Any
    padding: Any = 0
    mode: str = "constant"

    def __post_init__(self) -> None:
        self._check(1, self.mode, size=self.size)
        self._check(0, self.mode, padding=self.padding)

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        return images.random_crop(x, self.size, self.padding, self.mode, training)


@dataclass(repr=False, eq=False)
class RandomShift(_Augmented):
    """Each image shifted along its spatial axes by up to ``most`` elements, one for all or one each; without training as it is.

    mode : how vacated elements are filled, as in `calcvm.pad`: "constant" (zeros), "edge", "reflect" or "wrap".
    """

    most: Any
    mode: str = "constant"

    def __post_init__(self) -> None:
        self._check(0, self.mode, most=self.most)

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        return images.random_crop(x, None, self.most, self.mode, training)


@dataclass(repr=False, eq=False)
class RandomHorizontalFlip(_Augmented):
    """Each image mirrored left to right, along its last axis, with probability p; without training as it is."""

    axis: ClassVar[int] = -1
    p: float = 0.5

    def __post_init__(self) -> None:
        self.p = checks.number(f"{type(self).__name__}: p", self.p, 0, 1)

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        if x.rank < 2 - self.axis:
            raise ShapeError(f"{scope}: the input {x} is not (N, channels, {-self.axis} sizes)")
        return images.random_flip(x, self.p, self.axis, training)


class RandomVerticalFlip(RandomHorizontalFlip):
    """Each image mirrored top to bottom, along its second-last axis, with probability p; without training as it is."""

    axis = -2


@dataclass(repr=False, eq=False)
class Normalize(Layer):
    """``(x - mean) / std`` for each channel of (N, C, *sizes); mean and std are one number for all, or one per channel.

    Raises
    ------
    CalcError : a number is not finite, or a deviation is not above 0.
    """

    stateless: ClassVar[bool] = True
    mean: Any
    std: Any

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            v = as_numbers(f"Normalize: {name}", getattr(self, name)).astype(np.float64)
            if v.ndim > 1 or not v.size or not np.isfinite(v).all() or (name == "std" and not (v > 0).all()):
                wanted = "numbers above 0" if name == "std" else "finite numbers"
                raise CalcError(
                    f"Normalize: {name} {checks.shown(getattr(self, name))}: give {wanted}, one for all or one per channel"
                )
            setattr(self, name, v.tolist())

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        if x.rank < 3:
            raise ShapeError(
                f"{scope}: the input {x} is not (N, channels, *sizes): nn.Standardize() takes data of any rank, and learns the "
                "numbers by model.adapt(X)"
            )
        mean, scale = np.asarray(self.mean), 1 / np.asarray(self.std)
        for name, v in (("mean", mean), ("std", scale)):
            if v.size not in (1, x.shape[1].b):
                raise ShapeError(f"{scope}: {v.size} numbers of {name} for the channels of the input {x}")
        one_a_channel = (-1, *(1,) * (x.rank - 2))
        return (x - mean.reshape(one_a_channel)) * scale.reshape(one_a_channel)
