"""Normalization layers.  Scale and shift are learned, unless ``affine=False``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from calcvm import checks, images
from calcvm import functions as F
from calcvm.errors import ShapeError
from calcvm.graph import Variable
from calcvm.init import Ones, Zeros
from calcvm.nn.layers import Layer, shared


@dataclass(repr=False, eq=False)
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
                more = {"ends": "[)", "unless": " (the layer reads sizes off its input)"} if f.name == "eps" else {}
                setattr(self, f.name, checks.number(f"{name}: {f.name}", value, 0, 1, **more))
            else:
                setattr(self, f.name, checks.integer(f"{name}: {f.name}", value, 1, 2**31))

    def _channels(self, x: Variable, scope: str) -> int:
        self._given(x)
        if x.rank < 2 or not x.shape[1].constant:
            raise ShapeError(f"{scope}: the input {x} is not (N, channels, ...)")
        return x.shape[1].b

    def _affine(self, x: Variable, scope: str, shape: tuple[int, ...], *names: str) -> list[Variable | None]:
        """Scale and shift, or None for each."""
        starts: dict[str, Any] = {"scale": Ones(), "shift": Zeros()}
        make = shared(x, True)
        return [make(f"{scope}.{name}", shape, starts[name], None) if self.affine else None for name in names]


@dataclass(repr=False, eq=False)
class BatchNorm(_Norm):
    """Channels normalized over the batch in training, by running statistics otherwise: `calcvm.batch_norm`."""

    momentum: float = 0.1

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        n = self._channels(x, scope)
        running = []
        for name, start in ("running_mean", "zeros"), ("running_var", "ones"):
            known = x.graph.variables.get(f"{scope}.{name}")
            running.append(known or x.graph.buffer(f"{scope}.{name}", (n,), init=start))
        scale, shift = self._affine(x, scope, (n,), "scale", "shift")
        return images.batch_norm(x, running[0], running[1], scale, shift, self.momentum, self.eps, training)


@dataclass(repr=False, eq=False)
class InstanceNorm(_Norm):
    """Each channel of each sample normalized: `calcvm.instance_norm`."""

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        scale, shift = self._affine(x, scope, (self._channels(x, scope),), "scale", "shift")
        return images.instance_norm(x, scale, shift, self.eps)


@dataclass(repr=False, eq=False)
class GroupNorm(_Norm):
    """Groups of channels of each sample normalized: `calcvm.group_norm`."""

    groups: int = 1

    def __init__(self, groups: int, eps: float = 1e-5, affine: bool = True):
        self.groups, self.eps, self.affine = groups, eps, affine
        self.__post_init__()

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        scale, shift = self._affine(x, scope, (self._channels(x, scope),), "scale", "shift")
        return images.group_norm(x, self.groups, scale, shift, self.eps)


@dataclass(repr=False, eq=False)
class LayerNorm(_Norm):
    """Each sample's last ``normalized_axes`` axes normalized: `calcvm.layer_norm`."""

    normalized_axes: int = 1

    def _last(self, x: Variable, scope: str) -> tuple[int, ...]:
        self._given(x)
        last = x.shape[x.rank - self.normalized_axes :] if self.normalized_axes < x.rank else ()
        if not last or not all(n.constant for n in last):
            raise ShapeError(
                f"{scope}: the input {x} must have the batch first and {self.normalized_axes} fixed sizes last"
            )
        return tuple(n.b for n in last)

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        scale, shift = self._affine(x, scope, self._last(x, scope), "scale", "shift")
        return F.layer_norm(x, scale, shift, self.normalized_axes, self.eps)


@dataclass(repr=False, eq=False)
class RMSNorm(LayerNorm):
    """Each sample's last ``normalized_axes`` axes divided by their root mean square: `calcvm.rms_norm`."""

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        (scale,) = self._affine(x, scope, self._last(x, scope), "scale")
        return F.rms_norm(x, scale, self.normalized_axes, self.eps)


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
