"""The arithmetic of kernels: scalar functions, elementwise loops and reductions over (pointer, n).

``exp, log, tanh, erf`` take a float of the heap's dtype; they are inlined, and vectorise in a plain loop.  `_formulas` states
their bounds.  `elementwise` and `reduction` make loops in vector IR from a formula.  Unlike loops that the compiler
vectorises, these need no check for overlap (so they run at full speed in place), and their last elements cost one
masked vector instead of a scalar loop: 10 elements cost as much as 16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add
from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from calcvm.kernels_cpu import _formulas as F
from calcvm.kernels_cpu._common import I32, WORD
from calcvm.kernels_cpu._formulas import V
from calcvm.kernels_cpu._vectors import Vectors, emitted, phi, word


def scalar(formula: Callable) -> Any:
    """A formula of one float as a function that kernels call."""

    @intrinsic
    def function(tc, x):
        return x(x), lambda ctx, b, sig, args: formula(V(b, args[0])).v

    return function


exp, log, tanh, erf = map(scalar, (F.exp, F.log, F.tanh, F.erf))


# From this many bytes on results are stored past the caches, so that no line is read before it is written.  On 16.8 million
# elements (Zen 5) relu takes 2.3 instead of 3.0 ms, an addition 3.4 instead of 4.5.
STREAMED = 1 << 24


# ---------------------------------------------------------------- loops
class Lanes(Vectors):
    """Vectors of numbers, from the i-th element of a pointer on."""

    def get(self, p: Any, i: Any, mask: Any) -> V:
        return V(self.b, self.load(self.b.gep(p, [i]), mask))

    def put(self, v: V, p: Any, i: Any, mask: Any) -> None:
        self.store(v.v, self.b.gep(p, [i]), mask)

    def stream(self, v: V, p: Any, i: Any, mask: None) -> None:
        """`put` past the caches; the vector is whole and aligned."""
        p, _, size, _ = self._memory(self.b.gep(p, [i]))
        store = self.b.store(v.v, p, align=self.lanes * size)
        store.set_metadata("nontemporal", self.b.module.add_metadata([ir.Constant(I32, 1)]))

    def streamed(self) -> None:
        """A fence after `stream`: the workers' barrier does not wait for such stores."""
        self.b.call(self.fn("llvm.x86.sse.sfence", ir.VoidType()), [])

    def below(self, left: Any) -> Any:
        """The mask of the first ``left`` lanes; all lanes if there are fewer."""
        return self.lanes_below(self.b.select(self.b.icmp_signed("<", left, word(self.lanes)), left, word(self.lanes)))


def loop_of(kinds: str, emit: Callable, result: int = 0, name: str = "") -> Any:
    """An intrinsic of ``n`` and one argument per kind, see `emitted`."""
    return emitted(Lanes, "i" + kinds, emit, result, name)


def _vectors(e: Lanes, n: Any, body: Callable, carried: list, step: int = 1) -> list:
    """Run ``body(i, load mask or None, lanes, carried, u) -> carried`` over [0, n) in vectors; the last is masked.

    ``carried`` has ``step`` groups of values.  Block u of each ``step`` vectors updates group u, and the masked
    vectors at the end update the groups in turn, so the order of a reduction depends only on n.
    """
    b, lanes = e.b, e.lanes
    width = len(carried) // step
    whole = b.and_(n, word(-lanes * step))
    start = b.block
    head, loop, after = (b.append_basic_block(f"each.{s}") for s in ("head", "loop", "after"))
    b.branch(head)
    b.position_at_end(head)
    i = phi(b, WORD, (word(0), start))
    acc = [phi(b, v.type, (v, start)) for v in carried]
    b.cbranch(b.icmp_signed("<", i, whole), loop, after)
    b.position_at_end(loop)
    new = []
    for u in range(step):
        new += body(b.add(i, word(u * lanes)) if u else i, None, acc[u * width : (u + 1) * width])
    i.add_incoming(b.add(i, word(lanes * step)), b.block)
    for p, v in zip(acc, new):
        p.add_incoming(v, b.block)
    b.branch(head)
    b.position_at_end(after)
    done = list(acc)
    at = whole
    for u in range(step):  # the rest: at most ``step`` vectors, the last one partial
        here = b.block
        tail, end = b.append_basic_block("each.tail"), b.append_basic_block("each.end")
        b.cbranch(b.icmp_signed("<", at, n), tail, end)
        b.position_at_end(tail)
        group = done[u * width : (u + 1) * width]
        updated = body(at, b.sub(n, at), group)
        tail = b.block
        b.branch(end)
        b.position_at_end(end)
        done[u * width : (u + 1) * width] = [
            phi(b, old.type, (old, here), (new, tail)) for old, new in zip(group, updated)
        ]
        at = b.add(at, word(lanes))
    return done


