"""Carries: states of samples that the forward of any path updates, beside NumPy and through everything that moves a model."""

from __future__ import annotations

import importlib
import pickle

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn, zoo

RNG = np.random.default_rng(0)
X, T = RNG.standard_normal((40, 6, 3)), RNG.standard_normal((40, 6, 4))
START = np.array([0.5, -0.25, 0.0, 1.0])


def graph(optimizer=None):
    """A recurrent cell.  Each path carries a separate state.  Gradients do not go back to earlier steps."""
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 3)), g.placeholder("t", (None, 4))
    h, trained = g.carry("h", (None, 4), init=START), g.carry("trained", (None, 4))
    W, U = g.parameter("W", (3, 4)), g.parameter("U", (4, 4))
    with g.path("learn", backward=True) as learn:
        y = cv.carry(trained, cv.tanh(x @ W + trained @ U))
        learn.minimize(cv.mse(y, t), optimizer or cv.SGD(0.1), output=y)
    with g.path("predict") as predict:
        predict.output = cv.carry(h, cv.tanh(x @ W + h @ U))
    return g


def program(batch=6, **options):
    return cv.compile(graph(), batch_size=batch, **{"workers": 1, "dtype": "float64", **options})


def made(of, seed=1):
    return cv.CalcHeap(of.heap_bytes).create(of, seed=seed)


class Twin:
    """The same in NumPy."""

    def __init__(self, model):
        self.W, self.U = model["W"].astype(float), model["U"].astype(float)
        self.h, self.trained = np.tile(START, (6, 1)), np.zeros((6, 4))

    def predict(self, x):
        n = len(x)
        self.h[:n] = np.tanh(x @ self.W + self.h[:n] @ self.U)
        return self.h[:n].copy()

    def step(self, x, t):
        n = len(x)
        before = self.trained[:n].copy()
        y = self.trained[:n] = np.tanh(x @ self.W + before @ self.U)
        d = 2 * (y - t) / y.size * (1 - y * y)
        self.W -= 0.1 * x.T @ d
        self.U -= 0.1 * before.T @ d
        return np.square(y - t).mean()


CALLS = ["predict", "forward", "step", "run_steps", "reset", "small"]


def play(model, twin, n, rng, tolerance=1e-12):
    """Calls in any order, of batches of any size; the state is compared after each."""
    for _ in range(n):
        call, k, size = rng.choice(CALLS), rng.integers(40), int(rng.integers(1, 7))
        x, t = X[k, :size], T[k, :size]
        if call == "predict":
            np.testing.assert_allclose(predicted(model, x), twin.predict(x), atol=tolerance)
        elif call == "forward":
            model["x"] = x
            model.forward("predict")
            twin.predict(x)
        elif call == "step":
            assert model.step(x, t) == pytest.approx(twin.step(x, t), abs=tolerance)
        elif call == "run_steps":
            model["x"], model["t"] = x, t
            loss = model.run_steps(3)
            assert loss == pytest.approx([twin.step(x, t) for _ in range(3)][-1], abs=tolerance)
        elif call == "reset":
            places = rng.permutation(6)[:size]
            model.reset_state(places)
            twin.h[places], twin.trained[places] = START, 0
        compare(model, twin, tolerance)


def predicted(model, x):
    model["x"] = x
    model.forward("predict")
    return model["h"][: len(x)]


def compare(model, twin, tolerance=1e-12):
    np.testing.assert_allclose(model["h"], twin.h, atol=tolerance)
    np.testing.assert_allclose(model.carries["trained"], twin.trained, atol=tolerance)
    np.testing.assert_allclose(model["U"], twin.U, atol=tolerance)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_state_is_carried_from_call_to_call(workers):
    model = made(program(workers=workers))
    play(model, Twin(model), 60, np.random.default_rng(workers))


