"""Packs for browsers: WebAssembly beside the host, and the JavaScript module that calls it."""

from __future__ import annotations

import json
import shutil
import subprocess

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from tests.edge.test_packs import STEPS, apart, model_of, network
from tests.edge.wasm import Wasm

NODE = shutil.which("node")


class Web:
    """A pack as a module of a WebAssembly machine, called as a Device of test_packs is."""

    def __init__(self, model, folder, **how):
        self.model, self.pack = model, model.export(folder, "browser", "it", **how)
        self.facts = json.loads((folder / "it.json").read_text())
        self.machine = Wasm(folder / "it.wasm", self.pack.ram)
        self.bytes, self.write, self.read = self.machine.bytes, self.machine.write, self.machine.read
        assert self.machine.call("it_start") == 0

    def __call__(self, function, **arrays):
        for name, array in arrays.items():
            of = self.facts["arrays"][name]
            self.write(np.asarray(array, of["dtype"]), of["at"])
        return self.machine.call(f"it_{function}")

    def __getitem__(self, name):
        of = self.facts["arrays"][name]
        return self.read(int(np.prod(of["shape"])), of["dtype"], of["at"])

    @property
    def state(self):
        at, n = self.pack.state
        return self.read(n, "u1", at).tobytes()


NETWORKS = {
    "digits": (lambda: network((64, 64, 64, 10)), (64,), 10, 1),
    "a batch": (lambda: network((64, 64, 64, 10)), (64,), 10, 32),
    "convolutions": (lambda: nn.Conv2d(8, 3) >> nn.ReLU() >> nn.MaxPool2d(2) >> nn.Flatten() >> nn.Linear(5), (1, 12, 12), 5, 4),
    "lstm": (lambda: nn.LSTM(6, return_sequences=False) >> nn.Linear(3), (5, 2), 3, 2),
}  # fmt: skip


@pytest.mark.parametrize("objective", ["speed", "size"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_train_as_on_the_host(name, objective, tmp_path):
    make, shape, classes, batch = NETWORKS[name]
    model = model_of(make(), shape, batch_size=batch)
    web, rng = Web(model, tmp_path, objective=objective), np.random.default_rng(0)
    for _ in range(STEPS // 2):
        x, y = rng.uniform(-1, 1, (batch, *shape)).astype("f4"), rng.integers(0, classes, batch)
        loss = model.step(x, y)
        assert web("step", input=x, target=y) == 0
        assert web["loss"][0] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    learned = {p: np.array(value) for p, value in model.parameters.items()}
    web.pack.restore(model, web.state)
    assert all(apart(model.parameters[p], learned[p]) < 5e-6 for p in learned)


def test_sizes_are_those_asked_for(tmp_path):
    assert Web(model_of(network(), (4,)), tmp_path / "tiny").bytes <= 6500
    web = Web(model_of(network((64, 64, 64, 10)), (64,)), tmp_path / "digits")
    assert web.bytes - 4 * sum(p.size for p in web.model.parameters.values()) <= 12_000


SCRIPT = """
import {readFile} from "node:fs/promises";
import {Model, load} from "./it.js";
const model = await load(await readFile("it.wasm"));
const x = [0.1, -0.2, 0.3, 0.4];
const losses = [];
for (let k = 0; k < 20; k++) losses.push(model.step(x, 1));
const state = model.state, after = model.step(x, 1);
model.state = state;
const again = model.step(x, 1);
const told = [];
for (const wrong of [() => model.step(x, 7), () => model.step([1], 1), () => model.step(x), () => { model.state = new Uint8Array(3); }])
  try { wrong(); told.push("accepted"); } catch (error) { told.push(error.message); }
console.log(JSON.stringify({losses, after, again, output: [...model.predict(x)], told}));
"""


@pytest.mark.skipif(NODE is None, reason="there is no node")
def test_the_javascript_module(tmp_path):
    model = model_of(network(), (4,))
    model.export(tmp_path, "browser", "it")
    (tmp_path / "run.mjs").write_text(SCRIPT)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    done = subprocess.run([NODE, "run.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found, x = json.loads(done.stdout), np.array([[0.1, -0.2, 0.3, 0.4]], "f4")
    wanted = [model.step(x, np.array([1])) for _ in range(21)]
    assert found["losses"] == pytest.approx(wanted[:20], rel=1e-4, abs=1e-6)
    assert found["after"] == found["again"] == pytest.approx(wanted[20], rel=1e-4, abs=1e-6)
    assert apart(found["output"], model.predict(x).ravel()) < 1e-4
    label, numbers, few, state = found["told"]
    assert "step: data that the model cannot use, such as a label that is no class (trap 1, row" in label
    assert numbers == "input has 1 numbers: 4 are wanted"
    assert few == "step takes input, target: 1 arrays are given"
    assert state.startswith("a state has ")


def test_without_a_linker_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("calcvm.edge.linker.find_spec", lambda name: None)
    with pytest.raises(cv.MissingExtra, match=r"a pack for browsers needs ziglang: .*calcvm\[edge\]"):
        model_of(network(), (4,)).export(tmp_path, "browser")
    assert [*tmp_path.iterdir()] == []
