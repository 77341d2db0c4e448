"""Operators defined by their equations: rows, gradients and kernels follow (`calcvm.equations.declared`).

Each sees x as (O, N, I): N is the axis or block of neighbouring axes that it works on, O are the axes before, I those after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from calcvm.equations.declared import DECLARED
from calcvm.ops.dims import ONE, Shape, numel, show
from calcvm.ops.plain import declared
from calcvm.ops.reduction import ATTRS, CASES, reduce_shape, reduced_axes
from calcvm.ops.shape import along_axis
from calcvm.ops.spec import Attr, Example, Shapes, Word, same_shape


def around(shape: Shape, taken: Sequence[int]) -> dict[str, Any]:
    """The sizes (O, N, I) of a shape, for neighbouring axes ``taken``."""
    first, end = (taken[0], taken[-1] + 1) if taken else (len(shape),) * 2
    return {"O": numel(shape[:first]), "N": numel(shape[first:end]), "I": numel(shape[end:])}


# ---------------------------------------------------------------- over any block of axes
def _block(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    x = shapes["x"]
    gone = reduced_axes(x, attrs)
    taken = [axis for axis, n in enumerate(x) if gone[axis] and n != ONE]
    if any(x[k] != ONE and not gone[k] for k in range(*(taken[:1] + taken[-1:] or (0, 0)))):
        raise ValueError(f"axes {attrs['axes']} of {show(x)} are not neighbours: transpose first")
    return around(x, taken)


declared(
    DECLARED["logsumexp"],
    reduce_shape,
    _block,
    category="reduction",
    attrs=ATTRS,
    onnx=("ReduceLogSumExp",),
    examples=(
        *(Example(shapes=(s,), attrs=a) for s, a in CASES),
        Example(shapes=((None, 3, 67),), attrs={"axes": (2,)}, low=-30.0, high=30.0),
        Example(shapes=((None, 64),), attrs={"axes": (1,)}, batch=256, bench=True),
    ),
    source="the largest is subtracted first: Goodfellow et al., Deep Learning, 4.1",
)

_CORRECTION = Word(name="correction", kind="int", lo=0, hi=2**24)


def _spread(name: str) -> None:
    def words(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
        return {**_block(shapes, attrs), "correction": attrs["correction"]}

    declared(
        DECLARED[name],
        reduce_shape,
        words,
        (_CORRECTION,),
        category="reduction",
        attrs=(
            *ATTRS,
            Attr(
                name="correction",
                default=0,
                check=lambda v: isinstance(v, int) and 0 <= v <= _CORRECTION.hi,
                doc="subtracted from the number of elements in the divisor",
            ),
        ),
        examples=(
            *(Example(shapes=(s,), attrs=a) for s, a in CASES),
            Example(shapes=((None, 3, 67),), attrs={"axes": (1, 2), "correction": 1}),
            Example(shapes=((None, 7, 3),), attrs={"axes": (1, 2), "correction": 2}),
            Example(shapes=((None, 64),), attrs={"axes": (1,)}, batch=256, bench=True),
        ),
        source="two passes: Chan, Golub and LeVeque, Algorithms for computing the sample variance",
    )


_spread("var")
_spread("std")


# ---------------------------------------------------------------- along an axis
AXIS = Attr(name="axis", default=-1, check=lambda v: isinstance(v, int), doc="the axis")
ALONG = tuple(
    Example(shapes=(s,), attrs={"axis": k}) for s in ((4, 1, 5), (None, 7), (None, 3, 19)) for k in range(len(s))
)


def _along(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    x, axis = shapes["x"], attrs["axis"]
    if not -len(x) <= axis < len(x):
        raise ValueError(f"axis {axis} does not fit shape {show(x)}")
    return around(x, [axis % len(x)])


for _name in ("cumsum", "reverse_cumsum"):
    declared(
        DECLARED[_name],
        same_shape,
        _along,
        category="reduction",
        attrs=(AXIS,),
        anyhow=True,
        relaid=along_axis,
        onnx=("CumSum",),
        examples=(*ALONG, Example(shapes=((None, 64),), attrs={"axis": 1}, batch=256, bench=True)),
        source="an element after the other: each result is the one before, rounded, and one more",
    )

declared(
    DECLARED["logcumsumexp"],
    same_shape,
    _along,
    category="reduction",
    attrs=(AXIS,),
    anyhow=True,
    relaid=along_axis,
    examples=(
        *ALONG,
        Example(shapes=((None, 3, 19),), attrs={"axis": 2}, low=-30.0, high=30.0),
        Example(shapes=((None, 64),), attrs={"axis": 1}, batch=256, bench=True),
    ),
    source="an element after the other: log(exp(a) + exp(b)) is the larger plus log1p of exp of the negative difference",
)


# ---------------------------------------------------------------- of positions
def _turned(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    x, cos, sin = shapes["x"], shapes["cos"], shapes["sin"]
    size = 2 * attrs["heads"] * cos[-1].b if len(cos) == 2 and cos[-1].constant else 0
    if len(x) != 3 or cos != sin or cos[:1] != x[1:2] or x[-1] != size:
        raise ValueError(
            f"x {show(x)} is not (samples, steps, {attrs['heads']} heads of an even size), with cos {show(cos)} and sin "
            f"{show(sin)} of a step and of half a head"
        )
    return {"N": x[0], "T": x[1], "H": attrs["heads"], "C": cos[-1]}


declared(
    DECLARED["rotary"],
    lambda shapes, attrs: (_turned(shapes, attrs), same_shape(shapes, attrs))[1],
    _turned,
    category="elementwise",
    attrs=(Attr(name="heads", default=1, check=lambda v: type(v) is int and v >= 1, doc="heads along the last axis"),),
    onnx=("RotaryEmbedding",),
    examples=(
        Example(shapes=((None, 3, 8), (3, 2), (3, 2)), attrs={"heads": 2}),
        Example(shapes=((2, 1, 14), (1, 7), (1, 7))),
        Example(shapes=((None, 32, 64), (32, 8), (32, 8)), attrs={"heads": 4}, batch=8, bench=True),
    ),
    source="Su et al. 2021, with the halves of a head as in GPT-NeoX and Llama",
)
