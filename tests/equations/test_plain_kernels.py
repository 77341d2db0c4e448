"""Kernels that follow from equations: beside the equations in float64, between guards, by teams, in both types.

In `make test` a sample; ``pytest --whole tests/equations/test_plain_kernels.py`` takes more seeds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from calcvm.equations.check import INTEGER, NUMBER, check
from calcvm.equations.grammar import read
from calcvm.equations.meaning import evaluate
from calcvm.equations.plain import Plain
from calcvm.equations.ranges import ranges
from calcvm.equations.text import show_equations
from calcvm.equations.tree import Element, Equation, Index, Name, Node, Number, Reduction, rewritten, walk
from calcvm.errors import CalcError
from calcvm.kernels_cpu._native import closure, modules_of
from calcvm.kernels_cpu.plain import add
from tests import rowrun
from tests.equations.generate import generate
from tests.equations.random_windows import random_windows
from tests.plainrows import row_of
from tests.rowrun import EPS, close, guard_of, run_row, same_bits

TEAMS = (2, 3, 5)
SAMPLE, WHOLE, PARTS = 40, 400, 4
_number = count()


def declared(
    text: str, words: str, operands: str, types: Mapping[str, str] | None = None, reals: str = "", declares: str = ""
) -> Plain:
    """A plain row with a kernel, of a name that no other has."""
    name = f"plain_test_{next(_number)}"
    plain = Plain(
        name, text, tuple(words.split()), tuple(operands.split()), tuple(reals.split()), types or {}, declares
    )
    add(plain, own=True)
    return plain


def made(
    plain: Plain, words: Mapping[str, Any], values: Mapping[str, Any], dtype: str = "float32", **how: Any
) -> dict[str, np.ndarray]:
    """The row's results, flat; between guards, and with the same bits by every team, of which one worker sets an element."""
    row = row_of(plain)
    flat = {n: np.ascontiguousarray(v).reshape(-1) for n, v in values.items()}
    flat = {n: v.astype(dtype) if v.dtype.kind == "f" else v for n, v in flat.items()}
    known = {*flat} | {o.name for o in row.operands if not o.optional}
    got = run_row(row, words, flat, dtype, known=known, **how)
    for n in TEAMS:
        for name, value in run_row(row, words, flat, dtype, known=known, n_workers=n, **how).items():
            assert same_bits(value, got[name]), f"{name} of {plain.text} differs by {n} workers"
        alone = [run_row(row, words, flat, dtype, known=known, n_workers=n, only=w, raw=True, **how) for w in range(n)]
        for name in got:
            guard = guard_of(row, row.operand(name), dtype)
            setting = sum((worker[name] != guard).astype(int) for worker in alone)
            assert (setting <= 1).all(), f"several of {n} workers set {name} of {plain.text}"
    return got


@pytest.mark.parametrize("text", ["y[b<1] = sum[a<3] x[b,a]", "y[b<1,a<3] = 2*x[b,a]"])
def test_one_worker_sets_what_has_one_unit(text: str) -> None:
    """Where others set it, too, they do so after the next row has made something else of it."""
    made(declared(text, "", "x y"), {}, {"x": np.ones((1, 3))})


def near(got: np.ndarray, want: np.ndarray, tolerance: float, what: str) -> None:
    """`close`, and what is not finite is equal."""
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite], what)
    close(got[finite], want[finite], tolerance, what)


# ---------------------------------------------------------------- generated equations
def as_row(text: str, values: Mapping[str, np.ndarray], by_words: bool) -> tuple[Plain, dict[str, int], str]:
    """Equations as a row's, with extents that are words, or numbers; those before the last are parts of it."""
    equations = read(text)
    kinds = {name: INTEGER if v.dtype.kind == "i" else NUMBER for name, v in values.items()}
    check(equations, kinds, {})
    extents = ranges(equations, {name: v.shape for name, v in values.items()}, {}).extents
    words = {v.upper(): n for v, n in extents.items()} if by_words else {}

    def said(i: Index) -> Index:
        return replace(i, extent=Name(i.name.upper()) if by_words else Number(extents[i.name]))

    def ranged(node: Node) -> Node:
        return replace(node, indexes=tuple(map(said, node.indexes))) if isinstance(node, Reduction) else node

    equations = tuple(Equation(e.name, tuple(map(said, e.kept or ())), rewritten(e.value, ranged)) for e in equations)
    declares = []
    for name, v in values.items():
        at = next(n for e in equations for n in walk(e.value) if isinstance(n, Element) and n.array == name)
        axes = [
            said(Index(p.name)) if isinstance(p, Name) and extents[p.name] == n else Index(f"{name}{k}_", Number(n))
            for k, (p, n) in enumerate(zip(at.places, v.shape))
        ]
        declares.append(show_equations([Equation(name, tuple(axes), Number(0))]).partition(" =")[0])
    types = {name: "int64" for name, v in values.items() if v.dtype.kind == "i"}
    out = equations[-1].name
    once = "; ".join(declares)
    plain = declared(show_equations(equations), " ".join(words), " ".join([*values, out]), types, declares=once)
    return plain, words, out


