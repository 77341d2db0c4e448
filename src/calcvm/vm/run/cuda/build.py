"""Programs as PTX: the dispatch of the instructions that a program uses, compiled with the VM's loops around it.

A kernel of all rows would take as many registers as the hungriest; so each set of instructions has kernels of
its own, compiled at first use and kept as PTX in the user's cache.  Compiling needs no GPU and no driver.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from calcvm.kernels_cpu import _native
from calcvm.kernels_cuda import _cuda, kernels
from calcvm.kernels_cuda._common import Kernel
from calcvm.kernels_cuda._product import shared_bytes as scratch_bytes
from calcvm.kernels_cuda._tuples import by_number
from calcvm.vm.run.cuda import loop

ARGUMENTS = {"rows": 1, "rounds": 1, "fleet": 1, "row": 3, "bring": 1, "hand_over": 1}  # 64-bit integers
WITHOUT_ROWS = ("bring", "hand_over")  # the same for every program
SOURCES = (
    *sorted(Path(_cuda.__file__).parent.glob("*.py")),
    *sorted(Path(__file__).parent.glob("*.py")),
    Path(loop.__file__).parents[1] / "job.py",
)


@dataclass(frozen=True)
class Target:
    """What PTX is specialized for.

    threads : of a block.  blocks : that must fit one multiprocessor at once, which bounds their registers.
    precision : of matrix products, "float32" or "tf32".
    """

    cc: tuple[int, int] = (9, 0)
    threads: int = 256
    blocks: int = 1
    precision: str = "float32"

    def shared_bytes(self, itemsize: int) -> int:
        """Dynamic shared memory of a block."""
        return _cuda.SCRATCH_AT + scratch_bytes(self.threads, itemsize)


# ---------------------------------------------------------------- functions
def functions(names: Iterable[str], dtype: str) -> dict[str, Callable]:
    """The VM's entries for a set of rows, as Python functions: what the simulator runs and the compiler compiles."""
    return dict(_functions(tuple(sorted(set(names))), dtype, tuple(k.mark for k in _rows(names).values())))


@cache
def _functions(names: tuple[str, ...], dtype: str, marks: tuple[str, ...]) -> dict[str, Callable]:
    rows = _rows(names)
    run = by_number({code: kernel.bound for code, kernel in rows.items()})

    @_cuda.device
    def dispatch(h, r, w, nw, phase):  # type: ignore[no-untyped-def]
        run(r[0], h, r, w, nw, phase)

    return loop.entries(dispatch, {"float32": _cuda.f32_at, "float64": _cuda.f64_at}[dtype])


def number(name: str) -> int:
    """What stands for a row's name in word 0 of rows on the device: the same in every program, so that they share kernels."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:15], 16)


def _rows(names: Iterable[str]) -> dict[int, Kernel]:
    known = kernels()
    return {number(name): known[name] for name in sorted(set(names))}


# ---------------------------------------------------------------- PTX
def ptx(entry: str, names: Iterable[str], dtype: str, target: Target) -> str:
    """PTX of one entry, from the cache or compiled; its kernel is called ``calcvm_ENTRY``."""
    rows = () if entry in WITHOUT_ROWS else tuple(sorted(set(names)))
    marks = tuple(k.mark for k in _rows(rows).values())
    major, minor = target.cc
    known = repr((entry, rows, marks, dtype, target.cc, target.threads, target.blocks, _sources()))
    path = (
        _native.cache_root()
        / "ptx"
        / f"{entry}-{hashlib.sha256(known.encode()).hexdigest()[:24]}.sm_{major}{minor}.ptx"
    )
    try:
        text = path.read_text()
    except OSError:
        text = ""
    if not text.endswith(END):
        text = _compile(entry, rows, dtype, target)
        _write(path, text)
    return _specialized(text, target)


END = "// calcvm: whole\n"


def _compile(entry: str, names: tuple[str, ...], dtype: str, target: Target) -> str:
    fn = functions(names, dtype)[entry]
    signature = (_cuda.types.int64,) * ARGUMENTS[entry]
    text = _cuda.compile_ptx(fn, signature, f"calcvm_{entry}", target.cc, target.threads, target.blocks)
    return f"{text}\n{END}"


def _specialized(text: str, target: Target) -> str:
    """Threads of a block and precision as constants: what depends on them folds away when the driver assembles it."""
    return text.replace("%ntid.x", str(target.threads)).replace("%envreg0", str(int(target.precision == "tf32")))


@cache
def _sources() -> str:
    """A digest of everything that compiled code depends on beside its kernels."""
    digest = hashlib.sha256(repr([version(n) for n in ("numba", "numba-cuda", "llvmlite")]).encode())
    for path in SOURCES:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        os.replace(temporary, path)  # whole or not at all, also where processes race
    except OSError:  # nowhere to write: this process has what it needs
        temporary.unlink(missing_ok=True)
