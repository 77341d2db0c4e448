"""A program on a device, ready to run: the data that all its models share, independent of their places in a heap."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, ProgramError, ShapeError, Uncopied
from calcvm.init import Constant, Initializer
from calcvm.lazy import cached_property
from calcvm.ops.dims import Affine
from calcvm.ops.elementwise import CAST_ROW
from calcvm.ops.losses import PROBABILITIES
from calcvm.ops.optimizers import DECAY_ROW, Slot, slots_of
from calcvm.ops.sizes import evaluate
from calcvm.ops.spec import stem_of
from calcvm.ops.statement import PHASES
from calcvm.vm.program.documents import initializer
from calcvm.vm.program.encoding import FLAG_SYNC, copied, decode_row
from calcvm.vm.program.program import Program, Symbol
from calcvm.vm.run.device import device_of
from calcvm.vm.run.slices import SLICE_SECONDS, brief_batch, changing, cut, seconds_of
from calcvm.vm.run.specialized import joined

P = ParamSpec("P")
T = TypeVar("T")
Span = tuple[int, int]
FORWARD = ("forward", "loss")  # phases that compute results
KEPT_BATCHES = 64  # copies of the rows to cache, each patched for a batch

_loaded: WeakValueDictionary[str, Loaded] = WeakValueDictionary()


def kept(method: Callable[P, T]) -> Callable[P, T]:
    """Cache the answers of a loaded program's method; a program does not change."""
    name = method.__name__

    @wraps(method)
    def answer(loaded: Any, *of: Any) -> Any:
        found = loaded._kept.get((name, of))
        if found is None:
            found = loaded._kept[name, of] = method(loaded, *of)  # type: ignore[call-arg,arg-type]
        return found

    return answer  # type: ignore[return-value]


def loaded_of(program: Program) -> Loaded:
    """The program on its device; equal programs share one `Loaded`."""
    loaded = _loaded.get(program.hash)
    if loaded is None:
        program.check_instructions()  # a custom instruction may have been redeclared since
        loaded = _loaded[program.hash] = Loaded(program)
    return loaded


def forget(rows: set[str]) -> None:
    """Drop programs with these rows, whose kernels have changed; programs loaded from now on use the new kernels."""
    for digest, loaded in [*_loaded.items()]:
        if any(name in rows for name, _ in loaded.program.instructions):
            _loaded.pop(digest, None)


