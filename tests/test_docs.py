"""docs/ says what is so: links, module paths, snippets, quoted numbers, and a reference that follows the table."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import calcvm
from tests.test_math import BOUND
from tests.test_readme import blocks, check
from tools.reference import REPOSITORY, described, members, public

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "calcvm"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*DOCS, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"))]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
WIDTH = 140


def names(paths: list[Path]) -> list[str]:
    return [p.name for p in paths]


# ---------------------------------------------------------------- the operator reference
def reference(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """In a separate process: what other tests register is not in the table there."""
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True)


def test_operator_reference_is_up_to_date() -> None:
    result = reference("tools/operators.py", "--check")
    assert result.returncode == 0, f"run `make docs`\n{result.stdout[:2000]}{result.stderr}"


ALTERED = """
import sys
from dataclasses import replace
sys.path.insert(0, "tools")
import operators
from calcvm.ops import OPS
row = OPS["exp"].fwd[0]
changed = {changed}
OPS["exp"] = replace(OPS["exp"], **changed)
sys.argv = ["operators.py", "--check"]
sys.exit(operators.main())
"""


@pytest.mark.parametrize(
    "changed",
    [
        "{'synopsis': 'y = e'}",
        "{'source': 'somewhere'}",
        "{'fwd': (replace(row, name='other'),)}",
        "{'fwd': (replace(row, in_place=()),)}",
        "{'fwd': (replace(row, flops='7*rows'),)}",
        "{'fwd': (replace(row, operands=(replace(row.operands[0], part=''), row.operands[1])),)}",
        "{'bwd': ()}",
    ],
)
def test_a_stale_reference_is_caught(changed: str) -> None:
    result = reference("-c", ALTERED.replace("{changed}", changed))
    assert result.returncode == 1 and "+++ table" in result.stdout, result.stderr


def test_reference_has_every_operator_and_row() -> None:
    from calcvm.ops import OPS

    text = (ROOT / "docs" / "operators.md").read_text()
    headings = re.findall(r"^###? (\S+)$", text, re.MULTILINE)
    assert len(headings) == len(set(headings)), "two headings with one anchor"
    for spec in OPS.values():
        if spec.words.__module__.startswith("calcvm.ops."):
            assert spec.name in headings
            assert all(f"\n{row.name}: " in text for row in spec.rows)


# ---------------------------------------------------------------- links, paths, width
def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


def broken_links(page: Path) -> list[str]:
    bad = []
    for target in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page.read_text())):
        path = re.sub(rf"^{REPOSITORY}/(blob|raw)/main/", f"{ROOT}/", target)
        if re.match(r"[a-z]+:", path):
            continue
        file, _, anchor = path.partition("#")
        other = page.parent / file if file else page
        if not other.exists() or (anchor and anchor not in anchors(other)):
            bad.append(target)
    return bad


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_caught(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    away = f"{REPOSITORY}/blob/main/docs"
    text = f"[a](page.md) [b](#one-two) [c](https://x.y) [d](none.md) [e](page.md#none) [f]({away}/planning.md) [g]({away}/no.md)"
    page.write_text(f"# One, two\n{text}\n")
    assert broken_links(page) == ["none.md", "page.md#none", f"{away}/no.md"]


WRITTEN = {"train.py"}  # by an example


def missing_paths(text: str) -> list[str]:
    """Paths in code ticks (with a folder, or ending in .py) that are neither below the package nor below the root."""
    ticked = re.findall(r"`([\w./]+)`", CODE.sub("", text))
    paths = {t for t in ticked if t.endswith((".py", ".md", ".txt", "/")) or re.fullmatch(r"\w+/\w+", t)}
    paths |= set(re.findall(r"\b[\w/]+\.py\b", "\n".join(CODE.findall(text))))
    files = {p.name for p in PACKAGE.rglob("*.py")} | WRITTEN
    return sorted(p for p in paths if p not in files and not (PACKAGE / p).exists() and not (ROOT / p).exists())


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_named_files_exist(page: Path) -> None:
    assert missing_paths(page.read_text()) == []


def test_a_missing_file_is_caught() -> None:
    assert missing_paths(
        "`ops/spec.py` `tests/rowrun.py` `vm/` `no/such.py`\n```text\nvm/none.py vm/run/loop.py\n```\n"
    ) == [
        "no/such.py",
        "vm/none.py",
    ]


def test_architecture_names_every_room() -> None:
    text = ARCHITECTURE.read_text()
    for room in PACKAGE.iterdir():
        if room.is_dir() and (room / "__init__.py").exists():
            assert f"`{room.name}/`" in text, room.name
        elif room.suffix == ".py" and not room.name.startswith("__"):
            assert f"`{room.name}`" in text, room.name


@pytest.mark.parametrize("page", DOCS, ids=names(DOCS))
def test_lines_are_short(page: Path) -> None:
    for n, line in enumerate(page.read_text().splitlines(), 1):
        generated_table = page.name == "operators.md" and line.startswith("|")
        assert len(line) <= WIDTH or generated_table, f"{page.name}:{n}"


# ---------------------------------------------------------------- what architecture.md claims
@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("page", DOCS, ids=names(DOCS))
def test_snippets_run_and_print_what_is_said(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check(page.read_text(), page.name)


@pytest.mark.usefixtures("forgotten")
def test_examples_of_docstrings_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of public objects, which know ``cv``, ``nn`` and ``np``."""
    monkeypatch.chdir(tmp_path)
    runner, tried = doctest.DocTestRunner(optionflags=doctest.REPORT_ONLY_FIRST_FAILURE), 0
    for name, value in public().items():
        inner = [*members(value)] if isinstance(value, type) else []
        for full, documented in ((name, value), *((f"{name}.{member}", of) for member, of in inner)):
            known = {"cv": calcvm, "nn": calcvm.nn, "np": np}
            found = doctest.DocTestParser().get_doctest(described(documented), known, full, None, None)
            tried += runner.run(found).attempted
    assert tried > 150 and runner.failures == 0


