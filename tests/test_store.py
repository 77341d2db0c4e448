"""Stores: what was put comes back, or is refused by name; nothing is lost when writing fails or the process dies."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import tracemalloc
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest

import calcvm as cv
from calcvm import optim
from calcvm.errors import CalcError, ProgramError
from calcvm.vm.memory import versions
from calcvm.vm.memory.store import FileStore, MemoryStore
from calcvm.vm.program.program import Program
from tests import store_faults
from tests.fuzz_programs import mlp

NAMES = ["a", "user/17", "../../up", ".", "..", ".hidden", "x.previous", "x.model", "a b\n\t", "ü—模型 🙂", "\x00", "%2F",
         "\ud800", "A" * 200]  # fmt: skip


@pytest.fixture(scope="module")
def program() -> Program:
    return mlp((2, 2), optim.SGD(0.1), batch=2)


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    made = MemoryStore() if request.param == "memory" else FileStore(tmp_path / "store", durable=False)
    yield made
    made.close()


@pytest.fixture
def files(tmp_path):
    made = FileStore(tmp_path / "store")
    yield made
    made.close()


def image(seed: int, n: int = 100) -> memoryview:
    return memoryview(bytearray(np.random.default_rng(seed).bytes(n)))


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a store but its lock."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


def child(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    source = "import os, sys\nfrom calcvm.errors import CalcError\nfrom calcvm.vm.memory.store import FileStore\n"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", source + code, *map(str, arguments)], env=environment, capture_output=True, text=True
    )


# ---------------------------------------------------------------- both
def test_what_was_put_comes_back(store):
    facts = {"program": "f" * 64, "rounds": 3, "rate": 1e-3, "tags": ["a", None, True]}
    kept = image(1)
    store.put("m", facts, kept)
    kept[:] = bytes(100)  # the store has a copy
    found, back = store.get("m")
    assert found == facts and back == image(1)
    back[:] = bytes(100)  # and gives copies
    room = memoryview(bytearray(100))
    found, filled = store.get("m", room)
    assert filled is room and found == facts and room == image(1)


def test_the_last_version_counts(store):
    for rounds, n in enumerate((100, 100, 37, 0, 5000)):
        store.put("m", {"rounds": rounds}, image(rounds, n))
        facts, back = store.get("m")
        assert facts == {"rounds": rounds}
        assert back == image(rounds, n)


def test_names_may_be_any_text(store):
    for i, name in enumerate(NAMES):
        assert name not in store
        store.put(name, {"i": i}, image(i))
    assert sorted(store.names()) == sorted(NAMES)
    for i, name in enumerate(NAMES):
        assert name in store
        facts, back = store.get(name)
        assert facts == {"i": i}
        assert back == image(i)


def test_no_file_of_a_model_is_hidden(files):
    for i, name in enumerate(NAMES):
        files.put(name, {}, image(i))
    stored = os.listdir(files.folder / "models")
    assert len(stored) == len(NAMES) and not [name for name in stored if name.startswith(".")]


def test_a_model_that_is_open_is_neither_removed_nor_restored(files):
    """What is in a heap would be written again."""
    program = cv.compile(cv.build_graph(cv.nn.Linear(2), (3,), "mse", "adam"), batch_size=4)
    with cv.Fleet("1 MiB", store=files) as fleet:
        handle = fleet.add(program, data=(np.ones((4, 3)), np.ones((4, 2))), name="m")
        fleet.fit(2, progress=False)
        for change, what in ((files.remove, "removed"), (files.restore, "restored")):
            with pytest.raises(CalcError, match=f"model 'm' is open, and cannot be {what} now: close it first"):
                change("m")
        handle.close()
        files.restore("m")
        assert fleet.heap.open("m").epochs_done == 1
        fleet.heap["m"].close()
        files.remove("m")
        assert "m" not in files


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_two_heaps_of_one_store_never_share_a_model(kind, tmp_path):
    program = cv.compile(cv.build_graph(cv.nn.Linear(2), (3,), "mse", "adam"), batch_size=4)
    store = MemoryStore() if kind == "memory" else FileStore(tmp_path)
    one, two = (cv.CalcHeap(program.heap_bytes, store=store) for _ in range(2))
    models = [heap.create(program, seed=10 * i + j) for i in range(3) for j, heap in enumerate((one, two))]
    assert len({model.name for model in models}) == 6
    for i, model in enumerate(models):  # each heap has room for one
        fresh = cv.CalcHeap(program.heap_bytes).create(program, seed=10 * (i // 2) + i % 2)
        np.testing.assert_array_equal(model.parameters["linear_1.weight"], fresh.parameters["linear_1.weight"])
    one.create(program, name="m")
    for taken in (lambda: two.create(program, name="m"), lambda: two.open("m")):
        with pytest.raises(
            CalcError, match="another heap of this store has a model 'm' open|the store has a model 'm'"
        ):
            taken()
    one["m"].close()
    if kind == "files":
        assert two.open("m").name == "m"


def test_a_store_stays_where_it_is_wherever_the_process_goes(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    store = FileStore("kept")
    store.put("m", {}, image(1))
    monkeypatch.chdir("other")
    store.put("m", {}, image(2))
    assert store.names() == ["m"] and store.get("m")[1] == image(2) and not os.listdir()
    with pytest.raises(ProgramError, match="m.model: is a model of a store: open it by cv.CalcHeap"):
        cv.load(tmp_path / "kept" / "models" / "m.model")


@pytest.mark.parametrize("end", ["flush", "close", "exit"])
def test_what_cannot_be_written_keeps_nothing_else_from_it(end, tmp_path, monkeypatch):
    program = cv.compile(cv.build_graph(cv.nn.Linear(2), (3,), "mse", "adam"), batch_size=4)
    store, names = FileStore(tmp_path), [f"m{k}" for k in range(6)]
    heap = cv.CalcHeap("1 MiB", store=store)
    models = [heap.create(program, name=name) for name in names]
    heap.flush()
    for model in models:
        model.step(np.ones((4, 3)), np.ones((4, 2)))
    full, put = {"m1", "m4"}, store.put
    monkeypatch.setattr(store, "put", lambda name, *a: no_room(name) if name in full else put(name, *a))
    with pytest.raises(CalcError, match="2 of 6 models could not be written: m1, m4; the first error: 'm1': no room"):
        {"flush": heap.flush, "close": heap.close, "exit": lambda: heap._end()}[end]()
    kept = FileStore(tmp_path, read_only=True)
    first, last = kept.get("m1")[1], kept.get("m0")[1]
    assert first != last
    for name in names:
        assert kept.get(name)[1] == (first if name in full else last)
    if end != "exit":  # which closes the store
        full.clear()
        heap.close()
        assert kept.get("m1")[1] == kept.get("m4")[1] == last


def no_room(name):
    raise CalcError(f"{name!r}: no room")


def test_a_removed_model_is_gone_and_its_name_free(store):
    store.put("m", {}, image(1))
    store.put("other", {}, image(2))
    store.remove("m")
    store.remove("m")
    assert "m" not in store and store.names() == ["other"]
    with pytest.raises(CalcError, match="no model 'm'"):
        store.get("m")
    store.put("m", {}, image(3, 7))
    assert store.get("m")[1] == image(3, 7)


@pytest.mark.parametrize("n", [0, 1, 99, 101])
def test_room_of_another_size_is_refused(store, n):
    store.put("m", {}, image(1))
    with pytest.raises(CalcError, match=f"'m'.*100 bytes, room for {n} was given"):
        store.get("m", memoryview(bytearray(n)))


def test_programs_come_back(store, program):
    store.put_program(program)
    store.put_program(program)
    assert store.get_program(program.hash) == program
    with pytest.raises(ProgramError, match="no (such )?program"):
        store.get_program("0" * 64)


def test_memory_is_reused_and_facts_are_kept_by_reference():
    store, facts, kept = MemoryStore(), {"rounds": 0}, image(1, 10_000)
    store.put("m", facts, kept)
    tracemalloc.start()
    for _ in range(100):
        store.put("m", facts, kept)
        assert store.get("m", kept)[0] is facts
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000


# ---------------------------------------------------------------- files
def test_a_store_survives_its_process(tmp_path, program):
    first = FileStore(tmp_path / "deep" / "store")
    first.put("m", {"rounds": 1}, image(1))
    first.put_program(program)
    first.close()
    second = FileStore(tmp_path / "deep" / "store")
    assert second.names() == ["m"] and second.get("m")[0] == {"rounds": 1}
    assert second.get_program(program.hash) == program
    assert second.get_program(program.hash) is second.get_program(program.hash)
    second.close()


def test_the_version_before_is_kept(files):
    with pytest.raises(CalcError, match="no previous version of 'm'"):
        files.get("m", previous=True)
    for rounds in range(4):
        files.put("m", {"rounds": rounds}, image(rounds))
        if rounds:
            facts, back = files.get("m", previous=True)
            assert facts == {"rounds": rounds - 1}
            assert back == image(rounds - 1)
    assert sorted(content(files.folder)) == ["models/m.model"]
    files.remove("m")
    assert content(files.folder) == {}


def test_many_names_cost_no_memory(tmp_path):
    store, kept = FileStore(tmp_path, durable=False), image(0, 1000)
    store.put("warm", {}, kept)
    tracemalloc.start()
    for i in range(500):
        store.put(f"model-{i}", {"rounds": i}, kept)
        store.get(f"model-{i}", kept)
    ours = [tracemalloc.Filter(True, f"{Path(cv.__file__).parent}/*")]  # threads of other tests hold more
    held = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(ours).traces)
    tracemalloc.stop()
    store.close()
    assert held < 50_000


@pytest.mark.parametrize("name", ["x" * 201, "模" * 30, "", 5, b"a"])
def test_names_that_no_file_can_have_are_refused(files, name):
    for use in (lambda: name in files, lambda: files.put(name, {}, image(0)), lambda: files.get(name)):
        with pytest.raises(CalcError, match="a shorter one|a non-empty text"):
            use()
    assert content(files.folder) == {}


def test_facts_that_are_not_json_are_refused(files):
    files.put("m", {"a": 1}, image(0))
    before = content(files.folder)
    for facts in ({"a": np.zeros(1)}, {"a": {1}}, {(1, 2): 1}):
        with pytest.raises(CalcError, match="'m'.*JSON"):
            files.put("m", facts, image(1))
    assert content(files.folder) == before


# ---------------------------------------------------------------- damaged files
def test_every_flipped_bit_and_every_cut_is_refused_by_name_or_changes_nothing(tmp_path):
    store = FileStore(tmp_path, durable=False)
    kept = {1: image(0, 5), 2: image(1, 16)}
    store.put("m", {"n": 1}, kept[1])
    store.put("m", {"n": 2}, kept[2])
    path = tmp_path / "models" / "m.model"
    good = path.read_bytes()
    read = [k for k in range(len(good)) if k < 140 or good[k]]  # all that says something, and of what does not a part
    flipped = [good[:i] + bytes([good[i] ^ 1 << bit]) + good[i + 1 :] for i in read for bit in range(8)]
    cut = [good[:n] for n in range(0, len(good), 7)] + [good + b"\0", good + good]
    refused = 0
    for damaged in flipped + cut:
        path.write_bytes(damaged)
        found = []
        for previous in (False, True):
            try:
                facts, back = store.get("m", previous=previous)
                assert back == kept[facts["n"]]
                found.append(facts["n"])
            except CalcError as error:
                assert str(path) in str(error)
                found.append(0)
        assert found in ([2, 1], [2, 0], [0, 1], [0, 2], [0, 0])  # [0, 2]: either header may be the last version's
        refused += found != [2, 1]
    assert refused > len(flipped) // 2
    store.close()


@pytest.mark.parametrize("place", [0, 1])
def test_a_damaged_version_is_refused_and_the_one_before_it_comes_back(files, place):
    for n in range(3 + place):
        files.put("m", {"n": n}, image(n))
    path = files.folder / "models" / "m.model"
    data = bytearray(path.read_bytes())
    heads = versions.Heads.of(bytes(data))
    last = heads.versions[0]
    for at in (last.place * versions.PLACE + 20, last.start + 3):  # its header, its facts
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(
            ProgramError, match=r"m\.model: altered.*store\.restore\('m'\) goes back to the version before it"
        ):
            files.get("m")
        files.restore("m")
        assert files.get("m")[0] == {"n": last.number - 2}
        with pytest.raises(CalcError, match="no previous version"):
            files.restore("m")
    with pytest.raises(CalcError, match="no model 'other'"):
        files.restore("other")


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "truncated to 0 bytes"),
        (b"PK\3\4" + bytes(100), "not a model that calcvm wrote"),
        (b"calcvmMD" + (3).to_bytes(4, "little") + bytes(100), "format 3, this calcvm reads 1 and 2"),
        (b"calcvmMD\1\0\0\0" + b"\xff" * 12 + bytes(40), "its header says"),
    ],
)
def test_foreign_files_and_other_versions_are_refused(files, data, message):
    (files.folder / "models" / "m.model").write_bytes(data)
    with pytest.raises(ProgramError, match=f"m.model: .*{message}.*[Cc]opy it again"):
        files.get("m")


def test_facts_are_checked_also_where_the_checksum_fits(files):
    """A file made by hand."""
    files.put("list", {}, image(0))
    versions.write(files.folder / "models" / "list.model", b"[1]", image(0), False)
    with pytest.raises(ProgramError, match=r"list\.model.*not a model"):
        files.get("list")


def former(path: Path, facts: bytes, kept: memoryview) -> None:
    """A file of format 1."""
    whole = versions.FORMER.pack(versions.MAGIC, 1, len(facts), kept.nbytes) + facts + kept
    path.write_bytes(whole + hashlib.sha256(whole).digest())


def test_files_of_format_1_are_read_and_written_anew(files):
    models = files.folder / "models"
    former(models / "m.model", b'{"n": 2}', image(2, 300))
    former(models / "m.previous", b'{"n": 1}', image(1))
    assert files.get("m") == ({"n": 2}, image(2, 300)) and files.get("m", previous=True) == ({"n": 1}, image(1))
    damaged = bytearray((models / "m.model").read_bytes())
    damaged[-40] ^= 1
    (models / "d.model").write_bytes(damaged)
    (models / "d.previous").write_bytes((models / "m.previous").read_bytes())
    with pytest.raises(ProgramError, match=r"d\.model: altered.*d\.previous is the version before it: rename that"):
        files.get("d")
    files.put("m", {"n": 3}, image(3, 20))
    files.put("d", {"n": 3}, image(3, 20))
    assert files.get("m", previous=True) == ({"n": 2}, image(2, 300)) and sorted(content(files.folder)) == [
        "models/d.model",
        "models/m.model",
    ]
    assert files.get("d")[0] == files.get("m")[0] == {"n": 3}


def test_damaged_and_exchanged_programs_are_refused(tmp_path, program):
    store = FileStore(tmp_path)
    other = mlp((3, 2), optim.SGD(0.1), batch=2)
    store.put_program(program)
    store.close()
    path = tmp_path / "programs" / f"{program.hash}.calc"
    good = path.read_bytes()
    path.write_bytes(good[:-100])
    store = FileStore(tmp_path)
    with pytest.raises(ProgramError, match=f"{program.hash}.calc"):
        store.get_program(program.hash)
    other.save(path)
    with pytest.raises(ProgramError, match=f"{program.hash}.calc.*another program"):
        store.get_program(program.hash)
    other.save(tmp_path / "outside.calc")
    for digest in ("../outside", "", program.hash.upper()):
        with pytest.raises(ProgramError, match="no such program"):
            store.get_program(digest)
    store.close()


# ---------------------------------------------------------------- one process at a time
def test_a_second_opener_is_refused(tmp_path):
    store = FileStore(tmp_path)
    with pytest.raises(CalcError, match="is open in this process"):
        FileStore(tmp_path)
    opener = "try: FileStore(sys.argv[1]).close()\nexcept CalcError as error: print(error)"
    assert f"is open in process {os.getpid()}: close it there" in child(opener, tmp_path).stdout
    store.put("m", {}, image(0))  # the refused ones did no harm
    store.close()
    store.close()
    done = child(opener, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    FileStore(tmp_path).close()


def test_a_forgotten_store_is_open_no_longer(tmp_path):
    store = FileStore(tmp_path)
    del store
    FileStore(tmp_path).close()


def test_a_closed_store_refuses(files):
    files.put("m", {}, image(0))
    files.close()
    uses = (
        lambda: files.put("m", {}, image(0)),
        lambda: files.get("m"),
        lambda: files.names(),
        lambda: files.remove("m"),
        lambda: files.restore("m"),
        lambda: "m" in files,
        lambda: files.get_program("0" * 64),
    )
    for use in uses:
        with pytest.raises(CalcError, match="closed"):
            use()


def test_a_forked_child_has_no_part_in_the_store(tmp_path):
    code = """
