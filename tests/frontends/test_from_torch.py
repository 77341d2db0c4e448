"""PyTorch modules as layers: results, training, names, and what is refused."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn as T
from torch.nn import functional as F

import calcvm as cv
from calcvm import nn
from tests.conftest import by_turns
from tests.frontends.networks import networks

NETWORKS = networks()
BATCH_AXES = {"states": (0, 1, 1)}
TYPES = (  # the operators that they are made of
    "_weight_norm adaptive_avg_pool2d add add_ alias amax avg_pool2d batch_norm cat chunk contiguous conv1d conv2d conv_transpose2d div "
    "dropout embedding eq exp expand flatten gelu gru hardtanh_ index layer_norm linear lstm masked_fill matmul max_pool2d mean mul neg "
    "pad permute prelu relu relu_ reshape rms_norm rnn_relu roll scaled_dot_product_attention select sigmoid silu silu_ slice softmax "
    "split split_with_sizes squeeze tanh transpose unbind unflatten unsqueeze upsample_nearest2d view zeros"
)


# ours, PyTorch's, and how near the losses of five steps are (by Adam a gradient that is rounding alone moves a weight by a whole step)
OPTIMIZERS = {
    "sgd": (lambda: cv.SGD(0.05), lambda p: torch.optim.SGD(p, 0.05), 1e-5),
    "adam": (lambda: cv.Adam(1e-3), lambda p: torch.optim.Adam(p, 1e-3), 1e-4),
}


def pytest_generate_tests(metafunc):
    if "optimizer" in metafunc.fixturenames:
        by_turns(metafunc, 2, name=NETWORKS, optimizer=OPTIMIZERS)


def imported(name):
    module, example = NETWORKS[name]
    module, inputs = copy.deepcopy(module), example if isinstance(example, tuple) else (example,)
    return module, inputs, cv.from_torch(module, *inputs, batch_axes=BATCH_AXES.get(name))


def of_tensors(state_dict):
    return {name: torch.from_numpy(array) for name, array in state_dict.items()}


def graph_of(net, inputs, module, optimizer):
    """A graph of all inputs and outputs that trains, the loss a sum of mean squares, and its targets."""
    g, rng = cv.CalcGraph(), np.random.default_rng(0)
    given = [g.placeholder(f"x{k}", shape, dtype) for k, (shape, dtype) in enumerate(net.inputs)]
    wanted, targets = [], {}
    with torch.no_grad():
        results = module(*inputs)
    for k, (y, shape) in enumerate(zip(results if isinstance(results, tuple) else (results,), net.outputs)):
        wanted.append(rng.standard_normal(y.shape).astype("float32"))
        targets[f"t{k}"] = g.placeholder(f"t{k}", shape)
    with g.path("learn", backward=True) as learn:
        losses = [cv.mse(y, t) for y, t in zip(net.call(*given, training=True), targets.values())]
        learn.minimize(sum(losses[1:], losses[0]), optimizer)
    with g.path("predict") as predict:
        predict.output = (*net.call(*given, training=False),)
    return g, wanted


def test_networks_predict_train_and_go_back(name, optimizer):
    """Forward, losses of five steps, all names; the weights go back, and both predict the same."""
    module, inputs, net = imported(name)
    module.eval()
    ours, theirs, within = OPTIMIZERS[optimizer]
    graph, targets = graph_of(net, inputs, module, ours())
    model = cv.Model(graph, batch_size=4, seed=0)
    arrays = {f"x{k}": x.numpy() for k, x in enumerate(inputs)}

    def differ():
        for k, v in arrays.items():
            model[k] = v
        model.forward("predict")
        found = [model[y.name] for y in graph.paths["predict"].output]
        with torch.no_grad():
            wanted = module.eval()(*inputs)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        return max(abs(y - w.numpy()).max() / max(1, abs(w).max().item()) for y, w in zip(found, wanted, strict=True))

    assert differ() < 1e-5
    state, given = module.state_dict(), model.state_dict()
    assert {*given} == {n for n, v in state.items() if v.is_floating_point()}
    assert all(np.array_equal(given[n], state[n].numpy()) for n in given)
    module.train()
    stepper = theirs(module.parameters())
    for _ in range(5):
        stepper.zero_grad()
        results = module(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        loss = sum(F.mse_loss(y, torch.from_numpy(t)) for y, t in zip(results, targets))
        loss.backward()
        stepper.step()
        found = model.step(*arrays.values(), *targets)
        assert found == pytest.approx(loss.item(), rel=within)
    state = module.state_dict()
    for n, array in model.state_dict().items():
        assert optimizer == "adam" or abs(array - state[n].numpy()).max() < 1e-5
    module.load_state_dict(of_tensors(model.state_dict()), strict=name != "windows")  # which has integers
    assert differ() < 1e-5


def test_the_operators_of_the_networks_are_these():
    """What PyTorch writes into graphs has not changed."""
    found = {node.name for name in NETWORKS for node in imported(name)[2]._imported.nodes if not node.of_sizes}
    assert " ".join(sorted(found - {"getitem", "sym_size"})) == TYPES


# ---------------------------------------------------------------- as any other layer
IMAGES, LABELS = torch.randn(6, 3, 12, 12), np.arange(6) % 5


def residual():
    """A network with batch norm, its example, and it as a layer."""
    module = copy.deepcopy(NETWORKS["resnet"][0])
    return module, NETWORKS["resnet"][1]


def model_of(net, **options):
    return cv.Model(net, input_shape=(3, 24, 24), optimizer=cv.SGD(0.1), batch_size=4, seed=0, **options)


def test_a_network_goes_on_behind_a_module():
    module, x = residual()
    model = model_of(cv.from_torch(module, x) >> nn.ReLU() >> nn.Linear(2))
    assert {"0.conv1.weight", "0.layer1.0.bn1.running_mean", "2.weight"} < {*model.state_dict()}
    names = {*model.state_dict(names={"torchmodule_1": "", "linear_1": "head"})}
    assert names == {n for n in module.state_dict() if not n.endswith("tracked")} | {"head.weight", "head.bias"}
    assert model.predict(x.numpy()).shape == (3, 2)


def test_frozen_parts_stay():
    """Parameters without requires_grad, and batch norm in evaluation; the module's own modes are as they were."""
    module, x = residual()
    module.train()
    module.layer1.eval()
    for p in module.layer1.parameters():
        p.requires_grad = False
    modes = {path: m.training for path, m in module.named_modules()}
    model = model_of(cv.from_torch(module, x))
    assert {path: m.training for path, m in module.named_modules()} == modes
    before = model.state_dict()
    model.step(x.numpy(), np.array([0, 1, 2]))
    after = model.state_dict()
    stayed = {n for n in before if np.array_equal(before[n], after[n])}
    assert stayed == {n for n in before if n.startswith("layer1.")}


