"""Recurrent operators: the steps of a sequence inside one row, for each cell of `calcvm.formulas.cells`.

The products of the inputs with their weights precede them, as one linear row over all steps; z is its result.  On a CPU the
forward computes these products itself if the weights have at most `FEW` elements: then z is not stored, and padding costs nothing.
Samples are shared, and no barrier is inside.  ``lengths`` are data: steps at and past a sample's length are not computed; their
results and gradients are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calcvm.formulas.cells import AHEAD, CELLS, Cell
from calcvm.ops.dims import Shape, show
from calcvm.ops.sizes import On
from calcvm.ops.spec import (
    ACC,
    RECURRENT,
    WN,
    A,
    Attr,
    Example,
    Operand,
    OpSpec,
    R,
    RowSpec,
    S,
    Shapes,
    W,
    Word,
    choice,
    dims,
    register,
)  # fmt: skip

Room = tuple[Any, Any]
REVERSE = choice("reverse", 2)
SIZES = dims("N T H")
INNER = Word(name="K", kind="int")  # features of x
PROJECTED = {
    "x": "x",
    "wi": "wt",
    "bi": "b",
}  # what a forward takes in place of z, by the operands of the linear row that makes z
FEW = 1 << 16  # elements of weights that each step can read again
RECURS = "each step reads a product with the state before it"


def _operands(cell: Cell, row: str, access: Mapping[str, Operand]) -> tuple[Operand, ...]:
    return tuple(access[name] for name in cell.operands(row))


def _rows(cell: Cell, make: type[RowSpec]) -> tuple[tuple[RowSpec, ...], tuple[RowSpec, ...]]:
    g, steps, last = cell.gates, "N*T*H", "N*H"
    gates, more, of_p = f"N*T*{g}*H", f"N*T*{cell.apart}*H", f"{cell.parameters}*H"
    others = "H" if cell.others == 1 else f"{cell.others}*H"
    sizes = dict.fromkeys(("h0", "dh0", "dhn", "hn", "dh"), last)
    sizes |= dict.fromkeys(("c0", "dc0", "dcn", "cn", "dc"), f"N*{others}")
    products = f"2*N*T*{g}*H*H"

    def zeros(w: Any, on: On) -> Room:
        n = max(g, cell.others) * w.H  # zeros; on a GPU the sums of a step
        if w.K and w.T != 1:  # and products ahead
            n += AHEAD * g * w.H
        return n, n

    def turned(w: Any, on: On) -> Room:
        n = 0 if on.gpu else (g * w.H + max(cell.others, 1)) * ((w.H + 15) // 16 * 16)
        return n, n

    state = {name: R(name, sizes[name], "N", optional=True) for name in ("h0", "c0", "dhn", "dcn")}
    scratch = {
        "ws": S("ws", "nw*wn"),
        "order": S("order", "0 if gpu else 2*N", "N", type="int64"),  # the samples, and their steps
        "counts": S("counts", "0 if gpu else nw*(T + 2)", type="int64"),  # of the samples of each length
    }
    given = state | scratch | {
        "wh": R("wh", f"H*{g}*H"),
        "p": R("p", of_p),
        "lengths": R("lengths", "N", "N", type="index", below="T + 1", optional=True),
    }  # fmt: skip
    kept = {"gates": f"N*T*{cell.kept}*H", "more": more, "c": f"N*T*{others}"}
    forward = make(
        name=f"{cell.name}_fwd",
        synopsis=f"y[n,t] = h of step t: {cell.synopsis}",
        no_equation=RECURS,
        words=(*SIZES, INNER, REVERSE, WN),
        operands=_operands(cell, "forward", given | {
            "z": R("z", gates, "N", optional=True), "b": R("b", f"{g}*H", optional=True),
            "x": R("x", "N*T*K", "N", optional=True), "wi": R("wi", f"K*{g}*H", optional=True), "bi": R("bi", f"{g}*H", optional=True),
            "y": W("y", steps, "N"), **{name: W(name, sizes[name], "N") for name in ("hn", "cn")},
            **{name: W(name, n, "N", optional=True) for name, n in kept.items()},
        }),
        in_place=(("gates", "z"),) if cell.kept == g else (),
        workspace=zeros,
        flops=f"2*N*T*{g}*H*(H + K) + {cell.flops}*{steps}",
    )  # fmt: skip
    backward = make(
        name=f"{cell.name}_bwd",
        synopsis="dz[n,t] = gradients of the sums of step t, from the last step to the first",
        no_equation=RECURS,
        words=(*SIZES, REVERSE, WN),
        operands=_operands(cell, "backward", given | {
            "y": R("y", steps, "N"), "dy": R("dy", steps, "N", optional=True),
            **{name: R(name, n, "N") for name, n in kept.items()},
            "dz": W("dz", gates, "N"), "t_dmore": W("t_dmore", more, "N"), "t_dp": W("t_dp", f"N*T*{of_p}", "N"),
            **{name: W(name, sizes[name], "N", optional=True) for name in ("dh0", "dc0")},
            **{name: S(name, sizes[name], "N") for name in ("dh", "dc")},
        }),
        in_place=((("dz", "gates"),) if cell.kept == g else ()) + ((("t_dmore", "more"),) if cell.apart else ()),
        workspace=turned,
        flops=f"{products} + {2 * cell.flops}*{steps}",
    )  # fmt: skip
    weights = make(
        name=f"{cell.name}_bwd_w",
        synopsis="dwh = sum over samples and steps of h before the step times dz; db = sum of dz",
        no_equation=RECURS,
        words=(*SIZES, REVERSE, ACC),
        operands=_operands(cell, "weights", {
            "y": R("y", steps), "h0": R("h0", last, optional=True),
            "lengths": R("lengths", "N", type="index", below="T + 1", optional=True),
            "dz": R("dz", gates), "t_dmore": R("t_dmore", more), "t_dp": R("t_dp", f"N*T*{of_p}"),
            "dwh": A("dwh", f"H*{g}*H", "H"), "dp": A("dp", of_p, of_p, optional=True),
            "db": A("db", f"{g}*H", f"{g}*H", optional=True),
        }),
        flops=products,
    )  # fmt: skip
    return (forward,), (backward, weights)


def _shape(cell: Cell) -> Any:
    def shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
        z, wh = shapes["z"], shapes["wh"]
        if len(wh) != 2 or not all(n.constant for n in wh) or wh[1] != cell.gates * wh[0]:
            raise ValueError(f"the weights {show(wh)} must be (H, {cell.gates}*H), for H units of the state")
        if len(z) != 3 or z[2] != wh[1]:
            raise ValueError(
                f"z {show(z)} must be (N, T, {show(wh[1:])[1:-1].rstrip(',')}): samples, steps, sums of each gate"
            )
        n, t, h = z[0], z[1], wh[0]
        if not (n.constant or t.constant):
            raise ValueError(f"z {show(z)} has the batch twice")
        of_c = h * cell.others
        for name, wanted in (
            ("p", (h * cell.parameters,)), ("b", wh[1:]), ("h0", (n, h)), ("c0", (n, of_c)), ("lengths", (n,)),
        ):  # fmt: skip
            if (given := shapes.get(name)) is not None and given != wanted:
                raise ValueError(f"{name} {show(given)} must be {show(wanted)}")
        out = {"y": (n, t, h), "hn": (n, h)}
        if cell.others:
            out |= {"cn": (n, of_c), "c": (n, t, of_c)}
        if cell.kept:
            out["gates"] = (n, t, h * cell.kept)
        if cell.apart:
            out |= dict.fromkeys(("more", "t_dmore"), (n, t, h * cell.apart))
        if cell.parameters:
            out["t_dp"] = (n, t, h * cell.parameters)
        return out

    return shape


def _words(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    n, t, _ = shapes["z"]
    return {"N": n, "T": t, "H": shapes["wh"][0], "K": 0, "reverse": int(attrs["reverse"])}


def _example(
    cell: Cell, n: int | None, t: int, h: int, given: str = "wh", batch: int = 5, reach: float = 1.0, **more: Any
) -> Example:
    """given : the last input that is given.  reach : the largest input (of many steps: small, or rounding grows without end)."""
    of = {
        "z": (n, t, cell.gates * h),
        "wh": (h, cell.gates * h),
        "p": (cell.parameters * h,),
        "b": (cell.gates * h,),
        "h0": (n, h),
        "c0": (n, cell.others * h),
        "lengths": (n,),
    }
    names = _inputs(cell)
    shapes = tuple(of[name] for name in names[: names.index(given) + 1])
    integer = {"lengths": t + 1} if given == "lengths" else {}
    return Example(shapes=shapes, integer=integer, batch=batch, low=-reach, high=reach, **more)


def _inputs(cell: Cell) -> tuple[str, ...]:
    lacks = ("" if cell.others else "c0 ") + ("" if cell.parameters else "p")
    return tuple(name for name in ("z", "wh", "p", "b", "h0", "c0", "lengths") if name not in lacks.split())


def spec_of(cell: Cell, make: type[OpSpec] = OpSpec, make_row: type[RowSpec] = RowSpec) -> OpSpec:
    """The operator of a cell."""
    two = bool(cell.others)
    fwd, bwd = _rows(cell, make_row)
    inputs = _inputs(cell)
    return make(
        name=cell.name,
        synopsis=f"y[n,t] = h of step t, hn = the last h: {cell.synopsis}",
        category=RECURRENT,
        inputs=inputs,
        optional_inputs=tuple(name for name in inputs if name not in ("z", "wh", "p")),
        outputs=("y", "hn", "cn") if two else ("y", "hn"),
        saved=(*(("gates",) if cell.kept else ()), *(("more",) if cell.apart else ()), *(("c",) if two else ())),
        attrs=(
            Attr(name="reverse", default=False, check=lambda v: isinstance(v, (bool, int)) and v in (0, 1),
                 doc="from the last step to the first"),
        ),
        shape=_shape(cell),
        words=_words,
        fwd=fwd,
        bwd=bwd,
        differentiable=inputs[:-1],
        examples=(
            _example(cell, None, 4, 3, "p" if cell.parameters else "wh"),
            _example(cell, None, 3, 17, inputs[-2], batch=7),
            _example(cell, None, 5, 16, "lengths", batch=9, attrs={"reverse": True}),
            _example(cell, None, 6, 5, "lengths", batch=8),
            _example(cell, 1, 3, 33, "b"),
            _example(cell, 2, 1, 1, "h0", attrs={"reverse": True}),
            _example(cell, None, 50, 64, "b", batch=32, reach=0.2, bench=True),
        ),
        source=cell.source,
    )  # fmt: skip


for _cell in CELLS.values():
    register(spec_of(_cell))
