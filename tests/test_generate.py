"""Language models: one token after the other gives what the whole sequence gives; drawing; the zoo's networks of sequences."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn, zoo
from calcvm.errors import CalcError, ShapeError
from calcvm.model import generate
from calcvm.vm.memory.slot import Slot
from calcvm.vm.run.device import Cpu
from calcvm.vm.run.loaded import Loaded

TEXT = np.frombuffer(b"the rain in spain stays mainly in the plain. " * 6, np.uint8).astype(np.int64)
LETTERS, TOKENS = np.unique(TEXT, return_inverse=True)
STEPS = 12


def windows() -> tuple[np.ndarray, np.ndarray]:
    view = np.lib.stride_tricks.sliding_window_view(TOKENS, STEPS + 1)
    return view[:, :-1], view[:, 1:]


def language_model(net: nn.Layer, **how) -> cv.Model:
    options = {"optimizer": cv.Adam(3e-3), "batch_size": 16, "stream": True, "seed": 0, "dtype": "float64"}
    return cv.Model(net, input_shape=(STEPS,), **{**options, **how})


NETWORKS = {
    "lstm": lambda: zoo.char_lstm(len(LETTERS), width=16, layers=2),
    "gpt": lambda: zoo.gpt(len(LETTERS), width=16, layers=2, heads=2, steps=STEPS),
    "rotary": lambda: (
        nn.Embedding(len(LETTERS), 16)
        >> nn.TransformerEncoderLayer(4, dim_feedforward=32, causal=True, rotary=100.0, kv_heads=2)
        >> nn.Linear(len(LETTERS))
    ),
    "window": lambda: (
        nn.Embedding(len(LETTERS), 16) >> nn.MultiHeadAttention(2, causal=True, window=3) >> nn.Linear(len(LETTERS))
    ),
    "gru": lambda: nn.Embedding(len(LETTERS), 8) >> nn.GRU(8) >> nn.LayerNorm() >> nn.Linear(len(LETTERS)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_token_at_a_time_gives_what_the_sequence_gives(name):
    model = language_model(NETWORKS[name]())
    X, y = windows()
    model.fit(X[:64], y[:64], epochs=2, progress=False)
    want = model.predict(X[:3])
    stream = model.stream("stream", batch=3)
    for t in range(STEPS):
        np.testing.assert_allclose(stream(X[:3, t]), want[:, t], rtol=1e-9, atol=1e-11)
    stream.reset()
    np.testing.assert_allclose(stream(X[:3, 0]), want[:, 0], rtol=1e-9, atol=1e-11)


def test_it_writes_what_it_has_learnt():
    model = language_model(NETWORKS["gpt"](), dtype="float32", optimizer=cv.Adam(1e-2))
    model.fit(*windows(), epochs=40, progress=False)
    prompt = TOKENS[:4]
    found = model.generate(prompt, tokens=8, temperature=0)
    assert "".join(chr(LETTERS[t]) for t in [*prompt, *found]) == "the rain in "
    both = model.generate(np.stack([TOKENS[:4], TOKENS[9:13]]), tokens=8, temperature=0)
    assert (both[0] == found).all() and both.shape == (2, 8)
    drawn = [model.generate(prompt, tokens=8, temperature=5.0, seed=seed).tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    space = int(np.flatnonzero(LETTERS == ord(" "))[0])
    ended = model.generate(prompt, tokens=8, temperature=0, stop=space).tolist()
    assert ended[4:] == [space] * 4 and space not in ended[:4]


# ---------------------------------------------------------------- the loop in compiled code
PROMPTS = [[1, 2, 3], [4], [0, 5, 6, 7, 8], [9, 2]]
DRAWING = {"temperature": 1.3, "top_k": 9, "top_p": 0.95, "seed": 5}


def written(model: cv.Model, prompt=PROMPTS, tokens=7, **how) -> tuple[bytes, dict[str, bytes]]:
    """A text, and what the model carries after it."""
    found = model.generate(prompt, tokens, **{**DRAWING, **how})
    return found.tobytes(), {name: array.tobytes() for name, array in model.carries.items()}


def call_by_call(model: cv.Model, stop: int | None = None, tokens=7, **how) -> tuple[bytes, dict[str, bytes]]:
    """The same by single calls of a stream: the definition."""
    how = {**DRAWING, **how}
    prompts, stream = [np.array(p) for p in PROMPTS], model.stream("stream", batch=len(PROMPTS))
    seed = how.pop("seed")
    sampler = generate.Sampler(
        prompts, tokens, (len(LETTERS), model.program.itemsize), [(seed, i) for i in range(4)], stop=stop, **how
    )
    for step in sampler.text[:-1]:
        sampler.draw(stream(step))
        if sampler.over:
            break
    return sampler.drawn().tobytes(), {name: array.tobytes() for name, array in model.carries.items()}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_loop_is_the_single_calls(name, dtype, monkeypatch):
    """Texts, and the bits of what is carried: for any team, place, and length of stretches, and without the loop."""
    model = language_model(NETWORKS[name](), dtype=dtype, batch_size=6, workers=1)
    wanted = call_by_call(model)
    assert written(model) == wanted
    stop = int(np.frombuffer(wanted[0], np.int64)[2])
    model.reset_state()
    ended = call_by_call(model, stop=stop)
    model.reset_state()
    assert written(model, stop=stop) == ended != wanted
    for workers in (1, 2, 3):
        other = language_model(NETWORKS[name](), dtype=dtype, batch_size=6, workers=workers)
        with monkeypatch.context() as patch:
            patch.setattr(Loaded, "brief", lambda *_: 0)  # a team of all workers, however short a step is
            assert written(other) == wanted
            patch.setattr(generate, "latest", lambda: 1)  # each stretch ends as soon as it may
            other.reset_state()
            assert written(other, stop=stop) == ended
    other.reset_state()
    keep = other.stream(batch=2)  # it has the first places
    keep([1, 2])
    kept = {name: array.tobytes() for name, array in keep.state.items()}
    assert written(other)[0] == wanted[0]
    assert {name: array.tobytes() for name, array in keep.state.items()} == kept
    monkeypatch.setattr(generate, "Cpu", type("Other", (Cpu,), {}))
    model.reset_state()
    assert written(model) == wanted
    model.reset_state()
    assert written(model, stop=stop) == ended


def test_a_prompt_alone_or_among_others():
    """The prompt and the seed alone decide a text.  One seed serves all prompts, with their places; or each has its own."""
    model = language_model(NETWORKS["gpt"]())
    together = model.generate(PROMPTS, 7, **DRAWING)
    assert together.shape == (4, 7) and together.dtype == np.int64
    assert (model.generate(PROMPTS[0], 7, **DRAWING) == together[0]).all()
    seeds = [3, 8, 8, 5]
    own = model.generate(PROMPTS, 7, **{**DRAWING, "seed": seeds})
    for i, seed in enumerate(seeds):
        assert (model.generate(PROMPTS[i], 7, **{**DRAWING, "seed": seed}) == own[i]).all()
    assert (own[3] != together[3]).any()
    same = model.generate([[1, 2]] * 3, 7, **DRAWING)
    assert len({tuple(text) for text in same.tolist()}) == 3  # samples draw their own numbers
    assert (model.generate(np.array(PROMPTS[0], "u1"), 7, **DRAWING) == together[0]).all()
    assert model.generate([PROMPTS[0]], 7, **DRAWING).shape == (1, 7)
    assert model.generate([0], 0).shape == (0,) and model.generate(PROMPTS, 0).shape == (4, 0)
    assert (model.generate([0], 9) != model.generate([0], 9)).any()  # without a seed


def test_a_text_of_a_model_that_is_moved():
    """In a heap with room for one model, and when it was trained on, loaded, copied: the text follows from the parameters."""
    p = cv.compile(
        cv.build_graph(NETWORKS["gpt"](), (STEPS,), "softmax_cross_entropy", cv.SGD(0.1), stream=True), batch_size=4
    )
    heap, texts = cv.CalcHeap(p.heap_bytes), []
    models = [heap.create(p, seed=seed) for seed in (0, 1)]
    for _ in range(2):
        texts.append([written(m)[0] for m in models])
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]
    assert written(models[0].copy(heap=cv.CalcHeap(p.heap_bytes)))[0] == texts[0][0]
    models[0].fit(*windows(), epochs=1, progress=False)
    assert written(models[0])[0] != texts[0][0]
    models[0].close()
    with pytest.raises(CalcError, match="closed"):
        models[0].generate([0], 1)


def test_other_types_of_tokens():
    """Bytes, and tokens as floats."""
    wanted = language_model(NETWORKS["gpt"]()).generate(PROMPTS, 7, **DRAWING)
    as_bytes = language_model(NETWORKS["gpt"](), input_dtype="uint8")
    assert (as_bytes.generate(PROMPTS, 7, **DRAWING) == wanted).all()
    net = (
        nn.Function(lambda x: cv.reshape(x, (None, *(n.b for n in x.shape[1:]), 1)) / 10.0)
        >> nn.LSTM(8)
        >> nn.Linear(10)
    )
    model = cv.Model(net, input_shape=(STEPS,), optimizer=cv.SGD(0.1), batch_size=4, stream=True, seed=0)
    assert model.generate(PROMPTS, 30, seed=1).max() < 10


def test_ctrl_c_ends_a_text():
    model = language_model(NETWORKS["lstm"]())
    model.generate([0], 2)
    before, alarm = time.monotonic(), threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    alarm.start()
    with pytest.raises(KeyboardInterrupt):
        model.generate([0], 20_000_000)
    assert time.monotonic() - before < 20
    assert model.generate([0], 2).shape == (2,)


def test_a_trap_ends_a_text_where_it_came(monkeypatch):
    """The steps before it have changed the states, those after it have not run."""
    g, found = cv.CalcGraph(), []
    token, seen = g.placeholder("token", (None,)), g.carry("seen", (None,))
    with g.path("stream") as stream:
        stream.output = cv.embedding(cv.carry(seen, seen + token), g.parameter("W", (10, 12), init="zeros"))
    program = cv.compile(g, batch_size=2)
    for device in (Cpu, type("Other", (Cpu,), {})):
        monkeypatch.setattr(generate, "Cpu", device)
        model = cv.CalcHeap(program.heap_bytes).create(program)
        with pytest.raises(cv.errors.Trap, match="is not an integer in"):
            model.generate([1, 4, 6, 1, 1], 3, temperature=0)
        found.append(model.carries["seen"].tolist())
    assert found == [[11.0, 0.0]] * 2


# ---------------------------------------------------------------- wrong input
def of_networks() -> cv.Model:
    return language_model(NETWORKS["gpt"](), batch_size=4)


WRONG = {
    "text": (lambda m: m.generate("abc", 3), "array of tokens"),
    "texts": (lambda m: m.generate(["abc", "b"], 3), "array of tokens"),
    "empty": (lambda m: m.generate([], 3), "array of tokens"),
    "an empty one": (lambda m: m.generate([[1], []], 3), "array of tokens"),
    "no prompts": (lambda m: m.generate(np.zeros((0, 3), int), 3), "array of tokens"),
    "floats": (lambda m: m.generate([0.5], 3), "array of tokens"),
    "whole floats": (lambda m: m.generate(np.ones(3), 3), "array of tokens"),
    "bools": (lambda m: m.generate([True, False], 3), "array of tokens"),
    "None": (lambda m: m.generate(None, 3), "array of tokens"),
    "rank 3": (lambda m: m.generate(np.zeros((1, 2, 3), int), 3), "array of tokens"),
    "a list of rank 2": (lambda m: m.generate([np.zeros((2, 3), int)], 3), "array of tokens"),
    "beyond": (lambda m: m.generate([1, len(LETTERS)], 3), r"integers in \[0, \d+\), not \d+, at index 1"),
    "negative": (lambda m: m.generate([[0], [1, -1]], 3), r"integers in \[0, \d+\), not -1, at index 1"),
    "a long prompt": (
        lambda m: m.generate([0] * (STEPS + 1), 1),
        f"take {STEPS + 1} steps, and the network has room for {STEPS}",
    ),
    "many tokens": (
        lambda m: m.generate([[0], [0, 0]], STEPS),
        f"a prompt of 2 tokens and {STEPS} more take {STEPS + 1} steps",
    ),
    "tokens": (lambda m: m.generate([0], -1), "tokens"),
    "too many tokens": (lambda m: m.generate([0], 2**40), "tokens"),
    "half a token": (lambda m: m.generate([0], 2.5), "tokens"),
    "temperature": (lambda m: m.generate([0], 3, temperature=-1), "temperature"),
    "no temperature": (lambda m: m.generate([0], 3, temperature=float("nan")), "temperature"),
    "top_k": (lambda m: m.generate([0], 3, top_k=0), "top_k"),
    "top_p": (lambda m: m.generate([0], 3, top_p=0), "top_p"),
    "top_p above 1": (lambda m: m.generate([0], 3, top_p=1.5), "top_p"),
    "stop": (lambda m: m.generate([0], 3, stop=len(LETTERS)), "stop must be an integer from 0 to"),
    "negative stop": (lambda m: m.generate([0], 3, stop=-1), "stop"),
    "seed": (lambda m: m.generate([0], 3, seed=-1), "seed"),
    "seeds": (lambda m: m.generate([0], 3, seed=[1, 2]), "2 seeds for 1 prompts"),
    "a seed": (lambda m: m.generate([[0], [1]], 3, seed=[1, 2.5]), "seed"),
    "many prompts": (lambda m: m.generate(np.zeros((5, 2), int), 3), "stream: batch must be an integer from 1 to 4"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input(what):
    model, (call, told) = of_networks(), WRONG[what]
    model.generate(PROMPTS, 3)
    before = model.image().tobytes()
    with pytest.raises(CalcError, match=told):
        call(model)
    assert model.image().tobytes() == before
    assert model.generate([0], 2).shape == (2,)


def test_places_that_streams_have():
    model = of_networks()
    streams = [model.stream() for _ in range(4)]
    with pytest.raises(CalcError, match="all 4 places"):
        model.generate([0], 3)
    del streams[2]
    assert model.generate([0], 3).shape == (3,)


def test_models_that_write_no_text():
    def model(net, shape=(STEPS,), **how):
        return cv.Model(net, input_shape=shape, optimizer=cv.SGD(0.1), batch_size=2, stream=True, seed=0, **how)

    words, lstm = nn.Embedding(10, 4), nn.LSTM(4)
    for wrong, told in (
        (language_model(NETWORKS["gpt"](), stream=False), "stream=True"),
        (
            model(nn.LSTM(4), (STEPS, 3), loss="mse"),
            r"takes step \(B, 3\), and one token of each sample, \(B,\), is wanted",
        ),
        (
            model(
                words >> lstm >> nn.Function(lambda y: cv.reshape(y, (None, *(n.b for n in y.shape[1:-1]), 2, 2))),
                loss="mse",
            ),
            r"gives stream.output \(B, 2, 2\) for a step, and scores of the tokens, \(B, vocabulary\), are wanted",
        ),
        (
            model(nn.Embedding(10, 4) >> nn.LSTM(4) >> nn.Linear(11)),
            "gives scores of 11 tokens, and reads only tokens below 10",
        ),
    ):
        with pytest.raises(CalcError, match=told):
            wrong.generate([0], 2)
    assert model(nn.Embedding(10, 4) >> nn.LSTM(4) >> nn.Linear(7)).generate([9], 20, seed=0).max() < 7
    with pytest.raises(ShapeError):
        model(nn.LSTM(4), (STEPS, 3), loss="mse").generate([0], 2)


def test_scores_that_are_not_finite():
    model = of_networks()
    model.parameters["embedding_1.weight"][:] = np.nan
    with pytest.raises(
        CalcError, match="the scores of sample 0 after 2 tokens are not finite: has the training diverged"
    ):
        model.generate([[0, 1], [1, 2]], 3)


def test_a_window_and_an_lstm_have_room_for_any_text():
    for name in ("lstm", "window", "gru"):
        assert language_model(NETWORKS[name]()).generate([0, 1], 5 * STEPS, seed=0).shape == (5 * STEPS,)
    with pytest.raises(CalcError, match="has room for 12"):
        language_model(NETWORKS["rotary"]()).generate([0, 1], STEPS)


def test_the_room_for_a_text_is_kept(tmp_path):
    """In files, and in the text of a graph."""
    model = of_networks()
    model.save(tmp_path / "it.calcvm")
    with pytest.raises(CalcError, match="has room for 12"):
        cv.load(tmp_path / "it.calcvm").generate([0], STEPS + 1)
    g = cv.CalcGraph()
    with g.path("count") as count:
        n = g.carry("n", (None,), steps=7)
        count.output = cv.carry(n, n + 1.0) * 2.0
    again = cv.read_graph(g.text())
    assert again.variables["n"].steps == 7 and again.text() == g.text()
    assert cv.compile(again, batch_size=2).info["carries"]["n"]["steps"] == 7
    for wrong in (0, 1.5, "7"):
        with pytest.raises(CalcError, match="carry 'm': steps must be an integer"):
            g.carry("m", (None,), steps=wrong)


def test_streams_have_a_batch_and_reset_single_samples():
    model = language_model(NETWORKS["lstm"]())
    stream = model.stream(batch=3, place=2)
    for wrong in ([0], [0, 1], [0, 1, 2, 3], [[0, 1, 2]]):
        with pytest.raises(ShapeError):
            stream(wrong)
    first = stream([1, 2, 3])
    before = {name: array.copy() for name, array in stream.state.items()}
    for bad in (3, -1, [0, 3], 0.5, "a", [True]):
        with pytest.raises(CalcError, match="stream.reset: a sample"):
            stream.reset(bad)
    stream.reset([])
    assert all((array == before[name]).all() for name, array in stream.state.items())
    stream.reset([0, 2])
    for name, array in stream.state.items():
        assert (array[[0, 2]] == 0).all() and (array[1] == before[name][1]).all()
    again = stream([1, 2, 3])
    assert (again[[0, 2]] == first[[0, 2]]).all() and (again[1] != first[1]).any()
    stream.reset(1)
    stream.reset()
    assert (stream([1, 2, 3]) == first).all()


def test_an_interrupted_generation_gives_its_place_back(monkeypatch):
    """Also while its traceback is kept, as in an interactive session."""
    model = language_model(NETWORKS["gru"](), batch_size=1)
    wanted = model.generate([1, 2], 5, seed=0).tolist()

    def interrupted(self, *_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as kept:
        patch.setattr(Slot, "execute", interrupted)
        model.generate([1, 2], 5)
    assert kept.traceback and model.generate([1, 2], 5, seed=0).tolist() == wanted
    assert model.stream().place == 0


def test_networks_of_sequences_train():
    rng = np.random.default_rng(0)
    words, labels = rng.integers(0, 50, (40, 10)), rng.integers(0, 2, 40)
    net = zoo.transformer_classifier(2, width=16, layers=1, heads=2, steps=10, vocabulary=50)
    model = cv.Model(net, input_shape=(10,), optimizer=cv.Adam(1e-2), batch_size=20, seed=0)
    model.fit(words, labels, epochs=60, progress=False)
    assert model.evaluate(words, labels)["accuracy"] == 1.0
    X = rng.standard_normal((64, 20, 1))
    y = np.cumsum(X, 1) / 4
    model = cv.Model(zoo.tcn(width=8), input_shape=(20, 1), loss="mse", optimizer=cv.Adam(1e-2), stream=True, seed=0)
    before = model.evaluate(X, y)["loss"]
    model.fit(X, y, epochs=40, progress=False)
    assert model.evaluate(X, y)["loss"] < 0.2 * before
    stream, whole = model.stream("stream"), model.predict(X[:1])[0]
    np.testing.assert_allclose([stream(x) for x in X[0].astype("float32")], whole, atol=1e-5)


@pytest.mark.parametrize("name", zoo.SEQUENCES)
def test_what_does_not_fit_is_refused(name):
    for given in {"layers": 0}, {"width": "8"}, {"classes": 2.5}:
        with pytest.raises(cv.CalcError, match=f"zoo.{name}: {[*given][0]} must be an integer"):
            getattr(zoo, name)(**given)
