"""Recurrent layers beside PyTorch; sequences of different lengths; streams; models of sequences."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from tests.conftest import whole_of

torch = pytest.importorskip("torch")

KINDS = {"rnn": (cv.rnn, torch.nn.RNN, 1), "gru": (cv.gru, torch.nn.GRU, 3), "lstm": (cv.lstm, torch.nn.LSTM, 4)}
NETWORKS, SAMPLE = 500, 60


def pytest_generate_tests(metafunc):
    if "number" in metafunc.fixturenames:
        n = NETWORKS if whole_of(metafunc) else SAMPLE
        metafunc.parametrize("number", range(n))


class Network:
    """A random recurrent network: its graph, its data, and PyTorch's with the same weights."""

    def __init__(self, number: int):
        rng = self.rng = np.random.default_rng(number)
        self.kind = ("rnn", "gru", "lstm")[number % 3]
        self.n, self.steps, self.inputs = rng.integers(1, 9), rng.integers(1, 12), rng.integers(1, 9)
        self.size = int(rng.choice([1, 3, 8, 16, 17, 40]))
        self.layers, self.both, self.bias = rng.integers(1, 4), rng.random() < 0.4, rng.random() < 0.8
        self.nonlinearity = "relu" if rng.random() < 0.3 else "tanh"
        self.starts, self.ragged, self.last = rng.random() < 0.5, rng.random() < 0.6, rng.random() < 0.3
        more = {"nonlinearity": self.nonlinearity} if self.kind == "rnn" else {}
        self.theirs = KINDS[self.kind][1](
            int(self.inputs), self.size, int(self.layers), bias=self.bias, bidirectional=self.both, batch_first=True, **more
        ).double()  # fmt: skip
        self.ends = [f"_l{k}{end}" for k in range(self.layers) for end in ("", "_reverse")[: 1 + self.both]]
        width = self.size * (1 + self.both)
        with torch.no_grad():
            for p in self.theirs.parameters():
                p.copy_(torch.from_numpy(rng.uniform(-1, 1, tuple(p.shape)) / self.size**0.5))
        self.weights = {name: p.detach().numpy().T.copy() for name, p in self.theirs.named_parameters()}
        self.data = {
            "x": rng.standard_normal((self.n, self.steps, self.inputs)),
            "t": rng.standard_normal((self.n, width) if self.last else (self.n, self.steps, width)),
        }
        if self.ragged:
            self.data["lengths"] = rng.choice([0, 1, self.steps, *rng.integers(0, self.steps + 1, 5)], self.n)
            self.data["lengths"][0] = self.steps  # else nothing may depend on the parameters, which PyTorch refuses
        for name in ("h0", "c0")[: 1 + (self.kind == "lstm")] if self.starts else ():
            for end in self.ends:
                self.data[name + end] = rng.standard_normal((self.n, self.size))

    def graph(self) -> cv.CalcGraph:
        function, _, gates = KINDS[self.kind]
        g = cv.CalcGraph()
        v = {
            name: g.placeholder(name, (None, *value.shape[1:]), "int64" if name == "lengths" else None)
            for name, value in self.data.items()
        }
        for name, p in self.theirs.named_parameters():
            v[name] = g.parameter(name, tuple(p.shape)[::-1])
        more = {"nonlinearity": self.nonlinearity} if self.kind == "rnn" else {}
        with g.path("learn", backward=True) as learn:
            for name in self.states:  # with a parameter, which gets the sum of their gradients
                v[name] = v[name] + g.parameter(f"of {name}".replace(" ", "_"), (self.size,), "zeros")
            y = v["x"]
            for k in range(self.layers):
                found = []
                for end in ("", "_reverse")[: 1 + self.both]:
                    weights = [v.get(f"{w}_l{k}{end}") for w in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
                    states = [v.get(f"{s}_l{k}{end}") for s in ("h0", "c0")[: 1 + (self.kind == "lstm")]]
                    found.append(function(y, *weights, *states, lengths=v.get("lengths"), reverse=bool(end), **more))
                if len(found) == 1:
                    y, h = found[0][:2]
                else:
                    y, h = (cv.concat([a[i] for a in found], axis=-1) for i in (0, 1))
            out = (h if self.last else y).rename("out")
            loss = cv.sum(cv.square(out - v["t"]) * (0.5 / self.n)).rename("loss")
            for i, result in enumerate(found[0]):
                result.rename(("y", "h_n", "c_n")[i]) if result is not out and result is not y else None
            learn.minimize(loss, optimizer=cv.SGD(0.05), output=out)
        return g

    def model(self, workers: int = 1, **how) -> cv.Model:
        program = cv.compile(
            self.graph(), batch_size=int(self.n), dtype="float64", workers=workers, accumulate=True, **how
        )
        model = cv.CalcHeap(program.heap_bytes).create(program, seed=0)
        model.set_parameters(self.weights | {f"of_{name}": np.zeros(self.size) for name in self.states})
        for name, value in self.data.items():
            if name in model.loaded.feeds("learn"):
                model[name] = value
        return model

    @property
    def states(self) -> list[str]:
        return [name for name in self.data if name[:2] in ("h0", "c0")]

    def expected(self, states: dict) -> tuple:
        """PyTorch's outputs, sample by sample, since it refuses lengths of 0; ``states``: tensors of h0 and c0."""
        lengths = self.data.get("lengths", np.full(self.n, self.steps))
        outs = []
        for i, length in enumerate(lengths):
            width = self.size * (1 + self.both)
            h = torch.stack([states[f"h0{end}"][i] for end in self.ends])[:, None] if self.starts else None
            if not length:
                last = h[-1 - self.both :].reshape(-1) if self.starts else torch.zeros(width, dtype=torch.float64)
                outs.append((torch.zeros(self.steps, width, dtype=torch.float64), last))
                continue
            c = (
                torch.stack([states[f"c0{end}"][i] for end in self.ends])[:, None]
                if self.starts and self.kind == "lstm"
                else None
            )
            x = torch.from_numpy(self.data["x"][i : i + 1, :length])
            y, last = self.theirs(x, (h, c) if c is not None else h)
            last = (last[0] if self.kind == "lstm" else last)[-1 - self.both :]
            pad = torch.zeros(self.steps - int(length), width, dtype=torch.float64)
            outs.append((torch.cat([y[0], pad]), last.reshape(-1)))
        return tuple(torch.stack([a[k] for a in outs]) for k in (0, 1))


def test_beside_pytorch(number):
    """Outputs and gradients to 1e-9, and five steps of SGD; a team of any size gives the same bits."""
    of = Network(number)
    model = of.model()
    added = {name: torch.zeros(of.size, dtype=torch.float64, requires_grad=True) for name in of.states}
    trained = {**dict(of.theirs.named_parameters()), **{f"of_{name}": p for name, p in added.items()}}
    optimizer = torch.optim.SGD(trained.values(), 0.05)
    for step in range(5):
        optimizer.zero_grad()
        y, last = of.expected({name: torch.from_numpy(of.data[name]) + p for name, p in added.items()})
        out = last if of.last else y
        loss = ((out - torch.from_numpy(of.data["t"])) ** 2).sum() * 0.5 / int(of.n)
        loss.backward()
        assert model.run_steps(1) == pytest.approx(loss.item(), rel=1e-9)
        np.testing.assert_allclose(model["out"], out.detach().numpy(), rtol=1e-9, atol=1e-10)
        if step == 0:
            slopes = of.model()
            slopes.forward("learn")
            slopes.backward("learn")
        for name in model.parameters if step == 0 else ():
            grad = trained[name].grad
            want = np.zeros(tuple(trained[name].shape)) if grad is None else grad.numpy()
            np.testing.assert_allclose(slopes.grad(name), want.T, rtol=1e-9, atol=1e-10)
        optimizer.step()
    team = of.model(workers=2 + number % 2)
    team.run_steps(5)
    for name, p in model.parameters.items():
        assert p.tobytes() == team.parameters[name].tobytes(), name


# ---------------------------------------------------------------- models of sequences
LENGTHS = [3, 7, 0, 1, 5]


def sequences(features: int = 5, out: int = 3, seed: int = 0) -> tuple[list, list]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((n, features)) for n in LENGTHS], [rng.standard_normal((n, out)) for n in LENGTHS]


