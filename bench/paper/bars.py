"""Bars for the experiments' pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def bars(axes: Any, values: Mapping[str, float], title: str, form: str) -> None:
    """A bar for each name with its value beside it; ours, whose names begin with calcvm, in red."""
    drawn = axes.barh(
        list(values), list(values.values()), color=["C3" if n.startswith("calcvm") else "C7" for n in values]
    )
    axes.bar_label(drawn, fmt=form, padding=3, fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_title(title, fontsize="small")
    axes.tick_params(labelsize="small")
