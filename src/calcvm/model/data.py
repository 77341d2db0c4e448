"""Training data: arrays by placeholder, sample weights, streams of batches."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, ShapeError
from calcvm.model.roles import LENGTHS, WEIGHT, Roles
from calcvm.vm.memory.base_model import BaseModel
from calcvm.vm.memory.totals import Totals
from calcvm.vm.run.feeds import numbers, numeric, of_batches, outside

Arrays = dict[str, np.ndarray]
MOST_STEPS = 2**24


def arrays_of(x: Any, y: Any, more: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arrays of a step; the second is optional."""
    return (x,) if y is None and not more else (x, y, *more)


def samples(what: str, data: Any, whole: bool = False, column: bool = False) -> np.ndarray:
    """A data set as an array, samples first (``whole`` : also an array without samples; ``column`` : of shape (n, 1))."""
    array = numbers(what, data)
    if array.ndim == 0 and not (whole and array.dtype.kind in "fiub"):
        hint = f"; {what}.toarray() is one" if hasattr(data, "toarray") else ""
        hint = "; batches, one by one, are tuples (X, y)" if what == "y" and data is None else hint
        raise CalcError(f"{what}: an array of samples is wanted, not {checks.called(data)}{hint or of_batches(data)}")
    return array[:, None] if column and array.ndim == 1 else array


def by_name(what: str, names: Sequence[str], given: Any, roles: Roles) -> Arrays:
    """Data sets for placeholders: a single array, a tuple of arrays in their order, or a mapping by name."""
    whole, columns = roles.whole, roles.columns
    if roles.steps and not isinstance(given, (tuple, Mapping)):
        given = _sequences(what, names, given, roles.steps)
    if isinstance(given, Mapping) and (len(names) != 1 or given.keys() == {*names}):
        unknown = [name for name in given if name not in names]
        missing = [name for name in names if name not in given]
        if unknown or missing:
            raise CalcError(
                f"{what}: arrays for {', '.join(names) or 'nothing'} are wanted, "
                + (f"there is none for {missing[0]!r}" if missing else f"not for {checks.shown(unknown[0])}")
            )
        return {name: samples(name, given[name], name in whole, name in columns) for name in names}
    if len(names) == 1:
        kind = "target" if what.endswith("y") else "input"
        only = f"the model's one {kind} is called {names[0]!r}: give the array itself"
        if isinstance(given, Mapping):
            raise CalcError(f"{what} is a mapping, and {only}")
        if (
            isinstance(given, (tuple, list))
            and len(given) == 1
            and getattr(given[0], "ndim", 0) == roles.ranks[names[0]]
        ):
            raise CalcError(f"{what} is a {type(given).__name__} of one array, and {only}")
        return {names[0]: samples(what, given, names[0] in whole, names[0] in columns)}
    if not names:
        if given is not None:
            raise CalcError(f"{what}: the model takes none: leave it out")
        return {}
    if not isinstance(given, (tuple, list)) or len(given) != len(names):
        n = f"{type(given).__name__} of {len(given)}" if isinstance(given, (tuple, list)) else checks.called(given)
        hint = roles.hint or of_batches(given)
        raise CalcError(f"{what}: a tuple or mapping of arrays for {', '.join(names)} is wanted, not {n}{hint}")
    return {name: samples(name, array, name in whole, name in columns) for name, array in zip(names, given)}


def _sequences(what: str, names: Sequence[str], given: Any, steps: Mapping[str, int]) -> Any:
    """Sequences as an array with their lengths: a list of arrays (steps, ...), or an array of sequences that all are whole."""
    first = next((name for name in names if name in steps), None)
    if first is None:
        return given
    lengths = np.full(len(given), steps[first]) if hasattr(given, "__len__") else None
    if isinstance(given, np.ndarray) and given.dtype == object:
        given = [*given]
    if isinstance(given, list) and any(np.ndim(item) for item in given):
        given, lengths = _padded(what, given, steps[first])
    return {first: given, LENGTHS: lengths} if LENGTHS in names else given


