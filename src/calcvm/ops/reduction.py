"""Reductions over a block of neighbouring axes, and softmax over the last axis.

x is seen as (O, P, R0, R1, I) and reduced over R = (R0, R1).  O is the leading axis where that is kept,
R0 where it is reduced: one of them (and then P) is 1, so O*R0 rows are what workers share x by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from calcvm.ops.dims import ONE, Shape, numel, show
from calcvm.ops.sizes import On, parts
from calcvm.ops.spec import PHASES, WN, Attr, Example, Operand, OpSpec, R, RowSpec, S, W, choice, dims, register

REDUCE = (*dims("O P R0 R1 I"), choice("by", 2))  # by 1: shared over I, the leading axis being reduced
X_ELEMS, Y_ELEMS = "O*P*R0*R1*I", "O*P*I"
ONE_IS_1 = ("-(R0 - 1)*(O*P - 1)",)


def _block(shape: Shape, attrs: Mapping[str, Any]) -> tuple[int, int]:
    """The reduced axes as a range."""
    axes = attrs.get("axes")
    rank = len(shape)
    if axes is None:
        return 0, rank
    found = sorted(a + rank if a < 0 else a for a in axes)
    if len(set(found)) != len(found) or any(not 0 <= a < rank for a in found):
        raise ValueError(f"axes {tuple(axes)} do not fit shape {show(shape)}")
    if not found:
        return rank, rank
    if found[-1] - found[0] != len(found) - 1:
        raise ValueError(f"axes {tuple(axes)} of {show(shape)} are no neighbours: split into one reduction a block")
    return found[0], found[-1] + 1


def reduce_shape(inputs: tuple[Shape, ...], attrs: Mapping[str, Any]) -> dict[str, Shape]:
    (x,) = inputs
    i, j = _block(x, attrs)
    return {"y": x[:i] + ((ONE,) * (j - i) if attrs.get("keepdims") else ()) + x[j:]}


def reduce_words(shapes: Mapping[str, Shape], attrs: Mapping[str, Any]) -> dict[str, Any]:
    x = shapes["x"]
    i, j = _block(x, attrs)
    inner = numel(x[j:])
    if i == 0 and j > 0:  # the leading axis is reduced
        return {"O": ONE, "P": ONE, "R0": x[0], "R1": numel(x[1:j]), "I": inner, "by": int(inner != ONE)}
    return {"O": x[0] if x else ONE, "P": numel(x[1:i]), "R0": ONE, "R1": numel(x[i:j]), "I": inner, "by": 0}


ATTRS = (
    Attr(
        name="axes",
        default=None,
        check=lambda v: v is None or (isinstance(v, tuple) and all(isinstance(a, int) for a in v)),
        doc="axes to reduce, one block of neighbours; None: all",
    ),
    Attr(name="keepdims", default=False, check=lambda v: isinstance(v, bool), doc="keep reduced axes with size 1"),
)
_CASES: tuple[tuple[tuple[int | None, ...], dict[str, Any]], ...] = (
    ((None, 7), {"axes": (1,)}),
    ((None, 19), {"axes": (0,)}),
    ((None, 3, 5), {"axes": None}),
    ((None, 3, 5), {"axes": (-1,), "keepdims": True}),
    ((None, 3, 5, 4), {"axes": (1, 2)}),
    ((None, 3, 5), {"axes": (0, 1), "keepdims": True}),
    ((3, 2, 5), {"axes": (1,)}),
    ((3, 150), {"axes": (0,)}),
    ((131, 3), {"axes": (0,)}),
    ((37,), {"axes": None}),
    ((), {"axes": None}),
    ((None, 3), {"axes": ()}),
)


BLOCK = 4096  # summands of a partial sum, as in kernels_cpu/reduction.py
LONG = 1 << 16  # summands from which a team sums what becomes one number


def sum_workspace(w: Any, on: On) -> tuple[Any, Any]:
    """Partial sums of what becomes one number, for a CPU's team."""
    many = not on.gpu and on.nw > 1 and w.O * w.P * w.I == 1 and w.R0 * w.R1 >= LONG
    return 0, parts(w.R0 * w.R1, BLOCK) if many else 0


