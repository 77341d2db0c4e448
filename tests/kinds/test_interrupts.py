"""Interrupts: an exception at any step of any call leaves heap and models as before the call or as after it."""

import gc
import signal
from functools import partial

import numpy as np
import pytest

import calcvm as cv
from calcvm.fleet import tasks as fleet_tasks
from calcvm.vm.memory.cuda import DeviceSlot
from calcvm.vm.memory.turns import unlocked
from tests.kinds.interrupts import (
    MOST,
    SAMPLE,
    B,
    Failed,
    HookedStore,
    Terminated,
    World,
    X,
    Y,
    chosen,
    interrupted,
    starved,
    steps_of,
)

# what comes in a finalizer or a weak reference's callback, Python drops, and says so
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module", autouse=True)
def swept():
    """What interrupted calls have left open is collected here, where that is expected, not in a later test."""
    yield
    gc.collect()


def run_steps(model):
    with model:
        model["input"], model["target"] = B
        model.run_steps(3)


def by_hand(model, *sections):
    with model:
        model["input"], model["target"] = B
        for section in sections:
            getattr(model, section)("learn")


CALLS = {
    "step": lambda w: w.model.step(*B),
    "run_steps": lambda w: run_steps(w.model),
    "run": lambda w: w.model.run({"input": B[0]}),
    "predict": lambda w: w.model.predict(X),
    "evaluate": lambda w: w.model.evaluate(X, Y),
    "setitem": lambda w: w.model.__setitem__("input", B[0]),
    "getitem": lambda w: w.model["linear_1.weight"],
    "parameters": lambda w: w.model.parameters,
    "hyper": lambda w: w.model.hyper.__setitem__("learning_rate", 0.5),
    "reset": lambda w: w.model.reset(7),
    "set_weights": lambda w: w.model.set_weights({k: v + 1 for k, v in w.model.get_weights().items()}),
    "predict_proba": lambda w: w.model.predict_proba(B[0]),
    "copy": lambda w: w.model.copy("copy", cv.CalcHeap("64 KiB")),
    "turns": lambda w: [m.predict(B[0]) for m in (w.model, w.other, w.model)],
    "ensemble": lambda w: cv.Ensemble([w.model, w.other], "vote").evaluate(X, Y),
    "flush": lambda w: w.heap.flush(),
    "commit": lambda w: w.model.commit(),
    "save": lambda w: w.model.save(w.path / "saved.calc"),
    # of a program that adds gradients up
    "learning_batch": lambda w: setattr(w.model, "learning_batch", 16),
    "grad": lambda w: w.model.grad("linear_1.weight"),
    "forward": lambda w: by_hand(w.model, "forward"),
    "run_round": lambda w: by_hand(w.model, "run_round"),
    "backward": lambda w: by_hand(w.model, "forward", "backward"),
    "optimize": lambda w: w.model.optimize("learn"),
    "end_round": lambda w: w.model.end_round("learn"),
}
BEGUN = {  # of those, the sections that have run before the call
    "learning_batch": (),
    "grad": ("forward", "backward"),
    "forward": (),
    "run_round": (),
    "backward": (),
    "optimize": ("forward", "backward"),
    "end_round": ("forward", "backward", "optimize"),
}
STREAMS = {
    "stream": lambda w: w.one(3),
    "stream of two": lambda w: w.pair(np.array([3, 4])),
    "stream reset": lambda w: w.pair.reset(),
    "stream state": lambda w: setattr(w.pair, "state", {"h": np.full((2, 6), 0.5), "n": np.ones((2, 6))}),
    "reset_state": lambda w: w.model.reset_state([3, 5]),
    "stream saved": lambda w: w.model.save(w.path / "saved.calc", state=True),
    "generate": lambda w: w.model.generate([1, 2], 4, seed=3),
    "generate two": lambda w: w.model.generate([[1], [2]], 3, seed=3),
}
CALLS |= STREAMS
REPEATED = {
    "stream",
    "stream of two",
    "step",
    "run_steps",
    "backward",
    "optimize",
    "set_weights",
}  # where two calls are more than one
HERE = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}  # what a signal raises


