"""P5: elementwise operators, softmax, normalizations and pools on one core, forward and backward, beside torch's.

Ours is what the VM runs: the operator's rows, called through their native addresses on operands in a heap.  torch's is
what a user calls, in the fastest way: the function in inference mode, and the backward by the node of its graph, or by
`torch.autograd.grad` if there are several nodes; images contiguous and channels last.  Its dispatch counts, because users
pay for it; page faults do not.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np

from bench.harness import (
    QUICK_REPEATS,
    REPEATS,
    Process,
    Result,
    answers,
    copy_gbs,
    geomean,
    idlest_core,
    interleave,
    number,
    ratio,
    say,
)
from calcvm.kernels_cpu import address_of
from calcvm.ops import OPS
from calcvm.ops.sizes import evaluate
from calcvm.ops.spec import Example, Operand, RowSpec
from calcvm.ops.types import bytes_of
from calcvm.vm.program.encoding import encode_row
from tests.rowrun import RESERVED, Case, words_of

DTYPE, ALIGN = "float32", 64
SIZES = [2**8, 2**12, 2**16, 2**20, 2**24]
ELEMENTWISE = (
    "relu relu6 leaky_relu prelu elu selu gelu silu mish hard_sigmoid hard_swish sigmoid tanh softplus exp add mul softmax"
).split()
IMAGES = [(8, 56, 56, 64), (8, 14, 14, 256), (32, 28, 28, 96), (64, 24, 24, 20)]  # N, H, W, channels
VECTORS = [(32, 128), (512, 768), (4096, 1024)]
# operator, attributes
OF_IMAGES: list[tuple[str, dict[str, Any]]] = [
    ("batch_norm", {}),
    ("batch_norm_inference", {}),
    ("group_norm", {"groups": 4}),
    ("instance_norm", {}),
    ("local_response_norm", {}),
    ("max_pool", {"kernel": (2, 2)}),
    ("max_pool", {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1)}),
    ("avg_pool", {"kernel": (2, 2)}),
    ("avg_pool", {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1)}),
    ("lp_pool", {"p": 2.0, "kernel": (2, 2)}),
    ("adaptive_avg_pool", {"sizes": (7, 7)}),
    ("global_max_pool", {}),
    ("global_avg_pool", {}),
]
QUICK = [("silu", (2**8,), {}), ("batch_norm", (2, 5, 5, 6), {}), ("max_pool", (2, 6, 6, 3), {"kernel": (2, 2)})]
GEOMEAN_TARGET, WORST_TARGET = 1.5, 0.95
TURN_SECONDS, QUICK_TURN_SECONDS = 0.01, 0.0005
TOLERANCE = 1e-4  # relative to the largest element

# Freed memory stays with the process, so torch's results are in pages that were touched before, like ours.
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(2**40), "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**28)}

Run = Callable[[int], object]  # runs the pass a number of times


def cases(quick: bool) -> Iterator[tuple[str, tuple[int, ...], dict[str, Any]]]:
    """Operator, shape of its first input, attributes."""
    if quick:
        yield from QUICK
        return
    for name in ELEMENTWISE:
        for n in SIZES:
            yield name, ((n,) if name not in ("prelu", "softmax") else (n // 64, 64)), {}
    for name in "layer_norm", "rms_norm":
        for vectors in VECTORS:
            yield name, vectors, {}
    for name, attrs in OF_IMAGES:
        for shape in IMAGES:
            yield name, shape, attrs


# ---------------------------------------------------------------- ours
Operands = dict[str, np.ndarray]  # bytes in the heap, by name


def place(case: Case, rows: Sequence[RowSpec], values: Mapping[str, np.ndarray]) -> tuple[list[np.ndarray], Operands]:
    """The encoded rows and their operands in one heap, whose first element is ``operands["heap"]``."""
    extents = {"heap": RESERVED * np.dtype(DTYPE).itemsize}
    wide = {}
    for row in rows:
        for o in row.operands:
            if not o.optional or o.name in case.known():
                wide[o.name] = bytes_of(o.type, np.dtype(DTYPE).itemsize)
                n_bytes = wide[o.name] * int(evaluate(o.elems, words_of(row, case.words)))
                extents[o.name] = max(extents.get(o.name, 0), n_bytes)
    ends = np.cumsum([-(-n // ALIGN) * ALIGN for n in extents.values()]).tolist()
    memory = np.zeros(ends[-1] + ALIGN, np.uint8)
    memory = memory[-memory.ctypes.data % ALIGN :]
    starts = dict(zip(extents, [0, *ends]))
    operands = {name: memory[at : at + extents[name]] for name, at in starts.items()}
    for name in operands.keys() & values.keys():
        operands[name][:] = np.ascontiguousarray(values[name]).reshape(-1).view(np.uint8)
    encoded = []
    for row in rows:
        offsets = {o.name: starts[o.name] // wide[o.name] for o in row.operands if o.name in wide}
        encoded.append(encode_row(row, words_of(row, case.words), offsets))
    return encoded, operands


class Ours:
    """An operator's forward and backward rows, and their results: y and gradients, by name."""

    def __init__(self, name: str, shape: tuple[int, ...], attrs: dict[str, Any]):
        spec = OPS[name]
        given = (None, *shape[1:])
        others = (shape[-1:] if len(shape) > 1 else given,) * (len(spec.inputs) - 1)
        low = 0.1 if name in ("lp_pool", "batch_norm_inference") else -1.0  # positive where inputs must be
        example = Example(shapes=(given, *others), attrs=attrs, batch=shape[0], low=low)
        case = self.case = Case(spec, example, DTYPE, shape[0])
        rows = [row for row in case.spec.rows if not any(map(self.added_up, row.writes))]
        values = case.values | case.output_gradients()
        encoded, self.operands = place(case, rows, values)
        self.passes, self.n_bytes = {}, {}
        for which, part in ("forward", case.spec.fwd), ("backward", case.spec.bwd):
            calls = [(row.name, words_of(row, case.words)["phases"], e) for row, e in zip(rows, encoded) if row in part]
            if calls:
                self.passes[which] = self.compiled(calls)
            moved = {o.name for row in part for o in row.operands if o.access != "s"}
            self.n_bytes[which] = sum(self.operands[n].size for n in self.operands.keys() & moved)
        self.inputs = {n: case.array(n, case.values[n]).astype(DTYPE) for n in case.given}
        self.dy = case.output_gradients()["dy"].reshape(case.shapes["y"])

    def added_up(self, operand: Operand) -> bool:
        """Whether it is the gradient of a broadcast operand, before another row reduces it."""
        of = operand.name[1:]
        return (
            of in self.case.given
            and self.case.spec.broadcast
            and prod(self.case.shapes[of]) < prod(self.case.shapes["y"])
        )

    def compiled(self, calls: Sequence[tuple[str, int, np.ndarray]]) -> Run:
        """Compiled code that calls the kernels' phases in order, by their native addresses."""
        from numba import njit

        heap = self.operands["heap"]
        native = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)  # heap, row, worker, n_workers, phase
        scope: dict[str, Any] = {f"f{i}": native(address_of(name, DTYPE)) for i, (name, *_) in enumerate(calls)}
        lines = [f"f{i}(heap, r{i}, 0, 1, {k})" for i, (_, phases, _) in enumerate(calls) for k in range(phases)]
        names = "".join(f", r{i}" for i in range(len(calls)))
        exec(f"def loop(n, heap{names}):\n  for _ in range(n):\n    {'; '.join(lines)}", scope)
        loop, rows = njit(scope["loop"]), [row for *_, row in calls]
        return lambda times: loop(times, heap.ctypes.data, *(row.ctypes.data for row in rows))

    def run(self, which: str) -> Run:
        return self.passes[which]

    def results(self, which: str) -> dict[str, np.ndarray]:
        names = ["y"] if which == "forward" else [f"d{n}" for n in self.case.given if f"d{n}" in self.operands]
        return {n: self.operands[n].view(DTYPE) for n in names}


