"""The site has every public name once, with an example; its links hold in the repository too; what is published says one version."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import calcvm
from tests.test_readme import FENCE
from tools import reference
from tools.reference import REPOSITORY, described, members, public

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
SHOWN = re.compile(r"^::: (\S+)(?:\n    options:\n      members: (\[.*\]|false))?$", re.MULTILINE)
CONFIG = (ROOT / "mkdocs.yml").read_text()


def uses(code: str, name: str) -> bool:
    """Whether code uses a public name: ``cv.relu``, or as imported."""
    imported = rf"^from calcvm[\w.]* import [^\n]*\b{name}\b"
    return bool(re.search(rf"\b(?:cv|nn|init|zoo)\.{name}\b|{imported}", code, re.MULTILINE))


# ---------------------------------------------------------------- the reference
def test_every_public_name_is_on_one_page() -> None:
    shown = Counter(full for page in PAGES for full, _ in SHOWN.findall(page.read_text()))
    assert {full for full in shown if full not in public()} == set(), "these are not public"
    assert {full for full in public() if shown[full] != 1} == set(), "give each one line in docs/reference/: `::: name`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_name_has_an_example(page: Path) -> None:
    text = page.read_text()
    code = "\n".join(fence[2] for fence in FENCE.finditer(text) if fence[1] in ("python", "py"))
    names = [full for full, _ in SHOWN.findall(text) if full in public()]
    bare = [n for n in names if ">>>" not in described(public()[n]) and not uses(code, n.rpartition(".")[2])]
    assert names and bare == [], "write an example into the docstring, or use the name in a block of the page"


def test_a_name_without_an_example_is_caught() -> None:
    assert uses("y = cv.relu(x)", "relu") and uses("from calcvm.operators import Real, update", "update")
    assert not uses("y = cv.relu6(x)", "relu") and not uses("relu = 3", "relu")


def test_listed_members_are_documented() -> None:
    for page in PAGES:
        for full, listed in SHOWN.findall(page.read_text()):
            value = public().get(full)
            known = {name for name, _ in members(value)} if isinstance(value, type) else set()
            assert {*re.findall(r"\w+", listed)} - {"false"} <= known, full


def test_docstrings_become_markdown() -> None:
    doc = "x*y, by `relu` of ``a*b``.\n\nkind : one.  size : two.\n\nParameters\n----------\na, b : int\n    Of *both*.\n\nReferences\n----------\nHere."
    assert reference.markdown(doc, "calcvm.add") == (
        "x\\*y, by [`relu`][calcvm.relu] of ``a*b``.\n\n\n**kind**: one.\n\n**size**: two.\n\n"
        "Parameters\n---\na\n    int.\n    Of \\*both\\*.\nb\n    int.\n    Of \\*both\\*.\n\n**References**\n\nHere."
    )


def test_modules_for_mkdocstrings_are_python() -> None:
    for full, value in public().items():
        text = reference.source(full, value)
        compile(text, full, "exec")
    assert "def relu(x: Variable) -> Variable:" in reference.source("calcvm.relu", calcvm.relu)
    assert reference.source("calcvm.nn.ReLU", calcvm.nn.ReLU).startswith("class ReLU(Activation):")


# ---------------------------------------------------------------- pages and links
def test_the_menu_has_every_page() -> None:
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert Counter(re.findall(r"[\w/-]+\.md", CONFIG)) == Counter([*pages, *reference.HOME.values()])


def test_nothing_is_fetched_from_elsewhere() -> None:
    assert "font: false" in CONFIG and "://" not in CONFIG


@pytest.mark.parametrize(
    ("page", "written", "seen"),
    [
        ("training.md", "[a](images.md#data) [b](#c)", "[a](images.md#data) [b](#c)"),
        ("training.md", "[a](../CONTRIBUTING.md#words)", "[a](contributing.md#words)"),
        ("training.md", "[a](../examples/gan.py)", f"[a]({REPOSITORY}/blob/main/examples/gan.py)"),
        ("reference/models.md", "[a](../training.md)", "[a](../training.md)"),
        ("reference/models.md", "[a](../../CONTRIBUTING.md)", "[a](../contributing.md)"),
        ("index.md", f"![a]({REPOSITORY}/raw/main/docs/heap.png)", "![a](heap.png)"),
        ("index.md", f"[a]({REPOSITORY}/blob/main/LICENSE)", f"[a]({REPOSITORY}/blob/main/LICENSE)"),
        ("contributing.md", "[a](docs/planning.md) [b](https://x.y)", "[a](planning.md) [b](https://x.y)"),
        ("index.md", "`cv.plan`, `plan`", "[`cv.plan`][calcvm.plan], `plan`"),
        ("index.md", "## `cv.plan`", "## `cv.plan`"),
        ("index.md", "```text\n[a](../b.py) `cv.plan`\n```", "```text\n[a](../b.py) `cv.plan`\n```"),
    ],
)
def test_links_of_pages_hold_in_the_site(page: str, written: str, seen: str) -> None:
    class Page:
        class file:
            src_uri = page

    assert reference.on_page_markdown(written, Page) == seen


def test_the_gallery_has_every_example() -> None:
    text = (ROOT / "docs" / "gallery.md").read_text()
    assert [path.name for path in (ROOT / "examples").glob("*.py") if f"examples/{path.name}" not in text] == []


# ---------------------------------------------------------------- what is published
def test_one_version() -> None:
    version = calcvm.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## {re.escape(version)}( |$)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_one_address() -> None:
    urls = re.findall(r'"(https://[^"]*)"', (ROOT / "pyproject.toml").read_text().partition("[project.urls]")[2])
    assert len(urls) >= 4 and all(url.startswith(REPOSITORY) for url in urls)


def test_sources_are_published_whole() -> None:
    """Every folder that the tests read is in the sdist."""
    manifest = (ROOT / "MANIFEST.in").read_text().splitlines()
    for folder in (".ci", "bench", "docs", "examples", "tests", "tools"):
        assert f"graft {folder}" in manifest
