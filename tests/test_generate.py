"""Language models: one token after the other gives what the whole sequence gives; drawing; the zoo's networks of sequences."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn, zoo
from calcvm.model.generate import Sampler

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
    drawn = [model.generate(prompt, tokens=8, temperature=2.0, seed=seed).tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    space = int(np.flatnonzero(LETTERS == ord(" "))[0])
    ended = model.generate(prompt, tokens=8, temperature=0, stop=space).tolist()
    assert ended[4:] == [space] * 4 and space not in ended[:4]


def test_what_is_drawn_follows_the_scores():
    scores = np.log(np.tile([0.5, 0.3, 0.15, 0.05], (20_000, 1)))
    for how, want in (
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.9}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, np.square([0.5, 0.3, 0.15, 0.05]) / np.square([0.5, 0.3, 0.15, 0.05]).sum()),
    ):
        sampler = Sampler(**{"temperature": 1.0, "top_k": None, "top_p": None, "seed": 0, **how})
        shares = np.bincount(sampler.draw(scores), minlength=4) / len(scores)
        np.testing.assert_allclose(shares, want, atol=0.015)
        assert (shares[np.equal(want, 0)] == 0).all()


def test_wrong_input():
    model = language_model(NETWORKS["gpt"]())
    for wrong, told in (
        (lambda: model.generate("abc", 3), "array of tokens"),
        (lambda: model.generate([], 3), "array of tokens"),
        (lambda: model.generate([0.5], 3), "array of tokens"),
        (lambda: model.generate([len(LETTERS)], 3), "integers in"),
        (lambda: model.generate([0] * (STEPS + 1), 1), "embedding|integers in"),  # more than there are positions for
        (lambda: model.generate([0], -1), "tokens"),
        (lambda: model.generate([0], 3, temperature=-1), "temperature"),
        (lambda: model.generate([0], 3, top_k=0), "top_k"),
        (lambda: model.generate([0], 3, top_p=0), "top_p"),
        (lambda: model.generate(np.zeros((99, 2), int), 3), "16|batch"),
        (lambda: language_model(NETWORKS["gpt"](), stream=False).generate([0], 1), "stream=True"),
    ):
        with pytest.raises(cv.CalcError, match=told):
            wrong()
    assert model.generate([0], 0).shape == (0,)


def test_an_interrupted_generation_gives_its_place_back(monkeypatch):
    """Also while its traceback is kept, as in an interactive session."""
    model, draws = language_model(NETWORKS["gru"](), batch_size=1), iter([0, 1])
    wanted = model.generate([1, 2], 5, seed=0).tolist()

    def interrupted(self, scores):
        for token in draws:
            return np.full(len(scores), token)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as kept:
        patch.setattr(Sampler, "draw", interrupted)
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
