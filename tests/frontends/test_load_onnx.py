"""Files of ONNX as layers: results, training, names, sizes, and what is refused."""

from __future__ import annotations

import copy
import pickle
import resource

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

import calcvm as cv
from calcvm import nn
from tests.conftest import by_turns, whole_of
from tests.frontends.files import exported, parsed
from tests.frontends.networks import networks

NETWORKS = networks()
BATCH_AXES = {"states": (0, 1, 1)}
OPTIMIZERS = {  # ours, PyTorch's, and how near the losses of five steps are
    "sgd": (lambda: cv.SGD(0.05), lambda p: torch.optim.SGD(p, 0.05), 1e-5),
    "adam": (lambda: cv.Adam(1e-3), lambda p: torch.optim.Adam(p, 1e-3), 1e-4),
}
MUTATED = 1000  # files of a part
NOT_WRITTEN = ("llama",)  # by the older exporter


def pytest_generate_tests(metafunc):
    if "exporter" in metafunc.fixturenames:
        by_turns(metafunc, 5, name=NETWORKS, exporter=["script", "training", "program"])
    if "part" in metafunc.fixturenames:
        metafunc.parametrize("part", range(100 if whole_of(metafunc) else 1))
    if "optimizer" in metafunc.fixturenames:
        by_turns(metafunc, 3, name=[n for n in NETWORKS if n not in NOT_WRITTEN], optimizer=OPTIMIZERS)


def given(name):
    module, example = NETWORKS[name]
    inputs = example if isinstance(example, tuple) else (example,)
    axes = BATCH_AXES.get(name) or [0 if x.ndim and len(x) == len(inputs[0]) else None for x in inputs]
    return copy.deepcopy(module), inputs, axes


def tensors(arrays):
    return arrays if isinstance(arrays, tuple) else (arrays,)


# ---------------------------------------------------------------- what PyTorch writes
def test_networks_of_both_exporters(name, exporter):
    if exporter != "program" and name in NOT_WRITTEN:
        pytest.skip("PyTorch's older exporter cannot write it")
    module, inputs, axes = given(name)
    net = cv.load_onnx(exported(module, inputs, axes, exporter), batch_axes=axes)
    batch = inputs[0].shape[axes[0]]
    model = cv.Model(net, batch_size=batch)
    with torch.no_grad():
        wanted = tensors(module.eval()(*inputs))
    found = model.run({name: x.numpy() for name, x in zip(net.inputs, inputs)})
    for got, want in zip(found.values(), wanted, strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=2e-6)
    if exporter == "training":  # the others fold weights, and write equal ones once
        trained = {name for name, _ in module.named_parameters()}
        assert trained <= {*model.state_dict()}, trained - {*model.state_dict()}


def test_training_is_that_of_pytorch(name, optimizer):
    """The losses of five steps of a file in the form of training; the weights go back by name."""
    module, inputs, axes = given(name)
    ours, theirs, within = OPTIMIZERS[optimizer]
    for part in module.modules():
        if isinstance(part, torch.nn.modules.dropout._DropoutNd):
            part.p = 0.0
        if isinstance(vars(part).get("dropout"), float):  # of attention's weights
            part.dropout = 0.0
    file = exported(module, inputs, axes, "training")
    net, g, rng = cv.load_onnx(file, batch_axes=axes), cv.CalcGraph(), np.random.default_rng(0)
    with torch.no_grad():
        targets = [
            torch.from_numpy(rng.standard_normal(y.shape).astype("float32")) for y in tensors(module.eval()(*inputs))
        ]
    placed = [g.placeholder(n, shape, dtype) for n, (shape, dtype) in net.inputs.items()]
    wanted = [g.placeholder(f"t{k}", shape) for k, shape in enumerate(net.outputs.values())]
    with g.path("learn", backward=True) as learn:
        losses = [cv.mse(y, t) for y, t in zip(net.call(*placed, training=True), wanted)]
        learn.minimize(sum(losses[1:], losses[0]), ours())
    with g.path("predict") as predict:
        predict.output = (*net.call(*placed, training=False),)
    model = cv.Model(g, batch_size=inputs[0].shape[axes[0]], seed=0)
    module.train()
    optimizer = theirs([p for p in module.parameters() if p.requires_grad])
    for _ in range(5):
        optimizer.zero_grad()
        loss = sum(torch.nn.functional.mse_loss(y, t) for y, t in zip(tensors(module(*inputs)), targets))
        loss.backward()
        optimizer.step()
        got = model.step(*[x.numpy() for x in (*inputs, *targets)])
        assert got == pytest.approx(loss.item(), rel=within), name
    weights = {n: torch.from_numpy(x) for n, x in model.state_dict().items()}
    left = module.load_state_dict({n: w for n, w in weights.items() if n in module.state_dict()}, strict=False)
    assert not [n for n in left.missing_keys if n in dict(module.named_parameters())]
    with torch.no_grad():
        again = tensors(module.eval()(*inputs))
    found = model.run({n: x.numpy() for n, x in zip(net.inputs, inputs)})
    for got, want in zip(found.values(), again):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------- a layer as others
