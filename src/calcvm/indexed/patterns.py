"""Recognizes trees that one row computes, though written differently: softmax, its logarithm, and elements picked from that.

They become calls of ``softmax``, ``log_softmax`` and ``pick``, which no text contains.  The arguments are the value and the indexes
that it is over; for ``pick`` an index and its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from calcvm.equations.tree import Call, Element, Name, Node, Number, Reduction, call, names, parts, substituted

Opened = Callable[[Node], Node]  # replaces an element of a part by its value
Terms = list[tuple[int, Node]]  # the terms of a sum: 1 or -1, and the node


def rewritten(node: Node, opened: Opened, extents: Mapping[str, Any]) -> Node | None:
    """The same value in the form that a row computes, or None."""
    if not isinstance(node, Call):
        return None
    if node.function == "/":
        return _softmax(node, opened, extents)
    if node.function == "exp":
        whole = _log_softmax(terms(node.arguments[0]), opened, extents)
        if whole is not None and len(whole) == 1 and whole[0][0] == 1 and _is(whole[0][1], "log_softmax"):
            return Call("softmax", whole[0][1].arguments, node.at)  # type: ignore[union-attr]
        return None
    if node.function == "log":
        inner = opened(node.arguments[0])
        if isinstance(inner, Reduction) and inner.how == "sum" and _is(exp := opened(inner.body), "exp"):
            return Reduction("logsumexp", inner.indexes, exp.arguments[0], node.at)  # type: ignore[union-attr]
        made = inner if _is(inner, "softmax") else rewritten(inner, opened, extents)
        return Call("log_softmax", made.arguments, node.at) if _is(made, "softmax") else None  # type: ignore[union-attr]
    if node.function in ("+", "-", "neg"):
        found = _log_softmax(terms(node), opened, extents)
        return None if found is None else sum_of(found)
    return None


def _is(node: Node | None, function: str) -> bool:
    return isinstance(node, Call) and node.function == function


# ---------------------------------------------------------------- sums
def terms(node: Node, sign: int = 1) -> Terms:
    """A sum as its terms."""
    if isinstance(node, Call) and node.function in ("+", "-"):
        first, second = node.arguments
        return terms(first, sign) + terms(second, sign if node.function == "+" else -sign)
    if isinstance(node, Call) and node.function == "neg":
        return terms(node.arguments[0], -sign)
    return [(sign, node)]


def sum_of(found: Terms) -> Node:
    """A sum of terms; positive ones come first."""
    node: Node | None = None
    for sign, term in sorted(found, key=lambda item: -item[0]):
        if node is None:
            node = term if sign > 0 else call("neg", term)
        else:
            node = Call("+" if sign > 0 else "-", (node, term), term.at)
    return Number(0) if node is None else node


def _divided(node: Node, over: Sequence[str]) -> tuple[Terms, Terms]:
    """Terms that have one of the indexes, and terms that have none."""
    found = terms(node)
    with_ = [t for t in found if names(t[1]) & {*over}]
    return with_, [t for t in found if t not in with_]


# ---------------------------------------------------------------- equal up to indexes
def alike(pattern: Node, node: Node, over: Sequence[str], found: dict[str, Node]) -> bool:
    """Whether a node is the pattern with other nodes for the indexes ``over``; these are put into ``found``."""
    if isinstance(pattern, Name) and pattern.name in over:
        return found.setdefault(pattern.name, node) == node
    if type(pattern) is not type(node) or len(parts(pattern)) != len(parts(node)):
        return False
    if not parts(pattern):
        return pattern == node
    same: tuple[Any, ...]
    if isinstance(pattern, Call):
        same = (pattern.function, node.function)  # type: ignore[union-attr]
    elif isinstance(pattern, Element):
        same = ((pattern.array, pattern.beyond), (node.array, node.beyond))  # type: ignore[union-attr]
    else:
        same = ((pattern.how, pattern.indexes), (node.how, node.indexes))  # type: ignore[union-attr]
    return same[0] == same[1] and all(alike(p, n, over, found) for p, n in zip(parts(pattern), parts(node)))


def _indexes(found: Mapping[str, Node], over: Sequence[str], extents: Mapping[str, Any]) -> list[str] | None:
    """The indexes that stand for others, if they are distinct and have the same extents."""
    stand = [found.get(name) for name in over]
    of = [n.name for n in stand if isinstance(n, Name) and n.name in extents]
    far = len(of) == len(over) == len({*of}) and all(extents[a] == extents[b] for a, b in zip(of, over))
    return of if far else None


# ---------------------------------------------------------------- softmax
def _softmax(node: Call, opened: Opened, extents: Mapping[str, Any]) -> Node | None:
    """``exp(e) / sum[k] exp(e)``."""
    above, below = map(opened, node.arguments)
    if not (_is(above, "exp") and isinstance(below, Reduction) and below.how == "sum"):
        return None
    body, over = opened(below.body), [i.name for i in below.indexes]
    found: dict[str, Node] = {}
    if not _is(body, "exp") or not alike(body.arguments[0], above.arguments[0], over, found):  # type: ignore[union-attr]
        return None
    of = _indexes(found, over, extents)
    if of is None or {*of} & names(below):
        return None
    with_, _ = _divided(above.arguments[0], of)  # type: ignore[union-attr]
    return Call("softmax", (sum_of(with_), *map(Name, of)), node.at)


def _log_sum_exp(node: Node, opened: Opened) -> tuple[list[str], Node] | None:
    """The indexes of ``log(sum[k] exp(e))`` or ``logsumexp[k] e``, and e."""
    node = opened(node)
    made = rewritten(node, opened, {}) if _is(node, "log") else node
    if isinstance(made, Reduction) and made.how == "logsumexp":
        return [i.name for i in made.indexes], opened(made.body)
    return None


def _log_softmax(found: Terms, opened: Opened, extents: Mapping[str, Any]) -> Terms | None:
    """The terms of ``e - logsumexp[k] e`` and others, with a log_softmax in place of the former."""
    for k, (sign, term) in enumerate(found):
        of = _log_sum_exp(term, opened)
        if of is None:
            continue
        over, body = of
        with_, free = _divided(body, over)
        rest, stand = found[:k] + found[k + 1 :], dict[str, Node]()
        for s, t in with_:
            match = next(
                (i for i, (r, other) in enumerate(rest) if r == -s * sign and alike(t, other, over, stand)), None
            )
            if match is None:
                break
            del rest[match]
        else:
            made = _read(sum_of(with_), over, stand, extents)
            if made is not None:
                return [(-sign, made), *_without_opposites(rest + [(sign * s, t) for s, t in free])]
    return None


def _read(e: Node, over: Sequence[str], stand: Mapping[str, Node], extents: Mapping[str, Any]) -> Node | None:
    """The log_softmax of e with its indexes replaced by other indexes, or by a place from data."""
    of = _indexes(stand, over, extents)
    if of is not None:
        by: dict[str, Node] = {a: Name(b) for a, b in zip(over, of)}
        return None if {*of} & names(e) else call("log_softmax", substituted(e, by), *map(Name, of))
    if len(over) == 1 and isinstance(place := stand.get(over[0]), Element):
        return call("pick", call("log_softmax", e, Name(over[0])), Name(over[0]), place)
    return None


def _without_opposites(found: Terms) -> Terms:
    left: Terms = []
    for sign, term in found:
        if (-sign, term) in left:
            left.remove((-sign, term))
        else:
            left.append((sign, term))
    return left
