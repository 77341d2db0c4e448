"""Pages: what does not fit waits in a file, or persists there; training has the bits of training in memory."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import calcvm as cv
from calcvm import kernel, nn
from calcvm.errors import FileError, PlanError, ProgramError, Trap
from calcvm.ops.statement import Lowered
from calcvm.planner import plan
from calcvm.planner.paging import KINDS, File
from calcvm.vm.memory import pages, slot
from calcvm.vm.program.verify import verify
from tests.planner_checker import Broken, check
from tests.test_planner import programs
from tests.test_recompute import chain, deep

FAST = File(1 << 40, 1e12)


# ---------------------------------------------------------------- plans
@pytest.mark.parametrize("again", [False, True])
def test_a_chain_waits_in_the_file(again: bool) -> None:
    lowered = chain(12)
    free = plan(lowered, itemsize=4, batch_size=1, workers=3)
    p = plan(lowered, itemsize=4, batch_size=1, workers=3, memory=free.heap_bytes - 256, file=FAST, recompute=again)
    check(p, lowered, batches=(1,))
    assert p.heap_bytes <= free.heap_bytes - 256
    assert p.page_bytes > 0 and not p.recomputed  # a fast file costs less
    slow = replace(FAST, bandwidth=1.0)
    if again:
        assert plan(
            lowered, itemsize=4, batch_size=1, workers=3, memory=p.heap_bytes, file=slow, recompute=True
        ).recomputed


def test_no_more_is_written_than_there_is_room_for() -> None:
    lowered = chain(12)
    free = plan(lowered, itemsize=4, batch_size=1, workers=3)
    p = plan(
        lowered,
        itemsize=4,
        batch_size=1,
        workers=3,
        memory=free.heap_bytes - 256,
        file=replace(FAST, room=128),
        recompute=True,
    )
    assert 0 < p.page_bytes <= 128 and p.recomputed
    with pytest.raises(PlanError, match="moved to a file"):
        plan(lowered, itemsize=4, batch_size=1, workers=3, memory=free.heap_bytes - 256, file=replace(FAST, room=128))


@given(programs(), st.sampled_from([1, 2, 7]), st.floats(0.4, 0.95), st.booleans(), st.integers(0, 2))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_generated_programs(lowered: Lowered, batch: int, share: float, again: bool, streams: int) -> None:
    free = plan(lowered, itemsize=4, batch_size=batch, workers=3)
    memory = int(share * free.heap_bytes)
    options: dict[str, Any] = {"recompute": again, "file": FAST, "stream": KINDS[:streams]}
    try:
        p = plan(lowered, itemsize=4, batch_size=batch, memory=memory, workers=3, **options)
    except PlanError as e:
        assert e.needed is not None and e.needed > memory == e.allowed
        return
    check(p, lowered, batches={batch, 1})
    assert p.heap_bytes <= memory


# ---------------------------------------------------------------- as a user trains
def wide(n: int = 4) -> nn.Layer:
    net: nn.Layer = nn.Linear(256)
    for _ in range(n):
        net = net >> nn.Tanh() >> nn.Dropout(0.1) >> nn.Linear(256)
    return net >> nn.Linear(4)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize(
    ("network", "shape", "share"), [(deep, (3, 12, 12), 0.6), (wide, (40,), 0.7), (wide, (40,), 0.5)]
)
def test_training_has_the_same_bits(network, shape, share, accumulate, dtype, workers, tmp_path, whole) -> None:
    if (accumulate + workers + (dtype == "float32")) % 2 and not whole:
        pytest.skip("takes --whole")
    graph = cv.build_graph(network(), shape, "softmax_cross_entropy", cv.Adam(1e-2))
    options: dict[str, Any] = {"batch_size": 32, "dtype": dtype, "accumulate": accumulate, "workers": workers}
    free = cv.plan(graph, **options)
    memory = int(share * free.heap_bytes)
    paged = cv.plan(
        graph, memory=memory, page_bytes="64 MiB", recompute=network is deep, page_bandwidth=1e12, **options
    )
    assert paged.heap_bytes <= memory and 0 < paged.page_bytes <= 64 << 20
    rng = np.random.default_rng(3)
    data = [(rng.normal(size=(b, *shape)), rng.integers(0, 4, b)) for b in (32, 7, 1, 32, 12)]
    models = [
        cv.CalcHeap(p.heap_bytes, page_folder=tmp_path).create(cv.compile(graph, plan=p), seed=5) for p in (free, paged)
    ]
    assert not [*tmp_path.iterdir()]  # files have no names
    first, second = ([m.step(*d) for d in data] for m in models)
    assert first == second
    for part in ("parameters", "buffers"):
        for name, value in getattr(models[0], part).items():
            np.testing.assert_array_equal(value, getattr(models[1], part)[name], err_msg=name)


def streaming(**more: Any) -> tuple[cv.CalcGraph, Any, Any]:
    """A graph, its plan, and one in which parameters and optimizer state persist in the file."""
    graph = cv.build_graph(wide(), (40,), "softmax_cross_entropy", cv.Adam(1e-2))
    free = cv.plan(graph, batch_size=8, workers=1)
    small = cv.plan(graph, batch_size=8, workers=1, memory=int(0.5 * free.heap_bytes), page_bytes="64 MiB", **more)
    assert small.zones["pages"].persistent_bytes > 0
    return graph, free, small


def test_what_persists_in_the_file_is_a_part_of_the_model(tmp_path) -> None:
    graph, free, small = streaming()
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(8, 40)), rng.integers(0, 4, 8)
    one = cv.CalcHeap(free.heap_bytes).create(cv.compile(graph, plan=free), seed=5)
    program = cv.compile(graph, plan=small)
    heap = cv.CalcHeap(small.heap_bytes, cv.FileStore(tmp_path / "models"))
    paged = heap.create(program, seed=5, name="first")
    assert [one.step(X, y) for _ in range(3)] == [paged.step(X, y) for _ in range(3)]
    other = heap.create(program, seed=9, name="second")  # the first is switched out
    other.step(X, y)
    loss = one.step(X, y)
    assert paged.step(X, y) == loss
    twin = paged.copy(heap=cv.CalcHeap(small.heap_bytes))
    weights = {name: value.copy() for name, value in one.parameters.items()}
    loss = one.step(X, y)
    assert twin.step(X, y) == loss == paged.step(X, y)
    heap.flush()
    heap.close()
    again = cv.CalcHeap(small.heap_bytes, cv.FileStore(tmp_path / "models")).open("first")
    assert again.step(X, y) == one.step(X, y)
    again.set_parameters(weights)
    for name, value in weights.items():
        np.testing.assert_array_equal(again.parameters[name], value)
    again.parameters["linear_2.weight"][0, 0] = 3.5  # views
    assert again["linear_2.weight"][0, 0] == 3.5
    again.reset(5)
    fresh = cv.CalcHeap(free.heap_bytes).create(cv.compile(graph, plan=free), seed=5)
    assert [again.step(X, y) for _ in range(2)] == [fresh.step(X, y) for _ in range(2)]
    loaded = cv.load_program(saved(program, tmp_path))
    assert loaded.page_bytes == program.page_bytes == small.page_bytes and loaded == program


def test_as_much_is_streamed_as_is_missing(tmp_path) -> None:
    """The less memory, the more persists in the file; and the bits are the same."""
    graph = cv.build_graph(wide(), (40,), "softmax_cross_entropy", cv.Adam(1e-2))
    how: dict[str, Any] = {"batch_size": 8, "workers": 1, "accumulate": False}
    free, least = (cv.plan(graph, objective=which, **how) for which in ("speed", "memory"))
    parts = [cv.plan(graph, memory=int(f * least.heap_bytes), page_bytes="64 MiB", **how) for f in (0.99, 0.8, 0.6)]
    paged = [plan.zones["pages"].persistent_bytes for plan in parts]
    assert 0 < paged[0] < paged[1] < paged[2] and paged[0] < 0.1 * least.heap_bytes
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(8, 40)), rng.integers(0, 4, 8)
    models = [
        cv.CalcHeap(p.heap_bytes, page_folder=tmp_path).create(cv.compile(graph, plan=p), seed=5)
        for p in (free, *parts)
    ]
    losses = [[model.step(X, y) for _ in range(3)] for model in models]
    assert losses[1:] == losses[:1] * 3


def saved(program: Any, folder: Path) -> Path:
    program.save(folder / "program.calc")
    return folder / "program.calc"


def test_a_network_larger_than_memory_predicts() -> None:
    """Weights are streamed layer by layer: the heap holds the largest, not their sum."""
    graph = cv.CalcGraph()
    x = graph.placeholder("x", (None, 256))
    with graph.path("predict"):
        h = x
        for k in range(8):
            h = cv.tanh(cv.matmul(h, graph.parameter(f"w{k}", (256, 256))))
        h.rename("y")
    free = cv.plan(graph, batch_size=4, workers=1)
    small = cv.plan(graph, batch_size=4, workers=1, memory=free.heap_bytes // 3, page_bytes="4 MiB")
    assert small.heap_bytes < 8 * 256 * 256 * 4 // 3
    a, b = (cv.CalcHeap(p.heap_bytes).create(cv.compile(graph, plan=p), seed=2) for p in (free, small))
    data = np.random.default_rng(0).normal(size=(4, 256))
    for m in (a, b):
        m["x"] = data
        m.forward("predict")
    np.testing.assert_array_equal(a["y"], b["y"])


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX's, where another test has imported it
def test_a_fork_has_a_file_of_its_own() -> None:
    graph, _, small = streaming()
    model = cv.CalcHeap(small.heap_bytes).create(cv.compile(graph, plan=small), seed=5)
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(8, 40)), rng.integers(0, 4, 8)
    model.step(X, y)
    expected = model.copy(heap=cv.CalcHeap(small.heap_bytes))
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        losses = [model.step(X, y) for _ in range(5)]
        os.write(into, np.array(losses).tobytes())
        os._exit(0)
    os.close(into)
    found = b""
    while part := os.read(out, 1000):
        found += part
    assert os.waitpid(pid, 0)[1] == 0
    wanted = [expected.step(X, y) for _ in range(5)]
    assert np.frombuffer(found).tolist() == wanted
    assert [model.step(X, y) for _ in range(5)] == wanted  # what the child did is not seen here


# ---------------------------------------------------------------- what goes wrong
def test_room_is_taken_before_anything_is_written(monkeypatch, tmp_path) -> None:
    graph, _, small = streaming()
    program = cv.compile(graph, plan=small)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(FileError, match=r"the pages of a model, [\d,]+ bytes in .*: make room on the disk"):
            cv.CalcHeap(small.heap_bytes, page_folder=tmp_path).create(program)
    heap = cv.CalcHeap(small.heap_bytes, page_folder=tmp_path / "none")
    with pytest.raises(FileError, match="none.*the folder to write to must be there"):
        heap.create(program)
    with pytest.raises(cv.CalcError, match="page_folder"):
        cv.CalcHeap(1 << 20, page_folder=3)  # type: ignore[arg-type]
    assert heap.free_bytes == heap.nbytes


def test_a_file_that_cannot_be_read_is_an_error_and_no_number() -> None:
    graph, _, small = streaming()
    model = cv.CalcHeap(small.heap_bytes).create(cv.compile(graph, plan=small), seed=5)
    word = model.slot.bytes[8 * pages.WORD : 8 * pages.WORD + 8].view(np.int64)
    kept = word[0]
    for bad in (0, 10**6):
        word[0] = bad
        with pytest.raises(Trap, match="page_(in|out).*the file of its pages could not be written or read"):
            model.step(np.zeros((8, 40)), np.zeros(8, int))
    word[0] = kept
    model.reset(5)
    assert np.isfinite(model.step(np.zeros((8, 40)), np.zeros(8, int)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_bytes": -1}, "page_bytes -1"),
        ({"page_bytes": "1 MiB", "memory": None}, "page_bytes= goes with memory="),
        ({"page_bytes": "1 MiB", "page_bandwidth": 1e-300}, "page_bandwidth"),
        ({"page_bytes": "much"}, "much"),
        ({"page_bytes": "1 MiB", "page_bandwidth": 0}, "page_bandwidth"),
        ({"page_bytes": "1 MiB", "page_bandwidth": float("nan")}, "page_bandwidth"),
        ({"page_bytes": "1 MiB", "device": "cuda"}, "cuda"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    graph = cv.build_graph(nn.Linear(3), (4,), "mse", cv.SGD(0.1))
    with pytest.raises(cv.CalcError, match=message):
        cv.plan(graph, **{"batch_size": 4, "memory": "1 MiB", **options})


def test_what_does_not_fit_says_that_a_file_would_do() -> None:
    graph = cv.build_graph(deep(), (3, 12, 12), "softmax_cross_entropy", cv.SGD(0.1))
    with pytest.raises(PlanError) as floor:
        cv.plan(graph, batch_size=32, workers=1, memory=1)
    assert re.search(r"alone needs", str(floor.value)) and "page_bytes" not in str(floor.value)


# ---------------------------------------------------------------- proof
def test_the_verifier_follows_pages() -> None:
    """A page is read as it was written; nothing but rows of pages leaves the heap, and these do not leave the file."""
    graph = cv.build_graph(deep(), (3, 12, 12), "softmax_cross_entropy", cv.SGD(0.1))
    free = cv.plan(graph, batch_size=32, workers=1)
    small = cv.plan(
        graph, batch_size=32, workers=1, memory=int(0.6 * free.heap_bytes), page_bytes="64 MiB", page_bandwidth=1e12
    )
    program = cv.compile(graph, plan=small)
    names = [program.spec(pc).name for pc in range(len(program.rows))]
    assert {"page_out", "page_ahead", "page_in"} <= {*names}

    def with_word(name: str, operand: str, value: int) -> Any:
        pc = names.index(name)
        spec, rows = program.spec(pc), program.rows.copy()
        rows[pc, 2 + len(spec.words) + spec.operands.index(spec.operand(operand))] = value
        return replace(program, rows=rows)

    end = program.heap_elems + program.page_bytes // 4
    for name, operand, value, message in (
        ("page_out", "page", end, "leaves the pages"),
        ("page_out", "page", 16, "leaves the pages"),
        ("page_in", "page", program.heap_elems - 1, "leaves the pages"),
        ("page_in", "y", program.heap_elems, "leaves the heap"),
        ("page_out", "x", end - 1, "leaves the heap"),
    ):
        with pytest.raises(ProgramError, match=message):
            verify(with_word(name, operand, value))
    pc = names.index("page_out")
    rows, values = program.rows.copy(), program.operand_values.copy()
    other = next(k for k, name in enumerate(names) if name == "page_out" and k != pc)
    rows[pc, 4], values[pc, 4] = rows[other, 4], values[other, 4]  # written to another's page
    with pytest.raises(ProgramError):
        verify(replace(program, rows=rows, operand_values=values))
    zones = tuple(replace(z, start=z.start + 16) if z.name == "pages" else z for z in program.zones)
    with pytest.raises(ProgramError, match="pages"):
        verify(replace(program, zones=zones))


def test_a_broken_schedule_is_found() -> None:
    lowered = chain(12)
    free = plan(lowered, itemsize=4, batch_size=1, workers=3)
    p = plan(lowered, itemsize=4, batch_size=1, workers=3, memory=free.heap_bytes - 256, file=FAST)
    late = [*p.statements]
    k = next(t for t, s in enumerate(late) if s.spec.name == "page_out")
    late.insert(len(late) - 1, late.pop(k))  # written when it has been read
    with pytest.raises(Broken):
        check(replace(p, lowered=replace(p.lowered, statements=tuple(late))), lowered, batches=(1,))


def test_kernels_and_slots_agree() -> None:
    assert kernel.PAGES == pages.WORD and kernel.LOST_PAGES == slot.LOST_PAGES


PEAK = """
import resource, sys
import numpy as np
import calcvm as cv
def anonymous():
    return sum(int(l.split()[1]) for l in open("/proc/self/smaps_rollup") if l.startswith("Anonymous")) * 1024
