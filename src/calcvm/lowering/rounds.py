"""How a result depends on the samples of a batch, so that rounds, each with a part of the batch, can be combined.

This module puts each variable, from the placeholders on, into a class:

- the same for any batch;
- one part per sample, which depends on no other sample;
- a mean, or a sum, over samples of such parts;
- another function of the batch.

Means of rounds combine weighted by their share of the samples, and sums add up.  Other functions cannot be combined.

A value with one part per sample lies in memory as (outer, B, inner).  Views and transpositions keep this form or change the
numbers.  An operator on two such values works sample by sample only if both have the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from calcvm.graph import Operation, Variable
from calcvm.ops.dims import Shape
from calcvm.ops.gradient import GRADIENT
from calcvm.ops.spec import EQUATION
from calcvm.ops.types import FLOAT

SAME, SAMPLES, MEAN, SUM, OTHER = "same", "samples", "mean", "sum", "other"


@dataclass(frozen=True)
class Over:
    """How a value depends on the samples of a batch.

    what : the same for any batch, one part per sample (outer, B, inner), a mean, a sum, or another function.
    added : for SAMPLES: a mean was added to each part.
    why : for OTHER: the operator that made it so.
    """

    what: str
    outer: int = 1
    inner: int = 1
    added: bool = False
    why: str = ""


@dataclass(frozen=True)
class _Axis:
    """The axis of a shape that contains the samples, and the (outer, B, inner) form of this axis."""

    at: int  # from the last one: -1, -2, ...
    outer: int
    inner: int


CONSTANT = Over(SAME)
LINEAR = frozenset(
    "neg affine add sub sum mean transpose concat concat_many slice cast reshape flatten channels_last channels_first "
    "stop_gradient".split()
)
ELEMENTWISE = ("unary", "binary", "ternary")  # categories of operators
# Operators whose result for a sample depends on that sample only.  Statistics of a batch are computed per round.
BY_SAMPLE = frozenset(
    "conv conv_transpose avg_pool max_pool lp_pool global_avg_pool global_max_pool adaptive_avg_pool adaptive_max_pool upsample "
    "pad rotary local_response_norm group_norm instance_norm batch_norm batch_norm_inference center crop dropout_mask "
    "linear_int8 conv_int8 max_pool_int8".split()
)


Places = dict[str, list[int | None]]  # by input and axis the result's axis; None: a result depends on many places of it


def _taken(op: Operation) -> Places:
    """Of ``y[.., *k, ..] = x[.., index[*k], ..]``."""
    x, k = len(op.laid["x"]), len(op.laid.get("index", ()))
    axis = op.attrs.get("axis", 0) % x
    return {"x": [*range(axis), None, *range(axis + k, x - 1 + k)], "index": [*range(axis, axis + k)]}


def _along_axis(op: Operation) -> Places:
    x = len(op.laid["x"])
    axis = op.attrs.get("axis", 0) % x
    return {"x": [None if a == axis else a for a in range(x)], "index": [*range(x)]}


def _of_index(op: Operation) -> Places:
    return {"x": [None] * len(op.laid["x"]), "index": [*range(len(op.laid["index"]))]}


def _added(op: Operation) -> Places:
    x = _along_axis(op)["x"]
    index: list[int | None] = [None] * len(op.laid["index"])
    return {"x": x, "index": index, "u": [*index, *x[1:]]}


AT_PLACES = {
    **dict.fromkeys(("embedding", "take", "argmax", "argmin"), _taken),
    **dict.fromkeys(("take_along_axis", "argsort"), _along_axis),
    **dict.fromkeys(("one_hot", "inside"), _of_index),
    "scatter_add": _added,
}


class Rounds:
    """How the variables of a graph depend on the samples of a batch."""

    def __init__(self) -> None:
        self._known: dict[Variable, Over] = {}

    def of(self, v: Variable) -> Over:
        """Classify a variable (without recursion: graphs are deep)."""
        todo = [v]
        while todo:
            v = todo[-1]
            op = v.producer
            behind = [] if op is None else [x for x in op.inputs.values() if x not in self._known]
            if v in self._known or not behind:
                todo.pop()
                if v not in self._known:
                    self._known |= _source(v) if op is None else self._made(op)
            else:
                todo += behind
        return self._known[v]

    def totals(self, v: Variable) -> list[Variable] | None:
        """The means and sums of a batch of which a number is a function; None if it depends on single samples."""
        found, todo = dict[Variable, None](), [v]
        seen = {v}
        while todo:
            v = todo.pop()
            what = self.of(v).what
            if what in (MEAN, SUM):
                found[v] = None
            elif what != SAME:
                if v.producer is None or any(n.a for n in v.laid):
                    return None
                todo += [x for x in v.producer.inputs.values() if x not in seen]
                seen |= {*v.producer.inputs.values()}
        return [*found]

    def _made(self, op: Operation) -> dict[Variable, Over]:
        inputs = {slot: self._known[x] for slot, x in op.inputs.items()}
        found = next((o for o in inputs.values() if o.what == OTHER), None)
        if found is None and any(o.what != SAME for o in inputs.values()):
            found = _rule(op, inputs)
        found = found or CONSTANT
        why = found.why or f"{op.spec.name} ({op.name})" if found.what == OTHER else ""
        others = found.what == SAMPLES and found.outer == 1  # of several results each has its own size
        return {
            y: _checked(op, y, replace(found, why=why, inner=_size(y.laid[1:]) if others and i else found.inner))
            for i, y in enumerate(op.outputs.values())
        }


def _checked(op: Operation, y: Variable, over: Over) -> Over:
    """Replace a class by OTHER if it contradicts the shape: a result has samples if and only if B is in its shape."""
    has = any(n.a for n in y.laid)
    if over.what != OTHER and (has != (over.what == SAMPLES) or any(n.a and n.b for n in y.laid)):
        return Over(OTHER, why=f"{op.spec.name} ({op.name})")
    return over


def _source(v: Variable) -> dict[Variable, Over]:
    at = next((i for i, n in enumerate(v.laid) if n.a), None)
    if at is None:
        return {v: CONSTANT}
    if v.laid[at].b:
        return {v: Over(OTHER, why=f"the placeholder {v.name!r}")}
    return {v: Over(SAMPLES, _size(v.laid[:at]), _size(v.laid[at + 1 :]) * v.laid[at].a)}


def _size(shape: Shape) -> int:
    return math.prod(n.b for n in shape)


def _axis(over: Over, shape: Shape) -> _Axis | None:
    """The axis of a shape that contains the samples; None if they do not form part of one axis."""
    at = next((i for i, n in enumerate(shape) if n.a), None)
    if at is None:
        return None
    before, after = _size(shape[:at]), _size(shape[at + 1 :])
    if not before or not after or over.outer % before or over.inner % after:
        return None
    return _Axis(at - len(shape), over.outer // before, over.inner // after)


def _along(axis: _Axis, shape: Shape, added: bool = False) -> Over:
    """The class of a value with samples in an axis of a shape."""
    at = len(shape) + axis.at
    return Over(SAMPLES, axis.outer * _size(shape[:at]), axis.inner * _size(shape[at + 1 :]), added)


def _rule(op: Operation, inputs: dict[str, Over]) -> Over | None:
    """The class of an operator's result, if some input depends on the batch."""
    name, shapes = op.spec.name, op.laid
    if op.spec is GRADIENT:
        return _gradient(inputs)
    kinds = {o.what for o in inputs.values()}
    if SAMPLES not in kinds:
        return _of_totals(op, inputs, kinds)
    if op.spec.view or op.spec.casts:
        found = inputs[op.spec.inputs[0]]
        return found if not found.added or not op.spec.casts or op.outputs["y"].type == FLOAT else OTHER_
    axes = {slot: _axis(o, shapes[slot]) for slot, o in inputs.items() if o.what == SAMPLES}
    if None in axes.values():
        return OTHER_
    placed = {slot: axis for slot, axis in axes.items() if axis is not None}
    y = shapes[op.spec.outputs[0]]
    if name in ("matmul", "linear"):
        return _product(op, inputs, placed, y)
    if op.spec.category == EQUATION:
        return _of_equation(op, placed, kinds, any(o.added for o in inputs.values()))
    one = {*placed.values()}
    if name == "inside" and placed.keys() == {"x"} and placed["x"].at == -1:
        return CONSTANT  # index itself, whatever x is
    if name in AT_PLACES:
        same = len({(axis.outer, axis.inner) for axis in one}) == 1 and kinds <= {SAME, SAMPLES}
        to = {AT_PLACES[name](op)[slot][len(shapes[slot]) + axis.at] for slot, axis in placed.items()}
        at = to.pop()
        if not same or to or at is None or any(o.added for o in inputs.values()):
            return OTHER_
        return _along(replace(one.pop(), at=at - len(y)), y)
    if name in ("pick", "softmax_cross_entropy", "accuracy"):
        return _of_classes(op, inputs, placed)
    if name in ("attention", "attention_packed") or op.spec.category == "recurrent":
        first = all(axis.outer == 1 and axis.at == -len(shapes[slot]) for slot, axis in placed.items())
        alone = kinds <= {SAME, SAMPLES} and not any(o.added for o in inputs.values())
        return _along(replace(one.pop(), at=-len(y)), y) if first and alone else OTHER_
    if len(one) != 1:
        return OTHER_
    axis = one.pop()
    mixed, added = kinds - {SAME, SAMPLES}, any(o.added for o in inputs.values())
    if op.spec.category == "loss":
        return OTHER_ if mixed or added else Over(MEAN)
    if op.spec.category in ELEMENTWISE or name in ("dropout", "add_int8"):
        if not mixed and not added:
            return _along(axis, y)
        chosen = name == "where" and inputs["c"].what == SAME
        scaled = SAME in kinds and not mixed and (name == "mul" or (name == "div" and inputs["b"].what == SAME))
        return _along(axis, y, True) if mixed <= {MEAN} and (name in LINEAR or chosen or scaled) else OTHER_
    if mixed or (added and name not in LINEAR):
        return OTHER_
    x = shapes[op.spec.inputs[0]]
    at = len(x) + axis.at
    if op.spec.category == "reduction" and "axes" in op.attrs:
        taken = range(len(x)) if op.attrs["axes"] is None else {a % len(x) for a in op.attrs["axes"]}
        if at in taken:
            return {"sum": Over(SUM), "sum_squares": Over(SUM), "mean": Over(MEAN)}.get(name, OTHER_)
        after = sum(1 for a in range(at + 1, len(x)) if a not in taken or op.attrs["keepdims"])
        return _along(replace(axis, at=-1 - after), y, added)
    if op.spec.category == "reduction":
        return _along(axis, y, added) if at != op.attrs["axis"] % len(x) else OTHER_
    if name in ("layer_norm", "rms_norm"):
        return _along(axis, y) if axis.at < -op.attrs["axes"] else OTHER_
    if name == "transpose":
        order = op.attrs["axes"] or tuple(reversed(range(len(x))))
        return _along(replace(axis, at=[a % len(x) for a in order].index(at) - len(x)), y, added)
    if name == "slice":
        return _along(axis, y, added) if y[at] == x[at] else OTHER_
    if name in ("concat", "concat_many"):
        if len(placed) < len(inputs):
            return OTHER_
        if op.attrs["axis"] % len(x) != at:
            return _along(axis, y, added)
        return (
            _along(replace(axis, outer=len(inputs)), y, added)
            if axis.outer == 1 and len({*shapes.values()}) == 2
            else OTHER_
        )
    if at != 0 or axis.outer != 1 or len(placed) > 1:
        return OTHER_
    return _along(replace(axis, at=-len(y)), y) if y and (name in BY_SAMPLE or _shared_by_rows(op)) else OTHER_


