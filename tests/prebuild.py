"""Compile every CPU kernel and loop into the user's cache, by all cores: the tests then find them there.

python -m tests.prebuild
"""

from __future__ import annotations

from calcvm import kernels_cpu
from calcvm.kernels_cpu._common import DTYPES, KERNELS
from calcvm.vm.run import entry


def main() -> None:
    kernels_cpu.load()
    entries = entry.places(entry.ARGUMENTS)
    for dtype in DTYPES:
        kernels_cpu.prepare(KERNELS, dtype, others=entries)


if __name__ == "__main__":
    main()