def _scalar_tail(e: Lanes, at: Any, left: Any, one: Callable) -> None:
    """Run ``one(i)`` for min(left, lanes) elements from ``at`` on, for machines without masks."""
    b = e.b
    stop = b.add(at, b.select(b.icmp_signed("<", left, word(e.lanes)), left, word(e.lanes)))
    start = b.block
    loop, after = b.append_basic_block("tail.loop"), b.append_basic_block("tail.after")
    b.branch(loop)  # left > 0
    b.position_at_end(loop)
    i = phi(b, WORD, (at, start))
    one(i)
    new = b.add(i, word(1))
    i.add_incoming(new, b.block)
    b.cbranch(b.icmp_signed("<", new, stop), loop, after)
    b.position_at_end(after)


def each(formula: Callable, reads: str, indexed: bool = False, writes: int = 0) -> Callable:
    """Emits y[i] = formula(reads[i]..., params...) for i in [0, n): see `elementwise`.

    writes : number of arrays written, if the formula returns a tuple.
    """

    def emit(e: Lanes, n: Any, *args: Any) -> None:
        b, k, last = e.b, len(reads), len(reads) + (writes or 1)
        ptrs, ys = args[:k], args[k:last]
        first = args[last] if indexed else None
        given = args[last + indexed :]

        def results(*numbers: V) -> Sequence[V]:
            return formula(*numbers) if writes else (formula(*numbers),)

        singles = {j: b.load(ptrs[j]) for j in range(k) if reads[j] == "s"}

        def lanes_of(x: Any) -> V:
            return V(b, e.splat(x))

        def vector(i: Any, mask: Any, put: Callable = e.put) -> None:
            xs = [lanes_of(singles[j]) if reads[j] == "s" else e.get(ptrs[j], i, mask) for j in range(k)]
            if indexed:
                iota = ir.Constant(ir.VectorType(WORD, e.lanes), list(range(e.lanes)))
                xs.append(V(b, b.add(e.splat(b.add(first, i)), iota)))
            for y, v in zip(ys, results(*xs, *map(lanes_of, given))):
                put(v, y, i, mask)

        def element(i: Any) -> None:
            xs = [V(b, singles[j] if reads[j] == "s" else b.load(b.gep(ptrs[j], [i]))) for j in range(k)]
            if indexed:
                xs.append(V(b, b.add(first, i)))
            for y, v in zip(ys, results(*xs, *(V(b, p) for p in given))):
                b.store(v.v, b.gep(y, [i]))

        def body(start: Any, i: Any, left: Any, carried: list) -> list:
            i = b.add(start, i)
            if left is None:
                vector(i, None)
            elif e.target.masks:
                vector(i, e.below(left))
            else:
                _scalar_tail(e, i, left, element)
            return carried

        def all_() -> None:
            start = _streamed(e, n, ptrs, ys, vector) if e.target.streams and not singles else word(0)
            _vectors(e, b.sub(n, start), partial(body, start), [])

        if singles:  # n may be 0, and the single element then belongs to another value: do not even load it
            with b.if_then(b.icmp_signed(">", n, word(0))):
                all_()
        else:
            all_()

    return emit


def _streamed(e: Lanes, n: Any, xs: Sequence[Any], ys: Sequence[Any], vector: Callable) -> Any:
    """How many elements ``vector`` has written past the caches: none, or as many as fill vectors."""
    b = e.b
    before, here, after = b.block, b.append_basic_block("streamed"), b.append_basic_block("not.streamed")
    b.cbranch(past_caches(e, n, xs, ys), here, after)
    b.position_at_end(here)
    whole = b.and_(n, word(-e.lanes))

    def turn(i: Any, carried: list) -> list:
        vector(i, None, e.stream)
        return carried

    counting(b, word(0), whole, e.lanes, [], turn)
    e.streamed()
    last = b.block
    b.branch(after)
    b.position_at_end(after)
    return phi(b, WORD, (word(0), before), (whole, last))


