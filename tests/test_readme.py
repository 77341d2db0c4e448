"""README's Python blocks run, one after another, and print what the text block after them says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[int, str, str | None]]:
    """(line, code, expected output or None) of each Python block."""
    found = [(text[: m.start()].count("\n") + 2, m[1], m[2], m.start(), m.end()) for m in FENCE.finditer(text)]
    result = []
    for i, (line, language, code, _, end) in enumerate(found):
        if language != "python":
            continue
        after = found[i + 1] if i + 1 < len(found) else None
        directly = after is not None and after[1] == "text" and not text[end : after[3]].strip()
        result.append((line, code, after[2] if after and directly else None))
    return result


def run(text: str, filename: str) -> None:
    namespace: dict[str, object] = {"__name__": "readme"}
    for line, code, expected in blocks(text):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (line - 1) + code, filename, "exec", dont_inherit=True), namespace)
        if expected is not None:
            assert [s.rstrip() for s in printed.getvalue().splitlines()] == expected.splitlines(), f"{filename}:{line}"


def test_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text()
    assert len(blocks(text)) >= 5
    run(text, "README.md")


def test_readme_links_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text()):
            assert target.startswith("https://") or (ROOT / target).exists(), f"{name}: {target}"


def test_a_wrong_readme_is_caught() -> None:
    run("```python\nx = 1\n```\n\n```python\nprint(x)\n```\n```text\n1\n```\n", "right")
    with pytest.raises(AssertionError, match="wrong:2"):
        run("```python\nprint(1)\n```\n\n```text\n2\n```\n", "wrong")
    with pytest.raises(ZeroDivisionError):
        run("```python\n1 / 0\n```\n", "broken")
