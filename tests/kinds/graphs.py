"""Generated graphs, valid by construction, each with a twin in PyTorch: `generate` draws one from a seed.

An operator is only drawn onto values that it is smooth at: away from kinks and ties, inside its domain, of moderate
size (after NNSmith, Liu et al. 2023, which searches such inputs).  So both sides compute the same function in float64,
and differ by rounding alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as T

import calcvm as cv
from calcvm.errors import ShapeError
from calcvm.graph import CalcGraph, Variable, apply
from calcvm.lowering import sections
from calcvm.ops.dims import BATCH, Shape

NAMES = (
    "dt", "t", "ddt", "dddt", "dW", "W", "W.m", "W.v", "W_2", "dW_2", "learn.seed", "learn.hyper", "rng", "x.y", "x", "dx",
    "dropout.rate", "mse.t_l", "add", "dadd", "mul", "matmul", "add_2", "clip.sumsq", "W..b", "b", "db", "Größe", "重み", "é",
    "e\u0301", "   ", " ", "a/b", "state/0", "0", "-1", "None", "__class__", "seed", "hyper", "d", "dd", "out", "input",
    "target", "loss", "dloss", "output", "predict.loss", "needs", "'", '"', "a'b", "%s", "{}", "\\n", "x" * 80, "sum.ws",
    "linear", "dlinear", "tick", "sumsq", "m", "v", "y", "p", "g",
)  # fmt: skip
PATHS = ("learn", "t", "dt", "forward", "loss", "p.q", "W", "other", " ")
LARGEST = 600  # elements of a value
BOUND = 50.0  # of a value's size, and of how fast it grows
CLEAR = 1e-3  # how far values are from kinks and ties where a graph is drawn
STILL_CLEAR = 1e-9  # and wherever it is compared


# ---------------------------------------------------------------- what a case is made of
@dataclass(frozen=True)
class Source:
    """A placeholder (of data between ``low`` and ``high``, or labels of so many classes) or a parameter (with data)."""

    key: int
    name: str
    shape: Shape
    data: np.ndarray | None = None
    trainable: bool = False
    regularizer: tuple[float, float] | None = None  # l1, l2
    classes: int = 0


@dataclass(frozen=True)
class Step:
    """An operator in a path.  name : chosen for its result (None: what it is called by itself)."""

    path: int
    key: int
    op: str
    inputs: tuple[int | None, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None


@dataclass(frozen=True)
class Train:
    """How a path trains."""

    loss: int
    optimizer: str
    settings: Mapping[str, float | bool | str]
    output: int | None = None
    parameters: tuple[int, ...] | None = None  # None: all behind the loss


@dataclass(frozen=True)
class Case:
    """A graph to build (`build`), data for it (`inputs`) and its twin (`Twin(case)`).

    batch : the largest.
    """

    seed: int
    batch: int
    sources: tuple[Source, ...]
    paths: tuple[str, ...]
    steps: tuple[Step, ...]
    trains: Mapping[int, Train]
    keep: tuple[int, ...]
    accumulate: bool
    early: bool  # all parameters are updated inside the backward where the program does not accumulate

    def build(self) -> CalcGraph:
        return self._build()[0]

    def _build(self) -> tuple[CalcGraph, dict[int, Variable]]:
        g, of = CalcGraph(), dict[int, Variable]()
        for s in self.sources:
            shape = [d.b if d.constant else None for d in s.shape]
            if s.data is None:
                of[s.key] = g.placeholder(s.name, shape)
            else:
                penalty = None if s.regularizer is None else cv.Elastic(*s.regularizer)
                of[s.key] = g.parameter(s.name, shape, s.data, penalty, s.trainable)
        for number, name in enumerate(self.paths):
            train = self.trains.get(number)
            with g.path(name, backward=train is not None, adopt=False) as path:
                for step in self.steps:
                    if step.path == number:
                        of[step.key] = _emit(step, [None if k is None else of[k] for k in step.inputs])
                if train is not None:
                    output = None if train.output is None else of[train.output]
                    chosen = None if train.parameters is None else [of[k] for k in train.parameters]
                    path.minimize(of[train.loss], _optimizer(train), output, chosen)
        return g, of

    def compile(self, **options: Any) -> cv.Program:
        """The program; ``options`` are those of `calcvm.plan`."""
        graph, of = self._build()
        options = {"batch_size": self.batch, "dtype": "float64", "accumulate": self.accumulate, **options}
        with _early(self.early):
            return cv.compile(graph, keep=[of[k].name for k in self.keep], **options)

    @cached_property
    def names(self) -> dict[int, str]:
        """Names of all values, by key."""
        return {key: v.name for key, v in self._build()[1].items()}

    @cached_property
    def samples(self) -> set[str]:
        """Names of values whose leading axis is the batch, each element made of its own sample alone."""
        found = {s.key for s in self.sources if s.data is None and s.shape[0] == BATCH}
        leading = {key for key, v in self._build()[1].items() if v.shape[:1] == (BATCH,)}
        for p in self.steps:
            inputs = [k for k in p.inputs if k is not None]
            own = all(k in found or not self._depends(k) for k in inputs) and p.key in leading
            if own and p.op not in ("transpose", "concat") and all(k in found or k not in leading for k in inputs):
                found.add(p.key)
        return {self.names[k] for k in found}

    def _depends(self, key: int) -> bool:
        """Whether a value depends on the data."""
        if any(s.key == key for s in self.sources):
            return any(s.key == key and s.data is None for s in self.sources)
        return any(k is not None and self._depends(k) for p in self.steps if p.key == key for k in p.inputs)

    def inputs(self, batch: int, draw: int = 0) -> dict[str, np.ndarray]:
        """Data for the placeholders, by name; a smaller batch has the first samples of a larger one."""
        return {s.name: array for s, array in self._data(batch, draw)}

    def _data(self, batch: int, draw: int) -> Iterator[tuple[Source, np.ndarray]]:
        for s in self.sources:
            if s.data is None:
                array = self._drawn.get((s.key, draw))
                if array is None:
                    array = self._drawn[s.key, draw] = self._draw(s, np.random.default_rng([self.seed, s.key, draw]))
                yield s, array[tuple(slice(None, d.at(batch)) for d in s.shape)]

    @cached_property
    def _drawn(self) -> dict[tuple[int, int], np.ndarray]:
        return {}

    def _draw(self, s: Source, rng: np.random.Generator) -> np.ndarray:
        shape = [d.at(self.batch) for d in s.shape]
        if s.classes:
            return rng.integers(0, s.classes, shape).astype(np.float64)
        return rng.uniform(0.2, 1.4, shape) * _signs(rng, shape)

    @property
    def text(self) -> str:
        """What was drawn, a line each."""
        lines = [
            f"seed {self.seed}, batch {self.batch}, accumulate {self.accumulate}, early {self.early}, keep {self.keep}"
        ]
        for s in self.sources:
            kind = "placeholder" if s.data is None else "parameter" if s.trainable else "frozen"
            lines.append(f"%{s.key} = {kind} {s.name!r} {s.shape} {s.regularizer or ''} {s.classes or ''}")
        for number, path in enumerate(self.paths):
            lines.append(f"path {path!r}:")
            for p in self.steps:
                if p.path == number:
                    inputs = ", ".join(f"%{k}" for k in p.inputs)
                    lines.append(f"  %{p.key} = {p.op}({inputs}) {dict(p.attrs) or ''} {p.name or ''}")
            if number in self.trains:
                lines.append(f"  {self.trains[number]}")
        return "\n".join(lines)

    def trains_it(self, path: int, key: int) -> bool:
        """Whether a path trains a parameter that is behind its loss."""
        chosen = self.trains[path].parameters
        return chosen is None or key in chosen

    def without(self, key: int) -> Case | None:
        """The case without a step and all that needs it (None: nothing is left to run)."""
        gone = {key}
        for p in self.steps:
            if gone & {*p.inputs}:
                gone.add(p.key)
        trains = {n: t for n, t in self.trains.items() if t.loss not in gone}
        trains = {n: replace(t, output=None) if t.output in gone else t for n, t in trains.items()}
        trains = {n: replace(t, parameters=None) for n, t in trains.items()}  # some may be behind the loss no more
        steps = tuple(p for p in self.steps if p.key not in gone)
        keep = tuple(k for k in self.keep if k not in gone)
        return replace(self, steps=steps, trains=trains, keep=keep) if steps else None


def _signs(rng: np.random.Generator, shape: list[int]) -> np.ndarray:
    return np.where(rng.random(shape) < 0.5, -1.0, 1.0)


def _emit(step: Step, inputs: list[Variable | None]) -> Variable:
    x = inputs[0]
    assert x is not None
    v = cv.dropout(x, 0.0) if step.op == "dropout" else apply(step.op, *inputs, **step.attrs)
    return v if step.name is None else v.rename(step.name)


@contextmanager
def _early(yes: bool) -> Iterator[None]:
    large = sections.LARGE_PARAMETER
    sections.LARGE_PARAMETER = 2 if yes else large
    try:
        yield
    finally:
        sections.LARGE_PARAMETER = large


# ---------------------------------------------------------------- operators
def _axes(x: torch.Tensor, attrs: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(range(x.dim())) if attrs["axes"] is None else attrs["axes"]


def _reduced(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, **a: fn(x, dim=_axes(x, a), keepdim=a["keepdims"]) if x.dim() else fn(x.reshape(1), dim=(0,))


def _reshape(x: torch.Tensor, batch: int, shape: tuple[int | None, ...]) -> torch.Tensor:
    return x.reshape([batch if n is None else n for n in shape])


def _matmul(a: torch.Tensor, b: torch.Tensor, transpose_a: bool = False, transpose_b: bool = False) -> torch.Tensor:
    return (a.mT if transpose_a else a) @ (b.mT if transpose_b else b)


def _slice(x: torch.Tensor, starts: tuple, stops: tuple) -> torch.Tensor:
    return x[tuple(slice(i, j) for i, j in zip(starts, stops))]


def _cross_entropy(x: torch.Tensor, t: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    return T.cross_entropy(x, t.long() if t.dim() < x.dim() else t, label_smoothing=label_smoothing)


TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "linear": lambda x, w, b=None: x @ w if b is None else x @ w + b,
    "matmul": _matmul,
    "neg": torch.neg, "abs": torch.abs, "sqrt": torch.sqrt, "square": torch.square, "exp": torch.exp, "log": torch.log,
    "pow": lambda x, exponent: x**exponent,
    "relu": torch.relu,
    "leaky_relu": lambda x, alpha: T.leaky_relu(x, alpha),
    "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "gelu": lambda x, approximate: T.gelu(x, approximate=approximate),
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),  # T.softplus is a line from 20 on: its slope is off by 2e-9
    "elu": lambda x, alpha: T.elu(x, alpha),
    "affine": lambda x, a, b: a * x + b,
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "sum": _reduced(torch.sum), "mean": _reduced(torch.mean), "max": _reduced(torch.amax), "min": _reduced(torch.amin),
    "sum_squares": _reduced(lambda x, **a: torch.sum(x * x, **a)),
    "softmax": lambda x, axis: torch.softmax(x, axis), "log_softmax": lambda x, axis: torch.log_softmax(x, axis),
    "flatten": lambda x: x.reshape(len(x), -1),
    "stop_gradient": torch.Tensor.detach,
    "pick": lambda x, index: x.gather(-1, index.long()[..., None])[..., 0],
    "transpose": lambda x, axes: x.permute(*(axes or range(x.dim())[::-1])),
    "concat": lambda a, b, axis: torch.cat([a, b], axis),
    "slice": _slice,
    "dropout": lambda x: x * 1.0,
    "binary_cross_entropy": T.binary_cross_entropy_with_logits,
    "mse": T.mse_loss, "mae": T.l1_loss,
    "huber": lambda x, t, delta: T.huber_loss(x, t, delta=delta),
    "softmax_cross_entropy": _cross_entropy,
    "rmse": lambda x, t: torch.sqrt(T.mse_loss(x, t)),
    "accuracy": lambda x, t: (x.argmax(-1) == (t if t.dim() < x.dim() else t.argmax(-1))).double().mean(),
}  # fmt: skip


def _gap(x: torch.Tensor, axes: tuple[int, ...]) -> float:
    """The least distance of a reduction's two largest elements."""
    rest = [i for i in range(x.dim()) if i not in axes]
    rows = x.permute(*rest, *axes).reshape(-1, math.prod(x.shape[i] for i in axes)) if x.dim() else x.reshape(1, 1)
    top = rows.topk(min(2, rows.shape[1]), dim=1).values
    return math.inf if top.shape[1] < 2 else float((top[:, 0] - top[:, 1]).min())