def in_range(text: str, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Data in places inside, where nothing is said for beyond the ends: that traps."""
    values = dict(values)
    for equation in read(text):
        for node in walk(equation.value):
            if isinstance(node, Element) and node.beyond == 0:
                for place, n in zip(node.places, values[node.array].shape if node.array in values else ()):
                    for inner in walk(place):
                        if isinstance(inner, Element):
                            values[inner.array] = np.clip(values[inner.array], 0, n - 1)
    return values


def examine(text: str, values: dict[str, np.ndarray], by_words: bool, dtype: str) -> None:
    values = in_range(text, values)
    try:
        plain, words, out = as_row(text, values, by_words)
    except CalcError as error:
        if "begin with different indexes" in str(error):
            return
        raise
    want = evaluate(read(text), {n: v.astype(dtype) if v.dtype.kind == "f" else v for n, v in values.items()})[out]
    got = made(plain, words, values, dtype)[out].astype(np.float64)
    near(got, np.asarray(want, np.float64).reshape(-1), 256 * EPS[dtype], plain.text)


@pytest.mark.parametrize("part", range(PARTS))
def test_generated_equations(part: int, whole: bool) -> None:
    for seed in range(part, WHOLE if whole else SAMPLE, PARTS):
        drawn = generate(seed)
        examine(drawn.text, drawn.values, seed % 3 > 0, ("float32", "float64")[seed % 2])


@pytest.mark.parametrize("part", range(PARTS))
def test_generated_windows(part: int, whole: bool) -> None:
    for seed in range(part, (WHOLE if whole else SAMPLE) // 2, PARTS):
        text, values = random_windows(np.random.default_rng(seed))
        examine(text, values, seed % 3 > 0, ("float32", "float64")[seed % 2])


# ---------------------------------------------------------------- how often what is reduced is computed
MIDDLE = {
    "softmax": "y[o<O,n<N,i<I] = exp(x[o,n,i] - max[k<N] x[o,k,i])/sum[j<N] exp(x[o,j,i] - max[k] x[o,k,i])",
    "normed": "y[o<O,n<N,i<I] = (x[o,n,i] - mean[j<N] x[o,j,i])/sqrt(var[k<N] x[o,k,i] + 0.001)",
    "mean is a result": "m[o<O,i<I] = mean[n<N] x[o,n,i]; y[o,n,i] = x[o,n,i] - m[o,i]",
}


@pytest.mark.parametrize("text", MIDDLE.values(), ids=MIDDLE)
def test_what_is_reduced_over_a_middle_axis_is_computed_once(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each of the 2048 places of that axis: then an element would take 40 to 400 times as long as along the last axis."""
    run, times = rowrun.backend.run, []

    def timed(*args: Any) -> None:
        start = perf_counter()
        run(*args)
        times.append(perf_counter() - start)

    def least(words: Mapping[str, int]) -> float:
        values = {"x": np.ones(prod(words.values()), np.float32)}
        run_row(row, words, values, "float32")  # compiled
        times.clear()
        for _ in range(9):
            run_row(row, words, values, "float32")
        return min(times)

    row = row_of(declared(text, "O N I", "x m y" if text.startswith("m") else "x y"))
    monkeypatch.setattr(rowrun.backend, "run", timed, raising=False)
    assert least({"O": 1, "N": 2048, "I": 16}) < 10 * least({"O": 16, "N": 2048, "I": 1})


# ---------------------------------------------------------------- what is kept of them
PROGRAM = """
import sys
import numpy as np
import calcvm as cv

g = cv.CalcGraph()
x = g.placeholder("x", (None, 3))
with g.path("p") as p:
    p.output = cv.equation(sys.argv[1], x=x).rename("y")
m = cv.CalcHeap("1 MiB").load(cv.compile(g, batch_size=1))
m["x"] = np.array([[1, 3, 2]], np.float32)
m.forward("p")
print("numba" in sys.modules, *m["y"][0].tolist())
"""


def test_a_kernel_is_compiled_once_for_its_text(tmp_path: Path) -> None:
    def lines(text: str) -> tuple[str, int]:
        environment = {**os.environ, "CALCVM_CACHE_DIR": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", PROGRAM, text], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), len([*tmp_path.rglob("*equation*.o")])

    assert lines("y[b,i] = max(y[b,i - 1], x[b,i])") == ("True 1.0 3.0 3.0", 1)
    assert lines("y[b,i] = max(y[b, i-1], (x[b,i]))") == ("False 1.0 3.0 3.0", 1)
    assert lines("y[b,i] = max(2*y[b,i - 1], x[b,i])") == ("True 1.0 3.0 6.0", 2)


def test_kernels_of_derived_rows_depend_on_what_derives_them() -> None:
    """Else one of a wrong derivation would be taken from the cache after that has been mended."""
    found = closure(modules_of("plain"))
    assert {"equations.declared", "equations.backward", "equations.gradient", "equations.plain"} <= {*found}
