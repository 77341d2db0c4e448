"""A program loaded in a heap: its variables by name, its sections to run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from calcvm import init as initializers
from calcvm.errors import CalcError, MissingExtra, ProgramError, ShapeError, Trap
from calcvm.kernels_cpu import address_of
from calcvm.ops.dims import Affine, show
from calcvm.ops.optimizers import HYPER_SLOTS
from calcvm.ops.spec import OPCODES
from calcvm.ops.statement import PHASES
from calcvm.vm import job as layout
from calcvm.vm.heap import CalcHeap
from calcvm.vm.program import Program, Symbol
from calcvm.vm.team import team

TRAPS = {1: "a target label is not an integer in [0, classes)"}


class Hyper(MutableMapping):
    """Hyperparameters of a path, by name: values in the heap, effective from the next step on."""

    def __init__(self, slots: np.ndarray):
        self._slots = slots

    def __getitem__(self, name: str) -> float:
        return float(self._slots[self._index(name)])

    def __setitem__(self, name: str, value: float) -> None:
        if not np.isfinite(value):
            raise CalcError(f"hyperparameter {name!r}: {value!r} is not a finite number")
        self._slots[self._index(name)] = value

    def __delitem__(self, name: str) -> None:
        raise CalcError(f"hyperparameter {name!r} cannot be removed; set it")

    def __iter__(self) -> Iterator[str]:
        return iter(HYPER_SLOTS)

    def __len__(self) -> int:
        return len(HYPER_SLOTS)

    def __repr__(self) -> str:
        return f"Hyper({dict(self)})"

    @staticmethod
    def _index(name: str) -> int:
        if name not in HYPER_SLOTS:
            raise CalcError(f"no hyperparameter {name!r}; there are {', '.join(HYPER_SLOTS)}")
        return HYPER_SLOTS.index(name)


class Resident:
    """A model: a program and its piece of a heap.

    ``model[name]`` reads a variable, ``model[name] = array`` sets a placeholder; `forward`, `backward`,
    `optimize` and `end_round` run a path's sections, `run_steps` whole steps.
    """

    def __init__(self, program: Program, heap: CalcHeap, *, seed: int = 0, workers: int | None = None):
        if workers is not None and not 1 <= workers <= program.workers:
            raise CalcError(
                f"workers={workers}: the program was planned for 1 to {program.workers}; compile with workers={workers}"
            )
        self.program, self.heap, self.workers = program, heap, workers or program.workers
        self.seed = seed
        self._start, piece = heap.take(program.heap_bytes)
        self.elements = piece.view(program.dtype)
        self._rows = program.rows.copy()
        self._rows_batch = program.batch_size
        self._table = _kernel_table(program)
        self._job = np.zeros(layout.JOB_WORDS, np.int64)
        self._job_address, self._rows_address = self._job.ctypes.data, self._rows.ctypes.data
        self.table_address, self.heap_address = self._table.ctypes.data, self.elements.ctypes.data
        self._job[[layout.TABLE, layout.HEAP]] = self.table_address, self.heap_address
        self._symbols = {s.name: s for s in program.symbols}
        self._variables: Mapping[str, Any] = program.info["variables"]
        self._set_batch: dict[str, int] = {}  # placeholders that hold data: the batch it has
        self._ran: dict[str, int] = {}  # paths that were run: the batch
        self._arena = ""  # the path whose transient values the heap holds
        self._inputs = _placeholders_of_paths(program)
        self._spans = {path: _spans(program, path) for path in program.paths}
        self.reset(seed)

    # ------------------------------------------------------------ start and end
    def reset(self, seed: int) -> None:
        """Initialize parameters, optimizer state and counters as `CalcHeap.load` with ``seed`` does."""
        self.seed = seed
        self.elements[:] = 0
        self._set_batch.clear()
        self._ran.clear()
        info = self.program.info
        for i, (name, facts) in enumerate(info["parameters"].items()):
            self._set_parameter(name, facts["init"], np.random.default_rng([seed, i]))
        for name, facts in info["state"].items():
            self._set_state(name, facts)

    def _set_parameter(self, name: str, spec: Mapping[str, Any], rng: np.random.Generator) -> None:
        view = self._view(self._symbols[name])
        if "array" in spec:
            view[...] = self.program.constants[spec["array"]]
        else:
            kind = getattr(initializers, spec["class"], None)
            if not (isinstance(kind, type) and issubclass(kind, initializers.Initializer)):
                raise ProgramError(f"parameter {name!r}: no initializer is called {spec['class']!r}")
            view[...] = kind(**spec["fields"])(view.shape, rng)

    def _set_state(self, name: str, facts: Mapping[str, Any]) -> None:
        symbol = self._symbols.get(name)
        if symbol is None:
            return
        cells = self.elements[symbol.offset : symbol.offset + symbol.elems.b]
        kind = facts["kind"]
        if kind == "hyper":
            cells.view(np.float64)[:] = [facts["slots"][slot] for slot in HYPER_SLOTS]
        elif kind == "rng":
            cells.view(np.int64)[:] = self.seed, 0
        elif kind == "float64":
            cells.view(np.float64)[:] = facts["value"]
        elif kind == "constant":
            cells[:] = self.program.constants[facts["array"]].reshape(-1)
        else:  # seed, fill
            cells[:] = facts.get("value", 1.0)

    def close(self) -> None:
        """Give the model's piece of the heap back; the model cannot be used afterwards."""
        self.heap.release(self._start)
        self.elements = self.elements[:0]

    # ------------------------------------------------------------ variables
    def _variable(self, name: str) -> Mapping[str, Any]:
        try:
            return self._variables[name]
        except KeyError:
            raise CalcError(f"no variable {name!r}; there are {', '.join(self._variables)}") from None

    def _view(self, symbol: Symbol, batch: int = 1, shape: Any = None) -> np.ndarray:
        forms = symbol.shape if shape is None else [Affine(*s) for s in shape]
        sizes = tuple(s.at(batch) for s in forms)
        n = int(np.prod(sizes, dtype=np.int64))
        return self.elements[symbol.offset : symbol.offset + n].reshape(sizes)

    def __getitem__(self, name: str) -> Any:
        """A copy of a variable's value; a parameter's or constant's is a view into the heap."""
        facts = self._variable(name)
        if facts["unreadable"]:
            raise CalcError(
                f"{name!r} cannot be read: its value is {facts['unreadable']}; compile with keep=[{name!r}]"
            )
        symbol = self._symbols[facts["symbol"]]
        if facts["kind"] in ("parameter", "constant", "state"):
            return self._view(symbol, 1, facts["shape"] if facts["kind"] != "state" else None)
        if facts["kind"] == "placeholder":
            return self._view(symbol, self._set_batch.get(name, self.program.batch_size), facts["shape"]).copy()
        path = facts["path"]
        if path not in self._ran:
            raise CalcError(f"{name!r} belongs to path {path!r}, which has not been run: call forward({path!r}) first")
        value = self._view(symbol, self._ran[path], facts["shape"])
        return value.copy() if value.ndim else value[()]

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a placeholder; the first size of the batch may be anything up to the planned batch."""
        facts = self._variable(name)
        if facts["kind"] != "placeholder":
            how = "change it through model.parameters" if facts["kind"] == "parameter" else "only placeholders are set"
            raise CalcError(f"{name!r} is a {facts['kind']}: {how}")
        array = np.asarray(value)
        batch = self.check(name, array)
        self._view(self._symbols[facts["symbol"]], batch, facts["shape"])[...] = array
        self._set_batch[name] = batch

    def check(self, name: str, array: np.ndarray, samples: bool = False) -> int:
        """The batch size of data for a placeholder; raises where dtype, rank, sizes or labels do not fit.

        samples : the array is a data set, whose number of samples has no limit.
        """
        facts = self._variable(name)
        shape = tuple(Affine(*s) for s in facts["shape"])
        if array.dtype.kind not in "fiub":
            raise CalcError(f"{name!r}: data of dtype {array.dtype} cannot be used; give numbers")
        if array.ndim != len(shape):
            raise ShapeError(f"{name!r}: data of shape {array.shape} has rank {array.ndim}, {show(shape)} is wanted")
        batch = next((n // s.a for s, n in zip(shape, array.shape) if s.a), 1)
        if array.size == 0:
            raise CalcError(f"{name!r}: the data are empty (shape {array.shape}); {show(shape)} is wanted")
        if array.shape != tuple(s.at(batch) for s in shape):
            raise ShapeError(f"{name!r}: data of shape {array.shape} do not fit {show(shape)}")
        if not samples and batch > self.program.batch_size:
            raise CalcError(
                f"{name!r}: a batch of {batch} is above the planned {self.program.batch_size}; "
                f"compile with batch_size={batch} or give smaller batches"
            )
        if facts["classes"] is not None:
            _check_labels(name, array, facts["classes"])
        return batch

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """Parameters by name, as views into the heap."""
        return {name: self._view(self._symbols[name]) for name in self.program.info["parameters"]}

    def grad(self, name: str, path: str | None = None) -> np.ndarray:
        """A copy of a parameter's gradient after `backward`.

        Raises
        ------
        CalcError : the parameter is frozen, or is updated inside the backward (its gradient is gone).
        """
        gradients = self._facts(path)["gradients"]
        if name not in gradients:
            raise CalcError(f"{name!r} has no gradient; these have one: {', '.join(gradients) or 'none'}")
        if gradients[name] is None:
            raise CalcError(
                f"the gradient of {name!r} is used up by the update inside the backward; compile with accumulate=True"
            )
        return self._view(self._symbols[gradients[name]]).copy()

    def hyper(self, path: str | None = None) -> Hyper:
        """Hyperparameters of the path that trains."""
        symbol = self._symbols[self._facts(path)["hyper"]]
        return Hyper(self.elements[symbol.offset : symbol.offset + symbol.elems.b].view(np.float64))

    def settle(self, path: str) -> None:
        """Drop what rounds have added up, and weigh the next one in full: the state between two learning batches."""
        facts = self._facts(path)
        if facts["accumulate"]:
            self._view(self._symbols[facts["seed"]])[...] = 1
            for gradient in facts["gradients"].values():
                self._view(self._symbols[gradient])[...] = 0

    def _facts(self, path: str | None) -> Mapping[str, Any]:
        paths = self.program.info["paths"]
        path = path or next((p for p, facts in paths.items() if facts["backward"]), None)
        if path is None or path not in paths or not paths[path]["backward"]:
            raise CalcError(f"path {path!r} does not train; paths: {', '.join(paths)}")
        return paths[path]

    # ------------------------------------------------------------ running
    def forward(self, path: str) -> None:
        """Run a path's forward and loss sections on the data in its placeholders."""
        self._run(path, "forward", "loss")

    def backward(self, path: str) -> None:
        """Gradients of the loss; they add up until `end_round` where the program accumulates."""
        self._needs_forward(path)
        if self._arena != path:
            raise CalcError(
                f"path {self._arena!r} has run since forward({path!r}), and paths share the memory of what they "
                f"compute: call forward({path!r}) again before backward({path!r})"
            )
        self._run(path, "backward")

    def optimize(self, path: str) -> None:
        """Update the parameters."""
        self._needs_forward(path)
        self._run(path, "optimize")

    def end_round(self, path: str) -> None:
        """Clear the gradients for the next learning batch."""
        self._run(path, "end_round")

    def run_steps(self, n: int, path: str | None = None) -> float | None:
        """Run ``n`` whole steps on the data in the heap, in one call; returns the last loss."""
        path = path or next(iter(self.program.paths))
        self._run(path, *PHASES, steps=n)
        loss = self.program.info["paths"].get(path, {}).get("loss")
        return float(self[loss]) if loss else None

    def run_section(self, path: str, phase: str) -> None:
        """Run one section of a path."""
        self._run(path, phase)

    def _needs_forward(self, path: str) -> None:
        if path not in self._ran:
            raise CalcError(f"path {path!r} has not been run forward: call forward({path!r}) first")

    def _span(self, path: str, phases: tuple[str, ...]) -> tuple[int, int]:
        if path not in self._spans:
            raise CalcError(f"no path {path!r}; there are {', '.join(self._spans)}")
        spans = [self._spans[path][p] for p in phases]
        return spans[0][0], spans[-1][1]

    def _run(self, path: str, *phases: str, steps: int = 1) -> None:
        start, stop = self._span(path, phases)
        batch = self._batch_of(path)
        if batch != self._rows_batch:
            self.program.patch(self._rows, batch)
            self._rows_batch = batch
        job = self._job
        job[layout.ROWS], job[layout.START], job[layout.STOP], job[layout.STEPS] = (
            self._rows_address,
            start,
            stop,
            steps,
        )
        self._ran[path], self._arena = batch, path
        self.execute("run_rows", job, self._job_address)

    def execute(self, code: str, job: np.ndarray, address: int) -> None:
        """Run the job at ``address`` by ``code`` with the model's workers, and raise what a kernel trapped."""
        team().run(code, job, address, self.workers)
        if self.elements[0]:
            self._raise_trap()

    def _batch_of(self, path: str) -> int:
        """The batch of the data that a path's placeholders hold."""
        batch = 0
        for name in self._inputs[path]:
            n = self._set_batch.get(name)
            if n is None:
                raise CalcError(f"placeholder {name!r} was never set: model[{name!r}] = data")
            if batch and n != batch:
                sizes = ", ".join(f"{k!r}: {self._set_batch.get(k)}" for k in self._inputs[path])
                raise ShapeError(f"placeholders of path {path!r} hold batches of different sizes ({sizes})")
            batch = n
        return batch or self._rows_batch

    def _raise_trap(self) -> None:
        code, pc = int(self.elements[0]), int(self.elements[1])
        self.elements[:2] = 0
        row = OPCODES[int(self.program.rows[pc, 0])].name
        raise Trap(f"row {pc} ({row}, {self.program.labels[pc]}): {TRAPS.get(code, f'trap {code}')}")


