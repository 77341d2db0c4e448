"""Models as scripts: run in an environment that has NumPy alone, with the same losses, outputs and figures."""

from __future__ import annotations

import ast
import json
import os
import resource
import runpy
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.script.sections import Listing

ALONE = """
import json, sys, importlib, importlib.metadata, importlib.util
assert [d.name for d in importlib.metadata.distributions()] == ["numpy"]
for name in ("calcvm", "numba", "llvmlite", "scipy", "setuptools"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} is here")
import numpy as np
spec = importlib.util.spec_from_file_location("train", sys.argv[1])
train = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train)
data, said = np.load(sys.argv[2]), json.loads(sys.argv[3])
batches, names, inputs, judged = said
losses = [train.step(*(data[n][a:b] for n in names)) for a, b in batches]
out = {"losses": losses}
if judged:
    out["figures"] = train.evaluate(*(data[n] for n in judged))
y = train.predict(*(data[n] for n in inputs))
np.savez(sys.argv[2] + ".out.npz", *(y if isinstance(y, list) else [y]))
print(json.dumps(out))
"""


def only_numpy(folder: Path) -> Path:
    """The Python of a new environment in which nothing but NumPy is installed: that of this one, by links."""
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    ours = metadata.distribution("numpy")
    here = Path(str(ours.locate_file("")))
    assert ours.files is not None
    for name in {path.parts[0] for path in ours.files if path.parts[0].startswith("numpy")}:
        (packages / name).symlink_to(here / name)
    return folder / "bin" / "python"


