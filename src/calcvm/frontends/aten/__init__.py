"""Operators of PyTorch's library ATen, as `torch.export` writes them, by operators of calcvm."""

from calcvm.frontends.aten import elementwise, layers, places, reductions, shapes
from calcvm.frontends.aten.declared import ACROSS, ATEN, CHECKS, GETITEM, RANDOM, SIZE, counterpart

__all__ = [
    "ACROSS", "ATEN", "CHECKS", "GETITEM", "RANDOM", "SIZE", "counterpart", "elementwise", "layers", "places", "reductions", "shapes",
]  # fmt: skip
