"""Layers that move elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.aten.shapes import repeat, unsqueeze
from calcvm.frontends.building import Building, Cannot, arranged
from calcvm.frontends.keras.declared import FIRST, keras


@keras("Flatten")
def flatten(b: Building, x: Any, *, data_format: str | None = None, **_: Any) -> Arranged:
    x = arranged(b, x)
    if data_format == FIRST and x.rank > 1:
        x = x.permuted([0, *range(2, x.rank), 1])
    return x.reshaped([x.shape[0], -1])


@keras("Reshape")
def reshape(b: Building, x: Any, *, target_shape: Sequence[int], **_: Any) -> Arranged:
    x = arranged(b, x)
    return x.reshaped([x.shape[0], *target_shape])


@keras("Permute")
def permute(b: Building, x: Any, *, dims: Sequence[int], **_: Any) -> Arranged:
    return arranged(b, x).permuted([0, *dims])


@keras("RepeatVector")
def repeat_vector(b: Building, x: Any, *, n: int, **_: Any) -> Arranged:
    return repeat(b, unsqueeze(b, arranged(b, x), 1), [1, n, 1])


# ---------------------------------------------------------------- steps as samples: TimeDistributed
@keras("steps.apart")
def steps_apart(b: Building, x: Any, **_: Any) -> Arranged:
    """(N, T, ...) as (N * T, ...)."""
    if b.training:
        raise Cannot("the layer inside takes statistics of each step in training")
    x = arranged(b, x)
    return x.reshaped([x.shape[0] * x.shape[1].b, *x.shape[2:]])


@keras("steps.together")
def steps_together(b: Building, y: Any, x: Any, **_: Any) -> Arranged:
    """(N * T, ...) as (N, T, ...), as x has them."""
    y = arranged(b, y)
    return y.reshaped([*x.shape[:2], *y.shape[1:]])
