"""What a step takes where a row's seconds depend on how much of its operands is still in caches.

All caches count as one that forgets what was touched longest ago.  What it holds are places in the heap, whichever values lie
there: a value that is made in the cells of one that was just read is found warm.  Between two touches of a place lies what
other rows have touched, half of the row that touched it last and half of the one that does now, since both go through their
operands side by side; a real cache is none of the kind exactly, so that what it holds fades out over `SOFT` of its size.
Paths are run over and over: a step finds what the one before it has left.

Of a ResNet-18, batch 8, one worker, making values again is told to take 0.7 % in 75 % of the memory and takes 0.2; in half of it 9.0,
and 9.7.  Of a UNet, batch 2, 0.5 and -1.1, 4.3 and 3.3; of a VGG-11 of width 16 0.9 and -0.4.  Of a MobileNetV2 -0.2 and -3.6, 3.1 and
-2.8: a cache of 40 to 48 MiB would tell it, and this one has 32 (Zen 5; `python -m bench overhead`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from calcvm.ops.statement import Statement, Value
from calcvm.planner.lifetimes import Machine, at_most, operands
from calcvm.record import record

SOFT = 0.3  # of the cache's bytes: places that were left so much sooner or later are surely, or surely not, in it
Place = tuple[int, int]  # first byte and bytes


class Stateful(Protocol):
    """Seconds of a row by the warm shares of its operands, and by which of them lie in the place of which."""

    cache_bytes: int

    def found(self, statement: Statement, warm: Mapping[str, float], shared: Mapping[str, str]) -> float: ...


@record
class Touched:
    """Where a statement's operands lie, by their names."""

    statement: Statement
    places: Mapping[str, Place]

    @property
    def shared(self) -> dict[str, str]:
        """Operands that have just the place of one before them."""
        first: dict[Place, str] = {}
        return {name: of for name, place in self.places.items() if (of := first.setdefault(place, name)) != name}


def touched(st: Statement, offsets: Mapping[Value, int], batch: int, machine: Machine) -> Touched:
    """What a statement touches in a plan's heap."""
    places = {
        o.name: (machine.start(o.name, v, st, offsets), at_most(machine.extent(o, st), batch)) for o, v in operands(st)
    }
    return Touched(st, places)


def of_rows(rows: Sequence[Touched], cost: Stateful) -> float:
    """Seconds of a run of rows, which are run over and over."""
    shares = warm([[*row.places.values()] for row in rows], cost.cache_bytes)
    return sum(
        cost.found(row.statement, dict(zip(row.places, found, strict=True)), row.shared)
        for row, found in zip(rows, shares, strict=True)
    )


def warm(rows: Sequence[Sequence[Place]], cache_bytes: int) -> list[list[float]]:
    """Of each place that each row touches, the share that is still in a cache (1: of one without bytes)."""
    bounds = np.unique([end for row in rows for start, n in row for end in (start, start + n)])
    size = np.diff(bounds)
    index = {end: k for k, end in enumerate(bounds.tolist())}
    spans = [[slice(index[start], index[start + n]) for start, n in row] for row in rows]
    last = np.zeros(len(size), np.int64)  # the row that touched a place last, counted through two runs
    for t, row in enumerate(spans):
        for span in row:
            last[span] = t
    left = np.bincount(last, size, 2 * len(rows))  # bytes that a row was the last to touch
    out: list[list[float]] = []
    empty = np.zeros(0, np.int64)
    for t, (row, places) in enumerate(zip(spans, rows, strict=True), len(rows)):
        since = left[: t + 1].sum() - np.cumsum(left[: t + 1])  # bytes touched after a row
        own = np.unique(np.concatenate([np.arange(s.start, s.stop) for s in row])) if row else empty
        total = size[own].sum()
        between = since + 0.5 * left[: t + 1] + 0.5 * total
        held = np.clip(0.5 + (cache_bytes - between) / (2 * SOFT * cache_bytes), 0, 1)
        out.append([float(size[s] @ held[last[s]]) / n if n else 1.0 for s, (_, n) in zip(row, places, strict=True)])
        left -= np.bincount(last[own], size[own], len(left))
        last[own], left[t] = t, total
    return out
