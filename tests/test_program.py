"""Programs as data: encoding, batches, listings, hashes, and files that are whole or refused."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from calcvm import kernel, optim
from calcvm.errors import CalcError, ProgramError
from calcvm.ops import ROWS
from calcvm.ops.dims import Affine
from calcvm.vm.program import encoding
from calcvm.vm.program.encoding import FORMAT_VERSION, decode_row, encode_row
from calcvm.vm.program.program import Program, load_program
from calcvm.vm.program.serialize import read_archive, write_archive
from tests.fuzz_programs import mlp


@pytest.fixture(scope="module")
def program() -> Program:
    return mlp((6, 4, 3), optim.Adam(1e-3), batch=100)


# ---------------------------------------------------------------- rows and batches
@pytest.mark.parametrize("name", sorted(ROWS))
def test_encoded_rows_decode_to_what_they_were(name):
    spec = ROWS[name]
    words = {w.name: 0.5 if w.kind == "float" else k for k, w in enumerate(spec.words)}
    offsets = {o.name: None if o.optional else 16 * k for k, o in enumerate(spec.operands, 1)}
    row = encode_row(spec, words, offsets, flags=1, instruction=7)
    assert row.tolist()[:2] == [7, 1] and not row[spec.n_words :].any()
    assert len(row) % 8 == 0 and spec.n_words <= len(row) < spec.n_words + 8
    found_words, found_offsets = decode_row(spec, row)
    assert found_words == words
    assert found_offsets == {k: -1 if v is None else v for k, v in offsets.items()}


def test_kernels_and_programs_agree_on_the_header_of_a_row():
    """Kernels import nothing of programs, so both say it."""
    ours = encoding.HEADER_WORDS, encoding.FLAG_PHASES, encoding.FLAG_PC_SHIFT
    assert (kernel.PREFIX, kernel.FLAG_PHASES, kernel.FLAG_PC_SHIFT) == ours


def test_words_that_depend_on_the_batch_follow_it(program):
    for batch in (1, 7, 100):
        rows = program.rows_for(batch)
        changed = rows != program.rows
        named = np.zeros_like(changed)
        for row, word, a, b in program.patches:
            named[row, word] = True
            assert rows[row, word] == a * batch + b
        assert not (changed & ~named).any()
    np.testing.assert_array_equal(program.rows_for(100), program.rows)
    assert len(program.patches) > 0


def test_a_patched_array_can_be_patched_again(program):
    rows = program.rows.copy()
    for batch in (3, 100, 1, 50):
        program.patch(rows, batch)
        np.testing.assert_array_equal(rows, program.rows_for(batch))


@pytest.mark.parametrize("batch", [0, 101, -1])
def test_batches_beyond_the_plan_are_refused(program, batch):
    with pytest.raises(CalcError, match="planned for 1 to 100"):
        program.rows_for(batch)
    with pytest.raises(CalcError, match="planned for 1 to 100"):
        program.disassemble(batch)


def test_programs_cannot_be_changed(program):
    for array in (program.rows, program.patches, program.operand_values):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(AttributeError):
        program.batch_size = 5


def test_unknown_names_are_named(program):
    assert program.symbol("w0").elems == Affine(0, 24)
    with pytest.raises(CalcError, match="'nope'.*w0"):
        program.symbol("nope")


# ---------------------------------------------------------------- identity
def test_equal_graphs_give_equal_programs(program):
    again = mlp((6, 4, 3), optim.Adam(1e-3), batch=100)
    assert again == program and hash(again) == hash(program) and again.hash == program.hash


@pytest.mark.parametrize(
    "change",
    [
        lambda p: {"rows": np.where(np.arange(len(p.rows))[:, None] == 1, p.rows + 1, p.rows)},
        lambda p: {"instructions": (p.instructions[0]._replace(form=""), *p.instructions[1:])},
        lambda p: {"patches": p.patches[:-1]},
        lambda p: {"operand_values": p.operand_values + 1},
        lambda p: {"batch_size": 99},
        lambda p: {"workers": 1},
        lambda p: {"heap_elems": p.heap_elems + 16},
        lambda p: {"dtype": "float64"},
        lambda p: {"info": {"x": 1}},
        lambda p: {"constants": {"c": np.ones(2)}},
        lambda p: {"labels": ("x",) * len(p.labels)},
        lambda p: {"zones": p.zones[:-1]},
        lambda p: {"symbols": (replace(p.symbols[0], offset=32), *p.symbols[1:])},
        lambda p: {"symbols": (replace(p.symbols[0], resident=not p.symbols[0]), *p.symbols[1:])},
        lambda p: {"sections": dict(list(p.sections.items())[:-1])},
    ],
)
def test_the_hash_covers_everything(program, change):
    assert replace(program, **change(program)).hash != program.hash


# ---------------------------------------------------------------- listings
def test_listing_shows_equations_with_names_shapes_and_offsets(program):
    text = program.disassemble()
    lines = [line for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert len(lines) == len(program.rows)
    x, w = program.symbol("x"), program.symbol("w0")
    first = lines[0]
    assert f"x[B,6]@{x.offset}" in first and f"w0[6,4]@{w.offset}" in first
    assert "[m,n] = sigmoid(sum[k] x[m,k]*w0[k,n] + b0[n])" in first
    assert "learn / backward" in text and "zone forward" in text
    assert first.endswith("|sync") == bool(program.rows[0, 1] & 1)
    assert lines[-1].endswith("|sync")


def test_listing_for_one_batch_shows_numbers(program):
    assert "x[5,6]@" in program.disassemble(5)
    assert "x[B,6]@" not in program.disassemble(5)


def test_listing_tells_setting_from_adding(program):
    rounds = program.disassemble()
    once = mlp((6, 4, 3), optim.Adam(1e-3), accumulate=False).disassemble()
    assert "dw0[6,4]@" in rounds and "dw0[k,n] += sum[m] x[m,k]*" in rounds
    assert "dw0[k,n] = sum[m] x[m,k]*" in once and "dw0[k,n] +=" not in once


# ---------------------------------------------------------------- files
def test_a_program_survives_a_file(program, tmp_path):
    path = tmp_path / "p.calc"
    full = replace(program, constants={"mean": np.arange(3.0)}, info={"shape": (1, 2), "rate": 0.1})
    full.save(path)
    loaded = load_program(path)
    assert loaded == full and loaded.disassemble() == full.disassemble()
    np.testing.assert_array_equal(loaded.constants["mean"], [0, 1, 2])
    assert loaded.info == {"shape": [1, 2], "rate": 0.1}
    assert loaded.sections == full.sections and loaded.symbols == full.symbols


def test_equal_programs_make_equal_files(program, tmp_path):
    program.save(tmp_path / "a")
    program.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_file_cut_anywhere_is_refused(program, tmp_path):
    path = tmp_path / "p.calc"
    program.save(path)
    data = path.read_bytes()
    for length in [0, 1, 3, 21, *range(22, len(data), max(len(data) // 97, 1)), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(ProgramError, match=r"p\.calc"):
            load_program(path)


def test_an_altered_byte_is_refused_or_changes_nothing(program, tmp_path):
    path = tmp_path / "p.calc"
    small = mlp((2, 2), optim.SGD(0.1), batch=2)
    small.save(path)
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    places = rng.choice(len(data), 600, replace=False)
    for at in places:
        altered = bytearray(data)
        altered[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(altered)
        try:
            assert load_program(path) == small  # bytes that say nothing: times and attributes in zip headers
        except ProgramError:
            refused += 1
    assert refused > 0.8 * len(places)


def test_foreign_files_are_refused_by_name(tmp_path):
    path = tmp_path / "foreign.zip"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("readme.txt", "hello")
    with pytest.raises(ProgramError, match="not one that calcvm wrote"):
        load_program(path)
    path.write_text("not a zip")
    with pytest.raises(ProgramError, match="not a calcvm file"):
        load_program(path)
    with pytest.raises(FileNotFoundError):
        load_program(tmp_path / "absent")


def test_other_kinds_and_versions_are_refused(tmp_path):
    path = tmp_path / "m.calc"
    write_archive(path, {"a": 1}, {}, kind="list", version=1)
    with pytest.raises(ProgramError, match="holds a list, not a program"):
        load_program(path)
    write_archive(path, {"a": 1}, {}, kind="program", version=99)
    with pytest.raises(ProgramError, match="format 99, this calcvm reads 3"):
        load_program(path)
    write_archive(path, {"a": 1}, {}, kind="program", version=1)
    with pytest.raises(ProgramError, match="format 1, this calcvm reads 3: .* compile the graph again"):
        load_program(path)
    write_archive(path, {"a": 1}, {}, kind="program", version=FORMAT_VERSION)
    with pytest.raises(ProgramError, match="not a well-formed program"):
        load_program(path)


def test_compressed_members_are_refused(program, tmp_path):
    """A zip bomb is a small member that unpacks to a large one."""
    source, bomb = tmp_path / "p.calc", tmp_path / "bomb.calc"
    program.save(source)
    with zipfile.ZipFile(source) as z, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as out:
        out.comment = z.comment
        for name in z.namelist():
            out.writestr(name, z.read(name))
    with pytest.raises(ProgramError, match="compressed"):
        load_program(bomb)


def test_array_headers_that_promise_more_than_follows_are_refused(tmp_path):
    """``np.load`` would allocate first what the header says."""
    import hashlib

    path = tmp_path / "a.calc"
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"
    header += b" " * (64 - (len(header) + 11) % 64) + b"\n"
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64)
    entry = {"member": "arrays/0.npy", "type": "array", "name": "x", "bytes": len(data)}
    entry["sha256"] = hashlib.sha256(data).hexdigest()
    manifest = json.dumps({"format": "calcvm", "kind": "program", "version": 1, "members": [entry]}).encode()
    with zipfile.ZipFile(path, "w") as z:
        z.comment = hashlib.sha256(manifest).hexdigest().encode()
        z.writestr("manifest.json", manifest)
        z.writestr("arrays/0.npy", data)
    with pytest.raises(ProgramError, match="header says"):
        read_archive(path, kinds={"program": 1})


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (2, 3)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "int32", "uint8", "bool"])
def test_arrays_of_any_shape_and_number_type_survive(tmp_path, shape, dtype):
    array = np.ones(shape, dtype)
    write_archive(tmp_path / "x", {}, {"a/b": array}, kind="k", version=1)
    back = read_archive(tmp_path / "x", kinds={"k": 1}).arrays["a/b"]
    assert back.dtype == array.dtype and back.shape == array.shape
    np.testing.assert_array_equal(back, array)


def test_objects_are_never_written(tmp_path):
    with pytest.raises(ValueError, match="[Oo]bject"):
        write_archive(tmp_path / "x", {}, {"a": np.array([{}])}, kind="k", version=1)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_file_whole(program, tmp_path, monkeypatch):
    path = tmp_path / "p.calc"
    program.save(path)
    before = path.read_bytes()

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr("calcvm.files.os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        mlp((2, 2), optim.SGD(0.1)).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["p.calc"]


def test_a_program_for_other_instructions_is_refused(program, tmp_path):
    """Words of an instruction changed since the file was written."""
    documents, arrays = program.to_parts()
    for instruction in documents["program"]["instructions"]:
        if instruction[0] == "linear_fwd":
            instruction[1] = "0" * 16
    write_archive(tmp_path / "p", documents, arrays, kind="program", version=FORMAT_VERSION)
    with pytest.raises(ProgramError, match="other instructions .linear_fwd.: build and compile"):
        load_program(tmp_path / "p")


def test_a_stored_program_is_verified(program, tmp_path):
    documents, arrays = program.to_parts()
    rows = arrays["program/rows"].copy()
    rows[0, -1] = 1
    arrays = {**arrays, "program/rows": rows}
    write_archive(tmp_path / "p", documents, arrays, kind="program", version=FORMAT_VERSION)
    with pytest.raises(ProgramError, match="must be zero"):
        load_program(tmp_path / "p")


@pytest.mark.parametrize(
    "field", ["rows", "symbols", "sections", "batch_size", "labels", "zones", "info", "dtype", "instructions"]
)
@pytest.mark.parametrize("value", [None, 5, "x", [1], {"a": 1}, [[1, 2]]])
def test_documents_of_another_form_are_refused(program, field, value):
    documents, arrays = program.to_parts()
    documents["program"][field] = value
    if field == "rows":
        arrays = {k: v for k, v in arrays.items() if k != "program/rows"}
    if field == "info" and isinstance(value, dict):
        assert Program.from_parts(documents, arrays).info == value  # facts that nothing here relies on
        return
    with pytest.raises(ProgramError):
        Program.from_parts(documents, arrays)
