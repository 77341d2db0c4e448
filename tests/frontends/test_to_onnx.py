"""Files of ONNX that calcvm writes, beside ONNX Runtime and read again: operators, layers, networks, weights, and what is refused."""

from __future__ import annotations

import copy
import io
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

import calcvm as cv
from calcvm import nn
from calcvm.errors import MissingExtra
from calcvm.frontends.onnx_writer import WRITERS, written
from calcvm.graph import CalcGraph, applied
from calcvm.ops import OPS
from calcvm.ops.layouts import seen
from tests.conftest import whole_of
from tests.frontends.networks import networks

onnxruntime.set_default_logger_severity(4)
BATCH = 40  # the most of an example
LEFT = {  # examples of operators that have no counterpart, and why
    "conv_transpose": ({3}, "output_padding"),
    **dict.fromkeys(("cumprod", "cummax", "cummin", "logcumsumexp"), ({3, 5}, "the axis of a running result depends on the batch")),
    "crop": ({0, 1, 2, 3}, "its places are random"),
}  # fmt: skip
OF_TRAINING = {"batch_norm", "center", "dropout", "dropout_mask"}
OF_BYTES = {"linear_int8", "conv_int8", "max_pool_int8", "add_int8"}


def run(file, data):
    """What ONNX Runtime computes."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_outputs()]
    return dict(zip(names, session.run(None, {x.name: data[x.name] for x in session.get_inputs()})))


def check(model, data, file=None, within=1e-5):
    """The model's results beside those of its file."""
    file = file or model.to_onnx()
    found, wanted = run(file, data), model.run(data)
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        assert found[name].dtype == want.dtype
        np.testing.assert_allclose(found[name], want, rtol=within, atol=within, err_msg=name)
    return file


def first(data, n):
    return {name: x[:n] for name, x in data.items()}


# ---------------------------------------------------------------- operators
def pytest_generate_tests(metafunc):
    if {"operator", "k"} <= {*metafunc.fixturenames}:
        whole = whole_of(metafunc)
        examples = [(name, k) for name in WRITERS for k, e in enumerate(OPS[name].examples) if not e.bench]
        metafunc.parametrize(("operator", "k"), [(name, k) for name, k in examples if whole or k % 2 == 0])


def test_all_operators_of_inference_are_written():
    others = {name for name, spec in OPS.items() if spec.category not in ("optimizer", "system")} - WRITERS.keys()
    assert others == OF_TRAINING | OF_BYTES


def of_example(name, k):
    """A graph of an operator's example, and data for a batch."""
    spec, example = OPS[name], OPS[name].examples[k]
    g, rng, types = CalcGraph(), np.random.default_rng(k), {}
    shapes = {slot: seen(s, spec.layouts.get(slot, "")) for slot, s in zip(spec.inputs, example.shapes)}
    for slot in shapes:
        kind = spec.types.get(slot, "float")
        kind = example.types.get(kind, kind)
        types[slot] = kind if kind in ("bool", "uint8", "int8", "int32", "int64", "float32", "float64") else None
    given = [g.placeholder(slot, shape, types[slot]) for slot, shape in shapes.items()]
    with g.path("predict") as predict:
        applied(spec, *given, **example.attrs)
        predict.output = tuple(predict.operations[-1].outputs.values())

    def data(batch):
        found = {}
        for slot, shape in shapes.items():
            sizes = [batch if n is None else n for n in shape]
            low, high = (0, example.integer[slot]) if slot in example.integer else (example.low, example.high)
            if name == "binary_cross_entropy" and slot == "t":
                low, high = 0, 1
            low = 0 if types[slot] in ("bool", "uint8") else low
            draw = rng.integers if types[slot] or slot in example.integer else rng.uniform
            found[slot] = draw(int(low) if draw == rng.integers else low, high, sizes).astype(types[slot] or "float32")
        return found

    batches = (example.batch or 3, 1) if any(None in s for s in shapes.values()) else (1,)
    return g, [data(b) for b in batches]