def test_architecture_has_snippets() -> None:
    assert sum(said is not None for _, _, said in blocks(ARCHITECTURE.read_text())) >= 2


MOST_WORDS = 3500  # of architecture.md: half an hour


def words_of(text: str) -> int:
    """Words of a page, outside its code and tables."""
    lines = CODE.sub("", text).splitlines()
    return sum(len(line.split()) for line in lines if not line.startswith("|"))


def test_architecture_is_short() -> None:
    assert words_of(ARCHITECTURE.read_text()) <= MOST_WORDS


def test_words_of_code_and_tables_do_not_count() -> None:
    assert words_of("# Two words\n\none\n\n| a | b |\n|---|---|\n\n```text\na b c\n```\nfour five\n") == 6


def table(text: str, header: str) -> list[list[str]]:
    lines = text[text.index(header) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_quoted_error_bounds_are_the_tested_ones() -> None:
    text = ARCHITECTURE.read_text()
    header = next(line for line in text.splitlines() if line.startswith("| function |"))
    (bounds,) = table(text, header)
    said = dict(zip([c.strip() for c in header.strip("|").split("|")][1:], map(float, bounds[1:])))
    assert said.items() <= BOUND.items()


def test_quoted_constants_are_the_code_s() -> None:
    from calcvm.lowering import LARGE_PARAMETER
    from calcvm.ops.spec import MAX_WORDS
    from calcvm.vm.run.job import MAX_WORKERS

    text = " ".join(ARCHITECTURE.read_text().split())
    assert f"`LARGE_PARAMETER` elements ({LARGE_PARAMETER})" in text
    assert f"at most {MAX_WORDS} words" in text
    assert f"at most {MAX_WORKERS} workers" in text
    for check_name in re.findall(r"`((?:check|test)_\w+)`", text):
        sources = (ROOT / "tests" / name for name in ("rowrun.py", "test_operators.py"))
        assert any(f"def {check_name}(" in source.read_text() for source in sources), check_name


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_pages_are_ascii(page: Path) -> None:
    assert page.read_text().isascii()
