"""Recurrent cells: all steps of a worker's samples inside one row (see `calcvm.ops.recurrent`).

A tile of samples and units has the sums of all gates of its units in registers, and the cell is computed there: 6 samples x 16
units x 4 gates of an LSTM are 24 accumulators.  Samples are ordered by their lengths, the longest first: those that still run are
the first ones, and each is at its own step.

A tile of one sample alone is wider if the cell has many units: then whole lines of the weights are read in order.  50 steps of an
LSTM of 256 units take 544 us with wide tiles and 944 with narrow ones; those of 64 units take 39 with wide ones and 35 with narrow ones.

An element is one chain of products in the order of k, whatever the tile, so bits depend on neither team nor lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba.core import cgutils

from calcvm.equations.cells import OwnCell
from calcvm.formulas.cells import AHEAD, CELLS, Cell
from calcvm.kernel import words_of_cell
from calcvm.kernels_cpu._common import KERNELS, at, given, index_of, kernel_as, lanes, like, njit, share
from calcvm.kernels_cpu._formulas import V
from calcvm.kernels_cpu._gemm import gemm
from calcvm.kernels_cpu._math import column_sums, copy, fill
from calcvm.kernels_cpu._simd import Emit, Tile, by_heights, native, transpose
from calcvm.kernels_cpu._vectors import as_word, word

WIDE, MANY = 16, 128  # accumulators of one sample alone that has more units than so many
transposed = transpose()


# ---------------------------------------------------------------- tiles
def _tiles(
    e: Emit, m: Any, units: Any, vectors: int, blocks: int, visit: Callable[[Tile, Any, list[Any]], None]
) -> None:
    """``visit(tile, j, masks)`` over m rows, and units from j on in blocks of vectors, each with its mask.

    vectors : accumulators for each vector of units.  blocks : vectors of units in a tile of several rows.
    """
    b = e.b
    broad, full = max(WIDE // vectors, 1), b.and_(units, word(-e.lanes))
    height = (24 if e.target.registers == 32 else 12) // vectors

    def over(start: Any, stop: Any, n: int, rem: Any = None) -> None:
        most = height // n
        with cgutils.for_range_slice(b, start, stop, word(n * e.lanes)) as (j, _):
            masks = [None] * (n - 1) + [None if rem is None else e.lanes_below(rem)]
            heights = {most: most, max(most // 2, 1): min(most, 2), 1: 1} if most else {1: 1}
            by_heights(e, m, heights.items(), [(e, mask) for mask in masks], lambda t: visit(t, j, masks))

    def whole(start: Any, n: int) -> Any:
        stop = b.add(start, b.mul(b.udiv(b.sub(units, start), word(n * e.lanes)), word(n * e.lanes)))
        over(start, stop, n)
        return stop

    begin = cgutils.alloca_once_value(b, word(0))
    if broad > blocks:
        with b.if_then(b.and_(b.icmp_signed("==", m, word(1)), b.icmp_signed(">", units, word(MANY)))):
            b.store(whole(word(0), broad), begin)
    done = b.load(begin)
    for n in (blocks, 1) if blocks > 1 else (1,):
        done = whole(done, n)
    over(full, units, 1, b.sub(units, full))


class Rows:
    """Rows of a tile in arrays, by numbers from tables."""

    def __init__(self, t: Tile, j: Any, masks: list[Any]):
        self.t, self.e, self.j, self.masks = t, t.e, j, masks

    def numbers(self, table: Any) -> list[Any]:
        b = self.e.b
        return [as_word(b, b.load(p)) for p in self.t.pointers(self.e.at(table, self.t.i), word(1))]

    def of(self, base: Any, numbers: list[Any], stride: Any) -> list[Any]:
        return [self.e.at(base, self.e.b.mul(n, stride)) for n in numbers]

    def offset(self, gate: Any, q: int) -> Any:
        """The place of vector q of the tile's units; gate : the place of its gate in a row, or None."""
        j = self.j if gate is None else self.e.b.add(self.j, gate)
        return self.e.b.add(j, word(q * self.e.lanes))

    def load(self, p: Any, q: int, gate: Any = None) -> V:
        return V(self.e.b, self.e.load(self.e.at(p, self.offset(gate, q)), self.masks[q]))

    def store(self, v: V, p: Any, q: int, gate: Any = None) -> None:
        self.e.store(v.v, self.e.at(p, self.offset(gate, q)), self.masks[q])

    def products(self, k: Any, rows: list[Any], w: Any, stride: Any, gates: Sequence[Any], acc: list[Any]) -> list[Any]:
        """acc + the products of k elements of each row with k rows of w, ``stride`` apart; vectors by gates, then units."""
        e, b = self.e, self.e.b
        places = [(self.offset(gate, q), mask) for gate in gates for q, mask in enumerate(self.masks)]

        def step(now: list[Any], acc: list[Any]) -> tuple[list[Any], list[Any]]:
            p, i = now
            bv = [e.load(e.at(p, off), mask) for off, mask in places]
            av = [e.splat(b.load(e.at(row, i), align=e.size)) for row in rows]
            new = [e.fma(a, v, acc[r * len(bv) + c]) for r, a in enumerate(av) for c, v in enumerate(bv)]
            return [e.at(p, stride), b.add(i, word(1))], new

        return self.t.loop(k, [w, word(0)], acc, step)[1]

    def stored(self, r: int, store: Callable[[], None]) -> None:
        """Store the results of row r, if it is no repetition: rows may be updated in place."""
        if self.t.exact or r == 0:
            store()
        else:
            with self.e.b.if_then(self.t.live[r - 1]):
                store()


