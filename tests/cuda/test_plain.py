"""Kernels that follow from equations, simulated: random equations beside `calcvm.equations.meaning`, rows beside the reference."""

from __future__ import annotations

import numpy as np
import pytest

from calcvm.errors import CalcError
from calcvm.kernel import TRAP_CODE
from calcvm.kernels_cuda._common import KERNELS, Kernel
from calcvm.kernels_cuda._cuda import SCRATCH_AT
from calcvm.kernels_cuda._plain import text_of
from calcvm.kernels_cuda._product import shared_bytes
from calcvm.kernels_cuda._simulator import launch
from calcvm.kernels_cuda.plain import add
from tests.cuda.simulated import on_each
from tests.equations.generate import generate
from tests.equations.plainly import Row, close

SAMPLE, WHOLE, PARTS = 60, 1_000, 10
TEAMS = ((1, 4), (3, 4), (2, 16))  # blocks, threads


def made(p):
    add(p)
    return KERNELS[p.name]


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
    kernel, want = made(row.plain), row.expected()
    for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-4)):
        (first, trapped), *others = [run(kernel, row, dtype, *team) for team in TEAMS]
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
    for seed in range(part, WHOLE if whole else SAMPLE, PARTS):
        for row in rows_of(seed):
            try:
                text = text_of(row.plain)
            except CalcError:
                continue
            try:
                examine(row, any(v.dtype.kind == "i" for v in row.values.values()))
            except Exception as failure:
                raise AssertionError(f"generate({seed}): {row.plain.text}\n{text}") from failure