W = np.arange(12, dtype="float32").reshape(4, 3) / 10
DENSE = "net (float[N, 4] x) => (float[N, 3] y) {a = MatMul(x, w) y = Add(a, b)}"


def dense():
    return cv.load_onnx(parsed(DENSE, w=W, b=[1, 2, 3]))


def test_a_file_trains_as_a_layer(tmp_path):
    X, t = np.random.default_rng(0).standard_normal((2, 64, 4)).astype("float32")
    net = dense()
    assert (net.inputs, net.outputs) == ({"x": ((None, 4), None)}, {"y": (None, 3)})
    model = cv.Model(net, loss="mse", optimizer=cv.SGD(0.1), batch_size=16, seed=0)
    twin = cv.Model(
        nn.Linear(3, init=W, bias_init=np.array([1.0, 2, 3])),
        input_shape=(4,),
        loss="mse",
        optimizer=cv.SGD(0.1),
        batch_size=16,
    )
    for m in (model, twin):
        m.fit(X, t[:, :3], epochs=3, progress=False)
    np.testing.assert_allclose(model.predict(X), twin.predict(X), rtol=1e-6)
    state = model.state_dict()
    assert [*state] == ["w", "b"] and state["w"].shape == (4, 3)
    np.testing.assert_allclose(X @ state["w"] + state["b"], model.predict(X), rtol=1e-5, atol=1e-6)
    model.save(tmp_path / "m.calc")
    np.testing.assert_array_equal(cv.load(tmp_path / "m.calc").predict(X), model.predict(X))


def test_copies_and_texts_of_layers():
    net, X = dense(), np.ones((2, 4), "float32")
    again = pickle.loads(pickle.dumps(net))
    np.testing.assert_array_equal(cv.Model(again).predict(X), cv.Model(net).predict(X))
    graph = cv.build_graph(net, (4,), "mse", "adam")
    model = cv.Model(cv.read_graph(graph.text()))
    assert model.state_dict()["w"].tolist() == W.tolist()
    assert cv.read_graph(graph.text()).text() == graph.text()


def test_weights_are_those_of_the_file():
    """Of a product with either form of a weight, and after a turn."""
    net = cv.load_onnx(parsed(
        "net (float[N, 4] x) => (float[N, 2] y) {a = MatMul(x, w) b = Gemm <transB = 1> (a, u, c) d = Transpose <perm = [1, 0]> (v) y = MatMul(b, d)}",
        w=W, u=np.arange(15).reshape(5, 3), c=np.ones(5), v=np.arange(10).reshape(2, 5),
    ))  # fmt: skip
    state = cv.Model(net, loss="mse", optimizer="adam").state_dict()
    assert {name: x.shape for name, x in state.items()} == {"w": (4, 3), "u": (5, 3), "c": (5,), "v": (2, 5)}
    np.testing.assert_array_equal(state["u"], np.arange(15).reshape(5, 3))
    assert cv.Model(net).state_dict().keys() == state.keys()


