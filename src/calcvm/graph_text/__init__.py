"""Graphs as texts (CalcGraph's external language): what writes one, and what reads it back."""

from calcvm.graph_text.read import read_graph
from calcvm.graph_text.write import text_of

__all__ = ["read_graph", "text_of"]
