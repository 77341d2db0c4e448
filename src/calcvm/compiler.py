"""From a graph to a plan and a program: the compiler's front."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from calcvm import planner
from calcvm.errors import CalcError, PlanError
from calcvm.graph import CalcGraph
from calcvm.lowering import lower
from calcvm.ops.dims import Affine
from calcvm.ops.spec import evaluate
from calcvm.ops.statement import Lowered
from calcvm.planner import Plan
from calcvm.vm.assemble import assemble
from calcvm.vm.heap import parse_bytes
from calcvm.vm.program import Program

ITEMSIZE = {"float32": 4, "float64": 8}
DEVICES = ("cpu", "blas")
# A team pays once its share of a step's arithmetic exceeds its barriers (about 0.1 us each, and the lines
# that move between caches): see bench/RESULTS.md.
TEAM_FLOPS = 2e6


def plan(
    graph: CalcGraph,
    *,
    batch_size: int | None = None,
    memory: int | str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    workers: int | None = None,
    accumulate: bool = True,
    keep: Iterable[str] = (),
) -> Plan:
    """What a graph needs: order, offsets, bytes.  Allocates nothing.

    Parameters
    ----------
    batch_size : int, optional
        The largest batch.  Without it, the largest that ``memory`` allows.
    memory : int or str, optional
        Hard cap of the heap in bytes, or a text such as ``"64 MiB"``.
    dtype : "float32" or "float64"
    device : "cpu" (own kernels) or "blas" (matrix products through SciPy; extra ``blas``)
    workers : int, optional
        Largest team; by default the machine's cores where a step is long enough to share, else 1.
    accumulate : bool
        Whether several rounds may precede an optimize (gradients persist and add up).  Otherwise large
        parameters are updated inside the backward, which saves their gradients' memory.
    keep : names of results that stay readable after a step.

    Raises
    ------
    PlanError : it does not fit, with ``needed`` and ``allowed`` bytes.
    """
    if dtype not in ITEMSIZE:
        raise CalcError(f"dtype {dtype!r}: take 'float32' or 'float64'")
    if device not in DEVICES:
        raise CalcError(f"device {device!r}: take one of {', '.join(DEVICES)}")
    if batch_size is None and memory is None:
        raise PlanError("give batch_size= or memory=: how large may a batch be?")
    keep = tuple(keep)

    def planned(team: int) -> Plan:
        lowered, facts = lower(graph, dtype=dtype, workers=team, accumulate=accumulate, keep=keep)
        lowered = replace(lowered, info={"dtype": dtype, "device": device, "facts": facts})
        budget = None if memory is None else parse_bytes(memory)
        return planner.plan(lowered, itemsize=ITEMSIZE[dtype], batch_size=batch_size, memory=budget, workers=team)

    if device == "blas" and workers not in (None, 1):
        raise CalcError("device 'blas': programs run with workers=1; BLAS has threads of its own")
    if workers is not None or device == "blas":
        return planned(workers or 1)
    alone = planned(1)
    cores = n_cores()
    if cores == 1 or flops(alone.lowered, alone.batch_size) < TEAM_FLOPS:
        return alone
    try:
        return planned(cores)
    except PlanError:  # a team's scratch does not fit
        return alone


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


plan_of = plan  # under a name that `compile` does not use itself


def flops(lowered: Lowered, batch: int) -> int:
    """Floating-point operations of a run of the most expensive path."""
    totals = dict.fromkeys(lowered.paths, 0)
    for s in lowered.statements:
        words = {k: v.at(batch) if isinstance(v, Affine) else v for k, v in s.words.items()}
        totals[s.path] += int(evaluate(s.spec.flops, words))
    return max(totals.values(), default=0)


def compile(  # noqa: A001
    graph: CalcGraph, *, plan: Plan | None = None, **options: Any
) -> Program:
    """Verified rows for a graph.

    Parameters
    ----------
    plan : Plan, optional
        What `plan` answered; otherwise ``options`` are those of `plan`.

    Raises
    ------
    PlanError, CalcError : as `plan`.
    ProgramError : the rows do not verify (a defect of calcvm or of a registered operator).
    """
    plan = plan or plan_of(graph, **options)
    info = plan.lowered.info
    facts = dict(vars(info["facts"]))
    constants = facts.pop("constants")
    return assemble(plan.lowered, plan, info["dtype"], {**facts, "device": info["device"]}, constants)
