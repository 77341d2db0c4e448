"""Planning over several devices: an assignment of statements, its cost, and a memory plan for each device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from calcvm import checks, planner
from calcvm.compiler import check_kernels
from calcvm.errors import CalcError, PlanError
from calcvm.graph import CalcGraph
from calcvm.lowering import lower
from calcvm.ops.sizes import MAX_BATCH
from calcvm.ops.statement import Lowered
from calcvm.planner import Plan
from calcvm.planner.lifetimes import Machine
from calcvm.planner.split.assignment import assign
from calcvm.planner.split.problem import Assigned, AssignmentProblem, Site, problem_of, shared_values
from calcvm.split_model.parts import Parts, Stretch, parts_of
from calcvm.split_model.processor import Processor
from calcvm.tables import duration, laid_out, preformatted
from calcvm.vm.program.encoding import ITEMSIZE

LATENCY, BANDWIDTH = 10e-6, 10e9  # of a copy, by default: seconds, bytes per second
ATTEMPTS = 4  # assignments to search for if packing one needs more than predicted

Link = tuple[float, float]


@dataclass(frozen=True, eq=False, repr=False)
class SplitPlan:
    """The assignment of a network to several devices.

    processors : the processors, in the given order.
    where : the index of the processor of each statement of the whole program.
    seconds, joules : of a step, predicted from the costs of statements and copies.
    alone : per processor, the seconds of a step if it runs everything (None: it does not fit there).
    lower_bound : lower bound of the seconds of any assignment (None: no solver ran); ``proved``: no assignment takes less.
    copied_bytes : bytes copied between devices in a run of all paths at the planned batch.
    plans : per processor, the plan of its part (None: it has none).
    solver : the solver and its time.
    """

    graph: CalcGraph = field(repr=False)
    processors: tuple[Processor, ...]
    batch_size: int
    dtype: str
    where: tuple[int, ...]
    seconds: float
    joules: float
    alone: tuple[float | None, ...]
    lower_bound: float | None
    copied_bytes: int
    plans: tuple[Plan | None, ...]
    solver: str
    parts: Parts = field(repr=False)
    whole: Lowered = field(repr=False)
    home: Mapping[int, int] = field(repr=False)
    accumulate: bool = field(repr=False, default=False)

    @property
    def proved(self) -> bool:
        return self.lower_bound is not None and self.seconds <= self.lower_bound * (1 + 1e-6)

    @property
    def heap_bytes(self) -> dict[str, int]:
        """Bytes of each processor's heap, by its name."""
        return {p.name: 0 if plan is None else plan.heap_bytes for p, plan in zip(self.processors, self.plans)}

    def report(self) -> list[dict[str, Any]]:
        """One dict per statement of the whole program: index, path, phase, row, label, processor."""
        return [
            {
                "index": s,
                "path": st.path,
                "phase": st.phase,
                "row": st.spec.name,
                "label": st.label,
                "processor": self.processors[d].name,
            }
            for s, (st, d) in enumerate(zip(self.whole.statements, self.where))
        ]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for JSON."""
        return {
            "batch_size": self.batch_size,
            "dtype": self.dtype,
            "processors": [
                {
                    "name": p.name,
                    "device": p.device,
                    "workers": p.workers,
                    "memory_bytes": p.memory,
                    "alone_seconds": alone,
                }
                for p, alone in zip(self.processors, self.alone)
            ],
            "heap_bytes": self.heap_bytes,
            "seconds": self.seconds,
            "joules": self.joules,
            "lower_bound": self.lower_bound,
            "proved": self.proved,
            "copied_bytes": self.copied_bytes,
            "solver": self.solver,
            "statements": self.report(),
        }

    def __str__(self) -> str:
        rows = [["processor", "statements", "heap", "allowed", "alone"]]
        for d, (p, plan) in enumerate(zip(self.processors, self.plans)):
            alone = self.alone[d]
            rows.append(
                [
                    p.name,
                    str(self.where.count(d)),
                    f"{0 if plan is None else plan.heap_bytes:,} bytes",
                    "any" if p.memory is None else f"{p.memory:,} bytes",
                    "does not fit" if alone is None else duration(alone),
                ]
            )
        bound = "" if self.lower_bound is None else f", at least {duration(self.lower_bound)}"
        proved = " (proved)" if self.proved else ""
        n = len(self.parts.copies)
        lines = laid_out(rows)
        lines.append(f"a step of a batch of {self.batch_size}: {duration(self.seconds)}{bound}{proved}")
        lines.append(f"{n} copies, {self.copied_bytes:,} bytes; {self.solver or 'searched'}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<SplitPlan: batch {self.batch_size:,}, {', '.join(f'{n} {b:,} bytes' for n, b in self.heap_bytes.items())}>"

    def _repr_html_(self) -> str:
        return preformatted(str(self))


def plan_devices(
    graph: CalcGraph,
    processors: Sequence[Processor],
    *,
    batch_size: int,
    dtype: str = "float32",
    accumulate: bool = False,
    copies: Mapping[tuple[str, str], Link] | None = None,
    joules: float | None = None,
    solver_seconds: float = 0.0,
) -> SplitPlan:
    """Assign the statements of a graph to devices so that a step is fast and each part fits.  Allocates nothing.

    Statements run one after the other, in one order, each on one device; values from another device are copied.

    Parameters
    ----------
    processors : at least one, with distinct names.
    batch_size : the largest batch.
    copies : for pairs of names (from, to), the latency of a copy in seconds and its bytes per second (default: 10 us, 10 GB/s).
    joules : the maximum per step, by the processors' watts.
    solver_seconds : time for a solver (extra ``solver``) after the search; it also gives a bound.

    Raises
    ------
    PlanError : no assignment was found that fits, with the bytes of the nearest one.
    UnsupportedOperator : a GPU has no kernel for a row.

    References
    ----------
    Schuler et al., XEngine: optimal tensor rematerialization for neural networks in heterogeneous environments, 2022.

    Examples
    --------
    >>> graph = cv.build_graph(nn.Linear(64) >> nn.ReLU() >> nn.Linear(10), (64,), "mse", cv.SGD(0.1))
    >>> plan = cv.plan_devices(graph, [cv.Processor("a", memory="1 MiB"), cv.Processor("b", memory="1 MiB")], batch_size=32)
    >>> [processor.name for processor in plan.processors]
    ['a', 'b']
    """
    checks.one_of("plan_devices", graph, CalcGraph, "a graph (cv.CalcGraph, cv.build_graph)")
    processors = _checked(processors)
    batch_size = checks.integer("batch_size", batch_size, 1, MAX_BATCH)
    dtype = checks.choice("dtype", dtype, ITEMSIZE)
    accumulate = checks.flag("accumulate", accumulate)
    solver_seconds = checks.number("solver_seconds", solver_seconds, 0, 1e6)
    if joules is not None:
        joules = checks.number("joules", joules, 0, 1e18)
    link = _links(processors, copies)
    if not any(path.operations for path in graph.paths.values()):
        raise CalcError("plan_devices: the graph has no path with an operator: build one (cv.build_graph, graph.path)")

    with ExitStack() as measuring:
        sites = _sites(graph, processors, batch_size, dtype, accumulate, measuring)
        _check_alike([site.lowered for site in sites])
        single = [_alone(site, batch_size) for site in sites]
        problem, clusters = problem_of(sites, batch_size, link, joules)
    problem = replace(problem, fits=frozenset(d for d, plan in enumerate(single) if plan is not None))
    alone = [problem.evaluate([d] * problem.n_clusters) for d in problem.devices]
    found, parts, plans = _planned(sites, problem, clusters, single, batch_size, dtype, solver_seconds)
    return SplitPlan(
        graph=graph,
        processors=tuple(processors),
        batch_size=batch_size,
        dtype=dtype,
        where=found.where,
        seconds=found.seconds,
        joules=found.joules,
        alone=tuple(None if a.excess else a.seconds for a in alone),
        lower_bound=found.bound,
        copied_bytes=found.copied,
        plans=plans,
        solver=found.solver + (", proved" if found.proved else ""),
        parts=parts,
        whole=sites[0].lowered,
        home={i: found.at[c] for i, c in clusters.items()},
        accumulate=accumulate,
    )


def _sites(
    graph: CalcGraph, processors: Sequence[Processor], batch: int, dtype: str, accumulate: bool, measuring: ExitStack
) -> list[Site]:
    """The program as lowered for each processor."""
    sites = []
    for p in processors:
        lowered, facts = lower(graph, dtype=dtype, workers=p.workers, device=p.device, accumulate=accumulate)
        machine = Machine(ITEMSIZE[dtype], p.workers, p.device)
        if machine.gpu:
            check_kernels(lowered)
        lowered = replace(lowered, info={"dtype": dtype, "device": p.device, "facts": facts})
        cost = measuring.enter_context(p.cost(lowered, batch, machine, dtype))
        sites.append(Site(name=p.name, machine=machine, lowered=lowered, cost=cost, memory=p.memory, watts=p.watts))
    return sites


def _planned(
    sites: Sequence[Site],
    problem: AssignmentProblem,
    clusters: Mapping[int, int],
    single: Sequence[Plan | None],
    batch: int,
    dtype: str,
    solver_seconds: float,
) -> tuple[Assigned, Parts, tuple[Plan | None, ...]]:
    """The best assignment whose parts fit when they are planned.

    The first search counts in-place writes, and its bound is returned.  The second does not count them, since the planner
    cannot overwrite values that are kept.
    """
    bound: float | None = None
    ways: list[tuple[Assigned, Parts, tuple[Plan | None, ...]]] = []
    for counted in [problem, *([replace(problem, pairs=())] if problem.pairs else [])]:
        memory = list(problem.memory)
        for attempt in range(ATTEMPTS):
            found = assign(replace(counted, memory=tuple(memory)), solver_seconds)
            if counted is problem and not attempt:
                bound = found.bound  # later ones hold for less memory only
            found = replace(found, bound=bound)
            if found.excess:
                break
            home = {i: found.at[c] for i, c in clusters.items()}
            parts = parts_of([site.lowered for site in sites], found.where, home, dtype)
            plans = _parts_planned(sites, parts, single, batch, dtype)
            over = False
            for d, plan in enumerate(plans):
                allowed, most = memory[d], sites[d].memory
                if plan is not None and most is not None and allowed is not None and plan.heap_bytes > most:
                    over = True
                    memory[d] = allowed - (plan.heap_bytes - most)  # the next attempt has that much less
            if not over:
                ways.append((found, parts if parts.copies else _unsplit(parts, plans), plans))
                break
        if ways and ways[-1][0].proved:
            break
    if ways:
        return min(ways, key=lambda way: way[0].seconds)
    allowed_bytes = ", ".join(
        f"{s.name!r} of {'any memory' if s.memory is None else f'{s.memory:,} bytes'}" for s in sites
    )
    energy = "" if problem.joules_allowed is None else f" and {found.joules:.3g} joules of {problem.joules_allowed:.3g}"
    raise PlanError(
        f"no assignment to {allowed_bytes} was found that fits; the nearest needs "
        f"{' and '.join(f'{peak:,}' for peak in found.peaks)} bytes{energy}: allow more memory or take a smaller batch",
        max(found.peaks),
    )


def _parts_planned(
    sites: Sequence[Site], parts: Parts, single: Sequence[Plan | None], batch: int, dtype: str
) -> tuple[Plan | None, ...]:
    """The plan of each device's part (None: it has none)."""
    plans: list[Plan | None] = []
    for d, (site, part) in enumerate(zip(sites, parts.lowered)):
        whole = single[d] if not parts.copies else None
        if not part.statements and not part.values:
            plans.append(None)
            continue
        plans.append(
            whole
            or planner.plan(
                part,
                itemsize=ITEMSIZE[dtype],
                batch_size=batch,
                workers=site.machine.workers,
                device=site.machine.device,
                as_given=True,
            )
        )
    return tuple(plans)


