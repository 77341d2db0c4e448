"""Kernels of rows that are given by their equation alone: a row's arguments, words, operands and loops (`_plain_loops`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from calcvm.equations.kinds import NUMBER, WITH_INDEXES
from calcvm.equations.plain import Plain, Stage
from calcvm.equations.tree import Element, Index, Name, Node, Number, substituted, walk
from calcvm.kernel import FLAG_PC_SHIFT, TRAP_CODE, TRAP_PC
from calcvm.kernels_cpu._common import I64, WORD, intrinsic_of
from calcvm.kernels_cpu._math import Lanes
from calcvm.kernels_cpu._plain_loops import Loops
from calcvm.kernels_cpu._scatter import scattered
from calcvm.kernels_cpu._target import current
from calcvm.kernels_cpu._values import BAD_PLACE, Operand
from calcvm.kernels_cpu._vectors import word
from calcvm.kernels_cpu._whole import Whole


def kernel_of(plain: Callable[[], Plain]) -> Any:
    """The intrinsic ``loops(me, given)`` of a kernel; ``given`` : its words and operands.  ``plain()`` is called at compile time."""

    def typing(me: Any, given: Any) -> Any:
        def codegen(ctx: Any, b: Any, sig: Any, values: Any) -> Any:
            _Row(ctx, b, plain(), me, given, *values).emit()
            return ctx.get_dummy_value()

        return types.void(me, given), codegen

    return intrinsic_of(2, typing)


class _Row:
    """A row's words and operands as LLVM values, and its loops."""

    def __init__(self, ctx: Any, b: Any, plain: Plain, me_type: Any, given_type: Any, me: Any, given: Any):
        self.b, self.plain, self.me = b, plain, me
        values = [b.extract_value(given, k) for k in range(len(given_type.types))]
        n, m = len(plain.words), len(plain.words) + len(plain.reals)
        dtype = me_type.types[0].dtype
        self.e = Lanes(b, ctx.get_value_type(dtype), current())
        self.words = {name: Whole(v) for name, v in zip(plain.words, values)}
        self.reals = {name: ctx.cast(b, v, types.float64, dtype) for name, v in zip(plain.reals, values[n:])}
        heap = b.extract_value(me, 0)
        self.operands = {}
        for name, pointer, t in zip(plain.operands, values[m:], given_type.types[m:]):
            place: Any = -1
            if name in plain.left_out:
                first = b.gep(b.bitcast(heap, pointer.type), [word(-1)])
                there = b.icmp_unsigned("!=", b.ptrtoint(pointer, WORD), b.ptrtoint(first, WORD))
                pointer = b.select(there, pointer, self.constant(pointer.type.pointee, plain.left_out[name]))
                place = b.sext(there, WORD)
            whole = isinstance(t.dtype, (types.Integer, types.Boolean))
            kind = WITH_INDEXES.get(plain.types.get(name, ""), NUMBER) if whole else NUMBER
            self.operands[name] = Operand(pointer, t.dtype, kind, plain.axes.get(name, ()), place)

    def constant(self, element: Any, value: float) -> Any:
        """A pointer to a vector of a number, on the stack."""
        vec = ir.VectorType(element, self.e.lanes)
        number = value if isinstance(element, (ir.FloatType, ir.DoubleType)) else int(value)
        at = cgutils.alloca_once_value(self.b, ir.Constant(vec, [number] * self.e.lanes))
        return self.b.bitcast(at, element.as_pointer())

    def trap(self) -> None:
        b = self.b
        heap, row = (b.extract_value(self.me, k) for k in range(2))
        pc = b.ashr(b.load(b.gep(row, [word(1)])), I64(FLAG_PC_SHIFT))
        for place, value in ((TRAP_CODE, word(BAD_PLACE)), (TRAP_PC, pc)):
            b.store(b.sitofp(value, self.e.element), b.gep(heap, [word(place)]))

    def emit(self) -> None:
        """The loops, in a version per case of sizes."""
        b, stages = self.b, self.plain.stages
        one = single(self.plain)
        if one is None:
            self.loops(stages, {})
            return
        alone = b.icmp_signed("==", self.words[one].base, word(1))
        with b.if_else(alone) as (narrow, general):
            with narrow:
                self.loops(stages, {one: Number(1)})
            with general:
                self.loops(stages, {})

    def loops(self, stages: Sequence[Stage], known: Mapping[str, Node]) -> None:
        """The loops, with numbers in place of the words in ``known``."""
        operands = self.operands
        words = {name: w for name, w in self.words.items() if name not in known}
        shared = self.plain.shared
        if known:
            stages = [_with(stage, known) for stage in stages]
            operands = {
                name: o._replace(axes=tuple(substituted(n, known) for n in o.axes)) for name, o in operands.items()
            }
        loops = Loops(self.e, self.plain, stages, words, self.reals, operands, self.trap)
        alone = [s for s in stages if s.result and s.scan and shared and s.scan[0] == shared.name]
        if shared is None or alone:  # only worker 0 runs it
            with self.b.if_then(self.b.icmp_signed("==", self.b.extract_value(self.me, 2), word(0))):
                self.results(loops, stages, {})
        else:
            lo, hi = self.share(loops.w.value(loops.size(loops.extents[shared.name])))
            with self.b.if_then(self.b.icmp_signed("<", lo, hi)):  # a share without places runs no loop
                self.results(loops, stages, {shared.name: (lo, hi)})

    @staticmethod
    def results(loops: Loops, stages: Sequence[Stage], bounds: dict[str, tuple[Any, Any]]) -> None:
        """All results; the shared index runs between bounds."""
        loops.bounds = bounds
        loops.row(stages, [left for s in stages if s.result and (left := scattered(loops, s)) is not None])

    def share(self, n: Any) -> tuple[Any, Any]:
        """As `calcvm.kernels_cpu._common.share`."""
        b = self.b
        worker, workers = (b.extract_value(self.me, k) for k in (2, 3))
        return tuple(b.sdiv(b.mul(n, w), workers) for w in (worker, b.add(worker, word(1))))  # type: ignore[return-value]


def single(plain: Plain) -> str | None:
    """The word that is the last extent of all results, if the loops differ where it is 1."""
    results = [s for s in plain.stages if s.result]
    last = {s.kept[-1].extent if len(s.kept) > 1 else None for s in results}
    reads = [(s, n.places) for s in results for n in walk(s.value) if isinstance(n, Element)]
    spread = any(Name(s.kept[-1].name) in places and len(places) < len(s.kept) for s, places in reads if s.kept)
    if len(last) != 1 or not (spread or any(s.how or s.scan for s in plain.stages)):
        return None
    (extent,) = last
    return extent.name if isinstance(extent, Name) else None


def _with(stage: Stage, known: Mapping[str, Node]) -> Stage:
    """A stage with numbers in place of some words."""

    def ranged(indexes: tuple[Index, ...]) -> tuple[Index, ...]:
        return tuple(replace(i, extent=substituted(i.extent, known)) for i in indexes)  # type: ignore[arg-type]

    return replace(stage, kept=ranged(stage.kept), over=ranged(stage.over), value=substituted(stage.value, known))
