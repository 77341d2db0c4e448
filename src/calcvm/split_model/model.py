"""A network on several devices: one program and one heap per device, and copies between them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np

from calcvm import checks, hints
from calcvm.compiler import compile as compile_graph
from calcvm.errors import CalcError, Uncopied
from calcvm.model import CalcHeap
from calcvm.ops.statement import PHASES, Value
from calcvm.planner import Plan
from calcvm.planner.split.problem import shared_values
from calcvm.split_model.parts import Copy, Stretch
from calcvm.split_model.plan import SplitPlan
from calcvm.split_model.processor import Processor, on_cores
from calcvm.system import give_back
from calcvm.vm.memory.cuda import DeviceMemory
from calcvm.vm.memory.slot import HostMemory, Memory
from calcvm.vm.program.assemble import assemble
from calcvm.vm.program.program import Symbol
from calcvm.vm.run import job as J
from calcvm.vm.run.device import Cpu, device_of
from calcvm.vm.run.loaded import FORWARD, Loaded
from calcvm.without_signals import without_signals

NOTHING: dict[str, Any] = {
    "part": True,
    "variables": {},
    "parameters": {},
    "state": [],
    "paths": {},
}  # the facts of the graph in a part's program


class Part:
    """The part of one processor: its program, in its own heap."""

    def __init__(self, processor: Processor, plan: Plan, dtype: str):
        self.processor = processor
        mode = {"mode": "grid", "precision": "float32"} if processor.device == "cuda" else {}
        self.program = assemble(plan.lowered, plan, dtype, {**NOTHING, "device": processor.device, **mode})
        self.symbols = dict(zip((v for v in plan.lowered.values if v in plan.offsets), self.program.symbols))
        self.loaded = Loaded(self.program)
        self.memory: Memory
        if processor.device == "cuda":
            self.memory = DeviceMemory(cast(Any, device_of("cuda")), self.program.heap_bytes)
        else:
            self.loaded.device = Cpu("cpu", f"split {processor.cores}" if processor.cores else "team")
            self.memory = HostMemory(self.program.heap_bytes)
        self.slot = self.memory.slot(self.loaded, 0, self.program.heap_bytes)
        self.slot.clear()
        self.slot.clear_padding()

    def run(self, start: int, stop: int, batch: int) -> None:
        """Run the rows [start, stop) of its program."""
        _, address = self.loaded.rows(batch)
        self.slot.job[J.ROWS : J.STEPS + 1] = address, start, stop, 1
        with on_cores(self.processor.cores):
            self.slot.execute("run_rows", self.slot.job, self.slot.job_address, self.processor.workers)

    def get(self, v: Value, batch: int) -> np.ndarray:
        """A value's cells in storage order."""
        symbol = self._flat(v)
        return self.slot.cells(symbol, (symbol.elems.at(batch),))

    def put(self, v: Value, cells: np.ndarray, batch: int) -> None:
        symbol = self._flat(v)
        self.slot.write(symbol, cells, (symbol.elems.at(batch),))

    def _flat(self, v: Value) -> Symbol:
        return replace(self.symbols[v], layout="")