OTHER_ = Over(OTHER)


def _of_totals(op: Operation, inputs: dict[str, Over], kinds: set[str]) -> Over:
    """The class of a result of means, sums, and values that are the same for any batch."""
    name, totals = op.spec.name, kinds - {SAME}
    if len(totals) > 1:
        return OTHER_
    found = Over(totals.pop())
    number = [slot for slot, o in inputs.items() if o.what != SAME]
    if op.spec.casts and op.outputs["y"].type != FLOAT:
        return OTHER_
    if name in LINEAR or (name == "where" and "c" not in number):
        with_same = SAME in {o.what for slot, o in inputs.items() if slot != "c"} or op.attrs.get("b", 0.0) != 0.0
        return OTHER_ if found.what == SUM and with_same else found
    if name in ("max", "min") and _size(op.laid["x"]) == _size(op.laid["y"]):
        return found
    if name == "linear":
        return found if not {"x", "wt"} <= {*number} and (found.what == MEAN or "b" not in inputs) else OTHER_
    return found if (name in ("mul", "matmul") and len(number) == 1) or (name == "div" and number == ["a"]) else OTHER_


def _product(op: Operation, inputs: dict[str, Over], placed: dict[str, _Axis], y: Shape) -> Over:
    """The class of a matrix product, with samples in one factor or in both."""
    first, second = op.spec.inputs[:2]
    if any(o.what in (MEAN, SUM) for o in inputs.values()):
        return OTHER_
    turned = {first: op.attrs.get("transpose_a", False), second: op.attrs.get("transpose_b", False)}
    # per factor, the axis in the form (..., rows, columns)
    axes = {
        slot: replace(axis, at=-3 - axis.at if turned.get(slot) and axis.at >= -2 else axis.at)
        for slot, axis in placed.items()
    }
    added = any(o.added for o in inputs.values())
    if len(op.laid[first]) == 1 or len(op.laid[second]) == 1:
        return OTHER_
    if axes.keys() == {first}:
        return _along(axes[first], y, added) if axes[first].at != -1 else OTHER_
    if axes.keys() == {second}:
        return _along(axes[second], y, added) if axes[second].at != -2 else OTHER_
    if added or axes.keys() != {first, second}:
        return OTHER_
    a, b = axes[first], axes[second]
    if (a.at, b.at) == (-1, -2):
        return Over(SUM) if (a.outer, a.inner) == (b.outer, b.inner) and len(inputs) == 2 else OTHER_
    return _along(a, y) if a == b and a.at < -2 else OTHER_


