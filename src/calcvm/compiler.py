"""From a graph to a plan and a program: the compiler's front."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
from calcvm.ops.statement import Lowered, Statement
from calcvm.planner import Plan
from calcvm.planner.cost import Table, of_step, told
from calcvm.planner.lifetimes import Machine
from calcvm.planner.paging import BANDWIDTH, File, is_paging, moved_bytes
from calcvm.planner.paging import KINDS as STREAMED
from calcvm.planner.warmth import Touched, of_rows, touched
from calcvm.progress import Solving
from calcvm.teams import default_team
from calcvm.undisturbed import uncollected
from calcvm.vm.memory.heap import parse_bytes
from calcvm.vm.program.assemble import assemble
from calcvm.vm.program.documents import MAX_BLOCKS, MAX_HEAP, MAX_WORKERS
from calcvm.vm.program.encoding import ITEMSIZE
from calcvm.vm.program.program import Program
from calcvm.vm.run.device import DEVICES

if TYPE_CHECKING:
    from typing_extensions import Unpack  # which only type checkers need

MODES = ("grid", "graph", "fleet")
PRECISIONS = ("float32", "tf32")
OBJECTIVES = ("speed", "memory")
COSTS = ("reckoned", "measured")
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
    mode: str | None = None,
    precision: str = "float32",
    recompute: bool = True,
    solver_seconds: float = 0.0,
    progress: bool | Callable[[float, float, float], None] = False,
    objective: str = "speed",
    page_bytes: int | str | None = None,
    page_bandwidth: float = BANDWIDTH,
    costs: str | Table = "reckoned",
) -> Plan:
    """What a graph needs: order, offsets, bytes.  Allocates nothing.

    Parameters
    ----------
    batch_size : int, optional
        The largest batch.  Without it, the largest that ``memory`` allows with the scratch that speed wants.
    memory : int or str, optional
        Hard cap of the heap in bytes, or a text such as ``"64 MiB"``.  Where it does not suffice, rows get less scratch
        than speed wants; and where it does not suffice for ``batch_size``, values of the forward are made again in the
        backward (``plan.again``), which changes no bit of what is trained.
    dtype : "float32" or "float64"
    device : "cpu" (own kernels), "blas" (matrix products through SciPy; extra ``blas``) or "cuda" (extra ``cuda``)
    workers : int, optional
        Largest team; by default the machine's cores where a step is long enough to share, else 1.  On "cuda" thread
        blocks; by default what the cost model finds fastest.
    accumulate : bool
        Whether several rounds may precede an optimize (gradients persist and add up).  Otherwise large
        parameters are updated inside the backward, which saves their gradients' memory.
    keep : names of results, or of layers for what they make, that stay readable after a step.
    mode : "grid", "graph" or "fleet", optional
        How "cuda" runs the program: all rows in one kernel, a launch a row, or as one of many models, by one block.
        By default the faster of the first two, by the cost model.
    precision : "float32" or "tf32"
        Of the matrix products on "cuda"; "tf32" rounds their factors to 10 bits.
    recompute : bool
        Whether values may be made again; otherwise what does not fit is refused.
    solver_seconds : float
        That solvers (extra ``solver``) may take, beside the search, to find which ones cost least, and to prove it:
        ``plan.lower_bound``, ``plan.proved``; and to pack values without a gap, where there is one and ``memory`` does not
        allow it.  How far they come depends on the machine, and `plan.solver` tells it; where they are missing or fail, the
        search's schedule stays, with a `CalcWarning`.  Ctrl-C ends them, and not the planning.
    progress : bool or callable
        Show on stderr what solvers have found, or call this with their seconds, the overhead and the lower bound so far,
        both as fractions of a step.
    page_bytes : int or str, optional
        Where ``memory`` does not suffice for ``batch_size``, values of the forward may also wait in a file of at most so many
        bytes (``plan.page_bytes``; `CalcHeap` says where), from where they are read ahead; what costs less is done.
    page_bandwidth : float
        Bytes a second to that file and from it.
    objective : "speed" or "memory"
        With "memory" rows get the least scratch with which they run, from the start: the largest batch of a budget is then
        the largest that there is without making values again.
    costs : "reckoned", "measured", mapping or callable
        What the work of a row is told from, where values are made again: reckoned from operations and bytes; measured on
        this machine, once, and kept in the cache folder (a second or two; ``plan.seconds`` is then what a step takes); a
        mapping from names of rows or labels to seconds, with what it does not name as reckoned; or a function of a
        statement's facts, a dict of row, label, path, phase, operations, bytes, batch and workers.

    Raises
    ------
    PlanError : it does not fit, with ``needed`` and ``allowed`` bytes.
    UnsupportedOperator : the device has no kernel for a row.
    CalcError : an option is none; ``costs`` says what is no number >= 0, of a row that is named.
    """
    checks.one_of("plan", graph, CalcGraph, "a graph (cv.CalcGraph, cv.build_graph)")
    dtype = checks.choice("dtype", _name_of(dtype), ITEMSIZE)
    checks.choice("device", device, DEVICES)
    accumulate = checks.flag("accumulate", accumulate)
    recompute = checks.flag("recompute", recompute)
    solver_seconds = checks.number("solver_seconds", solver_seconds, 0, 1e6)
    if not callable(progress) and not isinstance(progress, bool):
        raise CalcError(f"progress: True, False or a function is wanted, not {checks.called(progress)}")
    checks.choice("objective", objective, OBJECTIVES)
    if workers is not None:
        workers = checks.integer("workers", workers, 1, MAX_BLOCKS if device == "cuda" else MAX_WORKERS)
    _check_options(device, dtype, workers, mode, precision)
    if batch_size is None and memory is None:
        raise PlanError("give batch_size= or memory=: how large may a batch be?")
    if batch_size is not None:
        batch_size = checks.integer("batch_size", batch_size, 1, MAX_BATCH)
    keep = _names(keep)

    gpu = device == "cuda"
    file = _file(page_bytes, memory, page_bandwidth, gpu)
    costing = Costing(costs, dtype, device, batch_size, file)
    most = MAX_HEAP * ITEMSIZE[dtype]
    budget = None if memory is None else min(parse_bytes(memory), most)

    def planned(team: int, solver_seconds: float = solver_seconds) -> Plan:
        lowered, facts = uncollected(
            lambda: lower(graph, dtype=dtype, workers=team, gpu=gpu, accumulate=accumulate, keep=keep)
        )
        lowered = replace(
            lowered, info={"dtype": dtype, "device": device, "facts": facts, "graph": (ref(graph), graph.extent)}
        )
        if gpu:
            check_kernels(lowered)
        fit = partial(
            planner.plan, lowered, itemsize=ITEMSIZE[dtype], batch_size=batch_size, memory=budget, workers=team, gpu=gpu,
            solver_seconds=solver_seconds,
            cost=costing.of(lowered, team),
        )  # fmt: skip
        costing.without[team] = partial(fit, least=True, memory=None)
        last: dict[str, Any] = {"least": True}
        if (recompute or file is not None) and batch_size is not None:  # where it does not fit with least scratch alone
            last |= {"recompute": recompute, "tell": tell, "file": file}
        ways = [last] if objective == "memory" else [{}, last]
        if last.get("file"):
            ways += [{**last, "stream": STREAMED[:n]} for n in (1, 2)]
        refused: PlanError | None = None
        for way in ways:
            try:
                plan = fit(**way) if solver_seconds else uncollected(partial(fit, **way))  # solvers may take minutes
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
        tell = progress if callable(progress) else shown  # of all ways and teams that are tried
        if gpu:
            return costing.on(_planned_for_gpu(planned, mode, workers, precision))
        if workers is not None or device == "blas":
            return costing.on(planned(1 if workers is None else workers))
        return costing.on(_planned_for_cpu(planned, bool(solver_seconds)))


def _planned_for_cpu(planned: Callable[..., Plan], solved: bool) -> Plan:
    """The plan for one worker, or for the machine's cores where a step is long enough and their scratch fits.

    solved : solvers are asked, for the plan that is taken alone.
    """
    cores = default_team()
    if cores == 1:
        return planned(1)
    alone = planned(1, 0.0)
    if flops(alone.lowered, alone.batch_size) >= TEAM_FLOPS:
        with suppress(PlanError):  # a team's scratch does not fit
            return planned(cores)
    return planned(1) if (alone.again or alone.page_bytes) and solved else alone


def _name_of(dtype: Any) -> Any:
    """ "float32" of ``np.float32`` and of ``np.dtype("float32")`` too."""
    return dtype if isinstance(dtype, str) else getattr(dtype, "name", getattr(dtype, "__name__", dtype))


def _names(keep: Any) -> tuple[str, ...]:
    """Names of results; the results themselves are welcome."""
    given = checks.items("keep", keep, "a list of names of results, such as keep=['y'],")
    return tuple(checks.text("keep: a name", v.name if isinstance(v, Variable) else v, "y") for v in given)


def _check_options(device: str, dtype: str, workers: int | None, mode: str | None, precision: str) -> None:
    """What a device does not know is refused."""
    if mode is not None:
        checks.choice("mode", mode, MODES)
    checks.choice("precision", precision, PRECISIONS)
    if device != "cuda" and (mode is not None or precision != "float32"):
        raise CalcError(f"device {device!r} has no mode and no precision: they are of device 'cuda'")
    if precision == "tf32" and dtype != "float32":
        raise CalcError(f"precision 'tf32' is of float32, not of dtype {dtype!r}")
    if mode == "fleet" and workers not in (None, 1):
        raise CalcError("mode 'fleet': a model is run by one thread block, workers=1")
    if device == "blas" and workers not in (None, 1):
        raise CalcError("device 'blas': programs run with workers=1; BLAS has threads of its own")


def _file(page_bytes: int | str | None, memory: Any, bandwidth: Any, gpu: bool) -> File | None:
    """Where values may wait."""
    bandwidth = checks.number("page_bandwidth", bandwidth, 1, 1e18)
    if page_bytes is None:
        return None
    if memory is None:
        raise CalcError("page_bytes= goes with memory=: how much may the heap have?")
    if gpu:
        raise CalcError("page_bytes: programs for device 'cuda' have no pages; leave it out, or take device='cpu'")
    return File(parse_bytes(page_bytes, "page_bytes"), bandwidth)


def check_costs(how: Any, device: str, what: str = "costs") -> Any:
    """How rows are costed, if it is a way to."""
    if isinstance(how, type) or not (isinstance(how, Mapping) or callable(how)):
        if not isinstance(how, str):
            raise CalcError(
                f"{what}: 'reckoned', 'measured', a mapping from rows to seconds or a function of a row is wanted, not "
                f"{checks.called(how)}"
            )
        checks.choice(what, how, COSTS)
    if how == "measured" and device == "cuda":
        raise CalcError(
            f"{what} are measured on the processor, not on device 'cuda': take costs='reckoned', or give a table"
        )
    return how


class Costing:
    """What rows cost, by what the user asked for; what is measured on the way is kept in the end.

    how : "reckoned", "measured", or a user's table.
    """

    def __init__(self, how: Any, dtype: str, device: str, batch: int | None, file: File | None = None):
        self.how, self.dtype, self.device, self.batch = check_costs(how, device), dtype, device, batch
        self.file = file
        self.without: dict[int, Callable[[], Plan]] = {}
        self._made: dict[int, Any] = {}

    def of(self, lowered: Lowered, team: int) -> Callable[[Statement], float] | None:
        """Seconds of a statement run by a team (None: as the planner reckons)."""
        if self.how == "reckoned" or (self.how == "measured" and self.batch is None):
            return None
        if self.how == "measured":
            from calcvm.vm.run.costs import Costs

            assert self.batch is not None
            rows = {st.spec.name for st in lowered.statements}
            self._made[team] = Costs(self.batch, team, self.dtype, self.device, rows)
        else:
            machine = Machine(ITEMSIZE[self.dtype], team, self.device == "cuda")
            self._made[team] = told(self.how, lowered, self.batch or 1, machine)
        return self._made[team]

    def on(self, plan: Plan) -> Plan:
        """A plan that says what it was made by, and what a step takes."""
        seconds = without = None
        if plan.workers in self._made and self.batch is not None:
            seconds = self._step(plan)
            if plan.again and self.how == "measured":
                without = self._step(self.without[plan.workers]())
        costs = self.how if isinstance(self.how, str) else "given"
        return replace(plan, costs=costs, seconds=seconds, seconds_without=without)

    def _step(self, plan: Plan) -> float:
        """What a step of a plan takes: of what is measured, with its rows' operands as warm as they find them."""
        made, machine = self._made[plan.workers], plan.layout.machine
        assert self.batch is not None
        if self.how != "measured" or not made.cache_bytes:
            cost = made if self.file is None else self.file.cost(made, self.batch, machine)
            return of_step(plan.statements, cost)
        paths: dict[str, list[Touched]] = {}
        moved = dict[str, float]()
        for st in plan.statements:
            if self.file is not None and is_paging(st):
                moved[st.path] = moved.get(st.path, 0.0) + self.file.seconds(moved_bytes(st, self.batch, machine))
            else:
                paths.setdefault(st.path, []).append(touched(st, plan.offsets, self.batch, machine))
        return max((of_rows(rows, made) + moved.get(path, 0.0) for path, rows in paths.items()), default=0.0)

    def __enter__(self) -> Costing:
        return self

    def __exit__(self, *error: object) -> None:
        if self.how == "measured":
            for made in self._made.values():
                made.keep()


