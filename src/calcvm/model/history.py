"""`History`: the figures of a training, epoch by epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from calcvm import checks
from calcvm.errors import CalcError
from calcvm.tables import html, number


@dataclass
class History:
    """Figures of each epoch, by name: ``loss``, ``seconds``, and with validation data ``val_loss``, ``val_accuracy``.

    ``stopped`` says why training ended, and from which epoch on the loss was not finite.  ``kept`` is the epoch, from 0,
    whose state the model was given back in the end (``keep_best``; None: the last one's).
    """

    epochs: list[dict[str, float]] = field(default_factory=list)
    stopped: str = "all epochs done"
    kept: int | None = None

    def __getitem__(self, name: str) -> list[float]:
        known = dict.fromkeys(k for e in self.epochs for k in e)
        if self.epochs and not (isinstance(name, str) and name in known):
            raise CalcError(f"no figure {checks.shown(name)} of the epochs; there are {', '.join(known)}")
        return [e[name] for e in self.epochs if name in e]

    def __iter__(self) -> Iterator[dict[str, float]]:
        return iter(self.epochs)

    def __len__(self) -> int:
        return len(self.epochs)

    def _repr_html_(self) -> str:
        names = [*dict.fromkeys(k for e in self.epochs for k in e)]
        rows = [[str(i), *(number(e[k]) if k in e else "" for k in names)] for i, e in enumerate(self.epochs, 1)]
        return html(f"{len(self)} epochs: {self.stopped}", ["epoch", *names], rows)
