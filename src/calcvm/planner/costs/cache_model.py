"""Seconds of a step if a row's time depends on how much of its operands is still in caches.

The model has one cache, with LRU replacement.  It holds addresses of the heap, not values: a value written to the cells of one
that was just read is warm.  The distance between two touches of an address is the bytes that other rows touch in between, plus
half of the row before and half of the row after, since both walk through their operands side by side.  A real cache is not
exactly LRU, so the hit rate falls from 1 to 0 over a range of distances (`SOFT`).  Paths run repeatedly: a step finds what the
previous one left.

Predicted and measured overhead of recomputation, in per cent of a step (Zen 5 with 32 MiB, one worker; `python -m bench overhead`):

| network | 75 % of the memory | 50 % |
|---|---|---|
| ResNet-18, batch 8 | 0.7, 0.2 | 9.0, 9.7 |
| UNet, batch 2 | 0.5, -1.1 | 4.3, 3.3 |
| VGG-11 of width 16 | 0.9, -0.4 | |
| MobileNetV2 | -0.2, -3.6 | 3.1, -2.8 |

A cache of 40 to 48 MiB in the model would explain the MobileNetV2.

The prediction is within 2 to 4 % of a step (at worst 3.9 for a UNet, 3.6 for a MobileNetV2).  One plan alone varies by 1 to 3 %
between runs, more if other processes use its last cache.  A Zen 5 still holds 66 to 86 % of the data after 16 MiB of other data,
and 30 to 50 % after 24 to 64 MiB.  With that curve instead of LRU, whole steps are predicted well (a MobileNetV2 150.6 ms,
measured 150.5) and differences worse (3.6 % more, measured 1.2 % less).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from calcvm.frozen import frozen
from calcvm.ops.statement import Statement, Value
from calcvm.planner.lifetimes import Machine, at_most, operands

SOFT = 0.3  # of the cache's bytes: distances this much below or above its size are certain hits or misses
Place = tuple[int, int]  # first byte and bytes


class Stateful(Protocol):
    """Seconds of a row, from the warm share of each operand and the operands that share an address."""

    cache_bytes: int

    def found(self, statement: Statement, warm: Mapping[str, float], shared: Mapping[str, str]) -> float: ...


@frozen
class Touched:
    """The addresses of a statement's operands, by name."""

    statement: Statement
    places: Mapping[str, Place]

    @property
    def shared(self) -> dict[str, str]:
        """Operands with exactly the address and size of an earlier one: name, and name of that one."""
        first: dict[Place, str] = {}
        return {name: of for name, place in self.places.items() if (of := first.setdefault(place, name)) != name}


def touched(st: Statement, offsets: Mapping[Value, int], batch: int, machine: Machine) -> Touched:
    """The addresses that a statement touches in a plan's heap."""
    places = {
        o.name: (machine.start(o.name, v, st, offsets), at_most(machine.extent(o, st), batch)) for o, v in operands(st)
    }
    return Touched(st, places)


def of_rows(rows: Sequence[Touched], cost: Stateful) -> float:
    """Seconds of one pass over rows that run repeatedly."""
    shares = warm([[*row.places.values()] for row in rows], cost.cache_bytes)
    return sum(
        cost.found(row.statement, dict(zip(row.places, found, strict=True)), row.shared)
        for row, found in zip(rows, shares, strict=True)
    )


def warm(rows: Sequence[Sequence[Place]], cache_bytes: int) -> list[list[float]]:
    """The share of each place of each row that is still in the cache (1 for an empty place)."""
    bounds = np.unique([end for row in rows for start, n in row for end in (start, start + n)])
    size = np.diff(bounds)
    index = {end: k for k, end in enumerate(bounds.tolist())}
    spans = [[slice(index[start], index[start + n]) for start, n in row] for row in rows]
    last = np.zeros(len(size), np.int64)  # the row that touched a place last, numbered through two passes
    for t, row in enumerate(spans):
        for span in row:
            last[span] = t
    left = np.bincount(last, size, 2 * len(rows))  # bytes that each row was the last to touch
    out: list[list[float]] = []
    empty = np.zeros(0, np.int64)
    for t, (row, places) in enumerate(zip(spans, rows, strict=True), len(rows)):
        since = left[: t + 1].sum() - np.cumsum(left[: t + 1])  # bytes touched after each row
        own = np.unique(np.concatenate([np.arange(s.start, s.stop) for s in row])) if row else empty
        total = size[own].sum()
        between = since + 0.5 * left[: t + 1] + 0.5 * total
        held = np.clip(0.5 + (cache_bytes - between) / (2 * SOFT * cache_bytes), 0, 1)
        out.append([float(size[s] @ held[last[s]]) / n if n else 1.0 for s, (_, n) in zip(row, places, strict=True)])
        left -= np.bincount(last[own], size[own], len(left))
        last[own], left[t] = t, total
    return out
