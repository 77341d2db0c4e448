"""Compiling ahead: what `calcvm warm` leaves in the cache, and what wheels bring."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from calcvm.errors import CalcError
from calcvm.kernels_cpu import FAMILIES, _build, _native, _shipped, load
from calcvm.kernels_cpu._compile_workers import compile_ahead
from calcvm.kernels_cpu._target import Target, host
from calcvm.ops import OPS, ROWS
from calcvm.ops.types import FLOAT
from calcvm.vm.program.program import Program
from calcvm.vm.run import entry
from calcvm.vm.run.device import heaps_of
from calcvm.vm.run.specialized import sections_of

DTYPES = ("float32", "float64")


class Function(NamedTuple):
    """A function's symbol, what builds it, and the modules that it may come from."""

    symbol: str
    build: _native.Build
    places: tuple[_native.Modules, ...]
    elsewhere: bool = True  # other processes can compile it, too

    def objects(self, target: Target) -> dict[str, _native.ObjectCode]:
        """The function and all that it calls, by symbol; what the cache lacks is compiled into it."""
        return _native.objects(self.symbol, self.build, *self.places, target=target)


def loops() -> list[Function]:
    """The VM's loops."""
    return [Function(symbol, entry._build, places) for symbol, places in entry.places(entry.ARGUMENTS).items()]


def kernels_of(program: Program) -> list[Function]:
    """The kernels of a program's rows, and of its sections (CalcError: it is for another device than the CPU)."""
    device = program.info.get("device", "cpu")
    if heaps_of(device) != "cpu":
        raise CalcError(f"the program is compiled for {device!r}: only code for the CPU is compiled ahead")
    places = tuple(_native.modules_of(family, device) for family in FAMILIES)
    names = [name for name, _ in program.instructions]
    sections = [Function(c.symbol, c.build, (c.modules,), False) for c in sections_of(program).values() if c.kept]
    return [*(Function(_native.symbol_of(name, program.dtype, device), _build, places) for name in names), *sections]


def everything() -> list[Function]:
    """The loops and the kernels of all rows, also for other types of values (`instances`)."""
    from calcvm.kernels_cpu._common import KERNELS

    load()
    own = [name for name, kernel in KERNELS.items() if not kernel.mark]
    names = [*reversed(own), *sorted(instances())]  # the last families' take longest
    places = tuple(map(_native.modules_of, FAMILIES))
    symbols = [_native.symbol_of(name, dtype) for name in names for dtype in DTYPES]
    return [*(Function(symbol, _build, places) for symbol in symbols), *loops()]


def instances() -> set[str]:
    """Rows for other types: those that examples of the table have, and int64, which indexes and lengths mostly have."""
    typed = [(row, e.types) for spec in OPS.values() for e in spec.examples if e.types for row in spec.rows]
    indexed = {row.of(("int64",)).name for row in ROWS.values() if row.variables == ("index",)}
    return indexed | {row.of(tuple(types.get(v, FLOAT) for v in row.variables)).name for row, types in typed}


def write_archive(path: Path, made: Mapping[str, _native.ObjectCode], target: Target) -> None:
    """Write the archive of a wheel for a level: functions by symbol."""
    members: dict[tuple[str, str], dict[str, bytes]] = defaultdict(dict)
    for symbol, function in made.items():
        members[_native.key(function.modules, target), symbol.rsplit("_", 2)[1]][symbol] = _native.body_of(function)
    _shipped.write(path, members)


def warm(programs: Iterable[Program] = (), tell: Callable[[int], None] = lambda n: None) -> int:
    """Compile what these programs need, or everything, by all cores; returns how many functions neither a wheel nor the cache had.

    tell : is called with their number before they are compiled.
    """
    needed = [f for program in programs for f in kernels_of(program)]
    functions = {f.symbol: f for f in ([*needed, *loops()] if needed else everything())}.values()
    missing = [f for f in functions if not _native.is_there(f.symbol, f.places)]
    tell(len(missing))
    compile_ahead({f.symbol: f.places for f in missing if f.elsewhere}, lambda: None)
    for function in missing:
        function.objects(host())
    return len(missing)
