"""Epilogues: work on a block of a row's result while it is still in cache (`calcvm.ops.epilogues`)."""

from __future__ import annotations

from typing import Any

from calcvm.formulas.elementwise import ACTIVATIONS, ELEMENTWISE, elu_by_output
from calcvm.kernels_cpu._columns import rows_of
from calcvm.kernels_cpu._common import at, given, njit, routine
from calcvm.kernels_cpu._formulas import fma
from calcvm.kernels_cpu._math import elementwise

NONE, RELU, LEAKY_RELU, SIGMOID, TANH, ELU, RELU6, SILU, HARD_SWISH = range(len(ACTIVATIONS))
BLOCK = 4096  # elements
NORMALIZED, SHIFTED, ADDED, SLOPE = 1 << 8, 1 << 9, 1 << 10, 1 << 11  # flags beside an activation: further work


def _act(name: str, slope: bool = True) -> tuple[Any, Any]:
    """The loops of an activation, y = act(x), and of its derivative from its output: d = d * act'(.)."""
    op = ELEMENTWISE[name]
    params = "f" * len(op.params)
    backward = elementwise(op.backward["x"].variant(), "vv", params) if slope else None
    return elementwise(op.forward.variant(), "v", params), backward


def normalised(x: Any, m: Any, a: Any, c: Any) -> Any:
    return fma(x - m, a, c)


relu, drelu = _act("relu")
leaky, dleaky = _act("leaky_relu")
sigmoid, dsigmoid = _act("sigmoid")
tanh, dtanh = _act("tanh")
elu, delu = _act("elu", slope=False)[0], elementwise(elu_by_output, "vv", "f")
relu6, drelu6 = _act("relu6")
silu, _ = _act("silu", slope=False)
hard_swish, _ = _act("hard_swish", slope=False)
_plus = elementwise(lambda x, y: x + y, "vv")
_normalise = rows_of(normalised, 1, "vv0", lambda m, a, c: (m, a, c))


@routine("ipid")
def activate(n, y, act, alpha):
    """y = act(y); a routine, so that rows without an activation do not load its constants."""
    if act == SIGMOID:
        sigmoid(n, y, y)
    elif act == RELU:
        relu(n, y, y)
    elif act == TANH:
        tanh(n, y, y)
    elif act == LEAKY_RELU:
        leaky(n, y, y, alpha)
    elif act == ELU:
        elu(n, y, y, alpha)
    elif act == RELU6:
        relu6(n, y, y)
    elif act == SILU:
        silu(n, y, y)
    elif act == HARD_SWISH:
        hard_swish(n, y, y)


@routine("ippid")
def scale_by_derivative(n, d, y, act, alpha):
    """d *= act'(.), the derivative computed from the activation's output y."""
    if act == SIGMOID:
        dsigmoid(n, d, y, d)
    elif act == RELU:
        drelu(n, d, y, d)
    elif act == TANH:
        dtanh(n, d, y, d)
    elif act == LEAKY_RELU:
        dleaky(n, d, y, d, alpha)
    elif act == ELU:
        delu(n, d, y, d, alpha)
    elif act == RELU6:
        drelu6(n, d, y, d)


# ---------------------------------------------------------------- all epilogues
# A row's epilogue is a tuple: (what, alpha, then per column mean, factor, offset, then per element other, ya).
@njit(inline=True)
def forward_of(me, act, alpha, mean, factor, offset, other):
    what = act + (NORMALIZED if given(me, factor) else 0) + (SHIFTED if given(me, offset) else 0)
    return what + (ADDED if given(me, other) else 0), alpha, mean, factor, offset, other, other


@njit(inline=True)
def backward_of(me, act, alpha, other, ya):
    what = (act + SLOPE if act != NONE else 0) + (ADDED if given(me, other) else 0)
    return what, alpha, other, other, other, other, ya


@njit(inline=True)
def after(me, act, alpha, other):
    """The epilogue of a row that normalizes."""
    return act + (ADDED if given(me, other) else 0), alpha, other, other, other, other, other


@njit(inline=True)
def block_of(n, rows, todo):
    """How many rows of n columns stay in cache until the epilogue is done; all rows if there is none."""
    return max(BLOCK // max(n, 1), 1) if todo[0] != NONE else max(rows, 1)


@njit(inline=True)
def from_column(j, todo):
    """The epilogue of the columns from j on."""
    what, alpha, mean, factor, offset, other, ya = todo
    return what, alpha, at(mean, j), at(factor, j), at(offset, j), at(other, j), at(ya, j)


@njit(inline=True)
def finish(m, n, stride, y, at_y, todo):
    """The epilogue of a block: m rows of n columns, ``stride`` apart, which begin at element ``at_y`` of the result."""
    what, alpha, mean, factor, offset, other, ya = todo
    if what != NONE:
        complete(m, n, stride, at(y, at_y), what, alpha, mean, factor, offset, at(other, at_y), at(ya, at_y))


@routine("iiipidppppp")
def complete(m, n, stride, y, what, alpha, mean, factor, offset, other, ya):
    """y = act((y - mean)*factor + offset + other), or (y + other)*act'(.); the flags in ``what`` select the parts."""
    if what & NORMALIZED:
        _normalise(n, m, stride, y, y, mean, factor, offset, what & SHIFTED)
    if stride == n:
        m, n = 1, m * n
    act = what & 0xFF
    for i in range(m):
        row = i * stride
        yi = at(y, row)
        if what & ADDED:
            _plus(n, yi, at(other, row), yi)
        if what & SLOPE:
            scale_by_derivative(n, yi, at(ya, row), act, alpha)
        elif act != NONE:
            activate(n, yi, act, alpha)
