"""Microbenchmarks of every operator's rows, from the operator table: ``pytest bench/test_micro.py``.

The cases are the table's examples with ``bench=True``, or an operator's first example if it has none.  A row runs
as in the VM: called through its native address from compiled code, on one worker.  The FLOPs and bytes that a row's
spec declares are in the columns ``extra_info`` of ``--benchmark-json``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from bench.harness import compiled_loop
from bench.operators import DTYPE, place
from calcvm.kernels_cpu import address_of
from calcvm.ops import OPS
from calcvm.ops.sizes import evaluate
from calcvm.ops.types import FLOAT
from tests.rowrun import Case, _row_runs, words_of

CALLS = 100
SIGNATURE = [ctypes.c_int64] * 5  # heap, row, worker, n_workers, phase


def rows() -> Iterator:
    for spec in OPS.values():
        marked = [e for e in spec.examples if e.bench]
        for i, example in enumerate(marked or spec.examples[:1]):
            for row in spec.rows:
                shapes = "x".join(str(n or example.batch) for n in example.shapes[0]) if example.shapes else "scalar"
                yield pytest.param(spec, example, row, id=f"{row.name}-{shapes}-{i}")


@pytest.mark.parametrize(("spec", "example", "row"), list(rows()))
def test_row(benchmark, spec, example, row):
    case = Case(spec, example, DTYPE, example.batch)
    row = row.of(tuple(example.types.get(v, FLOAT) for v in row.variables)) if row.variables else row
    values = next(values for r, values in _row_runs(case) if r is row)
    (encoded,), operands = place(case, [row], values)
    heap = operands.pop("heap")
    loop = compiled_loop(address_of(row.name, DTYPE), SIGNATURE)
    arguments = (CALLS, heap.ctypes.data, encoded.ctypes.data, 0, 1, 0)
    loop(*arguments)
    assert not heap.any(), f"{row.name} trapped"
    words = words_of(row, case.words)
    n_bytes = sum(o.size for o in operands.values())
    benchmark.extra_info.update(calls=CALLS, flops=int(evaluate(row.flops, words)), bytes=n_bytes)
    benchmark(loop, *arguments)
