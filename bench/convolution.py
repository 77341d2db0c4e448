"""P16: the three products of every convolution in five networks of the zoo, one core, beside oneDNN in both layouts.

Ours are rows as in a program, called through their native addresses.  The others are called as PyTorch's autograd
calls them, channels first and channels last.  Equal layers are timed once.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from bench.harness import (
    QUICK_REPEATS,
    REPEATS,
    Process,
    Result,
    answers,
    best_seconds,
    compiled_loop,
    geomean,
    idlest_core,
    number,
    ratio,
    say,
    turn_ratio,
)

NETWORKS = {"lenet": 64, "resnet18": 8, "vgg16": 2, "mobilenet_v2": 8, "unet": 2}  # with their batches
PASSES = {"fwd": "forward", "bwd_x": "by input", "bwd_w": "by weights"}
GEOMEAN_TARGET, LINE = 1.1, 16  # LINE: alignment of operands, in elements
TURN_SECONDS, QUICK_TURN_SECONDS = 0.02, 0.001
TOLERANCE = 1e-5  # relative to the largest element times the root of the length of its sum
NAMES = {"ours": "calcvm", "first": "oneDNN, channels first", "last": "oneDNN, channels last"}

Case = dict[str, Any]  # operator, pass, stored shapes, settings
Run = Callable[[int], object]  # runs the case a number of times


def layers(network: str, batch: int) -> dict[str, Case]:
    """The convolutions of a network, by their sizes, and the products of each in a step."""
    from calcvm import CalcGraph, zoo

    size, channels = {"lenet": (28, 1), "unet": (256, 3)}.get(network, (224, 3))
    g = CalcGraph()
    x = g.placeholder("x", (batch, channels, size, size))
    with g.path("learn", backward=True) as path:
        getattr(zoo, network)().build(x)
    found: dict[str, Case] = {}
    for op in path.operations:
        if op.spec.name.startswith("conv"):
            shapes = {name: [s.b for s in op.laid[name]] for name in ("x", "wt", "y")}
            window, stride = shapes["wt"][0], (op.attrs["stride"] or (1,))[0]
            (_, size, _, c), f = shapes["x"], shapes["y"][-1]
            what = f"{c} to {f} at {size}: {window}x{window}" + (f" by {stride}" if stride > 1 else "")
            what += f", {op.attrs['groups']} groups" if op.attrs["groups"] > 1 else ""
            what += ", transposed" if op.spec.name != "conv" else ""
            passes = [name for name in PASSES if found or name != "bwd_x"]  # none for the first input
            found[what] = {"operator": op.spec.name, "shapes": shapes, "attrs": op.attrs, "passes": passes}
    return found


class Ours:
    """A row as the VM runs it, in a separate heap."""

    def __init__(self, case: Case, values: dict[str, np.ndarray]) -> None:
        from calcvm.ops import OPS
        from calcvm.ops.dims import shape_of
        from calcvm.ops.sizes import On, evaluate, workspace
        from calcvm.vm.program.encoding import encode_row

        spec = OPS[case["operator"]]
        row = next(r for r in spec.rows if r.name.endswith(case["pass"]))
        shapes = {name: shape_of(tuple(shape)) for name, shape in case["shapes"].items()}
        attrs = {name: tuple(v) if isinstance(v, list) else v for name, v in case["attrs"].items()}
        forms = spec.words({**shapes, "b": None}, attrs)
        words = (
            {w.name: 0 for w in row.words}
            | {"phases": 1, "nw": 1, "gpu": 0}
            | {n: v if isinstance(v, int) else v.b for n, v in forms.items()}
        )
        words["wn"] = workspace(row, words, On(1, 0))[1].at(1)
        extents = {o.name: int(evaluate(o.elems, words)) for o in row.operands if not o.optional}
        offsets, end = {}, LINE
        for name, n in extents.items():
            offsets[name] = end
            end += -(-n // LINE) * LINE
        heap = np.zeros(end + LINE, np.float32)
        heap = heap[-heap.ctypes.data // heap.itemsize % LINE :]
        for name in extents.keys() & values.keys():
            heap[offsets[name] : offsets[name] + extents[name]] = values[name].reshape(-1)
        made = row.writes[0].name
        self.result = heap[offsets[made] : offsets[made] + extents[made]]
        self.terms = int(evaluate(row.flops, words)) / 2 / self.result.size
        loop, encoded = native(row.name), encode_row(row, words, offsets)
        self.run: Run = lambda times: (loop(times, heap.ctypes.data, encoded.ctypes.data, 0, 1, 0), heap)

    def found(self) -> np.ndarray:
        self.run(1)
        return self.result


@cache
def native(row: str) -> Callable:
    """The loop over a row's kernel."""
    from calcvm.kernels_cpu import address_of

    return compiled_loop(address_of(row, "float32"), [ctypes.c_int64] * 5)


