"""Every public call from 8 threads at once: each gets what it gets alone, and all changes are as if made one after the other."""

import copy
import multiprocessing
import pickle
import sys
import threading
import warnings
from collections import Counter
from functools import cache, partial
from io import BytesIO

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.vm.memory.turns import unlocked
from tests.kinds.threads import N_THREADS, ONE, X, Y, at_once, counting_program, fine, fresh, impatient, network  # noqa: F401

DATA = np.ones((8, 1), "f4"), np.zeros((8, 1), "f4")  # an epoch is two learning batches of 4, of two rounds each
BATCH = ONE, 0 * ONE
WEIGHT = "linear_1.weight"
PLACES = ["roomy", "crowded", "files"]


def bytes_of(model):
    file = BytesIO()
    model.save(file)
    return file.getvalue()


def image_of(resident):
    """What persists of a model; then nothing is left of it."""
    image = resident.image().tobytes()
    resident.close()
    resident.heap.store.remove(resident.name)
    return image


def net():
    return nn.Linear(8) >> nn.ReLU() >> nn.Linear(3)


def graph():
    return cv.build_graph(net(), (5,), "softmax_cross_entropy", cv.Adam(0.01, clip_norm=1.0, schedule=cv.Cosine(9)))


@cache
def program():
    return cv.compile(graph(), batch_size=16, workers=1, accumulate=True)


