"""Streams: samples that come one after the other, of which a model keeps the state in between."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any
from weakref import WeakSet

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, ShapeError, Uncopied
from calcvm.model.roles import PREDICT, STREAM
from calcvm.ops.dims import Affine
from calcvm.vm.calls import methods
from calcvm.vm.memory.base_model import BaseModel
from calcvm.vm.run.feeds import numbers, numeric, plain
from calcvm.vm.run.loaded import FORWARD

PHASES, BATCH = FORWARD[:1], (Affine(1, 0),)


class Stream(methods.HasFastMethods, Uncopied):
    """Samples at some places of a model's batch: each call is the next step of each, from the state that the last one left.

    Made by `Model.stream`.  Calls change the model's carries at these places only, so a model has as many streams as its
    batch has places.  They go on after the model was trained, with its new parameters, and after it was switched out or loaded
    (``save(state=True)``).  A `predict` of n samples by the same path is a step of the first n places.

    Each call has ``batch`` samples: any other number raises a `ShapeError`.  After ``model.close()`` every call raises a `CalcError`.
    A call that raises an error changes no state, except that a `Trap` comes after its step has run.

    Attributes
    ----------
    place, batch : the first place, and the number of samples of a call.

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x, t, total = g.placeholder("x", (None, 1)), g.placeholder("t", (None, 1)), g.carry("total", (None, 1))
    >>> with g.path("learn", backward=True) as learn:
    ...     y = x @ g.parameter("W", (1, 1))
    ...     learn.minimize(cv.mse(y, t), cv.SGD(0.1), output=y)
    >>> with g.path("predict") as predict:
    ...     predict.output = cv.carry(total, total + x)
    >>> model = cv.Model(g, batch_size=10)
    >>> one, another = model.stream(), model.stream()
    >>> for number in (1.0, 2.0, 3.0):
    ...     y = one([number])
    >>> y, another([5.0])
    (array([6.], dtype=float32), array([5.], dtype=float32))
    >>> one.state["total"]
    array([[6.]], dtype=float32)
    """

    _instead = "model.stream(place=stream.place) is another one at its place"

    def __init__(self, model: BaseModel, path: str, place: int, batch: int):
        self.model, self.path, self.place, self.batch = model, path, place, batch
        loaded, self.places = model.loaded, slice(place, place + batch)
        self._feeds, self.rows = loaded.feeds(path, PHASES), loaded.rows_at(path, batch, place)
        self._outputs = loaded.paths[path].get("outputs", [loaded.paths[path]["output"]])
        methods.prepare(self)

    @property
    def record(self) -> Any:
        return self.model.record

    def _given(self, inputs: tuple[Any, ...]) -> tuple[dict[str, np.ndarray], bool]:
        """The arrays by name, and whether they are one sample without the batch."""
        names, loaded = self._feeds, self.model.loaded
        if len(inputs) != len(names):
            raise CalcError(f"a stream takes {len(names)} arrays ({', '.join(names)}), not {len(inputs)}")
        arrays = {name: numbers(name, x, loaded.own_types.get(name, "")) for name, x in zip(names, inputs)}
        ranks = {name: len(loaded.forms[name]) - loaded.has_samples(name) for name in names}
        return arrays, self.batch == 1 and all(array.ndim == ranks[name] for name, array in arrays.items())

    def _plain(self, *inputs: Any) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
        own = self.model.loaded.own_types
        return tuple([plain(name, array, own.get(name, "")) for name, array in self._given(inputs)[0].items()]), {}

    @methods.native(_plain)
    def __call__(self, *inputs: Any) -> Any:
        """The path's output for the next step of each sample; a tuple of its outputs, if it has several.

        inputs : arrays (batch, *shape) for the path's placeholders in the order of declaration; of a single sample also (*shape),
            and the output has no batch then either.
        """
        model, path, loaded = self.model, self.path, self.model.loaded
        arrays, single = self._given(inputs)
        for name in arrays if single else ():
            arrays[name] = np.expand_dims(arrays[name], [k for k, size in enumerate(loaded.forms[name]) if size.a])
        arrays = {name: model.numbers(name, array) for name, array in arrays.items()}
        batches = model.check_batch(arrays)
        if wrong := [name for name in arrays if loaded.has_samples(name) and batches[name] != self.batch]:
            raise ShapeError(f"{wrong[0]!r}: data of {batches[wrong[0]]} samples, the stream has {self.batch}")
        with model.record.change, model.record.turn.mine:
            start = perf_counter()
            try:
                model.place(arrays, batches)
                for of in (*loaded.before(path, PHASES), (path, PHASES)):
                    model._run(*of, rows=self.rows)
            finally:
                model.record.forget()
            found = [model.slot.cells(loaded.symbol(y), loaded.shape(y, self.batch)).copy() for y in self._outputs]
            methods.arm_stream(self, self._outputs, start)
        methods.offer(model)
        if single:
            found = [
                y.reshape(y.shape[1:]) if loaded.forms[name][:1] == BATCH else y
                for name, y in zip(self._outputs, found)
            ]
        return found[0] if len(found) == 1 else tuple(found)

    def _calcvm_trapped(self) -> None:
        self.model._calcvm_trapped()  # type: ignore[attr-defined]

    @property
    def state(self) -> dict[str, np.ndarray]:
        """Its part of the model's carries, by name: views as in `Model.carries`; some or all can be set to arrays."""
        return {name: array[self.places] for name, array in self.model.carries.items()}

    @state.setter
    def state(self, values: Mapping[str, Any]) -> None:
        loaded, carries, given = self.model.loaded, self.model.program.info["carries"], {}
        for name, value in checks.one_of("stream: state", values, Mapping, 'a mapping such as {"h": array}').items():
            if name not in carries:
                raise CalcError(f"stream: no carry {checks.shown(name)}; there are {', '.join(carries)}")
            array, shape = numeric(name, numbers(name, value)), loaded.shape(name, self.batch)
            if array.shape != shape:
                raise ShapeError(f"stream: the state {name!r} of shape {array.shape}; {shape} is wanted")
            given[name] = array
        self.model.set_states(self.places, given)

    def reset(self, samples: Any = None) -> None:
        """Set its state back to the start, of all samples, or of some: their places among those of a call.

        Raises
        ------
        CalcError : a place is no integer in [0, batch).
        """
        if samples is None:
            samples = range(self.batch)
        within = [checks.integer("stream.reset: a sample", k, 0, self.batch - 1) for k in np.ravel(samples).tolist()]
        self.model.reset_state([self.place + k for k in within])


