"""State dicts beside PyTorch: both directions, by name, all or none."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn as T

import calcvm as cv
from calcvm import nn


def first(kind):
    """A module that returns the first of its results, under its own names."""
    return type(kind.__name__, (kind,), {"forward": lambda self, x: kind.forward(self, x)[0]})


class Attention(T.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


class Memory(T.TransformerDecoderLayer):
    def forward(self, x):
        memory, x = x.chunk(2, 1)
        return super().forward(x, memory, T.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype))


class Decoder(nn.Layer):
    def __init__(self, **options):
        self.layer = nn.TransformerDecoderLayer(2, dim_feedforward=12, **options)

    def build(self, x, scope, training):
        memory, x = cv.split(x, 2, axis=1)
        return self.layer.build(x, scope, training, memory)


RECURRENT = {"num_layers": 2, "bidirectional": True}
ENCODER = {"dim_feedforward": 12, "dropout": 0.0}
# name: (our layer, PyTorch's for an input of so many features or channels), for sequences (N, 6, C)
SEQUENCES = {
    "linear": (lambda c: nn.Linear(c), lambda c: T.Linear(c, c)),  # a square weight
    "linear without bias": (lambda c: nn.Linear(8, bias=False), lambda c: T.Linear(c, 8, bias=False)),
    "rnn": (lambda c: nn.RNN(4, nonlinearity="relu"), lambda c: first(T.RNN)(c, 4, nonlinearity="relu", batch_first=True)),
    "gru": (lambda c: nn.GRU(c, bias=False), lambda c: first(T.GRU)(c, c, bias=False, batch_first=True)),
    "lstm": (lambda c: nn.LSTM(4), lambda c: first(T.LSTM)(c, 4, batch_first=True)),
    "both": (lambda c: nn.LSTM(2, **RECURRENT), lambda c: first(T.LSTM)(c, 2, batch_first=True, **RECURRENT)),
    "grus": (lambda c: nn.GRU(4, **RECURRENT), lambda c: first(T.GRU)(c, 4, batch_first=True, **RECURRENT)),
    "attention": (lambda c: nn.MultiHeadAttention(2), lambda c: Attention(c, 2, batch_first=True)),
    "attention without bias": (lambda c: nn.MultiHeadAttention(2, bias=False), lambda c: Attention(c, 2, bias=False, batch_first=True)),
    "encoder": (
        lambda c: nn.TransformerEncoderLayer(2, activation="gelu", norm_first=True, **ENCODER),
        lambda c: T.TransformerEncoderLayer(c, 2, activation="gelu", norm_first=True, batch_first=True, **ENCODER),
    ),
    "encoder without bias": (
        lambda c: nn.TransformerEncoderLayer(2, bias=False, **ENCODER),
        lambda c: T.TransformerEncoderLayer(c, 2, bias=False, batch_first=True, **ENCODER),
    ),
    "layer norm": (lambda c: nn.LayerNorm(), lambda c: T.LayerNorm(c)),
    "rms norm": (lambda c: nn.RMSNorm(), lambda c: T.RMSNorm(c, eps=1e-5)),
    "slope": (lambda c: nn.PReLU(), lambda c: T.PReLU()),
    "tanh": (lambda c: nn.Tanh(), lambda c: T.Tanh()),
}  # fmt: skip
WINDOW = {"stride": 1, "padding": 1}
IMAGES = {  # (N, C, *sizes); {} is the number of axes
    "conv": (lambda c, d: getattr(nn, f"Conv{d}d")(4, 3, groups=2, **WINDOW), lambda c, d: getattr(T, f"Conv{d}d")(c, 4, 3, groups=2, **WINDOW)),
    "square": (lambda c, d: getattr(nn, f"Conv{d}d")(c, 1), lambda c, d: getattr(T, f"Conv{d}d")(c, c, 1)),
    "transposed": (
        lambda c, d: getattr(nn, f"ConvTranspose{d}d")(6, 3, groups=2, **WINDOW),
        lambda c, d: getattr(T, f"ConvTranspose{d}d")(c, 6, 3, groups=2, **WINDOW),
    ),
    "batch": (lambda c, d: nn.BatchNorm(), lambda c, d: getattr(T, f"BatchNorm{d}d")(c)),
    "batch alone": (lambda c, d: nn.BatchNorm(affine=False), lambda c, d: getattr(T, f"BatchNorm{d}d")(c, affine=False)),
    "instance": (lambda c, d: nn.InstanceNorm(), lambda c, d: getattr(T, f"InstanceNorm{d}d")(c, affine=True)),
    "group": (lambda c, d: nn.GroupNorm(2), lambda c, d: T.GroupNorm(2, c)),
    "slopes": (lambda c, d: nn.PReLU(per_channel=True), lambda c, d: T.PReLU(c)),
    "slope": (lambda c, d: nn.PReLU(), lambda c, d: T.PReLU()),
    "relu": (lambda c, d: nn.ReLU(), lambda c, d: T.ReLU()),
}  # fmt: skip


def moved(module, rng):
    """A module of random numbers, none of which is at its start."""
    module = module.double()
    for name, v in module.state_dict().items():
        if v.is_floating_point():
            low = 0.5 if name.endswith("running_var") else -0.5
            v.copy_(torch.from_numpy(rng.uniform(low, low + 1.0, v.shape)))
    return module


def model_of(net, shape, dtype="float64", **options):
    given = {"loss": "mse", "optimizer": cv.SGD(0.1), "batch_size": 4, "workers": 1, "target_shape": None}
    return cv.Model(net, input_shape=shape, dtype=dtype, **{**given, **options})


def outputs(module, x):
    return module.eval()(torch.from_numpy(x)).detach().numpy()


def check(net, module, shape, rng):
    """In, out, a step of training on both sides, and back."""
    model, x = model_of(net, shape), rng.standard_normal((4, *shape))
    moved(module, rng)
    assert model.load_state_dict(module.state_dict()) == ([], [])
    np.testing.assert_allclose(model.predict(x), outputs(module, x), rtol=1e-10, atol=1e-10)
    found, right = model.state_dict(), module.state_dict()
    assert [*sorted(found)] == [*sorted(n for n in right if not n.endswith("num_batches_tracked"))]
    for name, value in found.items():
        np.testing.assert_array_equal(value, right[name].numpy(), name)
        assert value.flags.c_contiguous and value.flags.writeable
    target = rng.standard_normal(model.predict(x).shape)
    trained = [p for p in module.parameters() if p.requires_grad]
    loss = torch.mean((module.train()(torch.from_numpy(x)) - torch.from_numpy(target)) ** 2)
    if trained:
        loss.backward()
        torch.optim.SGD(trained, 0.1).step()
        assert model.step(x, target) == pytest.approx(loss.item(), rel=1e-12)
        for name, value in model.state_dict().items():
            np.testing.assert_allclose(value, module.state_dict()[name].numpy(), rtol=1e-9, atol=1e-12, err_msg=name)
    twin = moved(copy.deepcopy(module), rng)
    twin.load_state_dict({name: torch.from_numpy(value) for name, value in model.state_dict().items()})
    np.testing.assert_allclose(outputs(twin, x), model.predict(x), rtol=1e-10, atol=1e-10)
    before = model.get_weights()
    model.load_state_dict(twin.state_dict())
    for name, value in model.get_weights().items():
        np.testing.assert_array_equal(value, before[name], name)


@pytest.mark.parametrize("name", SEQUENCES)
def test_each_layer_of_sequences(name):
    """Alone: then its parameters have PyTorch's names without a number."""
    ours, theirs = SEQUENCES[name]
    if name != "tanh":
        check(ours(4), theirs(4), (6, 4), np.random.default_rng(0))


