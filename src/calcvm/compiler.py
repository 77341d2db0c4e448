"""The compiler's front end: from a graph to a plan and a program.

Planning runs without garbage collection, unless a solver works: full collections took 40 % of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict
from weakref import ref

from calcvm import checks, kernels_cuda, planner
from calcvm.errors import CalcError, DeviceError, MissingExtra, PlanError, ShapeError, UnsupportedOperator
from calcvm.graph import CalcGraph, Variable
from calcvm.lowering import lower
from calcvm.ops.sizes import MAX_BATCH, evaluate
from calcvm.ops.spec import row_words
from calcvm.ops.statement import Lowered
from calcvm.planner import Plan
from calcvm.planner.costs.costing import Costing, Measured
from calcvm.planner.costs.reckoned import Table
from calcvm.planner.ladder import ladder
from calcvm.planner.paging import BANDWIDTH, File
from calcvm.progress import Solving
from calcvm.teams import default_team
from calcvm.vm.memory.heap import parse_bytes
from calcvm.vm.program.assemble import assemble
from calcvm.vm.program.documents import MAX_BLOCKS, MAX_HEAP, MAX_WORKERS
from calcvm.vm.program.encoding import ITEMSIZE
from calcvm.vm.program.program import Program
from calcvm.vm.run.device import DEVICES
from calcvm.vm.run.slices import SLICE_SECONDS, seconds_of
from calcvm.without_signals import uncollected

if TYPE_CHECKING:
    from typing_extensions import Unpack  # needed by type checkers only

MODES = ("grid", "graph", "fleet")
PRECISIONS = ("float32", "tf32")
OBJECTIVES = ("speed", "memory")
ALONE = {"blas": "; BLAS has its own threads", "small": ""}  # devices without teams, with more of why
# A team pays off if it saves more arithmetic than its barriers cost (about 0.1 us each, and cache lines
# that move between cores): see bench/RESULTS.md.
TEAM_FLOPS = 2e6


def plan(
    graph: CalcGraph,
    *,
    batch_size: int | None = None,
    memory: int | str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    workers: int | None = None,
    accumulate: bool = False,
    keep: Iterable[str] = (),
    mode: str | None = None,
    precision: str = "float32",
    recompute: bool = True,
    solver_seconds: float = 0.0,
    progress: bool | Callable[[float, float, float], None] = False,
    objective: str = "speed",
    page_bytes: int | str | None = None,
    page_bandwidth: float = BANDWIDTH,
    costs: str | Table = "reckoned",
    specialize: bool = False,
) -> Plan:
    """Plan a graph: order, offsets, bytes.  Allocates nothing.

    Parameters
    ----------
    batch_size : int, optional
        The largest batch.  By default the largest that ``memory`` allows if rows get the scratch that is fastest.
    memory : int or str, optional
        Hard cap of the heap in bytes, or a text such as ``"64 MiB"``.  If it does not suffice, rows get less scratch.  If
        it still does not suffice for ``batch_size``, the backward recomputes values of the forward (``plan.recomputed``).
        Training gives the same bits.
    dtype : "float32" or "float64"
    device : "cpu" (own kernels), "blas" (matrix products through SciPy; extra ``blas``), "cuda" (extra ``cuda``) or "small"
        For "small" the program takes as little memory as it can, as on microcontrollers (`Model.export`).
    workers : int, optional
        Largest team; by default the machine's cores if a step is long enough to share, else 1.  On "cuda" the number of
        thread blocks; by default the fastest by the cost model.
    accumulate : bool
        Whether several rounds may precede an optimize (gradients persist and add up).  By default a step is one round, and
        large parameters are updated inside the backward, which saves their gradients' memory.
    keep : names of results, or of layers whose results, stay readable after a step.
    mode : "grid", "graph" or "fleet", optional
        How "cuda" runs the program: all rows in one kernel, one launch per row, or in one block, as one of many models.
        By default the faster of the first two, by the cost model.
    precision : "float32" or "tf32"
        Precision of the matrix products on "cuda"; "tf32" rounds their factors to 10 bits.
    recompute : bool
        Whether values may be recomputed; otherwise a program that does not fit is refused.
    solver_seconds : float
        Time for solvers (extra ``solver``), after the search, to find the cheapest recomputation and to prove it
        (``plan.lower_bound``, ``plan.proved``), and to close a gap in the packing that ``memory`` does not allow.  Their
        success depends on the machine; `plan.solver` reports it.  If they are missing or fail, the schedule of the search
        stays, with a `CalcWarning`.  Ctrl-C ends the solvers, not the planning.
    progress : bool or callable
        Show the solvers' progress on stderr, or call this with their seconds, the overhead and the lower bound so far,
        both as fractions of a step.
    page_bytes : int or str, optional
        If ``memory`` does not suffice for ``batch_size``, values of the forward may also wait in a file of at most this
        size (``plan.page_bytes``; `CalcHeap` says where), with read-ahead.  The planner takes the cheaper way per value.
    page_bandwidth : float
        Bytes per second to and from that file.
    objective : "speed" or "memory"
        With "memory", rows get the minimal scratch from the start, so a budget allows the largest batch that is possible
        without recomputation.
    costs : "reckoned", "measured", mapping or callable
        The costs of rows, for choosing the values to recompute.  "reckoned": estimated from operations and bytes.
        "measured": measured once on this machine and kept in the cache folder (takes a second or two; ``plan.seconds`` is
        then the predicted time of a step).  A mapping from names of rows or labels to seconds; other rows are estimated.
        A function of a statement's facts: a dict of row, label, path, phase, operations, bytes, batch and workers.
    specialize : bool
        Compile each section of the program to one function, in which all sizes, for ``batch_size`` samples, are constants.  A
        step of 4-16-3 takes 0.32 us instead of 0.52; large networks gain nothing, and `compile` refuses those whose step may
        take 0.1 s, by an upper estimate.  Compiling takes seconds, once.  Smaller batches run as without it.  One worker runs
        the program, on the CPU.

    Raises
    ------
    PlanError : the program does not fit, with ``needed`` and ``allowed`` bytes.
    UnsupportedOperator : the device has no kernel for a row.
    CalcError : an option is invalid, or the seconds of a row are not a number >= 0.

    Examples
    --------
    >>> graph = cv.build_graph(nn.Linear(64) >> nn.ReLU() >> nn.Linear(10), (64,), "mse", cv.SGD(0.1))
    >>> plan = cv.plan(graph, batch_size=32, workers=1)
    >>> plan.heap_bytes < 100_000
    True
    >>> cv.plan(graph, memory="1 MiB").batch_size > 1000
    True
    """
    checks.one_of("plan", graph, CalcGraph, "a graph (cv.CalcGraph, cv.build_graph)")
    dtype = checks.choice("dtype", _name_of(dtype), ITEMSIZE)
    checks.choice("device", device, DEVICES)
    accumulate = checks.flag("accumulate", accumulate)
    recompute = checks.flag("recompute", recompute)
    specialize = checks.flag("specialize", specialize)
    solver_seconds = checks.number("solver_seconds", solver_seconds, 0, 1e6)
    if not callable(progress) and not isinstance(progress, bool):
        raise CalcError(f"progress: True, False or a function is wanted, not {checks.called(progress)}")
    checks.choice("objective", objective, OBJECTIVES)
    if workers is not None:
        workers = checks.integer("workers", workers, 1, MAX_BLOCKS if device == "cuda" else MAX_WORKERS)
    _check_options(device, dtype, workers, mode, precision)
    if specialize and (device == "cuda" or workers not in (None, 1)):
        raise CalcError(
            f"specialize=True is for one worker of a processor, not for device={device!r}, workers={workers}"
        )
    workers = 1 if specialize else workers
    if batch_size is None and memory is None:
        raise PlanError("give batch_size= or memory=: how large may a batch be?")
    if batch_size is not None:
        batch_size = checks.integer("batch_size", batch_size, 1, MAX_BATCH)
    keep = _names(keep)

    gpu = device == "cuda"
    file = _file(page_bytes, memory, page_bandwidth, gpu)
    costing = Costing(costs, dtype, device, batch_size, measured, file)
    most = MAX_HEAP * ITEMSIZE[dtype]
    budget = None if memory is None else min(parse_bytes(memory), most)

    def planned(team: int, solver_seconds: float = solver_seconds) -> Plan:
        lowered, facts = uncollected(
            lambda: lower(graph, dtype=dtype, workers=team, device=device, accumulate=accumulate, keep=keep)
        )
        info = {"dtype": dtype, "device": device, "facts": facts, "graph": (ref(graph), graph.extent)}
        lowered = replace(lowered, info=info | ({"specialize": True} if specialize else {}))
        if gpu:
            check_kernels(lowered)
        fit = partial(
            planner.plan, lowered, itemsize=ITEMSIZE[dtype], batch_size=batch_size, memory=budget, workers=team, device=device,
            solver_seconds=solver_seconds,
            cost=costing.of(lowered, team),
        )  # fmt: skip
        costing.without[team] = partial(fit, least=True, memory=None)
        refused: PlanError | None = None
        for means in ladder("memory" if device == "small" else objective, recompute, file is not None, batch_size):
            way = partial(
                fit,
                least=means.least,
                recompute=means.recompute,
                file=file if means.pages else None,
                stream=means.stream,
                tell=tell,
            )
            try:
                plan = way() if solver_seconds else uncollected(way)  # solvers may take minutes
                _check_size(plan, most)
                _check_use(plan)
            except ShapeError as e:
                if batch_size is not None:
                    raise
                refused = PlanError(f"memory={memory!r} allows a batch of {plan.batch_size}: {e}", allowed=budget)
            except PlanError as e:
                refused = e
            else:
                return plan
        assert refused is not None
        raise refused from None

    with costing, closing(Solving(progress is True)) as shown:
        tell = progress if callable(progress) else shown  # for all means and teams that are tried
        if gpu:
            return costing.on(_planned_for_gpu(planned, mode, workers, precision))
        if workers is not None or device in ALONE:
            return costing.on(planned(1 if workers is None else workers))
        return costing.on(_planned_for_cpu(planned, bool(solver_seconds)))


def measured(*of: Any) -> Measured:
    """Costs measured on this machine: see `Costing`."""
    from calcvm.vm.run.costs import Costs  # kernels, which few plans need

    return Costs(*of)


def _planned_for_cpu(planned: Callable[..., Plan], solved: bool) -> Plan:
    """The plan for one worker, or for the machine's cores if a step is long enough and their scratch fits.

    solved : run solvers, but only for the plan that is returned.
    """
    cores = default_team()
    if cores == 1:
        return planned(1)
    alone = planned(1, 0.0)
    if flops(alone.lowered, alone.batch_size) >= TEAM_FLOPS:
        with suppress(PlanError):  # a team's scratch does not fit
            return planned(cores)
    return planned(1) if (alone.recomputed or alone.page_bytes) and solved else alone


def _name_of(dtype: Any) -> Any:
    """The name of a dtype: "float32" for ``np.float32`` and for ``np.dtype("float32")`` too."""
    return dtype if isinstance(dtype, str) else getattr(dtype, "name", getattr(dtype, "__name__", dtype))


def _names(keep: Any) -> tuple[str, ...]:
    """Names of results, from names or the results themselves."""
    given = checks.items("keep", keep, "a list of names of results, such as keep=['y'],")
    return tuple(checks.text("keep: a name", v.name if isinstance(v, Variable) else v, "y") for v in given)


def _check_options(device: str, dtype: str, workers: int | None, mode: str | None, precision: str) -> None:
    """Refuse options that the device does not support."""
    if mode is not None:
        checks.choice("mode", mode, MODES)
    checks.choice("precision", precision, PRECISIONS)
    if device != "cuda" and (mode is not None or precision != "float32"):
        raise CalcError(f"device {device!r} has no mode and no precision: these are options of device 'cuda'")
    if precision == "tf32" and dtype != "float32":
        raise CalcError(f"precision 'tf32' needs dtype 'float32', not {dtype!r}")
    if mode == "fleet" and workers not in (None, 1):
        raise CalcError("mode 'fleet': a model is run by one thread block, workers=1")
    if device in ALONE and workers not in (None, 1):
        raise CalcError(f"device {device!r}: programs run with workers=1{ALONE[device]}")


def _file(page_bytes: int | str | None, memory: Any, bandwidth: Any, gpu: bool) -> File | None:
    """The page file, if the options ask for one."""
    bandwidth = checks.number("page_bandwidth", bandwidth, 1, 1e18)
    if page_bytes is None:
        return None
    if memory is None:
        raise CalcError("page_bytes= goes with memory=: how much may the heap have?")
    if gpu:
        raise CalcError("page_bytes: programs for device 'cuda' have no pages; leave it out, or take device='cpu'")
    return File(parse_bytes(page_bytes, "page_bytes"), bandwidth)


def _check_size(plan: Plan, most: int) -> None:
    """Check that a program can address the heap."""
    if plan.heap_bytes > most:
        raise PlanError(
            f"a batch of {plan.batch_size:,} needs {plan.heap_bytes:,} bytes, more than a program can address ({most:,}): "
            "take a smaller batch",
            plan.heap_bytes,
            most,
        )


def _check_use(plan: Plan) -> None:
    """Check that every row is meaningful at least at the largest batch."""
    for s in plan.statements:
        for text, says in s.spec.useful:
            if evaluate(text, s.words_at(plan.batch_size)) < 0:
                raise ShapeError(
                    f"{s.label}: in a batch of {plan.batch_size} {says}: plan a larger batch (predict takes smaller ones), or do "
                    f"without it in path {s.path!r}"
                )


def check_kernels(lowered: Lowered) -> None:
    """Check that every row has a CUDA kernel."""
    kernels = kernels_cuda.kernels(s.spec.name for s in lowered.statements)
    for s in lowered.statements:
        if s.spec.name not in kernels:
            raise UnsupportedOperator(f"row {s.spec.name!r} (of {s.label}) has no CUDA kernel; take device='cpu'")


def _planned_for_gpu(planned: Callable[[int], Plan], mode: str | None, workers: int | None, precision: str) -> Plan:
    """The plan for a mode and a number of thread blocks; the cost model chooses those that are not given."""
    if mode == "fleet":
        workers = 1
    try:
        plan = planned(workers or 2)  # two blocks have the barriers and the scratch of several
    except PlanError:
        if workers is not None:
            raise
        plan, workers = planned(1), 1
    if mode is None or workers is None:
        from calcvm.vm.run.cuda.cost import choose

        mode, workers = choose(plan, _figures(), mode, workers)
        if workers != plan.workers:
            with suppress(PlanError):  # the scratch of that many blocks does not fit
                plan = planned(workers)
    from calcvm.vm.run.cuda.device import PROCESS_BYTES, table_bytes

    info = {**plan.lowered.info, "mode": mode, "precision": precision}
    n_words = row_words(statement.spec for statement in plan.statements)
    rows = table_bytes(len(plan.statements), n_words)
    device_bytes = {"heap": plan.heap_bytes, "rows": rows, "process": PROCESS_BYTES}
    return replace(plan, lowered=replace(plan.lowered, info=info), device_bytes=device_bytes)


def _figures() -> Any:
    """The figures of this machine's GPU, or the assumed ones if it has none."""
    from calcvm.vm.run.cuda.cost import Figures
    from calcvm.vm.run.cuda.device import cuda

    try:
        return cuda().figures
    except (DeviceError, MissingExtra):
        return Figures()


