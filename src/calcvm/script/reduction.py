"""Texts of sums, extrema, softmax, losses and metrics."""

from __future__ import annotations

from typing import Any

from calcvm.formulas.declare import PAIR_LOSSES, Formula
from calcvm.ops.dims import ONE, Affine, Shape
from calcvm.script.code import ATOM, LOWEST, show, show_axes
from calcvm.script.code import ONE as ONE_TEXT
from calcvm.script.elementwise import applied
from calcvm.script.row import FALLBACKS, Row, Writer, sizes, writes

SUM, EXTREMUM = ("O", "R0", "K0", "R1", "K1", "R2", "I"), ("O", "P", "R0", "R1", "I")


# ---------------------------------------------------------------- reductions
class Axes:
    """How a reduction sees x: in a shape of x's own axes where its groups are those, and which of them it is over."""

    def __init__(self, r: Row, names: tuple[str, ...], x: str):
        groups = [(getattr(r.w, v), v[0] == "R") for v in names if getattr(r.w, v) != ONE]
        own = _split(r.shape(x), groups)
        self.full: Shape = sizes(tuple(n for n, _ in own))
        self.over = tuple(i for i, (_, gone) in enumerate(own) if gone)
        self.kept: Shape = tuple(n for n, gone in own if not gone)
        self.single: Shape = tuple(ONE if gone else n for n, gone in own)
        self.count: Any = ONE
        for n, gone in own:
            self.count = self.count * n if gone else self.count

    def reduce(self, x: Any, how: str) -> Any:
        return x.method(f"{how}({show_axes(self.over)})") if self.over else x

    def spread(self, r: Row, name: str) -> Any:
        """What was reduced, in a shape that broadcasts to x's."""
        return r.factor(name, self.single)


def _split(shape: Shape, groups: list[tuple[Affine, bool]]) -> list[tuple[Affine, bool]]:
    """Each axis of a shape with the kind of its group; the groups themselves where axes do not line up with them."""
    out: list[tuple[Affine, bool]] = []
    todo, size, gone = [*groups], ONE, False
    for n in shape:
        if n == ONE:
            out.append((n, False))
            continue
        if size == ONE:
            if not todo:
                return groups
            size, gone = todo.pop(0)
        try:
            size = size // n
        except ArithmeticError:
            return groups
        out.append((n, gone))
    return out if size == ONE and not todo else groups


def _sums(name: str, forward: str, of: Any, back: Any) -> None:
    @writes(f"{name}_fwd")
    def _forward(r: Row) -> None:
        axes = Axes(r, SUM, "x")
        r.put_shaped("y", axes.reduce(of(r.shaped("x", axes.full)), forward), axes.kept)

    @writes(f"{name}_bwd")
    def _back(r: Row) -> None:
        axes = Axes(r, SUM, "dx")
        x = r.shaped("x", axes.full) if "x" in r else None
        value = back(axes.spread(r, "dy"), x, axes.count)
        if x is None and axes.over:
            value = r.call("np.broadcast_to", value, axes.full)
        r.put_shaped("dx", value, axes.full)


_sums("sum", "sum", lambda x: x, lambda dy, x, n: dy)
_sums("mean", "mean", lambda x: x, lambda dy, x, n: dy / n)
_sums("sum_squares", "sum", lambda x: x * x, lambda dy, x, n: 2 * dy * x)


@writes("max_fwd", "min_fwd")
def _extremum(r: Row) -> None:
    axes = Axes(r, EXTREMUM, "x")
    r.put_shaped("y", axes.reduce(r.shaped("x", axes.full), r.spec.name[:3]), axes.kept)


@writes("max_bwd", "min_bwd")
def _extremum_back(r: Row) -> None:
    axes = Axes(r, EXTREMUM, "x")
    first = r.call("first_of", r.shaped("x", axes.full), axes.spread(r, "y"), axes.over)
    r.put_shaped("dx", axes.spread(r, "dy") * first, axes.full)


