"""What layers compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from calcvm import functions as F
from calcvm import images, sequences
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.aten.declared import ATEN, aten
from calcvm.frontends.aten.elementwise import add, div, mul
from calcvm.frontends.aten.reductions import norm
from calcvm.frontends.aten.shapes import chunk, select, stack, unsqueeze
from calcvm.frontends.building import (
    Building,
    Cannot,
    Filled,
    Sizes,
    arranged,
    axis_of,
    given,
    one_by_one,
    plain,
    variable,
    whole,
)
from calcvm.graph import Variable
from calcvm.ops.dims import ONE, show


# ---------------------------------------------------------------- products
@aten("linear")
def linear(b: Building, x: Any, weight: Any, bias: Any = None) -> Arranged:
    x, weight, bias = arranged(b, x), arranged(b, weight), given(b, bias)
    if x.rank < 2:
        return linear(b, x.reshaped([1, *x.shape]), weight, bias).without([0])
    across = weight.swapped()
    if (
        across.order == [*range(len(across.atoms))] and across.base.shape == across.shape
    ):  # it is stored as (inputs, outputs)
        return x.rows(lambda v: F.linear(v, across.base, bias))
    w = weight.variable()
    y = x.rows(lambda v: F.matmul(v, w, transpose_b=True))
    return y if bias is None else y.rows(lambda v: v + bias)


@aten("matmul", "bmm", "mm")
def matmul(b: Building, x: Any, y: Any) -> Arranged:
    x, y = arranged(b, x), arranged(b, y)
    if x.rank == 1:
        return (z := matmul(b, x.reshaped([1, *x.shape]), y)).without([z.rank - min(y.rank, 2)])
    if y.rank == 1:
        return (z := matmul(b, x, y.reshaped([*y.shape, 1]))).without([z.rank - 1])
    rows, columns = y.axes[-2:]
    across = rows > columns  # y lies as its transpose
    right = (y.swapped() if across else y).variable()
    return Arranged.of(F.matmul(x.variable(), right, transpose_b=bool(across)))


ATEN["dot"] = ATEN["mv"] = ATEN["matmul"]


@aten("addmm", "baddbmm")
def addmm(b: Building, bias: Any, x: Any, y: Any, beta: float = 1, alpha: float = 1) -> Arranged:
    product = matmul(b, x, y)
    product = product if alpha == 1 else mul(b, product, float(alpha))
    return product if beta == 0 else add(b, product, bias, beta)


@aten("einsum")
def einsum(b: Building, subscripts: str, operands: Sequence[Any], path: Any = None) -> Arranged:
    from calcvm.indexed import einsum

    return Arranged.of(einsum(subscripts, *(plain(b, x) for x in operands)))


@aten("glu")
def glu(b: Building, x: Arranged, axis: int = -1) -> Arranged:
    a, gate = chunk(b, x, 2, axis)
    return one_by_one(b, F.mul, a, gate.again(F.sigmoid))


@aten("_weight_norm")
def weight_norm(b: Building, v: Arranged, g: Arranged, axis: int = 0) -> Arranged:
    others = [k for k in range(v.rank) if k != axis_of(v, axis)]
    return mul(b, v, div(b, g, norm(b, v, 2, others, True)))


# ---------------------------------------------------------------- images
def _settings(n: int, **given: Any) -> dict[str, Any]:
    """Numbers of each axis, of which one may stand for all."""

    def each(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return value
        sizes = [whole(v) for v in value]
        return tuple(sizes * n if len(sizes) == 1 else sizes)

    return {name: each(value) for name, value in given.items()}


def _windows(n: int) -> None:
    """Declare the operators of windows over n axes."""

    def conv(
        b: Building, x: Any, w: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
    ) -> Arranged:  # fmt: skip
        how = _settings(n, stride=stride, padding=padding, dilation=dilation)
        return Arranged.of(
            getattr(images, f"conv{n}d")(variable(b, x), plain(b, w), given(b, bias), groups=groups, **how)
        )

    def transposed(
        b: Building, x: Any, w: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1,
        dilation: Any = 1,
    ) -> Arranged:  # fmt: skip
        how = _settings(n, stride=stride, padding=padding, dilation=dilation, output_padding=output_padding)
        f = getattr(images, f"conv_transpose{n}d")
        return Arranged.of(f(variable(b, x), plain(b, w), given(b, bias), groups=groups, **how))

    def max_pool(
        b: Building, x: Arranged, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> Arranged:  # fmt: skip
        how = _settings(n, kernel=kernel, stride=stride or None, padding=padding, dilation=dilation)
        return Arranged.of(images.max_pool(x.variable(), ceil_mode=ceil_mode, **how))

    def avg_pool(
        b: Building, x: Arranged, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False, count_pad: bool = True,
        divisor: Any = None,
    ) -> Arranged:  # fmt: skip
        if divisor is not None:
            raise Cannot("divisor_override is given")
        how = _settings(n, kernel=kernel, stride=stride or None, padding=padding)
        return Arranged.of(images.avg_pool(x.variable(), ceil_mode=ceil_mode, count_include_pad=count_pad, **how))

    def adaptive_avg(b: Building, x: Arranged, size: Any) -> Arranged:
        return _adaptive(images.adaptive_avg_pool, images.global_avg_pool, x, n, size)

    def adaptive_max(b: Building, x: Arranged, size: Any) -> Any:
        return _adaptive(images.adaptive_max_pool, images.global_max_pool, x, n, size), _no_places

    def nearest(b: Building, x: Arranged, size: Any, scales: Any = None) -> Arranged:
        return _upsampled(x, size, scales, "nearest", False)

    def linear(b: Building, x: Arranged, size: Any, align: bool, scales: Any = None) -> Arranged:
        return _upsampled(x, size, scales, "linear", align)

    made: dict[str, Any] = {
        "conv": conv, "conv_transpose": transposed, "max_pool": max_pool, "avg_pool": avg_pool, "adaptive_avg_pool": adaptive_avg,
        "adaptive_max_pool": adaptive_max, "upsample_nearest": nearest, f"upsample_{images.LINEAR[n]}": linear,
    }  # fmt: skip
    ATEN.update({f"{name}{n}d": f for name, f in made.items()})


def _no_places() -> Any:
    raise Cannot("the places of the largest elements of windows have no counterpart")


def _adaptive(f: Any, of_all: Any, x: Arranged, n: int, size: Any) -> Arranged:
    sizes = [whole(s) for s in size] * (n if len(size) == 1 else 1)
    v = x.variable()
    return Arranged.of(of_all(v) if sizes == [1] * n else f(v, tuple(sizes)))


def _upsampled(x: Arranged, size: Any, scales: Any, mode: str, align: bool) -> Arranged:
    how: dict[str, Any] = {"scale": tuple(scales)} if scales else {"size": tuple(whole(s) for s in size)}
    return Arranged.of(images.upsample(x.variable(), mode=mode, align_corners=align, **how))


for _n in (1, 2, 3):
    _windows(_n)


# ---------------------------------------------------------------- normalization, dropout
@aten("batch_norm")
def batch_norm(
    b: Building, x: Arranged, w: Any, bias: Any, mean: Any, var: Any, train: bool, momentum: float, eps: float, *_: Any
) -> Arranged:
    if mean is None:
        raise Cannot("it keeps no running statistics")
    if train:
        raise Cannot("it takes the batch's statistics in evaluation, too")
    if b.training and not momentum:
        raise Cannot("its momentum is None: running means over all batches have no counterpart")
    running = variable(b, mean), variable(b, var)
    how: dict[str, Any] = {"momentum": momentum, "eps": eps, "training": b.training}
    return Arranged.of(images.batch_norm(x.variable(), *running, given(b, w), given(b, bias), **how))


@aten("instance_norm")
def instance_norm(
    b: Building, x: Arranged, w: Any, bias: Any, mean: Any, var: Any, train: bool, momentum: float, eps: float, *_: Any
) -> Arranged:
    if mean is not None:
        raise Cannot("it keeps running statistics")
    return Arranged.of(images.instance_norm(x.variable(), given(b, w), given(b, bias), eps))


@aten("group_norm")
def group_norm(
    b: Building, x: Arranged, groups: int, w: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Arranged:
    return Arranged.of(images.group_norm(x.variable(), groups, given(b, w), given(b, bias), eps))


@aten("layer_norm")
def layer_norm(
    b: Building, x: Arranged, shape: Sizes, w: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Arranged:
    scale, shift = given(b, w), given(b, bias)
    return _of_last(x, len(shape), lambda v: F.layer_norm(v, scale, shift, len(shape), eps))


@aten("rms_norm")
def rms_norm(b: Building, x: Arranged, shape: Sizes, w: Any = None, eps: Any = None) -> Arranged:
    scale, eps = given(b, w), float(np.finfo(b.type).eps) if eps is None else eps
    return _of_last(x, len(shape), lambda v: F.rms_norm(v, scale, len(shape), eps))


def _of_last(x: Arranged, n: int, f: Callable[[Variable], Variable]) -> Arranged:
    return x.rows(f) if n == 1 else Arranged.of(f(x.variable()))


@aten("dropout")
def dropout(b: Building, x: Arranged, p: float, always: bool = False) -> Arranged:
    return x.again(lambda v: F.dropout(v, p)) if (b.training or always) and p else x


@aten("feature_dropout")
def feature_dropout(b: Building, x: Arranged, p: float, always: bool = False) -> Arranged:
    return Arranged.of(F.dropout2d(x.variable(), p)) if (b.training or always) and p else x


# ---------------------------------------------------------------- attention
@aten("scaled_dot_product_attention")
def attention(
    b: Building, q: Any, k: Any, v: Any, mask: Any = None, p: float = 0.0, causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Arranged:  # fmt: skip
    if len(q.shape) == 3:
        one = attention(b, *(unsqueeze(b, arranged(b, x), 1) for x in (q, k, v)), mask, p, causal, scale)
        return one.without([1])
    if len(q.shape) != 4:
        raise Cannot(f"queries are {show(q.shape)}: (N, heads, T, d) has a counterpart")
    heads, kv_heads = whole(q.shape[1]), whole(k.shape[1])
    if v.shape[-1] != q.shape[-1]:
        raise Cannot("values have another size than keys")
    bias = None if mask is None else _bias(b, mask, q, k)
    side = [arranged(b, x).permuted([0, 2, 1, 3]) for x in (q, k, v)]
    side = [x.reshaped([*x.shape[:2], x.shape[2] * x.shape[3]]) for x in side]
    how: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "causal": causal, "bias": bias, "scale": scale}
    together = packed(side)
    y = F.attention(together, **how) if together is not None else F.attention(*(x.variable() for x in side), **how)
    n, t, _ = y.shape
    return Arranged.of(y).reshaped([n, t, heads, q.shape[3]]).permuted([0, 2, 1, 3])


def _bias(b: Building, mask: Any, q: Any, k: Any) -> Any:
    """What a mask adds to scores, (..., queries, keys)."""
    bias = plain(b, mask)
    if str(getattr(bias, "type", getattr(bias, "dtype", ""))) == "bool":
        bias = np.where(bias, 0.0, -np.inf) if isinstance(bias, np.ndarray) else F.where(bias, 0.0, -np.inf)
    if isinstance(bias, np.ndarray):
        return np.broadcast_to(bias, (*bias.shape[:-2], whole(q.shape[2]), whole(k.shape[2])))
    return bias + np.zeros((whole(q.shape[2]), 1)) if bias.shape[-2] == ONE != q.shape[2] else bias


def packed(side: Sequence[Arranged]) -> Variable | None:
    """The variable whose columns are queries, keys and values, one behind the other."""
    found = [x.columns for x in side]
    if any(c is None or x.order != [*range(len(x.atoms))] for c, x in zip(found, side)):
        return None
    q, k, v = found
    ends = [0, q.stop, k.stop, v.stop]  # type: ignore[union-attr]
    together = {c.of for c in found} == {q.of} and [c.start for c in found] == ends[:-1]  # type: ignore[union-attr]
    return q.of if together and q.of.shape[-1] == ends[-1] and q.of.rank == 3 else None  # type: ignore[union-attr]


# ---------------------------------------------------------------- recurrent layers
def _recurrent(name: str, f: Callable[..., tuple[Variable, ...]], states: int, **more: Any) -> None:
    def layers(
        b: Building, x: Arranged, start: Any, weights: Sequence[Any], biases: bool, n: int, p: float, train: bool, both: bool,
        batch_first: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        if len(x.shape) != 3:
            raise Cannot("sequences without a batch: (N, T, features) has a counterpart")
        starts = [start] if states == 1 else start
        x = x if batch_first else x.swapped(0, 1)
        each = len(weights) // (n * (1 + both))
        lasts: list[tuple[Variable, ...]] = []
        for layer in range(n):
            v = x.variable()
            v = F.dropout(v, p) if layer and p and b.training else v
            found = []
            for end in range(1 + both):
                k = 2 * layer + end if both else layer
                own = weights[k * each : (k + 1) * each]
                w = [*(_weight(b, w) for w in own[:2]), *(variable(b, bias) for bias in own[2:])]
                first = [None if is_zero(s) else select(b, arranged(b, s), 0, k).variable() for s in starts]
                y, *last = f(v, *w, *(None,) * (4 - len(w)), *first, reverse=bool(end), **more)
                found.append(y)
                lasts.append(tuple(last))
            x = Arranged.of(found[0] if len(found) == 1 else F.concat(found, axis=-1))
        ends = (lambda k=k: stack(b, [Arranged.of(last[k]) for last in lasts]) for k in range(states))
        return (x if batch_first else x.swapped(0, 1), *ends)

    ATEN[name] = layers


def _weight(b: Building, w: Any) -> Variable:
    """A weight as (inputs, units)."""
    return arranged(b, w).swapped().variable()


def is_zero(x: Any) -> bool:
    return isinstance(x, Filled) and x.value == 0 or isinstance(x, np.ndarray) and not x.any()


_recurrent("lstm", sequences.lstm, 2)
_recurrent("gru", sequences.gru, 1)
_recurrent("rnn_tanh", sequences.rnn, 1)
_recurrent("rnn_relu", sequences.rnn, 1, nonlinearity="relu")