def _of_classes(op: Operation, inputs: dict[str, Over], placed: dict[str, _Axis]) -> Over:
    """The class of a result of scores, whose last axis has the classes, and labels or one number per class."""
    scores, labels = op.spec.inputs[:2]
    if len(placed) != 2 or any(o.added for o in inputs.values()):
        return OTHER_
    x, t = op.laid[scores], op.laid[labels]
    at, of_labels = len(x) + placed[scores].at, len(t) + placed[labels].at
    same = (placed[scores].outer, placed[scores].inner) == (placed[labels].outer, placed[labels].inner)
    if not same or at != of_labels or at == len(x) - 1:
        return OTHER_
    if op.spec.name != "pick":
        return Over(MEAN)
    return _along(replace(placed[labels]), op.laid["y"])


def _of_equation(op: Operation, placed: dict[str, _Axis], kinds: set[str], added: bool) -> Over:
    """The class of an operator given by an equation, if exactly one index runs over the samples."""
    spec: Any = op.spec
    along = {spec.indexes[slot][axis.at] for slot, axis in placed.items()}
    alike = {(axis.outer, axis.inner) for axis in placed.values()}
    if kinds != {SAME, SAMPLES} and kinds != {SAMPLES} or added or len(along) != 1 or len(alike) != 1:
        return OTHER_
    (index,) = along
    y, axis = spec.indexes["y"], next(iter(placed.values()))
    if index in y:
        return _along(replace(axis, at=y.index(index) - len(y)), op.laid["y"])
    return {"sum": Over(SUM), "mean": Over(MEAN)}.get(spec.reduces.get(index, ""), OTHER_)


def _gradient(inputs: dict[str, Over]) -> Over:
    """The class of dy/dx, summed over all elements of y."""
    y, x = inputs["y"], inputs["x"]
    if y.added or x.added or x.what not in (SAME, SAMPLES):
        return OTHER_
    if x.what == SAMPLES:
        return x if y.what in (SUM, SAMPLES) else OTHER_
    return Over(SUM) if y.what == SAMPLES else y


def _shared_by_rows(op: Operation) -> bool:
    """Whether workers share an operator along its leading axis, so that each reads its own samples only."""
    with_samples = {slot for slot, shape in op.laid.items() if any(n.a for n in shape)}
    operands = [o for row in op.spec.fwd for o in row.operands if o.name in with_samples or o.writes]
    return bool(operands) and all(o.part == "rows" for o in operands)
