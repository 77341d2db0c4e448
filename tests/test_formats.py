"""Files of the former format: converted where they are read, or refused by name.

``data/format_2.model`` is a linear layer of 4 to 3 that has been trained for five steps, ``data/format_2_own.program`` has
rows of a user's operator; both were written by the last calcvm of that format.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import calcvm as cv
from calcvm.ops import ROWS
from calcvm.ops.spec import R, RowSpec, W, dims
from calcvm.vm.program.encoding import FORMAT_VERSION
from calcvm.vm.program.program import Program
from calcvm.vm.program.serialize import read_archive

DATA = Path(__file__).with_name("data")
HASH = "81ce77e6a660735ad9857039560ea39acfd8085b42438342c8e6b0246423eae2"  # as the calcvm that wrote the model has it
LOSSES = 1.5844154357910156, 1.5522457361221313, 1.521131157875061  # of its next steps


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.random((8, 4), np.float32), rng.integers(0, 3, 8)


def test_a_model_of_the_former_format_goes_on(tmp_path):
    model = cv.load(DATA / "format_2.model")
    program = model.program
    assert program.format_version == FORMAT_VERSION and program.former == HASH and program.rows.shape == (12, 16)
    model.save(tmp_path / "model")
    assert cv.load(tmp_path / "model").program == program == cv.load_program(DATA / "format_2.model")
    np.testing.assert_allclose([model.step(*data()) for _ in LOSSES], LOSSES, rtol=1e-6)


def test_a_store_of_the_former_format_goes_on(tmp_path):
    def fill(folder: Path, digest: str) -> None:
        store = cv.FileStore(folder)
        heap = cv.CalcHeap("1 MiB", store=store)
        model = cv.load(DATA / "format_2.model")
        heap.adopt(model.program, dict(model.resident.facts), model.resident.image(), name="it")
        heap.flush()
        facts, image = store.get("it")
        store.put("it", {**facts, "program": digest}, image)
        heap.close()

    fill(tmp_path, HASH)
    (written,) = (tmp_path / "programs").iterdir()
    documents, arrays = parts("format_2.model")
    cv.vm.program.serialize.write_archive(
        tmp_path / "programs" / f"{HASH}.calc", documents, arrays, kind="program", version=2
    )
    written.unlink()
    for steps in (LOSSES[:2], LOSSES[2:]):  # what was trained is written, with the program of today
        heap = cv.CalcHeap("1 MiB", store=cv.FileStore(tmp_path))
        model = cv.Model.on(heap.open("it"))
        np.testing.assert_allclose([model.step(*data()) for _ in steps], steps, rtol=1e-6)
        heap.close()
        (tmp_path / "programs" / f"{HASH}.calc").unlink(missing_ok=True)
    other = tmp_path / "other"
    fill(other, "0" * 64)
    cv.vm.program.serialize.write_archive(
        other / "programs" / f"{'0' * 64}.calc", documents, arrays, kind="program", version=2
    )
    with pytest.raises(cv.ProgramError, match="holds another program"):
        cv.CalcHeap("1 MiB", store=cv.FileStore(other)).open("it")


def test_users_instructions_must_be_registered(monkeypatch):
    where = DATA / "format_2_own.program"
    told = r"other instructions \(softsign_bwd, softsign_fwd\): declare a user's operators as the program did that made it .*, or"
    with pytest.raises(cv.ProgramError, match=f"format_2_own.program: written for {told}"):
        cv.load_program(where)
    for name, operands in (("fwd", "x y"), ("bwd", "y dy dx")):
        *read, written = (f"softsign_{name}", *operands.split())[1:]
        elems, in_place = ("rows*cols", "rows"), ((written, read[-1]),)
        row = RowSpec(name=f"softsign_{name}", synopsis="", words=dims("rows cols"),
                      operands=(*(R(r, *elems) for r in read), W(written, *elems)), in_place=in_place)  # fmt: skip
        monkeypatch.setitem(ROWS, row.name, row)
    assert "softsign_bwd" in cv.load_program(where).disassemble()
    monkeypatch.setitem(ROWS, "softsign_bwd", replace(ROWS["relu_bwd"], name="softsign_bwd"))  # of another form
    with pytest.raises(cv.ProgramError, match=r"other instructions \(softsign_bwd\)"):
        cv.load_program(where)


def parts(name: str) -> tuple[dict, dict]:
    """Of the program in a file."""
    archive = read_archive(DATA / name, kinds=("program", "model"), versions=(2,))
    arrays = {k: v for k, v in archive.arrays.items() if k.startswith("program/")}
    return {"program": json.loads(json.dumps(archive.documents["program"]))}, arrays


@pytest.mark.parametrize(
    "alter, message",
    [
        (lambda d, a: d["instructions"].update(linear_fwd="0" * 16), r"other instructions \(linear_fwd\)"),
        (lambda d, a: d["instructions"].update(relu_fwd="0" * 16), r"other instructions \(relu_fwd\)"),
        (lambda d, a: d["instructions"].pop("linear_fwd"), r"other instructions \(opcode 1\)"),
        (lambda d, a: d.update(instructions=[]), "instructions must be a mapping"),
        (lambda d, a: d.pop("instructions"), "lacks 'instructions'"),
        (lambda d, a: a.pop("program/rows"), "rows are not those of format 2"),
        (lambda d, a: a.update({"program/rows": a["program/rows"][:, :16]}), "rows are not those of format 2"),
        (lambda d, a: a.update({"program/rows": a["program/rows"].astype(np.int32)}), "rows are not those of format 2"),
        (lambda d, a: a.update({"program/rows": a["program/rows"] + np.eye(12, 32, 2, np.int64)}), "row 0 linear_fwd"),
    ],
)
def test_what_does_not_fit_is_refused(alter, message):
    documents, arrays = parts("format_2.model")
    Program.from_parts(documents, arrays)
    alter(documents["program"], arrays)
    with pytest.raises(cv.ProgramError, match=message):
        Program.from_parts(documents, arrays)
