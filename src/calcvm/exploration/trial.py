"""A trial: its parameters and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from calcvm import checks, hints
from calcvm.errors import CalcError


@hints.names_of_others
@dataclass
class Trial:
    """One model of a search.  ``build`` gets it with its parameters; the result lists it with its outcome.

    Attributes
    ----------
    number : int, from 0
    params : the sampler's choices, by name; ``trial["width"]`` is short for one
    seed : int, of the initial weights, shuffling and dropout; a function of the search's seed and the number
    status : "running", "complete" (all epochs), "pruned", "failed" or "interrupted"; ``reason`` says why
    value : the metric after the last epoch; None without one
    epochs : epochs trained so far
    curves : ``loss``, ``val_loss``, ... by name, one figure per epoch
    nbytes : bytes of the heap that its program takes; None without a program
    seconds : from the start of the search to the trial's end
    """

    number: int
    params: dict[str, Any]
    seed: int
    status: str = "running"
    reason: str = ""
    value: float | None = None
    epochs: int = 0
    curves: dict[str, list[float]] = field(default_factory=dict)
    nbytes: int | None = None
    seconds: float = 0.0

    def __getitem__(self, name: str) -> Any:
        try:
            return self.params[name]
        except (KeyError, TypeError):
            raise CalcError(
                f"the space has no {checks.shown(name)}; it has {', '.join(map(repr, self.params))}"
            ) from None


def seed_of(seed: int, number: int) -> int:
    """A seed for each trial of a search, and for the trials that continue an earlier run."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
