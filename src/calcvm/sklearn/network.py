"""The network behind an estimator: its graph, compiled once per design, and its model in a heap."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from calcvm import compiler, init, nn
from calcvm import functions as F
from calcvm.graph import CalcGraph, Variable, apply
from calcvm.model import CalcHeap, Model, persistent
from calcvm.optim import SGD, AdamHat, Optimizer
from calcvm.teams import default_team
from calcvm.vm.program.program import Program

KEPT_PROGRAMS = 64
ACTIVATIONS = {"identity": None, "logistic": nn.Sigmoid, "tanh": nn.Tanh, "relu": nn.ReLU}
OUT_ACTIVATIONS: dict[str, Callable[[Variable], Variable]] = {
    "softmax": F.softmax,
    "logistic": F.sigmoid,
    "identity": lambda z: z,
    "exp": F.exp,
}
# Hyperparameters are set in the heap; these only choose the rows.  L-BFGS uses momentum, which with a value of 0 is the gradient.
OPTIMIZERS: dict[str, Optimizer] = {
    "adam": AdamHat(),
    "sgd": SGD(1.0),
    "momentum": SGD(1.0, momentum=0.5),
    "nesterov": SGD(1.0, momentum=0.5, nesterov=True),
    "lbfgs": SGD(1.0, momentum=0.5),
}


@dataclass(frozen=True)
class Design:
    """Everything that determines the program of a network.

    out_activation : softmax, logistic, identity or exp; it determines the loss.
    optimizer : one of `OPTIMIZERS`, or "" if the network only predicts.
    weighted : samples have weights.
    penalized : alpha is not 0.
    judged : a path predicts.
    workers : the largest team (None: as large as pays for a step).
    """

    units: tuple[int, ...]
    activation: str
    out_activation: str
    optimizer: str
    weighted: bool
    penalized: bool
    judged: bool
    batch: int
    dtype: str
    workers: int | None

    @property
    def labels(self) -> bool:
        """Whether targets are class numbers, not one column per output."""
        return self.out_activation == "softmax" and not self.weighted

    @property
    def normed(self) -> bool:
        """Whether a batch's sums are divided by the sum of its weights, which are ones if no weights are given."""
        return self.optimizer != "lbfgs" and (self.weighted or self.penalized)

    @property
    def two_losses(self) -> bool:
        """Whether reported and minimized loss differ: scikit-learn reports the mean over outputs, but descends the sum."""
        return self.out_activation == "identity" and self.units[-1] > 1


# ---------------------------------------------------------------- the graph
def graph_of(design: Design) -> CalcGraph:
    """The graph of a design: path learn if it has an optimizer, and predict if it is judged.

    The loss of a batch is scikit-learn's, ``(sum_i w_i*l_i + alpha/2 * sum W^2) / sum_i w_i``.  For L-BFGS it is
    ``mean_i w_i*l_i``, so that batches add up.
    """
    g = CalcGraph()
    activation, n_outputs = ACTIVATIONS[design.activation], design.units[-1]
    layers: list[nn.Layer] = []
    for n in design.units[1:-1]:
        layers += [nn.Linear(n, init=init.Zeros()), *([activation()] if activation else [])]
    net = nn.Sequential(*layers, nn.Linear(n_outputs, init=init.Zeros()))
    x = g.placeholder("input", (None, design.units[0]))
    t = g.placeholder("target", (None,) if design.labels else (None, n_outputs))
    if design.optimizer:
        with g.path("learn", backward=True, adopt=False) as learn:
            z = net.build(x)
            loss, goal = _losses(design, g, z, t)
            learn.minimize(goal, OPTIMIZERS[design.optimizer], output=z)
            loss.rename("loss")
    if design.judged:
        with g.path("predict", adopt=False) as predict:
            output = OUT_ACTIVATIONS[design.out_activation](net.build(x, training=False))
            predict.output = output.rename("output")
    return g


def _losses(design: Design, g: CalcGraph, z: Variable, t: Variable) -> tuple[Variable, Variable]:
    """The reported and the minimized loss.  They are the same except for `Design.two_losses`."""
    weight = g.placeholder("weight", (None,)) if design.weighted or design.normed else None
    norm = F.sum(weight) if weight is not None and design.normed else None
    if weight is not None and design.weighted:
        each = weight * _each(design, z, t)
        goal = F.mean(each) if norm is None else F.sum(each) / norm
    else:
        goal = F.mean(_each(design, z, t)) if design.out_activation == "exp" else _mean(design, z, t)
    loss = goal / design.units[-1] if design.two_losses else goal
    if norm is None or not design.penalized:
        return loss, goal
    alpha = g.parameter("alpha", (1,), init=init.Zeros(), trainable=False)
    squares = [F.sum_squares(v) for v in [*g.variables.values()] if v.kind == "parameter" and v.rank == 2]
    penalty = F.reshape(alpha, ()) * sum(squares[1:], squares[0]) * 0.5 / norm
    total = goal + penalty
    return (loss + penalty if design.two_losses else total), total


