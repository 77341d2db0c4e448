"""Loops over rows of columns, in blocks of columns: values that a whole column shares, such as its mean, stay in registers.

Rows are ``stride`` elements apart.  A sum along a column runs in blocks of 128 rows.  Its order depends only on the
number of rows and on the column's place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from calcvm.kernels_cpu._common import WORD
from calcvm.kernels_cpu._formulas import V, fma, maximum
from calcvm.kernels_cpu._math import STREAMED, Lanes, counting, loop_of, past_caches
from calcvm.kernels_cpu._vectors import word

BLOCK = 128  # rows of a block
WIDE = 8  # vectors of columns at once; narrower blocks skip more between rows: with 4, 144 channels take up to 2.3 times as long
MOST_INV = 1e15  # limit of 1/sqrt(var + eps) while the squares are in range, with digits to spare in float32
IN_FLIGHT = 4  # sums of a term; fewer vectors get several sums each


class Block:
    """Some vectors of columns, from the i-th on; if only ``left`` are left, the last vector is masked."""

    def __init__(self, e: Lanes, i: Any, left: Any, vectors: int):
        self.e, self.b, self.vectors, self.whole = e, e.b, vectors, left is None and vectors == WIDE
        self.at = [(e.b.add(i, word(k * e.lanes)), None) for k in range(vectors)]
        if left is not None:
            self.at[-1] = self.at[-1][0], e.below(left)
        self.zeros = [ir.Constant(e.vec, [0.0] * e.lanes)] * vectors

    def row(self, p: Any, r: Any = None, stride: Any = None) -> list[V]:
        """The vectors of row r."""
        if r is not None:
            p = self.b.gep(p, [self.b.mul(r, stride)])
        return [self.e.get(p, *at) for at in self.at]

    def put(self, vs: list[V], p: Any, r: Any = None, stride: Any = None, put: Callable | None = None) -> None:
        if r is not None:
            p = self.b.gep(p, [self.b.mul(r, stride)])
        for v, at in zip(vs, self.at):
            (put or self.e.put)(v, p, *at)

    def row_or(self, default: float, p: Any, there: Any) -> list[V]:
        """A row that is read if ``there`` is not 0, and is ``default`` otherwise."""
        b, e = self.b, self.e
        live = e.splat(b.icmp_signed("!=", there, word(0)))
        other = ir.Constant(e.vec, [default] * e.lanes)
        masks = [(k, live if mask is None else b.and_(live, mask)) for k, mask in self.at]
        return [V(b, b.select(live, e.get(p, *at).v, other)) for at in masks]

    def splat(self, x: Any) -> V:
        """A number in all lanes; a count is converted."""
        if x.type == WORD:
            x = self.b.sitofp(x, self.e.element)
        return V(self.b, self.e.splat(x))

    def over(self, x: V, count: Any) -> V:
        """x / count, as a rounded product with the reciprocal: the compiler would divide differently in blocks of other widths."""
        one = ir.Constant(self.e.element, 1.0)
        share = self.splat(self.b.fdiv(one, self.b.sitofp(count, self.e.element)))
        product = self.b.fmul(x.v, share.v, flags=("nsz",))
        # AArch64's last passes would make one instruction of it and a sum, in some blocks
        fence = self.e.fn(f"llvm.arithmetic.fence.v{self.e.lanes}f{8 * self.e.size}", self.e.vec, self.e.vec)
        return V(self.b, self.b.call(fence, [product]))

    def wrapped(self, vs: list[Any]) -> list[V]:
        return [V(self.b, v) for v in vs]

    def smaller(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)


def by_columns(e: Lanes, n: Any, visit: Callable[[Block], None]) -> None:
    """``visit`` all of n columns: blocks of WIDE vectors, then the rest, whose partial vector is separate where masks cost."""
    b = e.b
    whole, rest = b.and_(n, word(-WIDE * e.lanes)), b.and_(n, word(e.lanes - 1))
    left = b.sub(n, whole)

    def several(i: Any, carried: list) -> list:
        visit(Block(e, i, None, WIDE))
        return carried

    counting(b, word(0), whole, WIDE * e.lanes, [], several)
    if e.target.free_masks:
        vectors = b.sdiv(b.add(left, word(e.lanes - 1)), word(e.lanes))
        for k in range(1, WIDE + 1):
            with b.if_then(b.icmp_signed("==", vectors, word(k))):
                visit(Block(e, whole, b.sub(left, word((k - 1) * e.lanes)), k))
        return
    for k in range(1, WIDE):
        with b.if_then(b.icmp_signed("==", b.sdiv(left, word(e.lanes)), word(k))):
            visit(Block(e, whole, None, k))
    with b.if_then(b.icmp_signed(">", rest, word(0))):
        visit(Block(e, b.sub(n, rest), rest, 1))


def by_blocks(e: Lanes, n: Any, rows: Any, visit: Callable[[Block, Any, Any], None]) -> None:
    """``visit(columns, first row, number of rows)`` in blocks of rows, each for all columns while it is in cache; at least once."""
    b = e.b

    def block_of_rows(start: Any, carried: list) -> list:
        left = b.sub(rows, start)
        count = b.select(b.icmp_signed("<", left, word(BLOCK)), left, word(BLOCK))
        by_columns(e, n, lambda block: visit(block, start, count))
        return carried

    some = b.select(b.icmp_signed(">", rows, word(1)), rows, word(1))
    counting(b, word(0), some, BLOCK, [], block_of_rows)


def rows_of(formula: Callable, reads: int, columns: str, prepare: Callable, params: str = "") -> Any:
    """A loop ``f(n, rows, stride, xs..., y, columns..., params...)``: y[r,i] = formula(xs[r,i]..., *prepare(columns[i]..., params...)).

    columns : one letter each: ``v``, or ``0`` or ``1`` for an operand that may be left out and then has this value; a further
        argument after it says whether it is given.  y may be one of the xs.
    """

    def emit(e: Lanes, n: Any, rows: Any, stride: Any, *args: Any) -> None:
        xs, y, rest = args[:reads], args[reads], list(args[reads + 1 :])

        def visit(block: Block, start: Any, count: Any) -> None:
            given = iter(rest)
            found = [
                block.row(next(given)) if kind == "v" else block.row_or(float(kind), next(given), next(given))
                for kind in columns
            ]
            numbers = [block.splat(p) for p in given]
            held = [prepare(*column, *numbers) for column in zip(*found)]

            def row(r: Any, carried: list) -> list:
                values = zip(*(block.row(x, r, stride) for x in xs))
                block.put([formula(*v, *h) for v, h in zip(values, held)], y, r, stride)
                return carried

            counting(e.b, start, e.b.add(start, count), 1, [], row)

        by_blocks(e, n, rows, visit)

    return loop_of("ii" + "p" * (reads + 1) + "".join("p" if kind == "v" else "pi" for kind in columns) + params, emit)


def _block_sums(block: Block, count: Any, terms: Callable, k: int) -> list[list[V]]:
    """The sums of each of k terms over ``count`` rows; ``terms(r)`` : the terms of row r, per vector."""
    b, nv = block.b, block.vectors
    ways = max(IN_FLIGHT // nv & -2, 1)

    def take(r: Any, acc: list) -> list:
        per_vector = list(zip(*terms(r)))
        return [add(V(b, a)).v for a, add in zip(acc, [t for term in per_vector for t in term])]

    def several(r: Any, acc: list) -> list:
        out = []
        for w in range(ways):
            out += take(b.add(r, word(w)), acc[w * k * nv : (w + 1) * k * nv])
        return out

    whole = b.and_(count, word(-ways))
    acc = counting(b, word(0), whole, ways, block.zeros * (k * ways), several)
    if ways > 1:
        acc[: k * nv] = counting(b, whole, count, 1, acc[: k * nv], take)
    sums = [block.wrapped(acc[w * k * nv : (w + 1) * k * nv]) for w in range(ways)]
    while len(sums) > 1:
        sums = [[x + y for x, y in zip(*pair)] for pair in zip(sums[::2], sums[1::2])]
    return [sums[0][t * nv : (t + 1) * nv] for t in range(k)]


def _sums_so_far(block: Block, start: Any, places: tuple) -> list[list[V]]:
    """The sums stored at these places so far; 0 before the first row."""
    b = block.b
    begun = b.icmp_signed(">", start, word(0))
    return [[V(b, b.select(begun, v.v, zero)) for v, zero in zip(block.row(p), block.zeros)] for p in places]


def _moments(e: Lanes, n: Any, rows: Any, stride: Any, x: Any, mean: Any, m2: Any) -> None:
    b = e.b

    def visit(block: Block, start: Any, count: Any) -> None:
        origin = b.gep(x, [b.mul(start, stride)])
        first, from_ = block.row(x), block.row(origin)

        def terms(r: Any) -> list:
            off = [v - k for v, k in zip(block.row(origin, r, stride), from_)]
            return [(partial(_plus, d), partial(fma, d, d)) for d in off]

        s, q = _block_sums(block, count, terms, 2)
        share = block.over(block.splat(count), b.add(start, count))
        pairs = block.splat(start) * share
        out_mean, out_m2 = [], []
        for v, (mu, m) in enumerate(zip(*_sums_so_far(block, start, (mean, m2)))):
            mean_b = block.over(s[v], count)
            m2_b = maximum(fma(-s[v], mean_b, q[v]), 0.0)
            delta = (from_[v] - first[v]) + (mean_b - mu)
            out_mean.append(fma(delta, share, mu))
            out_m2.append(fma(delta * delta, pairs, m + m2_b))
        block.put(out_mean, mean)
        block.put(out_m2, m2)

    by_blocks(e, n, rows, visit)


def _plus(x: V, y: V) -> V:
    return y + x


# moments(n, rows, stride, x, mean, m2): per column, the mean less its first element, and the sum of squares about the mean.
# Each block subtracts its own first row.  That row's square is at most the block's sum, so only rounding errors cancel.
moments = loop_of("iippp", _moments)


def _products(e: Lanes, n: Any, rows: Any, stride: Any, dy: Any, x: Any, mean: Any, g: Any, s: Any) -> None:
    def visit(block: Block, start: Any, count: Any) -> None:
        means = block.row(mean)
        xs, ds = (e.b.gep(p, [e.b.mul(start, stride)]) for p in (x, dy))

        def terms(r: Any) -> list:
            rows_ = zip(block.row(xs, r, stride), block.row(ds, r, stride), means)
            return [(partial(fma, d, v - m), partial(_plus, d)) for v, d, m in rows_]

        sums = _block_sums(block, count, terms, 2)
        for old, new, place in zip(_sums_so_far(block, start, (g, s)), sums, (g, s)):
            block.put([x + y for x, y in zip(old, new)], place)

    by_blocks(e, n, rows, visit)


# products(n, rows, stride, dy, x, mean, g, s): per column, g = sum dy*(x - mean) and s = sum dy.
products = loop_of("iippppp", _products)


def _joined_moments(e: Lanes, n: Any, rows: Any, stride: Any, chunk: Any, x: Any, parts: Any, *rest: Any) -> None:
    b = e.b
    mean, inv, running_mean, running_var, eps, momentum = rest
    of_a_chunk = b.mul(stride, word(2))

    def visit(block: Block) -> None:
        first = block.row(x)

        def over(body: Callable) -> list:
            def one(start: Any, state: list) -> list:
                p = b.gep(parts, [b.mul(b.sdiv(start, chunk), of_a_chunk)])
                off = block.row(b.gep(x, [b.mul(start, stride)]))
                means = [(o - f) + m for o, f, m in zip(off, first, block.row(p))]
                count = block.splat(block.smaller(chunk, b.sub(rows, start)))
                return [v.v for v in body(count, means, p, block.wrapped(state))]

            return block.wrapped(_for_by(b, rows, chunk, block.zeros, one))

        sums = over(lambda count, means, p, state: [fma(count, m, s) for m, s in zip(means, state)])
        mu = [block.over(s, rows) for s in sums]

        def squares(count: V, means: list, p: Any, state: list) -> list:
            m2s = block.row(b.gep(p, [stride]))
            return [fma(count * (m - u), m - u, s + m2) for m, u, s, m2 in zip(means, mu, state, m2s)]

        m2 = over(squares)
        freedom = b.sub(rows, b.zext(b.icmp_signed(">", rows, word(1)), WORD))
        means = [f + u for f, u in zip(first, mu)]
        block.put(means, mean)
        invs = [1 / (block.over(s, rows) + block.splat(eps)).call("sqrt") for s in m2]
        block.put(invs, inv)
        some = b.select(
            b.icmp_signed(">", rows, word(1)), momentum, ir.Constant(e.element, 0.0)
        )  # one value has no variance
        variances = [block.over(s, freedom) for s in m2]
        for running, new, by in ((running_mean, means, momentum), (running_var, variances, some)):
            by, olds = block.splat(by), block.row(running)
            known = [(a > 0) & (a < MOST_INV) for a in invs]
            block.put([fma(by, v - r, r).where(k, r) for v, r, k in zip(new, olds, known)], running)

    by_columns(e, n, visit)


def _for_by(b: Any, stop: Any, step: Any, carried: list, body: Callable) -> list:
    """`counting` from 0 with a step that is not a constant."""
    times = b.sdiv(b.sub(b.add(stop, step), word(1)), step)
    return counting(b, word(0), times, 1, carried, lambda k, state: body(b.mul(k, step), state))


# Joins the moments of the chunks of rows, and updates the running statistics of columns that are in range:
# joined_moments(n, rows, stride, chunk, x, parts, mean, inv, running_mean, running_var, eps, momentum).
joined_moments = loop_of("iiippppppff", _joined_moments)


def vector_slopes(slopes: bool, sums: bool) -> Any:
    """A loop ``f(n, rows, stride, of, dy, x, w, there, dx, total, all)``; ``of`` has the numbers m, a, p, q of each row.

    slopes : dx = (dy*w + (x - m)*p)*a + q; w is 1 if it is left out.  sums : total += sum dy*(x - m)*a, and n elements further += sum dy.
    all : elements of the dx that these rows are part of.  A large dx is stored past the caches: 4096x1024 in 1.0 instead of 1.9 ms (Zen 5).
    """

    def emit(
        e: Lanes, n: Any, rows: Any, stride: Any, of: Any, dy: Any, x: Any, w: Any, there: Any, dx: Any, total: Any,
        all_: Any,
    ) -> None:  # fmt: skip
        b = e.b
        aligned = b.icmp_signed("==", b.and_(stride, word(e.lanes - 1)), word(0))
        streamed = b.and_(aligned, past_caches(e, all_, [dy, x], [dx], STREAMED // 2))

        def visit(block: Block) -> None:
            if slopes and e.target.streams and block.whole:
                with b.if_else(streamed) as (past, plain):
                    with past:
                        of_block(block, e.stream)
                    with plain:
                        of_block(block, e.put)
            else:
                of_block(block, e.put)

        def of_block(block: Block, put: Callable) -> None:
            ws = block.row_or(1.0, w, there)
            places = [total, b.gep(total, [n])] if sums else []

            def row(r: Any, state: list) -> list:
                m, a, p, q = (block.splat(b.load(b.gep(of, [b.add(b.mul(r, word(4)), word(k))]))) for k in range(4))
                off = [v - m for v in block.row(x, r, stride)]
                ds = block.row(dy, r, stride)
                if slopes:
                    block.put([fma(fma(o, p, d * s), a, q) for d, s, o in zip(ds, ws, off)], dx, r, stride, put)
                olds = block.wrapped(state)
                new = [fma(d, o * a, g) for d, o, g in zip(ds, off, olds)]
                return [v.v for v in new + [s + d for s, d in zip(olds[block.vectors :], ds)]][: len(state)]

            state = counting(b, word(0), rows, 1, [v.v for p in places for v in block.row(p)], row)
            for k, p in enumerate(places):
                block.put(block.wrapped(state[k * block.vectors : (k + 1) * block.vectors]), p)

        by_columns(e, n, visit)
        if slopes and e.target.streams:
            with b.if_then(streamed):
                e.streamed()

    return loop_of("iipppp" + "ippi", emit)
