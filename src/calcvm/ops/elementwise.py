"""Elementwise operators: unary ones, binary ones with broadcasting, and rows that lowering inserts.

A backward reads the output rather than the input wherever it can, so that the input's storage can be
the output's, and an activation fused into the row before needs no copy of its argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from calcvm.ops.dims import ONE, ZERO, Affine, Shape, show
from calcvm.ops.spec import Attr, Example, OpSpec, R, RowSpec, U, W, Word, choice, dims, register, rows_cols, same_shape

ROWS_COLS = dims("rows cols")
SIZE = "rows*cols"


def _float(name: str, default: float | None, doc: str, lo: float = -1e300, hi: float = 1e300) -> tuple[Attr, Word]:
    def check(v: Any) -> bool:
        return isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) and lo <= v <= hi

    return Attr(name=name, default=default, check=check, doc=doc), Word(name=name, kind="float", lo=lo, hi=hi)


# ---------------------------------------------------------------- unary
def _unary(
    opcode: int,
    name: str,
    y: str,
    dx: str,
    reads: str,
    *,
    attrs: tuple[tuple[Attr, Word], ...] = (),
    bwd_words: tuple[Word, ...] | None = None,
    word_values: Any = None,
    flops: tuple[int, int] = (1, 1),
    examples: tuple[dict[str, Any], ...] = ({},),
    low: float = -2.0,
    onnx: tuple[str, ...] = (),
    source: str = "",
) -> None:
    """y = f(x); dx = dy*f'; ``reads``: what the backward reads besides dy, "x", "y" or ""."""
    words = tuple(w for _, w in attrs)

    def values(shapes: Mapping[str, Shape], a: Mapping[str, Any]) -> dict[str, Any]:
        return {**rows_cols(shapes["x"]), **(word_values(a) if word_values else a)}

    fwd = RowSpec(
        opcode=opcode,
        name=f"{name}_fwd",
        synopsis=f"y = {y}",
        words=ROWS_COLS + words,
        operands=(R("x", SIZE, "rows"), W("y", SIZE, "rows")),
        in_place=(("y", "x"),),
        flops=f"{flops[0]}*{SIZE}",
    )
    read = ("dy", reads) if reads else ("dy",)
    bwd = RowSpec(
        opcode=opcode + 1,
        name=f"{name}_bwd",
        synopsis=f"dx = {dx}",
        words=ROWS_COLS + (words if bwd_words is None else bwd_words),
        operands=(*(R(v, SIZE, "rows") for v in read), W("dx", SIZE, "rows")),
        in_place=tuple(("dx", v) for v in read),
        flops=f"{flops[1]}*{SIZE}",
    )
    shapes: tuple[tuple[int | None, ...], ...] = ((None, 5), (None, 19), (7,), (3, 2, 9), ())
    more = tuple(Example(shapes=((None, 3),), attrs=a, low=low) for a in examples[1:])
    register(
        OpSpec(
            name=name,
            synopsis=f"y = {y}",
            category="unary",
            inputs=("x",),
            attrs=tuple(a for a, _ in attrs),
            shape=same_shape,
            words=values,
            fwd=(fwd,),
            bwd=(bwd,),
            differentiable=("x",),
            onnx=onnx,
            examples=tuple(Example(shapes=(s,), attrs=examples[0], low=low) for s in shapes)
            + more
            + (Example(shapes=((None, 64),), attrs=examples[0], low=low, batch=256, bench=True),),
            source=source,
        )
    )


ALPHA_SLOPE = _float("alpha", 0.01, "slope for x < 0, >= 0", lo=0.0)
ALPHA_ELU = _float("alpha", 1.0, "limit for x -> -inf is -alpha, >= 0", lo=0.0)
EXPONENT = _float("exponent", None, "the power p")
A, B = _float("a", 1.0, "factor"), _float("b", 0.0, "added")
APPROXIMATE = Attr(
    name="approximate", default="none", check=lambda v: v in ("none", "tanh"), doc='"none" (erf) or "tanh"'
)