def test_some_weights_train():
    net = cv.load_onnx(parsed(DENSE, w=W, b=[1, 2, 3]), trainable=["b"])
    model = cv.Model(net, loss="mse", optimizer=cv.SGD(0.1))
    model.step(np.ones((4, 4)), np.zeros((4, 3)))
    assert (model.state_dict()["w"] == W).all() and (model.state_dict()["b"] != [1, 2, 3]).all()
    for wrong in ("c", "bb", "", "b/"):
        with pytest.raises(cv.CalcError, match=f"no weight is called '{wrong}'"):
            cv.load_onnx(parsed(DENSE, w=W, b=[1, 2, 3]), trainable=[wrong])


def test_norms_train_and_frozen_ones_stay():
    text = "net (float[N, 2, 3] x) => (float[N, 2, 3] y) {y = BatchNormalization(x, s, t, m, v)}"
    file = parsed(text, s=[1, 2], t=[0, 1], m=[0.5, 0], v=[1, 2])
    X = np.random.default_rng(0).standard_normal((8, 2, 3)) + 3
    for trainable in (True, False):
        net = cv.load_onnx(file, trainable=trainable)
        g = cv.CalcGraph()
        x, t, w = g.placeholder("x", (None, 2, 3)), g.placeholder("t", (None, 2, 3)), g.parameter("w", (1,), "ones")
        with g.path("learn", backward=True) as learn:
            learn.minimize(cv.mse(net.call(x, training=True)[0] * w, t), cv.SGD(0.1))
        with g.path("predict") as predict:
            predict.output = net.call(x, training=False)[0]
        model = cv.Model(g, batch_size=8)
        model.step(X, X)
        assert (model.state_dict()["m"] == [0.5, 0]).all() != trainable


def test_sizes_that_depend_on_the_batch():
    """Computed from Shape, by Gather, Concat and arithmetic, for any batch."""
    net = cv.load_onnx(parsed(
        """net (float[N, 4, 6] x) => (float[A, 3] y) {
            s = Shape(x)  zero = Constant <value_ints = [0]> ()  last = Constant <value_ints = [2]> ()
            three = Constant <value_ints = [3]> ()
            n = Gather(s, zero)  k = Gather(s, last)  half = Div(k, three)  rows = Mul(n, half)
            four = Constant <value_ints = [4]> ()  all = Mul(rows, four)
            shape = Concat <axis = 0> (all, three)  y = Reshape(x, shape)
        }""",
    ))  # fmt: skip
    model = cv.Model(net, batch_size=5)
    for n in (1, 5):
        X = np.random.default_rng(n).standard_normal((n, 4, 6)).astype("float32")
        np.testing.assert_array_equal(model.run({"x": X})["y"], X.reshape(-1, 3))