def margin(op: str, inputs: list[torch.Tensor], attrs: Mapping[str, Any]) -> float:
    """How far values are from where an operator is not smooth (below 0: outside its domain)."""
    x = inputs[0].detach()
    if not x.numel():
        return math.inf
    if op in ("abs", "relu", "leaky_relu", "elu"):
        return float(x.abs().min())
    if op in ("sqrt", "log") or (op == "pow" and attrs["exponent"] != int(attrs["exponent"])):
        return float(x.min()) - 0.1
    if op == "pow" and attrs["exponent"] < 0:
        return float(x.abs().min()) - 0.1
    if op == "exp":
        return 4.0 - float(x.max())
    if op == "div":
        return float(inputs[1].detach().abs().min()) - 0.1
    if op in ("max", "min"):
        return _gap(x if op == "max" else -x, _axes(x, attrs))
    if op in ("mae", "huber"):
        away = (x - inputs[1].detach()).abs()
        return float(away.min()) if op == "mae" else float((away - attrs["delta"]).abs().min())
    if op == "rmse":
        return float((x - inputs[1].detach()).abs().max()) - 0.1
    if op == "accuracy":
        t = inputs[1].detach()
        return min(_gap(x, (x.dim() - 1,)), _gap(t, (t.dim() - 1,)) if t.dim() == x.dim() else math.inf)
    return math.inf