store = FileStore(sys.argv[1])
ready, done = os.pipe(), os.pipe()
if not os.fork():
    os.close(done[1])
    try:
        store.put("m", {}, memoryview(b"x"))
        os.write(ready[1], b"not refused")
    except CalcError as error:
        os.write(ready[1], str(error).encode())
    os.read(done[0], 1)
    os._exit(0)
print(os.read(ready[0], 1000).decode())
store.put("m", {}, memoryview(b"x"))
store.close()
FileStore(sys.argv[1]).close()  # though the child lives
os.write(done[1], b"x")
os.wait()
"""
    done = child(code, tmp_path)
    assert done.returncode == 0 and "store is closed" in done.stdout, done


# ---------------------------------------------------------------- full and read-only disks
def refuse(number: int):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    "call, number, remedy",
    [
        ("open", errno.ENOSPC, "make room on the disk"),
        ("open", errno.EROFS, "make the disk writable"),
        ("open", errno.EACCES, "change its permissions"),
        ("os.fsync", errno.ENOSPC, "make room on the disk"),
        ("os.fsync", errno.EIO, "see to the disk"),
        ("os.replace", errno.ENOSPC, "make room on the disk"),
    ],
)
def test_a_disk_that_refuses_a_new_file_loses_nothing(files, program, monkeypatch, call, number, remedy):
    files.put("m", {"version": 0}, image(0))
    before = content(files.folder)
    with monkeypatch.context() as patch:
        patch.setattr(f"calcvm.files.{call}", refuse(number), raising=False)
        for name, n in (("new", 100), ("m", 5000)):  # the second has no room in its file
            with pytest.raises(
                CalcError, match=rf"{name}\.model: cannot be written \({os.strerror(number)}\): {remedy}"
            ):
                files.put(name, {"version": 3}, image(3, n))
        with pytest.raises(CalcError, match=rf"{program.hash}\.calc: cannot be written"):
            files.put_program(program)
    assert content(files.folder) == before
    files.put("m", {"version": 4}, image(4, 5000))
    files.put_program(program)
    assert files.get("m")[0] == {"version": 4} and files.get("m", previous=True)[0] == {"version": 0}


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("at", range(6))
def test_a_disk_that_refuses_a_version_loses_no_other(files, monkeypatch, at, number):
    """At each of the writes of a version and each wait for the disk."""
    for version in range(3):
        files.put("m", {"version": version}, image(version))
    calls = iter(range(6))

    def failing(real):
        def call(*args):
            if next(calls) == at:
                raise OSError(number, os.strerror(number))
            return real(*args)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(versions, "_write", failing(versions._write))
        patch.setattr(versions, "SYNC", failing(versions.SYNC))
        with pytest.raises(CalcError, match=r"m\.model: cannot be written") if at < 5 else nullcontext():
            files.put("m", {"version": 3}, image(3))
    assert at < 5 or next(calls, None) is not None  # five calls are all
    found = files.get("m")
    assert found in [({"version": v}, image(v)) for v in ((2,), (2, 3))[at >= 4]]
    files.put("m", {"version": 4}, image(4))
    assert files.get("m")[0] == {"version": 4} and files.get("m", previous=True) == found


def test_a_file_that_cannot_grow_loses_nothing(tmp_path):
    """A real limit on the size of files, which cuts the write short."""
    code = """
