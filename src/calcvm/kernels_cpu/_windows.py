"""Loops over the taps of windows, in vector IR; lanes are neighbouring elements whose taps are neighbours too.

The taps of a window are three nested loops: ``na nb nc`` are their counts, ``sa sb sc`` their steps in memory; ``t ta tb tc`` are the
first tap's number and its increments.  Each loop is a separate function that is not unrolled, since a window has few taps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from calcvm.kernels_cpu import _formulas as F
from calcvm.kernels_cpu._common import WORD
from calcvm.kernels_cpu._formulas import V
from calcvm.kernels_cpu._math import Lanes, blocks, counting, loop_of, narrow
from calcvm.kernels_cpu._vectors import word

WIDE = 4  # vectors that visit the taps together
TABLE = 256  # taps that fit a `table`


def _function(name: str, kinds: str, emit: Callable) -> Any:
    """The loop ``f(m, n, ...)`` that ``emit(e, m, n, ...)`` emits, as a separate function."""

    def small(e: Lanes, *args: Any) -> None:
        e.b.function.attributes.add("optsize")  # no unrolling
        emit(e, *args)

    return loop_of(kinds, small, name=name)


def _nest(b: Any, loops: list[tuple], at: list, carried: list, take: Callable) -> list:
    """``carried = take(at, carried)`` in nested loops of (count, steps); each moves ``at`` by its steps.  Constant counts are unrolled."""
    if not loops:
        return take(at, carried)
    (n, steps), *inner = loops
    if isinstance(n, int):
        for k in range(n):
            carried = _nest(
                b, inner, [b.add(x, b.mul(word(k), s)) for x, s in zip(at, steps)] if k else at, carried, take
            )
        return carried

    def turn(i: Any, state: list) -> list:
        return _nest(b, inner, [b.add(x, b.mul(i, s)) for x, s in zip(at, steps)], state, take)

    return counting(b, word(0), n, 1, carried, turn)


def _each(e: Lanes, m: Any, n: Any, gaps: tuple, body: Callable, apart: bool = False) -> None:
    """``body(places, starts)`` over n elements of each of m windows, as in `blocks`; ``starts`` advance by ``gaps``.

    apart : vectors visit the windows one after the other, for a body that reads what it writes: a load waits for a masked store
    of neighbours (backward of adaptive means, (64, 24, 24, 20), Zen 4: 338 instead of 577 us).
    """
    b = e.b

    def windows(inside: Callable) -> None:
        def window(o: Any, state: list) -> list:
            inside([b.mul(o, gap) for gap in gaps])
            return state

        counting(b, word(0), m, 1, [], window)

    def together(places: list) -> None:  # masks are computed once for all windows
        for some in [[place] for place in places] if apart else [places]:
            windows(partial(body, some))

    with b.if_else(narrow(e, n)) as (one, several):
        with one:
            mask = e.lanes_below(n)
            windows(lambda starts: body([(word(0), mask)], starts))
        with several:
            blocks(e, n, WIDE, together)


def _by_counts(e: Lanes, nb: Any, nc: Any, emit: Callable) -> None:
    """``emit(nb, nc)``, with constants in place of small counts.

    Means of 3x3 windows, 2 apart, on (32, 28, 28, 16) take 43 us on Zen 5 instead of 55.
    """
    b = e.b
    done = b.append_basic_block("done")
    for taps in (1, 2, 3):
        here, there = b.append_basic_block("few"), b.append_basic_block("more")
        few = b.and_(b.icmp_signed("==", nb, word(1)), b.icmp_signed("==", nc, word(taps)))
        b.cbranch(few, here, there)
        b.position_at_end(here)
        emit(1, taps)
        b.branch(done)
        b.position_at_end(there)
    emit(nb, nc)
    b.branch(done)
    b.position_at_end(done)


def sums(name: str, term: Callable = lambda x: x, params: str = "", add: bool = False) -> Any:
    """A loop ``(m, n, gap, to_gap, na, nb, nc, sa, sb, sc, x, y, factor, params...)``: y = factor * sum of term(x, params...).

    It covers m windows, ``gap`` apart in x and ``to_gap`` in y, of n elements each.  add : the sum is added to y.
    """

    def emit(e: Lanes, m, n, gap, to_gap, na, nb, nc, sa, sb, sc, x, y, factor, *given):  # type: ignore[no-untyped-def]
        b = e.b
        by, reals = V(b, e.splat(factor)), [V(b, e.splat(p)) for p in given]

        def columns(nb: Any, nc: Any, places: list, starts: list) -> None:
            def take(at: list, acc: list) -> list:
                p = b.gep(x, at)
                return [(V(b, a) + term(e.get(p, *place), *reals)).v for a, place in zip(acc, places)]

            zero, to = ir.Constant(e.vec, [0.0] * e.lanes), b.gep(y, starts[1:])
            for total, place in zip(
                _nest(b, [(na, [sa]), (nb, [sb]), (nc, [sc])], starts[:1], [zero] * len(places), take), places
            ):
                out = V(b, total) * by
                e.put(out + e.get(to, *place) if add else out, to, *place)

        def each(nb: Any, nc: Any) -> None:
            _each(e, m, n, (gap, to_gap), partial(columns, nb, nc), apart=add)

        if params:  # a long term, which is not duplicated
            each(nb, nc)
        else:
            _by_counts(e, nb, nc, each)

    return _function(f"sums_{name}", "iiiiiiiiippf" + params, emit)


def _largest() -> Any:
    """A loop ``(m, n, gap, na, nb, nc, sa, sb, sc, x, y)``: y = the largest of x, NaN if any is."""

    def emit(e: Lanes, m, n, gap, na, nb, nc, sa, sb, sc, x, y):  # type: ignore[no-untyped-def]
        b = e.b

        def columns(nb: Any, nc: Any, places: list, starts: list) -> None:
            def take(at: list, best: list) -> list:
                p = b.gep(x, at)
                return [F.maximum(e.get(p, *place), V(b, a)).v for a, place in zip(best, places)]

            least, to = ir.Constant(e.vec, [float("-inf")] * e.lanes), b.gep(y, starts[1:])
            for best, place in zip(
                _nest(b, [(na, [sa]), (nb, [sb]), (nc, [sc])], starts[:1], [least] * len(places), take), places
            ):
                e.put(V(b, best), to, *place)

        _by_counts(e, nb, nc, lambda nb, nc: _each(e, m, n, (gap, n), partial(columns, nb, nc)))

    return _function("largest", "iiiiiiiipp", emit)


def _first_of_largest() -> Any:
    """A loop ``(m, n, gap, na, nb, nc, sa, sb, sc, t, ta, tb, x, y, index)``: also the first tap of the largest; the last NaN if any."""

    def emit(e: Lanes, m, n, gap, na, nb, nc, sa, sb, sc, t, ta, tb, x, y, index):  # type: ignore[no-untyped-def]
        b = e.b
        number = ir.IntType(8 * e.size)

        def splat(t: Any) -> Any:
            return e.splat(b.trunc(t, number) if e.size < 8 else t)

        def columns(nb: Any, nc: Any, places: list, starts: list) -> None:
            wide = len(places)

            def take(at: list, state: list) -> list:
                p, tap, best, where = b.gep(x, at[:1]), splat(at[1]), [], []
                for old, found, place in zip(state[:wide], state[wide:], places):
                    v = e.get(p, *place).v
                    higher = b.and_(b.fcmp_unordered(">", v, old), b.fcmp_ordered("ord", old, old))
                    best.append(b.select(higher, v, old))
                    where.append(b.select(higher, tap, found))
                return best + where

            loops = [(na, [sa, ta]), (nb, [sb, tb]), (nc, [sc, word(1)])]
            least = ir.Constant(e.vec, [float("-inf")] * e.lanes)
            state = _nest(b, loops, [starts[0], t], [least] * wide + [splat(t)] * wide, take)
            kept = ir.VectorType(index.type.pointee, e.lanes)
            to, also = b.gep(y, starts[1:]), b.gep(index, starts[1:])
            for best, found, (k, mask) in zip(state[:wide], state[wide:], places):
                e.put(V(b, best), to, k, mask)
                e.store(b.trunc(found, kept) if found.type != kept else found, b.gep(also, [k]), mask)

        _by_counts(e, nb, nc, lambda nb, nc: _each(e, m, n, (gap, n), partial(columns, nb, nc)))

    return _function("first_of_largest", "iiiiiiiiiiippp", emit)


def _of_tap(e: Lanes, dy: Any, index: Any, k: Any, mask: Any, t: Any) -> V:
    """dy if index is the tap, else 0."""
    b = e.b
    here = b.icmp_signed("==", e.load(b.gep(index, [k]), mask), e.splat(b.trunc(t, index.type.pointee)))
    return e.get(dy, k, mask).where(V(b, here), 0.0)


def _chosen() -> Any:
    """A loop ``(m, n, gap, to_gap, na, nb, nc, sa, sb, sc, t, ta, tb, tc, dy, index, dx)``: dx = sum of dy where index is the tap.

    It covers m places, ``gap`` apart in dy and ``to_gap`` in dx, of n elements each.
    """

    def emit(e: Lanes, m, n, gap, to_gap, na, nb, nc, sa, sb, sc, t, ta, tb, tc, dy, index, dx):  # type: ignore[no-untyped-def]
        b = e.b

        def columns(nb: Any, nc: Any, places: list, starts: list) -> None:
            def take(at: list, acc: list) -> list:
                p, q = b.gep(dy, at[:1]), b.gep(index, at[:1])
                return [(V(b, a) + _of_tap(e, p, q, *place, at[1])).v for a, place in zip(acc, places)]

            loops = [(na, [sa, ta]), (nb, [sb, tb]), (nc, [sc, tc])]
            zero, to = ir.Constant(e.vec, [0.0] * e.lanes), b.gep(dx, starts[1:])
            for total, place in zip(_nest(b, loops, [starts[0], t], [zero] * len(places), take), places):
                e.put(V(b, total), to, *place)

        _by_counts(e, nb, nc, lambda nb, nc: _each(e, m, n, (gap, to_gap), partial(columns, nb, nc)))

    return _function("chosen", "iiiiiiiiiiiiippp", emit)


def _spread(name: str, of_tap: bool) -> Any:
    """A loop over m windows, ``gap`` apart in dx, of n elements and nc taps: sets dx at each tap to its part of dy.

    ``(m, n, gap, nc, sc, t, dy, index, dx)``: the part is dy if index is the tap; else ``(m, n, gap, nc, sc, dy, dx, factor)``.
    """

    def emit(e: Lanes, m, n, gap, nc, sc, *args):  # type: ignore[no-untyped-def]
        b = e.b
        t, dy, index, dx = args if of_tap else (word(0), args[0], args[0], args[1])

        def columns(places: list, starts: list) -> None:
            p, q = b.gep(dy, starts[:1]), b.gep(index, starts[:1])
            parts = [] if of_tap else [e.get(p, *place) * V(b, e.splat(args[2])) for place in places]

            def put(at: list, state: list) -> list:
                to = b.gep(dx, at[:1])
                for j, place in enumerate(places):
                    e.put(_of_tap(e, p, q, *place, at[1]) if of_tap else parts[j], to, *place)
                return state

            _nest(b, [(nc, [sc, word(1)])], [starts[1], t], [], put)

        _each(e, m, n, (n, gap), columns)

    return _function(name, "iiiiippp" if of_tap else "iiiippf", emit)


largest, first_of_largest, chosen = _largest(), _first_of_largest(), _chosen()
spread, spread_chosen = _spread("spread", False), _spread("spread_chosen", True)


@intrinsic
def table(tc):
    """A pointer to TABLE integers on the stack."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return cgutils.alloca_once(b, WORD, TABLE)

    return types.CPointer(types.intp)(), codegen