def pad_sequences(sequences: Iterable[Any], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of different lengths as one array, with zeros after their ends, and their lengths.

    Parameters
    ----------
    sequences : arrays (length, ...), alike but for their lengths
    steps : int, the most steps: the size of the array's second axis

    Returns
    -------
    ndarray (n, steps, ...), and ndarray (n,) of int64.

    Raises
    ------
    ShapeError : a sequence is longer, or their shapes differ otherwise.

    Examples
    --------
    >>> cv.pad_sequences([[1, 2, 3], [4]], steps=3)
    (array([[1, 2, 3],
           [4, 0, 0]]), array([3, 1]))
    """
    return _padded("pad_sequences", sequences, checks.integer("pad_sequences: steps", steps, 1, MOST_STEPS))


def _padded(what: str, sequences: Any, steps: int) -> tuple[np.ndarray, np.ndarray]:
    given = checks.items(what, sequences, "a list of arrays (length, ...)")
    arrays = [numeric(f"{what}: sequence {i}", samples(f"{what}: sequence {i}", item)) for i, item in enumerate(given)]
    filled = [a for a in arrays if len(a)] or arrays or [np.zeros(0)]
    out = np.zeros((len(arrays), steps, *filled[0].shape[1:]), np.result_type(*(a.dtype for a in filled)))
    for i, a in enumerate(arrays):
        if len(a) > steps:
            raise ShapeError(f"{what}: sequence {i} has {len(a)} steps, and {steps} are the most")
        if len(a) and a.shape[1:] != filled[0].shape[1:]:
            raise ShapeError(f"{what}: sequence {i} has steps of shape {a.shape[1:]}, another of {filled[0].shape[1:]}")
        out[i, : len(a)] = a if len(a) else 0
    return out, np.array([len(a) for a in arrays], np.int64)


def check_steps(lengths: np.ndarray, y: Any, roles: Roles) -> None:
    """ShapeError, if a target that is a list of sequences has not the steps of the inputs."""
    if len(roles.labels) == 1 and roles.labels[0] in roles.steps and isinstance(y, list):
        for i, (n, of_y) in enumerate(zip(lengths, y)):
            if np.ndim(of_y) and len(of_y) != n:
                raise ShapeError(f"y: sequence {i} has {len(of_y)} steps, and that of X has {n}")


def _without_strange_padding(data: Arrays, lengths: np.ndarray, roles: Roles) -> Arrays:
    """The same data, with zeros past the ends of sequences where there is NaN or inf: gradients would multiply it by 0."""
    out = dict(data)
    for name in roles.steps.keys() & data.keys():
        if data[name].dtype.kind == "f":
            past = np.arange(data[name].shape[1]) >= np.asarray(lengths)[:, None]
            if not np.isfinite(data[name][past]).all():
                out[name] = np.where(past.reshape(*past.shape, *[1] * (data[name].ndim - 2)), 0, data[name])
    return out


def count_of(data: Arrays, roles: Roles) -> int:
    """Number of samples in data sets; 1 if none has samples."""
    return next((len(array) for name, array in data.items() if name not in roles.whole), 1)


def training_data(
    model: BaseModel, roles: Roles, X: Any, y: Any, sample_weight: Any, class_weight: Any, validation: Any
) -> tuple[Arrays, Arrays | None]:
    """Data to train on, with sample weights, and data to judge by: the given ones, or a share at the end of X."""
    if y is None and roles.labels and isinstance(X, (tuple, list)) and len(X) == len(roles.inputs) + len(roles.labels):
        raise CalcError("X: arrays for X and y come one by one: fit(X, y), and not fit((X, y))")
    inputs, targets = by_name("X", roles.inputs, X, roles), by_name("y", roles.labels, y, roles)
    n = count_of({**inputs, **targets}, roles)
    if LENGTHS in inputs and len(inputs[LENGTHS]) == n:
        check_steps(inputs[LENGTHS], y, roles)
        inputs, targets = (_without_strange_padding(data, inputs[LENGTHS], roles) for data in (inputs, targets))
    for name, array in (*inputs.items(), *targets.items()):
        if name not in roles.whole and len(array) != n:
            single = len(roles.inputs) == len(roles.labels) == 1
            raise ShapeError(f"X has {n} samples, {'y' if single else repr(name)} has {len(array)}")
    given = [what for what, w in (("sample_weight", sample_weight), ("class_weight", class_weight)) if w is not None]
    if not roles.weighted:
        if given:
            raise CalcError(
                f"{given[0]}: the model's loss has no weights: make it with cv.Model(..., sample_weight=True)"
            )
        return _split({**inputs, **targets}, validation, roles)
    weights = np.ones(n, model.program.dtype)
    data, held = _split({**inputs, **targets, WEIGHT: weights}, validation, roles)
    if sample_weight is not None:
        array = numeric("sample_weight", samples("sample_weight", sample_weight))
        if array.shape != (n,):
            raise ShapeError(f"sample_weight: shape {array.shape} for {n} samples; {(n,)} is wanted")
        weights[:] = _weights("sample_weight: weights are", array, weights.dtype)
    if class_weight is not None:
        facts = model.loaded.variables[roles.labels[0]] if len(roles.labels) == 1 else {}
        counted = data[WEIGHT]  # a view of the weights
        product = counted.astype(np.float64) * _of_classes(
            class_weight, targets, facts.get("classes"), facts.get("ignored"), len(counted)
        )
        counted[:] = _weights("class_weight: weights of samples are", product, weights.dtype)
    return data, held


def _weights(what: str, weights: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Weights as the model's floats (CalcError: some are negative or not finite)."""
    with np.errstate(over="ignore"):
        seen = weights.astype(dtype)
    if not (np.isfinite(seen).all() and (seen >= 0).all()):
        found = outside(seen, f"{seen.min()} to {seen.max()} as {dtype}")
        raise CalcError(f"{what} finite numbers >= 0; found {found}")
    return seen


def _of_classes(given: Any, targets: Arrays, most: int | None, ignored: int | None, n: int) -> np.ndarray:
    """The class weight of each of the first ``n`` samples; the model has ``most`` classes (None: any number).

    ignored : a label that is no class; its weight is 1.
    """
    y = next(iter(targets.values())) if len(targets) == 1 else np.zeros(0)
    labels = y.reshape(-1)
    if not len(labels) or len(labels) != len(y) or (labels != np.floor(labels)).any():
        raise CalcError("class_weight: the model's target is not one integer per sample: give sample_weight")
    classes, place, counts = np.unique(labels[:n], return_inverse=True, return_counts=True)
    if isinstance(given, str) and given == "balanced":
        real = classes != ignored
        return np.where(real, counts[real].sum() / (real.sum() * counts), 1.0)[place]
    wanted = 'a mapping such as {0: 1.0, 1: 5.0}, or "balanced",'
    given = checks.one_of("class_weight", given, Mapping, wanted)
    of = {
        checks.integer("class_weight: a class", c, 0): checks.number(f"class_weight of {c}", w, 0)
        for c, w in given.items()
    }
    if most is not None and max(of, default=0) >= most:
        raise CalcError(f"class_weight: there is no class {max(of)}: the model's are 0 to {most - 1}")
    return np.array([of.get(int(c), 1.0) for c in classes])[place]


def _split(data: Arrays, validation: Any, roles: Roles) -> tuple[Arrays, Arrays | None]:
    """Data to train on, and data to judge by: the given ones, or a share at the end of the data."""
    if validation is None:
        return data, None
    if not checks.is_number(validation):
        return data, held_out(validation, roles)
    share = checks.number("validation", validation, 0, 1, ends="()", unless=", the share of samples, or (X, y)")
    n = count_of(data, roles)
    keep = n - round(n * share)
    if not 0 < keep < n:
        raise CalcError(f"validation={share}: no samples are left on one side of {n}")
    return tuple(
        {k: a if k in roles.whole else a[part] for k, a in data.items()} for part in (slice(keep), slice(keep, None))
    )  # type: ignore[return-value]


def held_out(validation: Any, roles: Roles) -> Arrays:
    """The inputs and targets of validation data."""
    if not roles.labels and not (isinstance(validation, tuple) and len(validation) == 2 and validation[1] is None):
        alone = isinstance(validation, tuple) and len(validation) == len(roles.inputs) == 1
        return by_name("validation X", roles.inputs, validation[0] if alone else validation, roles)
    if not isinstance(validation, (tuple, list)) or len(validation) != 2:
        n = f"a {type(validation).__name__} of {len(validation)}" if isinstance(validation, (tuple, list)) else None
        weighs = n and len(validation) == 3 and not isinstance(validation[0], (tuple, list))
        raise CalcError(
            "validation: (X, y) or a share of the samples such as 0.2 is wanted, not "
            f"{n or checks.called(validation)}"
            + (": there are no sample weights in validation" if weighs else of_batches(validation))
        )
    X, y = validation
    return {**by_name("validation X", roles.inputs, X, roles), **by_name("validation y", roles.labels, y, roles)}


def like_lengths(lengths: np.ndarray, batch: int, key: int | None) -> np.ndarray:
    """An order of samples in which those of a batch have like lengths; without a key from short to long.

    Samples in the order of their lengths, equal ones in any, move back by up to a batch, and are cut into batches, which are
    shuffled.  The last one, that is not whole, is of any length.
    """
    if key is None:
        return np.argsort(lengths, kind="stable")
    rng, n = np.random.default_rng(key), len(lengths)
    order = rng.permutation(n)
    order = order[np.argsort(lengths[order], kind="stable")]
    order = order[np.argsort(np.arange(n) + rng.uniform(0, batch, n))]
    at, rest = rng.integers(n // batch + 1) * batch, n % batch
    batches = np.delete(order, np.s_[at : at + rest]).reshape(-1, batch)
    batches = np.take_along_axis(
        batches, np.argsort(lengths[batches], axis=1), axis=1
    )  # like ones share a tile of a kernel
    return np.concatenate([*rng.permutation(batches), order[at : at + rest]])


# ---------------------------------------------------------------- streams of batches
def comes_in_batches(X: Any, y: Any, roles: Roles) -> bool:
    """Whether data are an iterable of batches: a generator, a loader, a list of tuples."""
    if y is not None or not isinstance(X, Iterable) or isinstance(X, (str, bytes, Mapping)) or hasattr(X, "__array__"):
        return False
    if not isinstance(X, Sequence) or isinstance(X, range):
        return True
    first = X[0] if len(X) else None
    arrays = isinstance(first, list) and len(first) > 0 and all(isinstance(a, np.ndarray) and a.ndim for a in first)
    return bool(roles.targets and (isinstance(first, (tuple, Mapping)) or arrays))


class Batches:
    """Batches instead of a data set, one step per batch (the counterpart of `calcvm.vm.memory.epoch.Epoch`).

    names : the arrays that a step of the model takes.
    batches : iterable of tuples of arrays in this order, or of mappings by name.  If it can be iterated again, each epoch
        starts over.
    rounds : batches per epoch (None: all).
    results : averages over the samples, or functions of averages or sums, the loss first; a loss that is neither is the mean
        over the steps.
    """

    def __init__(self, model: Any, names: Sequence[str], batches: Any, rounds: int | None, results: Sequence[str]):
        self.rounds = rounds
        self._model, self._names, self._batches, self._results = model, names, batches, results
        others = {n: of for n, of in model.loaded.variables.items() if n in results and of.get("over") == "other"}
        if none := [name for name in results[1:] if name in others and not others[name]["totals"]]:
            raise CalcError(
                f"train_metrics: {none[0]!r} is no function of means or sums over samples, so it cannot be computed from a stream of "
                "batches: leave it out"
            )
        self._totals = Totals(model, "learn", [name for name in others if others[name]["totals"]])
        self._iterator: Iterator[Any] = iter(batches)
        self._again = self._iterator is not batches
        self._sums, self._samples = np.zeros(len(results)), 0
        self.passes = 0  # complete ones

    def begin(self, key: int | None) -> None:
        """Start an epoch."""
        if self._again:
            self._iterator = iter(self._batches)
        self._sums[:], self._samples = 0.0, 0
        self._of_totals: dict[str, Any] = dict.fromkeys(self._totals.kinds, 0.0)
        self._found: dict[str, float] = {}

    def slices(self, seconds: float, marks: Sequence[int] = ()) -> Generator[int, None, None]:
        """Run a step for each batch; yields the number of steps about every ``seconds``, and at multiples of ``marks``."""
        done, told, since = 0, 0, time.perf_counter()
        while done != self.rounds and (batch := next(self._iterator, None)) is not None:
            arrays = self._arrays(batch)
            loss, n = self._model.step(*arrays), self._count(arrays)
            self._sums += [n * loss, *(n * np.asarray(self._model[name]).item() for name in self._results[1:])]
            for name, kind in self._totals.kinds.items():
                self._of_totals[name] += np.asarray(self._model[name], np.float64) * (n if kind == "mean" else 1)
            self._samples, done = self._samples + n, done + 1
            if time.perf_counter() - since > seconds or any(done % mark == 0 for mark in marks):
                yield done
                told, since = done, time.perf_counter()
        if done and self._totals.kinds:
            with self._model.record.turn.mine:
                parts = {"mean": self._samples, "sum": 1}
                found = {name: self._of_totals[name] / parts[kind] for name, kind in self._totals.kinds.items()}
                self._found = self._totals.results(found)
        self.passes += done > 0
        if done > told:
            yield done

    def _count(self, arrays: Sequence[Any]) -> int:
        """Number of samples in a batch, along any axis."""
        forms = self._model.loaded.forms
        axes = ((array, i) for name, array in zip(self._names, arrays) for i, n in enumerate(forms[name]) if n.a)
        return next((np.shape(array)[i] for array, i in axes), 1)

    @property
    def ended(self) -> bool:
        """Whether this epoch got no batch."""
        return not self._samples

    def mean(self, name: str) -> float:
        """Mean of a result over the samples seen so far in this epoch; at its end, a function of totals uses those of the epoch."""
        if name in self._found:
            return self._found[name]
        return float(self._sums[self._results.index(name)]) / max(self._samples, 1)

    def _arrays(self, batch: Any) -> list[Any]:
        if isinstance(batch, Mapping):
            missing = [name for name in self._names if name not in batch]
            if missing or len(batch) != len(self._names):
                raise CalcError(
                    f"a batch has arrays for {', '.join(map(str, batch))}; wanted: {', '.join(self._names)}"
                )
            return [batch[name] for name in self._names]
        if len(self._names) == 1 and not isinstance(batch, (tuple, list)):
            return [batch]
        if not isinstance(batch, (tuple, list)) or len(batch) != len(self._names):
            n = (
                f"a {type(batch).__name__} of {len(batch)}"
                if isinstance(batch, (tuple, list))
                else checks.called(batch)
            )
            raise CalcError(f"a batch is a tuple of arrays for {', '.join(self._names)}, or a mapping by name, not {n}")
        return [*batch]
