"""The table of operators of ONNX (ai.onnx, opset 28; ai.onnx.ml; ai.onnx.preview.training), and what its functions share.

A function of the table gets the `Building`, then the node's inputs, None for those that are left out, and its attributes by name, without
defaults.  It returns an output, or a tuple of outputs; one that costs something may be a function that computes it when it is read.

An input is `Arranged` if it depends on data or weights, and otherwise known: an array of the file's type (of Affine, dtype object, where it
has the batch's size in it), or `Filled`.  If all inputs are known, the node is computed when the file is read, and is not met here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from calcvm import functions as F
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.building import Building, Cannot, Filled, declaring, variable
from calcvm.graph import Variable
from calcvm.ops.types import FLOAT, RANKS

ONNX: dict[str, Callable[..., Any]] = {}
onnx = declaring(ONNX)  # by types of nodes


def counterpart(name: str) -> Callable[..., Any] | None:
    return ONNX.get(name)


# ---------------------------------------------------------------- what inputs are
def is_known(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def known(x: Any, what: str) -> np.ndarray:
    """Numbers of an input that must be known (Cannot: they depend on data)."""
    if isinstance(x, Filled) and all(n.constant for n in x.shape):
        return np.full([n.b for n in x.shape], x.value)
    if not isinstance(x, np.ndarray):
        raise Cannot(f"{what} depends on data: it must be known when the file is read")
    return x


def whole_numbers(x: Any, what: str) -> list[Any]:
    """Known integers: int, or Affine where they depend on the batch."""
    return [n if not isinstance(n, (int, np.integer)) else int(n) for n in known(x, what).reshape(-1).tolist()]


def number(x: Any, what: str) -> Any:
    """A known number."""
    numbers = known(x, what).reshape(-1)
    if numbers.size != 1:
        raise Cannot(f"{what} has {numbers.size} numbers, and one is wanted")
    if numbers.dtype == object:
        raise Cannot(f"{what} depends on the batch's size")
    return numbers[0].item()


def type_of(x: Any) -> str:
    """NumPy's name of a type; "float" for the network's own."""
    if isinstance(x, Arranged):
        return x.type
    name = str(x.dtype) if isinstance(x, np.ndarray) else (x.type or FLOAT)
    return "int64" if name == "object" else FLOAT if name in ("float16", "float32", "float64") else name


def rank_of(x: Any) -> int:
    return len(x.shape)


def place_of(axis: int, rank: int) -> int:
    """An axis that may count from the end."""
    if not -max(rank, 1) <= axis < max(rank, 1):
        raise Cannot(f"axis {axis} of an input with {rank} axes")
    return axis % max(rank, 1)


# ---------------------------------------------------------------- types
TYPES = {
    1: FLOAT,
    2: "uint8",
    3: "int8",
    6: "int32",
    7: "int64",
    9: "bool",
    10: FLOAT,
    11: FLOAT,
    16: FLOAT,
}  # by ONNX's numbers


def in_floats(v: Variable) -> Variable:
    """Integers and conditions as floats, in which rows compute."""
    return v if v.type == FLOAT else F.cast(v, None)


def floats(b: Building, x: Any) -> Variable:
    """An input as a variable of floats."""
    return in_floats(variable(b, x))


def in_type(v: Variable, kind: str) -> Variable:
    """A variable in a type of `type_of`."""
    return v if v.type == kind else F.cast(v, None if kind == FLOAT else kind)


def wrapped(v: Variable, kind: str) -> Variable:
    """Floats in a type; narrow integers keep their lowest bits."""
    return v if kind == FLOAT else in_type(in_type(v, "int64"), kind)


def is_integer(x: Any) -> bool:
    return type_of(x) in RANKS[1:]


def keeps_type(b: Building, f: Callable[..., Variable], x: Any, *others: Any) -> Arranged:
    """A function of floats, whose result has the type of the first operand.

    Integers are computed in floats: exact below 2^24, in a network of float64 below 2^53.
    """
    kind = type_of(x)
    return Arranged.of(in_type(f(floats(b, x), *(floats(b, y) for y in others)), kind))


@onnx("filled")
def filled(b: Building, x: Filled) -> Arranged:
    """A constant of the batch's size, computed: an operator of no file."""
    return Arranged.of(variable(b, x))
