"""Random kernels: a hash of (seed, counter, stream, element index), by vectors."""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic
from numpy import int64

from calcvm.kernel import words
from calcvm.kernels_cpu._common import I64, INT, Float, Ptr, at, given, kernel, kernel_as, like, njit, share
from calcvm.kernels_cpu._formulas import V
from calcvm.kernels_cpu._math import copy, elementwise, fill
from calcvm.kernels_shared.random import ALL, hashing
from calcvm.kernels_shared.resizing import padding_of


def _wide(x: V) -> V:
    """Integers as such of 64 bits."""
    return x if x.is_f64 else V(x.b, x.b.sext(x.v, x.over(I64)))


_mix, _key, _bits = hashing(lambda fn: fn, _wide, V.shift_right)


@intrinsic
def key_of(tc, seed, counter, stream):
    """The key with which a row of a step hashes its element indexes."""
    i64 = types.int64
    return i64(i64, i64, i64), lambda ctx, b, sig, args: _key(*(V(b, a) for a in args)).v


@intrinsic
def bits_of(tc, key, index):
    """62 random bits of an element, as an integer."""
    i64 = types.int64
    return i64(i64, i64), lambda ctx, b, sig, args: _bits(*(V(b, a) for a in args)).v


def _dropout(x: V, index: V, scale: V, key: V, threshold: V) -> V:
    """x*scale if the element's random bits are not below the threshold, else 0."""
    return (x * scale).where(_bits(key, index) >= threshold, 0.0)


_loop_dropout = elementwise(_dropout, "v", "fll", indexed=True)


@njit
def _masked(n, first, stream, x, rng, rate, y):
    """x/(1 - rate) or 0 for n elements, from the ``first`` of a row on; y may be x."""
    p = rate[0]
    p = 0.0 if not p > 0 else 1.0 if p > 1 else p
    _loop_dropout(n, x, y, first, like(x, 1.0 / (1.0 - p)), key_of(rng[0], rng[1], stream), int64(p * ALL))


@kernel_as("dropout_fwd", words("rows cols stream", "", ("x", "rng.int64", "rate.float64", "y")))
@kernel_as("dropout_bwd", words("rows cols stream", "", ("dy", "rng.int64", "rate.float64", "dx")))
def _drop(me, rows, cols, stream, x, rng, rate, y):
    """y = x/(1 - rate) where the hash of (seed, counter, stream, i) keeps i, else 0; rows are shared; in place."""
    lo, hi = share(me, rows)
    i = lo * cols
    _masked((hi - lo) * cols, i, stream, at(x, i), rng, rate, at(y, i))


@kernel
def dropout_mask_fwd(me, rows, cols, stream, rng: Ptr.int64, rate: Ptr.float64, y: Ptr):
    """y = 1/(1 - rate) where the hash of (seed, counter, stream, i) keeps i, else 0; rows are shared."""
    lo, hi = share(me, rows)
    i, n = lo * cols, (hi - lo) * cols
    fill(n, at(y, i), like(y, 1))
    _masked(n, i, stream, at(y, i), rng, rate, at(y, i))


# ---------------------------------------------------------------- augmentation of images
_shows = njit(padding_of)


@njit
def _drawn(drawn, key, k, room, rate):
    """The start of a crop along an axis, one of ``room`` + 1 places, and whether it is mirrored; k : the image's number for this axis."""
    if not drawn:
        return room // 2, False
    return INT(bits_of(key, k) % (room + 1)), bits_of(key, k + 3) < int64(rate * ALL)


@njit
def _shown_at(mode, o, e, d, p, start, mirrored):
    """The element of an axis of d that element o of a crop of e takes, or -1."""
    return _shows(mode, start + (e - 1 - o if mirrored else o), d, p)


@kernel
def crop_fwd(
    me, N, A, D, H, W, C, ED, EH, EW, pd, ph, pw, mode, stream, fd: Float, fh: Float, fw: Float,
    x: Ptr.cells, rng: Ptr.int64, y: Ptr.cells,
):  # fmt: skip
    """y[n] = a part of the padded x[n], mirrored or not.  x (N,A,D,H,W,C), y (N,A,ED,EH,EW,C); N*A*ED is shared."""
    lo, hi = share(me, N * A * ED)
    drawn = given(me, rng)
    key = key_of(rng[0], rng[1], stream) if drawn else 0
    line, k = EW * C, -1
    sd, sh, sw, md, mh, mw = 0, 0, 0, False, False, False
    for u in range(lo, hi):
        plane = u // ED
        if plane // A * 6 != k:  # once per image
            k = plane // A * 6
            sd, md = _drawn(drawn, key, k, D + 2 * pd - ED, fd)
            sh, mh = _drawn(drawn, key, k + 1, H + 2 * ph - EH, fh)
            sw, mw = _drawn(drawn, key, k + 2, W + 2 * pw - EW, fw)
        first, last = (0, 0) if mw else (max(pw - sw, 0), min(W + pw - sw, EW))  # the part that lies in x as in y
        d = _shown_at(mode, u % ED, ED, D, pd, sd, md)
        for o in range(EH):
            h = _shown_at(mode, o, EH, H, ph, sh, mh)
            to, from_ = at(y, (u * EH + o) * line), at(x, ((plane * D + d) * H + h) * W * C)
            if min(d, h) < 0:
                fill(line, to, like(y, 0))
                continue
            if first < last:
                copy((last - first) * C, at(from_, (first + sw - pw) * C), at(to, first * C))
            for i in range(EW - max(last - first, 0)):
                i = i if i < first or first >= last else i + last - first
                w = _shown_at(mode, i, EW, W, pw, sw, mw)
                for c in range(C):
                    to[i * C + c] = from_[w * C + c] if w >= 0 else like(y, 0)


@kernel
def rng_advance(me, rng: Ptr.int64):
    """rng.counter += 1; worker 0."""
    if me.worker == 0:
        rng[1] += 1
