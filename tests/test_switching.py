"""Models that share a heap: bit for bit what they are alone, however they are switched."""

import threading

import numpy as np
import pytest

import calcvm as cv
from calcvm.vm.memory.turns import Turns
from tests import switched
from tests.switched import BATCH, N_CLASSES, N_INPUTS, contents, differing, load, programs, random_order, small_heap

X = np.random.default_rng(0).standard_normal((BATCH, N_INPUTS))
Y = np.random.default_rng(1).integers(0, N_CLASSES, BATCH)


def heap_of(program, n=1, store=None):
    return cv.CalcHeap(n * program.heap_bytes + 64 * n, store)


# ---------------------------------------------------------------- the same bits
@pytest.mark.parametrize("room", [1, 3])
def test_fifty_models_of_six_programs_over_a_thousand_switches(room):
    heap = cv.CalcHeap(small_heap(room))
    assert differing(heap, 50, random_order(50, 1120)) == []
    assert heap.stats.switches >= 1000


def test_models_in_files(tmp_path):
    heap = cv.CalcHeap(small_heap(), cv.FileStore(tmp_path, durable=False))
    assert differing(heap, 15, random_order(15, 200)) == []
    assert heap.stats.switches > 100


def test_each_turn_writes_to_the_store_and_back(tmp_path):
    """A model written to its file and opened by another heap goes on as one that stayed, open gradients included."""
    number, turns = 2, 9  # rounds that add up: most turns end in the middle of an accumulation
    program = list(programs().values())[number]
    told = []
    for k in range(turns):
        with cv.CalcHeap(program.heap_bytes, cv.FileStore(tmp_path, durable=False)) as heap:
            model = heap.open(f"model {number}") if k else load(heap, number)
            told.append(switched.turn(model, number, k))
            contents = switched.contents(model)
    assert (told, contents) == switched.alone(number, turns)


def test_threads_that_share_a_heap():
    """Each thread takes models of its own through the same heap, which has room for two of them."""
    n_threads, each, turns = 4, 5, 60
    heap, failed = cv.CalcHeap(small_heap(2)), []
    models = [load(heap, i) for i in range(n_threads * each)]

    def work(thread):
        told = [[] for _ in range(each)]
        try:
            for k in random_order(each, turns, thread):
                number = thread * each + k
                told[k].append(switched.turn(models[number], number, len(told[k])))
            for k in range(each):
                number = thread * each + k
                if (told[k], switched.contents(models[number])) != switched.alone(number, len(told[k])):
                    failed.append(models[number].name)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(n_threads)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not failed and not any(t.is_alive() for t in threads)
    assert heap.stats.switches > turns


def test_a_flush_meanwhile_writes_whole_models(tmp_path):
    """What one thread writes while another trains is read back as it was at the end of some run."""
    store, done = cv.FileStore(tmp_path, durable=False), threading.Event()
    model = cv.CalcHeap("1 MiB", store).create(programs()["adam"], seed=1, name="m")
    model.step(X, Y)
    thread = threading.Thread(target=lambda: [model.run_steps(500) for _ in range(100)] and done.set())
    thread.start()
    flushes = 0
    while not done.is_set():
        model.heap.flush()
        store.get("m")  # refused where it was written in the middle of a step
        flushes += 1
    thread.join()
    assert flushes > 5


def test_a_switch_that_is_left_out_is_noticed():
    """The comparison itself: models that do not get their bits back differ."""

    class Forgetful(cv.MemoryStore):
        def put(self, name, facts, image):
            if self.counted == 12:  # of a model that zeros leave finite
                image = np.zeros(len(image), np.uint8).data
            self.counted += 1
            super().put(name, facts, image)

        counted = -20  # the first are of models that were just loaded

    heap = cv.CalcHeap(small_heap(1), Forgetful())
    assert len(differing(heap, 20, random_order(20, 200))) == 1


