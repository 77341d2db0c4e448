"""Texts of recurrent cells."""

from __future__ import annotations

from typing import Any

from calcvm.formulas.cells import CELLS
from calcvm.script.row import Row, writes


def _given(r: Row, *names: str) -> list[Any]:
    return [r.x(name) if name in r else None for name in names]


@writes(*(f"{cell}_fwd" for cell in CELLS))
def _forward(r: Row) -> None:
    cell, reverse = r.spec.name.partition("_fwd")[0], r.integer("reverse") == 1
    found = r.call("recurrent", cell, *_given(r, "z", "x", "wi", "bi", "wh", "b", "h0", "c0", "lengths"), reverse)
    r.put_all(found, "y", "hn", "cn", "gates", "more", "c")


@writes(*(f"{cell}_bwd" for cell in CELLS))
def _backward(r: Row) -> None:
    cell, reverse = r.spec.name.partition("_bwd")[0], r.integer("reverse") == 1
    names = ("wh", "h0", "c0", "lengths", "y", "gates", "more", "c", "dy", "dhn", "dcn")
    found = r.call("recurrent_back", cell, *_given(r, *names), reverse)
    r.put_all(found, "dz", "t_dmore", "dh0", "dc0")


@writes(*(f"{cell}_bwd_w" for cell in CELLS))
def _weights(r: Row) -> None:
    found = r.call("recurrent_weights", *_given(r, "y", "h0", "lengths", "dz", "t_dmore"), r.integer("reverse") == 1)
    add = r.integer("acc") == 1
    r.put("dwh", found[0], add=add)
    r.put("db", found[1], add=add)
