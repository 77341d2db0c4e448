"""Normalization layers.  Scale and shift are learned, unless ``affine=False``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from calcvm import checks, images
from calcvm import functions as F
from calcvm.errors import ShapeError
from calcvm.graph import Variable
from calcvm.nn.layers import Layer


@dataclass(repr=False, eq=False, kw_only=True)
class _Norm(Layer):
    eps: float = 1e-5
    affine: bool = True

    def __post_init__(self) -> None:
        name = type(self).__name__
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(f.default, bool):
                setattr(self, f.name, checks.flag(f"{name}: {f.name}", value))
            elif isinstance(f.default, float):
                ends = "[)" if f.name == "eps" else "[]"
                setattr(self, f.name, checks.number(f"{name}: {f.name}", value, 0, 1, ends=ends))
            else:
                setattr(self, f.name, checks.integer(f"{name}: {f.name}", value, 1, 2**31))

    def _channels(self, x: Variable, scope: str) -> int:
        self._given(x)
        if x.rank < 2 or not x.shape[1].constant:
            raise ShapeError(f"{scope}: the input {x} is not (N, channels, ...)")
        if x.lengths is not None:
            raise ShapeError(
                f"{scope}: the input {x} is sequences (N, steps, features) with lengths, which have no channels: take nn.LayerNorm(), "
                "which normalizes each step"
            )
        return x.shape[1].b

    def _scale(self, x: Variable, shape: tuple[int, ...]) -> Variable | None:
        return self.parameter(x, "scale", shape, "ones") if self.affine else None

    def _affine(self, x: Variable, shape: tuple[int, ...]) -> tuple[Variable | None, Variable | None]:
        return self._scale(x, shape), self.parameter(x, "shift", shape, "zeros") if self.affine else None


@dataclass(repr=False, eq=False, kw_only=True)
class BatchNorm(_Norm):
    """Channels normalized over the batch in training, by running statistics otherwise: `calcvm.batch_norm`.

    A batch to train on has two values per channel or more; a last batch with one sample of one place is refused.
    ``momentum`` is the share of the new batch in the running statistics, as in PyTorch.  Keras's 0.99 is 0.01 here.
    """

    momentum: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum > 0.5:
            self._warn_once(
                f"BatchNorm: momentum is the new value's share: for Keras's {self.momentum:g} write {1 - self.momentum:g}"
            )

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        n = self._channels(x, scope)
        mean, var = self.buffer(x, "running_mean", (n,)), self.buffer(x, "running_var", (n,), "ones")
        return images.batch_norm(x, mean, var, *self._affine(x, (n,)), self.momentum, self.eps, training)


@dataclass(repr=False, eq=False)
class InstanceNorm(_Norm):
    """Each channel of each sample normalized: `calcvm.instance_norm`."""

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        return images.instance_norm(x, *self._affine(x, (self._channels(x, scope),)), self.eps)


@dataclass(repr=False, eq=False)
class GroupNorm(_Norm):
    """Groups of channels of each sample normalized: `calcvm.group_norm`."""

    groups: int

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        return images.group_norm(x, self.groups, *self._affine(x, (self._channels(x, scope),)), self.eps)


@dataclass(repr=False, eq=False, kw_only=True)
class _OfLast(_Norm):
    normalized_axes: int = 1

    def _last(self, x: Variable, scope: str) -> tuple[int, ...]:
        self._given(x)
        last = x.shape[x.rank - self.normalized_axes :] if self.normalized_axes < x.rank else ()
        if not last or not all(n.constant for n in last):
            raise ShapeError(
                f"{scope}: the input {x} must have the batch first and {self.normalized_axes} fixed sizes last"
            )
        return tuple(n.b for n in last)


@dataclass(repr=False, eq=False, kw_only=True)
class LayerNorm(_OfLast):
    """Each sample's last ``normalized_axes`` axes normalized: `calcvm.layer_norm`.  ``bias`` : whether there is a shift."""

    bias: bool = True

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        shape = self._last(x, scope)
        scale, shift = self._affine(x, shape) if self.bias else (self._scale(x, shape), None)
        return F.layer_norm(x, scale, shift, self.normalized_axes, self.eps)


@dataclass(repr=False, eq=False)
class RMSNorm(_OfLast):
    """Each sample's last ``normalized_axes`` axes divided by their root mean square: `calcvm.rms_norm`."""

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        return F.rms_norm(x, self._scale(x, self._last(x, scope)), self.normalized_axes, self.eps)


@dataclass(repr=False, eq=False)
class LocalResponseNorm(Layer):
    """Each channel divided by a power of its neighbours' mean square: `calcvm.local_response_norm`."""

    stateless: ClassVar[bool] = True
    size: int
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 1.0

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        return images.local_response_norm(x, self.size, self.alpha, self.beta, self.k)
