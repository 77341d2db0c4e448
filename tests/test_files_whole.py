"""What calcvm writes is there whole, or what was there before is: every way to write a file, on a disk that is full at any byte."""

from __future__ import annotations

import ast
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import calcvm as cv
from calcvm import files, nn
from calcvm.exploration.picture import draw
from calcvm.vm.run.cuda.cost import Figures

SOURCE = Path(cv.__file__).parent
# Who else writes to a file, with the reason.
OTHERS = {
    "commands.py": "arrays into the file that files.write gives it",
    "edge/linker.py": "a temporary folder, which it removes",
    "edge/on_board.py": "runs in packs: beside and renamed (tests/edge/test_python_packs.py)",
    "kernels_cpu/_native.py": "the cache, which nobody names: beside and renamed, without a word where it fails",
    "exploration/cluster.py": "a folder of its own, which is gone when it has been read",
    "vm/memory/store.py": "slots of a store: the version before stays (tests/test_store.py)",
}
WRITES = re.compile(r"open\(|write_text|write_bytes|savefig|savez|tofile|O_CREAT")
Write = Callable[[Path], object]


@contextmanager
def room(nbytes: int) -> Iterator[None]:
    """No file may be longer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def model() -> cv.Model:
    return cv.Model(
        nn.Linear(16) >> nn.Tanh() >> nn.Linear(3), input_shape=(4,), optimizer=cv.SGD(0.1), batch_size=4, workers=1
    )


def writers(model: cv.Model) -> dict[str, tuple[str, Write]]:
    """By what is written a file's name, and the call."""
    return {
        "page": ("plan.html", model.plan.html),
        "picture": ("heap.png", lambda path: model.plan.picture(str(path))),
        "drawing": ("heap.svg", lambda path: model.plan.picture(str(path))),
        "search": ("search.png", lambda path: draw([], "loss", False, path)),
        "model": ("m.calc", model.save),
        "program": ("p.calc", model.program.save),
        "script": ("m.py", model.to_python),
        "figures": ("gpu.json", lambda path: Figures().save(path)),
        "longest name": ("n" * 250 + ".calc", model.save),
    }


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("before", [False, True], ids=["new", "old"])
def test_a_full_disk_leaves_what_was_there(model: cv.Model, tmp_path: Path, before: bool, whole: bool) -> None:
    """Of each writer at its first byte, in the middle, at its last one: and when there is room it writes."""
    for what, (name, write) in writers(model).items():
        if drawn := name.endswith((".png", ".svg")):
            if not whole and (before or what != "drawing"):
                continue  # each takes a while
            pytest.importorskip("matplotlib")
        folder = tmp_path / what
        folder.mkdir()
        write(folder / name)
        sizes = [len(data) for data in content(folder).values()]
        for path in folder.iterdir():
            path.write_bytes(b"old") if before else path.unlink()
        there = content(folder)
        largest = max(sizes)
        points = np.linspace(largest - 1, 0, 25 if whole else 1 if drawn else 4).astype(int).tolist()
        for nbytes in points:
            with room(nbytes), pytest.raises(cv.FileError, match=r"cannot be written \(.+\): ."):
                write(folder / name)
            assert content(folder) == there, (what, nbytes)
        with room(largest):
            write(folder / name)
        assert sorted(len(data) for data in content(folder).values()) == sorted(sizes), what


def test_no_other_way_to_write_a_file() -> None:
    """A new one is to be `calcvm.files.write`, or to stand in the list above with its reason."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if WRITES.search(text) else ():
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            mode = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            mode += [k.value.value for k in node.keywords if k.arg == "mode" and isinstance(k.value, ast.Constant)]
            opens = called == "open" and any({*m} <= {*"rwxabt+"} and {*m} & {*"wxa+"} for m in mode)
            if opens or called in ("write_text", "write_bytes", "savefig", "savez", "tofile", "O_CREAT"):
                found.add(str(path.relative_to(SOURCE)))
    assert found - {"files.py"} <= {*OTHERS}, found
    assert "files.py" in found


def test_a_picture_of_no_format_is_refused(model: cv.Model, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(cv.CalcError, match=r"no picture is written as '.*'; take one of .*png"):
        model.plan.picture(str(tmp_path / "heap.xyz"))
    assert not [*tmp_path.iterdir()]


def test_a_picture_without_a_suffix_is_a_png(model: cv.Model, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model.plan.picture(str(tmp_path / "heap"))
    assert [p.name for p in tmp_path.iterdir()] == ["heap.png"]


def test_a_link_stays_one(model: cv.Model, tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "plan.html")
    model.plan.html(tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink() and (tmp_path / "plan.html").read_bytes().endswith(b"</html>\n")


def test_an_interrupt_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write(file: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write(path, write)
    assert content(tmp_path) == {"file": b"old"}
