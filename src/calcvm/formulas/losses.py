"""Losses over pairs of equal shape: a prediction x and a target t.

``term`` is the loss of an element, ``dx`` and ``dt`` are its slopes; the loss is the mean of the terms.  The slopes are
multiplied by ``factor`` last: some slopes are finite only after scaling to an element's share of the mean.
"""

from __future__ import annotations

import math
from typing import Any

from calcvm.formulas import number as n
from calcvm.formulas.declare import PAIR_LOSSES, Real, pair_loss
from calcvm.formulas.elementwise import logistic_loss, logistic_slope, step

__all__ = ["PAIR_LOSSES"]


@pair_loss(source="torch.nn.BCEWithLogitsLoss: x are logits, t probabilities")
class binary_cross_entropy:
    def term(x, t):
        return logistic_loss(x, t)

    def dx(x, t):
        return logistic_slope(x, t)

    def dt(x):
        return -x


@pair_loss()
class mse:
    factor = 2

    def term(x, t):
        return (x - t) * (x - t)

    def dx(x, t):
        return x - t

    def dt(x, t):
        return t - x


@pair_loss(source="the derivative at x = t is 0, as in PyTorch")
class mae:
    def term(x, t):
        return n.fabs(x - t)

    def dx(x, t):
        return step(x - t)

    def dt(x, t):
        return step(t - x)


@pair_loss(source="log(cosh(x - t)), in terms that do not overflow")
class log_cosh:
    def term(x, t):
        d = n.fabs(x - t)
        return d + n.log1p(n.exp(-2 * d)) - LOG_2

    def dx(x, t):
        return n.tanh(x - t)

    def dt(x, t):
        return n.tanh(t - x)


LOG_2 = math.log(2)


@pair_loss(
    delta=Real(1.0, "where the parabola becomes a line, > 0", lo=0.0, open=True),
    source="Huber 1964; torch.nn.HuberLoss",
)
class huber:
    def term(x, t, delta):
        e = n.fabs(x - t)
        return n.where(e <= delta, e * e * 0.5, delta * (e - delta * 0.5))

    def dx(x, t, delta):
        return _within(x - t, delta)

    def dt(x, t, delta):
        return _within(t - x, delta)


def _within(d: Any, delta: Any) -> Any:
    d = n.where(d > delta, delta, d)
    return n.where(d < -delta, -delta, d)