def test_dropout_drops_in_training_alone():
    module = T.Sequential(T.Linear(4, 64), T.Dropout(0.5), T.Linear(64, 1))
    net = cv.from_torch(module, torch.zeros(2, 4))
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 4))
    kinds = []
    for training in (True, False):
        with g.path(f"p{training}", backward=training) as path:
            net.call(x, training=training)
        kinds.append([op.spec.name for op in path.operations])
    assert "dropout" in kinds[0] and "dropout" not in kinds[1]


def test_a_module_that_is_written_in_its_training_form_alone():
    class Always(T.Module):
        def forward(self, x):
            return F.dropout(x * 2, 0.5, training=True)

    class Never(T.Module):
        def forward(self, x):
            return F.dropout(x * 2, 0.5, training=False)

    for module, random in ((Always(), True), (Never(), False)):
        net, g = cv.from_torch(module, torch.zeros(2, 4)), cv.CalcGraph()
        x = g.placeholder("x", (None, 4))
        for training in (True, False):
            with g.path(f"p{training}", backward=training) as path:
                net.call(x, training=training)
            assert ("dropout" in [op.spec.name for op in path.operations]) == random


def test_blocks_without_gradient():
    class Fixed(T.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = T.Linear(4, 4), T.Linear(4, 2)

        def forward(self, x):
            with torch.no_grad():
                y = torch.tanh(self.body(x))
                z = y * 2
            return self.head(y) + z.mean(1, keepdim=True)

    module, x = Fixed(), torch.randn(3, 4)
    model = cv.Model(cv.from_torch(module, x), input_shape=(4,), loss="mse", optimizer=cv.SGD(0.1), batch_size=4)
    assert abs(model.predict(x.numpy()) - module(x).detach().numpy()).max() < 1e-6
    before = model.state_dict()
    model.step(x.numpy(), np.ones((3, 2), "f4"))
    assert {n for n, v in model.state_dict().items() if not np.array_equal(v, before[n])} == {
        "head.weight",
        "head.bias",
    }


def test_masks_that_are_written_part_by_part():
    """Constants made of an input's type alone are made once, by PyTorch; so are assignments to their parts."""

    class Masked(T.Module):
        def __init__(self):
            super().__init__()
            self.layer = T.Linear(4, 4)

        def forward(self, x):
            mask = x.new_zeros((4, 4))
            for k, part in enumerate((slice(0, 2), slice(2, 4))):
                mask[part, part] = k + 1
            mask = torch.full_like(mask, -9.0).masked_fill(mask > 0, 0)
            with torch.autocast("cpu", enabled=False):
                return (self.layer(x)[:, None] + mask).softmax(-1).flatten(1)

    module, x = Masked(), torch.randn(3, 4)
    model = cv.Model(cv.from_torch(module, x), input_shape=(4,), loss="mse", optimizer=cv.SGD(0.1), batch_size=4)
    assert abs(model.predict(x.numpy()) - module(x).detach().numpy()).max() < 1e-6


def test_copies_pickles_texts_and_files(tmp_path):
    module, x = residual()
    net = cv.from_torch(module, x)
    wanted = model_of(net).predict(x.numpy())
    assert np.array_equal(model_of(copy.deepcopy(net)).predict(x.numpy()), wanted)
    assert np.array_equal(model_of(pickle.loads(pickle.dumps(net))).predict(x.numpy()), wanted)
    graph = cv.build_graph(net, (3, 24, 24), "softmax_cross_entropy", cv.SGD(0.1))
    again = cv.Model(cv.read_graph(graph.text()), batch_size=4, seed=0)
    assert np.array_equal(again.predict(x.numpy()), wanted)
    again.save(tmp_path / "m.calc")
    loaded = cv.load(tmp_path / "m.calc")
    assert {*loaded.state_dict()} == {n for n in module.state_dict() if not n.endswith("tracked")}
    assert np.array_equal(loaded.predict(x.numpy()), wanted)


def test_the_summary_has_the_modules():
    module, x = residual()
    told = model_of(cv.from_torch(module, x)).summary()
    assert all(f"torchmodule_1.{path}" in told for path in ("conv1", "layer1.0.bn1", "layer2.0.downsample.0", "fc"))


def test_rows_are_those_of_our_layers():
    """A transformer of PyTorch takes no more rows than one of ours: its views are none."""
    ours = nn.TransformerEncoderLayer(4, dim_feedforward=24, dropout=0.0) >> nn.TransformerEncoderLayer(
        4, dim_feedforward=24, dropout=0.0
    )
    _, x, net = imported("encoder")
    options = {"input_shape": (6, 16), "loss": "mse", "optimizer": cv.SGD(0.1), "batch_size": 4}
    n = len(cv.Model(ours >> nn.Function(cv.mean, axis=1) >> nn.Linear(3), **options).program.rows)
    assert len(cv.Model(net, **options).program.rows) == n


def test_queries_keys_and_values_are_read_where_they_lie():
    """A product that is split into them is read whole, without a copy of a part."""
    _, _, net = imported("gpt")
    g = cv.CalcGraph()
    with g.path("p") as path:
        net.call(g.placeholder("x", (None, 8), "int64"), training=False)
    kinds = [op.spec.name for op in path.operations]
    assert kinds.count("attention_packed") == 2 and not {"transpose", "slice"} & {*kinds}


# ---------------------------------------------------------------- errors and warnings
class Of(T.Module):
    def __init__(self, f, **modules):
        super().__init__()
        self.f, self.layer = f, T.Linear(4, 4)
        for name, m in modules.items():
            setattr(self, name, m)

    def forward(self, *given):
        return self.f(self, *given)


def grown(self, x):
    y = F.dropout(self.layer(x), 0.1, self.training)
    y[:, 0] += 1
    return y


def gapped(self, x):
    y = self.layer(x)
    y[:, ::2] = 1
    return y


class Counting(T.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(1))

    def forward(self, x):
        self.n += 1
        return x + self.n


X = torch.zeros(3, 4)
REFUSED = {
    "no module": (lambda: cv.from_torch(torch.relu, X), cv.CalcError, "torch.nn.Module"),
    "no example": (lambda: cv.from_torch(T.Linear(4, 2)), cv.CalcError, "an example"),
    "a list": (lambda: cv.from_torch(T.Linear(4, 2), [1.0]), cv.CalcError, "example 0: a tensor or an array"),
    "texts": (lambda: cv.from_torch(T.Linear(4, 2), np.array(["a"])), cv.CalcError, "an array of numbers"),
    "no batch": (lambda: cv.from_torch(T.Linear(4, 2), torch.zeros(())), cv.CalcError, "number of samples"),
    "axes": (lambda: cv.from_torch(T.Linear(4, 2), X, batch_axes=(0, 1)), cv.CalcError, "2 axes for 1"),
    "no axis": (lambda: cv.from_torch(T.Linear(4, 2), X, batch_axes=(3,)), cv.CalcError, "batch_axes"),
    "a number of the batch": (
        lambda: cv.from_torch(Of(lambda s, x: s.layer(x).view(3, 2, 2)), X),
        cv.CalcError,
        "x.shape[0] for len(x)",
    ),
    "a shape that does not fit": (
        lambda: cv.from_torch(T.Linear(5, 2), X),
        cv.CalcError,
        "PyTorch cannot export Linear",
    ),
    "operators": (
        lambda: cv.from_torch(
            Of(
                lambda s, x: torch.erfinv(torch.special.i0(s.layer(x))) + s.d(x),
                d=Of(lambda s, x: torch.linalg.inv(x[:, None] * torch.eye(4)).sum(1)),
            ),
            X,
        ),
        cv.UnsupportedOperator,
        "erfinv.default in Of; ",
    ),
    "random": (
        lambda: cv.from_torch(Of(lambda s, x: s.layer(x) + torch.randn(4)), X),
        cv.UnsupportedOperator,
        "aten.randn.default in Of",
    ),
    "a part in place": (lambda: cv.from_torch(Of(grown), X), cv.UnsupportedOperator, "changes a part of a value"),
    "gaps": (lambda: cv.from_torch(Of(gapped), X), cv.UnsupportedOperator, "without gaps"),
    "a mask": (lambda: cv.from_torch(Of(lambda s, x: s.layer(x)[x > 0]), X), cv.CalcError, ""),
    "an average of all batches": (
        lambda: cv.from_torch(T.BatchNorm1d(4, momentum=None), X),
        cv.UnsupportedOperator,
        "momentum is None",
    ),
    "statistics of the batch": (
        lambda: cv.from_torch(T.BatchNorm1d(4, track_running_stats=False), X),
        cv.UnsupportedOperator,
        "running statistics",
    ),
    "data": (
        lambda: cv.from_torch(Of(lambda s, x: s.layer(x) if x.sum() > 0 else x), X),
        cv.CalcError,
        "cannot export",
    ),
    "a buffer": (lambda: cv.from_torch(Counting(), X), cv.UnsupportedOperator, "changes n in evaluation"),
    "the batch's size": (
        lambda: cv.from_torch(Of(lambda s, x: s.layer(x) / x.shape[0]), X),
        cv.UnsupportedOperator,
        "the batch's size",
    ),
    "half": (lambda: cv.from_torch(Of(lambda s, x: s.layer(x).half()), X), cv.UnsupportedOperator, "float16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, kind, told = REFUSED[name]
    with pytest.raises(kind) as error:
        make()
    assert told in str(error.value) and "from_torch" in str(error.value)


def test_all_operators_are_named_at_once():
    with pytest.raises(cv.UnsupportedOperator) as error:
        REFUSED["operators"][0]()
    assert all(part in str(error.value) for part in ("erfinv", "i0", "linalg_inv", " in d"))


def test_inputs_of_another_shape():
    net, g = cv.from_torch(T.Linear(4, 2), X), cv.CalcGraph()
    with g.path("p"), pytest.raises(cv.ShapeError, match=r"\(B, 5\) has not the shape of the input 'x0', \(B, 4\)"):
        net.call(g.placeholder("x", (None, 5)), training=False)
    with pytest.raises(cv.CalcError, match="takes 1 inputs, not 2"), g.path("q"):
        net.call(g.variables["x"], g.variables["x"], training=False)
    with pytest.raises(cv.CalcError, match="3 outputs"):
        cv.Model(imported("autoencoder")[2], input_shape=(12,), loss="mse", optimizer=cv.SGD(0.1))
    assert not g.parameters()


def test_what_is_other_in_training_is_told():
    class Skips(T.Module):
        def __init__(self):
            super().__init__()
            self.layer = T.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) * torch.bernoulli(torch.full((4,), 0.5)) if self.training else self.layer(x)

    with pytest.warns(cv.CalcWarning, match="Skips does in training .* from aten.mul.Tensor in Skips on"):
        cv.from_torch(Skips(), X)
    other = {
        "softmax": lambda s, x: s.layer(x) if s.training else s.layer(x).softmax(1),
        "mul": lambda s, x: s.layer(x) * (2 if s.training else 1),
    }
    for name, f in other.items():
        with pytest.warns(cv.CalcWarning, match=f"from aten.{name}.* in Of on"):
            cv.from_torch(Of(f), X)
    with pytest.warns(cv.CalcWarning, match="dropout of attention's weights"):
        cv.from_torch(T.TransformerEncoderLayer(4, 2, 8, 0.1, batch_first=True), torch.zeros(2, 3, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cv.from_torch(T.Sequential(T.Linear(4, 4), T.BatchNorm1d(4), T.Dropout(0.1)), X)


def test_without_pytorch(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(cv.MissingExtra, match=r"calcvm\[torch\]"):
        cv.from_torch(None, X)
