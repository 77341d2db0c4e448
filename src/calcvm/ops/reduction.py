"""Sums over any axes, extrema over a block of neighbouring axes, and softmax over the last axis.

A sum sees x as (O, R0, K0, R1, K1, R2, I) and is over R = (R0, R1, R2); an extremum sees (O, P, R0, R1, I) and is over
R = (R0, R1).  The leading axis begins O if it is kept and R0 if it is reduced, joined by the second axis if that is treated
alike.  The workers share x by its O*R0 rows.

A team sums many elements to one number in two phases: 262144 elements take 6.2 us with two workers, 10.7 with one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from calcvm.frozen import frozen
from calcvm.ops.dims import ONE, Affine, Shape, show
from calcvm.ops.sizes import On, parts
from calcvm.ops.spec import (
    PHASES,
    PLACES,
    VECTORS,
    WN,
    Attr,
    Example,
    R,
    RowSpec,
    S,
    Shapes,
    W,
    Word,
    are_axes,
    choice,
    dims,
    joined,
    operator,
    places,
    uniform,
)

BY = choice("by", 2)  # 1: workers share the kept elements, because the leading axis is reduced
BLOCKS = 3  # of neighbouring axes that a sum may be over


@frozen
class Form:
    """The form in which x is seen: an index and a size for each axis; axes with a size R... are reduced.

    kept : elements below the leading axis of y.  part, dy_part : of backward rows.
    """

    indexes: str
    sizes: str
    kept: str
    require: tuple[str, ...]
    part: str
    dy_part: str

    @property
    def words(self) -> tuple[Word, ...]:
        return (*dims(self.sizes), BY)

    def axes(self, which: str = "KR", ranges: bool = True) -> str:
        """Indexes that are kept (K), reduced (R) or both, as written in brackets."""
        pairs = zip(self.indexes.split(), self.sizes.split())
        return ",".join(f"{i}<{n}" if ranges else i for i, n in pairs if ("R" if n[0] == "R" else "K") in which)

    def elems(self, which: str = "KR") -> str:
        return "*".join(n for n in self.sizes.split() if ("R" if n[0] == "R" else "K") in which)


SUM = Form("o a m b j c l", "O R0 K0 R1 K1 R2 I", "K0*K1*I", ("1 - O if by else 0",), "O*R0", "O if R0 == 1 else 0")
# The search for the first of equals runs along R: one worker for each O.
EXTREMUM = Form("o p a b l", "O P R0 R1 I", "I", ("-(R0 - 1)*(O*P - 1)",), "O", "O")


def reduced_axes(shape: Shape, attrs: Mapping[str, Any]) -> list[bool]:
    """Whether each axis is reduced."""
    axes, rank = attrs.get("axes"), len(shape)
    if axes is None:
        return [True] * rank
    found = {a + rank if a < 0 else a for a in axes}
    if len(found) != len(axes) or not found <= {*range(rank)}:
        raise ValueError(f"axes {tuple(axes)} do not fit shape {show(shape)}")
    return [axis in found for axis in range(rank)]


def reduce_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    x = shapes["x"]
    axes = zip(x, reduced_axes(x, attrs))
    return {"y": tuple(ONE if gone else n for n, gone in axes if attrs.get("keepdims") or not gone)}


def sum_words(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    x = shapes["x"]
    gone = reduced_axes(x, attrs)
    if len(x) > 2 and gone[0] == gone[1]:
        x, gone = joined(x), gone[1:]
    blocks: list[tuple[Affine, bool]] = []  # below the leading axis: size, whether reduced
    for n, kind in zip(x[1:], gone[1:]):
        if blocks and blocks[-1][1] == kind:
            blocks[-1] = (blocks[-1][0] * n, kind)
        elif n != ONE:
            blocks.append((n, kind))
    words: dict[str, Any] = {"O": ONE}
    for name in ("I", "R2", "K1", "R1", "K0", "R0"):
        words[name] = blocks.pop()[0] if blocks and blocks[-1][1] == (name[0] == "R") else ONE
    leading = "R0" if x and gone[0] else "O"
    if blocks and leading == "O" and not blocks[-1][1]:
        words["O"] = blocks.pop()[0]
    if blocks:
        raise ValueError(f"axes {attrs['axes']} of {show(x)} are more than {BLOCKS} blocks: split into several sums")
    words[leading] = (x[0] if x else ONE) * words[leading]
    return {**words, "by": int(leading == "R0" and words["K0"] * words["K1"] * words["I"] != ONE)}


def extremum_words(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    x = shapes["x"]
    w = sum_words(shapes, attrs)
    if w["R0"] * w["K0"] * w["R1"] == ONE:
        return {"O": w["O"], "P": w["K1"], "R0": ONE, "R1": w["R2"], "I": w["I"], "by": 0}
    if w["O"] * w["K0"] * w["R1"] * w["K1"] == ONE:
        return {"O": ONE, "P": ONE, "R0": w["R0"], "R1": w["R2"], "I": w["I"], "by": w["by"]}
    raise ValueError(f"axes {attrs['axes']} of {show(x)} are not neighbours: split into one reduction per block")


ATTRS = (
    Attr(name="axes", check=are_axes, doc="axes to reduce; None: all"),
    Attr(name="keepdims", default=False, check=lambda v: isinstance(v, bool), doc="keep reduced axes with size 1"),
)
CASES: tuple[tuple[tuple[int | None, ...], dict[str, Any]], ...] = (
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
    ((1, 4, 3), {"axes": (0, 2)}),
)
# Blocks of axes with others in between, which extrema reduce one after the other.
_SEVERAL: tuple[tuple[tuple[int | None, ...], dict[str, Any]], ...] = (
    ((None, 3, 7), {"axes": (0, 2)}),
    ((None, 3, 4, 19), {"axes": (0, 2)}),
    ((4, 3, None, 2), {"axes": (1, 3)}),
    ((None, 3, 2, 5), {"axes": (0, 1, 3), "keepdims": True}),
    ((2, 2, 3, 2, 3, None), {"axes": (1, 3, 5)}),
    ((2, 2, 3, 2, 3, None), {"axes": (0, 1, 3, 5)}),
    ((2, None, 2, 3, 2, 3), {"axes": (0, 2, 4)}),
)


BLOCK = 4096  # summands of a partial sum, as in kernels_cpu/reduction.py
LONG = 1 << 16  # from so many summands on, a team computes a sum that is one number


def sum_workspace(w: Any, on: On) -> tuple[Any, Any]:
    """Partial sums for a result that is one number, computed by a CPU's team."""
    R = w.R0 * w.R1 * w.R2
    many = not on.gpu and on.nw > 1 and w.O * w.K0 * w.K1 * w.I == 1 and R >= LONG
    return 0, parts(R, BLOCK) if many else 0


