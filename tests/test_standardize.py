"""`nn.Standardize` and `Model.adapt`: the numbers are those of the data, and go where the model goes."""

import copy
import io
import itertools
import pickle
import runpy
import warnings

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.errors import CalcError, CalcWarning, ShapeError

RNG = np.random.default_rng(0)


def network(shape, layer=None, **options):
    net = (layer or nn.Standardize()) >> nn.Flatten() >> nn.Linear(2)
    return cv.Model(
        net,
        **{
            "input_shape": shape,
            "loss": "mse",
            "optimizer": "adam",
            "workers": 1,
            "keep": ["standardize_1"],
            **options,
        },
    )


def moments(x, axis):
    """Of float64 data, the slow way: a mean and deviation for each feature, in the buffers' shape."""
    x = x.astype(np.longdouble)
    if axis is None:
        return x.mean(0), x.std(0)
    over = tuple(k for k in range(x.ndim) if k != axis)
    keep = (x.mean(over, keepdims=True)[0], x.std(over, keepdims=True)[0])
    return tuple(v.reshape(v.shape[axis - 1 :]) for v in keep)


def ways(x):
    """Forms of data: at once, on disk, as they come."""
    yield "array", x
    yield "list", x.tolist()
    yield "strided", np.repeat(x, 2, -1)[..., ::2]
    cuts = [0, 1, 2, 7, len(x) // 2, len(x)]
    parts = [x[a:b] for a, b in itertools.pairwise(cuts)]
    yield "generator", (part for part in parts)
    yield "with targets", ((part, np.zeros((len(part), 2))) for part in parts)
    yield "mappings", ({"input": part, "target": None} for part in parts)


CASES = [
    ((6,), 1), ((6,), -1), ((6,), None), ((3, 5), 1), ((3, 5), -1), ((3, 5), None), ((2, 4, 5), 1), ((2, 4, 5), 2), ((2, 4, 5), -1),
    ((2, 4, 5), None), ((2, 3, 4, 5), 1), ((2, 3, 4, 5), None), ((1,), 1),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("shape", "axis"), CASES)
def test_the_numbers_are_those_of_the_data(shape, axis, dtype, whole):
    x = RNG.standard_normal((50, *shape)) * RNG.uniform(0.01, 9, shape) + RNG.uniform(-50, 50, shape)
    x = x.astype(dtype)
    wanted = moments(x, None if axis is None else axis if axis > 0 else len(shape))
    eps = np.finfo(dtype).eps
    sums = (
        16 if dtype == "float64" else 4
    )  # roundings of a sum over 3000 elements in float64; in float32 the result's alone
    model = network(shape, nn.Standardize(axis=axis), dtype=dtype)
    for way, given in ways(x):
        if not whole and way not in ("array", "with targets"):
            continue
        model.adapt(given)
        for name, value in zip(("mean", "std"), wanted):
            found = model.buffers[f"standardize_1.{name}"]
            assert found.shape == value.shape, way
            np.testing.assert_allclose(
                found, value, rtol=sums * eps, atol=sums * eps * abs(x).max() * (name == "mean"), err_msg=way
            )
        model.run({"input": x[:32]})
        buffers = [model.buffers[f"standardize_1.{name}"].astype("f8") for name in ("mean", "std")]
        np.testing.assert_allclose(
            model["standardize_1"], (x[:32] - buffers[0]) / buffers[1], rtol=8 * eps, atol=100 * eps
        )


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "float16", "bool"])
def test_data_of_any_type(dtype):
    x = (RNG.integers(0, 2 if dtype == "bool" else 100, (40, 3))).astype(dtype)
    model = network((3,)).adapt(x)
    np.testing.assert_allclose(model.buffers["standardize_1.mean"], x.astype("f8").mean(0), rtol=1e-6)
    own = network((3,), input_dtype="uint8").adapt(x.astype("u1"))
    np.testing.assert_array_equal(own.buffers["standardize_1.std"], x.astype("u1").astype("f8").std(0).astype("f4"))


def test_images_with_channels_last():
    x = RNG.random((20, 4, 5, 3)).astype("f4") * [1, 10, 100]
    last, first = network((4, 5, 3), channels_last=True).adapt(x), network((3, 4, 5)).adapt(np.moveaxis(x, -1, 1))
    assert last.buffers["standardize_1.mean"].shape == (3, 1, 1)
    for name in first.buffers:
        np.testing.assert_array_equal(first.buffers[name], last.buffers[name])


@pytest.mark.parametrize("size", [1, 2, 1000, 100_003])
def test_one_pass_is_stable(size):
    """Far from 0, over many blocks: as exact as two passes in more digits."""
    x = RNG.standard_normal((size, 3)) * [1, 1e-3, 1e3] + [1e8, 1.0, -1e9]
    model = network((3,), dtype="float64").adapt(x)
    mean, std = moments(x, 1)
    np.testing.assert_allclose(model.buffers["standardize_1.mean"], mean, rtol=1e-15)
    if size > 1:
        np.testing.assert_allclose(model.buffers["standardize_1.std"], std, rtol=1e-9)


