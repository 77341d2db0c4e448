"""Optimizers, learning-rate schedules and regularizers: what a model asks for, as plain data.

The formulas are PyTorch's; the rows that compute them are declared in `calcvm.ops.optimizers`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from calcvm.errors import CalcError
from calcvm.ops.optimizers import HYPER_SLOTS, HYPER_START, SCHEDULES


def _check(owner: Any, name: str, ok: bool, wanted: str) -> None:
    if not ok:
        raise CalcError(f"{type(owner).__name__}: {name} must be {wanted}, not {getattr(owner, name)!r}")


def _number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def _at_least_0(owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        _check(owner, name, _number(value) and value >= 0, "a number >= 0")


def _below_1(owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        _check(owner, name, _number(value) and 0 <= value < 1, "a number in [0, 1)")


def _count(owner: Any, name: str, least: int) -> None:
    value = getattr(owner, name)
    _check(owner, name, isinstance(value, int) and value >= least, f"an integer >= {least}")


# ---------------------------------------------------------------- schedules
@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning rate over steps.  The first ``warmup_steps`` steps rise linearly to the full rate.

    Step k (from 1) of the warm-up runs at ``learning_rate * k / warmup_steps``; the schedule's own
    steps are counted from there.
    """

    warmup_steps: int = 0
    kind: ClassVar[str] = "constant"
    slot_of: ClassVar[dict[str, str]] = {}  # attribute: slot, where the names differ

    def __post_init__(self) -> None:
        _count(self, "warmup_steps", 0)

    def slots(self) -> dict[str, float]:
        return {self.slot_of.get(f.name, f.name): float(getattr(self, f.name)) for f in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The same rate in every step."""


@dataclass(frozen=True)
class Step(Schedule):
    """The rate times ``gamma`` after every ``step_size`` steps (torch's StepLR)."""

    step_size: int
    gamma: float = 0.1
    kind: ClassVar[str] = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        _count(self, "step_size", 1)
        _at_least_0(self, "gamma")


@dataclass(frozen=True)
class Exponential(Schedule):
    """The rate times ``gamma`` after every step (torch's ExponentialLR)."""

    gamma: float
    kind: ClassVar[str] = "exponential"

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_0(self, "gamma")


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from the rate down to ``min_lr`` over ``total_steps``, which then stays.

    As torch's CosineAnnealingLR, whose rate would rise again.
    """

    total_steps: int
    min_lr: float = 0.0
    kind: ClassVar[str] = "cosine"

    def __post_init__(self) -> None:
        super().__post_init__()
        _count(self, "total_steps", 1)
        _at_least_0(self, "min_lr")


@dataclass(frozen=True)
class CosineRestarts(Schedule):
    """Half a cosine from the rate down to ``min_lr`` over ``period`` steps, then from the rate again: SGDR.

    Each cycle is ``factor`` times as long as the one before, in whole steps.  Loshchilov and Hutter 2017; as
    torch's CosineAnnealingWarmRestarts, whose ``T_mult`` is an integer.
    """

    period: int
    factor: float = 1.0
    min_lr: float = 0.0
    kind: ClassVar[str] = "cosine_restarts"
    slot_of: ClassVar[dict[str, str]] = {"period": "total_steps", "factor": "gamma"}

    def __post_init__(self) -> None:
        super().__post_init__()
        _count(self, "period", 1)
        _check(self, "factor", _number(self.factor) and self.factor >= 1, "a number >= 1")
        _at_least_0(self, "min_lr")


# ---------------------------------------------------------------- optimizers
@dataclass(frozen=True)
class Optimizer:
    """What all optimizers share.

    Parameters
    ----------
    learning_rate : float
        The rate before the schedule.
    clip_value : float, optional
        Every element of a gradient is clamped to [-clip_value, clip_value].
    clip_norm : float, optional
        All gradients are scaled by one factor so that their common norm is at most this (after ``clip_value``).
    schedule : Schedule, optional
        The learning rate over steps; by default constant.

    Raises
    ------
    CalcError
        A value is outside its range.

    Notes
    -----
    ``row`` names the update row, ``state`` the values it keeps for each parameter and what they start
    with, ``slots()`` the values of `HYPER_SLOTS` before the first step.
    """

    learning_rate: float
    clip_value: float | None = field(default=None, kw_only=True)
    clip_norm: float | None = field(default=None, kw_only=True)
    schedule: Schedule | None = field(default=None, kw_only=True)
    slot_of: ClassVar[dict[str, str]] = {}  # attribute: slot, where the names differ

    def __post_init__(self) -> None:
        _check(self, "schedule", self.schedule is None or isinstance(self.schedule, Schedule), "a Schedule or None")
        _at_least_0(self, "learning_rate")
        for name in ("clip_value", "clip_norm"):
            value = getattr(self, name)
            _check(self, name, value is None or (_number(value) and value > 0), "a number > 0 or None")

    @property
    def row(self) -> str:
        return type(self).__name__.lower()

    @property
    def state(self) -> dict[str, float]:
        return {}

    @property
    def schedule_code(self) -> int:
        return SCHEDULES.index((self.schedule or Constant()).kind)

    @property
    def form(self) -> tuple[Any, ...]:
        """What decides the rows: all but the values of `slots`."""
        clipped = (self.clip_value is not None, self.clip_norm is not None)
        return (type(self).__name__, self.row, *self.state.items(), self.schedule_code, *clipped)

    def slots(self) -> dict[str, float]:
        """Value of every hyperparameter slot before the first step."""
        out = dict.fromkeys(HYPER_SLOTS, 0.0) | HYPER_START | {"lr_t": float(self.learning_rate)}
        out |= {"clip_value": math.inf, "clip_norm": math.inf}
        for f in fields(self):
            slot, value = self.slot_of.get(f.name, f.name), getattr(self, f.name)
            if slot in out and value is not None:
                out[slot] = float(value)
        return out | (self.schedule or Constant()).slots()


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum (Polyak) or Nesterov momentum."""

    learning_rate: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    slot_of: ClassVar[dict[str, str]] = {"momentum": "beta1"}

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_0(self, "momentum", "weight_decay")
        if self.nesterov:
            _check(self, "momentum", self.momentum > 0, "greater than 0 for nesterov")

    @property
    def row(self) -> str:
        return "nesterov" if self.nesterov else "momentum" if self.momentum else "sgd"

    @property
    def state(self) -> dict[str, float]:
        return {"m": 0.0} if self.momentum else {}


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015); ``weight_decay`` is added to the gradient."""

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _below_1(self, "beta1", "beta2")
        _at_least_0(self, "eps", "weight_decay")

    @property
    def state(self) -> dict[str, float]:
        return {"m": 0.0, "v": 0.0}


@dataclass(frozen=True)
class AdamHat(Adam):
    """Adam with ``eps`` added to the root before its bias is corrected: Kingma and Ba's epsilon hat.

    In the first steps ``eps`` then weighs up to ``1 / sqrt(1 - beta2)`` times as much as in `Adam`.
    """


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    weight_decay: float = 1e-2


@dataclass(frozen=True)
class RMSProp(Optimizer):
    """RMSProp (Tieleman and Hinton 2012), not centred."""

    learning_rate: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0
    slot_of: ClassVar[dict[str, str]] = {"alpha": "beta2", "momentum": "beta1"}

    def __post_init__(self) -> None:
        super().__post_init__()
        _below_1(self, "alpha")
        _at_least_0(self, "eps", "momentum", "weight_decay")

    @property
    def row(self) -> str:
        return "rmsprop_momentum" if self.momentum else "rmsprop"

    @property
    def state(self) -> dict[str, float]:
        return {"v": 0.0, "m": 0.0} if self.momentum else {"v": 0.0}


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi et al. 2011)."""

    learning_rate: float = 1e-2
    eps: float = 1e-10
    weight_decay: float = 0.0
    initial_accumulator: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_0(self, "eps", "weight_decay", "initial_accumulator")

    @property
    def state(self) -> dict[str, float]:
        return {"v": float(self.initial_accumulator)}


# ---------------------------------------------------------------- regularizers
@dataclass(frozen=True)
class Regularizer:
    """The penalty ``l1 * sum |p| + l2 * sum p^2`` on a parameter (as in Keras)."""

    l1: float
    l2: float

    def __post_init__(self) -> None:
        _at_least_0(self, "l1", "l2")


class Elastic(Regularizer):
    """Both penalties: ``l1 * sum |p| + l2 * sum p^2``."""


class L1(Regularizer):
    """The penalty ``l * sum |p|`` on a parameter."""

    def __init__(self, l: float):
        super().__init__(l, 0.0)


class L2(Regularizer):
    """The penalty ``l * sum p^2`` on a parameter."""

    def __init__(self, l: float):
        super().__init__(0.0, l)