def _reduction(name: str, y: str, dx: str, reads: str, onnx: str, flops: tuple[int, int]) -> None:
    """``y`` and ``dx`` : with x, dy, over and n in braces, for the elements, the reduced indexes, and their number of elements."""
    form = EXTREMUM if "y" in reads else SUM
    x, result = form.axes(ranges=False), form.axes("K", ranges=False)
    said = {
        "x": f"x[{x}]",
        "dy": f"dy[{result}]",
        "over": form.axes("R", ranges=False),
        "n": form.elems("R"),
        "arg": f"arg{name}",
    }
    y, dx = (
        f"y[{form.axes('K')}] = {y.format(**{**said, 'over': form.axes('R')})}",
        f"dx[{form.axes()}] = {dx.format(**said)}",
    )
    fwd = RowSpec(
        name=f"{name}_fwd",
        synopsis=y,
        words=form.words,
        operands=(R("x", form.elems(), "0 if by else O"), W("y", form.elems("K"), f"{form.kept} if by else O")),
        require=form.require,
        flops=f"{flops[0]}*{form.elems()}",
    )
    if form is SUM:
        fwd = replace(
            fwd,
            words=(PHASES, *form.words, WN),
            operands=(
                R("x", form.elems(), "0 if by or wn else O"),
                W("y", form.elems("K"), f"{form.kept} if by else O"),
                S("ws", "wn"),
            ),
            phases="2 if wn else 1",
            workspace=sum_workspace,
        )
    read = (R(v, form.elems() if v == "x" else form.elems("K"), form.part) for v in reads)
    bwd = RowSpec(
        name=f"{name}_bwd",
        synopsis=dx,
        words=form.words,
        operands=(R("dy", form.elems("K"), form.dy_part), *read, W("dx", form.elems(), form.part)),
        in_place=(("dx", "x"),) if reads else (),
        require=form.require,
        flops=f"{flops[1]}*{form.elems()}",
    )
    operator(
        name=name,
        synopsis=y,
        category="reduction",
        inputs=("x",),
        attrs=ATTRS,
        shape=reduce_shape,
        words=extremum_words if form is EXTREMUM else sum_words,
        fwd=(fwd,),
        bwd=(bwd,),
        differentiable=("x",),
        onnx=(onnx,),
        examples=tuple(Example(shapes=(s,), attrs=a) for s, a in CASES + (() if form is EXTREMUM else _SEVERAL))
        + (Example(shapes=((None, 64),), attrs={"axes": (0,)}, batch=256, bench=True),),
        source="partial sums of fixed shape, then a tree: Higham, Accuracy and Stability, 4.2",
    )