def test_graphs_inside():
    text = """net (float[N, 2] x) => (float[N, 2] y, float[3, N, 2] all) {
        three = Constant <value_int = 3> ()  yes = Constant <value = bool {1}> ()
        s = Shape <start = 1> (x)  two = Constant <value_ints = [2]> ()  same = Equal(s, two)  flag = Squeeze(same)
        z = If (flag) <then_branch = then () => (float[N, 2] a) {a = Neg(x)}, else_branch = other () => (float[N, 2] b) {b = Abs(x)}>
        y, all = Loop (three, yes, z) <body = round (int64 i, bool c, float[N, 2] v) => (bool on, float[N, 2] w, float[N, 2] part)
            {on = Identity(c)  w = Add(v, v)  part = Sin(w)}>
    }"""
    model = cv.Model(cv.load_onnx(parsed(text)), batch_size=4)
    X = np.random.default_rng(0).standard_normal((4, 2)).astype("float32")
    found = model.run({"x": X})
    np.testing.assert_allclose(found["y"], -8 * X, rtol=1e-6)
    np.testing.assert_allclose(found["all"], np.sin([-2 * X, -4 * X, -8 * X]), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- rows
def rows(model):
    return sorted(model.program.instructions[row[0]].name for row in model.program.rows)


@pytest.mark.parametrize("by", ["script", "program"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_an_encoder_has_the_rows_of_our_own(by, activation):
    """What exporters write as many nodes is joined: linear layers, attention, GELU; views cost no row."""
    layer = torch.nn.TransformerEncoderLayer(16, 4, 24, 0.0, batch_first=True, activation=activation)
    module = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    net = cv.load_onnx(exported(module, (torch.zeros(2, 5, 16),), [0], by))
    own = nn.TransformerEncoderLayer(4, dim_feedforward=24, dropout=0.0, activation=activation)
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 5, 16))
    with g.path("predict") as predict:
        predict.output = nn.Sequential(own, copy.deepcopy(own)).build(x, training=False)
    assert rows(cv.Model(net)) == rows(cv.Model(g))


def test_joined_nodes_are_those_of_the_file():
    """A mask, a scale on either side, and what only looks like it."""
    head = "net (float[N, 2, 5, 4] q, float[N, 2, 5, 4] k, float[N, 2, 5, 4] v, float[5, 5] m) => (float[N, 2, 5, 4] y, float[N, 2, 5, 5] z)"
    body = """{t = Transpose <perm = [0, 1, 3, 2]> (k)  s = Constant <value_float = 0.7> ()  d = Constant <value_float = 2.0> ()
        a = Mul(q, s)  b = Div(t, d)  p = MatMul(a, b)  SCORES  c = Softmax <axis = -1> (e)  y = MatMul(c, v)  z = Identity(LAST)}"""
    arrays = {n: np.random.default_rng(0).standard_normal((3, 2, 5, 4)).astype("float32") for n in "qkv"}
    arrays["m"] = np.random.default_rng(1).standard_normal((5, 5)).astype("float32")
    scores = arrays["q"] * 0.35 @ arrays["k"].transpose(0, 1, 3, 2)
    for text, plus, last, joined in (
        ("e = Add(p, m)", arrays["m"], "p", False),
        ("e = Add(m, p)", arrays["m"], "m2", True),
        ("e = Neg(p)", None, "m2", False),
    ):
        text = body.replace("SCORES", f"{text} m2 = Add(m, m)").replace("LAST", last)
        net = cv.load_onnx(
            parsed(
                head.replace("float[N, 2, 5, 5] z", "float[A, B] z" if last == "m2" else "float[N, 2, 5, 5] z") + text
            )
        )
        model = cv.Model(net, batch_size=3)
        e = -scores if plus is None else scores + plus
        shares = np.exp(e - e.max(-1, keepdims=True))
        np.testing.assert_allclose(
            model.run(arrays)["y"], shares / shares.sum(-1, keepdims=True) @ arrays["v"], rtol=1e-4, atol=1e-5
        )
        assert any("attention" in name for name in rows(model)) == joined


# ---------------------------------------------------------------- files
def test_arrays_in_other_files(tmp_path):
    model, path = parsed(DENSE, w=W, b=[1, 2, 3]), tmp_path / "net.onnx"
    onnx.save(model, path, save_as_external_data=True, location="net.data", size_threshold=0)
    X = np.ones((2, 4), "float32")
    np.testing.assert_allclose(cv.Model(cv.load_onnx(path)).predict(X), X @ W + [1, 2, 3], rtol=1e-6)
    with pytest.raises(cv.CalcError, match="give the model's path"):
        cv.load_onnx(path.read_bytes())
    (tmp_path / "net.data").write_bytes(b"1234")
    with pytest.raises(cv.CalcError, match="'net.data' ends before them"):
        cv.load_onnx(path)


@pytest.mark.parametrize("place", ["../secret", "/etc/passwd", "sub/../../secret", "link"])
def test_arrays_outside_the_folder_are_refused(tmp_path, place):
    (tmp_path / "secret").write_bytes(bytes(1000))
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path / "secret")
    model = parsed(DENSE, w=W, b=[1, 2, 3])
    t = model.graph.initializer[0]
    t.ClearField("raw_data")
    t.data_location = TensorProto.EXTERNAL
    t.external_data.append(onnx.StringStringEntryProto(key="location", value=place))
    (folder / "net.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(cv.CalcError, match="outside the model's folder"):
        cv.load_onnx(folder / "net.onnx")


WHOLE = [
    parsed(DENSE, w=W, b=[1, 2, 3]),
    parsed(
        """net (float[N, 2, 8, 8] x) => (float[N, 4] y) {a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w)
        b = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (a)  s = Shape <start = 0, end = 1> (b)  k = Constant <value_ints = [64]> ()
        r = Concat <axis = 0> (s, k)  f = Reshape(b, r)  y = Gemm <transB = 1> (f, v)}""",
        w=np.ones((4, 2, 3, 3)), v=np.ones((4, 64)),
    ),
    parsed(
        """net (float[N, 2] x) => (float[N, 2] y) {three = Constant <value_int = 3> ()  yes = Constant <value = bool {1}> ()
        y = Loop (three, yes, x) <body = round (int64 i, bool c, float[N, 2] v) => (bool on, float[N, 2] w)
        {on = Identity(c)  w = Add(v, v)}>}"""
    ),
    parsed(
        """net (float[N, 5, 3] x) => (float[N, 5, 4] y) {t = Transpose <perm = [1, 0, 2]> (x)  one = Constant <value_ints = [1]> ()
        a, h, c = LSTM <hidden_size = 4> (t, w, r, b)  z = Squeeze(a, one)  y = Transpose <perm = [1, 0, 2]> (z)}""",
        w=np.ones((1, 16, 3)), r=np.ones((1, 16, 4)), b=np.ones((1, 32)),
    ),
]  # fmt: skip


@pytest.mark.time_limit(600)
def test_mutated_files(part):
    """An error, or the answer that ONNX's reference gives; never a crash, and no more memory than files of some kilobytes justify."""
    rng, loaded = np.random.default_rng(part), 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for k in range(MUTATED):
        mutated = bytearray(WHOLE[k % len(WHOLE)].SerializeToString())
        for at in rng.integers(0, len(mutated), rng.integers(1, 4)):
            mutated[at] = rng.integers(256)
        file = bytes(mutated[: rng.integers(len(mutated))] if rng.random() < 0.2 else mutated)
        try:
            net = cv.load_onnx(file)
        except cv.CalcError:
            continue
        loaded += 1
        if loaded % 40 == 0 and all(dtype is None for _, dtype in net.inputs.values()):
            beside_the_reference(net, file, rng)
    assert loaded > MUTATED // 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 19  # kilobytes


def beside_the_reference(net, file, rng):
    X = {
        n: rng.standard_normal([2 if s is None else s for s in shape]).astype("float32")
        for n, (shape, _) in net.inputs.items()
    }
    with np.errstate(all="ignore"):
        try:
            wanted = ReferenceEvaluator(onnx.load_from_string(file)).run(None, X)
        except Exception:  # whatever the reference raises of a damaged file
            return
        found = cv.Model(net, batch_size=2).run(X)
    for got, want in zip(found.values(), wanted):
        finite = np.isfinite(want)  # sums of numbers beyond float32 depend on their order
        size = max(1, abs(want[finite]).max(initial=0))
        np.testing.assert_allclose(got[finite], want[finite], rtol=1e-3, atol=1e-3 * size)


def test_files_that_are_none(tmp_path):
    with pytest.raises(cv.NoSuchFile, match="there is no file"):
        cv.load_onnx(tmp_path / "none.onnx")
    for text in (b"", b"no file of ONNX", b"\x08\x0a"):
        with pytest.raises(cv.CalcError, match="is no ONNX file"):
            cv.load_onnx(text)


# ---------------------------------------------------------------- what is refused
REFUSED = {
    "operators": ("net (float[N, 4] x) => (float[N, 4] y) {a = NonMaxSuppressionLike(x) y = Strange(a)}", "Strange"),
    "random": ("net (float[N, 4] x) => (float[N, 4] y) {r = RandomNormalLike(x) y = Add(x, r)}", "RandomNormalLike"),
    "of data": ("net (float[N, 4] x) => (float[M] y) {k = NonZero(x) s = Shape(k) f = Cast <to = 1> (s) y = Identity(f)}", "NonZero"),
    "open sizes": ("net (float[N, T] x) => (float[N, T] y) {y = Tanh(x)}", r"sizes=\{'T': 128\}"),
    "shapes": ("net (float[N, 4] x, int64[2] s) => (float[A, B] y) {y = Reshape(x, s)}", r"values=\{'s': "),
    "texts": ("net (string[N] x) => (string[N] y) {y = Identity(x)}", "type"),
    "the batch in numbers": ("net (float[N, 4] x) => (float[N, 4] y) {s = Shape <end = 1> (x) f = Cast <to = 1> (s) y = Mul(x, f)}", "batch's size"),
    "comparisons": (
        """net (float[N, 4] x) => (float[N, 4] y) {s = Shape <end = 1> (x) five = Constant <value_ints = [5]> () c = Less(s, five) f = Squeeze(c)
        y = If (f) <then_branch = a () => (float[N, 4] p) {p = Neg(x)}, else_branch = b () => (float[N, 4] q) {q = Abs(x)}>}""", "compares",
    ),
    "conditions": (
        """net (float[N, 4] x, bool c) => (float[N, 4] y) {
        y = If (c) <then_branch = a () => (float[N, 4] p) {p = Neg(x)}, else_branch = b () => (float[N, 4] q) {q = Abs(x)}>}""", r"values=\{'c'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    text, told = REFUSED[case]
    with pytest.raises(cv.CalcError, match=told) as error:
        cv.load_onnx(parsed(text))
    assert "load_onnx" in str(error.value)


def test_wrong_arguments():
    file = parsed(DENSE, w=W, b=[1, 2, 3])
    for how, told in (
        ({"sizes": {"z": 3}}, "no input or size is called 'z'"), ({"values": {"z": 3}}, "no input is called 'z'"),
        ({"batch_axes": [0, 1]}, "2 axes for 1 inputs"), ({"batch_axes": {"z": 1}}, "no input is called 'z'"), ({"trainable": 3}, "trainable"),
    ):  # fmt: skip
        with pytest.raises(cv.CalcError, match=told):
            cv.load_onnx(file, **how)
    with pytest.raises(cv.CalcError, match="a path, bytes"):
        cv.load_onnx(3)
    assert cv.load_onnx(file, sizes={"N": 7}).outputs == {"y": (7, 3)}
    two = cv.load_onnx(parsed("net (float[N, 4] x, float[N, 4] z) => (float[N, 4] y) {y = Add(x, z)}"))
    with pytest.raises(cv.CalcError, match="has the inputs x, z: build a graph"):
        cv.Model(two, loss="mse", optimizer="adam")
    assert (cv.Model(two).run({"x": np.ones((2, 4)), "z": np.ones((2, 4))})["y"] == 2).all()


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(cv.MissingExtra, match=r"calcvm\[onnx\]"):
        cv.load_onnx(b"")


def test_nodes_without_names():
    """As `onnx.helper` makes them."""
    node = helper.make_node("Relu", ["x"], ["y"])
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 3]) for n in "xy")
    net = cv.load_onnx(helper.make_model(helper.make_graph([node], "g", [x], [y])))
    assert cv.Model(net).predict(np.full((1, 3), -1.0)).tolist() == [[0, 0, 0]]