def _unsplit(parts: Parts, plans: Sequence[Plan | None]) -> Parts:
    """The schedule if one device runs everything: the sections as planned."""
    d = next(d for d, plan in enumerate(plans) if plan is not None and plan.statements)
    plan = plans[d]
    assert plan is not None
    spans = plan.lowered.sections()
    return Parts(parts.lowered, {section: [Stretch(d, *span)] for section, span in spans.items() if span[0] < span[1]})


def _alone(site: Site, batch: int) -> Plan | None:
    """The plan of the whole program on one device; None if it does not fit."""
    try:
        return planner.plan(
            site.lowered,
            itemsize=site.machine.itemsize,
            batch_size=batch,
            memory=site.memory,
            workers=site.machine.workers,
            device=site.machine.device,
        )
    except PlanError:
        return None


def _checked(processors: Any) -> list[Processor]:
    found = checks.items("processors", processors, "a list of processors, such as [cv.Processor('big')],")
    for p in found:
        checks.one_of("a processor", p, Processor, "cv.Processor")
    if not found:
        raise CalcError("processors: give at least one, such as cv.Processor('big')")
    names = [p.name for p in found]
    for name in names:
        if names.count(name) > 1:
            raise CalcError(f"processors: two are called {name!r}: give them distinct names")
    return found


