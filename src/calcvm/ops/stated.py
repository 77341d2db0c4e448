"""Rows and operators that are users' equations: extents, gradients and kernels follow from the text.

No table contains them: a row is found by its name, which identifies its computation, while the process knows its text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calcvm.equations.backward import backward_rows
from calcvm.equations.grammar import read
from calcvm.equations.kinds import NUMBER
from calcvm.equations.places import size
from calcvm.equations.rows import read_ranged
from calcvm.equations.stated import Stated, known, of_document, said
from calcvm.equations.tree import Element, Name, Node, Number, Reduction, bound, parts
from calcvm.errors import CalcError
from calcvm.lazy import cached_property
from calcvm.ops.dims import Affine, Shape, affine, show
from calcvm.ops.plain import row
from calcvm.ops.spec import EQUATION, STATED, OpSpec, RowSpec, Shapes, dims

OUT = "y"  # the result of an operator


class StatedRow(RowSpec):
    """A row that is a user's equation."""

    def __reduce__(self) -> tuple:
        return _row_again, (self.name, stated_of(self).document)


class StatedOp(OpSpec):
    """An operator that is a user's equation."""

    stem = EQUATION

    def __reduce__(self) -> tuple:
        return _operator_again, (self.name, stated_of(self.fwd[0]).document)

    @cached_property
    def stated(self) -> Stated:
        return stated_of(self.fwd[0])

    @cached_property
    def indexes(self) -> dict[str, tuple[str, ...]]:
        """For operands the only index by which each axis is read, for the result its kept indexes; "" if there is none.

        An index that is also used as a number, or in other places, does not count.
        """
        plain = self.stated.plain
        (equation,) = read_ranged(plain.text, plain.declares, plain.operands).equations
        extents = {i.name: i.extent for i in bound(equation)}
        found: dict[str, list[set[Node]]] = {name: [set() for _ in axes] for name, axes in plain.axes.items()}
        free: set[str] = set()

        def visit(node: Node) -> None:
            if isinstance(node, Name):
                free.add(node.name)
            elif isinstance(node, Element):
                for seen, place, extent in zip(found[node.array], node.places, plain.axes[node.array]):
                    seen.add(place)
                    if not isinstance(place, Name) or extents[place.name] != extent:
                        visit(place)
            else:
                for part in parts(node):
                    visit(part)

        visit(equation.value)
        found[OUT] = [{Name(i.name)} for i in equation.kept or ()]
        alone: dict[Node, str] = {Name(name): name for name in {*extents} - free}
        return {
            name: tuple((len(seen) == 1 and alone.get(next(iter(seen)))) or "" for seen in axes)
            for name, axes in found.items()
        }

    @cached_property
    def reduces(self) -> dict[str, str]:
        """For the indexes of its outermost reduction, which reduction that is."""
        value = read(self.stated.text)[0].value
        return {i.name: value.how for i in value.indexes} if isinstance(value, Reduction) else {}


_OF: dict[str, Stated] = {}


def stated_of(spec: RowSpec) -> Stated:
    return _OF[spec.name]


def row_of(stated: Stated) -> RowSpec:
    """The row of a checked equation; from now on it is found by its name."""
    if stated.name not in STATED:
        _OF[stated.name] = known(stated)
        STATED[stated.name] = row(stated, dims(" ".join(stated.words)), StatedRow)
    return STATED[stated.name]


def rows_of(documents: Mapping[str, Mapping[str, Any]]) -> None:
    """Register the rows of a file (CalcError: one was changed, or has another version of the language)."""
    for name, document in documents.items():
        row_of(of_document(name, document))


def documents_of(specs: Any) -> dict[str, dict[str, Any]]:
    """The documents, as stored in files, of those rows that are users' equations."""
    return {spec.name: stated_of(spec).document for spec in specs if spec.name in _OF}


def _row_again(name: str, document: Mapping[str, Any]) -> RowSpec:
    return row_of(of_document(name, document))


def _operator_again(name: str, document: Mapping[str, Any]) -> OpSpec:
    return operator_of(of_document(name, document))


# ---------------------------------------------------------------- operators
def operator_said(document: Mapping[str, Any]) -> StatedOp:
    """The operator of a document without a name (CalcError: it has another version of the language, or is invalid)."""
    return operator_of(said("the equation", document))


_OPERATORS: dict[str, StatedOp] = {}


def operator_of(stated: Stated) -> StatedOp:
    """The operator of an equation, with its gradients.

    Raises
    ------
    CalcError : the text is not a valid row, or its gradient is not.
    """
    if stated.name not in _OPERATORS:
        try:
            _OPERATORS[stated.name] = _operator(stated.checked())
        except (ArithmeticError, RecursionError) as error:
            raise CalcError(f"{stated.text}: {error}") from None
    return _OPERATORS[stated.name]


def _operator(stated: Stated) -> StatedOp:
    floats = [name for name in stated.reads if name not in stated.types]
    graded = floats if stated.kinds()[OUT] == NUMBER else []
    backward = backward_rows(stated, [OUT], graded)
    targets = {name for made in backward for name in made.sets}
    rows = [row_of(stated), *map(row_of, backward)]
    temporaries = {name: made for made in backward for name in made.sets if name[:2] == "t_"}

    def sizes(shapes: Shapes) -> dict[str, Affine]:
        return _words(stated, shapes)

    def shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
        words = sizes(shapes)
        made = {OUT: stated, **temporaries}
        return {name: tuple(affine(size(n, words)) for n in of.plain.axes[name]) for name, of in made.items()}

    return StatedOp(
        name=stated.name,
        synopsis=stated.text,
        category=EQUATION,
        inputs=stated.reads,
        outputs=stated.sets,
        shape=shape,
        words=lambda shapes, attrs: sizes(shapes),
        fwd=(rows[0],),
        bwd=tuple(rows[1:]),
        differentiable=tuple(name for name in graded if f"d{name}" in targets),
        flat=tuple(name for name in floats if f"d{name}" not in targets),
    )


def _words(stated: Stated, shapes: Shapes) -> dict[str, Affine]:
    """Sizes by word (ValueError: an axis is not as long as the equation requires)."""
    words: dict[str, Affine] = {}
    for name in stated.reads:
        axes, shape = stated.plain.axes[name], shapes[name]
        if len(axes) != len(shape):
            raise ValueError(f"{name} {show(shape)} has {len(shape)} axes, and {len(axes)} in {stated.text}")
        for extent, n in zip(axes, shape):
            wanted = affine(extent.value) if isinstance(extent, Number) else words.setdefault(extent.name, n)  # type: ignore[arg-type,union-attr]
            if wanted != n:
                raise ValueError(f"an axis of {name} {show(shape)} is {wanted} in {stated.text}")
    return words
