"""What every model in a heap can do: access to its variables by name, and methods that run its sections."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, ShapeError, Uncopied
from calcvm.hints import NAMES, Answering, hinted
from calcvm.ops.dims import show
from calcvm.ops.layouts import axes
from calcvm.ops.optimizers import COMPUTED, HYPER_SLOTS, SLOTS
from calcvm.ops.statement import PHASES
from calcvm.vm.memory.slot import Slot, as_seen, cells_of, lasting_elems, shape_of
from calcvm.vm.program.facts import MAX_SEED, Facts
from calcvm.vm.program.program import Program, Symbol
from calcvm.vm.run import job as J
from calcvm.vm.run.device import heaps_of
from calcvm.vm.run.feeds import index_of, numbers, numeric, outside
from calcvm.vm.run.loaded import FORWARD, Loaded

if TYPE_CHECKING:
    from typing_extensions import Self

    from calcvm.vm.memory.heap import Heap
    from calcvm.vm.memory.record import Record

LARGEST_COUNT = 2**53  # counts up to this are exact in a float64


NAMES["Hyper"] = {name: f'model.hyper["{name}"]' for name in HYPER_SLOTS} | {"lr": 'model.hyper["learning_rate"]'}


class Hyper(MutableMapping, Uncopied, Answering):
    """Hyperparameters of a path, by name: values in the heap, effective from the next step on.

    Setting one raises an error if the path's optimizer, schedule and clipping do not read it, or if the value is out of range.
    Those that each step computes, such as ``hyper["lr_t"]``, are read by name; iteration leaves them out.
    """

    _instead = "copy dict(hyper)"

    def __init__(self, model: BaseModel, path: str | None = None):
        facts = model.loaded.training(path)
        self._model, self._path, self._symbol = model, model.loaded.path(path), model.program.symbols[facts["hyper"]]

    @hinted
    def __call__(self, path: str | None) -> Hyper:
        """The hyperparameters of another path that trains."""
        return Hyper(self._model, path)

    def __getitem__(self, name: str) -> float:
        with self._model.record.turn.mine:
            return float(self._values(self._model.slot)[self._index(name)])

    def __setitem__(self, name: str, value: float) -> None:
        with self._model.record.turn.mine:
            slot = self._model.slot
            values, i = self._values(slot), self._index(name)
            if checks.is_number(value) and checks.plain(value) == float(values[i]):  # as in copying another model's
                return
            values[i] = self._checked(name, value)
            self._model.record.changed = True
            slot.write(self._symbol, values, (self._symbol.elems.b,))

    def _checked(self, name: str, value: Any) -> float:
        known, what = self._model.loaded.hyper[self._path], f"hyperparameter {name!r}"
        if name in COMPUTED:
            raise CalcError(f"{what} is computed in each step: set {COMPUTED[name]!r}")
        if name not in SLOTS and (name != "gamma_t" or "gamma" in known):  # the program advances it
            return checks.number(what, value)
        if name not in known:
            raise CalcError(
                f"{what} has no effect: path {self._path!r} was compiled with an optimizer, schedule and clipping that "
                f"read {', '.join(known)}"
            )
        may = known[name]
        if may.whole:
            value = checks.plain(value)
            n = int(value) if isinstance(value, float) and value.is_integer() else value
            return checks.integer(what, n, int(may.low), LARGEST_COUNT)
        return checks.number(what, value, may.low, may.high, ends=may.ends)

    def __delitem__(self, name: str) -> None:
        raise CalcError(f"hyperparameter {name!r} cannot be removed; set it")

    def __iter__(self) -> Iterator[str]:
        return (name for name in HYPER_SLOTS if name not in COMPUTED)

    def __len__(self) -> int:
        return len(HYPER_SLOTS) - len(COMPUTED)

    def __repr__(self) -> str:
        return f"Hyper({dict(self)})"

    def _values(self, slot: Slot) -> np.ndarray:
        return slot.cells(self._symbol, (self._symbol.elems.b,))

    def _index(self, name: str) -> int:
        if not isinstance(name, str) or name not in HYPER_SLOTS:
            hint = ": SGD's and RMSProp's momentum is beta1" if isinstance(name, str) and name == "momentum" else ""
            known = ", ".join(self._model.loaded.hyper[self._path])
            raise CalcError(f"no hyperparameter {checks.shown(name)}{hint}; there are {known}")
        return HYPER_SLOTS.index(name)


class Keeping:
    """``with model:`` takes the lock of the model's turn; these are its ``__enter__`` and ``__exit__``.

    Python methods would admit Ctrl-C between taking the lock and entering the block.
    """

    def __init__(self, name: str):
        self._name = name

    def __get__(self, model: Any, _: Any = None) -> Any:
        if model is None:
            return self
        return model._entry() if self._name == "__enter__" else model.record.turn.lock.__exit__

    def __call__(self, model: Any, *error: object) -> Any:
        """As ``type(model).__enter__(model)``, the form that `contextlib.ExitStack` uses."""
        return self.__get__(model)(*error)


class BaseModel:
    """A model: a program and its image, in a heap or temporarily in the heap's store (see `calcvm.Model`).

    Threads may share it: each call takes a turn, and sees the model before or after the others' calls.  Training
    (`Model.fit`) is a sequence of turns.  Between them other threads may read (`predict`, ``model[name]``, `save`);
    calls that change the model wait for the end of the training.
    """

    heap: Heap
    record: Record

    __enter__, __exit__ = Keeping("__enter__"), Keeping("__exit__")
    __iter__ = None  # variables are read by name

    def _entry(self) -> Callable[[], Any]:
        """The ``__enter__`` of its turn; no other thread is in the middle of training the model.

        Bringing the model in first keeps an error out of the block.  Until the block begins, other models may still displace it.
        """
        record = self.record
        with record.change:
            with record.turn.mine:
                self.heap.enter(record)
            return record.enter

    @property
    def slot(self) -> Slot:
        """Its slot in the heap, after bringing it in; the slot stays its own while this thread has its turn."""
        return self.heap.enter(self.record)

    # ------------------------------------------------------------ properties
    @property
    def name(self) -> str:
        return self.record.name

    @property
    def loaded(self) -> Loaded:
        if self.record.loaded is None:
            raise self.record.closed()
        return self.record.loaded

    @property
    def program(self) -> Program:
        return self.loaded.program

    @property
    def workers(self) -> int:
        return self.record.workers

    @property
    def facts(self) -> Facts:
        """Metadata beside the image in the store: the program's hash, seed, number of epochs, settings (JSON-able)."""
        return self.record.facts

    @property
    def seed(self) -> int:
        return self.facts["seed"]

    @property
    def batch_size(self) -> int:
        return self.program.batch_size

    @property
    def learning_batch(self) -> int:
        """Samples per update."""
        return self.facts.get("learning_batch", self.batch_size)

    @learning_batch.setter
    def learning_batch(self, n: int) -> None:
        """At least the batch (CalcError: more, but the program does not accumulate gradients)."""
        self.facts["learning_batch"] = n

    @property
    def steps_done(self) -> int:
        """Updates of the parameters so far, by `fit`, `step`, `run_steps` and fleets, of all paths: the sum of ``hyper(path)["t"]``.

        Paths that share an optimizer's state have one count.
        """
        counts = {facts["hyper"]: path for path, facts in self.loaded.paths.items() if facts["backward"]}
        with self.record.turn.mine:
            return sum(int(Hyper(self, path)["t"]) for path in counts.values())

    @property
    def epochs_done(self) -> int:
        """Complete epochs of `fit` and fleets; `steps_done` counts every update."""
        return self.facts["epochs"]

    @property
    def elements(self) -> np.ndarray:
        """The model's piece of the heap: a view, valid until the model is switched out.

        Raises
        ------
        CalcError : the heap is not in host memory.
        """
        with self._on_host().record.turn.mine:
            slot = self.slot
            self.record.exposed = True
            return slot.elements

    @property
    def heap_address(self) -> int:
        """Address of its piece of the heap, until it is switched out (CalcError: as `elements`)."""
        with self._on_host().record.turn.mine:
            return self.slot.address

    def _on_host(self) -> Self:
        if heaps_of(self.heap.device.name) != "cpu":
            raise CalcError(
                f"model {self.name!r} is in the memory of device {self.heap.device.name!r}, which has no views: "
                "model[name] and model.parameters give copies"
            )
        return self

    # ------------------------------------------------------------ start and end
    def reset(self, seed: int) -> None:
        """Initialize parameters, buffers, optimizer state and counters, as `CalcHeap.create` with ``seed`` does."""
        seed = checks.integer("seed", seed, 0, MAX_SEED)
        with self.record.change, self.record.turn.mine:
            self.initialize(seed, np.zeros(lasting_elems(self.loaded), self.program.dtype))

    def initialize(self, seed: int, elements: np.ndarray | None = None) -> None:
        """As `reset`, for a caller that has the turn; ``elements``, zeros, are filled before the model's memory is set."""
        slot, record, info = self.slot, self.record, self.program.info
        elements = slot.blank() if elements is None else elements
        slot.clear_pages()
        for i, (name, facts) in enumerate(info["parameters"].items()):
            self._set_variable(elements, name, facts["init"], np.random.default_rng([seed, i]))
        for i, (name, facts) in enumerate(info.get("buffers", {}).items()):
            self._set_variable(elements, name, facts["init"], np.random.default_rng([seed, i, 1]))
        for name in info.get("carries", ()):
            symbol = self.loaded.symbol(name)
            cells_of(self.slot.elements_of(symbol, elements), symbol)[...] = self._initial_state(name, seed)
        for facts in info["state"]:
            self._set_state(elements, facts, seed)
        record.forget()
        record.changed = True
        slot.renew(record, elements, {"seed": seed, "epochs": 0})

    def _set_variable(self, elements: np.ndarray, name: str, spec: Mapping[str, Any], rng: np.random.Generator) -> None:
        symbol = self.loaded.symbol(name)
        self._set_view(cells_of(self.slot.elements_of(symbol, elements), symbol), symbol.layout, name, spec, rng)

    def _set_view(self, view: np.ndarray, layout: str, name: str, spec: Mapping[str, Any], rng: Any) -> None:
        """Set an array, stored in a layout, to the initial value of a variable."""
        if "array" in spec:
            view[...] = self.program.constants[spec["array"]]
            return
        made = self.loaded.initializers[name]
        layout = "" if made.as_seen else layout
        with np.errstate(over="ignore"):  # as `Slot.write`
            made.fill(view.transpose(axes(layout, view.ndim)), rng)
        if made.as_seen and not np.isfinite(view).all():  # a custom function
            raise CalcError(f"{name!r}: its initializer {made!r} gives numbers that are not finite in {view.dtype}")

    def _initial_state(self, name: str, seed: int) -> np.ndarray | float:
        """What each sample of a carry starts from: its elements, or one number for all."""
        if (start := self.loaded.starts.get(name)) is not None:
            return start
        carries, symbol = self.program.info["carries"], self.loaded.symbol(name)
        one, rng = (
            np.empty(shape_of(symbol)[1:], symbol.dtype),
            np.random.default_rng([seed, [*carries].index(name), 2]),
        )
        self._set_view(one, "", name, carries[name]["init"], rng)
        return one

    def _set_state(self, elements: np.ndarray, facts: Mapping[str, Any], seed: int) -> None:
        if facts["symbol"] is None:
            return
        symbol = self.program.symbols[facts["symbol"]]
        cells = cells_of(self.slot.elements_of(symbol, elements), symbol, (symbol.elems.b,))
        kind = facts["kind"]
        if kind == "hyper":
            cells[:] = [facts["slots"][name] for name in HYPER_SLOTS]
        elif kind == "rng":
            cells[:] = seed, 0
        elif kind == "constant":
            with np.errstate(over="ignore"):  # as `Slot.write`
                cells[:] = self.program.constants[facts["array"]].reshape(-1)
        else:  # float64, seed, fill
            cells[:] = facts.get("value", 1.0)

    def commit(self) -> None:
        """Write the model to the heap's `FileStore` now (it is also written when it is switched out or closed)."""
        self.heap.commit_record(self.record)

    @property
    def adding(self) -> bool:
        """Whether it holds accumulated gradients in the middle of a learning batch that the user runs by hand."""
        return bool(self.record.open.difference(self.record.passing))

    def image(self, state: bool = True) -> np.ndarray:
        """A copy of the persistent bytes, with gradients; in the middle of a pass the copy looks as if the pass were settled.

        state : False: the state of samples (`calcvm.carry`) is that of the start.
        """
        with self.record.turn.mine:
            image = self.slot.get_image(open=True)
            if not state:
                started = {name: self._initial_state(name, self.seed) for name in self.program.info.get("carries", ())}
                self._put(image, ((self.loaded.symbol(name), value) for name, value in started.items()))
            for path in self.record.passing:
                self._put(image, self._settled(path))
            return image

    def restore(self, image: np.ndarray) -> None:
        """Set the model back to a state from `image`; contents of its placeholders and results are gone."""
        record = self.record
        with record.change, record.turn.mine:
            slot = self.slot
            record.forget()
            record.changed = True
            slot.set_image(image, open=True)

    def set_parameters(self, given: Any) -> None:
        """Set all parameters or none: arrays by name, or in the order of `parameters`, optionally followed by all buffers.

        Raises
        ------
        CalcError, ShapeError : the names or shapes do not match.
        """
        info = self.program.info
        names, buffers = [*info["parameters"]], [*info.get("buffers", ())]
        if not isinstance(given, Mapping):
            arrays = checks.items("weights", given, "arrays by name, or a list of them,")
            if len(arrays) not in (len(names), len(names) + len(buffers)):
                more = f" and {len(buffers)} buffers" if buffers else ""
                raise CalcError(
                    f"weights: {len(arrays)} arrays for {len(names)} parameters{more}: {', '.join(names + buffers)}"
                )
            given = dict(zip(names + buffers, arrays))
        if any(name in given for name in buffers):
            names += buffers
        wrong = [name for name in given if name not in names] or [name for name in names if name not in given]
        if wrong:
            why = "no parameter is called" if wrong[0] in given else "there is no array for"
            raise CalcError(f"weights: {why} {checks.shown(wrong[0])}; the parameters are {', '.join(names)}")
        self.set_values({name: numeric(name, numbers(name, value)) for name, value in given.items()})

    def set_values(self, values: Mapping[str, np.ndarray]) -> None:
        """Set the given parameters and buffers, all or none; contents of placeholders and results are gone."""
        for name, value in values.items():
            if value.shape != self.loaded.shape(name, 1):
                raise ShapeError(f"weights: {name!r} of shape {value.shape}; {self.loaded.shape(name, 1)} is wanted")
            limit = np.finfo(self.program.dtype).max
            if (np.isfinite(value) & (np.abs(value.astype(np.float64)) > limit)).any():
                raise CalcError(
                    f"weights: {name!r} has numbers beyond {limit:.3g}, the largest of {self.program.dtype}"
                )
        with self.record.change, self.record.turn.mine:
            image = self.image()
            self._put(image, ((self.loaded.symbol(name), value) for name, value in values.items()))
            self.restore(image)

    def _put(self, image: np.ndarray, values: Iterable[tuple[Symbol, Any]]) -> None:
        """Write values into an image with gradients."""
        for symbol, value in values:
            cells = image[self.loaded.in_image(symbol)].view(symbol.dtype)
            as_seen(cells, symbol, shape_of(symbol))[...] = value

    def close(self) -> None:
        """Free the model's room; it cannot be used afterwards.  A `FileStore` keeps its file."""
        self.heap.remove_record(self.record)

    # ------------------------------------------------------------ variables
    def _variable(self, name: str) -> Mapping[str, Any]:
        variables = self.loaded.variables
        if not isinstance(name, str) or name not in variables:
            raise CalcError(f"no variable {checks.shown(name)}; there are {', '.join(variables)}")
        return variables[name]

    def _called(self, name: str) -> str:
        """The variable that the layer of that name produces, or the variable of that name."""
        return self.loaded.program.info.get("called", {}).get(name, name) if isinstance(name, str) else name

    def __getitem__(self, name: str) -> Any:
        """A copy of a variable's value, or of a layer's output; for a view, the current contents of its base variable."""
        called, name = name, self._called(name)
        facts = self._variable(name)
        if facts["unreadable"]:
            raise CalcError(
                f"{called!r} cannot be read: its value is {facts['unreadable']}; compile with keep=[{called!r}]"
            )
        loaded = self.loaded
        with self.record.turn.mine:
            slot = self.slot
            batch = self._batch_in(facts["of"])
            value = slot.cells(loaded.symbol(name), None if facts["kind"] == "state" else loaded.shape(name, batch))
            return value.copy() if value.ndim else value[()]

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a placeholder; the first size of the batch may be any number up to the planned batch."""
        array = self.numbers(name, value)
        batch = self.check_placeholder(name, array)
        with self.record.change, self.record.turn.mine:
            self.place({name: array}, {name: batch})

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._called(name) in self.loaded.variables

    def __delitem__(self, name: str) -> NoReturn:
        raise CalcError(f"{checks.shown(name)} cannot be removed: a model has the variables of its program")

    def numbers(self, name: str, value: Any) -> np.ndarray:
        """A value for a placeholder, as an array that it accepts."""
        own = self.loaded.own_types.get(name, "") if isinstance(name, str) else ""
        array = numbers(name, value, own)
        return array[:, None] if array.ndim == 1 and name in self.loaded.columns else array

    def check_placeholder(self, name: str, array: np.ndarray) -> int:
        """As `check`, for a name that may belong to another kind of variable."""
        facts = self._variable(name)
        if facts["kind"] != "placeholder":
            ours = {"parameter": "parameters", "buffer": "buffers", "carry": "carries"}.get(facts["kind"])
            how = f"change it through model.{ours}" if ours else "only placeholders are set"
            raise CalcError(f"{name!r} is a {facts['kind']}: {how}")
        return self.check(name, array)

    def place(self, arrays: Mapping[str, np.ndarray], batches: Mapping[str, int]) -> None:
        """Set placeholders, all or none: after an exception their data are gone."""
        slot, record = self.slot, self.record
        for name in arrays:
            record.unset(name)
        for name, array in arrays.items():
            slot.write(self.loaded.symbol(name), array, array.shape)
        record.held.update(batches)

    def held(self, name: str) -> int:
        """The batch of the data in a placeholder."""
        batch = self.record.held.get(name)
        if batch is None:
            raise CalcError(
                f"placeholder {name!r} was never set, or its data are gone since whole data sets were run or another "
                f"model was in its place: model[{name!r}] = data"
            )
        return batch

    def _batch_in(self, name: str) -> int:
        """The batch of a variable's current contents (1: it does not depend on the batch)."""
        facts = self.loaded.variables[name]
        if facts["kind"] == "placeholder":
            return self.held(name)
        if facts["kind"] == "carry":
            return self.batch_size
        if facts["kind"] != "result":
            return 1
        path = facts["path"]
        batch = self.record.ran.get((path, facts["phase"]))
        if batch is None:
            instead = "take what model.run(inputs) returns, or " * (path == "predict")
            raise CalcError(
                f"{name!r} belongs to path {path!r}, which has not been run since the model came into the heap, or only by predict, "
                f"evaluate or fit, which keep no results there: {instead}set its data and call forward({path!r}) first"
            )
        return batch

    def check(self, name: str, array: np.ndarray, samples: bool = False) -> int:
        """The batch size of data for a placeholder; raises if dtype, rank, sizes or labels do not fit.

        samples : the array is a data set, with any number of samples.
        """
        facts = self._variable(name)
        shape = self.loaded.forms[name]
        numeric(name, array)
        if array.ndim != len(shape):
            fewer, hint = array.ndim + 1 == len(shape), ""
            if fewer and shape[-1] == 1:
                hint = ": write data[..., None]"
            elif facts["classes"] is not None and array.ndim == len(shape) + 1:
                hint = _dense(array)
            elif facts["classes"] is not None and array.ndim == 1:
                hint = ": as many labels as places of the output; of images nn.Flatten() comes before nn.Linear"
            elif fewer and array.shape == tuple(n.b for n in shape[1:]):
                hint = ": write data[None] for one sample"
            elif len(shape) == 2 and fewer and array.dtype.kind in "iub":
                hint = f": labels are for softmax_cross_entropy, this loss takes np.eye({shape[1].b})[labels]"
            raise ShapeError(
                f"{name!r}: data of shape {array.shape} has rank {array.ndim}, {show(shape)} is wanted{hint}"
            )
        batch = next((n // s.a for s, n in zip(shape, array.shape) if s.a), 1)
        if array.size == 0:
            raise CalcError(f"{name!r}: the data are empty (shape {array.shape}); {show(shape)} is wanted")
        if array.shape != (self.loaded.shape(name, batch) if not samples else tuple(s.at(batch) for s in shape)):
            first = (*array.shape[:1], *array.shape[-1:], *array.shape[1:-1])
            turned = array.ndim > 2 and first[1:] == tuple(n.b for n in shape[1:])
            raise ShapeError(
                f"{name!r}: data of shape {array.shape} do not fit {show(shape)}"
                + (": their channels are last, which channels_last=True is for" if turned else "")
            )
        if not samples and batch > self.program.batch_size:
            raise CalcError(
                f"{name!r}: a batch of {batch} is above the planned {self.program.batch_size}; "
                f"compile with batch_size={batch} or give smaller batches"
            )
        if facts["classes"] is not None:
            _check_labels(name, array, facts["classes"], facts.get("ignored"))
        elif name in self.loaded.probabilities and not (array.min() >= 0 and array.max() <= 1):
            found = outside(array, f"{array.min()} to {array.max()}")
            raise CalcError(f"{name!r}: binary_cross_entropy takes targets in [0, 1]; found {found}")
        return batch

    def check_batch(self, arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
        """The batch sizes of data for placeholders, as by `check`; those with samples must agree (else ShapeError)."""
        batches = {name: self.check(name, array) for name, array in arrays.items()}
        if len({batches[name] for name in arrays if self.loaded.has_samples(name)}) > 1:
            shapes = [f"{name} {array.shape}" for name, array in arrays.items() if self.loaded.has_samples(name)]
            raise ShapeError(f"{' and '.join(shapes)} differ in their number of samples")
        return batches

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """Parameters by name, as views into the heap, valid until the model is switched out (see ``with model``).

        On a device with separate memory they are read-only copies.
        """
        return self._views(self.program.info["parameters"])

    @property
    def buffers(self) -> dict[str, np.ndarray]:
        """State of the layers besides the parameters, such as running means, by name: views as in `parameters`."""
        return self._views(self.program.info.get("buffers", {}))

    @property
    def carries(self) -> dict[str, np.ndarray]:
        """What forwards leave for the next call (`calcvm.carry`), by name, of each sample: views as in `parameters`."""
        return self._views(self.program.info.get("carries", {}))

    def reset_state(self, samples: Any = None) -> None:
        """Set the state back to its start, of all samples, or of some: their places in a batch.

        Raises
        ------
        CalcError : a place is no integer in [0, batch_size).
        """
        n = self.batch_size
        places = (
            slice(None)
            if samples is None
            else [checks.integer("reset_state: a sample's place", at, 0, n - 1) for at in np.ravel(samples).tolist()]
        )
        carries = self.program.info.get("carries", ())
        self.set_states(places, {name: self._initial_state(name, self.seed) for name in carries})

    def set_states(self, places: Any, values: Mapping[str, Any]) -> None:
        """Set carries, by name, of the samples at some places."""
        with self.record.change, self.record.turn.mine:
            slot, self.record.changed = self.slot, True
            with np.errstate(over="ignore"):  # as `Slot.write`
                for name, value in values.items():
                    symbol = self.loaded.symbol(name)
                    cells = slot.cells(symbol)
                    cells[places] = value
                    if not slot.writable:
                        slot.write(symbol, cells)

    def _views(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        with self.record.turn.mine:
            slot = self.slot
            self.record.exposed |= slot.writable
            arrays = {name: slot.cells(self.loaded.symbol(name)) for name in names}
            if not slot.writable:
                for array in arrays.values():
                    array.flags.writeable = False
            return Views(arrays)

    def grad(self, name: str, path: str | None = None) -> np.ndarray:
        """A copy of a parameter's gradient after `backward`; each path that trains the parameter has its own.

        path : default: the first path that trains.

        Raises
        ------
        CalcError : the parameter is frozen, or backward updates it at once (its gradient is gone).
        """
        path = self.loaded.path(path)
        facts = self.loaded.training(path)
        gradients = facts["gradients"]
        if not isinstance(name, str) or name not in gradients:
            raise CalcError(f"{checks.shown(name)} has no gradient; these have one: {', '.join(gradients) or 'none'}")
        if gradients[name] is None:
            raise CalcError(
                f"the gradient of {name!r} is used up by the update inside the backward; compile with accumulate=True "
                "(a Model: learning_batch= of more than a batch)"
            )
        with self.record.turn.mine:
            slot = self.slot
            if not (facts["accumulate"] or path in self.record.graded):
                raise CalcError(
                    f"{name!r} has no gradient since the model came into the heap: call backward({path!r}) first"
                )
            return slot.cells(self.program.symbols[gradients[name]]).copy()

    @property
    def hyper(self) -> Hyper:
        """Hyperparameters by name; setting one takes effect with the next step.

        They are those of path learn, or of the first path that trains; ``hyper(path)`` has those of another.
        """
        return Hyper(self)

    def settle(self, path: str) -> None:
        """Discard a path's accumulated gradients and reset its weight, to the state between two learning batches."""
        with self.record.change:
            self.drop_added(path)

    def drop_added(self, path: str) -> None:
        """As `settle`, for the thread that trains it."""
        if self.loaded.training(path)["accumulate"]:
            with self.record.turn.mine:
                slot, record = self.slot, self.record
                record.changed = True
                for symbol, value in self._settled(path):
                    slot.write(symbol, value)
                record.open.discard(path)
                record.passing = tuple(other for other in record.passing if other != path)

    def _settled(self, path: str) -> Iterator[tuple[Symbol, float]]:
        """The state besides the model that a path's accumulation changes, with its value between two learning batches."""
        symbols, facts = self.program.symbols, self.loaded.paths[path]
        yield symbols[facts["seed"]], 1.0
        yield from ((symbols[gradient], 0.0) for gradient in facts["gradients"].values())

    # ------------------------------------------------------------ running
    def forward(self, path: str) -> None:
        """Run a path's forward and loss sections on the data in its placeholders and on the results that it reads.

        It uses the batch of these data, and rejects data of different batches.
        """
        self._change(self.loaded.path(path), FORWARD)

    def backward(self, path: str) -> None:
        """Gradients of the loss; if the program accumulates, they add up until `end_round`."""
        self._change(self.loaded.path(path), ("backward",))

    def optimize(self, path: str) -> None:
        """Update the parameters."""
        path = self.loaded.path(path)
        self.loaded.training(path)
        with self.record.change, self.record.turn.mine:
            if path not in self.record.open:  # an accumulated gradient is part of the image
                self._needs_forward(path)
            self._run(path, ("optimize",))

    def end_round(self, path: str) -> None:
        """Clear the gradients for the next learning batch."""
        self._change(self.loaded.path(path), ("end_round",))

    def run_section(self, path: str, phase: str) -> None:
        """Run one section of a path: forward, loss, backward, optimize or end_round."""
        checks.choice("section", phase, PHASES)
        self._change(self.loaded.path(path), (phase,))

    def _change(self, path: str, phases: tuple[str, ...]) -> None:
        if phases[0] not in FORWARD:
            self.loaded.training(path)
        with self.record.change, self.record.turn.mine:
            self._run(path, phases)

    def step_on(self, data: Sequence[Any], path: str) -> float | None:
        """One training step on a batch: arrays for the placeholders of the path, in the order they were declared."""
        self.loaded.training(path)
        names = self.loaded.feeds(path)
        if len(data) != len(names):
            raise CalcError(f"step takes {len(names)} arrays ({', '.join(names)}), not {len(data)}")
        arrays = {name: self.numbers(name, array) for name, array in zip(names, data)}
        batches = self.check_batch(arrays)
        self._check_trains(path, batches)
        with self.record.change, self.record.turn.mine:
            self.place(arrays, batches)
            return self.run_whole(1, path)

    def run_whole(self, n: int, path: str) -> float | None:
        """``n`` whole steps on the data in the heap, in this thread's turn; returns the last loss."""
        loss = self.loaded.paths[path].get("loss")
        slot = self.slot
        self.run_round(path, PHASES, n)
        return None if loss is None else slot.scalar(self.loaded.symbol(loss).offset)

    def before_turn(self, path: str, phases: tuple[str, ...] = FORWARD) -> Any:
        """The lock to take before the turn to run a round: the one for changes, if that changes the model, else the turn's."""
        paths = (path, *(other for other, _ in self.loaded.before(path, phases)))
        return self.record.turn.mine if self.loaded.changes.isdisjoint(paths) else self.record.change

    def run_round(self, path: str, phases: tuple[str, ...] = FORWARD, steps: int = 1) -> None:
        """Run phases of a path ``steps`` times, after computing the other paths' results that they read once."""
        loaded, record = self.loaded, self.record
        with self.before_turn(path, phases), record.turn.mine:
            if "backward" in phases and loaded.least(path)[0] > 1:
                self.heap.enter(record)  # takes note of compiled calls
                self._check_trains(path, {name: self.held(name) for name in loaded.feeds(path)})
            for other in loaded.before(path, phases):
                self._run(*other)
            self._run(path, phases, steps)

    def _check_trains(self, path: str, batches: Mapping[str, int]) -> None:
        """Check that a path can train with the batches in its placeholders."""
        for name, batch in batches.items():
            if self.loaded.has_samples(name):
                self.loaded.check_trains(path, batch)

    def _needs_forward(self, path: str) -> int:
        """The batch of the path's last forward."""
        ran = self.record.ran
        if not {(path, phase) for phase in FORWARD} <= ran.keys():
            raise CalcError(f"path {path!r} has not been run forward: call forward({path!r}) first")
        return ran[path, "forward"]

    def _run(
        self, path: str, phases: tuple[str, ...], steps: int = 1, rows: tuple[np.ndarray, int] | None = None
    ) -> None:
        """Run phases of a path in this thread's turn.

        Values that the rows overwrite are marked as gone before the run, and as available after it.

        rows : instead of those for the batch, as from `Loaded.rows_at`.
        """
        loaded, record, slot = self.loaded, self.record, self.slot
        start, stop = loaded.span(path, phases)
        made: tuple[tuple[str, str], ...] = ()
        if phases[0] in ("optimize", "end_round"):  # they read the persistent part
            batch = record.ran.get((path, "forward"), self.program.batch_size)
        elif phases[0] == "backward":
            batch = self._needs_forward(path)
            loaded.check_trains(path, batch)
            self._needs_arena(path)
            record.arena = None  # until it has completed
        else:
            batch, made = self._batch_of(path, phases), loaded.makes(path, phases)
            record.unmake(path, phases)
        rows = loaded.rows(batch) if rows is None else rows  # a reference: another thread may drop them from the cache
        address = rows[1]
        slot.job[J.ROWS : J.STEPS + 1] = address, start, stop, steps
        record.changed |= path in loaded.changes
        if "backward" in phases:
            record.graded.add(path)
            if path in loaded.accumulating:
                record.open.add(path)
        slot.execute("run_rows", slot.job, slot.job_address, record.workers)
        if phases[-1] == "end_round":
            record.open.discard(path)
        if made or phases[0] == "backward":
            for section in made:
                record.ran[section] = batch
            record.arena = path

    def _needs_arena(self, path: str) -> None:
        """Require that the path's forward results are still there, and the data that it read."""
        other = self.record.arena
        if other != path:
            why = (
                f"path {other!r} has run since forward({path!r}), and paths share the memory of what they compute"
                if other is not None
                else f"data that forward({path!r}) read have been set again"
            )
            raise CalcError(f"{why}: call forward({path!r}) again before backward({path!r})")

    def _batch_of(self, path: str, phases: tuple[str, ...]) -> int:
        """The batch of the data that phases of a path read: in placeholders, and in results of other paths."""
        loaded, found = self.loaded, 0
        for name in loaded.needs(path, phases):
            batch = self._batch_in(name)
            if loaded.symbol(name).elems.a:
                if found and batch != found:
                    self._refuse_batches(path, phases)
                found = batch
        if phases[0] != "forward":
            batch = self.record.ran.get((path, "forward"), found)
            if found and batch != found:
                self._refuse_batches(path, phases)
            found = batch
        return found or self.program.batch_size

    def _refuse_batches(self, path: str, phases: tuple[str, ...]) -> NoReturn:
        names = [name for name in self.loaded.needs(path, phases) if self.loaded.symbol(name).elems.a]
        sizes = {name: self._batch_in(name) for name in names}
        if phases[0] != "forward":
            sizes[f"path {path}"] = self.record.ran[path, "forward"]
        held = ", ".join(f"{name!r}: {batch}" for name, batch in sizes.items())
        raise ShapeError(
            f"path {path!r} reads batches of different sizes ({held}): set placeholders of the same number of "
            "samples, and run the paths whose results it reads on them"
        )


class Views(dict[str, np.ndarray]):
    """Views by name; assigning another array would have no effect on the model."""

    def __setitem__(self, name: str, value: Any) -> None:
        if self.get(name) is not value:  # += assigns the same array
            raise CalcError(f"{name!r} is a view of the model's memory: set what it shows, [{name!r}][...] = array")

    def __call__(self) -> NoReturn:
        raise CalcError("parameters are a mapping, not a method: model.parameters[name]; the optimizer is the model's")

    def __reduce__(self) -> tuple[Any, ...]:  # a copy is no view of the model
        return dict, (dict(self),)


def _dense(array: np.ndarray) -> str:
    """The hint for labels with an axis too many."""
    axis = next((i for i in (array.ndim - 1, 1) if array.shape[i] == 1), None)
    if axis is None:
        return " of labels: for one number per class, give a target_shape with the classes"
    return f" of labels: write np.asarray(y)[{':, ' * axis}0]"


def _check_labels(name: str, labels: np.ndarray, classes: int, ignored: int | None) -> None:
    """Reject labels, or other indexes, that are not below ``classes``, except the ignored one."""
    if labels.dtype == np.int64 and labels.view(np.uint64).max() < classes:  # the common case in one pass
        return
    given = labels
    if ignored is not None and not (labels := labels[labels != ignored]).size:
        return
    low, high = labels.min(), labels.max()
    parts = labels[labels != np.floor(labels)] if labels.dtype.kind == "f" else np.zeros(0)
    if len(parts) or not (low >= 0 and high < classes):
        found = outside(labels, parts[0]) if len(parts) else f"{low} to {high}" if labels.ndim else low
        if given.ndim and not len(parts):
            wrong = (given < 0) | (given >= classes) & (given != ignored)
            found += f", {given[wrong][0]} at index {index_of(given, int(np.argmax(wrong)))}"
        but = "" if ignored is None else f", or {ignored}, which is ignored"
        raise CalcError(f"{name!r}: indexes and labels must be integers in [0, {classes}){but}; found {found}")
