"""Whether what a kernel computes is a number, an integer or a condition: the same on every device."""

from __future__ import annotations

from collections.abc import Mapping

from calcvm.equations.tree import COMPARISONS, Call, Element, Name, Node, Number

NUMBER, INTEGER, CONDITION = "number", "integer", "condition"
KINDS = {"bool": CONDITION, **dict.fromkeys(("int64", "int32", "uint8", "int8"), INTEGER)}  # by the type of an operand


def kind_of(node: Node, kinds: Mapping[str, str]) -> str:
    """What a value is; ``kinds`` : of names that are no integers."""
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
    whole = node.function in ("+", "-", "*", "//", "%", "neg", "abs", "max", "min") and {*found} == {INTEGER}
    return INTEGER if whole else NUMBER
