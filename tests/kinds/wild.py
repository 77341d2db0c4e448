"""Graphs of anything: any operator of the table, of any types, ranks and batch axes, in paths that read each other, of any names.

`tests.kinds.graphs` draws graphs that have a twin in PyTorch, and so what both sides have, where it is smooth.  What is
drawn here needs no twin: it is compared with what the program itself computes (`tests.kinds.test_wild`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import calcvm as cv
from calcvm.graph import CalcGraph, Path, Variable, apply
from calcvm.ops import OPS
from calcvm.ops.dims import numel
from calcvm.ops.types import TYPES
from tests.kinds.graphs import NAMES

ODD = (
    "x", "x_", "x__", "class", "class_", "_", "__", "ª", "-", "µ", "𝐱", "nul\0byte", "bad\udcff", "new\nline", "cr\rx", "\u202e",
    "B", "BATCH", "np", "u1", "u2", "step", "predict", "evaluate", "heap", "view", "n", "sum", "axis", "keepdims", "lambda",
    "x_data", "learn_forward", "learn_step", "softmax", "one_hot", "dtype", "L" * 300, "é" * 200, '"""', "\\", "#", "%s", "{n}",
    "True", "print", "data", "start", "samples_of", "global", "place", "1", "a b", "a-b", "a_b",
)  # fmt: skip
ODD_PATHS = ("a b", "a_b", "learn_forward", "adam", "x", "class", "nul\0", "重", "_", "step", "\udcff", "learn_")
LARGEST = 2000  # elements of a value
POSITIVE = {"log", "sqrt", "pow", "div", "mod", "lp_pool"}  # of which an input is made positive
UNARY, BINARY = ([n for n, op in OPS.items() if op.category == kind] for kind in ("unary", "binary"))
WHOLE = [n for n, op in OPS.items() if op.category in ("contraction", "normalization", "pooling", "loss", "metric")]
WHOLE += ["upsample", "pad", "pick", "slice", "transpose", "reshape", "concat_many", "softmax", "log_softmax"]


def kinds(number: Any) -> list[Any]:
    """What says a number, or a number near it, in Python and NumPy; of what is none itself."""
    if type(number) not in (int, float):
        return [number]
    whole = round(number)
    return [number, float(number), np.float32(number), np.float64(number)] + [whole, np.int64(whole)] * (
        whole == number
    )