# ---------------------------------------------------------------- calls that only look
class Seen:
    """What there is to look at: models in one heap, a fleet, an ensemble, files, estimators."""

    def __init__(self, place, folder):
        from calcvm.sklearn import MLPClassifier, MLPRegressor

        self.folder = folder
        self.store = cv.FileStore(folder / "store", durable=False) if place == "files" else None
        room = 8 if place == "roomy" else 1
        self.heap = cv.CalcHeap(room * -(-program().heap_bytes // 64) * 64, self.store)
        self.models = [self.heap.create(program(), seed=i, name=f"m{i}") for i in range(3)]
        for m in self.models:
            m.fit(X, Y, epochs=2, progress=False)
        self.model, self.graph = self.models[0], graph()
        self.plan = cv.plan(self.graph, batch_size=16, workers=1)
        self.model.save(folder / "model.calc")
        program().save(folder / "program.calc")
        self.bytes = bytes_of(self.model)
        self.mean, self.vote = cv.Ensemble(self.models), cv.Ensemble(self.models, "vote", [1, 2, 3])
        self.fleet = cv.Fleet("1 MiB", workers=2)
        for i in range(3):
            self.fleet.add(program(), data=(X, Y), validation=(X, Y), seed=i)
        self.results = self.fleet.fit(2, progress=False)
        self.handle = self.fleet.handles["model-1"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.classifier = MLPClassifier((64,), random_state=0, max_iter=2, workers=1).fit(X, Y)
            self.regressor = MLPRegressor(hidden_layer_sizes=(64,), random_state=0, max_iter=2, workers=1).fit(X, Y)
        self.many = np.tile(X, (60, 1))  # enough for a program

    def trained(self):
        """A model that steps of its own change, in a heap of its own."""
        model = cv.CalcHeap("1 MiB").create(program(), seed=5)
        seen = []
        history = model.fit(
            X,
            Y,
            epochs=2,
            validation=0.25,
            keep_best=True,
            progress=False,
            callbacks=[lambda m, k, f: seen.append(m.predict(X))],
        )
        model.set_weights(model.get_weights())
        model.fit([(X[:9], Y[:9])] * 3, epochs=2, progress=False)
        return history["val_loss"], seen, image_of(model)


LOOKS = {
    # one model
    "predict": lambda s: s.model.predict(X),
    "predict_proba, predict_classes": lambda s: (s.model.predict_proba(X), s.model.predict_classes(X)),
    "get_weights": lambda s: s.model.get_weights(),
    "summary": lambda s: (s.model.summary(), s.model._repr_html_()),
    "tables": lambda s: (s.results._repr_html_(), s.heap._repr_html_()[:9], s.plan._repr_html_(), s.graph._repr_html_()),
    "evaluate": lambda s: s.model.evaluate(X, Y),
    "judge": lambda s: s.model.judge({"input": X, "target": Y})(),
    "run": lambda s: s.model.run({"input": X[:7]})["output"],
    "model[name]": lambda s: s.model["linear_1.weight"],
    "parameters": lambda s: within(s.model, lambda m: {k: v.copy() for k, v in m.parameters.items()}),
    "elements": lambda s: within(s.model, lambda m: m.elements.nbytes),
    "heap_address": lambda s: within(s.model, lambda m: m.heap_address % 8),
    "grad": lambda s: s.model.grad("linear_1.weight"),
    "hyper": lambda s: dict(s.model.hyper),
    "save": lambda s: bytes_of(s.model),
    "pickle": lambda s: pickle.loads(pickle.dumps(s.model)).predict(X),
    "copy.deepcopy": lambda s: copy.deepcopy(s.model).predict(X),
    "copy": lambda s: image_of(s.model.copy()),
    "copy to another heap": lambda s: image_of(s.model.copy(heap=cv.CalcHeap("1 MiB"))),
    "image": lambda s: s.model.image(),
    "commit": lambda s: s.model.commit(),
    "facts": lambda s: (s.model.learning_batch, s.model.epochs_done, s.model.batch_size, dict(s.model.facts)),
    "repr": lambda s: (repr(s.model), repr(s.model.hyper)),
    "a model of a heap": lambda s: s.heap["m1"].predict(X),
    "one after another": lambda s: [m.predict(X[:5]) for m in s.models],
    # heaps, stores
    "names": lambda s: [name for name in s.heap.names if name.startswith("m") and "-" not in name],
    "in": lambda s: ("m0" in s.heap, "none" in s.heap),
    "heap[name]": lambda s: s.heap["m2"]["linear_1.bias"],
    "handles": lambda s: s.heap["m2"] is s.heap.open("m2") is s.models[2],
    "heap.latest": lambda s: repr(s.heap.latest)[:0],
    "heap": lambda s: s.heap.nbytes - s.heap.free_bytes >= 0 and repr(s.heap)[:9],
    "flush": lambda s: s.heap.flush(),
    "load and close": lambda s: image_of(s.heap.create(program(), seed=9)),
    "no such model": lambda s: refused(lambda: s.heap["none"])[:20],
    # ensembles
    "Ensemble": lambda s: repr(cv.Ensemble(s.models)),
    "ensemble.predict": lambda s: s.mean.predict(X),
    "ensemble.evaluate": lambda s: s.mean.evaluate(X, Y),
    "ensemble.predict_proba": lambda s: s.vote.predict_proba(X),
    "ensemble.predict_classes": lambda s: s.vote.predict_classes(X),
    # fleets
    "results": lambda s: (str(s.results), repr(s.fleet.results), [*s.results], s.results.best(2)),
    "column": lambda s: s.results.column("loss"),
    "handle": lambda s: (s.handle.losses, s.handle.metrics, s.handle.val_loss, s.handle.epochs_done, repr(s.handle)),
    "handle.model": lambda s: s.handle.model.predict(X),
    "fleet": lambda s: (repr(s.fleet), len(s.fleet), s.fleet.free_bytes),
    # what makes programs and models
    "build_graph": lambda s: cv.plan(graph(), batch_size=4, workers=1).heap_bytes,
    "plan": lambda s: str(cv.plan(s.graph, batch_size=16, workers=2)),
    "plan.report": lambda s: str(s.plan),
    "compile": lambda s: cv.compile(s.graph, batch_size=16, workers=1, accumulate=True).hash == program().hash,
    "compile a plan": lambda s: cv.compile(s.graph, plan=s.plan).hash,
    "disassemble": lambda s: program().disassemble(),
    "load_program": lambda s: cv.load_program(s.folder / "program.calc").hash,
    "load": lambda s: cv.load(s.folder / "model.calc").predict(X),
    "load bytes": lambda s: cv.load(BytesIO(s.bytes)).step(X[:9], Y[:9]),
    "Model": lambda s: network(seed=3).fit(X, Y, epochs=1, progress=False)["loss"],
    "fit": lambda s: s.trained(),
    # estimators
    "predict_proba": lambda s: s.classifier.predict_proba(s.many),
    "classifier.predict": lambda s: s.classifier.predict(X),
    "score": lambda s: s.classifier.score(X, Y),
    "regressor.predict": lambda s: s.regressor.predict(s.many),
    "pickled estimator": lambda s: pickle.loads(pickle.dumps(s.regressor)).predict(X),
}  # fmt: skip


def within(model, look):
    with model:
        return look(model)


def refused(call):
    try:
        call()
    except cv.CalcError as error:
        return str(error)
    raise AssertionError("it was not refused")


def same(a, b):
    """Whether two results are the same bits."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return np.array_equal(a, b, equal_nan=isinstance(a, (float, np.ndarray)))


@pytest.fixture(params=PLACES)
def seen(request, tmp_path):
    return Seen(request.param, tmp_path)


def test_calls_that_look_give_each_thread_what_they_give_alone(seen, whole):
    """The same call in all threads, for each; then calls that are drawn."""
    alone = {name: look(seen) for name, look in LOOKS.items()}

    def look(name):
        assert same(LOOKS[name](seen), alone[name]), name

    for name in LOOKS:
        fine(at_once(*[partial(look, name)] * N_THREADS))

    def drawn(seed):
        for name in np.random.default_rng(seed).choice([*LOOKS], 150 if whole else 5):
            look(name)

    fine(at_once(*(partial(drawn, i) for i in range(N_THREADS)), limit=600))
    assert {*seen.heap.names} == {"m0", "m1", "m2"}
    sound(seen.heap)


def sound(heap):
    """Nothing is locked, and all pieces are there."""
    for name in heap.names:
        record = heap[name].record
        assert unlocked(record.turn.lock) and unlocked(record.training.lock)
    assert heap.free_bytes + sum(slot.stop - slot.start for slot in heap._slots) == heap.nbytes


# ---------------------------------------------------------------- calls that change
class Counting:
    """Models whose weights fall by 1 with each update, in one heap, and what changes what of them."""

    def __init__(self, place, folder, n=3):
        self.program = counting_program()
        self.folder = folder / "store"
        self.n, self.room = n, (n if place == "roomy" else 1) * -(-self.program.heap_bytes // 64) * 64
        store = cv.FileStore(self.folder, durable=False) if place == "files" else None
        self.heap = cv.CalcHeap(self.room, store)
        self.models = [self.heap.create(self.program, name=f"m{i}") for i in range(n)]
        for r in self.models:
            r.facts["learning_batch"] = 4

    def state(self):
        """Of each model: by how much its weight fell, its steps, its epochs."""
        out = []
        for r in self.models:
            with r:
                out.append((-float(r[WEIGHT][0, 0]), r.hyper["t"], r.epochs_done))
        return out


def by_hand(r):
    with r:
        r["input"], r["target"] = BATCH
        for _ in range(2):  # what two rounds add up, one update follows
            r.forward("learn")
            r.backward("learn")
        assert r.grad(WEIGHT) == 2 and r.adding
        r.optimize("learn")
        r.end_round("learn")
        assert r.grad(WEIGHT) == 0 and not r.adding
    return 2, 1, 0


def by_sections(r):
    with r:
        r["input"], r["target"] = BATCH
        for phase in ("forward", "loss", "backward", "optimize", "end_round"):
            r.run_section("learn", phase)
    return 1, 1, 0


def by_round(r):
    with r:
        r["input"], r["target"] = BATCH
        r.run_round("learn", ("forward", "loss", "backward", "optimize", "end_round"), 2)
    return 2, 2, 0


def many_steps(r):
    with r:
        r["input"], r["target"] = BATCH
        r.run_steps(3)
    return 3, 3, 0


def rate(r):
    with r:
        r.hyper["learning_rate"] = 2
        r.step(*BATCH)
        r.hyper["learning_rate"] = 1
    return 2, 1, 0


def views(r):
    with r:
        r.parameters[WEIGHT][...] -= 1
    return 1, 0, 0


def begun_anew(r):
    """Reset, and then as many steps as there had been falls."""
    with r:
        before, steps, epochs = int(-r[WEIGHT][0, 0]), r.hyper["t"], r.epochs_done
        r.reset(1)
        if before:
            r["input"], r["target"] = BATCH
            r.run_steps(before)
    return 0, before - steps, -epochs


def fitted(r):

    assert len(r.fit(*DATA, epochs=2, progress=False)["loss"]) == 2
    return 4, 4, 2


def kept(r):
    r.commit()
    return 0, 0, 0


def copied(r):
    other = r.copy()
    w = float(other[WEIGHT][0, 0])
    assert w.is_integer() and w >= r[WEIGHT]
    other.step(*BATCH)
    assert other[WEIGHT] == w - 1
    other.close()
    return 0, 0, 0


def set_and_read(r):
    r.learning_batch = 4
    r.predict(DATA[0])
    r.facts["seen"] = str(threading.get_ident())
    return 0, 0, 0


def flushed(r):
    r.heap.flush()
    return 0, 0, 0


def settled(r):
    r.settle("learn")
    return 0, 0, 0


def judged(r):
    w = r.evaluate(*DATA)["loss"]
    assert w == int(w)  # of one state of the model
    return 0, 0, 0


def saved(r):
    other = cv.load(BytesIO(bytes_of(r)))
    assert float(other[WEIGHT][0, 0]).is_integer()
    return 0, 0, 0


def stepped(r):
    r.step(*BATCH)
    return 1, 1, 0


def changed_nothing(r):
    refused(lambda: r.step(ONE[:, :0], ONE))
    refused(lambda: r.run_steps(0))
    refused(lambda: r.hyper.__setitem__("learning_rate", "much"))
    return 0, 0, 0


CHANGES = [stepped, many_steps, by_hand, by_sections, by_round, rate, views, begun_anew, fitted, kept, copied, set_and_read,
           flushed, settled, judged, saved, changed_nothing]  # fmt: skip


def adding_up(world, works):
    """Run works in threads, each of which tells what it changed of which model; all of it, and no more, was changed."""
    before = np.array(world.state())
    done = sum(fine(at_once(*works, limit=600)))
    np.testing.assert_array_equal(np.array(world.state()) - before, done)
    sound(world.heap)


@pytest.mark.parametrize("place", PLACES)
def test_changes_of_all_threads_add_up(place, tmp_path, whole):
    """The same call in all threads, for each; then calls that are drawn, on models that are drawn."""
    world = Counting(place, tmp_path)

    def do(change, i):
        out = np.zeros((world.n, 3))
        out[i] = change(world.models[i])
        return out

    for change in CHANGES:
        adding_up(world, [partial(do, change, 0)] * N_THREADS)

    def drawn(seed):
        rng = np.random.default_rng([seed, len(place)])
        return sum(do(CHANGES[rng.integers(len(CHANGES))], rng.integers(world.n)) for _ in range(400 if whole else 15))

    adding_up(world, [partial(drawn, seed) for seed in range(N_THREADS)])
    wanted = world.state()
    if place == "files":  # what was written is what there was
        world.heap.close()
        world.heap = cv.CalcHeap(world.room, cv.FileStore(world.folder, durable=False))
        world.models = [world.heap.open(f"m{i}") for i in range(world.n)]
        assert world.state() == wanted
        world.heap.close()


def test_a_training_of_many_parts_is_one(tmp_path):
    """Cycles of a snapshot ensemble, and runs by hand, follow a training of another thread whole."""

    def cyclic():
        optimizer = cv.SGD(0.1, schedule=cv.CosineRestarts(1))
        return cv.Model(net(), input_shape=(5,), optimizer=optimizer, batch_size=16, workers=1)

    def snapshots(model):
        return cv.snapshot_ensemble(model, X, Y, cycles=6, epochs_per_cycle=1, progress=False).predict(X)

    alone, model = cyclic(), cyclic()
    wanted = [snapshots(alone) for _ in range(4)]
    out = fine(at_once(*[partial(snapshots, model)] * 4))
    assert {o.tobytes() for o in out} == {w.tobytes() for w in wanted}
    np.testing.assert_array_equal(model["linear_1.weight"], alone["linear_1.weight"])


def test_what_changes_a_model_by_hand_waits_for_the_end_of_a_training(tmp_path):
    r = Counting("roomy", tmp_path, 1).models[0]
    begun, seen = threading.Barrier(3), []

    def trains():
        with r.record.change:
            r.step(*BATCH)
            r.record.trains = threading.get_ident()
            r.forward("learn")
            r.backward("learn")
            begun.wait(30)
            threading.Event().wait(0.1)  # others have time to come in between
            seen.append((float(r[WEIGHT][0, 0]), float(r.grad(WEIGHT)[0, 0])))
            r.optimize("learn")
            r.end_round("learn")
            r.record.trains = 0

    def rounds():
        begun.wait(30)
        r.run_round("learn", ("forward", "loss", "backward", "optimize", "end_round"), 2)

    def settles():
        begun.wait(30)
        r.settle("learn")

    fine(at_once(trains, rounds, settles))
    assert seen == [(-1, 1)] and r[WEIGHT] == -4


def test_no_training_begins_between_the_asking_for_a_turn_and_its_taking(tmp_path):
    """Who is about to take the lock of ``with model:`` is let in before a training that comes later."""
    r = Counting("roomy", tmp_path, 1).models[0]
    model, asked = r, threading.Event()
    data = [np.tile(a, (4000, 1)) for a in DATA]

    def block():
        enter = type(r).__enter__.__get__(r)
        asked.set()
        threading.Event().wait(0.02)
        enter()
        del enter
        try:
            w = float(r[WEIGHT][0, 0])
            by_hand(r)
            return w, float(r[WEIGHT][0, 0])
        finally:
            r.__exit__(None, None, None)

    def trains():
        asked.wait(30)
        model.fit(*data, epochs=5, progress=False)

    assert fine(at_once(block, trains))[0] == (0, -2)
    assert r[WEIGHT] == -2 - 5 * 8000


# ---------------------------------------------------------------- models that come and go
@pytest.mark.parametrize("files", [False, True])
def test_all_of_a_heap_while_models_come_and_go(files, tmp_path, whole):
    """Nothing of a heap is torn by those who load and close: names, looks, flush and commit."""
    program = counting_program()
    heap = cv.CalcHeap(4 * program.heap_bytes, cv.FileStore(tmp_path / "s", durable=False) if files else None)

    def comes_and_goes(seed):
        for k in range(60 if whole else 12):
            r = heap.create(program, name=f"{seed}-{k}")
            r.step(*BATCH)
            if k % 3:
                assert heap.open(r.name) is r
            r.close()
            r.commit()
            assert "closed" in refused(lambda r=r: r.step(*BATCH))
            if files:
                again = heap.open(r.name)
                assert again[WEIGHT] == -1
                again.step(*BATCH)
                r.commit()  # of one that is closed: the other keeps its file
                again.close()
                assert heap.store.get(r.name)[1] is not None
                heap.store.remove(r.name)

    def looks():
        for _ in range(300 if whole else 60):
            last = heap.latest
            assert last is None or isinstance(last.name, str)
            assert 0 <= heap.free_bytes <= heap.nbytes
            repr(heap)
            heap.flush()
            assert all(isinstance(name, str) for name in heap.names)

    fine(at_once(*(partial(comes_and_goes, i) for i in range(N_THREADS - 2)), looks, looks))
    assert heap.names == [] and heap.free_bytes == heap.nbytes


@pytest.mark.parametrize("files", [False, True])
def test_a_heap_closed_meanwhile_has_written_each_step(files, tmp_path):
    for k in range(5):
        folder = tmp_path / f"{k}"
        world = Counting("files" if files else "crowded", folder)
        done = Counter()

        def steps(i, world=world, done=done):
            r, begun = world.models[i % world.n], threading.get_ident()
            while True:
                try:
                    r.step(*BATCH)
                except cv.CalcError as error:
                    assert "closed" in str(error)
                    return
                done[i % world.n, begun] += 1

        def closes(world=world):
            threading.Event().wait(0.02)
            world.heap.close()

        fine(at_once(closes, *(partial(steps, i) for i in range(6))))
        if files:
            heap = cv.CalcHeap(world.room, cv.FileStore(world.folder))
            for i in range(world.n):
                assert -heap[f"m{i}"][WEIGHT] == sum(n for (j, _), n in done.items() if j == i)
            heap.close()


def test_facts_set_while_a_model_is_written_are_kept(tmp_path, whole):
    heap = cv.CalcHeap("1 MiB", cv.FileStore(tmp_path / "s", durable=False))
    r, n = heap.create(counting_program(), name="m"), 100 if whole else 20

    def sets(i):
        for k in range(n):
            r.facts[f"{i}-{k}"] = k

    def writes():
        for _ in range(n):
            heap.flush()
            r.copy(heap=cv.CalcHeap("1 MiB")).close()

    fine(at_once(*(partial(sets, i) for i in range(6)), writes, writes))
    heap.close()
    with cv.CalcHeap("1 MiB", cv.FileStore(tmp_path / "s")) as heap:
        facts = heap["m"].facts
        assert all(facts[f"{i}-{k}"] == k for i in range(6) for k in range(n))


# ---------------------------------------------------------------- fleets
@pytest.mark.parametrize("place", PLACES)
def test_all_of_a_fleet_at_once(place, tmp_path, whole):
    """Models are added, trained, looked at, stopped, closed and written; each has had as many epochs as it says."""
    program = counting_program(accumulate=False)
    most, few = (8, 4) if place == "files" else (40, 10)  # epochs and calls: each epoch is written
    room = (40 if place == "roomy" else 3) * -(-program.heap_bytes // 64) * 64
    fleet = cv.Fleet(room, 2, cv.FileStore(tmp_path / "s", durable=False) if place == "files" else None)
    for _ in range(6):
        fleet.add(program, data=DATA, validation=DATA)

    def check(h):
        with h.model as _:
            w = h.model[WEIGHT][0, 0]
        assert w == int(w) <= 0

    def own(rng):
        h = fleet.add(program, data=DATA, epochs=int(rng.integers(1, 4)))
        if rng.random() < 0.5:
            fleet.advance({h: 2})
        if rng.random() < 0.3:
            h.stop("enough")
        if rng.random() < 0.6:
            try:
                h.close()
            except cv.CalcError as error:  # it is being trained
                assert "in use" in str(error)
                return
            assert h.status == "closed" and len(h.losses) == h.epochs_done

    calls = [
        own,
        own,
        lambda rng: fleet.fit(int(rng.integers(1, most)), progress=False),
        lambda rng: fleet.advance(int(rng.integers(1, most))),
        lambda rng: [check(h) for h in [*fleet.handles.values()][:6]],
        lambda rng: (str(fleet.results), repr(fleet.results), fleet.results.column("epochs"), repr(fleet), fleet.free_bytes),
        lambda rng: fleet.heap.flush(),
        lambda rng: [*fleet.handles.values()][rng.integers(6)].model.commit(),
        lambda rng: fleet.handles["model-0"].stop("enough"),
        lambda rng: [(h.losses, h.metrics, repr(h), h.model.predict(DATA[0])) for h in [*fleet.handles.values()][:6]],
    ]  # fmt: skip

    def drawn(seed):
        rng = np.random.default_rng([seed, len(place)])
        for _ in range((20 if place == "files" else 200) if whole else few):
            calls[rng.integers(len(calls))](rng)

    fine(at_once(*(partial(drawn, i) for i in range(N_THREADS)), limit=600))
    states = {}
    for h in [*fleet.handles.values()]:
        assert -h.model[WEIGHT][0, 0] == 4 * h.epochs_done == 4 * len(h.losses), h
        assert h.model.epochs_done == h.epochs_done
        assert h.open or h.error == "enough"
        states[h.name] = h.epochs_done
        h.close()
    assert fleet.free_bytes == fleet.heap.nbytes and not fleet.handles
    for name in states if place == "files" else ():
        assert -fleet.heap[name][WEIGHT][0, 0] == 4 * states[name] == 4 * fleet.heap[name].facts["epochs"]


def test_names_of_a_fleet_are_each_models_own(whole):
    """Of threads that add without a name each gets its own; of those that add one name, or one of the store's, one gets it."""
    program = counting_program(accumulate=False)
    for _ in range(40 if whole else 8):
        fleet = cv.Fleet("1 MiB", 1)
        fine(at_once(*[lambda fleet=fleet: fleet.add(program, data=DATA)] * N_THREADS))
        assert len(fleet) == N_THREADS == len(fleet.heap.names)

        def same_name(fleet=fleet):
            try:
                return fleet.add(program, data=DATA, name="same")
            except cv.CalcError as error:
                assert "same" in str(error)
                return fleet.add(program, data=DATA)

        handles = fine(at_once(*[same_name] * N_THREADS))
        assert sorted(h.name == "same" for h in handles) == [False] * (N_THREADS - 1) + [True]
        assert {*fleet.handles} == {*fleet.heap.names} and len(fleet) == 2 * N_THREADS
        kept = fleet.heap.create(program, name="kept")

        def known(fleet=fleet):
            try:
                return fleet.add("kept", data=DATA, hyper={"learning_rate": 1})
            except cv.CalcError as error:
                assert "the fleet has a model 'kept'" in str(error)

        out = [h for h in fine(at_once(*[known] * N_THREADS)) if h is not None]
        assert out == [fleet.handles["kept"]] and out[0].model is kept
        fleet.fit(2, progress=False)
        assert all(h.model[WEIGHT] == -8 for h in fleet.handles.values())


# ---------------------------------------------------------------- estimators
@pytest.mark.filterwarnings("ignore:.*(Maximum iterations|ConvergenceWarning|lbfgs)")
def test_estimators_of_threads_are_trained_and_asked_in_turn(whole):
    """Each thread its own estimator, and all threads one: as one thread alone; no prediction of a half of two states."""
    from calcvm.sklearn import MLPClassifier, MLPRegressor

    many = np.tile(X, (60, 1))  # enough for a program
    n = 12 if whole else 3

    def own(kind, solver, seed):
        estimator = kind(hidden_layer_sizes=(64,), random_state=seed, max_iter=3, solver=solver, workers=1)
        out = [estimator.fit(X, Y).predict(many)]
        if solver != "lbfgs":
            out.append(estimator.partial_fit(X, Y).predict(many))
        return out

    kinds = [(kind, solver) for kind in (MLPClassifier, MLPRegressor) for solver in ("adam", "sgd", "lbfgs")]
    alone = [own(*kind, 0) for kind in kinds]
    out = fine(at_once(*(partial(own, *kind, 0) for kind in (*kinds, *kinds[:2]))))
    assert same(out, [*alone, *alone[:2]])

    def shared():
        return MLPClassifier((64,), random_state=0, workers=1).partial_fit(X, Y, classes=[0, 1, 2])

    one, states = shared(), []
    for _ in range(4 * n + 1):
        states.append(one.predict_proba(many).tobytes())
        one.partial_fit(X, Y)
    model = shared()

    def trains():
        for _ in range(n):
            model.partial_fit(X, Y)

    def looks(look):
        for _ in range(n):
            assert look() in states

    def pickled():
        return pickle.loads(pickle.dumps(model)).predict_proba(many).tobytes()

    fine(at_once(*[trains] * 4, *[partial(looks, lambda: model.predict_proba(many).tobytes())] * 2,
                 *[partial(looks, pickled)] * 2))  # fmt: skip
    assert (
        model.predict_proba(many).tobytes() == states[-1]
        and model.n_iter_ == one.n_iter_
        and model.t_ == one.t_ - len(X)
    )


# ---------------------------------------------------------------- searches, processes
def test_searches_of_threads_try_the_same(whole):
    pytest.importorskip("optuna")

    def search(seed):
        def build(trial):
            return cv.build_graph(nn.Linear(trial["units"]) >> nn.Linear(3), (5,), "softmax_cross_entropy", "adam")

        found = cv.explore(
            build, {"units": [2, 4, 8]}, data=(X, Y), validation=0.25, n_trials=3, epochs=2, sampler="grid", pruner=None,
            batch_size=16, workers=1, concurrent=2, seed=seed, progress=False,
        )  # fmt: skip
        return sorted((t.params["units"], t.value) for t in found.trials)

    alone = [search(seed) for seed in range(2)]
    for _ in range(4 if whole else 1):
        assert fine(at_once(*(partial(search, i % 2) for i in range(N_THREADS if whole else 4)))) == alone * (
            4 if whole else 2
        )


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_pools_begun_and_used_while_threads_train_and_predict(start, whole):
    """Processes made in the middle of 8 threads' calls train with the same bits, and so do the threads."""
    sys.setswitchinterval(1e-3)  # the threads of the pool have to come to their turns
    wanted, done = fresh(), threading.Event()
    model, shared = network(seed=4), network()
    outputs = model.predict(X)
    context = multiprocessing.get_context(start)
    pools, together = (
        {"fork": (4, 2), "spawn": (1, 0)}[start] if not whole else {"fork": (30, 4), "spawn": (3, 2)}[start]
    )

    def begins(n):
        for _ in range(n):
            with context.Pool(2 if together else 1) as pool:
                assert pool.starmap_async(fresh, [()] * 3).get(120) == [wanted] * 3

    def until_the_end(call):
        n = 0
        while not done.wait(0.005):  # the processes need some time, too
            call()
            n += 1
        return n

    def pooled():
        try:
            begins(pools)
            fine(at_once(*[partial(begins, 1)] * together, limit=200) if together else [])
        finally:
            done.set()

    def trains():
        assert fresh() == wanted

    calls = [trains] * 3 + [lambda: np.testing.assert_array_equal(model.predict(X), outputs)] * 3
    calls += [lambda: shared.fit(X, Y, epochs=1, progress=False)] * 2
    _, *counts = fine(at_once(pooled, *(partial(until_the_end, call) for call in calls), limit=300))
    assert all(counts)
    alone = network()
    for _ in range(shared.epochs_done):
        alone.fit(X, Y, epochs=1, progress=False)
    np.testing.assert_array_equal(shared["linear_1.weight"], alone["linear_1.weight"])


def test_epochs_that_a_reset_took_back_are_not_counted_by_a_training_that_waited_for_it(tmp_path):
    r = Counting("roomy", tmp_path, 1).models[0]
    model, inside = r, threading.Event()
    model.fit(*DATA, epochs=3, progress=False)

    def begins_anew():
        with r:
            inside.set()
            while unlocked(r.record.training.lock):
                threading.Event().wait(0.001)
            threading.Event().wait(0.05)  # the training has begun, and waits for the turn
            r.reset(1)

    def trains():
        inside.wait(30)
        model.fit(*DATA, epochs=2, progress=False)

    fine(at_once(begins_anew, trains))
    assert model.epochs_done == 2 and r[WEIGHT] == -4
