"""scikit-learn's multi-layer perceptrons with compiled solvers."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import sklearn
from scipy.sparse import issparse
from scipy.special import xlogy
from sklearn import neural_network
from sklearn.base import is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import r2_score
from sklearn.model_selection import train_test_split
from sklearn.neural_network._stochastic_optimizers import AdamOptimizer, SGDOptimizer
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import check_consistent_length, validate_data

from calcvm.errors import CalcError
from calcvm.model import Model
from calcvm.sklearn.network import Design, Network, gradients_of, set_rate, weights_of
from calcvm.system import at_fork
from calcvm.vm.memory.epoch import Epoch
from calcvm.vm.memory.turns import Turns
from calcvm.vm.run.slices import SLICE_SECONDS

AUTO_BATCH = 200  # as in scikit-learn
LBFGS_BATCH = 1024  # batch size for a gradient over all samples
# More bytes of features are converted in each epoch, and not once before the first.  That takes 4 % longer.
COPIED_BYTES = 1 << 28
PREDICT_BATCH = 512
LARGE_FLOPS = 2e7  # of a prediction: above it a program, which takes 0.2 ms to set up, is faster than NumPy
# An epoch of fewer operations takes at most 8 us longer in float64 (200 samples, 4-100-3, one Zen 5 core: 19 us and
# not 12), which is 2 ms of a whole fit.
EXACT_FLOPS = 1e6


@dataclass
class Task:
    """A training task for a network.

    targets : arrays other than the features, by placeholder.
    rows, held : indexes of the training samples (None: all), and of the samples for early stopping.
    measure : the score of outputs for the held samples.
    hyper : hyperparameters of the optimizer.
    """

    design: Design
    targets: dict[str, np.ndarray]
    rows: np.ndarray | None
    held: np.ndarray | None
    measure: Callable[[np.ndarray], float] | None
    hyper: dict[str, float]
    seed: int


T = TypeVar("T")
_stand_in: ContextVar[Callable[[Any, Task], bool] | None] = ContextVar("stand_in", default=None)


def instead_of_training(stand_in: Callable[[Any, Task], bool], act: Callable[[], T]) -> T:
    """Call ``act`` with ``stand_in(estimator, task)`` in place of training; if it returns False, training runs.

    It is not a context manager: after Ctrl-C one stays active until its traceback is freed, and nothing would be trained.
    """
    before = _stand_in.get()
    try:
        _stand_in.set(stand_in)
        return act()
    finally:
        _stand_in.set(before)


_turns: WeakKeyDictionary[Any, Turns] = WeakKeyDictionary()  # not in the estimators, which are copied and pickled
_lost: WeakSet[Any] = WeakSet()  # estimators that another thread was using at a fork


def turn(estimator: Any) -> Any:
    """The lock of an estimator: one thread at a time replaces its parameters."""
    if estimator in _lost:
        raise CalcError(
            "the estimator was in use by another thread when this process was forked, and its state is incomplete here: "
            "load it again, or fork while no thread uses it"
        )
    turns = _turns.get(estimator)
    return (turns or _turns.setdefault(estimator, Turns("the estimator"))).mine


def _after_fork() -> None:
    for estimator, turns in [*_turns.items()]:
        if turns.renew():
            _lost.add(estimator)


at_fork(after_in_child=_after_fork)


def _check_hooks() -> None:
    """Raise CalcError if the methods replaced below have other names or signatures in this scikit-learn."""
    for name, first, last in (
        ("_fit_stochastic", ["X", "y", "sample_weight"], ["layer_units", "incremental"]),
        ("_fit_lbfgs", ["X", "y", "sample_weight"], ["layer_units"]),
        ("_loss_grad_lbfgs", ["packed_coef_inter", "X"], []),
        ("_update_no_improvement_count", ["early_stopping", "X"], []),
    ):
        hook = getattr(neural_network.MLPClassifier, name, None)
        names = [*inspect.signature(hook).parameters][1:] if hook else []
        if names[: len(first)] != first or names[len(names) - len(last) :] != last:
            raise CalcError(
                f"scikit-learn {sklearn.__version__} trains its perceptrons in another way ({name}) than calcvm.sklearn "
                "knows: install a version from 1.7 to 1.9"
            )


_check_hooks()


class Compiled:
    """Mixin that replaces the training of scikit-learn's perceptrons.

    scikit-learn's code still checks parameters and data, draws the initial weights, and evaluates epochs.
    Trainings, predictions and copies of an estimator take turns.
    """

    def _fit(self: Any, *args: Any, **options: Any) -> Any:
        with turn(self):
            return super()._fit(*args, **options)  # type: ignore[misc]

    def __getstate__(self: Any) -> dict[str, Any]:
        with turn(self):
            state = dict(super().__getstate__())  # type: ignore[misc]
            if "_network" in state:
                state["_network"] = copy.copy(state["_network"])  # its current state
            return state

    # ------------------------------------------------------------ sgd and adam
    def _fit_stochastic(self: Any, X: Any, y: np.ndarray, sample_weight: np.ndarray | None, *rest: Any) -> None:
        *_, layer_units, incremental = rest
        if self.early_stopping and incremental:
            raise ValueError("partial_fit does not support early_stopping=True")
        known = getattr(self, "_network", None) if incremental else None
        task = self._task(
            known.design.dtype if known else self._precision(X, layer_units), y, sample_weight, layer_units
        )
        if known is None or not known.fits(task.design):
            known, self._optimizer = None, self._schedule()
        self.n_iter_ = 0
        if (stand_in := _stand_in.get()) is not None and stand_in(self, task):
            return
        self._network = known.redesigned(task.design, len(y)) if known else Network(task.design, task.seed)
        resident = self._network.resident
        self._place(resident, {} if known else task.hyper)
        data = {"input": dense(X, task.design.dtype), **task.targets}
        train = Epoch(resident, data, "learn", samples=task.rows, train=True, results=["loss"])
        score = self._judge(resident, task, data["input"])
        try:
            ended = False
            while not ended:
                for (loss,) in train.epochs(1 if incremental else self._certain_epochs(), SLICE_SECONDS, self.shuffle):
                    ended = self._epoch_ends(resident, loss, train.samples, score) or incremental
                if self.n_iter_ == self.max_iter and not ended:
                    self._warn_of_max_iter()
                    break
        except KeyboardInterrupt:
            warnings.warn("Training interrupted by user.", stacklevel=2)
        finally:
            self._take(resident)
            if not incremental:
                self._network.rest()

    def _precision(self: Any, X: Any, units: list[int]) -> str:
        if self.dtype != "auto":
            return self.dtype
        flops = 6 * X.shape[0] * sum(n * m for n, m in pairwise(units)) if X.dtype == np.float64 else math.inf
        return "float64" if flops < EXACT_FLOPS else "float32"

    def _task(self: Any, dtype: str, y: np.ndarray, sample_weight: Any, layer_units: list[int]) -> Task:
        rows, held = self._held_out(y, sample_weight) if self.early_stopping else (None, None)
        n_samples = len(y) if rows is None else len(rows)
        batch = AUTO_BATCH if self.batch_size == "auto" else self.batch_size
        if self.batch_size != "auto" and batch > n_samples:
            text = "Got `batch_size` less than 1 or larger than sample size. It is going to be clipped"
            warnings.warn(text, stacklevel=2)
        batch = at_most(batch, n_samples)
        optimizer = "adam"
        hyper = {"learning_rate": self.learning_rate_init}
        if self.solver == "adam":
            hyper |= {"beta1": self.beta_1, "beta2": self.beta_2, "eps": self.epsilon}
        elif not self.momentum:
            optimizer = "sgd"
        else:
            optimizer = "nesterov" if self.nesterovs_momentum else "momentum"
            hyper["beta1"] = self.momentum
        design = self._design(optimizer, dtype, sample_weight, layer_units, batch)
        return Task(
            design, self._targets(design, y, sample_weight), rows, held,
            None if held is None else self._measure(y[held], None if sample_weight is None else sample_weight[held]),
            hyper, int(self._random_state.randint(2**31 - 1)),
        )  # fmt: skip

    def _design(self: Any, optimizer: str, dtype: str, sample_weight: Any, units: list[int], batch: int) -> Design:
        return Design(
            tuple(units), self.activation, self.out_activation_, optimizer, sample_weight is not None,
            self.alpha > 0, self.early_stopping and optimizer != "lbfgs", batch, dtype, self.workers,
        )  # fmt: skip

    @staticmethod
    def _targets(design: Design, y: np.ndarray, sample_weight: np.ndarray | None) -> dict[str, np.ndarray]:
        targets = {"target": y.argmax(axis=1) if design.labels else y}
        if design.weighted:
            targets["weight"] = sample_weight
        elif design.normed:
            targets["weight"] = np.ones(len(y), np.uint8)
        if design.out_activation == "exp":
            targets["constant"] = (xlogy(y, y) - y).sum(axis=1)
        return targets

    def _schedule(self: Any) -> Any:
        """scikit-learn's optimizer without parameters, which sets the rate and decides when to stop."""
        if self.solver == "adam":
            return AdamOptimizer([], self.learning_rate_init)
        return SGDOptimizer([], self.learning_rate_init, self.learning_rate, power_t=self.power_t)

    def _place(self: Any, resident: Model, hyper: dict[str, float]) -> None:
        """Put the estimator's weights and hyperparameters into the heap."""
        for views, arrays in zip(weights_of(resident), (self.coefs_, self.intercepts_)):
            for view, array in zip(views, arrays):
                view[...] = array
        if "alpha" in resident.parameters:
            resident.parameters["alpha"][...] = self.alpha
        for name, value in hyper.items():
            resident.hyper[name] = value

    def _take(self: Any, resident: Model) -> None:
        """Copy the weights from the heap; after early stopping, take those with the best score."""
        if self.early_stopping:
            self.coefs_, self.intercepts_ = self._best_coefs, self._best_intercepts
        else:
            self.coefs_, self.intercepts_ = ([view.copy() for view in views] for views in weights_of(resident))

    # ------------------------------------------------------------ epochs
    def _epoch_ends(self: Any, resident: Model, loss: float, n_samples: int, score: Any) -> bool:
        """Do what scikit-learn does after each epoch, and return whether to stop."""
        self.n_iter_ += 1
        self.loss_ = loss
        self.t_ += n_samples
        self.loss_curve_.append(loss)
        if self.verbose:
            print(f"Iteration {self.n_iter_}, loss = {loss:.8f}")
        if score is not None:  # scikit-learn copies these if they are the best
            self.coefs_, self.intercepts_ = map(list, weights_of(resident))
        self._update_no_improvement_count(score is not None, score, None, None)
        self._optimizer.iteration_ends(self.t_)
        stops = False
        if self._no_improvement_count > self.n_iter_no_change:
            what = "Training loss" if score is None else "Validation score"
            reason = (
                f"{what} did not improve more than tol={self.tol:f} for {self.n_iter_no_change} consecutive epochs."
            )
            stops = self._optimizer.trigger_stopping(reason, self.verbose)
            if not stops:
                self._no_improvement_count = 0
        if self.solver == "sgd":  # also when it stops: partial_fit continues with this rate
            set_rate(resident, self._optimizer.learning_rate)
        return stops

    def _certain_epochs(self: Any) -> int:
        """The number of epochs until one can be the last, change the rate, be scored, or be printed."""
        if self.early_stopping or self.verbose or (self.solver == "sgd" and self.learning_rate == "invscaling"):
            return 1
        patience = self.n_iter_no_change + 1 - self._no_improvement_count
        return max(1, int(min(patience, self.max_iter - self.n_iter_)))

    def _warn_of_max_iter(self: Any) -> None:
        warnings.warn(
            f"Stochastic Optimizer: Maximum iterations ({self.max_iter}) reached and the optimization hasn't "
            "converged yet.",
            ConvergenceWarning,
            stacklevel=2,
        )

    # ------------------------------------------------------------ early stopping
    def _held_out(self: Any, y: np.ndarray, sample_weight: Any) -> tuple[np.ndarray, np.ndarray]:
        """Indexes of the training and validation samples, as scikit-learn draws them."""
        rows, held = train_test_split(
            np.arange(len(y)),
            random_state=self._random_state,
            test_size=self.validation_fraction,
            stratify=y if is_classifier(self) and self.n_outputs_ == 1 else None,
        )
        if len(held) < 2:
            raise ValueError(
                "The validation set is too small. Increase 'validation_fraction' or the size of your dataset."
            )
        return rows, held

    def _measure(self: Any, y: np.ndarray, sample_weight: Any) -> Callable[[np.ndarray], float]:
        """scikit-learn's ``_score`` of the network's outputs: accuracy or R2."""
        if not is_classifier(self):
            return lambda outputs: r2_score(y, outputs, sample_weight=sample_weight)
        if self.out_activation_ == "softmax":
            labels = y.argmax(axis=1)
            return lambda outputs: float(np.average(outputs.argmax(axis=1) == labels, weights=sample_weight))
        return lambda outputs: float(np.average(((outputs > 0.5) == y).all(axis=1), weights=sample_weight))

    def _judge(self: Any, resident: Model, task: Task, X: np.ndarray) -> Callable[[], float] | None:
        if task.held is None or task.measure is None:
            return None
        measure = task.measure
        outputs = np.empty((len(task.held), task.design.units[-1]), task.design.dtype)
        run = Epoch(resident, {"input": X}, "predict", samples=task.held, outputs={"output": outputs})

        def score() -> float:
            run.whole(SLICE_SECONDS)
            return measure(outputs) if np.isfinite(outputs).all() else np.nan

        return score

    def _score(self: Any, score: Any, y: Any = None, sample_weight: Any = None) -> float:
        return score()  # `_update_no_improvement_count` passes on its argument from `_epoch_ends`

    # ------------------------------------------------------------ prediction
    def _forward_pass_fast(self: Any, X: Any, check_input: bool = True) -> np.ndarray:
        """Activations of the last layer, in the precision of the weights; scikit-learn's code computes few samples."""
        if check_input:
            X = validate_data(self, X, accept_sparse=["csr", "csc"], reset=False)
        with turn(self):
            return self._outputs(X)

    def _outputs(self: Any, X: Any) -> np.ndarray:
        dtype = self.coefs_[0].dtype
        flops = 2 * X.shape[0] * sum(c.size for c in self.coefs_)
        if flops < LARGE_FLOPS or issparse(X) or dtype.name not in ("float32", "float64"):
            return super()._forward_pass_fast(X.astype(dtype, copy=False), check_input=False)  # type: ignore[misc]
        units = (X.shape[1], *(c.shape[1] for c in self.coefs_))
        design = Design(
            units, self.activation, self.out_activation_, optimizer="", weighted=False, penalized=False, judged=True,
            batch=PREDICT_BATCH, dtype=dtype.name, workers=self.workers,
        )  # fmt: skip
        resident = Network(design).resident
        self._place(resident, {})
        outputs = np.empty((len(X), units[-1]), dtype)
        Epoch(resident, {"input": X}, "predict", outputs={"output": outputs}).whole(SLICE_SECONDS)
        return outputs

    # ------------------------------------------------------------ lbfgs
    def _fit_lbfgs(self: Any, X: Any, y: np.ndarray, sample_weight: np.ndarray | None, *rest: Any) -> None:
        # SciPy moves the parameters; the methods below compute loss and gradient for it
        gradient = self._gradient(X, y, sample_weight, rest[-1])
        super()._fit_lbfgs(gradient, y, sample_weight, *rest)  # type: ignore[misc]

    def _loss_grad_lbfgs(self: Any, packed: np.ndarray, gradient: Any, *_: Any) -> tuple[float, np.ndarray]:
        return gradient(packed)

    def _gradient(
        self: Any, X: Any, y: np.ndarray, sample_weight: np.ndarray | None, layer_units: list[int]
    ) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
        """A function of the packed weights and biases that returns the loss over all samples and its gradient.

        It uses float64 whatever ``dtype`` is, because the line search compares losses that hardly differ.
        """
        design = self._design("lbfgs", "float64", sample_weight, layer_units, at_most(LBFGS_BATCH, len(y)))
        if sample_weight is None:
            total, weights = len(y), None
        else:
            total = sample_weight.sum()
            weights = sample_weight * (len(y) / total)
        resident = Network(design).resident
        resident.hyper.update(learning_rate=0.0, beta1=0.0)  # the momentum is then the gradient
        data = {"input": dense(X, design.dtype), **self._targets(design, y, weights)}
        run = Epoch(resident, data, "learn", train=True, learning=len(y), results=["loss"], of_totals=True)
        coefs, intercepts = weights_of(resident)
        views, gradients = [*coefs, *intercepts], gradients_of(resident)
        n_weights = sum(view.size for view in coefs)
        ends = np.cumsum([view.size for view in views])

        def gradient(packed: np.ndarray) -> tuple[float, np.ndarray]:
            for view, part in zip(views, np.split(packed, ends[:-1])):
                view[...] = part.reshape(view.shape)
            run.whole(SLICE_SECONDS)
            slope = np.concatenate([g.ravel() for g in gradients])
            w = packed[:n_weights]
            slope[:n_weights] += self.alpha / total * w
            return run.mean("loss") + 0.5 * self.alpha / total * float(w @ w), slope

        return gradient


