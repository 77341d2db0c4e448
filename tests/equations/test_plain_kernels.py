"""Kernels that follow from equations: beside the equations in float64, between guards, by teams, in both types.

In `make test` a sample; ``pytest --whole tests/equations/test_plain_kernels.py`` takes more seeds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from calcvm.equations.check import check
from calcvm.equations.facts import in_place
from calcvm.equations.grammar import read
from calcvm.equations.kinds import INTEGER, NUMBER
from calcvm.equations.meaning import evaluate
from calcvm.equations.plain import Plain
from calcvm.equations.ranges import ranges
from calcvm.equations.text import show_equations
from calcvm.equations.tree import Element, Equation, Index, Name, Node, Number, Reduction, rewritten, walk
from calcvm.errors import CalcError
from calcvm.kernels_cpu._native import closure, modules_of
from calcvm.kernels_cpu.plain import add
from calcvm.ops.spec import RowSpec
from calcvm.script.evaluation import row_values
from tests import rowrun
from tests.conftest import by_turns
from tests.equations.far_places import PLACES, far_place
from tests.equations.generate import generate
from tests.equations.random_windows import random_windows
from tests.plainrows import row_of
from tests.rowrun import EPS, close, guard_of, run_row, same_bits

TEAMS = (2, 3, 5)
SAMPLE, WHOLE, PARTS = 8, 160, 4
_number = count()


def declared(
    text: str, words: str, operands: str, types: Mapping[str, str] | None = None, reals: str = "", declares: str = ""
) -> Plain:
    """A plain row of a name that no other has, with a kernel that is compiled once."""
    return _declared(text, words, operands, tuple((types or {}).items()), reals, declares)


@cache
def _declared(text: str, words: str, operands: str, types: tuple, reals: str, declares: str) -> Plain:
    name = f"plain_test_{next(_number)}"
    plain = Plain(
        name, text, tuple(words.split()), tuple(operands.split()), tuple(reals.split()), dict(types), declares
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


# ---------------------------------------------------------------- teams
ALIKE = [  # products that are added, in loops that take several places at once and in those of the rest
    "y[b<B,c<C] = sum[k<3] tab[t[b,k], c]*w[k,c]",
    "y[b<B,c<C] = sum[k<K] x[b,k]*w[k,c]",
    "y[b<B,c<C] = sum[k<3] x[b,k]*w[k,c]*w[k, c + 1]",
    "y[b<B,c<C] = sum[k<K] (x[b,k] - w[k,c])*x[b,k]/(1 + w[0,c]^2)",
    "y[b<B,c<C] = x[b,0]*w[0,c] + x[b,1]*w[1,c] - x[b,2]*w[2,c]",
    "y[b<B,c<C] = w[0,c]*w[1,c]*y[b, c - 1] + x[b,0]*w[2,c]",
    "y[b<B,c<C] = (sum[k<K] x[b,k]*w[k,c])*w[0,c] + w[1,c]*w[2,c]",
    "y[b<B,c<C] = sum[k<K,j<3] (x[b,k]*w[j,c]/w[k,c] - x[b,j]*x[b,k])",
]


def pytest_generate_tests(metafunc):
    if metafunc.function is test_products_are_added_alike_by_any_team:
        by_turns(metafunc, 2, dtype=("float32", "float64"), text=ALIKE)


def test_products_are_added_alike_by_any_team(text, dtype):
    rng, sizes = np.random.default_rng(3), {"B": 7, "C": 37, "K": 11}
    values = {"x": rng.uniform(0.5, 2, (7, 11)), "w": rng.uniform(0.5, 2, (11, 37)), "tab": rng.normal(size=(5, 37))}
    values["t"] = rng.integers(0, 5, (7, 3))
    read_ = [name for name in values if f"{name}[" in text.partition("=")[2]]
    axes = {"x": "x[b<B,k0<11]", "w": "w[k1<11,c<C]", "tab": "tab[v<5,c<C]", "t": "t[b<B,k2<3]"}
    plain = declared(
        text,
        "B C K" if "<K" in text else "B C",
        " ".join([*read_, "y"]),
        {"t": "int64"} if "t" in read_ else {},
        declares="; ".join(f"{axes[name]}" for name in read_),
    )
    words = {name: sizes[name] for name in plain.words}
    given = {name: values[name] for name in read_}
    found = made(plain, words, given, dtype)["y"]
    want = evaluate(read(text), given, words)["y"].reshape(-1)
    near(found, want, 1e-12 if dtype == "float64" else 256 * EPS[dtype], text)


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


# ---------------------------------------------------------------- how long a call takes
def least(monkeypatch: pytest.MonkeyPatch, row: RowSpec, words: Mapping[str, int], values: Mapping[str, Any]) -> float:
    """The shortest of several calls of a row's kernel, in seconds."""
    run, times = rowrun.backend.run, []

    def timed(*args: Any) -> None:
        start = perf_counter()
        run(*args)
        times.append(perf_counter() - start)

    run_row(row, words, values, "float32")  # compiled
    with monkeypatch.context() as patched:
        patched.setattr(rowrun.backend, "run", timed, raising=False)
        for _ in range(9):
            run_row(row, words, values, "float32")
    return min(times)


