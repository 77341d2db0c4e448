"""Loops over the taps of windows, in vector IR: lanes are neighbouring channels, or outputs whose taps lie at one distance.

Taps are three nested loops; ``na nb nc`` are their counts, ``sa sb sc`` how far they step in memory, ``t ta tb tc`` the number of
the first tap and what it grows by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from calcvm.kernels_cpu import _formulas as F
from calcvm.kernels_cpu._common import I32, I64
from calcvm.kernels_cpu._formulas import V
from calcvm.kernels_cpu._math import Lanes, _for, blocks, loop_of
from calcvm.kernels_cpu._vectors import c64

WIDE = 4  # vectors that go through the taps together


def _nest(b: Any, loops: list[tuple], at: list, carried: list, take: Callable) -> list:
    """``carried = take(at, carried)`` in nested loops of (count, steps); ``at`` moves by the steps of each."""
    if not loops:
        return take(at, carried)
    (n, steps), *inner = loops

    def turn(i: Any, state: list) -> list:
        return _nest(b, inner, [b.add(x, b.mul(i, s)) for x, s in zip(at, steps)], state, take)

    return _for(b, c64(0), n, 1, carried, turn)


def _near(e: Lanes, n: Any, columns: Callable) -> None:
    """``columns(places, mask, get)`` over [0, n), where outputs that are neighbours have taps that are."""
    b = e.b

    def some(i: Any, left: Any, vectors: int) -> None:
        mask = None if left is None else e.below(left)
        places = [b.add(i, c64(k * e.lanes)) for k in range(vectors)]
        columns(places, mask, lambda p, place: e.get(p, place, mask))

    blocks(e, n, WIDE, some)


def _apart(e: Lanes, n: Any, C: Any, gap: Any, columns: Callable) -> None:
    """The same where taps of outputs that are neighbours lie ``gap`` apart, each of C channels: they are gathered."""
    b = e.b
    integers = ir.VectorType(I64, e.lanes)
    # Lane k is channel k mod C of output k / C, both small: the quotient is right in float32.
    of_float = ir.VectorType(ir.FloatType(), e.lanes)
    half = ir.Constant(of_float, [k + 0.5 for k in range(e.lanes)])
    lane = ir.Constant(integers, list(range(e.lanes)))
    pixel = b.fptosi(b.fdiv(half, e.splat(b.sitofp(C, ir.FloatType()))), integers)
    channel = b.sub(lane, b.mul(pixel, e.splat(C)))
    first = b.add(b.mul(pixel, e.splat(gap)), channel)
    pixels = b.sdiv(c64(e.lanes), C)
    channels = b.sub(c64(e.lanes), b.mul(pixels, C))
    further = e.splat(b.add(b.mul(pixels, gap), channels))
    over, carry, channels = e.splat(C), e.splat(b.sub(gap, C)), e.splat(channels)
    pointers = ir.VectorType(ir.PointerType(e.element), e.lanes)
    gather = e.fn(
        f"llvm.masked.gather.v{e.lanes}{e.element.intrinsic_name}.v{e.lanes}p0", e.vec, pointers, I32, e.mask, e.vec
    )

    def some(i: Any, state: list) -> list:
        offset, channel = state
        mask = e.below(b.sub(n, i))

        def get(p: Any, place: Any) -> V:
            at = b.add(e.splat(b.ptrtoint(p, I64)), b.mul(offset, e.splat(c64(e.size))))
            given = [b.inttoptr(at, pointers), ir.Constant(I32, e.size), mask, ir.Constant(e.vec, [0] * e.lanes)]
            return V(b, b.call(gather, given))

        columns([i], mask, get)
        offset, channel = b.add(offset, further), b.add(channel, channels)
        wraps = b.icmp_signed(">=", channel, over)
        return [
            b.select(wraps, b.add(offset, carry), offset),
            b.select(wraps, b.sub(channel, over), channel),
        ]

    _for(b, c64(0), n, e.lanes, [first, channel], some)


def _both(kinds: str, emit: Callable) -> tuple[Any, Any]:
    """Two loops of what ``emit(e, over, *args)`` emits ``over`` its columns: of near taps, and of taps apart (C and gap follow n)."""

    def near(e: Lanes, n: Any, *args: Any) -> None:
        emit(e, lambda columns: _near(e, n, columns), *args)

    def apart(e: Lanes, n: Any, C: Any, gap: Any, *args: Any) -> None:
        emit(e, lambda columns: _apart(e, n, C, gap, columns), *args)

    return loop_of(kinds, near), loop_of("ii" + kinds, apart)


def sums(term: Callable = lambda x: x, params: str = "", add: bool = False) -> tuple[Any, Any]:
    """Loops ``(n, na, nb, nc, sa, sb, sc, x, y, factor, params...)``: y = factor * sum of term(x, params...); ``add`` : y + that."""

    def emit(e: Lanes, over: Callable, na, nb, nc, sa, sb, sc, x, y, factor, *given):  # type: ignore[no-untyped-def]
        b, loops = e.b, [(na, [sa]), (nb, [sb]), (nc, [sc])]
        by, reals = V(b, e.splat(factor)), [V(b, e.splat(p)) for p in given]

        def columns(places: list, mask: Any, get: Callable) -> None:
            def take(at: list, acc: list) -> list:
                p = b.gep(x, at)
                return [(V(b, a) + term(get(p, k), *reals)).v for a, k in zip(acc, places)]

            zero = ir.Constant(e.vec, [0.0] * e.lanes)
            for total, k in zip(_nest(b, loops, [c64(0)], [zero] * len(places), take), places):
                out = V(b, total) * by
                e.put(out + e.get(y, k, mask) if add else out, y, k, mask)

        over(columns)

    return _both("iiiiiippf" + params, emit)


def _largest() -> tuple[Any, Any]:
    """Loops ``(n, na, nb, nc, sa, sb, sc, x, y)``: y = the largest of x, NaN if any is."""

    def emit(e: Lanes, over: Callable, na, nb, nc, sa, sb, sc, x, y):  # type: ignore[no-untyped-def]
        b, loops = e.b, [(na, [sa]), (nb, [sb]), (nc, [sc])]

        def columns(places: list, mask: Any, get: Callable) -> None:
            def take(at: list, best: list) -> list:
                p = b.gep(x, at)
                return [F.maximum(get(p, k), V(b, a)).v for a, k in zip(best, places)]

            least = ir.Constant(e.vec, [float("-inf")] * e.lanes)
            for best, k in zip(_nest(b, loops, [c64(0)], [least] * len(places), take), places):
                e.put(V(b, best), y, k, mask)

        over(columns)

    return _both("iiiiiipp", emit)


def _first_of_largest() -> tuple[Any, Any]:
    """Loops ``(n, na, nb, nc, sa, sb, sc, t, ta, tb, x, y, index)``: the same, and the tap where it is first; of NaNs the last."""

    def emit(e: Lanes, over: Callable, na, nb, nc, sa, sb, sc, t, ta, tb, x, y, index):  # type: ignore[no-untyped-def]
        b, loops = e.b, [(na, [sa, ta]), (nb, [sb, tb]), (nc, [sc, c64(1)])]
        number = ir.IntType(8 * e.size)

        def splat(t: Any) -> Any:
            return e.splat(b.trunc(t, number) if e.size < 8 else t)

        def columns(places: list, mask: Any, get: Callable) -> None:
            m = len(places)

            def take(at: list, state: list) -> list:
                p, tap, best, where = b.gep(x, at[:1]), splat(at[1]), [], []
                for old, found, k in zip(state[:m], state[m:], places):
                    v = get(p, k).v
                    higher = b.or_(b.fcmp_ordered(">", v, old), b.fcmp_unordered("uno", v, v))
                    best.append(b.select(higher, v, old))
                    where.append(b.select(higher, tap, found))
                return best + where

            least = ir.Constant(e.vec, [float("-inf")] * e.lanes)
            state = _nest(b, loops, [c64(0), t], [least] * m + [splat(t)] * m, take)
            to = ir.VectorType(index.type.pointee, e.lanes)
            for best, found, k in zip(state[:m], state[m:], places):
                e.store(best, b.gep(y, [k]), mask)
                e.store(b.trunc(found, to) if found.type != to else found, b.gep(index, [k]), mask)

        over(columns)

    return _both("iiiiiiiiippp", emit)


def _chosen(add: bool) -> Any:
    """A loop ``(n, na, nb, nc, sa, sb, sc, t, ta, tb, tc, dy, index, dx)``: dx = sum of dy where index is the tap; ``add`` : dx + that."""

    def emit(e: Lanes, n, na, nb, nc, sa, sb, sc, t, ta, tb, tc, dy, index, dx):  # type: ignore[no-untyped-def]
        b, loops = e.b, [(na, [sa, ta]), (nb, [sb, tb]), (nc, [sc, tc])]
        number = index.type.pointee

        def columns(places: list, mask: Any, get: Callable) -> None:
            def take(at: list, acc: list) -> list:
                p, q, tap = b.gep(dy, at[:1]), b.gep(index, at[:1]), e.splat(b.trunc(at[1], number))
                out = []
                for a, k in zip(acc, places):
                    here = V(b, b.icmp_signed("==", e.load(b.gep(q, [k]), mask), tap))
                    out.append((V(b, a) + get(p, k).where(here, 0.0)).v)
                return out

            zero = ir.Constant(e.vec, [0.0] * e.lanes)
            start = [e.get(dx, k, mask).v if add else zero for k in places]
            for total, k in zip(_nest(b, loops, [c64(0), t], start, take), places):
                e.put(V(b, total), dx, k, mask)

        _near(e, n, columns)

    return loop_of("iiiiiiiiiippp", emit)


largest, first_of_largest = _largest(), _first_of_largest()
chosen, chosen_too = _chosen(False), _chosen(True)
