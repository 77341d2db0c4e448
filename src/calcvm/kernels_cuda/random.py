"""Random kernels: a hash of (seed, counter, stream, element index), the same bits as the CPU's."""

from __future__ import annotations

import numpy as np

from calcvm.kernel import words
from calcvm.kernels_cuda._common import Float, Ptr, first, given, kernel, kernel_as, share
from calcvm.kernels_cuda._cuda import at, device, like, thread, threads
from calcvm.kernels_cuda._loops import digits, elementwise, onward
from calcvm.kernels_cuda._reduce import divide
from calcvm.kernels_shared.random import ALL, hashing
from calcvm.kernels_shared.resizing import padding_of

mix, _key, _bits = hashing(device, np.uint64, device(lambda z, n: z >> np.uint64(n)))


@device
def _dropout(x, i, scale, key, threshold):
    """x*scale if the element's random bits are not below the threshold, else 0."""
    return x * scale if _bits(key, i) >= threshold else like(x, 0)


@device
def _params(rng, rate, stream, x):
    """`_dropout`'s arguments besides elements."""
    p = rate[0]
    p = like(p, 0) if not p > 0 else like(p, 1) if p > 1 else p
    return like(x, 1.0 / (1.0 - p)), _key(rng[0], rng[1], stream), np.uint64(p * ALL)


_dropped = elementwise(_dropout, indexed=True)


@kernel_as("dropout_fwd", words("rows cols stream", "", ("x", "rng.int64", "rate.float64", "y")))
@kernel_as("dropout_bwd", words("rows cols stream", "", ("dy", "rng.int64", "rate.float64", "dx")))
def _drop(me, rows, cols, stream, x, rng, rate, y):
    """y = x/(1 - rate) where the hash of (seed, counter, stream, i) keeps i, else 0; rows are shared; in place."""
    lo, hi = share(me, rows)
    _dropped(lo * cols, hi * cols, (x,), y, _params(rng, rate, stream, x))


@kernel
def dropout_mask_fwd(me, rows, cols, stream, rng: Ptr.int64, rate: Ptr.float64, y: Ptr):
    """y = 1/(1 - rate) where the hash of (seed, counter, stream, i) keeps i, else 0; rows are shared."""
    lo, hi = share(me, rows)
    scale, key, threshold = _params(rng, rate, stream, y)
    i = lo * cols + thread()
    while i < hi * cols:
        y[i] = _dropout(like(y, 1), i, scale, key, threshold)
        i += threads()


# ---------------------------------------------------------------- augmentation of images
_shows = device(padding_of)


@device
def _source(drawn, key, k, mode, o, e, d, p, rate):
    """The element of an axis of d that element o of a crop of e takes, or -1; k : the image's number for this axis."""
    room = d + 2 * p - e
    start = divide(room, 2)
    if drawn:
        bits = np.int64(_bits(key, k))
        start = bits - divide(bits, room + 1) * (room + 1)
        if _bits(key, k + 3) < np.uint64(rate * ALL):
            o = e - 1 - o
    return _shows(mode, start + o, d, p)


@kernel
def crop_fwd(
    me, N, A, D, H, W, C, ED, EH, EW, pd, ph, pw, mode, stream, fd: Float, fh: Float, fw: Float,
    x: Ptr.cells, rng: Ptr.int64, y: Ptr.cells,
):  # fmt: skip
    """y[n] = a part of the padded x[n], mirrored or not.  x (N,A,D,H,W,C), y (N,A,ED,EH,EW,C); N*A*ED is shared."""
    lo, hi = share(me, N * A * ED)
    drawn, key = given(me, rng), np.uint64(0)
    if drawn:
        key = _key(rng[0], rng[1], stream)
    unit, inner, i = EH * EW * C, (1, 1, EH, EW, C), thread()
    y = at(y, lo * unit)
    if (hi - lo) * unit > 0:
        o, step = digits(thread(), inner), digits(threads(), inner)
        while i < (hi - lo) * unit:
            plane = divide(lo + o[0], ED)
            k = divide(plane, A) * 6
            d = _source(drawn, key, k, mode, lo + o[0] - plane * ED, ED, D, pd, fd)
            h = _source(drawn, key, k + 1, mode, o[3], EH, H, ph, fh)
            w = _source(drawn, key, k + 2, mode, o[4], EW, W, pw, fw)
            y[i] = like(y, 0) if min(min(d, h), w) < 0 else x[(((plane * D + d) * H + h) * W + w) * C + o[5]]
            o = onward(o, step, inner)
            i += threads()


@kernel
def rng_advance(me, rng: Ptr.int64):
    """rng.counter += 1; one thread."""
    if first(me):
        rng[1] += 1