def _mean(design: Design, z: Variable, t: Variable) -> Variable:
    """The mean loss of a batch, by the table's loss operators."""
    if design.out_activation == "softmax":
        return F.softmax_cross_entropy(z, t)
    if design.out_activation == "logistic":
        return F.binary_cross_entropy(z, t) * design.units[-1]
    return F.mse(z, t) * (0.5 * design.units[-1])


def _each(design: Design, z: Variable, t: Variable) -> Variable:
    """The loss of each sample, shape (batch,)."""
    if design.out_activation == "softmax":
        return F.neg(F.sum(t * F.log_softmax(z), axis=1))
    if design.out_activation == "logistic":
        return F.sum(apply("binary_cross_entropy_term", z, t), axis=1)
    if design.out_activation == "identity":
        return F.sum(F.square(z - t), axis=1) * 0.5
    # half the Poisson deviance; the part that depends only on the target is data
    return F.sum(F.exp(z) - t * z, axis=1) + z.graph.placeholder("constant", (None,))


@lru_cache(KEPT_PROGRAMS)
def program_of(design: Design) -> Program:
    """The program of a design, compiled once per process."""
    return compiler.compile(
        graph_of(design), batch_size=design.batch, dtype=design.dtype, workers=design.workers,
        accumulate=design.optimizer == "lbfgs", keep=["loss"] if design.optimizer else [],
    )  # fmt: skip


# ---------------------------------------------------------------- in a heap
class Network:
    """A design with its own heap.  At rest, and in a pickle, it is arrays."""

    def __init__(self, design: Design, seed: int = 0):
        self.design, self.seed, self.epochs = design, seed, 0
        self._resident: Model | None = None
        self._state: Mapping[str, np.ndarray] = {}

    @property
    def resident(self) -> Model:
        if self._resident is None:
            program = program_of(self.design)
            heap = CalcHeap(program.heap_bytes)
            self._resident = heap.create(program, seed=self.seed, workers=min(program.workers, allowed_workers()))
            self._resident.facts["epochs"] = self.epochs
            for name, cells in self._cells(self._resident):
                if name in self._state:
                    cells[:] = self._state[name]
        return self._resident

    def rest(self) -> None:
        """Free the heap, keeping the state as arrays."""
        self._keep()
        self._resident = None

    def fits(self, design: Design) -> bool:
        """Whether the state fits another design."""
        return all(getattr(design, what) == getattr(self.design, what) for what in ("units", "optimizer", "dtype"))

    def redesigned(self, design: Design, n_samples: int) -> Network:
        """The same parameters and optimizer state for a compatible design."""
        batch = self.design.batch
        if design == self.design or (
            replace(design, batch=batch) == self.design and n_samples <= min(batch, design.batch)
        ):
            return self  # all data fit in one batch, so its size makes no difference
        self._keep()
        other = Network(design, self.seed)
        other.epochs, other._state = self.epochs, self._state
        return other

    def _keep(self) -> None:
        if self._resident is not None:
            self.epochs = self._resident.facts["epochs"]
            self._state = {name: cells.copy() for name, cells in self._cells(self._resident)}

    @staticmethod
    def _cells(resident: Model) -> Iterator[tuple[str, np.ndarray]]:
        """Bytes of all persistent values, by name."""
        cells = resident.elements.view(np.uint8)
        for s in persistent(resident.program).values():
            yield s.name, cells[s.start : s.start + s.bytes.b]

    def __getstate__(self) -> dict[str, object]:
        self._keep()
        return {**vars(self), "_resident": None}


def allowed_workers() -> int:
    """The limit of OMP_NUM_THREADS, which joblib also sets if processes share a machine."""
    try:
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    except (KeyError, ValueError):
        return default_team()


def weights_of(resident: Model) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Weights and biases by layer, as views into the heap."""
    views = resident.parameters
    by_layer = {kind: [v for name, v in views.items() if name.endswith(kind)] for kind in ("weight", "bias")}
    return by_layer["weight"], by_layer["bias"]


def gradients_of(resident: Model) -> list[np.ndarray]:
    """The momenta of all weights, then of all biases, as views into the heap."""
    symbols, moments = resident.program.symbols, resident.loaded.training(None)["moments"]
    found = [symbols[moments[name]["m"]] for kind in ("weight", "bias") for name in moments if name.endswith(kind)]
    return [resident.elements[s.offset : s.offset + s.elems.b] for s in found]


def set_rate(resident: Model, rate: float) -> None:
    """Change the learning rate from now on.

    scikit-learn's velocities include the rate of their time, ours do not.  They are rescaled.
    """
    hyper = resident.hyper
    before = hyper["learning_rate"]
    hyper["learning_rate"] = rate
    if hyper["t"] and before != rate:
        elements = resident.elements
        for s in persistent(resident.program).values():
            if s.kind == "optimizer":
                elements[s.offset : s.offset + s.elems.b] *= before / rate