# ---------------------------------------------------------------- found by users
def constant(name, array):
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(array, np.float32), name))


def test_weights_in_constant_nodes():
    """As some exporters write all of them: they train, freeze, and have names."""
    file = parsed("net (float[N, 2, 3] x) => (float[N, 2, 3] y) {y = BatchNormalization(x, s, t, m, v)}")
    for name, array in {"s": [1, 2], "t": [0, 1], "m": [0.5, 0], "v": [1, 2]}.items():
        file.graph.node.insert(0, constant(name, array))
    X = np.random.default_rng(0).standard_normal((8, 2, 3)) + 3
    for trainable, changed in ((True, "stmv"), (False, ""), (["t"], "tmv")):
        model = cv.Model(
            cv.load_onnx(file, trainable=trainable) >> nn.Flatten() >> nn.Linear(6),
            input_shape=(2, 3),
            loss="mse",
            optimizer=cv.SGD(0.1),
        )
        before = model.state_dict()
        model.step(X, X.reshape(8, 6))
        found = [n for n, array in model.state_dict().items() if n[0] == "0" and (array != before[n]).any()]
        assert sorted(n.split(".")[-1] for n in found) == sorted(changed)


def test_quotients_are_rounded_as_quotients():
    """23.499998 is 23; times 1 / 0.05 it would be 23.5, and so 24."""
    text = "net (float[N] x) => (float[N] y) {z = QuantizeLinear(x, s) y = DequantizeLinear(z, s)}"
    file = parsed(text)
    file.graph.initializer.append(numpy_helper.from_array(np.float32(0.05), "s"))
    X = np.float32(np.arange(200) * 0.025)
    found = cv.Model(cv.load_onnx(file), batch_size=200).run({"x": X})["y"]
    np.testing.assert_array_equal(found, np.round(X / np.float32(0.05)).astype("float32") * np.float32(0.05))


