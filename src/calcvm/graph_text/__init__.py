"""Graphs as text (CalcGraph's external language): writer and reader."""

from calcvm.graph_text.read import read_graph
from calcvm.graph_text.write import text_of

__all__ = ["read_graph", "text_of"]
