"""Places of data that leave the 64 bits on the way, or divide by 0: such a place lies nowhere, and what is said for there counts."""

from __future__ import annotations

import numpy as np

FAR = [0, 1, 2, 2**62, -(2**62), 2**63 - 1, -(2**63), 2**61, 3]
COLUMNS = 20
PLACES = [
    "t[r]*4 + 1", "t[r] + t[r]", "t[r] - 1 - t[r]*t[r]", "t[r]*8//8", "3%t[r]", "3//t[r]", "0/t[r]", "where(t[r] > 1, 1, t[r]*4)",
    "u[c]*4 + 1", "t[r]*c",
]  # fmt: skip


def far_place(place: str) -> tuple[str, dict[str, np.ndarray], np.ndarray]:
    """A text with the place, its operands, and what it is, by Python's integers."""
    rows = len(FAR)
    values = {"x": np.random.default_rng(0).normal(size=(rows, COLUMNS)), "t": np.array(FAR)}
    values["u"] = np.resize(FAR, COLUMNS)
    given = {name: v for name, v in values.items() if name == "x" or f"{name}[" in place}

    def integer(x: int) -> int:
        if abs(x) >= 2**62:
            raise OverflowError
        return x

    def at(r: int, c: int) -> float:
        names = {"t": lambda i: integer(FAR[i]), "u": lambda i: integer(FAR[i % rows]), "r": r, "c": c}
        if "where" in place and FAR[r] > 1:
            return values["x"][r, 1]
        text = "t[r]*4" if "where" in place else place
        try:
            k = eval(text.replace("[", "(").replace("]", ")"), names)
        except (ZeroDivisionError, OverflowError):
            return 7
        return values["x"][r, int(k)] if k == int(k) and 0 <= k < COLUMNS else 7

    want = np.array([[at(r, c) for c in range(COLUMNS)] for r in range(rows)])
    return f"y[r<{rows},c<{COLUMNS}] = x[r, {place}; 7]", given, want
