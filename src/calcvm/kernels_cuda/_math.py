"""Elementary functions in the dtype of their argument: libdevice's on the device, NumPy's in the simulator.

NaN and infinities stay what IEEE 754 says.  A formula over float32 must not meet a float64, which a GPU computes
at a small fraction of its speed: constants are written ``like(x, 0.5)``, and a test looks for float64 in the PTX.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from calcvm.kernels_cuda._cuda import compiled_by, device, like, overload


def _libm(name: str, simulate: Callable, native: Callable, arity: int = 1) -> Any:
    """A function of one or two numbers with a face for each world."""
    arguments = ", ".join("xyz"[:arity])
    scope: dict[str, Any] = {"simulate": simulate, "native": native}
    exec(f"def {name}({arguments}): return simulate({arguments})", scope)
    exec(f"def choose({arguments}):\n    def f({arguments}): return native({arguments})\n    return f", scope)
    overload(scope[name], jit_options={"forceinline": True})(scope["choose"])
    return scope[name]


exp = _libm("exp", np.exp, math.exp)
expm1 = _libm("expm1", np.expm1, math.expm1)
log = _libm("log", np.log, math.log)
log1p = _libm("log1p", np.log1p, math.log1p)
sqrt = _libm("sqrt", np.sqrt, math.sqrt)
tanh = _libm("tanh", np.tanh, math.tanh)
cos = _libm("cos", np.cos, math.cos)
fabs = _libm("fabs", np.abs, math.fabs)
floor = _libm("floor", np.floor, math.floor)
copysign = _libm("copysign", np.copysign, math.copysign, 2)
power = _libm("power", np.power, math.pow, 2)
erf = _libm("erf", lambda x: x.dtype.type(math.erf(x)), math.erf)


@compiled_by(lambda tc, x, y, z: (x(x, x, x), lambda ctx, b, sig, args: b.fma(*args)))
def fma(x, y, z):
    """x*y + z, rounded once (in the simulator twice).

    Written where a sum of a product occurs: an assembler that is free to choose might fuse it in one loop of a
    formula and not in another, and the bits of an element would depend on its loop.
    """
    return x * y + z


# ---------------------------------------------------------------- activations, and gradients by their outputs
# Alone and inside a linear row they are these, so that fusion changes no bit.
@device
def relu(x):
    return like(x, 0) if x < like(x, 0) else x


@device
def relu_slope(dy, y):
    return like(y, 0) if y <= like(y, 0) else dy


@device
def leaky_relu(x, alpha):
    return x if x > like(x, 0) else alpha * x


@device
def leaky_relu_slope(dy, y, alpha):
    return dy if y > like(y, 0) else alpha * dy


@device
def sigmoid(x):
    return like(x, 1) / (like(x, 1) + exp(-x))


@device
def sigmoid_slope(dy, y):
    return dy * (y * (like(y, 1) - y))


@device
def tanh_slope(dy, y):
    return dy * fma(-y, y, like(y, 1))


@device
def elu(x, alpha):
    return x if x > like(x, 0) else alpha * expm1(x)


@device
def elu_slope(dy, y, alpha):
    return dy if y > like(y, 0) else dy * (y + alpha)