# ---------------------------------------------------------------- what a switch costs
def test_what_is_copied_is_counted():
    program = programs()["adam"]
    heap = heap_of(program)
    a, b = heap.create(program, seed=1), heap.create(program, seed=2)
    image = a.loaded.image[1] - a.loaded.image[0]
    assert image < program.heap_bytes
    a.step(X, Y)
    heap.stats.reset()
    b.step(X, Y)
    assert (heap.stats.switches, heap.stats.bytes) == (1, 2 * image)
    assert heap.latest is b
    b.step(X, Y)
    assert heap.stats.switches == 1  # it was there
    a.step(X, Y)
    b.predict(X)
    heap.stats.reset()
    a.step(X, Y)
    assert (heap.stats.switches, heap.stats.bytes) == (1, image)  # predicting has not changed b: it is not written
    assert 0 < heap.stats.seconds < 1
    heap.stats.reset()
    assert (heap.stats.switches, heap.stats.bytes, heap.stats.seconds) == (0, 0, 0)


def test_a_gradient_is_copied_only_in_the_middle_of_an_accumulation():
    program = programs()["rounds"]
    heap = heap_of(program)
    a, b = heap.create(program, seed=1), heap.create(program, seed=2)
    start, stop = a.loaded.image

    def bytes_out():
        a["input"], a["target"] = X, Y
        a.forward("learn")
        a.backward("learn")
        yield
        a.optimize("learn")
        a.end_round("learn")
        yield

    written = []
    for _ in bytes_out():
        heap.stats.reset()
        with b:
            pass
        written.append(heap.stats.bytes)
        with a:
            pass
    opened = a.loaded.opened[1] - a.loaded.opened[0]
    assert opened > stop - start
    assert written == [opened + stop - start, 2 * (stop - start)]


def test_predictions_in_the_middle_of_an_accumulation_leave_it_open():
    """The gradient outlives what only looks at the model, and a switch after that."""
    program = programs()["rounds"]
    heap = heap_of(program)
    looked_at, other = heap.create(program, seed=1), heap.create(program, seed=2)
    alone = heap_of(program).create(program, seed=1)
    for model in (looked_at, alone):
        model["input"], model["target"] = X, Y
        model.forward("learn")
        model.backward("learn")
    looked_at.predict(X)
    looked_at.evaluate(X, Y)
    with other:
        pass
    for model in (looked_at, alone):
        model.optimize("learn")
        model.end_round("learn")
    assert contents(looked_at) == contents(alone)


def test_nothing_is_planned_or_compiled_for_a_switch(monkeypatch):
    program = programs()["adam"]
    heap = heap_of(program)
    models = [heap.create(program, seed=i) for i in range(4)]
    for model in models:
        model.step(X, Y)
    for name in (
        "calcvm.planner.plan",
        "calcvm.vm.program.assemble.assemble",
        "calcvm.vm.memory.heap.loaded_of",
        "calcvm.vm.memory.slot.Slot",
    ):
        monkeypatch.setattr(name, lambda *a, name=name, **k: pytest.fail(f"{name} was called"))
    for i in range(40):
        models[i % 4].step(X, Y)
    assert heap.stats.switches >= 40


# ---------------------------------------------------------------- who stays
def test_one_model_more_than_there_is_room_for_switches_few():
    program, rounds = programs()["adam"], 6
    heap = heap_of(program, 60)
    models = [heap.create(program, seed=i) for i in range(61)]
    for _ in range(rounds):
        for model in models:
            model.step(X, Y)
    heap.stats.reset()
    for _ in range(rounds):
        for model in models:
            model.step(X, Y)
    assert rounds < heap.stats.switches < 20 * rounds  # of 61 * rounds calls
    again = heap_of(program, 61)
    for i, model in enumerate(models):
        alone = again.create(program, seed=i)
        for _ in range(2 * rounds):
            alone.step(X, Y)
        np.testing.assert_array_equal(model.parameters["linear_1.weight"], alone.parameters["linear_1.weight"])


def test_the_least_recently_used_goes_and_who_is_in_use_stays():
    program = programs()["adam"]
    heap = heap_of(program, 3)
    a, b, c, d = (heap.create(program, seed=i, name=name) for i, name in enumerate("abcd"))

    def inside():
        return {m.name for m in (a, b, c, d) if m.record.slot is not None}

    assert inside() == {"b", "c", "d"}
    b.step(X, Y)
    a.step(X, Y)
    assert inside() == {"b", "d", "a"}  # c was used least recently
    with b, a:
        c.step(X, Y)
        assert inside() == {"a", "b", "c"}
        with c:
            assert heap.keep(d.record, Turns("the test")) is None
            with pytest.raises(cv.PlanError, match="leave one of them") as refused:
                d.step(X, Y)
            assert refused.value.needed == program.heap_bytes > refused.value.allowed
    d.step(X, Y)
    assert "d" in inside()


