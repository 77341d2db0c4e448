"""Programs of a fleet.  Graphs that differ only in hyperparameters are compiled once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from calcvm import compiler
from calcvm.graph import CalcGraph
from calcvm.model.roles import LEARN
from calcvm.ops.optimizers import COMPUTED
from calcvm.vm.program.program import Program

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Programs:
    """Compile graphs for one worker, with a cache of the programs used last."""

    KEPT = 512  # 60 kB each

    def __init__(self) -> None:
        self._kept: dict[tuple, Program] = {}  # the one used last comes last

    def of(self, graph: CalcGraph, **options: Unpack[compiler.Options]) -> tuple[Program, dict[str, float]]:
        """The program of a graph, and the hyperparameters of its path learn, or of its only path that trains, in which it differs.

        Raises
        ------
        PlanError, CalcError : as in `calcvm.plan`.
        """
        options = {"workers": 1, "accumulate": False, **options}
        trained = {p.name: p for p in graph.paths.values() if p.optimizer is not None}
        first = LEARN if LEARN in trained else next(iter(trained)) if len(trained) == 1 else None
        others = [p.optimizer.slots() for name, p in trained.items() if name != first and p.state_of is None]
        key = graph.form, repr((sorted(options.items()), others))
        program = self._kept.pop(key, None)
        if program is None:
            program = compiler.compile(graph, **options)
        self._kept[key] = program
        if len(self._kept) > self.KEPT:
            self._kept.pop(next(iter(self._kept)), None)
        if first is None:
            return program, {}
        hyper = program.info["paths"][first]["hyper"]
        (slots,) = (facts["slots"] for facts in program.info["state"] if facts["symbol"] == hyper)
        given = {k: v for k, v in trained[first].optimizer.slots().items() if k not in COMPUTED and v != slots[k]}
        # an absent clipping is infinite in both, and equal
        return program, {k: v for k, v in given.items() if math.isfinite(v)}
