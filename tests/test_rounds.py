"""Raw jobs: batches gathered as numpy gathers them, tasks and fleets that train to the bits of `Model.fit`."""

import threading

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.vm.memory.epoch import shuffling_key
from calcvm.vm.run import job as J
from calcvm.vm.run.entry import address, entry
from calcvm.vm.run.loaded import loaded_of

M64 = 2**64 - 1
GUARD = 16


# ---------------------------------------------------------------- gathering
def mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & M64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & M64
    return x ^ (x >> 31)


def shuffled(n, key):
    """The order of n samples that a key chooses: saved models rely on it."""
    bits = (n - 1).bit_length()
    mask, half = (1 << bits) - 1, (bits + 1) // 2
    rounds = [mix((key + k * 0x9E3779B97F4A7C15) & M64) for k in range(1, (6 if bits <= 6 else 3) + 1)]
    order = []
    for x in range(n):
        while True:
            for h in rounds:
                x = (x * (h >> 32 | 1) + h) & mask
                x ^= x >> half
            if x < n:
                break
        order.append(x)
    return order


class Gathering:
    """A job without rows: batches go from arrays into a hand-made heap, and from there to outputs."""

    def __init__(self, arrays, dtype, batch, *, key=None, index=None):
        self.dtype, self.arrays, self.index = np.dtype(dtype), arrays, index
        sizes = [int(np.prod(a.shape[1:])) for a in arrays]
        self.samples = n = len(arrays[0]) if index is None else len(index)
        self.heap = np.full(GUARD + sum(batch * e + GUARD for e in sizes), np.nan, dtype)
        self.inside = np.zeros(self.heap.size, bool)
        self.outputs = [np.full(n * e + 2 * GUARD, np.nan, dtype) for e in sizes]
        offset, feeds, drains = GUARD, [], []
        for array, e, out in zip(arrays, sizes, self.outputs):
            feeds.append((array.ctypes.data, J.FEED_DTYPES[array.dtype.name], e, offset))
            inner = out.ctypes.data + GUARD * self.dtype.itemsize
            drains.append((inner, J.FEED_DTYPES[dtype], e, offset))
            self.inside[offset : offset + batch * e] = True
            offset += batch * e + GUARD
        self.sums, self.results = np.zeros(1), np.array([feeds[0][3]], np.int64)
        self.feeds, self.drains = np.array(feeds, np.int64), np.array(drains, np.int64)
        self.control = np.zeros(J.CONTROL_BYTES // 8, np.int64)
        job = self.job = np.zeros(J.JOB_WORDS, np.int64)
        job[[J.HEAP, J.ITEMSIZE]] = self.heap.ctypes.data, self.dtype.itemsize
        job[[J.FEEDS, J.N_FEEDS]] = self.feeds.ctypes.data, len(feeds)
        job[[J.DRAINS, J.N_DRAINS]] = self.drains.ctypes.data, len(drains)
        job[[J.RESULTS, J.N_RESULTS, J.SUMS]] = self.results.ctypes.data, 1, self.sums.ctypes.data
        job[[J.N_SAMPLES, J.BATCH, J.LEARNING]] = n, batch, batch
        job[[J.COUNT, J.SEED_OFF]] = -(-n // batch), -1
        job[[J.SHUFFLE, J.KEY]] = (0, 0) if key is None else (1, key)
        job[J.INDEX] = 0 if index is None else index.ctypes.data

    def run(self, workers=1):
        job = self.job
        self.control[J.FIT // 8] = workers
        job[[J.TEAM, J.BARRIER]] = workers, self.control.ctypes.data
        first, count = (int(job[w]) for w in (J.FIRST, J.COUNT))
        # A team goes on to the next batch while worker 0 delivers: here that would overwrite what is delivered.
        job[J.COUNT] = count if workers == 1 else 1
        for k in range(first, first + count, int(job[J.COUNT])):
            job[J.FIRST] = k
            in_threads(workers, lambda w: entry("run_rounds")(job.ctypes.data, w))
        assert np.isnan(self.heap[~self.inside]).all(), "wrote outside the placeholders"
        for out in self.outputs:
            assert np.isnan(out[:GUARD]).all() and np.isnan(out[-GUARD:]).all(), "wrote outside an output"
        return [out[GUARD:-GUARD].reshape(self.samples, -1) for out in self.outputs]


def in_threads(n, work):
    threads = [threading.Thread(target=work, args=(w,)) for w in range(1, n)]
    for t in threads:
        t.start()
    work(0)
    for t in threads:
        t.join()


def numbers(rng, dtype, shape):
    kind = np.dtype(dtype).kind
    if kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    low, high = (0, 256) if kind == "u" else (-(2**30), 2**30)
    return rng.integers(low, high, shape).astype(dtype)


@pytest.mark.parametrize("heap", ["float32", "float64"])
@pytest.mark.parametrize("dtype", list(J.FEED_DTYPES))
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
def test_batches_are_gathered_as_numpy_gathers_them(heap, dtype, shuffle, indexed):
    rng = np.random.default_rng(0)
    for elems, n, batch in [
        (1, 1, 1), (1, 100, 33), (2, 37, 5), (3, 64, 64), (4, 130, 50), (7, 5, 8), (15, 90, 31), (16, 100, 32),
        (17, 40, 7), (64, 70, 16), (101, 33, 32),
    ]:  # fmt: skip
        arrays = [numbers(rng, dtype, (n, elems)), numbers(rng, "int64", n), numbers(rng, heap, (n, elems))]
        index = rng.integers(0, n, 2 * n + 1) if indexed else None
        key = int(rng.integers(2**63)) if shuffle else None
        size = len(index) if indexed else n
        order = np.array(shuffled(size, key)) if shuffle else np.arange(size)
        where = index[order] if indexed else order
        for workers in (1, 2, 3):
            job = Gathering(arrays, heap, batch, key=key, index=index)
            for out, array in zip(job.run(workers), arrays):
                wanted = array.reshape(n, -1)[where].astype(heap)
                assert out.tobytes() == wanted.tobytes(), (elems, n, batch, workers)
            first = arrays[0].reshape(n, -1)[where, 0].astype(heap).astype(np.float64)
            counts = [min(batch, size - i) for i in range(0, size, batch)]
            assert job.sums[0] == pytest.approx(float(np.dot(first[::batch], counts)), rel=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 31, 32, 33, 64, 65, 1000, 4097])
def test_the_order_of_samples_is_the_one_that_saved_models_have(n):
    X = np.arange(n, dtype="int64")
    for key in (0, 1, 5, 0x7FFFFFFFFFFFFFFF, 123456789012345678):
        (out,) = Gathering([X], "float64", 48, key=key).run()
        assert out[:, 0].astype(int).tolist() == shuffled(n, key)


def test_large_arrays_are_asked_for_one_round_ahead():
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((20_011, 16)), rng.integers(0, 4, 20_011)
    order = shuffled(len(X), 9)
    for workers in (1, 2):
        out, labels = Gathering([X, y], "float32", 70, key=9).run(workers)
        assert (out == X[order].astype("float32")).all() and (labels[:, 0] == y[order]).all()


def test_rounds_may_start_in_the_middle_of_an_epoch():
    X = np.arange(100, dtype="float32").reshape(50, 2)
    job = Gathering([X], "float32", 8, key=3)
    whole = job.run()[0].copy()
    job.outputs[0][:] = np.nan
    for first, count in ((0, 1), (1, 4), (5, 2)):
        job.job[[J.FIRST, J.COUNT]] = first, count
        job.run()
    assert job.run()[0].tobytes() == whole.tobytes()


# ---------------------------------------------------------------- tasks
def data(n=203, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, 5)).astype("float32")
    return X, np.argmax(X[:, :classes], 1)


KINDS = {
    "plain": dict(optimizer=cv.Adam(0.01), batch_size=16),
    "wide": dict(optimizer=cv.RMSProp(0.01), batch_size=32, dtype="float64"),
    "adds up": dict(optimizer=cv.SGD(0.05), batch_size=8, learning_batch=30),
}


def make(kind="plain", seed=3, **options):
    net = nn.Linear(9) >> nn.Tanh() >> nn.Dropout(0.1) >> nn.Linear(3)
    return cv.Model(net, input_shape=(5,), seed=seed, **{**KINDS[kind], **options})


def state(model):
    """Everything that the model is, its gradients included."""
    cells = model.elements
    kept = [s for s in model.program.symbols if s.persistent]
    return {s.name: cells[s.offset : s.offset + s.elems.b].tobytes() for s in kept}


class Task:
    """A model's training on arrays as a raw task; validation (X, y) as its judge."""

    def __init__(self, model, X, y, epochs, *, validation=None, patience=None, index=None, shuffle=True):
        self.model, self.index, self.keep = model, index, []
        self.losses, self.scores = np.full(epochs, np.nan), np.full((epochs, 2), np.nan)
        job = self.job = self._rounds(("forward", "loss", "backward"), "learn", X, y, ["loss"], self.losses)
        job[J.LEARNING] = model.learning_batch
        learning, batch, n = (int(job[w]) for w in (J.LEARNING, J.BATCH, J.N_SAMPLES))
        if index is not None:
            job[[J.INDEX, J.N_SAMPLES]] = index.ctypes.data, len(index)
            n = len(index)
        short, rest = learning % batch, n % learning % batch
        job[[J.ROWS_SHORT, J.ROWS_LAST]] = self._rows(short or batch), self._rows(rest or batch)
        job[J.ROUNDS] = n // learning * -(-learning // batch) + -(-(n % learning) // batch)
        ends = self._spans("learn", ("optimize", "end_round"))
        job[[J.END_SPANS, J.N_END_SPANS]] = ends.ctypes.data, len(ends)
        facts = model.program.info["paths"]["learn"]
        job[J.SEED_OFF] = model.program.symbols[facts["seed"]].offset if facts["accumulate"] else -1
        job[[J.SHUFFLE, J.SEED]] = shuffle, model.seed
        job[[J.EPOCH, J.LIMIT]] = model.epochs_done, model.epochs_done + epochs
        job[[J.PATIENCE]] = -1 if patience is None else patience
        job[J.BEST : J.BEST + 1].view(np.float64)[:] = np.inf
        if validation is not None:
            names = ["predict.loss", "accuracy"]
            self.judge = self._rounds(("forward", "loss"), "predict", *validation, names, self.scores)
            job[J.JUDGE] = self.judge.ctypes.data

    def _rounds(self, phases, path, X, y, results, means):
        program, resident = self.model.program, self.model
        job = np.zeros(J.TASK_WORDS, np.int64)
        batch, n = program.batch_size, len(X)
        offsets = [program.symbols[program.info["variables"][r]["symbol"]].offset for r in results]
        feeds = [
            (a.ctypes.data, J.FEED_DTYPES[a.dtype.name], a.size // n, program.symbol(name).offset)
            for name, a in (("input", X), ("target", y))
        ]
        spans, feeds, offsets = self._spans(path, phases), np.array(feeds, np.int64), np.array(offsets, np.int64)
        sums = np.full(len(results), np.nan)
        self.keep += [X, y, feeds, offsets, sums]
        job[[J.CODE, J.TABLE]] = address("run_rounds"), loaded_of(program).table_address
        job[J.ROW_BYTES] = program.row_bytes
        job[[J.HEAP, J.ITEMSIZE]] = resident.elements.ctypes.data, program.itemsize
        job[[J.SPANS, J.N_SPANS]] = spans.ctypes.data, len(spans)
        job[[J.FEEDS, J.N_FEEDS]] = feeds.ctypes.data, len(feeds)
        job[[J.RESULTS, J.N_RESULTS]] = offsets.ctypes.data, len(offsets)
        job[[J.SUMS, J.MEANS]] = sums.ctypes.data, means.ctypes.data
        job[[J.N_SAMPLES, J.BATCH, J.LEARNING]] = n, batch, batch
        job[[J.ROWS_FULL, J.ROWS_LAST]] = self._rows(batch), self._rows(n % batch or batch)
        job[[J.ROUNDS, J.SEED_OFF]] = -(-n // batch), -1
        return job

    def _rows(self, batch):
        self.keep.append(self.model.program.rows_for(batch))
        return self.keep[-1].ctypes.data

    def _spans(self, path, phases):
        sections = self.model.program.sections
        self.keep.append(np.array([sections[path, p] for p in phases if (path, p) in sections], np.int64))
        return self.keep[-1]

    def run(self, budget, turns=10**6):
        for _ in range(turns):
            if self.status != J.READY:
                break
            entry("run_task")(self.job.ctypes.data, budget)
        return self

    @property
    def status(self):
        return int(self.job[J.STATUS])

    def figures(self):
        n = int(self.job[J.EPOCH]) - self.model.epochs_done
        figures = {"loss": self.losses[:n].tolist()}
        if self.job[J.JUDGE]:
            figures["val_loss"], figures["val_accuracy"] = self.scores[:n].T.tolist()
        return figures

    def equals(self, fitted, history):
        for name, values in self.figures().items():
            assert values == history[name], name
        assert state(self.model) == state(fitted)


def run_fleet(tasks, workers=1, budget=7, laps=10**6):
    addresses = np.array([t.job.ctypes.data for t in tasks], np.int64)
    job = np.zeros(J.FLEET_WORDS, np.int64)
    job[[J.TASKS, J.N_TASKS]] = addresses.ctypes.data, len(tasks)
    job[[J.SLICE, J.LAPS]] = budget, laps
    in_threads(workers, lambda w: entry("run_fleet")(job.ctypes.data, w))
    return int(job[J.NEXT])


@pytest.mark.parametrize("budget", [1, 7, 10**6])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_task_trains_as_fit_does(kind, budget):
    X, y = data()
    held = data(50, seed=1)
    fitted = make(kind)
    history = fitted.fit(X, y, epochs=4, validation=held, progress=False)
    task = Task(make(kind), X, y, 4, validation=held).run(budget)
    assert task.status == J.FINISHED and task.job[J.EPOCH] == 4
    task.equals(fitted, history)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_task_goes_on_with_a_higher_limit(shuffle):
    X, y = data()
    fitted = make()
    first = fitted.fit(X, y, epochs=2, shuffle=shuffle, progress=False)
    second = fitted.fit(X, y, epochs=3, shuffle=shuffle, progress=False)
    task = Task(make(), X, y, 5, shuffle=shuffle)
    task.job[J.LIMIT] = 2
    task.run(5)
    task.job[[J.LIMIT, J.STATUS]] = 5, J.READY
    task.run(5)
    assert task.figures()["loss"] == first["loss"] + second["loss"]
    assert state(task.model) == state(fitted)


def test_samples_by_index_train_as_their_copies_do():
    X, y = data()
    index = np.random.default_rng(0).permutation(len(X))[:90]
    fitted = make()
    history = fitted.fit(X[index], y[index], epochs=3, progress=False)
    Task(make(), X, y, 3, index=index).run(4).equals(fitted, history)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**62 + 12345])
def test_a_task_has_the_models_shuffling_keys(seed):
    X, y = data(40)
    model, task = make(seed=seed), Task(make(seed=seed), X, y, 2)
    for _ in range(2):
        task.run(int(task.job[J.ROUNDS]), turns=1)
        assert task.job[J.KEY] == shuffling_key(model.seed, model.epochs_done)
        model.fit(X, y, progress=False)


@pytest.mark.parametrize("patience", [0, 1, 3, None])
def test_patience_is_fits(patience):
    X, y = data(60)
    held = X, np.roll(y, 7)  # nothing to learn: the validation loss rises soon
    fitted, options = make(optimizer=cv.Adam(0.1)), dict(validation=held, patience=patience)
    history = fitted.fit(X, y, epochs=30, progress=False, **options)
    assert (len(history) < 30) == (patience is not None)
    for budget in (1, 10**6):
        task = Task(make(optimizer=cv.Adam(0.1)), X, y, 30, **options).run(budget)
        assert task.status == (J.FINISHED if patience is None else J.STOPPED)
        assert task.job[J.EPOCH] == len(history)
        task.equals(fitted, history)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 7, 10**6])
