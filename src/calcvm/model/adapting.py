"""Means and deviations of data in one pass, for `Model.adapt` and for new models of a fleet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from calcvm.errors import CalcError, ShapeError, warn
from calcvm.model.data import by_name, comes_in_batches
from calcvm.model.roles import LENGTHS

if TYPE_CHECKING:
    from calcvm.model.roles import Roles
    from calcvm.vm.memory.base_model import BaseModel

BLOCK = 1 << 17  # elements that are processed together


class Moments:
    """Count, mean and sum of squared deviations per column, in float64, updated block by block: Chan et al. 1983.

    Values are taken relative to the first block's mean, so rounding errors scale with the deviations, however far from 0 the data are.
    """

    def __init__(self) -> None:
        self.n, self.start, self.beside, self.squares = 0, np.zeros(0), np.zeros(0), np.zeros(0)

    def add(self, block: np.ndarray) -> None:
        """block : shape (n, features), float64."""
        if not self.n:
            self.start = block.mean(axis=0)
        block = block - self.start
        n, mean = len(block), block.mean(axis=0)
        apart = block - mean
        squares = (apart * apart).sum(axis=0) - apart.sum(axis=0) ** 2 / n  # the second term corrects the rounded mean
        mean = mean + apart.sum(axis=0) / n
        if not self.n:
            self.n, self.beside, self.squares = n, mean, squares
            return
        both, delta = self.n + n, mean - self.beside
        self.beside = self.beside + delta * (n / both)
        self.squares = self.squares + squares + delta * delta * (self.n * (n / both))
        self.n = both

    @property
    def mean(self) -> np.ndarray:
        return self.start + self.beside

    @property
    def std(self) -> np.ndarray:
        """The population deviation; 1 for a feature that is constant up to rounding, as in scikit-learn."""
        return np.where(self.varies, np.sqrt(self._variance), 1.0)

    @property
    def varies(self) -> np.ndarray:
        """The features that are not constant up to rounding."""
        variance, eps = self._variance, np.finfo(np.float64).eps
        least = self.n * eps * variance + (self.n * self.mean * eps) ** 2
        return (variance > least) | ~np.isfinite(variance)

    @property
    def _variance(self) -> np.ndarray:
        return np.maximum(self.squares, 0) / self.n


def adapt(model: BaseModel, roles: Roles, X: Any) -> None:
    """`Model.adapt`."""
    if not model.program.info.get("adapts"):
        raise CalcError(
            "adapt: the model has no layer that learns from data beforehand: begin the network with nn.Standardize()"
        )
    _learn(model, _batches(model, roles, X))


def missing(model: BaseModel) -> list[str]:
    """Layers that have not seen data yet."""
    return [scope for scope in model.program.info.get("adapts", ()) if not model[f"{scope}.samples"].any()]


def adapt_new(model: BaseModel, data: Mapping[str, np.ndarray], samples: Any) -> None:
    """Adapt layers that have not seen data to the training data: ``samples`` of arrays by placeholder."""
    if missing(model):
        read = {str(facts["of"]) for facts in model.program.info["adapts"].values()}
        _learn(model, [{n: a if samples is None else a[samples] for n, a in data.items() if n in read}])


def _learn(model: BaseModel, batches: Iterable[Mapping[str, np.ndarray]]) -> None:
    """Set the statistics of all layers that learn from data, from arrays by placeholder."""
    layers = model.program.info["adapts"]
    for scope, facts in layers.items():
        if facts["of"] is None:
            raise CalcError(
                f"adapt: layer {scope!r} reads a computed value, and no data: put it first, or give it numbers, "
                "nn.Standardize(mean, std)"
            )
    found = {scope: Moments() for scope in layers}
    for data in batches:
        for scope, facts in layers.items():
            for block in _blocks(data[facts["of"]]):
                with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                    found[scope].add(_columns(facts, block))
    dtype = model.program.dtype
    values: dict[str, np.ndarray] = {}
    for scope, moments in found.items():
        if not moments.n:
            raise CalcError("adapt: no data came: the iterable is empty, or was consumed before")
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            mean, std = moments.mean.astype(dtype), moments.std.astype(dtype)
        wrong = np.flatnonzero(~(np.isfinite(mean) & np.isfinite(std)))
        if wrong.size:
            raise CalcError(
                f"adapt: feature {wrong[0]} of {layers[scope]['of']!r} has NaN, Inf or numbers too large for {dtype}: fill them in, or "
                "leave their samples out"
            )
        apart = np.spacing(np.abs(mean))  # values closer to each other than this become equal
        coarse = np.flatnonzero((100.0 * apart > moments.std) & moments.varies & (std > 0))
        if coarse.size:
            i = coarse[0]
            warn(
                f"adapt: feature {i} of {layers[scope]['of']!r} has mean {mean[i]:g} and deviation {std[i]:.3g}, and {dtype} has numbers "
                f"there that are {apart[i]:g} apart: the data are rounded to these before the mean is subtracted; subtract an "
                "offset from the data yourself" + ("" if dtype == "float64" else ", or use dtype='float64'")
            )
        values |= {
            f"{scope}.mean": mean,
            f"{scope}.std": np.where(std == 0, 1, std),
            f"{scope}.samples": np.array([moments.n]),
        }
    model.set_values({name: value.reshape(model.loaded.shape(name, 1)) for name, value in values.items()})


def _batches(model: BaseModel, roles: Roles, X: Any) -> Iterator[dict[str, np.ndarray]]:
    """Data for the model's inputs, at once or in batches, with or without the rest of a batch."""
    inputs = roles.inputs
    if not comes_in_batches(X, None, roles):
        yield _checked(model, roles, by_name("X", inputs, X, roles))
        return
    for batch in X if isinstance(X, Iterable) else ():
        if isinstance(batch, Mapping):
            batch = {name: batch[name] for name in inputs if name in batch}
        elif isinstance(batch, (tuple, list)):
            batch = batch[0] if len(inputs) == 1 else tuple(batch[: len(inputs)])
        yield _checked(model, roles, by_name("a batch", inputs, batch, roles))


def _checked(model: BaseModel, roles: Roles, data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    sizes = {name: model.check(name, array, samples=True) for name, array in data.items()}
    if len({n for name, n in sizes.items() if name not in roles.whole}) > 1:
        raise ShapeError(f"adapt: the arrays differ in their number of samples ({sizes})")
    lengths, steps = data.get(LENGTHS), min(roles.steps.values(), default=0)
    if lengths is not None and (lengths < steps).any():
        raise CalcError(
            f"adapt: there are sequences of fewer than {steps} steps, and what is past their ends would count: give the layer its "
            "numbers, nn.Standardize(mean, std), such as np.concatenate(X).mean(0)"
        )
    return data


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    step = max(1, BLOCK // max(1, array[:1].size))
    for start in range(0, len(array), step):
        yield array[start : start + step]


def _columns(facts: Mapping[str, Any], block: np.ndarray) -> np.ndarray:
    """Samples as float64, with one column per feature."""
    block = np.moveaxis(block, -1, 1) if facts["channels_last"] else block
    seen = np.ascontiguousarray(block, np.float64).reshape(len(block), *facts["shape"])
    if facts["axis"] is None:
        return seen.reshape(len(seen), -1)
    columns = np.moveaxis(seen, facts["axis"] + 1, -1)
    return columns.reshape(-1, columns.shape[-1])
