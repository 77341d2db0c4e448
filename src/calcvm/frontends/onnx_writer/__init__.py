"""Paths of graphs as files of ONNX."""

from calcvm.frontends.onnx_writer import elementwise, layers, reductions, sequences, shapes
from calcvm.frontends.onnx_writer.declared import WRITERS
from calcvm.frontends.onnx_writer.graph import written

__all__ = ["WRITERS", "elementwise", "layers", "reductions", "sequences", "shapes", "written"]
