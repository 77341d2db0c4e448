"""A plan as one self-contained page: heap, live bytes, graph and statements, linked on hover."""

from __future__ import annotations

import json
import os
from importlib import resources
from os import PathLike

from calcvm import checks, files
from calcvm.errors import CalcError
from calcvm.planner.plan_data import PlanData
from calcvm.planner.views.document import document


def page(plan: PlanData) -> str:
    """The page as HTML."""
    template = resources.files("calcvm.planner.views").joinpath("page.html").read_text("utf-8")
    before, after = template.split("/*PLAN*/")
    data = json.dumps(document(plan), separators=(",", ":")).replace("<", "\\u003c")  # a name may hold "</script>"
    return before + data + after


def write(plan: PlanData, path: str | PathLike[str]) -> None:
    """See `Plan.html`."""
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
        raise CalcError(f"plan.html: the path of a file is wanted, not {checks.shown(path)}")
    text = page(plan)
    files.write(path, lambda file: file.write(text.encode()))
