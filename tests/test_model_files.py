"""Model files: what is loaded is what was saved, and a file costs no more than it holds until it runs."""

from __future__ import annotations

import copy
import errno
import io
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.errors import FileError, NoSuchFile
from tests.kinds.archives import rewritten

X = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)
Y = np.arange(40) % 3


def model(**how) -> cv.Model:
    options = dict(input_shape=(6,), optimizer=cv.Adam(0.01), batch_size=8, workers=1, seed=4) | how
    return cv.Model(nn.Linear(8) >> nn.Tanh() >> nn.Dropout(0.2) >> nn.Linear(3), **options)


def trained(**how) -> cv.Model:
    made = model(**how)
    made.fit(X, Y, epochs=2, progress=False)
    return made


def child(code: str, *arguments: object) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---------------------------------------------------------------- what comes back
def through_a_file(made: cv.Model) -> cv.Model:
    file = io.BytesIO()
    made.save(file)
    file.seek(0)
    return cv.load(file)


@pytest.mark.parametrize("way", [through_a_file, copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))],
                         ids=["file", "deepcopy", "copy", "pickle"])  # fmt: skip
def test_a_copy_goes_on_with_the_same_bits_and_is_another_model(way):
    made = trained(learning_batch=20)
    other = way(made)
    assert (other.epochs_done, other.learning_batch, other.seed) == (2, 20, 4)
    losses = [m.fit(X, Y, epochs=2, progress=False)["loss"] for m in (made, other)]
    assert losses[0] == losses[1]
    np.testing.assert_array_equal(made.predict(X), other.predict(X))
    other.parameters["linear_1.weight"][:] = 0
    assert made["linear_1.weight"].any()


def test_a_model_saved_in_the_middle_of_an_accumulation_goes_on_with_the_same_bits():
    made = model(learning_batch=16)
    made["input"], made["target"] = X[:8], Y[:8]
    made.forward("learn")
    made.backward("learn")
    other = through_a_file(made)
    for m in (made, other):
        m.optimize("learn")
    np.testing.assert_array_equal(made["linear_1.weight"], other["linear_1.weight"])


def test_the_program_of_a_model_file_can_be_looked_at(tmp_path):
    made = model()
    made.save(tmp_path / "m.calc")
    program = cv.load_program(tmp_path / "m.calc")
    assert program == made.program and program.heap_bytes == made.heap.nbytes
    with open(tmp_path / "m.calc", "rb") as file:
        assert cv.load_program(file) == program


# ---------------------------------------------------------------- memory
LARGE = """
import resource, sys
import calcvm as cv
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
m = cv.load(sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, m.heap.nbytes)
"""


def test_loading_touches_what_the_file_holds_and_not_what_running_takes(tmp_path):
    path = tmp_path / "m.calc"
    model(batch_size=1 << 21).save(path)
    assert path.stat().st_size < 60_000
    grown, heap = map(int, child(LARGE, path).split())
    assert heap > 200 << 20 and grown < 20 << 10  # KiB


def test_a_limit_refuses_a_heap_that_is_larger(tmp_path):
    path = tmp_path / "m.calc"
    made = model()
    made.save(path)
    need = made.heap.nbytes
    assert cv.load(path, memory=need).heap.nbytes == need
    with pytest.raises(cv.PlanError, match=f"takes {need:,} bytes, memory= allows {need - 1:,}") as error:
        cv.load(path, memory=need - 1)
    assert (error.value.needed, error.value.allowed) == (need, need - 1)


def test_a_heap_larger_than_the_machine_is_refused_with_bytes(tmp_path):
    for make in (lambda: cv.CalcHeap("1000000 GiB"), lambda: model(batch_size=10**10), lambda: cv.Fleet(2**62)):
        with pytest.raises(cv.PlanError, match="a heap of .*use smaller batches or models") as error:
            make()
        assert error.value.needed > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >= error.value.allowed


def test_parameters_are_bounded_by_the_file(tmp_path):
    """A file that says it has large ones, but does not hold them, is refused before there is a heap."""
    path = tmp_path / "m.calc"
    made = model()
    made.save(path)
    for missing in (f"state/{made.program.info['variables']['linear_1.weight']['symbol']}", "state/"):

        def without(arrays, missing=missing):
            return {name: array for name, array in arrays.items() if not name.startswith(missing)}

        damaged = tmp_path / "damaged.calc"
        damaged.write_bytes(rewritten(path.read_bytes(), arrays=without))
        with pytest.raises(cv.ProgramError, match="it has no array 'state/"):
            cv.load(damaged)


# ---------------------------------------------------------------- the document "model"
NASTY = [None, "8", True, 1.5, [], {}, -1, -(2**63), 2**63, 10**400, float("nan")]


@pytest.mark.parametrize("field", ["seed", "epochs", "learning_batch"])
@pytest.mark.parametrize("value", NASTY, ids=lambda v: repr(v)[:12])
def test_every_number_of_a_model_is_checked(tmp_path, field, value):
    path = tmp_path / "m.calc"
    if not path.exists():
        model(workers=2).save(path)

    def alter(documents):
        documents["model"][field] = value

    path.write_bytes(rewritten(path.read_bytes(), documents=alter))
    with pytest.raises(cv.ProgramError, match=rf"m\.calc: (document 'model'\.{field} must be|documents/1.json .*JSON)"):
        cv.load(path)


