"""Parameters of formulas, as attributes of operators and as words of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calcvm.formulas.declare import HUGE, Choice, Parameters, Real
from calcvm.ops.spec import Attr, Word, choice


def attributes(params: Parameters) -> tuple[Attr, ...]:
    return tuple(Attr(name=name, default=p.default, check=p.has, doc=_told(p)) for name, p in params.items())


def _told(p: Real | Choice) -> str:
    """Its description, and its range if both ends are given."""
    if isinstance(p, Real) and -HUGE < p.lo and p.hi < HUGE:
        return f"{p.doc}, in {'(' if p.open else '['}{p.lo:g}, {p.hi:g}]"
    return p.doc


def words(params: Parameters) -> tuple[Word, ...]:
    return tuple(
        choice(name, len(p.names)) if isinstance(p, Choice) else Word(name=name, kind="float", lo=p.lo, hi=p.hi)
        for name, p in params.items()
    )


def values(params: Parameters, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The words' values: numbers unchanged, names by their places."""
    out = {}
    for name, p in params.items():
        v = attrs.get(name, p.default)
        out[name] = p.names.index(v) if isinstance(p, Choice) else v
    return out
