"""Parameters of formulas, as attributes of operators and as words of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calcvm.formulas.declare import Choice, Parameters, Real
from calcvm.ops.spec import Attr, Word, choice


def attributes(params: Parameters) -> dict[str, tuple[Attr, Word]]:
    """An attribute and a word for each."""
    return {name: _number(name, p) if isinstance(p, Real) else _name(name, p) for name, p in params.items()}


def _number(name: str, p: Real) -> tuple[Attr, Word]:
    return Attr(name=name, default=p.default, check=p.has, doc=p.doc), Word(name=name, kind="float", lo=p.lo, hi=p.hi)


def _name(name: str, p: Choice) -> tuple[Attr, Word]:
    attr = Attr(name=name, default=p.default, check=lambda v: v in p.names, doc=p.doc)
    return attr, choice(name, len(p.names))


def values(params: Parameters, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The words' values: numbers as they are, names by their places."""
    out = {}
    for name, p in params.items():
        v = attrs.get(name, p.default)
        out[name] = p.names.index(v) if isinstance(p, Choice) else v
    return out
