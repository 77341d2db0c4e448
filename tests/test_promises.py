"""docs/promises.md: every promise names the tests that show it, and they are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "promises.md").read_text()
PARTS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:-1]  # but the last: what is not promised
PROMISES = [promise for part in PARTS for promise in re.split(r"^- ", part, flags=re.MULTILINE)[1:]]


def functions_of(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.split("\n")[0][:60])
def test_a_promise_has_its_tests(promise: str) -> None:
    named = re.findall(r"^  - `([\w/]+\.py)(?:::(\w+))?`$", promise, re.MULTILINE)
    assert named, f"no test is named: {promise}"
    for file, test in named:
        assert not test or test in functions_of(ROOT / file), f"{file} has no {test}"


def test_every_part_of_the_page_promises_something() -> None:
    assert len(PARTS) == 9 and all("\n- " in part for part in PARTS)
