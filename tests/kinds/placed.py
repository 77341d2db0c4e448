"""The operator table's examples as graphs, the batch on every axis that can carry it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

import calcvm as cv
from calcvm.errors import CalcError
from calcvm.graph import apply
from calcvm.ops import OPS, layouts
from calcvm.ops.spec import Example, OpSpec
from calcvm.ops.types import RANKS
from tests.reference import reference

OPERATORS = [n for n in sorted(OPS) if OPS[n].category not in ("optimizer", "system")]
RATE = 0.25  # of dropout
AWAY = 13  # what the batch of an example becomes where it is put elsewhere: no other size is 13


def placements(spec: OpSpec) -> list[Example]:
    """The examples, and each with the batch in place of one of its sizes, wherever that size stands or on one axis."""
    found: dict[str, Example] = {}
    for example in spec.examples:
        if example.bench:
            continue
        shapes = tuple(tuple(AWAY if n is None else n for n in s) for s in example.shapes)
        attrs = {k: _put(v, None, AWAY) for k, v in example.attrs.items() if spec.name != "slice"} or example.attrs
        axes = [(i, j) for i, s in enumerate(shapes[: len(Placed(spec, example).drawn)]) for j in range(len(s))]
        sets = [[axis] for axis in axes] + [[(i, j) for i, j in axes if shapes[i][j] == n] for n in {*sum(shapes, ())}]
        tried = [example, replace(example, shapes=shapes, attrs=attrs)]
        for chosen in filter(None, sets):
            here = tuple(tuple(None if (i, j) in chosen else n for j, n in enumerate(s)) for i, s in enumerate(shapes))
            n = shapes[chosen[0][0]][chosen[0][1]]
            tried += [
                replace(example, shapes=here, attrs=a) for a in (attrs, {k: _put(v, n, None) for k, v in attrs.items()})
            ]
        for e in (replace(e, integer={slot: below(spec, e, slot) for slot in e.integer}) for e in tried):
            key = repr((e.shapes, e.attrs))
            if key not in found and _fits(spec, e):
                found[key] = e
    return list(found.values())


def below(spec: OpSpec, example: Example, slot: str) -> int:
    """What the numbers of an index are below: the size of the axis that they count along, or 1 if that is the batch."""
    axes = {"lengths": 1, "embedding": 0, "inside": 0, "one_hot": 0, "put_line": 1, "scatter_add": 0}
    axis = axes.get(slot if slot == "lengths" else spec.name, -1)
    of = example.shapes[1 if slot == "lengths" and "k" in spec.inputs else 0]  # lengths are those of keys
    size = of[int(example.attrs.get("axis", axis))] if of else None
    if size is None:
        return 2 if slot == "lengths" else 1
    return example.integer[slot] if slot == "lengths" else min(example.integer[slot], size)


def _put(value: Any, old: Any, new: Any) -> Any:
    return tuple(new if n is old or n == old else n for n in value) if isinstance(value, tuple) else value


def _fits(spec: OpSpec, example: Example) -> bool:
    if "target" in spec.inputs and "target" not in example.integer and len({*example.shapes}) > 1:
        return False  # what were probabilities would be labels
    try:
        Placed(spec, example).graph()
    except CalcError:
        return False
    return True


@dataclass(frozen=True)
class Placed:
    """An operator on an example's shapes in a graph of its own, with a weighted mean as loss.

    Inputs that it updates are buffers, others without the batch parameters; one with it is a placeholder times a parameter of its rank, so that its
    gradient is seen too.  Labels, and inputs without a gradient, are placeholders.
    """

    spec: OpSpec
    example: Example

    def __str__(self) -> str:
        return f"{self.spec.name} of {self.example.shapes} {dict(self.example.attrs)}"

    @property
    def trains(self) -> bool:
        return bool(self.spec.differentiable)

    @property
    def drawn(self) -> dict[str, tuple[int | None, ...]]:
        """Inputs that are drawn (those of dropout beside x are the model's)."""
        return dict(zip(self.spec.inputs[:1] if self.spec.name == "dropout" else self.spec.inputs, self.example.shapes))

    @property
    def seen(self) -> dict[str, tuple[int | None, ...]]:
        """The same, with the axes that users see."""
        return {slot: layouts.seen(shape, self.spec.layouts.get(slot, "")) for slot, shape in self.drawn.items()}

    def is_data(self, slot: str) -> bool:
        return slot in self.example.integer or slot not in self.spec.differentiable

    def graph(self, optimizer: Any = None) -> cv.CalcGraph:
        g, inputs = cv.CalcGraph(), []
        with g.path("learn", backward=self.trains) as learn:
            for slot, shape in self.seen.items():
                if slot in self.spec.updates:
                    inputs.append(g.buffer(slot, shape))
                elif self.is_data(slot):
                    inputs.append(g.placeholder(slot, shape))
                elif None in shape:
                    factor = g.parameter(f"{slot}.factor", [1 if n is None else n for n in shape])
                    inputs.append(g.placeholder(slot, shape) * factor)
                else:
                    inputs.append(g.parameter(slot, shape))
            if self.spec.name == "dropout":
                y = cv.dropout(inputs[0], RATE).rename("y")
            else:
                y = apply(self.spec.name, *inputs, out="y", **self.example.attrs)
            if self.trains:
                weight = g.constant("weight", self.weight([n.b if n.constant else 1 for n in y.shape]))
                learn.minimize(cv.mean(y * weight).rename("loss"), optimizer or cv.SGD(1.0), output=y)
        return g

    @staticmethod
    def weight(shape: Sequence[int]) -> np.ndarray:
        return np.random.default_rng(len(shape)).uniform(0.5, 1.5, shape)

    # ------------------------------------------------------------ numbers
    def data(self, batch: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """What the placeholders hold."""
        return {
            slot: self._draw(slot, tuple(batch if n is None else n for n in shape), rng)
            for slot, shape in self.seen.items()
            if None in shape or self.is_data(slot)
        }

    def inputs(self, batch: int) -> dict[str, np.ndarray]:
        """The same data for a batch, whenever they are asked for."""
        return self.data(batch, np.random.default_rng(batch))

    def parameters(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        out = {}
        for slot, shape in self.seen.items():
            if not self.is_data(slot) and None in shape:
                out[f"{slot}.factor"] = rng.uniform(0.8, 1.2, [1 if n is None else n for n in shape])
            elif not self.is_data(slot):
                out[slot] = self._draw(slot, shape, rng)
        return out

    def _draw(self, slot: str, shape: Sequence[int | None], rng: np.random.Generator) -> np.ndarray:
        if slot in self.example.integer:
            return rng.integers(0, self.example.integer[slot], shape).astype(float)
        drawn = rng.uniform(self.example.low, self.example.high, shape)
        return np.rint(drawn) if self.spec.types.get(slot) in RANKS else drawn

    def expected(self, values: Mapping[str, np.ndarray], batch: int, rng_state: np.ndarray) -> tuple[np.ndarray, float]:
        """The reference's output and loss for placeholders and parameters by name."""
        lie = self.spec.layouts
        inputs = [values[s] * values.get(f"{s}.factor", 1.0) for s in self.drawn]
        inputs = [v.transpose(layouts.axes(lie.get(s, ""), v.ndim)) for s, v in zip(self.drawn, inputs)]
        attrs = dict(self.example.attrs)
        if isinstance(attrs.get("shape"), tuple):
            attrs["shape"] = tuple(batch if n is None else n for n in attrs["shape"])
        if self.spec.name == "dropout":
            inputs, attrs = [*inputs, rng_state, np.float64(RATE)], {}
        fn = reference(self.spec.name)
        assert fn is not None
        out = fn(*inputs, **attrs)
        y = np.asarray(out[self.spec.outputs[0]] if isinstance(out, dict) else out, np.float64)
        y = y.transpose(layouts.back(lie.get(self.spec.outputs[0], ""), y.ndim))
        return y, float(np.mean(y * self.weight(self._numbers)))

    @cached_property
    def _numbers(self) -> list[int]:
        shape = self.graph().variables["y"].shape
        return [n.b if n.constant else 1 for n in shape]
