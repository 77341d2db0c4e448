"""Convolution: products over taps (`_taps`), and by channel if each channel has its own window.

If the input has few channels, the taps along the last axis become one tap with all their elements: they are contiguous in
rows that are copied with their padding.
"""

from __future__ import annotations

from math import gcd

from calcvm.kernels_cpu._common import Float, Ptr, at, given, kernel, lanes, like, njit, routine, share
from calcvm.kernels_cpu._epilogues import backward_of, finish, forward_of, from_column
from calcvm.kernels_cpu._gemm import WIDE, gemm, pack_wide
from calcvm.kernels_cpu._math import column_sums, fill
from calcvm.kernels_cpu._taps import (
    ENTRIES,
    MOST_TAPS,
    PIXELS,
    address,
    blocks,
    over_lanes,
    over_pixels,
    over_planes,
    over_taps,
    pixels,
    spread,
    table,
    turn,
    unfolded,
)
from calcvm.kernels_cpu.contraction import FROM_INIT, SET

FEW, NEAR = 16, 8  # as in ops.convolution
PLANES = 1 << 15  # cells of planes, and of columns: as in ops.convolution
PACKED = 256  # from this many pixels on weights are packed, if they have more columns than a panel
SHAPE = "i" * 21  # arguments of routines: G, C, F, and six numbers of each axis
CHAIN = 512  # as in ops.convolution: cells in a column of taps
TODO = "idppppp"  # the epilogue, as in `_epilogues.finish`
IN_CACHE = 120  # pixels whose gradients, for a panel's columns, stay in L1


@njit(inline=True)
def parts(more):
    """A routine's further arguments: sizes, the numbers of the axes, the epilogue."""
    I, O, K = more[3:6], more[6:9], more[9:12]
    return more[:3], I, O, K, more[12:15], more[15:18], more[18:21], more[21:]


@njit(inline=True)
def is_near(G, K, S, L):
    """Whether rows of the input may be copied so that taps along them are contiguous."""
    return G == 1 and K[2] > 1 and S[2] <= NEAR and L[2] == 1


@njit(inline=True)
def is_few(G, C, K, S, L):
    return is_near(G, K, S, L) and C < FEW


@njit(inline=True)
def is_lanewise(G, C, F):
    """Whether each channel has its own window."""
    return G > 1 and C == 1 and F == 1


@njit(inline=True)
def in_planes(G, C, F, I, O, K, S, L, inner):
    """Whether the input's gradient is computed in planes: its channels do not fill a vector, and rows are whole."""
    one = G * I[0] * O[0] * K[0] * S[0] * S[1] * S[2] == 1
    near = K[1] * K[2] <= ENTRIES and (K[1] - 1) * L[1] <= 64 and (K[2] - 1) * L[2] <= 64
    return one and near and C < FEW and inner == I[2] and band(F, I[2] + (K[2] - 1) * L[2], (K[1] - 1) * L[1]) > 0