def test_operators(operator, k):
    g, batches = of_example(operator, k)
    left, why = LEFT.get(operator, ((), ""))
    if k in left:
        with pytest.raises(cv.UnsupportedOperator, match=why):
            written(g.paths["predict"], {}, {}, "float32")
        return
    model = cv.Model(g, batch_size=BATCH, workers=1)
    file = model.to_onnx()
    for data in batches:
        check(model, data, file, 2e-5)


def of_graph(build, *inputs):
    """A model of a function of placeholders: (shape, type)."""
    g = cv.CalcGraph()
    given = [g.placeholder(f"x{k}", shape, kind) for k, (shape, kind) in enumerate(inputs)]
    with g.path("predict") as predict:
        made = build(*given)
        predict.output = tuple(made) if isinstance(made, (list, tuple)) else made
    return cv.Model(g, batch_size=8, workers=1)


@pytest.mark.parametrize("kind", ["bool", "uint8", "int8", "int32", "int64", "float32", "float64"])
def test_types(kind):
    def build(x, y):
        chosen = cv.where(x > 1, x, y)
        moved = cv.transpose(cv.concat([x, y], axis=1)[:, 1:3])
        names = "bool", "uint8", "int8", "int32", "int64", None, "float32", "float64"
        casts = [cv.cast(x, to) for to in names if to != kind]
        return (
            cv.equal(x, y),
            x <= y,
            x > y,
            cv.apply("not_equal", x, y),
            chosen,
            moved,
            cv.argmax(cv.cast(x, None), 1),
            *casts,
        )

    model = of_graph(build, ((None, 3), kind), ((None, 3), kind))
    x, y = np.random.default_rng(0).integers(0, 3, (2, 5, 3)).astype(kind)
    check(model, {"x0": x, "x1": y})


def test_floats_become_the_nearest_bytes():
    model = of_graph(lambda x: [cv.cast(x, "uint8"), cv.cast(x, "int8"), cv.cast(x, "bool")], ((None,), None))
    check(model, {"x0": np.array([-300, -1.5, -0.5, 0, 0.5, 127.9, 200, 300], "float32")})


def test_numbers_of_any_size():
    x = np.array([-1e30, -200, -30, -1e-6, 0, 1e-6, 0.3, 30, 88], "float32")
    functions = [cv.expm1, cv.tanh, cv.sigmoid, cv.softplus, cv.elu, cv.selu, cv.silu, cv.gelu, cv.hard_swish, cv.relu6]
    model = of_graph(lambda v: [f(v) for f in functions], ((None,), None))
    model = cv.Model(model._source[0], batch_size=len(x))
    check(model, {"x0": x})
    small = of_graph(cv.log1p, ((None,), None))
    check(small, {"x0": np.array([-0.9, -1e-6, 0, 1e-6, 0.7, 1e30], "float32")})
    near = run(small.to_onnx(), {"x0": np.array([1e-6], "float32")})
    assert next(iter(near.values())) == pytest.approx(1e-6, rel=1e-6)


def test_reductions_over_no_axes():
    def build(x, y):
        over_none = [
            cv.apply(name, x, axes=(), keepdims=True) for name in ("sum", "max", "logsumexp", "sum_squares", "var")
        ]
        return *over_none, cv.apply("sum", cv.mean(y), keepdims=True), cv.std(x, None, 1), cv.var(x, 0, 1, True)

    model = of_graph(build, ((None, 3), None), ((None, 2), None))
    check(model, {f"x{k}": np.random.default_rng(k).standard_normal((4, 3 - k)).astype("float32") for k in (0, 1)})


def test_states_of_sequences_without_steps_stay():
    def build(x, h, c, lengths):
        g = x.graph
        w, v = g.parameter("w", (4, 12), "normal"), g.parameter("v", (3, 12), "normal")
        return cv.lstm(x, w, v, h0=h, c0=c, lengths=lengths, reverse=True)

    sizes = ((None, 5, 4), None), ((None, 3), None), ((None, 3), None), ((None,), "int64")
    rng = np.random.default_rng(0)
    data = {f"x{k}": rng.standard_normal((4, *shape[1:])).astype("float32") for k, (shape, _) in enumerate(sizes[:3])}
    check(of_graph(build, *sizes), {**data, "x3": np.array([0, 5, 2, 1])})


