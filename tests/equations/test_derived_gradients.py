"""Backward rows written by hand beside the gradient that follows from the forward's equation: values, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from calcvm.equations.cost import Cost, cost
from calcvm.equations.gradient import gradient
from calcvm.equations.meaning import evaluate
from calcvm.equations.places import size
from calcvm.equations.ranges import Ranges, ranges
from calcvm.equations.tree import (
    Element,
    Equation,
    Index,
    Name,
    Node,
    Reduction,
    arrays,
    bound,
    names,
    parts,
    rewritten,
    with_parts,
)
from calcvm.ops import OPS
from calcvm.ops.equation import read_row
from calcvm.ops.spec import OpSpec, RowSpec
from calcvm.ops.specialized import specialized
from calcvm.script.evaluation import activation, row_values
from tests.equations.test_row_equations import numbers_of
from tests.rowrun import Case, _row_runs, cases

MOST = 1.25  # times the operations of what is written by hand, and its large arrays

# Why what is derived costs more.
DEARER = {
    "attention": "the sum of the gradients of weights is over keys, and not over the elements of a head",
    "attention_packed": "the same",
    "adaptive_max_pool": "a place is solved for the window, whose index the forward has kept",
    "global_max_pool": "the same",
    "avg_pool": "a zero beyond the ends is asked for again where a count is divided by",
    "lp_pool": "the sum of powers is computed anew, which the forward has kept under a root",
    "conv_transpose": "sums run over the larger of two arrays",
    "group_norm": "the sum of x - mean, which is 0, is no fact where the mean is a saved value",
    "instance_norm": "the same",
    "concat": "conditions instead of two rows",
    "pad": "the same",
    "slice": "a place of several indexes is solved for one of them",
    "transpose": "the same",
}


class Derived:
    """The gradient of a forward row's equation, as an example runs it."""

    def __init__(self, case: Case, row: RowSpec, values: Mapping[str, np.ndarray]):
        self.spec, self.words = case.spec, numbers_of(row, case.words)
        self.equations, self.given = put_in(row, case, values)
        self.found = ranges(self.equations, {n: v.shape for n, v in self.given.items()}, self.words)
        wrt = [name for name in self.spec.differentiable if name in self.given]
        outs = [o.name for o in row.writes if o.name in self.spec.outputs]
        integers = [n for n, v in self.given.items() if v.dtype.kind in "iu"]
        self.gradient = gradient(self.equations, wrt, outs, self.found, integers)

    def values(self, dys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        made, words = self.gradient, {**self.words, **self.gradient.sizes}
        shapes = self.found.shapes
        seeds = {made.seeds[out]: dy.reshape(shapes[out]) for out, dy in dys.items() if out in made.seeds}
        out = evaluate([*made.forward, *made.backward], {**self.given, **seeds}, words, activation(words))
        return {name: out[array] for name, array in made.of.items() if array in out}

    def cost(self) -> Cost:
        """Beside the values that the forward leaves."""
        made = self.gradient
        there = {*self.given, *made.seeds.values(), *self.spec.outputs, *self.spec.saved}
        wanted, equations = {n for e in made.backward for n in arrays(e.value)} - there, [*made.backward]
        for e in reversed(made.forward):
            if e.name in wanted:
                wanted |= {*arrays(e.value)} - there
                equations.insert(0, e)
        shapes = self.found.shapes | {made.seeds[out]: self.found.shapes[out] for out in made.seeds}
        new = {e.name for e in equations}
        return cost(
            equations,
            ranges(equations, {n: s for n, s in shapes.items() if n not in new}, {**self.words, **made.sizes}),
        )


def put_in(row: RowSpec, case: Case, values: Mapping[str, np.ndarray]) -> Any:
    """A row's equations with what its words choose put in, every range said, and what they read, as it lies."""
    words = numbers_of(row, case.words)
    equation, whole = read_row(row), {k: v for k, v in words.items() if isinstance(v, int)}
    gone = [o.name for o in row.operands if o.optional and o.name not in case.known() | {*values}]
    there = {
        o.name: values[o.name] for o in row.operands if o.access in "ru" and o.name in values and o.name not in gone
    }
    special = specialized(equation, words, gone, 99, row.lies(words) if row.lies else {})
    indexes = {i.name: i.extent for e in equation.equations for i in bound(e)}
    given = {
        name: value.reshape([int(size(equation.axes[name][k], whole)) for k in special.axes[name]])
        if name in equation.axes
        else value.reshape(case.shapes[name if name in case.shapes else name[1:]])  # of whole arrays
        for name, value in there.items()
    }

    def said(node: Node) -> Node:
        return replace(node, indexes=ranged(node.indexes)) if isinstance(node, Reduction) else node

    def ranged(found: Sequence[Index]) -> tuple[Index, ...]:
        return tuple(Index(i.name, indexes[i.name]) for i in found)

    out = [replace(e, kept=e.kept and ranged(e.kept), value=rewritten(e.value, said)) for e in special.equations]
    return out, given


def apart(equations: Sequence[Equation]) -> list[Equation]:
    """With each reduction in an equation of its own, as what is derived has them."""
    out: list[Equation] = []
    for e in equations:
        extents = {i.name: i for i in bound(e)}

        def lifted(node: Node, top: bool = False, extents: dict[str, Index] = extents) -> Node:
            below = parts(node)
            node = with_parts(node, tuple(map(lifted, below))) if below else node
            if not isinstance(node, Reduction) or top:
                return node
            kept = tuple(i for name, i in extents.items() if name in names(node))
            out.append(Equation(f"part{len(out)}", kept, node))
            return Element(out[-1].name, tuple(Name(i.name) for i in kept))

        out.append(replace(e, value=lifted(e.value, top=True)))
    return out


def hand_cost(row: RowSpec, case: Case, values: Mapping[str, np.ndarray]) -> Cost:
    words = numbers_of(row, case.words)
    equations, given = put_in(row, case, values)
    found: Ranges = ranges(equations, {n: v.shape for n, v in given.items()}, words)
    equations = apart(equations)
    made = {e.name for e in equations}
    found = ranges(equations, {n: s for n, s in found.shapes.items() if n not in made}, words)
    return cost(equations, found)


def derivable(spec: OpSpec) -> bool:
    rows = [row for row in spec.rows if not row.no_equation]
    return bool(spec.bwd) and len(spec.fwd) == 1 and len(rows) == len(spec.rows)


NAMES = [name for name, spec in OPS.items() if derivable(spec)]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_rows_follow_from_their_equations(name):
    for case in cases(OPS[name], "float64"):
        forward, *backward = _row_runs(case)
        made, want, dys = Derived(case, *forward), {}, {}
        if made.found.shapes[case.spec.outputs[0]] == () != case.shapes[case.spec.outputs[0]]:
            continue  # words make the result a constant: affine with a factor of 0
        for row, values in backward:
            dys |= {out: values[f"d{out}"] for out in case.spec.outputs if f"d{out}" in values}
            there = {o.name: values[o.name] for o in row.operands if o.name in values and o.access in "ru"}
            want |= row_values(row, numbers_of(row, case.words), there)
        for of, value in made.values(dys).items():
            if f"d{of}" in want:
                by_hand = case.gradient(of, want, np.zeros(0)).reshape(-1)
                most = np.abs(by_hand).max(initial=0)
                np.testing.assert_allclose(
                    value.reshape(-1), by_hand, 1e-11, 1e-11 * most,
                    err_msg=f"d{of} of {case.spec.name}, {case.example.shapes}, {case.attrs}",
                )  # fmt: skip


def dearer(name: str) -> bool:
    case = max(cases(OPS[name], "float64"), key=lambda c: sum(v.size for v in _row_runs(c)[0][1].values()))
    forward, *backward = _row_runs(case)
    made = Derived(case, *forward).cost()
    hand = sum((hand_cost(row, case, values) for row, values in backward), Cost(0, 0, 0))
    return made.operations > MOST * hand.operations or made.large > MOST * max(hand.large, 2)


def test_what_is_derived_costs_what_is_written_by_hand():
    """Of rows with indexes: formulas are elementwise, written once."""
    indexed = [name for name in NAMES if all(e.kept is not None for e in read_row(OPS[name].fwd[0]).equations)]
    assert {name for name in indexed if dearer(name)} == {*DEARER}