def test_a_constant_feature_stays_finite():
    x = np.repeat(np.array([[0.1, 1e20, 0.0, 1e-30, 5.0]]), 100, 0)
    x[:, 4] = np.arange(100)
    model = network((5,)).adapt(x)
    np.testing.assert_array_equal(model.buffers["standardize_1.std"][:4], 1)
    model.run({"input": x[:32]})
    assert np.isfinite(model["standardize_1"]).all()
    tiny = network((1,)).adapt(np.array([[1e-60], [3e-60]]))  # a deviation of 0 in float32
    assert tiny.buffers["standardize_1.std"] == 1


def test_an_array_on_disk_is_read_in_blocks(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", RNG.random((30_000, 8)))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    model = network((8,)).adapt(x)
    np.testing.assert_allclose(model.buffers["standardize_1.mean"], np.asarray(x).mean(0), rtol=1e-6)


def test_it_goes_where_the_model_goes(tmp_path):
    x, t = (RNG.random((64, 4)) * 9 + 3).astype("f4"), RNG.random((64, 2)).astype("f4")
    model = network((4,)).adapt(x)
    model.fit(x, t, epochs=2, progress=False)
    file = io.BytesIO()
    model.save(file)
    file.seek(0)
    others = {"loaded": cv.load(file), "copied": copy.copy(model), "pickled": pickle.loads(pickle.dumps(model))}
    heap = cv.CalcHeap("1 MiB", cv.FileStore(tmp_path / "store", durable=False))
    model.copy(name="kept", heap=heap)
    heap.close()
    others["of a store"] = cv.CalcHeap("1 MiB", cv.FileStore(tmp_path / "store", durable=False)).open("kept")
    for how, other in others.items():
        assert np.array_equal(other.predict(x), model.predict(x)), how
        assert other.adapt(x + 1).buffers["standardize_1.mean"][0] > model.buffers["standardize_1.mean"][0], how
    other = network((4,), seed=1)
    other.set_weights(model.get_weights())
    assert np.array_equal(other.predict(x), model.predict(x))
    model.to_python(tmp_path / "script.py")
    script = runpy.run_path(str(tmp_path / "script.py"))
    np.testing.assert_allclose(script["predict"](x), model.predict(x), rtol=1e-5, atol=1e-6)


def test_each_model_of_a_fleet_has_its_own():
    program, t = network((4,)).program, np.zeros((64, 2), "f4")
    fleet = cv.Fleet("1 MiB", workers=1)
    sets = [(RNG.random((64, 4)) * k + k).astype("f4") for k in (1, 5)]
    handles = [fleet.add(program, data=(x, t), seed=3) for x in sets]
    for handle, x in zip(handles, sets):
        handle.model.adapt(x)
    fleet.fit(epochs=3, progress=False)
    for handle, x in zip(handles, sets):
        alone = network((4,), seed=3).adapt(x)
        alone.fit(x, t, epochs=3, progress=False)
        assert np.array_equal(handle.model.predict(x), alone.predict(x))


def test_calls_stay_compiled_and_training_leaves_the_numbers():
    x, t = (RNG.random((32, 4)) * 9 + 3).astype("f4"), RNG.random((32, 2)).astype("f4")
    model = network((4,)).adapt(x)
    before = {name: value.copy() for name, value in model.buffers.items()}
    losses = [model.step(x, t) for _ in range(100)]
    assert losses[-1] < losses[0]
    assert all(np.array_equal(value, before[name]) for name, value in model.buffers.items())


def test_numbers_that_are_known():
    x = RNG.random((32, 4)).astype("f4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mean, std in ((0.5, 2.0), ([1, 2, 3, 4], [1, 1, 2, 2])):
            model = network((4,), nn.Standardize(mean, std))
            model.run({"input": x})
            np.testing.assert_allclose(
                model["standardize_1"], (x - np.array(mean)) / np.array(std), rtol=1e-6, atol=1e-7
            )


@pytest.mark.parametrize("call", ["fit", "step", "predict", "evaluate", "run"])
def test_a_model_that_was_never_adapted_is_warned_of_once(call):
    model, x, t = network((4,)), np.ones((8, 4), "f4"), np.zeros((8, 2), "f4")
    calls = {
        "fit": lambda: model.fit(x, t, progress=False), "step": lambda: model.step(x, t), "predict": lambda: model.predict(x),
        "evaluate": lambda: model.evaluate(x, t), "run": lambda: model.run({"input": x}),
    }  # fmt: skip
    with pytest.warns(CalcWarning, match=r"layer 'standardize_1' has seen no data.*model.adapt\(X\)") as told:
        calls[call]()
    assert len(told) == 1 and told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calls[call]()


def test_models_of_fleets_and_searches_learn_from_what_they_train_on():
    rng = np.random.default_rng(0)
    x, t = rng.normal(50, 9, (60, 4)).astype("f4"), rng.standard_normal((60, 2)).astype("f4")
    graph = cv.build_graph(nn.Standardize() >> nn.Linear(2), (4,), "mse", cv.SGD(0.01))
    program, fleet = cv.compile(graph, batch_size=8, accumulate=False), cv.Fleet("1 MiB")
    for samples in (slice(None), slice(10, 40), np.arange(0, 60, 3)):
        handle = fleet.add(program, data=(x, t), samples=samples)
        fleet.fit(3, progress=False)
        alone = cv.CalcHeap("1 MiB").create(program).adapt(x[samples])
        losses = alone.fit(x[samples], t[samples], epochs=3, progress=False)["loss"]
        np.testing.assert_array_equal(handle.losses, losses)
        handle.close()


def test_a_model_that_has_learnt_from_data_learns_from_no_other():
    rng = np.random.default_rng(0)
    x, t = rng.normal(50, 9, (60, 4)).astype("f4"), rng.standard_normal((60, 2)).astype("f4")
    graph = cv.build_graph(nn.Standardize() >> nn.Linear(2), (4,), "mse", cv.SGD(0.01))
    fleet = cv.Fleet("1 MiB", store=cv.MemoryStore())
    model = fleet.heap.create(cv.compile(graph, batch_size=8, accumulate=False), name="kept").adapt(2 * x)
    before = model.buffers["standardize_1.mean"].copy()
    handle = fleet.add("kept", data=(x, t))
    np.testing.assert_array_equal(handle.model.buffers["standardize_1.mean"], before)


def test_trials_of_a_search_are_adapted():
    pytest.importorskip("optuna")
    rng = np.random.default_rng(0)
    x, t = rng.normal(50, 9, (60, 4)).astype("f4"), rng.standard_normal((60, 2)).astype("f4")

    def build(trial):
        return cv.build_graph(nn.Standardize() >> nn.Linear(2), (4,), "mse", cv.SGD(trial["rate"]))

    found = cv.explore(build, {"rate": (0.01, 0.1)}, data=(x, t), validation=0.2, n_trials=2, epochs=2, progress=False)
    assert np.abs(found.top(1)[0].buffers["standardize_1.mean"] - 50).max() < 9


def test_what_cannot_be_adapted_is_said():
    x = np.ones((8, 4), "f4")
    plain = cv.Model(nn.Linear(2), input_shape=(4,), loss="mse", optimizer="adam")
    deep = cv.Model(nn.Linear(4) >> nn.Standardize() >> nn.Linear(2), input_shape=(4,), loss="mse", optimizer="adam")
    bad = x.copy()
    bad[3, 2] = np.nan
    for call, error, words in (
        (lambda: plain.adapt(x), CalcError, r"no layer that learns.*nn\.Standardize\(\)"),
        (lambda: deep.adapt(x), CalcError, "'standardize_1' reads a computed value"),
        (lambda: network((4,)).adapt(bad), CalcError, "feature 2 of 'input' has NaN"),
        (lambda: network((4,)).adapt(np.full((8, 4), 1e300)), CalcError, "too large for float32"),
        (
            lambda: network((4,), dtype="float64").adapt(1e300 * np.arange(32.0).reshape(8, 4)),
            CalcError,
            "too large for float64",
        ),
        (lambda: network((4,)).adapt(x[:, :3]), ShapeError, "do not fit"),
        (lambda: network((4,)).adapt(x[:0]), CalcError, "the data are empty"),
        (lambda: network((4,)).adapt(iter(())), CalcError, "no data came"),
        (lambda: network((4,), nn.Standardize(axis=2)), ShapeError, "no axis 2"),
        (lambda: nn.Standardize(1.0), CalcError, "mean and std, or neither"),
        (lambda: nn.Standardize(1.0, 0.0), CalcError, "above 0"),
        (lambda: network((4,), nn.Standardize([1, 2], [1, 2])), ShapeError, "2 numbers of mean for 4 features"),
        (lambda: network((4,), nn.Normalize(0.0, 1.0)), ShapeError, r"nn\.Standardize\(\) takes data of any rank"),
    ):
        with pytest.raises(error, match=words):
            call()
    model = network((4,))
    with pytest.raises(CalcError):
        model.adapt(bad)
    assert not model.buffers["standardize_1.samples"].any() and not model.buffers["standardize_1.mean"].any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_column_that_the_models_floats_cannot_tell_apart_is_warned_of(dtype):
    rng = np.random.default_rng(0)
    X = np.c_[rng.standard_normal(200), 1.76e9 + rng.uniform(-300, 300, 200), np.full(200, 1e9)]
    net = nn.Standardize() >> nn.Linear(1)
    m = cv.Model(net, input_shape=(3,), loss="mse", optimizer=cv.SGD(0.1), batch_size=20, dtype=dtype)
    if dtype == "float32":
        with pytest.warns(
            cv.CalcWarning, match=r"feature 1 of 'input' has mean 1.76e\+09 .* 128 apart: .* dtype='float64'"
        ):
            m.adapt(X)
    else:
        m.adapt(X)
    m.adapt(X - [0, 1.76e9, 1e9])
