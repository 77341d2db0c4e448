"""Types of the numbers in a heap: the program's own float, and types of fixed width.

A value has a type.  Its offset counts elements of that type: a word of a row is an index into the heap viewed as an array of the
operand's type, so an element is always aligned for its type.

An operand may have a *variable* type.  The row itself is then the one for the program's float.  Each other type has an instance of
the row, whose name ends with the type: ``slice_fwd.int64``.
"""

from __future__ import annotations

from collections.abc import Iterable

FLOAT = "float"  # the program's own: float32 or float64
FLOATS = (FLOAT, "float32", "float64")  # what gradients go through
BYTES = {"float32": 4, "float64": 8, "int64": 8, "int32": 4, "uint8": 1, "int8": 1, "bool": 1}
TYPES = (FLOAT, *BYTES)

CELLS = "cells"  # moved unchanged: an instance for each size, not for each type
BY_SIZE = {1: "uint8", 4: "int32", 8: "int64"}
VARIABLES = {  # and the types that each may stand for
    CELLS: (FLOAT, *BY_SIZE.values()),
    "any": TYPES,
    "to": TYPES,
    "index": (FLOAT, "int64", "int32", "uint8"),
}
RANKS = ("bool", "uint8", "int8", "int32", "int64")  # of integers that are combined; uint8 and int8 become int32


def bytes_of(type_: str, itemsize: int) -> int:
    """Bytes of an element; ``itemsize`` : of the program's own float."""
    return BYTES.get(type_, itemsize)


def dtype_of(type_: str, dtype: str) -> str:
    """NumPy's name of a type; ``dtype`` : the program's."""
    return type_ if type_ in BYTES else dtype


def promoted(types: Iterable[str], wide: bool = False) -> str:
    """The common type of numbers that are combined: the program's float if any is a float.

    wide : float64 instead, if the program's float cannot represent them all, for code that only inspects them.
    """
    met = {*types}
    if len(met) == 1:
        return met.pop()
    if not met <= {*RANKS}:
        return "float64" if wide and met & {"float64", "int64", "int32"} else FLOAT
    return max("int32" if {"uint8", "int8"} <= met else "bool", *met, key=RANKS.index)


def instance_of(variable: str, type_: str, dtype: str) -> str:
    """The instance of a row that serves a type in a program of ``dtype``."""
    if variable == CELLS:
        size = bytes_of(type_, BYTES[dtype])
        return FLOAT if size == BYTES[dtype] else BY_SIZE[size]
    return FLOAT if type_ == dtype else type_
