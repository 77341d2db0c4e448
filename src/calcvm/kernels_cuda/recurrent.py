"""Recurrent cells: a block takes one of its samples after the other, through all steps (see `calcvm.ops.recurrent`).

Threads share the sums of a step, then its units.  A step waits for the one before, so small batches leave a GPU idle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from calcvm.formulas.cells import CELLS, Cell
from calcvm.kernel import words_of_cell
from calcvm.kernels_cuda._common import given, index_of, kernel_as, share
from calcvm.kernels_cuda._cuda import at, device, like, sync, thread, threads
from calcvm.kernels_cuda._formulas import formula
from calcvm.kernels_cuda._tuples import ats, loads, part, stores


def _parts(n: int) -> Callable:
    """The n parts of an array, each H long: ``parts(p, H)``, a tuple of pointers."""
    if n == 1:
        return device(lambda p, H: (p,))
    before = _parts(n - 1)
    return device(lambda p, H: before(p, H) + (at(p, (n - 1) * H),))


@device
def length_of(me, T, lengths, n):
    """The steps of a sample."""
    return index_of(me, lengths[n], T + 1) if given(me, lengths) else T


@device
def put(me, H, x, at_x, y, at_y):
    """H numbers of y are x's, or 0 if x is left out."""
    u = thread()
    while u < H:
        y[at_y + u] = x[at_x + u] if given(me, x) else like(y, 0)
        u += threads()


@device
def clear(y, start, stop):
    i = start + thread()
    while i < stop:
        y[i] = like(y, 0)
        i += threads()


@device
def state(me, s, here, back, y, n, h0, H, u):
    """A unit of a state before step s, which is in y from the second step on."""
    if s > 0:
        return y[(here + back) * H + u]
    return h0[n * H + u] if given(me, h0) else like(y, 0)


@device
def products(p, at_p, n, q, at_q, step):
    """The sum of n products, of p in order and of q in steps."""
    total = like(p, 0)
    for k in range(n):
        total += p[at_p + k] * q[at_q + k * step]
    return total


# ---------------------------------------------------------------- forward
def _forward(cell: Cell) -> Any:
    g, apart, merged, two, has_gates = cell.gates, cell.apart, cell.gates - cell.apart, cell.states == 2, cell.kept
    n_after = cell.states
    gates_in, more_in = part(n_after, n_after + g), part(n_after + g, n_after + g + apart)

    def flat(*x: Any) -> tuple[Any, ...]:
        gates, more, after = cell.forward(x[:g], x[g : g + apart], x[g + apart :])
        return (*after, *gates, *more)

    step, of_gates, of_merged, of_apart = formula(flat), _parts(g), _parts(merged), _parts(max(apart, 1))

    if apart:
        sums = device(
            lambda ws, z, H, u: (
                loads(ats(of_merged(ws, H), u))
                + loads(ats(of_apart(at(z, merged * H), H), u))
                + loads(ats(of_apart(at(ws, merged * H), H), u))
            )
        )
    else:
        sums = device(lambda ws, z, H, u: loads(ats(of_merged(ws, H), u)))

    if two:
        states = device(lambda h, c, i: (h[i], c[i]))
        put_c = device(lambda c, i, out: stores((at(c, i),), (out[1],)))
    else:
        states = device(lambda h, c, i: (h[i],))
        put_c = device(lambda c, i, out: None)
    put_gates = device(
        (lambda p, H, u, out: stores(ats(of_gates(p, H), u), gates_in(out)))
        if has_gates else (lambda p, H, u, out: None)
    )  # fmt: skip
    put_more = device(
        (lambda p, H, u, out: stores(ats(of_apart(p, H), u), more_in(out))) if apart else (lambda p, H, u, out: None)
    )

    @device
    def run(me, N, T, H, reverse, wn, z, wh, b, h0, c0, lengths, y, hn, cn, gates, more, c, ws):
        n, stop = share(me, N if given(me, z) else 0)
        sum_of, kept = at(ws, me.worker * wn), two and given(me, c)
        while n < stop:
            length = length_of(me, T, lengths, n)
            put(me, H, h0, n * H, hn, n * H)
            if two:
                put(me, H, c0, n * H, cn, n * H)
            sync()
            for s in range(length):
                here = n * T + (length - 1 - s if reverse else s)
                q = thread()
                while q < g * H:
                    first = z[here * g * H + q] if q < merged * H else like(z, 0)
                    total = first + b[q] if given(me, b) else first
                    sum_of[q] = total + products(hn, n * H, H, wh, q, g * H)
                    q += threads()
                sync()
                u = thread()
                while u < H:
                    out = step(*(sums(sum_of, at(z, here * g * H), H, u) + states(hn, cn, n * H + u)))
                    y[here * H + u] = out[0]
                    hn[n * H + u] = out[0]
                    put_c(cn, n * H + u, out)
                    if kept:
                        put_c(c, here * H + u, out)
                    if has_gates and given(me, gates):
                        put_gates(at(gates, here * g * H), H, u, out)
                    if apart and given(me, more):
                        put_more(at(more, here * apart * H), H, u, out)
                    u += threads()
                sync()
            first, last = n * T + length, (n + 1) * T
            clear(y, first * H, last * H)
            if kept:
                clear(c, first * H, last * H)
            if has_gates and given(me, gates):
                clear(gates, first * g * H, last * g * H)
            if apart and given(me, more):
                clear(more, first * apart * H, last * apart * H)
            n += 1

    return run