# ---------------------------------------------------------------- softmax
def rows_of(r: Row) -> tuple[Affine, Affine]:
    return r.w.rows * r.w.inner, r.w.N


@writes("softmax_fwd", "log_softmax_fwd")
def _softmax(r: Row) -> None:
    r.put("y", r.call(r.spec.name.removesuffix("_fwd"), r.x("x", *rows_of(r))), *rows_of(r))


def total(x: Any) -> Any:
    """Of each row, in a shape that broadcasts."""
    return x.method("sum(-1, keepdims=True)")


@writes("softmax_bwd")
def _softmax_back(r: Row) -> None:
    y, dy = r.x("y", *rows_of(r)), r.x("dy", *rows_of(r))
    r.put("dx", y * (dy - total(dy * y)), *rows_of(r))


@writes("log_softmax_bwd")
def _log_softmax_back(r: Row) -> None:
    y, dy = r.x("y", *rows_of(r)), r.x("dy", *rows_of(r))
    r.put("dx", dy - y.exp() * total(dy), *rows_of(r))


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
    """A slope times the gradient of the mean that it is part of and a factor, in the shape of what it is put to."""
    own = r.shape("dloss")
    seed, count = r.factor("dloss", own if len(own) <= len(r.shape(to)) else ()), r.number(r.w.count)
    return factor * slope / count if seed.form == ONE_TEXT else factor * (seed / count * slope)


@writes("loss_mean", "metric_mean")
def _mean(r: Row) -> None:
    r.put("loss" if "loss" in r else "y", r.x("t_l").sum() / r.number(r.w.count))


@writes("metric_root_mean")
def _root_mean(r: Row) -> None:
    r.put("y", (r.x("t_l").sum() / r.number(r.w.count)).sqrt())


# ---------------------------------------------------------------- losses of classes
def _labels(r: Row, name: str) -> Any:
    """Labels, or probabilities, of each row."""
    return r.x(name, *rows_of(r)) if getattr(r.w, "dense", 0) == 1 else r.x(name, rows_of(r)[0])


def _wanted(r: Row) -> Any:
    """The distribution that is wanted."""
    dense, s = r.w.dense == 1, r.w.smoothing
    q = _labels(r, "target") if dense else one_hot(r, _labels(r, "target"))
    return q if not s else (1 - s) * q + r.number(s) / r.w.N


def _picked(r: Row, x: Any, labels: Any, n: Any) -> Any:
    """Of each row of x its element of the label."""
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
    else:  # without 0*inf where a class that is not wanted has the score -inf
        each = -(r.call("times", _wanted(r), log_p).sum(1) if dense else _picked(r, log_p, _labels(r, "target"), r.w.N))
    if r.w.inner != ONE:
        each = each.reshape(r.w.rows, r.w.inner).sum(1)
    r.put("t_l", each, r.w.rows)
    r.put("p", r.call("softmax", logits), *rows_of(r))


@writes("softmax_cross_entropy_bwd")
def _cross_entropy_back(r: Row) -> None:
    p, q = r.x("p", *rows_of(r)), _wanted(r)
    by_row = p * total(q) if r.w.dense == 1 else p
    r.put("dlogits", weighted(r, by_row - q, "dlogits"), *rows_of(r))


@writes("pick_fwd")
def _pick(r: Row) -> None:
    places, n = rows_of(r)
    r.put("y", _picked(r, r.x("x", places, n), r.x("index", places), n), places)


@writes("pick_bwd")
def _pick_back(r: Row) -> None:
    dy = r.x("dy", rows_of(r)[0], 1)
    r.put("dx", dy * one_hot(r, r.x("index", rows_of(r)[0])), *rows_of(r))


@writes("accuracy_fwd")
def _accuracy(r: Row) -> None:
    label = _labels(r, "target")
    label = label.method("argmax(1)") if r.w.dense == 1 else label
    hits = r.x("scores", *rows_of(r)).method("argmax(1)").equals(label)
    if r.w.inner != ONE:
        hits = hits.reshape(r.w.rows, r.w.inner).sum(1)
    r.put("t_l", hits, r.w.rows)