def test_outputs_that_are_inputs_or_one_another():
    net = cv.load_onnx(parsed("net (float[N, 2] x) => (float[N, 2] x, float[N, 2] y, float[N, 2] y) {y = Neg(x)}"))
    found = cv.Model(net).run({"x": np.ones((1, 2))})
    assert [y.tolist() for y in found.values()] == [[[1, 1]], [[-1, -1]], [[-1, -1]]]


def test_a_file_without_data_is_refused():
    with pytest.raises(cv.CalcError, match="has no input of data"):
        cv.load_onnx(parsed("net (float[N, 0] x) => (float[N, 0] y) {y = Relu(x)}"))
    with pytest.raises(cv.CalcError, match=r"the output 'y' of net: it computes with the batch's size"):
        cv.load_onnx(parsed("net (float[N, 2] x) => (int64[2] y) {y = Shape(x)}"))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_hardmax_of_old_opsets(axis):
    """It goes over all axes from one on."""
    text = f'<ir_version: 7, opset_import: ["" : 11]> net (float[2, 3, 4] x) => (float[2, 3, 4] y) {{y = Hardmax <axis = {axis}> (x)}}'
    X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype("float32")
    flat = X.reshape(int(np.prod(X.shape[:axis])), -1)
    wanted = (flat == flat.max(1, keepdims=True)).reshape(X.shape)
    np.testing.assert_array_equal(cv.Model(cv.load_onnx(parser.parse_model(text))).run({"x": X})["y"], wanted)


