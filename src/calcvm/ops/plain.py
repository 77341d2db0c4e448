"""Rows and operators that follow from their equations: extents, shares, operations, what may be in place.

Other rows declare these facts by hand; these rows derive them from their equations on first use (`calcvm.equations.facts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from calcvm.equations.declare import Declared, Row
from calcvm.ops.dims import Shape
from calcvm.ops.spec import Operand, OpSpec, RowSpec, Shapes, Word, dims, registered
from calcvm.ops.types import FLOAT

if TYPE_CHECKING:
    from calcvm.equations.stated import Stated


def row(of: Row | Stated, words: Sequence[Word], make: type[RowSpec] = RowSpec) -> RowSpec:
    """The row of an equation.  words : in its order."""

    def fact(what: str, *given: Any) -> Callable[[], Any]:
        def found() -> Any:
            from calcvm.equations import facts  # importing calcvm parses no equation

            return getattr(facts, what)(of.plain, *given)

        return found

    def operand(name: str, access: str) -> Operand:
        said: dict[str, Any] = {what: fact(what, name) for what in ("elems", "part", "below")}
        return Operand(name=name, access=access, type=of.types.get(name, FLOAT), **said)

    return make(
        name=of.name,
        synopsis=lambda: of.plain.text,
        declares=lambda: of.plain.declares,
        words=tuple(words),
        operands=(*(operand(name, "r") for name in of.reads), *(operand(name, "w") for name in of.sets)),
        in_place=fact("in_place", of.reads),
        flops=fact("flops"),
    )


def spec_of(
    of: Declared, shape: Any, words: Any, numbers: Sequence[Word] = (), passes: tuple[str, ...] = (), **more: Any
) -> OpSpec:
    """The operator of a declaration.

    numbers : its words that are not sizes.  The rest is as in `OpSpec`; shapes of backward rows' further results follow.
    """
    named = tuple(w.name for w in numbers)
    assert named == (*of.integers, *of.reals), f"{of.name}: numbers are {named}, and {of.integers + of.reals} declared"
    rows = partial(row, words=(*dims(" ".join(of.sizes)), *numbers))
    forward = rows(of.forward)
    scans = {name: name[3:] for sets in of.gradients for name in sets if name[0] == "t"}  # t_dy has the shape of y

    def shapes(given: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
        made = shape(given, attrs)
        return made | {name: made[like] for name, like in scans.items()}

    return OpSpec(
        name=of.name,
        synopsis=lambda: forward.synopsis,
        inputs=of.inputs,
        outputs=of.outputs,
        shape=shapes if scans else shape,
        words=words,
        fwd=(forward,),
        bwd=tuple(map(rows, of.backward)),
        differentiable=tuple(
            name for name in of.inputs if name in passes or any(f"d{name}" in s for s in of.gradients)
        ),
        passes=passes,
        **more,
    )


declared = registered(spec_of)
