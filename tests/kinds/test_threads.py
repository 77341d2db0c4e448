"""Threads and processes: calls on one model take turns, calls on several run at once, and forks are whole or refused."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.model import CalcHeap
from calcvm.vm.memory.turns import owner, unlocked
from tests.kinds.threads import (  # noqa: F401
    N_THREADS,
    ONE,
    RNG,
    X,
    Y,
    at_once,
    counter,
    fine,
    fresh,
    impatient,
    in_child,
    lines_of,
    network,
    pausing,
)  # fmt: skip


# ---------------------------------------------------------------- the lock that all stands on
def test_who_has_a_lock_is_read_from_its_text():
    lock = threading.RLock()
    assert owner(lock) == 0 and unlocked(lock)
    with lock, lock:
        assert owner(lock) == threading.get_ident() and not unlocked(lock)
    assert owner(lock) == 0 and unlocked(lock)


# ---------------------------------------------------------------- one model
@pytest.mark.parametrize("workers", [1, 2])
def test_predictions_of_a_pool_are_each_callers_own(workers, whole):
    model = network(workers=workers)
    data = [RNG.standard_normal((20, 5)) for _ in range(N_THREADS)]
    alone = [model.predict(x) for x in data]
    with ThreadPoolExecutor(N_THREADS) as pool:
        numbers = list(range(N_THREADS)) * (500 if whole else 40)
        for i, out in zip(numbers, pool.map(lambda i: model.predict(data[i]), numbers)):
            np.testing.assert_array_equal(out, alone[i])


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"learning_batch": 40}], ids=str)
def test_looking_on_does_not_change_training(options, tmp_path, whole):
    """predict, evaluate, reading, saving and copying between the turns of fit: the same bits as alone."""
    epochs = 3000 if whole else 120
    model, done, looked = network(**options), threading.Event(), [0]
    same = np.tile(X[:1], (50, 1))

    everybody = threading.Barrier(9)

    def look(what):
        what()
        everybody.wait(30)  # then training begins
        while not done.is_set():
            what()
            looked[0] += 1  # about

    def predict():
        out = model.predict(same)
        assert (out == out[0]).all(), "the parameters changed within one call"

    def save():
        model.save(path := tmp_path / f"{threading.get_ident()}.calc")
        assert np.isfinite(cv.load(path).fit(X, Y, epochs=1, progress=False)["loss"]).all()

    def fit():
        """Until they have looked, however busy the machine is."""
        everybody.wait(30)
        losses, end = [], time.monotonic() + 30
        try:
            while len(losses) < epochs or looked[0] <= 8 and time.monotonic() < end:
                losses += model.fit(X, Y, epochs=epochs // 4, progress=False)["loss"]
        finally:
            done.set()
        return losses

    looks = [predict, predict, lambda: model.evaluate(X, Y), lambda: model["linear_1.weight"], save,
             lambda: model.copy(heap=cv.CalcHeap("1 MiB")), lambda: model.hyper["learning_rate"],
             lambda: model.run({"input": X[:7], "target": Y[:7]})]  # fmt: skip
    trained, *_ = fine(at_once(fit, *(partial(look, what) for what in looks)))
    alone = network(**options)
    assert trained == alone.fit(X, Y, epochs=len(trained), progress=False)["loss"]
    for name in alone.parameters:
        np.testing.assert_array_equal(model[name], alone[name])
    assert looked[0] > 8, "who looked on had no turns"


def test_a_file_saved_in_the_middle_of_a_learning_batch_holds_none_of_its_gradients():
    model = network(learning_batch=48)
    model.fit(X, Y, epochs=1, progress=False)
    image = model.image()
    from calcvm.vm.memory.epoch import Epoch

    train = Epoch(model, {"input": X, "target": Y}, "learn", train=True, learning=48, results=["loss"])
    train.begin(None)
    rounds = train.slices(1e-9)
    next(rounds)
    elements = model.image().view(np.float32)
    gradients = model.slot.get_image(open=True).view(np.float32)
    start = model.loaded.gradient[0] - model.loaded.opened[0]
    assert gradients[start // 4 :].any() and not elements[start // 4 :].any()
    rounds.close()
    assert len(image) == elements.nbytes and not model.record.open


def test_steps_of_threads_are_all_counted(whole):
    n, model = (300 if whole else 60), counter()

    def whole_steps():
        for _ in range(n):
            model.step(ONE)

    def parts():
        for _ in range(n):
            with model:  # what belongs together
                model["x"] = ONE
                model.run_steps(1)

    def sections():
        for _ in range(n):
            with model:
                model["x"] = ONE
                model.forward("learn")
                model.backward("learn")
                model.optimize("learn")

    def look():
        for _ in range(n):
            assert float(model["w"][0, 0]).is_integer()
            assert 0 <= model.hyper["t"] <= 6 * n

    fine(at_once(whole_steps, parts, sections, whole_steps, parts, sections, look, look))
    assert model["w"][0, 0] == -6 * n and model.hyper["t"] == 6 * n


def test_whole_trainings_follow_each_other():
    """fit and step of several threads: as if one had been called after the other, in some order."""
    serial = network(learning_batch=40)
    for _ in range(4):
        serial.fit(X, Y, epochs=3, progress=False)
    model = network(learning_batch=40)
    fine(at_once(*[lambda: model.fit(X, Y, epochs=3, progress=False)] * 4))
    assert model.epochs_done == 12
    for name in serial.parameters:
        np.testing.assert_array_equal(model[name], serial[name])


def test_looking_comes_between_two_slices_and_the_training_ends_nevertheless():
    model = network()
    model.fit(X, Y, epochs=2, progress=False)
    done, longest = threading.Event(), [0.0] * 6

    def training():
        try:
            model.fit(np.tile(X, (3000, 1)), np.tile(Y, 3000), epochs=2, progress=False)  # several slices
        finally:
            done.set()

    def look(i):
        while not done.is_set():
            began = time.perf_counter()
            model.predict(X)
            longest[i] = max(longest[i], time.perf_counter() - began)

    fine(at_once(training, *(partial(look, i) for i in range(6))))
    assert 0 < min(longest) and max(longest) < 5  # a slice is 0.1 s; the machine may be busy


def test_what_would_change_a_model_in_training_is_refused_where_it_cannot_wait():
    model, started, go = counter(), threading.Event(), threading.Event()

    def trains():
        with model.record.change:
            model.step(ONE)
            model.record.trains = threading.get_ident()
            started.set()
            go.wait(30)
            model.step(ONE)

    def meddles():
        started.wait(30)
        with model.record.turn.mine:
            try:
                model.step(ONE)
            finally:
                go.set()

    trained, refused = at_once(trains, meddles)
    assert trained is None and isinstance(refused, cv.CalcError) and "being trained" in str(refused)
    assert model["w"][0, 0] == -2


def test_a_model_closed_meanwhile_says_so():
    model = network()
    time_to_close = threading.Timer(0.3, model.close)
    time_to_close.start()
    with pytest.raises(cv.CalcError, match="closed"):
        model.fit(X, Y, epochs=10**6, progress=False)
    assert model.heap.free_bytes == model.heap.nbytes


# ---------------------------------------------------------------- several models
@pytest.mark.parametrize("room", [1, 3, 8])
def test_any_thread_on_any_model_of_a_heap(room, whole):
    """Models that take turns in a heap, each used by all threads."""
    n, size = (200 if whole else 30), counter().program.heap_bytes
    heap = cv.CalcHeap(room * -(-size // 64) * 64)
    models = [counter(heap, f"m{i}") for i in range(6)]

    def work(seed):
        rng, done = np.random.default_rng(seed), np.zeros(6)
        for _ in range(n):
            i = int(rng.integers(6))
            if rng.random() < 0.6:
                models[i].step(ONE)
                done[i] += 1
            elif rng.random() < 0.9:
                assert models[i]["w"][0, 0] <= 0
            else:
                heap.flush()
        return done

    done = sum(fine(at_once(*(partial(work, i) for i in range(N_THREADS)))))
    assert [-float(m["w"][0, 0]) for m in models] == done.tolist()
    for m in models:
        m.close()
    assert heap.free_bytes == heap.nbytes and heap.names == []


def test_models_come_and_go_in_many_threads():
    heap = cv.CalcHeap("16 KiB")

    def work(seed):
        for k in range(8):
            model = counter(heap, f"{seed}-{k}")
            copy = model.copy()
            copy.step(ONE)
            assert (float(model["w"][0, 0]), float(copy["w"][0, 0])) == (0, -1)
            model.close()
            copy.close()

    fine(at_once(*(partial(work, i) for i in range(N_THREADS))))
    assert heap.free_bytes == heap.nbytes and heap.names == []


def test_of_two_loads_of_one_name_one_is_refused():
    heap = cv.CalcHeap("16 KiB")
    program = counter().program
    for _ in range(20):
        out = at_once(*[lambda: heap.create(program, name="same")] * 2)
        assert sum(isinstance(o, cv.CalcError) for o in out) == 1
        heap["same"].close()
        assert heap.free_bytes == heap.nbytes


@pytest.mark.parametrize("room", [2, 4])
def test_threads_that_would_wait_for_each_other_are_told(room):
    size = -(-counter().program.heap_bytes // 64) * 64
    heap = cv.CalcHeap(room * size)
    a, b = counter(heap), counter(heap)
    for _ in range(30):
        both = threading.Barrier(2)

        def nested(first, second, both=both):
            with first:
                both.wait(30)
                second.step(ONE)

        out = at_once(partial(nested, a, b), partial(nested, b, a), limit=20)
        assert any(isinstance(o, cv.CalcError) for o in out)
        assert all(o is None or isinstance(o, cv.CalcError) for o in out), out
    a.step(ONE)
    b.step(ONE)


def test_threads_that_keep_the_whole_heap_and_want_more_are_told():
    size = -(-counter().program.heap_bytes // 64) * 64
    heap = cv.CalcHeap(2 * size)
    a, b, c, d = (counter(heap) for _ in range(4))
    for _ in range(20):
        both = threading.Barrier(2)

        def nested(first, second, both=both):
            with first:
                first.step(ONE)  # in the heap until the block ends; before the block, another model may take its place
                both.wait(30)
                second.step(ONE)

        out = at_once(partial(nested, a, c), partial(nested, b, d), limit=20)
        assert any(isinstance(o, cv.PlanError) for o in out), out
        assert all(o is None or isinstance(o, cv.PlanError) for o in out), out
    for model in (a, b, c, d):
        model.step(ONE)


# ---------------------------------------------------------------- fleets, ensembles, estimators
def test_a_fleet_lets_others_look_between_its_slices(whole):
    program = network().program
    looks, slices = (20, 20) if whole else (3, 4)

    def fleet_of(n, memory):
        fleet = cv.Fleet(memory, workers=2)
        return fleet, [fleet.add(program, data=(X, Y), seed=i) for i in range(n)]

    for memory in ("1 MiB", 3 * (program.heap_bytes + 64)):
        fleet, handles = fleet_of(5, memory)
        counts, done = [0] * 6, threading.Event()

        def training(fleet=fleet, counts=counts, done=done):
            """Until everyone has looked, however busy the machine is; how many epochs that took."""
            n, end = 0, time.monotonic() + 30
            try:
                while n < slices or min(counts) < looks and time.monotonic() < end:
                    fleet.fit(30, progress=False)
                    n += 1
            finally:
                done.set()
            return 30 * n

        def look(i, handles=handles, counts=counts, done=done):
            while not done.is_set():
                assert np.isfinite(handles[i % 5].model.predict(X)).all()
                counts[i] += 1

        epochs, *_ = fine(at_once(training, *(partial(look, i) for i in range(6))))
        assert min(counts) >= looks
        alone, untouched = fleet_of(5, "1 MiB")
        alone.fit(epochs, progress=False)
        for h, other in zip(handles, untouched):
            np.testing.assert_array_equal(h.losses, other.losses)
        for h in handles:
            h.close()
        assert fleet.free_bytes == fleet.heap.nbytes


PLACES = [(f, line) for f in (CalcHeap.keep, CalcHeap._find) for line in lines_of(f)]


def test_nobody_looks_at_a_model_that_a_fleet_is_about_to_train(whole):
    """Whoever wants a model's turn at any line of a fleet's taking of it, and pauses once it is let in, sees no change."""
    program = network().program
    same, data = np.tile(X[:1], (5000, 1)), (np.tile(X, (30, 1)), np.tile(Y, 30))
    fleet = cv.Fleet("1 MiB", workers=2)
    alone = fleet.add(program, data=data, seed=0)
    fleet.fit(60, progress=False)
    for place in PLACES * (5 if whole else 1):
        fleet, done, here, inside = cv.Fleet("1 MiB", workers=2), *(threading.Event() for _ in range(3))
        handle = fleet.add(program, data=data, seed=0)

        def training(place=place, fleet=fleet, done=done, here=here, inside=inside):
            with pausing(place[0], lambda: (here.set(), inside.wait(0.02), here.clear()), place[1]):
                for _ in range(3):
                    inside.clear()
                    fleet.fit(20, progress=False)
            done.set()
            here.set()

        def look(handle=handle, done=done, here=here, inside=inside):
            with pausing(CalcHeap.enter, lambda: (inside.set(), time.sleep(2e-3))):
                while here.wait(30) and not done.is_set():
                    out = handle.model.predict(same)
                    assert (out == out[0]).all(), "the parameters changed within one call"

        fine(at_once(training, look))
        np.testing.assert_array_equal(handle.losses, alone.losses)


def test_a_fleet_takes_models_while_it_trains():
    program, fleet = network().program, cv.Fleet("1 MiB", workers=2)
    first = fleet.add(program, data=(X, Y), seed=0)
    added = fine(
        at_once(
            lambda: fleet.fit(100, progress=False),
            *(partial(fleet.add, program, data=(X, Y), seed=i, name=f"late {i}") for i in range(1, 90)),
        )
    )[1:]
    fleet.advance({h: 100 - h.epochs_done for h in added})
    for h in (first, added[-1]):
        alone = cv.CalcHeap("1 MiB").create(program, seed=h.model.seed)
        assert h.losses.tolist() == alone.fit(X, Y, epochs=100, progress=False)["loss"]


def test_an_ensemble_and_an_estimator_serve_many_threads():
    from calcvm.sklearn import MLPClassifier

    heap = cv.CalcHeap("8 KiB")
    models = [network(heap=heap, seed=i) for i in range(3)]
    ensemble = cv.Ensemble(models)
    estimator = MLPClassifier((64,), random_state=0, tol=1e9, n_iter_no_change=1, workers=1)
    estimator.fit(np.tile(X, (30, 1)), np.tile(Y, 30))
    many = np.tile(X, (60, 1))
    calls = [lambda: ensemble.predict_proba(X), lambda: ensemble.evaluate(X, Y)["loss"],
             lambda: estimator.predict_proba(many), lambda: ensemble.predict_classes(X)]  # fmt: skip
    alone = [call() for call in calls]

    def work(i):
        for _ in range(5):
            np.testing.assert_array_equal(calls[i % len(calls)](), alone[i % len(calls)])

    fine(at_once(*(partial(work, i) for i in range(N_THREADS))))


# ---------------------------------------------------------------- processes
def test_a_fork_in_the_middle_of_other_threads_calls_is_whole_or_refused(whole):
    """In the child: fresh models train as ever, models that nobody used go on, one that was in use says so."""
    size = counter().program.heap_bytes
    heap = cv.CalcHeap(2 * -(-size // 64) * 64)
    busy, idle, third = (counter(heap) for _ in range(3))
    wanted, done = str(fresh()), threading.Event()
    idle.step(ONE)

    def work():
        while not done.is_set():
            busy.step(ONE)
            third.step(ONE)

    def steps(model):
        before = float(model["w"][0, 0])
        model.step(ONE)
        return float(model["w"][0, 0]) - before

    def kept():
        with busy:
            time.sleep(0.02)

    sys.setswitchinterval(1e-3)  # the thread that forks has to come to its turn
    threads = [threading.Thread(target=work) for _ in range(2)]
    threads += [threading.Thread(target=lambda: [kept() for _ in range(20) if not done.is_set()])]
    for t in threads:
        t.start()
    answers = []
    try:
        for _ in range(60 if whole else 3):
            assert in_child(fresh) == wanted
            assert in_child(partial(steps, idle)) == "-1.0"
            answers.append(in_child(partial(steps, busy)))
    finally:
        done.set()
        for t in threads:
            t.join(60)
    assert {*answers} <= {"-1.0"} | {a for a in answers if "this process was forked" in a}, answers


def test_what_was_in_use_at_a_fork_is_refused_and_can_be_closed():
    model, inside, done = counter(), threading.Event(), threading.Event()

    def keeps():
        with model:
            inside.set()
            done.wait(30)

    thread = threading.Thread(target=keeps)
    thread.start()
    inside.wait(30)
    try:
        assert "this process was forked" in in_child(lambda: model.step(ONE))
        assert in_child(lambda: [model.close(), model.heap.free_bytes == model.heap.nbytes]) == "[None, True]"
    finally:
        done.set()
        thread.join()
    model.step(ONE)


def test_children_of_threads_train_with_the_same_bits():
    wanted = fresh()

    def spawned():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(fresh)

    out = fine(at_once(spawned, partial(in_child, fresh), partial(in_child, fresh), fresh, fresh, limit=120))
    assert [*map(str, out)] == [str(wanted)] * 5


def test_what_a_fork_and_a_signal_go_through_may_change_meanwhile():
    """Heaps and contexts come and go in other threads: of 300 turns none meets one half done."""
    from calcvm.vm.memory import heap
    from calcvm.vm.run import signals

    def comes_and_goes():
        kept = [cv.CalcHeap(4096) for _ in range(20)]
        with signals.orderly_end():
            del kept[::2]

    stop, interval = threading.Event(), sys.getswitchinterval()
    threads = [threading.Thread(target=lambda: [comes_and_goes() for _ in iter(stop.is_set, True)]) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            heap._before_fork()
            with pytest.raises(KeyboardInterrupt):
                signals._end(signal.SIGINT, None)
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        for thread in threads:
            thread.join(30)


@pytest.mark.parametrize("what", ["build", "load"])
def test_children_of_threads_that_make_programs_go_on(what, tmp_path):
    """No lock that another thread has at the fork is needed in the child: of properties, or of compiled code."""
    path = tmp_path / "m.calc"

    def make() -> cv.Model:
        return cv.Model(nn.Linear(3), input_shape=(4,), loss="mse", optimizer="adam", batch_size=20, workers=1)

    def new() -> None:
        made = cv.load(path) if what == "load" else make()
        made.step(np.ones((2, 4), "f4"), np.ones((2, 3), "f4"))

    make().save(path)
    new()
    stop = threading.Event()
    threads = [threading.Thread(target=lambda: [new() for _ in iter(stop.is_set, True)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(25):
            child = os.fork()
            if not child:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(30)  # one that waits for ever is ended
                try:
                    new()
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
