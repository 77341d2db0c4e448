"""Elementwise operators: those of `calcvm.formulas.elementwise`, ``pow``, and rows that lowering inserts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from calcvm.formulas.declare import AXES, Elementwise, Formula, Real
from calcvm.formulas.elementwise import ACCUMULATE, CAST, ELEMENTWISE, FILL
from calcvm.ops import parameters
from calcvm.ops.dims import ONE, ZERO, Affine, Shape, show
from calcvm.ops.epilogues import of_formula
from calcvm.ops.spec import (
    OPS,
    ROWS_COLS,
    SIZE,
    Attr,
    Example,
    Operand,
    OpSpec,
    R,
    RowSpec,
    Shapes,
    U,
    W,
    Word,
    choice,
    dims,
    joined,
    operator,
    register,
    rows_cols,
    same_shape,
    uniform,
)
from calcvm.ops.types import FLOAT, TYPES, VARIABLES


def _row(f: Formula, words: tuple[Word, ...], operands: tuple[Operand, ...], size: str, **more: Any) -> RowSpec:
    """The row of a formula; a test checks calcvm's own formulas, so that processes need not."""
    if f.own:
        f.check()
    return RowSpec(
        name=f.name,
        synopsis=lambda: f.text,
        words=words + parameters.words(f.words),
        operands=operands,
        in_place=tuple((f.writes, read) for read in f.reads),
        flops=lambda: f"{f.operations}*{size}" if f.operations > 1 else size,
        epilogues=() if f.own else of_formula(f.name, f.reads, f.words),
        **more,
    )


def _flat(f: Formula) -> RowSpec:
    """The row of a formula whose operands all have one shape."""
    operands = (
        *(R(v, SIZE, "rows", type=_type(f, v)) for v in f.reads),
        W(f.writes, SIZE, "rows", type=_type(f, f.writes)),
    )
    return _row(f, ROWS_COLS, operands, SIZE)


def _type(f: Formula, operand: str) -> str:
    return f.types.get(operand, FLOAT)


def _typed(op: Elementwise, shapes: tuple[tuple[int | None, ...], ...], low: float) -> list[Example]:
    """An example for each type that it is tested with."""
    variables = {*op.forward.types.values()} & {*VARIABLES}
    return [Example(shapes=shapes, low=low, types=dict.fromkeys(variables, t)) for t in op.types]


# ---------------------------------------------------------------- of one operand
UNARY_SHAPES: tuple[tuple[int | None, ...], ...] = ((None, 5), (None, 19), (7,), (3, 2, 9), ())


def _unary(op: Elementwise, fwd: RowSpec, *bwd: RowSpec) -> OpSpec:
    example = partial(Example, low=op.low, high=op.high)
    examples = [example(shapes=(s,), attrs=op.cases[0]) for s in UNARY_SHAPES]
    examples += [example(shapes=((None, 3),), attrs=attrs) for attrs in op.cases[1:]]
    examples.append(example(shapes=((None, 64),), attrs=op.cases[0], batch=256, bench=True))
    x = op.forward.reads[0]
    graded = (x,) if bwd or op.backward else ()
    return OpSpec(
        name=op.name,
        synopsis=lambda: fwd.synopsis,
        category="unary",
        inputs=(x,),
        attrs=parameters.attributes(op.params),
        shape=same_shape,
        words=lambda shapes, attrs: {**rows_cols(shapes[x]), **parameters.values(op.params, attrs)},
        fwd=(fwd,),
        bwd=bwd,
        passes=tuple(name for name, f in op.backward.items() if f.passes),
        anyhow=True,
        differentiable=graded,
        flat=() if graded else (x,),
        onnx=op.onnx,
        examples=tuple(examples),
        source=op.source,
    )


POW = Elementwise(
    name="pow",  # its kernel is not a formula, because some exponents have special forms
    forward=Formula("pow_fwd", lambda x, exponent: x * exponent, "y"),
    backward={},
    params={"exponent": Real(None, "the power p")},
    onnx=("Pow",),
    low=0.1,
    cases=tuple({"exponent": p} for p in (2.5, -1.5, 0.5, 3.0, 2.0, 1.0, 0.0)),
    source="IEEE 754 pow: x < 0 is nan unless p is an integer; x^0 = 1; within 2 ulp over the whole range",
)
_POW_WORDS = ROWS_COLS + parameters.words(POW.params)
POW_FWD = uniform("pow_fwd", "y = x^exponent", ("x",), "y", 3, _POW_WORDS)
POW_BWD = uniform("pow_bwd", "dx = dy*exponent*x^(exponent - 1)", ("dy", "x"), "dx", 5, _POW_WORDS)


# ---------------------------------------------------------------- binary, with broadcasting
SIZES = dims(" ".join(f"d{i}" for i in range(AXES)))
INNER = "*".join(f"d{i}" for i in range(1, AXES))
FULL = f"d0*{INNER}"