graph = cv.CalcGraph()
x = graph.placeholder("x", (None, 1024))
with graph.path("predict"):
    h = x
    for k in range(16):
        h = cv.tanh(cv.matmul(h, graph.parameter(f"w{k}", (1024, 1024), init=cv.init.Constant(1e-3))))
    h.rename("y")
plan = cv.plan(graph, batch_size=1, workers=1, memory="10 MiB", page_bytes="1 GiB")
program = cv.compile(graph, plan=plan)
from calcvm.vm.run.loaded import loaded_of
kept = loaded_of(program)
before = anonymous()
model = cv.CalcHeap(plan.heap_bytes).create(program)
model["x"] = np.ones((1, 1024))
model.forward("predict")
print(anonymous() - before, plan.heap_bytes, plan.page_bytes)
"""


def test_memory_is_what_the_plan_says(tmp_path) -> None:
    """64 MiB of weights, in a heap of less than 10 all but one of them in the file: the process grows by no more."""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", PEAK], env=env, check=True, capture_output=True, text=True, timeout=250
    )
    grown, heap, paged = map(int, found.stdout.split())
    assert heap < 10 << 20 and paged >= 60 << 20
    assert grown <= heap + (2 << 20), f"{grown:,} bytes for a heap of {heap:,}"


def test_a_killed_process_leaves_no_file(tmp_path) -> None:
    code = PEAK.replace("print(", 'print("there", flush=True); import time; time.sleep(200); print(')
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not [*tmp_path.iterdir()]


def test_pages_are_shown(tmp_path) -> None:
    _, _, small = streaming()
    text = str(small)
    assert re.search(rf"in a file +{small.page_bytes:,} bytes, [\d,]+ of them from step to step", text)
    document = small.to_dict()
    assert document["page_bytes"] == small.page_bytes
    within = {v["paged"]: v["start_byte"] + v["bytes"] for v in document["values"]}
    assert within[False] <= small.heap_bytes < within[True] <= small.heap_bytes + small.page_bytes
    small.html(tmp_path / "plan.html")
    assert (
        '"paged": true' in (tmp_path / "plan.html").read_text()
        or '"paged":true' in (tmp_path / "plan.html").read_text()
    )


def test_a_model_with_pages(tmp_path) -> None:
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(64, 40)).astype("float32"), rng.integers(0, 4, 64)
    options: dict[str, Any] = {
        "input_shape": (40,), "loss": "softmax_cross_entropy", "optimizer": cv.Adam(1e-2), "batch_size": 16, "workers": 1, "seed": 3
    }  # fmt: skip
    whole = cv.Model(wide(), **options)
    small = cv.Model(
        wide(), memory=int(0.6 * whole.plan.heap_bytes), page_bytes="64 MiB", page_folder=tmp_path, **options
    )
    assert small.plan.page_bytes > 0 and small.heap.nbytes <= 0.6 * whole.plan.heap_bytes
    assert small.fit(X, y, epochs=2, progress=False)["loss"] == whole.fit(X, y, epochs=2, progress=False)["loss"]
    np.testing.assert_array_equal(small.predict(X), whole.predict(X))
    small.save(tmp_path / "model.calcvm")
    again = cv.load(tmp_path / "model.calcvm")
    np.testing.assert_array_equal(again.predict(X), whole.predict(X))
    assert again.step(X[:16], y[:16]) == whole.step(X[:16], y[:16])
    with pytest.raises(cv.UnsupportedOperator, match="page_bytes"):
        small.to_python(tmp_path / "train.py")


@pytest.mark.parametrize("room", [0, 1, 4096, 10**6])
def test_the_file_is_never_larger_than_allowed(room: int) -> None:
    graph, _, small = streaming()
    assert small.page_bytes > room
    with pytest.raises(PlanError, match="page_bytes") as error:
        cv.plan(graph, batch_size=8, workers=1, memory=small.heap_bytes, page_bytes=room)
    assert error.value.allowed == room


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX's, where another test has imported it
def test_a_fork_beside_a_busy_parent() -> None:
    """The child's file holds what there was when it was forked, whatever the parent does at once."""
    graph, _, small = streaming()
    model = cv.CalcHeap(small.heap_bytes).create(cv.compile(graph, plan=small), seed=5)
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(8, 40)), rng.integers(0, 4, 8)
    for _ in range(6):
        wanted = model.copy(heap=cv.CalcHeap(small.heap_bytes)).step(X, y)
        out, into = os.pipe()
        pid = os.fork()
        if not pid:
            os.write(into, np.float64(model.step(X, y)).tobytes())
            os._exit(0)
        os.close(into)
        for _ in range(3):
            model.step(X, y)
        found = os.read(out, 8)
        os.close(out)
        assert os.waitpid(pid, 0)[1] == 0
        assert np.frombuffer(found)[0] == wanted
