"""Operators of PyTorch's library ATen, as `torch.export` writes them, by operators of calcvm."""

from calcvm.frontends.aten import elementwise, layers, places, reductions, shapes
from calcvm.frontends.aten.declared import (
    ACROSS,
    ATEN,
    CHECKS,
    FLOATS,
    GETITEM,
    RANDOM,
    SIZE,
    Cannot,
    Filled,
    counterpart,
    variable,
)

__all__ = [
    "ACROSS", "ATEN", "CHECKS", "FLOATS", "GETITEM", "RANDOM", "SIZE", "Cannot", "Filled", "counterpart", "elementwise", "layers", "places",
    "reductions", "shapes", "variable",
]  # fmt: skip
