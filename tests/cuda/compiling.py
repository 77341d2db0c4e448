"""PTX of single kernels, compiled by processes beside the tests: what compiling leaves in memory goes with them."""

from __future__ import annotations

import multiprocessing
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager

from calcvm.vm.run.cuda import build

Key = tuple[str, str, tuple[int, int]]  # kernel, dtype, compute capability
ASSEMBLER = shutil.which("ptxas")


def ptx_of(name: str, dtype: str, cc: tuple[int, int] = (9, 0)) -> str:
    """A module of one row's kernel, with all that it calls."""
    return build.ptx("row", (name,), dtype, build.Target(cc, 256, 2))


def functions_in(ptx: str) -> list[str]:
    """The names that calcvm gave to functions of a module, in order; those of the compiler have a "$" and a number."""
    defined = re.findall(r"^\.func (?:\([^)]*\) )?(\S+?)\([^{;]*\n\{$", ptx.replace(".func  ", ".func "), re.M)
    return [name for name in defined if not re.search(r"\$\d+$", name)]


def assemble(ptx: str, to: str) -> str:
    """What NVIDIA's assembler says of a module that it writes to a file as machine code."""
    (cc,) = re.findall(r"^\.target (\w+)$", ptx, re.M)
    command = [str(ASSEMBLER), f"-arch={cc}", "-O1", "-v", "-", "-o", to]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@contextmanager
def process() -> Iterator[ProcessPoolExecutor]:
    """One process, started afresh: what kernels share it types once."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def submit(pool: ProcessPoolExecutor, keys: list[Key]) -> dict[Key, Future]:
    """Begin to compile kernels, in the order of ``keys``."""
    return {key: pool.submit(ptx_of, *key) for key in keys}