# ---------------------------------------------------------------- sums that are scatters
SCATTERS = {
    "rows": "w[j<J,c<C] = sum[r<R] where(j == t[r], x[r,c], 0)",
    "elements": "w[j<J] = sum[r<R,c<C] where(j == t[r], x[r,c], 0)",
    "of a batch": "w[r<R,j<J] = sum[c<C] where(j == u[r,c], x[r,c], 0)",
    "two places": "w[i<I,j<J] = sum[r<R,c<C] where(i == t[r] and j == u[r,c], x[r,c], 0)",
    "between": "w[c<C,j<J,d<C] = sum[r<R] where(j == t[r], x[r,c]*x[r,d], 0)",
    "guarded": "w[j<J,c<C] = sum[r<R] where(j == t[r] and x[r,c] > 0 and t[r] != 2, x[r,c], 0)",
    "its place is read": "w[j<J,c<C] = sum[r<R] where(j == t[r], x[r,c]*v[j,c], 0)",
    "scaled": "w[j<J,c<C] = v[j,c]*sum[r<R] where(j == t[r], x[r,c], 0) + 1",
    "bands": "w[j<J,c<C] = sum[r<R] where(sqrt(r + 0.5) - 1 < j and j <= sqrt(r + 0.5) + 1, x[r,c]*v[j,c], 0)",
    "bands of lanes": "w[c<C,j<J] = sum[r<R] where(sqrt(r + 0.5) - 1 < j and j <= sqrt(r + 0.5) + 1, x[r,c], 0)",
    "of bands": "w[r<R,c<C] = sum[j<J] where(sqrt(r + 0.5) - 1 < j and j <= sqrt(r + 0.5) + 1, v[j,c], 0)",
    "sums": "w[j<J,c<C] = sum[r<R,d<C] where(j == t[r], x[r,d]*v[c,d], 0)",
    "by a number": "w[j<J,c<C] = sum[r<R] where(j == f[r], x[r,c], 0)",
}


@pytest.mark.parametrize("text", SCATTERS.values(), ids=SCATTERS)
@pytest.mark.parametrize("sizes", [(5, 7, 21), (5, 7, 0), (3, 4, 300), (1, 1, 4), (0, 3, 2)])
def test_scatters(text: str, sizes: tuple[int, int, int]) -> None:
    """Indexes are equal, outside, none; a place that no index is equal to is 0."""
    rng, (n_i, n_j, n_r) = np.random.default_rng(0), sizes
    words = {"I": n_i, "J": n_j, "C": 19, "R": n_r}
    values = {
        "x": rng.uniform(-1, 1, (n_r, 19)),
        "v": rng.uniform(-1, 1, (19 if "v[c" in text else n_j, 19)),
        "t": rng.integers(-2, 9, n_r),
        "u": rng.integers(-2, 9, (n_r, 19)),
        "f": rng.choice([0.0, 1.0, 1.5, 3.0, -1.0, np.nan, np.inf, 1e30], n_r),
    }
    values = {
        name: v.astype("float32") if v.dtype.kind == "f" else v for name, v in values.items() if f"{name}[" in text
    }
    own = {name: n for name, n in words.items() if f"<{name}" in text}
    types = {name: "int64" for name in ("t", "u") if name in values}
    plain = declared(text, " ".join(own), " ".join([*values, "w"]), types)
    got = made(plain, own, values)["w"]
    want = row_values(row_of(plain), own, {name: v.reshape(-1) for name, v in values.items()})["w"]
    near(got, want, 256 * EPS["float32"], text)


def test_scatters_by_quotients() -> None:
    """What steps, and steps that are not coprime with what is between taps, negative ones among them."""
    rng = np.random.default_rng(0)
    text = "dx[n<N,i<I] = sum[t<T] dy[n, (i + p - t*d)/s]*w[t]"
    plain = declared(text, "N I T O p d s", "dy w dx", declares="dy[n,o<O]")
    for i, taps, o, p, d, s in (
        (9, 3, 5, 1, 1, 2),
        (9, 3, 4, 1, 2, 4),
        (7, 2, 3, 0, 3, 3),
        (8, 3, 9, 2, -1, -2),
        (0, 2, 3, 1, 1, 1),
    ):
        words = {"N": 3, "I": i, "T": taps, "O": o, "p": p, "d": d, "s": s}
        values = {"dy": rng.uniform(-1, 1, (3, o)).astype("float32"), "w": rng.uniform(-1, 1, taps).astype("float32")}
        want = row_values(row_of(plain), words, {name: v.reshape(-1) for name, v in values.items()})["dx"]
        near(made(plain, words, values)["dx"], want, 256 * EPS["float32"], str(words))


