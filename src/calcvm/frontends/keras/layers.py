"""Dense layers, embeddings, normalization, dropout, preprocessing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from calcvm import functions as F
from calcvm import gathers, images
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.aten import layers as aten
from calcvm.frontends.building import Building, Cannot, arranged, axis_of, given, one_by_one, plain, variable, whole
from calcvm.frontends.keras.activations import activated
from calcvm.frontends.keras.declared import LEFT_OUT, image, keras, of_image
from calcvm.ops.dims import numel
from calcvm.ops.types import FLOAT


# ---------------------------------------------------------------- products
@keras("Dense")
def dense(b: Building, x: Any, *, kernel: Arranged, bias: Any = None, activation: Any = None, **_: Any) -> Arranged:
    return activated(b, aten.linear(b, x, kernel.swapped(), bias), activation)


@keras("EinsumDense")
def einsum_dense(
    b: Building, x: Any, *, equation: str, kernel: Arranged, bias: Any = None, activation: Any = None, **_: Any
) -> Arranged:  # fmt: skip
    y = aten.einsum(b, equation, [x, kernel])
    return activated(b, y if bias is None else one_by_one(b, F.add, y, bias), activation)


@keras("Embedding")
def embedding(b: Building, x: Any, *, embeddings: Any, mask_zero: bool = False, **_: Any) -> Arranged:
    if mask_zero:
        raise Cannot("mask_zero=True hides steps from the layers behind it: masks have no counterpart")
    v = plain(b, x)
    v = F.cast(v, "int64") if getattr(v, "type", "") == FLOAT else v
    return Arranged.of(gathers.embedding(v, variable(b, embeddings)))


# ---------------------------------------------------------------- normalization
@keras("BatchNormalization")
def batch_norm(
    b: Building, x: Any, *, moving_mean: Any, moving_variance: Any, gamma: Any = None, beta: Any = None, axis: Any = -1,
    momentum: float = 0.99, epsilon: float = 1e-3, renorm: bool = False, **_: Any,
) -> Arranged:  # fmt: skip
    if renorm:
        raise Cannot("renorm=True has no counterpart")
    running = variable(b, moving_mean), variable(b, moving_variance)
    how: dict[str, Any] = {"momentum": 1 - momentum, "eps": epsilon, "training": b.training}
    return _of_channels(
        arranged(b, x), _one(axis), lambda v: images.batch_norm(v, *running, given(b, gamma), given(b, beta), **how)
    )


def _one(axis: Any) -> int:
    if isinstance(axis, int):
        return axis
    if len(axis) != 1:
        raise Cannot("it is over several axes")
    return axis[0]


def _of_channels(x: Arranged, axis: int, f: Callable[..., Any]) -> Arranged:
    """A function of images whose channels are on an axis."""
    axis = axis_of(x, axis)
    if x.rank == 2:
        return Arranged.of(f(x.variable()))
    last = [*(k for k in range(x.rank) if k != axis), axis]
    back = [last.index(k) for k in range(x.rank)]
    return Arranged.of(f(x.variable())) if axis == 1 else of_image(f(image(x.permuted(last)))).permuted(back)


@keras("GroupNormalization")
def group_norm(
    b: Building, x: Any, *, gamma: Any = None, beta: Any = None, groups: int = 32, axis: int = -1, epsilon: float = 1e-3, **_: Any
) -> Arranged:  # fmt: skip
    x = arranged(b, x)
    groups = whole(x.shape[axis]) if groups == -1 else groups
    return _of_channels(x, axis, lambda v: images.group_norm(v, groups, given(b, gamma), given(b, beta), epsilon))


@keras("LayerNormalization")
def layer_norm(
    b: Building, x: Any, *, gamma: Any = None, beta: Any = None, axis: Any = -1, epsilon: float = 1e-3, rms_scaling: bool = False,
    **_: Any,
) -> Arranged:  # fmt: skip
    x = arranged(b, x)
    if rms_scaling:
        axes = _axes(x, axis)
        v = x.variable()
        y = Arranged.of(v * F.pow(F.var(v, axes, 0, True) + epsilon, -0.5))
        shape = [n if k in axes else 1 for k, n in enumerate(x.shape)]
        return y if gamma is None else one_by_one(b, F.mul, y, gamma.reshaped(shape))
    return _of_last(x, axis, lambda z, sizes: aten.layer_norm(b, z, sizes, gamma, beta, epsilon))


@keras("RMSNormalization")
def rms_norm(b: Building, x: Any, *, scale: Any, axis: Any = -1, epsilon: float = 1e-6, **_: Any) -> Arranged:
    return _of_last(arranged(b, x), axis, lambda z, sizes: aten.rms_norm(b, z, sizes, scale, epsilon))


def _axes(x: Arranged, axis: Any) -> tuple[int, ...]:
    return tuple(sorted(axis_of(x, a) for a in ([axis] if isinstance(axis, int) else axis)))


def _of_last(x: Arranged, axis: Any, f: Callable[[Arranged, Sequence[Any]], Arranged]) -> Arranged:
    """A function over axes, as one over the last ones."""
    axes = _axes(x, axis)
    order = [*(k for k in range(x.rank) if k not in axes), *axes]
    moved = x.permuted(order)
    return f(moved, moved.shape[-len(axes) :]).permuted([order.index(k) for k in range(x.rank)])


@keras("UnitNormalization")
def unit_norm(b: Building, x: Any, *, axis: Any = -1, **_: Any) -> Arranged:
    v = arranged(b, x).variable()
    norm = F.sqrt(F.maximum(F.sum_squares(v, _axes(Arranged.of(v), axis), True), 1e-24))
    return Arranged.of(v / norm)


# ---------------------------------------------------------------- what differs in training
@keras("Dropout")
def dropout(b: Building, x: Any, *, rate: float, noise_shape: Any = None, **_: Any) -> Arranged:
    x = arranged(b, x)
    if noise_shape is None or not b.training or not rate:
        return aten.dropout(b, x, rate)
    if noise_shape[0] == 1:
        raise Cannot("its noise_shape drops the same elements of all samples")
    return _dropped_together(x, rate, [k for k, n in enumerate(noise_shape) if n == 1])


def _dropped_together(x: Arranged, rate: float, axes: Sequence[int]) -> Arranged:
    """Dropout of all elements along axes, or of none of them."""
    apart = [k for k in range(1, x.rank) if k not in axes]
    order = [0, *apart, *axes]
    moved = x.permuted(order)
    flat = moved.reshaped([x.shape[0], numel(moved.shape[1 : 1 + len(apart)]), -1])
    return (
        Arranged.of(F.dropout2d(flat.variable(), rate))
        .reshaped(moved.shape)
        .permuted([order.index(k) for k in range(x.rank)])
    )


@keras("StochasticDepth")
def stochastic_depth(b: Building, x: Any, *, drop_path_rate: float, **_: Any) -> Arranged:
    x = arranged(b, x)
    return _dropped_together(x, drop_path_rate, range(1, x.rank)) if b.training and drop_path_rate else x


@keras("SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D")
def spatial_dropout(b: Building, x: Any, *, rate: float, data_format: str | None = None, **_: Any) -> Arranged:
    x = arranged(b, x)
    return of_image(F.dropout2d(image(x, data_format), rate), data_format) if b.training and rate else x


@keras("Identity", *LEFT_OUT)
def identity(b: Building, x: Any, **_: Any) -> Any:
    return x


# ---------------------------------------------------------------- scaling
@keras("LayerScale")
def layer_scale(b: Building, x: Any, *, variable: Any, **_: Any) -> Arranged:
    return one_by_one(b, F.mul, arranged(b, x), variable)


@keras("CustomScaleLayer")
def scaled_sum(b: Building, inputs: Sequence[Any], *, scale: float, **_: Any) -> Arranged:
    """The sum of an input and a part of another: a layer of Keras's InceptionResNetV2."""
    x, y = inputs
    return one_by_one(b, F.add, x, arranged(b, y).again(lambda v: v * scale))


@keras("Rescaling")
def rescaling(b: Building, x: Any, *, scale: Any, offset: Any = 0.0, **_: Any) -> Arranged:
    y = arranged(b, x).again(lambda v: F.cast(v, None) if v.type != FLOAT else v)
    for f, numbers in ((F.mul, scale), (F.add, offset)):
        numbers = np.asarray(numbers, float)
        y = one_by_one(b, f, y, numbers if numbers.ndim else float(numbers))
    return y


@keras("Normalization")
def normalization(b: Building, x: Any, *, mean: Any, variance: Any, invert: bool = False, **_: Any) -> Arranged:
    v, spread = arranged(b, x).variable(), np.maximum(np.sqrt(variance), 1e-7)
    return Arranged.of(v * spread + mean if invert else (v - mean) / spread)