def test_states_are_read_before_they_change():
    """Also by operators that stand behind, by the path's loss section, and by the state that another one becomes."""
    g = cv.CalcGraph()
    x, a, b = g.placeholder("x", (None, 2)), g.carry("a", (None, 2)), g.carry("b", (None, 2), init="ones")
    with g.path("swap"):
        cv.carry(a, b)
        cv.carry(b, cv.reshape(a, (None, 2)))
    with g.path("predict") as predict:
        predict.output = cv.carry(a, a + x)
        late = cv.mean(a * b).rename("late")
    p = cv.compile(g, batch_size=3, keep=["late"])
    m = cv.CalcHeap(p.heap_bytes).create(p)
    m["x"] = np.ones((3, 2))
    for k in range(5):
        m.forward("swap")
        assert (m["a"] == 1 - k % 2).all() and (m["b"] == k % 2).all()
    for _ in range(2):
        m.forward("predict")
    m.run_section("predict", "loss")
    assert late.name in m and m["late"] == 0 and (m["a"] == 3).all()


FORMS = {
    "columns": lambda h, x: cv.concat([h[:, :2], x], 1), "last": lambda h, x: h[:, -1], "transposed": lambda h, x: h.T @ h,
    "views": lambda h, x: cv.expand_dims(h, 1) + cv.expand_dims(x[:, :1], 2), "stack": lambda h, x: cv.stack([h, 2 * h], 1),
    "image": lambda h, x: cv.reshape(h, (None, 2, 2)), "mean": lambda h, x: cv.mean(h, axis=0), "softmax": lambda h, x: cv.softmax(h),
    "running": lambda h, x: cv.cumsum(h, axis=1), "cast": lambda h, x: cv.cast(h, "int32"), "twice": lambda h, x: h * h,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_states_are_read_in_any_form(form):
    """By streams at any place too."""
    g = cv.CalcGraph()
    x, h, W = g.placeholder("x", (None, 3)), g.carry("h", (None, 4), init=START), g.parameter("W", (3, 4))
    with g.path("predict") as predict:
        y = FORMS[form](h, x)
        cv.carry(h, cv.tanh(x @ W + h))
        predict.output = y * 1.0
    p, told = cv.compile(g, batch_size=7, workers=1, dtype="float64"), []
    for place in (0, 4):
        m = made(p)
        stream, state = m.stream(place=place), START
        for k in range(4):
            given = {"x": X[k, :1], "h": state[None], "W": m["W"]}
            y = stream(X[k, :1])
            np.testing.assert_allclose(y, predict.evaluate(given)[predict.output.name], atol=1e-12)
            state = np.tanh(X[k, 0] @ given["W"] + state)
            told.append(y.tobytes())
        np.testing.assert_allclose(m["h"], [state if at == place else START for at in range(7)], atol=1e-12)
        if form == "views":
            np.testing.assert_array_equal(m["reshape"], m["h"][:, None])
    assert told[:4] == told[4:]


# ---------------------------------------------------------------- what moves a model
def test_switching_keeps_the_states():
    p = program()
    heap = cv.CalcHeap(p.heap_bytes + 64)
    models = [heap.create(p, seed=seed) for seed in range(3)]
    twins, rng = [Twin(m) for m in models], np.random.default_rng(0)
    for _ in range(30):
        k = rng.integers(3)
        play(models[k], twins[k], 1, rng)
    assert heap.stats.switches > 5


def test_files_copies_and_pickles(tmp_path):
    model = made(program())
    twin, rng = Twin(model), np.random.default_rng(1)
    play(model, twin, 10, rng)
    whole = cv.Model(graph(), batch_size=6, dtype="float64", workers=1)
    whole.predict(X[0])
    for other in (whole.copy("other"), pickle.loads(pickle.dumps(whole))):
        np.testing.assert_array_equal(other["h"], whole["h"])
        np.testing.assert_array_equal(other.predict(X[1]), whole.copy().predict(X[1]))
    whole.save(tmp_path / "with.calc", state=True)
    whole.save(tmp_path / "without.calc")
    np.testing.assert_array_equal(cv.load(tmp_path / "with.calc")["h"], whole["h"])
    fresh = cv.load(tmp_path / "without.calc")
    assert (fresh["h"] == START).all() and (whole["h"] != START).any()
    whole.reset_state()
    np.testing.assert_array_equal(fresh.predict(X[2]), whole.predict(X[2]))


def test_a_store_of_files_keeps_the_states(tmp_path):
    p = program()
    with cv.CalcHeap(2 * p.heap_bytes, store=cv.FileStore(tmp_path)) as heap:
        model = heap.create(p, seed=1, name="one")
        twin = Twin(model)
        play(model, twin, 10, np.random.default_rng(2))
    with cv.CalcHeap(2 * p.heap_bytes, store=cv.FileStore(tmp_path)) as heap:
        compare(heap.open("one"), twin)
        play(heap.open("one"), twin, 10, np.random.default_rng(3))


@pytest.mark.parametrize("share", [0.75, 0.9])
def test_recomputation_has_the_same_bits(share):
    g = cv.CalcGraph()
    x, t, h = g.placeholder("x", (None, 16)), g.placeholder("t", (None, 16)), g.carry("h", (None, 16))
    with g.path("learn", backward=True) as learn:
        y = x
        for k in range(8):
            y = cv.tanh(y @ g.parameter(f"W{k}", (16, 16)) + h)
        learn.minimize(cv.mse(cv.carry(h, y), t), cv.SGD(0.5), output=y)
    free = cv.compile(g, batch_size=64, workers=1)
    small = cv.compile(g, batch_size=64, workers=1, memory=int(share * free.heap_bytes))
    assert small.heap_bytes < free.heap_bytes
    data = RNG.standard_normal((5, 2, 64, 16))
    runs = []
    for of in (free, small):
        m = made(of)
        runs.append([m.step(*pair) for pair in data] + [m["h"].tobytes()])
    assert runs[0] == runs[1]


def test_compiled_calls_change_the_state_too():
    model = cv.Model(graph(), batch_size=6, dtype="float64", workers=1, seed=1)
    twin = Twin(model)
    for k in range(200):
        x, t = X[k % 40], T[k % 40]
        np.testing.assert_allclose(model.predict(x), twin.predict(x), atol=1e-9)
        assert model.step(x, t) == pytest.approx(twin.step(x, t), abs=1e-9)
    assert model.record.calls is not None
    compare(model, twin, 1e-9)


def test_fit_carries_the_state_from_batch_to_batch():
    model = cv.Model(graph(), batch_size=6, dtype="float64", workers=1, seed=1)
    twin = Twin(model)
    x, t = X[:10].reshape(60, 3), T[:10].reshape(60, 4)
    model.fit(x, t, epochs=2, shuffle=False, progress=False)
    for _ in range(2):
        for k in range(10):
            twin.step(X[k], T[k])
    compare(model, twin)
    np.testing.assert_allclose(model.predict(x), np.concatenate([twin.predict(X[k]) for k in range(10)]), atol=1e-12)
    compare(model, twin)


def test_fleets_carry_the_states_of_their_models():
    p = cv.compile(graph(), batch_size=6, workers=1)
    x, t = X[:10].reshape(60, 3).astype("f4"), T[:10].reshape(60, 4).astype("f4")
    alone = []
    for seed in range(8):
        m = cv.CalcHeap(p.heap_bytes).create(p, seed=seed)
        m.fit(x, t, epochs=4, progress=False)
        alone.append(m.carries["trained"].tobytes() + m["U"].tobytes())
    for memory in ("1 MiB", 3 * p.heap_bytes):
        fleet = cv.Fleet(memory, workers=2)
        handles = [fleet.add(p, data=(x, t), seed=seed) for seed in range(8)]
        fleet.fit(4, progress=False)
        assert [h.model.carries["trained"].tobytes() + h.model["U"].tobytes() for h in handles] == alone


def test_a_fleet_of_a_thousand_models_with_a_state_each():
    """In memory for a few of them, against each of them alone."""
    p = cv.compile(graph(), batch_size=6, workers=1)
    x, t = X[:4].reshape(24, 3).astype("f4"), T[:4].reshape(24, 4).astype("f4")
    heap, alone = cv.CalcHeap(p.heap_bytes), []
    for seed in range(1000):
        m = heap.create(p, seed=seed)
        m.fit(x, t, epochs=2, progress=False)
        alone.append(m.carries["trained"].tobytes() + m.stream(place=2)(x[0]).tobytes())
        m.close()
    fleet = cv.Fleet(40 * p.heap_bytes, workers=2)
    handles = [fleet.add(p, data=(x, t), seed=seed) for seed in range(1000)]
    fleet.fit(2, progress=False)
    found = [h.model.carries["trained"].tobytes() + h.model.stream(place=2)(x[0]).tobytes() for h in handles]
    assert found == alone and len({*found}) == 1000


def test_learning_batches_of_several_rounds_carry_from_round_to_round():
    """As in NumPy: an update after the gradients of three rounds, whose states follow each other."""
    model = cv.Model(graph(), batch_size=6, learning_batch=18, dtype="float64", workers=1, seed=1)
    twin, x, t = Twin(model), X[:9], T[:9]
    model.fit(x.reshape(54, 3), t.reshape(54, 4), epochs=2, shuffle=False, progress=False)
    for _ in range(2):
        for first in range(0, 9, 3):
            dW, dU = np.zeros((3, 4)), np.zeros((4, 4))
            for k in range(first, first + 3):
                before, twin.trained = twin.trained, np.tanh(x[k] @ twin.W + twin.trained @ twin.U)
                d = 2 * (twin.trained - t[k]) / (18 * 4) * (1 - twin.trained**2)
                dW, dU = dW + x[k].T @ d, dU + before.T @ d
            twin.W, twin.U = twin.W - 0.1 * dW, twin.U - 0.1 * dU
    compare(model, twin)


def deep(n=8):
    g = cv.CalcGraph()
    x, t, h = g.placeholder("x", (None, 64)), g.placeholder("t", (None, 64)), g.carry("h", (None, 64), init="ones")
    with g.path("learn", backward=True) as learn:
        y = x
        for k in range(n):
            y = cv.tanh(y @ g.parameter(f"W{k}", (64, 64)) + h)
        learn.minimize(cv.mse(cv.carry(h, y), t), cv.Adam(0.01), output=y)
    with g.path("predict") as predict:
        predict.output = cv.carry(h, cv.tanh(x @ g.variables["W0"] + h))
    return g


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_pages_have_the_same_bits(share, tmp_path):
    """Values, moments and parameters wait in a file; the states stay in the heap, and streams move them there."""
    of, options = deep(), {"batch_size": 48, "workers": 1}
    free = cv.plan(of, **options)
    memory = int(share * free.heap_bytes)
    paged = cv.plan(of, memory=memory, page_bytes="64 MiB", page_bandwidth=1e12, recompute=False, **options)
    assert paged.page_bytes > 0 and paged.heap_bytes <= memory
    data, runs = RNG.standard_normal((6, 2, 48, 64)), []
    for p in (free, paged):
        m = cv.CalcHeap(p.heap_bytes, page_folder=tmp_path).create(cv.compile(of, plan=p), seed=5)
        stream = m.stream(batch=2, place=40)
        runs.append([(m.step(*pair), stream(pair[0, :2]).tobytes()) for pair in data] + [m["h"].tobytes()])
        if p is paged:
            other = m.copy(heap=cv.CalcHeap(p.heap_bytes, page_folder=tmp_path))
            assert other["h"].tobytes() == runs[-1][-1] and other.step(*data[0]) == m.step(*data[0])
    assert runs[0] == runs[1]


def test_a_program_of_another_batch_takes_parameters_and_states_by_name():
    model = made(program(batch=6))
    play(model, Twin(model), 10, np.random.default_rng(8))
    for batch in (1, 3, 9):
        other = made(program(batch=batch), seed=2)
        other.set_weights(model.get_weights())
        assert (other["h"] == START).all() and other["h"].shape == (batch, 4)
        here, there = model.stream(place=4), other.stream(place=batch - 1)
        there.state = here.state
        for k in range(5):
            assert here(X[k, 0]).tobytes() == there(X[k, 0]).tobytes()


def test_texts():
    g = graph()
    again = cv.read_graph(g.text())
    assert again.text() == g.text() and again.form == g.form
    options = {"batch_size": 6, "workers": 1}
    assert cv.compile(again, **options).hash == cv.compile(g, **options).hash


# ---------------------------------------------------------------- mistakes
def test_what_is_refused():
    g = cv.CalcGraph()
    x, h = g.placeholder("x", (None, 3)), g.carry("h", (None, 3))
    for shape in ((3,), (3, None), (None, None), 3, "h"):
        with pytest.raises(cv.ShapeError, match="carry 'no': "):
            g.carry("no", shape)
    with g.path("p"):
        for state, new, text in (
            (x, h, "the placeholder 'x' is no state: make one by g.carry"),
            (h, x[:, :2], "does not fit the state"),
            (h, cv.cast(x, "int64"), "int64 does not fit the state"),
            (1, x, "a state, made by g.carry"),
            (h, np.ones((2, 3)), "a variable is wanted"),
        ):
            with pytest.raises(cv.CalcError, match=text):
                cv.carry(state, new)
        cv.carry(h, x)
        with pytest.raises(cv.CalcError, match="path 'p' updates 'h' already, by 'x'"):
            cv.carry(h, 2 * x)
    m = made(cv.compile(g, batch_size=2))
    with pytest.raises(cv.CalcError, match="change it through model.carries"):
        m["h"] = np.ones((2, 3))
    for places in (2, -1, [0, 5], "a", 0.5):
        with pytest.raises(cv.CalcError, match="reset_state"):
            m.reset_state(places)


# ---------------------------------------------------------------- float64 values, scripts, other devices
def test_evaluate_starts_from_the_initial_state():
    g, model = graph(), made(program())
    path, twin = g.paths["predict"], Twin(model)
    given = {"x": X[0], **model.parameters}
    np.testing.assert_allclose(path.evaluate(given)["tanh_2"], twin.predict(X[0]), atol=1e-12)
    np.testing.assert_allclose(
        path.evaluate({**given, "x": X[1], "h": twin.h})["tanh_2"], twin.predict(X[1]), atol=1e-12
    )


def test_scripts_carry_the_states(tmp_path, monkeypatch):
    model = cv.Model(graph(), batch_size=6, dtype="float64", workers=1, seed=1)
    model.predict(X[5])
    model.to_python(tmp_path / "carries.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    import carries

    rng = np.random.default_rng(4)
    for _ in range(20):
        x, t = (of[rng.integers(40), : rng.integers(1, 7)] for of in (X, T))
        t = np.resize(t, (len(x), 4))
        np.testing.assert_allclose(carries.predict(x), model.predict(x), atol=1e-12)
        assert carries.step(x, t) == pytest.approx(model.step(x, t), abs=1e-12)


STREAMING = {
    "recurrent": lambda: nn.LSTM(8, num_layers=2) >> nn.GRU(5) >> nn.Linear(3),
    "attention": lambda: zoo.gpt(7, width=8, layers=1, heads=2, steps=9),
    "rotary": lambda: nn.MultiHeadAttention(2, causal=True, window=3, kv_heads=1, rotary=10.0) >> nn.RMSNorm(),
    "convolution": lambda: zoo.tcn(2, width=4, layers=2),
}


@pytest.mark.parametrize("name", STREAMING)
def test_scripts_stream(name, tmp_path, monkeypatch):
    """From the states that the model has then; samples that begin again; the next batch trains as the model does."""
    words, rng = name == "attention", np.random.default_rng(0)
    x = rng.integers(0, 7, (4, 9)) if words else rng.standard_normal((4, 9, 4))
    options = {"loss": "softmax_cross_entropy" if words else "mse", "optimizer": cv.SGD(0.1), "stream": True}
    model = cv.Model(
        STREAMING[name](), input_shape=x.shape[1:], batch_size=4, dtype="float64", workers=1, seed=1, **options
    )
    t = rng.integers(0, 7, (4, 9)) if words else rng.standard_normal(model.predict(x).shape)
    stream = model.stream(batch=4)
    for k in range(3):
        stream(x[:, k])
    model.to_python(tmp_path / f"streams_{name}.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    script = importlib.import_module(f"streams_{name}")
    few = model.stream(batch=3, place=0)
    for k in range(3, 9):
        if k == 5:
            model.reset_state([1])
            for carry in model.carries:
                getattr(script, carry.replace(".", "_"))[1] = 0
            assert script.step(x, t) == pytest.approx(model.step(x, t), abs=1e-12)
        np.testing.assert_allclose(script.stream(x[:, k]), stream(x[:, k]), atol=1e-12)
        if k == 6:
            np.testing.assert_allclose(script.stream(x[:3, k]), few(x[:3, k]), atol=1e-12)
            break
    with pytest.raises(ValueError, match="5 samples, and BATCH is 4"):
        script.stream(np.concatenate([x, x])[:5, 0])


@pytest.mark.parametrize("share", [0.75, 0.9])
def test_a_split_model_carries_the_states(share):
    memory = int(share * program().heap_bytes)
    processors = [cv.Processor(name, memory=memory) for name in "ab"]
    plan = cv.plan_devices(graph(), processors, batch_size=6, dtype="float64")
    assert {*plan.where} == {0, 1}
    split, twin = cv.SplitModel(plan, seed=1), Twin(made(program()))
    for k in range(10):
        assert split.step(X[k], T[k]) == pytest.approx(twin.step(X[k], T[k]), abs=1e-12)
        np.testing.assert_allclose(split.run("predict", X[k]), twin.predict(X[k]), atol=1e-12)
        np.testing.assert_allclose(split.state()["trained"].reshape(6, 4), twin.trained, atol=1e-12)
        np.testing.assert_allclose(split.state()["h"].reshape(6, 4), twin.h, atol=1e-12)


# ---------------------------------------------------------------- streams
def test_streams_answer_and_keep_their_states(tmp_path):
    model = cv.Model(graph(), batch_size=6, dtype="float64", workers=1, seed=1)
    twin = Twin(model)
    streams, pair = [model.stream() for _ in range(4)], model.stream(batch=2)
    assert [s.place for s in (*streams, pair)] == [0, 1, 2, 3, 4]
    rng = np.random.default_rng(6)
    for _ in range(60):
        k, step = rng.integers(5), X[rng.integers(40)]
        at = slice(4, 6) if k == 4 else slice(k, k + 1)
        twin.h[at] = np.tanh(step[at] @ twin.W + twin.h[at] @ twin.U)
        y = pair(step[at]) if k == 4 else streams[k](step[k])
        np.testing.assert_allclose(y, twin.h[at] if k == 4 else twin.h[k], atol=1e-12)
    np.testing.assert_allclose(model["h"], twin.h, atol=1e-12)
    streams[2].reset()
    twin.h[2] = START
    np.testing.assert_allclose(streams[2].state["h"], twin.h[2:3])
    model.save(tmp_path / "m.calc", state=True)
    again = cv.load(tmp_path / "m.calc")
    np.testing.assert_array_equal(again.stream(place=3)(X[0, 3]), streams[3](X[0, 3]))
    with pytest.raises(cv.CalcError, match="all 6 places of the model's batch have streams"):
        model.stream()
    del pair
    assert model.stream().place == 4


def test_what_streams_refuse():
    model = cv.Model(graph(), batch_size=3, dtype="float64", workers=1)
    for path, text in (("learn", "keeps no state|trains"), ("no", "no path")):
        with pytest.raises(cv.CalcError, match=text):
            model.stream(path)
    for options in ({"batch": 0}, {"batch": 4}, {"place": 3}, {"place": -1}, {"batch": 2, "place": 2}):
        with pytest.raises(cv.CalcError, match="stream: "):
            model.stream(**options)
    s = model.stream()
    for x, text in (
        (np.ones(2), "input|x"),
        (np.ones((2, 3)), "data of 2 samples, the stream has 1"),
        (np.ones((1, 1, 3)), "x"),
    ):
        with pytest.raises(cv.CalcError, match=text):
            s(x)
    with pytest.raises(cv.CalcError, match=r"a stream takes 1 arrays \(x\), not 2"):
        s(np.ones(3), np.ones(3))