class Theirs:
    """The functions that PyTorch's autograd calls."""

    def __init__(self, case: Case, values: dict[str, np.ndarray], layout: str) -> None:
        import torch

        form = torch.channels_last if layout == "last" else torch.contiguous_format

        def tensor(name: str, *axes: int) -> Any:
            return torch.from_numpy(values[name]).permute(axes).contiguous(memory_format=form)

        x, dy, w = tensor("x", 0, 3, 1, 2), tensor("dy", 0, 3, 1, 2), tensor("wt", 3, 2, 0, 1)
        stride, pads = (
            [*(case["attrs"][name] or default)] for name, default in (("stride", (1, 1)), ("padding", (0, 0)))
        )
        settings = stride, pads[:2], [1, 1], case["operator"] == "conv_transpose", [0, 0], case["attrs"]["groups"]
        forward, backward = torch.ops.aten.convolution, torch.ops.aten.convolution_backward
        i = list(PASSES).index(case["pass"]) - 1
        self.axes = (2, 3, 1, 0) if i == 1 else (0, 2, 3, 1)

        def once() -> Any:
            if i < 0:
                return forward(x, w, None, *settings)
            return backward(dy, x, w, None, *settings, [i == 0, i == 1, False])[i]

        self.once = once

    def run(self, times: int) -> None:
        for _ in range(times):
            self.once()

    def found(self) -> np.ndarray:
        return self.once().permute(self.axes).contiguous().numpy().reshape(-1)


def serve(quick: bool, core: int | None) -> None:
    """The one-thread process: time every case on request and answer with seconds per call, turn by turn."""
    import torch

    torch.set_num_threads(1)
    answer = answers(core)
    answer(onednn=torch.backends.mkldnn.is_available())
    for line in sys.stdin:
        case = json.loads(line)["case"]
        rng = np.random.default_rng(0)
        values = {
            n: rng.standard_normal(case["shapes"]["y" if n == "dy" else n], dtype=np.float32) for n in ("x", "wt", "dy")
        }
        ours = Ours(case, values)
        contestants: dict[str, Any] = {"ours": ours, **{name: Theirs(case, values, name) for name in ("first", "last")}}
        with torch.backends.mkldnn.flags(enabled=False):  # PyTorch's native loops
            reference = Theirs(case, values, "first").found()
        bound = TOLERANCE * np.sqrt(ours.terms) * np.abs(reference).max()
        wrong = [n for n, c in contestants.items() if not np.abs(c.found() - reference).max() <= bound]
        times: dict[str, list[float]] = {name: [] for name in contestants if name not in wrong}
        once = {name: best_seconds(partial(contestants[name].run, 1), 1) for name in times}
        for _ in range(QUICK_REPEATS if quick else REPEATS):
            for name in times:
                n_calls = max(1, int((QUICK_TURN_SECONDS if quick else TURN_SECONDS) / once[name]))
                start = time.perf_counter()
                contestants[name].run(n_calls)
                times[name].append((time.perf_counter() - start) / n_calls)
        answer(times=times, wrong=wrong, flops=2 * ours.terms * ours.result.size)


def main(quick: bool = False) -> bool:
    """Run the workload; True if every result is right."""
    result = Result("convolution", "Convolutions on one core", quick)
    try:
        process = Process("-m", "bench.convolution", json.dumps({"quick": quick, "core": idlest_core()}), threads=1)
    except RuntimeError as error:
        result.fail(f"not measured: {error}")
        return result.save()
    if not process.ready["onednn"]:
        result.note("this PyTorch has no oneDNN: its own loops are measured")
    peak = result.data["limits"]["fma_gflops"]
    ratios: dict[str, dict[str, float]] = {text: {} for text in PASSES.values()}
    by_turns: list[float] = []
    for network, batch in NETWORKS.items():
        rows = []
        for what, layer in list(layers(network, batch).items())[: 2 if quick else None]:
            for which in layer["passes"]:
                text = PASSES[which]
                label = f"{network}, {what}, {text}"
                reply = process.ask(case={**layer, "pass": which})
                times = reply["times"]
                for name in reply["wrong"]:
                    result.fail(f"{NAMES[name]} DISAGREES in {label}")
                gflops = {name: 1e-9 * reply["flops"] / min(t) for name, t in times.items()}
                cells = [number(gflops[name]) if name in gflops else "-" for name in NAMES]
                peers = [t for name, t in times.items() if name != "ours"]
                if "ours" in times and peers:
                    ratios[text][label] = best = min(ratio(t, times["ours"]) for t in peers)
                    by_turns.append(min(turn_ratio(t, times["ours"]) for t in peers))
                    cells += [number(best), f"{100 * gflops['ours'] / peak:.0f} %"]
                else:
                    cells += ["-", "-"]
                rows.append([what, text, *cells])
                say("  ".join([f"{label:>60}", *(f"{cell:>8}" for cell in cells)]))
        header = ["layer", "product", *NAMES.values(), "times best", "of peak"]
        result.table(f"{network}, {batch} images: GFLOP/s of the fastest turn", header, rows)
    process.close()
    rows = [
        [text, number(geomean(list(of.values()))), number(of[worst]), worst]
        for text, of in {**ratios, "all": {k: v for of in ratios.values() for k, v in of.items()}}.items()
        for worst in [min(of, key=lambda label: of[label])]
    ]
    result.table("Ours against the best of them", ["product", "geometric mean", "worst", "which is"], rows)
    result.note(f"geometric mean by turns: {number(geomean(by_turns))}")
    every = {label: value for of in ratios.values() for label, value in of.items()}
    what = f"convolutions, geometric mean of {len(every)} against the best layout"
    result.target("P16", what, geomean(list(every.values())), GEOMEAN_TARGET, "x")
    return result.save()


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    serve(options["quick"], options["core"])
