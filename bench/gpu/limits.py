"""What the GPU allows: its FMA rate and copy bandwidth, measured, and what a step asks of both.

A step's limit is the larger of its FLOPs over the FMA rate and its bytes over the copy bandwidth.  FLOPs and bytes are the
operator table's: of each row its operations, and the extents of its operands, once for each time that they are read or
written.  Values that stay in a cache or in registers from row to row make a time below that possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from bench.harness import Result, number, say

CHAINS, UNROLL, THREADS = 16, 8, 256
COPY_BYTES, QUICK_COPY_BYTES = 1 << 30, 1 << 24


@dataclass(frozen=True)
class Limits:
    """A GPU and its measured rates: float32 operations a second, bytes read plus written a second."""

    name: str
    multiprocessors: int
    compute_capability: str
    cuda: str
    memory_bytes: int
    flops: float
    bandwidth: float

    def seconds(self, flops: float, nbytes: float) -> float:
        return max(flops / self.flops, nbytes / self.bandwidth)

    def __str__(self) -> str:
        return (
            f"{self.name}, {self.multiprocessors} multiprocessors, compute capability {self.compute_capability}, "
            f"CUDA {self.cuda}: {number(self.flops / 1e12)} TFLOP/s of float32 FMA, "
            f"{number(self.bandwidth / 1e12)} TB/s copy (read and written)"
        )


# ---------------------------------------------------------------- the machine
def fma_kernel() -> Callable:
    """A kernel (address, n) of `CHAINS` independent chains of n * `UNROLL` FMAs a thread."""
    cuda = import_module("calcvm.kernels_cuda._cuda")
    names = [f"x{k}" for k in range(CHAINS)]
    lines = ["def fma(address, n):", "    p = f32_at(address)", "    a, b = p[0], p[1]"]
    lines += [f"    {x} = like(p, thread() + {k})" for k, x in enumerate(names)]
    lines += ["    i = 0", "    while i < n:"]
    lines += [f"        {x} = {x} * a + b" for _ in range(UNROLL) for x in names]
    lines += ["        i += 1", f"    total = {' + '.join(names)}"]
    lines += ["    if total == p[2]:", "        p[3] = total"]  # never: but the chains must be computed to know
    scope: dict[str, Any] = {name: getattr(cuda, name) for name in ("f32_at", "like", "thread")}
    exec("\n".join(lines), scope)
    return scope["fma"]


def fma_ptx(cc: tuple[int, int]) -> str:
    cuda = import_module("calcvm.kernels_cuda._cuda")
    text = cuda.compile_ptx(fma_kernel(), (cuda.types.int64,) * 2, "fma", cc, THREADS, 4)
    assert text.count("fma.rn.f32") == CHAINS * UNROLL, "the chains are not FMAs"
    return text


def event_seconds(driver: Any, run: Callable[[], object], repeats: int) -> float:
    """Least seconds of the device over `repeats` runs, after one that does not count."""
    start, end = driver.event(), driver.event()
    run()
    driver.synchronize()
    best = math.inf
    for _ in range(repeats):
        driver.record(start)
        run()
        driver.record(end)
        driver.synchronize_event(end)
        best = min(best, driver.elapsed_ms(start, end) / 1e3)
    driver.free_event(start)
    driver.free_event(end)
    return best


def fma_rate(driver: Any, repeats: int, n: int) -> float:
    """Float32 operations a second of FMA chains on all multiprocessors; the best of several grids."""
    np = import_module("numpy")
    module = driver.load(fma_ptx(driver.compute_capability))
    function, cells = driver.function(module, "fma"), driver.alloc(16)
    driver.to_device(cells, np.array([0.5, 1.0, np.nan, 0], np.float32))
    best = 0.0
    for per_multiprocessor in (2, 4, 8):
        blocks = per_multiprocessor * driver.multiprocessors
        seconds = event_seconds(driver, driver.launch(function, blocks, THREADS, [cells, n]), repeats)
        best = max(best, 2 * CHAINS * UNROLL * n * THREADS * blocks / seconds)
    driver.free(cells)
    driver.unload(module)
    return best


def copy_rate(driver: Any, repeats: int, nbytes: int) -> float:
    """Bytes a second, read plus written, of a copy from device memory to device memory."""
    source, target = driver.alloc(nbytes), driver.alloc(nbytes)
    driver.fill(source, 1, nbytes)
    seconds = event_seconds(driver, lambda: driver.copy(target, source, nbytes, 0), repeats)
    driver.free(source)
    driver.free(target)
    return 2 * nbytes / seconds


def measure(driver: Any, quick: bool) -> Limits:
    """The limits of a driver's GPU."""
    repeats = 2 if quick else 10
    found = Limits(
        driver.name,
        driver.multiprocessors,
        ".".join(map(str, driver.compute_capability)),
        ".".join(map(str, driver.version)),
        driver.memory()[1],
        fma_rate(driver, repeats, 100 if quick else 2000),
        copy_rate(driver, repeats, QUICK_COPY_BYTES if quick else COPY_BYTES),
    )
    say(str(found))
    return found


def result(limits: Limits, part: str, title: str, quick: bool) -> Result:
    """The result of a part of `bench.gpu`, with the GPU in it."""
    made = Result(f"gpu-{part}", title, quick)
    made.data["command"] = f"python -m bench gpu --part {part}"
    made.data["gpu"] = {**asdict(limits), "text": str(limits)}
    return made


# ---------------------------------------------------------------- what a step asks
def step_cost(plan: Any, path: str = "learn") -> tuple[float, float]:
    """(FLOPs, bytes) of a path's rows at the plan's batch, by the operator table."""
    evaluate = import_module("calcvm.ops.sizes").evaluate
    batch, flops, elems = plan.batch_size, 0.0, 0.0
    for statement in plan.statements:
        if statement.path != path:
            continue
        words = {k: v.at(batch) if hasattr(v, "at") else v for k, v in statement.words.items()}
        env = {"acc": 0, **words, "nw": 1, "gpu": 1}
        flops += float(evaluate(statement.spec.flops, env))
        for operand in statement.spec.operands:
            if operand.access == "s" or statement.operands.get(operand.name) is None:
                continue
            twice = operand.access == "u" or (operand.access == "a" and env["acc"])
            elems += int(evaluate(operand.elems, env)) * (2 if twice else 1)
    return flops, elems * plan.itemsize
