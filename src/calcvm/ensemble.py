"""`Ensemble`: several models that predict together, and snapshots of one model under a cyclic learning rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from calcvm import checks, hints
from calcvm.errors import CalcError, ShapeError
from calcvm.fleet import Handle
from calcvm.model import CalcHeap, Model
from calcvm.model.data import by_name, count_of
from calcvm.model.scores import Scores, scores_of
from calcvm.ops.dims import Shape, show
from calcvm.ops.optimizers import SCHEDULES, STEP_ROW
from calcvm.vm.program.encoding import decode_row
from calcvm.vm.program.program import Program

METHODS = ("mean", "vote")


@hints.names_of_others
class Ensemble:
    """Models with the same inputs and outputs that predict together.

    Parameters
    ----------
    models : sequence of Model, or of the handles of a fleet
        They may share a heap, be switched through it, or each have a heap; predictions are the same.
    method : "mean" or "vote"
        "mean": the mean of the outputs; for scores of a cross-entropy loss, the mean of the probabilities; for bools, the
        share that is true.  "vote": each model votes for the class that it finds most probable.
    weights : sequence of float, shape (n_models,), optional
        The weight of each model (default: equal).

    Raises
    ------
    CalcError : there is no model; inputs, outputs or losses differ; outputs are integers such as classes, which have no
        mean; or there are no classes to vote for.

    References
    ----------
    Hansen and Salamon, Neural network ensembles, 1990.

    Examples
    --------
    >>> X = np.ones((8, 4), "float32")
    >>> models = [cv.Model(nn.Linear(1), input_shape=(4,), loss="mse", optimizer="adam", seed=s) for s in range(3)]
    >>> cv.Ensemble(models).predict(X).shape
    (8, 1)
    """

    def __init__(self, models: Sequence[Model | Handle], method: str = "mean", weights: Sequence[float] | None = None):
        given = checks.items("an ensemble", models, "a list of models, such as [model] or fleet.results.best(5),")
        self.models = [model.model if isinstance(model, Handle) else model for model in given]
        self.method = checks.choice("method", method, METHODS)
        for i, model in enumerate(self.models):
            checks.one_of(f"model {i} of the ensemble", model, Model, "a model or a handle of a fleet")
        if not self.models:
            raise CalcError("an ensemble needs at least one model")
        try:
            self.weights = np.ones(len(self)) if weights is None else np.array(weights, np.float64)
        except (TypeError, ValueError, OverflowError):
            raise CalcError(f"weights {checks.shown(weights)}: give a number for each model") from None
        if self.weights.shape != (len(self),):
            raise ShapeError(f"weights of shape {self.weights.shape} for {len(self)} models: give one weight per model")
        if not (np.isfinite(self.weights).all() and (self.weights >= 0).all() and self.weights.any()):
            raise CalcError(f"weights {self.weights.tolist()}: give finite numbers >= 0, at least one above 0")
        programs = [model.program for model in self.models]
        self._scored = scores_of(programs[0])
        self._dtype = np.result_type(*(program.dtype for program in programs))
        for i, program in enumerate(programs):
            for what, ours, first in zip(("input", "output"), self._ends(i), self._ends(0)):
                if ours != first:
                    raise ShapeError(f"model {i}: its {what} is {show(ours)}, that of model 0 is {show(first)}")
            if (of := self._output(i)) != self._output(0):
                raise CalcError(f"model {i}: its output is of {of}s, that of model 0 of {self._output(0)}s")
            if scores_of(program) != self._scored:
                raise CalcError(
                    f"model {i}: its outputs have another meaning than those of model 0: their losses differ"
                )
        if method == "vote":
            self._needs_classes()

    def __len__(self) -> int:
        return len(self.models)

    def __repr__(self) -> str:
        return f"<ensemble of {len(self)} models, by {self.method}>"

    # ------------------------------------------------------------ predictions
    def predict(self, X: Any) -> np.ndarray:
        """Combined outputs for a data set, shape (n, *output_shape).

        "mean": the mean of the outputs, or with a cross-entropy loss `predict_proba`.  "vote": the share of votes
        for each class.
        """
        if self.method == "vote":
            return self._votes(X)
        return self.predict_proba(X) if self._scored else self._mean(lambda outputs: outputs, X)

    def predict_proba(self, X: Any) -> np.ndarray:
        """The mean of the models' probabilities, for either method, shape (n, *output_shape).

        Raises
        ------
        CalcError : the loss is not a cross-entropy, so the outputs are not scores of classes.
        """
        return self._mean(self._needs_classes().probabilities, X)

    def predict_classes(self, X: Any) -> np.ndarray:
        """The classes with the highest `predict`, int64; the lowest of equals.

        softmax_cross_entropy: the index of the largest output, shape (n,).  binary_cross_entropy: 1 if an output is
        above one half, else 0, shape (n, *output_shape).
        """
        return self._needs_classes().classes(self.predict(X), above=0.5)

    def evaluate(self, X: Any, y: Any) -> dict[str, float]:
        """The figures of `Model.evaluate` for the combined outputs.

        The loss is the first model's.  For a cross-entropy it is that of `predict_proba`, with either method, and the
        accuracy that of `predict_classes`.  Bools count as true if more than half are.
        """
        roles = self.models[0].roles
        targets = by_name("y", roles.labels, y, roles)

        def judged(outputs: np.ndarray) -> dict[str, float]:
            return self.models[0].judge({roles.outputs[0]: outputs, **targets})()

        if not self._scored:
            combined = self.predict(X)
            return judged(combined > 0.5 if self._output(0) == "bool" else combined)
        figures = judged(self._scores(X))
        if self.method == "vote" and "accuracy" in figures:
            votes = self._votes(X)
            figures["accuracy"] = judged(votes if self._scored.axis is not None else votes - 0.5)["accuracy"]
        return figures

    # ------------------------------------------------------------ parts
    def _ends(self, i: int) -> tuple[Shape, Shape]:
        """Shapes of one model's input and output."""
        model = self.models[i]
        roles, forms = model.roles, model.loaded.forms
        if len(roles.inputs) != 1 or len(roles.outputs) != 1:
            raise CalcError(f"model {i} has several inputs or outputs: an ensemble needs models with one of each")
        return forms[roles.inputs[0]], forms[roles.outputs[0]]

    def _output(self, i: int) -> str:
        """The type of a model's outputs, "float" or "bool" (CalcError: integers)."""
        model = self.models[i]
        name = model.roles.outputs[0]
        of = np.dtype(model.loaded.own_types.get(name, model.program.dtype))
        if of.kind in "iu":
            raise CalcError(
                f"model {i}: its output {name!r} is of {of}, and integers, such as classes, have no meaningful mean: make an "
                "ensemble of models whose output is their scores"
            )
        return "bool" if of.kind == "b" else "float"

    def _needs_classes(self) -> Scores:
        if not self._scored:
            raise CalcError(
                "the models have no classes, because their loss is not a cross-entropy: use predict, by 'mean'"
            )
        return self._scored

    @np.errstate(all="ignore")  # as `Scores.probabilities`
    def _mean(self, term: Callable[[np.ndarray], np.ndarray], X: Any) -> np.ndarray:
        """Weighted mean of a term of the models' outputs, summed in float64 in order."""
        terms = (term(model.predict(X).astype(np.float64)) for model in self.models)
        total = sum(weight * values for weight, values in zip(self.weights, terms))
        return (total / self.weights.sum()).astype(self._dtype)

    def _votes(self, X: Any) -> np.ndarray:
        """Share of the votes for each class, or (binary_cross_entropy) for 1."""
        return self._mean(self._needs_classes().votes, X)

    @np.errstate(all="ignore")
    def _scores(self, X: Any) -> np.ndarray:
        """Scores whose probabilities are the mean of the models' probabilities, in float64.

        Probabilities are summed as logarithms, so a class that every model finds improbable keeps a finite loss.
        """
        log_weights = np.log(self.weights / self.weights.sum())
        axis = self._needs_classes().axis
        yes = no = np.array(-np.inf)
        for model, log_weight in zip(self.models, log_weights):
            scores = model.predict(X).astype(np.float64)
            if axis is not None:
                yes = np.logaddexp(yes, log_weight + scores - np.logaddexp.reduce(scores, axis=axis, keepdims=True))
            else:
                yes = np.logaddexp(yes, log_weight - np.logaddexp(0, -scores))
                no = np.logaddexp(no, log_weight - np.logaddexp(0, scores))
        return yes - no if axis is None else yes


