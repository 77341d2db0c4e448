"""Cost model of a step on a GPU, with few parameters: it chooses how a program runs, and with how many blocks.

A row is bound by the latency of its chain of loads, by arithmetic, or by memory.  In a grid, blocks that share a row must meet at
the plan's barriers, and a multiprocessor runs few threads, so it has few loads in flight.  With a CUDA graph, each row is a
launch that can use the whole device, but the launch has a cost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from calcvm import files
from calcvm.ops.sizes import evaluate
from calcvm.ops.statement import Statement
from calcvm.ops.types import bytes_of

MODES = ("grid", "graph", "fleet")


@dataclass(frozen=True)
class Figures:
    """Figures of one GPU.  The defaults are an H200's published rates and reported values; `bench gpu` measures the actual GPU."""

    name: str = "assumed: NVIDIA H200"
    multiprocessors: int = 132
    flops: float = 67e12  # float32 operations per second
    bandwidth: float = 4.3e12  # bytes read and written per second, by a copy
    row: float = 0.6e-6  # seconds of the shortest row, per block
    barrier: float = 1.2e-6  # across all multiprocessors
    node: float = 1.3e-6  # per node of a CUDA graph
    product: float = 0.7  # fraction of `flops` that matrix products reach
    grid_memory: float = 0.35  # fraction of `bandwidth` that a grid with one block per multiprocessor reaches
    graph_memory: float = 0.85

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, lambda file: file.write(json.dumps(asdict(self), indent=1).encode()))

    @classmethod
    def load(cls, path: Path) -> Figures:
        """The figures from a file that `save` wrote; the defaults if it is missing or from another version."""
        try:
            known = json.loads(path.read_text())
            return cls(**{f.name: known[f.name] for f in fields(cls)})
        except (OSError, ValueError, KeyError, TypeError):
            return cls()


def seconds(
    statements: Sequence[Statement],
    barriers: Sequence[bool],
    batch: int,
    itemsize: int,
    mode: str,
    blocks: int,
    figures: Figures,
) -> float:
    """Time of the slowest path."""
    share = min(blocks / figures.multiprocessors, 1.0)
    memory = figures.graph_memory if mode == "graph" else figures.grid_memory
    totals = dict.fromkeys((s.path for s in statements), 0.0)
    for statement, barrier in zip(statements, barriers):
        words = statement.words_at(batch)
        flops = evaluate(statement.spec.flops, words)
        operands = [o for o in statement.spec.operands if statement.operands.get(o.name)]
        moved = sum(bytes_of(o.type, itemsize) * evaluate(o.elems, words) for o in operands)
        work = max(flops / (figures.flops * figures.product), moved / (figures.bandwidth * memory)) / share
        if mode == "graph":
            totals[statement.path] += max(work, figures.node)
        else:
            totals[statement.path] += max(work, figures.row) + (figures.barrier if barrier and blocks > 1 else 0.0)
    return max(totals.values(), default=0.0)


def candidates(multiprocessors: int) -> list[int]:
    """Numbers of blocks worth trying: the device's multiprocessors, repeatedly halved down to one."""
    return sorted({max(multiprocessors >> k, 1) for k in range(9)})


def choose(plan: Any, figures: Figures, mode: str | None = None, blocks: int | None = None) -> tuple[str, int]:
    """The cheapest way to run a plan within the given ``mode`` and ``blocks``: mode and number of thread blocks."""
    modes = ("grid", "graph") if mode is None else (mode,)
    if mode == "fleet":
        return mode, 1
    best = None
    for m in modes:
        for n in (
            [blocks] if blocks else [figures.multiprocessors] if m == "graph" else candidates(figures.multiprocessors)
        ):
            time = seconds(plan.statements, plan.sync, plan.batch_size, plan.itemsize, m, n, figures)
            if best is None or time < best[0]:
                best = time, m, n
    assert best is not None
    return best[1], best[2]
