"""The ladder of means to fit a program into memory: the planner takes the first that suffices.

| means | costs |
|---|---|
| scratch for speed | nothing |
| minimal scratch; then recompute values, or move them to a file, whichever costs less | a part of a step |
| keep the optimizer state of large parameters in the file | reads and writes it in each step |
| keep these parameters in the file too | reads and writes them in each step |
"""

from __future__ import annotations

from dataclasses import replace

from calcvm.frozen import frozen
from calcvm.planner.paging import KINDS


@frozen
class Means:
    """One rung of the ladder.

    least : rows get the minimal scratch.  recompute : the backward may recompute values.
    pages : values may wait in a file.  stream : kinds of values whose large members persist in that file.
    """

    name: str
    least: bool = True
    recompute: bool = True
    pages: bool = True
    stream: tuple[str, ...] = ()


LADDER = (
    Means("scratch for speed", least=False, recompute=False, pages=False),
    Means("recompute or page"),
    Means("stream optimizer state", stream=KINDS[:1]),
    Means("stream parameters", stream=KINDS[:2]),
)


def ladder(objective: str, recompute: bool, file: bool, batch_size: int | None) -> list[Means]:
    """The means that the user allows, in the order in which the planner tries them.

    objective : with "memory" rows have the minimal scratch from the start.
    recompute, file : whether values may be recomputed; whether there is a page file.
    batch_size : the batch that has to fit; None: the largest that fits, without recomputation or pages.
    """
    whole = batch_size is not None
    means = [
        replace(m, recompute=m.recompute and recompute and whole, pages=m.pages and file and whole) for m in LADDER
    ]
    if objective == "memory":
        del means[0]
    return [m for m in means if m.pages or not m.stream]
