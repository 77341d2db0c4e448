"""Whether a value is a number, an integer or a condition; text checks and all devices use the same rules."""

from __future__ import annotations

from collections.abc import Mapping

from calcvm.equations.tree import COMPARISONS, Call, Element, Name, Node, Number

NUMBER, INTEGER, CONDITION = "a number", "an integer", "a condition"
KINDS = {"bool": CONDITION, **dict.fromkeys(("int64", "int32", "uint8", "int8"), INTEGER)}  # by an operand's type
WITH_INDEXES = {**KINDS, "index": INTEGER}  # the same with a program's type for indexes, an integer
WHOLE = ("+", "-", "*", "//", "%", "neg", "abs", "max", "min")  # their results are integers if their arguments are


def kind_of(node: Node, kinds: Mapping[str, str]) -> str:
    """The kind of a value; ``kinds`` : of names that are not integers."""
    if isinstance(node, Number):
        return INTEGER if isinstance(node.value, int) else NUMBER
    if isinstance(node, Name):
        return kinds.get(node.name, INTEGER)
    if isinstance(node, Element):
        return kinds[node.array]
    assert isinstance(node, Call)
    if node.function in COMPARISONS or node.function in ("and", "or", "not"):
        return CONDITION
    found = [kind_of(argument, kinds) for argument in node.arguments[node.function == "where" :]]
    if node.function in ("where", "stop"):
        return found[0] if len({*found}) == 1 else NUMBER
    return INTEGER if node.function in WHOLE and {*found} == {INTEGER} else NUMBER