def test_a_slice_of_the_batch_that_ends_far_away():
    text = """net (float[N, 2] x) => (float[N, 2] y) {a = Constant <value_ints = [0]> () e = Constant <value_ints = [1000000000]> ()
        y = Slice(x, a, e, a)}"""
    X = np.random.default_rng(0).standard_normal((3, 2)).astype("float32")
    np.testing.assert_array_equal(cv.Model(cv.load_onnx(parsed(text))).predict(X), X)


@pytest.mark.parametrize("how", ["Mul", "Add"])
def test_constants_of_several_times_the_batch(how):
    """Of a multiple there are as many; of the batch and two more there is no constant."""
    text = f"""net (float[N, 2] x) => (float[N, 2] y, float[1] z) {{one = Constant <value_ints = [1]> ()
        s = Shape <end = 1> (x)  two = Constant <value_ints = [2]> ()  n = {how}(s, two)
        c = ConstantOfShape <value = float {{3.0}}> (n)  z = ReduceSum(c)  y = Add(x, z)}}"""
    if how == "Add":
        with pytest.raises(cv.UnsupportedOperator, match=r"a constant of the shape \(B\+2,\)"):
            cv.load_onnx(parsed(text))
        return
    model = cv.Model(cv.load_onnx(parsed(text)), batch_size=4)
    for n in (1, 4):
        assert model.run({"x": np.zeros((n, 2))})["z"].item() == 3 * 2 * n


def test_sizes_that_the_file_has_are_not_changed():
    file = parsed("net (float[N, 3] x) => (float[N, 3] y) {y = Neg(x)}")
    for sizes in ((None, 4), (None, 3, 1), (None,)):
        with pytest.raises(cv.CalcError, match=r"the file says \(open, 3\)"):
            cv.load_onnx(file, sizes={"x": sizes})
    assert cv.load_onnx(file, sizes={"x": (5, 3)}).outputs == {"y": (5, 3)}


