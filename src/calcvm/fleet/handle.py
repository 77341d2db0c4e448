"""`Handle`: one model of a fleet, with its progress and figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from calcvm import checks, hints
from calcvm.errors import CalcError, Trap, Uncopied
from calcvm.fleet.tasks import Tasks
from calcvm.model import Model
from calcvm.vm.memory.epoch import Epoch
from calcvm.vm.memory.order import EpochInOrder
from calcvm.vm.memory.slot import Slot
from calcvm.vm.run import job as J
from calcvm.vm.run.pieces import Shared

STATUS = {
    J.FINISHED: "done",
    J.STOPPED: "stopped early",
    J.NOT_FINITE: "not finite",
    J.TRAPPED: "trapped",
}


@dataclass(frozen=True, eq=False)
class Converted:
    """A converted array, with the original that compiled code cannot read in place.

    Models that read it keep it alive, and so ``given``; therefore no other object can have the id of ``given``.
    """

    given: Any
    array: np.ndarray


@hints.names_of_others
class Handle(Uncopied):
    """A model of a fleet: its state, epochs and losses.

    Attributes
    ----------
    name : str
    status : "waiting", "done" (all epochs trained), "stopped early" (by patience), "not finite" (its loss), "trapped" (by
        a kernel), "stopped" (by `stop`) or "closed"; ``error`` gives the reason or place.
    own_epochs : its number of epochs in each `Fleet.fit`, if `Fleet.add` gave one.
    nbytes : bytes of the heap that it occupies while it trains.
    model : the `Model`: predict, evaluate, save.
    """

    _instead = "copy its model, handle.model; the copy has its own heap"

    def __init__(
        self,
        tasks: Tasks,
        handles: dict[str, Handle],
        model: Model,
        train: Epoch,
        judge: Epoch | None,
        epochs: int | None,
        sources: list[Converted],
        keep_best: bool = False,
    ):
        self._sources = sources
        self._tasks, self._handles = tasks, handles
        self.model, self._train, self._judge, self.own_epochs = model, train, judge, epochs
        self.name, self.nbytes = model.name, model.program.heap_bytes
        self.status, self.error = "waiting", ""
        self._best: np.ndarray | None = None  # the state after the best epoch
        if keep_best:
            loaded = model.loaded
            self._best = np.zeros(-(-loaded.image_bytes(open=False) // 4) * 4, np.uint8)
            train.job[[J.KEEP, J.IMAGE, J.IMAGE_BYTES]] = (
                loaded.device.output(self._best), loaded.image[0], self._best.nbytes,
            )  # fmt: skip
        self._place = tasks.take(train.job)
        self._judge_place = -1 if judge is None else tasks.take(judge.job, judges=self._place)
        self._address = 0  # of the slot that the task points at
        self._before = int(model.facts["epochs"])  # epochs of earlier runs
        # one row per epoch: means of results, then arguments of functions of means
        self._means = [np.zeros((0, int(run.job[J.N_RESULTS]))) for run in (train, judge) if run]
        self._shared: dict[int, Shared] = {}  # owners of these arrays
        self._longer: Shared | None = None  # the replacement for one of them

    def __repr__(self) -> str:
        return f"<{self.name!r}: {self.status}, {self.epochs_done} epochs, loss {self.loss:.4g}>"

    @property
    def epochs_done(self) -> int:
        """Whole epochs trained so far, including those of earlier processes."""
        while True:
            place, job = self._place, self._job
            done = int(job[J.EPOCH])
            if place == self._place:  # else it was closed meanwhile, and the place may have been reused
                return done

    @property
    def losses(self) -> np.ndarray:
        """Mean training loss of each epoch in this fleet, shape (n_epochs,); with an ``order`` that of its first path."""
        return self._column(0, 0)

    @property
    def losses_of(self) -> dict[str, np.ndarray]:
        """As `losses`, by name: ``loss``, or with an ``order`` those of its paths, such as ``critic.loss``."""
        paths = self._train.trains if isinstance(self._train, EpochInOrder) else ()
        names = [f"{path}.loss" for path in paths] or ["loss"]
        return {name: self._column(0, i) for i, name in enumerate(names)}

    @property
    def loss(self) -> float:
        """The last of `losses`; NaN before the first epoch."""
        return last(self.losses)

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """Figures on the validation data after each epoch, by name: ``val_loss``, ``val_accuracy``."""
        names = self._judge.names if self._judge else []
        return {f"val_{name.removeprefix('predict.')}": self._column(1, i) for i, name in enumerate(names)}

    @property
    def val_losses(self) -> np.ndarray:
        """Loss on the validation data after each epoch, shape (n_epochs,).

        Raises
        ------
        CalcError : path ``predict`` has no result called ``predict.loss``.  `metrics` has the figures that exist.
        """
        if self._judge is None:
            return np.zeros(0)
        if "val_loss" not in (figures := self.metrics):
            raise CalcError(
                f"model {self.name!r} has the figures {', '.join(figures)}, and no val_loss: read handle.metrics, or name the "
                "result of path 'predict' that is its loss 'predict.loss'"
            )
        return figures["val_loss"]

    @property
    def val_loss(self) -> float:
        return last(self.val_losses)

    @property
    def figures(self) -> dict[str, float]:
        """The last of `losses`, and of each of `metrics`, by name; NaN before the first epoch.

        With an ``order``, each path has its loss, such as ``critic.loss``, in place of ``loss``.
        """
        return {name: last(values) for name, values in {**self.losses_of, **self.metrics}.items()}

    def __getitem__(self, name: Any) -> NoReturn:
        told = f"figures[{name!r}]" if str(name) in self.figures else hints.NAMES["Handle"].get(str(name), str(name))
        raise CalcError(
            f"a handle has attributes: read handle.{told.removeprefix('handle.')} in place of [{checks.shown(name)}]"
        )

    @property
    def kept(self) -> int | None:
        """The epoch of `losses`, from 0, whose state ``keep_best`` keeps; None if there is none."""
        if self._best is None or not np.isfinite(losses := self.val_losses).any():
            return None
        return int(np.nanargmin(losses))

    def stop(self, reason: str = "") -> None:
        """Stop training the model; it can still be used.  A training in progress finishes its current epoch."""
        with self._tasks.turn.mine:  # between two slices
            self.status, self.error = "stopped", reason
            self._tasks.stops = True

    def close(self) -> None:
        """Free its room in the heap at once.  A `FileStore` keeps its file."""
        self.model.close()
        self.status = "closed"
        with self._tasks.turn.mine:
            if self._place >= 0:
                self._train.job[:] = self._tasks.rows[self._place]  # so its figures can still be read
                places = self.places
                self._place = self._judge_place = -1
                self._tasks.give_back(places)
            if self._handles.get(self.name) is self:
                del self._handles[self.name]
        self._sources.clear()
        for run in filter(None, (self._train, self._judge)):
            run.release()

    # ------------------------------------------------------------ for the fleet
    @property
    def _job(self) -> np.ndarray:
        """The words of its task."""
        place = self._place
        return self._train.job if place < 0 else self._tasks.rows[place]

    @property
    def places(self) -> list[int]:
        """The places of its tasks in the table."""
        return [place for place in (self._place, self._judge_place) if place >= 0]

    @property
    def open(self) -> bool:
        """Whether it can be trained further."""
        return self.status in ("waiting", "done") and self.model.record.loaded is not None

    @property
    def ends(self) -> bool:
        """Whether training leaves the model alone: it is not open, and not stopped in the middle of an epoch."""
        return not (self.open or self.stops_later)

    @property
    def wanted(self) -> bool:
        """Whether another thread waits until the heap has room for it."""
        return self.model.record.slot is None and self.model.record.turn.taken

    @property
    def stops_later(self) -> bool:
        """Whether it was stopped in the middle of an epoch."""
        there = self.model.record.loaded is not None
        return self.status == "stopped" and there and bool(self._job[J.FIRST])

    def limit(self, goal: int) -> int:
        """The epoch to train to: ``goal``, or the end of the current epoch if the model is stopped."""
        return goal if self.status != "stopped" else self.epochs_done + self.stops_later

    def _column(self, which: int, i: int) -> np.ndarray:
        return self._means[which][: self.epochs_done - self._before, i].copy()

    def _enter(self, slot: Slot, goal: int) -> None:
        """Point the task at its slot of the heap, with room for the figures of epochs up to ``goal``."""
        if slot.address != self._address:
            for words in self._jobs:
                words[J.HEAP] = slot.address
            self._address = slot.address
        wanted = goal - self._before
        for i, means in enumerate(self._means):
            if len(means) < wanted:
                words, done = self._jobs[i], self.epochs_done - self._before
                n = max(wanted, 2 * len(means))
                self._longer = slot.loaded.device.shared(n * means.shape[1])
                longer = self._longer.array.reshape(n, means.shape[1])
                longer[:done] = means[:done]
                words[J.MEANS] = self._longer.address + longer.strides[0] * done  # each epoch advances it
                self._means[i] = longer
                self._shared[i] = self._longer  # only now, because the task pointed at the old array until here
        self._train.occupy()
        self._train.hold(slot)

    def _leave(self, slot: Slot, status: int, epoch: int, first: int) -> None:
        """Record the progress of the task, before its slot may go to another model."""
        record = self.model.record
        record.facts["epochs"], record.trains = epoch, 0
        if first == 0:
            record.open.difference_update(self._train.trains)
            record.passing = ()
        if self.status != "stopped":
            self.status = STATUS.get(status, "waiting")
        if status == J.TRAPPED:
            try:
                slot.check()
            except Trap as error:
                self.error = str(error)
        elif status == J.NOT_FINITE:
            self.error = f"the loss of epoch {epoch} is {self.loss}"

    def _give_best(self, slot: Slot) -> None:
        """Restore the state after the best epoch, if it is kept and was not the last."""
        there = self.model.record.loaded is not None
        if self._best is not None and there and self.kept not in (None, len(self.losses) - 1):
            slot.loaded.device.collect(self._best)
            self.model.record.forget()
            slot.set_image(self._best[: slot.loaded.image_bytes(open=False)])

    @property
    def _jobs(self) -> list[np.ndarray]:
        return [self._job] if self._judge is None else [self._job, self._tasks.rows[self._judge_place]]


def last(values: np.ndarray) -> float:
    return float(values[-1]) if len(values) else float("nan")
