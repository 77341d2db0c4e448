"""How a heap makes and hands out its models; `calcvm.CalcHeap` is this for `calcvm.Model`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from calcvm import checks, hints
from calcvm.vm.calls import methods
from calcvm.vm.memory.base_model import BaseModel
from calcvm.vm.memory.heap import Heap, open_paths
from calcvm.vm.memory.record import Record
from calcvm.vm.program.program import Program

M = TypeVar("M", bound=BaseModel)


class ModelHeap(Heap, Generic[M]):
    """A heap whose models are of class ``kind``."""

    kind: type[M]

    @hints.hinted
    def create(self, program: Program, seed: int = 0, workers: int | None = None, name: str | None = None) -> M:
        """A new model: place a program in the heap and initialize its parameters from ``seed``.

        Parameters
        ----------
        workers : int, optional
            Size of the team that runs it (default: the program's).
        name : str, optional
            Its name in the store and the heap (default: ``model-0``, ``model-1``, ...).

        Raises
        ------
        PlanError : the program is larger than the heap (``needed`` and ``allowed`` bytes).
        CalcError : the name is in use, or the program is compiled for another device.
        """
        return self.add(self.kind.__new__(self.kind), program, seed, workers, name)

    def add(self, model: M, program: Program, seed: int = 0, workers: int | None = None, name: str | None = None) -> M:
        """As `create`, for a new `Model` object that is in no heap yet."""
        check_program(program)
        seed = checks.integer("seed", seed, 0)
        values = {"program": program.hash, "seed": seed, "epochs": 0}
        return self._begin(model, program, values, workers, name, lambda: model.initialize(seed))

    def adopt(
        self,
        program: Program,
        facts: Mapping[str, Any],
        image: np.ndarray,
        workers: int | None = None,
        name: str | None = None,
        kind: type[M] | None = None,
    ) -> M:
        """A model from elsewhere: its facts, and its image with gradients (`Slot.get_image`); otherwise as `create`."""
        kind = kind or self.kind
        model = kind.__new__(kind)

        def fill() -> None:
            model.slot.set_image(image, open=True)
            model.record.changed, model.record.open = True, open_paths(model.loaded, facts)

        return self._begin(model, program, facts, workers, name, fill)

    def _begin(
        self,
        model: M,
        program: Program,
        facts: Mapping[str, Any],
        workers: int | None,
        name: str | None,
        fill: Callable[[], None],
    ) -> M:
        def complete(record: Record) -> None:
            model.heap, model.record = self, record
            fill()

        self._models[self.begin(program, facts, workers, name, complete).name] = model
        methods.prepare(model)
        return model

    @hints.hinted
    def open(self, name: str, *, workers: int | None = None) -> M:
        """A model of the store, by name, for instance one that an earlier process trained.

        Raises
        ------
        CalcError : there is no such model, or it is for another device.
        PlanError : it is larger than the heap (``needed`` and ``allowed`` bytes).
        ProgramError : its file is truncated, altered or foreign; the error names the file.
        """
        with self.still:
            return self._model(self.find(name, workers))

    def __getitem__(self, name: str) -> M:
        return self.open(name)

    @property
    def latest(self) -> M | None:
        """The most recently used model."""
        with self.still:
            return None if self._last is None else self._model(self._last)

    def _model(self, record: Record) -> M:
        """The object of a model: the one that the user holds, or a new one."""
        model = self._models.get(record.name)
        if model is None or model.record is not record:
            model = self.kind.__new__(self.kind)
            vars(model).update(heap=self, record=record)  # 1.5 us less than `Closed.__setattr__`
            methods.prepare(model)
            self._models[record.name] = model  # at last: an interrupt leaves none in part
        return model


def check_program(program: Any) -> None:
    """Require a compiled program; its source is often given instead."""
    hint = {"Model": ": its .program", "CalcGraph": ": cv.compile(graph)", "Plan": ": cv.compile(graph, plan=plan)"}
    kind = type(program).__name__
    wanted = f"a compiled program{hint.get(kind, ' (cv.compile, cv.load_program)')}"
    checks.one_of("a model of the heap", program, Program, wanted)
