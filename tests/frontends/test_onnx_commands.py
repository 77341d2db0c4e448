"""The command with files of ONNX: plan, dis, run, convert, train."""

from __future__ import annotations

import re

import numpy as np
import pytest

import calcvm as cv
from tests.frontends.files import parsed
from tests.test_cli import calcvm, refused

RNG = np.random.default_rng(0)
W, B = RNG.standard_normal((6, 3)).astype("float32"), np.zeros(3, "float32")
NET = "net (float[N, 6] x) => (float[N, 3] y) {a = MatMul(x, w) y = Add(a, b)}"
TWO = "net (float[N, 2] x, float[N, 2] z) => (float[N, 2] y, float[N, 2] d) {y = Add(x, z) d = Sub(x, z)}"


@pytest.fixture
def net(tmp_path):
    path = tmp_path / "net.onnx"
    path.write_bytes(parsed(NET, w=W, b=B).SerializeToString())
    return path


def test_plans_and_listings(net):
    assert "predict" in calcvm("plan", net, "--batch-size", 8) and "learn" not in calcvm("plan", net, "--batch-size", 8)
    assert "learn" in calcvm("plan", net, "--memory", "64 KiB", "--loss", "softmax_cross_entropy")
    assert "linear_fwd" in calcvm("dis", net) and "linear_dw" not in calcvm("dis", net)
    assert "adam" in calcvm("dis", net, "--loss", "mse", "--batch-size", 4)
    assert "flash" in calcvm("plan", net, "--target", "cortex-m4f", "--loss", "mse")
    assert "--loss is for a file of ONNX" in refused("plan", "6-3", "--batch-size", 8, "--loss", "mse")
    assert "there is no file" in refused("plan", "none.onnx", "--batch-size", 8)


def test_run_one_batch(net, tmp_path):
    X, out = RNG.standard_normal((5, 6)).astype("float32"), tmp_path / "y.npz"
    np.save(tmp_path / "x.npy", X)
    assert calcvm("run", net, "--input", tmp_path / "x.npy") == "y (5, 3) float32\n"
    calcvm("run", net, "--input", f"x={tmp_path / 'x.npy'}", "--out", out)
    np.testing.assert_allclose(np.load(out)["y"], X @ W, rtol=1e-5, atol=1e-6)
    (tmp_path / "two.onnx").write_bytes(parsed(TWO).SerializeToString())
    np.save(tmp_path / "z.npy", X[:, :2])
    several = ["--input", f"x={tmp_path / 'z.npy'}", "--input", f"z={tmp_path / 'z.npy'}", "--out", out]
    calcvm("run", tmp_path / "two.onnx", *several)
    assert (np.load(out)["y"] == 2 * X[:, :2]).all() and (np.load(out)["d"] == 0).all()
    assert "give its inputs x, z" in refused("run", tmp_path / "two.onnx", "--input", tmp_path / "z.npy")
    assert "no .npy file" in refused("run", net, "--input", net)
    assert "no .npy file" in refused("run", net, "--input", out)
    twice = ["--input", f"x={tmp_path / 'x.npy'}"] * 2
    assert "given twice" in refused("run", net, *twice)
    assert "a .npz file" in refused("run", net, *twice[:2], "--out", tmp_path / "y.csv")


def test_a_converted_file_is_a_model(net, tmp_path):
    model, X = tmp_path / "net.calc", RNG.standard_normal((7, 6)).astype("float32")
    assert "wrote" in calcvm("convert", net, model)
    np.testing.assert_allclose(cv.load(model).predict(X), X @ W, rtol=1e-5, atol=1e-6)
    calcvm("convert", net, model, "--loss", "softmax_cross_entropy", "--batch-size", 4)
    loaded = cv.load(model)
    loaded.fit(X, np.argmax(X @ W, 1), epochs=2, progress=False)
    np.savez(tmp_path / "d.npz", X=X, y=np.argmax(X @ W, 1))
    assert "accuracy 1" in calcvm("evaluate", model, tmp_path / "d.npz")
    assert "is no file of ONNX" in refused("convert", model, tmp_path / "other.calc")
    assert "would be overwritten" in refused("convert", net, net)


def test_train_on_from_a_file(net, tmp_path):
    X = RNG.standard_normal((300, 6))
    np.savez(tmp_path / "d.npz", X=X, y=np.argmax(X @ W[:, ::-1], 1))
    how = ["--epochs", 30, "--learning-rate", 0.05, "--out", tmp_path / "m.calc"]
    printed = calcvm("train", tmp_path / "d.npz", net, *how)
    assert float(re.search(r"accuracy ([\d.]+) on the held-out 60", printed)[1]) > 0.9
    assert [*cv.load(tmp_path / "m.calc").state_dict()] == ["w", "b"]
