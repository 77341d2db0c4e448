"""Microbenchmarks of every operator's rows, from the operator table: ``pytest bench/test_micro.py``.

The cases are the table's examples with ``bench=True``, and for an operator without one its first example.  A row
runs as the VM runs it: called through its native address from compiled code, on one worker.  FLOPs and bytes of a
row, as its spec counts them, are in the columns ``extra_info`` of ``--benchmark-json``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from bench.harness import compiled_loop
from calcvm.kernels_cpu import address_of
from calcvm.ops import OPS
from calcvm.ops.sizes import evaluate
from calcvm.ops.spec import RowSpec
from calcvm.ops.types import FLOAT, bytes_of
from calcvm.vm.program.encoding import encode_row
from tests.rowrun import RESERVED, Case, _row_runs, words_of

DTYPE, ALIGN, CALLS = "float32", 64, 100
SIGNATURE = [ctypes.c_int64] * 5  # heap, row, worker, n_workers, phase


def rows() -> Iterator:
    for spec in OPS.values():
        marked = [e for e in spec.examples if e.bench]
        for i, example in enumerate(marked or spec.examples[:1]):
            for row in spec.rows:
                shapes = "x".join(str(n or example.batch) for n in example.shapes[0]) if example.shapes else "scalar"
                yield pytest.param(spec, example, row, id=f"{row.name}-{shapes}-{i}")


def place(case: Case, row: RowSpec, values: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, int]:
    """A heap that holds the row's operands, the encoded row, and the bytes of its operands."""
    words = words_of(row, case.words)
    present = [o for o in row.operands if not o.optional or o.name in case.known()]
    extents = {o.name: int(evaluate(o.elems, words)) for o in present}
    size = np.dtype(DTYPE).itemsize
    wide = {o.name: bytes_of(o.type, size) for o in present}
    offsets, end = {}, RESERVED * size  # in bytes
    for name, n in extents.items():
        offsets[name] = end
        end += -(-n * wide[name] // ALIGN) * ALIGN
    memory = np.zeros(end + ALIGN, np.uint8)
    memory = memory[-memory.ctypes.data % ALIGN :]
    for name in extents.keys() & values.keys():
        given = np.ascontiguousarray(values[name]).reshape(-1).view(np.uint8)
        memory[offsets[name] : offsets[name] + given.size] = given
    encoded = encode_row(row, words, {name: at // wide[name] for name, at in offsets.items()})
    return memory, encoded, sum(n * wide[name] for name, n in extents.items())


@pytest.mark.parametrize(("spec", "example", "row"), list(rows()))
def test_row(benchmark, spec, example, row):
    case = Case(spec, example, DTYPE, example.batch)
    row = row.of(tuple(example.types.get(v, FLOAT) for v in row.variables)) if row.variables else row
    values = next(values for r, values in _row_runs(case) if r is row)
    cells, encoded, n_bytes = place(case, row, values)
    loop = compiled_loop(address_of(row.name, DTYPE), SIGNATURE)
    arguments = (CALLS, cells.ctypes.data, encoded.ctypes.data, 0, 1, 0)
    loop(*arguments)
    assert not cells.view(DTYPE)[:RESERVED].any(), f"{row.name} trapped"
    words = words_of(row, case.words)
    benchmark.extra_info.update(calls=CALLS, flops=int(evaluate(row.flops, words)), bytes=n_bytes)
    benchmark(loop, *arguments)
