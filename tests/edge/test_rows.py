"""Every row of the table in a pack: an example of each operator, trained for a step in an emulator beside the host.

In `make test` a sample; ``pytest --whole tests/edge/test_rows.py`` takes every operator on every processor.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np

import calcvm as cv
from calcvm.edge.places import places_of
from calcvm.edge.targets import TARGETS
from calcvm.ops import OPS
from tests.conftest import whole_of
from tests.edge.emulator import Machine, linked
from tests.edge.native import Native
from tests.edge.wasm import Wasm
from tests.kinds.placed import OPERATORS, Placed, placements
from tests.kinds.races import put

PROCESSORS = ("cortex-m4f", "raspberry-pi-4", "riscv32", "esp32", "browser")
SAMPLE = 40  # of `make test`: every so many operators, each on one processor
BATCH = 3
CLOSE = 2e-6  # of the largest number; of a derivative near a pole as of the host's


def cases(whole):
    every = [(name, target) for name in OPERATORS for target in PROCESSORS]
    return every if whole else every[:: SAMPLE * len(PROCESSORS) + 1]


def pytest_generate_tests(metafunc):
    if "operator" in metafunc.fixturenames:
        metafunc.parametrize("operator, target", cases(whole_of(metafunc)))


def apart(found, wanted):
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    most = np.abs(wanted[np.isfinite(wanted)]).max(initial=1e-3)
    return np.where(same, 0, np.abs(found.astype("f8") - wanted)).max(initial=0) / most


def machine_of(target, folder, ram, entries):
    """What runs a pack in a folder: this machine its C, a WebAssembly machine, or an emulated processor."""
    if target == "browser":
        return Wasm(folder / "it.wasm", ram)
    if target == "esp32":
        return Native(folder, ram)
    code = linked((folder / "it.o").read_bytes(), TARGETS[target], entries, folder)
    return Machine(code, TARGETS[target], ram)


def test_an_operator_computes_as_on_the_host(operator, target, tmp_path):
    placed = Placed(OPS[operator], placements(OPS[operator])[0])
    rng = np.random.default_rng(0)
    program = cv.compile(placed.graph(), batch_size=BATCH, device="small", keep=["y"])
    parameters, data = placed.parameters(rng), placed.data(BATCH, rng)
    with cv.CalcHeap(program.heap_bytes) as heap:
        model = heap.create(program, seed=3)
        for name, value in parameters.items():
            model.parameters[name][...] = value
        pack = model.export(tmp_path, target, "it", paths=["learn"])
        function = "it_step"
        machine = machine_of(target, tmp_path, pack.ram, ["it_start", function])
        machine.call("it_start")
        loaded = model.loaded
        phases = ("forward", "backward", "optimize", "end_round") if placed.trains else ("forward",)
        spans = [loaded.span("learn", (phase,)) for phase in phases]
        places = places_of(program, spans, loaded.image)

        def raw(name):
            """A value's numbers as they lie in the host's heap, and their place in the device's."""
            symbol = loaded.symbol(name)
            cells = model.slot.elements.view(symbol.dtype)[symbol.offset :][: symbol.elems.at(BATCH)]
            return cells, places.of(symbol.start)[0]

        for name, value in data.items():
            put(model, name, value)
            machine.write(*raw(name))
        for phase in phases:
            getattr(model, phase)("learn")
        assert machine.call(function) == 0
        for name in ["y", *parameters]:
            wanted, at = raw(name)
            assert apart(machine.read(wanted.size, wanted.dtype, at), wanted) < CLOSE, f"{name} of {placed}"


LOWERED = """
import sys
from calcvm.edge.narrow import narrow
narrow()
from calcvm.edge.targets import TARGETS
from calcvm.kernels_cpu import find
from calcvm.kernels_cpu._common import lowered, on_device
from calcvm.kernels_cpu._target import on_target
from calcvm.ops import ROWS
target = TARGETS["cortex-m4f"].target
with on_device("small", straight=True), on_target(target):
    for name in [*ROWS][:: int(sys.argv[1])]:
        kernel = find(name)
        lowered(kernel.fn, kernel.signature("float32"), kernel.words, target)
"""


def test_every_kernel_has_a_form_with_integers_of_32_bits(whole):
    done = subprocess.run(
        [sys.executable, "-c", LOWERED, "1" if whole else "24"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
