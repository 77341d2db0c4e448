"""The search space: convert a user's forms to Optuna's distributions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from calcvm import checks
from calcvm.errors import CalcError

PLAIN = (str, int, float, bool, type(None))


def distributions(space: Mapping[str, Any]) -> dict[str, Any]:
    """Optuna's distributions by name (see `calcvm.exploration.explore` for the forms of a space).

    Raises
    ------
    CalcError : the space is empty, or an entry has an unknown form; the message names the entry.
    """
    if not isinstance(space, Mapping) or not space:
        raise CalcError(
            f"space must name at least one parameter, such as {{'width': (8, 64)}}; it is {checks.shown(space)}"
        )
    return {checks.text("space: a name", name, "width"): _distribution(name, entry) for name, entry in space.items()}


def _distribution(name: str, entry: Any) -> Any:
    from optuna import distributions as optuna

    if isinstance(entry, optuna.BaseDistribution):
        return entry
    entry = checks.plain(entry)
    if isinstance(entry, list):
        if not entry or not all(isinstance(value, PLAIN) for value in entry):
            raise CalcError(
                f"space[{name!r}] = {checks.shown(entry)}: a list holds the values to choose from, numbers or texts; "
                "give other objects names here, and look them up in build"
            )
        return optuna.CategoricalDistribution(entry)
    bounds, kind = _bounds(name, entry)
    low, high = bounds
    log = kind == "log"
    step = None if log else kind
    if not low <= high or (log and low <= 0):
        raise CalcError(
            f"space[{name!r}] = {checks.shown(entry)}: the lower bound must be {'above 0 and ' if log else ''}first"
        )
    if isinstance(low, int) and isinstance(high, int) and not isinstance(step, float):
        return optuna.IntDistribution(low, high, log=log, step=step or 1)
    return optuna.FloatDistribution(low, high, log=log, step=step)


def _bounds(name: str, entry: Any) -> tuple[tuple[Any, Any], Any]:
    """((low, high), "log", a step or None)."""
    if isinstance(entry, tuple) and len(entry) in (2, 3):
        low, high, kind = (*entry, None)[:3]
        if _number(low) and _number(high) and (kind in (None, "log") or (_number(kind) and kind > 0)):
            return (low, high), kind
    raise CalcError(
        f"space[{name!r}] = {checks.shown(entry)}: give a list of values, (low, high), (low, high, 'log'), (low, high, step), "
        "or a distribution of Optuna"
    )


def _number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def grid(space: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Values of every parameter, for a search of all their combinations.

    Raises
    ------
    CalcError : a parameter has no finite list of values.
    """
    from optuna import distributions as optuna

    values: dict[str, list[Any]] = {}
    for name, of in distributions(space).items():
        if isinstance(of, optuna.CategoricalDistribution):
            values[name] = list(of.choices)
        elif isinstance(of, optuna.IntDistribution) and not of.log:
            values[name] = list(range(of.low, of.high + 1, of.step))
        elif isinstance(of, optuna.FloatDistribution) and of.step is not None:
            values[name] = [of.low + i * of.step for i in range(round((of.high - of.low) / of.step) + 1)]
        else:
            raise CalcError(f"sampler 'grid': {name!r} has no steps; give a list of its values, or (low, high, step)")
    return values