def snapshot_ensemble(
    model: Model,
    X: Any,
    y: Any,
    *,
    cycles: int = 5,
    epochs_per_cycle: int = 10,
    learning_rate: float | None = None,
    shuffle: bool = True,
    check_finite: bool = False,
    progress: bool = True,
) -> Ensemble:
    """Train one model in cycles of a cosine learning rate, and keep a snapshot at the end of each.

    Parameters
    ----------
    model : Model
        Compiled with the schedule `CosineRestarts`, whose period and factor are set here.  A warm-up in progress
        replaces the first steps of the first cycle.
    X, y, shuffle, check_finite, progress : see `Model.fit`.
    cycles, epochs_per_cycle : int
    learning_rate : float, optional
        At the beginning of each cycle (default: the model's).

    Returns
    -------
    Ensemble : the snapshots, oldest first, by "mean"; ``cv.Ensemble(snapshots.models[-3:])`` takes the last three.
        They share a new heap of ``cycles`` times the program's ``heap_bytes``.  After Ctrl-C there are only those of
        complete cycles.

    Raises
    ------
    CalcError : the model has another schedule, or the loss of a cycle is not finite.

    References
    ----------
    Huang et al., Snapshot ensembles: train 1, get M for free, 2017.

    Examples
    --------
    >>> X, y = np.eye(8, 4, dtype="float32"), np.arange(8) % 2
    >>> schedule = cv.CosineRestarts(10)
    >>> model = cv.Model(nn.Linear(2), input_shape=(4,), optimizer=cv.SGD(0.1, schedule=schedule), batch_size=8)
    >>> ensemble = cv.snapshot_ensemble(model, X, y, cycles=2, epochs_per_cycle=2, progress=False)
    >>> len(ensemble.models)
    2
    """
    checks.one_of("snapshot_ensemble", model, Model, "a model or a handle of a fleet")
    cycles, epochs_per_cycle = checks.integer("cycles", cycles), checks.integer("epochs_per_cycle", epochs_per_cycle)
    if _schedule(model.program) != "cosine_restarts":
        raise CalcError(
            f"the model's schedule is {_schedule(model.program)!r}: "
            "compile it with an optimizer such as cv.SGD(0.1, schedule=cv.CosineRestarts(1))"
        )
    samples = count_of(by_name("X", model.roles.inputs, X, model.roles), model.roles)
    heap = CalcHeap(cycles * model.program.heap_bytes, device=model.heap.device.name)
    record = model.record
    with record.change:  # held from the first cycle to the last
        record.begin_training()
        hyper = model.hyper
        hyper["total_steps"], hyper["gamma"] = epochs_per_cycle * -(-samples // model.learning_batch), 1.0
        hyper["gamma_t"] = hyper["t"] - hyper["warmup_steps"] + 1  # the next step begins the first cycle
        if learning_rate is not None:
            hyper["learning_rate"] = learning_rate
        snapshots: list[Model] = []
        for cycle in range(cycles):
            history = model.fit(
                X,
                y,
                epochs=epochs_per_cycle,
                shuffle=shuffle,
                check_finite=check_finite,
                terminate_on_nan=True,
                progress=progress,
            )
            loss = history["loss"][-1] if len(history) else 0.0
            if not np.isfinite(loss):
                raise CalcError(
                    f"cycle {cycle + 1} of {cycles} ended with a loss of {loss}: use a smaller learning_rate, or look for "
                    "NaN in the data with check_finite=True"
                )
            if len(history) < epochs_per_cycle:  # Ctrl-C
                if not snapshots:
                    raise KeyboardInterrupt
                break
            snapshots.append(model.copy(f"cycle-{cycle + 1}", heap))
    return Ensemble(snapshots)


# ---------------------------------------------------------------- facts of programs
def _schedule(program: Program) -> str:
    """The learning-rate schedule of the path learn."""
    for (path, _), section in program.sections.items():
        for pc in range(*section):
            spec = program.spec(pc)
            if path == "learn" and spec.name == STEP_ROW:
                return SCHEDULES[decode_row(spec, program.rows[pc])[0]["schedule"]]
    raise CalcError("the model's program does not count steps")
