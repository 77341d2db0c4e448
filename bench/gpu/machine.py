"""What the GPU costs calcvm beside arithmetic and memory: barriers of a grid, launches, nodes of CUDA graphs, calls of Python.

The figures that come out are what `calcvm.vm.run.cuda.cost` chooses a mode and a number of blocks by; they are kept for this
GPU in the user's cache, as the assumed ones are then no longer needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from bench.gpu.limits import Limits, event_seconds, result
from bench.harness import Result, best_seconds, number

BARRIER_BLOCKS = (1, 2, 4, 8, 16, 33, 66, 132)
N_ROWS, QUICK_N_ROWS = 2000, 50
PRODUCTS = ((10_000, 64, 784), (4096, 1024, 1024), (32, 16, 4))  # rows, N, K of a linear layer
MAP_ELEMS, QUICK_MAP_ELEMS = 1 << 27, 1 << 20
HEAP_START = 64  # elements: what comes before is the VM's


def row_spec(name: str) -> Any:
    """A row of the operator table."""
    return import_module("calcvm.ops.spec").ROWS[name]


class Rows:
    """Rows by the VM's own kernels, on memory laid out by hand.

    rows : (name, words, offsets by operand, whether a barrier follows) of each.
    """

    def __init__(self, device: Any, rows: Sequence[tuple[str, dict, dict, bool]], elems: int):
        loop, job = import_module("calcvm.vm.run.cuda.loop"), import_module("calcvm.vm.run.job")
        encode_row = import_module("calcvm.vm.program.encoding").encode_row
        number = import_module("calcvm.vm.run.cuda.build").number
        self.device, self.driver = device, device.driver
        specs = [row_spec(name) for name, *_ in rows]
        table = np.stack(
            [
                encode_row(spec, words, offsets, int(sync) | k << 8, number(spec.name))
                for k, (spec, (_, words, offsets, sync)) in enumerate(zip(specs, rows))
            ]
        )
        self.names = sorted({spec.name for spec in specs})
        self.row_bytes = table.strides[0]
        self.n = len(rows)
        self.heap, self.rows = self.driver.alloc(4 * elems), self.driver.alloc(table.nbytes)
        self.control, self.job = self.driver.alloc(loop.CONTROL_BYTES), self.driver.alloc(8 * job.TASK_WORDS)
        self.driver.fill(self.heap, 0, 4 * elems)
        self.driver.to_device(self.rows, table.reshape(-1))
        words = np.zeros(loop.CONTROL_BYTES // 8, np.int64)
        words[loop.PATIENCE_NS] = 10 * 10**9
        self.driver.to_device(self.control, words)
        self.words = np.zeros(job.TASK_WORDS, np.int64)
        self.words[[job.HEAP, job.ROWS, job.STOP, job.BARRIER]] = self.heap, self.rows, self.n, self.control
        self.words[job.ROW_BYTES] = self.row_bytes
        self.steps, self.gave_up, self.arrived = job.STEPS, loop.GAVE_UP, loop.ARRIVED

    def grid(self, blocks: int, steps: int) -> Callable[[], None]:
        """What runs all rows ``steps`` times, by the blocks of one grid; its launches begin at a full barrier count."""
        self.words[self.steps] = steps
        self.driver.to_device(self.job, self.words)
        function, target = self._function("rows", self.names, 1)
        return self.driver.launch(
            function, blocks, target.threads, [self.job], shared_bytes=target.shared_bytes(4), cooperative=blocks > 1
        )

    def alone(self, per_multiprocessor: int, blocks: int | None = None) -> Callable[[], None]:
        """What launches each row on its own, once."""
        runs = []
        for k in range(self.n):
            assert len(self.names) == 1
            function, target = self._function("row", self.names, per_multiprocessor)
            n = blocks or per_multiprocessor * self.driver.multiprocessors
            run = self.driver.launch(
                function,
                n,
                target.threads,
                [self.heap, self.rows + self.row_bytes * k, 0],
                shared_bytes=target.shared_bytes(4),
            )
            runs.append(run)

        def run_all() -> None:
            for run in runs:
                run()

        return run_all

    def _function(self, entry: str, names: Sequence[str], per_multiprocessor: int) -> tuple[int, Any]:
        target_of = import_module("calcvm.vm.run.cuda.build").Target
        target = target_of(self.driver.compute_capability, self.device.threads, per_multiprocessor, "float32")
        return self.device.function(entry, tuple(names), "float32", target)[0], target

    def check(self) -> None:
        """RuntimeError: a barrier was given up, so that what was timed was no barrier."""
        words = np.zeros(self.gave_up + 1, np.int64)
        self.driver.to_host(words, self.control)
        if words[self.gave_up]:
            raise RuntimeError("the blocks of a grid did not meet at a barrier")

    def close(self) -> None:
        for address in (self.heap, self.rows, self.control, self.job):
            self.driver.free(address)


def tiny_rows(n: int, sync: bool) -> list[tuple[str, dict, dict, bool]]:
    """Rows of one element that depend on each other."""
    return [("sigmoid_fwd", {"rows": 1, "cols": 1}, {"x": HEAP_START, "y": HEAP_START}, sync)] * n


def seconds_per_row(device: Any, blocks: int, sync: bool, repeats: int, n: int) -> float:
    """Slope of a grid's time over its rows."""
    rows = Rows(device, tiny_rows(n, sync), 1024)
    try:
        one, many = (event_seconds(device.driver, rows.grid(blocks, steps), repeats) for steps in (1, 5))
        rows.check()
    finally:
        rows.close()
    return (many - one) / (4 * n)