@hints.names_of_others
class SplitModel(Uncopied):
    """A network on several devices.

    Threads may share it: calls run one after the other.  On Ctrl-C a step is either done or not begun: one that has begun goes on,
    and the next call waits for it.  During construction, persistent values are in memory twice.

    Parameters
    ----------
    plan : SplitPlan
        The result of `plan_devices`.
    seed : int
        As in `CalcHeap.create`: a model with the same seed on one device starts with the same parameters, and training keeps them equal.

    Examples
    --------
    >>> graph = cv.build_graph(nn.Linear(64) >> nn.ReLU() >> nn.Linear(10), (64,), "mse", cv.SGD(0.1))
    >>> plan = cv.plan_devices(graph, [cv.Processor("a", memory="1 MiB"), cv.Processor("b", memory="1 MiB")], batch_size=32)
    >>> model = cv.SplitModel(plan)
    >>> loss = model.step(np.ones((32, 64)), np.ones((32, 10)))
    """

    _instead = "its state() is, and another one has its own"

    def __init__(self, plan: SplitPlan, seed: int = 0):
        self.plan = checks.one_of("SplitModel", plan, SplitPlan, "a plan (cv.plan_devices)")
        # the model on one device supplies names, shapes and initial values; only the persistent part of its heap is touched
        program = compile_graph(
            plan.graph, batch_size=plan.batch_size, dtype=plan.dtype, workers=1, accumulate=plan.accumulate
        )
        self._whole = CalcHeap(program.heap_bytes).create(program, seed)
        self._parts = [
            None if each is None else Part(processor, each, plan.dtype)
            for processor, each in zip(plan.processors, plan.plans)
        ]
        self._batch = 0
        self._turn = threading.Lock()
        common = shared_values(plan.whole)
        self._value_of = {v.name: i for i, v in enumerate(common)}
        self._made = {
            i: d
            for d, st in zip(plan.where, plan.whole.statements)
            for v in st.written_values
            if (i := self._value_of[v.name]) not in plan.home
        }
        for i in plan.home:
            name = common[i].name
            symbol = program.by_name.get(name)
            if symbol is not None and symbol.persistent:
                part, own = self._at(name)
                part.put(own, self._whole.slot.cells(replace(symbol, layout=""), (symbol.elems.b,)), 1)
        give_back(self._whole.slot.bytes)

    def _at(self, name: str) -> tuple[Part, Value]:
        """The part that holds a value, and the value there."""
        i = self._value_of[name]
        d = self.plan.home.get(i, self._made.get(i, 0))
        part = self._parts[d]
        assert part is not None
        own = next(v for v in part.symbols if v.name == name)
        return part, own

    def step(self, *data: Any, path: str | None = None) -> float | None:
        """One training step on a batch of at most ``batch_size`` samples; returns the loss (None: the path has none).

        Parameters
        ----------
        data : arrays for the placeholders of the path that trains, in the order of their declaration.
        """
        whole = self._whole
        path = whole.loaded.path(path)
        whole.loaded.training(path)
        arrays, batch = self._checked(path, PHASES, data)
        whole.loaded.check_trains(path, batch)
        loss = whole.loaded.paths[path].get("loss")

        def step() -> Any:
            with self._turn:
                self._run(path, PHASES, arrays, batch)
                return None if loss is None else float(np.asarray(self._value(loss)).item())

        return without_signals(step)

    def run(self, path: str, *data: Any) -> Any:
        """Run a path's forward on a batch, and its loss if data for it are given; returns the output."""
        loaded = self._whole.loaded
        path = loaded.path(path)
        phases = FORWARD[:1] if len(data) == len(loaded.feeds(path, FORWARD[:1])) else FORWARD
        arrays, batch = self._checked(path, phases, data)
        output = loaded.paths[path]["output"]

        def run() -> Any:
            with self._turn:
                self._run(path, phases, arrays, batch)
                return None if output is None else self._value(output)

        return without_signals(run)

    def _checked(self, path: str, phases: tuple[str, ...], data: tuple[Any, ...]) -> tuple[dict[str, np.ndarray], int]:
        """The arrays by placeholder, and their batch."""
        whole = self._whole
        names = whole.loaded.feeds(path, phases)
        if len(data) != len(names):
            raise CalcError(f"path {path!r} takes {len(names)} arrays ({', '.join(names)}), not {len(data)}")
        arrays = {name: whole.numbers(name, array) for name, array in zip(names, data)}
        batches = whole.check_batch(arrays)
        return arrays, next((batches[name] for name in names if whole.loaded.has_samples(name)), self.plan.batch_size)

    def _run(self, path: str, phases: tuple[str, ...], arrays: Mapping[str, np.ndarray], batch: int) -> None:
        self._batch = batch
        for name, array in arrays.items():
            part, own = self._at(self._whole.loaded.symbol(name).name)
            part.slot.write(part.symbols[own], array, array.shape)
        for other, of in (*self._whole.loaded.before(path, phases), (path, phases)):
            for phase in of:
                for event in self.plan.parts.schedule.get((other, phase), ()):
                    self._do(event)

    def _do(self, event: Stretch | Copy) -> None:
        if isinstance(event, Stretch):
            part = self._parts[event.device]
            assert part is not None
            part.run(event.start, event.stop, self._batch)
            return
        source, target = self._parts[event.source], self._parts[event.target]
        assert source is not None and target is not None
        target.put(event.into, source.get(event.value, self._batch), self._batch)

    def __getitem__(self, name: str) -> Any:
        """A copy of a variable's value."""
        with self._turn:
            return self._value(name)

    def _value(self, name: str) -> Any:
        whole = self._whole
        facts = whole._variable(name)
        if facts["unreadable"]:
            raise CalcError(f"{name!r} cannot be read: its value is {facts['unreadable']}")
        symbol = whole.loaded.symbol(name)
        part, own = self._at(symbol.name)
        shape = whole.loaded.shape(name, self._batch or 1)
        value = part.slot.cells(replace(part.symbols[own], layout=symbol.layout), shape)
        return value.copy() if value.ndim else value[()]

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """Copies of the parameters, by name."""
        with self._turn:
            return {name: self._value(name) for name in self._whole.program.info["parameters"]}

    def state(self) -> dict[str, np.ndarray]:
        """Copies of all persistent values (parameters, buffers, optimizer state, counters), by their names in the program."""
        out = {}
        with self._turn:
            for symbol in self._whole.program.symbols:
                if symbol.persistent and not symbol.members and symbol.name in self._value_of:
                    part, own = self._at(symbol.name)
                    out[symbol.name] = part.get(own, 1).copy()
        return out

    def __repr__(self) -> str:
        return f"<SplitModel: {', '.join(f'{n} {b:,} bytes' for n, b in self.plan.heap_bytes.items())}>"