# ---------------------------------------------------------------- torch's
def torch_functions() -> dict[str, Callable]:
    """torch's functions for our inputs and attributes, channels first."""
    import torch

    f = torch.nn.functional

    def windows(kernel: Any, stride: Any = None, padding: Any = (0, 0)) -> tuple:
        return kernel, stride, padding[:2]

    return {
        **{n: getattr(f, n) for n in "relu relu6 leaky_relu prelu elu selu gelu silu mish softplus".split()},
        **{n: getattr(torch, n) for n in "sigmoid tanh exp add mul".split()},
        "hard_sigmoid": f.hardsigmoid,
        "hard_swish": f.hardswish,
        "softmax": lambda x: torch.softmax(x, -1),
        "layer_norm": lambda x, w, b: f.layer_norm(x, w.shape, w, b),
        "rms_norm": lambda x, w: f.rms_norm(x, w.shape, w, 1e-5),
        "batch_norm": lambda x, m, v, w, b: f.batch_norm(x, m, v, w, b, True, 0.1),
        "batch_norm_inference": lambda x, m, v, w, b: f.batch_norm(x, m, v, w, b),
        "group_norm": lambda x, w, b, groups: f.group_norm(x, groups, w, b),
        "instance_norm": lambda x, w, b: f.instance_norm(x, None, None, w, b),
        "local_response_norm": lambda x: f.local_response_norm(x, 5),
        "max_pool": lambda x, **attrs: f.max_pool2d(x, *windows(**attrs)),
        "avg_pool": lambda x, **attrs: f.avg_pool2d(x, *windows(**attrs)),
        "lp_pool": lambda x, p, kernel: f.lp_pool2d(x, p, kernel),
        "adaptive_avg_pool": lambda x, sizes: f.adaptive_avg_pool2d(x, sizes),
        "global_max_pool": lambda x: f.adaptive_max_pool2d(x, 1),
        "global_avg_pool": lambda x: f.adaptive_avg_pool2d(x, 1),
    }