def ragged(net: nn.Layer, **how) -> cv.Model:
    options = {"loss": "mse", "optimizer": cv.SGD(0.1), "batch_size": 8, "dtype": "float64", "seed": 0, "lengths": True}
    return cv.Model(net, input_shape=(7, 5), **{**options, **how})


def test_sequences_of_different_lengths_count_what_is_there():
    """Loss, metrics and gradients of padded sequences are those of each one alone, whatever the padding holds."""
    X, Y = sequences()
    model = ragged(nn.LSTM(8) >> nn.Linear(3), metrics=["mse", "rmse", "mae"])
    net, head = torch.nn.LSTM(5, 8, batch_first=True).double(), torch.nn.Linear(8, 3).double()
    with torch.no_grad():
        for name, p in [*net.named_parameters()] + [*head.named_parameters()]:
            of = model.parameters.get(f"lstm_1.{name}", model.parameters.get(f"linear_1.{name}"))
            p.copy_(torch.from_numpy(np.ascontiguousarray(of.T)))

    def terms(x, y):
        return head(net(torch.from_numpy(x)[None])[0])[0] - torch.from_numpy(y)

    def errors():
        return torch.cat([terms(x, y) for x, y in zip(X, Y) if len(x)])

    with torch.no_grad():
        e = errors()
    found = model.evaluate(X, Y)
    assert found["loss"] == found["mse"] == pytest.approx((e**2).mean().item(), rel=1e-12)
    assert found["rmse"] == pytest.approx((e**2).mean().sqrt().item(), rel=1e-12)
    assert found["mae"] == pytest.approx(e.abs().mean().item(), rel=1e-12)
    padded, lengths = cv.pad_sequences(X, 7)
    targets, _ = cv.pad_sequences(Y, 7)
    for i, n in enumerate(lengths):
        padded[i, n:], targets[i, n:] = 1e30, -1e30
    assert model.evaluate((padded, lengths), targets) == pytest.approx(found, rel=1e-12)
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss = (errors() ** 2).mean()
        loss.backward()
        optimizer.step()
        assert model.step((padded, lengths), targets) == pytest.approx(loss.item(), rel=1e-9)


