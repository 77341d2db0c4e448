"""What layers compute: products, convolutions, pooling, normalization, dropout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from calcvm import functions as F
from calcvm import images
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.aten import layers as aten
from calcvm.frontends.aten.elementwise import add, mul
from calcvm.frontends.aten.places import taken
from calcvm.frontends.building import Building, Cannot, Filled, arranged, given, plain, variable, whole
from calcvm.frontends.onnx.declared import (
    floats,
    in_type,
    is_integer,
    is_known,
    keeps_type,
    number,
    onnx,
    place_of,
    type_of,
)
from calcvm.graph import Variable
from calcvm.ops.dims import numel
from calcvm.ops.pooling import TAPS

Numbers = Sequence[int]


# ---------------------------------------------------------------- products
@onnx("MatMul")
def matmul(b: Building, x: Any, y: Any) -> Arranged:
    if is_integer(x):
        return keeps_type(b, lambda u, v: product(b, u, v).variable(), x, y)
    return product(b, x, y)


def product(b: Building, x: Any, y: Any) -> Arranged:
    """NumPy's matmul of floats."""
    x, y = arranged(b, x), arranged(b, y)
    if x.rank == 1:
        return product(b, x.reshaped([1, *x.shape]), y).without([max(y.rank, 2) - 2])
    if y.rank == 1:
        return (z := product(b, x, y.reshaped([*y.shape, 1]))).without([z.rank - 1])
    if y.rank == 2 and all(n.constant for n in y.shape):
        return aten.linear(b, x, y.swapped())
    if x.rank == 2 or y.rank == 2 or x.shape[:-2] == y.shape[:-2]:
        return aten.matmul(b, x, y)
    return aten.einsum(b, "...mk,...kn->...mn", [x, y])


@onnx("linear")
def linear(b: Building, x: Any, weight: Any, bias: Any) -> Arranged:
    """A product and its bias: an operator of no file."""
    return aten.linear(b, x, arranged(b, weight).swapped(), bias)


@onnx("Gemm")
def gemm(
    b: Building, x: Any, y: Any, c: Any = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0
) -> Arranged:  # fmt: skip
    how: dict[str, Any] = {"alpha": alpha, "beta": beta, "transA": transA, "transB": transB}
    if is_integer(x):
        operands = (x, y) if c is None else (x, y, c)
        return keeps_type(b, lambda *v: gemm(b, *map(Arranged.of, v), **how).variable(), *operands)
    x, y = _turned(b, x, transA), _turned(b, y, transB)
    columns, constant = y.shape[1], all(n.constant for n in y.shape)
    if c is not None and constant and alpha == beta == 1 and c.shape[-1:] == (columns,) and numel(c.shape) == columns:
        return aten.linear(b, x, y.swapped(), arranged(b, c).reshaped([columns]))
    z = product(b, x, y)
    z = z if alpha == 1 else mul(b, z, float(alpha))
    return z if c is None or beta == 0 else add(b, z, c, float(beta))


def _turned(b: Building, x: Any, turned: int) -> Arranged:
    """A matrix or its transpose; a known one is stored that way, as products read it."""
    if not turned:
        return arranged(b, x)
    return arranged(b, x.T) if is_known(x) else arranged(b, x).swapped()