def _check_size(plan: Plan, most: int) -> None:
    """A program can address what it needs."""
    if plan.heap_bytes > most:
        raise PlanError(
            f"a batch of {plan.batch_size:,} needs {plan.heap_bytes:,} bytes, more than a program can address ({most:,}): "
            "take a smaller batch",
            plan.heap_bytes,
            most,
        )


def _check_use(plan: Plan) -> None:
    """No row is senseless even at the largest batch."""
    for s in plan.statements:
        for text, says in s.spec.useful:
            if evaluate(text, s.words_at(plan.batch_size)) < 0:
                raise ShapeError(
                    f"{s.label}: in a batch of {plan.batch_size} {says}: plan a larger batch (smaller ones may be run), or do "
                    f"without it in path {s.path!r}"
                )


def check_kernels(lowered: Lowered) -> None:
    """Every row has a CUDA kernel."""
    kernels = kernels_cuda.kernels(s.spec.name for s in lowered.statements)
    for s in lowered.statements:
        if s.spec.name not in kernels:
            raise UnsupportedOperator(f"row {s.spec.name!r} (of {s.label}) has no CUDA kernel; take device='cpu'")


def _planned_for_gpu(planned: Callable[[int], Plan], mode: str | None, workers: int | None, precision: str) -> Plan:
    """The plan for a mode and thread blocks; what is not given is the cost model's choice."""
    if mode == "fleet":
        workers = 1
    try:
        plan = planned(workers or 2)  # two have the barriers and the scratch of several
    except PlanError:
        if workers is not None:
            raise
        plan, workers = planned(1), 1
    if mode is None or workers is None:
        from calcvm.vm.run.cuda.cost import choose

        mode, workers = choose(plan, _figures(), mode, workers)
        if workers != plan.workers:
            with suppress(PlanError):  # their scratch does not fit
                plan = planned(workers)
    from calcvm.vm.run.cuda.device import PROCESS_BYTES, table_bytes

    info = {**plan.lowered.info, "mode": mode, "precision": precision}
    n_words = row_words(statement.spec for statement in plan.statements)
    rows = table_bytes(len(plan.statements), n_words)
    device_bytes = {"heap": plan.heap_bytes, "rows": rows, "process": PROCESS_BYTES}
    return replace(plan, lowered=replace(plan.lowered, info=info), device_bytes=device_bytes)


