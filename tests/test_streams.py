"""Streams: compiled calls answer, fail and change the model as those in Python, whatever else happens to the model."""

import gc
import inspect
import multiprocessing
import random
import sys
import threading

import numpy as np
import pytest

import calcvm as cv
from calcvm.errors import CalcError
from calcvm.vm.calls import methods
from calcvm.vm.run import job as J
from calcvm.vm.run.loaded import loaded_of
from tests.kinds.threads import at_once, fine, impatient  # noqa: F401 (a fixture)

RNG = np.random.default_rng(0)
BATCH = 6


def graph():
    """Paths with one input and output, with several of all forms, and with a result of another path."""
    g = cv.CalcGraph()
    x, u, k = g.placeholder("x", (None, 3)), g.placeholder("u", (None, 1)), g.placeholder("k", (None,), dtype="int64")
    t = g.placeholder("t", (None, 4))
    h, n = g.carry("h", (None, 4), init=np.array([0.5, -0.25, 0.0, 1.0])), g.carry("n", (None,))
    W, U = g.parameter("W", (3, 4)), g.parameter("U", (4, 4))
    with g.path("learn", backward=True) as learn:
        y = cv.tanh(x @ W + h @ U)
        learn.minimize(cv.mse(y, t), cv.SGD(0.1), output=y)
    with g.path("predict") as predict:
        predict.output = once = cv.carry(h, cv.tanh(x @ W + h @ U))
    with g.path("several") as several:
        z = cv.carry(h, cv.tanh(x @ W + h @ U) * u)
        picked = cv.carry(n, n + cv.pick(z, k))
        several.output = z, picked, cv.reshape(z, (None, 2, 2)) + 1.0
    with g.path("after") as after:
        after.output = cv.carry(n, n + cv.sum(once, 1))
    with g.path("none") as none:
        none.output = cv.carry(n, n + 1.0)
    return g


PROGRAMS = {}


def program(**options):
    key = str(options)
    if key not in PROGRAMS:
        PROGRAMS[key] = cv.compile(graph(), batch_size=BATCH, **{"workers": 1, **options})
    return PROGRAMS[key]