def worlds(tmp_path, kind, name):
    n = 0

    def make():
        nonlocal n
        n += 1
        store = None
        if kind == "files":
            store = cv.FileStore(tmp_path / f"store {n}", durable=False)
        elif kind == "hooked":
            store = HookedStore(persistent=False)
        elif kind == "hooked files":
            store = HookedStore(persistent=True)
        room = 2 if kind in ("roomy", "team") else 1
        world = World(
            room, store, accumulate=name in BEGUN, workers=2 if kind == "team" else 1, streams=name in STREAMS
        )
        world.path = tmp_path
        if sections := BEGUN.get(name):
            by_hand(world.model, *sections)
        return world

    return make


def between(world, name):
    """States of a model between the steps of a call, which are its own: those of generation."""
    if not name.startswith("generate"):
        return []
    prompt, count = ([[1, 2]], 4) if name == "generate" else ([[1], [2]], 3)
    tokens = np.concatenate([prompt, np.reshape(CALLS[name](world), (len(prompt), count))], 1)
    stream, states = world.model.stream(batch=len(prompt)), []
    stream.reset()
    for step in tokens.T[:-1]:
        states.append(world.contents())
        stream(step)
    return states


def goes_on(world, call, before, after, once, steps=()):
    """The model is in one of the two states; the next call does to it what it would have done without."""
    now = world.contents()
    assert now in (before, after, *steps), "neither as before nor as after"
    call(world)
    if now != after or once:
        assert world.contents() == after
    losses = [world.model.step(*B) for _ in range(2)]
    assert np.isfinite(losses).all()


def interrupted_anywhere(name, kind, tmp_path, whole, number=signal.SIGINT, sample=SAMPLE, most=None):
    make, call = worlds(tmp_path, kind, name), CALLS[name]
    call(make())  # what is compiled at the first time, is
    world = make()
    before = world.contents()
    total = steps_of(lambda: call(world))
    after, steps = world.contents(), between(make(), name)
    if kind == "team":  # a call that waits for it is longer at one time than at another
        again = [make() for _ in range(4)]
        total = min(total, *(steps_of(partial(call, world)) for world in again))
    came = reached = 0
    for n in chosen(total, whole, [len(name), len(kind)], sample, most):
        world = make()
        raised, left = interrupted(lambda world=world: call(world), n, number)
        came += isinstance(raised, HERE[number])
        reached += left <= 0
        world.sound()
        goes_on(world, call, before, after, name not in REPEATED, steps)
    assert came > reached / 2


@pytest.mark.parametrize("kind", ["roomy", "crowded", "files"])
@pytest.mark.parametrize("name", CALLS)
def test_a_signal_at_any_step_leaves_before_or_after(name, kind, tmp_path, whole):
    interrupted_anywhere(name, kind, tmp_path, whole, most=None if kind == "crowded" else MOST)


@pytest.mark.parametrize("name", CALLS)
def test_a_signal_at_any_step_of_a_team_leaves_before_or_after(name, tmp_path, whole):
    interrupted_anywhere(name, "team", tmp_path, whole, sample=2, most=MOST)


@pytest.mark.parametrize("name", CALLS)
def test_sigterm_at_any_step_leaves_before_or_after(name, tmp_path, whole):
    interrupted_anywhere(name, "crowded", tmp_path, whole, signal.SIGTERM, 2, MOST)


@pytest.mark.parametrize("kind", ["crowded", "files"])
@pytest.mark.parametrize("name", CALLS)
def test_memory_that_cannot_be_had_leaves_before_or_after(name, kind, tmp_path, whole, monkeypatch):
    make, call = worlds(tmp_path, kind, name), CALLS[name]
    world = make()
    before = world.contents()
    _, left = starved(lambda: call(world), 0, monkeypatch)
    after, steps = world.contents(), between(make(), name)
    for n in chosen(-left, whole, len(name), 6):
        world = make()
        starved(lambda world=world: call(world), n, monkeypatch)
        world.sound()
        goes_on(world, call, before, after, name not in REPEATED, steps)


