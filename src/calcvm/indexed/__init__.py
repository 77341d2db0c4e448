"""Users' index equations on variables of a graph: parsed, checked, and lowered to the rows that compute them best.

This package is above the graph.  `calcvm.equations` knows neither the graph nor the table, so the table can state its rows in that
language.
"""

from calcvm.indexed.cells import cell
from calcvm.indexed.einsum import einsum
from calcvm.indexed.tracing import indexes
from calcvm.indexed.users import Equations

__all__ = ["cell", "einsum", "equation", "indexes"]

equation = Equations()