@pytest.mark.parametrize("size", ["Add", "Mul"])
def test_shapes_that_fit_one_batch_alone_are_refused(size):
    """(B, 3) has not the elements of B + 2, nor of 2 B."""
    text = f"""net (float[N, 3] x) => (float[M] y) {{s = Shape <end = 1> (x)  two = Constant <value_ints = [2]> ()  n = {size}(s, two)
        y = Reshape(x, n)}}"""
    with pytest.raises(cv.UnsupportedOperator, match="has not the elements of"):
        cv.load_onnx(parsed(text))


def test_the_number_of_the_best_from_the_batch_is_refused():
    text = """net (float[N, 3] x) => (float[N, K] y, int64[N, K] i) {s = Shape <end = 1> (x)  y, i = TopK(x, s)}"""
    with pytest.raises(cv.UnsupportedOperator, match="TopK in net: k depends on the batch"):
        cv.load_onnx(parsed(text))


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("opset", [9, 10])
def test_resizing_of_old_opsets(opset, mode):
    """Places are x / scale, and the nearest one is below."""
    name, n = ("Upsample", "Resize")[opset - 9], 5
    text = f"""<ir_version: 5, opset_import: ["" : {opset}]> net (float[1, 1, {n}] x) => (float[1, 1, M] y)
        {{s = Constant <value = float[3] {{1.0, 1.0, 1.6}}> ()  y = {name} <mode = "{mode}"> (x, s)}}"""
    x = np.random.default_rng(0).standard_normal(n).astype("float32")
    at = np.arange(8) / 1.6
    wanted = x[np.floor(at).astype(int)] if mode == "nearest" else np.interp(at, np.arange(n), x)
    found = cv.Model(cv.load_onnx(parser.parse_model(text))).run({"x": x.reshape(1, 1, n)})["y"]
    np.testing.assert_allclose(found.ravel(), wanted, rtol=1e-5, atol=1e-6)


def test_one_node_by_the_backend():
    from calcvm.onnx import Backend

    a, b = np.ones((2, 3), "float32"), np.arange(12, dtype="float32").reshape(3, 4)
    (found,) = Backend.run_node(helper.make_node("MatMul", ["a", "b"], ["y"]), [a, b])
    np.testing.assert_array_equal(found, a @ b)
    with pytest.raises(cv.CalcError, match="1 arrays for the inputs a, b"):
        Backend.run_node(helper.make_node("MatMul", ["a", "b"], ["y"]), [a])
    with pytest.raises(cv.CalcError, match="runs on the CPU"):
        Backend.prepare(parsed(DENSE, w=W, b=[1, 2, 3]), "CUDA")


@pytest.mark.parametrize(
    "node",
    [
        "y = MaxPool <kernel_shape = [3], dilations = [2]> (x)",
        "y = MaxPool <kernel_shape = [4]> (x)",
        "y = AveragePool <kernel_shape = [3], dilations = [2]> (x)",
        "y = LpPool <kernel_shape = [3], dilations = [2]> (x)",
    ],
)
def test_windows_beyond_the_input_are_refused(node):
    with pytest.raises(cv.CalcError, match="Pool in net"):
        cv.load_onnx(parsed(f"net (float[N, 2, 3] x) => (float[N, 2, K] y) {{{node}}}"))


def test_integers_from_ranges_are_those_of_the_reference():
    """The scale is a quotient by 255, and integers are rounded as quotients are."""
    file = parsed("net (float[8] x) => (uint8[8] y, float s, uint8 z) {y, s, z = DynamicQuantizeLinear(x)}")
    model, reference, rng = cv.Model(cv.load_onnx(file)), ReferenceEvaluator(file), np.random.default_rng(0)
    differ = 0
    for _ in range(300):
        x = np.float32(np.round(rng.normal(0, 1.5, 8), 2))
        found = [*model.run({"x": x}).values()]
        differ += any((np.asarray(a) != b).any() for a, b in zip(found, reference.run(None, {"x": x})))
    assert differ == 0


def test_outputs_have_their_names_whatever_operators_are_called():
    net = cv.load_onnx(
        parsed(
            "net (float[N, 2] x) => (float[N, 2] add, float[N, 2] tanh) {a = Add(x, x) add = Tanh(a) tanh = Add(add, a)}"
        )
    )
    assert [*cv.Model(net).run({"x": np.ones((1, 2))})] == ["add", "tanh"] == [*net.outputs]
