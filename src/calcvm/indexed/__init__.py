"""Users' index equations on variables of a graph: read, checked, and lowered to the rows that compute them best.

It is a room above the graph: `calcvm.equations` knows neither graph nor table, and so the table may say its rows in its language.
"""

from calcvm.indexed.einsum import einsum
from calcvm.indexed.tracing import indexes
from calcvm.indexed.users import Equations

__all__ = ["einsum", "equation", "indexes"]

equation = Equations()
