"""Defects put in on purpose, each in a copy of the sources: the suite of its kind must find it.

``python -m tests.mutants [NAME ...]`` prints what found each; it fails where one was not found.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECONDS = 900  # a mutant may make a test hang: that finds it too


@dataclass(frozen=True)
class Mutant:
    """A defect: texts of files of ``src/calcvm`` with what takes their place, and the tests that must fail."""

    name: str
    changes: tuple[tuple[str, str, str], ...]  # file, text (once in it), what takes its place
    tests: tuple[str, ...]


IMAGE = (
    "vm/run/loaded.py",
    '        self.image = _hull([s for s in kept if s.kind != "gradient"])\n',
    '        self.image = _hull([s for s in kept if s.kind not in ("gradient", "carry")])\n',
)
CARRIES = {  # what loses a state, by the words that choose tests of test_carry.py
    "switching": IMAGE,
    "fleets_carry": IMAGE,
    "store_of_files": IMAGE,
    "files_copies": ("model/files.py", "model.image(state)", "model.image(False)"),
    "pickles": ("model/model.py", "        self.save(file, state=True)\n", "        self.save(file)\n"),
    "copies": ("model/model.py", "            image = self.image()  # first", "            image = self.image(False)  # first"),
    "before_they_change": (
        "lowering/sections.py", " if states and not path.backward else states.keys()\n", " if 0 else ()\n",
    ),
    "recomputation": (
        "lowering/sections.py", " if states and not path.backward else states.keys()\n", " if states else states.keys()\n",
    ),
    "pages": (
        "planner/paging.py", "        out.append(st.with_values(copies))\n",
        '        out += [st.with_values(copies)] * all(v.kind != "carry" for v in written)\n',
    ),
    "rounds_carry": (
        "lowering/sections.py", "path.carries.items() if wanted else ():\n",
        "path.carries.items() if wanted and not self.accumulate else ():\n",
    ),
    "split": (
        "split_model/model.py", "            if symbol is not None and symbol.persistent:\n",
        '            if symbol is not None and symbol.persistent and symbol.kind != "carry":\n',
    ),
    "scripts": ("script/sections.py", 'name, shape = f"{name}[:B]"', 'name, shape = f"{name}[:B].copy()"'),
    "simulated": (
        "vm/memory/base_model.py", "                    if not slot.writable:\n                        slot.write(symbol, cells)\n", "",
    ),
    "streams": ("vm/program/program_data.py", "] += place * symbol.elems", "] += 0 * symbol.elems"),
    "compiled_calls": ("lowering/sections.py", "path.carries.items() if wanted else ():\n", "() if wanted else ():\n"),
    "texts": ("graph_text/write.py", "        for state, new in path.carries.items():\n", "        for state, new in ():\n"),
}  # fmt: skip
MUTANTS = (
    *(
        Mutant(f"a state is lost: {words}", (change,), ("tests/test_carry.py", "-k", words))
        for words, change in CARRIES.items()
    ),
    Mutant("a state is lost when a process is killed", (IMAGE,), ("tests/test_store.py", "-k", "kill")),
    Mutant(
        "a buffer is taken for what it was",
        (
            (
                "lowering/simplify.py",
                "            number = (shown, self.updates[here, source])\n",
                "            number = shown\n",
            ),
        ),
        ("tests/test_simplify.py",),
    ),
    Mutant(
        "a barrier is left out by the planner",
        (
            (
                "planner/sync.py",
                "        if any(pending.conflicts(key, writes) for key, writes in own.items()):\n",
                "        if any(pending.conflicts(key, writes) for key, writes in own.items()) and t % 5:\n",
            ),
        ),
        ("tests/kinds/test_plans.py",),
    ),
    Mutant(
        "a barrier is left out, and the verifier agrees",
        (
            ("planner/sync.py", "        return (start, extent.until(batch), units)\n", '        return "batch"\n'),
            ("vm/program/verify/row.py", "            return (start, size, units)\n", '            return "batch"\n'),
        ),
        ("tests/kinds/test_races.py",),
    ),
    Mutant(
        "a share is off at one batch",
        (
            (
                "kernels_cpu/random.py",
                "    lo, hi = share(me, rows)\n    i = lo * cols\n",
                "    lo, hi = share(me, rows)\n    if rows == 3:\n        lo, hi = 0, rows\n    i = lo * cols\n",
            ),
        ),
        ("tests/kinds/test_table.py", "--whole", "-k", "shares and dropout"),
    ),
    Mutant(
        "a lock is dropped",
        (
            (
                "vm/memory/turns.py",
                "            self._line_up()\n        return self.lock\n",
                "            pass\n        return threading.RLock()\n",
            ),
        ),
        ("tests/kinds/test_threads.py",),
    ),
    Mutant(
        "a job is freed while a worker has it",
        (
            (
                "vm/run/loop.py",
                "        while atomic_load(box) != 0:\n",
                "        while atomic_load(box) != 0 and looks < 3:\n",
            ),
        ),
        ("tests/test_team.py",),
    ),
    Mutant(
        "what an interrupt leaves in a heap is not mended",
        (
            (
                "vm/memory/heap.py",
                "        if not (self._torn or self._orphaned):\n            return\n",
                "        return\n",
            ),
        ),
        ("tests/kinds/test_interrupts.py",),
    ),
    Mutant(
        "a section's own rows follow its straight code",
        (("vm/run/specialized.py", "(stop - start) * out.strides[0]", "out.strides[0]"),),
        ("tests/test_specialized.py", "-k", "rows and not images and not sequences"),
    ),
    Mutant(
        "two values have one name",
        (("lowering/emit.py", "        name = unique(stem, self._names, self._counts)\n", "        name = stem\n"),),
        ("tests/kinds/test_graphs.py",),
    ),
    Mutant(
        "a file's bytes are not checked",
        (
            (
                "vm/memory/versions.py",
                "    if _digest(before + document, image) != version.digest:\n",
                '    if _digest(before + document, image) == b"":\n',
            ),
        ),
        ("tests/kinds/test_files.py",),
    ),
)


def altered(mutant: Mutant) -> dict[str, str]:
    """The files of ``src/calcvm`` that have the defect, as they then are."""
    sources: dict[str, str] = {}
    for file, text, other in mutant.changes:
        source = sources.get(file) or (ROOT / "src" / "calcvm" / file).read_text()
        if source.count(text) != 1:
            raise SystemExit(f"{mutant.name}: {file} has {source.count(text)} times: {text!r}")
        sources[file] = source.replace(text, other)
    return sources


def found(mutant: Mutant) -> str:
    """The first test that fails with the defect in; empty where none does."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for path, source in altered(mutant).items():
            (Path(folder) / "src" / "calcvm" / path).write_text(source)
        env = {**os.environ, "PYTHONPATH": str(Path(folder) / "src")}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
        try:
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"no end within {SECONDS} s"
    if done.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)$", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"exit status {done.returncode}: {(done.stderr or done.stdout).strip()[-200:]}"


def main(names: list[str]) -> int:
    missed = 0
    for mutant in MUTANTS:
        if names and mutant.name not in names:
            continue
        start = time.monotonic()
        by = found(mutant)
        missed += not by
        print(f"{mutant.name}: {by or 'NOT FOUND'} ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{missed} of {len(names) or len(MUTANTS)} not found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