def test_queries_that_see_no_key():
    def build(q, k, v, lengths):
        return cv.attention(q, k, v, heads=2, lengths=lengths), cv.attention(
            q, k, v, heads=2, bias=np.full((3, 5), -np.inf)
        )

    rng = np.random.default_rng(0)
    data = {f"x{k}": rng.standard_normal((3, n, 4)).astype("float32") for k, n in enumerate((3, 5, 5))}
    model = of_graph(build, *(((None, n, 4), None) for n in (3, 5, 5)), ((None,), "int64"))
    check(model, {**data, "x3": np.array([0, 5, 2])})


# ---------------------------------------------------------------- networks of PyTorch
NETWORKS = networks()


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name):
    """A file for every batch, which is read again with the weights by their names, but for recurrent layers'."""
    module, example = NETWORKS[name]
    inputs = example if isinstance(example, tuple) else (example,)
    axes = {"states": (0, 1, 1)}.get(name)
    how = {} if axes is None else {"batch_axes": axes}
    model = cv.Model(cv.from_torch(copy.deepcopy(module).eval(), *inputs, **how), batch_size=4, workers=1)
    data = {name: x.numpy() for name, x in zip(model.roles.inputs, inputs)}
    file = check(model, data)
    if axes is None:
        check(model, first(data, 1), file)
    again = cv.Model(cv.load_onnx(file, **how), batch_size=4, workers=1)
    for got, want in zip(again.run(data).values(), model.run(data).values(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    weights, theirs = again.state_dict(), model.state_dict()
    kept = {n for n in theirs if "rnn." not in n and "weight_hh" not in n and "weight_ih" not in n and "bias_" not in n}
    assert kept - weights.keys() <= {"head.weight", "mask"}  # which is tied, and which is no weight
    for n in kept & weights.keys():
        np.testing.assert_array_equal(weights[n], theirs[n])


# ---------------------------------------------------------------- layers and the zoo
IMAGES = {
    "elu": nn.ELU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "selu": nn.SELU(), "softplus": nn.Softplus(), "mish": nn.Mish(),
    "silu": nn.SiLU(), "hard_sigmoid": nn.HardSigmoid(), "hard_swish": nn.HardSwish(), "relu6": nn.ReLU6(), "leaky": nn.LeakyReLU(0.2),
    "softmax": nn.Softmax(), "log_softmax": nn.LogSoftmax(), "prelu": nn.PReLU(), "scale": nn.Scale(2.0, -1.0), "relu": nn.ReLU(),
    "sigmoid": nn.Sigmoid(), "tanh": nn.Tanh(), "dropout": nn.Dropout(0.5), "dropout2d": nn.Dropout2d(0.3), "center": nn.Center(),
    "batch_norm": nn.BatchNorm(), "group_norm": nn.GroupNorm(2), "instance_norm": nn.InstanceNorm(), "layer_norm": nn.LayerNorm(),
    "lrn": nn.LocalResponseNorm(3), "lrn_even": nn.LocalResponseNorm(2), "rms_norm": nn.RMSNorm(), "flatten": nn.Flatten(),
    "conv": nn.Conv2d(6, 3, stride=2, padding=1, groups=2), "dilated": nn.Conv2d(3, 3, dilation=2, bias=False),
    "transposed": nn.ConvTranspose2d(4, 3, stride=2), "upsample": nn.Upsample(2), "linear": nn.Upsample(1.7, mode="linear"),
    "corners": nn.Upsample(size=(5, 9), mode="linear", align_corners=True), "nearest": nn.Upsample(size=(5, 9)),
    "pad": nn.Pad(1, value=2.0), "reflect": nn.Pad(2, "reflect"), "edge": nn.Pad(2, "edge"), "wrap": nn.Pad(2, "wrap"),
    "global_avg": nn.GlobalAvgPool(), "global_max": nn.GlobalMaxPool(), "adaptive_avg": nn.AdaptiveAvgPool((3, 2)),
    "adaptive_max": nn.AdaptiveMaxPool((3, 4)), "lp": nn.LPPool2d(2.0, 2), "max_pool": nn.MaxPool2d(3, stride=2, padding=1),
    "max_ceil": nn.MaxPool2d(3, stride=2, ceil_mode=True), "avg_pool": nn.AvgPool2d(3, stride=2, padding=1),
    "avg_ceil": nn.AvgPool2d(3, stride=2, ceil_mode=True), "residual": nn.Residual(nn.Conv2d(4, 3, padding=1)),
    "concat": nn.Concat(nn.Conv2d(4, 1), nn.ReLU()), "normalize": nn.Normalize(0.5, 2.0), "crop": nn.RandomCrop(3, 1),
    "flip": nn.RandomHorizontalFlip(), "flip2": nn.RandomVerticalFlip(), "shift": nn.RandomShift(1), "reshape": nn.Reshape(7, 24),
    "volumes": nn.Reshape(2, 2, 7, 6) >> nn.Conv3d(3, 2) >> nn.MaxPool3d(1) >> nn.AvgPool3d(1) >> nn.ConvTranspose3d(2, 2),
}  # fmt: skip
SEQUENCES = {
    "rnn": nn.RNN(5), "relu": nn.RNN(5, nonlinearity="relu"), "last": nn.RNN(5, return_sequences=False), "gru": nn.GRU(5, bidirectional=True),
    "lstm": nn.LSTM(5, num_layers=2), "unbiased": nn.LSTM(5, bias=False), "mean": nn.RNN(4) >> nn.MeanOverSteps(),
    "attention": nn.MultiHeadAttention(2), "rotary": nn.MultiHeadAttention(2, kv_heads=1, rotary=10000.0, causal=True),
    "window": nn.MultiHeadAttention(2, causal=True, window=2, softcap=3.0), "encoder": nn.TransformerEncoderLayer(2, dim_feedforward=8),
}  # fmt: skip
LINES = {
    "positions": nn.PositionalEmbedding(9), "causal": nn.CausalConv1d(4, 3), "transposed": nn.ConvTranspose1d(4, 3, stride=2),
    "pools": nn.Conv1d(4, 1) >> nn.MaxPool1d(2) >> nn.AvgPool1d(1),
}  # fmt: skip
ZOO = {
    "lenet": (cv.zoo.lenet(10, width=4), (1, 28, 28)), "vgg11": (cv.zoo.vgg11(5, width=4, size=32), (3, 32, 32)),
    "alexnet": (cv.zoo.alexnet(5, width=8), (3, 224, 224)), "googlenet": (cv.zoo.googlenet(5, width=16, size=64), (3, 64, 64)),
    "mobilenet": (cv.zoo.mobilenet_v2(5, width=8, size=32), (3, 32, 32)), "resnet18": (cv.zoo.resnet18(5, width=8, size=32), (3, 32, 32)),
    "resnet50": (cv.zoo.resnet50(5, width=8, size=32), (3, 32, 32)), "unet": (cv.zoo.unet(2, width=4, size=32), (3, 32, 32)),
    "char_lstm": (cv.zoo.char_lstm(11, width=6, layers=2), (7,)), "gpt": (cv.zoo.gpt(11, width=8, layers=2, heads=2), (7,)),
    "bert": (cv.zoo.bert(11, width=8, layers=2, heads=2), (7,)), "tcn": (cv.zoo.tcn(2, width=4, layers=2), (16, 3)),
    "transformer": (cv.zoo.transformer_classifier(2, width=8, layers=2, heads=2, vocabulary=11), (7,)),
    "seq2seq": (cv.zoo.seq2seq(11, width=6, layers=1, source=4), (7,)),
}  # fmt: skip


def check_network(net, shape, within=1e-5, **options):
    """Batches of 3 and 1 by one file, and the file read again."""
    model = cv.Model(
        net, input_shape=shape, loss=lambda y, t: cv.mean(y), optimizer="adam", batch_size=4, workers=1, **options
    )
    rng = np.random.default_rng(0)
    if model.loaded.own_types.get("input") == "int64":
        data = {"input": rng.integers(0, 11, (3, *shape))}
    else:
        data = {"input": rng.standard_normal((3, *shape)).astype("float32")}
    if options.get("lengths"):
        data["lengths"] = np.array([3, shape[0], 1])
    file = model.to_onnx()
    for n in (3, 1):
        check(model, first(data, n), file, within)
    again = cv.Model(cv.load_onnx(file), batch_size=4, workers=1)
    np.testing.assert_allclose(again.run(data)["output"], model.run(data)["output"], rtol=within, atol=within)


@pytest.mark.parametrize("name", IMAGES)
def test_layers_of_images(name):
    check_network(IMAGES[name] >> nn.Flatten() >> nn.Linear(2), (4, 7, 6))


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("name", SEQUENCES)
def test_layers_of_sequences(name, lengths):
    check_network(SEQUENCES[name] >> nn.Flatten() >> nn.Linear(2), (6, 4), lengths=lengths)


@pytest.mark.parametrize("name", LINES)
def test_layers_of_lines(name):
    check_network(LINES[name] >> nn.Flatten() >> nn.Linear(2), (6, 4))


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo(name):
    check_network(*ZOO[name], 1e-4 if name == "resnet50" else 1e-5)


def test_a_decoder_with_a_memory():
    layer = nn.TransformerDecoderLayer(2, dim_feedforward=8)
    model = of_graph(lambda x, m: layer.build(x, "decoder.", False, m), ((None, 3, 4), None), ((None, 5, 4), None))
    rng = np.random.default_rng(0)
    check(model, {f"x{k}": rng.standard_normal((2, n, 4)).astype("float32") for k, n in enumerate((3, 5))})


# ---------------------------------------------------------------- data, weights and names
def test_weights_are_the_present_ones_by_their_names():
    net = nn.Conv2d(4, 3) >> nn.BatchNorm() >> nn.PReLU() >> nn.Flatten() >> nn.Linear(3)
    model = cv.Model(net, input_shape=(2, 6, 5), optimizer=cv.Adam(0.1), batch_size=16, workers=1, seed=0)
    before = model.to_onnx()
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((64, 2, 6, 5)).astype("float32"), rng.integers(0, 3, 64)
    model.fit(X, y, epochs=3, progress=False)
    file = check(model, {"input": X[:16]})
    stored = {t.name: numpy_helper.to_array(t) for t in file.graph.initializer}
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(stored[name], array, err_msg=name)
    old = {t.name: numpy_helper.to_array(t) for t in before.graph.initializer}
    assert not np.array_equal(old["0.weight"], stored["0.weight"])
    again = cv.Model(cv.load_onnx(file), loss="softmax_cross_entropy", optimizer="adam", batch_size=16, seed=0)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert np.isfinite(again.step(X[:16], y[:16]))


def test_constants_do_not_become_weights():
    bias = np.arange(3, dtype="float32")
    model = of_graph(lambda x: cv.exp(x + bias), ((None, 3), None))
    file = check(model, {"x0": np.ones((2, 3), "float32")})
    assert not cv.Model(cv.load_onnx(file)).state_dict()


def test_the_file_says_what_it_is(tmp_path):
    model = cv.Model(nn.Linear(3) >> nn.Tanh(), input_shape=(2,), loss="mse", optimizer="adam")
    file = model.to_onnx(tmp_path / "net.onnx")
    assert onnx.load(tmp_path / "net.onnx") == file
    stream = io.BytesIO()
    model.to_onnx(stream)
    assert stream.getvalue() == (tmp_path / "net.onnx").read_bytes()
    assert (file.producer_name, file.ir_version, file.graph.name) == ("calcvm", 10, "predict")
    assert file.opset_import[0].version == 21
    assert [(n.name, *n.output) for n in file.graph.node] == [
        ("linear_1/linear_2/Gemm", "linear_2"),
        ("tanh_1/tanh_2/Tanh", "output"),
    ]
    batch = file.graph.input[0].type.tensor_type.shape.dim[0]
    assert batch.dim_param == "batch" and "predict" in file.graph.doc_string


def test_images_with_channels_last_in_bytes():
    before = nn.Normalize([0.5, 0.2, 0.1], [2.0, 1.0, 3.0]) >> nn.RandomHorizontalFlip()
    how = {"preprocess": before, "channels_last": True, "input_dtype": "uint8", "optimizer": "adam", "batch_size": 4}
    model = cv.Model(nn.Conv2d(4, 3) >> nn.Flatten() >> nn.Linear(3), input_shape=(8, 9, 3), **how)
    check(model, {"input": np.random.default_rng(0).integers(0, 255, (4, 8, 9, 3)).astype("uint8")})


@pytest.mark.parametrize("shape", [(8, 9, 1), (1, 6, 1), (6, 1, 2), (1, 1, 3)])
def test_images_with_an_axis_of_one(shape):
    """The elements lie in the same order, and the axes do not."""
    how = {"channels_last": True, "loss": "mse", "optimizer": "adam", "batch_size": 4}
    model = cv.Model(nn.Conv2d(4, 3, padding=1) >> nn.ReLU() >> nn.Flatten() >> nn.Linear(3), input_shape=shape, **how)
    check(model, {"input": np.random.default_rng(0).standard_normal((4, *shape)).astype("float32")})


def test_float64():
    net = nn.Linear(5) >> nn.Tanh() >> nn.LayerNorm() >> nn.Linear(3) >> nn.Softmax()
    model = cv.Model(net, input_shape=(4,), loss="mse", optimizer="adam", dtype="float64", batch_size=4)
    file = check(model, {"input": np.random.default_rng(0).standard_normal((4, 4))}, within=1e-9)
    assert {t.data_type for t in file.graph.initializer} == {onnx.TensorProto.DOUBLE}


def test_outputs_that_are_other_variables():
    def build(x, i):
        y = x @ x.graph.parameter("w", (3, 3))
        return y, cv.reshape(y, (-1,)), cv.stop_gradient(y), cv.cast(i, "int32"), cv.mean(y)

    model = of_graph(build, ((None, 3), None), ((None,), "int64"))
    file = check(model, {"x0": np.ones((2, 3), "float32"), "x1": np.array([1, 2])})
    assert file.graph.output[1].type.tensor_type.shape.dim[0].dim_param == "3*batch"
    model = of_graph(lambda x: (x + 1, x), ((None, 3), None))
    assert [o.name for o in model.to_onnx().graph.output][1] == "x0_2"


def test_only_what_the_outputs_need_is_written():
    model = cv.Model(nn.Linear(3), input_shape=(4,), optimizer="adam")
    file = model.to_onnx()
    assert [x.name for x in file.graph.input] == ["input"] and len(file.graph.node) == 1


@pytest.mark.parametrize("loss", ["mse", "softmax_cross_entropy", "log_cosh"])
def test_losses(loss):
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 4)), g.placeholder("t", (None,) if loss == "softmax_cross_entropy" else (None, 4))
    with g.path("judge") as judge:
        judge.output = getattr(cv, loss)(x, t)
    with g.path("predict") as predict:
        predict.output = cv.softmax(x)
    model = cv.Model(g, batch_size=5)
    rng = np.random.default_rng(0)
    data = {
        "x": rng.standard_normal((5, 4)).astype("float32"),
        "t": rng.integers(0, 2, t.descriptor.current(5)).astype("float32"),
    }
    (found,) = run(model.to_onnx(of="judge"), data).values()
    assert found == pytest.approx(judge.evaluate(data)[judge.output.name], rel=1e-5)


