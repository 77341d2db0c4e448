"""Operators of ONNX by operators of calcvm."""

from calcvm.frontends.onnx import (
    attention,
    elementwise,
    layers,
    places,
    quantized,
    recurrent,
    reductions,
    resize,
    sampling,
    shapes,
    signals,
)
from calcvm.frontends.onnx.declared import ONNX, counterpart

__all__ = [
    "ONNX", "attention", "counterpart", "elementwise", "layers", "places", "quantized", "recurrent", "reductions", "resize", "sampling",
    "shapes", "signals",
]  # fmt: skip