def _reduction(name: str, y: str, dx: str, reads: str, onnx: str, flops: tuple[int, int]) -> None:
    fwd = RowSpec(
        name=f"{name}_fwd",
        synopsis=f"y[o,p,i] = {y}",
        words=REDUCE,
        operands=(R("x", X_ELEMS, "0 if by else O"), W("y", Y_ELEMS, "I if by else O")),
        require=ONE_IS_1,
        flops=f"{flops[0]}*{X_ELEMS}",
    )
    if reads != "xy":  # a sum
        fwd = replace(
            fwd,
            words=(PHASES, *REDUCE, WN),
            operands=(R("x", X_ELEMS, "0 if by or wn else O"), W("y", Y_ELEMS, "I if by else O"), S("ws", "wn")),
            phases="2 if wn else 1",
            workspace=sum_workspace,
        )
    if reads == "xy":  # the first of equals is sought along R: one worker for each O
        operands: tuple[Operand, ...] = (
            R("dy", Y_ELEMS, "O"),
            R("x", X_ELEMS, "O"),
            R("y", Y_ELEMS, "O"),
            W("dx", X_ELEMS, "O"),
        )
    else:
        x = tuple(R(name, X_ELEMS, "O*R0") for name in reads)
        operands = (R("dy", Y_ELEMS, "O if R0 == 1 else 0"), *x, W("dx", X_ELEMS, "O*R0"))
    bwd = RowSpec(
        name=f"{name}_bwd",
        synopsis=f"dx[o,p,r,i] = {dx}",
        words=REDUCE,
        operands=operands,
        in_place=(("dx", "x"),) if reads else (),
        require=ONE_IS_1,
        flops=f"{flops[1]}*{X_ELEMS}",
    )
    register(
        OpSpec(
            name=name,
            synopsis=f"y[o,p,i] = {y}",
            category="reduction",
            inputs=("x",),
            attrs=ATTRS,
            shape=reduce_shape,
            words=reduce_words,
            fwd=(fwd,),
            bwd=(bwd,),
            differentiable=("x",),
            onnx=(onnx,),
            examples=tuple(Example(shapes=(s,), attrs=a) for s, a in _CASES)
            + (Example(shapes=((None, 64),), attrs={"axes": (0,)}, batch=256, bench=True),),
            source="partial sums of fixed shape, then a tree: Higham, Accuracy and Stability, 4.2",
        )
    )


_reduction("sum", "sum_r x[o,p,r,i]", "dy[o,p,i]", "", "ReduceSum", (1, 1))
_reduction("mean", "sum_r x[o,p,r,i] / R", "dy[o,p,i] / R", "", "ReduceMean", (1, 1))
_reduction(
    "max",
    "max_r x[o,p,r,i] (NaN if any is)",
    "dy[o,p,i] at the first r where x = y, else 0",
    "xy",
    "ReduceMax",
    (1, 1),
)
_reduction(
    "min",
    "min_r x[o,p,r,i] (NaN if any is)",
    "dy[o,p,i] at the first r where x = y, else 0",
    "xy",
    "ReduceMin",
    (1, 1),
)
_reduction("sum_squares", "sum_r x[o,p,r,i]^2", "2*dy[o,p,i]*x[o,p,r,i]", "x", "ReduceSumSquare", (2, 2))


# ---------------------------------------------------------------- softmax
SOFTMAX = dims("rows inner N")
S_ELEMS = "rows*inner*N"


def softmax_shape(inputs: tuple[Shape, ...], attrs: Mapping[str, Any]) -> dict[str, Shape]:
    (x,) = inputs
    axis = attrs.get("axis", -1)
    if not x or axis not in (-1, len(x) - 1):
        raise ValueError(f"softmax runs over the last axis: transpose first (axis {axis} of {show(x)})")
    return {"y": x}


def softmax_words(shapes: Mapping[str, Shape], attrs: Mapping[str, Any]) -> dict[str, Any]:
    x = shapes["x"]
    return {"rows": x[0] if len(x) > 1 else ONE, "inner": numel(x[1:-1]), "N": x[-1]}


def _softmax(name: str, y: str, dx: str, flops: tuple[int, int], onnx: str) -> None:
    register(
        OpSpec(
            name=name,
            synopsis=y,
            category="reduction",
            inputs=("x",),
            attrs=(Attr(name="axis", default=-1, check=lambda v: isinstance(v, int), doc="the last axis"),),
            shape=softmax_shape,
            words=softmax_words,
            fwd=(
                RowSpec(
                    name=f"{name}_fwd",
                    synopsis=y,
                    words=SOFTMAX,
                    operands=(R("x", S_ELEMS, "rows"), W("y", S_ELEMS, "rows")),
                    in_place=(("y", "x"),),
                    flops=f"{flops[0]}*{S_ELEMS}",
                ),
            ),
            bwd=(
                RowSpec(
                    name=f"{name}_bwd",
                    synopsis=dx,
                    words=SOFTMAX,
                    operands=(R("dy", S_ELEMS, "rows"), R("y", S_ELEMS, "rows"), W("dx", S_ELEMS, "rows")),
                    in_place=(("dx", "dy"), ("dx", "y")),
                    flops=f"{flops[1]}*{S_ELEMS}",
                ),
            ),
            differentiable=("x",),
            onnx=(onnx,),
            examples=(
                Example(shapes=((None, 3),)),
                Example(shapes=((None, 10),), batch=7),
                Example(shapes=((None, 3, 67),), batch=3, low=-30.0, high=30.0),
                Example(shapes=((19,),), attrs={"axis": 0}),
                Example(shapes=((None, 1),)),
                Example(shapes=((None, 10),), batch=256, bench=True),
            ),
            source="Goodfellow et al., Deep Learning, 4.1: the largest is subtracted first",
        )
    )


_softmax(
    "softmax",
    "y[r,n] = exp(x[r,n] - m[r]) / sum_k exp(x[r,k] - m[r]), m = max_k x[r,k]",
    "dx[r,n] = y[r,n]*(dy[r,n] - sum_k dy[r,k]*y[r,k])",
    (5, 4),
    "Softmax",
)
_softmax(
    "log_softmax",
    "y[r,n] = x[r,n] - m[r] - log(sum_k exp(x[r,k] - m[r])), m = max_k x[r,k]",
    "dx[r,n] = dy[r,n] - exp(y[r,n])*sum_k dy[r,k]",
    (5, 4),
    "LogSoftmax",
)
