"""The checks of `make lint` that are ours: the words of docs and comments, the number of lines of code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import size, words


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("page.md", "Values are made again in the backward.\n", ["made again"]),
        ("page.md", "A word in code, `made again`, is none.\n\n```python\nx = 'made again'\n```\n", []),
        ("page.md", "It has rows.\nThe caller is told of it.\n", ["is told"]),
        ("page.md", "Of the rows two are longer.\n", ["Of the"]),
        ("page.md", f"It {'very ' * words.LONGEST}works.\n", [f"It{' very' * 7} ... ({words.LONGEST + 2} words)"]),
        ("page.md", f"It works{' and works' * 12}; it works{' and works' * 12}.\n", []),
        (
            "module.py",
            '"""A file a family."""\nx = 1  # as ever\nanew = f"{x} one a row"\n',
            ["A file a family", "as ever", "one a row"],
        ),
    ],
)
def test_words_of_the_list_and_long_sentences_are_found(tmp_path: Path, name: str, text: str, found: list[str]) -> None:
    page = tmp_path / name
    page.write_text(text)
    assert [what for _, what, _ in words.problems(page)] == found


def test_a_line_is_named(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nIt is right.\nIt was asked.\n")
    assert [line for line, _, _ in words.problems(page)] == [4]


def test_lines_of_code_are_counted_without_docstrings_comments_and_blanks(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""Docs.\n\nMore.\n"""\n\n# a comment\nx = [\n    1,\n]  # another\n\n\ndef f():\n    """Docs."""\n    return """\na\n"""\n'
    )
    assert size.lines_of(module) == 7
