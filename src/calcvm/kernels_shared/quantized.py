"""Sums of int8, in integers."""

from __future__ import annotations

from calcvm.kernel import Ptr, words
from calcvm.kernels_shared.pooling import NONE, SIZES, WINDOW, WindowAxis


def arithmetic(compiled, like):
    """The function ``as_int8``: a sum of int32 as `calcvm.ops.quantized` says.  No number has more than 31 bits."""

    @compiled
    def rounded(total, shift, lo):
        return min(max(((total >> shift) + 1) >> 1, lo), 127)

    @compiled
    def as_int8(y, total, scale, lo):
        factor = scale & 0x7FFF
        high = (total >> 16) * factor + (((total & 0xFFFF) * factor) >> 16)
        return like(y, rounded(high, (scale >> 15) & 31, lo))

    return rounded, as_int8


def products(compiled, at, taps, width, start, dot, put):
    """The body of `conv_int8_fwd` for ``width`` neighbouring outputs of a group, whose sums are the tuple ``start(b, j)``.

    ``dot(sums, n, x, w, apart)`` adds n products to each, with weights ``apart``; ``put(y, e, sums, scale, j, lo)`` sets elements of y.
    """

    @compiled
    def product(e, given):
        D, H, W, G, C, F, lo, x, wt, b, scale, y = given
        blocks = (F + width - 1) // width
        p = e // (G * blocks)
        g = e // blocks - p * G
        j = g * F + min(e % blocks * width, F - width)  # the last block has some outputs of the one before
        q, r = p // W.out, p // (W.out * H.out)
        n = r // D.out
        i0, k0, n0 = taps(r - n * D.out, D)
        i1, k1, n1 = taps(q - r * H.out, H)
        i2, k2, n2 = taps(p - q * W.out, W)
        at_x = (((n * D.size + i0) * H.size + i1) * W.size + i2) * G * C + g * C
        at_w = (((j * D.k + k0) * H.k + k1) * W.k + k2) * C
        times, length = (1, n2 * C) if G == 1 and W.d == 1 else (n2, C)  # the taps of a row lie together, or do not
        sums = start(b, j)
        for i in range(n0):
            for k in range(n1):
                of_x, of_w = at_x + (i * D.d * H.size + k * H.d) * W.size * G * C, at_w + (i * H.k + k) * W.k * C
                for t in range(times):
                    sums = dot(sums, length, at(x, of_x + t * W.d * G * C), at(wt, of_w + t * C), D.k * H.k * W.k * C)
        put(y, p * G * F + j, sums, scale, j, lo)

    return product


def register(kernel, kernel_as, compiled, like, each, taps, multiply):
    """Register all kernels.

    ``each(me, units, size, body, given)`` runs ``body(e, given)`` for each element of the worker's units; ``multiply(me, units, size,
    F, given)`` does so with `products`, for F outputs of each element.
    """
    rounded, _ = arithmetic(compiled, like)

    @kernel_as(
        "conv_int8_fwd", words(f"{SIZES} {WINDOW} G F lo", "", "x.int8 wt.int8 b.int32 scale.int32 y.int8".split())
    )
    def conv_int8_fwd(
        me, N, D, H, W, C, OD, OH, OW, kd, kh, kw, sd, sh, sw, pd, ph, pw, dd, dh, dw, G, F, lo, x, wt, b, scale, y
    ):
        z, v = WindowAxis(D, OD, kd, sd, pd, dd, NONE), WindowAxis(H, OH, kh, sh, ph, dh, NONE)
        u = WindowAxis(W, OW, kw, sw, pw, dw, NONE)
        multiply(me, N * OD, OH * OW * G, F, (z, v, u, G, C, F, lo, x, wt, b, scale, y))

    @compiled
    def largest(e, given):
        D, H, W, C, x, y = given
        p, c = e // C, e % C
        q, r = p // W.out, p // (W.out * H.out)
        n = r // D.out
        i0, _, n0 = taps(r - n * D.out, D)
        i1, _, n1 = taps(q - r * H.out, H)
        i2, _, n2 = taps(p - q * W.out, W)
        at = (((n * D.size + i0) * H.size + i1) * W.size + i2) * C + c
        top = like(y, -128)
        for a in range(n0):
            for b in range(n1):
                of = at + (a * D.d * H.size + b * H.d) * W.size * C
                for k in range(n2):
                    top = max(top, x[of + k * W.d * C])
        y[e] = top

    @kernel_as("max_pool_int8_fwd", words(f"{SIZES} {WINDOW}", "", "x.int8 y.int8".split()))
    def max_pool_int8_fwd(me, N, D, H, W, C, OD, OH, OW, kd, kh, kw, sd, sh, sw, pd, ph, pw, dd, dh, dw, x, y):
        z, v = WindowAxis(D, OD, kd, sd, pd, dd, NONE), WindowAxis(H, OH, kh, sh, ph, dh, NONE)
        each(me, N * OD, OH * OW * C, largest, (z, v, WindowAxis(W, OW, kw, sw, pw, dw, NONE), C, x, y))

    @compiled
    def added(e, given):
        factor_a, factor_b, shift, lo, a, b, y = given
        y[e] = like(y, rounded(int(a[e]) * factor_a + int(b[e]) * factor_b, shift, lo))

    @kernel
    def add_int8_fwd(me, rows, cols, factor_a, factor_b, shift, lo, a: Ptr.int8, b: Ptr.int8, y: Ptr.int8):
        each(me, rows, cols, added, (factor_a, factor_b, shift, lo, a, b, y))
