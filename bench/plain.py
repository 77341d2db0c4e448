"""Kernels that follow from equations beside those written by hand, of one core: the same work, in one process, turn by turn.

A row's own equation is taken where it is one of a plain row; of some the text here says the same without what a plain row has not:
an activation, running statistics, scratch.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from bench.harness import Result, interleave, number, ratio, say, turn_ratio
from bench.operators import place
from calcvm.equations.plain import Plain
from calcvm.errors import CalcError
from calcvm.kernels_cpu._common import KERNELS
from calcvm.kernels_cpu.plain import add
from calcvm.ops import OPS
from calcvm.ops.spec import Example, RowSpec
from tests.plainrows import plain_of, row_of
from tests.rowrun import Case

DTYPE = "float32"
TURNS, QUICK_TURNS, SECONDS, QUICK_SECONDS = 25, 2, 0.004, 0.0002
TOLERANCE = 1e-4  # of the largest element
HEADER = ("row", "shape", "own us, min", "median", "plain us, min", "median", "plain/own", "by turns")
IMAGES, SMALL = (8, 56, 56, 64), (32, 28, 28, 16)
POOL32: dict[str, Any] = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1)}
POOL22: dict[str, Any] = {"kernel": (2, 2)}
SUM = "y[o<O,i<I] = sum[r<R0*R1*R2] x[o,r,i]"
PRODUCT = "y[m<M,n<N] = sum[k<K] a[m,k]*b[k,n]"
CENTER = "y[r<rows*inner,c<N] = (x[r,c] - mean[c])*inv[c]*scale[c] + shift[c]"
STATS = (
    "mean[c<N] = sum[r<rows*inner] x[r,c]/R; inv[c] = 1/sqrt(sum[r] (x[r,c] - mean[c])^2/R + eps); "
    "var[c] = sum[r] (x[r,c] - mean[c])^2/R"
)
CUMSUM = "y[o<O,n<N,i<I] = y[o,n - 1,i] + x[o,n,i]"


@dataclass
class Comparison:
    """A row of an operator on shapes, and where it has no plain equation, a text with its words."""

    operator: str
    row: str
    shapes: tuple[tuple[int, ...], ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    words: str = ""
    reals: str = ""
    integer: Mapping[str, int] = field(default_factory=dict)


def comparisons() -> list[Comparison]:
    found = []
    for shape in ((256, 64), (512, 768)):
        for axis in (1, 0):
            found.append(Comparison("sum", "sum_fwd", (shape,), {"axes": (axis,)}, SUM, "O R0 R1 R2 I"))
    found += [Comparison("softmax", "softmax_fwd", (s,)) for s in ((4096, 64), (512, 1000), (256, 10))]
    found += [Comparison("layer_norm", "layer_norm_fwd", (s, s[1:], s[1:])) for s in ((32, 128), (512, 768))]
    found.append(Comparison("matmul", "matmul_fwd", ((64, 64), (64, 64)), {}, PRODUCT, "M N K"))
    for s in (SMALL, IMAGES):
        found.append(Comparison("batch_norm", "batch_norm_fwd", (s, *[s[3:]] * 4), {}, CENTER, "rows inner N"))
        found.append(Comparison("batch_norm", "batch_norm_stats", (s, *[s[3:]] * 4), {}, STATS, "rows inner N", "eps"))
    for pool in ("avg_pool", "max_pool"):
        found += [Comparison(pool, f"{pool}_fwd", (s,), a) for s, a in ((IMAGES, POOL32), (SMALL, POOL22))]
    found.append(Comparison("pick", "pick_fwd", ((4096, 10), (4096,)), {}, integer={"index": 10}))
    return found


class Side:
    """A row's kernel, its encoded row and its operands."""

    def __init__(self, case: Case, row: RowSpec, values: Mapping[str, np.ndarray]):
        (self.row,), self.operands = place(case, [row], values)
        self.results = [o.name for o in row.writes]
        from bench.harness import compiled_loop

        loop = compiled_loop(KERNELS[row.name].address(DTYPE), [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 3)
        heap, at = self.operands["heap"].ctypes.data, self.row.ctypes.data
        self.run: Callable[[int], object] = lambda n: loop(n, heap, at, 0, 1, 0)


def plain_row(c: Comparison, row: RowSpec) -> RowSpec:
    """The plain row of a comparison, with its kernel."""
    name = f"plain_{row.name.replace('.', '_')}"
    if not c.text:
        plain = plain_of(row, name)
    else:
        operands = [o for o in row.operands if f"{o.name}[" in c.text]
        plain = Plain(name, c.text, tuple(c.words.split()), tuple(o.name for o in operands), tuple(c.reals.split()))
    add(plain, own=True)
    return row_of(plain)


def timed(run: Callable[[int], object], n: int) -> float:
    start = time.perf_counter()
    run(n)
    return (time.perf_counter() - start) / n


def seconds(runs: Mapping[str, Callable[[int], object]], quick: bool) -> dict[str, list[float]]:
    """Of each, of a turn after the other."""
    turns = {}
    for who, run in runs.items():
        run(1)
        n = max(1, int((QUICK_SECONDS if quick else SECONDS) / timed(run, 1)))
        turns[who] = lambda run=run, n=n: timed(run, n)
    return interleave(turns, QUICK_TURNS if quick else TURNS)


def compared(c: Comparison, result: Result, quick: bool) -> dict[str, list[float]]:
    shapes = [(None, *s[1:]) if k == 0 or (c.integer and k) else s for k, s in enumerate(c.shapes)]
    if c.operator == "matmul":
        shapes = [*c.shapes]
    example = Example(shapes=tuple(shapes), attrs=c.attrs, batch=c.shapes[0][0], integer=c.integer, low=-1.0, high=1.0)
    case = Case(OPS[c.operator], example, DTYPE, c.shapes[0][0])
    values = dict(case.values) | case.forward()
    row = next(r for r in case.spec.rows if r.name == c.row)
    sides = {"own": Side(case, row, values), "plain": Side(case, plain_row(c, row), values)}
    times = seconds({who: side.run for who, side in sides.items()}, quick)
    for name in sides["plain"].results:
        own, plain = (side.operands[name].view(DTYPE) for side in sides.values())
        if not np.abs(own - plain).max(initial=0) <= TOLERANCE * np.abs(own).max(initial=1e-3):
            result.fail(f"{name} of {c.row}, {c.shapes[0]}: the kernels disagree")
    return times


def scans(quick: bool) -> Iterator[tuple[str, tuple[int, ...], dict[str, list[float]]]]:
    """Running sums along both axes, beside NumPy's."""
    plain = Plain("plain_cumsum", CUMSUM, ("O", "N", "I"), ("x", "y"))
    add(plain, own=True)
    row = row_of(plain)
    x = np.random.default_rng(0).uniform(-1, 1, (512, 768)).astype(DTYPE)
    out = np.empty_like(x)
    case = Case(OPS["neg"], Example(shapes=((None, 768),), batch=512), DTYPE, 512)
    for axis, words in ((1, {"O": 512, "N": 768, "I": 1}), (0, {"O": 1, "N": 512, "I": 768})):
        case.words = words
        side = Side(case, row, {"x": x})

        def numpys(n: int, axis: int = axis) -> None:
            for _ in range(n):
                np.cumsum(x, axis, out=out)

        times = seconds({"own": numpys, "plain": side.run}, quick)
        yield f"np.cumsum, axis {axis}", x.shape, times


def main(quick: bool = False) -> bool:
    """Run the workload; True when both kernels of every row agree."""
    result = Result("plain", "Kernels that follow from equations", quick)
    rows = []

    def told(what: str, shape: tuple[int, ...], times: Mapping[str, list[float]]) -> None:
        us = [number(of(times[who]) * 1e6) for who in ("own", "plain") for of in (min, median)]
        ratios = [number(of(times["plain"], times["own"])) for of in (ratio, turn_ratio)]
        rows.append([what, "x".join(map(str, shape)), *us, *ratios])
        say("  ".join(f"{cell:>14}" for cell in rows[-1]))

    for c in comparisons():
        axes = c.attrs.get("axes")
        try:
            told(c.row + (f", axis {axes[0]}" if axes else ""), c.shapes[0], compared(c, result, quick))
        except CalcError as error:
            result.fail(f"{c.row}: {error}")
    for what, shape, times in scans(quick):
        told(what, shape, times)
    result.table("us a call of float32 kernels, one worker; own: the kernel written by hand, or NumPy's", HEADER, rows)
    return result.save()


if __name__ == "__main__":
    main(True)
