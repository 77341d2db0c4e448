"""The self-test of packs: as C on emulated processors, in Python, in Node."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.edge import linker
from calcvm.edge.targets import TARGETS
from tests.edge.emulator import Machine, linked
from tests.edge.test_packs import model_of, network

MAIN = '#include "it.h"\nint self_test(void *heap) { return it_self_test(heap); }\n'
NETWORKS = {
    "classes": lambda: model_of(network(), (4,)),
    "a batch": lambda: model_of(nn.Dropout(0.5) >> network(), (4,), batch_size=3),
    "a stream": lambda: model_of(nn.GRU(5) >> nn.Linear(2), (6, 3), loss="mse", stream=True),
}


def machine_of(folder, target, source, *options):
    """An emulated processor with a pack, and the C function ``self_test`` that calls it."""
    processor = TARGETS[target]
    files = {"main.c": source.encode(), "it.h": (folder / "it.h").read_bytes()}
    main = linker.linked(files, [*processor.zig, "-O1", "-c", "-fno-sanitize=all", *options], "a test")
    both = linker.linked(
        {"main.o": main, "it.o": (folder / "it.o").read_bytes()}, [*processor.zig, "-r", "-nostdlib"], "a test"
    )
    return Machine(linked(both, processor, ["self_test"], folder), processor, 1 << 16)


def self_test(folder, target):
    """What the header's function returns."""
    return machine_of(folder, target, MAIN).call("self_test")


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("target", ["cortex-m0plus", "cortex-m4f", "riscv32", "raspberry-pi-4"])
def test_it_passes_on_processors_and_fails_where_a_number_is_another(target, name, tmp_path):
    NETWORKS[name]().export(tmp_path, target, "it")
    assert self_test(tmp_path, target) == 0
    facts, header = json.loads((tmp_path / "it.json").read_text()), tmp_path / "it.h"
    values = [values for outputs in facts["self_test"].values() for values in outputs.values()]
    assert len(values) >= 2 and all(0 < len(v) <= 16 for v in values)
    text, largest = header.read_text(), max(values[0], key=abs)
    header.write_text(text.replace(repr(largest), repr(largest * 1.01)))
    assert header.read_text() != text and self_test(tmp_path, target) == 1


@pytest.mark.parametrize(("dtype", "target"), [("float32", "cortex-m4f"), ("float64", "raspberry-pi-4")])
def test_what_is_no_number_fails_where_compilers_take_all_for_numbers(dtype, target, tmp_path):
    """As the default of some IDEs for microcontrollers."""
    model_of(network(), (4,), dtype=dtype).export(tmp_path, target, "it")
    c_type = {"float32": "float", "float64": "double"}[dtype]
    source = f"""#include "it.h"
        static const {c_type} ones[4] = {{1, 1, 1, 1}};
        int self_test(void *heap) {{ return it_apart(heap, ones, 4); }}"""
    machine = machine_of(tmp_path, target, source, "-ffast-math")
    for third in (1, -1, 0, 1.1, np.nan, -np.nan, np.inf, -np.inf):
        machine.write(np.array([1, 1, third, 1], dtype))
        assert machine.call("self_test") == (third != 1), third


def test_it_is_a_method_in_python(tmp_path, monkeypatch):
    NETWORKS["classes"]().export(tmp_path / "tests_itself", "linux-x86_64", "it", format="python")
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("tests_itself")
    model = package.Model()
    model.step([0.1, 0.2, 0.3, 0.4], 1)
    state = model.state
    assert model.self_test() == [] and model.state == state
    package.PACK["self_test"]["predict"]["output"][1] += 0.01
    assert model.self_test() == ["predict"]
    del sys.modules["tests_itself"]


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node")
def test_it_is_a_method_in_javascript(tmp_path):
    NETWORKS["a batch"]().export(tmp_path, "browser", "it")
    script = """
import { readFileSync } from "node:fs";
const { load } = await import("./it.mjs");
const model = await load(readFileSync("it.wasm"));
console.log(JSON.stringify(model.selfTest()));
"""
    source = (tmp_path / "it.js").read_text()
    for text, failed in (
        (source, []),
        (source.replace('"self_test": {"step": {"loss": [', '"self_test": {"step": {"loss": [9, '), ["step"]),
    ):
        (tmp_path / "it.mjs").write_text(text)
        (tmp_path / "run.mjs").write_text(script)
        done = subprocess.run(["node", "run.mjs"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == failed


def test_there_is_none_where_the_pc_cannot_compute(tmp_path):
    """Of numbers that are not finite nothing follows."""
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3))
    with g.path("predict") as predict:
        predict.output = cv.log(x)
    heap = cv.CalcHeap("1 MiB")
    heap.create(cv.compile(g, batch_size=1)).export(tmp_path, "cortex-m4f", "it")
    assert json.loads((tmp_path / "it.json").read_text())["self_test"] == {}
    assert "self_test" not in (tmp_path / "it.h").read_text()