@pytest.mark.parametrize("kind", ["hooked", "hooked files"])
@pytest.mark.parametrize("name", CALLS)
def test_a_store_that_fails_leaves_before_or_after(name, kind, tmp_path, whole):
    """A user's own store raises at any of its calls."""
    make, call = worlds(tmp_path, kind, name), CALLS[name]
    world = make()
    before, hook = world.contents(), world.heap.store.hook
    hook.calls = 0
    call(world)
    total, after, steps = hook.calls, world.contents(), between(make(), name)
    for n in chosen(total, whole, len(name), 3):
        world = make()
        hook = world.heap.store.hook
        hook.calls, hook.at = 0, n
        with pytest.raises(Failed):
            call(world)
        hook.at = 0
        world.sound()
        goes_on(world, call, before, after, name not in REPEATED, steps)


@pytest.mark.parametrize(
    ("accumulate", "workers", "number"),
    [
        (False, 1, signal.SIGINT),
        (True, 1, signal.SIGINT),
        (True, 2, signal.SIGINT),
        (False, 1, signal.SIGTERM),
        (True, 1, signal.SIGTERM),
    ],
)
def test_a_signal_at_any_step_of_fit(accumulate, workers, number, whole):
    """Between two epochs (each is a slice here) at any of them; then training goes on, and accumulates nothing old."""
    data = (X, Y) if accumulate else B  # an epoch is one step of three rounds, or of one

    def make():
        return World(2, accumulate=accumulate, workers=workers)

    world, states = make(), []
    for _ in range(5):
        states.append(world.contents()[0])
        world.model.fit(*data, epochs=1, shuffle=False, progress=False)
    world = make()
    total = steps_of(lambda: world.model.fit(*data, epochs=3, shuffle=False, progress=False))
    for n in chosen(total, whole, 3, 12, 2 * MOST):
        world, told = make(), []
        fit = partial(world.model.fit, *data, epochs=3, shuffle=False, progress=False)
        interrupted(lambda fit=fit, told=told: told.append(fit()), n, number)
        world.sound()
        now = world.contents()[0]
        assert now in states[:4], f"step {n} of {total}"
        assert world.model.epochs_done == states.index(now), f"step {n} of {total}"
        assert [len(history) for history in told] in ([], [states.index(now)]), f"step {n} of {total}"
        world.model.fit(*data, epochs=1, shuffle=False, progress=False)
        assert world.contents()[0] == states[states.index(now) + 1], f"step {n} of {total}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", ["load", "close", "remove", "add", "handle", "copy", "open"])
def test_models_that_come_and_go_are_there_or_not(name, number, whole, monkeypatch):
    """No piece of the heap, no name and no place of a fleet is lost."""
    monkeypatch.setattr(fleet_tasks, "FIRST_ROWS", 6)
    calls = {
        "load": lambda w: w.heap.create(w.program, seed=3, name="new"),
        "copy": lambda w: w.model.copy("new"),
        "close": lambda w: w.heap["model"].close() if "model" in w.heap else None,
        "remove": lambda w: w.model.close(),
        "add": lambda w: w.fleet.add(w.program, data=(X, Y), validation=(X, Y), seed=1, name="new"),
        "handle": lambda w: w.handle.close(),
        "open": lambda w: w.heap.open("model"),
    }
    call = calls[name]

    def make():
        world = World(3)
        if name in ("add", "handle"):
            world.handle = world.fleets().fleet.handles["f1"]
        return world

    world = make()
    total = steps_of(lambda: call(world))
    for n in chosen(total, whole, 5, 20, 4 * MOST):
        world = make()
        interrupted(lambda world=world: call(world), n, number)
        world.sound()
        heap, fleet = world.heap, world.fleet
        if fleet is not None:
            heap = fleet.heap
            fleet.fit(2, progress=False)
            if name == "handle" or "new" not in fleet.handles:
                call(world)
            assert {*heap.names} == {*fleet.handles}, f"step {n} of {total}"
            fill_its_places(world)
        if "new" in heap:
            heap["new"].step(*B)
        elif name in ("load", "copy"):
            call(world)
        for model in [heap[k] for k in heap.names]:
            model.close()
        assert heap.free_bytes == heap.nbytes and heap.names == [], f"step {n} of {total}"


