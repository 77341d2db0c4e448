"""docs/promises.md: every promise names the tests that show it, and they are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "promises.md").read_text()
PROMISES = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| you can")]


def functions_of(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_has_its_tests(promise: str) -> None:
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", promise)
    assert named or "the same" in promise, f"no test is named: {promise}"
    for file, test in named:
        assert (TESTS / file).is_file(), file
        assert not test or test in functions_of(TESTS / file), f"{file} has no {test}"


def test_every_part_of_the_page_promises_something() -> None:
    parts = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    assert len(PROMISES) > 20 and all("| you can rely on" in part for part in parts[:-1])
