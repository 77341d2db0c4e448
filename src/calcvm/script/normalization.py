"""Texts of normalizations."""

from __future__ import annotations

from typing import Any

from calcvm.ops.dims import ONE, Affine, Shape
from calcvm.script.elementwise import activated
from calcvm.script.row import Row, writes


# ---------------------------------------------------------------- by column of a batch
@writes("center_mean")
def _center_mean(r: Row) -> None:
    mean = r.call("mean_of", r.x("x", r.w.rows, r.w.cols), 0)
    r.put("t_m", mean, r.w.cols)
    m, running = r.x("t_m", r.w.cols), r.x("running", r.w.cols)
    r.put("running", running + r.w.momentum * (m - running), r.w.cols)


@writes("center_fwd")
def _center(r: Row) -> None:
    r.put("y", r.x("x", r.w.rows, r.w.cols) - r.x("t_m", r.w.cols), r.w.rows, r.w.cols)


@writes("center_mean_bwd")
def _center_mean_back(r: Row) -> None:
    r.put("t_d", r.call("mean_of", r.x("dy", r.w.rows, r.w.cols), 0), r.w.cols)


@writes("center_bwd")
def _center_back(r: Row) -> None:
    r.put("dx", r.x("dy", r.w.rows, r.w.cols) - r.x("t_d", r.w.cols), r.w.rows, r.w.cols)


# ---------------------------------------------------------------- by channel of a batch
def _images(r: Row) -> Shape:
    """All that has channels, which are the last axis: as it lies, or as rows of them."""
    for name in ("x", "y", "dx"):
        if name in r and r.shape(name)[-1:] == (r.w.N,):
            return r.shape(name)
    return r.w.rows * r.w.inner, r.w.N


def _rows(r: Row) -> tuple[int, ...]:
    """The axes but that of channels."""
    return tuple(range(len(_images(r)) - 1))


def _scaled(r: Row, y: Any, *shape: Affine) -> Any:
    y = y * r.x("scale", *shape) if "scale" in r else y
    return y + r.x("shift", *shape) if "shift" in r else y


def _finished(r: Row, y: Any, shape: Shape) -> None:
    """With what is added and the activation."""
    r.put("y", activated(r, y + r.x("other", *shape) if "other" in r else y), *shape)


@writes("batch_norm_stats")
def _batch_stats(r: Row) -> None:
    x, count = r.x("x", *_images(r)), r.w.rows * r.w.inner
    n = r.number(count)
    r.put("mean", r.call("mean_of", x, *_rows(r)), r.w.N)
    mean = r.x("mean", r.w.N)
    var = r.call("variance_of", x, mean, *_rows(r))
    r.put("inv", 1 / (var + r.w.eps).sqrt(), r.w.N)
    of, running = r.x("running_mean", r.w.N), r.x("running_var", r.w.N)
    r.put("running_mean", of + r.w.momentum * (mean - of), r.w.N)
    change = r.w.momentum * (var * n / _at_least_one(n - 1, count) - running)
    several = count.at(1) > 1  # values a channel, whatever the batch
    r.put("running_var", running + (change if several else n._of("bool", "({} > 1)", 9, (n, 3)) * change), r.w.N)


def _at_least_one(rest: Any, count: Affine) -> Any:
    return rest if count.at(1) > 1 else rest.trace.of("max({}, 1)", 9, ((rest, 0),))


@writes("batch_norm_fwd")
def _batch(r: Row) -> None:
    y = (r.x("x", *_images(r)) - r.x("mean", r.w.N)) * r.x("inv", r.w.N)
    _finished(r, _scaled(r, y, r.w.N), _images(r))


@writes("batch_norm_sums")
def _batch_sums(r: Row) -> None:
    x, dy = r.x("x", *_images(r)), r.x("dy", *_images(r))
    mean, inv, n = r.x("mean", r.w.N), r.x("inv", r.w.N), r.number(r.w.rows * r.w.inner)
    dscale, dshift = r.call("sum_of", dy * (x - mean) * inv, *_rows(r)), r.call("sum_of", dy, *_rows(r))
    r.put("dscale", dscale, r.w.N)
    r.put("dshift", dshift, r.w.N)
    dscale = r.x("dscale", r.w.N) if "dscale" in r else dscale
    dshift = r.x("dshift", r.w.N) if "dshift" in r else dshift
    factor = -(r.x("scale", r.w.N) * inv) if "scale" in r else -inv
    r.put("t_p", -inv * dscale / n, r.w.N)
    r.put("t_q", factor * dshift / n, r.w.N)


@writes("batch_norm_bwd")
def _batch_back(r: Row) -> None:
    n = r.w.N
    factor = r.x("scale", n) * r.x("inv", n) if "scale" in r else r.x("inv", n)
    x = r.x("x", *_images(r)) - r.x("mean", n)
    r.put("dx", factor * (r.x("dy", *_images(r)) + x * r.x("t_p", n)) + r.x("t_q", n), *_images(r))


@writes("batch_norm_inference_factor")
def _factor(r: Row) -> None:
    r.put("t_factor", _known_factor(r), r.w.N)


def _known_factor(r: Row) -> Any:
    root = (r.x("running_var", r.w.N) + r.w.eps).sqrt()
    return (r.x("scale", r.w.N) if "scale" in r else 1) / root