def stream_of(model: BaseModel, path: str | None, place: int | None, batch: int, takes: bool = True) -> Stream:
    """`Model.stream`.  ``takes`` : whether others find its places taken, as long as it is there."""
    loaded, most = model.loaded, model.batch_size
    path = loaded.path(path if path is not None else STREAM if STREAM in loaded.paths else PREDICT)
    facts = loaded.paths[path]
    if facts["backward"]:
        raise CalcError(f"stream: path {path!r} trains: take a path that only predicts")
    if not loaded.carried(path):
        others = [repr(p) for p, of in loaded.paths.items() if loaded.carried(p) and not of["backward"]]
        hint = f"take {' or '.join(others)}" if others else "cv.carry(state, new) in it does"
        raise CalcError(f"stream: path {path!r} keeps no state from call to call: {hint}")
    for name in facts.get("outputs", [facts["output"]]):
        if name is None or loaded.variables[name]["kind"] != "result":
            given = "no output" if name is None else f"the output {name!r}, which no operator computes"
            raise CalcError(f"stream: path {path!r} has {given}: {path}.output = result")
    batch = checks.integer("stream: batch", batch, 1, most)
    with model.heap.still:  # two threads never get one place
        streams: WeakSet[Stream] = vars(model).setdefault("_streams", WeakSet())
        if place is None:
            taken = np.zeros(most, np.int64)
            for stream in streams:
                taken[stream.places] = 1
            several = np.convolve(taken, np.ones(batch, np.int64), "valid")  # at each place and the next ones
            place = int(np.argmin(several))
            if several[place]:
                raise CalcError(
                    f"stream: all {most} places of the model's batch have streams: drop one, or compile with a larger batch_size"
                )
        made = Stream(model, path, checks.integer("stream: place", place, 0, most - batch), batch)
        if takes:
            streams.add(made)
    return made
