"""`Standardize`, a layer that learns the mean and deviation of its data before training, by `calcvm.Model.adapt`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, ShapeError
from calcvm.graph import Variable, as_numbers
from calcvm.nn.layers import Layer


@dataclass(repr=False, eq=False)
class Standardize(Layer):
    """``(x - mean) / std`` for each feature, in data of any rank.  `calcvm.Model.adapt` computes mean and std from data.

    They are buffers of the model, ``<name>.mean`` and ``<name>.std``, and are saved, copied and read like others.

    Parameters
    ----------
    mean, std : numbers, arrays of one number per feature, or None
        Known values.  With them the model need not be adapted.
    axis : int or None
        The axis of the features: 1 for (B, features, ...), as for channels, or -1 for the last.  None: every element of a
        sample is a feature.

    Raises
    ------
    CalcError : a number is not finite, a deviation is not above 0, or only one of mean and std is given.
    """

    mean: Any = None
    std: Any = None
    axis: int | None = 1

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.std is None):
            raise CalcError("Standardize: give mean and std, or neither, and then model.adapt(X)")
        if self.axis is not None:
            checks.integer("Standardize: axis", self.axis, -64, 64)
        for name in ("mean", "std"):
            if getattr(self, name) is not None:
                v = as_numbers(f"Standardize: {name}", getattr(self, name)).astype(np.float64)
                if not v.size or not np.isfinite(v).all() or (name == "std" and not (v > 0).all()):
                    wanted = "numbers above 0" if name == "std" else "finite numbers"
                    raise CalcError(
                        f"Standardize: {name} {checks.shown(getattr(self, name))}: give {wanted}, one for all or one per feature"
                    )
                setattr(self, name, v)

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        sizes = [n.b for n in x.shape[1:]]
        if not x.rank or x.shape[0].constant or not all(n.constant for n in x.shape[1:]):
            raise ShapeError(f"{scope}: the input {x} must have the batch first and fixed sizes after it")
        axis, shape = None, tuple(sizes) or (1,)
        if self.axis is not None and x.rank > 1:
            axis = self.axis + x.rank if self.axis < 0 else self.axis
            if not 1 <= axis < x.rank:
                raise ShapeError(f"{scope}: the input {x} has no axis {self.axis} of features")
            shape = (sizes[axis - 1], *(1,) * (x.rank - 1 - axis))
        mean, std, _ = (self.buffer(x, name, v.shape, np.array(v)) for name, v in self._starts(shape, scope))
        x.graph.adapts[scope] = x, None if axis is None else axis - 1
        return (x - mean) / std

    def _starts(self, shape: tuple[int, ...], scope: str) -> list[tuple[str, np.ndarray]]:
        known = self.mean is not None
        starts = []
        for name, given in ("mean", self.mean if known else 0.0), ("std", self.std if known else 1.0):
            v = np.asarray(given, np.float64)
            if v.size not in (1, int(np.prod(shape))):
                raise ShapeError(f"{scope}: {v.size} numbers of {name} for {int(np.prod(shape))} features")
            starts.append((name, np.broadcast_to(v, shape) if v.size == 1 else v.reshape(shape)))
        return [*starts, ("samples", np.array([float(known)]))]