import resource
store = FileStore(sys.argv[1])
store.put("m", {"version": 0}, memoryview(bytes(1000)))
for size, version in ((5000, 1), (50_000, 2), (1_000_000, 3)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, resource.RLIM_INFINITY))
    try:
        store.put("m", {"version": version}, memoryview(bytes(size)))
    except CalcError as error:
        print(error)
"""
    done = child(code, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all("m.model: cannot be written (File too large): raise the limit" in k for k in lines)
    assert sorted(content(tmp_path)) == ["models/m.model"]
    store = FileStore(tmp_path)
    facts, back = store.get("m")
    assert facts == {"version": 0} and back.nbytes == 1000
    store.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_folder_without_permission_is_refused(tmp_path):
    store = FileStore(tmp_path)
    store.put("m", {"version": 0}, image(0))
    (tmp_path / "models").chmod(0o555)
    try:
        for use in (lambda: store.put("m", {}, image(1)), lambda: store.remove("m")):
            with pytest.raises(CalcError, match=r"m\.model: cannot be (written|removed) \(Permission denied\)"):
                use()
        assert store.get("m")[0] == {"version": 0}
        store.close()
    finally:
        (tmp_path / "models").chmod(0o755)


def test_what_cannot_be_a_store_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CalcError, match="file: cannot be opened as a store"):
        FileStore(tmp_path / "file")
    monkeypatch.setattr("calcvm.vm.memory.store.FileIO", refuse(errno.EROFS))
    with pytest.raises(CalcError, match=r"new: cannot be opened as a store \(Read-only file system\)"):
        FileStore(tmp_path / "new")


def test_a_file_that_cannot_be_read_is_named(files):
    (files.folder / "models" / "m.model").mkdir()
    with pytest.raises(CalcError, match=r"m\.model: cannot be read \(Is a directory\)"):
        files.get("m")


# ---------------------------------------------------------------- killed processes
CREATED = {"files.open": 0, "files.os.fsync": 0, "files.os.replace": 0, "files.os.fsync 2": 3}
WRITTEN = {
    "versions._write": 2,
    "versions._write 2": 2,
    "versions._write 3": 2,
    "versions.SYNC 1": 2,
    "versions.SYNC 2": 3,
}


@pytest.mark.parametrize("point, version", [*CREATED.items(), *WRITTEN.items(), ("never", 3)])
def test_a_process_killed_at_any_point_leaves_whole_versions(tmp_path, point, version):
    code = """
