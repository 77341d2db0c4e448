"""What a device has learned: its state in pages, across power cuts, to the host and back."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from tests.edge.test_packs import Device, apart, model_of, network

DOOR = """
#include "it.h"
uint32_t page_bytes(void) { return IT_PAGE_BYTES; }
void save(const void *heap, uint32_t counter, void *page) { it_save(heap, counter, page); }
int load(void *heap, const void *a, const void *b, uint32_t *counter) { return it_load(heap, a, b, counter) != 0; }
"""


@pytest.fixture
def exported(tmp_path):
    model = model_of(network(), (4,))
    pack = model.export(tmp_path, "cortex-m4f", "it")
    (tmp_path / "door.c").write_text(DOOR)
    command = [
        sys.executable,
        "-m",
        "ziglang",
        "cc",
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "door.c",
        "-o",
        "door.so",
    ]
    subprocess.run(command, cwd=tmp_path, check=True)
    door = ctypes.CDLL(str(tmp_path / "door.so"))
    return model, pack, door


def test_no_cut_of_power_loses_a_state(exported):
    """A page is written over the older one, and power fails after some of its bytes: the newer one is there."""
    model, pack, door = exported
    rng = np.random.default_rng(0)
    pages = [bytearray(rng.bytes(door.page_bytes())) for _ in range(2)]
    heap, counter, kept = bytearray(pack.ram), ctypes.c_uint32(), None
    for turn in range(100):
        heap[:] = rng.bytes(len(heap))
        new = ctypes.create_string_buffer(door.page_bytes())
        door.save(bytes(heap), turn + 2**32 - 50, new)  # the counter begins again at 0 on the way
        whole = kept is None or rng.random() < 0.5
        written = door.page_bytes() if whole else int(rng.integers(0, door.page_bytes()))
        pages[turn % 2][:written] = new.raw[:written]
        if whole:
            start, size = pack.state
            kept = bytes(heap[start : start + size])
        else:  # the next one takes this place
            pages.reverse()
        found = ctypes.create_string_buffer(bytes(pack.ram), pack.ram)
        assert door.load(found, bytes(pages[0]), bytes(pages[1]), ctypes.byref(counter)) == 1
        start, size = pack.state
        assert found.raw[start : start + size] == kept
        pack.restore(model, *map(bytes, pages))
        assert pack.state_of(model)[:524] == kept[:524]  # parameters; hyperparameters are not any bytes


def test_damaged_pages_are_refused(exported, whole):
    model, pack, door = exported
    page = ctypes.create_string_buffer(door.page_bytes())
    heap = bytes(pack.ram)
    door.save(heap, 1, page)
    rng, counter = np.random.default_rng(1), ctypes.c_uint32()
    before = model.image().tobytes()
    for _ in range(100_000 if whole else 1000):
        damaged = bytearray(page.raw)
        for k in rng.integers(0, len(damaged), rng.integers(1, 4)):
            damaged[k] ^= int(rng.integers(1, 256))
        if bytes(damaged) == page.raw:
            continue
        found = ctypes.create_string_buffer(heap, len(heap))
        assert door.load(found, bytes(damaged), bytes(damaged), ctypes.byref(counter)) == 0
        assert found.raw == heap
        with pytest.raises(cv.CalcError, match="no page is whole and of this program"):
            pack.restore(model, bytes(damaged))
    assert model.image().tobytes() == before


NETWORKS = {
    "digits": (lambda: network((64, 16, 10)), (64,), 10, cv.Adam(1e-2)),
    "convolutions": (lambda: nn.Conv2d(3, 3, bias=False) >> nn.BatchNorm() >> nn.ReLU() >> nn.Flatten() >> nn.Linear(3), (1, 6, 6), 3, cv.AdamW(1e-2)),
    "momentum": (network, (4,), 3, cv.SGD(0.1, momentum=0.9)),
}  # fmt: skip


@pytest.mark.parametrize("target", ["cortex-m4f", "raspberry-pi-4"])
@pytest.mark.parametrize("name", NETWORKS)
def test_training_goes_on_at_either_end(name, target, tmp_path):
    """Host, device, host: as the host alone."""
    make, shape, classes, optimizer = NETWORKS[name]
    batch = 4 if name == "convolutions" else 1
    model, alone = (model_of(make(), shape, optimizer=optimizer, batch_size=batch) for _ in range(2))
    rng = np.random.default_rng(0)
    data = [(rng.uniform(-1, 1, (batch, *shape)).astype("f4"), rng.integers(0, classes, batch)) for _ in range(15)]
    for x, y in data:
        alone.step(x, y)
    for x, y in data[:5]:
        model.step(x, y)
    device = Device(model, target, tmp_path)
    for x, y in data[5:10]:
        assert device("step", input=x, target=y) == 0
    pack = cv.Pack.load(tmp_path / "it.json")
    assert pack.lasting == device.pack.lasting
    start, size = pack.state
    pack.restore(model, device.machine.read(size, "u1", start).tobytes())
    for x, y in data[10:]:
        model.step(x, y)
    for name_, value in model.parameters.items():
        assert apart(value, alone.parameters[name_]) < 1e-5
    device.machine.write(np.frombuffer(pack.state_of(model), "u1"), start)
    x, _ = data[0]
    device("predict", input=x)
    assert apart(device["output"], model.predict(x).ravel()) < 1e-5


def test_what_is_no_pack_or_of_another_graph_is_refused(tmp_path):
    model = model_of(network(), (4,))
    pack = model.export(tmp_path, "pico", "it")
    with pytest.raises(cv.CalcError, match="the pack is of another graph: the model has no"):
        pack.restore(model_of(nn.Linear(16), (4,)), bytes(pack.state[1]))
    with pytest.raises(cv.CalcError, match="another graph: 'linear_1.weight' has 256 bytes there, 128 in the model"):
        pack.restore(model_of(network((4, 8, 3)), (4,)), bytes(pack.state[1]))
    (tmp_path / "no.json").write_text(json.dumps({"target": "pico"}))
    for what in ("no.json", "it.h"):
        with pytest.raises(cv.FileError, match="describes no pack: give the .json of model.export"):
            cv.Pack.load(tmp_path / what)
    with pytest.raises(cv.FileError):
        cv.Pack.load(tmp_path / "none.json")
