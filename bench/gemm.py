"""P4: C = A B on one core, 40 shapes in three layouts, beside every GEMM that a Python user can reach.

NumPy and torch are called as users call them.  Ours and OpenBLAS are called by address from a compiled loop, so
neither pays for Python.  The best peer of a case is the fastest of them all.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.harness import (
    QUICK_REPEATS,
    REPEATS,
    Process,
    Result,
    answers,
    compiled_loop,
    geomean,
    idlest_core,
    number,
    ratio,
    say,
    turn_ratio,
)

# M, N, K: layers of small networks and their gradients, convolutions' tap rows, squares
SHAPES = [
    (1, 16, 4), (32, 16, 4), (1, 3, 16), (32, 3, 16), (16, 32, 10), (1, 64, 784), (1, 64, 64), (1, 10, 64),
    (16, 64, 64), (32, 64, 784), (32, 64, 64), (32, 10, 64), (784, 64, 32), (64, 64, 32), (256, 64, 784),
    (256, 10, 64), (784, 64, 256), (10000, 64, 784), (10000, 10, 64), (784, 64, 10000), (64, 10, 10000),
    (1, 256, 64), (32, 256, 64), (1, 1000, 512), (32, 128, 64), (3136, 64, 576), (196, 256, 2304), (49, 512, 4608),
    (8, 8, 8), (16, 16, 16), (31, 33, 37), (64, 64, 64), (100, 100, 100), (129, 127, 131), (256, 256, 256),
    (512, 512, 512), (1000, 1000, 1000), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096),
]  # fmt: skip
QUICK_SHAPES = [(1, 16, 4), (16, 64, 64), (129, 127, 131), (256, 64, 784)]
LAYOUTS = {"A B": (False, False), "A^T B": (True, False), "A B^T": (False, True)}  # which operand is stored transposed
GEOMEAN_TARGET, WORST_TARGET = 1.15, 0.97
TURN_SECONDS, QUICK_TURN_SECONDS = 0.01, 0.001
WORKSPACE_ELEMS = 1 << 22
TOLERANCE = 1e-5  # relative to the largest element times sqrt(K)
NAMES = {"ours": "calcvm", "openblas": "OpenBLAS", "numpy": "numpy.matmul", "torch": "torch.mm", "onednn": "oneDNN"}

Run = Callable[[int], object]  # computes the product a number of times


class Ours:
    """The routines behind every contraction row, called as the kernels call them."""

    def __init__(self) -> None:
        from numba import njit

        from calcvm.kernels_cpu._common import ROUTINES
        from calcvm.kernels_cpu.contraction import product
        from calcvm.vm.run.atomics import f32_at

        for name in ("gemm", "gemv"):
            ROUTINES[name].address("float32")

        @njit
        def loop(times, m, n, k, a, a_rs, a_cs, b, b_rs, b_cs, c, ws):
            pa, pb, pc, pw = f32_at(a), f32_at(b), f32_at(c), f32_at(ws)
            for _ in range(times):
                product(m, m, n, k, pa, a_rs, a_cs, pb, b_rs, b_cs, pc, n, pc, 0, 0, pw, WORKSPACE_ELEMS)

        self.loop = loop
        workspace = np.zeros(WORKSPACE_ELEMS + 16, np.float32)
        self.workspace = workspace[-workspace.ctypes.data // 4 % 16 :]

    def product(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Run:
        (m, k), n = a.shape, b.shape[1]
        rows, cols = ([s // 4 for s in array.strides] for array in (a, b))
        pa, pb, pc, ws = (array.ctypes.data for array in (a, b, c, self.workspace))
        arguments = (m, n, k, pa, *rows, pb, *cols, pc, ws)
        return lambda times: self.loop(times, *arguments)


class OpenBlas:
    """SciPy's OpenBLAS, called through its native address."""

    def __init__(self) -> None:
        from numba.extending import get_cython_function_address

        address = get_cython_function_address("scipy.linalg.cython_blas", "sgemm")
        self.loop = compiled_loop(address, [ctypes.c_size_t] * 13)

    def product(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Run:
        m, n, k = a.shape[0], b.shape[1], a.shape[1]
        # column-major: C^T = B^T A^T
        ta, tb = (not array.flags.c_contiguous for array in (a, b))
        lda, ldb = (array.shape[not transposed] for array, transposed in ((a, ta), (b, tb)))
        letters, sizes = np.frombuffer(b"NT", np.uint8), np.array([m, n, k, lda, ldb], np.int32)
        one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
        letter = lambda t: letters.ctypes.data + t
        size = lambda i: sizes.ctypes.data + 4 * i
        arguments = (
            letter(tb), letter(ta), size(1), size(0), size(2), one.ctypes.data, b.ctypes.data, size(4),
            a.ctypes.data, size(3), zero.ctypes.data, c.ctypes.data, size(1),
        )  # fmt: skip
        keep = letters, sizes, one, zero
        return lambda times: (self.loop(times, *arguments), keep)


class NumPy:
    """`numpy.matmul` into an array."""

    def product(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Run:
        def run(times: int) -> None:
            for _ in range(times):
                np.matmul(a, b, out=c)

        return run


class Torch:
    """`torch.mm` into a tensor."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self.torch = torch

    def product(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Run:
        mm, x, y, out = self.torch.mm, *map(self.torch.from_numpy, (a, b, c))

        def run(times: int) -> None:
            for _ in range(times):
                mm(x, y, out=out)

        return run


class OneDnn(Torch):
    """oneDNN's inner product, by the operator that Inductor calls; it allocates its result."""

    def product(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Run:
        linear, x, w = self.torch.ops.mkldnn._linear_pointwise, *map(self.torch.from_numpy, (a, b.T))

        def run(times: int) -> None:
            for _ in range(times):
                y = linear(x, w, None, "none", [], "")
            np.copyto(c, y.numpy())

        return run


CONTESTANTS = {"ours": Ours, "openblas": OpenBlas, "numpy": NumPy, "torch": Torch, "onednn": OneDnn}


def matrices(m: int, n: int, k: int, a_transposed: bool, b_transposed: bool) -> tuple[np.ndarray, ...]:
    """A (m, k) and B (k, n) as views of stored arrays, and C (m, n)."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    a = normal(k, m).T if a_transposed else normal(m, k)
    b = normal(n, k).T if b_transposed else normal(k, n)
    return a, b, np.zeros((m, n), np.float32)


def serve(quick: bool, core: int | None) -> None:
    """The one-thread process: time every case on request and answer with seconds per call, turn by turn."""
    answer = answers(core)
    contestants: dict[str, Any] = {}
    missing = {}
    for name, kind in CONTESTANTS.items():
        try:
            contestants[name] = kind()
        except (ImportError, AttributeError, KeyError) as error:
            missing[name] = f"{type(error).__name__}: {error}"
    answer(missing=missing)
    for line in sys.stdin:
        m, n, k, ta, tb = json.loads(line)["case"]
        a, b, c = matrices(m, n, k, ta, tb)
        wide = np.float64 if m * n * k < 1 << 30 else np.float32
        reference = a.astype(wide) @ b.astype(wide)
        times: dict[str, list[float]] = {}
        wrong, runs = [], {}
        for name, contestant in contestants.items():
            run = contestant.product(a, b, c)
            c.fill(np.nan)
            run(1)
            if not np.abs(c - reference).max() <= TOLERANCE * np.sqrt(k) * np.abs(reference).max():
                wrong.append(name)
                continue
            start = time.perf_counter()
            run(1)
            once = time.perf_counter() - start
            runs[name] = run, max(1, int((QUICK_TURN_SECONDS if quick else TURN_SECONDS) / once))
            times[name] = []
        for _ in range(QUICK_REPEATS if quick else REPEATS):
            for name, (run, n_calls) in runs.items():
                start = time.perf_counter()
                run(n_calls)
                times[name].append((time.perf_counter() - start) / n_calls)
        answer(times=times, wrong=wrong)


def main(quick: bool = False) -> bool:
    """Run the workload; True if every product is right."""
    result = Result("gemm", "GEMM on one core", quick)
    process = Process("-m", "bench.gemm", json.dumps({"quick": quick, "core": idlest_core()}), threads=1)
    for name, why in process.ready["missing"].items():
        text = f"{NAMES[name]} left out: {why}"
        result.fail(text) if name == "ours" else result.note(text)
    peak = result.data["limits"]["fma_gflops"]
    ratios: dict[str, float] = {}
    by_turns: list[float] = []
    by_peer: dict[str, list[float]] = {name: [] for name in CONTESTANTS if name != "ours"}
    rows = []
    for m, n, k in QUICK_SHAPES if quick else SHAPES:
        for layout, transposed in LAYOUTS.items():
            what = f"{m}x{n}x{k} {layout}"
            reply = process.ask(case=[m, n, k, *transposed])
            times = reply["times"]
            for name in reply["wrong"]:
                result.fail(f"{NAMES[name]} DISAGREES in {what}")
            gflops = {name: 2e-9 * m * n * k / min(t) for name, t in times.items()}
            cells = [number(gflops[name]) if name in gflops else "-" for name in CONTESTANTS]
            if "ours" in times:
                against = {name: ratio(t, times["ours"]) for name, t in times.items() if name != "ours"}
                for name, value in against.items():
                    by_peer[name].append(value)
                ratios[what] = min(against.values())
                by_turns.append(min(turn_ratio(t, times["ours"]) for name, t in times.items() if name != "ours"))
                cells += [number(ratios[what]), f"{100 * gflops['ours'] / peak:.0f} %"]
            else:
                cells += ["-", "-"]
            rows.append([what, *cells])
            say("  ".join([f"{what:>24}", *(f"{cell:>8}" for cell in rows[-1][1:])]))
    process.close()
    result.table("M x N x K, GFLOP/s of the fastest turn", ["case", *NAMES.values(), "times best", "of peak"], rows)
    if ratios:
        worst = min(ratios, key=lambda what: ratios[what])
        rows = [
            [NAMES[name], number(geomean(values)), number(min(values))] for name, values in by_peer.items() if values
        ]
        rows.append(["best of them", number(geomean(list(ratios.values()))), f"{number(ratios[worst])} ({worst})"])
        rows.append(["best of them, by turns", number(geomean(by_turns)), number(min(by_turns))])
        result.table("Ours against", ["peer", "geometric mean", "worst"], rows)
        result.target("P4", f"worst of {len(ratios)} cases: {worst}", ratios[worst], WORST_TARGET, "x")
    mean = geomean(list(ratios.values())) if ratios else None
    result.target("P4", "geometric mean against the best peer of each case", mean, GEOMEAN_TARGET, "x")
    return result.save()


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    serve(options["quick"], options["core"])
