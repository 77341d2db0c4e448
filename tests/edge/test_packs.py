"""Packs for other processors, linked and run in an emulator beside the host."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.edge.emission import emit
from calcvm.edge.places import Places, places_of
from calcvm.edge.targets import ALIASES, TARGETS
from calcvm.formulas.steps import GAMMA_T, T
from calcvm.operators import elementwise
from tests.conftest import by_turns
from tests.edge.emulator import Machine, linked, own_bytes, unwinding_bytes
from tests.edge.native import Native

EMULATED = [name for name in TARGETS if name not in ("linux-x86_64", "browser", "esp32")]  # which run otherwise
STEPS = 20


def network(sizes=(4, 16, 3)):
    net = nn.Linear(sizes[1])
    for size in sizes[2:]:
        net = net >> nn.ReLU() >> nn.Linear(size)
    return net


def model_of(net, shape, **how):
    options = {"loss": "softmax_cross_entropy", "optimizer": cv.Adam(1e-2), "batch_size": 1, "seed": 0, "workers": 1}
    return cv.Model(net, input_shape=shape, **{**options, **how})


def created(graph, **how):
    """A model of a custom graph, for a batch of 1."""
    program = cv.compile(graph, batch_size=1, device="small", **how)
    return cv.CalcHeap(program.heap_bytes).create(program)


class Device:
    """A model's pack on an emulated processor; its heap is at the start."""

    def __init__(self, model, target, folder, **how):
        self.model, self.pack = model, model.export(folder, target, "it", **how)
        self.facts = json.loads((folder / "it.json").read_text())
        self.header = (folder / "it.h").read_text()
        found = re.findall(
            r"\*it_(\w+)\(void \*heap\) \{ return \((\w+) \*\).*heap \+ (\d+)\); \} /\* (\S+)", self.header
        )
        self.places = {
            name.removesuffix("_data"): (int(at), math.prod(map(int, re.findall(r"\d+", size))))
            for name, _, at, size in found
        }
        processor, entries = (
            TARGETS[ALIASES.get(target, target)],
            re.findall(r"^int32_t (\w+)\(", self.header, re.MULTILINE),
        )
        if (folder / "it.c").exists():
            self.machine = Native(folder, self.facts["ram"])
        else:
            self.elf = linked((folder / "it.o").read_bytes(), processor, entries, folder)
            self.machine = Machine(self.elf, processor, self.facts["ram"])
        self.start = bytes(model.image()).rstrip(b"\0")  # is in flash, too
        self.machine.write(np.full(self.facts["ram"], 0xA5, np.uint8))  # as RAM may be
        assert self.machine.call("it_start") == 0

    def __call__(self, function, **arrays):
        for name, array in arrays.items():
            self.machine.write(np.asarray(array, "f4"), self.places[name][0])
        return self.machine.call(f"it_{function}")

    def __getitem__(self, name):
        at, n = self.places[name]
        return self.machine.read(n, "f4", at)

    def parameters(self):
        """Those of the device and of the host, as they lie in their heaps."""
        host, (start, _) = self.model.slot.elements, self.pack.state
        found = [(self.model.loaded.symbol(name), self.pack.lasting[name]) for name in self.model.parameters]
        return [
            (self.machine.read(of.bytes // 4, "f4", start + of.at), host[s.offset :][: of.bytes // 4])
            for s, of in found
        ]


def apart(found, wanted):
    return np.abs(np.asarray(found) - wanted).max() / np.abs(wanted).max()


def beside_the_host(model, target, folder, classes, steps=STEPS):
    """The device after some steps, each of which agrees with the host's."""
    device, rng = Device(model, target, folder), np.random.default_rng(1)
    shape = model.loaded.shape("input", 1)[1:]
    for _ in range(steps):
        x, y = rng.uniform(-1, 1, (1, *shape)).astype("f4"), rng.integers(0, classes, 1)
        loss = model.step(x, y)
        assert device("step", input=x, target=y) == 0
        assert device["loss"][0] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    trained = device.machine.count, device.machine.stack
    assert all(apart(found, wanted) < 2e-6 for found, wanted in device.parameters())
    x = rng.uniform(-1, 1, (1, *shape)).astype("f4")
    assert device("predict", input=x) == 0
    assert apart(device["output"], model.predict(x).ravel()) < 2e-6
    return device, trained


# ---------------------------------------------------------------- the same numbers
LIMITS = {  # of 4-16-3 with Adam: bytes linked, instructions of a step, bytes of stack
    "cortex-m0plus": (8000, 300_000, 320), "cortex-m4f": (3000, 7000, 256), "cortex-m33": (3000, 7000, 256),
    "riscv32": (4000, 7500, 256), "esp32-c3": (9000, 400_000, 320), "raspberry-pi-4": (4100, 2000, 256),
    "armv7": (5200, 2600, 512), "riscv64": (5000, 5800, 512),
}  # fmt: skip


@pytest.mark.parametrize("target", EMULATED)
def test_a_network_trains_as_on_the_host(target, tmp_path):
    device, (count, stack) = beside_the_host(model_of(network(), (4,)), target, tmp_path, 3)
    size, most, deepest = LIMITS[target]
    assert own_bytes(device.elf, (tmp_path / "it.o").read_bytes()) - len(device.start) < size
    assert count <= most
    assert stack <= deepest


@pytest.mark.parametrize(
    "optimizer",
    [cv.SGD(0.1, momentum=0.9, weight_decay=0.01), cv.AdamW(1e-2), cv.RMSProp(1e-2), cv.Adam(1e-2, clip_norm=0.5)],
    ids=str,
)
def test_optimizers(optimizer, tmp_path):
    beside_the_host(model_of(network(), (4,), optimizer=optimizer), "cortex-m4f", tmp_path, 3)


@pytest.mark.parametrize(
    "schedule",
    [
        cv.Step(7, 0.5, warmup_steps=4),
        cv.Exponential(0.9, warmup_steps=4),
        cv.Cosine(30, min_lr=1e-3, warmup_steps=4),
        cv.CosineRestarts(3, 1.3),
        cv.CosineRestarts(5, 2, warmup_steps=4),
    ],
    ids=lambda schedule: schedule.kind,
)
def test_schedules(schedule, tmp_path):
    """60 steps: cycles end at numbers of steps that are none of float32, and the last rate of a cosine is reached."""
    model = model_of(network(), (4,), optimizer=cv.SGD(0.1, schedule=schedule))
    beside_the_host(model, "cortex-m4f", tmp_path, 3, 60)


def test_cycles_of_a_schedule_after_millions_of_steps(tmp_path):
    """Where float32 has no fractions of a step."""
    model = model_of(network(), (4,), optimizer=cv.SGD(0.1, schedule=cv.CosineRestarts(50)))
    symbol = next(s for s in model.program.symbols if s.name == "learn.hyper")
    hyper = model.slot.elements.view("f8")[symbol.offset :]
    hyper[T], hyper[GAMMA_T] = 1_999_990, 1_999_951
    beside_the_host(model, "cortex-m4f", tmp_path, 3, 20)


NETWORKS = {
    "functions": (
        lambda: nn.Linear(7) >> nn.Tanh() >> nn.LayerNorm() >> nn.Linear(5) >> nn.GELU() >> nn.Linear(3),
        (4,),
    ),
    "convolutions": (
        lambda: nn.Conv2d(4, 3) >> nn.ReLU() >> nn.MaxPool2d(2) >> nn.Flatten() >> nn.Linear(3),
        (1, 8, 8),
    ),
    "lstm": (lambda: nn.LSTM(6, return_sequences=False) >> nn.Linear(3), (5, 2)),
}


@pytest.mark.parametrize("target", ["cortex-m4f", "raspberry-pi-4", "esp32"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name, target, tmp_path):
    make, shape = NETWORKS[name]
    beside_the_host(model_of(make(), shape), target, tmp_path, 3, steps=5)


def test_a_stream(tmp_path):
    """State is kept from step to step."""
    model = model_of(nn.GRU(5) >> nn.Linear(2), (6, 3), loss="mse", stream=True)
    device, stream = Device(model, "riscv32", tmp_path), model.stream()
    for x in np.random.default_rng(0).uniform(-1, 1, (6, 3)).astype("f4"):
        assert device("stream", step=x) == 0
        assert apart(device["stream_output"], stream(x)) < 2e-6


# ---------------------------------------------------------------- what a pack takes
def pytest_generate_tests(metafunc):
    if metafunc.function is test_numbers_are_those_of_what_is_linked:
        targets = ["pico-2", "cortex-m4f", "riscv32", "riscv64"]
        by_turns(metafunc, 4, name=["network", "lstm", "convolutions"], target=targets)


def test_numbers_are_those_of_what_is_linked(name, target, tmp_path):
    make, shape = NETWORKS.get(name, (network, (4,)))
    device = Device(model_of(make(), shape), target, tmp_path)
    pack = device.pack
    assert [f for f in pack.undefined if not f.startswith("__")] == [], "nothing but the compiler's runtime"
    assert pack.ram == device.facts["ram"] == model_of(make(), shape, device="small").program.heap_bytes
    assert name != "network" or (pack.ram <= 2700 and pack.undefined == ())
    code = (tmp_path / "it.o").read_bytes()
    assert own_bytes(device.elf, code) + unwinding_bytes(code) == pytest.approx(pack.flash, abs=16)  # of alignment
    device("step", input=np.zeros(shape), target=[0])
    assert pack.stack["it_step"] <= device.machine.stack + 16
    assert device.machine.stack <= pack.stack["it_step"] + 16
    shown = str(pack)
    assert f"flash  {pack.flash:,} bytes" in shown
    assert f"RAM    {pack.ram:,} bytes" in shown


@pytest.mark.parametrize("target", ["cortex-m4f", "raspberry-pi-4"])
def test_inference_alone_has_its_parameters_in_flash(target, tmp_path):
    """So RAM has the values of a step alone; and a GRU's stream has its state there."""
    model = model_of(network(), (4,))
    device = Device(model, target, tmp_path / "alone", paths=["predict"])
    assert device.pack.ram <= 256
    assert device.pack.state[1] == 0
    size = own_bytes(device.elf, (tmp_path / "alone" / "it.o").read_bytes()) - 4 * 131
    assert size <= (400 if target == "cortex-m4f" else 1100)
    x = np.random.default_rng(0).uniform(-1, 1, (1, 4)).astype("f4")
    assert device("predict", input=x) == 0
    assert apart(device["output"], model.predict(x).ravel()) < 2e-6
    model = model_of(nn.GRU(5) >> nn.Linear(2), (6, 3), loss="mse", stream=True)
    device, stream = Device(model, target, tmp_path / "stream", paths=["stream"]), model.stream()
    assert device.pack.state[1] == 4 * 5
    for x in np.random.default_rng(0).uniform(-1, 1, (6, 3)).astype("f4"):
        assert device("stream", step=x) == 0
        assert apart(device["stream_output"], stream(x)) < 2e-6


@pytest.mark.parametrize("target", ["cortex-m0plus", "cortex-m4f", "riscv32"])
@pytest.mark.parametrize("name", ["sqrt", "round", "floor", "ceil"])
def test_what_processors_lack_has_the_bits_of_the_host(name, target, tmp_path):
    """Numbers of any bits; and the analysis of the stack knows of it."""
    rng, n = np.random.default_rng(0), 500
    special = np.array([0, -0.0, 1, 0.5, -0.5, 1.5, 2.5, 1 << 24, 2**-126, 2**-149, np.inf, -np.inf, np.nan, -1], "f4")
    bits = rng.integers(0, 1 << 32, n - len(special), dtype=np.uint32)
    near = (bits & 0x807F_FFFF) | (rng.integers(120, 155, len(bits), dtype=np.uint32) << 23)  # of -2^28 to 2^28
    x = np.concatenate([special, np.where(rng.random(len(bits)) < 0.5, bits, near).view("f4")])
    x = x.reshape(1, n)
    g = cv.CalcGraph()
    with g.path("predict"):
        getattr(cv, name)(g.placeholder("input", (None, n))).rename("output")
    model = created(g, keep=["output"])
    device = Device(model, target, tmp_path, paths=["predict"])
    assert [f for f in device.pack.undefined if not f.startswith("__")] == []
    assert device("predict", input=x) == 0
    with np.errstate(invalid="ignore"):
        wanted = {"round": np.rint}.get(name, getattr(np, name))(x)[0]
    loaded = model.loaded
    places = places_of(model.program, [loaded.span("predict", ("forward",))], loaded.image)
    found = device.machine.read(n, "f4", places.of(loaded.symbol("output").start)[0])
    same = (found.view("u4") == wanted.view("u4")) | (np.isnan(found) & np.isnan(wanted))
    assert same.all(), x[0][~same]
    if not device.pack.undefined:
        stack = device.pack.stack["it_predict"]
        assert stack - 16 < device.machine.stack <= stack  # not all of a frame is written


@pytest.mark.parametrize("target", ["cortex-m4f", "raspberry-pi-4"])
def test_speed_is_another_objective(target, tmp_path):
    model = model_of(network(), (4,))
    device = Device(model, target, tmp_path, objective="speed")
    x = np.random.default_rng(0).uniform(-1, 1, (1, 4)).astype("f4")
    assert device("step", input=x, target=[1]) == 0
    model.step(x, np.array([1]))
    assert all(apart(found, wanted) < 2e-6 for found, wanted in device.parameters())


def test_a_trap_is_a_return_code(tmp_path):
    model = model_of(network(), (4,))
    device = Device(model, "cortex-m4f", tmp_path)
    code = device("step", input=np.zeros(4), target=[3])
    assert code & 0xFF == 1
    assert code >> 8 == 2  # the row of the loss
    assert device("step", input=np.zeros(4), target=[2]) == 0


REFUSED = {  # of networks that change more than parameters: a function, and labels that it has not
    "running means": (lambda: model_of(nn.Linear(8) >> nn.BatchNorm() >> nn.Dropout(0.2) >> nn.Linear(3), (4,), batch_size=3), "step", "target", [[0, 1, 3], [-1, 0, 1], [0, 0.5, 1], [0, np.nan, 1]]),
    "tokens of a stream": (lambda: model_of(nn.Embedding(12, 3) >> nn.GRU(5) >> nn.Linear(2), (6,), loss="mse", stream=True), "stream", "step", [[12], [-1], [1e9]]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("target", ["cortex-m4f", "raspberry-pi-4", "esp32"])
def test_labels_that_are_no_class_change_nothing(target, name, tmp_path):
    make, function, feed, labels = REFUSED[name]
    device = Device(make(), target, tmp_path)
    at, n = device.pack.state
    before = device.machine.read(n, "u1", at).tobytes()
    for wrong in labels:
        assert device(function, **{feed: wrong}) & 0xFF == 1
        assert device.machine.read(n, "u1", at).tobytes() == before
    assert device(function, **{feed: np.zeros(len(labels[0]))}) == 0
    assert device.machine.read(n, "u1", at).tobytes() != before


def test_ignored_labels_are_ignored(tmp_path):
    model = model_of(network(), (4,), batch_size=3, ignore_index=-100)
    device = Device(model, "cortex-m4f", tmp_path)
    x, y = np.random.default_rng(0).uniform(-1, 1, (3, 4)).astype("f4"), np.array([1, -100, 2])
    assert device("step", input=x, target=y) == 0
    assert device["loss"][0] == pytest.approx(model.step(x, y), rel=1e-5)
    assert device("step", input=x, target=[1, -99, 2]) & 0xFF == 1


# ---------------------------------------------------------------- what is refused
def test_no_path_takes_the_place_of_training(tmp_path):
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, 2)), g.parameter("w", (2, 1))
    with g.path("step"):
        cv.tanh(x @ w)
    with g.path("learn", backward=True) as path:
        path.minimize(cv.mean((x @ w) ** 2), cv.SGD(0.1))
    with pytest.raises(cv.CalcError, match="paths step, learn give two functions one name"):
        created(g).export(tmp_path, "cortex-m4f", paths=["step", "learn"])


def test_names_of_functions_differ(tmp_path):
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, 2)), g.parameter("w", (2, 1))
    for name in ("a b", "a-b"):
        with g.path(name, backward=True) as path:
            path.minimize(cv.mean((x @ w) ** 2), cv.SGD(0.1))
    with pytest.raises(cv.CalcError, match="paths a b, a-b give two functions one name"):
        cv.Model(g, batch_size=1).export(tmp_path, "pico")


def test_a_header_is_one_of_cpp_too(tmp_path):
    """Also where a value has the name of a function: the input of a stream's step."""
    model_of(nn.GRU(5) >> nn.Linear(2), (6, 3), loss="mse", stream=True).export(tmp_path, "esp32", "it")
    assert "float *it_step_data(void *heap)" in (tmp_path / "it.h").read_text()
    (tmp_path / "main.cpp").write_text('#include "it.h"\nint main() { return it_start(nullptr); }\n')
    options = ["-Wall", "-Wextra", "-Werror", "-c"]
    for source, language in (("it.c", "cc"), ("main.cpp", "c++")):
        subprocess.run([sys.executable, "-m", "ziglang", language, *options, source], cwd=tmp_path, check=True)
    subprocess.run([sys.executable, "-m", "ziglang", "c++", "it.o", "main.o", "-o", "it"], cwd=tmp_path, check=True)


def test_a_custom_operator_is_refused(tmp_path, forgotten):
    @elementwise()
    class tripled_here:
        def y(x):
            return 3 * x

        def dx(dy):
            return 3 * dy

    model = model_of(nn.Linear(3) >> nn.Function(lambda x: cv.apply("tripled_here", x)), (4,))
    with pytest.raises(cv.CalcError, match=r"tripled_here_bwd is a kernel that only this process has: .*cv.equation"):
        model.export(tmp_path, "pico")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda m, p: m.export(p, "cortex-m9"), "target 'cortex-m9' is unknown; take one of .*cortex-m4f.*pico"),
        (lambda m, p: m.export(p, "pico", "My model"), "a C name of small letters"),
        (lambda m, p: m.export(p, "pico", 5), "name 5: a C name of small letters"),
        (lambda m, p: m.export(p, "pico", "math"), "not that of a header of C"),
        (lambda m, p: m.export(p, "pico", paths=[]), "paths is empty: name one"),
        (lambda m, p: m.export(3, "pico"), "is not the path of a folder"),
        (lambda m, p: m.export(p, "pico", batch_size=0), "batch_size must be"),
        (lambda m, p: model_of(network(), (4,), device="small").export(p, "pico", batch_size=2), "batch_size must be"),
        (lambda m, p: m.export(p, "pico", objective="best"), "objective 'best' is unknown; take one of size, speed"),
        (lambda m, p: m.export(p, "pico", paths=["learned"]), "a path 'learned' is unknown; take one of learn, predict"),
        (lambda m, p: model_of(network(), (4,), dtype="float64").export(p, "pico"), "computes in float32, and the program has float64"),
    ],
)  # fmt: skip
def test_wrong_input(call, told, tmp_path):
    with pytest.raises(cv.CalcError, match=told):
        call(model_of(network(), (4,)), tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_what_has_no_integers_wide_enough_is_refused():
    program = cv.compile(cv.build_graph(nn.Linear(60_000), (40_000,), "mse", cv.SGD(0.1)), batch_size=1)
    spans = {"predict": [program.sections["predict", "forward"]]}
    with pytest.raises(cv.CalcError, match="beyond integers of 32 bits, which cortex-m4f has"):
        places = Places(((0, program.heap_bytes, 0, False),), program.heap_bytes, (0, 1), (0, 0))
        emit(program, 1, spans, TARGETS["cortex-m4f"], "size", places, "start", b"\1", b"", {})
