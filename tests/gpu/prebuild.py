"""Compile the PTX that `test_gpu_rows` loads into the user's cache, by all cores; it needs no GPU.

python -m tests.gpu.prebuild [--cc 9.0] [--jobs N]
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from calcvm.errors import DeviceError
from calcvm.kernels_cuda import kernels
from calcvm.ops.spec import ROWS
from calcvm.vm.run.cuda import build
from calcvm.vm.run.cuda.device import FLEET_THREADS
from calcvm.vm.run.cuda.driver import Driver

BUILDS = (("float32", 256), ("float64", 256), ("float32", FLEET_THREADS))


def one(name: str, dtype: str, threads: int, cc: tuple[int, int]) -> int:
    return len(build.ptx("row", (name,), dtype, build.Target(cc, threads, 1, "float32")))


def capability() -> tuple[int, int]:
    try:
        major, minor = Driver.open().compute_capability
        return major, minor
    except DeviceError:
        return 9, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cc", help="compute capability (default: the GPU's, or 9.0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    major, minor = map(int, args.cc.split(".")) if args.cc else capability()
    names = [name for name in ROWS if name in kernels()]
    work = [(name, dtype, threads, (major, minor)) for dtype, threads in BUILDS for name in names]
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        sizes = list(pool.map(one, *zip(*work), chunksize=1))
    print(f"{len(sizes)} kernels, {sum(sizes):,} bytes of PTX in {build._native.cache_root() / 'ptx'}")


if __name__ == "__main__":
    main()
