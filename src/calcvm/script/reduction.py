"""Texts of gradients of extrema, of softmax, and of losses."""

from __future__ import annotations

from typing import Any

from calcvm.equations.tree import element
from calcvm.formulas.declare import PAIR_LOSSES, Formula
from calcvm.ops.dims import ONE, Affine
from calcvm.script.code import ATOM, LOWEST, show
from calcvm.script.code import ONE as ONE_TEXT
from calcvm.script.derived import Axes, Value
from calcvm.script.elementwise import applied
from calcvm.script.row import FALLBACKS, Row, Writer, writes


# ---------------------------------------------------------------- extrema
@writes("max_bwd", "min_bwd")
def _extremum_back(r: Row) -> None:
    axes = Axes(r)  # of x, which the equation reads at u and v as well as at the places a and b of dx
    x, dy = axes.element(element("x", *"opuvl")), axes.element(element("dy", *"opl"))
    kept = tuple(v for v in x.axes if v not in "uv")
    y = Value(kept, r.shaped("y", axes.shape(kept)), "y")
    over = tuple(k for k, v in enumerate(v for v in x.axes for _ in axes.dims[v]) if v in "uv")
    first = r.call("first_of", axes.at(x, x.axes), axes.at(y, x.axes), over)
    r.put_shaped("dx", axes.at(dy, x.axes) * first, axes.shape(x.axes))


# ---------------------------------------------------------------- places in order
@writes("argsort_fwd")
def _argsort(r: Row) -> None:
    w = r.w
    r.put("y", r.call("argsort", r.x("x", w.O, w.N, w.I), w.K, bool(r.integer("descending"))), w.O, w.K, w.I)


# ---------------------------------------------------------------- softmax
def rows_of(r: Row) -> tuple[Affine, Affine]:
    return r.w.rows * r.w.inner, r.w.N


@writes("softmax_fwd", "log_softmax_fwd")
def _softmax(r: Row) -> None:
    r.put("y", r.call(r.spec.name.removesuffix("_fwd"), r.x("x", *rows_of(r))), *rows_of(r))


# ---------------------------------------------------------------- losses over pairs
def _pair_row(name: str) -> Writer | None:
    for loss in PAIR_LOSSES.values():
        if name == loss.term.name:
            return lambda r: _terms(r, loss.term)
        for v, f in loss.slopes.items():
            if name == f.name:
                return lambda r, v=v, f=f: _slope(r, v, f)  # type: ignore[misc]
    return None


FALLBACKS.append(_pair_row)


def _terms(r: Row, f: Formula) -> None:
    shape = (r.w.rows, r.w.cols)
    term = applied(r, f, *(r.x(v, *shape) for v in f.reads))
    r.put("t_l", term if r.w.cols == ONE else term.sum(1), *shape[: 2 if r.w.cols == ONE else 1])


def _slope(r: Row, v: str, f: Formula) -> None:
    slope = applied(r, f, *(r.like(name, f"d{v}") for name in f.reads))
    r.put(f"d{v}", weighted(r, slope, f"d{v}", r.number(f.factor)))


def weighted(r: Row, slope: Any, to: str, factor: Any = 1) -> Any:
    """A slope times a factor and the gradient of the mean that it belongs to, in the shape of the target."""
    own = r.shape("dloss")
    seed, count = r.factor("dloss", own if len(own) <= len(r.shape(to)) else ()), r.number(r.w.count)
    return factor * slope / count if seed.form == ONE_TEXT else factor * (seed / count * slope)


# ---------------------------------------------------------------- losses of classes
def _labels(r: Row, name: str) -> Any:
    """Labels, or probabilities, per row."""
    return r.x(name, *rows_of(r)) if getattr(r.w, "dense", 0) == 1 else r.x(name, rows_of(r)[0])


def _wanted(r: Row) -> Any:
    """The target distribution."""
    dense, s = r.w.dense == 1, r.w.smoothing
    q = _labels(r, "target") if dense else one_hot(r, _labels(r, "target"))
    return q if not s else (1 - s) * q + r.number(s) / r.w.N


def _picked(r: Row, x: Any, labels: Any, n: Any) -> Any:
    """The element of each row of x at its label."""
    index = r.call("index_below", n, labels)
    return r.trace.of(f"{{}}[np.arange({show(rows_of(r)[0])}), {{}}]", ATOM, ((x, ATOM), (index, LOWEST)))


def one_hot(r: Row, labels: Any) -> Any:
    of = next(r.dtype(v) for v in ("p", "dlogits", "logits", "dx", "scores") if v in r)
    return r.call("one_hot", labels, r.w.N, *([] if of == "float64" else [f"np.{of}"]))


@writes("softmax_cross_entropy_fwd")
def _cross_entropy(r: Row) -> None:
    logits = r.x("logits", *rows_of(r))
    log_p, dense = r.call("log_softmax", logits), r.w.dense == 1
    if r.w.smoothing:
        each = -(_wanted(r) * log_p).sum(1)
    else:  # avoids 0*inf if a class of probability 0 has the score -inf
        each = -(r.call("times", _wanted(r), log_p).sum(1) if dense else _picked(r, log_p, _labels(r, "target"), r.w.N))
    if r.w.inner != ONE:
        each = each.reshape(r.w.rows, r.w.inner).sum(1)
    r.put("t_l", each, r.w.rows)
    r.put("p", r.call("softmax", logits), *rows_of(r))


@writes("softmax_cross_entropy_bwd")
def _cross_entropy_back(r: Row) -> None:
    p, q = r.x("p", *rows_of(r)), _wanted(r)
    by_row = p * q.method("sum(-1, keepdims=True)") if r.w.dense == 1 else p
    r.put("dlogits", weighted(r, by_row - q, "dlogits"), *rows_of(r))


@writes("pick_fwd")
def _pick(r: Row) -> None:
    places, n = rows_of(r)
    r.put("y", _picked(r, r.x("x", places, n), r.x("index", places), n), places)


@writes("pick_bwd")
def _pick_back(r: Row) -> None:
    dy = r.x("dy", rows_of(r)[0], 1)
    r.put("dx", dy * one_hot(r, r.x("index", rows_of(r)[0])), *rows_of(r))
