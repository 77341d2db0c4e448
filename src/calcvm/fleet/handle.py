"""`Handle`: what a fleet knows of one of its models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from calcvm.errors import CalcError, Trap, Uncopied
from calcvm.fleet.results import last
from calcvm.model import Model
from calcvm.vm.memory.epoch import Epoch
from calcvm.vm.memory.resident import Resident
from calcvm.vm.memory.slot import Slot
from calcvm.vm.run import job as layout
from calcvm.vm.run.pieces import Shared

if TYPE_CHECKING:
    from calcvm.fleet.fleet import Converted, Fleet

STATUS = {
    layout.FINISHED: "done",
    layout.STOPPED: "stopped early",
    layout.NOT_FINITE: "not finite",
    layout.TRAPPED: "trapped",
}


class Handle(Uncopied):
    """A model of a fleet: how far it is, and what it has reached.

    Attributes
    ----------
    name : str
    status : "waiting", "done" (with the epochs asked for), "stopped early" (its patience), "not finite" (its loss),
        "trapped" (by a kernel), "stopped" (by `stop`) or "closed"; ``error`` says why or where.
    nbytes : bytes of the heap that it takes while it is trained.
    resident : the model in the heap.
    """

    _instead = "its model is, handle.model, which then has a heap of its own"

    def __init__(
        self,
        fleet: Fleet,
        resident: Resident,
        train: Epoch,
        judge: Epoch | None,
        epochs: int | None,
        sources: list[Converted],
        keep_best: bool = False,
    ):
        self._sources = sources
        self._fleet, self.resident, self._train, self._judge, self.epochs = fleet, resident, train, judge, epochs
        self.name, self.nbytes = resident.name, resident.program.heap_bytes
        self.status, self.error = "waiting", ""
        self._best: np.ndarray | None = None  # the state after its best epoch
        if keep_best:
            loaded = resident.loaded
            self._best = np.zeros(-(-loaded.image_bytes(open=False) // 4) * 4, np.uint8)
            train.job[[layout.KEEP, layout.IMAGE, layout.IMAGE_BYTES]] = (
                loaded.device.output(self._best), loaded.image[0], self._best.nbytes,
            )  # fmt: skip
        self._place = fleet._take_place(train.job)
        self._judge_place = -1 if judge is None else fleet._take_place(judge.job, judges=self._place)
        self._address = 0  # of the slot that its task points at
        self._before = int(resident.facts["rounds"])  # epochs of earlier runs
        # a row an epoch: of results, then of what some are functions of
        self._means = [np.zeros((0, int(run.job[layout.N_RESULTS]))) for run in (train, judge) if run]
        self._shared: dict[int, Shared] = {}  # whose arrays these are
        self._longer: Shared | None = None  # what takes the place of one of them
        self._model: Model | None = None

    def __repr__(self) -> str:
        return f"<{self.name!r}: {self.status}, {self.epochs_done} epochs, loss {self.loss:.4g}>"

    @property
    def epochs_done(self) -> int:
        """Whole epochs it has been trained for, those of earlier processes among them."""
        while True:
            place, job = self._place, self._job
            done = int(job[layout.EPOCH])
            if place == self._place:  # else it was closed meanwhile, and the place may be another's
                return done

    @property
    def losses(self) -> np.ndarray:
        """Mean training loss of each epoch in this fleet, shape (n_epochs,)."""
        return self._column(0, 0)

    @property
    def loss(self) -> float:
        """The last of `losses`; NaN before the first epoch."""
        return last(self.losses)

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """Figures of the validation data after each epoch, by name: ``val_loss``, ``val_accuracy``."""
        names = self._judge.names if self._judge else []
        return {f"val_{name.removeprefix('predict.')}": self._column(1, i) for i, name in enumerate(names)}

    @property
    def val_losses(self) -> np.ndarray:
        """Loss on the validation data after each epoch, shape (n_epochs,).

        Raises
        ------
        CalcError : path ``predict`` has no result called ``predict.loss``: `metrics` has what it is judged by.
        """
        if self._judge is None:
            return np.zeros(0)
        if "val_loss" not in (figures := self.metrics):
            raise CalcError(
                f"model {self.name!r} is judged by {', '.join(figures)}, and not by val_loss: read handle.metrics, or call the "
                "result of path 'predict' that is its loss 'predict.loss'"
            )
        return figures["val_loss"]

    @property
    def val_loss(self) -> float:
        return last(self.val_losses)

    @property
    def kept(self) -> int | None:
        """The epoch of `losses`, from 0 on, whose state ``keep_best`` keeps; None: there is none."""
        if self._best is None or not np.isfinite(losses := self.val_losses).any():
            return None
        return int(np.nanargmin(losses))

    @property
    def model(self) -> Model:
        """The model itself: predict, evaluate, save."""
        if self._model is None:
            self._model = Model.on(self.resident)
        return self._model

    def stop(self, reason: str = "") -> None:
        """Train it no more; it can still be used.  Of a training that runs, the epoch it is in is its last."""
        with self._fleet.turn.mine:  # between two slices
            self.status, self.error = "stopped", reason
            self._fleet.stops = True

    def close(self) -> None:
        """Give its room back at once; a `FileStore` keeps its file."""
        self.resident.close()
        self.status = "closed"
        self._fleet._forget(self)
        self._sources.clear()
        for run in filter(None, (self._train, self._judge)):
            run.release()

    # ------------------------------------------------------------ for the fleet
    @property
    def _job(self) -> np.ndarray:
        """Words of its task."""
        place = self._place
        return self._train.job if place < 0 else self._fleet._tasks[place]

    @property
    def open(self) -> bool:
        """Whether it can be trained on."""
        return self.status in ("waiting", "done") and self.resident.record.loaded is not None

    @property
    def ends(self) -> bool:
        """Whether a training that has it leaves it: it cannot be trained on, and is not stopped in the middle of an epoch."""
        return not (self.open or self.stops_later)

    @property
    def stops_later(self) -> bool:
        """Whether it is stopped in the middle of an epoch."""
        there = self.resident.record.loaded is not None
        return self.status == "stopped" and there and bool(self._job[layout.FIRST])

    def limit(self, goal: int) -> int:
        """Up to which epoch it is trained: to ``goal``, or where it is stopped to the end of the one it is in."""
        return goal if self.status != "stopped" else self.epochs_done + self.stops_later

    def _column(self, which: int, i: int) -> np.ndarray:
        return self._means[which][: self.epochs_done - self._before, i].copy()

    def _enter(self, slot: Slot, goal: int) -> None:
        """Point the task at its slot of the heap, with room for the figures of epochs up to ``goal``."""
        if slot.address != self._address:
            for words in self._jobs:
                words[layout.HEAP] = slot.address
            self._address = slot.address
        wanted = goal - self._before
        for i, means in enumerate(self._means):
            if len(means) < wanted:
                words, done = self._jobs[i], self.epochs_done - self._before
                n = max(wanted, 2 * len(means))
                self._longer = slot.loaded.device.shared(n * means.shape[1])
                longer = self._longer.array.reshape(n, means.shape[1])
                longer[:done] = means[:done]
                words[layout.MEANS] = self._longer.address + longer.strides[0] * done  # moved on by each epoch
                self._means[i] = longer
                self._shared[i] = self._longer  # not before: the task points at the old one until it points here
        self._train.occupy()
        self._train.hold(slot)

    def _leave(self, slot: Slot, status: int, epoch: int, first: int) -> None:
        """Take note of where the task stands, before its slot may become another's."""
        record = self.resident.record
        record.facts["rounds"], record.trains = epoch, 0
        if first == 0:
            record.open.discard(self._train.trains)
            record.passing = None
        if self.status != "stopped":
            self.status = STATUS.get(status, "waiting")
        if status == layout.TRAPPED:
            try:
                slot.check()
            except Trap as error:
                self.error = str(error)
        elif status == layout.NOT_FINITE:
            self.error = f"the loss of epoch {epoch} is {self.loss}"

    def _give_best(self, slot: Slot) -> None:
        """Give the model back the state after its best epoch, where that is kept and was not the last."""
        there = self.resident.record.loaded is not None
        if self._best is not None and there and self.kept not in (None, len(self.losses) - 1):
            slot.loaded.device.collect(self._best)
            self.resident.record.forget()
            slot.set_image(self._best[: slot.loaded.image_bytes(open=False)])

    @property
    def _jobs(self) -> list[np.ndarray]:
        return [self._job] if self._judge is None else [self._job, self._fleet._tasks[self._judge_place]]