@writes("batch_norm_inference_fwd")
def _known(r: Row) -> None:
    y = (r.x("x", *_images(r)) - r.x("running_mean", r.w.N)) * r.x("t_factor", r.w.N)
    _finished(r, y + r.x("shift", r.w.N) if "shift" in r else y, _images(r))


@writes("batch_norm_inference_sums")
def _known_sums(r: Row) -> None:
    dy, n = r.x("dy", *_images(r)), r.w.N
    root = (r.x("running_var", n) + r.w.eps).sqrt()
    r.put("dscale", r.call("sum_of", dy * (r.x("x", *_images(r)) - r.x("running_mean", n)) / root, *_rows(r)), n)
    r.put("dshift", r.call("sum_of", dy, *_rows(r)), n)


@writes("batch_norm_inference_bwd")
def _known_back(r: Row) -> None:
    r.put("dx", r.x("dy", *_images(r)) * _known_factor(r), *_images(r))


# ---------------------------------------------------------------- by group of channels, by vector
def _normalized(r: Row, x: Any, axes: tuple[int, ...], single: Shape, own: Shape) -> Any:
    """Puts mean and inv, where they are kept, and gives (x - mean)*inv."""
    mean = r.call("mean_of", x, *axes)
    r.put("mean", mean, *own)
    mean = r.x("mean", *single) if "mean" in r else mean.reshape(*single)
    inv = 1 / (r.call("variance_of", x, mean, *axes) + r.w.eps).sqrt()
    r.put("inv", inv, *own)
    return (x - mean) * (r.x("inv", *single) if "inv" in r else inv.reshape(*single))


def _centered(r: Row, n: Any, g: Any, inv: Any, axes: str) -> Any:
    """dx of what was centered and divided by its deviation, n; of one that was divided alone, by ``center``."""
    b = (g * n).method(f"mean({axes}, keepdims=True)")
    return inv * (g - g.method(f"mean({axes}, keepdims=True)") - n * b) if "mean" in r else inv * (g - n * b)


@writes("group_norm_fwd")
def _group(r: Row) -> None:
    w = r.w
    shape = (w.rows, w.inner, w.groups, w.D)
    y = _normalized(r, r.x("x", *shape), (1, 3), (w.rows, ONE, w.groups, ONE), (w.rows, w.groups))
    _finished(r, _scaled(r, y, w.groups, w.D), shape)


@writes("group_norm_bwd")
def _group_back(r: Row) -> None:
    w = r.w
    shape, single = (w.rows, w.inner, w.groups, w.D), (w.rows, ONE, w.groups, ONE)
    _norm_back(r, shape, single, (w.groups, w.D), (0, 1), "(1, 3)")


def _norm_back(r: Row, shape: Shape, single: Shape, scale: Shape, rows: tuple[int, ...], axes: str) -> None:
    x, dy, inv = r.x("x", *shape), r.x("dy", *shape), r.x("inv", *single)
    n = (x - r.x("mean", *single)) * inv if "mean" in r else x * inv
    r.put("dscale", r.call("sum_of", dy * n, *rows), *scale)
    r.put("dshift", r.call("sum_of", dy, *rows), *scale)
    g = dy * r.x("scale", *scale) if "scale" in r else dy
    r.put("dx", _centered(r, n, g, inv, axes), *shape)


@writes("layer_norm_fwd")
def _layer(r: Row) -> None:
    m = r.w.rows * r.w.inner
    y = _normalized(r, r.x("x", m, r.w.N), (1,), (m, ONE), (m,))
    r.put("y", _scaled(r, y, r.w.N), m, r.w.N)


@writes("rms_norm_fwd")
def _rms(r: Row) -> None:
    m = r.w.rows * r.w.inner
    x = r.x("x", m, r.w.N)
    inv = 1 / (r.call("mean_of", x * x, 1) + r.w.eps).sqrt()
    r.put("inv", inv, m)
    r.put("y", _scaled(r, x * (r.x("inv", m, ONE) if "inv" in r else inv.reshape(m, ONE)), r.w.N), m, r.w.N)


@writes("layer_norm_bwd", "rms_norm_bwd")
def _vectors_back(r: Row) -> None:
    m = r.w.rows * r.w.inner
    _norm_back(r, (m, r.w.N), (m, ONE), (r.w.N,), (0,), "1")


# ---------------------------------------------------------------- by neighbouring channels
def _base(r: Row, x: Any) -> Any:
    size = r.integer("size")
    return r.number(r.w.k) + r.w.alpha / size * r.call("neighbours", x * x, size // 2, (size - 1) // 2)


@writes("local_response_norm_fwd")
def _local(r: Row) -> None:
    x = r.x("x", *_images(r))
    r.put("y", x * _base(r, x) ** -r.w.beta, *_images(r))


@writes("local_response_norm_bwd")
def _local_back(r: Row) -> None:
    x, dy, size = r.x("x", *_images(r)), r.x("dy", *_images(r)), r.integer("size")
    d = _base(r, x)
    others = r.call("neighbours", dy * x * d ** -(r.w.beta + 1), (size - 1) // 2, size // 2)
    r.put("dx", dy * d**-r.w.beta - 2 * r.w.alpha * r.w.beta / size * x * others, *_images(r))