def test_views_given_out_change_the_model():
    program = programs()["adam"]
    heap = heap_of(program)
    a, b = heap.create(program, seed=1), heap.create(program, seed=2)
    with a:
        a.parameters["linear_1.bias"][...] = 7
    b.step(X, Y)
    assert (a["linear_1.bias"] == 7).all()


def test_hyperparameters_stay_with_their_model():
    program = programs()["adam"]
    heap = heap_of(program)
    a, b = heap.create(program, seed=1), heap.create(program, seed=2)
    a.hyper["learning_rate"] = 0.5
    b.hyper["learning_rate"] = 0.25
    assert (a.hyper["learning_rate"], b.hyper["learning_rate"]) == (0.5, 0.25)


def test_data_and_results_are_gone_and_the_error_says_so():
    program = programs()["adam"]
    heap = heap_of(program)
    a, b = heap.create(program, seed=1), heap.create(program, seed=2)
    a.step(X, Y)
    assert np.isfinite(a["loss"])
    b.step(X, Y)
    with pytest.raises(cv.CalcError, match="another model was in its place"):
        a["input"]
    with pytest.raises(cv.CalcError, match="since the model came into the heap"):
        a["loss"]
    with pytest.raises(cv.CalcError, match="another model was in its place"):
        a.run_steps(1)
    with pytest.raises(cv.CalcError, match="forward"):
        a.backward("learn")
    with pytest.raises(cv.CalcError, match="no gradient since the model came into the heap"):
        a.grad("linear_2.bias")
    a.step(X, Y)
    assert a.grad("linear_2.bias").any()


def test_a_trap_is_not_the_next_models():
    program = programs()["adam"]
    heap = heap_of(program)
    a, b = heap.create(program, seed=1), heap.create(program, seed=2)
    with a:
        slot = a.slot
        a["input"], a["target"] = X, Y
        symbol = program.by_name["target"]
        slot.elements[symbol.offset] = N_CLASSES + 1
        with pytest.raises(cv.Trap):
            a.run_steps(1)
        slot.elements[:2] = 1, 2  # as if nobody had looked
    assert np.isfinite(b.step(X, Y))
    assert np.isfinite(a.step(X, Y))


def test_nothing_of_one_model_is_written_with_another():
    """Cells between parameters hold nothing, whatever lay in the piece before."""
    first, second = programs()["float64"], programs()["adam"]
    heap = cv.CalcHeap(max(first.heap_bytes, second.heap_bytes))
    loud, quiet = heap.create(first, seed=0), heap.create(second, seed=0)
    for _ in range(3):
        with loud:
            slot = loud.slot
            slot.bytes[64:] = 0xA5
        quiet.step(X, Y)
    alone = heap_of(second).create(second, seed=0)
    for _ in range(3):
        alone.step(X, Y)
    assert switched.contents(quiet) == switched.contents(alone)


# ---------------------------------------------------------------- bad input
def test_names_and_sizes_are_refused():
    program = programs()["adam"]
    heap = heap_of(program, 2)
    a = heap.create(program, name="a")
    with pytest.raises(cv.CalcError, match="the heap has a model 'a'"):
        heap.create(program, name="a")
    with pytest.raises(cv.CalcError, match="no model 'b'"):
        heap.open("b")
    large = programs()["float64"]
    small = cv.CalcHeap(large.heap_bytes - 64)
    with pytest.raises(cv.PlanError) as refused:
        small.create(large)
    assert (refused.value.needed, refused.value.allowed) == (large.heap_bytes, small.nbytes)
    a.close()
    with pytest.raises(cv.CalcError, match="closed"):
        a.step(X, Y)
    assert heap.names == [] and heap.free_bytes == heap.nbytes


# ---------------------------------------------------------------- many
def test_many_models_in_files_under_a_small_heap():
    from bench.switching import many_in_a_fresh_process

    reply = many_in_a_fresh_process(models=500, switches=3000, heap="2 MiB")
    assert reply["switches"] >= 3000
    assert reply["peak"] <= reply["imported"] + reply["heap"] + 100 * 2**20
    assert reply["resident"][-1] - reply["resident"][0] <= 2**20, "the process grows with the switches"
