"""BERT and the LSTM that answers: as large as published, beside PyTorch, and they learn what they are made for."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

import calcvm as cv
from calcvm import zoo

IGNORED = -100
BERT = {"classes": 13, "width": 12, "layers": 2, "heads": 3, "steps": 9, "types": 3}
ANSWER = {"classes": 12, "width": 9, "layers": 2, "source": 5}


@pytest.mark.parametrize(
    ("sizes", "published"),  # Hugging Face's BertForMaskedLM, whose scores are by the weight of the embedding too
    [({}, 109_514_298), ({"width": 1024, "layers": 24, "heads": 16}, 335_174_458)],
    ids=["base", "large"],
)
def test_bert_is_as_large_as_published_and_is_planned(sizes, published):
    net = zoo.bert(**sizes)
    graph = cv.build_graph(net, (512,), "softmax_cross_entropy", cv.Adam(1e-4), ignore_index=IGNORED)
    assert sum(prod(n.b for n in v.shape) for v in graph.parameters("")) == published
    assert cv.plan(graph, batch_size=1, workers=1).heap_bytes > 12 * published  # weights and both moments of Adam


def masked(rng, n, steps, classes):
    """Sequences that count up, of which a part is masked by the last class; the targets are what was masked."""
    whole = (rng.integers(0, classes - 1, (n, 1)) + np.arange(steps)) % (classes - 1)
    hidden = rng.uniform(size=whole.shape) < 0.2
    hidden[:, 0] = True
    return np.where(hidden, classes - 1, whole), np.where(hidden, whole, IGNORED)


def reversals(rng, n, source, classes):
    """Tokens to read, 1 to begin the answer, and the answer: they from the last to the first."""
    read = rng.integers(2, classes, (n, source))
    return np.concatenate([read, np.ones((n, 1), int), read[:, :0:-1]], axis=1), read[:, ::-1]


# ---------------------------------------------------------------- beside PyTorch
def bert_by_torch(torch, P, x):
    f, (W, H) = torch.nn.functional, (BERT["width"], BERT["heads"])

    def norm(x, name):
        return f.layer_norm(x, (W,), P[f"{name}.scale"], P[f"{name}.shift"], 1e-12)

    def linear(x, name):
        return x @ P[f"{name}weight"] + P[f"{name}bias"]

    words = P["bertembedding_1.words.weight"]
    tokens, kinds = (x[..., 0], x[..., 1]) if x.ndim == 3 else (x, torch.zeros_like(x))
    n, T = tokens.shape
    x = norm(words[tokens] + P["bertembedding_1.types"][kinds] + P["positionalembedding_1.weight"][:T], "layernorm_1")
    for k in range(1, BERT["layers"] + 1):
        at = f"transformerencoderlayer_{k}"
        heads = [v.view(n, T, H, W // H).transpose(1, 2) for v in linear(x, f"{at}.self_attn.in_proj_").split(W, 2)]
        y = f.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(n, T, W)
        x = norm(x + linear(y, f"{at}.self_attn.out_proj."), f"{at}.norm1")
        x = norm(x + linear(f.gelu(linear(x, f"{at}.linear1.")), f"{at}.linear2."), f"{at}.norm2")
    return norm(f.gelu(linear(x, "linear_1.")), "layernorm_2") @ words.T + P["tiedlinear_1.bias"]


def answer_by_torch(torch, P, x):
    W, S = ANSWER["width"], ANSWER["source"]

    def lstm(name, x, *states):
        given = {k.partition(f".{name}_")[2]: v.mT if v.ndim == 2 else v for k, v in P.items() if f".{name}_" in k}
        return torch.func.functional_call(torch.nn.LSTM(W, W, ANSWER["layers"], batch_first=True), given, (x, *states))

    words = P["answeringlstm_1.words.weight"][x]
    read, states = lstm("read", words[:, :S])
    answer, _ = lstm("answer", words[:, S:], states)
    both = torch.cat([torch.softmax(answer @ read.mT / W**0.5, 2) @ read, answer], 2)
    return torch.tanh(both @ P["linear_1.weight"]) @ P["linear_2.weight"] + P["linear_2.bias"]


@pytest.mark.peers
@pytest.mark.parametrize("name", ["bert", "bert with types", "seq2seq"])
def test_it_trains_as_by_torch(name):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    if name == "seq2seq":
        net, forward, (x, y) = zoo.seq2seq(**ANSWER), answer_by_torch, reversals(rng, 4, 5, 12)
    else:
        net, forward, (x, y) = zoo.bert(**BERT), bert_by_torch, masked(rng, 4, 7, 13)
        if "types" in name:
            x = np.stack([x, rng.integers(0, BERT["types"], x.shape)], axis=2)
    model = cv.Model(
        net, input_shape=x.shape[1:], optimizer=cv.SGD(0.1), batch_size=4, dtype="float64", ignore_index=IGNORED, workers=2
    )  # fmt: skip
    for value in model.parameters.values():
        value[...] += 0.1 * rng.standard_normal(value.shape)
    P = {k: torch.tensor(v, requires_grad=True) for k, v in model.get_weights().items()}
    for _ in range(5):
        scores = forward(torch, P, torch.tensor(x))
        np.testing.assert_allclose(model.predict(x), scores.detach(), 1e-9, 1e-10)
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), torch.tensor(y.reshape(-1)))
        for p, d in zip(P.values(), torch.autograd.grad(loss, [*P.values()])):
            p.data -= 0.1 * d
        np.testing.assert_allclose(model.step(x, y), loss.item(), 1e-9)


# ---------------------------------------------------------------- what they learn
def test_bert_tells_what_is_masked():
    rng = np.random.default_rng(0)
    net = zoo.bert(13, width=32, layers=1, heads=4, steps=12, dropout=0.1)
    model = cv.Model(
        net, input_shape=(12,), optimizer=cv.Adam(5e-3), ignore_index=IGNORED, batch_size=32, seed=0
    )  # fmt: skip
    test = masked(rng, 200, 12, 13)
    before = model.evaluate(*test)
    model.fit(*masked(rng, 1000, 12, 13), epochs=12, progress=False)
    after = model.evaluate(*test)
    assert before["accuracy"] < 0.3 and after["accuracy"] > 0.98 and after["loss"] < 0.1 * before["loss"]


def test_an_lstm_reverses_what_it_reads():
    rng = np.random.default_rng(0)
    model = cv.Model(
        zoo.seq2seq(12, width=48, layers=1, source=6), input_shape=(12,), optimizer=cv.Adam(1e-2), batch_size=50, stream=True, seed=0
    )  # fmt: skip
    model.fit(*reversals(rng, 3000, 6, 12), epochs=10, progress=False)
    X, y = reversals(rng, 50, 6, 12)
    assert model.evaluate(X, y)["accuracy"] > 0.98
    answers = model.generate(X[:, :7], tokens=6, temperature=0)  # from its own tokens, not the true ones
    assert np.mean(answers == y) > 0.97


@pytest.mark.parametrize("source", [1, 5])
def test_an_answer_token_by_token_has_the_scores_of_the_whole(source):
    net = zoo.seq2seq(**{**ANSWER, "source": source})
    model = cv.Model(
        net, input_shape=(source + 4,), optimizer="adam", batch_size=3, stream=True, dtype="float64", seed=0
    )
    X = np.random.default_rng(0).integers(0, 12, (3, source + 4))
    stream = model.stream("stream", batch=3)
    for _ in range(2):
        found = np.stack([stream(step) for step in X.T], axis=1)[:, source:]
        np.testing.assert_allclose(found, model.predict(X), 1e-9, 1e-12)
        stream.reset()


def test_bert_sees_no_padding():
    rng = np.random.default_rng(0)
    model = cv.Model(zoo.bert(**BERT), input_shape=(7,), optimizer="adam", batch_size=2, lengths=True, seed=0)
    one, other = rng.integers(0, 13, (2, 2, 7))
    other[0, :4], other[1] = one[0, :4], one[1]
    found = [model.predict((x, np.array([4, 7]))) for x in (one, other)]
    assert (found[0][0, :4] == found[1][0, :4]).all() and (found[0][1] == found[1][1]).all()
    assert (model.predict((one, np.array([5, 7])))[0, :4] != found[0][0, :4]).any()


def test_what_has_no_answer_or_no_type_is_refused():
    for shape in (5,), (7, 2):
        with pytest.raises(cv.ShapeError, match="the 5 that are read and at least one of the answer"):
            cv.Model(zoo.seq2seq(**ANSWER), input_shape=shape, optimizer="adam")
    with pytest.raises(cv.CalcError, match="pad what is read in front"):
        cv.Model(zoo.seq2seq(**ANSWER), input_shape=(7,), optimizer="adam", lengths=True)
    for shape in (4, 3), (4, 2, 1):
        with pytest.raises(cv.ShapeError, match="tokens and their types"):
            cv.Model(zoo.bert(**BERT), input_shape=shape, optimizer="adam")
    model = cv.Model(zoo.bert(**BERT), input_shape=(4, 2), optimizer="adam", batch_size=1)
    assert model.predict(np.full((1, 4, 2), 2)).shape == (1, 4, 13)
    for wrong in ([2, 3], [13, 0], [-1, 0]):
        with pytest.raises(cv.CalcError):
            model.predict(np.full((1, 4, 2), wrong))
    with pytest.raises(cv.ShapeError, match="more than max_length=9 steps"):
        cv.Model(zoo.bert(**BERT), input_shape=(10,), optimizer="adam")
