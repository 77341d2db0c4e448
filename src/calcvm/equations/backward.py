"""The equation of a backward row, derived from that of the forward, over the same words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from calcvm.equations.gradient import gradient
from calcvm.equations.places import size
from calcvm.equations.plain import Plain
from calcvm.equations.ranges import Ranges, ranges
from calcvm.equations.rows import read_ranged
from calcvm.equations.simplify import simplified
from calcvm.equations.text import show, show_equations
from calcvm.equations.tree import Element, Equation, Index, Name, Node, Number, Reduction, arrays, own_elements, parts, substituted, walk, with_parts
from calcvm.equations.words import OfWords, of_word
from calcvm.errors import CalcError


def backward_of(plain: Plain, outputs: Sequence[str], sets: Sequence[str], reads: Sequence[str]) -> tuple[str, str]:
    """The text of a row that sets gradients, and what it declares.

    Parameters
    ----------
    plain : the forward.  outputs : its results.
    sets : gradients, ``d`` and an input's name, and ``t_d`` and an output's, where the gradient of that is a scan of its own.
    reads : all that it may read: gradients of outputs, inputs, and outputs.  What else it needs it computes anew.

    Raises
    ------
    CalcError : it would read something else, or nothing of what is named.
    """
    ranged = read_ranged(plain.text, plain.declares, plain.operands)
    words = {name: of_word(name) for name in plain.words}
    shapes = {name: tuple(size(n, words) for n in axes) for name, axes in ranged.axes.items()}
    inputs = {name: shape for name, shape in shapes.items() if name in plain.operands and name not in outputs}
    integers = [name for name, t in plain.types.items() if t != "bool"]
    found = ranges(ranged.equations, inputs, words)
    made = gradient(ranged.equations, [name[1:] for name in sets if name[0] == "d"], outputs, found, integers)
    names = {array: f"d{name}" for name, array in (*made.of.items(), *made.seeds.items())}
    scans = {e.name: f"t_{e.name.rstrip('_')}" for e in made.backward if e.name not in names and own_elements(e)}
    equations = [_renamed(e, names | scans) for e in (*_anew(made.forward, made.backward, reads), *made.backward)]
    if {*scans.values()} != {name for name in sets if name[0] == "t"}:
        wanted = " ".join((*scans.values(), *(name for name in sets if name[0] == "d")))
        raise CalcError(
            f"{plain.name}: the gradient sets {', '.join(scans.values()) or 'no scan'} beside: write {wanted!r} for what "
            f"the backward row sets\n    {show_equations(equations)}"
        )
    known = {**shapes, **{f"d{out}": shapes[out] for out in outputs}}
    given = {name: known[name] for name in reads}
    read = {name for e in equations for name in arrays(e.value)} - {e.name for e in equations}
    for what, wrong in (("reads", read - {*reads}), ("does not read", {*reads} - read)):
        if wrong:
            raise CalcError(
                f"{plain.name}: the gradient {', '.join(sets)} {what} {', '.join(sorted(wrong))}: say that it reads "
                f"{', '.join(sorted(read))}\n    {show_equations(equations)}"
            )
    equations = _ranged(equations, ranges(equations, given, {**words, **made.sizes}), plain)
    return show_equations(equations), _declared(equations, given)


def _anew(forward: Sequence[Equation], backward: Sequence[Equation], given: Sequence[str]) -> list[Equation]:
    """Equations of the forward whose results are read, and not given."""
    wanted, out = {name for e in backward for name in arrays(e.value)} - {*given}, []
    for e in reversed(forward):
        if e.name in wanted:
            wanted |= {*arrays(e.value)} - {*given}
            out.append(e)
    return out[::-1]


def _renamed(equation: Equation, names: dict[str, str]) -> Equation:
    def go(node: Node) -> Node:
        below = parts(node)
        node = with_parts(node, tuple(map(go, below))) if below else node
        return replace(node, array=names.get(node.array, node.array)) if isinstance(node, Element) else node

    return replace(equation, name=names.get(equation.name, equation.name), value=go(equation.value))


# ---------------------------------------------------------------- ranges
def _ranged(equations: Sequence[Equation], found: Ranges, plain: Plain) -> list[Equation]:
    """With the range of each index where it is met first, and sizes as words say them."""
    extents = {name: _node(n) for name, n in found.extents.items()}
    by = {name.upper(): n for name, n in extents.items() if name.upper() not in plain.words}
    met: set[str] = set()

    def said(indexes: Sequence[Index]) -> tuple[Index, ...]:
        new = tuple(Index(i.name, None if i.name in met else extents[i.name]) for i in indexes)
        met.update(i.name for i in indexes)
        return new

    def go(node: Node) -> Node:
        if isinstance(node, Reduction):
            return Reduction(node.how, said(node.indexes), go(node.body))
        return with_parts(node, tuple(map(go, parts(node)))) if parts(node) else node

    out = []
    for e in equations:
        kept = said(e.kept or ())
        out.append(Equation(e.name, kept, go(simplified(substituted(e.value, by)))))
    return out


def _node(n: Any) -> Node:
    return n.node if isinstance(n, OfWords) else Number(n)


def _declared(equations: Sequence[Equation], given: dict[str, tuple[Any, ...]]) -> str:
    """The axes of what is read at other places than indexes."""
    elsewhere = {
        node.array: None
        for e in equations
        for node in walk(e.value)
        if isinstance(node, Element) and node.array in given and not all(isinstance(p, Name) for p in node.places)
    }
    axes = {name: ",".join(f"{name}{k}<{show(_node(n))}" for k, n in enumerate(given[name])) for name in elsewhere}
    return "; ".join(f"{name}[{inside}]" for name, inside in axes.items())
