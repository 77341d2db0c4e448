"""A state machine over heaps, models, files and fleets, beside a plain NumPy model of what must be.

Rules do what a user does, in any order: load, step, fit, predict, accumulate, change hyperparameters, switch, save,
copy, close, reopen a store, train fleets, and call what must be refused.  After each the model at hand has the losses,
predictions and parameters that NumPy computes in float64, and the heap the free bytes that it says.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import calcvm as cv
from calcvm import nn

N_IN, N_HIDDEN, N_OUT = 3, 4, 2
TOLERANCE = 1e-11
NAMES = ("linear_1.weight", "linear_1.bias", "linear_2.weight", "linear_2.bias")


# ---------------------------------------------------------------- what is trained
class Kind:
    """A program, and what NumPy must know of it."""

    def __init__(self, batch: int, momentum: float, adds_up: bool, workers: int):
        self.batch, self.adds_up, self.rate, self.momentum = batch, adds_up, 0.05, momentum
        net = nn.Linear(N_HIDDEN) >> nn.Tanh() >> nn.Linear(N_OUT)
        graph = cv.build_graph(net, (N_IN,), "mse", cv.SGD(self.rate, momentum=momentum))
        self.program = cv.compile(graph, batch_size=batch, dtype="float64", accumulate=adds_up, workers=workers)
        self._starts: dict[int, dict[str, np.ndarray]] = {}

    def start(self, seed: int) -> dict[str, np.ndarray]:
        """Parameters that ``seed`` draws, from a heap of their own."""
        if seed not in self._starts:
            with cv.CalcHeap(self.program.heap_bytes) as heap:
                model = heap.create(self.program, seed=seed)
                self._starts[seed] = {name: value.copy() for name, value in model.parameters.items()}
        return self._starts[seed]


class Twin:
    """A multi-layer perceptron of one tanh layer, trained by SGD with momentum, in NumPy."""

    def __init__(self, kind: Kind, seed: int):
        self.kind, self.learning = kind, kind.batch
        self.reset(seed)

    def reset(self, seed: int) -> None:
        self.seed, self.epochs = seed, 0
        self.rate, self.momentum = self.kind.rate, self.kind.momentum
        self.p = {name: value.copy() for name, value in self.kind.start(seed).items()}
        self.m = {name: np.zeros_like(value) for name, value in self.p.items()}
        self.drop()

    def drop(self) -> None:
        """Forget what rounds have added up."""
        self.sum = {name: np.zeros_like(value) for name, value in self.p.items()}
        self.open = False

    def predict(self, X: np.ndarray) -> np.ndarray:
        w1, b1, w2, b2 = (self.p[name] for name in NAMES)
        return np.tanh(X @ w1 + b1) @ w2 + b2

    def loss(self, X: np.ndarray, t: np.ndarray) -> float:
        return float(np.mean((self.predict(X) - t) ** 2))

    def backward(self, X: np.ndarray, t: np.ndarray, weight: float = 1.0) -> float:
        """Add the gradient of a batch up; its loss."""
        w1, b1, w2, b2 = (self.p[name] for name in NAMES)
        h = np.tanh(X @ w1 + b1)
        error = h @ w2 + b2 - t
        dy = weight * 2 * error / error.size
        dz = dy @ w2.T * (1 - h * h)
        for name, g in zip(NAMES, (X.T @ dz, dz.sum(0), h.T @ dy, dy.sum(0))):
            self.sum[name] = self.sum[name] + g
        self.open = True
        return float(np.mean(error**2))

    def update(self) -> None:
        for name, g in self.sum.items():
            self.m[name] = self.momentum * self.m[name] + g
            self.p[name] = self.p[name] - self.rate * (self.m[name] if self.kind.momentum else g)
        self.drop()

    def step(self, X: np.ndarray, t: np.ndarray) -> float:
        loss = self.backward(X, t)
        self.update()
        return loss

    def fit(self, X: np.ndarray, t: np.ndarray, epochs: int) -> list[float]:
        """Mean losses of whole epochs, in the data's own order; what has added up by hand is dropped."""
        self.drop()
        losses = []
        for _ in range(epochs):
            total = 0.0
            for first in range(0, len(X), self.learning):
                x, y = X[first : first + self.learning], t[first : first + self.learning]
                for k in range(0, len(x), self.kind.batch):
                    part = slice(k, k + self.kind.batch)
                    total += self.backward(x[part], y[part], len(x[part]) / len(x)) * len(x[part])
                self.update()
            losses.append(total / len(X))
            self.epochs += 1
        return losses