def test_labels_of_each_step():
    X, _ = sequences()
    rng = np.random.default_rng(1)
    labels = [rng.integers(0, 3, n) for n in LENGTHS]
    model = ragged(nn.GRU(16) >> nn.Linear(3), loss="softmax_cross_entropy", optimizer=cv.Adam(0.05))
    right = np.concatenate([scores.argmax(-1) == of for scores, of in zip(model.predict(X), labels)])
    assert model.evaluate(X, labels)["accuracy"] == pytest.approx(right.mean(), rel=1e-12)
    model.fit(X, labels, epochs=100, progress=False)
    assert model.evaluate(X, labels)["accuracy"] == pytest.approx(1.0)


def test_layers_that_do_not_read_the_lengths():
    """The loss reads them, and so they are data of the model like those of others."""
    X, Y = sequences()
    model = ragged(nn.CausalConv1d(3, 2))
    assert model.roles.inputs == ("input", "lengths") and model.roles.targets == ("target",)
    errors = np.concatenate([model.predict([x])[0][: len(x)] - y for x, y in zip(X, Y)])
    assert model.evaluate(X, Y)["loss"] == pytest.approx((errors**2).mean(), rel=1e-12)
    history = model.fit(X, Y, epochs=30, progress=False)
    assert history["loss"][-1] < history["loss"][0]


def test_dropout_of_one_layer_is_told_once():
    with pytest.warns(
        cv.CalcWarning, match=r"LSTM: dropout is between layers, and there is one: .* nn.Dropout\(0.5\) behind it"
    ) as told:
        ragged(nn.LSTM(8, dropout=0.5) >> nn.Linear(3))
    assert len(told) == 1


def test_one_label_of_a_sequence():
    X, _ = sequences()
    net = nn.LSTM(8, num_layers=2, bidirectional=True, dropout=0.1, return_sequences=False) >> nn.Linear(2)
    model = ragged(net, loss="softmax_cross_entropy", optimizer=cv.Adam(0.02))
    model.fit(X, [0, 1, 0, 1, 1], epochs=100, progress=False)
    assert model.evaluate(X, [0, 1, 0, 1, 1])["accuracy"] == 1.0


