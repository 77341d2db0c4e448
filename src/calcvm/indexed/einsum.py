"""NumPy's einsum: subscripts are translated to an equation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from calcvm import checks
from calcvm.errors import CalcError, ShapeError
from calcvm.graph import Variable, as_numbers
from calcvm.indexed.users import built
from calcvm.indexed.values import size_of

DOTS = "..."


def einsum(subscripts: str, *operands: Variable | Any) -> Variable:
    """``numpy.einsum`` of variables: ``cv.einsum("bi,io->bo", x, w)``; it becomes an equation (`equation`) and its rows.

    subscripts : a letter for each axis of each operand; after ``->`` those of the result.  Without ``->`` these are the letters that
        occur once, in alphabetical order.  A letter twice in one operand takes its diagonal; ``...`` stands for all other axes.

    Raises
    ------
    ShapeError : axes of one letter differ, or the numbers of subscripts and axes do; a caret shows the place in the equation.
    CalcError : the subscripts are invalid.

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x, w = g.placeholder("x", (None, 4)), g.parameter("w", (4, 3))
    >>> with g.path("forward"):
    ...     print(cv.einsum("bi,io->bo", x, w))
    y (B, 3)
    """
    text, given = equation_of(subscripts, operands)
    return built("einsum", text, None, given)


def equation_of(subscripts: str, operands: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """The text of the equation for some subscripts, and its operands by name."""
    if not isinstance(subscripts, str):
        raise CalcError(f"einsum: subscripts are a text such as 'bi,io->bo', not {checks.shown(subscripts)}")
    told = f"einsum: {checks.shown(subscripts)}"
    compact = subscripts.replace(" ", "")
    left, arrow, right = compact.partition("->")
    parts = left.split(",")
    for part in (*parts, right):
        if not re.fullmatch(r"[A-Za-z]*(\.\.\.)?[A-Za-z]*", part):
            raise CalcError(f"{told}: {checks.shown(part)} is not letters, with ... once at most")
    if len(parts) != len(operands):
        raise CalcError(f"{told} has {len(parts)} operands, but {len(operands)} are given")
    arrays = [
        v if isinstance(v, Variable) else as_numbers(f"{told}: operand {k}", v) for k, v in enumerate(operands, 1)
    ]
    wide: list[int] = []
    for k, (part, v) in enumerate(zip(parts, arrays), 1):
        letters, rank = len(part.replace(DOTS, "")), len(v.shape)
        if rank < letters or (DOTS not in part and rank != letters):
            raise ShapeError(f"{told}: operand {k} has {rank} axes, and {checks.shown(part)} names {letters}")
        wide.append(rank - letters)
    most = max((n for n, part in zip(wide, parts) if DOTS in part), default=0)
    out = right if arrow else (DOTS if DOTS in left else "") + _once(left)
    _check_result(told, out, left)
    sizes: dict[int, Any] = {}
    for v, part, n in zip(arrays, parts, wide):
        first = part.find(DOTS)
        for k in range(n):
            size = size_of(v.shape[first + k])
            sizes[most - n + k] = size if sizes.get(most - n + k, 1) == 1 else sizes[most - n + k]
    factors, read = [], {}
    for k, (part, v, n) in enumerate(zip(parts, arrays, wide), 1):
        first = part.find(DOTS)
        names = [*map(_index, part.replace(DOTS, ""))]
        dots = [
            "0" if size_of(v.shape[first + j]) == 1 != sizes[most - n + j] else f"i{most - n + j}" for j in range(n)
        ]
        places = [*names[:first], *dots, *names[first:]] if n else names
        factors.append(f"x{k}[{','.join(places)}]" if places else f"x{k}")
        read[f"x{k}"] = v
    kept = [
        name
        for c in re.findall(r"\.\.\.|.", out)
        for name in ([f"i{j}" for j in range(most)] if c == DOTS else [_index(c)])
    ]
    everyone = dict.fromkeys(_index(c) for c in left.replace(DOTS, "").replace(",", ""))
    over = [name for name in (*everyone, *(f"i{j}" for j in range(most))) if name not in kept]
    summed = f"sum[{','.join(over)}] " if over else ""
    name = next(name for name in ("y", "z", "y0") if name not in kept and name not in over)
    return f"{name}[{','.join(kept)}] = {summed}{'*'.join(factors)}", read


def _index(letter: str) -> str:
    """The index for a letter: capitals are extents in equations, so a capital letter becomes lowercase and doubled."""
    return letter if letter.islower() else letter.lower() * 2


def _once(left: str) -> str:
    letters = left.replace(DOTS, "").replace(",", "")
    return "".join(sorted(c for c in {*letters} if letters.count(c) == 1))


def _check_result(told: str, out: str, left: str) -> None:
    letters = out.replace(DOTS, "")
    for c in letters:
        if letters.count(c) > 1:
            raise CalcError(f"{told}: the result names {c!r} twice")
        if c not in left:
            raise CalcError(f"{told}: the result names {c!r}, which no operand has")
    if (DOTS in out) != (DOTS in left):
        raise CalcError(f"{told}: ... must be in operands and result, or in neither: sum over its axes by letters")
