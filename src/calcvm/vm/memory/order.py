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
from calcvm.errors import CalcError, ShapeError
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
        if not (isinstance(path, str) and path in trained):
            why = (
                f"path {path!r} does not train"
                if isinstance(path, str) and path in loaded.paths
                else f"no path {checks.shown(path)}"
            )
            raise CalcError(f"{what}: order: {why if paths else 'it is empty'}; {wanted} are wanted")
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
        device, self._parts = self._device, range(1)
        self._results, self._sums = np.zeros(len(words), np.int64), device.shared(len(words))
        for i, of_path in enumerate(words):
            of_path[J.SUMS] = self._sums.address + 8 * i
        at = [device.constant(of_path) for of_path in words]
        self._order = np.array([(at[i], k) for i, (_, k) in zip(self._of, turns)], np.int64)
        job[[J.ORDER, J.N_ORDER]] = device.constant(self._order), len(turns)
        job[[J.COUNTED, J.N_RESULTS, J.SUMS]] = device.constant(self._counted), len(words), self._sums.address
        job[[J.N_FEEDS, J.SEED_OFF, J.PARTS]] = 0, -1, 1
        job[[J.PACE, J.TURN]] = words[0][J.PACE] and words[0][J.PACE] + 1, min(w[J.TURN] for w in words)

    def release(self) -> None:
        super().release()
        for run in self._paths:
            run.release()

    def _seen(self, name: str) -> int:
        done = slice(self.job.item(J.REACHED))
        return int(self._sizes[done][self._of[done] == self.names.index(name)].sum())


class StepsInOrder:
    """A job for steps of paths in turn on data in the heap; ``batches``: of the paths, in the order of their first turns.

    A step is a round of one sample that fetches none: its batch is in the rows.
    """

    def __init__(self, loaded: Loaded, order: tuple[str, ...], batches: Sequence[int]):
        program, self.paths, self.n = loaded.program, [*dict.fromkeys(order)], len(order)
        self._losses = np.zeros(len(self.paths), program.dtype)
        self.sections = [(*loaded.before(path, PHASES), (path, PHASES)) for path in self.paths]
        self.made = [
            dict.fromkeys((made for section in some for made in loaded.makes(*section)), batch)
            for some, batch in zip(self.sections, batches)
        ]
        device, job = loaded.device, np.zeros(J.TASK_WORDS, np.int64)
        self._kept, self._job, self._address, self.turn = list[Any](), job, job.ctypes.data, 2**62
        losses, places = device.output(self._losses), dict[str, int]()
        device.prepare_task(job, loaded)
        job[[J.ROW_BYTES, J.ITEMSIZE, J.SEED_OFF]] = program.row_bytes, program.itemsize, -1
        for path, batch in zip(self.paths, batches):
            loaded.check_trains(path, batch)
            rows, address = loaded.rows(batch)
            loss = loaded.symbol(loaded.training(path)["loss"]).offset
            spans = np.array(loaded.round(path, *PHASES), np.int64)
            drain = np.array([losses + len(places) * program.itemsize, J.FEED_DTYPES[program.dtype], 1, loss], np.int64)
            words = np.zeros(J.JOB_WORDS, np.int64)
            words[[J.N_SAMPLES, J.BATCH, J.LEARNING, J.ROWS_FULL, J.SEED_OFF]] = 1, 1, 1, address, -1
            words[[J.SPANS, J.END_SPANS, J.SUMS, J.RESULTS]] = device.constant(spans)  # the last three are empty
            words[J.DRAINS], words[[J.N_SPANS, J.N_DRAINS]] = device.constant(drain), (len(spans), 1)
            self._kept += [rows, spans, drain, words]
            places[path] = device.constant(words)
            job[J.PACE] = job[J.PACE] or address + 2
            self.turn = min(self.turn, loaded.runs(*loaded.round(path, *PHASES)))
        table = np.array([(places[path], 0) for path in order], np.int64)
        self._kept.append(table)
        job[[J.ORDER, J.N_ORDER]] = device.constant(table), len(table)

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
        slot.loaded.device.collect(self._losses)
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