def image_layer(name, channels, axes):
    return (make(channels, axes) for make in IMAGES[name])


@pytest.mark.parametrize("axes", (1, 2, 3))
@pytest.mark.parametrize("name", IMAGES)
def test_each_layer_of_images(name, axes):
    (one, first_), (two, second) = image_layer("square", 4, axes), image_layer(name, 4, axes)
    check(one >> two, T.Sequential(first_, second), (4, *(5, 4, 3)[:axes]), np.random.default_rng(1))


def generated(rng):
    axes = int(rng.integers(0, 4))
    shape = (4, *(5, 4, 3)[:axes]) if axes else (6, 4)
    x, ours, theirs, first_ = torch.zeros(2, *shape).double(), [], [], "square" if axes else "linear"
    for name in (first_, *rng.choice([*(IMAGES if axes else SEQUENCES)], int(rng.integers(2, 6)))):
        size = x.shape[1 if axes else 2]
        layer, module = image_layer(name, size, axes) if axes else (make(size) for make in SEQUENCES[name])
        x = module.double()(x).detach()
        ours.append(layer)
        theirs.append(module)
    check(ours, T.Sequential(*theirs), shape, rng)


@pytest.mark.parametrize("seed", range(6))
def test_generated_networks(seed, whole):
    """Of all these layers, one after the other, in one list on both sides."""
    for k in range(50 if whole else 1):
        generated(np.random.default_rng([2, seed, k]))