class Torch:
    """The same operator in torch, with images in one memory format."""

    def __init__(self, name: str, ours: Ours, attrs: dict[str, Any], channels_last: bool = False):
        import torch

        fn, self.torch = torch_functions()[name], torch
        format_ = torch.channels_last if channels_last else torch.contiguous_format

        def tensor(a: np.ndarray) -> Any:
            t = torch.tensor(a)
            return t.movedim(-1, 1).contiguous(memory_format=format_) if t.dim() == 4 else t

        learnt = [n for n in ours.case.given if f"d{n}" in ours.results("backward")]
        inputs = {n: tensor(a).requires_grad_(n in learnt) for n, a in ours.inputs.items()}
        self.call = lambda: fn(*inputs.values(), **attrs)
        self.inputs, self.dy, self.y = {n: inputs[n] for n in learnt}, tensor(ours.dy), self.call()

    def backward(self) -> Any:
        """Gradients of all inputs that have one."""
        node = self.y.grad_fn
        if all(type(then).__name__ == "AccumulateGrad" for then, _ in node.next_functions if then is not None):
            gradients = self.dy, *[None] * (len(node._input_metadata) - 1)  # none for statistics
            return lambda: node(*gradients)
        return lambda: self.torch.autograd.grad(self.y, [*self.inputs.values()], self.dy, retain_graph=True)

    def run(self, which: str) -> Run:
        call = self.call if which == "forward" else self.backward()

        def run(times: int) -> None:
            with self.torch.inference_mode(which == "forward"):
                for _ in range(times):
                    call()

        return run

    def results(self, which: str) -> dict[str, np.ndarray]:
        def array(t: Any) -> np.ndarray:
            return (t.movedim(1, -1) if t.dim() == 4 else t).detach().numpy().reshape(-1)

        if which == "forward":
            return {"y": array(self.y)}
        gradients = self.torch.autograd.grad(self.y, [*self.inputs.values()], self.dy, retain_graph=True)
        return {f"d{n}": array(g) for n, g in zip(self.inputs, gradients)}


