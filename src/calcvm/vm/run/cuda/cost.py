"""What a step costs on a GPU, by a model of few figures: it chooses how a program is run, and by how many blocks.

A row is bound by the latency of its own chain of loads, by arithmetic, or by memory.  In a grid, blocks that
share a row must meet where the plan has a barrier, and a multiprocessor runs few threads, so that it has few
loads in flight; as launches of a CUDA graph every row has the whole device, and costs a launch.
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
    """Of one GPU.  The defaults are an H200's published rates and figures others report; `bench gpu` measures one's own."""

    name: str = "assumed: NVIDIA H200"
    multiprocessors: int = 132
    flops: float = 67e12  # of float32 a second
    bandwidth: float = 4.3e12  # bytes read and written a second, by a copy
    row: float = 0.6e-6  # seconds that the shortest row takes a block
    barrier: float = 1.2e-6  # of all multiprocessors
    node: float = 1.3e-6  # of a CUDA graph
    product: float = 0.7  # of `flops` that matrix products reach
    grid_memory: float = 0.35  # of `bandwidth` that a grid of one block a multiprocessor reaches
    graph_memory: float = 0.85

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, lambda file: file.write(json.dumps(asdict(self), indent=1).encode()))

    @classmethod
    def load(cls, path: Path) -> Figures:
        """The figures of a file that `save` wrote; the defaults where there is none, or another version's."""
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
    """Time of a run of the path that takes longest."""
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
    """Numbers of blocks worth trying: halves of the device, down to one."""
    return sorted({max(multiprocessors >> k, 1) for k in range(9)})


def choose(plan: Any, figures: Figures, mode: str | None = None, blocks: int | None = None) -> tuple[str, int]:
    """The cheapest way to run a plan, of those that ``mode`` and ``blocks`` leave open: mode and thread blocks."""
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
