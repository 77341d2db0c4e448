"""What a result of a batch is over its samples: how rounds, each of a part of them, can be put together.

Of each variable it is found out, from the placeholders on, whether it is the same for any batch, has a part for each
sample that depends on no other sample, or is a mean, or a sum, over samples of what depends on each alone.  Means of rounds
add up, each times its share of the samples, and so do sums; all else of a batch is none of these.

A value that has parts for samples lies in memory as (outer, B, inner): views and transpositions leave it so or change the
numbers, and what two such values make meets sample by sample only where they are laid alike.
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
    """What a value is over the samples of a batch.

    what : the same for any batch, of samples (outer, B, inner), a mean, a sum, or another function of them.
    added : of samples, a mean has been added to each.
    why : another function: made by which operator.
    """

    what: str
    outer: int = 1
    inner: int = 1
    added: bool = False
    why: str = ""


@dataclass(frozen=True)
class _Axis:
    """The axis of a shape in which the samples are, as (outer, B, inner) of it."""

    at: int  # from the last one: -1, -2, ...
    outer: int
    inner: int


CONSTANT = Over(SAME)
LINEAR = frozenset(
    "neg affine add sub sum mean transpose concat concat_many slice cast reshape flatten channels_last channels_first "
    "stop_gradient".split()
)
ELEMENTWISE = ("unary", "binary", "ternary")  # categories of operators
# A sample's result is of that sample, along the axes that no rule below names.  Statistics of a batch are those of a round.
BY_SAMPLE = frozenset(
    "conv conv_transpose avg_pool max_pool lp_pool global_avg_pool global_max_pool adaptive_avg_pool adaptive_max_pool upsample "
    "pad local_response_norm group_norm instance_norm batch_norm batch_norm_inference center crop dropout_mask".split()
)


class Rounds:
    """What variables of a graph are over the samples of a batch."""

    def __init__(self) -> None:
        self._known: dict[Variable, Over] = {}

    def of(self, v: Variable) -> Over:
        """What a variable is (without recursion: graphs are deep)."""
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
        """The means and sums of a batch that a number is a function of; None: it is a function of samples."""
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
        return {
            y: _checked(
                op, y, replace(found, why=found.why or f"{op.spec.name} ({op.name})" if found.what == OTHER else "")
            )
            for y in op.outputs.values()
        }


def _checked(op: Operation, y: Variable, over: Over) -> Over:
    """Samples only where a result has them at every batch, and only there."""
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
    """Where the samples are in a shape; None: they are in no axis by themselves."""
    at = next((i for i, n in enumerate(shape) if n.a), None)
    if at is None:
        return None
    before, after = _size(shape[:at]), _size(shape[at + 1 :])
    if not before or not after or over.outer % before or over.inner % after:
        return None
    return _Axis(at - len(shape), over.outer // before, over.inner // after)


def _along(axis: _Axis, shape: Shape, added: bool = False) -> Over:
    """Samples in an axis of a shape."""
    at = len(shape) + axis.at
    return Over(SAMPLES, axis.outer * _size(shape[:at]), axis.inner * _size(shape[at + 1 :]), added)


def _rule(op: Operation, inputs: dict[str, Over]) -> Over | None:
    """What an operator makes of inputs that are not all the same for any batch; None: another function."""
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
    if name in ("pick", "softmax_cross_entropy", "accuracy"):
        return _of_classes(op, inputs, placed)
    if len(one) != 1:
        return OTHER_
    axis = one.pop()
    mixed, added = kinds - {SAME, SAMPLES}, any(o.added for o in inputs.values())
    if op.spec.category == "loss":
        return OTHER_ if mixed or added else Over(MEAN)
    if op.spec.category in ELEMENTWISE or name == "dropout":
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
    """Of means and sums, and what is the same for any batch."""
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
    """Of a matrix product: of the samples of one factor, or over those of both."""
    first, second = op.spec.inputs[:2]
    if any(o.what in (MEAN, SUM) for o in inputs.values()):
        return OTHER_
    turned = {first: op.attrs.get("transpose_a", False), second: op.attrs.get("transpose_b", False)}
    # of each factor the axis as of (..., rows, columns)
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
    """Of scores whose last axis has the classes, and labels or a number for each class."""
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
    """Of an operator that is an equation: where one index alone goes along the samples."""
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
    """dy/dx, of all elements of y."""
    y, x = inputs["y"], inputs["x"]
    if y.added or x.added or x.what not in (SAME, SAMPLES):
        return OTHER_
    if x.what == SAMPLES:
        return x if y.what in (SUM, SAMPLES) else OTHER_
    return Over(SUM) if y.what == SAMPLES else y


def _shared_by_rows(op: Operation) -> bool:
    """Whether workers share an operator by its leading axis, so that each reads only its own samples of what has any."""
    with_samples = {slot for slot, shape in op.laid.items() if any(n.a for n in shape)}
    operands = [o for row in op.spec.fwd for o in row.operands if o.name in with_samples or o.writes]
    return bool(operands) and all(o.part == "rows" for o in operands)
