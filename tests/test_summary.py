"""The table of layers that `print(model)` shows."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

import calcvm as cv
from calcvm import nn, zoo
from calcvm.model.summary import layers
from calcvm.vm.program.program import Program, load_program

BATCH = 4
TABLE = """\
layer                          output        parameters  FLOPs    bytes moved
conv2d_1                       (B, 8, 8, 8)  216         110,592  18,272
batchnorm_1                    (B, 8, 8, 8)  16          6,176    16,576
relu_1                         (B, 8, 8, 8)              2,048    16,384
residual_1.branch.conv2d_1     (B, 8, 8, 8)  576         294,912  18,688
residual_1.branch.batchnorm_1  (B, 8, 8, 8)  16          6,176    16,576
residual_1                     (B, 8, 8, 8)              2,048    24,576
relu_2                         (B, 8, 8, 8)              2,048    16,384
dropout2d_1                    (B, 8, 8, 8)
globalavgpool_1                (B, 8, 1, 1)              2,048    8,320
flatten_1                      (B, 8)
linear_1                       (B, 10)       90          640      648
total                                        914         426,688  136,424
predict of 4: FLOPs and bytes are those of each operator alone, without fusion"""


def model(net: nn.Layer, shape: tuple[int, ...] = (3, 8, 8), **how) -> cv.Model:
    how = {"loss": "softmax_cross_entropy", "optimizer": cv.Adam(), "batch_size": BATCH, "workers": 1} | how
    return cv.Model(net, input_shape=shape, **how)


def block() -> nn.Layer:
    return nn.Conv2d(8, 3, padding=1, bias=False) >> nn.BatchNorm()


def images() -> cv.Model:
    net = block() >> nn.ReLU() >> nn.Residual(block()) >> nn.ReLU() >> nn.Dropout2d() >> nn.GlobalAvgPool()
    return model(net >> nn.Flatten() >> nn.Linear(10))


def lines(program: Program, path: str = "predict") -> list[tuple[str, int]]:
    """Layers and their parameters."""
    return [(name, n) for name, _, n, *_ in program.info["layers"][path]]


def elements(program: Program) -> int:
    return sum(program.symbols[program.info["variables"][p]["symbol"]].elems.b for p in program.info["parameters"])


def test_each_layer_has_a_line_whatever_is_fused():
    m = images()
    assert TABLE in m.summary() and any("batch_norm" in label and "conv" in label for label in m.program.labels)
    values, weights = BATCH * 8 * 64, 8 * 3 * 9
    (conv, norm, relu, *_) = m.program.info["layers"]["predict"]
    assert conv[3:] == [2 * values * 27, 4 * (weights + values + 3 * BATCH * 3 * 64)]  # the image is laid out otherwise
    assert relu[3:] == [values, 4 * 2 * values]
    channels = 8  # a row makes factors f of variances and scales; the next one makes y of x, f, means and shifts
    assert norm[3:] == [4 * channels + 3 * values, 4 * (3 * channels + 2 * values + 3 * channels)]


def test_a_file_shows_the_same_and_one_of_a_former_version_no_layers(tmp_path):
    m, file = images(), io.BytesIO()
    m.save(tmp_path / "m.calc")
    assert TABLE in cv.load(tmp_path / "m.calc").summary()
    former = replace(m.program, info={k: v for k, v in m.program.info.items() if k != "layers"})
    former.save(file)
    file.seek(0)
    assert layers(load_program(file), "predict") == []
    assert layers(m.program, "predict") == TABLE.splitlines()


def test_copies_into_the_order_of_users_are_of_the_layer_before_and_after():
    program = model(nn.Conv2d(8, 1, bias=False) >> nn.ReLU(), loss="mse").program
    n, m = 3 * BATCH * 64, 8 * BATCH * 64
    for path in ("learn", "predict"):
        assert [entry[4] for entry in program.info["layers"][path]] == [4 * (2 * n + n + 24 + m), 4 * (2 * m + 2 * m)]


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "mobilenet_v2", "lenet"])
def test_lines_of_the_zoo_have_all_parameters_of_the_model(name):
    net = getattr(zoo, name)(classes=5, width=4, size=32)
    shape = (1 if name == "lenet" else 3, 32, 32)
    g = cv.build_graph(net, shape, "softmax_cross_entropy", "adam")
    program = cv.compile(g, batch_size=2, workers=1)
    for path in ("learn", "predict"):
        assert sum(n for _, n in lines(program, path)) == elements(program)
    if name == "resnet18":  # 3 before, 8 blocks of 5, 8 additions and activations, 3 shortcuts of 2, and 3 at the end
        assert len(lines(program)) == 3 + 8 * 5 + 8 * 2 + 3 * 2 + 3
        assert [n for n, _ in lines(program)][16:26] == [
            "relu_3", *(f"residual_3.branch.{n}_1" for n in ("conv2d", "batchnorm", "relu")), "residual_3.branch.conv2d_2",
            "residual_3.branch.batchnorm_2", "residual_3.shortcut.conv2d_1", "residual_3.shortcut.batchnorm_1",
            "residual_3", "relu_4",
        ]  # fmt: skip
    if name == "googlenet":
        made = {n: shape for n, shape, *_ in program.info["layers"]["predict"]}
        parts = [made[f"concat_1.branch_{i}.relu_{k}"] for i, k in ((1, 1), (2, 2), (3, 2), (4, 1))]
        assert made["concat_1"][1][1] == sum(shape[1][1] for shape in parts)


class Twice(nn.Layer):
    """Layers and operators of one's own, mixed."""

    def __init__(self):
        self.inner = nn.Sequential(nn.Linear(6))

    def build(self, x, scope, training):
        a = self.parameter(x, "a", (6,))
        return self.inner.build(x * a, f"{scope}.inner.", training) * a