_unary(20, "neg", "-x", "-dy", "", onnx=("Neg",))
_unary(22, "abs", "|x|", "dy*sign(x)", "x", onnx=("Abs",), source="the derivative at 0 is 0, as in PyTorch")
_unary(24, "sqrt", "sqrt(x)", "dy/(2*y)", "y", low=0.1, flops=(1, 2), onnx=("Sqrt",))
_unary(26, "square", "x^2", "2*x*dy", "x", flops=(1, 2))
_unary(28, "exp", "exp(x)", "dy*y", "y", onnx=("Exp",))
_unary(30, "log", "log(x)", "dy/x", "x", low=0.1, onnx=("Log",))
_unary(
    32,
    "pow",
    "x^p",
    "dy*p*x^(p-1)",
    "x",
    attrs=(EXPONENT,),
    low=0.1,
    examples=tuple({"exponent": p} for p in (2.5, -1.5, 0.5, 3.0, 2.0, 1.0, 0.0)),
    flops=(3, 5),
    onnx=("Pow",),
    source="IEEE 754 pow: x < 0 is nan unless p is an integer; x^0 = 1; within 2 ulp over the whole range",
)
_unary(34, "relu", "max(x, 0)", "y > 0 ? dy : 0", "y", onnx=("Relu",))
_unary(
    36,
    "leaky_relu",
    "x > 0 ? x : alpha*x",
    "y > 0 ? dy : alpha*dy",
    "y",
    attrs=(ALPHA_SLOPE,),
    examples=({"alpha": 0.01}, {"alpha": 0.3}, {"alpha": 0.0}),
    flops=(2, 2),
    onnx=("LeakyRelu",),
)
_unary(38, "sigmoid", "1/(1 + exp(-x))", "dy*y*(1 - y)", "y", flops=(3, 3), onnx=("Sigmoid",))
_unary(40, "tanh", "tanh(x)", "dy*(1 - y^2)", "y", flops=(1, 3), onnx=("Tanh",))
_unary(
    42,
    "gelu",
    "x*Phi(x)",
    "dy*(Phi(x) + x*phi(x))",
    "x",
    attrs=((APPROXIMATE, choice("approximate", 2)),),
    word_values=lambda a: {"approximate": int(a.get("approximate", "none") == "tanh")},
    examples=({"approximate": "none"}, {"approximate": "tanh"}),
    flops=(4, 8),
    onnx=("Gelu",),
    source="Hendrycks and Gimpel 2016; Phi is the normal distribution, or its approximation by tanh",
)
_unary(
    44,
    "softplus",
    "log(1 + exp(x))",
    "dy*(1 - exp(-y))",
    "y",
    flops=(3, 3),
    onnx=("Softplus",),
)
_unary(
    46,
    "elu",
    "x > 0 ? x : alpha*(exp(x) - 1)",
    "y > 0 ? dy : dy*(y + alpha)",
    "y",
    attrs=(ALPHA_ELU,),
    examples=({"alpha": 1.0}, {"alpha": 0.5}),
    flops=(3, 2),
    onnx=("Elu",),
    source="Clevert et al. 2016; the derivative is right to half an ulp of alpha",
)
_unary(
    48,
    "affine",
    "a*x + b",
    "a*dy",
    "",
    attrs=(A, B),
    bwd_words=(A[1],),
    examples=({"a": 1.5, "b": -0.25}, {"a": 0.0, "b": 3.0}, {"a": -1.0, "b": 0.0}),
    flops=(2, 1),
)


# ---------------------------------------------------------------- binary, with broadcasting
AXES = 6  # the leading axis, which is never merged with others, and five more after merging
BINARY = (
    *dims(" ".join(f"d{i}" for i in range(AXES))),
    *dims(" ".join(f"a{i}" for i in range(AXES - 1))),
    choice("a5", 2),
    *dims(" ".join(f"b{i}" for i in range(AXES - 1))),
    choice("b5", 2),
)
INNER = "*".join(f"d{i}" for i in range(1, AXES))
FULL = f"d0*{INNER}"


def _row_span(s: str) -> str:
    """Elements that operand ``s`` spans below one index of the leading axis (fewer than 1 only if a size is 0)."""
    return "(1 + " + " + ".join(f"(d{i} - 1)*{s}{i}" for i in range(1, AXES)) + ")"


