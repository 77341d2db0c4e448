"""The vocabulary that the writer and the reader share.

    calcvm graph 1
    x = placeholder[None, 6]
    W = parameter[6, 3] init=XavierUniform()

    path learn (backward):
        layer linear_1:
            %matmul = matmul(x, W)
            return matmul
        minimize(loss, optimizer=SGD(0.1), output=matmul)

A line is a statement.  Lines indented under a path or a layer are its contents.  Each line of a path is an operator of the
table, with positional inputs and named attributes; attributes with default values are omitted.
"""

from __future__ import annotations

import re
from typing import Any

from calcvm import init, optim

VERSION = 1
TITLE = "calcvm graph"
BARE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*", re.ASCII)  # a name that needs no quotes
BEFORE_NAMES, BEFORE_VALUES = ("path", "layer", "return"), ("minimize", "output", "carry", "adapt")  # other statements
CONSTANTS: dict[str, Any] = {"None": None, "True": True, "False": False, "inf": float("inf"), "nan": float("nan")}
GRADIENT, LAID = "gradient", "laid"  # called like operators, but not in the table
SMALL = 64  # most elements of an array written as numbers; larger ones are written as bytes, in base64
CONTINUED = "continued"
BACKWARD = "backward"

# variables other than results, and the settings that their lines give by name
SOURCES = {
    "placeholder": ("dtype", "channels_last"),
    "parameter": ("init", "regularizer", "trainable", "turned", "layout"),
    "buffer": ("init",),
    "carry": ("init", "steps"),
    "constant": ("dtype", "value"),
    "state": ("dtype", "kind", "value", "of"),
}
# named settings of an operator that is a user's equation
EQUATIONS: dict[str, type] = {
    "language": int, "text": str, "words": list, "reads": list, "sets": list, "types": dict, "declares": str,
}  # fmt: skip
# the same of one that is a user's recurrent cell
CELLS: dict[str, type] = {
    "language": int, "name": str, "text": str, "gates": int, "apart": int, "states": list, "parameters": list, "reverse": bool,
}  # fmt: skip
# by kind of state: its type, its number of elements (None: any), and whether it starts from a value
STATES: dict[str, tuple[str | None, int | None, bool]] = {
    "rng": ("int64", 2, False),
    "float64": ("float64", 1, True),
    "fill": (None, None, True),
}


def _kinds(module: Any, base: type) -> dict[str, type]:
    found = (k for k in vars(module).values() if isinstance(k, type) and issubclass(k, base))
    return {kind.__name__: kind for kind in found if kind.__name__[0] != "_"}


INITIALIZERS: dict[str, type] = {kind.__name__: kind for kind in init.KINDS}
OPTIMIZERS: dict[str, type] = {kind.__name__: kind for kind in optim.OPTIMIZERS.values()}
SCHEDULES = _kinds(optim, optim.Schedule)
REGULARIZERS = _kinds(optim, optim.Regularizer)
# positional fields of the regularizers that take one number
PENALTIES: dict[type, tuple[str, ...]] = {optim.L1: ("l1",), optim.L2: ("l2",)}


class Numbering:
    """Default names of operators: that of the result if it is automatic, else ``matmul``, ``matmul_2``, ...

    Numbers continue from the last one used.
    """

    def __init__(self) -> None:
        self.last: dict[str, int] = {}

    def expected(self, stem: str, result: str, unnamed: bool) -> str:
        n = self.last.get(stem, 0) + 1
        return result if unnamed else stem if n == 1 else f"{stem}_{n}"

    def called(self, stem: str, name: str) -> None:
        """Record the name of an operator."""
        number = re.fullmatch(r"_([1-9]\d{0,8})", name.removeprefix(stem), re.ASCII) if name.startswith(stem) else None
        if name == stem or number:
            self.last[stem] = int(number[1]) if number else 1


def named(name: str) -> str:
    """A name as written in the text: in quotes if it is not an identifier, or is a constant."""
    return name if BARE.fullmatch(name) and name not in CONSTANTS else repr(name)
