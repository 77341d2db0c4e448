"""Scans, and the running sums among them, for which there is a row: ``y[r,i] = y[r,i - 1] + x[r,i]``."""

from __future__ import annotations

from calcvm.equations.tree import ONE, ZERO, Call, Element, Equation, Name, Node, arrays, call, own_elements
from calcvm.frozen import frozen


def is_scan(equation: Equation) -> bool:
    """Whether it reads its own result at other places than the one it sets."""
    kept = tuple(Name(i.name) for i in equation.kept or ())
    return any(n.places != kept for n in own_elements(equation))


@frozen
class RunningSum:
    """``value`` summed along an index from its first place, or from its last if ``reverse``."""

    index: str
    reverse: bool
    value: Node


def running_sum(equation: Equation) -> RunningSum | None:
    """The running sum that a scan computes, if it adds something to its result one place before or after; else None."""
    own = own_elements(equation)
    kept = [i.name for i in equation.kept or ()]
    if len(own) != 1 or own[0].beyond != 0 or len(own[0].places) != len(kept):
        return None
    moved = [(v, place) for v, place in zip(kept, own[0].places) if place != Name(v)]
    value = _less(equation.value, own[0])
    if len(moved) != 1 or value is None or equation.name in arrays(value):
        return None
    ((index, place),) = moved
    steps = {call("-", Name(index), ONE): False, call("+", Name(index), ONE): True}
    return RunningSum(index, steps[place], value) if isinstance(place, Call) and place in steps else None


def _less(node: Node, own: Element) -> Node | None:
    """A sum without one of its terms; None if that is not a term of it."""
    if node == own:
        return ZERO
    if not isinstance(node, Call) or node.function not in ("+", "-"):
        return None
    a, b = node.arguments
    if (left := _less(a, own)) is not None:
        return call(node.function, left, b) if left != ZERO else b if node.function == "+" else call("neg", b)
    if node.function == "+" and (left := _less(b, own)) is not None:
        return a if left == ZERO else call("+", a, left)
    return None
