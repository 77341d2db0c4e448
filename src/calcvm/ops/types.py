"""Types of the numbers in a heap: the program's own float, and those of a width of their own.

A value has a type.  What says where it lies counts its own elements: a word of a row is an index into the heap seen as an
array of the operand's type, so that an element cannot lie where its type may not.
"""

from __future__ import annotations

FLOAT = "float"  # the program's own: float32 or float64
BYTES = {"float32": 4, "float64": 8, "int64": 8, "int32": 4, "uint8": 1, "int8": 1, "bool": 1}
TYPES = (FLOAT, *BYTES)


def bytes_of(type_: str, itemsize: int) -> int:
    """Bytes of an element; ``itemsize`` : of the program's own float."""
    return BYTES.get(type_, itemsize)


def dtype_of(type_: str, dtype: str) -> str:
    """NumPy's name of a type; ``dtype`` : the program's."""
    return dtype if type_ == FLOAT else type_