class PlanOptions(TypedDict, total=False):
    """The options of `plan` that a `Model` hands on."""

    dtype: str
    device: str
    workers: int | None
    keep: Iterable[str]
    mode: str | None
    precision: str
    recompute: bool
    solver_seconds: float
    objective: str
    page_bytes: int | str | None
    page_bandwidth: float
    costs: str | Table
    specialize: bool


class Options(PlanOptions, total=False):
    """The options of `plan`."""

    batch_size: int | None
    memory: int | str | None
    accumulate: bool
    progress: bool | Callable[[float, float, float], None]


plan_of = plan  # under a name that `compile` does not use itself


def flops(lowered: Lowered, batch: int) -> int:
    """Floating-point operations of the most expensive path."""
    totals = dict.fromkeys(lowered.paths, 0)
    for s in lowered.statements:
        totals[s.path] += int(evaluate(s.spec.flops, s.words_at(batch)))
    return max(totals.values(), default=0)


def compile(  # noqa: A001
    graph: CalcGraph, *, plan: Plan | None = None, **options: Unpack[Options]
) -> Program:
    """Compile a graph into verified rows.

    Parameters
    ----------
    plan : Plan, optional
        The result of `plan`; otherwise ``options`` are those of `plan`.

    Raises
    ------
    PlanError, CalcError : as in `plan`.
    ProgramError : the rows do not verify (a defect of calcvm or of a registered operator).

    Examples
    --------
    >>> graph = cv.build_graph(nn.Linear(2), (4,), "mse", cv.SGD(0.1))
    >>> program = cv.compile(graph, batch_size=32, accumulate=False)
    >>> program.batch_size, len(program.rows) > 3
    (32, True)
    """
    checks.one_of("compile", graph, CalcGraph, "a graph (cv.CalcGraph, cv.build_graph)")
    if plan is None:
        plan = plan_of(graph, **options)
    elif options:
        raise CalcError(f"compile: the plan has its {next(iter(options))} already: give options to cv.plan")
    checks.one_of("compile: plan", plan, Plan, "a plan (cv.plan)")
    info = plan.lowered.info
    planned, extent = info["graph"]
    if planned() is not graph:
        raise CalcError(
            f"compile: the plan is of another graph than {graph!r}: plan this one (cv.plan), or compile that one"
        )
    if extent != graph.extent:
        raise CalcError(f"compile: {graph!r} has changed since it was planned: plan it again (cv.plan)")
    facts, dtype = dict(vars(info["facts"])), info["dtype"]
    constants, layers = facts.pop("constants"), facts["layers"]
    facts = {name: of for name, of in facts.items() if of or name not in ("called", "adapts", "carries")}
    device = {name: info[name] for name in ("device", "mode", "precision", "specialize") if name in info}

    def assembled() -> Program:
        facts["layers"] = {path: [line.at(plan.batch_size, dtype) for line in lines] for path, lines in layers.items()}
        return assemble(plan.lowered, plan, dtype, {**facts, **device}, constants)

    program = uncollected(assembled)
    if info.get("specialize") and (seconds := seconds_of(program).sum()) > SLICE_SECONDS:
        raise CalcError(
            f"specialize=True is for small networks: a step of this one may take {seconds:.2g} s, by an upper estimate, and only "
            f"{SLICE_SECONDS} are allowed; leave it out, which costs a long step nothing"
        )
    return program
