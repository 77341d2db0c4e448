"""Mixed-integer programs, built row by row, for HiGHS through SciPy (extra ``solver``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from calcvm.errors import MissingExtra

Row = dict[int, float]  # coefficients by variable
GAP = 1e-6  # relative gap between a solution and its bound at which the solution counts as optimal


class Milp:
    """Variables between 0 and 1, their costs, and rows over them: coefficients, lower and upper limit.

    Raises
    ------
    MissingExtra : SciPy is not installed.
    """

    def __init__(self) -> None:
        try:
            from scipy import optimize, sparse
        except ImportError as e:
            raise MissingExtra("scipy", "solver", "planning with a solver") from e
        self.optimize, self.sparse = optimize, sparse
        self.cost: list[float] = []
        self.binary: list[int] = []
        self.rows: list[tuple[Row, float, float]] = []
        self._taken: tuple[int, Any] = 0, None  # the number of rows converted last, and the solver's form of them

    @property
    def n(self) -> int:
        return len(self.cost)

    def variable(self, cost: float = 0.0, *, binary: bool = False) -> int:
        self.cost.append(cost)
        self.binary.append(int(binary))
        return self.n - 1

    def between(self, least: float, row: Row, most: float) -> None:
        self.rows.append((row, least, most))

    def at_most(self, row: Row, most: float) -> None:
        self.between(-np.inf, row, most)

    def at_least(self, row: Row, least: float) -> None:
        self.between(least, row, np.inf)

    def covers(self, x: int, others: Iterable[int]) -> None:
        """Force variable ``x`` to 1 if all of ``others`` are 1."""
        others = [*others]
        self.at_least({x: 1.0, **dict.fromkeys(others, -1.0)}, 1.0 - len(others))

    def solve(
        self,
        seconds: float,
        scale: float,
        *,
        cost: Mapping[int, float] | None = None,
        low: np.ndarray | float = 0.0,
        high: np.ndarray | float = 1.0,
        gap: float = GAP,
    ) -> Any:
        """The result of `scipy.optimize.milp`.

        scale : factor of all costs.  cost : costs of some variables, in place of the stored ones.
        low, high : bounds of the variables.
        gap : relative gap between the solution and its bound at which to stop.
        """
        costs = np.array(self.cost)
        for x, value in (cost or {}).items():
            costs[x] = value
        if self._taken[0] != len(self.rows):
            self._taken = len(self.rows), self._constraint(self.rows)
        return self.optimize.milp(
            costs * scale,
            integrality=np.array(self.binary),
            bounds=self.optimize.Bounds(low, high),
            constraints=[self._taken[1]],
            options={"time_limit": max(seconds, 0.0), "mip_rel_gap": gap},
        )

    def _constraint(self, rows: Sequence[tuple[Row, float, float]]) -> Any:
        i, j, a = (
            np.array(part) for part in zip(*((i, j, a) for i, (row, _, _) in enumerate(rows) for j, a in row.items()))
        )
        matrix = self.sparse.csr_array((a, (i, j)), shape=(len(rows), self.n))
        return self.optimize.LinearConstraint(matrix, *(np.array([row[k] for row in rows]) for k in (1, 2)))
