"""Vector IR: an emitter of the target's vectors, and GEMM's micro-kernels.

Kernels that LLVM's vectoriser would not find (accumulators in registers, broadcasts, masked tails, transposes) are
written here as vector IR, generic in the element type.  Each is emitted once per module, as an internal function that
jitted code calls (``native``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from calcvm.kernels_cpu._common import I32, WORD
from calcvm.kernels_cpu._target import Target
from calcvm.kernels_cpu._vectors import Vectors, emitted, phi, word


class Emit(Vectors):
    """Vectors, with the operations on them and on pointers that micro-kernels need."""

    @property
    def zero(self) -> Any:
        return ir.Constant(self.vec, [0.0] * self.lanes)

    def at(self, p: Any, off: Any = None, plus: int = 0) -> Any:
        """The pointer ``off + plus`` elements past ``p``."""
        if off is not None:
            p = self.b.gep(p, [off])
        return self.b.gep(p, [word(plus)]) if plus else p

    def smaller(self, i: int, top: Any) -> Any:
        """min(i, top)"""
        return self.b.select(self.b.icmp_signed("<", word(i), top), word(i), top) if i else word(0)

    def low(self, v: Any) -> Any:
        """The first lanes of a wider vector; other vectors unchanged."""
        return v if v.type == self.vec else self.b.shuffle_vector(v, v, self.indices(range(self.lanes)))

    def opaque(self, p: Any, register: str = "r") -> Any:
        """The pointer, opaque to the compiler, which would otherwise derive it from others in every iteration."""
        return self.b.asm(ir.FunctionType(p.type, [p.type]), "", f"={register},0", [p], side_effect=False)

    def prefetch(self, p: Any, level: int = 3) -> None:
        """Prefetch the cache line at ``p`` (3: into L1, 2: into L2); never faults."""
        p = self.b.bitcast(p, ir.IntType(8).as_pointer())
        f = self.fn("llvm.prefetch.p0", ir.VoidType(), p.type, I32, I32, I32)
        self.b.call(f, [p, *(ir.Constant(I32, v) for v in (0, level, 1))])

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """One rounding if the target has FMA, two otherwise; never a library call."""
        f = self.fn(f"llvm.fmuladd.v{self.lanes}{self.element.intrinsic_name}", self.vec, self.vec, self.vec, self.vec)
        return self.b.call(f, [x, y, z])


def native(name: str | Callable[[Target], str], signature: str, emit: Callable) -> Any:
    """An intrinsic that calls a function emitted once per module, see `emitted`."""

    def small(e: Emit, *args: Any) -> None:
        e.b.function.attributes.add("optsize")  # no unrolling
        emit(e, *args)

    return emitted(Emit, signature, small, name=name)


class Tiles(NamedTuple):
    """The tiles of a panel on one target.

    heights : (rows of a tile, the fewest rows left for which it is used), tallest first; the last is for 1.
    vectors : vectors of a tile's columns.
    masked : the last vector has ``rem`` live lanes.
    half : the last vector is half as wide.
    """

    heights: tuple[tuple[int, int], ...]
    vectors: int
    masked: bool
    half: bool = False

    @property
    def name(self) -> str:
        return f"{self.vectors}{'h' if self.half else ''}{'m' if self.masked else ''}"


def _panel(tiles: Callable[[Target], Tiles], name: str, kinds: str, products: Callable) -> Any:
    """C[:m, vectors] = init + A B, in tiles of rows held in registers.

    Rows past the end repeat the last: they compute and store the same bits, so one tile serves every remainder.
    Mode 0 starts from zero, mode 1 from init.  ``products(tile, *own)`` computes a tile's sums from further arguments, of
    these kinds; see `Tile`.
    """

    def emit(e, m, *args):  # type: ignore[no-untyped-def]
        (*own, c, crs, init, irs, mode, rem), (heights, nv, masked, half) = args, tiles(e.target)
        b = e.b
        last = Emit(b, e.element, e.target, e.lanes // 2) if half else e
        parts = [(e, None)] * (nv - 1) + [(last, last.lanes_below(rem) if masked else None)]
        fresh = b.icmp_signed("==", mode, word(0))
        add = b.not_(fresh)

        def tile(t, c, init):  # type: ignore[no-untyped-def]
            def each(base, stride, visit):  # type: ignore[no-untyped-def]
                for i, p in enumerate(t.pointers(base, stride)):
                    for j in range(nv):
                        visit(i * nv + j, e.at(p, None, j * e.lanes), *parts[j])

            with b.if_then(add):
                each(init, irs, lambda k, p, e, mask: e.prefetch(p))
            out = products(t, *own)
            with b.if_else(fresh) as (set_, sum_):
                with set_:
                    each(c, crs, lambda k, p, e, mask: e.store(out[k], p, mask))
                with sum_:
                    sums = list(out)

                    def add_init(k, p, e, mask):  # type: ignore[no-untyped-def]
                        sums[k] = b.fadd(out[k], e.load(p, mask))

                    each(init, irs, add_init)
                    each(c, crs, lambda k, p, e, mask: e.store(sums[k], p, mask))

        by_heights(e, m, heights, parts, lambda t: tile(t, *t.begins((c, crs), (init, irs))))

    return native(lambda target: f"{name}_{tiles(target).name}", f"i{kinds}pipiii", emit)


class Tile:
    """A tile of ``mr`` rows from row ``i`` on, of which ``left`` are left (at least mr where ``exact``).

    parts : the emitter and the mask of each vector of a row.
    """

    def __init__(self, e: Emit, mr: int, exact: bool, i: Any, left: Any, parts: list[tuple[Emit, Any]]):
        self.e, self.mr, self.exact, self.i, self.parts = e, mr, exact, i, parts
        self.live = [None if exact else e.b.icmp_signed("<", word(r), left) for r in range(1, mr)]

    def pointers(self, base: Any, stride: Any) -> list[Any]:
        """Pointers to its rows, which begin at ``base``."""
        found = [base]
        for more in self.live:
            found.append(self.e.at(found[-1], self.e.b.select(more, stride, word(0)) if more else stride))
        return found

    def begins(self, *walks: tuple[Any, Any]) -> list[Any]:
        """Pointers to its first row in arrays with the given strides."""
        return [self.e.at(p, self.e.b.mul(self.i, stride)) for p, stride in walks]

    def loop(self, n: Any, starts: list[Any], sums: list[Any], step: Callable) -> tuple[list[Any], list[Any]]:
        """Places and sums after n steps of ``step(places, sums)``, which returns the next ones."""
        b, before = self.e.b, [*starts, *sums]
        head, loop, done = b.block, b.append_basic_block("k"), b.append_basic_block("done")
        b.cbranch(b.icmp_signed(">", n, word(0)), loop, done)
        b.position_at_end(loop)
        left = phi(b, WORD, (n, head))
        now = [phi(b, v.type, (v, head)) for v in before]
        places, added = step(now[: len(starts)], now[len(starts) :])
        after, rest = [*places, *added], b.sub(left, word(1))
        for p, v in zip((left, *now), (rest, *after)):
            p.add_incoming(v, b.block)
        b.cbranch(b.icmp_signed("==", rest, word(0)), done, loop)
        end = b.block
        b.position_at_end(done)
        out = [phi(b, v.type, (v, head), (w, end)) for v, w in zip(before, after)]
        return out[: len(starts)], out[len(starts) :]

    def multiplied(self, rows: list[Any], bp: Any, acc: list[Any]) -> list[Any]:
        """The sums plus the products of an element of each row with a row of B."""
        e, nv = self.e, len(self.parts)
        bv, av = self.vectors(bp), [e.splat(e.b.load(p, align=e.size)) for p in rows]
        if self.parts[-1][0] is not e:
            av = [e.opaque(v, "v") for v in av]  # else each iteration would widen it from its first lanes
        return [
            of.fma(of.low(av[i]), bv[j], acc[i * nv + j])
            for i in range(self.mr)
            for j, (of, _) in enumerate(self.parts)
        ]

    def vectors(self, p: Any) -> list[Any]:
        """The vectors of a row that begins at a pointer."""
        return [e.load(e.at(p, None, j * self.e.lanes), mask) for j, (e, mask) in enumerate(self.parts)]

    @property
    def zeros(self) -> list[Any]:
        return [e.zero for e, _ in self.parts] * self.mr


def by_heights(
    e: Emit, m: Any, heights: Iterable[tuple[int, int]], parts: list[tuple[Emit, Any]], visit: Callable[[Tile], None]
) -> None:
    """``visit(tile)`` over m rows, in tiles of these heights (see `Tiles`)."""
    b, at_row = e.b, cgutils.alloca_once(e.b, WORD)
    b.store(word(0), at_row)
    for mr, least in heights:
        test, body, end = (b.append_basic_block(x) for x in ("rows", "tile", "end"))
        b.branch(test)
        b.position_at_end(test)
        i = b.load(at_row)
        left = b.sub(m, i)
        b.cbranch(b.icmp_signed(">=", left, word(least)), body, end)
        b.position_at_end(body)
        visit(Tile(e, mr, mr == least, i, left, parts))
        b.store(b.add(i, word(mr)), at_row)
        b.branch(test)
        b.position_at_end(end)


def panel(tiles: Callable[[Target], Tiles], columns: bool = False) -> Any:
    """C[:m, vectors] = init + sum_k A[i*ars + k*acs] * B[k*brs + j] (`_panel`).

    Tall tiles prefetch ``ahead``, columns of m rows that are ``ahead_cs`` apart; each tile prefetches its own rows.
    """

    def products(t, k, a, ars, acs, b_start, brs, ahead, ahead_cs):  # type: ignore[no-untyped-def]
        e, mr = t.e, t.mr
        ars = word(1) if columns else ars
        a, ahead = t.begins((a, ars), (ahead, word(1)))
        every = mr if columns else 3 if t.exact else 1  # rows that share a moving pointer
        starts = [e.opaque(p) for p in t.pointers(a, ars)[::every]]
        tall = len(t.parts) * mr > 16

        def step(places, acc):  # type: ignore[no-untyped-def]
            bp, *moving = places
            rows = [e.at(moving[i // every], e.b.mul(ars, word(i % every)) if i % every else None) for i in range(mr)]
            new = t.multiplied(rows, bp, acc)
            for i in (0, mr - 1) if tall else ():
                e.prefetch(e.at(moving[-1], None, i), 2)
            strides = [brs, *(acs for _ in starts), *([ahead_cs] if tall else [])]
            return [e.at(p, stride) for p, stride in zip(places, strides)], new

        return t.loop(k, [b_start, *starts, *([ahead] if tall else [])], t.zeros, step)[1]

    return _panel(tiles, f"gemm{'_c' if columns else ''}", "ipiipipi", products)


def taps(tiles: Callable[[Target], Tiles]) -> Any:
    """C[:m, vectors] = init + sum_t,c A_ti[c] * B[(t*k + c)*brs + j]; row i of tap t begins at the address table[t*ts + i]."""

    def products(t, n, k, table, ts, _, b_start, brs):  # type: ignore[no-untyped-def]
        e, b = t.e, t.e.b

        def tap(places, acc):  # type: ignore[no-untyped-def]
            place, bp = places
            rows = [b.inttoptr(b.load(p), b_start.type) for p in t.pointers(place, word(1))]

            def step(within, acc):  # type: ignore[no-untyped-def]
                bp, c = within
                return [e.at(bp, brs), b.add(c, word(1))], t.multiplied([b.gep(row, [c]) for row in rows], bp, acc)

            (bp, _), acc = t.loop(k, [bp, word(0)], acc, step)
            return [e.at(place, ts), bp], acc

        (table,) = t.begins((table, word(1)))
        return t.loop(n, [table, b_start], t.zeros, tap)[1]

    return _panel(tiles, "taps", "iitiipi", products)


def gather(tiles: Callable[[Target], Tiles]) -> Any:
    """C[:m, vectors] = init + sum_p A_p[off + i] * B[p*brs + j]; A_p begins at the address table[p]."""

    def products(t, n, table, off, _, b_start, brs):  # type: ignore[no-untyped-def]
        e, b = t.e, t.e.b
        places = [b.add(off, t.i)]
        for more in t.live:
            places.append(b.add(places[-1], b.zext(more, WORD) if more else word(1)))

        def step(moving, acc):  # type: ignore[no-untyped-def]
            place, bp = moving
            a = b.inttoptr(b.load(place), b_start.type)
            first = b.gep(a, [places[0]])
            rows = [e.at(first, None, i) if t.exact else b.gep(a, [at]) for i, at in enumerate(places)]
            return [e.at(place, word(1)), e.at(bp, brs)], t.multiplied(rows, bp, acc)

        return t.loop(n, [table, b_start], t.zeros, step)[1]

    return _panel(tiles, "gather", "itiipi", products)


def slides(tiles: Callable[[Target], Tiles]) -> Any:
    """C[:m, vectors] = init + sum_t,k A[i*ars + t*ats + k*acs] * B_t[k*bks + off + j]; B_t begins at the address table[t]."""

    def products(t, n, k, a, ars, ats, acs, table, off, like, bks):  # type: ignore[no-untyped-def]
        e, b = t.e, t.e.b
        (a,) = t.begins((a, ars))
        starts = t.pointers(a, ars)

        def tap(places, acc):  # type: ignore[no-untyped-def]
            place, *rows = places
            bp = e.at(b.inttoptr(b.load(place), like.type), off)

            def step(within, acc):  # type: ignore[no-untyped-def]
                bp, *now = within
                return [e.at(bp, bks), *(e.at(p, acs) for p in now)], t.multiplied(now, bp, acc)

            _, acc = t.loop(k, [bp, *rows], acc, step)
            return [e.at(place, word(1)), *(e.at(p, ats) for p in rows)], acc

        return t.loop(n, [table, *starts], t.zeros, tap)[1]

    return _panel(tiles, "slides", "iipiiitipi", products)


def lanewise(tiles: Callable[[Target], Tiles]) -> Any:
    """C[:m, vectors] = init + sum_k A_ik[off + j] * B[k*brs + j], by elements; A_ik begins at the address table[i*rs + k*ks]."""

    def products(t, n, table, rs, ks, off, b_start, brs):  # type: ignore[no-untyped-def]
        e, b = t.e, t.e.b

        def step(places, acc):  # type: ignore[no-untyped-def]
            place, bp = places
            rows = [e.at(b.inttoptr(b.load(p), b_start.type), off) for p in t.pointers(place, rs)]
            bv, av = t.vectors(bp), [t.vectors(row) for row in rows]
            new = [
                e.fma(x, y, acc[i * len(bv) + j]) for i, row in enumerate(av) for j, (x, y) in enumerate(zip(row, bv))
            ]
            return [e.at(place, ks), e.at(bp, brs)], new

        (table,) = t.begins((table, rs))
        return t.loop(n, [table, b_start], t.zeros, step)[1]

    return _panel(tiles, "lanewise", "itiiipi", products)


def pack_rows(tiles: Callable[[Target], Tiles]) -> Any:
    """dst[k, a tile's vectors] = src[k*rs + j]; the last vector has ``rem`` live lanes, the others read as zero."""

    def emit(e, k, src, rs, dst, rem):  # type: ignore[no-untyped-def]
        _, nv, masked, _ = tiles(e.target)
        mask = e.lanes_below(rem) if masked else None
        with cgutils.for_range(e.b, k) as loop:
            p, q = e.at(src, e.b.mul(loop.index, rs)), e.at(dst, e.b.mul(loop.index, word(nv * e.lanes)))
            for j in range(nv):
                e.store(e.load(e.at(p, None, j * e.lanes), mask if j == nv - 1 else None), e.at(q, None, j * e.lanes))

    return native("gemm_pack", "ipipi", emit)


def unfold() -> Any:
    """dst[p*to + t*width + e] = src[t*pitch + p*step + e] for p < m, t < n, e < width, in whole vectors: up to a
    vector past a row of dst is overwritten.
    """

    def emit(e, m, n, width, src, pitch, step, dst, to):  # type: ignore[no-untyped-def]
        b, e = e.b, Emit(e.b, e.element, e.target, max(e.lanes // 2, 4))
        with cgutils.for_range(b, m) as pixel, cgutils.for_range(b, n) as tap:
            p = e.at(e.at(src, b.mul(tap.index, pitch)), b.mul(pixel.index, step))
            q = e.at(e.at(dst, b.mul(pixel.index, to)), b.mul(tap.index, width))
            with cgutils.for_range_slice(b, word(0), width, word(e.lanes)) as (i, _):
                e.store(e.load(e.at(p, i)), e.at(q, i))

    return native("unfold", "iiipiipi", emit)


def thin() -> Any:
    """C[:m, n] = init + sum_k A[i + k*acs] * B[k*brs + j] for 1 <= n <= 4, A column-major; vectors hold rows of C."""

    def emit(e, m, n, k, a, acs, b_start, brs, c, crs, init, irs, mode):  # type: ignore[no-untyped-def]
        b, lanes, four = e.b, e.lanes, Emit(e.b, e.element, e.target, 4)
        fresh = b.icmp_signed("==", mode, word(0))
        mask = four.lanes_below(n)
        init_mask = four.lanes_below(b.select(fresh, word(0), n))
        columns = [e.smaller(j, b.sub(n, word(1))) for j in range(4)]
        sums = [cgutils.alloca_once_value(b, e.zero) for _ in range(8)]
        rows = cgutils.alloca_once(b, e.vec, 8)
        with cgutils.for_range_slice(b, word(0), m, word(2 * lanes)) as (i, _):
            left = b.sub(m, i)
            masks = [e.lanes_below(b.sub(left, word(v * lanes))) for v in range(2)]
            for s in sums:
                b.store(e.zero, s)
            with cgutils.for_range(b, k) as loop:
                p, q = e.at(e.at(a, i), b.mul(loop.index, acs)), e.at(b_start, b.mul(loop.index, brs))
                av = [e.load(e.at(p, None, v * lanes), masks[v]) for v in range(2)]
                for j, column in enumerate(columns):
                    x = e.splat(b.load(e.at(q, column), align=e.size))
                    for v in range(2):
                        s = sums[4 * v + j]
                        b.store(e.fma(av[v], x, b.load(s)), s)
            for v in range(2):  # four vectors of rows become rows of four
                x = [b.load(s) for s in sums[4 * v : 4 * v + 4]]
                for q in range(4):
                    pairs = [lanes // 2 * (q // 2) + t // 2 + lanes * (t % 2) for t in range(lanes)]
                    fours = [lanes // 2 * (q % 2) + t // 4 * 2 + t % 2 + lanes * (t % 4 // 2) for t in range(lanes)]
                    x01, x23 = (b.shuffle_vector(x[t], x[t + 1], e.indices(pairs)) for t in (0, 2))
                    b.store(b.shuffle_vector(x01, x23, e.indices(fours)), b.gep(rows, [word(4 * v + q)]))
            found = b.bitcast(rows, a.type)
            with cgutils.for_range(
                b, b.select(b.icmp_signed("<", left, word(2 * lanes)), left, word(2 * lanes))
            ) as loop:
                row = b.add(i, loop.index)
                x = four.load(e.at(found, b.mul(loop.index, word(4))))
                y = b.fadd(x, four.load(e.at(init, b.mul(row, irs)), init_mask))
                four.store(b.select(fresh, x, y), e.at(c, b.mul(row, crs)), mask)

    return native("gemm_thin", "iiipipipipii", emit)


def pack_columns(width: int) -> Any:
    """dst[p*width + i] = src[p*cs + i] for i < n <= width and p < k; past n it is zero where masks are free."""

    def emit(e, n, k, src, cs, dst):  # type: ignore[no-untyped-def]
        at = range(0, width, e.lanes)
        masks = [e.lanes_below(e.b.sub(n, word(x))) if e.target.free_masks else None for x in at]
        with cgutils.for_range(e.b, k) as loop:
            p, q = e.at(src, e.b.mul(loop.index, cs)), e.at(dst, e.b.mul(loop.index, word(width)))
            for x, mask in zip(at, masks):
                e.store(e.load(e.at(p, None, x), mask), e.at(q, None, x))

    return native("gemm_pack_columns", "iipip", emit)


def transpose() -> Any:
    """dst[p*width + x] = src[x*cs + p] for x < n and p < k; columns past n, up to a whole vector, repeat n-1."""

    def emit(e, n, k, src, cs, dst, width):  # type: ignore[no-untyped-def]
        b, lanes = e.b, e.lanes
        last = b.sub(k, word(lanes))  # blocks of lanes x lanes elements; the last block of a column overlaps another
        fits = b.icmp_signed(">=", last, word(0))
        mask = e.lanes_below(k) if e.target.free_masks else None

        def block(here, there, left, p):  # type: ignore[no-untyped-def]
            column = e.at(here, p)
            v = [e.load(column, mask)]
            for i in range(1, lanes):
                column = e.at(column, b.select(b.icmp_signed("<", word(i), left), cs, word(0)))
                v.append(e.load(column, mask))
            s = 1
            while s < lanes:  # swap the off-diagonal s x s blocks
                low = [y if not y & s else lanes + y - s for y in range(lanes)]
                high = [y + s if not y & s else lanes + y for y in range(lanes)]
                for i in range(lanes):
                    if not i & s:
                        y, z = v[i], v[i + s]
                        v[i], v[i + s] = (b.shuffle_vector(y, z, e.indices(t)) for t in (low, high))
                s *= 2
            return v, e.at(there, b.mul(p, width))

        with cgutils.for_range_slice(b, word(0), n, word(lanes)) as (x, _):
            left = b.sub(n, x)
            here, there = e.at(src, b.mul(x, cs)), e.at(dst, x)
            with b.if_else(fits) as (blocks, rest):
                with blocks, cgutils.for_range_slice(b, word(0), k, word(lanes)) as (p, _):
                    v, row = block(here, there, left, b.select(b.icmp_signed("<", p, last), p, last))
                    for y in v:
                        e.store(y, row)
                        row = e.at(row, width)
                with rest:
                    if e.target.free_masks:
                        v, row = block(here, there, left, word(0))
                        for i, y in enumerate(v[:-1]):
                            with b.if_then(b.icmp_signed("<", word(i), k)):
                                e.store(y, row)
                            row = e.at(row, width)
                    else:
                        with cgutils.for_range(b, k) as row:
                            live = b.select(b.icmp_signed("<", left, word(lanes)), left, word(lanes))
                            with cgutils.for_range(b, live) as column:
                                p = e.at(here, b.add(b.mul(column.index, cs), row.index))
                                b.store(b.load(p), e.at(there, b.add(b.mul(row.index, width), column.index)))

    return native("gemm_transpose", "iipipi", emit)


def stack(elements: int) -> Any:
    """An intrinsic: a pointer to so many elements on the stack, of its argument's type."""

    @intrinsic
    def on_stack(tc, p):
        def codegen(ctx, b, sig, args):
            memory = cgutils.alloca_once(b, ctx.get_value_type(p.dtype), elements)
            memory.align = 64
            return memory

        return p(p), codegen

    return on_stack
