"""Paths that learn in turn, in an order such as ("critic", "critic", "generator"), in one call of compiled code.

Each path has its own pass over the samples: its turns take the learning batches of the pass one after the other.  The pass of all
is over when the paths with the most turns have seen every sample.

    turn       critic   critic   generator   critic   critic   generator
    batch      0        1        0           2        3        1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, ShapeError, UnsupportedOperator
from calcvm.ops.statement import PHASES
from calcvm.vm.memory.base_model import BaseModel
from calcvm.vm.memory.epoch import Epoch, run_rounds
from calcvm.vm.memory.slot import Slot
from calcvm.vm.run import job as J
from calcvm.vm.run.feeds import readable
from calcvm.vm.run.loaded import Loaded
from calcvm.vm.run.rounds import round_of
from calcvm.vm.run.slices import SLICE_SECONDS, sliced

KEPT = 16  # jobs of a model for `run_steps` in an order


def checked_order(what: str, loaded: Loaded, order: Any) -> tuple[str, ...]:
    """The paths of an order (CalcError: none, an unknown one, or one that does not train)."""
    trained = [path for path, facts in loaded.paths.items() if facts["backward"]]
    wanted = f"the paths that train, in their order, such as {(*trained,)},"
    paths = checks.items(f"{what}: order", order, wanted)
    for path in paths or [""]:
        if path not in trained:
            why = f"path {path!r} does not train" if path in [*loaded.paths] else f"no path {checks.shown(path)}"
            raise CalcError(f"{what}: order: {why if paths else 'it is empty'}; {wanted} are wanted")
    if not loaded.device.stops:
        raise UnsupportedOperator(
            f"{what}: order: not on device {loaded.device.name!r}: call step(..., path=...) for one path after the other"
        )
    return (*paths,)


@lru_cache(16)
def turns_of(order: tuple[str, ...], n: int, batch: int, learning: int) -> tuple[tuple[str, int], ...]:
    """For each round of a pass over n samples the path that learns, and the round of that path's own pass."""
    per, learnings, seen = -(-learning // batch), -(-n // learning), Counter[str]()
    rounds = n // learning * per + -(-(n % learning) // batch)
    turns: list[tuple[str, int]] = []
    for _ in range(-(-learnings // max(Counter(order).values()))):
        for path in order:
            first = seen[path] * per
            turns += [(path, k) for k in range(first, min(first + per, rounds))]
            seen[path] += 1
    return (*turns,)


class EpochInOrder(Epoch):
    """Passes over the samples of arrays in which several paths learn, as `Epoch`; the results are the losses of the paths.

    data : arrays for the placeholders of all paths.  A path that reads none with samples has batches of the others' size.
    losses : the name of each path's loss.
    """

    def __init__(
        self, model: BaseModel, data: Mapping[str, Any], order: tuple[str, ...], learning: int | None = None, *,
        samples: Any = None, check_finite: bool = False,
    ):  # fmt: skip
        loaded, finite = model.loaded, model.program.dtype if check_finite else ""
        own = loaded.own_types
        data = {n: readable(n, model.numbers(n, array), finite, own.get(n, "")) for n, array in data.items()}
        super().__init__(model, data, order[0], samples=samples, train=True, learning=learning)
        self.trains = (*dict.fromkeys(order),)
        self.losses = {path: str(loaded.training(path)["loss"]) for path in self.trains}
        self.names, self._paths = [*self.losses.values()], []
        for path in self.trains:
            names = loaded.feeds(path)
            names = names if any(loaded.has_samples(name) for name in names) else (*data,)
            own_data = {name: array for name, array in data.items() if name in names}
            self._paths.append(
                Epoch(
                    model, own_data, path, samples=samples, train=True, learning=learning, results=[self.losses[path]]
                )
            )
        job, words = self.job, [path.job for path in self._paths]
        n, batch, learning = (int(job[word]) for word in (J.N_SAMPLES, J.BATCH, J.LEARNING))
        turns = turns_of(order, n, batch, learning)
        self.rounds = len(turns)
        self._of = np.array([self.trains.index(path) for path, _ in turns])  # by round
        self._sizes = np.array([round_of(n, batch, learning, k)[1] for _, k in turns])
        self._counted = np.bincount(self._of, self._sizes)
        self._order = np.array([(words[i].ctypes.data, k) for i, (_, k) in zip(self._of, turns)], np.int64)
        self._results, self._sums = np.zeros(len(self.names), np.int64), self._device.shared(len(self.names))
        for i, own_words in enumerate(words):
            own_words[J.SUMS] = self._sums.address + 8 * i
        self._parts = range(1)
        job[[J.ORDER, J.N_ORDER, J.COUNTED]] = self._order.ctypes.data, len(turns), self._counted.ctypes.data
        job[[J.RESULTS, J.N_RESULTS, J.SUMS]] = self._results.ctypes.data, len(self.names), self._sums.address
        job[[J.N_FEEDS, J.SEED_OFF, J.PARTS]] = 0, -1, 1
        job[[J.PACE, J.TURN]] = words[0][J.PACE] and words[0][J.PACE] + 1, min(own[J.TURN] for own in words)

    def release(self) -> None:
        super().release()
        for run in self._paths:
            run.release()

    def _seen(self, name: str) -> int:
        done = slice(self.job.item(J.REACHED))
        return int(self._sizes[done][self._of[done] == self.names.index(name)].sum())


class StepsInOrder:
    """A job for steps of paths in turn on data in the heap; ``batches``: of the paths, in the order of their first turns."""

    def __init__(self, loaded: Loaded, order: tuple[str, ...], batches: Sequence[int]):
        program, self.paths, self.n = loaded.program, [*dict.fromkeys(order)], len(order)
        self._losses = np.zeros(len(self.paths), program.dtype)
        self.sections = [(*loaded.before(path, PHASES), (path, PHASES)) for path in self.paths]
        self.made = [
            dict.fromkeys((made for section in some for made in loaded.makes(*section)), batch)
            for some, batch in zip(self.sections, batches)
        ]
        # of each path, for a round of one sample: its batch is in the rows
        words, self.turn, self._kept = np.zeros((len(self.paths), J.JOB_WORDS), np.int64), 2**62, list[Any]()
        words[:, [J.N_SAMPLES, J.BATCH, J.LEARNING]], words[:, J.SEED_OFF] = 1, -1
        for i, (path, batch) in enumerate(zip(self.paths, batches)):
            loaded.check_trains(path, batch)
            spans, rows = loaded.round(path, *PHASES), loaded.rows(batch)
            loss = loaded.symbol(loaded.training(path)["loss"]).offset
            drain = self._losses.ctypes.data + i * program.itemsize, J.FEED_DTYPES[program.dtype], 1, loss
            places, drains = np.array(spans, np.int64), np.array(drain, np.int64)
            words[i, [J.SPANS, J.N_SPANS, J.DRAINS, J.N_DRAINS]] = places.ctypes.data, len(spans), drains.ctypes.data, 1
            words[i, J.ROWS_FULL], self.turn = rows[1], min(self.turn, loaded.runs(*spans))
            self._kept += [places, drains, rows[0]]
        table = np.array([(words.ctypes.data + self.paths.index(p) * words.strides[0], 0) for p in order], np.int64)
        self._kept += [words, table]
        job = self._job = np.zeros(J.TASK_WORDS, np.int64)
        loaded.device.prepare_task(job, loaded)
        job[[J.ROW_BYTES, J.ITEMSIZE, J.SEED_OFF]] = program.row_bytes, program.itemsize, -1
        job[[J.ORDER, J.N_ORDER, J.PACE]] = table.ctypes.data, len(table), words[0, J.ROWS_FULL] + 2
        self._address = job.ctypes.data

    def run(self, slot: Slot, rounds: int, workers: int) -> dict[str, float]:
        """Run steps in slices; returns the last loss of each path."""
        job = self._job
        job[J.HEAP], job[J.REACHED] = slot.address, 0
        if rounds <= self.turn:
            run_rounds(slot, job, self._address, workers, rounds)
        else:
            run = partial(run_rounds, slot, job, self._address, workers)
            for _ in sliced(rounds, self.turn, SLICE_SECONDS, run):
                pass
        return dict(zip(self.paths, self._losses.tolist()))


def run_order(model: BaseModel, n: int, order: tuple[str, ...]) -> dict[str, float]:
    """``n`` times a step of each path in turn, in this thread's turn; returns the last loss of each path."""
    loaded, record, slot, batches = model.loaded, model.record, model.slot, list[int]()
    for path in dict.fromkeys(order):
        sizes = {name: model.held(name) for name in loaded.feeds(path) if loaded.has_samples(name)}
        if len({*sizes.values()}) > 1:
            raise ShapeError(f"path {path!r} reads batches of different sizes: {sizes}")
        batches.append(next(iter(sizes.values()), loaded.program.batch_size))
    kept, key = vars(model).setdefault("_orders", {}), (order, *batches)
    steps = kept.get(key)
    if steps is None:
        if len(kept) >= KEPT:
            kept.clear()
        steps = kept[key] = StepsInOrder(loaded, order, batches)
    for some in steps.sections:
        for section in some:
            record.unmake(*section)
    record.changed = True
    record.graded.update(steps.paths)
    losses = steps.run(slot, n * steps.n, model.workers)
    for made in steps.made:
        record.ran.update(made)
    record.arena = order[-1]
    return losses
