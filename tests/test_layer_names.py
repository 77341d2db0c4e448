"""What a layer makes has the name that the summary gives it; a scope may end with a dot."""

import dataclasses
import re

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.errors import CalcError

X = np.random.default_rng(0).standard_normal((4, 6)).astype("f4")


def leaky(z, h):
    return 0.9 * h + 0.1 * cv.tanh(z[0])


def layers():
    """Every layer that can be made without arguments, or of few, with the shape of a sample that it takes."""
    given = {
        "Embedding": (9, 3), "Linear": (3,), "Reshape": (2, 3), "Function": (cv.tanh,), "GroupNorm": (2,), "Residual": (nn.Linear(6),),
        "Concat": (nn.Linear(2), nn.Tanh()), "LocalResponseNorm": (3,), "Normalize": (0.5, 2.0), "Standardize": (0.5, 2.0), "Pad": (1,), "RandomCrop": (3,),
        "RandomShift": (1,), "AdaptiveAvgPool": (2,), "AdaptiveMaxPool": (2,), "Upsample": (2,), "LPPool2d": (2.0, 2), "PositionalEmbedding": (4,),
        "MultiHeadAttention": (3,), "TransformerEncoderLayer": (2,), "RNN": (3,), "GRU": (3,), "LSTM": (3,),
        "Recurrent": (cv.cell(1)(leaky), 3),
        "CausalConv1d": (4, 3), **{f"Conv{k}d": (4, 3) for k in (1, 2, 3)}, **{f"ConvTranspose{k}d": (4, 3) for k in (1, 2, 3)},
        **{f"{kind}Pool{k}d": (2,) for kind in ("Avg", "Max") for k in (1, 2, 3)},
    }  # fmt: skip
    images = {
        "BatchNorm",
        "InstanceNorm",
        "GroupNorm",
        "LocalResponseNorm",
        "Normalize",
        "Dropout2d",
        "Pad",
        "Upsample",
    }
    for name in nn.__all__:
        kind = getattr(nn, name)
        needs_another = "TiedLinear", "TransformerDecoderLayer"
        if name in ("Layer", "Sequential", "Activation", *needs_another):
            continue
        axes = re.search(r"[123](?=d$)", name)
        flat = not (axes or name in images or re.match("Random|Adaptive|Global", name))
        sequences = name in (
            "GRU",
            "LSTM",
            "MeanOverSteps",
            "MultiHeadAttention",
            "PositionalEmbedding",
            "RNN",
            "Recurrent",
            "TransformerEncoderLayer",
        )
        shape = (4, 6) if sequences else (6,) if flat else (4, *(6,) * int(axes[0] if axes else 2))
        yield name, kind(*given.get(name, ())), shape


EACH = pytest.mark.parametrize(("name", "layer", "shape"), [*layers()], ids=[name for name, *_ in layers()])


def test_every_layer_of_the_summary_is_a_name(whole):
    every = [*layers()]
    some = every if whole else every[::5]
    assert len(every) > 55
    for name, layer, shape in some:
        check_names(name, layer, shape)


def check_names(name, layer, shape):
    net = layer >> nn.Flatten() >> nn.ReLU() >> nn.Dropout() >> nn.Linear(2) >> nn.ReLU()
    last = "relu_3" if name == "ReLU" else "relu_2"
    kept = [f"{layer.kind}_1", "relu_1", "learn.relu_1", "dropout_1", "linear_2" if name == "Linear" else "linear_1"]
    model = cv.Model(net, input_shape=shape, loss="mse", optimizer="adam", batch_size=4, workers=1, keep=kept)
    x = np.random.default_rng(0).random((4, *shape)).astype("f4")
    x = (9 * x).astype("i8") if layer.takes else x
    model.run({"input": x})
    table = model.program.info["layers"]["predict"]
    assert {line[0] for line in table} <= {line.split()[0] for line in model.summary().splitlines()}
    for called, form, *_ in table:
        if called in kept or called == last:
            assert model[called].shape == tuple(4 * a + b for a, b in form), called
            assert called in model
    assert np.array_equal(model[last], model["output"])
    assert np.array_equal(np.maximum(model["relu_1"], 0), model["dropout_1"])
    weight = [*model.parameters][-2]
    assert weight.startswith("linear_")
    np.testing.assert_allclose(
        model[last],
        np.maximum(model["dropout_1"] @ model.parameters[weight] + model.parameters[weight[:-6] + "bias"], 0),
        rtol=2e-5,
        atol=1e-5,
    )
    model.step(x, np.zeros((4, 2), "f4"))
    assert model["learn.relu_1"].ndim == 2 and len(model["learn.relu_1"]) == 4


def test_a_name_that_is_nothing_is_refused_with_those_that_are():
    with pytest.raises(CalcError, match="keep: no variable and no layer is called 'relu_9'"):
        cv.Model(
            nn.Linear(2) >> nn.ReLU(), input_shape=(6,), loss="mse", optimizer="adam", batch_size=4, keep=["relu_9"]
        )
    model = cv.Model(
        nn.Linear(2) >> nn.ReLU() >> nn.Linear(2), input_shape=(6,), loss="mse", optimizer="adam", batch_size=4
    )
    model.run({"input": X})
    with pytest.raises(CalcError, match=re.escape("'relu_1' cannot be read")) as told:
        model["relu_1"]
    assert "compile with keep=['relu_1']" in str(told.value)


