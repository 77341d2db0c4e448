"""README's Python blocks run and print what the text blocks after them say; CONTRIBUTING's recipe works.

The blocks of docs/ run in `test_docs`; ``python tests/test_readme.py`` rewrites what they and README's say.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_extras_are_those_that_a_package_offers() -> None:
    """Which `calcvm info` lists."""
    offered = (
        (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    )
    table = (ROOT / "README.md").read_text().partition("## Extras")[2].partition("\nThe command")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == re.findall(r"^(\w+) = \[", offered, re.MULTILINE)


def blocks(text: str) -> Iterator[tuple[int, str, re.Match[str] | None]]:
    """(line, code, the text block directly after it or None) of each Python block."""
    fences = list(FENCE.finditer(text))
    for fence, after in zip(fences, [*fences[1:], None]):
        if fence[1] == "python":
            directly = after is not None and after[1] == "text" and not text[fence.end() : after.start()].strip()
            yield text.count("\n", 0, fence.start()) + 1, fence[2], after if directly else None


def outputs(text: str, filename: str) -> Iterator[tuple[int, re.Match[str], str]]:
    """Run all Python blocks; (line, text block, what was printed) for those that say what they print."""
    namespace: dict[str, object] = {"__name__": "readme"}
    for line, code, said in blocks(text):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + code, filename, "exec", dont_inherit=True), namespace)
        if said is not None:
            yield line, said, "".join(f"{s.rstrip()}\n" for s in printed.getvalue().splitlines())


def agrees(printed: str, said: str) -> bool:
    """A line of three dots stands for any number of lines."""
    pattern = "".join(r"(?:.*\n)*" if line == "...\n" else re.escape(line) for line in said.splitlines(keepends=True))
    return re.fullmatch(pattern, printed) is not None


def check(text: str, filename: str) -> None:
    for line, said, printed in outputs(text, filename):
        message = f"{filename}:{line}: prints something else (python tests/test_readme.py rewrites it)"
        assert agrees(printed, said[2]), message


def test_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text()
    assert len(list(blocks(text))) >= 5
    check(text, "README.md")


def test_readme_links_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text()):
            assert target.startswith("https://") or (name != "README.md" and (ROOT / target).exists()), (
                f"{name}: {target}"
            )


def test_the_measured_figures_are_those_of_the_results() -> None:
    """Each row of README's first table quotes numbers of the section that its command wrote."""
    results = (ROOT / "bench" / "RESULTS.md").read_text()
    row = r"^\|[^|]*\|([^|]*\|[^|]*)\| `python -m bench (\w+)` \|$"
    rows = re.findall(row, (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) >= 5
    for cells, command in rows:
        section = results.partition(f"\n`python -m bench {command}`")[2].partition("\n## ")[0]
        for figure in re.findall(r"([\d.]+) [um]s", cells):
            assert f" {figure} " in section, f"{figure} is not in the results of {command}"


def test_a_wrong_readme_is_caught() -> None:
    check("```python\nx = 1\n```\n\n```python\nprint(x)\n```\n```text\n1\n```\n", "right")
    with pytest.raises(AssertionError, match="wrong:1"):
        check("```python\nprint(1)\n```\n\n```text\n2\n```\n", "wrong")
    check("```python\nprint(1)\nprint(2)\nprint(3)\n```\n```text\n...\n3\n```\n", "right")
    with pytest.raises(AssertionError, match="wrong:1"):
        check("```python\nprint(1)\nprint(2)\n```\n\n```text\n...\n1\n```\n", "wrong")
    with pytest.raises(ZeroDivisionError):
        check("```python\n1 / 0\n```\n", "broken")


RECIPE = """
import sys
from pathlib import Path
from tests import rowrun
from tests.reference import elementwise
from calcvm.ops import OPS

sys.path.insert(0, ".")
exec(Path("recipe_reference.py").read_text(), vars(elementwise))
for module in sys.argv[1:]:
    __import__(module)
from tests.cuda.simulated import Simulated
spec = OPS["softsign"]
for rowrun.backend in (rowrun.backend, Simulated()):
    rowrun.check_names(spec)
    for dtype in ("float32", "float64"):
        for check in rowrun.CHECKS.values():
            check(rowrun.cases(spec, dtype))
    for case in rowrun.cases(spec, "float64"):
        rowrun.check_gradients(case)
print("the recipe works")
"""


@pytest.mark.parametrize("way", ["formulas", "in full"])
def test_contributing_recipe_makes_an_operator(way: str, tmp_path: Path) -> None:
    """The operator of CONTRIBUTING.md passes what every operator passes, with nothing else written."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    *_, formulas, spec, kernels, on_gpu, reference, _ = re.findall(r"```py\n(.*?)```", text, re.DOTALL)
    files = {
        "recipe_formulas.py": "from calcvm.formulas import number as n\nfrom calcvm.operators import elementwise\n\n\n"
        + formulas,
        "recipe_spec.py": "from calcvm.ops.spec import *\nfrom calcvm.ops.spec import dims\n\n" + spec,
        "recipe_kernels.py": "from calcvm.kernels_cpu._common import Ptr, fabs, kernel, like, share\n\n\n" + kernels,
        "recipe_on_gpu.py": "from calcvm.kernels_cuda._common import Ptr, kernel, share\n"
        "from calcvm.kernels_cuda._cuda import like, thread, threads\nfrom calcvm.kernels_cuda._math import fabs\n\n\n"
        + on_gpu,
        "recipe_reference.py": reference,
        "recipe.py": RECIPE,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    modules = ["recipe_formulas"] if way == "formulas" else ["recipe_spec", "recipe_kernels", "recipe_on_gpu"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "CALCVM_CACHE_DIR": str(tmp_path / "cache")}
    result = subprocess.run(
        [sys.executable, "recipe.py", *modules], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.stdout == "the recipe works\n", result.stderr


def test_contributing_shows_a_declared_operator_as_it_stands_in_its_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("### By its equation")[2].partition("### By a formula")[0]
    blocks = re.findall(r"in `(src/calcvm/\S+\.py)`[^`]*(?:`\w+`[^`]*)?:\n\n```py\n(.*?)```", text, re.DOTALL)
    assert [path for path, _ in blocks] == [
        f"src/calcvm/{of}.py" for of in ("equations/declared", "ops/declared", "functions")
    ]
    for path, block in blocks:
        assert block in (ROOT / path).read_text(), path


def test_contributing_recipe_makes_a_function(tmp_path: Path) -> None:
    """The function of CONTRIBUTING.md passes what every function passes, with nothing else written."""
    *_, function = re.findall(r"```py\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "src" / "calcvm" / "formulas" / "functions.py").open("a") as file:
        file.write(f"\n\n{function}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "src"), str(ROOT)])}
    tests = ["tests/test_math.py", "tests/cuda/test_values.py", "-k", "atanh"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert re.search(r"^10 passed", result.stdout, re.MULTILINE), result.stdout


def rewrite(page: Path) -> None:
    """Write what a page's blocks print now into the page, where it says something else."""
    text = page.read_text()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for _, said, printed in reversed(list(outputs(text, page.name))):
            if not agrees(printed, said[2]):
                text = text[: said.start(2)] + printed + text[said.end(2) :]
    page.write_text(text)


if __name__ == "__main__":
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        rewrite(page)