_FIRST = "where(a*R1 + b == {arg}[u<R0,v<R1] x[o,p,u,v,l], dy[o,p,l], 0)"
_reduction("sum", "sum[{over}] {x}", "{dy}", "", "ReduceSum", (1, 1))
_reduction("mean", "sum[{over}] {x}/({n})", "{dy}/({n})", "", "ReduceMean", (1, 1))
_reduction("max", "max[{over}] {x}", _FIRST, "xy", "ReduceMax", (1, 1))
_reduction("min", "min[{over}] {x}", _FIRST, "xy", "ReduceMin", (1, 1))
_reduction("sum_squares", "sum[{over}] {x}^2", "2*{dy}*{x}", "x", "ReduceSumSquare", (2, 2))


# ---------------------------------------------------------------- softmax
def softmax_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    x = shapes["x"]
    axis = attrs.get("axis", -1)
    if not x or axis not in (-1, len(x) - 1):
        why = "transpose first" if not x or -len(x) <= axis < len(x) else f"there are {len(x)} dimensions"
        raise ValueError(f"softmax runs over the last axis, or axis 1: {why} (axis {axis} of {show(x)})")
    return {"y": x}


def _softmax(name: str, y: str, dx: str, flops: tuple[int, int], onnx: str) -> None:
    operator(
        name=name,
        synopsis=y,
        category="reduction",
        inputs=("x",),
        attrs=(Attr(name="axis", default=-1, check=lambda v: isinstance(v, int), doc="the last axis"),),
        shape=softmax_shape,
        words=lambda shapes, attrs: places(shapes["x"]),
        fwd=(uniform(f"{name}_fwd", y, ("x",), "y", flops[0], PLACES, VECTORS),),
        bwd=(uniform(f"{name}_bwd", dx, ("dy", "y"), "dx", flops[1], PLACES, VECTORS),),
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


_softmax(
    "softmax",
    "m[r<rows*inner] = stop(max[n<N] x[r,n]); y[r,n] = exp(x[r,n] - m[r])/sum[k<N] exp(x[r,k] - m[r])",
    "dx[r<rows*inner,n<N] = y[r,n]*(dy[r,n] - sum[k<N] dy[r,k]*y[r,k])",
    (5, 4),
    "Softmax",
)
_softmax(
    "log_softmax",
    "y[r<rows*inner,n<N] = x[r,n] - logsumexp[k<N] x[r,k]",
    "dx[r<rows*inner,n<N] = dy[r,n] - exp(y[r,n])*sum[k<N] dy[r,k]",
    (5, 4),
    "LogSoftmax",
)