class Net(nn.Layer):
    """Attributes, a network among them, and a layer that reads the operators itself."""

    def __init__(self):
        self.words = nn.Embedding(9, 4)
        self.places = nn.PositionalEmbedding(5)
        self.encoder = nn.Linear(4) >> nn.ReLU() >> nn.LSTM(4, return_sequences=False)
        self.norm = nn.LayerNorm()

    def build(self, x, scope, training):
        x = self.places.build(self.words.build(x, f"{scope}.words", training), f"{scope}.places", training)
        x = self.norm.build(self.encoder.build(x, f"{scope}.encoder", training), f"{scope}.norm", training)
        a, b = self.parameter(x, "turned", (4, 4)), self.parameter(x, "plain", (4, 4))
        return cv.linear(x, a) + cv.matmul(x, b)


class TorchNet(T.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = T.Embedding(9, 4), T.Embedding(5, 4)
        self.encoder = T.Sequential(T.Linear(4, 4), T.ReLU(), first(T.LSTM)(4, 4, batch_first=True))
        self.norm = T.LayerNorm(4)
        self.turned, self.plain = T.Parameter(torch.zeros(4, 4)), T.Parameter(torch.zeros(4, 4))

    def forward(self, x):
        x = self.norm(self.encoder(self.words(x) + self.places.weight)[:, -1])
        return T.functional.linear(x, self.turned) + x @ self.plain


def words(rng, n=4, steps=5, of=9):
    return rng.integers(0, of, (n, steps))


def test_custom_layers_have_the_names_of_their_scopes():
    rng = np.random.default_rng(3)
    model, module, x = model_of(Net(), (5,)), moved(TorchNet(), rng), words(rng)
    model.load_state_dict(module.state_dict())
    np.testing.assert_allclose(model.predict(x), outputs(module, x), rtol=1e-10)
    module.load_state_dict({n: torch.from_numpy(v) for n, v in model.state_dict().items()})
    assert {*model.state_dict()} == {*module.state_dict()}
    behind = model_of(Net() >> nn.Linear(2), (5,))
    assert {*behind.state_dict(names={"linear_1": "head"})} == {f"0.{n}" for n in module.state_dict()} | {
        "head.weight",
        "head.bias",
    }
    whole = T.ModuleDict({"net": module, "head": T.Linear(4, 2)}).double()
    behind.load_state_dict(whole.state_dict(), names={"net_1": "net", "linear_1": "head"})
    right = whole["head"].eval()(module.eval()(torch.from_numpy(x))).detach().numpy()
    np.testing.assert_allclose(behind.predict(x), right, rtol=1e-10)
    model.load_state_dict({n: 0 * v for n, v in whole.state_dict().items()}, prefix="net.")
    assert not any(v.any() for v in model.get_weights().values())
    named = model.state_dict(prefix="net.", names={"net_1.encoder.linear_1": "in", "net_1.words.weight": "table"})
    assert {"net.in.weight", "net.in.bias", "net.table", "net.encoder.2.weight_ih_l0"} <= {*named}


def test_decoder_layers():
    ours, theirs = Decoder(dropout=0.0), Memory(4, 2, 12, dropout=0.0, batch_first=True)
    check(ours, theirs, (6, 4), np.random.default_rng(4))


class Tied(T.Sequential):
    def __init__(self):
        super().__init__(T.Embedding(9, 4), T.Linear(4, 4), T.Linear(4, 9, bias=False))
        self[2].weight = self[0].weight


@pytest.mark.parametrize(
    "make", [lambda e: nn.TiedLinear(e), lambda e: nn.TiedLinear(e, bias=True)], ids=["plain", "bias"]
)
def test_tied_weights_have_both_names(make):
    rng, embedding = np.random.default_rng(5), nn.Embedding(9, 4)
    model, module, x = model_of(embedding >> nn.Linear(4) >> make(embedding), (5,)), moved(Tied(), rng), words(rng)
    state = module.state_dict()
    if "tiedlinear_1.bias" in model.parameters:
        state = {**state, "2.bias": torch.zeros(9)}
    model.load_state_dict(state)
    np.testing.assert_allclose(model.predict(x), outputs(module, x), rtol=1e-10)
    found = model.state_dict()
    assert {*found} == {*state}
    np.testing.assert_array_equal(found["0.weight"], found["2.weight"])
    assert {*model.state_dict(names={"tiedlinear_1": "lm_head"})} == {n.replace("2.", "lm_head.") for n in state}
    model.load_state_dict({n: v for n, v in state.items() if n != "2.weight"})  # as in files that keep it once
    with pytest.raises(cv.ShapeError, match=r"2.weight differs from the weight that it is tied to, embedding_1.weight"):
        model.load_state_dict({**state, "2.weight": state["2.weight"] + 1})


def test_the_operator_decides_in_graphs_texts_and_files():
    g = cv.CalcGraph()
    x, w, v = g.placeholder("x", (None, 3)), g.parameter("w", (3, 3)), g.parameter("v", (3, 3))
    slope, scale = g.parameter("scale", (3,), "ones"), g.parameter("gamma", (3,), "ones")
    with g.path("learn", backward=True) as learn:
        y = cv.layer_norm(cv.layer_norm(cv.linear(x, w) @ v, slope, None), scale, None)
        learn.minimize(cv.mean(cv.square(y)), cv.SGD(0.1), output=y)
    with g.path("predict") as predict:
        predict.output = cv.linear(x, w)
    program = cv.compile(g, batch_size=4)
    assert cv.compile(cv.read_graph(g.text()), batch_size=4).hash == program.hash
    model, file = cv.Model(g, batch_size=4), io.BytesIO()
    state, weights = model.state_dict(), model.get_weights()
    assert [*state] == ["w", "v", "weight", "gamma"]
    np.testing.assert_array_equal(state["w"], weights["w"].T)
    np.testing.assert_array_equal(state["v"], weights["v"])
    model.save(file)
    file.seek(0)
    for other in (cv.load(file), model.copy()):
        for name, value in other.state_dict().items():
            np.testing.assert_array_equal(value, state[name])


def two(dtype="float32"):
    return model_of(nn.Linear(3) >> nn.Tanh() >> nn.Linear(3), (3,), dtype)


def torch_two():
    return T.Sequential(T.Linear(3, 3), T.Tanh(), T.Linear(3, 3))


@pytest.mark.parametrize("type_", (torch.bfloat16, torch.float16, torch.float32, torch.float64))
def test_tensors_of_any_type_and_arrays_and_files(type_, tmp_path):
    model, module = two(), torch_two().to(type_)
    for state in (
        module.state_dict(),
        dict(module.named_parameters()),
        {n: v.tolist() for n, v in module.state_dict().items()},
    ):
        model.load_state_dict(state)
        for name, value in model.state_dict().items():
            np.testing.assert_array_equal(value, module.state_dict()[name].float().numpy())
    other = two()
    np.savez(tmp_path / "w.npz", **model.state_dict())
    with np.load(tmp_path / "w.npz") as file:
        other.load_state_dict(file)
    for name, value in other.get_weights().items():
        np.testing.assert_array_equal(value, model.get_weights()[name])


def changed(**values):
    return {**torch_two().state_dict(), **values}


def without(*names):
    return {n: v for n, v in torch_two().state_dict().items() if n not in names}


C, S = cv.CalcError, cv.ShapeError
WRONG = [
    (without("0.bias"), {}, C, ["missing: 0.bias (3,); names="]),
    (changed(**{"0.gain": torch.zeros(2, 3)}), {}, C, ["unchanged: unknown: 0.gain (2, 3); names="]),
    (changed(**{"2.weight": torch.zeros(2, 3)}), {}, S, ["2.weight has shape (2, 3), and (3, 3) is wanted"]),
    (changed(**{"2.bias": torch.zeros(3, 1)}), {"strict": False}, S, ["2.bias has shape (3, 1), and (3,) is wanted"]),
    (
        {**without("0.bias"), "2.bias": np.zeros(4), "x": 1.0}, {}, C,
        ["2.bias has shape (4,), and (3,) is wanted; missing: 0.bias (3,); unknown: x ()"],
    ),
    ({}, {}, C, ["missing: 0.weight (3, 3), 0.bias (3,), 2.weight (3, 3), 2.bias (3,)"]),
    ({"model": without(), "epoch": 3}, {}, C, ["unknown: model (), epoch (); model is a mapping: give the one of arrays"]),
    ({"linear_1.weight": np.zeros((3, 3))}, {}, C, ["linear_1.weight is a name of get_weights: use set_weights"]),
    (without(), {"prefix": "net."}, C, ["missing: net.0.weight (3, 3)"]),
    (without(), {"names": {"linear_1": "fc"}}, C, ["missing: fc.weight (3, 3), fc.bias (3,); unknown: 0.weight (3, 3), 0.bias (3,)"]),
    (without(), {"names": {"0": "fc"}}, C, ["names: the model has no '0', but linear_1, linear_2"]),
    (without(), {"names": {"linear_1": "2"}}, C, ["'linear_1.weight' and 'linear_2.weight' are both called '2.weight'"]),
    (without(), {"names": {"linear_1": 0}}, C, ["names['linear_1']: a text such as 'encoder' is wanted, not 0"]),
    (without(), {"names": 3}, C, ["names: a mapping of names to names is wanted"]),
    (without(), {"prefix": 3}, C, ["prefix: a text such as 'encoder.' is wanted"]),
    (without(), {"strict": "no"}, C, ["strict"]),
    (torch_two(), {}, C, ["state_dict: a mapping of names to arrays, such as module.state_dict(), is wanted"]),
    ({0: np.zeros(3)}, {}, C, ["a name: a text is wanted"]),
    (changed(**{"2.bias": "abc"}), {}, C, ["2.bias"]),
    (changed(**{"2.bias": [1, 2, "x"]}), {}, C, ["2.bias"]),
    (changed(**{"2.bias": np.full(3, 1e300)}), {}, C, ["numbers beyond 3.4e+38"]),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(WRONG)))