# ---------------------------------------------------------------- one step
def parts(e: Emit, H: Any, cell: Cell) -> list[Any]:
    """Where the parts of a row that has several numbers of each unit begin: gates, states, parameters."""
    return [e.b.mul(H, word(x)) for x in range(max(cell.gates, cell.kept, cell.others, cell.parameters))]


def _step(cell: Cell) -> Any:
    """One step of m samples.  h before begins at row ``of_h`` of hb, c before at ``of_c`` of cb, c goes to row ``to_c``.

    x, y, and z, whose rows are ``zs`` apart: row ``now``.  The sums start with z, and have the ``kx`` products of x.
    """
    g, merged, others = cell.gates, cell.gates - cell.apart, cell.others

    def emit(  # type: ignore[no-untyped-def]
        e, m, k, H, now, z, zs, x, kx, wi, w, p, bias, hb, of_h, hs, cb, of_c, cs, c, to_c, y, gates, more, keep, keep_more
    ):  # fmt: skip
        b, row, gate = e.b, e.b.mul(H, word(g)), parts(e, H, cell)

        def visit(t: Tile, j: Any, masks: list[Any]) -> None:
            a, nb = Rows(t, j, masks), len(masks)
            steps, before = a.numbers(now), a.numbers(of_h)
            xs, hs_, ys = a.of(x, steps, kx), a.of(hb, before, hs), a.of(y, steps, H)
            olds, news = a.of(cb, a.numbers(of_c), cs), a.of(c, a.numbers(to_c), b.mul(H, word(others)))
            kept, mores = a.of(gates, steps, b.mul(H, word(cell.kept))), a.of(more, steps, b.mul(H, word(cell.apart)))
            of_units = [[a.load(p, q, gate[x]) for x in range(cell.parameters)] for q in range(nb)]
            each = [(i, q) for i in range(g) for q in range(nb)]
            of_x = a.products(kx, xs, wi, row, gate[:g], [e.zero] * (t.mr * len(each)))
            starts = [a.load(zr, q, gate[i]).v for zr in a.of(z, steps, zs) for i, q in each]
            of_x = [b.fadd(v, start) for v, start in zip(of_x, starts)]
            fixed = [a.load(bias, q, gate[i]).v for i, q in each] * t.mr
            acc = [v if n % (g * nb) >= merged * nb else b.fadd(of_x[n], v) for n, v in enumerate(fixed)]
            acc = a.products(k, hs_, w, row, gate[:g], acc)
            for r in range(t.mr):
                for q in range(nb):
                    sums = [V(b, acc[(r * g + i) * nb + q]) for i in range(g)]
                    of_z = [*sums[:merged], *(V(b, of_x[(r * g + i) * nb + q]) for i in range(merged, g))]
                    states = [a.load(hs_[r], q), *(a.load(olds[r], q, gate[x]) for x in range(others))]
                    to_gates, to_more, after = cell.forward(of_z, sums[merged:], states + of_units[q])

                    def store(r=r, q=q, to_gates=to_gates, to_more=to_more, after=after):  # type: ignore[no-untyped-def]
                        a.store(after[0], ys[r], q)
                        for x, v in enumerate(after[1:]):
                            a.store(v, news[r], q, gate[x])
                        for flag, to, new in ((keep, kept[r], to_gates), (keep_more, mores[r], to_more)):
                            if new:
                                with b.if_then(b.icmp_signed("!=", flag, word(0))):
                                    for x, v in enumerate(new):
                                        a.store(v, to, q, gate[x])

                    a.stored(r, store)

        _tiles(e, m, H, g + cell.apart, max(4 // g, 1), visit)

    return native(f"{cell.name}_step", "iiitpipippppptiptiptpppii", emit)


def _step_back(cell: Cell) -> Any:
    """The gradients of one step of m samples, from those of the next one, dnext and mnext; ``only``: of h before the first step."""
    g, merged, apart, others = cell.gates, cell.gates - cell.apart, cell.apart, cell.others

    def emit(  # type: ignore[no-untyped-def]
        e, m, run, H, now, who, dnext, mnext, wt, ws, p, dy, dys, hb, of_h, hs, cb, of_c, cs, y, c, gates, more, dh, dc, dz, dmore, dp,
        dh0, only,
    ):  # fmt: skip
        b, row, rest, gate = e.b, e.b.mul(H, word(g)), e.b.mul(H, word(apart)), parts(e, H, cell)
        of_c_row, of_p_row = b.mul(H, word(others)), b.mul(H, word(cell.parameters))
        k, ka = (b.mul(run, b.mul(H, word(n))) for n in (merged, apart))

        def visit(t: Tile, j: Any, masks: list[Any]) -> None:
            a, nb = Rows(t, j, masks), len(masks)
            steps, samples = a.numbers(now), a.numbers(who)
            ds, dhs, dcs = a.of(dy, steps, dys), a.of(dh, samples, H), a.of(dc, samples, of_c_row)
            acc = [b.fadd(a.load(own, q).v, a.load(d, q).v) for own, d in zip(dhs, ds) for q in range(nb)]
            acc = a.products(k, a.of(dnext, steps, row), wt, ws, [None], acc)
            if apart:
                acc = a.products(
                    ka, a.of(mnext, steps, rest), e.at(wt, b.mul(b.mul(H, word(merged)), ws)), ws, [None], acc
                )
            firsts = a.of(dh0, samples, H)

            def end() -> None:
                for r in range(t.mr):
                    for q in range(nb):
                        a.store(V(b, acc[r * nb + q]), firsts[r], q)

            def inside() -> None:
                gs, ms = a.of(gates, steps, b.mul(H, word(cell.kept))), a.of(more, steps, rest)
                zs, dms, dps = a.of(dz, steps, row), a.of(dmore, steps, rest), a.of(dp, steps, of_p_row)
                ys, cs_ = a.of(y, steps, H), a.of(c, steps, of_c_row)
                hs_, olds = a.of(hb, a.numbers(of_h), hs), a.of(cb, a.numbers(of_c), cs)
                for r in range(t.mr):
                    for q in range(nb):

                        def loads(p, n, q=q):  # type: ignore[no-untyped-def]
                            return [a.load(p, q, gate[x]) for x in range(n)]

                        kept, mores = loads(gs[r], cell.kept), loads(ms[r], apart)
                        before = [a.load(hs_[r], q) if cell.reads_before else None, *loads(olds[r], others)]
                        after = [a.load(ys[r], q) if cell.reads_after else None, *loads(cs_[r], others)]
                        d = [V(b, acc[r * nb + q]), *loads(dcs[r], others)]
                        dzs, dmores, (dh_, *rests) = cell.backward(
                            kept, mores, before + loads(p, cell.parameters), after, d
                        )

                        def store(r=r, q=q, dzs=dzs, dmores=dmores, dh_=dh_, rests=rests):  # type: ignore[no-untyped-def]
                            a.store(V(b, e.zero) if dh_ is None else dh_, dhs[r], q)
                            made = (dcs[r], rests[:others]), (zs[r], dzs), (dms[r], dmores), (dps[r], rests[others:])
                            for to, values in made:
                                for x, v in enumerate(values):
                                    a.store(v, to, q, gate[x])

                        a.stored(r, store)

            with b.if_else(b.icmp_signed("!=", only, word(0))) as (last, other):
                with last:
                    end()
                with other:
                    inside()

        _tiles(e, m, H, 1, 4 if e.target.registers == 32 else 2, visit)

    return native(f"{cell.name}_step_back", "iiittpppippiptiptippppppppppi", emit)


# ---------------------------------------------------------------- samples and their lengths
@njit(inline=True)
def length_of(me, T, lengths, has, sample):
    """The steps of a sample."""
    return index_of(me, lengths[sample], T + 1) if has else T


@njit
def order_samples(me, m, lo, T, lengths, has, who, counts):
    """who : the m samples from lo on, the longest first, equal ones in order.  counts : scratch, T + 2 numbers."""
    if not has:
        for i in range(m):
            who[i] = lo + i
        return
    for t in range(T + 2):
        counts[t] = 0
    for i in range(lo, lo + m):
        counts[T - length_of(me, T, lengths, has, i) + 1] += 1
    for t in range(T + 1):
        counts[t + 1] += counts[t]
    for i in range(lo, lo + m):
        t = T - length_of(me, T, lengths, has, i)
        who[counts[t]] = i
        counts[t] += 1


@njit(inline=True)
def running_at(me, s, m, T, lengths, has, who):
    """How many of the ordered samples have a step s."""
    if has:
        while m > 0 and length_of(me, T, lengths, has, who[m - 1]) <= s:
            m -= 1
    return m if s < T else 0


@njit(inline=True)
def places(me, s, m, T, lengths, has, reverse, who, now):
    """The places of step s of m samples among all steps."""
    for i in range(m):
        n = who[i]
        now[i] = n * T + (length_of(me, T, lengths, has, n) - 1 - s if reverse else s)


@njit(inline=True)
def put(n, has, x, y):
    """y = x, or 0 if it is left out."""
    if has:
        copy(n, x, y)
    else:
        fill(n, y, like(y, 0))


# ---------------------------------------------------------------- all steps
def _run_forward(cell: Cell) -> Any:
    step, g, apart, others, to_keep = _step(cell), cell.gates, cell.apart, cell.others, cell.kept
    two, widest = others > 0, max(g, others)

    @njit
    def run(
        me, N, T, H, K, reverse, wn, z, wh, p, b, h0, c0, lengths, y, hn, cn, gates, more, c, ws, order, counts, x, wi, bi
    ):  # fmt: skip
        lo, hi = share(me, N)
        m, back, width = hi - lo, 1 if reverse else -1, others * H
        if m == 0:
            return
        zeros, who, now = at(ws, me.worker * wn), at(order, 2 * lo), at(order, lo + hi)
        has, from_h, from_c = given(me, lengths), given(me, h0), two and given(me, c0)
        kept = two and given(me, c)
        keep = 1 if to_keep and given(me, gates) else 0
        keep_more = 1 if apart and given(me, more) else 0
        sums = g * H
        fill(widest * H, zeros, like(ws, 0))
        kx = K if given(me, x) and given(me, wi) else 0
        zb, zs = z if given(me, z) else bi if given(me, bi) else zeros, sums if given(me, z) else 0
        start, ahead = zb, at(zeros, widest * H)
        alone = kx > 0 and m == 1 and T > 1 and sums > 1  # a product with one column has another order
        order_samples(me, m, lo, T, lengths, has, who, at(counts, me.worker * (T + 2)))
        bias, to, of = b if given(me, b) else zeros, c if kept else cn, now if kept else who
        s, left = 0, running_at(me, 0, m, T, lengths, has, who)
        while left > 0:
            places(me, s, left, T, lengths, has, reverse, who, now)
            if alone and s % AHEAD == 0:  # weights are read from the second cache once for some steps
                n = min(AHEAD, length_of(me, T, lengths, has, lo) - s)
                begin = now[0] - (n - 1 if reverse else 0)
                gemm(n, sums, K, at(x, begin * K), K, 1, wi, sums, 1, ahead, sums, start, 0, 1, ws, 0)
                zb, zs, kx = at(ahead, -begin * sums), sums, 0
            first = s == 0
            hb, hs = at(y, back * H), H
            cb, cs = at(c, back * width) if kept else cn, width
            if first:
                hb, hs = h0 if from_h else zeros, H if from_h else 0
                cb, cs = c0 if from_c else zeros, width if from_c else 0
            of_h, of_c = who if first else now, who if first else of
            step(
                left, hs, H, now, zb, zs, x, kx, wi, wh, p, bias, hb, of_h, hs, cb, of_c, cs, to, of, y, gates, more, keep,
                keep_more,
            )  # fmt: skip
            s += 1
            left = running_at(me, s, left, T, lengths, has, who)
        for n in range(lo, hi):
            length = length_of(me, T, lengths, has, n)
            end, tail, unused = n * T + (0 if reverse else length - 1), n * T + length, T - length
            fill(unused * H, at(y, tail * H), like(y, 0))
            if keep:
                fill(unused * to_keep * H, at(gates, tail * to_keep * H), like(y, 0))
            if keep_more:
                fill(unused * apart * H, at(more, tail * apart * H), like(y, 0))
            if kept:
                fill(unused * width, at(c, tail * width), like(y, 0))
            if length > 0:
                copy(H, at(y, end * H), at(hn, n * H))
                if kept:
                    copy(width, at(c, end * width), at(cn, n * width))
            else:
                put(H, from_h, at(h0, n * H), at(hn, n * H))
                if two:
                    put(width, from_c, at(c0, n * width), at(cn, n * width))

    return run


def _run_backward(cell: Cell) -> Any:
    step, g, apart, others, of_p = _step_back(cell), cell.gates, cell.apart, cell.others, cell.parameters
    two, rows = others > 0, max(others, 1)

    @njit
    def run(
        me, N, T, H, reverse, wn, wh, p, h0, c0, lengths, y, gates, more, c, dy, dhn, dcn, dz, dmore, dp, dh0, dc0, dh, dc, ws, order,
        counts,
    ):  # fmt: skip
        lo, hi = share(me, N)
        m, ahead, size, c_width = hi - lo, -1 if reverse else 1, lanes(ws), others * H
        if m == 0:
            return
        width = (H + size - 1) // size * size
        zeros = at(ws, me.worker * wn)
        wt, who, now = at(zeros, rows * width), at(order, 2 * lo), at(order, lo + hi)
        has, from_h, from_c = given(me, lengths), given(me, h0), two and given(me, c0)
        has_dy = given(me, dy)
        d, ds = dy if has_dy else zeros, H if has_dy else 0
        fill(rows * H, zeros, like(ws, 0))
        order_samples(me, m, lo, T, lengths, has, who, at(counts, me.worker * (T + 2)))
        transposed(H, g * H, wh, g * H, wt, width)
        for n in range(lo, hi):
            put(H, given(me, dhn), at(dhn, n * H), at(dh, n * H))
            if two:
                put(c_width, given(me, dcn), at(dcn, n * c_width), at(dc, n * c_width))
            end = n * T + length_of(me, T, lengths, has, n)
            fill(((n + 1) * T - end) * g * H, at(dz, end * g * H), like(dz, 0))
            if apart:
                fill(((n + 1) * T - end) * apart * H, at(dmore, end * apart * H), like(dz, 0))
            if of_p:
                fill(((n + 1) * T - end) * of_p * H, at(dp, end * of_p * H), like(dz, 0))
        dnext, mnext = at(dz, ahead * g * H), at(dmore, ahead * apart * H)
        s = T - 1
        while s >= 0:
            left, on = running_at(me, s, m, T, lengths, has, who), running_at(me, s + 1, m, T, lengths, has, who)
            places(me, s, left, T, lengths, has, reverse, who, now)
            hb, of, hs = at(y, -ahead * H), now, H
            cb, cs = at(c, -ahead * c_width), c_width
            if s == 0:
                hb, of, hs = h0 if from_h else zeros, who, H if from_h else 0
                cb, cs = c0 if from_c else zeros, c_width if from_c else 0
            for ends in range(2):  # samples that have a next step, and those that end here
                start, stop = (on, left) if ends else (0, on)
                if stop > start:
                    step(
                        stop - start, 1 - ends, H, at(now, start), at(who, start), dnext, mnext, wt, width, p, d, ds, hb, at(of, start), hs,
                        cb, at(of, start), cs, y, c, gates, more, dh, dc, dz, dmore, dp, dh, 0,
                    )  # fmt: skip
            s -= 1
        if given(me, dh0):
            left = running_at(me, 0, m, T, lengths, has, who)
            places(me, 0, left, T, lengths, has, reverse, who, now)
            if left > 0:
                step(
                    left, 1, H, now, who, dz, dmore, wt, width, p, zeros, 0, zeros, who, 0, zeros, who, 0, y, c, gates, more, dh, dc,
                    dz, dmore, dp, dh0, 1,
                )  # fmt: skip
            for i in range(left, m):
                copy(H, at(dh, who[i] * H), at(dh0, who[i] * H))
        if two and given(me, dc0):
            copy(m * c_width, at(dc, lo * c_width), at(dc0, lo * c_width))

    return run


@njit
def products_of(me, rows, width, off, cols, N, T, H, reverse, acc, has, from_h, y, h0, lengths, d, dwh, g):
    """dwh[:, off:off + cols] += sum of h before each step times d, whose rows have ``width``; units of the state, ``rows``, are shared."""
    lo, hi = rows
    to, mode = at(dwh, lo * g * H + off), acc
    for n in range(N):
        length = length_of(me, T, lengths, has, n)
        first = n * T + (length - 1 if reverse else 0)
        h, row = n * T + (1 if reverse else 0), n * T + (0 if reverse else 1)
        for of_first in range(2):
            k = min(length, 1 if from_h else 0) if of_first else length - 1
            if k > 0:
                before, here = at(h0, n * H + lo) if of_first else at(y, h * H + lo), first if of_first else row
                gemm(
                    hi - lo, cols, k, before, 1, H, at(d, here * width), width, 1, to, g * H, to, g * H, mode, d, 0
                )  # fmt: skip
                mode = 1
    if mode == 0:
        for i in range(hi - lo):
            fill(cols, at(to, i * g * H), like(dwh, 0))


def _run_weights(cell: Cell) -> Any:
    g, apart, merged, of_p = cell.gates, cell.apart, cell.gates - cell.apart, cell.parameters

    @njit
    def run(me, N, T, H, reverse, acc, y, h0, lengths, dz, dmore, t_dp, dwh, dp, db):
        rows, has, from_h = share(me, H), given(me, lengths), given(me, h0)
        for part in range(2 if apart else 1):
            n, off, width = (apart, merged * H, apart * H) if part else (merged, 0, g * H)
            d = dmore if part else dz
            if rows[0] < rows[1]:
                products_of(me, rows, width, off, n * H, N, T, H, reverse, acc, has, from_h, y, h0, lengths, d, dwh, g)
            if given(me, db):
                lo, hi = share(me, g * H)
                lo, hi = max(lo, off), min(hi, off + n * H)
                if lo < hi:
                    column_sums(hi - lo, N * T, width, at(d, lo - off), at(db, lo), acc)
        if of_p and given(me, dp):
            lo, hi = share(me, of_p * H)
            if lo < hi:
                column_sums(hi - lo, N * T, of_p * H, at(t_dp, lo), at(dp, lo), acc)

    return run


def register(cell: Cell) -> None:
    """The kernels of a cell."""
    forward, backward, weights = _run_forward(cell), _run_backward(cell), _run_weights(cell)
    f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, *others = cell.places("forward")
    f11, f12, f13, f14, f15, f16, f17, f18 = others
    b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, *others = cell.places("backward")
    b11, b12, b13, b14, b15, b16, b17, b18, b19, b20, b21 = others
    w0, w1, w2, w3, w4, w5, w6, w7, w8 = cell.places("weights")

    @kernel_as(f"{cell.name}_fwd", words_of_cell(cell, "forward", "N T H K reverse wn"))
    def _(me, N, T, H, K, reverse, wn, *p):
        forward(
            me, N, T, H, K, reverse, wn, p[f0], p[f1], p[f2], p[f3], p[f4], p[f5], p[f6], p[f7], p[f8], p[f9], p[f10], p[f11],
            p[f12], p[f13], p[f14], p[f15], p[f16], p[f17], p[f18],
        )  # fmt: skip

    @kernel_as(f"{cell.name}_bwd", words_of_cell(cell, "backward", "N T H reverse wn"))
    def _(me, N, T, H, reverse, wn, *p):
        backward(
            me, N, T, H, reverse, wn, p[b0], p[b1], p[b2], p[b3], p[b4], p[b5], p[b6], p[b7], p[b8], p[b9], p[b10],
            p[b11], p[b12], p[b13], p[b14], p[b15], p[b16], p[b17], p[b18], p[b19], p[b20], p[b21],
        )  # fmt: skip

    @kernel_as(f"{cell.name}_bwd_w", words_of_cell(cell, "weights", "N T H reverse acc"))
    def _(me, N, T, H, reverse, acc, *p):
        weights(me, N, T, H, reverse, acc, p[w0], p[w1], p[w2], p[w3], p[w4], p[w5], p[w6], p[w7], p[w8])


def register_own(own: OwnCell) -> None:
    """Register the kernels of a user's cell.  Its digest is in their names, so their code can be cached by name."""
    if f"{own.stem}_fwd" not in KERNELS:
        register(own.cell)


for _cell in CELLS.values():
    register(_cell)
