"""Programs of a search.  Graphs that differ only in hyperparameters are compiled once."""

from __future__ import annotations

import math
from collections import OrderedDict

from calcvm import checks, compiler
from calcvm.graph import CalcGraph
from calcvm.vm.program.program import Program


class Programs:
    """Compile graphs, with a cache of the programs used last.

    Parameters
    ----------
    memory : int
        The most bytes of the heap that a program may take.
    """

    KEPT = 512  # 60 kB each

    def __init__(self, memory: int):
        self.memory = memory
        self._kept: OrderedDict[tuple, Program] = OrderedDict()

    def of(self, graph: CalcGraph, batch_size: int) -> tuple[Program, dict[str, float]]:
        """The program of a graph, and the hyperparameters in which the graph differs from it.

        Raises
        ------
        PlanError : it does not fit (``needed`` and ``allowed`` bytes).
        """
        batch_size = checks.integer("batch_size", batch_size)
        key = (batch_size, graph.form)
        program = self._kept.get(key)
        if program is None:
            program = compiler.compile(graph, batch_size=batch_size, memory=self.memory, workers=1, recompute=False)
            self._kept[key] = program
            if len(self._kept) > self.KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return program, _differences(graph, program)


def _differences(graph: CalcGraph, program: Program) -> dict[str, float]:
    """Slots of the optimizer that differ from the program's.  An absent clipping is infinite in both, and equal."""
    (path,) = (p for p in graph.paths.values() if p.optimizer is not None)
    hyper = program.info["paths"][path.name]["hyper"]
    (slots,) = (facts["slots"] for facts in program.info["state"] if facts["symbol"] == hyper)
    return {k: v for k, v in path.optimizer.slots().items() if v != slots[k] and math.isfinite(v)}