def alone(model: cv.Model, folder: Path, data: dict, batches: list[tuple[int, int]]) -> tuple[dict, list[np.ndarray]]:
    """What the model's script gives: losses of steps, then figures and outputs of all data."""
    model.to_python(folder / "train.py")
    np.savez(folder / "data.npz", **data)
    loaded = model.loaded
    judged = loaded.feeds("predict", ("forward", "loss")) if model.roles.figures else ()
    said = json.dumps([batches, loaded.feeds("learn"), model.roles.inputs, judged])
    command = [
        str(only_numpy(folder / "environment")),
        "-I",
        "-c",
        ALONE,
        str(folder / "train.py"),
        str(folder / "data.npz"),
        said,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = np.load(folder / "data.npz.out.npz")
    return json.loads(done.stdout), [found[name] for name in found.files]


def same_losses(
    model: cv.Model, folder: Path, data: dict, batches: list[tuple[int, int]], step=None, tolerance=1e-9
) -> tuple[dict, list[np.ndarray]]:
    """The script's losses are the model's; what else it gives.

    Of float64: sums are of another order, 2^-53 of them, and networks make up to a million times of it over a few steps.  In
    float32 that would be all there is, on one processor and not on another.
    """
    assert model.program.dtype == "float64"
    got, outputs = alone(model, folder, data, batches)
    names = model.loaded.feeds("learn")
    step = step or (lambda *arrays: model.step(*arrays))
    losses = [step(*(data[name][a:b] for name in names)) for a, b in batches]
    np.testing.assert_allclose(got["losses"], losses, rtol=tolerance)
    assert len({*losses}) > 1
    return got, outputs


def same(model: cv.Model, folder: Path, data: dict, batches: list[tuple[int, int]], step=None, tolerance=1e-9) -> None:
    """The script's losses, figures and outputs are the model's."""
    got, outputs = same_losses(model, folder, data, batches, step, tolerance)
    roles = model.roles
    X = data[roles.inputs[0]] if len(roles.inputs) == 1 else {name: data[name] for name in roles.inputs}
    want = model.predict(X)
    for y, w in zip(outputs, [want] if isinstance(want, np.ndarray) else want.values(), strict=True):
        np.testing.assert_allclose(y, w, rtol=1e3 * tolerance, atol=1e3 * tolerance * np.abs(w).max())
    if roles.figures:
        y = data[roles.labels[0]] if len(roles.labels) == 1 else {name: data[name] for name in roles.labels}
        for name, value in model.evaluate(X, y).items():
            assert got["figures"][name] == pytest.approx(value, rel=1e3 * tolerance, abs=tolerance)


def runs_on_random_numbers(folder: Path) -> None:
    command = [sys.executable, "-I", str(folder / "train.py")]
    assert "epoch 1: loss " in subprocess.run(command, check=True, capture_output=True, text=True).stdout


def images(shape, classes, n=23, seed=0):
    rng = np.random.default_rng(seed)
    return {"input": rng.normal(size=(n, *shape)).astype("float32"), "target": rng.integers(0, classes, n)}


STEPS = [(0, 8), (8, 13), (0, 8), (3, 4), (8, 16), (1, 9)]


# ---------------------------------------------------------------- networks
def test_a_perceptron_with_all_that_optimizers_do(tmp_path):
    net = (
        nn.Linear(24, bias=False)
        >> nn.BatchNorm()
        >> nn.GELU()
        >> nn.Dropout(0.3)
        >> nn.Linear(5, regularizer=cv.L1(1e-4))
    )
    adam = cv.Adam(
        3e-3, schedule=cv.Cosine(20, min_lr=1e-4, warmup_steps=3), clip_norm=1.0, weight_decay=1e-3, no_decay="1d"
    )
    model = cv.Model(
        net, input_shape=(10,), optimizer=adam, batch_size=8, workers=1, rates={"linear_2.": 0.5}, dtype="float64"
    )
    same(model, tmp_path, images((10,), 5), [batch for batch in STEPS if batch[1] - batch[0] > 1] * 2)


OPTIMIZERS = {
    "sgd": cv.SGD(0.05, schedule=cv.Step(2, 0.5)),
    "momentum": cv.SGD(0.02, momentum=0.9, clip_value=0.01),
    "nesterov": cv.SGD(0.02, momentum=0.9, nesterov=True, schedule=cv.Exponential(0.9)),
    "adamhat": cv.AdamHat(3e-3),
    "adamw": cv.AdamW(3e-3, weight_decay=0.1, no_decay=".bias", schedule=cv.CosineRestarts(2, 2.0)),
    "rmsprop": cv.RMSProp(1e-3, momentum=0.9),
    "adagrad": cv.Adagrad(1e-2, clip_norm=0.1),
    "lion": cv.Lion(1e-3, schedule=cv.Sampled(lambda k: 1 / (1 + k), 4)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_schedules(name, tmp_path):
    net = nn.Linear(7) >> nn.Tanh() >> nn.Linear(3)
    model = cv.Model(
        net, input_shape=(4,), loss="huber", optimizer=OPTIMIZERS[name], batch_size=8, workers=1, dtype="float64"
    )
    rng = np.random.default_rng(1)
    data = {"input": rng.normal(size=(20, 4)).astype("f"), "target": rng.normal(size=(20, 3)).astype("f")}
    same(model, tmp_path, data, STEPS)


def test_lenet_as_published(tmp_path):
    model = cv.Model(
        cv.zoo.lenet(), input_shape=(1, 28, 28), optimizer=cv.SGD(0.05, momentum=0.9), batch_size=8, dtype="float64"
    )
    same(model, tmp_path, images((1, 28, 28), 10), STEPS)


@pytest.mark.parametrize("size", [64, 128])
def test_a_unet_as_published(size, tmp_path, whole):
    """Of all its channels (without --whole of an eighth), on images of a quarter or a half of its size; of so deep
    a network the losses alone: steps make a thousand times of any difference in single pixels."""
    if size > 64 and not whole:
        pytest.skip("takes --whole")
    n = -(-size // 128)
    options = {
        "input_shape": (1, size, size),
        "optimizer": cv.SGD(0.05, momentum=0.9),
        "batch_size": n,
        "workers": 1,
        "dtype": "float64",
    }
    model = cv.Model(cv.zoo.unet(size=size, **({} if whole else {"width": 8})), **options)
    rng = np.random.default_rng(5)
    data = {"input": rng.normal(size=(3, 1, size, size)).astype("f"), "target": rng.integers(0, 2, (3, size, size))}
    same_losses(model, tmp_path, data, [(0, n), (3 - n, 3)])


def test_a_unet_in_less_memory(tmp_path):
    net = cv.zoo.unet(width=4, size=32)
    options = {"input_shape": (1, 32, 32), "optimizer": cv.SGD(0.05), "batch_size": 4, "workers": 1, "dtype": "float64"}
    memory = cv.Model(net, **options).plan.heap_bytes
    model = cv.Model(net, **options, memory=int(0.7 * memory))
    assert model.plan.recomputed
    rng = np.random.default_rng(2)
    data = {"input": rng.normal(size=(9, 1, 32, 32)).astype("f"), "target": rng.integers(0, 2, (9, 32, 32))}
    same(model, tmp_path, data, [(0, 4), (4, 6), (5, 9), (0, 4), (1, 5)])
    text = (tmp_path / "train.py").read_text()
    assert "_again[...] = " in text or " again:" in text


def test_a_forward_in_float32(tmp_path):
    """One, of the weights as they begin: each output is off by no more than its sums are, some hundred times 2^-24."""
    model = cv.Model(cv.zoo.lenet(), input_shape=(1, 28, 28), optimizer=cv.SGD(0.05), batch_size=8)
    data = images((1, 28, 28), 10)
    got, (y,) = alone(model, tmp_path, data, [(0, 8)])
    assert y.dtype == np.float32 and "np.float32" in (tmp_path / "train.py").read_text()
    assert got["losses"][0] == pytest.approx(model.step(data["input"][:8], data["target"][:8]), rel=1e-5)
    np.testing.assert_allclose(y, model.predict(data["input"]), atol=1e-4 * np.abs(y).max())


def test_rounds_add_up(tmp_path):
    net = nn.Conv2d(4, 3, padding=1) >> nn.ReLU() >> nn.MaxPool2d(2) >> nn.Flatten() >> nn.Linear(3)
    model = cv.Model(
        net, input_shape=(2, 8, 8), optimizer=cv.Adam(1e-2), batch_size=4, learning_batch=10, dtype="float64"
    )
    data = images((2, 8, 8), 3, n=20)

    def step(x, t):
        return model.fit(x, t, shuffle=False, progress=False)["loss"][-1]

    same(model, tmp_path, data, [(0, 10), (10, 20), (3, 13), (0, 4), (1, 11)], step)


def test_layers_of_images_in_float64(tmp_path):
    conv = nn.Conv2d(6, 3, padding=1, groups=1) >> nn.GroupNorm(2) >> nn.SiLU()
    depth = nn.Conv2d(6, 3, padding=1, groups=6) >> nn.InstanceNorm() >> nn.HardSwish() >> nn.LocalResponseNorm(3)
    up = (
        nn.Upsample(scale=2, mode="linear")
        >> nn.ConvTranspose2d(4, 2, stride=2)
        >> nn.AvgPool2d(3, stride=2, padding=1)
    )
    net = (
        conv
        >> nn.Residual(depth)
        >> up
        >> nn.Pad(1, mode="reflect")
        >> nn.LPPool2d(2, 2)
        >> nn.PReLU()
        >> nn.Dropout2d(0.2)
    )
    net = net >> nn.AdaptiveAvgPool(3) >> nn.Concat(nn.Conv2d(3, 1), nn.ELU(), nn.Softplus()) >> nn.AdaptiveMaxPool(2)
    net = net >> nn.GlobalMaxPool() >> nn.Flatten() >> nn.LayerNorm() >> nn.Linear(4) >> nn.RMSNorm() >> nn.LogSoftmax()
    model = cv.Model(net, input_shape=(3, 10, 12), optimizer=cv.Adam(1e-3), batch_size=8, workers=1, dtype="float64")
    same(model, tmp_path, images((3, 10, 12), 4), STEPS)


def test_augmented_images_of_bytes_and_weights_of_samples(tmp_path):
    before = nn.Scale(1 / 255) >> nn.RandomCrop(6, padding=1) >> nn.RandomHorizontalFlip()
    net = nn.Conv2d(4, 3) >> nn.Mish() >> nn.Flatten() >> nn.Linear(3)
    model = cv.Model(
        net, input_shape=(8, 8, 2), channels_last=True, preprocess=before, optimizer=cv.SGD(0.1), batch_size=8,
        input_dtype="uint8", target_dtype="int64", sample_weight=True, dtype="float64",
    )  # fmt: skip
    rng = np.random.default_rng(3)
    data = {
        "input": rng.integers(0, 256, (23, 8, 8, 2)).astype(np.uint8), "target": rng.integers(0, 3, 23),
        "sample_weight": rng.random(23).astype("f"),
    }  # fmt: skip
    same_losses(model, tmp_path, data, STEPS)
    runs_on_random_numbers(tmp_path)


def test_a_graph_of_several_paths(tmp_path):
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 6)), g.placeholder("t", (None, 2))
    W, V = g.parameter("W", (6, 2)), g.parameter("V", (6, 4))
    with g.path("code") as code:
        z = cv.tanh(x @ V)
    with g.path("learn", backward=True) as learn:
        y = cv.concat([z, cv.exp(-cv.square(x[:, 1:3]))], axis=1) @ W
        learn.minimize(cv.mae(y, t), optimizer=cv.SGD(0.1), output=y)
    with g.path("decode", backward=True) as decode:
        decode.minimize(cv.mse(cv.tanh(x @ V), z * 0.5), optimizer=cv.SGD(0.1))
    with g.path("predict") as predict:
        predict.output = cv.softmax(y), y
        off = cv.rmse(y, t)
    assert code and off is not None
    model = cv.Model(g, batch_size=8, workers=1, dtype="float64")
    rng = np.random.default_rng(4)
    data = {"x": rng.normal(size=(21, 6)).astype("f"), "t": rng.normal(size=(21, 2)).astype("f")}
    same(model, tmp_path, data, STEPS)
    assert "def decode_step(x_data):" in (tmp_path / "train.py").read_text()
    runs_on_random_numbers(tmp_path)


@pytest.mark.parametrize(
    "name", ["lenet", "alexnet", "overfeat", "vgg11", "resnet18", "resnet50", "googlenet", "mobilenet_v2", "unet"]
)
def test_networks_of_the_zoo(name, tmp_path, whole):
    """In float64 and by small steps: of a batch of four, deep networks make a hundred times of any difference in each step at 0.01."""
    if not whole and name not in ("resnet18", "googlenet"):
        pytest.skip("takes --whole")
    size = {"lenet": 28, "unet": 32, "overfeat": 95}.get(name, 64)
    net = getattr(cv.zoo, name)(5, size=size, **({} if name == "lenet" else {"width": 8}))
    model = cv.Model(net, input_shape=(3, size, size), optimizer=cv.SGD(1e-4), batch_size=4, workers=1, dtype="float64")
    data = images((3, size, size), 5, n=8)
    if name == "unet":
        data["target"] = np.random.default_rng(0).integers(0, 5, (8, size, size))
    same(model, tmp_path, data, [(0, 4), (4, 8), (0, 3), (3, 7), (1, 5)], tolerance=1e-8)


# ---------------------------------------------------------------- the script as a file
def small(**options) -> cv.Model:
    return cv.Model(nn.Linear(3), input_shape=(4,), optimizer=cv.SGD(0.1), batch_size=4, workers=1, **options)


def test_it_is_python_that_trains_from_a_shell_and_keeps_weights(tmp_path):
    model, path = small(), tmp_path / "train.py"
    model.to_python(path)
    ast.parse(path.read_text())
    np.savez(tmp_path / "data.npz", **images((4,), 3, n=30))
    train = [sys.executable, "-I", str(path), "--data", "data.npz", "--epochs", "3", "--save", "weights.npy"]
    said = subprocess.run(train, capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    losses = [float(line.split()[-1]) for line in said.splitlines()]
    assert len(losses) == 3 and losses[2] < losses[0]
    before, after = np.load(tmp_path / "train.npy"), np.load(tmp_path / "weights.npy")
    assert before.shape == after.shape and (before != after).any()
    subprocess.run([sys.executable, "-I", str(path)], check=True, cwd=tmp_path, capture_output=True)  # random numbers


def test_arrays_that_are_missing_or_of_other_lengths_and_epochs_below_none_are_refused(tmp_path):
    small().to_python(tmp_path / "train.py")

    def said(*options):
        train = [sys.executable, "-I", "train.py", *options]
        done = subprocess.run(train, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 1
        return done.stderr

    arrays = images((4,), 3, n=8)
    for wrong, why in (
        ({"input": arrays["input"]}, "has input; target must be there too"),
        ({}, "has no array; input, target must be there too"),
        ({**arrays, "target": arrays["target"][:7]}, "8 samples of input, 7 of target"),
    ):
        np.savez(tmp_path / "data.npz", **wrong)
        assert said("--data", "data.npz") == f"data.npz: {why}\n"
    assert said("--epochs", "-1") == "--epochs -1: must be >= 0\n"


def test_it_goes_on_where_the_model_stands(tmp_path):
    model, data = small(dtype="float64"), images((4,), 3, n=30)
    model.fit(data["input"], data["target"], epochs=3, progress=False)
    same(model, tmp_path, data, [(0, 4), (4, 8), (1, 4)])


def test_a_larger_batch_than_planned_is_refused_and_so_are_labels_that_are_none(tmp_path):
    small().to_python(tmp_path / "train.py")
    for call in ("step(np.ones((5, 4)), np.ones(5))", "step(np.ones((2, 4)), np.array([0, 3]))"):
        code = f"import numpy as np, sys; sys.path.insert(0, {str(tmp_path)!r}); import train; train.{call}"
        done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
        assert "ValueError: " in done.stderr and ("planned for 1 to 4" in done.stderr or "[0, 3)" in done.stderr)


def test_bytes_that_live_are_those_of_the_plan():
    for options in ({}, {"memory": 0.7}, {"accumulate": True}):
        graph = cv.build_graph(cv.zoo.unet(width=4, size=32), (1, 32, 32), "mse", cv.Adam(0.1))
        if "memory" in options:
            options = {"memory": int(0.7 * cv.plan(graph, batch_size=4, workers=1).heap_bytes)}
        plan = cv.plan(graph, batch_size=4, workers=1, **{"accumulate": False, **options})
        listing = Listing(cv.compile(graph, plan=plan))
        assert [line.live for lines in listing.sections.values() for line in lines] == [*plan.live_bytes]


# ---------------------------------------------------------------- what is refused
OWN = """
import sys
import calcvm as cv
from calcvm import nn
from calcvm.formulas import number as n
from calcvm.operators import OpSpec, R, Real, RowSpec, W, dims, elementwise, register_op, rows_cols, same_shape
from calcvm.operators.cpu import Ptr, kernel

@elementwise(power=Real(2.0, "how steep"))
class bump:
    def y(x, power):
        return n.exp(-power * x * x)
    def dx(dy, x, y, power):
        return -2 * power * x * y * dy

@kernel
def same_fwd(me, rows, cols, x: Ptr, y: Ptr):
    for i in range(rows * cols):
        y[i] = x[i]

row = RowSpec(name="same_fwd", synopsis="y = x", words=dims("rows cols"), operands=(R("x", "rows*cols"), W("y", "rows*cols", "w0")))
register_op(OpSpec(
    name="same", synopsis="y = x", category="unary", inputs=("x",), shape=same_shape,
    words=lambda s, a: rows_cols(s["x"]), fwd=(row,),
))
before = nn.Function(lambda v: cv.apply("same", v)) if sys.argv[1] == "same" else nn.Scale(1.0)
net = nn.Linear(3) >> nn.Function(lambda v: cv.apply("bump", v, power=0.5))
model = cv.Model(net, input_shape=(4,), optimizer=cv.SGD(0.1), batch_size=4, workers=1, preprocess=before)
try:
    model.to_python("train.py")
except cv.UnsupportedOperator as error:
    print(error)
else:
    print([line.strip() for line in open("train.py") if "exp(-" in line])
"""


def test_operators_of_ones_own_have_a_text_where_they_are_formulas_and_else_are_refused_by_name(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    for which, said in (("bump", "np.exp(-0.5*linear*linear)"), ("same", "row 'same_fwd' has no text in NumPy")):
        done = subprocess.run(
            [sys.executable, "own.py", which], capture_output=True, text=True, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(cv.__file__).parent.parent)},
        )  # fmt: skip
        assert said in done.stdout, done.stdout + done.stderr
        assert len([*tmp_path.glob("train.*")]) == (2 if which == "bump" else 0)
        for path in tmp_path.glob("train.*"):
            path.unlink()


def test_paths_that_are_none_are_refused(tmp_path):
    model = small()
    with pytest.raises(cv.CalcError, match="must end with .py"):
        model.to_python(tmp_path / "train.txt")
    with pytest.raises(cv.CalcError, match="not the path of a file"):
        model.to_python(3)
    with pytest.raises(cv.FileError):
        model.to_python(tmp_path / "none" / "train.py")
    with pytest.raises(cv.FileError, match="too long"):
        model.to_python(tmp_path / f"{'x' * 300}.py")
    for kept, folder in (("a.py", "a.npy"), ("b.npy", "b.py")):
        (tmp_path / kept).write_text("kept")
        (tmp_path / folder).mkdir()
        with pytest.raises(cv.FileError, match="give the path of a file"):
            model.to_python((tmp_path / kept).with_suffix(".py"))
        assert (tmp_path / kept).read_text() == "kept" and len([*tmp_path.iterdir()]) in (2, 4)


def test_names_as_long_as_a_file_may_have_and_a_full_disk(tmp_path):
    model = small()
    for name in ("x" * 250, "é" * 125, "x" * 240):
        model.to_python(tmp_path / f"{name}.py")
        model.save(tmp_path / f"{name}.calc")
    assert len([*tmp_path.iterdir()]) == 9 and cv.load(tmp_path / f"{'x' * 250}.calc").seed == 0
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(cv.FileError, match="File too large"):
            model.to_python(tmp_path / f"{name}.py")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert before == {p: p.read_bytes() for p in tmp_path.iterdir()}


@pytest.mark.parametrize(
    "name", ['x"+__import__("os").system("touch PWNED")+"', 'a"""b', "a\nb", "a\rb", "100%d", "tail\\"]
)
def test_a_name_is_never_code(name, tmp_path):
    g = cv.CalcGraph()
    x, t, W = g.placeholder(name, (None, 3)), g.placeholder(f"{name}t", (None, 2)), g.parameter("W", (3, 2))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mse(x @ W, t), optimizer=cv.SGD(0.1))
    with g.path("predict") as predict:
        predict.output = x @ W
    cv.Model(g, batch_size=4, workers=1).to_python(tmp_path / "train.py")
    for arguments in ([], ["--help"]):
        done = subprocess.run(
            [sys.executable, "-I", "train.py", *arguments], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.npy", "train.py"]


def test_data_of_another_shape_are_refused(tmp_path):
    model = cv.Model(
        nn.Linear(2) >> nn.Tanh(), input_shape=(3,), loss="mse", optimizer=cv.SGD(0.1), batch_size=4, workers=1
    )
    model.to_python(tmp_path / "train.py")
    code = """
import numpy as np, train
x, y = np.ones((4, 3)), np.ones((4, 2))
for bad in ((x, y[0]), (x, y[:, :1]), (x[0], y), (x.astype(object), y)):
    try:
        train.step(*bad)
    except ValueError as error:
        print(error)
print(train.step(x, y))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 5, done.stdout + done.stderr


@pytest.mark.parametrize("dense", [False, True])
def test_a_class_of_score_minus_infinity_that_is_not_wanted_changes_nothing(dense, tmp_path):
    """Nor does it in the script, where 0 times infinity would be NaN."""
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 3)), g.placeholder("t", (None, 3) if dense else (None,))
    with g.path("learn", backward=True) as learn:
        scores = x + g.parameter("b", (3,))
        learn.minimize(cv.softmax_cross_entropy(scores, t), cv.SGD(0.1), output=scores)
    with g.path("predict") as predict:
        predict.output = x * 1.0
    model = cv.Model(g, batch_size=4, dtype="float64")
    labels = np.array([0, 1, 2, 1])
    X = np.where(np.eye(3)[labels - 1] > 0, -np.inf, np.arange(12.0).reshape(4, 3))  # each masks the class before
    data = np.where(np.isinf(X), 0, [[0.25, 0.5, 0.25]]) if dense else labels
    model.to_python(tmp_path / "train.py")
    script = runpy.run_path(str(tmp_path / "train.py"))
    for _ in range(3):
        found, wanted = script["step"](X, data), model.step(X, data)
        assert np.isfinite(wanted) and found == pytest.approx(wanted, rel=1e-12)


def test_a_graph_without_a_batch(tmp_path):
    g = cv.CalcGraph()
    A, b, w = g.placeholder("A", (5, 3)), g.placeholder("b", (5,)), g.parameter("w", (3,))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mse(cv.sum(A * w, 1), b), cv.SGD(0.1))
    with g.path("predict") as predict:
        predict.output = cv.sum(A * w, 1)
    model = cv.Model(g, batch_size=1, dtype="float64")
    model.to_python(tmp_path / "script.py")
    say = runpy.run_path(str(tmp_path / "script.py"))
    given = np.random.default_rng(0).standard_normal((5, 3)), np.ones(5)
    for _ in range(3):
        assert say["step"](*given) == pytest.approx(model.step(*given), rel=1e-12)
    np.testing.assert_allclose(say["predict"](given[0]), model.run({"A": given[0]})[model.roles.outputs[0]], rtol=1e-12)
