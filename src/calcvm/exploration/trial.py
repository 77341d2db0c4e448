"""A trial: what the sampler chose, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError


@dataclass
class Trial:
    """One model of a search: ``build`` gets it with what was chosen, the result lists it with what it reached.

    Attributes
    ----------
    number : int, from 0
    params : what the sampler chose, by name; ``trial["width"]`` is short for one
    seed : int, of its initial weights, shuffling and dropout; a function of the search's seed and the number
    status : "running", "complete" (all rounds), "pruned", "failed" or "interrupted"; ``reason`` says why
    value : the metric after the last round, None without one
    rounds : how many it has been trained
    curves : ``loss``, ``val_loss``, ... by name, a figure a round
    nbytes : of the heap, that its program takes; None where there is no program
    seconds : since the search began, when it ended
    """

    number: int
    params: dict[str, Any]
    seed: int
    status: str = "running"
    reason: str = ""
    value: float | None = None
    rounds: int = 0
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
    """A seed for each trial of a search, and for what follows the trials of an earlier run."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