@njit(inline=True)
def in_columns(G, C, F, I, O, K, S, L, inner):
    """Whether it is computed from columns of all taps: if vectors of channels, and zeros beside dy, would cost more.

    64 images of 12x12x20 by 50 windows of 5x5, from dy of 8x8: 2.1 ms, without columns 7.5 (one Zen 4 core).
    """
    one = G * I[0] * O[0] * K[0] * S[0] * L[2] == 1 and K[1] * K[2] > 1 and S[1] <= NEAR and S[2] <= NEAR
    n = K[1] * K[2] * C
    if not one or inner != I[2] or n * 24 > PLANES or n * F > 2 * PLANES:
        return False
    return 4 * I[1] * I[2] * ((C + 15) // 16 * 16) * F > 5 * S[1] * S[2] * O[1] * O[2] * C * (F + 16)


@njit(inline=True)
def place(p, sizes):
    """The image of a pixel, and its indexes along the axes."""
    row = p // sizes[2]
    return row // sizes[1] // sizes[0], row // sizes[1] % sizes[0], row % sizes[1], p % sizes[2]


@njit(inline=True)
def tap_of(t, K):
    return t // K[2] // K[1], t // K[2] % K[1], t % K[2]


@njit
def seen(entries, stride, p, n, first, last, x, bytes_, zero, I, O, K, S, P, L):
    """The table of what taps read for pixels [p, p+n) of the result; x is an address, its pixels have ``bytes_`` bytes."""
    done = 0
    while done < n:
        i, o0, o1, o2 = place(p + done, O)
        m = min(O[2] - o2, n - done)
        for t in range(first, last):
            k0, k1, k2 = tap_of(t, K)
            i0, i1, i2 = o0 * S[0] - P[0] + k0 * L[0], o1 * S[1] - P[1] + k1 * L[1], o2 * S[2] - P[2] + k2 * L[2]
            there = 0 <= i0 < I[0] and 0 <= i1 < I[1]
            lo, hi = (S[2] - 1 - i2) // S[2] if there else m, (I[2] - 1 - i2) // S[2] + 1
            begin = x + (((i * I[0] + i0) * I[1] + i1) * I[2] + i2) * bytes_
            spread(at(entries, (t - first) * stride + done), m, lo, hi, begin, S[2] * bytes_, zero)
        done += m


@njit
def copied(p, n, first, last, x, C, rows, I, O, K, S, P, L):
    """Copy the rows of the input that n pixels of one row read, padded with zeros; taps along the row are contiguous."""
    i, o0, o1, o2 = place(p, O)
    width = (n - 1) * S[2] + K[2]
    begin = o2 * S[2] - P[2]
    lo, hi = min(max(-begin, 0), width), max(min(I[2] - begin, width), 0)
    for t in range(first, last):
        i0, i1 = o0 * S[0] - P[0] + t // K[1] * L[0], o1 * S[1] - P[1] + t % K[1] * L[1]
        row = at(rows, t * width * C)
        if 0 <= i0 < I[0] and 0 <= i1 < I[1] and lo < hi:
            fill(lo * C, row, like(x, 0))
            src = at(x, (((i * I[0] + i0) * I[1] + i1) * I[2] + begin + lo) * C)
            dst = at(row, lo * C)
            for e in range((hi - lo) * C):
                dst[e] = src[e]
            fill((width - hi) * C, at(row, hi * C), like(x, 0))
        else:
            fill(width * C, row, like(x, 0))


@njit
def forward(lo, hi, first, last, n, b, brs, y, mode, init, irs, x, ws, G, C, F, few, I, O, K, S, P, L, complete, todo):
    """Products of taps [first, last) at pixels [lo, hi) of the result, ``n`` columns of a group; after the last taps the epilogue."""
    entries = table()
    zero, bytes_ = address(ws), address(at(ws, 1)) - address(ws)
    depth = K[2] * C if few else C
    most = min(pixels(max(last - first, 1)), PIXELS // 2 if few else PIXELS)
    p = lo
    while p < hi:
        m = min(most, hi - p)
        if few:
            m = min(m, O[2] - p % O[2])
            copied(p, m, first, last, x, C, at(ws, C), I, O, K, S, P, L)
            for t in range(first, last):
                row = at(ws, (1 + t * ((m - 1) * S[2] + K[2])) * C)
                spread(at(entries, (t - first) * most), m, 0, m, address(row), S[2] * C * bytes_, 0)
        else:
            seen(entries, most, p, m, first, last, address(x), G * C * bytes_, zero, I, O, K, S, P, L)
        c = at(y, p * G * F)
        d = c if irs else init
        over_taps(m, n, b, brs, c, G * F, d, irs, mode, last - first, depth, entries, most)
        if complete:
            finish(m, n, G * F, y, p * G * F, todo)
        p += m


@njit
def forward_lanes(lo, hi, x, wt, b, biased, y, zeros, G, I, O, K, S, P, L, todo):
    """The same for channels with their own windows."""
    entries, taps = table(), K[0] * K[1] * K[2]
    bytes_ = address(at(x, G)) - address(x)
    fill(G, zeros, like(x, 0))
    step = min(taps, MOST_TAPS)
    most = pixels(step)
    for p in range(lo, hi, most):
        m, c = min(most, hi - p), at(y, p * G)
        for first in range(0, taps, step):
            last = min(first + step, taps)
            seen(entries, most, p, m, first, last, address(x), bytes_, address(zeros), I, O, K, S, P, L)
            init, irs = (b, 0) if first == 0 else (c, G)
            mode = FROM_INIT if biased or first > 0 else SET
            over_lanes(m, G, at(wt, first * G), G, c, G, init, irs, mode, last - first, entries, 1, most)
        finish(m, G, G, y, p * G, todo)


@routine("iipppippi" + SHAPE + TODO)
def convolved(lo, hi, x, wt, b, biased, y, ws, wn, *more):
    """y[n,o,f] = sum_k,c x[n,o*S+k*L-P,c]*wt[k,c,f] + b[f] at pixels [lo, hi) of y, b if biased; then the epilogue."""
    (G, C, F), I, O, K, S, P, L, todo = parts(more)
    if is_lanewise(G, C, F):
        forward_lanes(lo, hi, x, wt, b, biased, y, ws, G, I, O, K, S, P, L, todo)
        return
    few = is_few(G, C, K, S, L)
    taps, depth = (K[0] * K[1], K[2] * C) if few else (K[0] * K[1] * K[2], C)
    fill(C, ws, like(x, 0))
    used = C + (K[0] * K[1] * ((PIXELS // 2 - 1) * S[2] + K[2]) * C if few else 0)
    step, panel = blocks(taps, depth), WIDE() * lanes(x)
    packs = hi - lo >= PACKED and F > panel and wn >= used + step * depth * panel
    packed = at(ws, used)
    for g in range(G):
        for first in range(0, taps, step):
            last = min(first + step, taps)
            j = 0
            while j < F:
                n, brs = F - j, G * F
                col = g * F + j
                w = at(wt, first * depth * brs + col)
                if packs and n >= panel:
                    n = panel
                    pack_wide((last - first) * depth, w, brs, packed, lanes(x))
                    w, brs = packed, panel
                mode, init, irs = SET, y, 0
                if first > 0:
                    mode, irs = FROM_INIT, G * F
                elif biased:
                    mode, init = FROM_INIT, at(b, col)
                forward(lo, hi, first, last, n, w, brs, at(y, col), mode, init, irs, at(x, g * C), ws, G, C, F, few,
                        I, O, K, S, P, L, last == taps, from_column(col, todo))  # fmt: skip
                j += n


@njit
def weights_lanes(lo, hi, acc, x, dy, dwt, zeros, G, M, I, O, K, S, P, L):
    """The gradient of taps [lo, hi), for channels with their own windows."""
    entries = table()
    bytes_ = address(at(x, G)) - address(x)
    fill(G, zeros, like(x, 0))
    for p in range(0, M, IN_CACHE):
        m = min(IN_CACHE, M - p)
        step = ENTRIES // IN_CACHE
        for first in range(lo, hi, step):
            last = min(first + step, hi)
            seen(entries, IN_CACHE, p, m, first, last, address(x), bytes_, address(zeros), I, O, K, S, P, L)
            c = at(dwt, first * G)
            mode = FROM_INIT if acc or p > 0 else SET
            over_lanes(last - first, G, at(dy, p * G), G, c, G, c, G, mode, m, entries, IN_CACHE, 1)


@njit(inline=True)
def is_turned(rows, F):
    return 10 * ((rows + 15) // 16) * F < 9 * ((F + 15) // 16) * rows


@njit
def weights_columns(lo, hi, M, acc, x, dy, dwt, ws, C, F, I, O, K, S, P, L):
    """Rows [lo, hi) of the gradient, from columns of what taps read; transposed if vectors of filters would be emptier.

    64 images of 28x28x1 by 20 windows of 5x5: 0.7 ms, without columns 1.3; of 12x12x20 by 50: 2.1 and 2.8 (one Zen 4 core).
    """
    if lo == hi:
        return
    depth, taps = K[2] * C, K[0] * K[1]
    turns = is_turned(taps * depth, F)
    step = max(min(taps, CHAIN // depth), 1)
    n = step * depth
    most = max(min(PIXELS, PLANES // n), 24)
    columns = at(ws, taps * ((PIXELS // 2 - 1) * S[2] + K[2]) * C)
    found = at(columns, most * n + FEW)
    for t in range(lo // depth, (hi - 1) // depth + 1, step):
        first, last = max(lo, t * depth), min(hi, (t + step) * depth)
        end = (last - 1) // depth + 1
        for p in range(0, M, most):
            m, done = min(most, M - p), 0
            while done < m:
                k = min(min(m - done, PIXELS // 2), O[2] - (p + done) % O[2])
                pitch = ((k - 1) * S[2] + K[2]) * C
                copied(p + done, k, t, end, x, C, ws, I, O, K, S, P, L)
                unfolded(k, end - t, depth, at(ws, t * pitch), pitch, S[2] * C, at(columns, done * n), n)
                done += k
            a, b, k = at(columns, first - t * depth), at(dy, p * F), last - first
            if turns:
                c, mode = at(found, first), 1 if p > 0 else 0
                gemm(F, k, m, b, 1, F, a, n, 1, c, taps * depth, c, taps * depth, mode, c, 0)
            else:
                c, mode = at(dwt, first * F), 1 if acc or p > 0 else 0
                gemm(k, F, m, a, 1, n, b, F, 1, c, F, c, F, mode, c, 0)
    if turns:
        for k in range(lo, hi):
            for f in range(F):
                of = found[f * taps * depth + k]
                dwt[k * F + f] = dwt[k * F + f] + of if acc else of


@routine("iiiipppp" + SHAPE)
def correlated(lo, hi, M, acc, x, dy, dwt, ws, *shape):
    """dwt[k,c,f] (+)= sum_n,o x[n,o*S+k*L-P,c]*dy[n,o,f] at rows [lo, hi) of dwt, from M pixels of dy."""
    (G, C, F), I, O, K, S, P, L = shape[:3], shape[3:6], shape[6:9], shape[9:12], shape[12:15], shape[15:18], shape[18:]
    if M == 0:
        if not acc:
            fill((hi - lo) * G * F, at(dwt, lo * G * F), like(dy, 0))
        return
    if is_lanewise(G, C, F):
        weights_lanes(lo, hi, acc, x, dy, dwt, ws, G, M, I, O, K, S, P, L)
        return
    rows = K[0] * K[1] * K[2] * C
    if is_near(G, K, S, L) and (C < FEW or (rows <= CHAIN and is_turned(rows, F))):
        weights_columns(lo, hi, M, acc, x, dy, dwt, ws, C, F, I, O, K, S, P, L)
        return
    fill(C, ws, like(x, 0))
    packed = at(ws, C)
    entries, zero, bytes_ = table(), address(ws), address(at(ws, 1)) - address(ws)
    panel = WIDE() * lanes(x)
    p = 0
    while p < M:
        m = min(IN_CACHE, M - p)
        mode = 1 if acc or p > 0 else 0
        for g in range(G):
            j = 0
            while j < F:
                n, brs = F - j, G * F
                d = at(dy, p * brs + g * F + j)
                if n > panel:
                    n = panel
                    pack_wide(m, d, brs, packed, lanes(x))
                    d, brs = packed, panel
                row = lo
                while row < hi:
                    t, c = row // C, row % C
                    k = min(C - c, hi - row)
                    seen(entries, 0, p, m, t, t + 1, address(at(x, g * C)), G * C * bytes_, zero, I, O, K, S, P, L)
                    to = at(dwt, row * G * F + g * F + j)
                    over_pixels(k, n, d, brs, to, G * F, to, G * F, mode, m, entries, c)
                    row += k
                j += n
        p += m


@njit
def leading(i, K, S, P, L):
    """The taps along an axis that lead from place i of the input to places of the result."""
    step, k = S // gcd(S, L), 0
    while k < step and (i + P - k * L) % S != 0:
        k += 1
    return range(k, K if k < step else k, step)


@njit
def sends(entries, stride, p, n, first, last, dy, bytes_, zero, I, O, K, S, P, L):
    """The table of what arrives at n pixels of the input from p on, S[2] apart, through the taps that lead there."""
    done, apart = 0, S[2]
    while done < n:
        i, i0, i1, i2 = place(p + done * apart, I)
        m = min((I[2] - i2 + apart - 1) // apart, n - done)
        t = 0
        for k0 in leading(i0, K[0], S[0], P[0], L[0]):
            o0 = (i0 + P[0] - k0 * L[0]) // S[0]
            for k1 in leading(i1, K[1], S[1], P[1], L[1]):
                o1 = (i1 + P[1] - k1 * L[1]) // S[1]
                there = 0 <= o0 < O[0] and 0 <= o1 < O[1]
                for k2 in leading(i2, K[2], apart, P[2], L[2]):
                    if first <= t < last:
                        o2 = (i2 + P[2] - k2 * L[2]) // apart
                        lo, hi = -o2 if there else m, O[2] - o2
                        begin = dy + (((i * O[0] + o0) * O[1] + o1) * O[2] + o2) * bytes_
                        spread(at(entries, (t - first) * stride + done), m, lo, hi, begin, bytes_, zero)
                    t += 1
        done += m


@njit
def turned(first, last, r0, r1, r2, n, wt, C, F, G, packed, width, K, S, P, L):
    """Pack the weights of a class's taps, [tap, f, c], into a panel of n columns c; returns the number of such taps."""
    t = 0
    for k0 in leading(r0, K[0], S[0], P[0], L[0]):
        for k1 in leading(r1, K[1], S[1], P[1], L[1]):
            for k2 in leading(r2, K[2], S[2], P[2], L[2]):
                if first <= t < last:
                    src = at(wt, ((k0 * K[1] + k1) * K[2] + k2) * C * G * F)
                    if is_lanewise(G, C, F):
                        for e in range(G):
                            packed[(t - first) * G + e] = src[e]
                    else:
                        turn(n, F, src, G * F, at(packed, (t - first) * F * width), width)
                t += 1
    return t


@njit
def backward(
    lo, hi, first, last, r0, r1, r2, n, b, brs, dx, mode, init, irs, dy, zero, G, C, F, I, O, K, S, P, L, complete, todo
):  # fmt: skip
    """Products of a class's taps at its pixels in [lo, hi) of the input, ``n`` columns of a group; after the last taps the epilogue."""
    entries = table()
    most = pixels(max(last - first, 1))
    bytes_ = address(at(dy, 1)) - address(dy)
    whole = S[0] * S[1] * S[2] == 1
    p = lo
    while p < hi:
        _, i0, i1, i2 = place(p, I)
        left = hi - p if whole else min(hi - p, I[2] - i2)
        if i0 % S[0] == r0 and i1 % S[1] == r1:
            q = p + (r2 - i2) % S[2]
            end = p + left
            while q < end:
                m = min((end - q + S[2] - 1) // S[2], most)
                sends(entries, most, q, m, first, last, address(dy), G * F * bytes_, zero, I, O, K, S, P, L)
                c, crs = at(dx, q * G * C), S[2] * G * C
                d = c if irs else init
                if is_lanewise(G, C, F):
                    over_lanes(m, G, b, brs, c, crs, d, irs, mode, last - first, entries, 1, most)
                else:
                    over_taps(m, n, b, brs, c, crs, d, irs, mode, last - first, F, entries, most)
                if complete:
                    finish(m, G if is_lanewise(G, C, F) else n, crs, dx, q * G * C, todo)
                q += m * S[2]
        p += left


@njit(inline=True)
def band(depth, pitch, more):
    """Rows of a band of planes; 0 if not even one fits."""
    return max((PLANES // max(depth, 1) - 16) // pitch - more, 0)


@njit
def planes(dst, plane, rows, pitch, src, channels, row, column, H, W):
    """dst[c*plane + q*pitch + s] = src[row + q, column + s, c] of an image (H, W, channels), zeros outside of it."""
    lo, hi = min(max(-column, 0), pitch), max(min(W - column, pitch), 0)
    for q in range(rows):
        there, line = 0 <= row + q < H and lo < hi, at(dst, q * pitch)
        if there:
            begin = at(src, ((row + q) * W + column + lo) * channels)
            turn(hi - lo, channels, begin, channels, at(line, lo), plane)
        for c in range(channels):
            fill(lo if there else pitch, at(line, c * plane), like(src, 0))
            if there:
                fill(pitch - hi, at(line, c * plane + hi), like(src, 0))


@njit
def backward_planes(lo, hi, wt, dy, b, biased, dx, ws, C, F, I, O, K, P, L, todo):
    """dx of few channels at rows [lo, hi): vectors hold neighbours along a row, from planes of dy."""
    entries = table()
    more1, more2 = (K[1] - 1) * L[1], (K[2] - 1) * L[2]
    pitch = I[2] + more2
    most = band(F, pitch, more1)
    plane = (most + more1) * pitch + 16
    bytes_ = address(at(ws, 1)) - address(ws)
    found, lines = at(ws, F * plane), at(ws, F * plane + C * most * pitch)
    for k1 in range(K[1]):
        for k2 in range(K[2]):
            shift = (K[1] - 1 - k1) * L[1] * pitch + (K[2] - 1 - k2) * L[2]
            entries[k1 * K[2] + k2] = address(ws) + shift * bytes_
    while lo < hi:
        i, i1 = lo // I[1], lo % I[1]
        m = min(min(most, hi - lo), I[1] - i1)
        image = at(dy, i * O[1] * O[2] * F)
        planes(ws, plane, m + more1, pitch, image, F, i1 + P[1] - more1, P[2] - more2, O[1], O[2])
        n = m * pitch
        over_planes(C, n, found, plane, found, n, found, n, 0, K[1] * K[2], F, wt, F, C * F, 1, entries)
        for q in range(m):
            turn(C, I[2], at(found, q * pitch), n, lines, FEW)  # writes whole vectors
            row = at(dx, (lo + q) * I[2] * C)
            for e in range(I[2]):
                for c in range(C):
                    of = lines[e * FEW + c]
                    row[e * C + c] = of + b[c] if biased else of
        finish(m * I[2], C, C, dx, lo * I[2] * C, todo)
        lo += m


@njit
def add_columns(p, n, columns, dx, lo, hi, C, I, O, K, S, P, L):
    """dx += products of pixels [p, p+n) of dy with all taps, where these lead to rows [lo, hi)."""
    width = K[2] * C
    done = 0
    while done < n:
        i, _, o1, o2 = place(p + done, O)
        m = min(O[2] - o2, n - done)
        for q in range(m):
            begin = ((o2 + q) * S[2] - P[2]) * C
            first, last = max(-begin, 0), min(I[2] * C - begin, width)
            for k1 in range(K[1]):
                i1 = o1 * S[1] - P[1] + k1 * L[1]
                row = i * I[1] + i1
                if 0 <= i1 < I[1] and lo <= row < hi:
                    to, of = at(dx, row * I[2] * C + begin), at(columns, ((done + q) * K[1] + k1) * width)
                    for e in range(first, last):
                        to[e] += of[e]
        done += m


@njit
def backward_columns(lo, hi, wt, dy, b, biased, dx, ws, C, F, I, O, K, S, P, L, todo):
    """dx at rows [lo, hi): products of dy's pixels with all taps at once, then added in order where the taps lead."""
    n, panel = K[1] * K[2] * C, WIDE() * lanes(dx)
    weights = at(ws, PLANES)
    for j in range(0, n, panel):
        turn(min(panel, n - j), F, at(wt, j * F), F, at(weights, j * F), panel)
    to = at(dx, lo * I[2] * C)
    if biased:
        for e in range((hi - lo) * I[2]):
            for c in range(C):
                to[e * C + c] = b[c]
    else:
        fill((hi - lo) * I[2] * C, to, like(dx, 0))
    before = lo % I[1] + P[1] - (K[1] - 1) * L[1]
    first = min(max((before + S[1] - 1) // S[1], 0), O[1])
    last = max(min(((hi - 1) % I[1] + P[1]) // S[1] + 1, O[1]), 0)
    p, end = (lo // I[1] * O[1] + first) * O[2], ((hi - 1) // I[1] * O[1] + last) * O[2]
    while p < end:
        m = min(PLANES // n, end - p)
        for j in range(0, n, panel):
            to, w = at(ws, j), at(weights, j * F)
            gemm(m, min(panel, n - j), F, at(dy, p * F), F, 1, w, panel, 1, to, n, to, n, 0, ws, 0)
        add_columns(p, m, ws, dx, lo, hi, C, I, O, K, S, P, L)
        p += m
    finish((hi - lo) * I[2], C, C, dx, lo * I[2] * C, todo)


@routine("iiipppipp" + SHAPE + TODO)
def adjoint(lo, hi, inner, wt, dy, b, biased, dx, ws, *more):
    """dx[n,i,c] = sum_k,f dy[n,(i+P-k*L)/S,f]*wt[k,c,f] + b[c] at rows [lo, hi) of ``inner`` pixels, b if biased; then the epilogue.

    Pixels with equal remainders by the strides form a class: the same taps lead to them.
    """
    (G, C, F), I, O, K, S, P, L, todo = parts(more)
    if (hi - lo) * inner == 0:
        return
    if in_planes(G, C, F, I, O, K, S, L, inner):
        backward_planes(lo, hi, wt, dy, b, biased, dx, ws, C, F, I, O, K, P, L, todo)
        return
    if in_columns(G, C, F, I, O, K, S, L, inner):
        backward_columns(lo, hi, wt, dy, b, biased, dx, ws, C, F, I, O, K, S, P, L, todo)
        return
    lo, hi = lo * inner, hi * inner
    lanewise = is_lanewise(G, C, F)
    zeros = G if lanewise else F
    fill(zeros, ws, like(dy, 0))
    packed = at(ws, zeros)
    step, panel = blocks(K[0] * K[1] * K[2], F), G if lanewise else WIDE() * lanes(dx)
    classes = (min(S[0], I[0]), min(S[1], I[1]), min(S[2], I[2]))
    for g in range(1 if lanewise else G):
        for of in range(classes[0] * classes[1] * classes[2]):
            r0, r1, r2 = tap_of(of, classes)
            for j in range(0, C, panel):
                n = min(panel, C - j)
                w = at(wt, j * G * F + g * F)
                first, taps = 0, 1
                while first < max(taps, 1):
                    last = first + step
                    taps = turned(first, last, r0, r1, r2, n, w, C, F, G, packed, panel, K, S, P, L)
                    last = min(last, taps)
                    mode, init, irs = SET, dx, 0
                    if first > 0:
                        mode, irs = FROM_INIT, S[2] * G * C
                    elif biased:
                        mode, init = FROM_INIT, at(b, g * C + j)
                    col = g * C + j
                    backward(lo, hi, first, last, r0, r1, r2, n, packed, panel, at(dx, col), mode, init, irs, at(dy, g * F),
                             address(ws), G, C, F, I, O, K, S, P, L, last == taps, from_column(col, todo))  # fmt: skip
                    first += step


# ---------------------------------------------------------------- rows
@kernel
def conv_fwd(
    me, rows, inner, in_rows, in_inner, N, I0, I1, I2, O0, O1, O2, G, C, F, K0, K1, K2, S0, S1, S2, P0, P1, P2, L0, L1,
    L2, act, alpha: Float, wn, x: Ptr, wt: Ptr, b: Ptr, y: Ptr, mean: Ptr, factor: Ptr, offset: Ptr, other: Ptr, ws: Ptr,
):  # fmt: skip
    """y[n,o,f] = sum_k,c x[n,o*S+k*L-P,c]*wt[k,c,f] + b[f]; `forward_of`.  Workers own rows of y."""
    lo, hi = share(me, rows)
    convolved(lo * inner, hi * inner, x, wt, b, given(me, b), y, at(ws, me.worker * wn), wn, G, C, F, I0, I1, I2,
              O0, O1, O2, K0, K1, K2, S0, S1, S2, P0, P1, P2, L0, L1, L2,
              *forward_of(me, act, alpha, mean, factor, offset, other))  # fmt: skip


@kernel
def conv_bwd_w(
    me, phases, rows, inner, in_rows, in_inner, N, I0, I1, I2, O0, O1, O2, G, C, F, K0, K1, K2, S0, S1, S2, P0, P1, P2,
    L0, L1, L2, acc, wn, x: Ptr, dy: Ptr, dwt: Ptr, db: Ptr, ws: Ptr,
):  # fmt: skip
    """dwt[k,c,f] (+)= sum_n,o x[n,o*S+k*L-P,c]*dy[n,o,f]; db[f] (+)= sum_n,o dy[n,o,f].  Workers own rows of dwt."""
    sums_of_columns(me, rows * inner, G * F, dy, db, acc)
    lo, hi = share(me, K0 * K1 * K2 * C)
    correlated(lo, hi, rows * inner, acc, x, dy, dwt, at(ws, me.worker * wn), G, C, F, I0, I1, I2, O0, O1, O2,
               K0, K1, K2, S0, S1, S2, P0, P1, P2, L0, L1, L2)  # fmt: skip


@kernel
def conv_bwd_x(
    me, rows, inner, in_rows, in_inner, N, I0, I1, I2, O0, O1, O2, G, C, F, K0, K1, K2, S0, S1, S2, P0, P1, P2, L0, L1,
    L2, act, alpha: Float, wn, wt: Ptr, dy: Ptr, dx: Ptr, other: Ptr, ya: Ptr, ws: Ptr,
):  # fmt: skip
    """dx[n,i,c] = sum_k,f dy[n,(i+P-k*L)/S,f]*wt[k,c,f]; `backward_of`.  Workers own rows of dx."""
    lo, hi = share(me, in_rows)
    adjoint(lo, hi, in_inner, wt, dy, dx, False, dx, at(ws, me.worker * wn), G, C, F, I0, I1, I2, O0, O1, O2,
            K0, K1, K2, S0, S1, S2, P0, P1, P2, L0, L1, L2,
            *backward_of(me, act, alpha, other, ya))  # fmt: skip


@njit(inline=True)
def sums_of_columns(me, m, n, dy, db, acc):
    """db (+)= the sums of the columns of dy (m, n), if db is given."""
    if given(me, db):
        lo, hi = share(me, n)
        column_sums(hi - lo, m, n, at(dy, lo), at(db, lo), acc)


# transposed: the convolution from y to x
@kernel
def conv_transpose_fwd(
    me, rows, inner, in_rows, in_inner, N, I0, I1, I2, O0, O1, O2, G, C, F, K0, K1, K2, S0, S1, S2, P0, P1, P2, L0, L1,
    L2, act, alpha: Float, wn, x: Ptr, wt: Ptr, b: Ptr, y: Ptr, mean: Ptr, factor: Ptr, offset: Ptr, other: Ptr, ws: Ptr,
):  # fmt: skip
    """y[n,i,c] = sum_k,f x[n,(i+P-k*L)/S,f]*wt[k,c,f] + b[c]; `forward_of`.  Workers own rows of y."""
    lo, hi = share(me, in_rows)
    adjoint(lo, hi, in_inner, wt, x, b, given(me, b), y, at(ws, me.worker * wn), G, C, F, I0, I1, I2, O0, O1, O2,
            K0, K1, K2, S0, S1, S2, P0, P1, P2, L0, L1, L2,
            *forward_of(me, act, alpha, mean, factor, offset, other))  # fmt: skip


@kernel
def conv_transpose_bwd_w(
    me, phases, rows, inner, in_rows, in_inner, N, I0, I1, I2, O0, O1, O2, G, C, F, K0, K1, K2, S0, S1, S2, P0, P1, P2,
    L0, L1, L2, acc, wn, x: Ptr, dy: Ptr, dwt: Ptr, db: Ptr, ws: Ptr,
):  # fmt: skip
    """dwt[k,c,f] (+)= sum_n,o dy[n,o*S+k*L-P,c]*x[n,o,f]; db[c] (+)= sum_n,i dy[n,i,c].  Workers own rows of dwt."""
    sums_of_columns(me, in_rows * in_inner, G * C, dy, db, acc)
    lo, hi = share(me, K0 * K1 * K2 * C)
    correlated(lo, hi, rows * inner, acc, dy, x, dwt, at(ws, me.worker * wn), G, C, F, I0, I1, I2, O0, O1, O2,
               K0, K1, K2, S0, S1, S2, P0, P1, P2, L0, L1, L2)  # fmt: skip


@kernel
def conv_transpose_bwd_x(
    me, rows, inner, in_rows, in_inner, N, I0, I1, I2, O0, O1, O2, G, C, F, K0, K1, K2, S0, S1, S2, P0, P1, P2, L0, L1,
    L2, act, alpha: Float, wn, wt: Ptr, dy: Ptr, dx: Ptr, other: Ptr, ya: Ptr, ws: Ptr,
):  # fmt: skip
    """dx[n,o,f] = sum_k,c dy[n,o*S+k*L-P,c]*wt[k,c,f]; `backward_of`.  Workers own rows of dx."""
    lo, hi = share(me, rows)
    convolved(lo * inner, hi * inner, dy, wt, dx, False, dx, at(ws, me.worker * wn), wn, G, C, F, I0, I1, I2,
              O0, O1, O2, K0, K1, K2, S0, S1, S2, P0, P1, P2, L0, L1, L2,
              *backward_of(me, act, alpha, other, ya))  # fmt: skip
