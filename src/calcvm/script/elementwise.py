"""Texts of formulas, of casts, and of rows that lowering inserts."""

from __future__ import annotations

from typing import Any

from calcvm.formulas.declare import AXES, ELEMENTWISE, Choice, Formula
from calcvm.formulas.elementwise import ACTIVATIONS, CAST, elu_by_output
from calcvm.ops.dims import ONE, Affine, Shape, affine
from calcvm.script.code import formula
from calcvm.script.row import FALLBACKS, Row, Writer, writes


def applied(r: Row, f: Formula, *values: Any) -> Any:
    """Apply a formula to expressions for its inputs; its parameters are words of the row."""
    chosen = next((r.integer(name) for name, p in f.words.items() if isinstance(p, Choice)), 0)
    return formula(f.variant(chosen), *values, *(r.number(getattr(r.w, name)) for name in f.reals))


def _formula_row(name: str) -> Writer | None:
    found = next(((op, f) for op in ELEMENTWISE.values() for f in op.formulas if f.name == name), None)
    if found is None:
        return None
    op, f = found
    strided = op.strided(f)

    def write(r: Row) -> None:
        shape, values = _common(r, f, strided)
        r.put_shaped(f.writes, applied(r, f, *values), shape)

    return write


FALLBACKS.append(_formula_row)


def _common(r: Row, f: Formula, strided: tuple[str, ...]) -> tuple[Shape, list[Any]]:
    """The shape of the result, and inputs in shapes that broadcast to it."""
    y = r.shape(f.writes)
    if not strided:
        return y, r.together(f.reads, [y for _ in f.reads], y)
    natural = all(
        canonical(zip(y, _spread(r.shape(v), y))) == canonical(_pairs(r, v))
        for v in strided
        if len(r.shape(v)) <= len(y)
    ) and all(len(r.shape(v)) <= len(y) for v in strided)
    if natural and all(_fits(r.shape(v), y) for v in strided):
        return y, r.together(f.reads, [r.shape(v) if v in strided else y for v in f.reads], y)
    axes = [i for i in range(AXES) if getattr(r.w, f"d{i}") != ONE] or [AXES - 1]
    full = tuple(getattr(r.w, f"d{i}") for i in axes)
    seen = {v: tuple(getattr(r.w, f"d{i}") if getattr(r.w, f"{v}{i}") != 0 else ONE for i in axes) for v in strided}
    return full, r.together(f.reads, [seen.get(v, full) for v in f.reads], full)


def _fits(shape: Shape, y: Shape) -> bool:
    padded = (ONE,) * (len(y) - len(shape)) + shape
    return all(n in (ONE, out) for n, out in zip(padded, y))


def _spread(shape: Shape, y: Shape) -> list[Affine]:
    """Strides of an operand along the axes of the result; 0 if it is broadcast there."""
    padded, strides, step = (ONE,) * (len(y) - len(shape)) + shape, [], ONE
    for n, out in zip(padded[::-1], y[::-1]):
        strides.append(step if n == out else affine(0))
        step = step * n
    return strides[::-1]


def _pairs(r: Row, v: str) -> list[tuple[Affine, Affine]]:
    return [(getattr(r.w, f"d{i}"), getattr(r.w, f"{v}{i}")) for i in range(AXES)]


def canonical(pairs: Any) -> list[tuple[Affine, Affine]]:
    """Sizes and strides without axes of 1 and with adjacent axes merged.  Equal results address the same elements."""
    out: list[tuple[Affine, Affine]] = []
    for size, stride in pairs:
        if size == ONE:
            continue
        if out and out[-1][1] == _times(stride, size):
            out[-1] = (out[-1][0] * size, stride)
        else:
            out.append((size, stride))
    return out


def _times(stride: Affine, size: Affine) -> Affine:
    return affine(0) if stride == 0 else stride * size


# ---------------------------------------------------------------- epilogues of other rows
def activated(r: Row, y: Any) -> Any:
    """y after the activation that a row applies at its end, if any."""
    name = ACTIVATIONS[r.integer("act")]
    if name == "none":
        return y
    f = ELEMENTWISE[name].forward
    return formula(f.variant(), y, *(r.number(r.w.alpha) for _ in f.reals))


def derived(r: Row, dx: Any, ya: Any) -> Any:
    """dx times the derivative of that activation at its result ya."""
    name = ACTIVATIONS[r.integer("act")]
    if name == "none":
        return dx
    if name == "elu":
        return formula(elu_by_output, dx, ya, r.number(r.w.alpha))
    f = ELEMENTWISE[name].backward["x"]
    named = {"dy": dx, "y": ya}
    return formula(f.variant(), *(named[v] for v in f.reads), *(r.number(r.w.alpha) for _ in f.reals))


# ---------------------------------------------------------------- rows that are not formulas
@writes("pow_bwd")
def _pow_back(r: Row) -> None:
    p = r.w.exponent
    dy, x = r.together(("dy", "x"), (r.shape("dx"),) * 2, r.shape("dx"))
    r.put("dx", dy.select(dy.equals(0), 0.0, dy * (p * x ** (p - 1))) if p else r.like("dy", "dx") * 0.0)


@writes(CAST.name)
def _cast(r: Row) -> None:
    x, of, to = r.like("x", "y"), r.dtype("x"), r.dtype("y")
    x = r.call("np.asarray", x) if x.scalar else x
    if to == of:
        r.put("y", x)
    elif to == "bool":
        r.put("y", x._of("bool", "{} != 0", 2, (x, 3)))
    elif of.startswith("float") and not to.startswith("float"):
        r.put("y", r.call("to_integer", x, f"np.{to}"))
    else:
        r.put("y", x.method(f"astype(np.{to})"))