def past_caches(e: Lanes, n: Any, xs: Sequence[Any], ys: Sequence[Any], least: int = STREAMED) -> Any:
    """Whether ys, of n elements each, should be written by `Lanes.stream`: if they have ``least`` bytes and are aligned.

    Never for a result in the place of an operand, whose lines are in cache: a step of Adam on 16.8 million would take half as long again.
    """
    b = e.b
    large = b.icmp_signed(">=", n, word(least // e.size))
    for y in ys:
        to = b.ptrtoint(y, WORD)
        large = b.and_(large, b.icmp_signed("==", b.and_(to, word(e.lanes * e.size - 1)), word(0)))
        for x in xs:
            large = b.and_(large, b.icmp_signed("!=", to, b.ptrtoint(x, WORD)))
    return large


def elementwise(formula: Callable, reads: str, params: str = "", indexed: bool = False) -> Any:
    """A loop ``each(n, reads..., y, params...)``: y[i] = formula(reads[i]..., params...) for i in [0, n).

    reads : one letter each: ``v`` an array, ``s`` one element for all i.  y may be one of the arrays.
    params : one letter each: ``f`` a float, ``i`` an integer of code, ``l`` an int64, ``d`` a float64 in any heap.
    indexed : a further int64 argument before the params, the index of element 0; the formula gets the
        elements' indexes (int64 lanes) before its params.
    """
    return loop_of("p" * (len(reads) + 1) + "i" * indexed + params, each(formula, reads, indexed))


def _horizontal(e: Lanes, v: Any, combine: Callable) -> Any:
    """All lanes of a vector combined by a tree."""
    b, n = e.b, e.lanes
    while n > 1:
        n //= 2
        undef = ir.Constant(v.type, ir.Undefined)
        lo = b.shuffle_vector(v, undef, ir.Constant(ir.VectorType(I32, n), list(range(n))))
        hi = b.shuffle_vector(v, undef, ir.Constant(ir.VectorType(I32, n), list(range(n, 2 * n))))
        v = combine(V(b, lo), V(b, hi)).v
    return b.extract_element(v, ir.Constant(I32, 0))


def add_exactly(total: V, lost: V, x: V) -> tuple[V, V]:
    """total + x - lost, and the new rounding error: the error of a sum of any length is that of one addition.

    Kahan 1965.  An infinite sum has no rounding error.
    """
    x = x - lost
    new = total + x
    rounded = (new - total) - x
    return new, rounded.where(F.fabs(rounded) < float("inf"), 0.0)


def _when(b: ir.IRBuilder, condition: Any, change: Callable, values: list) -> list:
    """The values, changed by ``change(values)`` if the condition holds."""
    before = b.block
    with b.if_then(condition):
        new = change(values)
        inside = b.block
    return [phi(b, v.type, (v, before), (w, inside)) for v, w in zip(values, new)]


LONG = 256  # vectors summed plainly; longer sums run in blocks of them


def _summed(e: Lanes, n: Any, count: int, of_block: Callable) -> list:
    """``count`` sums over [0, n), as vectors, from the sums of blocks ``of_block(start, n)``; the error does not grow with n.

    Short sums have separate code: with the code of long ones a softmax of 10 takes a tenth longer.
    """
    b, zero = e.b, ir.Constant(e.vec, [0.0] * e.lanes)
    size = word(LONG * e.lanes)

    def further(start: Any, state: list) -> list:
        left = b.sub(n, start)
        new = of_block(start, b.select(b.icmp_signed("<", left, size), left, size))
        pairs = [add_exactly(V(b, s), V(b, c), V(b, x)) for s, c, x in zip(state[:count], state[count:], new)]
        return [s.v for s, _ in pairs] + [c.v for _, c in pairs]

    with b.if_else(b.icmp_signed("<=", n, size), likely=True) as (short, long):
        with short:
            alone = of_block(word(0), n)
            here = b.block
        with long:
            totals = counting(b, word(0), n, LONG * e.lanes, [zero] * (2 * count), further)
            there = b.block
    return [phi(b, v.type, (v, here), (s, there)) for v, s in zip(alone, totals)]


def _folded(e: Lanes, combine: Callable, groups: list) -> Any:
    """Four vectors of partial results as one."""
    a = [V(e.b, v) for v in groups]
    return combine(combine(a[0], a[1]), combine(a[2], a[3])).v


def reduced(combine: Callable, initial: float, formula: Callable, k: int, store: bool = False) -> Callable:
    """Emits formula(reads[i]..., params...) of k reads combined over i in [0, n): see `reduction`."""

    def emit(e: Lanes, n: Any, *args: Any) -> Any:
        b = e.b
        ptrs, y, params = args[:k], args[k] if store else None, args[k + store :]
        neutral = ir.Constant(e.vec, [initial] * e.lanes)

        def body(start: Any, i: Any, left: Any, carried: list) -> list:
            i = b.add(start, i)
            mask = None if left is None else e.below(left)
            xs = [e.get(p, i, mask) for p in ptrs]
            term = formula(*xs, *(V(b, e.splat(p)) for p in params))
            if store:
                e.put(term, y, i, mask)
            if mask is not None:
                term = V(b, b.select(mask, term.v, neutral))
            return [combine(V(b, carried[0]), term).v]

        def block(start: Any, n: Any) -> list:
            return [_folded(e, combine, _vectors(e, n, partial(body, start), [neutral] * 4, 4))]

        (all_,) = _summed(e, n, 1, block) if combine is add else block(word(0), n)
        return _horizontal(e, all_, combine)

    return emit


def reduction(combine: Callable, initial: float, formula: Callable, reads: str, n_params: int = 0, store: bool = False):
    """A loop ``all(n, reads..., [y,] params...)`` that combines formula(reads[i]..., params...) over [0, n).

    The order of the reduction depends only on n: 4 vectors of partial results, then a tree; sums run in blocks, see `_summed`.
    With ``store`` the terms are also written to y, which may be one of the arrays.
    """
    emit = reduced(combine, initial, formula, len(reads), store)
    return loop_of("p" * (len(reads) + store) + "f" * n_params, emit, result=1)


def sums(formula: Callable, reads: str, n_params: int, count: int) -> Any:
    """A loop ``all(n, reads..., params...)``: the sums over [0, n) of ``count`` terms, a tuple, in the order of `reduction`."""

    def emit(e: Lanes, n: Any, *args: Any) -> list:
        b, k = e.b, len(reads)
        zero = ir.Constant(e.vec, [0.0] * e.lanes)

        def body(start: Any, i: Any, left: Any, carried: list) -> list:
            i = b.add(start, i)
            mask = None if left is None else e.below(left)
            terms = formula(*(e.get(p, i, mask) for p in args[:k]), *(V(b, e.splat(p)) for p in args[k:]))
            if mask is not None:
                terms = [V(b, b.select(mask, t.v, zero)) for t in terms]
            return [(V(b, old) + t).v for old, t in zip(carried, terms)]

        def block(start: Any, n: Any) -> list:
            a = _vectors(e, n, partial(body, start), [zero] * (4 * count), 4)
            return [_folded(e, add, a[t::count]) for t in range(count)]

        return [_horizontal(e, v, add) for v in _summed(e, n, count, block)]

    return loop_of("p" * len(reads) + "f" * n_params, emit, result=count)


rsum = reduction(add, 0.0, lambda x: x, "v")  # rsum(n, x)
rsumsq = reduction(add, 0.0, lambda x: x * x, "v")  # sum of squares: rsumsq(n, x)
rdot = reduction(add, 0.0, lambda x, y: x * y, "vv")  # rdot(n, x, y)
rmax = reduction(F.maximum, float("-inf"), lambda x: x, "v")  # NaN if any element is
# The largest element of a row whose result a NaN spoils anyway.  It costs half of rmax and may miss a NaN.
rtop = reduction(lambda x, y: x.where(x > y, y), float("-inf"), lambda x: x, "v")
rmin = reduction(F.minimum, float("inf"), lambda x: x, "v")
# rexp(n, x, y, m): y = exp(x - m), and its sum.  The core of every softmax; y may be x.
rexp = reduction(add, 0.0, lambda x, m: F.exp(x - m), "v", 1, store=True)
rexpsum = reduction(add, 0.0, lambda x, m: F.exp(x - m), "v", 1)  # the sum only: rexpsum(n, x, m)
scale = elementwise(lambda x, a: x * a, "v", "f")  # scale(n, x, y, a): y = x * a; y may be x
exactly = loop_of("ppppp", each(add_exactly, "vvv", writes=2))  # exactly(n, total, lost, x, total, lost): `add_exactly`
copy = elementwise(lambda x: x, "v")  # copy(n, x, y)
fill = elementwise(lambda value: value, "", "f")  # fill(n, y, value)


# ---------------------------------------------------------------- reductions along columns
def counting(b: ir.IRBuilder, start: Any, stop: Any, step: int, carried: list, body: Callable) -> list:
    """``for i in range(start, stop, step): carried = body(i, carried)``."""
    entry = b.block
    head, loop, after = (b.append_basic_block(f"for.{s}") for s in ("head", "loop", "after"))
    b.branch(head)
    b.position_at_end(head)
    i = phi(b, WORD, (start, entry))
    state = [phi(b, v.type, (v, entry)) for v in carried]
    b.cbranch(b.icmp_signed("<", i, stop), loop, after)
    b.position_at_end(loop)
    new = body(i, state)
    i.add_incoming(b.add(i, word(step)), b.block)
    for p, v in zip(state, new):
        p.add_incoming(v, b.block)
    b.branch(head)
    b.position_at_end(after)
    return state


def in_groups(b: ir.IRBuilder, start: Any, stop: Any, n: int, body: Callable[[int, Any], None]) -> None:
    """``body(n, i)`` for ``n`` places from i on, then ``body(1, i)`` for each of the rest."""

    def of(count: int) -> Callable:
        def one(i: Any, carried: list) -> list:
            body(count, i)
            return carried

        return one

    full = b.add(start, b.and_(b.sub(stop, start), word(-n)))
    counting(b, start, full, n, [], of(n))
    counting(b, full, stop, 1, [], of(1))


def blocks(e: Lanes, n: Any, wide: int, columns: Callable) -> None:
    """``columns(places)`` over [0, n), a place and a mask per vector: ``wide`` at a time, then two, or one where masks cost."""
    b = e.b

    def several(i: Any, carried: list) -> list:
        columns([(b.add(i, word(k * e.lanes)), None) for k in range(wide)])
        return carried

    def two(i: Any, carried: list) -> list:
        columns([(k, e.below(b.sub(n, k))) for k in (i, b.add(i, word(e.lanes)))])
        return carried

    def one(i: Any, left: Any, carried: list) -> list:
        columns([(b.add(whole, i), None if left is None else e.below(left))])
        return carried

    whole = b.and_(n, word(-wide * e.lanes))
    counting(b, word(0), whole, wide * e.lanes, [], several)
    if e.target.free_masks:
        counting(b, whole, n, 2 * e.lanes, [], two)
    else:
        _vectors(e, b.sub(n, whole), one, [])


def narrow(e: Lanes, n: Any) -> Any:
    """Whether n elements are best handled as one masked vector."""
    return e.b.icmp_signed("<=" if e.target.free_masks else "<", n, word(e.lanes))


def column_reduction(
    combine: Callable, initial: float, formula: Callable = lambda x: x, nest: bool = False, onto: bool = False
) -> Any:
    """A loop ``cols(n, rows, stride, x, y, factor)``: y[i] = factor * combination of formula(x[r*stride + i]) over r.

    A column is combined in blocks of 128 rows by 4 partial results, and longer sums by `add_exactly`, so the order
    depends only on the counts of rows.  ``nest`` : two more counts and strides after ``stride``, of nested blocks of rows.
    ``onto`` : the argument ``acc`` takes factor's place; if it is not 0, the result is added to y.
    """
    block, ways, wide = 128, 4, 4
    exactly = combine is add

    def emit(e: Lanes, n: Any, rows: Any, stride: Any, *rest: Any) -> None:
        b, (*outer, x, y, last) = e.b, rest
        neutral = ir.Constant(e.vec, [initial] * e.lanes)
        adds = e.splat(b.icmp_signed("!=", last, word(0))) if onto else None

        def columns(places: list) -> None:
            """Reduce vectors of columns; the bits do not depend on how many there are."""
            vectors = len(places)

            def over(outer: list, x: Any, state: list) -> list:
                if not outer:
                    return counting(b, word(0), rows, block, state, partial(one_block, x))
                times, step, *inner = outer
                return counting(b, word(0), times, 1, state, lambda r, s: over(inner, b.gep(x, [b.mul(r, step)]), s))

            def take(x: Any, r: Any, acc: list) -> list:
                row = b.gep(x, [b.mul(r, stride)])
                return [combine(V(b, a), formula(e.get(row, *place))).v for a, place in zip(acc, places)]

            def four(x: Any, r: Any, acc: list) -> list:
                out = []
                for k in range(ways):
                    out += take(x, b.add(r, word(k)), acc[k * vectors : (k + 1) * vectors])
                return out

            def one_block(x: Any, start: Any, state: list) -> list:
                """State: the number of rows in ``part``, part, and the total before it with its rounding error."""
                end = b.add(start, word(block))
                end = b.select(b.icmp_signed("<", end, rows), end, rows)
                if exactly:
                    state = _when(b, b.icmp_signed(">=", state[0], word(block)), part_added, state)
                whole = b.add(start, b.and_(b.sub(end, start), word(-ways)))
                acc = counting(b, start, whole, ways, [neutral] * (ways * vectors), partial(four, x))
                acc[:vectors] = counting(b, whole, end, 1, acc[:vectors], partial(take, x))
                count, part = b.add(state[0], b.sub(end, start)), state[1 : 1 + vectors]
                both = [V(b, _folded(e, combine, acc[v::vectors])) for v in range(vectors)]
                return [count, *(combine(V(b, t), new).v for t, new in zip(part, both)), *state[1 + vectors :]]

            def part_added(state: list) -> list:
                k = vectors
                part, total, lost = state[1 : 1 + k], state[1 + k : 1 + 2 * k], state[1 + 2 * k :]
                pairs = [add_exactly(*(V(b, v) for v in three)) for three in zip(total, lost, part)]
                return [word(0), *[neutral] * k, *(t.v for t, _ in pairs), *(c.v for _, c in pairs)]

            def all_added(state: list) -> list:
                """The state with ``part`` added to the total."""
                added = part_added(state)
                return [added[0], *added[1 + vectors : 1 + 2 * vectors], *added[1 + vectors :]]

            state = over(outer, x, [word(0)] + [neutral] * (vectors * (3 if exactly else 1)))
            if exactly:
                begun = b.icmp_signed("<", state[0], reduce(b.mul, outer[::2], rows))
                state = _when(b, begun, all_added, state)
            totals = state[1 : 1 + vectors]
            for total, place in zip(totals, places):
                old = V(b, b.select(adds, e.get(y, *place).v, neutral)) if onto else None
                e.put(V(b, total) * V(b, e.splat(last)) if old is None else old + V(b, total), y, *place)

        with b.if_else(narrow(e, n)) as (one, several):
            with one:
                columns([(word(0), e.below(n))])
            with several:
                blocks(e, n, wide, columns)

    return loop_of("ii" + "iiii" * nest + "pp" + ("i" if onto else "f"), emit)


column_sums = column_reduction(add, 0.0, onto=True)  # column_sums(n, rows, stride, x, y, acc)


def _select_first() -> Any:
    """A loop ``first(n, rows, stride, dy, x, y, dx)``: down each column i, dx = dy[i] at the first x = y[i], else 0.

    y is an extremum of x, and NaN if x has one; then the first NaN gets dy.  dx may be x.
    """

    def emit(e: Lanes, n: Any, rows: Any, stride: Any, dy: Any, x: Any, y: Any, dx: Any) -> None:
        b = e.b

        def body(i: Any, left: Any, carried: list) -> list:
            mask = None if left is None else e.below(left)
            best = e.get(y, i, mask)

            def row(r: Any, state: list) -> list:
                g = V(b, state[0])
                k = b.add(b.mul(r, stride), i)
                v = e.get(x, k, mask)
                hit = v.equals(best) | v.is_nan()
                e.put(g.where(hit, 0.0), dx, k, mask)
                return [g.const(0.0).where(hit, g).v]

            counting(b, word(0), rows, 1, [e.get(dy, i, mask).v], row)
            return carried

        _vectors(e, n, body, [])

    return loop_of("iipppp", emit)


first_of_columns = _select_first()


# ---------------------------------------------------------------- transposition in registers
def _interleave(b: ir.IRBuilder, x: Any, y: Any, start: int) -> Any:
    """x[start], y[start], x[start + 1], ...: half of each vector."""
    n = x.type.count
    order = [start + k // 2 + (n if k % 2 else 0) for k in range(n)]
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, n), order))


