"""Kernels that follow from equations, simulated: random equations beside `calcvm.equations.meaning`, rows beside the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from calcvm.equations.declared import DECLARED
from calcvm.errors import CalcError
from calcvm.kernel import TRAP_CODE
from calcvm.kernels_cuda._common import KERNELS, Kernel
from calcvm.kernels_cuda._cuda import SCRATCH_AT
from calcvm.kernels_cuda._product import shared_bytes
from calcvm.kernels_cuda._simulator import launch
from calcvm.kernels_cuda.plain import kernel
from calcvm.ops import OPS
from calcvm.ops.spec import RowSpec
from tests import rowrun
from tests.cuda.simulated import Simulated, on_each
from tests.equations.generate import generate
from tests.equations.plainly import Row, close
from tests.plainrows import plain_of

SAMPLE, WHOLE, PARTS = 60, 1_000, 10
CASES, WHOLE_CASES = 2, 12  # of an operator of the table
TEAMS = ((1, 4), (3, 4), (2, 16))  # blocks, threads
REFUSED = ("where another worker may set it", "of all lines: make that an operand")  # what no worker can do alone


def run(kernel: Kernel, row: Row, dtype: str, blocks: int = 1, threads: int = 4) -> tuple[dict[str, np.ndarray], bool]:
    """Its results, and whether it trapped."""
    heap, words, places = row.laid(dtype)
    before, floats = heap.copy(), heap.view(dtype)
    launch(
        on_each, (kernel.bound, floats, words, 0), blocks=blocks, threads=threads, seed=blocks,
        shared_bytes=SCRATCH_AT + shared_bytes(threads, floats.itemsize),
    )  # fmt: skip
    return row.taken(heap, before, places, dtype), bool(floats[TRAP_CODE])


def examine(row: Row, may_trap: bool) -> None:
    made, want = kernel(row.plain), row.expected()
    for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-4)):
        (first, trapped), *others = [run(made, row, dtype, *team) for team in TEAMS]
        assert trapped <= may_trap
        for name, value in want.items():
            assert close(first[name], value, tolerance), f"{name} in {dtype}: {first[name]} is not {value}"
            for other, _ in others:
                assert other[name].tobytes() == first[name].tobytes(), f"{name} in {dtype} differs"


def rows_of(seed: int):
    """A random equation, with all of its results, and with the last of them."""
    drawn = generate(seed)
    for results in (None, "rs" if "; s" not in drawn.text else "s"):
        yield Row(f"random_{seed}", drawn.text, drawn.values, results)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_equations(part: int, whole: bool) -> None:
    seeds, refused = range(part, WHOLE if whole else SAMPLE, PARTS), 0
    for seed in seeds:
        for row in rows_of(seed):
            try:
                examine(row, any(v.dtype.kind == "i" for v in row.values.values()))
            except Exception as failure:
                if not isinstance(failure, CalcError) or not any(why in str(failure) for why in REFUSED):
                    raise AssertionError(f"generate({seed}): {row.plain.text}") from failure
                refused += 1
    assert refused <= max(1, len(seeds) // 8)  # of two rows each


# ---------------------------------------------------------------- the table
def is_plain(row: RowSpec) -> bool:
    try:
        kernel(plain_of(row, row.name))
    except CalcError:
        return False
    return True


def plainly(row: RowSpec, monkeypatch: pytest.MonkeyPatch) -> RowSpec:
    """The row with the kernel of its equation, if it has one."""
    if not is_plain(row):
        return row
    plain = plain_of(row, f"plain_{row.name.replace('.', '_')}")
    monkeypatch.setitem(KERNELS, plain.name, kernel(plain))
    return replace(row, name=plain.name)


PLAIN = [name for name in OPS if name not in DECLARED and any(map(is_plain, OPS[name].rows))]


@pytest.mark.parametrize("name", PLAIN)
def test_rows_of_the_table(name: str, whole: bool, monkeypatch) -> None:
    """By the kernels of their equations; with --whole more cases, by more teams and in float64."""
    monkeypatch.setattr(rowrun, "backend", Simulated(4))
    for dtype in ("float32", "float64") if whole else ("float32",):
        found = rowrun.cases(OPS[name], dtype)
        for case in found[:: -(-len(found) // (WHOLE_CASES if whole else CASES))]:
            forward, backward = ([plainly(row, monkeypatch) for row in rows] for rows in (case.spec.fwd, case.spec.bwd))
            assert any(row.name.startswith("plain_") for row in (*forward, *backward))
            case.spec = replace(case.spec, fwd=tuple(forward), bwd=tuple(backward))
            rowrun.check_forward(case)
            rowrun.check_accumulation(case)
            if case.spec.differentiable:
                rowrun.check_gradients_float32(case) if dtype == "float32" else rowrun.check_gradients(case)
            if whole:
                rowrun.check_workers(case)
