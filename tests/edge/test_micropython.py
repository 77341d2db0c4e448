"""User C modules of MicroPython: they compile; and with MicroPython's sources they train in its port to Unix.

MICROPYTHON names the folder of the sources: ``make test-micropython MICROPYTHON=...``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from tests.edge.native import COMPILER, STRICT
from tests.edge.test_packs import created, model_of, network

HERE = Path(__file__).parent / "micropython"
SOURCES, GCC = os.environ.get("MICROPYTHON"), shutil.which("gcc")


def models():
    rng = np.random.default_rng(0)
    sensor = model_of(network(), (4,))
    return {
        "sensor": sensor,
        "flow": model_of(nn.GRU(5) >> nn.Linear(2), (6, 3), loss="mse", stream=True),
        "small": cv.quantize(sensor, rng.normal(size=(200, 4)).astype("f4")),
        "bytes_of": model_of(
            nn.Conv2d(3, 3, bias=False) >> nn.BatchNorm() >> nn.ReLU() >> nn.Dropout(0.2) >> nn.Flatten() >> nn.Linear(4), (1, 5, 5),
            batch_size=2, input_dtype="uint8",
        ),
        "exact": model_of(network(), (4,), dtype="float64"),
    }  # fmt: skip


def write(found, folder):
    found["bytes_of"].export(folder / "bytes_of", "cortex-m33", "bytes_of", format="micropython")
    found["exact"].export(folder / "exact", "riscv64", "exact", format="micropython")
    found["sensor"].export(folder / "sensor", "pico", "sensor", format="micropython")
    found["flow"].export(folder / "flow", "esp32", "flow", format="micropython", paths=["stream"])
    found["small"].export(folder / "small", "pico", "small", format="micropython", batch_size=1, paths=["predict"])


def test_modules_are_c(tmp_path):
    found = models()
    write(found, tmp_path)
    for name in found:
        files = {file.name for file in (tmp_path / name).iterdir()}
        assert files == {f"{name}{end}" for end in (".c", ".h", ".json", "_module.c")} | {
            "micropython.mk",
            "micropython.cmake",
        }
        compiled(name, tmp_path / name)


def compiled(name, folder):
    """Compile a module, as ports do whose numbers are floats, too."""
    flags = ["-std=gnu99", "-Wdouble-promotion", "-Wfloat-conversion", f"-I{HERE}"]
    for file in (f"{name}.c", f"{name}_module.c"):
        subprocess.run([*COMPILER, *STRICT, *flags, "-c", file, "-o", "it.o"], cwd=folder, check=True)
        if GCC is not None:
            subprocess.run(
                [GCC, *STRICT[1:], "-fsingle-precision-constant", *flags, "-c", file, "-o", "it.o"],
                cwd=folder,
                check=True,
            )


def test_any_names_of_values_and_paths_are_c(tmp_path):
    g = cv.CalcGraph()
    for path, value in ('1"a', 'q"uo\\te'), ("\u00e4", "*/ x\n"):
        with g.path(path):
            cv.tanh(g.placeholder(value, (None, 2)))
    created(g).export(tmp_path, "pico", "it", format="micropython", paths=['1"a', "\u00e4"])
    compiled("it", tmp_path)


@pytest.mark.skipif(not SOURCES, reason="MICROPYTHON does not name MicroPython's sources")
def test_they_train_in_micropython(tmp_path):
    found = models()
    write(found, tmp_path)
    rng, sensor, stream = np.random.default_rng(1), found["sensor"], found["flow"].stream()
    sample = rng.uniform(-1, 1, (1, 4)).astype("f4")
    wanted = {
        "sample": sample[0].tolist(), "at first": sensor.predict(sample)[0].tolist(), "int8": found["small"].predict(sample)[0].tolist(),
        "steps": [], "stream": [], "bytes": float(found["bytes_of"].step(np.full((2, 1, 5, 5), 255, "u1"), np.array([0, 3]))),
        "exact": float(found["exact"].step(sample, np.array([1]))),
    }  # fmt: skip
    for x, y in zip(rng.uniform(-1, 1, (50, 1, 4)).astype("f4"), rng.integers(0, 3, (50, 1))):
        wanted["steps"].append((x[0].tolist(), int(y[0]), float(sensor.step(x, y))))
    for x in rng.uniform(-1, 1, (6, 3)).astype("f4"):
        wanted["stream"].append((x.tolist(), stream(x).ravel().tolist()))
    wanted["at last"] = sensor.predict(sample)[0].tolist()
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    (tmp_path / "manifest.py").touch()
    build = tmp_path / "build"
    options = [f"MICROPY_PY_{part}=0" for part in ("SSL", "BTREE", "FFI")]  # whose sources are elsewhere
    options += [
        "VARIANT=standard",
        f"BUILD={build}",
        f"FROZEN_MANIFEST={tmp_path / 'manifest.py'}",
        f"USER_C_MODULES={tmp_path}",
    ]
    subprocess.run(["make", "-C", f"{SOURCES}/mpy-cross"], check=True)
    subprocess.run(["make", "-C", f"{SOURCES}/ports/unix", "-j2", *options], check=True)
    done = subprocess.run(
        [build / "micropython", HERE / "run.py", tmp_path / "wanted.json"], capture_output=True, text=True
    )
    assert done.stdout == "all as on the PC\n", done.stdout + done.stderr