def at_most(batch: int, n_samples: int) -> int:
    """``batch``, or a smaller power of two that also holds all samples, so that few programs are compiled."""
    return min(int(batch), 1 << (n_samples - 1).bit_length())


def dense(X: Any, dtype: str) -> np.ndarray:
    """Features in the form that compiled code reads best; large arrays are not copied."""
    if isinstance(X, np.ndarray) and X.flags.c_contiguous and X.nbytes > COPIED_BYTES:
        return X
    with np.errstate(over="ignore"):  # values that overflow float32 end in scikit-learn's error about the weights
        return np.ascontiguousarray(X.toarray() if issparse(X) else X, dtype)


def with_options(**ours: Any) -> Callable[[type], type]:
    """Class decorator: the parameters of the scikit-learn parent, of any version, followed by ``ours``."""

    def decorate(cls: Any) -> type:
        theirs = cls.__init__

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            for name, default in ours.items():
                setattr(self, name, kwargs.pop(name, default))
            theirs(self, *args, **kwargs)

        signature = inspect.signature(theirs)
        keywords = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=v) for n, v in ours.items()]
        __init__.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *keywords])  # type: ignore
        cls.__init__ = __init__
        return cls

    return decorate


LABELS = ("binary", "multiclass")  # kinds of targets with one label per sample
_OPTIONS = {
    "dtype": [StrOptions({"auto", "float32", "float64"})],
    "workers": [Interval(Integral, 1, None, closed="left"), None],
}