@dataclass
class Wild:
    """A graph that was drawn, and the data that it takes.

    drawn : of each placeholder, how to draw its data at a batch.
    labels : those that are indexes, of whatever type.
    """

    seed: int
    graph: CalcGraph
    batch: int
    drawn: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = field(default_factory=dict)
    labels: set[str] = field(default_factory=set)

    def data(self, batch: int, draw: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([self.seed, draw])
        return {name: fn(rng, batch) for name, fn in self.drawn.items()}

    @property
    def learn(self) -> Path:
        return self.graph.paths["learn"]


def wild(seed: int, odd: bool = False) -> Wild:
    """The graph of a seed; ``odd`` : with names that no identifier is."""
    return _Drawing(seed, odd).whole()


class _Drawing:
    def __init__(self, seed: int, odd: bool):
        self.rng, self.data = random.Random(seed), np.random.default_rng([seed, 99])
        self.saying = random.Random(seed)
        self.graph = CalcGraph()
        self.made = Wild(seed, self.graph, self.rng.choice((1, 3, 4, 6)))
        self.values: list[Variable] = []
        names = [*dict.fromkeys((*ODD, *NAMES))] if odd else [f"v{i}" for i in range(200)]
        self.rng.shuffle(names)
        self.names, self.odd = names, odd

    # ------------------------------------------------------------ the whole
    def whole(self) -> Wild:
        rng, g = self.rng, self.graph
        x = self.placeholder((None, rng.choice((1, 2, 3))), "")
        for _ in range(rng.randint(1, 3)):
            self.source()
        others = rng.sample(ODD_PATHS, 2) if self.odd else ["first", "second"]
        for name in others[: rng.choice((0, 0, 1, 2))]:
            with g.path(name, adopt=False):
                for _ in range(rng.randint(1, 5)):
                    self.operator()
        w = self.parameter(rng.choice(((), (1,), (1, 1), (x.shape[1].b,))))
        with g.path("learn", backward=True, adopt=False) as learn:
            for _ in range(rng.randint(2, 12)):
                self.operator()
            loss = self.loss(x * w)
            for _ in range(rng.randint(0, 2)):
                with suppress(cv.CalcError):
                    loss = rng.choice((cv.add, cv.sub, cv.mul))(loss, self.one(self.some()))
            learn.minimize(loss, cv.SGD(1e-3, momentum=rng.choice((0.0, 0.9))))
        with g.path("predict", adopt=False) as predict:
            y = x * w
            for _ in range(rng.randint(0, 4)):
                self.operator()
            predict.output = rng.choice([y, *(v for v in self.values if v.path is predict)])
            with suppress(cv.CalcError):
                cv.mean(cv.tanh(y)).rename(g.unique("judged"))
        return self.made

    # ------------------------------------------------------------ sources
    def name(self) -> str:
        return self.names.pop()

    def shape(self) -> tuple[int, ...]:
        return tuple(self.rng.choice((1, 1, 2, 3, 4)) for _ in range(self.rng.choice((0, 1, 1, 2, 2, 3, 4))))

    def source(self) -> Variable:
        rng, shape = self.rng, self.shape()
        kind = rng.random()
        if kind < 0.35:
            return self.parameter(shape)
        if kind < 0.5:
            type_ = rng.choice(("", "", "int64", "bool", "int8"))
            value = self.data.uniform(-1.5, 1.5, shape) if not type_ else self.data.integers(0, 2, shape)
            return self.kept(self.graph.constant(self.name(), value, type_ or None))
        if shape and rng.random() < 0.7:
            sizes: list[int | None] = [*shape]
            sizes[rng.choice((0, 0, rng.randrange(len(shape))))] = None
            return self.placeholder(tuple(sizes), rng.choice(("", "", "", *TYPES)))
        return self.placeholder(shape, rng.choice(("", "", *TYPES)))

    def placeholder(self, shape: tuple[int | None, ...], type_: str, classes: int = 0) -> Variable:
        name = self.name()
        layout = len(shape) > 2 and not type_ and self.rng.random() < 0.3
        v = self.graph.placeholder(name, shape, type_ or None, channels_last=layout)
        kind = np.dtype(type_ or "float64").kind

        def draw(rng: np.random.Generator, batch: int) -> np.ndarray:
            sizes = [batch if n is None else n for n in shape]
            if kind == "f" and not classes:
                return (rng.uniform(0.2, 1.4, sizes) * rng.choice((-1.0, 1.0), sizes)).astype(type_ or "float64")
            low, high = (0, classes) if classes else (0, 2) if kind == "b" else (0, 9) if kind == "u" else (-4, 5)
            return rng.integers(low, high, sizes).astype(type_ or "float64")

        self.made.drawn[name] = draw
        self.made.labels |= {name} if classes else set()
        return self.kept(v) if not classes else v

    def parameter(self, shape: tuple[int, ...]) -> Variable:
        value = np.asarray(self.data.uniform(0.3, 1.2, shape) * self.data.choice((-1.0, 1.0), shape))
        return self.kept(self.graph.parameter(self.name(), shape, value))

    def kept(self, v: Variable) -> Variable:
        self.values.append(v)
        return v

    def some(self, wanted: Callable[[Variable], bool] = lambda v: True) -> Variable:
        found = [v for v in self.values if wanted(v)]
        return found[max(self.rng.randrange(len(found)), self.rng.randrange(len(found)))] if found else self.source()

    # ------------------------------------------------------------ operators
    def operator(self) -> None:
        kinds = (
            (self.unary, 6), (self.binary, 7), (self.chosen, 2), (self.reduced, 4), (self.moved, 4), (self.cut, 2),
            (self.joined, 1), (self.product, 2), (self.table, 5), (self.cast, 2), (self.single, 2), (self.dropped, 1), (self.windows, 2), (self.again, 2),
        )  # fmt: skip
        for _ in range(12):
            draw = self.rng.choices([k for k, _ in kinds], [w for _, w in kinds])[0]
            values, drawn = [*self.values], {**self.made.drawn}
            try:
                with self.graph.whole():
                    v = draw()
                    if numel(v.shape).at(self.made.batch) > LARGEST or v.rank > 6:
                        raise cv.CalcError("too large")
            except cv.CalcError:
                self.values, self.made.drawn = values, drawn
            else:
                if self.odd and self.rng.random() < 0.4 and v.kind == "result":
                    with suppress(cv.CalcError):
                        v.rename(self.name())
                self.kept(v)
                return

    def positive(self, x: Variable) -> Variable:
        return cv.square(x) * 0.5 + 0.6

    def unary(self) -> Variable:
        op = self.rng.choice(UNARY)
        x = self.some()
        attrs = self.rng.choice([e.attrs for e in OPS[op].examples])
        x = self.positive(x) if op in POSITIVE else cv.tanh(x) if op == "exp" else x
        return apply(op, x, **self.said(attrs))

    def said(self, attrs: Any) -> dict[str, Any]:
        """The attributes, their numbers as anybody may say them."""
        return {name: self.saying.choice(kinds(value)) for name, value in attrs.items()}

    def binary(self) -> Variable:
        op, a, b = self.rng.choice(BINARY), self.some(), self.some()
        b = self.positive(b) if op in POSITIVE else b
        if self.rng.random() < 0.15:
            b = self.rng.choice((2, 1, -1, 0.5, True))  # type: ignore[assignment]
            return {"add": a + b, "sub": b - a, "mul": a * b}.get(op, cv.less(a, b))
        return apply(op, a, b)

    def chosen(self) -> Variable:
        return cv.where(self.some(), self.some(), self.rng.choice((self.some(), 0.0, 1)))

    def axes(self, x: Variable) -> Any:
        rank = x.rank
        return self.rng.choice(
            (None, *(tuple(self.rng.sample(range(rank), self.rng.randint(1, rank))) for _ in range(3) if rank))
        )

    def reduced(self) -> Variable:
        x = self.some()
        fn = self.rng.choice((cv.sum, cv.mean, cv.max, cv.min, cv.sum_squares, cv.sum, cv.mean))
        return fn(x, self.axes(x), keepdims=self.rng.random() < 0.5)

    def moved(self) -> Variable:
        rng, x = self.rng, self.some(lambda v: v.rank > 0)
        which = rng.randrange(5)
        sizes: list[Any] = [n.b if n.constant else None for n in x.shape]
        if which == 0:
            return cv.transpose(x, rng.sample(range(x.rank), x.rank))
        if which == 1:
            return cv.flatten(x)
        if which == 2:
            return rng.choice((cv.channels_last, cv.channels_first, cv.stop_gradient))(x)
        if which == 3:
            sizes.insert(rng.randint(0, len(sizes)), 1)
            return cv.reshape(x, sizes)
        if 1 in sizes:
            sizes.remove(1)
        elif len(sizes) > 1 and None not in sizes[:2]:
            sizes[:2] = [sizes[0] * sizes[1]]
        return cv.reshape(x, sizes)

    def cut(self) -> Variable:
        rng, x = self.rng, self.some(lambda v: v.rank > 0)
        index: list[Any] = [slice(None)] * x.rank
        axis = rng.randrange(x.rank)
        n = x.shape[axis]
        if n.constant:
            lo = rng.randrange(n.b)
            index[axis] = slice(lo, rng.randint(lo + 1, n.b))
        return x[tuple(index)]

    def joined(self) -> Variable:
        x = self.some(lambda v: v.rank > 0)
        axis = self.rng.randrange(x.rank)
        return cv.concat([x, self.some(lambda v: v.rank == x.rank), x][: self.rng.choice((2, 3))], axis)

    def product(self) -> Variable:
        rng, a = self.rng, self.some(lambda v: v.rank > 1)
        n = a.shape[-1]
        if n.constant and rng.random() < 0.7:
            b = self.parameter((n.b, rng.choice((1, 2, 3))))
            return cv.matmul(a, b) if rng.random() < 0.6 else cv.linear(a, b, self.parameter((b.shape[1].b,)))
        return cv.matmul(a, self.some(lambda v: v.rank > 1), rng.random() < 0.4, rng.random() < 0.4)

    def cast(self) -> Variable:
        return cv.cast(self.some(), self.rng.choice((None, *TYPES)))

    def single(self) -> Variable:
        """A sum, or another view, over one element."""
        x = self.one(self.some())
        return self.rng.choice((
            lambda: cv.sum(x), lambda: cv.mean(cv.reshape(x, (1, 1)), 0, keepdims=True), lambda: cv.max(cv.reshape(x, (1, 1, 1)), 1),
            lambda: cv.transpose(cv.reshape(x, (1, 1))), lambda: cv.reshape(x, (1,)), lambda: -x, lambda: 1 - x,
        ))()  # fmt: skip

    def dropped(self) -> Variable:
        return cv.dropout(self.some(), self.rng.choice((0.0, 0.3)))

    def again(self) -> Variable:
        """An operator on the values that it has been on already."""
        made = [op for op in self.graph.active.operations if not op.spec.updates]
        if not made:
            raise cv.CalcError("there is none")
        op = self.rng.choice(made)
        return apply(op.spec.name, *op.inputs.values(), **op.attrs)

    def table(self) -> Variable:
        """An operator on an example's shapes: values that have them, else sources."""
        rng, op = self.rng, self.rng.choice(WHOLE)
        spec = OPS[op]
        example = rng.choice([e for e in spec.examples if not e.bench])
        inputs: list[Variable] = []
        for name, shape in zip(spec.inputs, example.shapes):
            sizes = tuple(shape)
            classes = example.integer.get(name, 0)
            if name in spec.updates:
                init = self.data.uniform(0.5, 1.5, shape)
                inputs.append(self.graph.buffer(self.name(), sizes, init))
            elif classes:
                inputs.append(self.placeholder(sizes, rng.choice(("", "int64", "int32", "uint8")), classes))
            elif name in ("running_var", "running_mean"):
                inputs.append(self.positive(self.parameter(sizes)))
            else:
                fits = [v for v in self.values if [n.b if n.constant else None for n in v.shape] == [*sizes]]
                new = self.parameter(sizes) if None not in sizes else self.placeholder(sizes, "")
                v = rng.choice(fits) if fits and rng.random() < 0.7 else new
                inputs.append(
                    cv.sigmoid(v)
                    if (op, name) == ("binary_cross_entropy", "t")
                    else self.positive(v)
                    if op in POSITIVE
                    else v
                )
        return apply(op, *inputs, **self.said(example.attrs))

    def windows(self) -> Variable:
        """A convolution of images, whose channels lie where they lie."""
        rng, n = self.rng, self.rng.choice((1, 2))
        x = self.some(lambda v: v.rank == n + 2 and v.shape[1].constant)
        if x.rank != n + 2 or rng.random() < 0.4:
            x = self.placeholder((None, 2, *(4,) * n), "")
        c, fn = (
            x.shape[1].b,
            rng.choice((cv.conv1d, cv.conv_transpose1d) if n == 1 else (cv.conv2d, cv.conv_transpose2d)),
        )
        out = rng.choice((1, 3))
        ends = (c, out) if "transpose" in fn.__name__ else (out, c)
        w = self.parameter((*ends, *rng.choices((1, 2), k=n)))
        return fn(x, w, rng.choice((None, self.parameter((out,)))), stride=rng.choice((1, 2)))

    # ------------------------------------------------------------ losses
    def one(self, x: Variable) -> Variable:
        """One element of anything."""
        return x if numel(x.shape) == 1 else self.rng.choice((cv.mean, cv.mean, cv.sum))(cv.tanh(x))

    def loss(self, must: Variable) -> Variable:
        rng = self.rng
        floats = [v for v in self.values if v.path is self.graph.active]
        z = rng.choice([must, *floats[-3:]])
        forms: list[Callable[[Variable], Variable]] = [
            lambda z: cv.mean(cv.tanh(z)), lambda z: -cv.mean(cv.tanh(z)), lambda z: 1 - cv.mean(cv.sigmoid(z)),
            lambda z: -cv.sum(cv.tanh(z)), lambda z: cv.mean(cv.square(cv.tanh(z))), lambda z: cv.mean(cv.square(z), keepdims=True),
            lambda z: -cv.mean(cv.sum(cv.tanh(z), axis=z.rank - 1 if z.rank else None)), lambda z: cv.sum_squares(cv.tanh(z)) * 0.5,
            lambda z: cv.mse(cv.tanh(z), cv.stop_gradient(cv.sigmoid(z))), lambda z: cv.max(cv.tanh(z)) / 3,
        ]  # fmt: skip
        total = rng.choice(forms)(must)
        with suppress(cv.CalcError):
            total = total + rng.choice(forms)(z)
        return cv.reshape(total, rng.choice(((), (1,), (1, 1)))) if rng.random() < 0.3 else total
