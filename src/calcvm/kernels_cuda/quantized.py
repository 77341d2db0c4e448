"""Kernels of int8, by the loops of `calcvm.kernels_shared.quantized`: a thread computes an element."""

from __future__ import annotations

from calcvm.kernels_cuda._common import kernel, kernel_as, share
from calcvm.kernels_cuda._cuda import at, device, like, thread, threads
from calcvm.kernels_cuda.pooling import taps
from calcvm.kernels_shared.quantized import arithmetic, products, register

_, _as_int8 = arithmetic(device, like)


@device
def _each(me, units, size, body, given):
    lo, hi = share(me, units)
    e = lo * size + thread()
    while e < hi * size:
        body(e, given)
        e += threads()


@device
def _dot(sums, n, x, w, apart):
    (s,) = sums
    for k in range(n):
        s += int(x[k]) * int(w[k])
    return (s,)


@device
def _put(y, e, sums, scale, j, lo):
    y[e] = _as_int8(y, sums[0], int(scale[j]), lo)


_product = products(device, at, taps, 1, device(lambda b, j: (int(b[j]),)), _dot, _put)


@device
def _multiply(me, units, size, F, given):
    _each(me, units, size * F, _product, given)


register(kernel, kernel_as, device, like, _each, taps, _multiply)