def _links(
    processors: Sequence[Processor], copies: Mapping[tuple[str, str], Link] | None
) -> Callable[[int, int, int], float]:
    """A function to the seconds of a copy, from source, target and bytes."""
    names = [p.name for p in processors]
    known: dict[tuple[int, int], Link] = {}
    if copies is not None:
        if not isinstance(copies, Mapping):
            raise CalcError(
                f"copies: a mapping from (name, name) to (seconds, bytes a second) is wanted, not {checks.called(copies)}"
            )
        for pair, link in copies.items():
            if not isinstance(pair, tuple) or len(pair) != 2 or any(name not in names for name in pair):
                raise CalcError(f"copies: {checks.shown(pair)} is no pair of processors; they are {', '.join(names)}")
            values = checks.items(f"copies of {pair}", link, "seconds and bytes a second, such as (1e-5, 1e10),")
            if len(values) != 2:
                raise CalcError(f"copies of {pair}: seconds and bytes a second are wanted, such as (1e-5, 1e10)")
            latency = checks.number(f"copies of {pair}: seconds", values[0], 0, 1e6)
            bandwidth = checks.number(f"copies of {pair}: bytes a second", values[1], 0, 1e18, ends="(]")
            known[names.index(pair[0]), names.index(pair[1])] = latency, bandwidth

    def seconds(source: int, target: int, nbytes: int) -> float:
        latency, bandwidth = known.get((source, target), (LATENCY, BANDWIDTH))
        return latency + nbytes / bandwidth

    return seconds


def _check_alike(lowered: Iterable[Lowered]) -> None:
    """Check that the statements and values of all devices correspond."""
    forms = [
        ([st.spec.name for st in each.statements], [(v.name, v.kind) for v in shared_values(each)]) for each in lowered
    ]
    if any(form != forms[0] for form in forms):
        raise CalcError("the network has different statements on different processors: plan it for one alone")
