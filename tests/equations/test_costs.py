"""Derived gradients cost at most a quarter more than those written by hand: operations, and large arrays touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from calcvm.equations.cost import Cost, cost
from calcvm.equations.gradient import gradient
from calcvm.equations.grammar import read
from calcvm.equations.ranges import Ranges, ranges
from calcvm.equations.text import show_equations
from tests.equations.peers import LAYER_NORM, SOFTMAX

X, DY = dict(x=(64, 96)), dict(dy=(64, 96))
OF_SOFTMAX = "t[r] = sum[k] dy[r,k]*y[r,k]; dx[r,j] = y[r,j]*(dy[r,j] - t[r])", {**DY, "y": (64, 96)}
# name: forward, shapes of its operands, the backward by hand, shapes of what that reads
BY_HAND: dict[str, tuple[str, dict, str, dict]] = {
    "softmax, max stopped": (SOFTMAX.format("stop(max[k] x[r,k])"), X, *OF_SOFTMAX),
    "softmax, max not stopped": (SOFTMAX.format("max[k] x[r,k]"), X, *OF_SOFTMAX),
    "softmax by logsumexp": ("y[r,j] = exp(x[r,j] - logsumexp[k] x[r,k])", X, *OF_SOFTMAX),
    "log_softmax": (
        "y[r,j] = x[r,j] - logsumexp[k] x[r,k]",
        X,
        "t[r] = sum[k] dy[r,k]; dx[r,j] = dy[r,j] - exp(y[r,j])*t[r]",
        {**DY, "y": (64, 96)},
    ),
    "layer_norm": (
        LAYER_NORM,
        {**X, "g": (96,), "b": (96,)},
        "a[r] = (sum[n] dy[r,n]*g[n])/96; c[r] = (sum[n] dy[r,n]*g[n]*(x[r,n] - m[r])*i[r])/96;"
        "dg[n] = sum[r] dy[r,n]*(x[r,n] - m[r])*i[r]; db[n] = sum[r] dy[r,n];"
        "dx[r,n] = i[r]*(dy[r,n]*g[n] - a[r] - (x[r,n] - m[r])*i[r]*c[r])",
        {**DY, **X, "g": (96,), "m": (64,), "i": (64,)},
    ),
    "conv1d": (
        "y[n,o,f] = sum[t,c] x[n, o*2 + t - 1, c]*w[t,c,f]",
        dict(x=(4, 32, 8), w=(3, 8, 8)),
        "dx[n,i<32,c] = sum[t,f] dy[n, (i + 1 - t)/2, f]*w[t,c,f]; dw[t<3,c,f] = sum[n,o] dy[n,o,f]*x[n, o*2 + t - 1, c]",
        dict(dy=(4, 16, 8), x=(4, 32, 8), w=(3, 8, 8)),
    ),
    "max_pool": (
        "y[n,o,c] = max[t<3] x[n, o*2 + t - 1, c; -inf]",
        dict(x=(4, 32, 8)),
        "index[n,o<16,c] = argmax[t<3] x[n, o*2 + t - 1, c; -inf];"
        "dx[n,i<32,c] = sum[t<3] where(t == index[n, (i + 1 - t)/2, c; -1], dy[n, (i + 1 - t)/2, c], 0)",
        dict(dy=(4, 16, 8), x=(4, 32, 8)),
    ),
    "attention": (
        "s[b,q,k] = sum[e] x[b,q,e]*z[b,k,e]; l[b,q] = logsumexp[k] s[b,q,k]; p[b,q,k] = exp(s[b,q,k] - l[b,q]);"
        "y[b,q,e] = sum[k] p[b,q,k]*w[b,k,e]",
        dict(x=(4, 32, 16), z=(4, 32, 16), w=(4, 32, 16)),
        "t[b,q] = sum[e] dy[b,q,e]*y[b,q,e]; dp[b,q,k] = sum[e] dy[b,q,e]*w[b,k,e]; ds[b,q,k] = p[b,q,k]*(dp[b,q,k] - t[b,q]);"
        "dx[b,q,e] = sum[k] ds[b,q,k]*z[b,k,e]; dz[b,k,e] = sum[q] ds[b,q,k]*x[b,q,e]; dw[b,k,e] = sum[q] p[b,q,k]*dy[b,q,e]",
        {"p": (4, 32, 32), **dict.fromkeys(["x", "z", "w", "y", "dy"], (4, 32, 16))},
    ),
    "bilinear": (
        "y[b,o] = sum[i,j] x[b,i]*w[i,j,o]*z[b,j]",
        dict(x=(64, 8), w=(8, 16, 32), z=(64, 16)),
        "t[b,i,o] = sum[j] w[i,j,o]*z[b,j]; dx[b,i] = sum[o] dy[b,o]*t[b,i,o]; u[b,i,j] = sum[o] dy[b,o]*w[i,j,o];"
        "dz[b,j] = sum[i] u[b,i,j]*x[b,i]; v[b,i,o] = dy[b,o]*x[b,i]; dw[i,j,o] = sum[b] v[b,i,o]*z[b,j]",
        dict(dy=(64, 32), x=(64, 8), w=(8, 16, 32), z=(64, 16)),
    ),
    "embedding": (
        "y[r,c] = w[index[r], c]",
        dict(w=(1000, 64), index=(4096,)),
        "dw[j<1000,c] = sum[r] where(j == index[r], dy[r,c], 0)",
        dict(dy=(4096, 64), index=(4096,)),
    ),
    "cumsum": ("y[r,i] = y[r,i - 1] + x[r,i]", X, "dx[r,i] = dx[r,i + 1] + dy[r,i]", DY),
}


def costs(name: str) -> tuple[Cost, Cost, str, Ranges]:
    """Of the derived backward, and of that by hand."""
    text, shapes, hand, reads = BY_HAND[name]
    forward = read(text)
    found = ranges(forward, shapes, {})
    made = gradient(forward, [k for k in shapes if k != "index"], ["y"], found, ["index"])
    known = ranges(made.forward, shapes, {})
    given: dict[str, Any] = {**known.shapes, "dy": known.shapes["y"]}
    derived = ranges(made.backward, given, {})
    by_hand = read(hand)
    return (
        cost(made.backward, derived),
        cost(by_hand, ranges(by_hand, reads, {})),
        show_equations(made.backward),
        known,
    )


@pytest.mark.parametrize("name", BY_HAND)
def test_a_derived_gradient_costs_no_more_than_by_hand(name: str) -> None:
    derived, hand, text, _ = costs(name)
    assert derived.operations <= 1.25 * hand.operations, text
    assert derived.large <= 1.25 * hand.large, text
    assert derived.touched <= 1.25 * hand.touched, text


def test_the_cost_of_an_equation_is_that_of_its_loops() -> None:
    equations = read("t[r] = sum[k] x[r,k]*x[r,k]; y[r,k] = x[r,k]*2 + exp(t[r])")
    assert cost(equations, ranges(equations, dict(x=(4, 10)), {})) == Cost(
        operations=2 * 40 + 2 * 40 + 4, touched=40 + 4 + 40 + 4 + 40, large=1 + 2
    )


def test_a_scatter_costs_what_it_adds() -> None:
    _, hand, _, known = costs("embedding")
    assert hand.operations == int(np.prod(known.shapes["y"]))