def _transpose_tiles() -> Any:
    """A loop ``tiles(n, x_stride, y_stride, x, y)``: y[i*y_stride + j] = x[j*x_stride + i], i below lanes, j below n.

    ``n`` is a multiple of the lanes.  Each cache line is read and written once and whole, so it does not matter that lines
    a power of two apart share a cache set.
    """

    def emit(e: Lanes, n: Any, x_stride: Any, y_stride: Any, x: Any, y: Any) -> None:
        b = e.b

        def tile(j: Any, carried: list) -> list:
            v = [e.get(x, b.mul(b.add(j, word(k)), x_stride), None).v for k in range(e.lanes)]
            half = e.lanes // 2
            for _ in range(e.lanes.bit_length() - 1):  # log2(lanes) perfect shuffles of all lanes of all vectors
                v = [_interleave(b, v[k // 2], v[k // 2 + half], (k % 2) * half) for k in range(e.lanes)]
            for k in range(e.lanes):
                e.put(V(b, v[k]), y, b.add(b.mul(y_stride, word(k)), j), None)
            return carried

        counting(b, word(0), n, e.lanes, [], tile)

    return loop_of("iipp", emit, name="tiles")


tiles = _transpose_tiles()


def _picked(b: ir.IRBuilder, vectors: Sequence[Any], places: Sequence[tuple[int, int]]) -> Any:
    """The vector of the given (vector, lane) pairs."""
    n, out = len(places), vectors[0]
    for k in range(1, len(vectors)):
        order = [n + lane if of == k else lane if of == 0 and k == 1 else j for j, (of, lane) in enumerate(places)]
        out = b.shuffle_vector(out, vectors[k], ir.Constant(ir.VectorType(I32, n), order))
    return out


def _woven(k: int, apart: bool) -> Any:
    """A loop ``weave(n, stride, x, y)``: y[j*k + i] = x[i*stride + j] for i below k and j below n, a multiple of the lanes.

    apart : the inverse, y[i*stride + j] = x[j*k + i].
    """

    def emit(e: Lanes, n: Any, stride: Any, x: Any, y: Any) -> None:
        b, lanes = e.b, e.lanes

        def dense(j: Any, v: int) -> Any:
            return b.add(b.mul(j, word(k)), word(v * lanes))

        def line(j: Any, v: int) -> Any:
            return b.add(b.mul(stride, word(v)), j)

        takes, gives = (dense, line) if apart else (line, dense)

        def place(v: int, lane: int) -> tuple[int, int]:
            of = divmod(lane * k + v, lanes) if apart else divmod(v * lanes + lane, k)
            return of if apart else (of[1], of[0])

        def turn(j: Any, carried: list) -> list:
            vectors = [e.get(x, takes(j, v), None).v for v in range(k)]
            for v in range(k):
                e.put(V(b, _picked(b, vectors, [place(v, lane) for lane in range(lanes)])), y, gives(j, v), None)
            return carried

        counting(b, word(0), n, lanes, [], turn)

    return loop_of("ipp", emit, name=f"{'unweave' if apart else 'weave'}{k}")


weave2, weave3, weave4 = (_woven(k, False) for k in (2, 3, 4))
unweave2, unweave3, unweave4 = (_woven(k, True) for k in (2, 3, 4))
