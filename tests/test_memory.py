"""Memory: predicted bytes are allocated bytes, and nothing is allocated while it runs."""

import gc
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import calcvm as cv
from bench import memory
from calcvm import nn
from calcvm.vm.calls import methods
from tests.test_zoo import REDUCED


def paper_network():
    return nn.Linear(64) >> nn.Sigmoid() >> nn.Linear(64) >> nn.Sigmoid() >> nn.Linear(10)


def make(batch_size, **options):
    return cv.Model(paper_network(), input_shape=(784,), optimizer=cv.Adam(1e-3), batch_size=batch_size, **options)


def resident_bytes():
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"dtype": "float64"}, {"learning_batch": 100}])
def test_predicted_bytes_are_allocated_bytes(options):
    model = make(33, **options)
    assert model.plan.heap_bytes == model.heap.nbytes == model.elements.nbytes == model.program.heap_bytes


def test_what_models_take_beside_the_heap():
    """As docs/many-models.md says; the system's count, of a fresh process."""
    code = """
import gc
import numpy as np
import calcvm as cv
from calcvm import nn

def resident_bytes():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096

x, y, n = np.ones((8, 3), "f4"), np.ones((8, 2), "f4"), 4000
program = cv.compile(cv.build_graph(nn.Linear(2), (3,), "mse", cv.SGD(0.1)), batch_size=4)
first = cv.Fleet("8 MiB")
first.add(program, data=(x, y))
first.fit(2, progress=False)
for fleet in (False, True):
    where = cv.Fleet(n * program.heap_bytes + 4096) if fleet else cv.CalcHeap(n * program.heap_bytes + 4096)
    before = resident_bytes()
    kept = [where.add(program, data=(x, y)) if fleet else where.create(program) for _ in range(n)]
    if fleet:
        where.fit(2, progress=False)
    print((resident_bytes() - before) / n - program.heap_bytes)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    model, in_a_fleet = map(float, done.stdout.split())
    assert 1000 < model < 5000 and 1000 < in_a_fleet < 10_000


@pytest.mark.parametrize("name", REDUCED)
def test_the_memory_of_a_network_is_predicted_allocated_and_what_the_process_grows_by(name, whole):
    """Of two steps in a fresh process: to the byte, and to the page."""
    if name not in ("lenet", "resnet18") and not whole:
        pytest.skip("takes --whole")
    width, size, channels = REDUCED[name]
    for batch in (1, 8) if whole else (3,):
        found = memory.measured("ours", name=name, batch=batch, width=width, size=size, channels=channels)
        assert not memory.wrong(found)
        assert found["planned"] == memory.planned(name, batch, width=width, size=size, channels=channels)[1].heap_bytes


@pytest.mark.parametrize("name", cv.zoo.SEQUENCES)
def test_the_memory_of_a_network_of_sequences_is_what_its_plan_says(name, whole):
    """Also of one that streams, with the states of its samples."""
    if name not in ("char_lstm", "gpt") and not whole:
        pytest.skip("takes --whole")
    reduced = {"classes": 11, "width": 48, "layers": 2, "heads": 4, "vocabulary": 50, "steps": 40, "source": 20}
    for batch, stream in ((1, 0), (8, 1)) if whole else ((8, 1),):
        reduced["stream"] = int(stream and name not in ("bert", "transformer_classifier"))
        found = memory.measured("ours", name=name, batch=batch, **reduced)
        assert not memory.wrong(found)
        assert found["planned"] == memory.planned(name, batch, **reduced)[1].heap_bytes


def test_the_training_heap_of_an_encoder_is_linear_in_the_steps():
    """Two layers of 64 features, 4 heads, 128 hidden ones: 5.7 kB a step of a sample, at most 7 MB at 1024 steps."""
    net = [nn.TransformerEncoderLayer(4, dim_feedforward=128) for _ in range(2)]
    told = {}
    for steps in (64, 128, 256, 512, 1024, 2048):
        graph = cv.build_graph([*net, nn.Linear(1)], (steps, 64), "mse", cv.Adam(1e-3))
        one, nine = (cv.plan(graph, batch_size=n, workers=1).heap_bytes for n in (1, 9))
        told[steps] = (nine - one) / 8
    assert told[1024] <= 7e6
    for steps, nbytes in told.items():
        assert nbytes / steps == pytest.approx(told[1024] / 1024, rel=1e-3), told


@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.parametrize("share", [0.75, 0.5])
def test_the_memory_of_a_network_in_a_budget_is_what_its_plan_says(name, share, whole):
    """Of the peak, or 10 % above what a single statement needs: also the most that the process takes in between."""
    if (name, share) != ("unet", 0.5) and not whole:
        pytest.skip("takes --whole")
    width, size, channels = REDUCED[name]
    reduced = {"width": width, "size": size, "channels": channels}
    free, plan = (memory.planned(name, 8, of, **reduced)[1] for of in (1, share))
    assert plan.heap_bytes <= free.heap_bytes
    if name in ("resnet18", "unet", "mobilenet_v2"):  # of the others one statement needs almost all
        assert plan.recomputed and plan.heap_bytes <= (share if share > 0.5 else 0.6) * free.heap_bytes
    found = memory.measured("ours", name=name, batch=8, share=share, **reduced)
    assert not memory.wrong(found)
    assert found["planned"] == plan.heap_bytes


@pytest.mark.parametrize("name", cv.zoo.__all__)
def test_a_network_as_published_takes_what_its_plan_says(name, whole):
    if not whole:
        pytest.skip("takes --whole")
    for batch in memory.BATCHES:
        graph, plan = memory.planned(name, batch)
        assert plan.heap_bytes == plan.lower_bound_bytes
        program = cv.compile(graph, plan=plan)  # verified, and not allocated
        assert program.heap_bytes == plan.heap_bytes
        if plan.heap_bytes < 1e8:
            assert not memory.wrong(memory.measured("ours", name=name, batch=batch))


def test_paper_network_at_batch_10000_fits_in_43_MB():
    plan = cv.plan(cv.model.build_graph(paper_network(), (784,), "softmax_cross_entropy", cv.Adam()),
                   batch_size=10000)  # fmt: skip
    assert plan.lower_bound_bytes <= plan.heap_bytes <= 43e6


def test_ten_thousand_steps_allocate_nothing(monkeypatch):
    rng = np.random.default_rng(0)
    model = make(8, workers=2)
    x, y = rng.standard_normal((8, 784)).astype("float32"), rng.integers(0, 10, 8)
    with monkeypatch.context() as patch:
        patch.setattr(
            methods, "perf_counter", lambda: 0.0
        )  # on a busy machine steps are long, and long ones stay in Python
        for _ in range(methods.WORTH + 1):  # from then on methods are compiled code
            model.step(x, y)
            model.run_steps(2)
    gc.collect()
    before = resident_bytes()
    model.run_steps(10_000)
    grown = resident_bytes() - before
    assert grown <= 64 * 1024, f"the process grew by {grown} bytes"
    tracemalloc.start()
    try:
        model.run_steps(1)
        first = tracemalloc.take_snapshot()
        for _ in range(200):
            model.step(x, y)
        model.run_steps(10_000)
        gc.collect()
        second = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    ours = tracemalloc.Filter(True, str(Path(cv.__file__).parent / "*"))
    stats = second.filter_traces([ours]).compare_to(first.filter_traces([ours]), "filename")
    kept = sum(s.size_diff for s in stats)
    assert kept <= 1024, stats  # a few interpreter objects (the last loss), nothing that grows with the steps


def test_an_epoch_allocates_only_its_tables():
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((5000, 784)).astype("float32"), rng.integers(0, 10, 5000)
    model = make(50)
    model.fit(X, y, epochs=1, progress=False)
    tracemalloc.start()
    try:
        model.fit(X, y, epochs=3, progress=False)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 500_000 < X.nbytes  # row tables, feeds, history: no copy of the data