def test_a_learning_batch_that_does_not_fit_the_program_is_refused(tmp_path):
    path = tmp_path / "m.calc"
    for made, value, message in ((model(), 16, "does not add gradients up"), (model(learning_batch=8), 3, "is below")):
        made.save(path)
        path.write_bytes(rewritten(path.read_bytes(), documents=lambda d, n=value: d["model"].update(learning_batch=n)))
        with pytest.raises(cv.ProgramError, match=rf"m\.calc: document 'model'.*{message}"):
            cv.load(path)


@pytest.mark.parametrize("field, value", [("seed", -1), ("epochs", 2**63), ("learning_batch", -(2**63)), ("open", 1),
                                          ("program", 5), ("program", "../x"), ("program", [])])  # fmt: skip
def test_every_fact_of_a_store_is_checked(tmp_path, field, value):
    store = cv.FileStore(tmp_path, durable=False)
    heap = cv.CalcHeap("1 MiB", store=store)
    resident = heap.create(model().program, name="m")
    resident.commit()
    facts, image = store.get("m")
    resident.close()
    store.put("m", {**facts, field: value}, image)
    with pytest.raises(cv.ProgramError, match=f"'m': its {field}"):
        heap.open("m")
    del facts[field if field in facts else "program"]
    store.put("m", facts, image)
    with pytest.raises(cv.ProgramError, match="'m': its"):
        heap.open("m")
    heap.close()


# ---------------------------------------------------------------- the system's errors
def test_the_systems_errors_name_the_path_that_was_given(tmp_path):
    made = model()
    missing, folder = tmp_path / "no" / "m.calc", tmp_path / "folder"
    folder.mkdir()
    for use in (made.save, made.program.save, cv.load, cv.load_program):
        with pytest.raises(NoSuchFile, match="look at the path") as error:
            use(missing)
        assert ("the folder to write to must be there" in str(error.value)) == (use in (made.save, made.program.save))
        assert str(error.value).startswith(f"{missing}: cannot be") and error.value.errno == errno.ENOENT
        assert isinstance(error.value, FileNotFoundError) and isinstance(error.value, cv.CalcError)
        with pytest.raises(FileError, match="give the path of a file") as error:
            use(folder)
        assert str(error.value).startswith(f"{folder}: cannot be") and isinstance(error.value, OSError)
    assert not list(folder.iterdir()) and not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob(".*"))


def test_a_file_that_may_not_grow_is_named_and_unchanged(tmp_path):
    path = tmp_path / "m.calc"
    model().save(path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(FileError, match=r"m\.calc: cannot be written \(File too large\): raise the limit"):
            model().save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["m.calc"]


def test_what_is_no_path_is_refused(tmp_path):
    for path in (None, 5, b"m.calc", ["m"], "a\0b", "", ".", "/"):
        for use in (model().save, cv.load):
            with pytest.raises(cv.CalcError, match="is not the path of a file"):
                use(path)
    file = io.BytesIO()
    model().save(file)
    for given in (file.getvalue(), bytearray(file.getvalue())):
        with pytest.raises(
            cv.CalcError, match=f"^{type(given).__name__} of length {len(given)}: wrap them in io.BytesIO$"
        ):
            cv.load(given)
    for given in ([0] * 9999, "m" * 99999):
        with pytest.raises(cv.CalcError) as told:
            cv.load(given)
        assert len(str(told.value)) < 5000
    with pytest.raises(cv.PlanError, match="memory= allows 10: raise memory=, or leave it out"):
        cv.load(io.BytesIO(file.getvalue()), memory=10)
    Path(tmp_path / "text").write_text("x")
    with open(tmp_path / "text") as file, pytest.raises(cv.CalcError, match="mode 'rb'"):
        cv.load(file)
    with open(tmp_path / "text", "w") as file, pytest.raises(cv.CalcError, match="mode 'wb'"):
        model().save(file)


def test_a_file_is_written_where_a_link_leads_and_stays_as_readable_as_it_was(tmp_path):
    target, link = tmp_path / "target", tmp_path / "latest.calc"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    model().save(link)
    assert (
        link.is_symlink()
        and target.stat().st_mode & 0o777 == 0o640
        and cv.load(target).program == cv.load(link).program
    )


def test_a_file_takes_the_place_of_no_device_and_no_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(cv.CalcError, match="is a device or a pipe"):
        model().save(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_a_stored_model_that_is_larger_than_the_heap_is_no_damage(tmp_path):
    program = model().program
    with cv.CalcHeap(program.heap_bytes, store=cv.FileStore(tmp_path)) as heap:
        heap.create(program, name="big")
    with cv.CalcHeap(64, store=cv.FileStore(tmp_path)) as heap, pytest.raises(cv.PlanError) as told:
        heap.open("big")
    assert (told.value.needed, told.value.allowed) == (program.heap_bytes, 64)