# ---------------------------------------------------------------- the one-thread process
def serve(quick: bool, core: int | None) -> None:
    """Time every case on request: seconds per call of each pass and contestant, turn by turn."""
    import torch

    torch.set_num_threads(1)
    answer = answers(core)
    answer()
    seconds = QUICK_TURN_SECONDS if quick else TURN_SECONDS

    def turn(run: Run, n: int) -> float:
        start = time.perf_counter()
        run(n)
        return (time.perf_counter() - start) / n

    for line in sys.stdin:
        name, shape, attrs = json.loads(line)["case"]
        attrs = {k: tuple(v) if isinstance(v, list) else v for k, v in attrs.items()}
        ours = Ours(name, tuple(shape), attrs)
        contestants: dict[str, Any] = {"ours": ours, "torch": Torch(name, ours, attrs)}
        if len(shape) == 4:
            contestants["torch_channels_last"] = Torch(name, ours, attrs, channels_last=True)
        reply: dict[str, Any] = {"times": {}, "wrong": [], "bytes": ours.n_bytes}
        for which in ours.passes:
            runs, right = {}, contestants["torch"].results(which)
            for who, contestant in contestants.items():
                run = contestant.run(which)
                run(1)
                runs[who] = run, max(1, int(seconds / min(turn(run, 1) for _ in range(2))))
                for n, a in contestant.results(which).items():
                    if not np.abs(a - right[n]).max(initial=0) <= TOLERANCE * np.abs(right[n]).max(initial=1e-3):
                        reply["wrong"].append(f"{n} of {who}")
            turns = {who: lambda run=run, n=n: turn(run, n) for who, (run, n) in runs.items()}
            reply["times"][which] = interleave(turns, QUICK_REPEATS if quick else REPEATS)
        answer(**reply)


@cache
def _copy_gbs(n_bytes: int) -> float:
    return copy_gbs(n_bytes)


def main(quick: bool = False) -> bool:
    """Run the workload; True if every result is torch's."""
    result = Result("operators", "Operators on one core", quick)
    options = json.dumps({"quick": quick, "core": idlest_core()})
    process = Process("-m", "bench.operators", options, threads=1, **KEPT)
    ratios: dict[str, float] = {}
    rows = []
    for name, shape, attrs in cases(quick):
        reply = process.ask(case=[name, shape, attrs])
        text = ", ".join(f"{k} {'x'.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in attrs.items())
        for wrong in reply["wrong"]:
            result.fail(f"{wrong} DISAGREES: {name} of {shape}")
        for which, times in reply["times"].items():
            what = f"{name} {which}, {'x'.join(map(str, shape))}{f', {text}' if text else ''}"
            best = min((t for who, t in times.items() if who != "ours"), key=min)
            ratios[what] = ratio(best, times["ours"])
            n_bytes = reply["bytes"][which]
            of_copy = n_bytes / min(times["ours"]) / 1e9 / _copy_gbs(1 << max(12, (n_bytes // 2).bit_length() - 1))
            us = [number(min(times[w]) * 1e6) if w in times else "-" for w in ("ours", "torch", "torch_channels_last")]
            rows.append([what, *us, number(ratios[what]), f"{100 * of_copy:.0f} %"])
            say("  ".join([f"{what:>70}", *(f"{cell:>8}" for cell in rows[-1][1:])]))
    process.close()
    header = ["case", "calcvm", "torch", "channels last", "times best", "of copy"]
    result.table("us of the fastest turn; torch as a user calls it, with its dispatch", header, rows)
    worst = min(ratios, key=lambda what: ratios[what])
    result.target("P5", f"worst of {len(ratios)} cases: {worst}", ratios[worst], WORST_TARGET, "x")
    result.target("P5", "geometric mean against torch", geomean(list(ratios.values())), GEOMEAN_TARGET, "x")
    return result.save()


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    serve(options["quick"], options["core"])
