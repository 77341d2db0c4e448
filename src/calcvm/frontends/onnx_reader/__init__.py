"""Files of ONNX as plain data; the only code here that needs the package onnx."""

from calcvm.frontends.onnx_reader.file import File
from calcvm.frontends.onnx_reader.graph import imported
from calcvm.frontends.onnx_reader.inputs import looked_at

__all__ = ["File", "imported", "looked_at"]
