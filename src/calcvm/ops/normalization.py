"""Statistics of a batch, and the running statistics that training keeps of them in buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calcvm.ops.dims import Shape, show
from calcvm.ops.spec import ROWS_COLS, SIZE, Attr, Example, R, RowSpec, Shapes, U, W, Word, leading, operator

MOMENTUM = Word(name="momentum", kind="float", lo=0, hi=1)


def _shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    x, running = shapes["x"], shapes["running"]
    if not x or running != x[1:]:
        raise ValueError(f"running {show(running)} is not of the shape of x {show(x)} without its leading axis")
    return {"y": x, "t_m": running, "t_d": running}


def _less(name: str, x: str, mean: str, y: str) -> RowSpec:
    return RowSpec(
        name=name,
        synopsis=f"{y}[r,c] = {x}[r,c] - {mean}[c]",
        words=ROWS_COLS,
        operands=(R(x, SIZE, "rows"), R(mean, "cols"), W(y, SIZE, "rows")),
        in_place=((y, x),),
        flops=SIZE,
    )


operator(
    name="center",
    synopsis="y = x - m, m = mean of x over the leading axis; running += momentum*(m - running)",
    category="normalization",
    inputs=("x", "running"),
    attrs=(
        Attr(
            name="momentum",
            default=0.1,
            check=lambda v: 0 <= v <= 1,
            doc="what the mean of a batch counts in the running one",
        ),
    ),
    shape=_shape,
    words=lambda shapes, attrs: {**leading(shapes["x"]), **attrs},
    fwd=(
        RowSpec(
            name="center_mean",
            synopsis="t_m[c] = sum_r x[r,c] / rows; running += momentum*(t_m - running)",
            words=(*ROWS_COLS, MOMENTUM),
            operands=(R("x", SIZE), W("t_m", "cols", "cols"), U("running", "cols", "cols")),
            flops=SIZE,
        ),
        _less("center_fwd", "x", "t_m", "y"),
    ),
    bwd=(
        RowSpec(
            name="center_mean_bwd",
            synopsis="t_d[c] = sum_r dy[r,c] / rows",
            words=ROWS_COLS,
            operands=(R("dy", SIZE), W("t_d", "cols", "cols")),
            flops=SIZE,
        ),
        _less("center_bwd", "dy", "t_d", "dx"),
    ),
    differentiable=("x",),
    examples=(
        Example(shapes=((None, 5), (5,))),
        Example(shapes=((None, 3, 7), (3, 7)), attrs={"momentum": 1.0}),
        Example(shapes=((None,), ()), attrs={"momentum": 0.0}),
        Example(shapes=((131, 3), (3,))),
        Example(shapes=((None, 64), (64,)), batch=256, bench=True),
    ),
    source="Ioffe and Szegedy 2015, batch normalization, its mean alone",
)
