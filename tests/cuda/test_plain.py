"""Kernels that follow from equations, simulated: random equations beside `calcvm.equations.meaning`, rows beside the reference."""

from __future__ import annotations

import numpy as np
import pytest

from calcvm.errors import CalcError
from calcvm.kernel import TRAP_CODE
from calcvm.kernels_cuda._common import KERNELS, Kernel
from calcvm.kernels_cuda._cuda import SCRATCH_AT
from calcvm.kernels_cuda._product import shared_bytes
from calcvm.kernels_cuda.plain import kernel
from calcvm.ops import OPS
from calcvm.ops.spec import RowSpec
from calcvm.testing.cuda_threads import launch
from tests import rowrun
from tests.cuda.simulated import Simulated, on_each
from tests.equations.far_places import PLACES, far_place
from tests.equations.generate import generate
from tests.equations.plainly import Row, close
from tests.equations.test_plain_rows import rows_beside_equations
from tests.equations.test_row_equations import NAMES
from tests.plainrows import as_plain, plain_of

SAMPLE, WHOLE, PARTS = 60, 1_000, 10
CASES, WHOLE_CASES = 2, 8  # of an operator of the table
TEAMS = ((1, 4), (3, 4), (2, 16))  # blocks, threads
REFUSED = (
    "where another worker may set it",
    ": make it an operand",
    ": make that an operand",
)  # what no worker does alone


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


@pytest.mark.parametrize("place", PLACES)
def test_a_place_of_data_that_leaves_the_integers_is_nowhere(place: str) -> None:
    text, values, want = far_place(place)
    row = Row("far", text, values)
    found, trapped = run(kernel(row.plain), row, "float64")
    assert not trapped and close(found["y"], want, 1e-12)


# ---------------------------------------------------------------- the table
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_the_table(name: str, dtype: str, whole: bool, monkeypatch) -> None:
    """Beside their equations; with --whole more cases, convolutions, and in float64."""
    if not whole and (dtype == "float64" or "conv" in name):
        pytest.skip("takes --whole")
    monkeypatch.setattr(rowrun, "backend", Simulated(4))

    def made(row: RowSpec) -> RowSpec:
        plain = as_plain(row)
        monkeypatch.setitem(KERNELS, plain.name, kernel(plain_of(row, plain.name)))
        return plain

    found = rowrun.cases(OPS[name], dtype)
    for case in found[:: -(-len(found) // (WHOLE_CASES if whole else CASES))]:
        rows_beside_equations(case, made, REFUSED)