# ---------------------------------------------------------------- states that paths keep
STREAMS = {
    "lstm": cv.zoo.char_lstm(11, width=6),
    "gpt": cv.zoo.gpt(11, width=8, layers=2, heads=2, steps=8),
    "seq2seq": cv.zoo.seq2seq(11, width=6, layers=1, source=3),
}


@pytest.mark.parametrize("name", STREAMS)
def test_states_are_inputs_and_outputs(name):
    model = cv.Model(STREAMS[name], input_shape=(7,), optimizer="adam", stream=True, batch_size=2, workers=1)
    file, stream, rng = model.to_onnx(of="stream"), model.stream(batch=2), np.random.default_rng(0)
    shapes = {x.name: [d.dim_value or 2 for d in x.type.tensor_type.shape.dim] for x in file.graph.input}
    states = {n: np.zeros(shape, "float32") for n, shape in shapes.items() if n != "step"}
    assert states
    for _ in range(6):
        step = rng.integers(0, 11, 2)
        found = run(file, {"step": step, **states})
        np.testing.assert_allclose(found["stream.output"], stream(step), rtol=1e-5, atol=1e-5)
        states = {n: found[f"{n}.next"] for n in states}


# ---------------------------------------------------------------- what is refused
def test_all_operators_without_a_counterpart_are_named():
    net = nn.Linear(3) >> nn.Dropout(0.5) >> nn.BatchNorm() >> nn.Linear(2)
    model = cv.Model(net, input_shape=(4,), loss="mse", optimizer="adam", batch_size=4)
    with pytest.raises(cv.UnsupportedOperator) as error:
        model.to_onnx(of="learn")
    assert "'dropout' of dropout_1 (no operator of ONNX)" in str(error.value)


