"""Stores: what was put comes back, or is refused by name; nothing is lost when writing fails or the process dies."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from calcvm import optim
from calcvm.errors import CalcError, ProgramError
from calcvm.vm.memory.store import FORMAT_VERSION, HEADER, MAGIC, FileStore, MemoryStore
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
    assert sorted(content(files.folder)) == ["models/m.model", "models/m.previous"]
    files.remove("m")
    assert content(files.folder) == {}


def test_many_names_cost_no_memory(tmp_path):
    store, kept = FileStore(tmp_path, durable=False), image(0, 1000)
    store.put("warm", {}, kept)
    tracemalloc.start()
    for i in range(500):
        store.put(f"model-{i}", {"rounds": i}, kept)
        store.get(f"model-{i}", kept)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    store.close()
    assert held < 50_000


@pytest.mark.parametrize("name", ["x" * 201, "模" * 30, "", 5, b"a"])
def test_names_that_no_file_can_have_are_refused(files, name):
    for use in (lambda: name in files, lambda: files.put(name, {}, image(0)), lambda: files.get(name)):
        with pytest.raises(CalcError, match="a shorter one|a text that is not empty"):
            use()
    assert content(files.folder) == {}


def test_facts_that_are_not_json_are_refused(files):
    files.put("m", {"a": 1}, image(0))
    before = content(files.folder)
    for facts in ({"a": np.int64(1)}, {"a": {1}}, {(1, 2): 1}):
        with pytest.raises(CalcError, match="'m'.*JSON"):
            files.put("m", facts, image(1))
    assert content(files.folder) == before


# ---------------------------------------------------------------- damaged files
def test_every_flipped_bit_and_every_cut_is_refused_by_name(tmp_path):
    store = FileStore(tmp_path, durable=False)
    store.put("m", {"n": 1}, image(0, 5))
    store.put("m", {"n": 2}, image(1, 16))
    path = tmp_path / "models" / "m.model"
    good = path.read_bytes()
    flipped = [good[:i] + bytes([good[i] ^ 1 << bit]) + good[i + 1 :] for i in range(len(good)) for bit in range(8)]
    cut = [good[:n] for n in range(len(good))] + [good + b"\0", good + good]
    for damaged in flipped + cut:
        path.write_bytes(damaged)
        with pytest.raises(ProgramError) as error:
            store.get("m")
        assert str(path) in str(error.value) and "m.previous is the version before it" in str(error.value)
    assert store.get("m", previous=True)[0] == {"n": 1}
    (tmp_path / "models" / "m.previous").rename(path)  # what the error says
    assert store.get("m")[1] == image(0, 5)
    store.close()


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "truncated to 0 bytes"),
        (b"PK\3\4" + bytes(100), "not a model that calcvm wrote"),
        (b"calcvmMD" + (2).to_bytes(4, "little") + bytes(100), "format 2, this calcvm reads 1"),
        (b"calcvmMD\1\0\0\0" + b"\xff" * 12 + bytes(40), "its header says"),
    ],
)
def test_foreign_files_and_other_versions_are_refused(files, data, message):
    (files.folder / "models" / "m.model").write_bytes(data)
    with pytest.raises(ProgramError, match=f"m.model: .*{message}.*[Cc]opy it anew"):
        files.get("m")


def test_facts_are_checked_also_where_the_checksum_fits(files):
    """A file made by hand."""
    files.put("list", {}, image(0))
    path = files.folder / "models" / "list.model"
    header = HEADER.pack(MAGIC, FORMAT_VERSION, 3, 0) + b"[1]"
    path.write_bytes(header + hashlib.sha256(header).digest())
    with pytest.raises(ProgramError, match=r"list\.model.*not a model"):
        files.get("list")


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


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(
    "call, number, remedy",
    [
        ("open", errno.ENOSPC, "make room on the disk"),
        ("open", errno.EROFS, "make the disk writable"),
        ("open", errno.EACCES, "change its permissions"),
        ("os.fsync", errno.ENOSPC, "make room on the disk"),
        ("os.fsync", errno.EIO, "see to the disk"),
        ("os.link", errno.ENOSPC, "make room on the disk"),
        ("os.replace", errno.ENOSPC, "make room on the disk"),
    ],
)
def test_a_disk_that_refuses_loses_nothing(files, program, monkeypatch, existing, call, number, remedy):
    if existing:
        for version in range(3):
            files.put("m", {"version": version}, image(version))
    before = content(files.folder)
    with monkeypatch.context() as patch:
        patch.setattr(f"calcvm.files.{call}", refuse(number), raising=False)
        if existing or call != "os.link":
            with pytest.raises(CalcError, match=rf"m\.model: cannot be written \({os.strerror(number)}\): {remedy}"):
                files.put("m", {"version": 3}, image(3))
        if call != "os.link":
            with pytest.raises(CalcError, match=rf"{program.hash}\.calc: cannot be written"):
                files.put_program(program)
    assert content(files.folder) == before
    files.put("m", {"version": 4}, image(4))
    files.put_program(program)
    assert files.get("m")[0] == {"version": 4}


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
    assert list(content(tmp_path)) == ["models/m.model"]
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
POINTS = ["open", "os.fsync", "os.link", "os.replace", "os.replace 2", "os.fsync 2", "never"]


@pytest.mark.parametrize("point", POINTS)
def test_a_process_killed_at_any_point_leaves_whole_versions(tmp_path, point):
    code = """
import signal
from calcvm import files as writing
store = FileStore(sys.argv[1])
for version in range(3):
    store.put("m", {"version": version}, memoryview(bytes([version]) * 3000))
call, _, count = sys.argv[2].partition(" ")
left = int(count or 1)
place, name = (os, call[3:]) if call.startswith("os.") else (writing, call)
real = getattr(place, name, open)
def killer(*args, **kwargs):
    global left
    left -= 1
    result = real(*args, **kwargs) if call == "open" else None
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)
if call != "never":
    setattr(place, name, killer)
store.put("m", {"version": 3}, memoryview(bytes([3]) * 3000))
"""
    done = child(code, tmp_path, point)
    assert done.returncode == (0 if point == "never" else -signal.SIGKILL), done.stderr
    left = [name for name in content(tmp_path) if name.endswith(".tmp")]
    assert bool(left) == (point not in ("os.fsync 2", "never"))
    store = FileStore(tmp_path)
    assert sorted(content(tmp_path)) == ["models/m.model", "models/m.previous"]
    for previous in (False, True):
        facts, back = store.get("m", previous=previous)
        versions = ((2,), (3,))[point in ("os.fsync 2", "never")]
        if previous:
            versions = (1, 2) if versions == (2,) else (2,)
        assert facts["version"] in versions
        assert back == bytes([facts["version"]]) * 3000
    store.put("m", {"version": 4}, memoryview(bytes(3000)))
    store.close()
    assert sorted(content(tmp_path)) == ["models/m.model", "models/m.previous"]


# ---------------------------------------------------------------- samples of `make kill`
def test_models_outlive_killed_processes():
    counts = store_faults.kills(5, seed=1, verbose=False)
    assert store_faults.harmless(counts), counts
    assert counts["kills"] == 5 and counts["opened"] >= 20 and counts["rounds"] >= 20, counts


def test_damaged_files_are_refused_by_name():
    counts = store_faults.flips(100, seed=1, verbose=False)
    assert store_faults.harmless(counts), counts
    assert counts["refused"] == counts["damaged"] == 100