# ---------------------------------------------------------------- the twin
class Unclear(Exception):
    """Values have come too near to where operators are not smooth: rounding alone may tell both sides apart."""


def value(step: Step, inputs: list[torch.Tensor], batch: int, clear: float) -> torch.Tensor:
    """The result of a step, if it is smooth around and of moderate size."""
    if margin(step.op, inputs, step.attrs) < clear:
        raise Unclear(f"%{step.key} = {step.op}")
    y = _reshape(*inputs, batch, **step.attrs) if step.op == "reshape" else TORCH[step.op](*inputs, **step.attrs)
    if not bool(torch.isfinite(y).all()) or (y.numel() and float(y.detach().abs().max()) > 20 * BOUND):
        raise Unclear(f"%{step.key} = {step.op}")
    return y


class Twin:
    """A case in PyTorch: `forward`, `backward` and `optimize` of its paths, in float64."""

    def __init__(self, case: Case, clear: float = STILL_CLEAR):
        self.case, self.clear = case, clear
        self.parameters = {
            s.key: torch.tensor(s.data, requires_grad=s.trainable) for s in case.sources if s.data is not None
        }
        behind = {n: self._behind(t.loss, n) for n, t in case.trains.items()}
        self.trained = {
            n: [k for k, p in self.parameters.items() if p.requires_grad and k in keys and case.trains_it(n, k)]
            for n, keys in behind.items()
        }
        self.gradients = {n: dict.fromkeys(keys, 0.0) for n, keys in self.trained.items()}
        self.optimizers: dict[int, torch.optim.Optimizer] = {}

    def _behind(self, key: int, path: int) -> set[int]:
        """Inputs of a path's operators that a value of it has a gradient of."""
        wanted = {key}
        for step in reversed(self.case.steps):
            if step.path == path and step.key in wanted and step.op != "stop_gradient":
                wanted |= {k for k in step.inputs if k is not None}
        return wanted

    def forward(self, path: int, batch: int, draw: int = 0) -> dict[int, torch.Tensor]:
        """Values of all keys that a path computes, after those of other paths that it reads, which pass no gradient."""
        values = {s.key: torch.tensor(array) for s, array in self.case._data(batch, draw)}
        values |= self.parameters
        for number in range(path + 1):
            for step in self.case.steps:
                if step.path == number and (number == path or self._read(step.key, path)):
                    inputs = [values[k] for k in step.inputs if k is not None]
                    values[step.key] = value(step, inputs, batch, self.clear)
            if number != path:
                values = {k: v if k in self.parameters else v.detach() for k, v in values.items()}
        return values

    def _read(self, key: int, path: int) -> bool:
        """Whether a path depends on a value of another path."""
        wanted: set[int] = set()
        for step in reversed(self.case.steps):
            if step.path == path or step.key in wanted:
                wanted |= {k for k in step.inputs if k is not None}
        return key in wanted

    def backward(self, path: int, values: Mapping[int, torch.Tensor]) -> None:
        """Add up the gradients of a path's loss."""
        keys = self.trained[path]
        loss = values[self.case.trains[path].loss].sum()
        found = torch.autograd.grad(loss, [self.parameters[k] for k in keys], allow_unused=True)
        for k, g in zip(keys, found):
            self.gradients[path][k] = self.gradients[path][k] + (
                torch.zeros_like(self.parameters[k]) if g is None else g
            )

    def optimize(self, path: int) -> None:
        """Update the parameters, and start new gradients."""
        train, regularizers = self.case.trains[path], {s.key: s.regularizer for s in self.case.sources}
        own = [self.parameters[k] for k in self.trained[path]]
        for k, p in zip(self.trained[path], own):
            l1, l2 = regularizers[k] or (0.0, 0.0)
            p.grad = (self.gradients[path][k] + l1 * torch.sign(p) + 2 * l2 * p).detach()
            if (l1 and float(p.detach().abs().min()) < self.clear) or float(p.grad.abs().max()) > 20 * BOUND:
                raise Unclear("a parameter")
        if train.settings.get("clip_value"):
            torch.nn.utils.clip_grad_value_(own, train.settings["clip_value"])
        if train.settings.get("clip_norm"):
            torch.nn.utils.clip_grad_norm_(own, train.settings["clip_norm"])
        if path not in self.optimizers:
            self.optimizers[path] = _torch_optimizer(train, own)
        self.optimizers[path].step()
        self.gradients[path] = dict.fromkeys(self.trained[path], 0.0)