def test_a_layer_of_ones_own_has_what_is_not_of_layers_inside_it():
    program = model(nn.Linear(6) >> Twice() >> nn.PReLU() >> nn.Linear(2), (6,)).program
    expected = [("linear_1", 42), ("twice_1.inner.linear_1", 42), ("twice_1", 6), ("prelu_1", 1), ("linear_2", 14)]
    assert lines(program) == expected
    (twice,) = (entry for entry in program.info["layers"]["predict"] if entry[0] == "twice_1")
    assert twice[3:] == [2 * 6 * BATCH, 2 * 4 * (2 * 6 * BATCH + 6)]


def own(name: str = "linear_2") -> cv.CalcGraph:
    """Operators and layers, mixed; a head for the loss alone; one operator has a layer's name."""
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 3), "uint8"), g.placeholder("t", (None, 3))
    with g.path("learn", backward=True, adopt=False) as learn:
        h = cv.apply("linear", x, g.parameter("w", (3, 3)), g.parameter("b", (3,)), out=name)
        y = (nn.Linear(3) >> nn.Linear(3) >> nn.Dropout(0.0)).build(h)
        y = cv.tanh(y) @ g.variables["w"] + g.parameter("c", (3,))
        head = nn.Sequential(nn.Linear(3)).build(y, "head.")
        learn.minimize(cv.mse(y, t) + cv.mse(head, t), cv.SGD(0.1), output=y)
    return g


def test_operators_of_no_layer_have_lines_of_their_own():
    program = cv.compile(own(), batch_size=5, workers=1)
    assert lines(program, "learn") == [
        ("cast", 0), ("linear_2", 12), ("linear_1", 12), ("linear_2", 12), ("dropout_1", 0), ("tanh", 0), ("add", 3)
    ]  # fmt: skip
    cast, of_own, *_ = program.info["layers"]["learn"]
    assert cast[4] == 5 * 3 * (1 + 4) and of_own[3:] == [2 * 5 * 3 * 3, 4 * (2 * 15 + 9 + 3)]


def test_graphs_whose_layers_differ_are_not_alike():
    a, b = cv.CalcGraph(), cv.CalcGraph()
    for g, scope in ((a, ""), (b, "own.")):
        x = g.placeholder("x", (None, 3))
        with g.path("predict", adopt=False) as path:
            path.output = (nn.ReLU() >> nn.Dropout()).build(x, scope, training=False)
    assert a.form != b.form and cv.compile(a, batch_size=2) != cv.compile(b, batch_size=2)
    assert own().form == own().form and own().form != own("other").form
