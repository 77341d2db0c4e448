"""What layers compute: products, convolutions, pooling, normalization."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from calcvm.frontends.onnx_writer.declared import INF, Cannot, Nodes, Tensor, whole, writes
from calcvm.ops.windows import Axis, adapted, slid

Numbers = Sequence[int]


# ---------------------------------------------------------------- products
@writes("linear")
def linear(n: Nodes, x: Tensor, wt: Tensor, b: Tensor | None) -> str:
    """Weights lie in the file as PyTorch has them, if its state dict does."""
    if x.rank == 2:
        return n("Gemm", x, wt.turned or wt, b, transB=int(wt.turned is not None))
    y = n("MatMul", x, wt)
    return y if b is None else n("Add", y, b)


@writes("matmul")
def matmul(n: Nodes, a: Tensor, b: Tensor, *, transpose_a: bool, transpose_b: bool) -> str:
    if a.rank == b.rank == 2 and transpose_a | transpose_b:
        return n("Gemm", a, b, transA=int(transpose_a), transB=int(transpose_b))
    sides = (n.turn(x, _swapped(x.rank)) if turned else x for x, turned in ((a, transpose_a), (b, transpose_b)))
    return n("MatMul", *sides)


def _swapped(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


# ---------------------------------------------------------------- windows
@writes("conv", "conv_transpose")
def conv(n: Nodes, x: Tensor, wt: Tensor, b: Tensor | None, *, groups: int, **of: Any) -> str:
    names = {"stride": "strides", "padding": "pads", "dilation": "dilations", "output_padding": "output_padding"}
    how = {names[name]: [*value] for name, value in of.items() if value is not None}
    window = [m.b for m in wt.shape[2:]]
    if any(a >= b for a, b in zip(of.get("output_padding") or (), of["stride"] or [1] * len(window))):
        raise Cannot("its output_padding is no smaller than its stride")
    return n(
        "Conv" if n.op.spec.name == "conv" else "ConvTranspose", x, wt, b, kernel_shape=window, group=groups, **how
    )


def _windows(
    x: Tensor, kernel: Numbers, stride: Any, padding: Any = None, dilation: Any = None, ceil_mode: bool = False
) -> Any:
    """Windows along the spatial axes."""
    lying = (x.shape[0], *x.shape[2:], x.shape[1])
    return slid(lying, tuple(kernel), tuple(stride or kernel), padding, dilation, ceil_mode)


def _ends(axis: Axis) -> int:
    """The padding behind an axis that its last window needs."""
    return max((axis.out - 1) * axis.stride + (axis.kernel - 1) * axis.dilation + 1 - axis.size - axis.before, 0)


def _pool(n: Nodes, kind: str, x: str, axes: Sequence[Axis], outside: float, **how: Any) -> str:
    """A pool whose padding ends where its last window does; that of no window is added before."""
    sides = [a.before for a in axes], [_ends(a) for a in axes]
    if any(p >= a.kernel for side in sides for p, a in zip(side, axes)):
        x = n("Pad", x, [0, 0, *sides[0], 0, 0, *sides[1]], outside)
        sides = [0] * len(axes), [0] * len(axes)
    if any(a.dilation > 1 for a in axes):
        how["dilations"] = [a.dilation for a in axes]
    how |= {"kernel_shape": [a.kernel for a in axes], "strides": [a.stride for a in axes]}
    return n(kind, x, pads=[*sides[0], *sides[1]], **how)


@writes("max_pool")
def max_pool(n: Nodes, x: Tensor, *, kernel: Numbers, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> str:
    return _pool(n, "MaxPool", x, _windows(x, kernel, stride, padding, dilation, ceil_mode), -INF)


@writes("avg_pool")
def avg_pool(
    n: Nodes, x: Tensor, *, kernel: Numbers, stride: Any, padding: Any, ceil_mode: bool, count_include_pad: bool
) -> str:
    """Means over the elements that are there, and what else counts by a factor of each window."""
    axes = _windows(x, kernel, stride, padding, None, ceil_mode)
    if count_include_pad and all(_ends(a) <= a.after for a in axes):
        return _pool(n, "AveragePool", x, axes, 0.0, count_include_pad=1)
    y = _pool(n, "AveragePool", x, axes, 0.0)
    if not count_include_pad:
        return y
    share = np.ones((1,) * len(axes))
    for k, a in enumerate(axes):
        first = np.arange(a.out) * a.stride - a.before
        there = np.minimum(first + a.kernel, a.size) - np.maximum(first, 0)
        counted = np.minimum(first + a.kernel, a.size + a.after) - first
        share = share * (there / counted).reshape([-1 if k == j else 1 for j in range(len(axes))])
    return y if (share == 1).all() else n("Mul", y, share)


@writes("lp_pool")
def lp_pool(n: Nodes, x: Tensor, *, p: float, kernel: Numbers, stride: Any, ceil_mode: bool) -> str:
    """Powers of x itself, not of its absolute value."""
    mean = _pool(n, "AveragePool", n("Pow", x, float(p)), _windows(x, kernel, stride, ceil_mode=ceil_mode), 0.0)
    return n("Pow", n.affine(mean, float(math.prod(kernel))), 1 / p)


@writes("adaptive_max_pool", "adaptive_avg_pool")
def adaptive_pool(n: Nodes, x: Tensor, *, sizes: Numbers) -> str:
    """Windows of one size are those of a pool; others are gathered along each axis."""
    largest = n.op.spec.name == "adaptive_max_pool"
    axes = adapted((x.shape[0], *x.shape[2:], x.shape[1]), tuple(sizes))
    if all(a.size % a.out == 0 for a in axes):
        window = [a.size // a.out for a in axes]
        return n("MaxPool" if largest else "AveragePool", x, kernel_shape=window, strides=window)
    y: str = x
    for k, a in enumerate(axes, 2):
        first = np.arange(a.out) * a.size // a.out
        count = -(-(np.arange(a.out) + 1) * a.size // a.out) - first
        taps = np.arange(count.max())
        places = first[:, None] + np.minimum(taps, count[:, None] - 1)
        y = n("Gather", y, places, axis=k)
        if not largest:
            shares = np.where(taps < count[:, None], 1 / count[:, None], 0.0)
            y = n("Mul", y, shares.reshape(*shares.shape, *(1,) * (x.rank - 1 - k)))
        y = n.reduce("Max" if largest else "Sum", y, [k + 1], keepdims=False)
    return y


@writes("global_max_pool")
def global_max_pool(n: Nodes, x: Tensor) -> str:
    return n("GlobalMaxPool", x)


@writes("global_avg_pool")
def global_avg_pool(n: Nodes, x: Tensor) -> str:
    return n("GlobalAveragePool", x)


# ---------------------------------------------------------------- normalization
def _each(n: Nodes, shape: Any, scale: Any, shift: Any) -> tuple[Any, Any]:
    """Scale and shift, also if they are left out."""
    sizes = [whole(m, "a normalized axis") for m in shape]
    return np.ones(sizes) if scale is None else scale, np.zeros(sizes) if shift is None else shift


@writes("batch_norm_inference")
def batch_norm(n: Nodes, x: Tensor, mean: Tensor, var: Tensor, scale: Any, shift: Any, *, eps: float) -> str:
    return n("BatchNormalization", x, *_each(n, x.shape[1:2], scale, shift), mean, var, epsilon=float(eps))


@writes("group_norm")
def group_norm(n: Nodes, x: Tensor, scale: Any, shift: Any, *, groups: int, eps: float) -> str:
    """Each group as a channel; then what each channel has."""
    y = n("Reshape", x, [0, groups, -1])
    y = n("InstanceNormalization", y, np.ones(groups), np.zeros(groups), epsilon=float(eps))
    y = n.reshape(y, x.shape)
    for kind, of in (("Mul", scale), ("Add", shift)):
        if of is not None:
            y = n(kind, y, n.reshape(of, (x.shape[1], *(1,) * (x.rank - 2))) if x.rank > 2 else of)
    return y


@writes("instance_norm")
def instance_norm(n: Nodes, x: Tensor, scale: Any, shift: Any, *, eps: float) -> str:
    return n("InstanceNormalization", x, *_each(n, x.shape[1:2], scale, shift), epsilon=float(eps))


@writes("layer_norm")
def layer_norm(n: Nodes, x: Tensor, scale: Any, shift: Any, *, axes: int, eps: float) -> str:
    scale, _ = _each(n, x.shape[x.rank - axes :], scale, shift)
    return n("LayerNormalization", x, scale, shift, axis=-axes, epsilon=float(eps))


@writes("rms_norm")
def rms_norm(n: Nodes, x: Tensor, scale: Any, *, axes: int, eps: float) -> str:
    n.opset = 23
    scale, _ = _each(n, x.shape[x.rank - axes :], scale, None)
    return n("RMSNormalization", x, scale, axis=-axes, epsilon=float(eps))


@writes("local_response_norm")
def local_response_norm(n: Nodes, x: Tensor, *, size: int, alpha: float, beta: float, k: float) -> str:
    """Means of channels beside each other, where runtimes have no row for it."""
    if size % 2 and x.rank == 4:
        return n("LRN", x, size=size, alpha=float(alpha), beta=float(beta), bias=float(k))
    channels, before = whole(x.shape[1], "the number of channels"), size // 2
    squares = n(
        "Pad", n("Reshape", n("Mul", x, x), [0, 1, channels, -1]), [0, 0, before, 0, 0, 0, size - 1 - before, 0]
    )
    means = n.reshape(n("AveragePool", squares, kernel_shape=[size, 1]), x.shape)
    return n("Div", x, n("Pow", n.affine(means, float(alpha), float(k)), float(beta)))