@pytest.mark.parametrize("net", [nn.RNN(8), nn.GRU(8, num_layers=2), nn.LSTM(8, num_layers=2)])
def test_step_by_step(net):
    """A stream gives what the sequence gives at once, and its state outlives training of another path, a reset and a file."""
    X, Y = sequences()
    model = ragged(net >> nn.Linear(3), stream=True)
    model.fit(X, Y, epochs=2, progress=False)
    want, stream = model.predict(X), model.stream("stream")
    for x, y in zip(X[1][:4], want[1]):
        np.testing.assert_allclose(stream(x), y, rtol=1e-12, atol=1e-14)
    held = {name: v.copy() for name, v in stream.state.items()}
    assert all(v.any() for v in held.values())
    model.predict(X)
    for name, v in stream.state.items():
        assert v.tobytes() == held[name].tobytes()
    for x, y in zip(X[1][4:], want[1][4:]):
        np.testing.assert_allclose(stream(x), y, rtol=1e-12, atol=1e-14)
    stream.reset()
    np.testing.assert_allclose(stream(X[4][0]), want[4][0], rtol=1e-12)


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products_of_the_inputs_inside_the_row(cell, dtype):
    """They have the same bits as in a separate row, for any team and lengths.  Large weights stay in a separate row."""
    layer, gates = getattr(cv, cell), {"rnn": 1, "gru": 3, "lstm": 4}[cell]
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((7, 20, 5)), "lengths": np.array([20, 1, 0, 17, 16, 20, 3])}

    def outputs(apart, workers, inputs=5, reverse=False):
        g = cv.CalcGraph()
        x, lengths = g.placeholder("x", (None, 20, inputs)), g.placeholder("lengths", (None,), dtype="int64")
        w, v = g.parameter("w", (inputs, gates * 32)), g.parameter("v", (32, gates * 32))
        b, c = g.parameter("b", (gates * 32,), cv.init.Normal()), g.parameter("c", (gates * 32,), cv.init.Normal())
        with g.path("forward") as path:
            y, *states = layer(x, w, v, b, c, lengths=lengths, reverse=reverse)
            path.output = (y, y.producer.inputs["z"]) if apart else y
        program = cv.compile(g, batch_size=7, dtype=dtype, workers=workers)
        assert ("linear_fwd" in program.disassemble()) == (apart or inputs > 5)
        model = cv.CalcHeap(program.heap_bytes).create(program, seed=0)
        if inputs > 5:
            return []
        for name, array in data.items():
            model[name] = array
        model.forward("forward")
        return [model[name.name].copy() for name in (y, *states)]

    for reverse in (False, True):
        want = outputs(True, 1, reverse=reverse)
        assert want[0].any()
        for workers in (1, 2, 3, 7):
            for found, wanted in zip(outputs(False, workers, reverse=reverse), want):
                np.testing.assert_array_equal(found, wanted)
    outputs(False, 1, inputs=2049)


def test_any_number_of_steps():
    """A program of one sample may run any number of steps up to its largest: the batch is the steps."""
    g = cv.CalcGraph()
    x, w, v = g.placeholder("x", (None, 5)), g.parameter("w", (5, 32)), g.parameter("v", (8, 32))
    with g.path("forward") as path:
        y, h, c = cv.lstm(cv.reshape(x, (1, None, 5)), w, v)
        path.output = y
    program = cv.compile(g, batch_size=50, dtype="float64", workers=1)
    model = cv.CalcHeap(program.heap_bytes).create(program, seed=0)
    data = np.random.default_rng(0).standard_normal((50, 5))
    model["x"] = data
    model.forward("forward")
    whole = model["y"].copy()
    for steps in (1, 7, 50, 3):
        model["x"] = data[:steps]
        model.forward("forward")
        np.testing.assert_allclose(
            model["y"], whole[:, :steps], rtol=1e-12, atol=1e-15
        )  # the first row rounds otherwise alone
        np.testing.assert_array_equal(model["h"], model["y"][:, -1])


def test_memory_is_linear_in_the_steps():
    def heap(steps):
        net = nn.LSTM(16) >> nn.Linear(3)
        return cv.Model(net, input_shape=(steps, 5), loss="mse", optimizer="adam", batch_size=8).program.heap_bytes

    assert heap(1024) < 1.01 * (2 * heap(512) - heap(1))


WRONG = [
    (lambda: nn.LSTM(0), "hidden_size"),
    (lambda: nn.LSTM(16, 64), "positional"),
    (lambda: nn.RNN(4, nonlinearity="sin"), "tanh, relu"),
    (lambda: nn.GRU(4, dropout=1.0), "dropout"),
    (lambda: nn.LSTM(4, layers=2), "layers"),
    (lambda: cv.Model(nn.LSTM(4), input_shape=(5,), loss="mse", optimizer="adam"), "steps, features"),
    (lambda: cv.Model(nn.Linear(4), input_shape=(5, 2), loss="mse", optimizer="adam", stream=True), "keeps a state"),
    (lambda: cv.Model(nn.LSTM(4, bidirectional=True), input_shape=(5, 2), loss="mse", optimizer="adam", stream=True), "from its end"),
    (lambda: ragged(nn.LSTM(3)).fit([np.zeros((8, 5))], [np.zeros((8, 3))], epochs=1), "8 steps"),
    (lambda: ragged(nn.LSTM(3)).fit([np.zeros((2, 4)), np.zeros((3, 5))], [np.zeros((2, 3))] * 2, epochs=1), "shape"),
    (lambda: ragged(nn.LSTM(3)).predict((np.zeros((1, 7, 5)), [8])), "8"),
    (lambda: ragged(nn.LSTM(3)).predict((np.zeros((1, 7, 5)), [-1])), "-1"),
    (lambda: ragged(nn.LSTM(3)).predict((np.zeros((2, 7, 5)), [3])), "samples"),
    (lambda: cv.pad_sequences([[1.0, 2.0]], steps=1), "2 steps"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "told"), WRONG, ids=[told for _, told in WRONG])
def test_wrong_input(call, told):
    with pytest.raises(cv.CalcError, match=told):
        call()