# ---------------------------------------------------------------- backward
def _backward(cell: Cell) -> Any:
    g, apart, merged, two, has_gates = cell.gates, cell.apart, cell.gates - cell.apart, cell.states == 2, cell.kept
    reads_before, reads_after, direct = cell.reads_before, cell.reads_after, cell.direct
    kept = g if has_gates else 0

    def flat(*x: Any) -> tuple[Any, ...]:
        gates, more = x[:kept], x[kept : kept + apart]
        h, h_after, dh, *others = x[kept + apart :]
        c, c_after, dc = ([v] for v in others) if two else ([], [], [])
        dz, dmore, (dh_before, *dc_before) = cell.backward(gates, more, (h, *c), (h_after, *c_after), (dh, *dc))
        return (*([] if dh_before is None else [dh_before]), *dc_before, *dz, *dmore)

    step, of_gates, of_apart = formula(flat), _parts(g), _parts(max(apart, 1))
    n_before = int(direct) + int(two)
    dz_in, dmore_in = part(n_before, n_before + g), part(n_before + g, n_before + g + apart)

    gates_of = device((lambda p, H, u: loads(ats(of_gates(p, H), u))) if has_gates else (lambda p, H, u: ()))
    more_of = device((lambda p, H, u: loads(ats(of_apart(p, H), u))) if apart else (lambda p, H, u: ()))
    of_c = device(
        (
            lambda me, s, here, back, c, n, c0, H, u, dc: (
                state(me, s, here, back, c, n, c0, H, u), c[here * H + u], dc[n * H + u]
            )
        )
        if two else (lambda me, s, here, back, c, n, c0, H, u, dc: ())
    )  # fmt: skip
    put_more = device(
        (lambda p, H, u, out: stores(ats(of_apart(p, H), u), dmore_in(out))) if apart else (lambda p, H, u, out: None)
    )

    @device
    def run(me, N, T, H, reverse, wh, h0, c0, lengths, y, gates, more, c, dy, dhn, dcn, dz, dmore, dh0, dc0, dh, dc):
        n, stop = share(me, N)
        back = 1 if reverse else -1
        while n < stop:
            length = length_of(me, T, lengths, n)
            put(me, H, dhn, n * H, dh, n * H)
            if two:
                put(me, H, dcn, n * H, dc, n * H)
            clear(dz, (n * T + length) * g * H, (n + 1) * T * g * H)
            if apart:
                clear(dmore, (n * T + length) * apart * H, (n + 1) * T * apart * H)
            s = length - 1
            while s >= -1:  # -1: of the state before the first step
                here = n * T + (length - 1 - s if reverse else s)
                ahead = here - back
                u = thread()
                while u < H:
                    d = dh[n * H + u]
                    if s >= 0 and given(me, dy):
                        d += dy[here * H + u]
                    if s < length - 1:
                        d += products(dz, ahead * g * H, merged * H, wh, u * g * H, 1)
                        if apart:
                            d += products(dmore, ahead * apart * H, apart * H, wh, u * g * H + merged * H, 1)
                    if s < 0:
                        if given(me, dh0):
                            dh0[n * H + u] = d
                        if two and given(me, dc0):
                            dc0[n * H + u] = dc[n * H + u]
                    else:
                        zero = like(wh, 0)
                        h = state(me, s, here, back, y, n, h0, H, u) if reads_before else zero
                        h_after = y[here * H + u] if reads_after else zero
                        read = gates_of(at(gates, here * g * H), H, u) + more_of(at(more, here * apart * H), H, u)
                        out = step(*(read + (h, h_after, d) + of_c(me, s, here, back, c, n, c0, H, u, dc)))
                        dh[n * H + u] = out[0] if direct else zero
                        if two:
                            dc[n * H + u] = out[n_before - 1]
                        stores(ats(of_gates(at(dz, here * g * H), H), u), dz_in(out))
                        put_more(at(dmore, here * apart * H), H, u, out)
                    u += threads()
                sync()
                s -= 1
            n += 1

    return run