def test_a_fleet_trains_as_fit_does_for_any_number_of_workers(workers, budget):
    X, y = data()
    wanted = [(kind, seed, 2 + seed) for kind in KINDS for seed in range(3)]
    tasks = [Task(make(kind, seed), X, y, epochs, validation=(X[:30], y[:30])) for kind, seed, epochs in wanted]
    run_fleet(tasks, workers, budget)
    for task, (kind, seed, epochs) in zip(tasks, wanted):
        fitted = make(kind, seed)
        history = fitted.fit(X, y, epochs=epochs, validation=(X[:30], y[:30]), progress=False)
        assert task.status == J.FINISHED and task.job[J.CLAIM] == 0
        task.equals(fitted, history)


def test_a_fleets_call_gives_as_many_turns_as_it_was_told():
    X, y = data()
    tasks = [Task(make(seed=s), X, y, 100) for s in range(3)]
    for lap in range(1, 4):
        run_fleet(tasks, budget=5, laps=1)
        assert [int(t.job[J.FIRST]) for t in tasks] == [5 * lap % 13] * 3  # 13 rounds an epoch
    assert [t.status for t in tasks] == [J.READY] * 3


def test_a_task_that_is_held_or_not_ready_is_passed_over():
    X, y = data()
    tasks = [Task(make(seed=s), X, y, 2) for s in range(3)]
    tasks[0].job[J.CLAIM] = 1
    tasks[1].job[J.STATUS] = J.STOPPED
    before = [state(t.model) for t in tasks]
    turns = run_fleet(tasks, workers=2)
    assert state(tasks[0].model) == before[0] and tasks[0].job[J.CLAIM] == 1
    assert state(tasks[1].model) == before[1] and tasks[1].status == J.STOPPED
    assert tasks[2].status == J.FINISHED
    assert turns < 100, "workers go when nothing is left to do"


