"""Rows that are users' equations.  A row's name is a digest of its content: one name is the same row in every process and file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from math import prod
from typing import Any

from calcvm.equations.check import MOST_PLACE, check
from calcvm.equations.facts import check as check_shares
from calcvm.equations.functions import ARGUMENTS
from calcvm.equations.grammar import read, read_declarations
from calcvm.equations.kinds import INTEGER, KINDS, NUMBER
from calcvm.equations.plain import Plain
from calcvm.equations.rows import read_ranged
from calcvm.equations.text import show_equations
from calcvm.equations.tree import Element, Equation, Name, Node, Number, Reduction, bound, parts
from calcvm.errors import CalcError
from calcvm.frozen import frozen
from calcvm.lazy import cached_property

LANGUAGE = 1  # the version of the language; it is part of a row's name
PREFIX = "equation_"
TYPES = ("bool", "int8", "uint8", "int32", "int64")  # of operands that do not have the program's float type
MOST_CHARACTERS = 10_000  # characters of a text
MOST_NODES = 4_096  # nodes of a row's equations after inlining its parts and expanding variances and the like
MOST_PLACES = 2**16  # of an index whose range is a number that is no operand's axis


@frozen
class Stated:
    """A row that is an equation.

    text : over ``words``, every index with its range, a word or a number.
    reads, sets : its operands, in the row's order.
    types, declares : as in `Plain`.
    """

    text: str
    words: tuple[str, ...]
    reads: tuple[str, ...]
    sets: tuple[str, ...]
    types: Mapping[str, str] = field(default_factory=dict)
    declares: str = ""

    @cached_property
    def name(self) -> str:
        said = json.dumps(
            [LANGUAGE, self.text, self.words, self.reads, self.sets, {**self.types}, self.declares], sort_keys=True
        )
        return PREFIX + hashlib.sha256(said.encode()).hexdigest()[:32]

    @cached_property
    def plain(self) -> Plain:
        return Plain(self.name, self.text, self.words, (*self.reads, *self.sets), (), self.types, self.declares)

    @property
    def document(self) -> dict[str, Any]:
        """Its representation in files."""
        out = {
            "language": LANGUAGE,
            "text": self.text,
            "words": [*self.words],
            "reads": [*self.reads],
            "sets": [*self.sets],
        }
        return out | {"types": {**self.types}, "declares": self.declares}

    def kinds(self) -> dict[str, str]:
        """The kind of each operand and result: number, integer or condition (CalcError: one is used as the wrong kind)."""
        found = read_ranged(self.text, self.declares, (*self.reads, *self.sets))
        read = {name: KINDS.get(self.types.get(name, ""), NUMBER) for name in self.reads}
        return check(found.equations, read, dict.fromkeys(self.words, INTEGER), ARGUMENTS)

    def checked(self) -> Stated:
        """Itself, if a kernel can be made of its text.

        Raises
        ------
        CalcError : the text does not parse, is not in canonical form, or says something that no row can compute.
        """
        names = (*self.words, *self.reads, *self.sets)
        if len(self.text) > MOST_CHARACTERS or len(self.declares) > MOST_CHARACTERS:
            raise CalcError(f"an equation of more than {MOST_CHARACTERS} characters")
        if re.search(r"\d{310}", f"{self.text} {self.declares}"):
            raise CalcError("an equation with a number of more than 309 digits")
        if twice := [
            name for name in names if names.count(name) > 1 or not re.fullmatch("[A-Za-z]\\w*", name, re.ASCII)
        ]:
            raise CalcError(f"{twice[0]!r} is not the name of exactly one word or operand")
        if wrong := [name for name, type_ in self.types.items() if name not in names or type_ not in TYPES]:
            raise CalcError(
                f"the type of {wrong[0]} is {self.types[wrong[0]]!r}: operands are of floats or {', '.join(TYPES)}"
            )
        if (canonical := show_equations(read(self.text, names))) != self.text:
            raise CalcError(f"the equation is not in its canonical form, {canonical!r}")
        found = read_ranged(self.text, self.declares, (*self.reads, *self.sets))
        if (n := _written_out(found.equations, names)) > MOST_NODES:
            raise CalcError(
                f"it has {n} nodes when its parts are written out, and {MOST_NODES} are the most: make the parts results"
            )
        made = [e.name for e in found.equations]
        if missing := [name for name in self.sets if made.count(name) != 1]:
            raise CalcError(f"{missing[0]} is not set by exactly one equation")
        kinds = self.kinds()
        if wrong := [name for name in self.sets if kinds[name] != KINDS.get(self.types.get(name, ""), NUMBER)]:
            raise CalcError(f"{wrong[0]} is {kinds[wrong[0]]}, but its type is another")
        if wrong := [e.name for e in found.equations if e.kept is None or e.name in self.reads]:
            raise CalcError(f"{wrong[0]} is set without indexes, or is an input")
        axes = {extent for name in (*self.reads, *self.sets) for extent in found.axes.get(name, ())}
        self._extents(found.equations, axes)
        if unread := [name for name in self.reads if name not in found.axes]:
            raise CalcError(f"{unread[0]} is never read")
        if unknown := [word for word in self.words if Name(word) not in axes]:
            raise CalcError(f"the word {unknown[0]} is not an axis of any operand")
        check_shares(self.plain)
        return self

    def _extents(self, equations: tuple[Equation, ...], axes: set[Node]) -> None:
        """Reject ranges that are neither a word nor a number, and long ones that no operand has."""
        for index in [i for e in (*equations, *read_declarations(self.declares, self.reads)) for i in bound(e)]:
            extent = index.extent
            number = isinstance(extent, Number) and isinstance(extent.value, int) and 0 <= extent.value <= MOST_PLACE
            if not (number or isinstance(extent, Name) and extent.name in self.words or extent is None):
                raise CalcError(f"the range of {index.name} is neither a word nor a number")
        for e in equations:
            own = {i.name: i.extent for i in bound(e) if isinstance(i.extent, Number) and i.extent not in axes}
            if prod(int(n.value) for n in own.values()) > MOST_PLACES:
                raise CalcError(
                    f"the range of {', '.join(own)} is above {MOST_PLACES}, and no operand has such an axis"
                )


def _written_out(equations: Sequence[Equation], operands: Sequence[str]) -> int:
    """Nodes of the equations after inlining those that are not operands and expanding reductions."""
    sizes: dict[str, int] = {}

    def count(node: Node) -> int:
        inside = sizes.get(node.array if isinstance(node, Element) else getattr(node, "name", ""), 0)
        times = {"var": 2, "logsumexp": 3}.get(node.how, 1) if isinstance(node, Reduction) else 1
        return 1 + inside + times * sum(map(count, parts(node)))

    for e in equations:
        n = count(e.value)
        if e.name not in operands:
            sizes[e.name] = n
        else:
            sizes[""] = sizes.get("", 0) + n
    return sizes.get("", 0)


STATED: dict[str, Stated] = {}  # the rows known to this process, by name


def known(stated: Stated) -> Stated:
    """Register the row, so that kernels can be made of it."""
    return STATED.setdefault(stated.name, stated)


def of_document(name: str, document: Mapping[str, Any]) -> Stated:
    """A row read from a file.

    Raises
    ------
    CalcError : it has another version of the language, was changed, or is not a valid row.
    """
    stated = said(f"the equation {name!r}", document)
    if stated.name != name:
        raise CalcError(f"the equation {name!r} was changed, {stated.text!r}: compile the graph again")
    if name not in STATED:
        try:
            stated.checked()
        except CalcError as error:
            raise CalcError(f"the equation {name!r}, {stated.text!r}: {error}") from None
    return known(stated)


def said(what: str, document: Mapping[str, Any]) -> Stated:
    """The row in a document, not yet checked (CalcError: it has another version of the language)."""
    if document["language"] != LANGUAGE:
        raise CalcError(
            f"{what} is of version {document['language']} of the language, and this calcvm reads {LANGUAGE}: build the graph again"
        )
    words, reads, sets = (tuple(document[key]) for key in ("words", "reads", "sets"))
    return Stated(document["text"], words, reads, sets, dict(document["types"]), document["declares"])
