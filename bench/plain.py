"""Kernels generated from equations beside kernels written by hand, NumPy and PyTorch, on one core: the same work, turn by turn.

A row's own equation is used if it is one of a plain row, without an activation.  For two rows the text here gives the same
without what plain rows lack: operands in other layouts, running statistics.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.harness import Result, compiled_loop, geomean, interleave, number, ratio, say, turn_ratio
from bench.operators import place, torch_functions
from calcvm.equations.declared import DECLARED
from calcvm.equations.plain import Plain
from calcvm.errors import CalcError
from calcvm.kernels_cpu import _plain_loops
from calcvm.kernels_cpu._common import KERNELS
from calcvm.kernels_cpu.plain import add
from calcvm.ops import OPS
from calcvm.ops.spec import Example, RowSpec
from tests.plainrows import as_plain, plain_of, row_of
from tests.rowrun import Case, _row_runs, words_of

DTYPE = "float32"
TURNS, QUICK_TURNS, SECONDS, QUICK_SECONDS = 15, 2, 0.002, 0.0002
TOLERANCE = 1e-4  # relative to the largest element
NEAR = 1.25  # times the time of the kernel written by hand
HEADER = ("row", "shape", "by hand us", "plain us", "plain/by hand", "by turns", "NumPy us", "PyTorch us")
IMAGES, SMALL = (8, 56, 56, 64), (32, 28, 28, 16)
POOL32: dict[str, Any] = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1)}
POOL22: dict[str, Any] = {"kernel": (2, 2)}
PRODUCT = "y[m<M,n<N] = sum[k<K] a[m,k]*b[k,n]"
STATS = (
    "mean[c<N] = sum[r<rows*inner] x[r,c]/R; inv[c] = 1/sqrt(sum[r] (x[r,c] - mean[c])^2/R + eps); "
    "var[c] = sum[r] (x[r,c] - mean[c])^2/R"
)
CUMSUM = "y[o<O,n<N,i<I] = y[o,n - 1,i] + x[o,n,i]"
_number = count()

Run = Callable[[int], object]  # runs it a number of times


@dataclass
class Comparison:
    """A row of an operator on shapes, with a text and its words if it has no plain equation."""

    operator: str
    row: str
    shapes: tuple[tuple[int, ...], ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    words: str = ""
    reals: str = ""
    integer: Mapping[str, int] = field(default_factory=dict)

    @property
    def called(self) -> str:
        axes = self.attrs.get("axes")
        return self.row + (f", axis {axes[0]}" if axes else "")

    def case(self) -> Case:
        shapes = [(None, *s[1:]) if k == 0 or (self.integer and k) else s for k, s in enumerate(self.shapes)]
        if self.operator == "matmul":
            shapes = [*self.shapes]
        batch = self.shapes[0][0]
        example = Example(shapes=tuple(shapes), attrs=self.attrs, batch=batch, integer=self.integer, low=-1.0, high=1.0)
        return Case(OPS[self.operator], example, DTYPE, batch)


def comparisons() -> list[Comparison]:
    found = []
    for shape in ((256, 64), (512, 768)):
        for axis in (1, 0):
            found.append(Comparison("sum", "sum_fwd", (shape,), {"axes": (axis,)}))
    found += [Comparison("softmax", "softmax_fwd", (s,)) for s in ((4096, 64), (512, 1000), (256, 10))]
    found += [Comparison("layer_norm", "layer_norm_fwd", (s, s[1:], s[1:])) for s in ((32, 128), (512, 768))]
    found.append(Comparison("matmul", "matmul_fwd", ((64, 64), (64, 64)), {}, PRODUCT, "M N K"))
    for s in (SMALL, IMAGES):
        found.append(Comparison("batch_norm", "batch_norm_fwd", (s, *[s[3:]] * 4)))
        found.append(Comparison("batch_norm", "batch_norm_stats", (s, *[s[3:]] * 4), {}, STATS, "rows inner N", "eps"))
    for pool in ("avg_pool", "max_pool"):
        found += [Comparison(pool, f"{pool}_fwd", (s,), a) for s, a in ((IMAGES, POOL32), (SMALL, POOL22))]
    found.append(Comparison("pick", "pick_fwd", ((4096, 10), (4096,)), {}, integer={"index": 10}))
    return found


# ---------------------------------------------------------------- contestants
class Side:
    """A row's kernel, its encoded row and its operands."""

    def __init__(self, case: Case, row: RowSpec, values: Mapping[str, np.ndarray]):
        (self.row,), self.operands = place(case, [row], values)
        self.results = [o.name for o in row.writes]
        self.loop = compiled_loop(KERNELS[row.name].address(DTYPE), [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 3)

    def run(self, n: int) -> None:
        self.loop(n, self.operands["heap"].ctypes.data, self.row.ctypes.data, 0, 1, 0)


def plain_row(c: Comparison, row: RowSpec) -> RowSpec:
    """The plain row of a comparison, with its kernel; a new one at each call."""
    name = f"plain_{row.name.replace('.', '_')}_{next(_number)}"
    if not c.text:
        add(plain_of(row, name), own=True)
        return replace(as_plain(row), name=name)
    operands = [o for o in row.operands if f"{o.name}[" in c.text]
    plain = Plain(name, c.text, tuple(c.words.split()), tuple(o.name for o in operands), tuple(c.reals.split()))
    add(plain, own=True)
    return row_of(plain)


def numpys(c: Comparison, x: list[np.ndarray]) -> Callable[[], object] | None:
    """The same in NumPy."""

    def softmax() -> np.ndarray:
        e = np.exp(x[0] - x[0].max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def layer_norm() -> np.ndarray:
        off = x[0] - x[0].mean(-1, keepdims=True)
        return off / np.sqrt((off * off).mean(-1, keepdims=True) + 1e-5) * x[1] + x[2]

    return {
        "sum_fwd": lambda: x[0].sum(c.attrs["axes"]),
        "softmax_fwd": softmax,
        "layer_norm_fwd": layer_norm,
        "matmul_fwd": lambda: x[0] @ x[1],
        "batch_norm_stats": lambda: (x[0].mean((0, 1, 2)), x[0].var((0, 1, 2))),
        "pick_fwd": lambda: x[0][np.arange(len(x[0])), x[1]],
    }.get(c.row)


def torchs(c: Comparison, x: list[np.ndarray]) -> Callable[[], object] | None:
    """The same in PyTorch, images channels last."""
    import torch

    torch.set_num_threads(1)
    t = [torch.tensor(a) for a in x]
    t = [a.movedim(-1, 1) if a.dim() == 4 else a for a in t]
    functions = torch_functions()
    if c.row in ("softmax_fwd", "layer_norm_fwd", "max_pool_fwd", "avg_pool_fwd"):
        return lambda: functions[c.operator](*t, **c.attrs)
    return {
        "sum_fwd": lambda: t[0].sum(c.attrs["axes"]),
        "matmul_fwd": lambda: t[0] @ t[1],
        "batch_norm_fwd": lambda: functions["batch_norm_inference"](*t),
        "batch_norm_stats": lambda: torch.var_mean(t[0], (0, 2, 3)),
        "pick_fwd": lambda: t[0].gather(1, t[1][:, None]),
    }.get(c.row)


def repeated(call: Callable[[], object]) -> Run:
    def run(n: int) -> None:
        for _ in range(n):
            call()

    return run


def timed(run: Run, n: int) -> float:
    start = time.perf_counter()
    run(n)
    return (time.perf_counter() - start) / n


def seconds(runs: Mapping[str, Run], quick: bool) -> dict[str, list[float]]:
    """Seconds of each run, in alternating turns; two turns if one call takes longer than a turn should."""
    turns, slow = {}, False
    for who, run in runs.items():
        run(1)
        once = timed(run, 1)
        slow |= once > TURNS * SECONDS
        n = max(1, int((QUICK_SECONDS if quick else SECONDS) / once))
        turns[who] = lambda run=run, n=n: timed(run, n)
    return interleave(turns, QUICK_TURNS if quick or slow else TURNS)


def agree(sides: Mapping[str, Side], case: Case, what: str, result: Result) -> None:
    """Check that both kernels have run and agree on the results that both compute."""
    own, plain = (side.operands for side in sides.values())
    for name in sides["plain"].results:
        if name in own:
            want, got = (o[name].view(case.types.get(name, DTYPE)).astype(np.float64) for o in (own, plain))
            if not np.abs(got - want).max(initial=0) <= TOLERANCE * np.abs(want).max(initial=1e-3):
                result.fail(f"{name} of {what}: the kernels disagree")


def peers_of(c: Comparison, case: Case) -> dict[str, Run]:
    x = [case.array(n, case.values[n]).astype("int64" if n in c.integer else DTYPE) for n in case.given]
    found = {"numpy": numpys(c, x), "torch": torchs(c, x)}
    return {who: repeated(call) for who, call in found.items() if call}


def row_and_values(c: Comparison, case: Case) -> tuple[RowSpec, dict[str, np.ndarray]]:
    return next(r for r in case.spec.rows if r.name == c.row), dict(case.values) | case.forward()


def compared(c: Comparison, result: Result, quick: bool) -> dict[str, list[float]]:
    case = c.case()
    row, values = row_and_values(c, case)
    sides = {"own": Side(case, row, values), "plain": Side(case, plain_row(c, row), values)}
    times = seconds({who: side.run for who, side in sides.items()} | peers_of(c, case), quick)
    agree(sides, case, f"{c.row}, {c.shapes[0]}", result)
    return times


# ---------------------------------------------------------------- tables
def scans(quick: bool) -> Iterator[tuple[str, tuple[int, ...], dict[str, list[float]]]]:
    """Running sums along both axes, for which there is no kernel written by hand."""
    import torch

    plain = Plain("plain_cumsum", CUMSUM, ("O", "N", "I"), ("x", "y"))
    add(plain, own=True)
    row = row_of(plain)
    x = np.random.default_rng(0).uniform(-1, 1, (512, 768)).astype(DTYPE)
    out, t = np.empty_like(x), torch.tensor(x)
    case = Case(OPS["neg"], Example(shapes=((None, 768),), batch=512), DTYPE, 512)
    for axis, words in ((1, {"O": 512, "N": 768, "I": 1}), (0, {"O": 1, "N": 512, "I": 768})):
        case.words = words
        runs: dict[str, Run] = {"plain": Side(case, row, {"x": x}).run}
        runs["numpy"] = repeated(partial(np.cumsum, x, axis, out=out))
        runs["torch"] = repeated(partial(torch.cumsum, t, axis))
        yield f"cumsum, axis {axis}", x.shape, seconds(runs, quick)


def beside_peers(result: Result, quick: bool) -> None:
    rows = []

    def told(what: str, shape: tuple[int, ...], times: Mapping[str, list[float]]) -> None:
        us = {who: number(min(found) * 1e6) for who, found in times.items()}
        ratios = [number(of(times["plain"], times["own"])) if "own" in times else "" for of in (ratio, turn_ratio)]
        cells = [us.get(who, "") for who in ("own", "plain", "numpy", "torch")]
        rows.append([what, "x".join(map(str, shape)), *cells[:2], *ratios, *cells[2:]])
        say("  ".join(f"{cell:>14}" for cell in rows[-1]))

    for c in comparisons()[:: 4 if quick else 1]:
        told(c.called, c.shapes[0], compared(c, result, quick))
    for what, shape, times in scans(quick):
        told(what, shape, times)
    result.table("us a call of float32 kernels, one worker, minima over the turns", HEADER, rows)


def every_row(result: Result, quick: bool) -> None:
    """Every row of the table that can be plain, on the examples of the microbenchmarks, or else the first."""
    rows: list[list[str]] = []
    ratios: dict[str, float] = {}
    declared = {row.name for d in DECLARED.values() for row in (d.forward, *d.backward)}
    for spec in [*OPS.values()][:: 40 if quick else 1]:
        marked = [e for e in spec.examples if e.bench]
        for example in marked or spec.examples[:1]:
            case = Case(spec, example, DTYPE, example.batch)
            for row, values in _row_runs(case):
                phases = words_of(row, case.words)["phases"]
                if row.name in declared or phases > 1 or any(o.paged for o in row.operands):
                    continue  # no kernel by hand, several calls, or a file
                try:
                    plain = as_plain(row)
                except CalcError:
                    continue
                sides = {"own": Side(case, row, values), "plain": Side(case, plain, values)}
                times = seconds({who: side.run for who, side in sides.items()}, quick)
                agree(sides, case, f"{row.name}, {example.shapes}", result)
                shape = "x".join(str(n or example.batch) for n in example.shapes[0]) if example.shapes else ""
                by = ratio(times["plain"], times["own"])
                ratios[row.name] = max(ratios.get(row.name, 0), by)
                rows.append([row.name, shape, *(number(min(t) * 1e6) for t in times.values()), number(by)])
                say("  ".join(f"{cell:>14}" for cell in rows[-1]))
    result.table("Every row that can be plain", ("row", "shape", "by hand us", "plain us", "plain/by hand"), rows)
    near = sorted(name for name, by in ratios.items() if by <= NEAR)
    result.note(
        f"{len(near)} of {len(ratios)} rows take at most {NEAR} times as long by their plain kernel on every shape here; "
        f"the geometric mean of all is {number(geomean([*ratios.values()]))}: {', '.join(near)}"
    )


def without(name: str, value: Any) -> AbstractContextManager:
    return patch.object(_plain_loops, name, value)


def unruly(method: str, answer: Any) -> AbstractContextManager:
    return patch.object(_plain_loops.Loops, method, lambda *args: answer)


RULES: dict[str, tuple[str, Callable[[], AbstractContextManager], tuple[str, ...]]] = {
    "A": ("4 vectors of results at once", lambda: without("WIDE", 1), ("sum_fwd, axis 0", "batch_norm_stats", "max_pool_fwd")),
    "A'": ("4 rows of results at once", lambda: without("ROWS", 1), ("matmul_fwd",)),
    "B": ("terms of a sum stay in the result", lambda: unruly("stored_terms", None), ("softmax_fwd",)),
    "B'": ("results of one index in one loop", lambda: unruly("same", False), ("layer_norm_fwd", "batch_norm_stats")),
    "C": ("4 sums of a long reduction", lambda: without("WAYS", 1), ("sum_fwd, axis 1", "batch_norm_stats", "layer_norm_fwd")),
    "D": ("what no index changes before the loop", lambda: unruly("hoist", None), ("batch_norm_fwd", "softmax_fwd")),
    "E": ("terms from the first inside to the last", lambda: unruly("guards", []), ("avg_pool_fwd", "max_pool_fwd")),
}  # fmt: skip


def rules(result: Result, quick: bool) -> None:
    """The gain of each rule of the loops: kernels generated without it beside those with it."""
    rows = []
    for rule, (what, off, called) in [*RULES.items()][:: 4 if quick else 1]:
        for c in comparisons():
            if c.called not in called:
                continue
            case = c.case()
            row, values = row_and_values(c, case)
            sides = {"with": Side(case, plain_row(c, row), values)}
            with off():
                sides["without"] = Side(case, plain_row(c, row), values)
            times = seconds({who: side.run for who, side in sides.items()}, quick)
            gain = number(ratio(times["without"], times["with"]))
            shape = "x".join(map(str, c.shapes[0]))
            rows.append([rule, what, c.called, shape, *(number(min(t) * 1e6) for t in times.values()), gain])
            say("  ".join(f"{cell:>14}" for cell in rows[-1]))
    result.table(
        "What each rule of the loops gains",
        ("rule", "", "row", "shape", "with us", "without us", "times"), rows,
    )  # fmt: skip


def main(quick: bool = False) -> bool:
    """Run the workload; True if both kernels of every row agree."""
    result = Result("plain", "Kernels that follow from equations", quick)
    for part in (beside_peers, rules, every_row):
        part(result, quick)
    return result.save()


if __name__ == "__main__":
    main(True)