def test_a_loss_that_is_not_finite_stops_its_task_alone():
    X, y = data()
    options = dict(loss="mse", target_shape=(3,), optimizer=cv.SGD(1e6))
    bad, good = Task(make(**options), X[:16], X[:16, :3].copy(), 50), Task(make(), X, y, 2)  # a round an epoch: to Inf
    run_fleet([bad, good], workers=2)
    assert bad.status == J.NOT_FINITE and good.status == J.FINISHED
    losses = bad.figures()["loss"]
    assert len(losses) == bad.job[J.EPOCH] < 50
    assert np.isinf(losses[-1]) and np.isfinite(losses[:-1]).all()


def test_a_trap_stops_its_task_alone_and_stays_to_be_read():
    X, y = data()
    wrong = y.copy()
    wrong[150] = 3
    bad, good = Task(make(), X, wrong, 2, shuffle=False), Task(make(), X, y, 2)
    run_fleet([bad, good], workers=2, budget=1)
    assert bad.status == J.TRAPPED and good.status == J.FINISHED
    assert bad.job[J.FIRST] == 150 // 16 + 1, "at the end of the turn it happened in"
    code, row = (int(v) for v in bad.model.elements[:2])
    assert code == 1 and bad.model.program.spec(row).name.startswith("softmax_cross_entropy")


def test_a_trap_in_the_judge_stops_the_task():
    X, y = data()
    task = Task(make(), X, y, 5, validation=(X[:20], np.full(20, 7))).run(10**6)
    assert task.status == J.TRAPPED and task.job[J.EPOCH] == 1
