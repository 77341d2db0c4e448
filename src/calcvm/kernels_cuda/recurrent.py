"""Recurrent cells: a block takes one of its samples after the other, through all steps (see `calcvm.ops.recurrent`).

Threads share the sums of a step, then its units.  A step waits for the one before, so small batches leave a GPU idle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from calcvm.equations.cells import OwnCell
from calcvm.formulas.cells import CELLS, Cell
from calcvm.kernel import words_of_cell
from calcvm.kernels_cuda._common import KERNELS, given, index_of, kernel_as, share
from calcvm.kernels_cuda._cuda import at, device, like, sync, thread, threads
from calcvm.kernels_cuda._formulas import formula
from calcvm.kernels_cuda._tuples import ats, likes, loads, stores


def _parts(n: int) -> Callable:
    """The n parts of an array, each H long: ``parts(p, H)``, a tuple of pointers."""
    if n < 2:
        return device(lambda p, H: (p,))
    before = _parts(n - 1)
    return device(lambda p, H: before(p, H) + (at(p, (n - 1) * H),))


@device
def length_of(me, T, lengths, n):
    """The steps of a sample."""
    return index_of(me, lengths[n], T + 1) if given(me, lengths) else T


def _loads(n: int) -> Callable:
    """``loads(p, H, u)``: the n numbers of unit u, each in its part of an array; none if n is 0."""
    of = _parts(n)
    return device((lambda p, H, u: loads(ats(of(p, H), u))) if n else (lambda p, H, u: ()))


def _stores(first: int, n: int) -> Callable:
    """``stores(p, H, u, out)``: the n numbers of unit u are those of a tuple from ``first`` on."""
    of, stop = _parts(n), first + n
    return device(
        (lambda p, H, u, out: stores(ats(of(p, H), u), out[first:stop])) if n else (lambda p, H, u, out: None)
    )


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
    g, apart, merged, others, to_keep = cell.gates, cell.apart, cell.gates - cell.apart, cell.others, cell.kept
    n_after, cell_has_c = cell.states, cell.others > 0

    def flat(*x: Any) -> tuple[Any, ...]:
        gates, more, after = cell.forward(x[:g], x[g : g + apart], x[g + apart :])
        return (*after, *gates, *more)

    step, of_merged, of_apart = formula(flat), _loads(merged), _loads(apart)
    c_of, p_of, put_c = _loads(others), _loads(cell.parameters), _stores(1, others)
    put_gates, put_more = _stores(n_after, to_keep), _stores(n_after + to_keep, apart)
    sums = device(
        lambda ws, z, H, u: of_merged(ws, H, u) + of_apart(at(z, merged * H), H, u) + of_apart(at(ws, merged * H), H, u)
    )

    @device
    def run(me, N, T, H, reverse, wn, z, wh, p, b, h0, c0, lengths, y, hn, cn, gates, more, c, ws):
        n, stop = share(me, N if given(me, z) else 0)  # lowering gives a GPU z, never x in its place
        sum_of, kept, width = at(ws, me.worker * wn), cell_has_c and given(me, c), others * H
        while n < stop:
            length = length_of(me, T, lengths, n)
            put(me, H, h0, n * H, hn, n * H)
            if others:
                put(me, width, c0, n * width, cn, n * width)
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
                    before = (hn[n * H + u],) + c_of(at(cn, n * width), H, u) + p_of(p, H, u)
                    out = step(*(sums(sum_of, at(z, here * g * H), H, u) + before))
                    y[here * H + u] = out[0]
                    hn[n * H + u] = out[0]
                    put_c(at(cn, n * width), H, u, out)
                    if kept:
                        put_c(at(c, here * width), H, u, out)
                    if to_keep and given(me, gates):
                        put_gates(at(gates, here * to_keep * H), H, u, out)
                    if apart and given(me, more):
                        put_more(at(more, here * apart * H), H, u, out)
                    u += threads()
                sync()
            first, last = n * T + length, (n + 1) * T
            clear(y, first * H, last * H)
            if kept:
                clear(c, first * width, last * width)
            if to_keep and given(me, gates):
                clear(gates, first * to_keep * H, last * to_keep * H)
            if apart and given(me, more):
                clear(more, first * apart * H, last * apart * H)
            n += 1

    return run


# ---------------------------------------------------------------- backward
def _backward(cell: Cell) -> Any:
    g, apart, merged, others, kept = cell.gates, cell.apart, cell.gates - cell.apart, cell.others, cell.kept
    of_p, reads_before, reads_after, direct = cell.parameters, cell.reads_before, cell.reads_after, cell.direct

    def flat(*x: Any) -> tuple[Any, ...]:
        """From gates, more, h before and after, dh, other states before and after, their gradients, parameters."""
        rest, parts = iter(x), []
        for n in (kept, apart, 3, others, others, others, of_p):
            parts.append([next(rest) for _ in range(n)])
        gates, more, (h, h_after, dh), c, c_after, dc, p = parts
        dz, dmore, (dh_before, *dbefore) = cell.backward(gates, more, (h, *c, *p), (h_after, *c_after), (dh, *dc))
        return (*([] if dh_before is None else [dh_before]), *dbefore, *dz, *dmore)

    step, n_c = formula(flat), int(direct)
    n_p, n_z = n_c + others, n_c + others + of_p
    gates_of, more_of, p_of, c_of = _loads(kept), _loads(apart), _loads(of_p), _loads(others)
    put_c, put_p, put_z, put_more = _stores(n_c, others), _stores(n_p, of_p), _stores(n_z, g), _stores(n_z + g, apart)
    nothing = (0.0,) * others

    @device
    def c_before(me, s, here, back, c, n, c0, H, u):
        if s > 0:
            return c_of(at(c, (here + back) * others * H), H, u)
        return c_of(at(c0, n * others * H), H, u) if given(me, c0) else likes(c, nothing)

    of_c = device(
        (
            lambda me, s, here, back, c, n, c0, H, u, dc: (
                c_before(me, s, here, back, c, n, c0, H, u)
                + c_of(at(c, here * others * H), H, u)
                + c_of(at(dc, n * others * H), H, u)
            )
        )
        if others else (lambda me, s, here, back, c, n, c0, H, u, dc: ())
    )  # fmt: skip

    @device
    def run(
        me, N, T, H, reverse, wh, p, h0, c0, lengths, y, gates, more, c, dy, dhn, dcn, dz, dmore, dp, dh0, dc0, dh, dc
    ):
        n, stop = share(me, N)
        back, width = 1 if reverse else -1, others * H
        while n < stop:
            length = length_of(me, T, lengths, n)
            put(me, H, dhn, n * H, dh, n * H)
            if others:
                put(me, width, dcn, n * width, dc, n * width)
            if others > 1:
                sync()  # a unit's numbers are other threads'
            clear(dz, (n * T + length) * g * H, (n + 1) * T * g * H)
            if apart:
                clear(dmore, (n * T + length) * apart * H, (n + 1) * T * apart * H)
            if of_p:
                clear(dp, (n * T + length) * of_p * H, (n + 1) * T * of_p * H)
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
                        if others and given(me, dc0):
                            for k in range(others):
                                dc0[n * width + k * H + u] = dc[n * width + k * H + u]
                    else:
                        zero = like(wh, 0)
                        h = state(me, s, here, back, y, n, h0, H, u) if reads_before else zero
                        h_after = y[here * H + u] if reads_after else zero
                        read = gates_of(at(gates, here * kept * H), H, u) + more_of(at(more, here * apart * H), H, u)
                        of_units = of_c(me, s, here, back, c, n, c0, H, u, dc) + p_of(p, H, u)
                        out = step(*(read + (h, h_after, d) + of_units))
                        dh[n * H + u] = out[0] if direct else zero
                        put_c(at(dc, n * width), H, u, out)
                        put_p(at(dp, here * of_p * H), H, u, out)
                        put_z(at(dz, here * g * H), H, u, out)
                        put_more(at(dmore, here * apart * H), H, u, out)
                    u += threads()
                sync()
                s -= 1
            n += 1

    return run


# ---------------------------------------------------------------- weights
def _weights(cell: Cell) -> Any:
    g, apart, merged, of_p = cell.gates, cell.apart, cell.gates - cell.apart, cell.parameters

    @device
    def slope(dz, dmore, here, q, H):
        """The gradient of sum q of a step."""
        if apart and q >= merged * H:
            return dmore[here * apart * H + q - merged * H]
        return dz[here * g * H + q]

    @device
    def run(me, N, T, H, reverse, acc, y, h0, lengths, dz, dmore, t_dp, dwh, dp, db):
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
        if of_p and given(me, dp):
            lo, hi = share(me, of_p * H)
            q = lo + thread()
            while q < hi:
                total = dp[q] if acc else zero
                for here in range(N * T):
                    total += t_dp[here * of_p * H + q]
                dp[q] = total
                q += threads()

    return run


def register(cell: Cell) -> None:
    """The kernels of a cell."""
    forward, backward, weights = _forward(cell), _backward(cell), _weights(cell)
    f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, *_ = cell.places("forward")
    b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15, b16, b17, b18, *_ = cell.places("backward")
    w0, w1, w2, w3, w4, w5, w6, w7, w8 = cell.places("weights")

    @kernel_as(f"{cell.name}_fwd", words_of_cell(cell, "forward", "N T H K reverse wn"))
    def _(me, N, T, H, K, reverse, wn, *p):
        forward(
            me, N, T, H, reverse, wn, p[f0], p[f1], p[f2], p[f3], p[f4], p[f5], p[f6], p[f7], p[f8], p[f9], p[f10], p[f11], p[f12], p[f13],
        )  # fmt: skip

    @kernel_as(f"{cell.name}_bwd", words_of_cell(cell, "backward", "N T H reverse wn"))
    def _(me, N, T, H, reverse, wn, *p):
        backward(
            me, N, T, H, reverse, p[b0], p[b1], p[b2], p[b3], p[b4], p[b5], p[b6], p[b7], p[b8], p[b9], p[b10], p[b11], p[b12], p[b13],
            p[b14], p[b15], p[b16], p[b17], p[b18],
        )  # fmt: skip

    @kernel_as(f"{cell.name}_bwd_w", words_of_cell(cell, "weights", "N T H reverse acc"))
    def _(me, N, T, H, reverse, acc, *p):
        weights(me, N, T, H, reverse, acc, p[w0], p[w1], p[w2], p[w3], p[w4], p[w5], p[w6], p[w7], p[w8])


def register_own(own: OwnCell) -> None:
    """Register the kernels of a user's cell."""
    if f"{own.stem}_fwd" not in KERNELS:
        register(own.cell)


for _cell in CELLS.values():
    register(_cell)
