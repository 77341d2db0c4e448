"""A model in a heap: its variables by name, its sections to run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, ShapeError
from calcvm.ops.dims import show
from calcvm.ops.optimizers import HYPER_SLOTS, SLOTS
from calcvm.ops.statement import PHASES
from calcvm.vm import job as layout
from calcvm.vm.binding import FORWARD, Binding
from calcvm.vm.device import heaps_of
from calcvm.vm.documents import initializer
from calcvm.vm.facts import Facts
from calcvm.vm.feeds import numbers
from calcvm.vm.frame import Frame, cells_of
from calcvm.vm.heap import CalcHeap, Tenant
from calcvm.vm.program import Program, Symbol

LARGEST_COUNT = 2**53  # that a float64 holds


class Hyper(MutableMapping):
    """Hyperparameters of a path, by name: values in the heap, effective from the next step on.

    Setting one that the path's optimizer, schedule and clipping do not read, or to a value they cannot have, is refused.
    """

    def __init__(self, model: Resident, symbol: Symbol, path: str):
        self._model, self._symbol, self._path = model, symbol, path

    def __getitem__(self, name: str) -> float:
        with self._model as frame:
            return float(self._slots(frame)[self._index(name)])

    def __setitem__(self, name: str, value: float) -> None:
        with self._model as frame:
            slots, i = self._slots(frame), self._index(name)
            if checks.is_number(value) and checks.plain(value) == float(slots[i]):  # as copying another model's does
                return
            slots[i] = self._checked(name, value)
            frame.write(self._symbol, slots.view(self._model.program.dtype), (self._symbol.elems.b,))
            self._model.tenant.changed = True

    def _checked(self, name: str, value: Any) -> float:
        known, what = self._model.binding.hyper[self._path], f"hyperparameter {name!r}"
        if name not in SLOTS:  # advanced by the program
            return checks.number(what, value)
        if name not in known:
            raise CalcError(
                f"{what} has no effect: path {self._path!r} was compiled with an optimizer, schedule and clipping that "
                f"read {', '.join(known)}"
            )
        slot = known[name]
        if slot.whole:
            value = checks.plain(value)
            n = int(value) if isinstance(value, float) and value.is_integer() else value
            return checks.integer(what, n, int(slot.low), LARGEST_COUNT)
        return checks.number(what, value, slot.low, slot.high, ends=slot.ends)

    def __delitem__(self, name: str) -> None:
        raise CalcError(f"hyperparameter {name!r} cannot be removed; set it")

    def __iter__(self) -> Iterator[str]:
        return iter(HYPER_SLOTS)

    def __len__(self) -> int:
        return len(HYPER_SLOTS)

    def __repr__(self) -> str:
        return f"Hyper({dict(self)})"

    def _slots(self, frame: Frame) -> np.ndarray:
        return frame.cells(self._symbol, (self._symbol.elems.b,)).view(np.float64)

    @staticmethod
    def _index(name: str) -> int:
        if not isinstance(name, str) or name not in HYPER_SLOTS:
            raise CalcError(f"no hyperparameter {checks.shown(name)}; there are {', '.join(HYPER_SLOTS)}")
        return HYPER_SLOTS.index(name)


class Resident:
    """A model: a program and its image, in a heap or for the time being in the heap's store.

    ``model[name]`` reads a variable, ``model[name] = array`` sets a placeholder; `forward`, `backward`,
    `optimize` and `end_round` run a path's sections, `step` and `run_steps` whole steps.  Using a model brings it
    into the heap; where that switches others out, their placeholders and results are forgotten.

    ``with model:`` keeps it in the heap meanwhile, so that views of its memory stay its own.
    """

    __slots__ = ("__weakref__", "heap", "tenant")

    def __init__(self, heap: CalcHeap, tenant: Tenant):
        self.heap, self.tenant = heap, tenant

    def __repr__(self) -> str:
        return f"<model {self.name!r}{' in the heap' if self.tenant.frame else ''}>"

    def __enter__(self) -> Frame:
        return self.heap.enter(self)

    def __exit__(self, *error: object) -> None:
        self.heap.leave(self)

    # ------------------------------------------------------------ what it is
    @property
    def name(self) -> str:
        return self.tenant.name

    @property
    def binding(self) -> Binding:
        if self.tenant.binding is None:
            raise CalcError(f"model {self.name!r} is closed")
        return self.tenant.binding

    @property
    def program(self) -> Program:
        return self.binding.program

    @property
    def workers(self) -> int:
        return self.tenant.workers

    @property
    def facts(self) -> Facts:
        """What the store keeps beside the image: the program's hash, the seed, the rounds done, settings (JSON-able)."""
        return self.tenant.facts

    @property
    def seed(self) -> int:
        return self.facts["seed"]

    @property
    def elements(self) -> np.ndarray:
        """The model's piece of the heap; a view, which is its own until it is switched out.

        Raises
        ------
        CalcError : the heap is not of the host's memory.
        """
        with self._on_host() as frame:
            self.tenant.exposed = True
            return frame.elements

    @property
    def heap_address(self) -> int:
        """Address of its piece of the heap, until it is switched out (CalcError: as `elements`)."""
        with self._on_host() as frame:
            return frame.address

    def _on_host(self) -> Resident:
        if heaps_of(self.heap.device.name) != "cpu":
            raise CalcError(
                f"model {self.name!r} is in the memory of device {self.heap.device.name!r}, which has no views: "
                "model[name] and model.parameters give copies"
            )
        return self

    # ------------------------------------------------------------ start and end
    def reset(self, seed: int) -> None:
        """Initialize parameters, optimizer state and counters as `CalcHeap.load` with ``seed`` does."""
        tenant, info = self.tenant, self.program.info
        seed = checks.integer("seed", seed, 0)
        with self as frame:
            tenant.facts.update(seed=seed, rounds=0)
            elements = frame.blank()
            tenant.forget()
            tenant.changed, tenant.open = True, False
            for i, (name, facts) in enumerate(info["parameters"].items()):
                self._set_parameter(elements, name, facts["init"], np.random.default_rng([seed, i]))
            for facts in info["state"]:
                self._set_state(elements, facts)
            frame.fill(elements)

    def _set_parameter(
        self, elements: np.ndarray, name: str, spec: Mapping[str, Any], rng: np.random.Generator
    ) -> None:
        view = cells_of(elements, self.binding.symbol(name))
        if "array" in spec:
            view[...] = self.program.constants[spec["array"]]
        else:
            view[...] = initializer(spec)(view.shape, rng)

    def _set_state(self, elements: np.ndarray, facts: Mapping[str, Any]) -> None:
        if facts["symbol"] is None:
            return
        symbol = self.program.symbols[facts["symbol"]]
        cells = cells_of(elements, symbol, (symbol.elems.b,))
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

    def commit(self) -> None:
        """Write the model to the heap's `FileStore` now (it is also written when it is switched out or closed)."""
        self.heap.commit(self)

    def copy(self, name: str | None = None, heap: CalcHeap | None = None) -> Resident:
        """A new model with the same parameters, optimizer state, counters and seed, in the same heap or in another.

        Gradients that add up to a learning batch which is not whole are not copied.
        """
        if heap is not None:
            checks.one_of("copy: heap", heap, CalcHeap, 'a heap such as cv.CalcHeap("1 MiB")')
        with self as frame:
            image, facts = frame.get_image(open=True), {**self.facts, "open": self.tenant.open}
        return (heap or self.heap).adopt(self.program, facts, image, self.workers, name)

    def close(self) -> None:
        """Give the model's room back; it cannot be used afterwards.  A `FileStore` keeps its file."""
        self.heap.remove(self)

    # ------------------------------------------------------------ variables
    def _variable(self, name: str) -> Mapping[str, Any]:
        variables = self.binding.variables
        try:
            return variables[name]
        except (KeyError, TypeError):
            raise CalcError(f"no variable {checks.shown(name)}; there are {', '.join(variables)}") from None

    def __getitem__(self, name: str) -> Any:
        """A copy of a variable's value; a view shows what the variable that it is a view of holds now."""
        facts = self._variable(name)
        if facts["unreadable"]:
            raise CalcError(
                f"{name!r} cannot be read: its value is {facts['unreadable']}; compile with keep=[{name!r}]"
            )
        binding = self.binding
        with self as frame:
            batch = self._batch_in(facts["of"])
            value = frame.cells(binding.symbol(name), None if facts["kind"] == "state" else binding.shape(name, batch))
            return value.copy() if value.ndim else value[()]

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a placeholder; the first size of the batch may be anything up to the planned batch."""
        facts = self._variable(name)
        if facts["kind"] != "placeholder":
            how = "change it through model.parameters" if facts["kind"] == "parameter" else "only placeholders are set"
            raise CalcError(f"{name!r} is a {facts['kind']}: {how}")
        array = numbers(name, value)
        self._place(name, array, self.check(name, array))

    def _place(self, name: str, array: np.ndarray, batch: int) -> None:
        binding, tenant = self.binding, self.tenant
        with self as frame:
            frame.write(binding.symbol(name), array, array.shape)
            tenant.held[name] = batch
            if tenant.arena is not None and name in binding.needs(tenant.arena):
                tenant.arena = None  # a backward would read other data than the forward did

    def _held(self, name: str) -> int:
        """The batch of the data in a placeholder."""
        batch = self.tenant.held.get(name)
        if batch is None:
            raise CalcError(
                f"placeholder {name!r} was never set, or its data are gone since whole data sets were run or another "
                f"model was in its place: model[{name!r}] = data"
            )
        return batch

    def _batch_in(self, name: str) -> int:
        """The batch of what a variable holds (1: it does not depend on the batch)."""
        facts = self.binding.variables[name]
        if facts["kind"] == "placeholder":
            return self._held(name)
        if facts["kind"] != "result":
            return 1
        path = facts["path"]
        batch = self.tenant.ran.get((path, facts["phase"]))
        if batch is None:
            raise CalcError(
                f"{name!r} belongs to path {path!r}, which has not been run since the model came into the "
                f"heap: call forward({path!r}) first"
            )
        return batch

    def check(self, name: str, array: np.ndarray, samples: bool = False) -> int:
        """The batch size of data for a placeholder; raises where dtype, rank, sizes or labels do not fit.

        samples : the array is a data set, whose number of samples has no limit.
        """
        facts = self._variable(name)
        shape = self.binding.forms[name]
        if array.dtype.kind not in "fiub":
            raise CalcError(f"{name!r}: data of dtype {array.dtype} cannot be used; give numbers")
        if array.ndim != len(shape):
            raise ShapeError(f"{name!r}: data of shape {array.shape} has rank {array.ndim}, {show(shape)} is wanted")
        batch = next((n // s.a for s, n in zip(shape, array.shape) if s.a), 1)
        if array.size == 0:
            raise CalcError(f"{name!r}: the data are empty (shape {array.shape}); {show(shape)} is wanted")
        if array.shape != (self.binding.shape(name, batch) if not samples else tuple(s.at(batch) for s in shape)):
            raise ShapeError(f"{name!r}: data of shape {array.shape} do not fit {show(shape)}")
        if not samples and batch > self.program.batch_size:
            raise CalcError(
                f"{name!r}: a batch of {batch} is above the planned {self.program.batch_size}; "
                f"compile with batch_size={batch} or give smaller batches"
            )
        if facts["classes"] is not None:
            _check_labels(name, array, facts["classes"])
        elif name in self.binding.probabilities and not (array.min() >= 0 and array.max() <= 1):
            raise CalcError(
                f"{name!r}: binary_cross_entropy takes targets in [0, 1]; found {array.min()} to {array.max()}"
            )
        return batch

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """Parameters by name, as views into the heap: the model's own until it is switched out (see ``with model``).

        Of a device with memory of its own they are copies, which cannot be written to.
        """
        with self as frame:
            self.tenant.exposed |= frame.writable
            arrays = {name: frame.cells(self.binding.symbol(name)) for name in self.program.info["parameters"]}
            if not frame.writable:
                for array in arrays.values():
                    array.flags.writeable = False
            return arrays

    def grad(self, name: str, path: str | None = None) -> np.ndarray:
        """A copy of a parameter's gradient after `backward`; of several paths that train it each has its own.

        path : default: the first that trains.

        Raises
        ------
        CalcError : the parameter is frozen, or is updated inside the backward (its gradient is gone).
        """
        path = self.binding.path(path)
        facts = self.binding.training(path)
        gradients = facts["gradients"]
        if not isinstance(name, str) or name not in gradients:
            raise CalcError(f"{checks.shown(name)} has no gradient; these have one: {', '.join(gradients) or 'none'}")
        if gradients[name] is None:
            raise CalcError(
                f"the gradient of {name!r} is used up by the update inside the backward; compile with accumulate=True"
            )
        with self as frame:
            if not (facts["accumulate"] or path in self.tenant.graded):
                raise CalcError(
                    f"{name!r} has no gradient since the model came into the heap: call backward({path!r}) first"
                )
            return frame.cells(self.program.symbols[gradients[name]]).copy()

    def hyper(self, path: str | None = None) -> Hyper:
        """Hyperparameters of the path that trains."""
        facts = self.binding.training(path)
        return Hyper(self, self.program.symbols[facts["hyper"]], self.binding.path(path))

    def settle(self, path: str) -> None:
        """Drop what rounds have added up, and weigh the next one in full: the state between two learning batches."""
        facts = self.binding.training(path)
        if facts["accumulate"]:
            symbols = self.program.symbols
            with self as frame:
                frame.write(symbols[facts["seed"]], 1)
                for gradient in facts["gradients"].values():
                    frame.clear_symbol(symbols[gradient])
                self.tenant.changed, self.tenant.open = True, False

    # ------------------------------------------------------------ running
    def forward(self, path: str) -> None:
        """Run a path's forward and loss sections on the data in its placeholders and in the results that it reads.

        It runs for the batch of those data, and refuses data of different batches.
        """
        self._run(self.binding.path(path), FORWARD)

    def backward(self, path: str) -> None:
        """Gradients of the loss; they add up until `end_round` where the program accumulates."""
        self._run(self.binding.path(path), ("backward",))

    def optimize(self, path: str) -> None:
        """Update the parameters."""
        path = self.binding.path(path)
        if not self.tenant.open:  # a gradient that adds up is part of the image
            self._needs_forward(path)
        self._run(path, ("optimize",))

    def end_round(self, path: str) -> None:
        """Clear the gradients for the next learning batch."""
        self._run(self.binding.path(path), ("end_round",))

    def run_section(self, path: str, phase: str) -> None:
        """Run one section of a path: forward, loss, backward, optimize or end_round."""
        checks.choice("section", phase, PHASES)
        self._run(self.binding.path(path), (phase,))

    def step(self, *data: Any, path: str | None = None) -> float | None:
        """One training step on a batch of at most ``batch_size`` samples.

        Parameters
        ----------
        data : arrays for the placeholders of the path that trains, in the order they were declared.

        Returns
        -------
        float : the loss (None: the path names none).  The model is unchanged if the data are refused.
        """
        names = self.binding.feeds(self.binding.path(path))
        if len(data) != len(names):
            raise CalcError(f"step takes {len(names)} arrays ({', '.join(names)}), not {len(data)}")
        arrays = [numbers(name, array) for name, array in zip(names, data)]
        sizes = [self.check(name, array) for name, array in zip(names, arrays)]
        if len(set(sizes)) > 1:
            shapes = " and ".join(f"{name} {array.shape}" for name, array in zip(names, arrays))
            raise ShapeError(f"{shapes} differ in their number of samples")
        with self:
            for name, array, batch in zip(names, arrays, sizes):
                self._place(name, array, batch)
            return self.run_steps(1, path)

    def run_steps(self, n: int, path: str | None = None) -> float | None:
        """``n`` whole steps on the data in the heap, in one call; returns the last loss.

        Paths whose results the path reads run forward once, before the first step.
        """
        n = checks.integer("run_steps: the number of steps", n)
        binding = self.binding
        path = binding.path(path)
        with self as frame:
            self.run_round(path, PHASES, n)
            loss = binding.paths[path].get("loss")
            return None if loss is None else frame.scalar(binding.symbol(loss).offset)

    def run_round(self, path: str, phases: tuple[str, ...] = FORWARD, steps: int = 1) -> None:
        """Run phases of a path ``steps`` times, after once making the results of other paths that they read."""
        with self:
            for other in self.binding.before(path, phases):
                self._run(*other)
            self._run(path, phases, steps)

    def _needs_forward(self, path: str) -> int:
        """The batch that a path has run forward at."""
        ran = self.tenant.ran
        if not {(path, phase) for phase in FORWARD} <= ran.keys():
            raise CalcError(f"path {path!r} has not been run forward: call forward({path!r}) first")
        return ran[path, "forward"]

    def _run(self, path: str, phases: tuple[str, ...], steps: int = 1) -> None:
        binding, tenant = self.binding, self.tenant
        start, stop = binding.span(path, phases)
        with self as frame:
            if phases[0] in ("optimize", "end_round"):  # they read what persists
                batch = tenant.ran.get((path, "forward"), self.program.batch_size)
            elif phases[0] == "backward":
                batch = self._needs_forward(path)
                self._needs_arena(path)
            else:
                batch = self._batch_of(path, phases)
                for phase in FORWARD:
                    if phase in phases or binding.span(path, (phase,))[0] == binding.span(path, (phase,))[1]:
                        tenant.ran[path, phase] = batch
                    elif phase == "loss":
                        tenant.ran.pop((path, phase), None)  # of an earlier forward
                tenant.arena = path
            rows, address = binding.rows(batch)  # held here: another thread's batches may drop it
            frame.job[layout.ROWS : layout.STEPS + 1] = address, start, stop, steps
            tenant.changed |= path in binding.changes
            if "backward" in phases:
                tenant.graded.add(path)
            if binding.accumulates:
                tenant.open = phases[-1] != "end_round" and (tenant.open or "backward" in phases)
            frame.execute("run_rows", frame.job, frame.job_address, tenant.workers)

    def _needs_arena(self, path: str) -> None:
        """What the path's forward computed is still there, and so are the data that it read."""
        other = self.tenant.arena
        if other != path:
            why = (
                f"path {other!r} has run since forward({path!r}), and paths share the memory of what they compute"
                if other is not None
                else f"data that forward({path!r}) read have been set anew"
            )
            raise CalcError(f"{why}: call forward({path!r}) again before backward({path!r})")

    def _batch_of(self, path: str, phases: tuple[str, ...]) -> int:
        """The batch of the data that phases of a path read: in placeholders, and in results of other paths."""
        binding = self.binding
        sizes = {name: self._batch_in(name) for name in binding.needs(path, phases)}
        sizes = {name: batch for name, batch in sizes.items() if binding.symbol(name).elems.a}
        if phases[0] != "forward" and (path, "forward") in self.tenant.ran:
            sizes[f"path {path}"] = self.tenant.ran[path, "forward"]
        if len(set(sizes.values())) > 1:
            held = ", ".join(f"{name!r}: {batch}" for name, batch in sizes.items())
            raise ShapeError(
                f"path {path!r} reads batches of different sizes ({held}): set placeholders of the same number of "
                "samples, and run the paths whose results it reads on them"
            )
        return next(iter(sizes.values()), self.program.batch_size)


def _check_labels(name: str, labels: np.ndarray, classes: int) -> None:
    if labels.dtype == np.int64 and labels.view(np.uint64).max() < classes:  # the common case in one pass
        return
    low, high = labels.min(), labels.max()
    whole = labels.dtype.kind != "f" or bool((labels == np.floor(labels)).all())
    if not (low >= 0 and high < classes and whole):
        raise CalcError(f"{name!r}: labels must be integers in [0, {classes}); found {low} to {high}")
