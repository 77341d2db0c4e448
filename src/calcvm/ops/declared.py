"""Operators defined by their equations: rows, gradients and kernels follow (`calcvm.equations.declared`).

Each sees x as (O, N, I): N is the axis or block of neighbouring axes that it works on, O are the axes before, I those after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from calcvm.equations.declared import DECLARED
from calcvm.ops.dims import ONE, Affine, Shape, affine, numel, show
from calcvm.ops.plain import declared
from calcvm.ops.reduction import ATTRS, CASES, reduce_shape, reduced_axes
from calcvm.ops.shape import along_axis
from calcvm.ops.spec import Attr, Example, R, RowSpec, Shapes, W, Word, choice, dims, operator, same_shape


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

for _name in ("cumprod", "cummax", "cummin"):
    declared(
        DECLARED[_name],
        same_shape,
        _along,
        category="reduction",
        attrs=(AXIS,),
        anyhow=True,
        relaid=along_axis,
        examples=(*ALONG, Example(shapes=((None, 64),), attrs={"axis": 1}, batch=256, bench=True)),
        source="an element after the other, as cumsum",
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


# ---------------------------------------------------------------- places that are data
def _axis(shapes: Shapes, attrs: Mapping[str, Any]) -> int:
    _along(shapes, attrs)  # which checks it
    return attrs["axis"] % len(shapes["x"])


def _without(shapes: Shapes, attrs: Mapping[str, Any], *instead: Shape) -> dict[str, Shape]:
    x, axis = shapes["x"], _axis(shapes, attrs)
    return {"y": (*x[:axis], *(n for shape in instead for n in shape), *x[axis + 1 :])}


for _name in ("argmax", "argmin"):
    declared(
        DECLARED[_name],
        _without,
        _along,
        category="reduction",
        attrs=(AXIS,),
        flat=("x",),
        onnx=(f"Arg{_name[3:].title()}",),
        examples=(*ALONG, Example(shapes=((None, 64),), attrs={"axis": 1}, batch=256, bench=True)),
        source="of equals the first; NaN wins, as in numpy.argmax",
    )

declared(
    DECLARED["embedding"],
    lambda shapes, attrs: {"y": shapes["index"] + shapes["x"][1:]},
    lambda shapes, attrs: {
        "N": shapes["x"][0],
        "K": numel(shapes["index"]),
        "I": numel(shapes["x"][1:]),
        "padding": attrs["padding"],
    },
    (Word(name="padding", kind="int", lo=-1, hi=2**40),),
    category="shape",
    attrs=(
        Attr(
            name="padding",
            default=-1,
            check=lambda v: isinstance(v, int) and -1 <= v <= 2**40,
            doc="the index whose vector gets no gradient; -1: none",
        ),
    ),
    onnx=("Gather",),
    examples=(
        Example(shapes=((11, 5), (None, 3)), integer={"index": 11}),
        Example(shapes=((11, 5), (None, 3)), integer={"index": 11}, types={"index": "int64"}),
        Example(shapes=((7, 19), (None,)), integer={"index": 7}, types={"index": "int32"}, batch=37),
        Example(shapes=((3,), (None, 4)), integer={"index": 3}),
        Example(shapes=((1, 1), ()), integer={"index": 1}),
        Example(
            shapes=((1000, 64), (None, 8)), integer={"index": 1000}, types={"index": "int64"}, batch=32, bench=True
        ),
    ),
    source="torch.nn.functional.embedding",
)


def _taking(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    return {**_along(shapes, attrs), "K": numel(shapes["index"])}


declared(
    DECLARED["take"],
    lambda shapes, attrs: _without(shapes, attrs, shapes["index"]),
    _taking,
    category="shape",
    attrs=(AXIS,),
    onnx=("Gather",),
    examples=(
        Example(shapes=((None, 7), (3,)), integer={"index": 7}, attrs={"axis": 1}),
        Example(shapes=((None, 5, 3), (2, 4)), integer={"index": 5}, types={"index": "int32"}, attrs={"axis": 1}),
        Example(shapes=((None, 3, 5), (9,)), integer={"index": 5}, types={"index": "int64"}, attrs={"axis": -1}),
        Example(shapes=((2, 3, 19), (None,)), integer={"index": 3}, attrs={"axis": 1}),
        Example(shapes=((None, 4), ()), integer={"index": 4}, attrs={"axis": 1}),
        Example(shapes=((None, 32, 16), (8,)), integer={"index": 32}, attrs={"axis": 1}, batch=64, bench=True),
    ),
    source="numpy.take",
)


def _along_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    x, index, axis = shapes["x"], shapes["index"], _axis(shapes, attrs)
    if len(index) != len(x) or any(n != m for k, (n, m) in enumerate(zip(x, index)) if k != axis):
        raise ValueError(f"indexes {show(index)} are not of the shape of x {show(x)}, but for axis {axis}")
    return {"y": index}


declared(
    DECLARED["take_along_axis"],
    _along_shape,
    lambda shapes, attrs: {**_along(shapes, attrs), "K": shapes["index"][_axis(shapes, attrs)]},
    category="shape",
    attrs=(AXIS,),
    onnx=("GatherElements",),
    examples=(
        Example(shapes=((None, 7), (None, 3)), integer={"index": 7}, attrs={"axis": 1}),
        Example(shapes=((None, 5, 3), (None, 8, 3)), integer={"index": 5}, types={"index": "int32"}, attrs={"axis": 1}),
        Example(
            shapes=((None, 3, 19), (None, 3, 1)), integer={"index": 19}, types={"index": "int64"}, attrs={"axis": 2}
        ),
        Example(shapes=((7,), (2,)), integer={"index": 7}, attrs={"axis": 0}),
        Example(shapes=((None, 32, 16), (None, 8, 16)), integer={"index": 32}, attrs={"axis": 1}, batch=64, bench=True),
    ),
    source="numpy.take_along_axis; torch.gather, with one size per axis",
)

declared(
    DECLARED["one_hot"],
    lambda shapes, attrs: {"y": shapes["index"] + shapes["x"]},
    lambda shapes, attrs: {"K": numel(shapes["index"]), "N": shapes["x"][0]},
    category="shape",
    flat=("x",),
    onnx=("OneHot",),
    examples=(
        Example(shapes=((7,), (None, 3)), integer={"index": 7}),
        Example(shapes=((3,), (None,)), integer={"index": 3}, types={"index": "int64"}),
        Example(shapes=((1,), ()), integer={"index": 1}),
        Example(shapes=((10,), (None,)), integer={"index": 10}, types={"index": "int64"}, batch=256, bench=True),
    ),
    source="torch.nn.functional.one_hot, of the program's floats",
)


def _of_first(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    x = shapes["x"]
    return {"N": x[0], "K": numel(shapes["index"]), "I": numel(x[1:])}


declared(
    DECLARED["inside"],
    lambda shapes, attrs: {"y": shapes["index"]},
    _of_first,
    category="shape",
    flat=("x",),
    examples=(
        Example(shapes=((7, 3), (None, 3)), integer={"index": 7}),
        Example(shapes=((5, 1), (None,)), integer={"index": 5}, types={"index": "int64"}),
        Example(shapes=((64, 8), (None,)), integer={"index": 64}, types={"index": "int64"}, batch=256, bench=True),
    ),
    source="scatter_add traps by it if an index is outside",
)


def _scattered(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    x, index, u = shapes["x"], shapes["index"], shapes["u"]
    if u != index + x[1:]:
        raise ValueError(
            f"updates {show(u)} are not of the shape {show(index + x[1:])}: indexes {show(index)}, then x {show(x)} after axis 0"
        )
    return {"y": x}


declared(
    DECLARED["scatter_add"],
    _scattered,
    _of_first,
    passes=("x",),
    category="shape",
    examples=(
        Example(shapes=((7, 3), (5,), (5, 3)), integer={"index": 7}),
        Example(shapes=((5, 19), (11, 4), (11, 4, 19)), integer={"index": 5}),
        Example(shapes=((5, 2, 4), (6,), (6, 2, 4)), integer={"index": 5}),
        Example(shapes=((3,), (37,), (37,)), integer={"index": 3}),
        Example(shapes=((1, 1), (), (1,)), integer={"index": 1}),
        Example(shapes=((64, 16), (256,), (256, 16)), integer={"index": 64}, bench=True),
    ),
    source="numpy.add.at; torch.index_add.  What goes to one place is first added up in the order of the indexes, and then to x",
)


def _kept(shapes: Shapes, attrs: Mapping[str, Any]) -> Affine:
    n, k = shapes["x"][_axis(shapes, attrs)], attrs["k"]
    if k is not None and not (n.constant and k <= n.b):
        raise ValueError(
            f"k {k} is more than the {n} elements of axis {attrs['axis']}"
            + " (the batch, which may be 1)" * (not n.constant)
        )
    return n if k is None else affine(k)


# ---------------------------------------------------------------- places in order, with kernels by hand
_LARGER = "not x[o,{},i] <= x[o,{},i] and x[o,{},i] <= inf"  # NaN is the largest
_FIRST, _SECOND = _LARGER.format("m", "n", "n"), _LARGER.format("n", "m", "m")

operator(
    name="argsort",
    synopsis="y = the first k places along an axis in ascending or descending order of x",
    category="shape",
    inputs=("x",),
    attrs=(
        AXIS,
        Attr(name="k", check=lambda v: v is None or (isinstance(v, int) and v > 0), doc="how many; default: all"),
        Attr(name="descending", default=False, check=lambda v: isinstance(v, bool), doc="the largest first"),
    ),
    shape=lambda shapes, attrs: _without(shapes, attrs, (_kept(shapes, attrs),)),
    words=lambda shapes, attrs: {
        **_along(shapes, attrs),
        "K": _kept(shapes, attrs),
        "descending": int(attrs["descending"]),
    },
    fwd=(
        RowSpec(
            name="argsort_fwd",
            synopsis="y[o<O,k<K,i<I] = sum[n<N] where(k == (sum[m<N] where("
            f"m < n and not ({_FIRST}) and not ({_SECOND}) or descending == 1 and {_FIRST} or descending == 0 and {_SECOND}"
            ", 1, 0)), n, 0)",
            words=(*dims("O N K I"), choice("descending", 2)),
            operands=(R("x", "O*N*I", "O"), W("y", "O*K*I", "O", type="int64")),
            require=("N - K",),
            flops="16*O*N*I",
        ),
    ),
    flat=("x",),
    onnx=("TopK",),
    examples=(
        *(Example(shapes=e.shapes, attrs={**e.attrs, "descending": down}) for e in ALONG for down in (False, True)),
        Example(shapes=((None, 37),), attrs={"k": 5, "descending": True}),
        Example(shapes=((None, 19, 3),), attrs={"axis": 1, "k": 4}),
        Example(shapes=((None, 64),), batch=256, bench=True),
    ),
    source="Knuth, The Art of Computer Programming 3, 5.2.3 (heapsort); NaN is the largest, and of equals the first comes first",
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