OPTIMIZERS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Mapping[str, str]]] = {
    "sgd": (cv.SGD, torch.optim.SGD, {}),
    "adam": (cv.Adam, torch.optim.Adam, {}),
    "adamw": (cv.AdamW, torch.optim.AdamW, {}),
    "rmsprop": (cv.RMSProp, torch.optim.RMSprop, {}),
    "adagrad": (cv.Adagrad, torch.optim.Adagrad, {"initial_accumulator": "initial_accumulator_value"}),
}


def _optimizer(train: Train) -> cv.Optimizer:
    return OPTIMIZERS[train.optimizer][0](**train.settings)


def _torch_optimizer(train: Train, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    _, make, names = OPTIMIZERS[train.optimizer]
    theirs = {"learning_rate": "lr", **names}
    settings = {theirs.get(k, k): v for k, v in train.settings.items() if not k.startswith("clip")}
    if settings.pop("no_decay", None) is None:
        return make(parameters, **settings)
    few, many = ([p for p in parameters if (p.ndim < 2) == one] for one in (True, False))
    return make([{"params": few, "weight_decay": 0.0}, {"params": many}], **settings)


# ---------------------------------------------------------------- drawing
def generate(seed: int) -> Case:
    """The case of a seed."""
    return _Draw(seed).case()


class _Draw:
    def __init__(self, seed: int):
        self.seed, self.rng = seed, random.Random(seed)
        self.data = np.random.default_rng([seed, 7])
        self.batch = self.rng.choice((1, 2, 3, 4, 5, 8, 9))
        self.names = self.rng.sample(NAMES, len(NAMES))
        self.sources: list[Source] = []
        self.steps: list[Step] = []
        self.trains: dict[int, Train] = {}
        self.graph = CalcGraph()
        self.of: dict[int, Variable] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.labels: list[int] = []
        self.path = 0

    def case(self) -> Case:
        rng = self.rng
        for _ in range(rng.randint(1, 3)):
            rank = rng.randint(1, 3)
            shape = [rng.choice((1, 2, 3, 4, 5, 7)) for _ in range(rank)]
            at = 0 if rng.random() < 0.75 else rng.randrange(rank)
            self.placeholder(tuple(None if i == at else n for i, n in enumerate(shape)))
        paths = rng.sample(PATHS, rng.choice((1, 1, 2, 2, 3, 4)))
        length = rng.randint(3, 40)
        for self.path, name in enumerate(paths):
            with self.graph.path(name, adopt=False):
                for _ in range(max(2, length // len(paths))):
                    self.operator()
                if rng.random() < 0.7:
                    self.train()
        results = [p.key for p in self.steps]
        case = Case(
            seed=self.seed, batch=self.batch, sources=tuple(self.sources), paths=tuple(paths), steps=tuple(self.steps),
            trains=self.trains, keep=tuple(rng.sample(results, len(results) // 3)), accumulate=rng.random() < 0.4,
            early=rng.random() < 0.3,
        )  # fmt: skip
        return case

    # ------------------------------------------------------------ values
    def name(self) -> str:
        return self.names.pop() if self.names else f"n{len(self.of)}"

    def placeholder(self, shape: tuple[int | None, ...], classes: int = 0) -> int:
        key, name = len(self.of), self.name()
        v = self.of[key] = self.graph.placeholder(name, shape)
        self.sources.append(Source(key, name, v.shape, classes=classes))
        only = replace(self.so_far(), sources=(self.sources[-1],))
        self.values[key] = torch.tensor(dict(only._data(self.batch, 0)).popitem()[1])
        return key

    def parameter(self, shape: tuple[int, ...]) -> int:
        rng, key, name = self.rng, len(self.of), self.name()
        spread = 0.8 if len(shape) < 2 else 1.0 / math.sqrt(shape[0])
        array = np.asarray(self.data.uniform(0.3, 1.3, shape) * _signs(self.data, list(shape)) * spread)
        v = self.of[key] = self.graph.parameter(name, shape, array)
        regularizer = (rng.choice((0.0, 0.01)), rng.choice((0.0, 0.02))) if rng.random() < 0.2 else None
        self.sources.append(Source(key, name, v.shape, array, rng.random() < 0.8, regularizer))
        self.values[key] = torch.tensor(array)
        return key

    def so_far(self) -> Case:
        return Case(self.seed, self.batch, tuple(self.sources), (), tuple(self.steps), {}, (), False, False)

    def some(self, wanted: Callable[[Shape], bool] = lambda shape: True) -> int | None:
        """A value, of those drawn lately rather than of others."""
        found = [k for k, v in self.of.items() if k not in self.labels and wanted(v.shape)]
        return found[max(self.rng.randrange(len(found)), self.rng.randrange(len(found)))] if found else None

    # ------------------------------------------------------------ operators
    def operator(self) -> None:
        """One more operator, or none where those drawn do not fit."""
        kinds = (
            (self.unary, 8), (self.binary, 7), (self.product, 5), (self.reduction, 3), (self.view, 4), (self.moved, 3),
            (self.softmax, 1), (self.joined, 2), (self.sliced, 1), (self.judged, 1), (self.fused, 2),
        )  # fmt: skip
        for _ in range(8):
            draw = self.rng.choices([k for k, _ in kinds], [w for _, w in kinds])[0]
            if draw() is not None:
                return

    def add(self, op: str, *inputs: int | None, **attrs: Any) -> int | None:
        """The key of a new step, if its shapes fit and its values are clear of where it is not smooth."""
        name = self.name() if self.rng.random() < 0.3 else None
        key = len(self.of)
        step = Step(self.path, key, op, inputs, attrs, name)
        given = [self.values[k] for k in inputs if k is not None]
        try:
            y = value(step, given, self.batch, CLEAR)
            if y.numel() > LARGEST or y.dim() > 4 or (y.numel() and float(y.abs().max()) > BOUND):
                return None
            v = _emit(step, [None if k is None else self.of[k] for k in inputs])
        except (Unclear, ShapeError, RuntimeError, IndexError):
            return None
        self.of[key], self.values[key] = v, y
        self.steps.append(step)
        return key

    def unary(self) -> int | None:
        x, rng = self.some(), self.rng
        op = rng.choice(
            ("neg", "abs", "sqrt", "square", "exp", "log", "pow", "relu", "leaky_relu", "sigmoid", "tanh", "gelu", "softplus",
             "elu", "affine", "dropout", "stop_gradient")
        )  # fmt: skip
        attrs: dict[str, Any] = {
            "pow": {"exponent": rng.choice((2.0, 3.0, -1.0, 0.5, 1.5, -2.0, 1.0))},
            "leaky_relu": {"alpha": rng.choice((0.01, 0.2))},
            "elu": {"alpha": rng.choice((1.0, 0.5))},
            "gelu": {"approximate": rng.choice(("none", "tanh"))},
            "affine": {"a": rng.choice((2.0, -0.5, 1.0)), "b": rng.choice((0.0, 1.0, -0.25))},
        }.get(op, {})
        return self.add(op, x, **attrs)

    def binary(self) -> int | None:
        rng, x = self.rng, self.some()
        assert x is not None
        shape = self.of[x].shape
        if rng.random() < 0.5:
            y = self.some(lambda s: s == shape)
        elif rng.random() < 0.6:
            y = self.some(lambda s: len(s) <= len(shape) and all(a in (b, 1) for a, b in zip(s[::-1], shape[::-1])))
        else:
            cut = rng.randrange(len(shape) + 1)
            y = self.parameter(tuple(n.b if n.constant and rng.random() < 0.8 else 1 for n in shape[cut:]))
        if rng.random() < 0.4:
            x, y = y, x
        return self.add(rng.choice(("add", "sub", "mul", "div", "mul", "add")), x, y)

    def product(self) -> int | None:
        rng = self.rng
        a = self.some(lambda s: len(s) >= 2)
        if a is None:
            return None
        shape, transpose_a = self.of[a].shape, rng.random() < 0.25
        inner = shape[-2 if transpose_a else -1]
        transpose_b = rng.random() < 0.25
        b = self.some(lambda s: len(s) >= 2 and s[-1 if transpose_b else -2] == inner) if rng.random() < 0.4 else None
        if b is None:
            if not inner.constant:
                return None
            n = rng.choice((1, 2, 3, 5, 6))
            b = self.parameter((n, inner.b) if transpose_b else (inner.b, n))
        y = self.add("matmul", a, b, transpose_a=transpose_a, transpose_b=transpose_b)
        if y is not None and rng.random() < 0.4:
            width = self.of[y].shape[-1]
            if width.constant:
                return self.add("add", *rng.sample((y, self.parameter((width.b,))), 2))
        return y

    def fused(self) -> int | None:
        """A linear layer, often with an activation."""
        rng = self.rng
        x = self.some(lambda s: len(s) >= 2 and s[-1].constant)
        if x is None:
            return None
        n = rng.choice((1, 2, 4, 6))
        y = self.add(
            "linear", x, self.parameter((self.of[x].shape[-1].b, n)), *([self.parameter((n,))] * (rng.random() < 0.7))
        )
        if y is not None and rng.random() < 0.7:
            attrs: dict[str, Any] = {"elu": {"alpha": 1.0}, "gelu": {"approximate": "none"}}
            op = rng.choice(("relu", "tanh", "sigmoid", "elu", "gelu", "softplus"))
            return self.add(op, y, **attrs.get(op, {})) or y
        return y

    def reduction(self) -> int | None:
        rng, x = self.rng, self.some(lambda s: len(s) >= 1)
        if x is None:
            return None
        rank = len(self.of[x].shape)
        first = rng.randrange(rank)
        axes = None if rng.random() < 0.2 else tuple(range(first, rng.randint(first + 1, rank)))
        return self.add(
            rng.choice(("sum", "mean", "max", "min", "sum_squares", "mean")), x, axes=axes, keepdims=rng.random() < 0.4
        )

    def view(self) -> int | None:
        rng, x = self.rng, self.some(lambda s: len(s) >= 1)
        if x is None:
            return None
        shape = self.of[x].shape
        if rng.random() < 0.4:
            return self.add("flatten", x)
        if not all(n.constant or n == BATCH for n in shape):
            return None
        sizes: list[int | None] = [n.b if n.constant else None for n in shape]
        if rng.random() < 0.5 and len(sizes) < 4:
            i = rng.randrange(len(sizes))
            divisors = [d for d in (1, 2, 3) if sizes[i] is not None and sizes[i] % d == 0]  # type: ignore[operator]
            if divisors:
                d, n = rng.choice(divisors), sizes[i]
                assert n is not None
                sizes[i : i + 1] = [d, n // d]
            else:
                sizes.insert(rng.choice((i, i + 1)), 1)
        else:
            pairs = [i for i, (a, b) in enumerate(pairwise(sizes)) if a is not None and b is not None]
            if not pairs:
                return None
            i = rng.choice(pairs)
            sizes[i : i + 2] = [sizes[i] * sizes[i + 1]]  # type: ignore[operator]
        return self.add("reshape", x, shape=tuple(sizes))

    def moved(self) -> int | None:
        x = self.some(lambda s: len(s) >= 2)
        if x is None:
            return None
        axes = list(range(len(self.of[x].shape)))
        self.rng.shuffle(axes)
        return self.add("transpose", x, axes=self.rng.choice((None, tuple(axes))))

    def softmax(self) -> int | None:
        x = self.some(lambda s: len(s) >= 1 and s[-1].constant)
        y = None if x is None else self.add(self.rng.choice(("softmax", "log_softmax")), x, axis=-1)
        if y is not None and self.of[y].shape[:-1] == (BATCH,) and self.rng.random() < 0.3:
            t = self.placeholder((None,), classes=self.of[y].shape[-1].b)
            self.labels.append(t)
            return self.add("pick", y, t)
        return y

    def joined(self) -> int | None:
        x = self.some(lambda s: len(s) >= 1)
        if x is None:
            return None
        shape = self.of[x].shape
        axis = self.rng.randrange(len(shape))
        fits = self.some(
            lambda s: len(s) == len(shape) and all(i == axis or a == b for i, (a, b) in enumerate(zip(s, shape)))
        )
        return self.add("concat", x, fits, axis=axis if self.rng.random() < 0.5 else axis - len(shape))

    def sliced(self) -> int | None:
        rng = self.rng
        x = self.some(lambda s: len(s) >= 1 and any(n.constant and n.b > 1 for n in s))
        if x is None:
            return None
        starts, stops = [], []
        for n in self.of[x].shape:
            lo, hi = (rng.randrange(n.b), n.b) if n.constant else (0, None)
            starts.append(lo)
            stops.append(hi if hi is None else rng.randint(lo + 1, hi))
        return self.add("slice", x, starts=tuple(starts), stops=tuple(stops))

    def judged(self) -> int | None:
        """A loss or metric of what is there."""
        rng, x = self.rng, self.some(lambda s: len(s) >= 1)
        if x is None:
            return None
        shape = self.of[x].shape
        t = self.some(lambda s: s == shape)
        if t is None or t == x:
            return None
        op = rng.choice(("mse", "mae", "huber", "rmse", "binary_cross_entropy"))
        if op == "binary_cross_entropy":
            t = self.add("sigmoid", t)
            if t is None:
                return None
        return self.add(op, x, t, **({"delta": rng.choice((0.5, 1.0))} if op == "huber" else {}))

    # ------------------------------------------------------------ training
    def train(self) -> None:
        """Make the path train, if something of it depends on a trainable parameter."""
        rng = self.rng
        trainable = {s.key for s in self.sources if s.trainable}
        own = {p.key for p in self.steps if p.path == self.path}
        depends: set[int] = set()
        for p in self.steps:
            if (
                p.path == self.path
                and p.op != "stop_gradient"
                and any(k in depends or k in trainable for k in p.inputs)
            ):
                depends.add(p.key)
        found = sorted(k for k in depends if len(self.of[k].shape) >= 1)
        if not found or not own:
            return
        y = rng.choice(found[-4:])
        loss = self.loss(y)
        if loss is None or not self.differentiable(loss):
            return
        if rng.random() < 0.3 and len(found) > 1:  # of several parts
            more = self.add("mean", rng.choice(found), axes=None, keepdims=False)
            both = self.add("add", loss, more) if more is not None and not self.of[loss].shape else None
            loss = both if both is not None and self.differentiable(both) else loss
        kind = rng.choice(("sgd", "sgd", "adam", "adamw", "rmsprop", "adagrad"))
        settings: dict[str, float | bool | str] = {"learning_rate": rng.choice((0.003, 0.01))}
        if kind == "sgd" and rng.random() < 0.6:
            settings |= {"momentum": 0.9, "nesterov": rng.random() < 0.5}
        if kind == "rmsprop" and rng.random() < 0.5:
            settings["momentum"] = 0.5
        if kind != "sgd":
            settings["eps"] = 1e-4
        if kind == "adagrad":
            settings["initial_accumulator"] = rng.choice((0.0, 0.5))
        if rng.random() < 0.3:
            settings["weight_decay"] = 0.01
        if rng.random() < 0.2:
            settings["clip_value"] = 0.05
        if rng.random() < 0.2:
            settings["clip_norm"] = 0.1
        steps = [p.key for p in self.steps if p.path == self.path]
        output = rng.choice(steps) if rng.random() < 0.5 else None
        mine = sorted(trainable & {k for p in self.behind(loss) for k in p.inputs if k is not None})
        chosen = tuple(rng.sample(mine, rng.randint(1, len(mine)))) if mine and rng.random() < 0.2 else None
        if len({len(self.of[k].shape) < 2 for k in chosen or mine}) == 2 and rng.random() < 0.5:
            settings |= {"weight_decay": 0.1, "no_decay": "1d"}
        self.trains[self.path] = Train(loss, kind, settings, output, chosen)

    def behind(self, key: int) -> list[Step]:
        """Steps of the path that a value has gradients through."""
        wanted, found = {key}, []
        for p in reversed(self.steps):
            if p.path == self.path and p.key in wanted and p.op != "stop_gradient":
                wanted |= {k for k in p.inputs if k is not None}
                found.append(p)
        return found

    def differentiable(self, key: int) -> bool:
        """Whether a value depends on something of its path, and on nothing through a metric, which has no gradient."""
        trainable, behind = {s.key for s in self.sources if s.trainable}, self.behind(key)
        return not any(p.op in ("rmse", "accuracy") for p in behind) and any(
            k in trainable for p in behind for k in p.inputs
        )

    def loss(self, y: int) -> int | None:
        rng, shape = self.rng, self.of[y].shape
        if rng.random() < 0.25 and len(shape) == 2 and not shape[0].constant and shape[1].constant and shape[1].b > 1:
            if shape[0] == BATCH:
                t = self.placeholder((None,), classes=shape[1].b)
                self.labels.append(t)
                found = self.add("softmax_cross_entropy", y, t, label_smoothing=rng.choice((0.0, 0.1)))
                if found is not None:
                    return found
        t = self.some(lambda s: s == shape)
        if t is not None and t != y and rng.random() < 0.7:
            found = self.add(*rng.choice((("mse", y, t), ("mse", y, t), ("mae", y, t))))
            if found is not None:
                return found
        return self.add(rng.choice(("mean", "sum_squares", "mean")), y, axes=None, keepdims=rng.random() < 0.2)