def test_what_does_not_fit_is_said_and_nothing_is_written(i):
    state, options, kind, messages = WRONG[i]
    model = two()
    before = model.get_weights()
    with pytest.raises(kind) as error:
        model.load_state_dict(state, **options)
    for message in messages:
        assert message in str(error.value)
    for name, value in model.get_weights().items():
        np.testing.assert_array_equal(value, before[name])


def test_without_strict_the_rest_is_loaded():
    model = two()
    before, state = model.state_dict(), torch_two().state_dict()
    assert model.load_state_dict({"0.weight": state["0.weight"], "x": 1}, strict=False) == (
        ["0.bias", "2.weight", "2.bias"],
        ["x"],
    )
    after = model.state_dict()
    np.testing.assert_array_equal(after["0.weight"], state["0.weight"].numpy())
    np.testing.assert_array_equal(after["2.weight"], before["2.weight"])


def test_a_network_of_one_layer_is_a_module_or_a_sequential_of_it():
    rng = np.random.default_rng(6)
    model, module = model_of([nn.Linear(2)], (3,)), moved(T.Sequential(T.Linear(3, 2)), rng)
    model.load_state_dict(module.state_dict())
    np.testing.assert_array_equal(model.state_dict(prefix="0.")["0.weight"], module[0].weight.detach().numpy())
    model.load_state_dict(moved(module[0], rng).state_dict())
    np.testing.assert_array_equal(model.state_dict()["weight"], module[0].weight.detach().numpy())
    with pytest.raises(cv.CalcError, match=r"missing: 0.bias \(2,\)"):
        model.load_state_dict({"0.weight": np.zeros((2, 3))})


def test_models_of_fleets():
    net, module = nn.Linear(3) >> nn.Tanh() >> nn.Linear(3), torch_two()
    options = {"input_shape": (3,), "loss": "mse", "optimizer": cv.SGD(0.1), "batch_size": 4}
    handle = cv.Fleet("1 MiB").add(net, data=(np.ones((8, 3)), np.ones((8, 3))), **options)
    handle.model.load_state_dict(module.state_dict())
    for name, value in handle.model.state_dict().items():
        np.testing.assert_array_equal(value, module.state_dict()[name].numpy())


def test_a_program_without_names_says_so(monkeypatch):
    model = two()
    monkeypatch.delitem(model.program.info, "state_names")
    with pytest.raises(cv.CalcError, match="older calcvm"):
        model.state_dict()
