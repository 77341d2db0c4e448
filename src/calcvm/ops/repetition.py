"""Equations that repeat for several axes, written for one."""

from __future__ import annotations

import re

JOINS = {";": "; ", "and": " and ", "*": "*", "+": " + "}


def each(axes: str, text: str) -> str:
    """A text in which each part in braces is repeated for all axes.

    It is written for the first axis: names that end in ``axes[0]``, or in its capital, get the other axes' endings.  A part that
    begins with ``;``, ``and``, ``*`` or ``+`` is joined by that, any other by commas.

    Examples
    --------
    >>> each("dhw", "y[n,{od<OD}] = x[n, {od*sd - pd}]")
    'y[n,od<OD,oh<OH,ow<OW] = x[n, od*sd - pd, oh*sh - ph, ow*sw - pw]'
    >>> each("01", "{; a0[i] = i*s0}; y[i] = {+ a0[i]}")
    'a0[i] = i*s0; a1[i] = i*s1; y[i] = a0[i] + a1[i]'
    """

    def repeated(part: re.Match) -> str:
        sign, _, rest = part[1].partition(" ")
        one, join = (rest, JOINS[sign]) if sign in JOINS else (part[1], ", " if " " in part[1] else ",")
        return join.join(_for(axes[0], axis, one) for axis in axes)

    return re.sub(r"\{(.*?)\}", repeated, text)


def _for(first: str, axis: str, text: str) -> str:
    ends = {first: axis, first.upper(): axis.upper()}
    return re.sub(r"\b(?!and\b)[A-Za-z_]\w*", lambda name: name[0][:-1] + ends.get(name[0][-1], name[0][-1]), text)
