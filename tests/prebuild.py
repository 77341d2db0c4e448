"""Compile every CPU kernel and loop into the user's cache: `pytest --prebuild` does it beside the first tests.

python -m tests.prebuild
"""

from __future__ import annotations

from calcvm import kernels_cpu
from calcvm.kernels_cpu._common import DTYPES, KERNELS
from calcvm.vm.run import entry


def main() -> None:
    kernels_cpu.load()
    for name in entry.ARGUMENTS:
        entry.address(name)
    for dtype in DTYPES:
        for name in KERNELS:
            kernels_cpu.address_of(name, dtype)


if __name__ == "__main__":
    main()
