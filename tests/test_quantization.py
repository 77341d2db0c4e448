"""Networks in int8: `calcvm.quantize`."""

import pickle
import random
from io import BytesIO

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.data import digits
from calcvm.ops.quantized import SUMMANDS
from tests.conftest import by_turns

HOW = {"optimizer": cv.Adam(3e-3), "batch_size": 16, "seed": 0}
INTEGERS = {"conv_int8_fwd", "max_pool_int8_fwd", "add_int8_fwd"}


def rows(model):
    return [i.name for i in (model.program.instructions[k] for k in model.program.rows[:, 0])]


def in_floats(model):
    """Rows between the first and the last in integers that are not, nor move anything."""
    names = rows(model)
    at = [k for k, name in enumerate(names) if name in INTEGERS]
    return [name for name in names[at[0] : at[-1]] if name not in INTEGERS and not name.endswith("uint8")]


def images(seed):
    """A random network of images of 8 x 8 with two channels."""
    r, net, channels, size = random.Random(seed), None, 2, 8
    for _ in range(r.randint(1, 4)):
        kind = r.choice(["conv", "depthwise", "groups", "residual", "largest", "mean"])
        window = r.choice([1, 3])
        more = [nn.BatchNorm()] * r.randint(0, 1) + [nn.ReLU(), nn.ReLU6()][: r.randint(0, 2)]
        if kind in ("largest", "mean"):
            halved = size > 2
            of = nn.MaxPool2d if kind == "largest" else nn.AvgPool2d
            layers = [of(2) if halved else of(3, 1, padding=1)]
            size = size // 2 if halved else size
        elif kind == "residual":
            layers = [nn.Residual(nn.Conv2d(channels, kernel=window, padding=window // 2)), *more[-1:]]
        else:
            groups = {"conv": 1, "depthwise": channels, "groups": 2}[kind]
            channels = r.choice([2, 4, 6]) if kind == "conv" else channels * r.choice([1, 2])
            layers = [nn.Conv2d(channels, kernel=window, padding=window // 2, groups=groups), *more]
        for layer in layers:
            net = layer if net is None else net >> layer
    return net >> r.choice([nn.GlobalAvgPool(), nn.MaxPool2d(2)]) >> nn.Flatten() >> nn.Linear(5)


def trained(net, shape, seed=0, **how):
    model = cv.Model(net, input_shape=shape, **{**HOW, **how})
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(64, *shape)).astype("float32")
    classes = model.predict(X[:1]).shape[1]
    model.fit(X, rng.integers(0, classes, 64), epochs=2, progress=False)
    return model, X


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        by_turns(metafunc, 6, seed=range(60))


def test_random_networks_predict_nearly_the_same_in_integers_alone(seed):
    model, X = trained(images(seed), (2, 8, 8), seed)
    small = cv.quantize(model, X)
    want, got = model.predict(X), small.predict(X)
    assert np.abs(got - want).max() <= 0.1 * np.abs(want).max(), rows(small)
    assert not in_floats(small)
    several = cv.compile(small._source[0], batch_size=7, workers=3)
    assert cv.CalcHeap(several.heap_bytes).create(several).predict(X).tobytes() == got.tobytes()


def lenet():
    convolutions = nn.Conv2d(8, kernel=3, padding=1) >> nn.ReLU() >> nn.MaxPool2d(2)
    more = nn.Conv2d(16, kernel=3, padding=1) >> nn.ReLU() >> nn.MaxPool2d(2) >> nn.Flatten()
    return convolutions >> more >> nn.Linear(64) >> nn.ReLU() >> nn.Linear(10)


def test_digits_are_recognized_as_well():
    pytest.importorskip("sklearn")  # which has the digits
    X, y = digits()
    X, n = X.reshape(-1, 1, 8, 8).astype("float32"), 1437
    model = cv.Model(lenet(), input_shape=(1, 8, 8), **HOW)
    model.fit(X[:n], y[:n], epochs=25, progress=False)
    small = cv.quantize(model, X[:300])
    before, after = (m.evaluate(X[n:], y[n:]) for m in (model, small))
    assert before["accuracy"] > 0.9 and after["accuracy"] > before["accuracy"] - 0.005
    assert abs(after["loss"] - before["loss"]) < 0.02


def test_it_is_a_model_as_any_other(tmp_path):
    model, X = trained(images(3), (2, 8, 8))
    small = cv.quantize(model, X)
    want = small.predict(X)
    small.save(tmp_path / "small.calc")
    file = BytesIO(pickle.dumps(small))
    for other in (cv.load(tmp_path / "small.calc"), small.copy(), pickle.load(file)):
        assert other.predict(X).tobytes() == want.tobytes()
    text = cv.read_graph(small._source[0].text())
    program = cv.compile(text, batch_size=16)
    assert cv.CalcHeap(program.heap_bytes).create(program).predict(X).tobytes() == want.tobytes()
    with pytest.raises(cv.CalcError, match="only predicts"):
        small.fit(X, np.zeros(64, int), progress=False)
    with pytest.raises(cv.CalcError, match="path"):
        small.step(X[:16], np.zeros(16, int))


def test_what_has_no_row_in_integers_is_computed_in_floats():
    net = nn.Linear(32) >> nn.Tanh() >> nn.LayerNorm() >> nn.Linear(16) >> nn.GELU() >> nn.Linear(3) >> nn.Softmax()
    model = cv.Model(net, input_shape=(6,), **{**HOW, "loss": "mse"})
    X = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
    small = cv.quantize(model, X)
    assert np.abs(small.predict(X) - model.predict(X)).max() < 0.03
    assert rows(small).count("conv_int8_fwd") == 3 and "gelu_fwd" in rows(small)
    wide = cv.Model(nn.Linear(2), input_shape=(SUMMANDS + 1,), **{**HOW, "loss": "mse"})
    assert not INTEGERS & {
        *rows(cv.quantize(wide, np.ones((2, SUMMANDS + 1), "float32")))
    }  # sums that int32 may not hold
    padded = cv.Model(nn.Conv1d(2, kernel=1, padding=1) >> nn.Flatten() >> nn.Linear(2), input_shape=(1, 4), **HOW)
    assert rows(cv.quantize(padded, np.ones((2, 1, 4), "float32"))).count("conv_int8_fwd") == 1


def conv(channels, **how):
    return nn.Conv2d(channels, kernel=3, padding=1, **how)


AXES = {
    "concat": lambda: nn.Concat(conv(4), conv(4) >> nn.ReLU()) >> nn.Flatten() >> nn.Linear(3),
    "concat, conv": lambda: nn.Concat(conv(4), nn.Conv2d(2, kernel=1)) >> conv(3) >> nn.GlobalAvgPool() >> nn.Flatten(),
    "pad": lambda: conv(4) >> nn.Pad(1) >> nn.Flatten() >> nn.Linear(3),
    "pad, conv": lambda: conv(4) >> nn.Pad(1, mode="reflect") >> nn.Conv2d(3, kernel=3) >> nn.Flatten() >> nn.Linear(3),
    "cumsum": lambda: conv(4) >> nn.Function(lambda x: cv.cumsum(x, axis=1)) >> nn.Flatten() >> nn.Linear(3),
    "slice": lambda: conv(4) >> nn.Function(lambda x: x[:, 1:3]) >> conv(3) >> nn.Flatten() >> nn.Linear(3),
    "softmax": lambda: conv(4) >> nn.Softmax() >> nn.Flatten() >> nn.Linear(3),
    "transpose": lambda: (
        conv(4) >> nn.Function(lambda x: cv.transpose(x, (0, 2, 1, 3))) >> nn.Flatten() >> nn.Linear(3)
    ),
    "ends": lambda: nn.Concat(conv(4), conv(4)),
}


@pytest.mark.parametrize("name", AXES)
def test_axes_are_those_that_users_see(name):
    loss = {"loss": "mse"} if name == "ends" else {}
    model = cv.Model(AXES[name](), input_shape=(2, 5, 7), **{**HOW, **loss})
    X = np.random.default_rng(0).normal(size=(50, 2, 5, 7)).astype("float32")
    want, got = model.predict(X), cv.quantize(model, X).predict(X)
    assert got.shape == want.shape and np.abs(got - want).max() < 0.06 * np.abs(want).max()


@pytest.mark.parametrize("scale", [10.0, 1.0, 0.1, 0.01, 1e-3, 1e-5])
@pytest.mark.parametrize("place", ["relu", "pool", "input", "sum"])
def test_any_scale_of_fake_quantize_is_that_of_the_value(place, scale):
    fake = nn.Function(lambda x: cv.fake_quantize(x, scale))
    first = {
        "relu": lambda: conv(4) >> nn.ReLU() >> fake,
        "pool": lambda: conv(4) >> nn.MaxPool2d(2) >> fake,
        "input": lambda: fake >> conv(4),
        "sum": lambda: nn.Residual(conv(2)) >> fake,
    }[place]()
    last = nn.Linear(3, bias_init=cv.init.Constant(1.0))
    model = cv.Model(first >> nn.Flatten() >> last, input_shape=(2, 6, 6), **{**HOW, "loss": "mse"})
    X = np.random.default_rng(0).normal(size=(50, 2, 6, 6)).astype("float32")
    want, got = model.predict(X), cv.quantize(model, X).predict(X)
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max() + 0.5 * scale * (scale > 0.05)


def test_what_only_a_figure_reads_stays_as_it_is():
    g = cv.CalcGraph()
    x, t, w = g.placeholder("x", (None, 3)), g.placeholder("t", (None, 3)), g.parameter("w", (3, 3))
    for name in ("learn", "predict"):
        with g.path(name, backward=name == "learn") as path:
            y = cv.relu(cv.linear(x, w))
            figure = cv.mse(cv.linear(y, w), t)
            if name == "learn":
                path.minimize(figure, optimizer=cv.SGD(0.1), output=y)
            path.output = y
    model, X = cv.Model(g, batch_size=4, seed=0), np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
    before, after = (m.evaluate(X, X) for m in (model, cv.quantize(model, X)))
    assert before.keys() == after.keys()
    assert all(abs(after[name] - value) < 0.02 for name, value in before.items())


def test_sequences_keep_their_recurrent_layers_in_floats():
    model = cv.Model(nn.LSTM(8, return_sequences=False) >> nn.Linear(3), input_shape=(5, 4), **HOW)
    X = np.random.default_rng(0).normal(size=(32, 5, 4)).astype("float32")
    small = cv.quantize(model, X)
    assert np.abs(small.predict(X) - model.predict(X)).max() < 0.02 and "conv_int8_fwd" in rows(small)


def test_extreme_weights_have_scales():
    """Channels of zeros, tiny weights beside a large bias, products far larger than their sums."""
    model = cv.Model(nn.Linear(4) >> nn.Linear(1), input_shape=(2,), **{**HOW, "loss": "mse"})
    first = np.array([[1e-12, 0.0, 3e4, 1.0], [0.0, 0.0, -3e4, 1e-3]])
    parameters = [first, [1e4, 0.0, 0.0, -1.0], [[1e-3], [1.0], [0.5], [2.0]], [0.25]]
    model.set_weights([np.asarray(p, "float32") for p in parameters])
    X = np.random.default_rng(0).uniform(0.9, 1.1, size=(50, 2)).astype("float32")
    X[:, 1] = X[:, 0]
    want, got = model.predict(X), cv.quantize(model, X).predict(X)
    assert np.isfinite(got).all() and np.abs(got - want).max() < 0.05 * np.abs(want).max() + 300


def test_ranges_are_those_of_the_data():
    model, X = trained(nn.Linear(8) >> nn.ReLU() >> nn.Linear(2), (4,))
    narrow, wide = cv.quantize(model, X), cv.quantize(model, 10 * X)
    want = model.predict(X)
    assert np.abs(narrow.predict(X) - want).max() < np.abs(wide.predict(X) - want).max()
    assert np.abs(wide.predict(10 * X) - model.predict(10 * X)).max() < 0.1 * np.abs(model.predict(10 * X)).max()
    assert np.abs(narrow.predict(10 * X)).max() <= 1.01 * np.abs(want).max()  # beyond the range it saturates


def test_training_that_is_aware_of_it():
    """What is trained is what is predicted: `fake_quantize` sets the scale, and its values are the integers'."""
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 3)), g.placeholder("t", (None, 1))
    w, b, v = g.parameter("w", (3, 8)), g.parameter("b", (8,)), g.parameter("v", (8, 1))
    for name in ("learn", "predict"):
        with g.path(name, backward=name == "learn") as path:
            hidden = cv.fake_quantize(cv.relu(cv.linear(x, w, b)), 1 / 32)
            y = cv.linear(hidden, v)
            if name == "learn":
                path.minimize(cv.mse(y, t), optimizer=cv.Adam(0.02), output=y)
            path.output = y
    model = cv.Model(g, batch_size=20, seed=1)
    X = np.random.default_rng(0).normal(size=(200, 3)).astype("float32")
    Y = (X[:, :1] * X[:, 1:2]).astype("float32")
    first = model.fit(X, Y, epochs=1, progress=False)["loss"][-1]
    assert model.fit(X, Y, epochs=60, progress=False)["loss"][-1] < 0.5 * first
    small = cv.quantize(model, X)
    assert "fake_quantize" not in str(rows(small)) and not in_floats(small)
    assert np.abs(small.predict(X) - model.predict(X)).max() < 0.05 * np.abs(model.predict(X)).max()


def test_errors():
    model, X = trained(nn.Linear(8) >> nn.ReLU() >> nn.Linear(2), (4,))
    with pytest.raises(cv.CalcError, match="int8 already"):
        cv.quantize(cv.quantize(model, X), X)
    file = BytesIO()
    model.save(file)
    file.seek(0)
    with pytest.raises(cv.CalcError, match="from a file has no graph"):
        cv.quantize(cv.load(file), X)
    with pytest.raises(cv.ShapeError):
        cv.quantize(model, X[:, :3])
    with pytest.raises(cv.CalcError, match="not finite"):
        cv.quantize(model, np.full_like(X, np.nan))
    with pytest.raises(cv.CalcError, match="no samples|empty|0"):
        cv.quantize(model, X[:0])
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 3)), g.placeholder("t", (None, 3))
    state, w = g.carry("state", (None, 3)), g.parameter("w", (3, 3))
    for name in ("learn", "predict"):
        with g.path(name, backward=name == "learn") as path:
            y = cv.tanh(x @ w + state)
            cv.carry(state, y)
            if name == "learn":
                path.minimize(cv.mse(y, t), optimizer=cv.SGD(0.1), output=y)
            path.output = y
    with pytest.raises(cv.CalcError, match="'state' is a carry"):
        cv.quantize(cv.Model(g, batch_size=4), np.ones((8, 3), "float32"))