import signal
from calcvm.vm.memory import versions
from calcvm import files
store = FileStore(sys.argv[1])
place, _, count = sys.argv[2].partition(" ")
written = place.startswith("versions")
for version in range(3 if written else 1):
    store.put("m", {"version": version}, memoryview(bytes([version]) * 3000))
left = int(count or 1)
module, *path = place.split(".")
if module != "never":
    where = globals()[module]
    for step in path[:-1]:
        where = getattr(where, step)
    real = getattr(where, path[-1], open)
    def killer(*args, **kwargs):
        global left
        left -= 1
        if not left:
            if real is open:
                open(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    setattr(where, path[-1], killer)
store.put("m", {"version": 3}, memoryview(bytes([3]) * (3000 if written else 9000)))
"""
    done = child(code, tmp_path, point)
    assert done.returncode == (0 if point == "never" else -signal.SIGKILL), done.stderr
    left = [name for name in content(tmp_path) if name.endswith(".tmp")]
    assert bool(left) == (point in CREATED and version == 0)
    store = FileStore(tmp_path)
    assert sorted(content(tmp_path)) == ["models/m.model"]
    facts, back = store.get("m")
    assert facts == {"version": version} and back == bytes([version]) * back.nbytes
    store.put("m", {"version": 4}, memoryview(bytes(3000)))
    assert store.get("m", previous=True)[0] == {"version": version}
    store.close()
    assert sorted(content(tmp_path)) == ["models/m.model"]


# ---------------------------------------------------------------- readers beside a writer
def test_readers_find_whole_versions_while_one_writes(tmp_path):
    """Bytes of a version are all alike, and its facts say which; sizes change, so that files are made anew too."""
    code = """
import numpy as np
store = FileStore(sys.argv[1], read_only=True)
print("ready", flush=True)
seen, n = 0, 0
while seen < 400:
    for previous in (False, True):
        try:
            facts, back = store.get("m", previous=previous)
        except CalcError as error:
            assert previous and "no previous version" in str(error), error
            continue
        assert (np.frombuffer(back, np.uint8) == facts["version"] % 251).all(), facts
        assert facts["version"] >= seen - 1, (facts, seen)
        seen, n = max(seen, facts["version"]), n + 1
print(n)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    imports = "import sys\nfrom calcvm.errors import CalcError\nfrom calcvm.vm.memory.store import FileStore\n"
    with FileStoreOf(tmp_path) as store:
        store.put("m", {"version": 0}, memoryview(bytes(20_000)))
        readers = [
            subprocess.Popen([sys.executable, "-c", imports + code, tmp_path], env=environment, stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        for reader in readers:
            assert reader.stdout.readline() == b"ready\n"
        version = 0
        while any(reader.poll() is None for reader in readers):
            version += 1
            size = 20_000 if version % 50 else 20_000 + version
            store.put("m", {"version": version}, memoryview(bytes([version % 251]) * size))
    counts = [int(reader.communicate()[0]) for reader in readers]
    assert all(reader.returncode == 0 for reader in readers) and min(counts) >= 10


@contextmanager
def FileStoreOf(folder):
    store = FileStore(folder, durable=False)
    yield store
    store.close()


def test_a_reader_changes_nothing(tmp_path, program):
    with pytest.raises(CalcError, match="there is no store here"):
        FileStore(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()
    writer = FileStore(tmp_path)
    writer.put("m", {"n": 1}, image(1))
    reader, other = FileStore(tmp_path, read_only=True), FileStore(tmp_path, read_only=True)
    uses = (
        lambda: reader.put("m", {}, image(0)),
        lambda: reader.remove("m"),
        lambda: reader.restore("m"),
        lambda: reader.put_program(program),
    )
    for use in uses:
        with pytest.raises(CalcError, match="opened with read_only=True"):
            use()
    writer.put_program(program)
    reader.put_program(program)  # it is there
    assert reader.get_program(program.hash) == program
    writer.put("m", {"n": 2}, image(2))
    assert reader.get("m") == other.get("m") == ({"n": 2}, image(2)) and reader.names() == ["m"]
    writer.close()
    assert reader.get("m")[0] == {"n": 2}
    reader.close()
    assert other.get("m")[0] == {"n": 2}


def test_a_model_of_a_reader_learns_in_memory_and_leaves_no_trace(tmp_path):
    program = cv.compile(cv.build_graph(cv.nn.Linear(2), (2,), "mse", cv.SGD(0.1)), batch_size=4, workers=1)
    with cv.CalcHeap("1 MiB", store=FileStore(tmp_path)) as heap:
        heap.create(program, seed=1, name="m")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    heap = cv.CalcHeap("1 MiB", store=FileStore(tmp_path, read_only=True))
    model = heap.open("m")
    for view in model.parameters.values():
        view[...] += 1
    model.commit()
    heap.flush()
    assert not np.array_equal(model.image(), FileStore(tmp_path, read_only=True).get("m")[1])
    heap.close()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("room", ["one", "all"])
def test_a_model_of_a_reader_stays_in_its_version_until_it_is_closed(tmp_path, used, room):
    """Image, settings and notes belong together, whatever a writer does meanwhile and whoever takes its place in the heap."""
    program = cv.compile(
        cv.build_graph(cv.nn.Linear(2), (2,), "mse", cv.SGD(0.1)), batch_size=4, workers=1, accumulate=True
    )
    X, Y = np.ones((4, 2), "float32"), np.ones((4, 2), "float32")

    def told(model):
        return model.epochs_done, model.notes["of"], model.steps_done, model.image().tobytes()

    def train(*models):
        for model in models:
            model.fit(X, Y, epochs=2, progress=False)
            model.notes["of"] = model.epochs_done
            model.commit()

    with cv.CalcHeap("1 MiB", store=FileStore(tmp_path)) as heap:
        written = {name: heap.create(program, name=name) for name in "ab"}
        train(*written.values())
        size = program.heap_bytes if room == "one" else "1 MiB"
        with cv.CalcHeap(size, store=FileStore(tmp_path, read_only=True)) as reader:
            for epochs in (2, 4):
                first, second = (reader.open(name) for name in "ab")
                as_opened = told(written["a"])
                if used:
                    assert told(first) == as_opened
                train(*written.values())
                assert told(first) == as_opened and as_opened[:3] == (epochs, epochs, epochs)
                second.predict(X)
                assert told(first) == as_opened
                first.fit(X, Y, progress=False)  # in memory, and kept there
                learned = told(first)
                second.step(X, Y)
                assert told(first) == learned and learned[0] == epochs + 1
                first.close()
                second.close()
        assert written["a"].epochs_done == 6


def test_a_model_of_a_reader_whose_name_was_given_to_another_program_stays_what_it_was(tmp_path):
    shape = {"input_shape": (2,), "loss": "mse", "optimizer": "adam", "batch_size": 4, "seed": 1}
    X = np.random.default_rng(0).standard_normal((4, 2)).astype("float32")
    with cv.CalcHeap("1 MiB", store=FileStore(tmp_path)) as heap:
        old = cv.Model(cv.nn.Linear(2) >> cv.nn.Tanh(), heap=heap, name="m", **shape)
        heap.flush()
        before = old.predict(X)
        with cv.CalcHeap("1 MiB", store=FileStore(tmp_path, read_only=True)) as reader:
            first, second = (reader.open("m") for _ in range(2))
            old.close()
            heap.store.remove("m")
            new = cv.Model(cv.nn.Linear(2) >> cv.nn.ReLU(), heap=heap, name="m", **shape)
            new.fit(X, X, progress=False)
            heap.flush()
            assert np.array_equal(first.predict(X), before) and np.array_equal(second.predict(X), before)
            first.close()
            assert np.array_equal(reader.open("m").predict(X), new.predict(X))


# ---------------------------------------------------------------- how often a training writes
@pytest.mark.parametrize("checkpoint, written", [(1, 7), (2, 4), (3, 3), (7, 1), (100, 1), ("end", 1)])
@pytest.mark.parametrize("how", ["fit", "fleet", "advance"])
def test_a_training_writes_every_n_epochs_and_at_its_end(tmp_path, monkeypatch, how, checkpoint, written):
    x = np.random.default_rng(0).standard_normal((20, 2)).astype("f4")
    graph = cv.build_graph(cv.nn.Linear(2), (2,), "softmax_cross_entropy", cv.SGD(0.1))
    program = cv.compile(graph, batch_size=5)
    store, versions_written = FileStore(tmp_path, durable=False), []
    fleet = cv.Fleet("64 KiB", store=store)
    handle = fleet.add(program, data=(x, np.zeros(20, "i8")), name="m")
    put = FileStore.put

    def counted(self, name, facts, image):
        versions_written.append(facts["epochs"])
        put(self, name, facts, image)

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "put", counted)
        if how == "fit":
            handle.model.fit(x, np.zeros(20, "i8"), epochs=7, progress=False, checkpoint=checkpoint)
        else:
            getattr(fleet, "fit" if how == "fleet" else how)(
                7, checkpoint=checkpoint, **({"progress": False} if how == "fleet" else {})
            )
    step = 7 if checkpoint == "end" else min(checkpoint, 7)
    assert versions_written == sorted({*range(step, 8, step), 7}) and len(versions_written) == written
    facts, kept = store.get("m")
    assert facts["epochs"] == 7 and handle.model.image().tobytes().startswith(bytes(kept))
    for wrong in (0, -1, "never", 1.5, None, True):
        with pytest.raises(CalcError, match="checkpoint"):
            handle.model.fit(x, np.zeros(20, "i8"), epochs=1, progress=False, checkpoint=wrong)
    fleet.heap.close()


# ---------------------------------------------------------------- samples of `make kill`
def test_models_outlive_killed_processes():
    counts = store_faults.kills(5, seed=1, verbose=False)
    assert store_faults.harmless(counts), counts
    assert counts["kills"] == 5 and counts["opened"] >= 20 and counts["rounds"] >= 20, counts


def test_damaged_files_are_refused_by_name():
    counts = store_faults.flips(100, seed=1, verbose=False)
    assert store_faults.harmless(counts), counts
    assert counts["refused"] >= 30 and counts["refused"] + counts["unharmed"] == counts["damaged"] == 100