def _row_span(s: str) -> str:
    """Elements that operand ``s`` spans below one index of the leading axis (fewer than 1 only if a size is 0)."""
    return "(1 + " + " + ".join(f"(d{i} - 1)*{s}{i}" for i in range(1, AXES)) + ")"


def _extent(s: str) -> str:
    return f"d0*{s}0 if {s}0 else {_row_span(s)}"


def broadcast_shape(*inputs: Shape) -> Shape:
    """The broadcast shape, by NumPy's rule."""
    n = max(map(len, inputs))
    y = []
    for sizes in zip(*((ONE,) * (n - len(s)) + s for s in inputs)):
        found = [*dict.fromkeys(size for size in sizes if size != ONE)] or [ONE]
        if len(found) > 1:
            shapes = ", ".join(map(show, inputs[:-1])) + f" and {show(inputs[-1])}"
            raise ValueError(f"shapes {shapes} do not broadcast: {found[0]} and {found[1]} differ, and neither is 1")
        y.append(found[0])
    return tuple(y)


def broadcast_words(inputs: Mapping[str, Shape]) -> dict[str, Any]:
    """The sizes of y, and each input's strides (0: broadcast), with neighbouring axes merged if possible."""
    y = broadcast_shape(*inputs.values()) or (ONE,)
    operands = [(ONE,) * (len(y) - len(s)) + s for s in inputs.values()]
    spread = [tuple(size == ONE and out != ONE for size, out in zip(axis, y)) for axis in operands]
    if all(of[:1] == of[1:2] for of in spread):  # all operands see the first two axes as one
        y, spread = joined(y), [of[len(y) > 2 :] for of in spread]
    groups: list[
        tuple[Affine, tuple[bool, ...]]
    ] = []  # inner axes: the size, and which operands are broadcast along it
    for i in range(1, len(y)):
        kind = tuple(of[i] for of in spread)
        if y[i] == ONE:
            continue
        if groups and groups[-1][1] == kind:
            groups[-1] = (groups[-1][0] * y[i], kind)
        else:
            groups.append((y[i], kind))
    if len(groups) > AXES - 1:
        shown = " and ".join(map(show, inputs.values()))
        raise ValueError(f"{shown} broadcast in more than {AXES} groups of axes")
    groups = [(ONE, (False,) * len(operands))] * (AXES - 1 - len(groups)) + groups
    words: dict[str, Any] = {"d0": y[0]}
    words |= {f"d{i}": size for i, (size, _) in enumerate(groups, 1)}
    for k, name in enumerate(inputs):
        stride = ONE
        for i in range(AXES - 1, 0, -1):
            size, kind = groups[i - 1]
            words[f"{name}{i}"] = ZERO if kind[k] else stride if size != ONE or i == AXES - 1 else ZERO
            if not kind[k]:
                stride = stride * size
        words[f"{name}0"] = ZERO if spread[k][0] else stride
        words[f"{name}{AXES - 1}"] = words[f"{name}{AXES - 1}"].b
    return words


def _strides(s: str) -> tuple[Word, ...]:
    return (*dims(" ".join(f"{s}{i}" for i in range(AXES - 1))), choice(f"{s}{AXES - 1}", 2))


def _strided(s: str, type_: str) -> Any:
    return R(s, _extent(s), f"d0 if {s}0 else 0", type=type_)


def _require(*operands: str) -> tuple[str, ...]:
    """A nonzero leading stride covers the elements below it; not all operands are constant along the innermost axis."""
    covered = tuple(f"{s}0 - {_row_span(s)} if {s}0 else 0" for s in operands)
    return (*covered, " + ".join(f"{s}{AXES - 1}" for s in operands) + " - 1") if len(operands) > 1 else covered


def _broadcast(f: Formula, strided: tuple[str, ...]) -> RowSpec:
    """The row of a formula whose operands are broadcast to y's shape: some by strides, the others whole."""
    words = (*SIZES, *(word for v in strided for word in _strides(v)))
    reads = (_strided(v, _type(f, v)) if v in strided else R(v, FULL, "d0", type=_type(f, v)) for v in f.reads)
    operands = (*reads, W(f.writes, FULL, "d0", type=_type(f, f.writes)))
    return _row(f, words, operands, FULL, require=_require(*strided))


BINARY_SHAPES: tuple[tuple[tuple[int | None, ...], ...], ...] = (
    ((None, 5), (None, 5)),
    ((None, 19), (19,)),
    ((4,), (None, 4)),
    ((None, 1), (None, 18)),
    ((None, 3, 1, 4), (5, 1)),
    ((7,), (7,)),
    ((7,), (1,)),
    ((7,), ()),
    ((), ()),
    ((2, 1, 3, 1, 2, 1), (1, 4, 1, 2, 1, 3)),
    ((1, 3), (None, 1)),
)
TERNARY_SHAPES: tuple[tuple[tuple[int | None, ...], ...], ...] = (
    ((None, 5), (None, 5), (None, 5)),
    ((None, 19), (19,), ()),
    ((None, 1), (None, 18), (1, 18)),
    ((7,), (7,), ()),
    ((None, 3, 1, 4), (5, 1), (3, 1, 1)),
    ((), (), ()),
)