def _figures() -> Any:
    """Those of this machine's GPU; where there is none, the ones assumed."""
    from calcvm.vm.run.cuda.cost import Figures
    from calcvm.vm.run.cuda.device import cuda

    try:
        return cuda().figures
    except (DeviceError, MissingExtra):
        return Figures()


class Options(TypedDict, total=False):
    """What `plan` takes beside the graph."""

    batch_size: int | None
    memory: int | str | None
    dtype: str
    device: str
    workers: int | None
    accumulate: bool
    keep: Iterable[str]
    mode: str | None
    precision: str
    recompute: bool
    solver_seconds: float
    progress: bool | Callable[[float, float, float], None]
    objective: str
    page_bytes: int | str | None
    page_bandwidth: float
    costs: str | Table


plan_of = plan  # under a name that `compile` does not use itself


def flops(lowered: Lowered, batch: int) -> int:
    """Floating-point operations of a run of the most expensive path."""
    totals = dict.fromkeys(lowered.paths, 0)
    for s in lowered.statements:
        totals[s.path] += int(evaluate(s.spec.flops, s.words_at(batch)))
    return max(totals.values(), default=0)


def compile(  # noqa: A001
    graph: CalcGraph, *, plan: Plan | None = None, **options: Unpack[Options]
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
        raise CalcError(f"compile: {graph!r} has changed since it was planned: plan it anew (cv.plan)")
    facts, dtype = dict(vars(info["facts"])), info["dtype"]
    constants, layers = facts.pop("constants"), facts["layers"]
    facts = {name: of for name, of in facts.items() if of or name not in ("called", "adapts")}
    device = {name: info[name] for name in ("device", "mode", "precision") if name in info}

    def assembled() -> Program:
        facts["layers"] = {path: [line.at(plan.batch_size, dtype) for line in lines] for path, lines in layers.items()}
        return assemble(plan.lowered, plan, dtype, {**facts, **device}, constants)

    return uncollected(assembled)