def test_what_is_scattered_lies_in_no_operands_place() -> None:
    """It is 0 before the operand is read."""
    for added, pairs in (("where(j == t[r], x[r,c], 0)", ()), ("x[r,c]", (("w", "v"),))):
        text = f"w[j<J,c<C] = v[j,c]*sum[r<R] {added}"
        read = ("v", "x", "t") if "t[" in text else ("v", "x")
        plain = Plain("scaled", text, ("J", "C", "R"), (*read, "w"), types={"t": "int64"})
        assert in_place(plain, read) == pairs


def test_what_a_scatter_takes_grows_with_what_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the rows that there are: 4096 of them were asked for each of 512 indexes."""
    plain = declared(SCATTERS["rows"], "J C R", "t x w", {"t": "int64"})
    values = {"t": np.zeros(512, np.int64), "x": np.ones(512 * 8, np.float32)}
    short, long = (least(monkeypatch, row_of(plain), {"J": n, "C": 8, "R": 512}, values) for n in (64, 4096))
    assert long < 20 * short


# ---------------------------------------------------------------- how often what is reduced is computed
MIDDLE = {
    "softmax": "y[o<O,n<N,i<I] = exp(x[o,n,i] - max[k<N] x[o,k,i])/sum[j<N] exp(x[o,j,i] - max[k] x[o,k,i])",
    "normed": "y[o<O,n<N,i<I] = (x[o,n,i] - mean[j<N] x[o,j,i])/sqrt(var[k<N] x[o,k,i] + 0.001)",
    "mean is a result": "m[o<O,i<I] = mean[n<N] x[o,n,i]; y[o,n,i] = x[o,n,i] - m[o,i]",
}


@pytest.mark.parametrize("text", MIDDLE.values(), ids=MIDDLE)
def test_what_is_reduced_over_a_middle_axis_is_computed_once(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each of the 2048 places of that axis: then an element would take 40 to 400 times as long as along the last axis."""
    row, values = (
        row_of(declared(text, "O N I", "x m y" if text.startswith("m") else "x y")),
        {"x": np.ones(2**15, np.float32)},
    )
    middle = least(monkeypatch, row, {"O": 1, "N": 2048, "I": 16}, values)
    assert middle < 10 * least(monkeypatch, row, {"O": 16, "N": 2048, "I": 1}, values)


# ---------------------------------------------------------------- what is kept of them
PROGRAM = """
import sys
import numpy as np
import calcvm as cv

g = cv.CalcGraph()
x = g.placeholder("x", (None, 3))
with g.path("p") as p:
    p.output = cv.equation(sys.argv[1], x=x).rename("y")
m = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=1))
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


def test_no_gradient_is_derived_before_its_kernel_is_compiled() -> None:
    program = (
        "import calcvm.kernels_cpu.plain; from calcvm.equations.declared import declared_rows; "
        "print(sum('plain' in row.__dict__ for row in declared_rows()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "0", done.stderr


def test_kernels_of_derived_rows_depend_on_what_derives_them() -> None:
    """Else one of a wrong derivation would be taken from the cache after that has been mended."""
    found = closure(modules_of("plain"))
    assert {"equations.declared", "equations.backward", "equations.gradient", "equations.plain"} <= {*found}


# ---------------------------------------------------------------- powers
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("text", ["y[i<N,j<M] = x[i]^w[j]", "y[i<N,j<M] = w[j]^x[i]", "y[i<N,j<M] = 2^x[i] + 0*w[j]^2"])
def test_powers_of_any_number_by_any(text, dtype):
    """As `numpy.power`: what is not finite, zeros of both signs, whole and half exponents, overflow."""
    some = [0.0, 1.0, 2.0, 3.0, 0.5, 1.5, 0.999, 1.001, 10.0, 1e30, 1e-30, 7.0, float("inf")]
    x = np.array([*some, *(-v for v in some), float("nan")])
    w = x[np.abs(x) < 1e9] if "0*w" in text else np.append(x, [2.0, -2.0, 5.0, -1 / 3])
    plain = declared(text, "N M", "x w y")
    values = {"x": x.astype(dtype).astype(float), "w": w.astype(dtype).astype(float)}
    found = made(plain, {"N": len(x), "M": len(w)}, values, dtype)["y"]
    with np.errstate(all="ignore"):
        want = evaluate(read(text), values, {"N": len(x), "M": len(w)})["y"].reshape(-1).astype(dtype)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(found) * np.sign(found), np.isinf(want) * np.sign(want))
    fits = np.isfinite(want)
    np.testing.assert_allclose(
        found[fits], want[fits], rtol=16 * EPS[dtype], atol=4e-38 if dtype == "float32" else 1e-300
    )


# ---------------------------------------------------------------- places that leave the integers
@pytest.mark.parametrize("place", PLACES)
def test_a_place_of_data_that_leaves_the_integers_is_nowhere(place):
    text, values, want = far_place(place)
    plain, words, out = as_row(text, values, by_words=True)
    close(made(plain, words, values, "float64")[out], want.reshape(-1), 1e-12, place)
