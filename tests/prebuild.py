"""Compile every CPU kernel and loop into the user's cache, by all cores: the tests then find them there.

python -m tests.prebuild
"""

from __future__ import annotations

from calcvm import kernels_cpu
from calcvm.kernels_cpu import FAMILIES, _native
from calcvm.kernels_cpu._common import DTYPES, KERNELS
from calcvm.kernels_cpu._compile_workers import compile_ahead
from calcvm.ops import OPS
from calcvm.ops.types import FLOAT
from calcvm.vm.run import entry


def instances() -> set[str]:
    """Rows for other types, which examples of the table have."""
    typed = [(row, e.types) for spec in OPS.values() for e in spec.examples if e.types for row in spec.rows]
    return {row.of(tuple(types.get(v, FLOAT) for v in row.variables)).name for row, types in typed}


def main() -> None:
    kernels_cpu.load()
    names = [*reversed(KERNELS), *sorted(instances())]  # the last families' take longest
    places = tuple(map(_native.modules_of, FAMILIES))
    wanted = {_native.symbol_of(name, dtype): places for name in names for dtype in DTYPES}
    compile_ahead(wanted | entry.places(entry.ARGUMENTS), lambda: None)


if __name__ == "__main__":
    main()