def test_custom_cells_and_equations_are_named():
    @cv.cell(gates=1)
    def leaky(z, h):
        return 0.9 * h + 0.1 * cv.tanh(z[0])

    g = cv.CalcGraph()
    x, w, v = g.placeholder("x", (None, 5, 4)), g.parameter("w", (4, 3)), g.parameter("v", (3, 3))
    with g.path("predict") as predict:
        y, _ = cv.recurrent(leaky, x, w, v)
        predict.output = cv.exp(y), cv.cumprod(cv.exp(x), 0)
    with pytest.raises(cv.UnsupportedOperator, match=r"'recurrent\w*' of .*; 'cumprod' of cumprod \(the axis") as error:
        written(predict, {"w": np.zeros((4, 3)), "v": np.zeros((3, 3))}, {}, "float32")
    assert "'exp'" not in str(error.value)


def test_models_without_a_graph(tmp_path):
    model = cv.Model(nn.Linear(3), input_shape=(2,), loss="mse", optimizer="adam")
    model.save(tmp_path / "net.calc")
    for other in (cv.load(tmp_path / "net.calc"), model.copy()):
        with pytest.raises(cv.CalcError, match="has no graph"):
            other.to_onnx()
    with pytest.raises(cv.CalcError, match="no path 'nothing'"):
        model.to_onnx(of="nothing")
    with pytest.raises(cv.FileError):
        model.to_onnx(tmp_path / "missing" / "net.onnx")
    with pytest.raises(cv.CalcError, match="not the path of a file"):
        model.to_onnx(3)