# ---------------------------------------------------------------- weights
def _weights(cell: Cell) -> Any:
    g, apart, merged = cell.gates, cell.apart, cell.gates - cell.apart

    @device
    def slope(dz, dmore, here, q, H):
        """The gradient of sum q of a step."""
        if apart and q >= merged * H:
            return dmore[here * apart * H + q - merged * H]
        return dz[here * g * H + q]

    @device
    def run(me, N, T, H, reverse, acc, y, h0, lengths, dz, dmore, dwh, db):
        lo, hi = share(me, H)
        back, width, zero = 1 if reverse else -1, g * H, like(dz, 0)
        e = lo * width + thread()
        while e < hi * width:
            i = e // width
            total = dwh[e] if acc else zero
            for n in range(N):
                length = length_of(me, T, lengths, n)
                for s in range(length):
                    here = n * T + (length - 1 - s if reverse else s)
                    total += state(me, s, here, back, y, n, h0, H, i) * slope(dz, dmore, here, e - i * width, H)
            dwh[e] = total
            e += threads()
        if given(me, db):
            lo, hi = share(me, width)
            q = lo + thread()
            while q < hi:
                total = db[q] if acc else zero
                for here in range(N * T):
                    total += slope(dz, dmore, here, q, H)
                db[q] = total
                q += threads()

    return run


def register(cell: Cell) -> None:
    """The kernels of a cell."""
    forward, backward, weights = _forward(cell), _backward(cell), _weights(cell)
    f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, *_ = cell.places("forward")
    b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15, b16, *_ = cell.places("backward")
    w0, w1, w2, w3, w4, w5, w6 = cell.places("weights")

    @kernel_as(f"{cell.name}_fwd", words_of_cell(cell, "forward", "N T H K reverse wn"))
    def _(me, N, T, H, K, reverse, wn, *p):
        forward(
            me, N, T, H, reverse, wn, p[f0], p[f1], p[f2], p[f3], p[f4], p[f5], p[f6], p[f7], p[f8], p[f9], p[f10], p[f11], p[f12],
        )  # fmt: skip

    @kernel_as(f"{cell.name}_bwd", words_of_cell(cell, "backward", "N T H reverse wn"))
    def _(me, N, T, H, reverse, wn, *p):
        backward(
            me, N, T, H, reverse, p[b0], p[b1], p[b2], p[b3], p[b4], p[b5], p[b6], p[b7], p[b8], p[b9], p[b10], p[b11], p[b12],
            p[b13], p[b14], p[b15], p[b16],
        )  # fmt: skip

    @kernel_as(f"{cell.name}_bwd_w", words_of_cell(cell, "weights", "N T H reverse acc"))
    def _(me, N, T, H, reverse, acc, *p):
        weights(me, N, T, H, reverse, acc, p[w0], p[w1], p[w2], p[w3], p[w4], p[w5], p[w6])


for _cell in CELLS.values():
    register(_cell)
