"""Mixed-integer programs, row by row, for HiGHS through SciPy (extra ``solver``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from calcvm.errors import MissingExtra

Row = Mapping[int, float]  # coefficients by variable
INFINITE = float("inf")


class Milp:
    """Variables between 0 and 1, what they cost, and rows over them: coefficients, least and most.

    Raises
    ------
    MissingExtra : SciPy is not installed.
    """

    def __init__(self) -> None:
        try:
            import numpy as np
            from scipy import optimize, sparse
        except ImportError as e:
            raise MissingExtra("scipy", "solver", "planning with a solver") from e
        self.np, self.optimize, self.sparse = np, optimize, sparse
        self.cost: list[float] = []
        self.binary: list[int] = []
        self.rows: list[tuple[Row, float, float]] = []

    def variable(self, cost: float = 0.0, *, binary: bool = False) -> int:
        self.cost.append(cost)
        self.binary.append(int(binary))
        return len(self.cost) - 1

    def at_most(self, row: Row, most: float) -> None:
        self.rows.append((row, -INFINITE, most))

    def at_least(self, row: Row, least: float) -> None:
        self.rows.append((row, least, INFINITE))

    def covers(self, x: int, others: Iterable[int]) -> None:
        """A variable is 1 where all of some others are."""
        others = [*others]
        self.at_least({x: 1.0, **dict.fromkeys(others, -1.0)}, 1.0 - len(others))

    def solve(self, seconds: float, unit: float = 1.0) -> Any:
        """What `scipy.optimize.milp` answers; costs are handed over in units of ``unit``."""
        np = self.np
        i, j, a = (
            np.array(part)
            for part in zip(*((i, j, a) for i, (row, _, _) in enumerate(self.rows) for j, a in row.items()))
        )
        matrix = self.sparse.csr_array((a, (i, j)), shape=(len(self.rows), len(self.cost)))
        least, most = (np.array([row[k] for row in self.rows]) for k in (1, 2))
        return self.optimize.milp(
            np.array(self.cost) / unit,
            integrality=np.array(self.binary),
            bounds=self.optimize.Bounds(0.0, 1.0),
            constraints=self.optimize.LinearConstraint(matrix, least, most),
            options={"time_limit": seconds, "mip_rel_gap": 1e-6},
        )
