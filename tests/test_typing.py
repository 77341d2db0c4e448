"""Scripts of users that mypy reads: what is right passes, and what is wrong is found where it is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = """
from collections.abc import Iterator, Mapping

import numpy as np

import calcvm as cv
from calcvm import nn

X: np.ndarray = np.zeros((64, 4), "float32")
y: np.ndarray = np.zeros(64, "int64")


class Log(cv.Callback):
    every = 10

    def on_epoch_end(self, model: cv.Model, epoch: int, figures: Mapping[str, float]) -> str | None:
        return "enough" if figures["loss"] < 0.1 else None


def tell(model: cv.Model, epoch: int, figures: Mapping[str, float]) -> None:
    print(epoch, figures["loss"])


def start(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(shape)


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    yield X[:32], y[:32]


net = nn.Linear(8, init=start) >> nn.ReLU() >> nn.Linear(3)
model = cv.Model(
    net, input_shape=(4,), optimizer=cv.Adam(1e-3, schedule=cv.Sampled(lambda k: 0.5**k, 10)), batch_size=32,
    metrics=["accuracy"], sample_weight=False, rates={"linear_1.": 0.1},
)
history = model.fit(X, y, epochs=2, validation=0.2, keep_best=True, callbacks=[Log(), tell, cv.ReduceOnPlateau()], progress=False)
losses: list[float] = history["loss"]
loss: float = model.step(X[:32], y[:32])
again = model.bind(X[:32], y[:32])
loss += again()
weights: dict[str, np.ndarray] = model.get_weights()
model.set_weights(weights)
probabilities: np.ndarray = model.predict_proba(X)
scores: np.ndarray = model.predict(X)
listed = cv.Model([nn.Linear(8), nn.ReLU(), nn.Linear(3)], input_shape=(4,), optimizer="adam", batch_size=32)
classes: np.ndarray = listed.predict_classes(X)
model.fit(batches(), epochs=1, progress=False)
print(model.summary(), model.evaluate(X, y)["loss"])

g = cv.CalcGraph()
x = g.placeholder("x", (None, 4))
w = g.parameter("w", (4, 1), init=start)
with g.path("learn", backward=True) as learn:
    out = x @ w
    learn.minimize(cv.mean(cv.square(out)), cv.SGD(0.1), output=out, parameters=[w], rates={"w": 0.5})
with g.path("predict") as predict:
    predict.output = cv.stop_gradient(x @ w).rename("score")
    b, o, i = cv.indexes("b o i")
    linear: cv.Variable = cv.equation("y[b,o] = sum[i] x[b,i]*w[i,o]", x=x, w=w)
    mean, spread = cv.equation("m[b] = mean[i] x[b,i]; d[b,i] = x[b,i] - m[b]", x=x, results=("m", "d"))
    linear = cv.equation[b, o](cv.exp(cv.sum(i, x[b, i] * w[i, o] + 1)) * cv.max((i,), x[b, i]))
    linear = cv.einsum("bi,io->bo", x, w)
    linear = x.sum(axis=1, keepdims=True) * x.std(axis=(0, 1)) + x.T.reshape(-1, 4).astype("float32").mean(0)
    halves: list[cv.Variable] = cv.split(cv.stack([cv.relu(x), cv.exp(x=x)]), 2, axis=-1)
text: str = g.text()
assert cv.compile(cv.read_graph(text), batch_size=8) == cv.compile(g, batch_size=8)
own = cv.Model(g, batch_size=8)
own.fit(X, epochs=1, progress=False)
"""
MISTAKES = {
    "cv.Model(net, input_shape=(4,), optimizer='adam', batch=3)": "call-overload",
    "cv.Model(net, batch_size=3)": "call-overload",
    "cv.Model(g, batch_size=3, loss='mse')": "call-overload",
    "model.fit(X, y, epoch=3)": "call-arg",
    "cv.ReduceOnPlateau(facto=0.1)": "call-arg",
    "nn.Linear('8')": "arg-type",
    "learn.minimize(out, 3)": "arg-type",
    "cv.Sampled(lambda k: 'a', 10)": "return-value",
    "model.fit(X, y, callbacks=3)": "arg-type",
    "model.step(X[:3], y[:3]).mean()": "attr-defined",
    "model.summary().rows": "attr-defined",
    "g.parameters(3)": "arg-type",
    "cv.read_graph(3)": "arg-type",
    "cv.equation(3, x=x)": "call-overload",
    "cv.indexes(3)": "arg-type",
    "x.sum(axes=1)": "call-arg",
    "x.mean('rows')": "arg-type",
    "cv.relu(3)": "arg-type",
    "nn.ReLU(3)": "call-arg",
}
LAYERS = """
import calcvm as cv; from calcvm import nn
net: nn.Sequential = nn.Linear(3) >> nn.ReLU()
nn.ReLU() >> 3
nn.LeakyReLU("x")
nn.Linear(4, 8)
cv.compile(cv.CalcGraph(), batch_size=8, workers=1)
cv.compile(cv.CalcGraph(), nonsense=3)
"""
OTHERS = """
[mypy]
[mypy-IPython.*,greenlet.*,jax.*,joblib.*,llvmlite.*,matplotlib.*,numba.*,optuna.*,pandas.*,ray.*,scipy.*,sklearn.*,torch.*]
follow_imports = skip
"""
FILES = {"good": SCRIPT, "bad": "\n".join([*SCRIPT.splitlines(), *MISTAKES]), "layers": LAYERS}


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "MYPYPATH": str(ROOT / "src")}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What mypy says of each file, by lines: of all at once, since reading what they import takes it some seconds."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "mypy.ini").write_text(OTHERS)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=silent",
        "--cache-dir",
        str(folder / "cache"),
    ]
    done = subprocess.run(
        [*command, *(f"{name}.py" for name in FILES)], cwd=folder, env=environment(), capture_output=True, text=True
    )
    assert "Found" in done.stdout, done
    found: dict[str, dict[int, str]] = {name: {} for name in FILES}
    for line in done.stdout.splitlines():
        if ": error:" in line:
            name, number, error = line.split(":", 2)
            found[name.removesuffix(".py")][int(number)] = error
    return found


@pytest.mark.time_limit(600)
def test_a_users_script_is_right(told: dict[str, dict[int, str]]) -> None:
    assert not told["good"]


def test_a_users_script_runs(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_a_users_mistakes_are_found(told: dict[str, dict[int, str]]) -> None:
    for number, (mistake, kind) in enumerate(MISTAKES.items(), len(SCRIPT.splitlines()) + 1):
        assert f"[{kind}]" in told["bad"].get(number, ""), (mistake, told["bad"].get(number))
    assert len(told["bad"]) == len(MISTAKES)


def test_types_of_layers_are_known(told: dict[str, dict[int, str]]) -> None:
    assert set(told["layers"]) == {4, 5, 6, 8}, told["layers"]