def _several(op: Elementwise) -> OpSpec:
    fwd, *bwd = (_broadcast(f, strided) if (strided := op.strided(f)) else _flat(f) for f in op.formulas)
    inputs = op.forward.reads
    shapes = BINARY_SHAPES if len(inputs) == 2 else TERNARY_SHAPES
    cases = op.cases[0]
    examples = [Example(shapes=s, attrs=cases, low=op.low) for s in shapes] + _typed(op, shapes[1], op.low)
    bench = ((None, 64), (64,), (64,))[: len(inputs)]

    def words(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
        of = {name: shapes[name] for name in inputs}
        of_params = parameters.values(op.params, attrs)
        return {**broadcast_words(of), **rows_cols(broadcast_shape(*of.values())), **of_params}

    return OpSpec(
        name=op.name,
        synopsis=lambda: op.forward.text,
        category="binary" if len(inputs) == 2 else "ternary",
        inputs=inputs,
        attrs=parameters.attributes(op.params),
        shape=lambda shapes, attrs: {"y": broadcast_shape(*(shapes[name] for name in inputs))},
        words=words,
        fwd=(fwd,),
        bwd=tuple(bwd),
        passes=tuple(name for name, f in op.backward.items() if f.passes),
        broadcast=True,
        anyhow=True,
        exact=op.exact,
        differentiable=tuple(op.backward),
        flat=tuple(name for name in op.forward.reads if name not in op.backward),
        onnx=op.onnx,
        examples=(*examples, Example(shapes=bench, attrs=cases, low=op.low, batch=256, bench=True)),
        source=op.source or "NumPy's broadcasting",
    )


def spec_of(op: Elementwise) -> OpSpec:
    """The operator of a formula of one operand, or of several, which are broadcast."""
    if len(op.forward.reads) == 1:
        return _unary(op, *map(_flat, op.formulas))
    return _several(op)


for _op in ELEMENTWISE.values():
    register(spec_of(_op))
register(_unary(POW, POW_FWD, POW_BWD))


# ---------------------------------------------------------------- casts
operator(
    name="cast",
    synopsis="y = x, as a number of another type",
    category="unary",
    inputs=("x",),
    attrs=(Attr(name="to", check=lambda v: v in TYPES, doc=f"the type: {', '.join(TYPES)}"),),
    shape=same_shape,
    words=lambda shapes, attrs: rows_cols(shapes["x"]),
    fwd=(_flat(CAST),),
    flat=("x",),
    onnx=("Cast",),
    examples=tuple(
        Example(shapes=((None, 19),), attrs={"to": to}, types={"any": of, "to": to}, low=-3.0 if to != "uint8" else 0.0, high=5.0)
        for of, to in (
            ("uint8", FLOAT), ("int64", FLOAT), ("bool", FLOAT), ("int8", FLOAT), (FLOAT, "int64"), (FLOAT, "uint8"),
            (FLOAT, "bool"), ("int64", "int32"), ("int32", "bool"), ("bool", "uint8"), ("float32", "float64"),
        )
    ),
    source="a float is truncated towards 0 and saturates, NaN becomes 0; an integer keeps its lowest bits; nonzero is true",
    casts=True,
    anyhow=True,
)  # fmt: skip


# ---------------------------------------------------------------- rows that lowering inserts
operator(
    name="accumulate",
    synopsis="y += x",
    category="system",
    inputs=("y", "x"),
    outputs=("y",),
    shape=same_shape,
    words=lambda shapes, attrs: rows_cols(shapes["y"]),
    fwd=(
        RowSpec(
            name=ACCUMULATE.name,
            synopsis="y += x",
            words=ROWS_COLS,
            operands=(R("x", SIZE, "rows"), U("y", SIZE, "rows")),
            flops=SIZE,
        ),
    ),
    examples=(Example(shapes=((None, 5), (None, 5))), Example(shapes=((37,), (37,)))),
)
operator(
    name="fill",
    synopsis="y = value",
    category="system",
    inputs=(),
    outputs=("y",),
    attrs=(Attr(name="shape", default=(1,), doc="shape of y"), *parameters.attributes(FILL.params)),
    shape=lambda shapes, attrs: {"y": tuple(Affine(1) if n is None else Affine(0, n) for n in attrs["shape"])},
    words=lambda shapes, attrs: {**rows_cols(shapes["y"]), **parameters.values(FILL.params, attrs)},
    fwd=(_flat(FILL),),
    examples=(
        Example(shapes=(), attrs={"shape": (6, 4), "value": 1.5}),
        Example(shapes=(), attrs={"shape": (None, 19), "value": -2.0}),
    ),
)
CAST_ROW, WHERE_ROW = CAST.name, OPS["where"].fwd[0].name