def _extent(s: str) -> str:
    return f"d0*{s}0 if {s}0 else {_row_span(s)}"


def broadcast_shape(inputs: tuple[Shape, ...], attrs: Mapping[str, Any]) -> dict[str, Shape]:
    """NumPy's rule for two shapes."""
    a, b = inputs
    n = max(len(a), len(b))
    pairs = zip((ONE,) * (n - len(a)) + a, (ONE,) * (n - len(b)) + b)
    y = []
    for p, q in pairs:
        if p != q and ONE not in (p, q):
            raise ValueError(f"shapes {show(a)} and {show(b)} do not broadcast: {p} and {q} differ, and neither is 1")
        y.append(q if p == ONE else p)
    return {"y": tuple(y)}


def broadcast_words(shapes: Mapping[str, Shape], attrs: Mapping[str, Any]) -> dict[str, Affine]:
    """Sizes of y, and strides of a and b (0: broadcast), neighbouring axes merged where that is possible."""
    y = broadcast_shape((shapes["a"], shapes["b"]), attrs)["y"] or (ONE,)
    operands = [(ONE,) * (len(y) - len(s)) + s for s in (shapes["a"], shapes["b"])]
    spread = [tuple(size == ONE and out != ONE for size, out in zip(axis, y)) for axis in operands]
    groups: list[tuple[Affine, tuple[bool, bool]]] = []  # inner axes: size, which operand is broadcast along it
    for i in range(1, len(y)):
        kind = (spread[0][i], spread[1][i])
        if y[i] == ONE:
            continue
        if groups and groups[-1][1] == kind:
            groups[-1] = (groups[-1][0] * y[i], kind)
        else:
            groups.append((y[i], kind))
    if len(groups) > AXES - 1:
        raise ValueError(f"{show(shapes['a'])} and {show(shapes['b'])} broadcast in more than {AXES} groups of axes")
    groups = [(ONE, (False, False))] * (AXES - 1 - len(groups)) + groups
    words: dict[str, Affine] = {"d0": y[0]}
    words |= {f"d{i}": size for i, (size, _) in enumerate(groups, 1)}
    for k, name in enumerate("ab"):
        stride = ONE
        for i in range(AXES - 1, 0, -1):
            size, kind = groups[i - 1]
            words[f"{name}{i}"] = ZERO if kind[k] else stride if size != ONE or i == AXES - 1 else ZERO
            if not kind[k]:
                stride = stride * size
        words[f"{name}0"] = ZERO if spread[k][0] else stride
    return words


def _strided(s: str) -> Any:
    return R(s, _extent(s), f"d0 if {s}0 else 0")


def _require(*operands: str) -> tuple[str, ...]:
    """A leading stride that is not 0 covers what lies below it; not both operands are constant innermost."""
    covered = tuple(f"{s}0 - {_row_span(s)} if {s}0 else 0" for s in operands)
    return (*covered, "a5 + b5 - 1") if len(operands) == 2 else covered


def _words_of(*operands: str) -> tuple[Word, ...]:
    return tuple(w for w in BINARY if w.name[0] == "d" or w.name[0] in operands)