def test_a_path_without_output():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3))
    with g.path("predict"):
        cv.exp(x)
    with pytest.raises(cv.CalcError, match="path 'predict' has no output"):
        cv.Model(g, batch_size=2).to_onnx()


def test_weights_that_no_file_holds(monkeypatch):
    monkeypatch.setattr("calcvm.frontends.onnx_writer.graph.MOST", 30)
    model = cv.Model(nn.Linear(3), input_shape=(2,), loss="mse", optimizer="adam")
    with pytest.raises(cv.CalcError, match="the weights have 36 bytes"):
        model.to_onnx()


def test_without_onnx(monkeypatch):
    model = cv.Model(nn.Linear(3), input_shape=(2,), loss="mse", optimizer="adam")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtra, match="to_onnx needs onnx"):
        model.to_onnx()


def test_pytorch_weights_come_back():
    """From PyTorch to a file of ONNX to PyTorch."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    file = cv.Model(cv.from_torch(module, torch.zeros(2, 4)), batch_size=2).to_onnx()
    state = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in file.graph.initializer}
    assert state.keys() == module.state_dict().keys()
    assert all(torch.equal(x, state[n]) for n, x in module.state_dict().items())


@pytest.mark.parametrize(
    "layer",
    [nn.Standardize(np.array([1.0, 2, 3]), np.array([1.0, 2, 4])), nn.BatchNorm(affine=False), nn.Center()],
    ids=repr,
)
def test_what_is_read_again_trains_what_trained(layer):
    model = cv.Model(layer >> nn.Linear(2), input_shape=(3,), loss="mse", optimizer="adam", batch_size=4, seed=0)
    again = cv.Model(cv.load_onnx(model.to_onnx()), loss="mse", optimizer="adam", batch_size=4)
    assert [*again.parameters] == ["onnxmodel_1.1.weight", "onnxmodel_1.1.bias"]
    X = np.random.default_rng(0).standard_normal((4, 3))
    np.testing.assert_allclose(again.predict(X), model.predict(X), rtol=1e-5, atol=1e-6)
