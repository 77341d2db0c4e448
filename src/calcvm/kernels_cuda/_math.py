"""Elementary functions in the dtype of their argument: libdevice's on the device, NumPy's in the simulator.

NaN and infinities follow IEEE 754.  A formula over float32 must not meet a float64, which a GPU computes at a small
fraction of its speed: constants are written ``like(x, 0.5)``, and a test searches the PTX for float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from calcvm.kernels_cuda._cuda import call_of, compiled_by


def _libm(simulate: Callable, native: Callable) -> Any:
    """A function of numbers, implemented for both worlds."""

    def codegen(tc, *args):
        result, call = call_of(tc, native, args)
        return result(*args), lambda ctx, b, sig, values: call(ctx, b, values)

    @compiled_by(codegen)
    def simulated(*args):
        return simulate(*args)

    return simulated


exp = _libm(np.exp, math.exp)
expm1 = _libm(np.expm1, math.expm1)
log = _libm(np.log, math.log)
log1p = _libm(np.log1p, math.log1p)
sqrt = _libm(np.sqrt, math.sqrt)
tanh = _libm(np.tanh, math.tanh)
cos = _libm(np.cos, math.cos)
fabs = _libm(np.abs, math.fabs)
floor = _libm(np.floor, math.floor)
copysign = _libm(np.copysign, math.copysign)
power = _libm(np.power, math.pow)
erf = _libm(lambda x: x.dtype.type(math.erf(x)), math.erf)


@compiled_by(lambda tc, x, y, z: (x(x, x, x), lambda ctx, b, sig, args: b.fma(*args)))
def fma(x, y, z):
    """x*y + z, rounded once (in the simulator twice).

    It is written out wherever a product is added: an assembler that is free to choose might fuse them in one loop of a
    formula and not in another, and an element's bits would depend on its loop.
    """
    return x * y + z