class Entry:
    """A model of the heap and its twin."""

    def __init__(self, resident: cv.Model, twin: Twin):
        self.model, self.twin = resident, twin

    def check(self) -> None:
        for name, value in self.model.parameters.items():
            np.testing.assert_allclose(value, self.twin.p[name], rtol=0, atol=TOLERANCE, err_msg=name)
        assert self.model.epochs_done == self.twin.epochs
        assert self.model.learning_batch == self.twin.learning
        assert self.model.seed == self.twin.seed
        assert self.model.hyper["learning_rate"] == self.twin.rate


def samples(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([n, seed])
    return rng.standard_normal((n, N_IN)), rng.standard_normal((n, N_OUT))


SAMPLE = 21  # the seed of the runs in `make test`
KINDS: list[Kind] = []
SEEDS, SIZES = st.integers(0, 3), st.integers(1, 4)
WHICH = st.integers(0, 1 << 16)  # which of the models that there are


def kinds() -> list[Kind]:
    """Programs that add rounds up, and that do not; for one worker, and for two."""
    if not KINDS:
        KINDS.extend((Kind(4, 0.9, True, 1), Kind(5, 0.0, False, 2)))
    return KINDS


# ---------------------------------------------------------------- the machine
class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="calcvm-machine-"))
        self.entries: dict[str, Entry] = {}
        self.asleep: dict[str, Twin] = {}  # models that only the store has
        self.handles: dict[str, Entry] = {}
        self.serial = 0

    @initialize(on_disk=st.booleans(), workers=st.integers(1, 2))
    def begin(self, on_disk: bool, workers: int) -> None:
        a, b = (kind.program.heap_bytes for kind in kinds())
        self.nbytes = -(-(a + b + 64) // 64) * 64  # one of each, or two of a few
        self.on_disk = on_disk
        self.heap = self.opened()
        self.fleet = cv.Fleet(a + b + 128, workers=workers)

    def opened(self) -> cv.CalcHeap:
        return cv.CalcHeap(
            self.nbytes, store=cv.FileStore(self.folder / "store", durable=False) if self.on_disk else None
        )

    def teardown(self) -> None:
        try:
            if hasattr(self, "heap"):
                for entry in [*self.entries.values(), *self.handles.values()]:
                    entry.check()
        finally:
            if hasattr(self, "heap"):
                self.heap.close()
                self.fleet.heap.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def pick(self, which: int) -> Entry:
        return list(self.entries.values())[which % len(self.entries)]

    some = precondition(lambda self: self.entries)

    def new_name(self) -> str:
        self.serial += 1
        return f"m{self.serial}"

    # ------------------------------------------------------------ models come and go
    @precondition(lambda self: len(self.entries) < 3)
    @rule(kind=st.integers(0, 1), seed=SEEDS)
    def load(self, kind: int, seed: int) -> None:
        name = self.new_name()
        resident = self.heap.create(kinds()[kind].program, seed=seed, name=name)
        self.entries[name] = Entry(resident, Twin(kinds()[kind], seed))
        self.entries[name].check()

    @some
    @precondition(lambda self: len(self.entries) < 3)
    @rule(which=WHICH)
    def copy(self, which: int) -> None:
        entry, name = self.pick(which), self.new_name()
        self.entries[name] = Entry(entry.model.copy(name), deepcopy_of(entry.twin))
        self.entries[name].check()

    @some
    @rule(which=WHICH)
    def close(self, which: int) -> None:
        entry = self.pick(which)
        name, resident = entry.model.name, entry.model
        resident.close()
        del self.entries[name]
        if self.on_disk:
            self.asleep[name] = entry.twin
        refused("closed", lambda: resident.parameters)
        resident.close()  # again: nothing

    @precondition(lambda self: self.asleep)
    @rule(which=WHICH)
    def wake(self, which: int) -> None:
        name = sorted(self.asleep)[which % len(self.asleep)]
        self.entries[name] = Entry(self.heap.open(name), self.asleep.pop(name))
        self.entries[name].check()

    @precondition(lambda self: self.asleep)
    @rule(which=WHICH)
    def remove(self, which: int) -> None:
        name = sorted(self.asleep)[which % len(self.asleep)]
        self.heap.store.remove(name)
        del self.asleep[name]
        refused("no model", lambda: self.heap.open(name))

    @precondition(lambda self: self.on_disk)
    @rule(whole=st.booleans())
    def reopen(self, whole: bool) -> None:
        """Write all and go on: in the same heap, or in a new one on the same folder."""
        if not whole:
            self.heap.flush()
            return
        self.heap.close()
        self.asleep |= {name: entry.twin for name, entry in self.entries.items()}
        self.entries.clear()
        self.heap = self.opened()

    @some
    @rule(which=WHICH, seed=SEEDS)
    def reset(self, which: int, seed: int) -> None:
        entry = self.pick(which)
        entry.model.reset(seed)
        entry.twin.reset(seed)
        entry.check()

    @some
    @rule(which=WHICH, size=SIZES, seed=SEEDS)
    def save(self, which: int, size: int, seed: int) -> None:
        """A file gives a model that goes on as this one does."""
        entry, (X, t) = self.pick(which), samples(size, seed)
        entry.model.save(self.folder / "model.calc")
        other = Entry(cv.load(self.folder / "model.calc"), deepcopy_of(entry.twin))
        other.check()
        np.testing.assert_allclose(other.model.step(X, t), other.twin.step(X, t), rtol=0, atol=TOLERANCE)
        other.check()

    # ------------------------------------------------------------ training
    @some
    @rule(which=WHICH, size=SIZES, seed=SEEDS, steps=st.integers(1, 3))
    def step(self, which: int, size: int, seed: int, steps: int) -> None:
        entry, (X, t) = self.pick(which), samples(size, seed)
        loss, want = entry.model.step(X, t), entry.twin.step(X, t)
        if steps > 1:
            loss = entry.model.run_steps(steps - 1)
            want = [entry.twin.step(X, t) for _ in range(steps - 1)][-1]
        assert loss == pytest.approx(want, rel=0, abs=TOLERANCE)
        entry.check()

    @some
    @rule(which=WHICH, size=st.integers(1, 13), seed=SEEDS, epochs=st.integers(1, 2), held=st.booleans())
    def fit(self, which: int, size: int, seed: int, epochs: int, held: bool) -> None:
        entry, (X, t) = self.pick(which), samples(size, seed)
        validation = samples(3, 0) if held else None
        history = entry.model.fit(X, t, epochs=epochs, validation=validation, shuffle=False, progress=False)
        wanted = []
        for _ in range(epochs):
            wanted.append(entry.twin.fit(X, t, epochs=1)[0])
        np.testing.assert_allclose(history["loss"], wanted, rtol=0, atol=TOLERANCE)
        if validation is not None:
            assert history["val_loss"][-1] == pytest.approx(entry.twin.loss(*validation), rel=0, abs=TOLERANCE)
        entry.check()

    @some
    @rule(which=WHICH, size=SIZES, seed=SEEDS, look=st.booleans())
    def accumulate(self, which: int, size: int, seed: int, look: bool) -> None:
        """Forward and backward by hand: the gradient adds up, where the program does; a look at the model after it."""
        entry, (X, t) = self.pick(which), samples(size, seed)
        entry.model["input"], entry.model["target"] = X, t
        entry.model.forward("learn")
        assert entry.model["loss"] == pytest.approx(entry.twin.loss(X, t), rel=0, abs=TOLERANCE)
        entry.model.backward("learn")
        before = deepcopy_of(entry.twin)
        if not entry.twin.kind.adds_up:
            before.drop()
        before.backward(X, t)
        for name in NAMES:
            np.testing.assert_allclose(entry.model.grad(name), before.sum[name], rtol=0, atol=TOLERANCE, err_msg=name)
        if entry.twin.kind.adds_up:
            entry.twin.sum, entry.twin.open = before.sum, True
        if look:
            np.testing.assert_allclose(entry.model.predict(X), entry.twin.predict(X), rtol=0, atol=TOLERANCE)
        entry.check()

    @precondition(lambda self: any(e.twin.open for e in self.entries.values()))
    @rule(which=WHICH)
    def update(self, which: int) -> None:
        """What has added up becomes an update, whatever has been done in between."""
        entries = [entry for entry in self.entries.values() if entry.twin.open]
        entry = entries[which % len(entries)]
        entry.model.optimize("learn")
        entry.model.end_round("learn")
        entry.twin.update()
        entry.check()

    @some
    @rule(which=WHICH, rate=st.sampled_from([0.0, 0.01, 0.1]), learning=st.sampled_from([None, 4, 6, 8, 12]))
    def change(self, which: int, rate: float, learning: int | None) -> None:
        entry = self.pick(which)
        entry.model.hyper["learning_rate"] = entry.twin.rate = rate
        if learning is not None and entry.twin.kind.adds_up:
            entry.model.learning_batch = entry.twin.learning = learning
        entry.check()

    @some
    @rule(which=WHICH, factor=st.sampled_from([0.5, -1.0]))
    def write(self, which: int, factor: float) -> None:
        entry = self.pick(which)
        with entry.model:
            entry.model.parameters[NAMES[2]][...] *= factor
        entry.twin.p[NAMES[2]] = entry.twin.p[NAMES[2]] * factor
        entry.check()

    # ------------------------------------------------------------ looking
    @some
    @rule(which=WHICH, size=st.integers(1, 12), seed=SEEDS)
    def predict(self, which: int, size: int, seed: int) -> None:
        entry, (X, t) = self.pick(which), samples(size, seed)
        want = entry.twin.predict(X)
        np.testing.assert_allclose(entry.model.predict(X), want, rtol=0, atol=TOLERANCE)
        assert entry.model.evaluate(X, t)["loss"] == pytest.approx(entry.twin.loss(X, t), rel=0, abs=TOLERANCE)
        few = X[: entry.twin.kind.batch]
        np.testing.assert_allclose(entry.model.run({"input": few})["output"], want[: len(few)], rtol=0, atol=TOLERANCE)

    @some
    @rule(which=WHICH)
    def refuse(self, which: int) -> None:
        """What cannot be is an error, and changes nothing."""
        entry = self.pick(which)
        model, resident, (X, t) = entry.model, entry.model, samples(2, 0)
        many = samples(entry.twin.kind.batch + 1, 0)
        refused("above the planned", lambda: model.step(*many))
        refused("do not fit|has rank", lambda: model.step(X[:, :2], t))
        refused("differ in their number", lambda: model.step(X, t[:1]))
        refused("samples", lambda: model.fit(X, t[:1], progress=False))
        refused("empty|no samples", lambda: model.predict(X[:0]))
        refused("no hyperparameter", lambda: model.hyper["rate"])
        refused("no variable", lambda: resident["nothing"])
        refused("only placeholders are set|is a result", lambda: resident.__setitem__("output", t))
        refused("has no gradient", lambda: resident.grad("output"))
        refused("the heap has a model", lambda: self.heap.create(resident.program, name=resident.name))
        refused("make the heap larger", lambda: cv.CalcHeap(64).create(resident.program))
        entry.check()

    # ------------------------------------------------------------ fleets
    @precondition(lambda self: len(self.handles) < 4)
    @rule(kind=st.integers(0, 1), seed=SEEDS, size=st.integers(1, 13), learning=st.sampled_from([None, 8]))
    def add(self, kind: int, seed: int, size: int, learning: int | None) -> None:
        name, twin = self.new_name(), Twin(kinds()[kind], seed)
        if learning is not None and twin.kind.adds_up:
            twin.learning = learning
        else:
            learning = None
        handle = self.fleet.add(
            twin.kind.program, data=samples(size, seed), seed=seed, name=name, shuffle=False, learning_batch=learning
        )
        self.handles[name] = Entry(handle.model, twin)
        self.handles[name].data = samples(size, seed)  # type: ignore[attr-defined]

    @precondition(lambda self: self.handles)
    @rule(epochs=st.integers(1, 2))
    def advance(self, epochs: int) -> None:
        self.fleet.advance(epochs)
        for name, entry in self.handles.items():
            losses = entry.twin.fit(*entry.data, epochs=epochs)  # type: ignore[attr-defined]
            np.testing.assert_allclose(self.fleet.handles[name].losses[-epochs:], losses, rtol=0, atol=TOLERANCE)
            entry.check()

    @precondition(lambda self: self.handles)
    @rule(which=WHICH)
    def leave(self, which: int) -> None:
        name = list(self.handles)[which % len(self.handles)]
        self.fleet.handles[name].close()
        del self.handles[name]

    # ------------------------------------------------------------ what always holds
    @invariant()
    def what_is_not_free_is_a_models(self) -> None:
        if not hasattr(self, "heap"):
            return
        for heap, entries in (self.heap, self.entries), (self.fleet.heap, self.handles):
            inside = [e.model.program.heap_bytes for e in entries.values() if e.model.record.slot is not None]
            assert heap.free_bytes == heap.nbytes - sum(-(-n // 64) * 64 for n in inside)
        assert self.heap.names == sorted([*self.entries, *self.asleep])


def deepcopy_of(twin: Twin) -> Twin:
    """A twin of its own; the program is shared."""
    return deepcopy(twin, {id(twin.kind): twin.kind})


def refused(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(cv.CalcError, match=message):
        call()


def test_any_order_of_calls_gives_numpys_numbers(whole: bool) -> None:
    run_state_machine_as_test(
        Machine if whole else seed(SAMPLE)(Machine),
        settings=settings(
            max_examples=3000 if whole else 100, stateful_step_count=40, deadline=None,
            database=None, print_blob=True, suppress_health_check=list(HealthCheck),
            phases=[Phase.generate] if not whole else list(Phase),
        ),
    )  # fmt: skip
