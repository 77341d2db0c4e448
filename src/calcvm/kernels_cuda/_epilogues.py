"""Epilogues: work of rows on their results (`calcvm.ops.epilogues`)."""

from __future__ import annotations

from typing import Any

from calcvm.formulas.elementwise import ACTIVATIONS, ELEMENTWISE, elu_by_output
from calcvm.kernels_cuda._common import given
from calcvm.kernels_cuda._cuda import device, like, sync, thread, threads
from calcvm.kernels_cuda._formulas import formula
from calcvm.kernels_cuda._math import fma

NONE, RELU, LEAKY_RELU, SIGMOID, TANH, ELU, RELU6, SILU, HARD_SWISH = range(len(ACTIVATIONS))


def _act(name: str) -> tuple[Any, Any]:
    op = ELEMENTWISE[name]
    return formula(op.forward.variant()), formula(op.backward["x"].variant())


relu, relu_slope = _act("relu")
leaky_relu, leaky_relu_slope = _act("leaky_relu")
sigmoid, sigmoid_slope = _act("sigmoid")
tanh, tanh_slope = _act("tanh")
elu, elu_slope = _act("elu")[0], formula(elu_by_output)
relu6, relu6_slope = _act("relu6")
silu, _ = _act("silu")
hard_swish, _ = _act("hard_swish")


@device
def activated(x, act, alpha):
    """act(x)"""
    a = like(x, alpha)
    if act == RELU:
        x = relu(x)
    elif act == LEAKY_RELU:
        x = leaky_relu(x, a)
    elif act == SIGMOID:
        x = sigmoid(x)
    elif act == TANH:
        x = tanh(x)
    elif act == ELU:
        x = elu(x, a)
    elif act == RELU6:
        x = relu6(x)
    elif act == SILU:
        x = silu(x)
    elif act == HARD_SWISH:
        x = hard_swish(x)
    return x


@device
def sloped(d, y, act, alpha):
    """d*act'(.), the derivative computed from the activation's output y."""
    a = like(d, alpha)
    if act == RELU:
        d = relu_slope(d, y)
    elif act == LEAKY_RELU:
        d = leaky_relu_slope(d, y, a)
    elif act == SIGMOID:
        d = sigmoid_slope(d, y)
    elif act == TANH:
        d = tanh_slope(d, y)
    elif act == ELU:
        d = elu_slope(d, y, a)
    elif act == RELU6:
        d = relu6_slope(d, y)
    return d


@device
def completed(me, x, e, act, alpha, other):
    """act(x + other), for element e."""
    if given(me, other):
        x += other[e]
    return activated(x, act, alpha)


@device
def by_column(me, x, m, a, shift, c):
    """(x - m)*a + shift, for column c."""
    return fma(x - m, a, shift[c] if given(me, shift) else like(x, 0))


@device
def finish(me, lo, hi, N, y, act, alpha, mean, factor, offset, other):
    """y = act((y - mean)*factor + offset + other), for elements [lo, hi) in rows of N."""
    if act != NONE or given(me, factor) or given(me, other):
        sync()
        e = lo + thread()
        while e < hi:
            x, c = y[e], e % N
            if given(me, factor):
                x = by_column(me, x, mean[c], factor[c], offset, c)
            y[e] = completed(me, x, e, act, alpha, other)
            e += threads()
        sync()


@device
def finish_slope(me, lo, hi, d, act, alpha, other, ya):
    """d = (d + other)*act'(.), for elements [lo, hi)."""
    if act != NONE or given(me, other):
        sync()
        e = lo + thread()
        while e < hi:
            x = d[e] + other[e] if given(me, other) else d[e]
            d[e] = sloped(x, ya[e], act, alpha) if act != NONE else x
            e += threads()
        sync()
