"""Kernels of int8, by the loops of `calcvm.kernels_shared.quantized`: four outputs at a time, for which x is read once."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from calcvm.kernels_cpu._common import I32, at, fact, kernel, kernel_as, like, njit, share
from calcvm.kernels_cpu._target import current
from calcvm.kernels_cpu.pooling import taps
from calcvm.kernels_shared.quantized import arithmetic, products, register

_, _as_int8 = arithmetic(njit, like)


@njit(inline=True)
def _each(me, units, size, body, given):
    lo, hi = share(me, units)
    for e in range(lo * size, hi * size):
        body(e, given)


@njit(inline=True)
def _dot(sums, n, x, w, apart):
    (s,) = sums
    for k in range(n):
        s = like(s, s + x[k] * w[k])
    return (s,)


@njit(inline=True)
def _put(y, e, sums, scale, j, lo):
    y[e] = _as_int8(y, sums[0], scale[j], lo)


has_dsp = fact(lambda target: target.dsp, types.boolean)


@intrinsic
def _four_products(tc, total, x, w):
    """The sum of int32 with four products of int8, by two instructions that multiply pairs."""

    def codegen(ctx, b, sig, args):
        def call(name, *given):
            of = ir.FunctionType(I32, [I32] * len(given))
            return b.call(cgutils.get_or_insert_function(b.module, of, f"llvm.{name}"), list(given))

        total, *of = args
        if not current().dsp:  # where nothing calls it
            return total
        words = [b.load(b.bitcast(p, I32.as_pointer()), align=1) for p in of]
        for turned in (words, [call("fshr.i32", v, v, I32(8)) for v in words]):
            total = call("arm.smlad", *(call("arm.sxtb16", v) for v in turned), total)
        return total

    return total(total, x, w), codegen


@njit(inline=True)
def _dot4(sums, n, x, w, apart):
    s, t, u, v = sums
    done = 0
    while has_dsp() and done + 4 <= n:
        four, of = at(x, done), at(w, done)
        s, t = _four_products(s, four, of), _four_products(t, four, at(of, apart))
        u, v = _four_products(u, four, at(of, 2 * apart)), _four_products(v, four, at(of, 3 * apart))
        done += 4
    for k in range(done, n):
        at_k = x[k]
        s = like(s, s + at_k * w[k])
        t = like(s, t + at_k * w[k + apart])
        u = like(s, u + at_k * w[k + 2 * apart])
        v = like(s, v + at_k * w[k + 3 * apart])
    return s, t, u, v


@njit(inline=True)
def _put4(y, e, sums, scale, j, lo):
    for k in range(4):
        y[e + k] = _as_int8(y, sums[k], scale[j + k], lo)


_one = products(njit, at, taps, 1, njit(lambda b, j: (b[j],)), _dot, _put)
_four = products(njit, at, taps, 4, njit(lambda b, j: (b[j], b[j + 1], b[j + 2], b[j + 3])), _dot4, _put4)


@njit(inline=True)
def _multiply(me, units, size, F, given):
    if F >= 4:
        _each(me, units, size * ((F + 3) // 4), _four, given)
    else:
        _each(me, units, size * F, _one, given)


register(kernel, kernel_as, njit, like, _each, taps, _multiply)