class Loaded(Uncopied):
    """A program on its device: kernels, rows for a batch, spans of sections, and the blocks that a model switch copies.

    device, kernels : the device, and the program's data prepared for it.
    table_address : the TABLE of jobs.
    image : persistent bytes [start, stop) of a program's piece: parameters, buffers, state, optimizer.
    opened : the same with persistent gradients, for the middle of an accumulation.
    paged : persistent bytes [start, stop) in the page file, relative to the piece's start; they are the end of each image.
    gradient : bytes [start, stop) to zero when a model is switched in between two learning batches.
    padding : elements before and between gradients that block-wise updates read, and nothing writes.
    """

    _instead = "it holds addresses of this process; copy its program, loaded.program"

    def __init__(self, program: Program):
        self.program = program
        missing = {"variables", "parameters", "state", "paths"} - program.info.keys()
        if missing:
            raise ProgramError(f"the program has no {min(missing)}: it can be inspected, but not run")
        self.variables = program.info["variables"]
        self.paths = program.info["paths"]
        self.device = device_of(program.info.get("device", "cpu"))
        self.kernels: Any = self.device.prepare(program)
        self.table_address = self.kernels.address
        self.forms = {name: tuple(Affine(*form) for form in facts["shape"]) for name, facts in self.variables.items()}
        self._shapes: dict[tuple[str, int], tuple[int, ...]] = {}
        self._rows: dict[int, tuple[np.ndarray, int]] = {}
        self._kept: dict[tuple[str, Any], Any] = {}
        self.sheet: Any = None  # the program's data for compiled methods (a `ProgramSheet`), once needed
        self._spans = {path: _spans(program, path) for path in program.paths}
        lasting = [s for s in program.symbols if s.persistent]
        kept = [s for s in lasting if s.start < program.heap_bytes]
        self.paged = _hull([s for s in lasting if s.start >= program.heap_bytes])
        self.image = _hull([s for s in kept if s.kind != "gradient"])
        self.gradient = _hull([s for s in kept if s.kind == "gradient"])
        self.opened = _hull(kept)
        self.padding = _padding(-(-self.image[1] // program.itemsize), [s for s in kept if s.kind == "gradient"])
        if self.gradient[0] < self.image[1] and self.image[0] < self.gradient[1]:
            raise ProgramError("the program's gradients lie between its parameters: compile the graph again")
        self.accumulating = {path for path, facts in self.paths.items() if facts.get("accumulate")}

    def image_bytes(self, open: bool) -> int:  # noqa: A002
        """Size of an image in bytes."""
        start, stop = self.opened if open else self.image
        return stop - start + self.paged[1] - self.paged[0]

    def in_image(self, symbol: Symbol) -> slice:
        """The bytes of a persistent symbol in an image with gradients."""
        start, stop = self.opened
        at = symbol.start - start if symbol.start < stop else symbol.start - self.paged[0] + stop - start
        return slice(at, at + symbol.bytes.b)

    def rows(self, batch: int) -> tuple[np.ndarray, int]:
        """Rows for ``batch`` (shared and read-only) and their address on the device."""
        kept = self._rows.get(batch)
        if kept is None:
            if len(self._rows) >= KEPT_BATCHES:
                self._rows.pop(next(iter(self._rows)), None)
            rows = self.program.rows_for(batch)
            if batch == self.program.batch_size and self.program.info.get("specialize"):
                rows = joined(
                    rows, {span: k for span, k in self.kernels.sections.items() if span[0] not in self._alone}
                )
            kept = self._rows[batch] = rows, self.device.place(rows, self.kernels)
        return kept

    def symbol(self, variable: str) -> Symbol:
        """The place of a variable's value (CalcError: it has none)."""
        facts = self.variables[variable]
        if facts["symbol"] is None:
            raise CalcError(f"{variable!r} has no value: it is {facts['unreadable']}")
        symbol = self.program.symbols[facts["symbol"]]
        return replace(symbol, layout=facts["layout"]) if "layout" in facts else symbol

    @kept
    def computed(self, path: str, output: str) -> Symbol:
        """The symbol in which later rows find an output; users see a copy of it, if its storage order is another."""
        shown = self.variables[output]["symbol"]
        source = self.program.copied_from(path, shown)
        return self.symbol(output) if source == shown else self.program.symbols[source]

    def shape(self, variable: str, batch: int) -> tuple[int, ...]:
        """Shape of a variable for a batch."""
        shape = self._shapes.get((variable, batch))
        if shape is None:
            shape = self._shapes[variable, batch] = tuple(form.at(batch) for form in self.forms[variable])
        return shape

    @cached_property
    def own_types(self) -> dict[str, str]:
        """Types of variables that do not have the heap's float type."""
        places = {name: facts["symbol"] for name, facts in self.variables.items() if facts["symbol"] is not None}
        dtypes = {name: self.program.symbols[k].dtype for name, k in places.items()}
        return {name: dtype for name, dtype in dtypes.items() if dtype != self.program.dtype}

    @cached_property
    def columns(self) -> frozenset[str]:
        """Placeholders with one number per sample, shape (B, 1); they also accept data of shape (n,)."""
        one = ((1, 0), (0, 1))
        kinds = {name: facts["kind"] for name, facts in self.variables.items()}
        return frozenset(
            name for name, form in self.forms.items()
            if kinds[name] == "placeholder" and tuple((size.a, size.b) for size in form) == one
        )  # fmt: skip

    def is_number(self, variable: str) -> bool:
        """Whether a variable is a single number for every batch."""
        return all((size.a, size.b) == (0, 1) for size in self.forms[variable])

    def has_samples(self, variable: str) -> bool:
        """Whether a variable's shape depends on the batch."""
        return any(size.a for size in self.forms[variable])

    # ------------------------------------------------------------ paths
    def path(self, path: str | None) -> str:
        """A path by name; the default is path learn if that trains, else the first path that does."""
        name: Any = path
        if path is None:
            trained = [p for p, facts in self.paths.items() if facts["backward"]]
            name = "learn" if "learn" in trained else next(iter(trained), None)
        if not isinstance(name, str) or name not in self._spans:
            there = f"no path {checks.shown(path)}; there are {', '.join(self._spans)}"
            there += "; of data, model.predict(X) gives the outputs" * hasattr(path, "shape")
            raise CalcError("no path trains" if path is None else there)
        return name

    def training(self, path: str | None) -> Any:
        """Facts of a training path."""
        name = self.path(path)
        if not self.paths[name]["backward"]:
            raise CalcError(f"path {name!r} does not train; paths: {', '.join(self.paths)}")
        return self.paths[name]

    @kept
    def least(self, path: str) -> tuple[int, str, str]:
        """The smallest batch that a path can train with, the layer that needs it, and why not a smaller one."""
        program, found = self.program, (1, "", "")
        for pc in (pc for span in self.round(path, *PHASES) for pc in range(*span)):
            for text, says in (spec := program.spec(pc)).useful:
                words = ((n, decode_row(spec, program.rows_for(n)[pc])[0]) for n in range(1, program.batch_size))
                least = next((n for n, at in words if evaluate(text, at) >= 0), program.batch_size)
                found = max(found, (least, program.labels[pc], says))
        return found

    def check_trains(self, path: str, batch: int, of: int = 0) -> None:
        """Check that a path can train with a batch, which is the last one of ``of`` samples (0: the only one)."""
        least, layer, says = self.least(path)
        if batch < least:
            where = f"the last batch, {batch} of {of} samples," if of else f"a batch of {batch}"
            remedy = (
                "take another batch_size, or leave out or add a sample" if of else f"train on {least} samples or more"
            )
            raise ShapeError(f"{layer}: in {where} {says}: {remedy}")

    @cached_property
    def hyper(self) -> dict[str, dict[str, Slot]]:
        """For each path the hyperparameters that affect it, and their valid values."""
        program = self.program
        out: dict[str, dict[str, Slot]] = {path: {} for path in program.paths}
        decays = [pc for pc in range(len(program.rows)) if program.spec(pc).name == DECAY_ROW]
        spared = {program.symbol_of(pc, "scaled") for pc in decays}
        for (path, _), section in program.sections.items():
            for pc in range(*section):
                spec = program.spec(pc)
                if any(operand.name == "hyper" for operand in spec.operands):
                    slots = slots_of(spec, decode_row(spec, program.rows[pc])[0])
                    if program.symbol_of(pc, "hyper") in spared:
                        slots.pop("weight_decay", None)
                    out[path] |= slots
        return out

    @cached_property
    def probabilities(self) -> frozenset[str]:
        """Placeholders whose values a loss uses as probabilities."""
        found, casts = set[int](), dict[int, int]()  # indexes of symbols; results of casts -> their inputs
        for pc in range(len(self.program.rows)):
            name = stem_of(self.program.spec(pc).name)
            if name in PROBABILITIES:
                found.add(self.program.symbol_of(pc, PROBABILITIES[name]))
            elif name == CAST_ROW:
                casts[self.program.symbol_of(pc, "y")] = self.program.symbol_of(pc, "x")
        found |= {casts[symbol] for symbol in found if symbol in casts}
        placeholders = {name: facts for name, facts in self.variables.items() if facts["kind"] == "placeholder"}
        return frozenset(name for name, facts in placeholders.items() if facts["symbol"] in found)

    def span(self, path: str, phases: tuple[str, ...]) -> Span:
        """The rows of adjacent phases of a path."""
        spans = self._spans[self.path(path)]
        return spans[phases[0]][0], spans[phases[-1]][1]

    def round(self, path: str, *phases: str) -> list[Span]:
        """The rows of a round: first those that compute results that phases of ``path`` read, then these phases."""
        return [*(self.span(*other) for other in self.before(path, phases)), self.span(path, phases)]

    def making(self, path: str, name: str, totals: Iterable[str]) -> list[int]:
        """Rows of a path that compute a result from other results of the path, in order."""
        program, variables = self.program, self.variables
        wanted, ends = {variables[name]["symbol"]}, {variables[t]["symbol"] for t in totals}
        rows: list[int] = []
        for pc in reversed(range(*self.span(path, FORWARD))):
            operands = program.spec(pc).operands
            if any(o.writes and program.symbol_of(pc, o.name) in wanted - ends for o in operands):
                rows.insert(0, pc)
                wanted |= {program.symbol_of(pc, o.name) for o in operands if o.reads}
        return rows

    @cached_property
    def _alone(self) -> set[int]:
        """Rows that run alone, to compute a result from totals."""
        results = [(facts["path"], name, facts.get("totals")) for name, facts in self.variables.items()]
        return {pc for path, name, totals in results if totals for pc in self.making(path, name, totals)}

    @kept
    def needs(self, path: str, phases: tuple[str, ...] = PHASES) -> tuple[str, ...]:
        """Variables that phases of a path read and do not compute: placeholders, and other paths' results."""
        sections = self.paths[path]["needs"]
        return (*dict.fromkeys(name for phase in phases for name in sections.get(phase, ())),)

    @kept
    def makes(self, path: str, phases: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
        """Sections of a path whose results exist once these phases have run; empty sections need not run."""
        spans = self._spans[path]
        return tuple((path, phase) for phase in FORWARD if phase in phases or spans[phase][0] == spans[phase][1])

    @kept
    def before(self, path: str, phases: tuple[str, ...] = PHASES) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Paths and phases that compute the values read by phases of a path, in execution order."""
        wanted, todo = dict[str, tuple[str, ...]](), [*self.needs(path, phases)]
        while todo:
            facts = self.variables[todo.pop()]
            other = facts["path"]
            if other is not None:
                making = FORWARD[: FORWARD.index(facts["phase"]) + 1]
                if len(making) > len(wanted.get(other, ())):
                    wanted[other] = making
                    todo += self.needs(other, making)
        return tuple((p, wanted[p]) for p in self.program.paths if p in wanted)

    @kept
    def feeds(self, path: str, phases: tuple[str, ...] = PHASES) -> tuple[str, ...]:
        """Placeholders that a round of phases of a path needs, in order of declaration."""
        read = {name for p in (*self.before(path, phases), (path, phases)) for name in self.needs(*p)}
        return tuple(name for name, facts in self.variables.items() if name in read and facts["kind"] == "placeholder")

    @cached_property
    def initializers(self) -> dict[str, Initializer]:
        """Initializers of the parameters, buffers and carries that have one, by name."""
        info = self.program.info
        starts = {
            name: facts["init"]
            for kind in ("parameters", "buffers", "carries")
            for name, facts in info.get(kind, {}).items()
        }
        return {name: initializer(dict(start)) for name, start in starts.items() if "array" not in start}

    @cached_property
    def starts(self) -> dict[str, float]:
        """The number from which all elements of a variable start."""
        return {name: float(made.value) for name, made in self.initializers.items() if isinstance(made, Constant)}

    def rows_at(self, path: str, batch: int, place: int) -> tuple[np.ndarray, int]:
        """As `rows`, for samples whose states (`calcvm.carry`) are those of ``place`` and the next ones; made for each call.

        Only the rows of a path's forward are there, so that those of many streams take little of the caches: 4000 streams in turn
        take 0.32 us each, with all rows of their small program 0.73 (Zen 4).
        """
        if place == 0:
            return self.rows(batch)
        spans = np.array(self.round(path, *FORWARD[:1]))
        start, stop = spans.min(), spans.max()
        rows = copied(self.program.rows_for(batch, place)[start:stop])
        return rows, self.device.place(rows, self.kernels) - int(start) * self.program.row_bytes

    @kept
    def carried(self, path: str) -> tuple[str, ...]:
        """Carries that a path's forward changes, and the paths' whose results it reads."""
        program, written = self.program, set[int]()
        for pc in (pc for span in self.round(path, *FORWARD[:1]) for pc in range(*span)):
            written |= {program.symbol_of(pc, o.name) for o in program.spec(pc).operands if o.writes}
        return tuple(name for name in program.info.get("carries", ()) if self.variables[name]["symbol"] in written)

    def most_steps(self, path: str) -> float:
        """The most steps from the start on for which a path's carries have room."""
        carries = self.program.info.get("carries", {})
        return min(
            (carries[name]["steps"] for name in self.carried(path) if "steps" in carries[name]), default=float("inf")
        )

    @cached_property
    def changes(self) -> frozenset[str]:
        """Paths that change the model; all others only read it."""
        sections = self.program.sections.items()
        return frozenset(path for (path, _), (start, stop) in sections if self._changing[start:stop].any())

    # ------------------------------------------------------------ slices
    @cached_property
    def _changing(self) -> np.ndarray:
        return changing(self.program)

    @cached_property
    def _seconds(self) -> np.ndarray:
        return seconds_of(self.program)

    @cached_property
    def short(self) -> int:
        """A number of runs of all rows that certainly takes less than a slice."""
        return int(min(SLICE_SECONDS / max(self._seconds.sum(), 1e-12), 2**62))

    @kept
    def runs(self, *spans: Span) -> int:
        """A number of runs of spans of rows that certainly takes less than a slice; at least one."""
        seconds = sum(float(self._seconds[start:stop].sum()) for start, stop in spans)
        return max(1, int(SLICE_SECONDS / max(seconds, 1e-12)))

    @kept
    def brief(self, path: str, phases: tuple[str, ...]) -> int:
        """The largest batch for which phases of a path are so short that one worker runs them."""
        return brief_batch(self.program, self.span(path, phases)) if self.device.stops else 0

    def meets(self, span: Span, workers: int) -> bool:
        """Whether the rows have a barrier, where workers can agree to stop."""
        rows = self.program.rows[slice(*span)]
        return self.device.stops and workers > 1 and bool((rows[:, 1] & FLAG_SYNC).any())

    @kept
    def cut(self, spans: tuple[Span, ...], workers: int) -> tuple[list[Span], int]:
        """Spans cut into parts (see `slices.cut`), if the device can stop between rows."""
        if not self.device.stops:
            return [*spans], 1
        return cut(spans, self.program.rows, self._seconds, self._changing, workers)


def _spans(program: Program, path: str) -> dict[str, Span]:
    spans, at = {}, 0
    for phase in PHASES:
        spans[phase] = program.sections.get((path, phase), (at, at))
        at = spans[phase][1]
    return spans


def _hull(symbols: list[Symbol]) -> Span:
    """The bytes from the first to the last cell of symbols."""
    if not symbols:
        return 0, 0
    return min(s.start for s in symbols), max(s.start + s.bytes.b for s in symbols)


def _padding(start: int, gradients: list[Symbol]) -> np.ndarray:
    """Elements from ``start`` to the last gradient that belong to no gradient."""
    gaps = [np.zeros(0, np.int64)]
    for symbol in sorted(gradients, key=lambda s: s.offset):
        if not symbol.members:
            gaps.append(np.arange(start, symbol.offset))
            start = symbol.offset + symbol.elems.b
    return np.concatenate(gaps)
