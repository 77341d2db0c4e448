"""Whole passes over data sets in compiled code: feeds, rounds, sums of results, outputs.

Fetching and delivering are words of the job, not rows: rows of an untrusted file must not hold addresses.  Rounds have up to
three sizes (technical batch, rest of a learning batch, rest of the data), each with its own patched copy of the rows.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from hashlib import blake2b
from threading import get_ident

import numpy as np

from calcvm.errors import CalcError, ShapeError
from calcvm.ops.layouts import axes
from calcvm.vm.memory.base_model import BaseModel
from calcvm.vm.memory.slot import Slot
from calcvm.vm.memory.totals import Totals
from calcvm.vm.program.facts import check_learning_batch
from calcvm.vm.program.program import Symbol
from calcvm.vm.run import job as J
from calcvm.vm.run.feeds import code_of, of_batches, readable
from calcvm.vm.run.slices import ended, latest, sliced


class Epoch:
    """Passes over the samples of arrays, in batches, through a path of a model.

    data : placeholder -> array of samples, read in place if possible (`calcvm.vm.run.feeds`).
        If it contains the path's output, the network does not run: the results use these outputs.
    held : arrays without samples, such as a table; written to the heap before rounds run.
    samples : indexes of the samples to use (default: all), or a slice; the arrays are not copied.
    order : makes the indexes, all of them, of each pass from its key; it is instead of ``samples``.
    train : each round also runs backward, and each learning batch ends with an update (``trains``: the paths that learn).
    learning : samples per learning batch (default: the program's batch, one round each).
    results : scalar results over the samples.  A mean over samples becomes the mean of the pass, a sum its sum.  A function of such
        totals is computed from the totals of the whole pass, at its end; in training only with ``of_totals``.  Any other result is
        the mean over the learning batches.
    outputs : result -> array that receives its value for every sample.
    """

    def __init__(
        self,
        model: BaseModel,
        data: Mapping[str, np.ndarray],
        path: str,
        *,
        samples: np.ndarray | slice | None = None,
        train: bool = False,
        learning: int | None = None,
        results: Sequence[str] = (),
        of_totals: bool = False,
        outputs: Mapping[str, np.ndarray] | None = None,
        check_finite: bool = False,
        order: Callable[[int | None], np.ndarray] | None = None,
    ):
        program, loaded = model.program, model.loaded
        device = self._device = loaded.device
        self.model, self.names = model, list(results)
        self.trains: tuple[str, ...] = (path,) if train else ()
        self._changes = path in loaded.changes
        data = {name: model.numbers(name, array) for name, array in data.items()}
        finite = program.dtype if check_finite else ""
        self.held = {name: data.pop(name) for name in [*data] if not loaded.has_samples(name)}
        for name, array in self.held.items():
            model.check(name, readable(name, array, finite, loaded.own_types.get(name, "")))
        if not data:
            raise ShapeError(f"no data have samples ({', '.join(self.held)}): use step, or run")
        if isinstance(samples, slice):
            data, samples = {name: array[samples] for name, array in data.items()}, None
        sizes = {name: model.check(name, array, samples=True) for name, array in data.items()}
        if len(set(sizes.values())) > 1:
            raise ShapeError(f"the arrays differ in their number of samples ({sizes})")
        n = next(iter(sizes.values()))
        self._index = None if samples is None else _index(samples, n)
        self.samples = n = n if self._index is None else len(self._index)
        batch = program.batch_size
        learning = batch if learning is None else learning
        if not 1 <= learning <= batch:  # compiled code does not check it
            check_learning_batch(program, learning)
        short, rest = learning % batch, n % learning % batch
        for size, of in ((short * (n >= learning), learning), (rest, n)) if train else ():
            if size:
                loaded.check_trains(path, size, of)
        self.rounds = n // learning * -(-learning // batch) + -(-(n % learning) // batch)
        own = loaded.own_types
        symbols = {name: loaded.symbol(name) for name in (*data, *(outputs or ()))}
        output = loaded.paths[path]["output"]
        if given := output in data:
            symbols[output] = lies = loaded.computed(path, output)
            data[output] = data[output].transpose(axes(lies.layout, data[output].ndim))
        self._arrays = [readable(name, array, finite, own.get(name, "")) for name, array in data.items()]
        self._feeds = np.array(
            [_feed(model, name, a, device.samples(a), symbols[name]) for name, a in zip(data, self._arrays)], np.int64
        )
        self._outputs = outputs or {}
        drains = [_feed(model, name, a, device.output(a), symbols[name]) for name, a in self._outputs.items()]
        self._drains = np.array(drains, np.int64).reshape(-1, J.FEED_WORDS)
        for name in results:
            if loaded.symbol(name).elems != 1 or name in own:
                raise CalcError(f"{name!r} is not a single number: it has no mean over the samples")
        facts = loaded.training(path) if train else {}
        offsets = [
            _counted(loaded.symbol(name).offset, str(loaded.variables[name].get("over")), name == facts.get("loss"))
            for name in results
        ]
        others = [name for name in results if self.rounds > 1 and loaded.variables[name].get("over") == "other"]
        functions = [n for n in others if n != facts.get("loss") or loaded.variables[n]["totals"]]
        functions = functions if of_totals or not train else []
        for name in functions:
            self._check_function(name)
        self._totals = Totals(model, path, functions, len(offsets))
        offsets += [_counted(offset, kind) for offset, kind in self._totals.elements]
        self._functions = self._totals.table(self.names)
        self._found: dict[str, float] = {}
        self._results = np.array(offsets, np.int64)
        self._sums = device.shared(max(len(offsets), 1))
        phases = ("forward", "loss", "backward") if train else ("forward", "loss") if results else ("forward",)
        ends = [loaded.span(path, ("optimize", "end_round"))] if train else []
        phases = ("loss",) if given else phases
        missing = [name for name in loaded.feeds(path, phases) if name not in data and name not in self.held]
        if missing:
            raise CalcError(f"path {path!r} needs data for {', '.join(map(repr, missing))} too")
        spans = loaded.round(path, *phases)
        turn = loaded.runs(*spans, *ends)
        spans, parts = loaded.cut((*spans,), model.workers)
        alone = model.workers > 1 and not train and self.rounds == 1 and n <= loaded.brief(path, phases)
        self._workers = 1 if alone else model.workers
        self._parts = range(1, parts + 1) if parts > 1 else range(1)  # 0: whole rounds
        self._spans = np.array(spans, np.int64)
        self._end_spans = np.array(ends, np.int64).reshape(-1, 2)
        self._rows = [loaded.rows(b or batch) for b in (batch, short, rest)]
        self._adds_up = bool(facts.get("accumulate"))
        whole = (
            train and loaded.variables[facts["loss"]].get("over") == "sum"
        )  # for a sum, each round's gradient counts in full
        weighs = self._adds_up and not whole
        seed_off = program.symbols[facts["seed"]].offset if weighs else -1
        job = self.job = np.zeros(J.TASK_WORDS, np.int64)
        self._job_address = job.ctypes.data  # read once: each read takes as long as a small round
        device.prepare_task(job, loaded)
        job[J.ROW_BYTES] = program.row_bytes
        job[J.ROWS_FULL : J.ROWS_LAST + 1] = [address for _, address in self._rows]
        if parts == 1:
            job[J.PACE] = self._rows[0][1] + int(self._spans[0, 0]) * program.row_bytes + 1
        for word, count, array in (
            (J.SPANS, J.N_SPANS, self._spans),
            (J.END_SPANS, J.N_END_SPANS, self._end_spans),
            (J.FEEDS, J.N_FEEDS, self._feeds),
            (J.DRAINS, J.N_DRAINS, self._drains),
            (J.RESULTS, J.N_RESULTS, self._results),
        ):
            job[word], job[count] = device.constant(array), len(array)
        job[[J.SUMS, J.PARTS, J.TURN]] = self._sums.address, self._parts[-1], turn
        job[J.N_SAMPLES : J.LEARNING + 1] = n, batch, learning
        job[J.ITEMSIZE : J.SEED_OFF + 1] = program.itemsize, seed_off
        job[J.INDEX] = 0 if self._index is None else device.constant(self._index)
        self._make_order = order
        if order is not None:
            self._drawn = device.shared(n, np.int64)
            job[J.INDEX] = self._drawn.address
        job[J.FUNCTIONS] = device.constant(self._functions) if functions else 0
        self._per_round = 0.0  # seconds, by the last measurement
        self._before = 0  # passes before the current one

    def release(self) -> None:
        """Drop the arrays; the model is closed, so no pass can begin."""
        self._arrays.clear()

    def begin(self, key: int | None) -> None:
        """Start a pass, in the order that ``key`` selects, or in the data's order (None).

        Leftovers of an unfinished learning batch are discarded.
        """
        if self._adds_up:
            for path in self.model.record.open.intersection(self.trains):
                self.model.drop_added(path)
        before, job = self.passes, self.job
        self._before = before  # no signal is handled between this and the next statement
        job[J.REACHED] = job[J.FIRST] = 0
        self._found.clear()
        self._sums.array[:] = 0
        if self._make_order is not None:
            self._drawn.array[:], key = self._make_order(key), None
        job[J.SHUFFLE], job[J.KEY] = (0, 0) if key is None else (1, key)

    @property
    def passes(self) -> int:
        """Number of complete passes."""
        return self._before + (self.job.item(J.REACHED) == self.rounds)

    def slices(self, seconds: float, marks: Sequence[int] = ()) -> Generator[int, None, None]:
        """Run the pass in slices of about ``seconds``, one turn each; yields the number of finished rounds.

        A slice ends when a multiple of one of ``marks`` is reached.
        A thread that trains holds the model's ``change`` from `begin` to the end.
        """
        try:
            yield from self._slices(seconds, marks)
            self._device.collect(*self._outputs.values())
        finally:  # also if training was interrupted in the middle of a learning batch
            for path in self.trains:
                self.model.drop_added(path)

    def whole(self, seconds: float) -> None:
        """Run a pass in the data's order, as one turn, in slices that allow Ctrl-C."""
        with self.model.record.turn.mine:
            self.begin(None)
            for _ in self.slices(seconds):
                pass

    def _check_function(self, name: str) -> None:
        facts, batch = self.model.loaded.variables[name], self.model.program.batch_size
        if not facts["totals"]:
            raise CalcError(
                f"{name!r} of {self.samples} samples in batches of {batch}: it is no function of means or sums over "
                f"samples, because {facts['why']} combines a batch in another way; compile with batch_size={self.samples}, leave "
                "it out, or compute it from the output of predict"
            )

    def _slices(self, seconds: float, marks: Sequence[int]) -> Iterator[int]:
        first = int(seconds / self._per_round) if self._per_round else 1
        for done, each in sliced(self.rounds, first, seconds, self._run, marks):
            self._per_round = each
            yield done

    def epochs(self, n: int, seconds: float, shuffle: bool = True) -> Iterator[list[float]]:
        """Train for ``n`` passes, shuffled by the model's seed; yields the results' means of each pass.

        With one worker, compiled code continues from pass to pass, and returns after ``seconds``.
        """
        model, facts = self.model, self.model.facts
        if model.workers > 1:
            for _ in range(n):
                self.begin(shuffling_key(model.seed, facts["epochs"]) if shuffle else None)
                for _ in self.slices(seconds):
                    pass
                facts["epochs"] += 1
                yield [self.mean(name) for name in self.names]
            return
        job, first, shared = self.job, facts["epochs"], self._device.shared(n * len(self._results))
        means = shared.array.reshape(n, len(self._results))[:, : len(self.names)]
        job[[J.ROUNDS, J.MEANS]] = self.rounds, shared.address
        job[[J.SEED, J.SHUFFLE, J.EPOCH]] = model.seed, shuffle, first
        job[[J.LIMIT, J.FIRST, J.PART, J.PATIENCE]] = first + n, 0, 0, -1
        try:
            while facts["epochs"] < first + n:
                job[J.STATUS] = J.READY  # also after a loss that is not finite
                done = facts["epochs"]
                count = max(1, int(seconds / self._per_round)) if self._per_round else 1
                with model.record.turn.mine:
                    slot, start = self._enter(), time.perf_counter()
                    before = job[J.EPOCH] * self.rounds + job[J.FIRST]
                    job[J.COUNT] = count
                    slot.execute("run_task", job, self._job_address, 1)
                    while job[J.PART]:  # a round runs to its end while the model is in the heap
                        slot.execute("run_task", job, self._job_address, 1)
                    self._device.collect()
                rounds = int(job[J.EPOCH] * self.rounds + job[J.FIRST] - before)
                self._per_round = (time.perf_counter() - start) / max(rounds, 1)
                facts["epochs"] = int(job[J.EPOCH])
                yield from means[done - first : facts["epochs"] - first].tolist()
        finally:
            model.drop_added(self.trains[0])

    def _run(self, count: int) -> float:
        """Run the next ``count`` whole rounds in a turn; returns the seconds they took."""
        with self.model.record.turn.mine:
            slot, start = self._enter(), time.perf_counter()
            run_rounds(slot, self.job, self._job_address, self._workers, count, self._parts)
            self._device.collect()
            return time.perf_counter() - start

    def _enter(self) -> Slot:
        """Prepare the job for the model's place in the heap."""
        slot = self.model.slot
        self.occupy()
        self.hold(slot)
        self.job[J.HEAP] = slot.address
        return slot

    def hold(self, slot: Slot) -> None:
        """Write the arrays that have no samples."""
        for name, array in self.held.items():
            slot.write(self.model.loaded.symbol(name), array, array.shape)

    def occupy(self) -> None:
        """Record the effect of rounds on the model: earlier contents of placeholders and results are gone."""
        record = self.model.record
        record.forget()
        record.changed |= self._changes
        if self.trains:
            record.graded.update(self.trains)
            record.trains = get_ident()
            if self._adds_up:  # until the pass is settled; readers leave it as it is
                record.open.update(self.trains)
                record.passing = self.trains

    def mean(self, name: str) -> float:
        """A result over the samples seen so far in this pass."""
        if name in self._totals and self.passes > self._before:
            if not self._found:
                with self.model.record.turn.mine:
                    self._found = self._totals.results(self._totals.seen(self._sums.array / self.samples))
            return self._found[name]
        return float(self._sums.array[self.names.index(name)]) / max(self._seen(name), 1)

    def _seen(self, name: str) -> int:
        """The samples so far in this pass, of a result."""
        seen, reached = self.samples, self.job.item(J.REACHED)
        if reached < self.rounds:
            batch, learning = int(self.job[J.BATCH]), int(self.job[J.LEARNING])
            whole, part = divmod(reached, -(-learning // batch))
            seen = min(whole * learning + min(part * batch, learning), seen)
        return seen


def run_rounds(
    slot: Slot, job: np.ndarray, address: int, workers: int, count: int, parts: Sequence[int] = range(1)
) -> None:
    """Run the next ``count`` rounds of a job, each in ``parts`` (0: whole)."""
    first = job.item(J.REACHED)
    stop = first + count
    while first < stop:
        job[J.FIRST], job[J.COUNT] = first, stop - first if len(parts) == 1 else 1
        if workers > 1:
            job[J.DEADLINE], job[J.UNTIL] = latest(), 0
        for job[J.PART] in parts:
            slot.execute("run_rounds", job, address, workers)
        first = ended(job, first + job.item(J.COUNT))


def _counted(offset: int, over: str, by_learning: bool = False) -> int:
    """A result's offset for `calcvm.vm.run.samples.deliver`, marked if it is a sum over the pass, or over learning batches."""
    return offset if over != "sum" else -1 - offset - (J.BY_LEARNING if by_learning else 0)


_indexes: weakref.WeakValueDictionary[bytes, np.ndarray] = weakref.WeakValueDictionary()


def _index(samples: object, n: int) -> np.ndarray:
    """Sample indexes, checked and copied, because compiled code does not check them; equal ones share one array."""
    batches = isinstance(samples, list) and of_batches(samples)  # their rows may differ in shape
    index = np.empty((), object) if batches else np.asarray(samples)
    if index.dtype == bool and index.shape == (n,):
        index = np.flatnonzero(index)
    if index.ndim != 1 or index.dtype.kind not in "iu" or not len(index):
        raise CalcError(
            f"samples: give a slice or indexes of samples, shape (n,); this is {index.dtype} {index.shape}{of_batches(samples)}"
        )
    low, high = index.min(), index.max()
    if low < 0 or high >= n:
        raise CalcError(f"samples: indexes from {low} to {high}, but there are {n} samples, 0 to {n - 1}")
    index = np.array(index, np.int64)
    key = blake2b(index.data, digest_size=16).digest()
    if (known := _indexes.get(key)) is None or not np.array_equal(known, index):
        known = _indexes[key] = index
    known.flags.writeable = False
    return known


def shuffling_key(seed: int, epoch: int) -> int:
    """The key of an epoch's sample order: a function of the model's seed and the number of earlier epochs."""
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1342543DE82EF95 + 1) % 2**63


def _feed(model: BaseModel, name: str, array: np.ndarray, address: int, to: Symbol) -> tuple[int, int, int, int]:
    shape = model.program.info["variables"][name]["shape"]
    if not shape or shape[0] != [1, 0]:
        raise ShapeError(f"{name!r}: data sets need the batch as the first dimension")
    per_sample = array.size // len(array)
    code = code_of(array, name in model.loaded.own_types)
    return address, code, per_sample, to.offset