def barriers(made: Result, device: Any, quick: bool) -> tuple[float, float]:
    """Table of the barrier's cost; seconds of a row by one block, and of a barrier of all multiprocessors."""
    repeats, n = (2, QUICK_N_ROWS) if quick else (7, N_ROWS)
    most = device.driver.multiprocessors
    table, row, barrier = [], 0.0, 0.0
    for blocks in sorted({min(b, most) for b in (*BARRIER_BLOCKS, most)}):
        plain = seconds_per_row(device, blocks, False, repeats, n)
        synced = seconds_per_row(device, blocks, True, repeats, n)
        row = plain if blocks == 1 else row
        barrier = synced - plain
        table.append([str(blocks), number(plain * 1e6), number(synced * 1e6), number(barrier * 1e6)])
    header = ["blocks", "us per row", "with a barrier", "us per barrier"]
    made.table(f"Rows of one element, {n} to a walk, without and with a barrier after each", header, table)
    return row, barrier


def linear(m: int, n: int, k: int, blocks: int) -> tuple[tuple[str, dict, dict, bool], int]:
    """The row of a linear layer of ``m`` samples, on ``blocks`` blocks, and the elements that its memory takes."""
    sizes = import_module("calcvm.ops.sizes")
    words: dict[str, Any] = {"rows": m, "inner": 1, "N": n, "K": k, "act": 0, "alpha": 0.0}
    words["wn"] = sizes.workspace(row_spec("linear_fwd"), words, sizes.On(blocks, 1))[1].at(1)
    offsets, end = {}, HEAP_START
    for name, elems in (("x", m * k), ("wt", k * n), ("b", n), ("y", m * n), ("ws", words["wn"])):
        offsets[name] = end
        end += elems + -elems % 16
    return ("linear_fwd", words, offsets, True), end


