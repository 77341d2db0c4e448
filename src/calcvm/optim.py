"""Optimizers, learning-rate schedules and regularizers, as plain data.

The formulas are PyTorch's; `calcvm.ops.optimizers` declares the rows that compute them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, InitVar, field, fields
from typing import Any, ClassVar

from calcvm import checks, hints
from calcvm.errors import CalcError
from calcvm.frozen import frozen
from calcvm.ops.optimizers import HYPER_SLOTS, HYPER_START, SCHEDULES, UPDATES

LARGEST_COUNT = 2**53  # steps: slots are float64
MOST_SAMPLES = 10**7  # numbers in a schedule's table

__all__ = [
    "L1", "L2", "SGD", "Adagrad", "Adam", "AdamHat", "AdamW", "Constant", "Cosine", "CosineRestarts", "Elastic",
    "Exponential", "Lion", "Optimizer", "RMSProp", "Sampled", "Step",
]  # fmt: skip


def _set(owner: Any, name: str, value: Any) -> None:
    object.__setattr__(owner, name, value)  # records are frozen for users


def _what(owner: Any, name: str) -> str:
    return f"{type(owner).__name__}: {name}"


def _at_least_0(owner: Any, *names: str) -> None:
    for name in names:
        _set(owner, name, checks.number(_what(owner, name), getattr(owner, name), 0))


def _below_1(owner: Any, *names: str) -> None:
    for name in names:
        _set(owner, name, checks.number(_what(owner, name), getattr(owner, name), 0, 1, ends="[)"))


def _count(owner: Any, name: str, least: int) -> None:
    _set(owner, name, checks.integer(_what(owner, name), getattr(owner, name), least, LARGEST_COUNT))


# ---------------------------------------------------------------- schedules
@frozen(kw_only=True)
class Schedule:
    """A learning rate over steps.  The first ``warmup_steps`` steps rise linearly to the full rate.

    Step k (from 1) of the warm-up runs at ``learning_rate * k / warmup_steps``.  The schedule starts after the warm-up.
    """

    warmup_steps: int = 0
    kind: ClassVar[str] = "constant"
    slot_of: ClassVar[dict[str, str]] = {}  # attribute: slot, if the names differ

    def __post_init__(self) -> None:
        _count(self, "warmup_steps", 0)

    def slots(self) -> dict[str, float]:
        return {self.slot_of.get(f.name, f.name): float(getattr(self, f.name)) for f in fields(self)}


@frozen(kw_only=True)
class Constant(Schedule):
    """The same rate in every step."""


@frozen
class Step(Schedule):
    """The rate times ``gamma`` after every ``step_size`` steps (torch's StepLR)."""

    step_size: int
    gamma: float = 0.1
    kind: ClassVar[str] = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        _count(self, "step_size", 1)
        _at_least_0(self, "gamma")


@frozen
class Exponential(Schedule):
    """The rate times ``gamma`` after every step (torch's ExponentialLR)."""

    gamma: float
    kind: ClassVar[str] = "exponential"

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_0(self, "gamma")


@frozen
class Cosine(Schedule):
    """Half a cosine from the rate down to ``min_lr`` over ``total_steps``; then ``min_lr``.

    As torch's CosineAnnealingLR, except that torch's rate would rise again.
    """

    total_steps: int
    min_lr: float = 0.0
    kind: ClassVar[str] = "cosine"

    def __post_init__(self) -> None:
        super().__post_init__()
        _count(self, "total_steps", 1)
        _at_least_0(self, "min_lr")


@frozen
class CosineRestarts(Schedule):
    """Half a cosine from the rate down to ``min_lr`` over ``period`` steps, then a restart from the rate: SGDR.

    Each cycle is ``factor`` times as long as the one before, in whole steps.  Loshchilov and Hutter 2017; as
    torch's CosineAnnealingWarmRestarts, whose ``T_mult`` must be an integer.
    """

    period: int
    factor: float = 1.0
    min_lr: float = 0.0
    kind: ClassVar[str] = "cosine_restarts"
    slot_of: ClassVar[dict[str, str]] = {"period": "total_steps", "factor": "gamma"}

    def __post_init__(self) -> None:
        super().__post_init__()
        _count(self, "period", 1)
        _set(self, "factor", checks.number(_what(self, "factor"), self.factor, 1))
        _at_least_0(self, "min_lr")


@frozen
class Sampled(Schedule):
    """The rate times ``function(k)`` in step k = 0, 1, ..., for a plain function (torch's LambdaLR).

    The function is called once, at construction, for k = 0, ``every``, 2 ``every``, ... below ``total_steps``.  A result
    holds for ``every`` steps, the last one forever.  Results are numbers >= 0 and are stored in the heap, one number each.
    """

    function: InitVar[Callable[[int], float]]
    total_steps: InitVar[int]
    every: int = 1
    factors: tuple[float, ...] = field(init=False)

    def __post_init__(self, function: Any = None, total_steps: Any = None) -> None:  # type: ignore[override]
        super().__post_init__()
        if not callable(function):
            raise CalcError(f"Sampled: a function of the step is wanted, not {checks.called(function)}")
        _count(self, "every", 1)
        steps = checks.integer("Sampled: total_steps", total_steps, 1, LARGEST_COUNT)
        if -(-steps // self.every) > MOST_SAMPLES:
            raise CalcError(
                f"Sampled: {steps:,} steps, sampled every {self.every}, need more than {MOST_SAMPLES:,} numbers"
            )
        answers = ((k, function(k)) for k in range(0, steps, self.every))
        _set(self, "factors", tuple(checks.number(f"Sampled: the factor of step {k}", f, 0) for k, f in answers))

    def slots(self) -> dict[str, float]:
        return {"warmup_steps": float(self.warmup_steps)}


# ---------------------------------------------------------------- optimizers
@hints.names_of_others
@frozen
class Optimizer:
    """Base class of the optimizers.

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
    no_decay : str or tuple of str
        Parameters exempt from ``weight_decay`` (default: none).  ``"1d"`` means all of at most one axis, such as biases
        and the scales and shifts of norms.  Others are given by name, by a prefix such as ``"linear_1."``, or by a suffix
        such as ``".bias"``.  A change of ``hyper["weight_decay"]`` does not affect them.

    Raises
    ------
    CalcError
        A value is outside its range, or ``no_decay`` is given without a ``weight_decay``.

    Notes
    -----
    ``row`` names the update row, ``state`` the values it keeps for each parameter with their initial
    values, ``slots()`` the values of `HYPER_SLOTS` before the first step.
    """

    learning_rate: float
    clip_value: float | None = field(default=None, kw_only=True)
    clip_norm: float | None = field(default=None, kw_only=True)
    schedule: Schedule | None = field(default=None, kw_only=True)
    no_decay: str | Sequence[str] = field(default=(), kw_only=True)
    slot_of: ClassVar[dict[str, str]] = {}  # attribute: slot, if the names differ

    def __post_init__(self) -> None:
        if self.schedule is not None:
            wanted = "a schedule such as cv.Cosine(1000), or cv.Sampled(function, total_steps)"
            checks.one_of(_what(self, "schedule"), self.schedule, Schedule, wanted)
        _at_least_0(self, "learning_rate")
        for name in ("clip_value", "clip_norm"):
            if (value := getattr(self, name)) is not None:
                _set(self, name, checks.number(_what(self, name), value, 0, ends="(]", unless=" or None"))
        what, wanted = _what(self, "no_decay"), 'names of parameters such as ".bias", or "1d",'
        names = (self.no_decay,) if isinstance(self.no_decay, str) else checks.items(what, self.no_decay, wanted)
        _set(self, "no_decay", tuple([checks.one_of(what, name, str, wanted) for name in names]))
        if self.no_decay and not any(self.slot_of.get(f.name, f.name) == "weight_decay" for f in fields(self)):
            raise CalcError(f"{what}: {type(self).__name__} has no weight_decay")

    @property
    def row(self) -> str:
        return type(self).__name__.lower()

    @property
    def state(self) -> dict[str, float]:
        return dict.fromkeys(UPDATES[self.row].state, 0.0)

    @property
    def schedule_code(self) -> int:
        return SCHEDULES.index((self.schedule or Constant()).kind)

    @property
    def form(self) -> tuple[Any, ...]:
        """Everything that determines the rows: all but the values of `slots`."""
        clipped = (self.clip_value is not None, self.clip_norm is not None)
        table = (self.schedule.every, *self.schedule.factors) if isinstance(self.schedule, Sampled) else ()
        return (type(self).__name__, self.row, *self.state.items(), self.schedule_code, *clipped, *table)

    def slots(self) -> dict[str, float]:
        """Value of every hyperparameter slot before the first step."""
        out = dict.fromkeys(HYPER_SLOTS, 0.0) | HYPER_START | {"lr_t": float(self.learning_rate)}
        out |= {"clip_value": math.inf, "clip_norm": math.inf}
        for f in fields(self):
            slot, value = self.slot_of.get(f.name, f.name), getattr(self, f.name)
            if slot in out and value is not None:
                out[slot] = float(value)
        return out | (self.schedule or Constant()).slots()


@frozen
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
        _set(self, "nesterov", checks.flag(_what(self, "nesterov"), self.nesterov))
        if self.nesterov and not self.momentum:
            raise CalcError("SGD: momentum must be greater than 0 for nesterov, not 0")

    @property
    def row(self) -> str:
        return "nesterov" if self.nesterov else "momentum" if self.momentum else "sgd"


@frozen
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


@frozen
class AdamHat(Adam):
    """Adam with ``eps`` added to the root before its bias is corrected: Kingma and Ba's epsilon hat.

    In the first steps ``eps`` then weighs up to ``1 / sqrt(1 - beta2)`` times as much as in `Adam`.
    """


@frozen
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    weight_decay: float = 1e-2


@frozen
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


@frozen
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


@frozen
class Lion(Optimizer):
    """Lion (Chen et al. 2023): the sign of a mean, with decoupled weight decay."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _below_1(self, "beta1", "beta2")
        _at_least_0(self, "weight_decay")


OPTIMIZERS = {kind.__name__.lower(): kind for kind in (SGD, Adam, AdamHat, AdamW, RMSProp, Adagrad, Lion)}


def optimizer_of(given: Any) -> Optimizer:
    """An optimizer, given as one, or by its name or class if it has a default learning rate.

    Raises
    ------
    CalcError : the name is unknown, or the value is not an optimizer.
    """
    names = ", ".join(repr(name) for name in OPTIMIZERS)
    if isinstance(given, str):
        if given.lower() not in OPTIMIZERS:
            raise CalcError(
                f"optimizer {checks.shown(given)} is unknown{hints.meant(given, OPTIMIZERS)}; take one of {names}"
            )
        given = OPTIMIZERS[given.lower()]
    if isinstance(given, type) and given in OPTIMIZERS.values():
        if any(f.init and f.default is MISSING for f in fields(given)):
            raise CalcError(f"{given.__name__} has no default learning rate: give optimizer=cv.{given.__name__}(0.1)")
        return given()
    if not isinstance(given, Optimizer) or type(given) is Optimizer:
        what = f"the class {given.__name__}" if isinstance(given, type) else checks.shown(given)
        raise CalcError(f"optimizer: one such as cv.Adam(1e-3) or one of the names {names} is wanted, not {what}")
    if given.row not in UPDATES:
        raise CalcError(
            f"optimizer {type(given).__name__}: no update {given.row!r} is declared (calcvm.operators.update); the name is the "
            "class's in lower case, or that of its attribute `row`, such as row = 'adam'"
        )
    if not isinstance(given, tuple(OPTIMIZERS.values())):
        if type(given).row is Optimizer.row and not UPDATES[given.row].own:
            raise CalcError(
                f"optimizer {type(given).__name__}: calcvm already has an update {given.row!r}, the name in lower case: "
                f"rename the class, or write row = {given.row!r} to use that update"
            )
        _check_own(given)
    return given


SET_BY_USERS = HYPER_SLOTS[: HYPER_SLOTS.index("t")]
POWERS = {"beta1_t": "beta1", "beta2_t": "beta2"}


def _check_own(given: Optimizer) -> None:
    """Raise CalcError for a field that sets nothing, or a hyperparameter of the formula that no field sets."""
    update, kind = UPDATES[given.row], type(given)
    if kind.slots is not Optimizer.slots or kind.state is not Optimizer.state:
        return  # custom methods may read any field
    slots = {given.slot_of.get(f.name, f.name): f.name for f in fields(given)}
    for slot, of in slots.items():
        if slot not in (*HYPER_SLOTS, "schedule", "no_decay"):
            raise CalcError(
                f"{kind.__name__}: {of!r} is none of learning_rate, beta1, beta2, eps and weight_decay: call it one of them, or "
                f"say which it sets, slot_of = {{{of!r}: 'beta1'}}"
            )
        if slot in update.slots and slot != "lr_t":
            checks.number(f"{kind.__name__}: {of}", getattr(given, of))
    for slot in update.slots:
        if (of := POWERS.get(slot, slot)) in SET_BY_USERS and of not in slots:
            raise CalcError(
                f"{kind.__name__}: its update {given.row!r} reads {slot}, for which {kind.__name__} has no field"
            )


# ---------------------------------------------------------------- regularizers
@frozen
class Regularizer:
    """The penalty ``l1 * sum |p| + l2 * sum p^2`` on a parameter (as in Keras)."""

    l1: float
    l2: float

    def __post_init__(self) -> None:
        for name in ("l1", "l2"):
            _set(self, name, checks.number(_what(self, name), getattr(self, name), 0, 1e300, ends="[)"))


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


def regularizer_of(what: str, given: Any) -> Regularizer | None:
    """A regularizer or None, checked (CalcError)."""
    if given is not None and not isinstance(given, Regularizer):
        hint = f"cv.L2({given!r})" if checks.is_number(given) else "cv.L2(1e-4), cv.L1(1e-4) or cv.Elastic(1e-5, 1e-4)"
        raise CalcError(f"{what}: its regularizer must be one such as {hint}, not {checks.shown(given)}")
    return given


def __getattr__(name: str) -> Any:
    raise hints.unknown_name("calcvm", name, {n: f"cv.{n}" for n in __all__})