def fill_its_places(world):
    """As many models can be added to a fleet's table of tasks as to one that nobody has disturbed."""
    fleet = world.fleet
    rows = fleet._tasks.rows
    while sum(1 + (h._judge_place >= 0) for h in fleet.handles.values()) < len(rows):
        fleet.add(world.program, data=(X, Y))
    assert fleet._tasks.rows is rows


@pytest.mark.parametrize("name", ["open", "remove"])
def test_models_in_files_are_there_or_not(name, tmp_path, whole):
    calls = {"open": lambda heap: heap.open("model"), "remove": lambda heap: heap.store.remove("model")}
    make, call = worlds(tmp_path, "files", name), calls[name]

    def kept():
        """A world whose models are in files alone."""
        world = make()
        before = world.contents()
        world.heap.close()
        world.heap = cv.CalcHeap(world.heap.nbytes, cv.FileStore(world.heap.store.folder, durable=False))
        return world, before

    world, _ = kept()
    total = steps_of(lambda: call(world.heap))
    for n in chosen(total, whole, 13):
        world, before = kept()
        interrupted(lambda world=world: call(world.heap), n)
        world.sound()
        if "model" in world.heap.names:
            assert world.contents() == before
        else:
            assert name == "remove"
            world.heap.create(world.program, name="model")
        world.heap.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", ["fit", "advance"])
def test_a_signal_at_any_step_of_a_fleet(name, number, whole):
    """Models of an interrupted fleet train on to the figures of one that nobody has disturbed."""

    def train(world):
        return world.fleet.fit(3, progress=False) if name == "fit" else world.fleet.advance(3)

    def figures(world, epochs):
        world.fleet.advance({h: epochs - h.epochs_done for h in world.fleet.handles.values()})
        return [h.losses.tolist() for h in world.fleet.handles.values()]

    wanted = figures(World().fleets(), 6)
    world = World().fleets()
    total = steps_of(lambda: train(world))
    for n in chosen(total, whole, 9, 16, 2 * MOST):
        world = World().fleets()
        interrupted(lambda world=world: train(world), n, number)
        assert figures(world, 6) == wanted, f"step {n} of {total}"
        assert all(unlocked(t.lock) for t in world.fleet.heap.turns)
        for h in [*world.fleet.handles.values()]:
            assert h.model.epochs_done == 6
            h.close()
        assert world.fleet.free_bytes == world.fleet.heap.nbytes


def test_an_interrupted_end_can_be_made_again(tmp_path, whole):
    make = worlds(tmp_path, "files", "close")
    world = make()
    total = steps_of(world.heap.close)
    for n in chosen(total, whole, 11, 30):
        world = make()
        wanted = world.contents()
        interrupted(world.heap.close, n)
        world.heap.close()
        with cv.CalcHeap("64 KiB", cv.FileStore(world.heap.store.folder, durable=False)) as again:
            world.heap = again
            assert world.contents() == wanted


def test_a_statement_with_is_left_unlocked_wherever_a_signal_comes():
    world = World(2)

    def call():
        with world.model:
            world.model.facts.get("epochs")

    for n in range(1, steps_of(call) + 1):
        interrupted(call, n)
        assert unlocked(world.model.record.turn.lock), n


def test_a_signal_in_a_copy_to_a_device_leaves_a_reset_whole():
    """A slot of a device cannot copy and note it in one: it copies again."""

    class Interrupted(DeviceSlot):
        def __init__(self):
            self.copies = 0

        def fill(self, elements):
            self.copies += 1
            if self.copies == 1:
                raise KeyboardInterrupt

    record, slot = World(2).model.record, Interrupted()
    record.open, record.passing = {"learn"}, ("learn",)
    with pytest.raises(KeyboardInterrupt):
        slot.renew(record, np.zeros(4), {"seed": 7})
    assert slot.copies == 2 and record.facts["seed"] == 7 and not record.open and record.passing == ()
