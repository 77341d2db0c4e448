"""Facts for a row's entry in the table, derived from its equation: extents, shares, operations, what may be in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from calcvm.equations.cost import operations
from calcvm.equations.plain import Plain, Stage
from calcvm.equations.scatter import scatter_of
from calcvm.equations.text import PRODUCT, show
from calcvm.equations.tree import Element, Equation, Name, Node, Reduction, walk
from calcvm.errors import CalcError


def check(plain: Plain) -> None:
    """Reject an equation that would make each worker compute more than its own share (CalcError)."""
    shared = plain.shared
    for stage in plain.stages:
        reads = [n.array for n in walk(stage.value) if isinstance(n, Element)]
        if shared and shared.name not in {i.name for i in stage.kept} and reads:
            over = f"{stage.how} over {', '.join(i.name for i in stage.over)} of {', '.join(dict.fromkeys(reads))}"
            raise CalcError(
                f"row {plain.name!r}: workers share {shared.name}, and each would compute the whole {over}: make it a "
                "separate operator, whose result this one reads"
            )


def elems(plain: Plain, name: str) -> str:
    """The number of elements of an operand."""
    return _product(plain.axes[name])


def _product(extents: Sequence[Node]) -> str:
    return "*".join(show(n, PRODUCT + 1) for n in extents) or "1"


def _read(plain: Plain) -> Iterator[tuple[Stage, Element]]:
    """The operands' elements that stages read, directly or in a reduction."""
    for stage in plain.stages:
        for node in walk(stage.value):
            if isinstance(node, Element) and node.array in plain.axes:
                yield stage, node


def part(plain: Plain, name: str) -> str:
    """The units of an operand that workers share: those of the results' common first index, if the operand is read only there.

    Numbers, and scans along that index, belong to worker 0 alone.
    """
    shared, axes = plain.shared, plain.axes[name]
    if shared is None or any(s.result and s.scan and s.scan[0] == shared.name for s in plain.stages):
        return "w0"
    own = axes[:1] == (shared.extent,) and all(
        n.places[:1] == (Name(shared.name),) for _, n in _read(plain) if n.array == name
    )
    return _product(axes[:1]) if own else ""


def below(plain: Plain, name: str) -> str:
    """The bound of an index that serves as a place, if the element has no value beyond the ends."""
    found = {
        show(extent)
        for _, node in _read(plain)
        for place, extent in zip(node.places, plain.axes[node.array])
        if isinstance(place, Element) and place.array == name and node.beyond == 0
    }
    return min(found, default="")


def in_place(plain: Plain, reads: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """(result, operand) pairs that may share memory: each operand element is read only for its own result element, not later."""
    pairs = ((s, name) for s in plain.stages if s.result and not s.how and not _adds_up(plain, s) for name in reads)
    return tuple((s.name, name) for s, name in pairs if _may_be(plain, s, name))


def _adds_up(plain: Plain, result: Stage) -> bool:
    """Whether a kernel may accumulate a sum that the result contains in the result's memory."""
    kept, read = {i.name for i in result.kept}, {n.array for n in walk(result.value) if isinstance(n, Element)}
    sums = [s for s in plain.stages if s.how == "sum" and s.name in read and {i.name for i in s.kept} == kept]
    return any(scatter_of(s.kept, s.over, s.value, plain.axes) for s in sums)


def _may_be(plain: Plain, of: Stage, name: str) -> bool:
    own = tuple(Name(i.name) for i in of.kept)
    same = all(f(name) == f(of.name) for f in (plain.axes.get, plain.types.get, partial(part, plain)))
    before = True
    for stage in plain.stages:
        places = [n.places for n in walk(stage.value) if isinstance(n, Element) and n.array == name]
        if stage is of:
            same, before = same and all(p == own for p in places), False
        elif places and before:  # it is complete before any element of the part it has read is set
            around = len(stage.kept)
            same = same and not stage.result and of.kept[:around] == stage.kept and around < len(own)
            same = same and all(p[:around] == own[:around] for p in places)
        elif places:
            return False
    return same


def flops(plain: Plain) -> str:
    """The operations of the stages with the most elements."""
    order = {word: k for k, word in enumerate(plain.words)}
    found: Counter[tuple[str, ...]] = Counter()
    for s in plain.stages:
        extents = {i.name: i.extent for i in (*s.kept, *s.over)}
        value = Reduction(s.how, s.over, s.value) if s.how else s.value
        for names, n in operations(Equation(s.name, s.kept, value))[0].items():
            key = (_product([e]) for v, e in extents.items() if v in names and e is not None)
            found[tuple(sorted(key, key=lambda e: (order.get(e, len(order)), e)))] += n
    most = {key: n for key, n in found.items() if not any(Counter(key) < Counter(other) for other in found)}
    return " + ".join("*".join((*([str(n)] * (n > 1 or not key)), *key)) for key, n in most.items()) or "0"