def _check_labels(name: str, labels: np.ndarray, classes: int) -> None:
    low, high = labels.min(), labels.max()
    whole = labels.dtype.kind != "f" or bool((labels == np.floor(labels)).all())
    if not (low >= 0 and high < classes and whole):
        raise CalcError(f"{name!r}: labels must be integers in [0, {classes}); found {low} to {high}")


def _kernel_table(program: Program) -> np.ndarray:
    """Native addresses by opcode, of the opcodes the program uses."""
    opcodes = sorted({int(c) for c in program.rows[:, 0]})
    table = np.zeros(max(opcodes, default=0) + 1, np.int64)
    device = program.info.get("device", "cpu")
    try:
        for code in opcodes:
            table[code] = address_of(OPCODES[code].name, program.dtype, device)
    except ImportError as error:
        if device == "cpu":
            raise
        raise MissingExtra("scipy", device, f"the device {device!r}") from error
    return table


def _spans(program: Program, path: str) -> dict[str, tuple[int, int]]:
    spans, at = {}, 0
    for phase in PHASES:
        spans[phase] = program.sections.get((path, phase), (at, at))
        at = spans[phase][1]
    return spans


def _placeholders_of_paths(program: Program) -> dict[str, list[str]]:
    """For each path the placeholders whose batch its rows read."""
    out = {}
    for path in program.paths:
        rows = [program.operand_values[a:b] for (p, _), (a, b) in program.sections.items() if p == path]
        used = {int(i) for block in rows for i in np.unique(block) if i >= 0}
        names = [program.symbols[i] for i in sorted(used)]
        out[path] = [s.name for s in names if s.kind == "placeholder" and s.elems.a]
    return out
