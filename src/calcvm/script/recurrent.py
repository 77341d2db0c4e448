"""Texts of recurrent cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from calcvm.equations.cells import OwnCell, own_cell
from calcvm.formulas.cells import CELLS
from calcvm.script.code import ATOM, LOWEST, trace
from calcvm.script.row import FALLBACKS, Row, Writer, writes


def _given(r: Row, *names: str) -> list[Any]:
    return [r.x(name) if name in r else None for name in names]


def _forward(r: Row, cell: Any, **sizes: int) -> None:
    x = r.x("x", r.w.N, r.w.T, r.w.K) if "x" in r else None
    given = _given(r, "wi", "bi", "wh", "b", "h0", "c0", "lengths")
    found = r.call("recurrent", cell, *_given(r, "z"), x, *given, r.integer("reverse") == 1, **sizes)
    r.put_all(found, "y", "hn", "cn", "gates", "more", "c")


def _backward(r: Row, cell: Any, **sizes: int) -> None:
    names = ("wh", "h0", "c0", "lengths", "y", "gates", "more", "c", "dy", "dhn", "dcn")
    found = r.call("recurrent_back", cell, r.w.N, r.w.T, *_given(r, *names), r.integer("reverse") == 1, **sizes)
    r.put_all(found, "dz", "t_dmore", "dh0", "dc0", "t_dp")


@writes(*(f"{cell}_bwd_w" for cell in CELLS))
def _weights(r: Row) -> None:
    found = r.call("recurrent_weights", *_given(r, "y", "h0", "lengths", "dz", "t_dmore"), r.integer("reverse") == 1)
    add = r.integer("acc") == 1
    r.put("dwh", found[0], add=add)
    r.put("db", found[1], add=add)
    if "t_dp" in r:
        r.put("dp", r.x("t_dp").sum(0, 1), add=add)


for _cell in CELLS:
    writes(f"{_cell}_fwd")(partial(_forward, cell=_cell))
    writes(f"{_cell}_bwd")(partial(_backward, cell=_cell))


# ---------------------------------------------------------------- users' cells
def _own(r: Row, own: OwnCell, given: Mapping[str, int], results: Callable[..., Sequence[Sequence[Any]]]) -> Any:
    """(function, number of gates apart, parameters): the function has lists of numbers, and returns tuples of them."""
    of = trace()
    made = results(*([of.of(f"{name}[{k}]", ATOM) for k in range(n)] for name, n in given.items()))
    named = [[(f"{name}{k}", v) for k, v in enumerate(values)] for name, values in zip("abcde", made)]
    steps = [f"{name} := {text}" for name, text in of.equations([pair for pairs in named for pair in pairs])]
    out = ", ".join(f"({''.join(f'{name}, ' for name, _ in pairs)})" for pairs in named)
    text = f"(lambda {', '.join(given)}: ({', '.join([*steps, f'({out})'])},)[-1], {own.apart}, "
    if "p" in r:
        return r.trace.of(f"{text}{{}})", ATOM, ((r.x("p"), LOWEST),))
    return r.trace.of(f"{text}None)", ATOM)


def _own_forward(r: Row, own: OwnCell) -> None:
    cell = own.cell

    def results(z: Any, m: Any, s: Any, p: Any) -> Any:
        kept, _, after = cell.forward(z, m, s + p)
        return kept, after

    given = {"z": cell.gates, "m": cell.apart, "s": cell.states, "p": cell.parameters}
    _forward(r, _own(r, own, given, results), others=cell.others, kept=cell.kept, apart=cell.apart)


def _own_backward(r: Row, own: OwnCell) -> None:
    cell = own.cell

    def results(gates: Any, more: Any, before: Any, p: Any, after: Any, d: Any) -> Any:
        dz, dmore, (dh, *rest) = cell.backward(gates, more, before + p, after, d)
        return dz, dmore, [d[0].const(0) if dh is None else dh], rest[: cell.others], rest[cell.others :]

    given = {"gates": cell.kept, "more": cell.apart, "before": cell.states, "p": cell.parameters}
    many = {"others": cell.others, "apart": cell.apart, "of_units": cell.parameters}
    _backward(r, _own(r, own, given | dict.fromkeys(("after", "d"), cell.states), results), **many)


def _own_row(stem: str) -> Writer | None:
    own = own_cell(stem)
    if own is None:
        return None
    if stem.endswith("_bwd_w"):
        return _weights
    return partial(_own_forward if stem.endswith("_fwd") else _own_backward, own=own)


FALLBACKS.append(_own_row)
