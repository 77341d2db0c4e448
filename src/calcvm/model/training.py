"""The loop of `Model.fit`: epochs in compiled code, validation after each epoch, and callbacks."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from calcvm.errors import CalcError, CalcWarning
from calcvm.model.callbacks import Callback, reason
from calcvm.model.data import Batches
from calcvm.model.history import History
from calcvm.progress import Epochs
from calcvm.vm.memory.epoch import Epoch, shuffling_key
from calcvm.vm.run.slices import SLICE_SECONDS

if TYPE_CHECKING:
    from calcvm.vm.memory.base_model import BaseModel


class Training:
    """A training of a model.

    trained : results of the training, the loss first, with their names in a `History`.
    run : the passes over its data, or over a stream of batches; it provides the means of these results.
    judge : returns figures of the validation data, after an epoch.
    callbacks : called after steps and epochs; they may end the training.
    checkpoint : epochs between two writes of the model to a persistent store.
    """

    def __init__(
        self,
        model: BaseModel,
        trained: Mapping[str, str],
        run: Epoch | Batches,
        judge: Callable[[], dict[str, float]] | None,
        callbacks: Sequence[Callback],
        checkpoint: int,
    ):
        self.model, self.run, self.judge, self.callbacks = model, run, judge, callbacks
        self.trained = trained
        self.loss = next(iter(trained))
        self._losses = [name for name in trained.values() if name == "loss" or name.endswith(".loss")] + ["val_loss"]
        self._per_step = -(-model.learning_batch // model.batch_size) if isinstance(run, Epoch) else 1  # rounds
        self.checkpoint = checkpoint
        self._epochs: int | None = None  # the model's count, including the epoch that ends
        self._of_steps = [(c, self._per_step * int(c.every)) for c in callbacks if c.every is not None]

    def epochs(self, n: int, shuffle: bool, terminate_on_nan: bool, progress: bool) -> History:
        """Train for ``n`` epochs, or until a callback ends it; Ctrl-C ends it between two steps."""
        history, diverged = History(), ""
        for c in self.callbacks:
            c.on_train_begin(self.model)
        report = Epochs(n, self.run.rounds, progress)
        try:
            for epoch in range(n):
                start, self._epochs = time.perf_counter(), None
                why = self._pass(epoch, shuffle, report)
                if not why:
                    self._count()
                    figures = self._figures()
                    report.epoch(epoch, figures)
                    history.epochs.append({**figures, "seconds": time.perf_counter() - start})
                    strange = [name for name in self._losses if not np.isfinite(figures.get(name, 0.0))]
                    if strange and not diverged:
                        diverged = f"the {strange[0]} of epoch {epoch + 1} is {figures[strange[0]]}"
                        why = diverged if terminate_on_nan else ""
                    ends = [reason(c, c.on_epoch_end(self.model, epoch, figures)) for c in self.callbacks]
                    why = why or next(filter(None, ends), "")
                if why:
                    history.stopped = why
                    break
        except KeyboardInterrupt:
            history.stopped = "interrupted"
        finally:  # an epoch may be over, but not yet recorded
            if self.run.passes > len(history.epochs):
                self._count()
                history.epochs.append({**self._trained(), "seconds": time.perf_counter() - start})
            report.close()
            if history.epochs:
                self.model.commit()
        for c in self.callbacks:
            c.on_train_end(self.model, history)
        if diverged and not terminate_on_nan:
            history.stopped += f"; {diverged}"
            warnings.warn(
                f"{diverged}, and training went on: use a smaller learning rate, look for NaN in the data with "
                "check_finite=True, or stop there with terminate_on_nan=True",
                CalcWarning,
                stacklevel=5,  # the line that calls fit; before it are `hinted` and `_training`
            )
        return history

    def _pass(self, epoch: int, shuffle: bool, report: Epochs) -> str:
        """Run an epoch; returns the reason if training ends in it, else ""."""
        model, run, why = self.model, self.run, ""
        run.begin(shuffling_key(model.seed, model.epochs_done) if shuffle else None)
        with closing(run.slices(SLICE_SECONDS, [mark for _, mark in self._of_steps])) as slices:
            for done in slices:
                mean = run.mean(self.loss)
                report.step(epoch, done, mean)
                due = [c for c, mark in self._of_steps if done % mark == 0]
                ends = [reason(c, c.on_step(model, done // self._per_step, mean)) for c in due]
                if why := next(filter(None, ends), ""):
                    break
        if not (isinstance(run, Batches) and run.ended):
            return why
        if epoch == 0:
            raise CalcError("fit: no batch came: the iterable is empty, or was consumed before")
        return f"no batch came in epoch {epoch + 1}"

    def _count(self) -> None:
        """Count an epoch as done; a second call, after an interrupt in the first, changes nothing."""
        if self._epochs is None:
            self._epochs = self.model.epochs_done + 1
        self.model.facts["epochs"] = self._epochs
        if self.run.passes % self.checkpoint == 0:
            self.model.commit()

    def _figures(self) -> dict[str, float]:
        """The figures of the finished epoch."""
        figures = self._trained()
        if self.judge is not None:
            figures |= {f"val_{name}": value for name, value in self.judge().items()}
        return figures

    def _trained(self) -> dict[str, float]:
        """The figures computed during the epoch's training."""
        return {called: self.run.mean(name) for name, called in self.trained.items()}