@pytest.mark.parametrize("scope", ["scores", "scores."])
@EACH
def test_a_scope_may_end_with_a_dot(name, layer, shape, scope):
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, *shape))
    with g.path("learn", backward=True):
        layer.build(x, scope, True)
    names = [v.name for v in g.variables.values() if v.kind in ("parameter", "buffer")]
    assert all(n.startswith("scores.") and ".." not in n for n in names)
    assert bool(names) == (not layer.stateless)
    assert dataclasses.is_dataclass(layer) or names or layer.stateless


@EACH
def test_a_layer_alone_is_built_as_a_network_of_one(name, layer, shape):
    names = []
    for built in (layer, nn.Sequential(layer)):
        g = cv.CalcGraph()
        x = g.placeholder("x", (None, *shape))
        with g.path("learn", backward=True):
            built.build(x)
            built.build(x, training=False)
        names.append([*g.variables])
    assert names[0] == names[1]


@pytest.mark.parametrize("scope", ["body", "body."])
def test_a_network_inside_a_scope_has_a_dot_between(scope):
    g = cv.CalcGraph()
    with g.path("learn", backward=True):
        (nn.Linear(2) >> nn.Linear(3)).build(g.placeholder("x", (None, 4)), scope, True)
    weights = [v.name for v in g.variables.values() if v.kind == "parameter"]
    assert weights == [f"body.linear_{k}.{what}" for k in (1, 2) for what in ("weight", "bias")]


def test_a_rate_of_0_is_shown_as_not_trained():
    net = nn.Linear(2) >> nn.Linear(2)
    model = cv.Model(
        net,
        input_shape=(6,),
        loss="mse",
        optimizer=cv.Adam(no_decay="1d"),
        batch_size=4,
        rates={"linear_1.": 0.0, "linear_2.bias": 0.5},
    )
    shown = {
        line.split()[0]: line.split()[-1] for line in model.summary().splitlines() if re.match(r"linear_\d\.", line)
    }
    assert shown == {"linear_1.weight": "no", "linear_1.bias": "no", "linear_2.weight": "yes", "linear_2.bias": "yes"}
    assert "of which 6 are trained" in model.summary()
    assert "optimizer Adam, whose weight decay spares 2 of the parameters; judged" in model.summary()


class Bend(nn.Layer):
    """A custom layer with a layer inside it; what it makes has the layer's own scope, before and after that."""

    def __init__(self):
        self.inner = nn.Linear(4)

    def build(self, x, scope, training):
        a = self.parameter(x, "a", x.shape[-1:], init="ones")
        y = self.inner.build(a * x, f"{scope}.inner", training)
        b = self.parameter(x, "b", (4,), init="ones", trainable=False)
        return b * cv.center(y, self.buffer(y, "mean", (4,)), 0.1, training)


def test_parameters_of_a_custom_layer_are_named_by_its_scope_and_shared_by_the_paths():
    net = nn.Linear(3) >> Bend() >> Bend()
    model = cv.Model(net, input_shape=(2,), loss="mse", optimizer=cv.SGD(0.1), batch_size=8)
    of = ["a", "inner.weight", "inner.bias", "b"]
    assert [*model.parameters] == [
        "linear_1.weight", "linear_1.bias", *(f"bend_{k}.{name}" for k in (1, 2) for name in of)
    ]  # fmt: skip
    assert [*model.buffers] == ["bend_1.mean", "bend_2.mean"]
    assert [model.parameters[f"bend_{k}.a"].shape for k in (1, 2)] == [(3,), (4,)]
    before = model.get_weights()
    model.step(X[:, :2], X[:, 2:])
    moved = {name for name, value in model.get_weights().items() if (value != before[name]).any()}
    assert "bend_1.a" in moved and "bend_1.b" not in moved


class Pair(nn.Layer):
    """Two layers in one scope, or (scope None) in the network's."""

    def __init__(self, scope):
        self.scope, self.inner = scope, (nn.Linear(4), nn.Linear(4))

    def build(self, x, scope, training):
        for layer in self.inner:
            x = layer.build(x, **({} if self.scope is None else {"scope": scope + self.scope}), training=training)
        return x


@pytest.mark.parametrize("scope", ["", ".inner", None])
def test_two_layers_of_one_path_never_share_a_parameter(scope):
    """They did in silence, where their shapes agreed; one layer that is built twice shares its own."""
    with pytest.raises(cv.CalcError, match=r"weight belongs to another layer, Linear\(units=4\): .*self.a.build"):
        cv.Model([Pair(scope)], input_shape=(4,), loss="mse", optimizer="adam")
    g, layer = cv.CalcGraph(), nn.Linear(4)
    x = g.placeholder("x", (None, 4))
    with g.path("run"):
        layer.build(layer.build(x, "twice", False), "twice", False)
    assert [v.name for v in g.parameters()] == ["twice.weight", "twice.bias"]


def test_a_layer_built_again_on_other_sizes_says_so():
    g, layer = cv.CalcGraph(), Bend()
    x, y = g.placeholder("x", (None, 3)), g.placeholder("y", (None, 5))
    with g.path("run"):
        layer.build(x, "bend", False)
        with pytest.raises(cv.ShapeError, match=r"bend: the input y \(B, 5\) does not fit its a \(3,\)"):
            layer.build(y, "bend", False)
