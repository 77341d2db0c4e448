"""Programs as PTX: an entry's VM loop, the kernels of the program's rows, and the functions they call, each compiled once.

A kernel for all rows would need the registers of the most demanding one, so a program's PTX has only the rows that it uses.  It
is joined from one text per function, and these are in the user's cache: a new program compiles only functions that no earlier
program had.  For a transformer that shares 37 of its 39 rows with an earlier program, PTX takes 2 s of a core instead of 34.
Compiling needs no GPU and no driver.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from calcvm.kernels_cpu import _native
from calcvm.kernels_cuda import _cuda, kernels
from calcvm.kernels_cuda._common import Kernel, row_call
from calcvm.kernels_cuda._product import shared_bytes as scratch_bytes
from calcvm.kernels_cuda._ptx import Piece, dispatch, joined, piece
from calcvm.kernels_cuda._routines import ROUTINES, Routine, external, symbol_of
from calcvm.vm.run.cuda import loop

MAGIC = b"calcvm ptx 1\n"
ARGUMENTS = {"rows": 1, "rounds": 1, "fleet": 1, "row": 3, "bring": 1, "hand_over": 1}  # 64-bit integers
WITHOUT_ROWS = ("bring", "hand_over")  # the same for every program
DISPATCH = "dispatch"  # the function that an entry calls for a row; each program has its own
HEAPS = {"float32": _cuda.f32_at, "float64": _cuda.f64_at}


@dataclass(frozen=True)
class Target:
    """The parameters that PTX is specialized for.

    threads : threads per block.  blocks : number that must fit one multiprocessor at once, which bounds their registers.
    precision : "float32" or "tf32", for matrix products.
    """

    cc: tuple[int, int] = (9, 0)
    threads: int = 256
    blocks: int = 1
    precision: str = "float32"

    def shared_bytes(self, itemsize: int) -> int:
        """Dynamic shared memory per block."""
        return _cuda.SCRATCH_AT + scratch_bytes(self.threads, itemsize)


# ---------------------------------------------------------------- functions
def functions(names: Iterable[str], dtype: str) -> dict[str, Callable]:
    """The VM's entries for a set of rows, as Python functions for the simulator."""
    rows = {code: kernel.bound for code, kernel in _rows(names).items()}

    def run(h, r, w, nw, phase):  # type: ignore[no-untyped-def]
        rows[int(r[0])](h, r, w, nw, phase)

    return loop.entries(run, HEAPS[dtype])


@cache
def _compiled_functions(dtype: str) -> dict[str, Callable]:
    """The same for the compiler, without rows: they call a function from another text."""

    @external(DISPATCH, row_call)
    def run(h, r, w, nw, phase):  # type: ignore[no-untyped-def]
        raise NotImplementedError("the simulator runs `functions`")

    return loop.entries(run, HEAPS[dtype])


def number(name: str) -> int:
    """The number of a row's name in word 0 of rows on the device: the same in every program, so that programs share kernels."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:15], 16)


def _rows(names: Iterable[str]) -> dict[int, Kernel]:
    wanted = sorted(set(names))
    known = kernels(wanted)
    return {number(name): known[name] for name in wanted}


# ---------------------------------------------------------------- PTX
def ptx(entry: str, names: Iterable[str], dtype: str, target: Target) -> str:
    """PTX of one entry, joined from cached or newly compiled pieces; its kernel is called ``calcvm_ENTRY``."""
    rows = {} if entry in WITHOUT_ROWS else {k: kernel.routine for k, kernel in _rows(names).items()}
    known = {routine.symbol(dtype): routine for routine in (*ROUTINES.values(), *rows.values())}
    choice = symbol_of(DISPATCH, dtype)
    found: dict[str, Piece] = {}  # in an order in which each function follows those that it calls

    def add(symbol: str, made: Piece) -> None:
        for need in made.needs:
            if need not in found:
                add(need, table if need == choice else _routine(known[need], dtype, target.cc))
        found[symbol] = made

    table = dispatch(choice, {k: routine.symbol(dtype) for k, routine in rows.items()})
    add(entry, _entry(entry, dtype, target))
    return _specialized(joined(found.values(), target.cc), target)


def _entry(entry: str, dtype: str, target: Target) -> Piece:
    """An entry with the VM's loop, independent of the rows."""
    name, signature = f"calcvm_{entry}", (_cuda.types.int64,) * ARGUMENTS[entry]
    how = dtype, target.threads, target.blocks
    return _kept(
        name,
        target.cc,
        repr((how, _sources((loop.__name__.removeprefix("calcvm."),)))),
        lambda: _cuda.compile_ptx(
            _compiled_functions(dtype)[entry], signature, name, target.cc, target.threads, target.blocks
        ),
    )


def _routine(routine: Routine, dtype: str, cc: tuple[int, int]) -> Piece:
    """A row's kernel, or a function that several kernels call."""
    name = routine.symbol(dtype)
    return _kept(
        name,
        cc,
        repr((routine.mark, _sources(routine.modules))),
        lambda: _cuda.compile_function(routine.fn, routine.signature(_cuda.POINTERS[dtype]), name, cc),
    )


def _specialized(text: str, target: Target) -> str:
    """Insert threads per block and precision as constants: dependent code is folded when the driver assembles it."""
    return text.replace("%ntid.x", str(target.threads)).replace("%envreg0", str(int(target.precision == "tf32")))


# ---------------------------------------------------------------- the cache
def _kept(name: str, cc: tuple[int, int], made_of: str, compiled: Callable[[], str]) -> Piece:
    """A function's piece, from the cache or compiled and cached there, keyed by everything it is made of."""
    digest = hashlib.sha256(f"{name} {made_of}".encode()).hexdigest()[:24]
    path = _native.cache_root() / "ptx" / f"{name[:100]}-{digest}.sm_{cc[0]}{cc[1]}.ptx"
    stored = _native.fetch(path, MAGIC)
    if stored is None:
        stored = piece(compiled(), name).stored()
        _native.store(path, MAGIC, stored, "PTX")
    return Piece.read(stored)


@cache
def _sources(modules: tuple[str, ...]) -> str:
    """A digest of the sources of compiled code: modules of calcvm with all their imports, and the compiler's versions."""
    digest = hashlib.sha256(repr([_native.version_of(n) for n in ("numba", "numba-cuda", "llvmlite")]).encode())
    for name, (text, _) in sorted(_native.closure(modules).items()):
        digest.update(name.encode() + text)
    return digest.hexdigest()