def rates(made: Result, device: Any, limits: Limits, quick: bool) -> dict[str, float]:
    """Shares of the limits that rows reach in a grid of one block per multiprocessor, and as separate launches."""
    repeats, blocks = 2 if quick else 7, device.driver.multiprocessors
    table, product = [], []
    for m, n, k in PRODUCTS[2:] if quick else PRODUCTS:
        row, elems = linear(m, n, k, blocks)
        rows = Rows(device, [row], elems)
        flops = 2.0 * m * n * k
        found = measured(rows, device.driver, blocks, repeats)
        shares = {mode: flops / limits.flops / seconds for mode, seconds in found.items()}
        if m * n * k > 1e6:
            product.append(max(shares.values()))
        table.append([f"linear_fwd {m}x{n}, K {k}", "FMA rate", *_cells(found, shares)])
    elems = QUICK_MAP_ELEMS if quick else MAP_ELEMS
    start = HEAP_START
    offsets = {"x": start, "y": start + elems}
    rows = Rows(device, [("sigmoid_fwd", {"rows": elems // 1024, "cols": 1024}, offsets, True)], start + 2 * elems)
    found = measured(rows, device.driver, blocks, repeats)
    memory = {mode: 8.0 * elems / limits.bandwidth / seconds for mode, seconds in found.items()}
    table.append([f"sigmoid_fwd of {elems:,} elements", "copy bandwidth", *_cells(found, memory)])
    header = ["row", "limit", "us in a grid", "of limit", "us as a launch", "of limit"]
    made.table("Single rows: in a grid with one block per multiprocessor, and launched one by one", header, table)
    share = sum(product) / len(product) if product else 0.7
    return {"product": share, "grid_memory": memory["grid"], "graph_memory": memory["graph"]}


def measured(rows: Rows, driver: Any, blocks: int, repeats: int) -> dict[str, float]:
    """Seconds of the row in a grid (the slope over steps), and as a launch; the memory is given back."""
    try:
        one, many = (event_seconds(driver, rows.grid(blocks, steps), repeats) for steps in (1, 5))
        alone = min(event_seconds(driver, rows.alone(per), repeats) for per in (1, 2, 4))
        rows.check()
    finally:
        rows.close()
    return {"grid": (many - one) / 4, "graph": alone}


def _cells(found: dict[str, float], shares: dict[str, float]) -> list[str]:
    return [text for mode in found for text in (number(found[mode] * 1e6), f"{100 * shares[mode]:.1f} %")]


def launches(made: Result, device: Any, quick: bool) -> float:
    """Table of what launches and calls cost; seconds of a CUDA graph's node."""
    cuda = import_module("calcvm.kernels_cuda._cuda")
    driver, repeats, n = device.driver, 2 if quick else 7, 20 if quick else 1000

    def empty(x):
        pass

    text = cuda.compile_ptx(empty, (cuda.types.int64,), "empty", driver.compute_capability, 32, 1)
    module = driver.load(text)
    stream = driver.stream(independent=True)
    launch = driver.launch(driver.function(module, "empty"), 1, 32, [0], stream=stream)

    def many(count: int) -> None:
        for _ in range(count):
            launch()
        driver.synchronize(stream)

    def one_by_one() -> None:
        for _ in range(n):
            launch()
            driver.synchronize(stream)

    def replays(graph: int, count: int) -> float:
        def run() -> None:
            for _ in range(count):
                driver.run_graph(graph, stream)
            driver.synchronize(stream)

        return best_seconds(run, repeats) / count

    sizes = (n // 10, n)
    graphs = [driver.graph(stream, lambda k=k: [launch() for _ in range(k)]) for k in sizes]
    few, all_ = (replays(graph, 10) for graph in graphs)
    node = (all_ - few) / (sizes[1] - sizes[0])
    table = [
        ["an empty kernel, launch after launch", number(best_seconds(lambda: many(n), repeats) / n * 1e6)],
        ["an empty kernel, launched and waited for", number(best_seconds(one_by_one, repeats) / n * 1e6)],
        ["a node of a CUDA graph (slope over nodes)", number(node * 1e6)],
    ]
    for graph in graphs:
        driver.free_graph(graph)
    driver.free_stream(stream)
    driver.unload(module)
    table += calls(repeats, n)
    made.table("Launches and calls", ["what", "us"], table)
    return node


def calls(repeats: int, n: int) -> list[list[str]]:
    """Steps of the tiny network through Python: 4-16-3, batch 32, Adam."""
    cv: Any = import_module("calcvm")
    net = cv.nn.Linear(16) >> cv.nn.Sigmoid() >> cv.nn.Linear(3)
    model = cv.Model(net, input_shape=(4,), optimizer=cv.Adam(1e-3), batch_size=32, device="cuda")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((32, 4), dtype=np.float32), rng.integers(0, 3, 32)
    model.step(x, y)

    def each(call: Callable[[], object]) -> str:
        def run() -> None:
            for _ in range(n):
                call()

        return number(best_seconds(run, repeats) / n * 1e6)

    start = time.perf_counter()
    model.run_steps(n)
    many = time.perf_counter() - start
    return [
        ["model.step(x, y) of 4-16-3, batch 32", each(lambda: model.step(x, y))],
        ["model.run_steps(1) of it", each(lambda: model.run_steps(1))],
        [
            f"a step of model.run_steps({n}) of it",
            number(min(many, best_seconds(lambda: model.run_steps(n), repeats)) / n * 1e6),
        ],
    ]


def main(limits: Limits, quick: bool = False) -> bool:
    """Measure, and keep the figures of this GPU; True when every check held."""
    made = result(limits, "machine", "On a GPU: barriers and launches", quick)
    device = import_module("calcvm.vm.run.cuda.device").cuda()
    figures = import_module("calcvm.vm.run.cuda.cost").Figures
    row, barrier = barriers(made, device, quick)
    node = launches(made, device, quick)
    found = figures(
        name=limits.name, multiprocessors=limits.multiprocessors, flops=limits.flops, bandwidth=limits.bandwidth,
        row=row, barrier=barrier, node=node, **rates(made, device, limits, quick),
    )  # fmt: skip
    made.data["figures"] = vars(found)
    made.note(
        "Figures that calcvm chooses a mode and blocks by: "
        + ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in vars(found).items())
    )
    if not quick:
        found.save(device.figures_path)
    return made.save()
