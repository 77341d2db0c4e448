"""Functions of keras.ops in a functional model, such as those of ``x + y``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from calcvm import functions as F
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.aten import layers as aten
from calcvm.frontends.aten.elementwise import ATEN
from calcvm.frontends.aten.shapes import cat, select, slice_, stack, unsqueeze
from calcvm.frontends.building import Building, Cannot, arranged, is_number, one_by_one
from calcvm.frontends.keras.declared import keras
from calcvm.graph import Variable

OF_TWO: dict[str, Callable[..., Variable]] = {
    "add": F.add, "divide": F.div, "maximum": F.maximum, "minimum": F.minimum, "multiply": F.mul, "subtract": F.sub, "truedivide": F.div,
}  # fmt: skip
SAME = (
    "ceil cos cosh erf exp exp2 expm1 floor log log10 log1p log2 reciprocal round rsqrt sign sin sinh sqrt square tan"
)
OF_ONE = {
    **{name: name for name in SAME.split()},
    "absolute": "abs", "arccos": "acos", "arcsin": "asin", "arctan": "atan", "negative": "neg", "stopgradient": "detach",
}  # fmt: skip
OVER_AXES: dict[str, Callable[..., Variable]] = {
    "amax": F.max,
    "max": F.max,
    "mean": F.mean,
    "min": F.min,
    "sum": F.sum,
    "var": F.var,
}

for _name, _function in OF_TWO.items():
    keras(f"ops.{_name}")(lambda b, x, y, f=_function, **_: one_by_one(b, f, x, y))
for _name, _of_torch in OF_ONE.items():
    keras(f"ops.{_name}")(lambda b, x, f=ATEN[_of_torch], **_: f(b, arranged(b, x)))


def _reduction(name: str, f: Callable[..., Variable]) -> None:
    def reduced(b: Building, x: Any, *, axis: Any = None, keepdims: bool = False, **_: Any) -> Arranged:
        v = arranged(b, x).variable()
        axes = range(v.rank) if axis is None else [axis] if isinstance(axis, int) else axis
        whole = tuple(a % v.rank for a in axes)
        if 0 in whole:
            raise Cannot("it is over the batch")
        return Arranged.of(f(v, whole, keepdims=keepdims))

    keras(f"ops.{name}")(reduced)


for _name in OVER_AXES:
    _reduction(_name, OVER_AXES[_name])


@keras("ops.power")
def power(b: Building, x: Any, y: Any, **_: Any) -> Arranged:
    return ATEN["pow"](b, x, y)


@keras("ops.matmul")
def matmul(b: Building, x: Any, y: Any, **_: Any) -> Arranged:
    return aten.matmul(b, x, y)


@keras("ops.einsum")
def einsum(b: Building, *operands: Any, subscripts: str, **_: Any) -> Arranged:
    return aten.einsum(b, subscripts, operands)


@keras("ops.reshape")
def reshape(b: Building, x: Any, newshape: Sequence[int], **_: Any) -> Arranged:
    x = arranged(b, x)
    first = x.shape[0] if newshape[0] in (-1, None) else newshape[0]
    return x.reshaped([first, *newshape[1:]])


@keras("ops.transpose")
def transpose(b: Building, x: Any, *, axes: Any = None, **_: Any) -> Arranged:
    x = arranged(b, x)
    return x.permuted([*range(x.rank)][::-1] if axes is None else [a % x.rank for a in axes])


@keras("ops.concatenate")
def concatenate(b: Building, xs: Sequence[Any], *, axis: int = 0, **_: Any) -> Arranged:
    return cat(b, xs, axis)


@keras("ops.stack")
def stacked(b: Building, xs: Sequence[Any], *, axis: int = 0, **_: Any) -> Arranged:
    return stack(b, xs, axis)


@keras("ops.expanddims")
def expand_dims(b: Building, x: Any, *, axis: int, **_: Any) -> Arranged:
    return unsqueeze(b, arranged(b, x), axis)


@keras("ops.squeeze")
def squeeze(b: Building, x: Any, *, axis: Any = None, **_: Any) -> Arranged:
    return ATEN["squeeze"](b, arranged(b, x), axis)


@keras("ops.getitem")
def getitem(b: Building, x: Any, key: Any, **_: Any) -> Arranged:
    x, axis = arranged(b, x), 0
    for part in key if isinstance(key, list) else [key]:
        if isinstance(part, dict):
            x, axis = slice_(b, x, axis, part["start"], part["stop"], part["step"] or 1), axis + 1
        elif is_number(part):
            x = select(b, x, axis, part)
        else:
            raise Cannot("integers and slices have a counterpart")
    return x
