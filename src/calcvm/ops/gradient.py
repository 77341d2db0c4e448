"""The operator that requests a gradient.  It is not in the table: its rows are the backwards of the operators between x and y."""

from __future__ import annotations

from calcvm.ops.spec import OpSpec


class _Gradient(OpSpec):
    def __reduce__(self) -> str:  # type: ignore[override]
        return "GRADIENT"


GRADIENT = _Gradient(
    name="gradient",
    synopsis="dx = dy/dx",
    category="system",
    inputs=("y", "x"),
    outputs=("dx",),
    shape=lambda shapes, attrs: {"dx": shapes["x"]},
    words=lambda shapes, attrs: {},
)