@with_options(dtype="auto", workers=None)
class MLPClassifier(Compiled, neural_network.MLPClassifier):
    """scikit-learn's `MLPClassifier`, trained by a compiled program.

    Its parameters, defaults, methods and fitted attributes are those of the installed scikit-learn; see its
    documentation.  From equal weights and batches it takes the same steps, up to rounding.  Two things differ: other
    random numbers shuffle the samples of an epoch, and sparse features become dense.

    Parameters
    ----------
    dtype : "auto", "float32" or "float64"
        Precision of training by "sgd" and "adam", and of ``coefs_`` and ``intercepts_``.  "auto" is float32, except
        for few float64 features, for which float64 costs little.  "lbfgs" always uses float64.
    workers : int, optional
        Threads of a step (default: the cores if a step is long enough to share, at most ``OMP_NUM_THREADS``).

    Examples
    --------
    >>> from calcvm.sklearn import MLPClassifier
    >>> X, y = np.eye(40, 4), np.arange(40) % 2
    >>> MLPClassifier(random_state=0, max_iter=500).fit(X, y).predict(X).shape
    (40,)
    """

    _parameter_constraints = {**neural_network.MLPClassifier._parameter_constraints, **_OPTIONS}

    def _validate_input(self: Any, X: Any, y: Any, incremental: bool, reset: bool) -> tuple[Any, np.ndarray]:
        """As scikit-learn's, which takes most of the time of a short partial_fit.  Faster for labels of known classes."""
        known = getattr(self, "classes_", None)
        if (
            incremental and known is not None and not self.warm_start and self._label_binarizer.y_type_ in LABELS
            and isinstance(y, np.ndarray) and y.ndim == 1 and y.dtype == known.dtype
        ):  # fmt: skip
            codes = np.searchsorted(known, y)
            if np.array_equal(known.take(codes, mode="clip"), y):
                X = validate_data(self, X, accept_sparse=["csr", "csc"], dtype=(np.float64, np.float32), reset=reset)
                check_consistent_length(X, y)
                return X, codes[:, None] == (1 if len(known) == 2 else np.arange(len(known)))
        return super()._validate_input(X, y, incremental, reset)


@with_options(dtype="auto", workers=None)
class MLPRegressor(Compiled, neural_network.MLPRegressor):
    """scikit-learn's `MLPRegressor`, trained by a compiled program; see `MLPClassifier`."""

    _parameter_constraints = {**neural_network.MLPRegressor._parameter_constraints, **_OPTIONS}