def _binary(opcode: int, name: str, y: str, bwd: tuple[RowSpec, ...], passes: tuple[str, ...], onnx: str) -> None:
    fwd = RowSpec(
        opcode=opcode,
        name=f"{name}_fwd",
        synopsis=f"y = {y}",
        words=BINARY,
        operands=(_strided("a"), _strided("b"), W("y", FULL, "d0")),
        in_place=(("y", "a"), ("y", "b")),
        require=_require("a", "b"),
        flops=FULL,
    )
    shapes: tuple[tuple[tuple[int | None, ...], ...], ...] = (
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
    low = 0.3 if name == "div" else -2.0
    register(
        OpSpec(
            name=name,
            synopsis=f"y = {y}",
            category="binary",
            inputs=("a", "b"),
            shape=broadcast_shape,
            words=lambda shapes, attrs: {
                **broadcast_words(shapes, attrs),
                **rows_cols(broadcast_shape((shapes["a"], shapes["b"]), attrs)["y"]),
            },
            fwd=(fwd,),
            bwd=bwd,
            passes=passes,
            broadcast=True,
            differentiable=("a", "b"),
            onnx=(onnx,),
            examples=tuple(Example(shapes=s, low=low) for s in shapes)
            + (Example(shapes=((None, 64), (64,)), low=low, batch=256, bench=True),),
            source="NumPy's broadcasting",
        )
    )


def _product_bwd(opcode: int, name: str, wrt: str, other: str, synopsis: str) -> RowSpec:
    """d``wrt`` = dy combined with the other operand, in y's shape."""
    return RowSpec(
        opcode=opcode,
        name=name,
        synopsis=f"d{wrt} = {synopsis}",
        words=_words_of(other),
        operands=(R("dy", FULL, "d0"), _strided(other), W(f"d{wrt}", FULL, "d0")),
        in_place=((f"d{wrt}", "dy"), (f"d{wrt}", other)),
        require=_require(other),
        flops=FULL,
    )


_binary(80, "add", "a + b", (), ("a", "b"), "Add")
_SUB_BWD_B = RowSpec(
    opcode=82,
    name="sub_bwd_b",
    synopsis="db = -dy",
    words=ROWS_COLS,
    operands=(R("dy", SIZE, "rows"), W("db", SIZE, "rows")),
    in_place=(("db", "dy"),),
    flops=SIZE,
)
_binary(81, "sub", "a - b", (_SUB_BWD_B,), ("a",), "Sub")
_binary(
    83,
    "mul",
    "a * b",
    (_product_bwd(84, "mul_bwd_a", "a", "b", "dy*b"), _product_bwd(85, "mul_bwd_b", "b", "a", "dy*a")),
    (),
    "Mul",
)
_DIV_BWD_B = RowSpec(
    opcode=88,
    name="div_bwd_b",
    synopsis="db = -dy*y/b",
    words=_words_of("b"),
    operands=(R("dy", FULL, "d0"), R("y", FULL, "d0"), _strided("b"), W("db", FULL, "d0")),
    in_place=(("db", "dy"), ("db", "y"), ("db", "b")),
    require=_require("b"),
    flops=f"3*{FULL}",
)
_binary(86, "div", "a / b", (_product_bwd(87, "div_bwd_a", "a", "b", "dy/b"), _DIV_BWD_B), (), "Div")


# ---------------------------------------------------------------- rows that lowering inserts
def _updated(inputs: tuple[Shape, ...], attrs: Mapping[str, Any]) -> dict[str, Shape]:
    return {"y": inputs[0]}


register(
    OpSpec(
        name="accumulate",
        synopsis="y += x",
        category="system",
        inputs=("y", "x"),
        outputs=("y",),
        shape=_updated,
        words=lambda shapes, attrs: rows_cols(shapes["y"]),
        fwd=(
            RowSpec(
                opcode=260,
                name="accumulate",
                synopsis="y += x",
                words=ROWS_COLS,
                operands=(R("x", SIZE, "rows"), U("y", SIZE, "rows")),
                flops=SIZE,
            ),
        ),
        examples=(Example(shapes=((None, 5), (None, 5))), Example(shapes=((37,), (37,)))),
    )
)

_VALUE = _float("value", 0.0, "what y is set to")
register(
    OpSpec(
        name="fill",
        synopsis="y = value",
        category="system",
        inputs=(),
        outputs=("y",),
        attrs=(Attr(name="shape", default=(1,), doc="shape of y"), _VALUE[0]),
        shape=lambda inputs, attrs: {"y": tuple(Affine(1) if n is None else Affine(0, n) for n in attrs["shape"])},
        words=lambda shapes, attrs: {**rows_cols(shapes["y"]), "value": attrs.get("value", 0.0)},
        fwd=(
            RowSpec(
                opcode=261,
                name="fill",
                synopsis="y = value",
                words=(*ROWS_COLS, _VALUE[1]),
                operands=(W("y", SIZE, "rows"),),
            ),
        ),
        examples=(
            Example(shapes=(), attrs={"shape": (6, 4), "value": 1.5}),
            Example(shapes=(), attrs={"shape": (None, 19), "value": -2.0}),
        ),
    )
)
