"""Interrupts: an exception at any step of any call leaves heap and models as before the call or as after it."""

import os
import signal
import sys
import threading

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.vm.turns import unlocked

sys.path.insert(0, os.path.dirname(__file__))
from interrupts import Terminated, interrupted, starved, steps_of  # noqa: E402

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((24, 4)).astype("f4"), RNG.integers(0, 3, 24)
B = X[:8], Y[:8]
NET = nn.Linear(6) >> nn.Tanh() >> nn.Dropout(0.2) >> nn.Linear(3)
SAMPLE = 12  # steps of each call in `make test`


def compiled(accumulate=False):
    graph = cv.build_graph(
        nn.Linear(6) >> nn.Tanh() >> nn.Linear(3) if accumulate else NET, (4,), "softmax_cross_entropy", cv.Adam(0.02)
    )
    return cv.compile(graph, batch_size=8, workers=1, accumulate=accumulate)


PROGRAMS = {}
# what comes in a finalizer or a weak reference's callback, Python drops, and says so
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


class World:
    """A heap with room for one (or more) of its models: the one that is used and one that must stay as it is."""

    def __init__(self, room=1, store=None, accumulate=False):
        if accumulate not in PROGRAMS:
            PROGRAMS[accumulate] = compiled(accumulate)
        self.program = PROGRAMS[accumulate]
        self.heap = cv.CalcHeap(room * -(-self.program.heap_bytes // 64) * 64, store)
        self.model = cv.Model.on(self.heap.load(self.program, seed=1, name="model"))
        self.other = cv.Model.on(self.heap.load(self.program, seed=2, name="other"))
        if accumulate:
            self.model.learning_batch = 24
        self.model.step(*B)
        self.other.step(*B)
        self.fleet = None

    def fleets(self):
        self.fleet = cv.Fleet(2 * self.program.heap_bytes + 128, workers=1)
        for i in range(3):
            self.fleet.add(self.program, data=(X, Y), seed=i, name=f"f{i}")
        return self

    def contents(self, model="model"):
        """All that a model is."""
        resident = self.heap[model]
        with resident:
            binding = resident.binding
            start, stop = (i - binding.opened[0] for i in binding.image)
            return resident.image()[start:stop].tobytes(), resident.facts["rounds"]

    def sound(self):
        """What holds after whatever came: nothing is locked, all pieces are there, the other model is what it was."""
        for resident in (self.heap[name] for name in self.heap.names):
            assert unlocked(resident.tenant.turn.lock) and unlocked(resident.tenant.training.lock)
        assert unlocked(self.heap._lock)
        free = self.heap.free_bytes
        frames = list(self.heap._frames)
        assert free + sum(f.stop - f.start for f in frames) == self.heap.nbytes
        assert all(f.tenant is not None and f.tenant.frame is f for f in frames)
        assert self.contents("other") == self.untouched
        assert threading.active_count() == 1


def run_steps(model):
    with model.resident:
        model["input"], model["target"] = B
        model.run_steps(3)


CALLS = {
    "step": lambda w: w.model.step(*B),
    "run_steps": lambda w: run_steps(w.model),
    "predict": lambda w: w.model.predict(X),
    "evaluate": lambda w: w.model.evaluate(X, Y),
    "setitem": lambda w: w.model.__setitem__("input", B[0]),
    "getitem": lambda w: w.model["linear_1.weight"],
    "parameters": lambda w: w.model.parameters,
    "hyper": lambda w: w.model.hyper.__setitem__("learning_rate", 0.5),
    "reset": lambda w: w.model.resident.reset(7),
    "copy": lambda w: w.model.resident.copy("copy", cv.CalcHeap("64 KiB")),
    "turns": lambda w: [m.predict(B[0]) for m in (w.model, w.other, w.model)],
    "flush": lambda w: w.heap.flush(),
    "commit": lambda w: w.model.resident.commit(),
    "save": lambda w: w.model.save(w.path / "saved.calc"),
}


def worlds(tmp_path, kind):
    n = 0

    def make():
        nonlocal n
        n += 1
        store = cv.FileStore(tmp_path / f"store {n}", durable=False) if kind == "files" else None
        world = World(2 if kind == "roomy" else 1, store)
        world.path = tmp_path
        world.untouched = world.contents("other")
        return world

    return make


def chosen(total, whole, seed, sample=SAMPLE):
    if whole or total <= sample:
        return range(1, total + 1)
    return sorted(np.random.default_rng(seed).choice(total, sample, replace=False) + 1)


def goes_on(world, call, before, after, once):
    """The model is in one of the two states; the next call does to it what it would have done without."""
    now = world.contents()
    assert now in (before, after), "neither as before nor as after"
    call(world)
    if now == before:
        assert world.contents() == after
    elif once:
        assert world.contents() == after
    losses = [world.model.step(*B) for _ in range(2)]
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("kind", ["roomy", "crowded", "files"])
@pytest.mark.parametrize("name", CALLS)
def test_a_signal_at_any_step_leaves_before_or_after(name, kind, tmp_path, whole):
    make, call = worlds(tmp_path, kind), CALLS[name]
    call(make())  # what is compiled at the first time, is
    world = make()
    before = world.contents()
    total = steps_of(lambda: call(world))
    after = world.contents()
    idempotent = name != "step" and name != "run_steps"
    came, steps = 0, chosen(total, whole, [len(name), len(kind)])
    for n in steps:
        world = make()
        raised, _ = interrupted(lambda world=world: call(world), int(n))
        came += isinstance(raised, KeyboardInterrupt)
        world.sound()
        goes_on(world, call, before, after, idempotent)
    assert came > len(steps) / 2


@pytest.mark.parametrize("name", ["step", "predict", "turns", "reset", "flush"])
def test_sigterm_at_any_step_leaves_before_or_after(name, tmp_path, whole):
    def terminate(*_):
        raise Terminated

    make, call = worlds(tmp_path, "crowded"), CALLS[name]
    world = make()
    before = world.contents()
    total = steps_of(lambda: call(world))
    after = world.contents()
    handler = signal.signal(signal.SIGTERM, terminate)
    try:
        for n in chosen(total, whole, len(name)):
            world = make()
            interrupted(lambda world=world: call(world), int(n), signal.SIGTERM)
            world.sound()
            goes_on(world, call, before, after, name != "step")
    finally:
        signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("kind", ["crowded", "files"])
@pytest.mark.parametrize("name", CALLS)
def test_memory_that_cannot_be_had_leaves_before_or_after(name, kind, tmp_path, whole, monkeypatch):
    make, call = worlds(tmp_path, kind), CALLS[name]
    world = make()
    before = world.contents()
    _, left = starved(lambda: call(world), 0, monkeypatch)
    after = world.contents()
    for n in chosen(-left, whole, len(name), 6):
        world = make()
        starved(lambda world=world: call(world), int(n), monkeypatch)
        world.sound()
        goes_on(world, call, before, after, name not in ("step", "run_steps"))


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_signal_at_any_step_of_fit(accumulate, whole):
    """Between two epochs (each is a slice here) at any of them; then training goes on, and accumulates nothing old."""

    def world_():
        world = World(2, accumulate=accumulate)
        world.untouched = world.contents("other")
        return world

    data = (X, Y) if accumulate else B  # an epoch is one step of three rounds, or of one
    world, states = world_(), []
    for _ in range(5):
        states.append(world.contents()[0])
        world.model.fit(*data, 1, shuffle=False, progress=False)
    world = world_()
    total = steps_of(lambda: world.model.fit(*data, 3, shuffle=False, progress=False))
    for n in chosen(total, whole, 3, 40):
        world = world_()
        interrupted(lambda world=world: world.model.fit(*data, 3, shuffle=False, progress=False), int(n))
        world.sound()
        now = world.contents()[0]
        assert now in states[:4], f"step {n} of {total}"
        world.model.fit(*data, 1, shuffle=False, progress=False)
        assert world.contents()[0] == states[states.index(now) + 1], f"step {n} of {total}"


@pytest.mark.parametrize("name", ["load", "close", "add", "copy", "open"])
def test_models_that_come_and_go_are_there_or_not(name, whole):
    """No piece of the heap and no name is lost."""
    calls = {
        "load": lambda w: w.heap.load(w.program, seed=3, name="new"),
        "copy": lambda w: w.model.resident.copy("new"),
        "close": lambda w: w.heap["model"].close() if "model" in w.heap else None,
        "add": lambda w: w.fleet.add(w.program, data=(X, Y), seed=1, name="new"),
        "open": lambda w: w.heap.open("model"),
    }
    call = calls[name]

    def world_():
        world = World(3)
        world.untouched = world.contents("other")
        return world.fleets() if name == "add" else world

    world = world_()
    total = steps_of(lambda: call(world))
    for n in chosen(total, whole, 5, 40):
        world = world_()
        interrupted(lambda world=world: call(world), int(n))
        world.sound()
        heap = world.heap
        if name == "add":
            heap = world.fleet.heap
            world.fleet.fit(2, progress=False)
            if "new" not in world.fleet.handles:
                call(world)
            assert {*heap.names} == {*world.fleet.handles}, f"step {n} of {total}"
        if "new" in heap:
            heap["new"].step(*B)
        elif name in ("load", "copy"):
            call(world)
        for model in [heap[k] for k in heap.names]:
            model.close()
        assert heap.free_bytes == heap.nbytes and heap.names == [], f"step {n} of {total}"


def test_a_signal_at_any_step_of_a_fleet(whole):
    """Models of an interrupted fleet train on to the figures of one that nobody has disturbed."""

    def figures(world, epochs):
        world.fleet.advance({h: epochs - h.epochs_done for h in world.fleet.handles.values()})
        return [h.losses.tolist() for h in world.fleet.handles.values()]

    wanted = figures(World().fleets(), 6)
    world = World().fleets()
    total = steps_of(lambda: world.fleet.fit(3, progress=False))
    for n in chosen(total, whole, 9, 40):
        world = World().fleets()
        interrupted(lambda world=world: world.fleet.fit(3, progress=False), int(n))
        assert figures(world, 6) == wanted, f"step {n} of {total}"
        assert all(unlocked(t.lock) for t in world.fleet.heap.turns)
        for h in [*world.fleet.handles.values()]:
            assert h.model.epochs_done == 6
            h.close()
        assert world.fleet.free_bytes == world.fleet.heap.nbytes


def test_an_interrupted_end_can_be_made_again(tmp_path, whole):
    make = worlds(tmp_path, "files")
    world = make()
    total = steps_of(world.heap.close)
    for n in chosen(total, whole, 11, 30):
        world = make()
        wanted = world.contents()
        interrupted(world.heap.close, int(n))
        world.heap.close()
        with cv.CalcHeap("64 KiB", cv.FileStore(world.heap.store.folder, durable=False)) as again:
            world.heap = again
            assert world.contents() == wanted


def test_a_statement_with_is_left_unlocked_wherever_a_signal_comes():
    world = World(2)

    def call():
        with world.model.resident:
            world.model.resident.facts.get("rounds")

    for n in range(1, steps_of(call) + 1):
        interrupted(call, n)
        assert unlocked(world.model.resident.tenant.turn.lock), n