def made(seed=1, room=1, **options):
    p = program(**options)
    return cv.CalcHeap(room * p.heap_bytes).create(p, seed=seed)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compiled calls are there from the first one on; a busy machine makes no call a long one."""
    if not methods.possible():
        pytest.skip("this interpreter's objects are laid out in another way")
    methods._calls = methods.WORTH
    before, J.LONG_NS = J.LONG_NS, 10**9
    stream = made().stream()
    assert not inspect.isfunction(vars(type(stream))["__call__"])
    yield
    J.LONG_NS = before


def in_python(stream, *inputs):
    return inspect.unwrap(vars(type(stream))["_calcvm_stream"])(stream, *inputs)


def is_compiled(stream):
    """Whether the last call was a compiled one: Python has not looked since."""
    calls = stream.record.calls
    return calls is not None and calls._seen != calls.words[J.SEQ] == calls.words[J.DONE + 2 * J.STREAM + 1]


def told(call, *given):
    """What a call answers, to the bit, or its error."""
    try:
        found = call(*given)
    except (CalcError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return [
        (y.shape, y.dtype, y.tobytes(), y.flags.c_contiguous) for y in (found if isinstance(found, tuple) else (found,))
    ]


def knows(model):
    """What Python knows of a model, and what it is."""
    with model:
        model.slot  # noqa: B018 (whoever uses the model looks what compiled calls have done)
        record = model.record
        return dict(record.held), dict(record.ran), record.arena, record.changed, model.image().tobytes()


INPUTS = {"predict": 1, "several": 3, "after": 1, "none": 0}
CHANGES = {
    "as it is": lambda a: a,
    "list": lambda a: a.tolist(),
    "float64": lambda a: a.astype("f8") if a.dtype.kind == "f" else a,
    "bytes": lambda a: np.abs(10 * a).astype("u1") if a.dtype.kind == "f" else a.astype("i4"),
    "another order": np.asfortranarray,
    "strided": lambda a: np.repeat(a, 2, -1)[..., ::2] if a.ndim else a,
    "a size too many": lambda a: np.concatenate([a, a], -1) if a.ndim else a,
    "an axis too many": lambda a: a[None],
    "an axis too few": lambda a: a[0] if a.ndim else a,
    "labels": lambda a: a + 4 if a.dtype.kind == "i" else a,
    "twice the samples": lambda a: np.repeat(a, 2, 0) if a.ndim else a,
    "text": lambda a: "abc",
}


def data(n, single):
    x, u, k = (RNG.standard_normal((n, s)).astype("f4") for s in (3, 1, 1))
    arrays = x, u, (np.abs(k[:, 0]) * 9).astype("i8") % 4
    return tuple(a[0] for a in arrays) if single else arrays


@pytest.mark.parametrize("options", [{}, {"dtype": "float64"}, {"workers": 2}], ids=str)
def test_calls_in_any_order_do_what_those_in_python_do(options, whole):
    rng, reached = random.Random(str(options)), 0
    for _ in range(40 if whole else 4):
        models = made(**options), made(**options)
        streams = [
            [
                m.stream(path, batch=n)
                for path, n in (("predict", 1), ("several", 2), ("several", 1), ("after", 1), ("none", 1))
            ]
            for m in models
        ]
        for _ in range(80):
            k, what = rng.randrange(5), rng.random()
            of = [s[k] for s in streams]
            if what < 0.8:
                change = CHANGES[rng.choice([*CHANGES, *["as it is"] * 12])]
                given = data(of[0].batch, of[0].batch == 1 and rng.random() < 0.6)[: INPUTS[of[0].path]]
                given = tuple(map(change, given)) if rng.random() < 0.9 else given[1:]
                found, wanted = told(of[0], *given), told(in_python, of[1], *given)
                reached += is_compiled(of[0])
                assert found == wanted, (of[0].path, given)
            else:
                x, t = RNG.standard_normal((3, 3)), RNG.standard_normal((3, 4))
                for m, s in zip(models, of):
                    if what < 0.84:
                        s.reset()
                    elif what < 0.88:
                        s.state = {"n": np.full(s.batch, what), "h": np.full((s.batch, 4), -what)}
                    elif what < 0.94:
                        m.step(x, t)
                    else:
                        m.predict(x)
            if rng.random() < 0.2:
                assert knows(models[0]) == knows(models[1])
        assert knows(models[0]) == knows(models[1])
    assert reached > (800 if whole else 80)


@pytest.mark.parametrize("path", INPUTS)
@pytest.mark.parametrize("batch", [1, 2])
def test_each_form_of_call_is_compiled(path, batch):
    stream, twin = (made().stream(path, batch=batch, place=3) for _ in range(2))
    for single in (True, False) if batch == 1 else (False,):
        for dtype in ("f4", "f8", "i4"):
            for change in (np.asarray, lambda a: a.tolist()):
                for k in range(4):
                    given = [
                        change(a.astype(dtype) if a.dtype.kind == "f" else a)
                        for a in data(batch, single)[: INPUTS[path]]
                    ]
                    assert told(stream, *given) == told(in_python, twin, *given)
                    assert is_compiled(stream) or k < 2, (single, dtype, k)
    assert knows(stream.model) == knows(twin.model)
    with pytest.raises(TypeError, match="Stream.__call__ has no argument 'x'|unexpected keyword"):
        stream(x=1)


def test_a_sample_of_one_number_is_one_sample():
    stream = made().stream("several", place=2)
    for _ in range(3):
        y, picked, image = stream(np.zeros(3), [0.5], 1)
        assert (y.shape, picked.shape, image.shape) == ((4,), (), (2, 2))
        y, picked, image = stream(np.zeros((1, 3)), [[0.5]], [1])
        assert (y.shape, picked.shape, image.shape) == ((1, 4), (1,), (1, 2, 2))


def test_many_streams_in_turn_answer_as_one_batch():
    p = cv.compile(graph(), batch_size=300, workers=1)
    model, twin = (cv.CalcHeap(p.heap_bytes).create(p, seed=2) for _ in range(2))
    streams = [model.stream() for _ in range(300)]
    for _ in range(4):
        x = RNG.standard_normal((300, 3)).astype("f4")
        found = np.stack([s(row) for s, row in zip(streams, x)])
        assert found.tobytes() == np.stack([twin.stream(place=k)(x[k]) for k in range(300)]).tobytes()
    assert is_compiled(streams[-1])
    np.testing.assert_allclose(model.predict(x), twin.predict(x), atol=1e-6)


def test_a_trap_is_raised_once():
    model = made()
    stream, (x, u, k) = model.stream("several"), data(1, True)
    for _ in range(3):
        stream(x, u, k)
    names = [model.program.spec(pc).name for pc in range(len(model.program.rows))]
    view, row = model.elements, next(i for i, name in enumerate(names) if "pick" in name or "gather" in name)
    stream(x, u, k)  # Python has looked
    view[:2] = 1, row  # as a kernel does
    with pytest.raises(cv.errors.Trap, match="'k' is not an integer"):
        stream(x, u, k)
    assert np.isfinite(stream(x, u, k)[0]).all()


def test_state_can_be_read_and_set():
    stream, other = (m.stream("several", batch=2, place=1) for m in (made(), made(seed=1)))
    given = data(2, False)
    for _ in range(3):
        stream(*given)
    kept = {name: array.copy() for name, array in stream.state.items()}
    assert {name: array.shape for name, array in kept.items()} == {"h": (2, 4), "n": (2,)}
    other.state = kept
    assert told(other, *given) == told(stream, *given)
    for wrong, message in (
        ({"W": kept["h"]}, "no carry 'W'; there are h, n"),
        ({"n": np.zeros(2), "h": np.zeros(4)}, r"the state 'h' of shape \(4,\); \(2, 4\) is wanted"),
        ([1, 2], "a mapping such as"),
        ({"h": "abc"}, "'h'"),
    ):
        with pytest.raises(CalcError, match=message):
            other.state = wrong
    assert told(other, *given) == told(stream, *given)


def test_a_short_step_is_short_whatever_the_batch_of_the_model():
    """So one worker runs it: the states of other samples do not count."""
    brief = [
        loaded_of(cv.compile(graph(), batch_size=n, workers=2)).brief("predict", ("forward",))
        for n in (100_000, 200_000)
    ]
    assert 0 < brief[0] < 100_000 and brief[0] == brief[1]


# ---------------------------------------------------------------- what happens to the model
@pytest.mark.parametrize("room", [1, 2])
def test_models_that_take_turns_in_a_heap(room):
    """A model that was switched out is brought in again: no call reads or changes another model's memory."""
    alone = [made(seed=k) for k in range(3)]
    heap = cv.CalcHeap(room * -(-program().heap_bytes // 64) * 64)
    models = [heap.create(program(), seed=k) for k in range(3)]
    streams = [[m.stream(place=p) for p in (0, 4)] for m in models]
    twins = [[m.stream(place=p) for p in (0, 4)] for m in alone]
    rng, reached = random.Random(room), 0
    for _ in range(300):
        i, j = rng.randrange(3), rng.randrange(2)
        for _ in range(rng.choice([1, 4])):
            (x, *_) = data(1, True)
            assert told(streams[i][j], x) == told(twins[i][j], x)
            reached += is_compiled(streams[i][j])
    assert reached > 100 and heap.stats.switches > 50
    heap.close()
    for stream in streams[0]:
        with pytest.raises(CalcError, match="closed"):
            stream(x)
    with pytest.raises(CalcError, match="closed"):
        streams[1][0].reset()


def test_a_closed_model_s_stream_leaves_the_next_one_alone():
    heap = cv.CalcHeap(program().heap_bytes)
    first = heap.create(program(), seed=1)
    stream, x = first.stream(), np.ones(3, "f4")
    for _ in range(3):
        stream(x)
    assert is_compiled(stream)
    first.close()
    second = heap.create(program(), seed=2)
    for _ in range(3):
        second.stream()(x)
    before = second.image().tobytes()
    for call in (lambda: stream(x), lambda: stream([1, 2, 3]), stream.reset, lambda: stream.state):
        with pytest.raises(CalcError, match="is closed"):
            call()
    with pytest.raises(CalcError, match="is closed"):
        stream.state = {"h": np.ones((1, 4))}
    assert second.image().tobytes() == before


def test_a_stream_goes_on_when_its_model_is_trained_or_restored():
    stream, twin = made().stream(place=2), made().stream(place=2)
    x, t = RNG.standard_normal((6, 3)).astype("f4"), RNG.standard_normal((6, 4)).astype("f4")
    for k in range(20):
        assert told(stream, x[0]) == told(in_python, twin, x[0])
        for m in (stream.model, twin.model):
            if k % 4 == 0:
                m.step(x, t)
            elif k % 4 == 1:
                m.fit(x, t, epochs=1, progress=False)
            elif k % 4 == 2:
                m.reset(k)
            else:
                m.set_weights({name: 0.9 * w for name, w in m.get_weights().items()})
    assert knows(stream.model) == knows(twin.model)


def test_streams_keep_what_they_changed_in_a_store(tmp_path):
    with cv.CalcHeap("1 MiB", cv.FileStore(tmp_path, durable=False)) as heap:
        model = heap.create(program(), seed=1, name="model")
        stream = model.stream(place=1)
        stream(np.ones(3, "f4"))
        model.commit()
        for _ in range(3):
            stream(np.ones(3, "f4"))
        assert is_compiled(stream)
        state = stream.state["h"].copy()
    with cv.CalcHeap("1 MiB", cv.FileStore(tmp_path, durable=False)) as heap:
        np.testing.assert_array_equal(heap.open("model").stream(place=1).state["h"], state)


def test_what_is_no_stream():
    g = graph()
    x, h = g.variables["x"], g.variables["h"]
    with g.path("no output"):
        cv.carry(h, h + 1.0)
    with g.path("a state") as state:
        state.output = h
        cv.carry(h, h + 1.0)
    with g.path("reads") as reads:
        reads.output = cv.dropout(h, 0.5) + cv.sum(x)
    model = cv.Model(g, batch_size=2, workers=1)
    for path, message in (
        ("learn", "path 'learn' trains"),
        ("no output", "has no output"),
        ("a state", "has the output 'h', which no operator computes"),
        (
            "reads",
            "keeps no state from call to call: take 'predict' or 'several' or 'after' or 'none' or 'no output' or 'a state'",
        ),
        ("no", "no path"),
        (np.ones((2, 3)), "no path .*; of data, model.predict"),
    ):
        with pytest.raises(CalcError, match=message):
            model.stream(path)


# ---------------------------------------------------------------- threads and processes
def test_threads_with_a_stream_each(impatient, whole):  # noqa: F811
    """On one model, while another thread trains its twin path and streams from a second model of the same program."""
    model, twin = made(), made()
    x = RNG.standard_normal((4, 2000 if whole else 300, 3)).astype("f4")
    wanted = [[twin.stream(place=k)(row).tobytes() for row in x[k]] for k in range(4)]
    streams = [model.stream(place=k) for k in range(4)]

    def work(k):
        return [streams[k](row).tobytes() for row in x[k]]

    out = fine(at_once(*(lambda k=k: work(k) for k in range(4)), lambda: [model["W"].sum() for _ in range(50)]))
    assert out[:4] == wanted


def _in_a_child(stream, x, answer):
    answer.put([stream(x).tobytes() for _ in range(4)])


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX's, where another test has imported it
def test_a_forked_child_goes_on_by_itself():
    stream, twin, x = made().stream(place=1), made().stream(place=1), np.ones(3, "f4")
    for _ in range(3):
        assert told(stream, x) == told(twin, x)
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    child = context.Process(target=_in_a_child, args=(stream, x, answer))
    child.start()
    found = answer.get(timeout=60)
    child.join()
    assert found == [twin(x).tobytes() for _ in range(4)] == [stream(x).tobytes() for _ in range(4)]


def test_no_reference_and_no_memory_is_lost(whole):
    model = made()
    one, several = model.stream(), model.stream("several")
    x, u, k = data(1, True)
    calls = {
        "one": lambda: one(x), "batch": lambda: one(x[None]), "several": lambda: several(x, u, k), "lists": lambda: one([1, 2, 3]),
        "refused": lambda: told(one, x[:2]), "labels": lambda: told(several, x, u, k + 4),
    }  # fmt: skip
    watched = x, u, k, model, one, several, np.dtype("f4"), np.dtype("i8"), None, np.ndarray, ()
    for name, call in calls.items():
        for _ in range(5):
            call()
        gc.collect()
        many = whole and name in ("one", "batch", "several")
        counts, n = [sys.getrefcount(o) for o in watched], 1_000_000 if many else 300
        blocks = sys.getallocatedblocks()
        for _ in range(n):
            call()
        gc.collect()
        assert sys.getallocatedblocks() - blocks < 100, name
        assert max(abs(sys.getrefcount(o) - c) for o, c in zip(watched, counts)) < 10, name


def test_a_path_called_stream_is_the_default():
    g = graph()
    with g.path("stream") as stream:
        stream.output = cv.carry(g.variables["n"], g.variables["n"] + 2.0)
    program = cv.compile(g, batch_size=2)
    for p, path in ((program, "stream"), (PROGRAMS["{}"], "predict")):
        assert cv.CalcHeap(p.heap_bytes).create(p).stream().path == path


def test_threads_make_streams_at_different_places(impatient):  # noqa: F811
    p = cv.compile(graph(), batch_size=80, workers=1)
    model = cv.CalcHeap(p.heap_bytes).create(p)
    made = fine(at_once(*[lambda: [model.stream(batch=1 + k % 2) for k in range(6)]] * 8))
    places = [k for streams in made for s in streams for k in range(s.place, s.place + s.batch)]
    assert len({*places}) == len(places) == 72
    with pytest.raises(CalcError, match="all 80 places"):
        model.stream(batch=9)
    del made[3:]
    assert model.stream(batch=8).place >= 0


def test_streams_go_with_the_last_reference():
    model = made()
    stream = model.stream(batch=BATCH)
    for _ in range(4):
        stream(np.ones((BATCH, 3), "f4"))
    with pytest.raises(CalcError, match="all 6 places"):
        model.stream()
    del stream
    assert model.stream(batch=BATCH).place == 0


def test_what_changes_a_state_waits_for_the_end_of_a_training(impatient):  # noqa: F811
    """Streams, and predictions by a path that carries; other threads read the model meanwhile."""
    model, x, t = made(), RNG.standard_normal((12, 3)).astype("f4"), RNG.standard_normal((12, 4)).astype("f4")
    stream, trains, over, waits = model.stream(place=3), threading.Event(), [], threading.Event()

    def trained(*_):
        trains.set()
        waits.wait(0.02)
        over.append("epoch")

    def training():
        model.fit(x, t, epochs=8, callbacks=[trained], progress=False)

    def after(call):
        def work():
            assert trains.wait(30)
            assert model["W"].shape == (3, 4)
            call()
            return len(over)

        return work

    calls = (
        lambda: stream(x[0]),
        lambda: model.predict(x[:6]),
        lambda: model.run({"x": x[:6]}),
        lambda: stream.reset(),
    )
    for _ in range(3):
        for call in calls:
            call()  # compiled ones wait too
    assert fine(at_once(training, *map(after, calls)))[1:] == [8, 8, 8, 8]
