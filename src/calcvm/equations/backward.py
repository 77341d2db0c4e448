"""The equation of a backward row, derived from the forward's equation, over the same words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from calcvm.equations.gradient import gradient, needed
from calcvm.equations.guarded import data_places, guarded
from calcvm.equations.places import size
from calcvm.equations.plain import Plain
from calcvm.equations.ranges import Ranges, ranges
from calcvm.equations.rows import read_ranged, said_once
from calcvm.equations.simplify import simplified
from calcvm.equations.stated import Stated
from calcvm.equations.text import show, show_equations
from calcvm.equations.tree import (
    ZERO,
    Element,
    Equation,
    Name,
    Node,
    Number,
    Reduction,
    bound,
    own_elements,
    parts,
    substituted,
    values,
    walk,
    with_parts,
)
from calcvm.equations.words import OfWords, of_word
from calcvm.errors import CalcError


def backward_of(plain: Plain, outputs: Sequence[str], sets: Sequence[str], reads: Sequence[str]) -> tuple[str, str]:
    """The text of a row that sets gradients, and its declarations.

    Parameters
    ----------
    plain : the forward.  outputs : its results.
    sets : gradients: ``d`` and an input's name, or ``t_d`` and an output's name if that output's gradient is itself a scan.
    reads : all values that it may read: gradients of outputs, inputs, and outputs.  It recomputes anything else.

    Raises
    ------
    CalcError : it would read something else, or does not read all of these.
    """
    of = _Derived(plain, outputs, [name[1:] for name in sets if name[0] == "d"])
    scans, equations = of.scans, [*of.anew(reads), *of.backward]
    if {*scans.values()} != {name for name in sets if name[0] == "t"}:
        wanted = " ".join((*scans.values(), *(name for name in sets if name[0] == "d")))
        raise CalcError(
            f"{plain.name}: the gradient also sets {', '.join(scans.values()) or 'no scan'}: write {wanted!r} as the "
            f"results of the backward row\n    {show_equations(equations)}"
        )
    given = {name: of.known[name] for name in reads}
    read = {name for e in equations for name in values(e.value) if name in of.known} - {e.name for e in equations}
    for what, wrong in (("reads", read - {*reads}), ("does not read", {*reads} - read)):
        if wrong:
            raise CalcError(
                f"{plain.name}: the gradient {', '.join(sets)} {what} {', '.join(sorted(wrong))}: declare that it reads "
                f"{', '.join(sorted(read))} (and results, instead of recomputing them)\n    {show_equations(equations)}"
            )
    equations = _ranged(equations, of.ranges(equations, given), plain)
    return show_equations(equations), _declared(equations, given)


class _Derived:
    """The gradient of a row's equations, with the row's names.

    forward, backward : equations; `anew` returns those of the forward that the backward reads but does not get.
    known : shapes of the row's values: operands, and gradients of outputs.
    scans : gradients that are scans and belong to no input, by the arrays that they are gradients of.
    """

    def __init__(self, plain: Plain, outputs: Sequence[str], wrt: Sequence[str]):
        ranged = read_ranged(plain.text, plain.declares, plain.operands)
        self.words = {name: of_word(name) for name in plain.words}
        shapes = {name: tuple(size(n, self.words) for n in axes) for name, axes in ranged.axes.items()}
        inputs = {name: shape for name, shape in shapes.items() if name in plain.operands and name not in outputs}
        integers = [name for name, t in plain.types.items() if t != "bool"]
        found = ranges(ranged.equations, inputs, self.words)
        made = gradient(ranged.equations, wrt, outputs, found, integers)
        names = {array: f"d{name}" for name, array in (*made.of.items(), *made.seeds.items())}
        self.scans = {
            e.name: f"t_{e.name.rstrip('_')}" for e in made.backward if e.name not in names and own_elements(e)
        }
        self.forward, self.backward = (
            [_renamed(e, names | self.scans) for e in equations] for equations in (made.forward, made.backward)
        )
        self.known = {**inputs, **{out: shapes[out] for out in outputs}, **{f"d{out}": shapes[out] for out in outputs}}
        self.sizes = {**self.words, **made.sizes}

    def anew(self, given: Sequence[str]) -> list[Equation]:
        return _anew(self.forward, self.backward, given)

    def ranges(self, equations: Sequence[Equation], given: Mapping[str, Any]) -> Ranges:
        return ranges(equations, given, self.sizes)


def backward_rows(of: Stated, outputs: Sequence[str], wrt: Sequence[str]) -> tuple[Stated, ...]:
    """The backward rows of a row that is an equation: first rows for shared values, then one for each input's gradient.

    Sums and extrema no larger than an operand become temporaries ``t_...``, each computed once, in its own row.

    Raises
    ------
    CalcError : it has no gradient, or one that no row computes.
    """
    derived = _Derived(of.plain, outputs, wrt)
    equations = [*derived.anew([*derived.known]), *derived.backward]
    found = derived.ranges(equations, derived.known)
    targets = {f"d{name}": None for name in wrt}
    for name in targets:
        equations = _apart(equations, name)
    shapes = {e.name: tuple(found.extents[i.name] for i in e.kept or ()) for e in equations}
    sets = dict.fromkeys(
        e.name
        for e in equations
        if e.name in targets or own_elements(e) or _is_shared(e, equations, shapes, derived.known)
    )
    called = {name: name if name in targets or name[:2] == "t_" else f"t_{name}" for name in sets}
    counts = {e.name for e in equations if isinstance(e.value, Reduction) and e.value.how in ("argmax", "argmin")}
    types = {**of.types, **{called[name]: "int64" for name in counts if name in called}}
    known = {**derived.known, **{called[name]: shapes[name] for name in sets}}
    equations = [_renamed(e, called) for e in equations]
    rows = []
    inside = data_places(read_ranged(of.text, of.declares, of.plain.operands).equations, of.plain.axes)
    for name in called.values():
        parts = needed([e for e in equations if e.name == name or e.name not in known], [name])
        if parts[-1].value == ZERO:  # an input that is only compared
            continue
        read = dict.fromkeys(v for e in parts for node in walk(e.value) if (v := _array(node)) in known and v != name)
        given = {v: known[v] for v in read}
        of_parts = derived.ranges(parts, given)
        axes = {v: [*map(_node, shape)] for v, shape in of_parts.shapes.items()}
        ranged = _ranged(guarded(parts, axes, inside), of_parts, of.plain)
        text, declares = show_equations(ranged), _declared(ranged, given)
        words = [w for w in of.words if w in re.findall(r"\w+", f"{text} {declares}")]
        said = {v: types[v] for v in (*given, name) if v in types}
        rows.append(Stated(text, tuple(words), tuple(given), (name,), said, declares).checked())
    return tuple(rows)


def _apart(equations: Sequence[Equation], name: str) -> list[Equation]:
    """If others read a gradient, compute it as a temporary, and the gradient as a copy of that."""
    if not any(name in values(e.value) for e in equations if e.name != name):
        return [*equations]
    out = []
    for e in equations:
        out.append(_renamed(e, {name: f"t_{name}"}))
        if e.name == name:
            places = tuple(Name(i.name) for i in e.kept or ())
            out.append(Equation(name, e.kept, Element(f"t_{name}", places) if places else Name(f"t_{name}")))
    return out


def _is_shared(
    e: Equation, equations: Sequence[Equation], shapes: Mapping[str, tuple], known: Mapping[str, tuple]
) -> bool:
    """Whether an equation is a reduction worth its own row: no larger than an operand, and read in more than one place."""
    own = Counter(shapes[e.name])
    if not isinstance(e.value, Reduction) or not any(own <= Counter(shape) for shape in known.values()):
        return False
    read = [(other, node) for other in equations for node in walk(other.value) if _array(node) == e.name]
    return len(read) != 1 or not _is_part(*read[0])


def _is_part(of: Equation, node: Node) -> bool:
    kept = tuple(Name(i.name) for i in of.kept or ())
    return not isinstance(of.value, Reduction) and isinstance(node, Element) and node.places == kept


def _array(node: Node) -> str:
    return node.array if isinstance(node, Element) else node.name if isinstance(node, Name) else ""


def _anew(forward: Sequence[Equation], backward: Sequence[Equation], given: Sequence[str]) -> list[Equation]:
    """Equations of the forward whose results are read but not given."""
    wanted, out = {name for e in backward for name in values(e.value)} - {*given}, []
    for e in reversed(forward):
        if e.name in wanted:
            wanted |= values(e.value) - {*given}
            out.append(e)
    return out[::-1]


def _renamed(equation: Equation, names: dict[str, str]) -> Equation:
    def go(node: Node) -> Node:
        below = parts(node)
        node = with_parts(node, tuple(map(go, below))) if below else node
        if isinstance(node, Name):
            return replace(node, name=names.get(node.name, node.name))
        return replace(node, array=names.get(node.array, node.array)) if isinstance(node, Element) else node

    return replace(equation, name=names.get(equation.name, equation.name), value=go(equation.value))


# ---------------------------------------------------------------- ranges
def _ranged(equations: Sequence[Equation], found: Ranges, plain: Plain) -> list[Equation]:
    """The equations with each index's range at its first occurrence, and sizes expressed by words."""
    extents = {name: _node(n) for name, n in found.extents.items()}
    by = {name.upper(): n for name, n in extents.items() if name.upper() not in plain.words}
    return said_once([replace(e, value=simplified(substituted(e.value, by))) for e in equations], extents)


def _node(n: Any) -> Node:
    return n.node if isinstance(n, OfWords) else Number(n)


def _declared(equations: Sequence[Equation], given: dict[str, tuple[Any, ...]]) -> str:
    """Declarations of the axes of arrays that are read at other places than indexes of the same range."""
    extents = {i.name: i.extent for e in equations for i in bound(e) if i.extent is not None}
    elsewhere = {
        node.array: None
        for e in equations
        for node in walk(e.value)
        if isinstance(node, Element) and node.array in given
        for place, n in zip(node.places, given[node.array])
        if not isinstance(place, Name) or extents.get(place.name) != _node(n)
    }
    axes = {name: ",".join(f"{name}_{k}<{show(_node(n))}" for k, n in enumerate(given[name])) for name in elsewhere}
    return "; ".join(f"{name}[{inside}]" for name, inside in axes.items())