# ---------------------------------------------------------------- windows
class Windows(NamedTuple):
    """Windows along the spatial axes: a number for each axis, and a pair of them of padding."""

    sizes: Numbers
    kernel: Numbers
    strides: Numbers
    dilations: Numbers
    pads: Sequence[tuple[int, int]]
    ceil_mode: bool = False

    @property
    def spans(self) -> list[int]:
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations)]

    @property
    def out(self) -> list[int]:
        """How many there are; none begins in the padding behind."""
        found = []
        for n, span, s, (before, after) in zip(self.sizes, self.spans, self.strides, self.pads):
            rest = n + before + after - span
            found.append(min((rest + (s - 1) * self.ceil_mode) // s, (n + before - 1) // s) + 1)
        return found

    @property
    def lengths(self) -> list[int]:
        """From where the first begins to where the last ends."""
        return [(m - 1) * s + span for m, s, span in zip(self.out, self.strides, self.spans)]

    def places(self, axis: int) -> np.ndarray:
        """The places of an axis in each window, which may be in the padding."""
        first = np.arange(self.out[axis]) * self.strides[axis] - self.pads[axis][0]
        return first[:, None] + np.arange(self.kernel[axis]) * self.dilations[axis]

    def along(self, axis: int) -> Windows:
        """The same along one axis alone."""

        def only(values: Sequence[Any], otherwise: Any) -> list[Any]:
            return [v if k == axis else otherwise for k, v in enumerate(values)]

        kernel, strides, dilations = (only(values, 1) for values in (self.kernel, self.strides, self.dilations))
        return Windows(self.sizes, kernel, strides, dilations, only(self.pads, (0, 0)), self.ceil_mode)

    @property
    def settings(self) -> dict[str, Any]:
        """What functions of pooling are given."""
        names = "kernel", "stride", "padding", "ceil_mode"
        return dict(zip(names, (self.kernel, self.strides, self.pads, self.ceil_mode)))

    def counts(self, padded: bool) -> Any:
        """How many elements each window has, or all have; ``padded`` : with the padding, but without what is behind it."""
        along = []
        for axis, (n, (before, after)) in enumerate(zip(self.sizes, self.pads)):
            low, high = (-before, n + after) if padded else (0, n)
            places = self.places(axis)
            along.append(((low <= places) & (places < high)).sum(1))
        found = reduce(np.multiply.outer, along).astype(float)
        return float(found.flat[0]) if np.ptp(found) == 0 else found


def windows(
    x: Any, kernel: Sequence[Any], strides: Numbers = (), pads: Numbers = (), dilations: Numbers = (), auto_pad: str = "NOTSET",
    ceil_mode: int = 0, **_: Any,
) -> Windows:  # fmt: skip
    """The windows over an input (N, C, *sizes) that attributes describe."""
    sizes, kernel = [whole(n) for n in x.shape[2:]], [whole(k) for k in kernel]
    n = len(sizes)
    strides, dilations, pads = list(strides) or [1] * n, list(dilations) or [1] * n, list(pads) or [0] * 2 * n
    of = Windows(sizes, kernel, strides, dilations, list(zip(pads[:n], pads[n:])), bool(ceil_mode))
    if auto_pad == "NOTSET":
        return of
    pairs = [(0, 0)] * n
    if auto_pad != "VALID":
        wanted = [max((-(-k // s) - 1) * s + span - k, 0) for k, s, span in zip(sizes, strides, of.spans)]
        pairs = [_halves(total, auto_pad == "SAME_UPPER") for total in wanted]
    return of._replace(pads=pairs, ceil_mode=False)


def _halves(total: int, more_behind: bool) -> tuple[int, int]:
    less = total // 2
    return (less, total - less) if more_behind else (total - less, less)


def _over(name: str, n: int) -> Callable[..., Variable]:
    """The function of images with n spatial axes."""
    if not 1 <= n <= 3:
        raise Cannot(f"its input has {n} spatial axes: 1 to 3 have a counterpart")
    return getattr(images, f"{name}{n}d")


@onnx("Conv")
def conv(b: Building, x: Any, w: Any, bias: Any = None, *, group: int = 1, **how: Any) -> Arranged:
    f, of = _over("conv", len(x.shape) - 2), windows(x, w.shape[2:], **how)
    return Arranged.of(f(variable(b, x), plain(b, w), given(b, bias), of.strides, of.pads, of.dilations, group))


@onnx("ConvTranspose")
def conv_transpose(
    b: Building, x: Any, w: Any, bias: Any = None, *, group: int = 1, output_padding: Numbers = (), output_shape: Numbers = (),
    auto_pad: str = "NOTSET", **how: Any,
) -> Arranged:  # fmt: skip
    f, of = _over("conv_transpose", len(x.shape) - 2), windows(x, w.shape[2:], **how)
    n = len(of.sizes)
    pads, more = [(0, 0)] * n if auto_pad == "VALID" else list(of.pads), list(output_padding) or [0] * n
    if output_shape or auto_pad.startswith("SAME"):
        wanted = output_shape[-n:] if output_shape else [size * s for size, s in zip(of.sizes, of.strides)]
        for k, out in enumerate(wanted):
            total = (of.sizes[k] - 1) * of.strides[k] + more[k] + of.spans[k] - out
            if total < 0 and not output_shape:
                raise Cannot(f"auto_pad {auto_pad} of windows that do not meet: give output_shape")
            pads[k] = _halves(max(total, 0), auto_pad == "SAME_UPPER")
            more[k] += max(-total, 0)
    return Arranged.of(f(variable(b, x), plain(b, w), given(b, bias), of.strides, pads, more, group, of.dilations))


# ---------------------------------------------------------------- pooling
def _pooled(x: Any, kernel: Numbers, auto_pad: str = "NOTSET", **how: Any) -> Windows:
    """The windows of a pooling operator; those that do not meet have no common meaning with automatic padding."""
    of = windows(x, kernel, auto_pad=auto_pad, **how)
    if auto_pad.startswith("SAME") and any(n > length + 1 for n, length in zip(of.sizes, of.lengths)):
        raise Cannot(f"auto_pad {auto_pad} of windows that do not meet: give pads")
    return of


@onnx("MaxPool")
def max_pool(b: Building, x: Any, *, kernel_shape: Numbers, storage_order: int = 0, **how: Any) -> tuple[Any, Any]:
    v, of = floats(b, x), _pooled(x, kernel_shape, **how)
    return (
        Arranged.of(in_type(_largest(v, of), type_of(x))),
        lambda: Arranged.of(in_type(_places_of_largest(v, of, bool(storage_order)), "int64")),
    )


def _largest(v: Variable, of: Windows) -> Variable:
    if of.kernel == of.sizes and {*of.dilations} == {1} and not any(map(any, of.pads)):
        return images.global_max_pool(v)
    few = math.prod(of.kernel) <= TAPS
    for part in [of] if few else [of.along(axis) for axis in reversed(range(len(of.sizes)))]:
        v = images.max_pool(v, dilation=part.dilations, **part.settings)
    return v


def _places_of_largest(v: Variable, of: Windows, by_columns: bool) -> Variable:
    """Where in the whole input the first of the largest elements is, in floats."""
    from calcvm.indexed import equation

    image, out = math.prod(of.sizes), ",".join(f"o{k}" for k in range(len(of.sizes)))
    ranged, taps = (
        ",".join(f"{i}{k}<{n}" for k, n in enumerate(sizes)) for i, sizes in (("o", of.out), ("t", of.kernel))
    )
    read, places = [], [f"n*{whole(v.shape[1]) * image} + c*{image}"]
    for k, (s, d, (before, _)) in enumerate(zip(of.strides, of.dilations, of.pads)):
        step = f"tap[n,c,{out}]//{math.prod(of.kernel[k + 1 :])}%{of.kernel[k]}"
        weight = math.prod(of.sizes[:k] if by_columns else of.sizes[k + 1 :])
        read.append(f"o{k}*{s} + t{k}*{d} - {before}")
        places.append(f"(o{k}*{s} + {step}*{d} - {before})*{weight}")
    tap = f"tap[n,c,{ranged}] = argmax[{taps}] x[n,c,{','.join(read)}; -inf]"
    return equation(f"{tap}; y[n,c,{out}] = {' + '.join(places)}", x=v, fused=True)


@onnx("AveragePool")
def average_pool(b: Building, x: Any, *, kernel_shape: Numbers, count_include_pad: int = 0, **how: Any) -> Arranged:
    v, of, padded = variable(b, x), _pooled(x, kernel_shape, **how), bool(count_include_pad)
    if max(of.dilations) > 1:
        return Arranged.of(_sums(v, of) / of.counts(padded))
    return Arranged.of(images.avg_pool(v, count_include_pad=padded, **of.settings))


@onnx("LpPool")
def lp_pool(b: Building, x: Any, *, kernel_shape: Numbers, p: float = 2, **how: Any) -> Arranged:
    return Arranged.of(_root(_sums(_power(variable(b, x), p), _pooled(x, kernel_shape, **how)), p))


def _sums(v: Variable, of: Windows) -> Variable:
    """The sum of each window; padding counts as zeros."""
    if max(of.dilations) == 1:
        return images.avg_pool(v, **of.settings) * of.counts(True)
    pads = [(before, max(m - n - before, 0)) for n, m, (before, _) in zip(of.sizes, of.lengths, of.pads)]
    channels = whole(v.shape[1])
    ones = np.ones((channels, 1, *of.kernel))
    return _over("conv", len(of.sizes))(v, ones, None, of.strides, pads, of.dilations, channels)


def _power(v: Variable, p: float) -> Variable:
    return F.abs(v) if p == 1 else F.square(v) if p == 2 else F.pow(F.abs(v), p)


def _root(sums: Variable, p: float) -> Variable:
    """The root of a sum of powers; where it is 0, the gradient is 0."""
    if p == 1:
        return sums
    zero = F.equal(sums, 0.0)
    return F.where(zero, 0.0, F.pow(F.where(zero, 1.0, sums), 1 / p))


def _global(name: str, of_images: Callable[[Variable], Variable], f: Callable[..., Variable]) -> None:
    def pooled(b: Building, x: Any) -> Arranged:
        v = variable(b, x)
        return Arranged.of(of_images(v) if 3 <= v.rank <= 5 else f(v, tuple(range(2, v.rank)), True))

    onnx(name)(pooled)


_global("GlobalAveragePool", images.global_avg_pool, F.mean)
_global("GlobalMaxPool", images.global_max_pool, F.max)


@onnx("GlobalLpPool")
def global_lp_pool(b: Building, x: Any, *, p: float = 2) -> Arranged:
    v = variable(b, x)
    return Arranged.of(_root(F.sum(_power(v, p), tuple(range(2, v.rank)), True), p))


# ---------------------------------------------------------------- normalization
@onnx("BatchNormalization")
def batch_norm(
    b: Building, x: Any, scale: Any, shift: Any, mean: Any, var: Any, *, training_mode: int = 0, momentum: float = 0.9,
    epsilon: float = 1e-5,
) -> tuple[Any, ...]:  # fmt: skip
    """The layer keeps its running statistics, unless they are computed, or are outputs because the file says so."""
    x = arranged(b, x)
    v = (x.reshaped([*x.shape, 1]) if x.rank == 1 else x).variable()
    running, (factor, offset) = ([variable(b, s) for s in pair] for pair in ((mean, var), (scale, shift)))
    of_batch, axes = (F.mean, F.var), tuple(k for k in range(v.rank) if k != 1)
    trains = bool(training_mode) if b.as_written else b.training
    kept = {s.kind for s in running} <= ({"buffer"} if trains else {"buffer", "constant"})
    if kept and not (b.as_written and trains):
        y = images.batch_norm(v, running[0], running[1], factor, offset, 1 - momentum, epsilon, trains)
    else:
        used = [f(v, axes) for f in of_batch] if trains else running
        m, s, w, bias = (F.reshape(u, [-1, *(1,) * (v.rank - 2)]) for u in (*used, factor, offset))
        y = (v - m) * (w / F.sqrt(s + epsilon)) + bias
    moved = (
        lambda s=s, f=f: Arranged.of(s * momentum + f(v, axes) * (1 - momentum)) for s, f in zip(running, of_batch)
    )
    return Arranged.of(y).without([1] if x.rank == 1 else []), *moved


@onnx("InstanceNormalization")
def instance_norm(b: Building, x: Any, scale: Any, shift: Any, *, epsilon: float = 1e-5) -> Arranged:
    return Arranged.of(images.instance_norm(variable(b, x), given(b, scale), given(b, shift), epsilon))


@onnx("GroupNormalization")
def group_norm(
    b: Building, x: Any, scale: Any, shift: Any, *, num_groups: int, epsilon: float = 1e-5, **_: Any
) -> Arranged:
    return aten.group_norm(b, arranged(b, x), num_groups, scale, shift, epsilon)


@onnx("LayerNormalization")
def layer_norm(
    b: Building, x: Any, scale: Any, shift: Any = None, *, axis: int = -1, epsilon: float = 1e-5, **_: Any
) -> tuple[Any, ...]:
    x = arranged(b, x)
    axes = tuple(range(place_of(axis, x.rank), x.rank))
    y = _of_last(b, aten.layer_norm, x, axes, [scale, shift], epsilon)
    return (
        y,
        lambda: Arranged.of(F.mean(x.variable(), axes, True)),
        lambda: Arranged.of(F.pow(F.var(x.variable(), axes, 0, True) + epsilon, -0.5)),
    )


@onnx("RMSNormalization")
def rms_norm(b: Building, x: Any, scale: Any, *, axis: int = -1, epsilon: float = 1e-5, **_: Any) -> Arranged:
    x = arranged(b, x)
    return _of_last(b, aten.rms_norm, x, tuple(range(place_of(axis, x.rank), x.rank)), [scale], epsilon)


def _of_last(
    b: Building, f: Callable[..., Arranged], x: Arranged, axes: tuple[int, ...], vectors: list[Any], eps: float
) -> Arranged:
    """A normalization over the last axes; scale and shift have their shape, or broadcast."""
    last = x.shape[axes[0] :]
    fit = all(v is None or v.shape[-len(last) :] == last and numel(v.shape) == numel(last) for v in vectors)
    y = f(b, x, last, *(arranged(b, v).reshaped(last) if fit and v is not None else None for v in vectors), eps)
    for g, v in zip((mul, add), () if fit else vectors):
        y = y if v is None else g(b, y, v)
    return y


@onnx("LRN")
def local_response_norm(
    b: Building, x: Any, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
) -> Arranged:
    x = arranged(b, x)
    back = np.arange(whole(x.shape[1]))[::-1]

    def turned(x: Arranged) -> Arranged:
        """Of an even number of channels, one more is before the place, and here behind it."""
        return x if size % 2 else taken(b, x, back, 1)

    return turned(Arranged.of(images.local_response_norm(turned(x).variable(), size, alpha, beta, bias)))


# ---------------------------------------------------------------- dropout, selection
@onnx("Dropout")
def dropout(b: Building, x: Any, ratio: Any = None, training_mode: Any = None, **_: Any) -> tuple[Any, Any]:
    trains = b.training
    if b.as_written:
        trains = training_mode is not None and bool(number(training_mode, "its training mode"))
    p = float(number(ratio, "its ratio")) if trains and ratio is not None else 0.5
    if not trains or not p:
        known = all(n.constant for n in x.shape)
        return x, np.ones(x.shape, bool) if known else Filled(1.0, x.shape, "bool")
    if b.as_written:
        raise Cannot("it drops elements at random")
    return aten.dropout(b, x, p), _no_mask


def _no_mask() -> Any:
    raise Cannot("which elements it drops has no counterpart")


@onnx("NonMaxSuppression")
def non_max_suppression(b: Building, *_: Any, **__: Any) -> Any:
    raise Cannot("how many boxes it selects depends on data")
