"""The words of the language: what writer and reader agree about.

    calcvm graph 1
    x = placeholder[None, 6]
    W = parameter[6, 3] init=XavierUniform()

    path learn (backward):
        layer linear_1:
            %matmul = matmul(x, W)
            return matmul
        minimize(loss, optimizer=SGD(0.1), output=matmul)

A line is a statement; what stands under a path or a layer is its part.  Each line of a path is an operator of the table, with
its inputs by position and its attributes by name; attributes that are as by default are left out.
"""

from __future__ import annotations

import re
from typing import Any

from calcvm import init, optim

VERSION = 1
TITLE = "calcvm graph"
BARE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*", re.ASCII)  # a name that needs no quotes
BEFORE_NAMES, BEFORE_VALUES = ("path", "layer", "return"), ("minimize", "output", "adapt")  # how other statements begin
CONSTANTS: dict[str, Any] = {"None": None, "True": True, "False": False, "inf": float("inf"), "nan": float("nan")}
GRADIENT, LAID = "gradient", "laid"  # called as operators, and none of the table
SMALL = 64  # elements of an array that is written as numbers; a larger one is its bytes, in base64
CONTINUED = "continued"
BACKWARD = "backward"

# what a line may make beside results, and what it says of it by name
SOURCES = {
    "placeholder": ("dtype", "channels_last"),
    "parameter": ("init", "regularizer", "trainable", "layout"),
    "buffer": ("init",),
    "constant": ("dtype", "value"),
    "state": ("dtype", "kind", "value", "of"),
}
# what an operator that is a user's equation says by name
EQUATIONS: dict[str, type] = {
    "language": int, "text": str, "words": list, "reads": list, "sets": list, "types": dict, "declares": str,
}  # fmt: skip
# of a kind of state the type, the number of elements (None: any), and whether it starts from a value
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
# fields of regularizers that are given one number
PENALTIES: dict[type, tuple[str, ...]] = {optim.L1: ("l1",), optim.L2: ("l2",)}


class Numbering:
    """What an operator is called where the text does not say: as what it makes, if nobody chose that, else by a number.

    ``matmul``, ``matmul_2``, ...: one more than the last one has.
    """

    def __init__(self) -> None:
        self.last: dict[str, int] = {}

    def expected(self, stem: str, result: str, unnamed: bool) -> str:
        n = self.last.get(stem, 0) + 1
        return result if unnamed else stem if n == 1 else f"{stem}_{n}"

    def called(self, stem: str, name: str) -> None:
        """An operator is called so."""
        number = re.fullmatch(r"_([1-9]\d{0,8})", name.removeprefix(stem), re.ASCII) if name.startswith(stem) else None
        if name == stem or number:
            self.last[stem] = int(number[1]) if number else 1


def named(name: str) -> str:
    """A name as it stands in the text: in quotes, if it is no identifier, or a constant."""
    return name if BARE.fullmatch(name) and name not in CONSTANTS else repr(name)
