"""Streams: samples that come one after the other, of which a model keeps the state in between."""

from __future__ import annotations

from typing import Any

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, ShapeError, Uncopied
from calcvm.vm.memory.base_model import BaseModel
from calcvm.vm.run.loaded import FORWARD


class Stream(Uncopied):
    """Samples at some places of a model's batch: each call is the next step of each, from the state that the last one left.

    Made by `Model.stream`.  Calls change the model's carries at these places only, so a model has as many streams as its
    batch has places.  They go on after the model was trained, switched out or loaded (``save(state=True)``).

    Attributes
    ----------
    place, batch : the first place, and the number of samples of a call.
    """

    _instead = "model.stream(place=stream.place) is another one at its place"

    def __init__(self, model: BaseModel, path: str, place: int, batch: int):
        self.model, self.path, self.place, self.batch = model, path, place, batch
        loaded = model.loaded
        self._feeds, self._rows = loaded.feeds(path, FORWARD[:1]), loaded.rows_at(batch, place)
        self._outputs = loaded.paths[path].get("outputs", [loaded.paths[path]["output"]])

    def __call__(self, *inputs: Any) -> Any:
        """The path's output for the next step of each sample.

        inputs : arrays (batch, *shape) for the path's placeholders in the order of declaration; of a single sample also (*shape),
            and the output has no batch then either.
        """
        model, names = self.model, self._feeds
        if len(inputs) != len(names):
            raise CalcError(f"a stream takes {len(names)} arrays ({', '.join(names)}), not {len(inputs)}")
        arrays = {name: model.numbers(name, x) for name, x in zip(names, inputs)}
        ranks = {name: len(model.loaded.forms[name]) for name in names}
        single = self.batch == 1 and all(array.ndim == ranks[name] - 1 for name, array in arrays.items())
        if single:
            arrays = {name: array[None] for name, array in arrays.items()}
        batches = model.check_batch(arrays)
        if wrong := [name for name, batch in batches.items() if batch != self.batch]:
            raise ShapeError(f"{wrong[0]!r}: data of {batches[wrong[0]]} samples, the stream has {self.batch}")
        with model.record.change, model.record.turn.mine:
            model.place(arrays, batches)
            model._run(self.path, FORWARD[:1], rows=self._rows)
            found = [model[name][0] if single else model[name] for name in self._outputs]
        return found[0] if len(found) == 1 else tuple(found)

    @property
    def state(self) -> dict[str, np.ndarray]:
        """Its part of the model's carries, by name: views as in `Model.carries`."""
        return {name: array[self.place : self.place + self.batch] for name, array in self.model.carries.items()}

    def reset(self) -> None:
        """Set its state back to the start."""
        self.model.reset_state(range(self.place, self.place + self.batch))


def stream_of(model: BaseModel, path: str, place: int | None, batch: int, taken: Any) -> Stream:
    """`Model.stream`; ``taken``: the model's streams."""
    loaded, most = model.loaded, model.batch_size
    path = loaded.path(path)
    if path not in loaded.changes or loaded.paths[path]["backward"]:
        raise CalcError(f"stream: path {path!r} keeps no state from call to call: cv.carry(state, new) in it does")
    batch = checks.integer("stream: batch", batch, 1, most)
    if place is None:
        used = {p for s in taken for p in range(s.place, s.place + s.batch)}
        free = (p for p in range(most - batch + 1) if used.isdisjoint(range(p, p + batch)))
        place = next(free, None)
        if place is None:
            raise CalcError(
                f"stream: all {most} places of the model's batch have streams: drop one, or compile with a larger batch_size"
            )
    place = checks.integer("stream: place", place, 0, most - batch)
    made = Stream(model, path, place, batch)
    taken.add(made)
    return made
