"""Altered files: damaged ones, and those of an attacker who makes all checksums right again.

What is altered are files of programs and of models, and models and programs in a `FileStore`.  Each file is read, and
what is accepted is run, in a forked child under limits of memory and time; a child that dies names the file's number.
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import os
import resource
import signal
import struct
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import calcvm as cv
from calcvm import nn
from calcvm.vm.memory import versions
from calcvm.vm.program.program import Program, load_program
from tests.fuzz_programs import tamper
from tests.kinds.archives import DEEP, dumped, npy, parts, sealed

CHUNK = 400  # files a child
HANG_SECONDS = 30
LARGEST_HEAP = 1 << 22  # bytes; what is accepted for a larger one is loaded and not run
SPARE_BYTES = 1 << 30  # of address space, beyond what the child has when it begins
LOADING_BYTES, LOADING_FACTOR = (
    24 << 20,
    12,
)  # resident memory that reading a file may take: so much, and times its size
N_SAMPLES = 11
NASTY = [DEEP, -1, 0, 1, 2, 3, 7, 16, 255, 2**31 - 1, 2**31, 2**32, 2**40, 2**47, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63),
         10**30, 10**400, 0.5, -0.0, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), True, False, None, "", "x", "0",
         "learn", "input", "\0", "\ud800", "../x", [], [[]], {}, [1, 0], [[1, 0]], {"a": 1}, [None]]  # fmt: skip

CELLS = [value for value in NASTY if isinstance(value, (int, float)) and abs(value) < 10**300 or value != value]


# ---------------------------------------------------------------- whole files
@dataclass(frozen=True)
class Base:
    """A whole file.  ``kind``: program, model, stored (a model in a store) or kept (a program in a store)."""

    kind: str
    data: bytes
    program: Program
    store: dict[str, bytes] = field(default_factory=dict)  # the store's files, of which this is the one called ``name``
    name: str = ""


def _models() -> list[cv.Model]:
    deep = nn.Linear(8) >> nn.Tanh() >> nn.Dropout(0.2) >> nn.Linear(3)
    return [
        cv.Model(nn.Linear(3), input_shape=(4,), optimizer=cv.SGD(0.1), batch_size=8, workers=1),
        cv.Model(deep, input_shape=(6,), optimizer=cv.Adam(0.01, clip_norm=1.0), batch_size=8, workers=2, learning_batch=20),
        cv.Model(nn.Flatten() >> deep, input_shape=(2, 3), loss="mse", optimizer=cv.Adagrad(0.1), batch_size=4, workers=1,
                 dtype="float64", preprocess=nn.Scale(0.5)),
        cv.Model(nn.Linear(5, regularizer=cv.L2(1e-3)) >> nn.ReLU() >> nn.Linear(2), input_shape=(3,), workers=2,
                 loss="binary_cross_entropy", optimizer=cv.SGD(0.1, momentum=0.9, schedule=cv.Cosine(9)), batch_size=5),
    ]  # fmt: skip


def bases() -> list[Base]:
    """Files of every kind, of models that were trained for an epoch."""
    out = []
    for model in _models():
        x, y = samples(model.program, np.random.default_rng(0))
        model.fit(x, y, progress=False)
        file = io.BytesIO()
        model.save(file)
        out.append(Base("model", file.getvalue(), model.program))
        file = io.BytesIO()
        model.program.save(file)
        out.append(Base("program", file.getvalue(), model.program))
        with tempfile.TemporaryDirectory() as folder:
            heap = cv.CalcHeap(model.program.heap_bytes, store=cv.FileStore(folder, durable=False))
            model.copy("m", heap)
            heap.close()
            store = {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}
        for kind, folder in (("stored", "models"), ("kept", "programs")):
            (name,) = (name for name in store if name.startswith(folder))
            out.append(Base(kind, store[name], model.program, store, name))
    return out


def samples(program: Program, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Data that fit a program's input and target, if those can be had."""
    arrays = []
    for name in ("input", "target"):
        facts = program.info["variables"][name]
        sizes = [min(int(b), 64) if a == 0 else N_SAMPLES for a, b in facts["shape"]]
        high = facts["classes"] or 2
        arrays.append(rng.integers(0, min(high, 100), sizes) if name == "target" else rng.standard_normal(sizes))
    return arrays[0], arrays[1]


# ---------------------------------------------------------------- damage
def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Bytes flipped, lost, added, moved."""
    out = bytearray(data)
    for _ in range(rng.integers(1, 3)):
        at, to = sorted(int(k) for k in rng.integers(0, len(out) + 1, 2))
        if rng.random() < 0.4:  # where the structure is: the ends
            at = int(rng.choice([min(at, 40), max(len(out) - 1 - at % 700, 0)]))
            to = min(at + int(rng.integers(1, 40)), len(out))
        kind = rng.integers(9)
        if kind < 3 and out:
            out[min(at, len(out) - 1)] ^= 1 << int(rng.integers(8))
        elif kind == 3:
            del out[at:]
        elif kind == 4:
            del out[at:to]
        elif kind == 5:
            out[at:at] = out[at:to]
        elif kind == 6:
            out[at:at] = rng.bytes(int(rng.integers(1, 100)))
        elif kind == 7:
            out[at : at + 4] = struct.pack("<I", int(rng.choice([0, 1, 2**31, 2**32 - 1, len(out)])))
        else:
            out[at:to] = bytes(to - at)
    return bytes(out)


# ---------------------------------------------------------------- attacks
def forged(base: Base, rng: np.random.Generator) -> bytes:
    """A file with altered content and right checksums."""
    if base.kind == "stored":
        return _forged_image(base.data, rng)
    documents, arrays = parts(base.data)
    if rng.random() < 0.25:
        altered_documents, altered_arrays = tamper_rows(base.program, rng)
        documents, arrays = {**documents, **altered_documents}, {**arrays, **altered_arrays}
    else:
        for _ in range(rng.integers(1, 3)):
            if rng.random() < 0.7:
                name = str(rng.choice(list(documents)))
                documents[name] = mutated(documents[name], rng)
            elif arrays:
                alter_arrays(arrays, rng)
    members = [("document", name, dumped(value)) for name, value in documents.items()]
    members += [
        ("array", name, content if isinstance(content, bytes) else npy(content)) for name, content in arrays.items()
    ]
    choice = rng.random()
    if choice < 0.1:  # one content for another
        i, j = rng.integers(len(members), size=2)
        members[i] = (*members[i][:2], members[j][2])
    elif choice < 0.15:
        members.pop(int(rng.integers(len(members))))
    elif choice < 0.2:
        members.insert(0, members[rng.integers(len(members))])
    elif choice < 0.25:
        i = int(rng.integers(len(members)))
        members[i] = (*members[i][:2], damaged(members[i][2], rng))
    data = sealed(members, base.data, _alter_manifest(rng) if rng.random() < 0.15 else None)
    return _altered_zip(data, rng) if rng.random() < 0.1 else data


def tamper_rows(program: Program, rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Words, rows, patches, symbols and sizes altered, with the program's facts as they were."""
    altered = replace(tamper(program, rng), info=program.info)
    documents, arrays = altered.to_parts()
    return documents, dict(arrays)


def mutated(document: Any, rng: np.random.Generator) -> Any:
    """A document with one thing altered, somewhere in it."""
    return _mutated(document, _leaves(document), rng)


def _leaves(document: Any) -> list[Any]:
    """The numbers, texts and truth values of a document."""
    if isinstance(document, (dict, list)):
        items = document.values() if isinstance(document, dict) else document
        return [leaf for item in items for leaf in _leaves(item)] + list(document if isinstance(document, dict) else [])
    return [document]


def _mutated(document: Any, leaves: list[Any], rng: np.random.Generator) -> Any:
    if isinstance(document, (dict, list)) and document and rng.random() < 0.95:
        keys = list(document) if isinstance(document, dict) else range(len(document))
        key = keys[int(rng.integers(len(keys)))]
        out = dict(document) if isinstance(document, dict) else list(document)
        choice = rng.random()
        if choice < 0.9:
            out[key] = _mutated(document[key], leaves, rng)
        elif choice < 0.93:
            del out[key]
        elif choice < 0.97:
            other = keys[int(rng.integers(len(keys)))]
            out[key], out[other] = document[other], document[key]
        elif isinstance(out, list):
            out.insert(key, document[int(rng.integers(len(document)))])
        else:
            out[str(rng.choice(["x", "", "learn", "input", "target", "symbol", "\ud800"]))] = document[key]
        return out
    choice = rng.random()
    if isinstance(document, (int, float)) and not isinstance(document, bool) and choice < 0.3:
        return document + int(rng.choice([-16, -2, -1, 1, 2, 16, 2**20]))
    if choice < 0.6:  # another of its type, which says something else
        alike = [leaf for leaf in leaves if type(leaf) is type(document)]
        return alike[int(rng.integers(len(alike)))] if alike else document
    return NASTY[int(rng.integers(len(NASTY)))]


def alter_arrays(arrays: dict[str, Any], rng: np.random.Generator) -> None:
    name = str(rng.choice(list(arrays)))
    array = arrays[name]
    if isinstance(array, bytes):
        return
    choice = rng.integers(9)
    if choice == 0:
        del arrays[name]
    elif choice == 1:
        with np.errstate(all="ignore"):
            kinds = ["<f4", "<f8", "<i4", "<i8", "|u1", "|b1", ">i8", ">f4", "<f2", "longdouble"]
            arrays[name] = array.astype(str(rng.choice(kinds)))
    elif choice == 2:
        arrays[name] = array.reshape(-1)[: int(rng.integers(array.size + 1))]
    elif choice == 3:
        arrays[name] = np.concatenate([array.reshape(-1)] * 2)
    elif choice == 4:
        arrays[str(rng.choice(["", "x", "state/x", "program/constants/x", *arrays]))] = arrays.pop(name)
    elif choice == 5:
        arrays[name] = arrays[str(rng.choice(list(arrays)))]
    elif choice == 6 and array.size:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            array = arrays[name] = array.copy()
            value = CELLS[int(rng.integers(len(CELLS)))]
            array.flat[int(rng.integers(array.size))] = np.float64(value) if array.dtype.kind == "f" else wrapped(value)
    elif choice == 7:
        arrays[name] = array.reshape((1,) * int(rng.integers(1, 40)) + array.shape) if array.ndim < 20 else array
    else:
        header = npy(array)
        shape = str(tuple(int(n) for n in rng.choice([0, 1, 3, -1, 2**31, 2**62, 10**30, 2**63 - 1], 3)))
        text = header[10:].split(b"\n", 1)
        arrays[name] = header[:10] + text[0].replace(str(array.shape).encode(), shape.encode())[: len(text[0])].ljust(
            len(text[0])
        ) + b"\n" + text[1]  # fmt: skip


def wrapped(value: Any) -> int:
    return (int(value) + 2**31) % 2**32 - 2**31 if isinstance(value, int) else 0


def _alter_manifest(rng: np.random.Generator) -> Callable[[dict[str, Any]], None]:
    def alter(manifest: dict[str, Any]) -> None:
        altered = mutated(manifest, rng)
        while not isinstance(altered, dict):
            altered = mutated(manifest, rng)
        manifest.clear()
        manifest.update(altered)

    return alter


def _altered_zip(data: bytes, rng: np.random.Generator) -> bytes:
    """Fields of the zip format altered, the manifest and its checksum as they were."""
    out = bytearray(data)
    central = data.index(b"PK\1\2")
    entries = [i for i in range(central, len(data) - 4) if data[i : i + 4] == b"PK\1\2"]
    end = data.rindex(b"PK\5\6")
    at = int(rng.choice([*[e + int(rng.integers(4, 46)) for e in entries], *[end + int(rng.integers(4, 22))] * 4]))
    size = int(rng.choice([1, 2, 4]))
    value = int(rng.choice([0, 1, 8, 12, 2**15, 2**16 - 1, 2**31, 2**32 - 1, len(data)])) % 256**size
    out[at : at + size] = value.to_bytes(size, "little")
    return bytes(out)


def _forged_image(data: bytes, rng: np.random.Generator) -> bytes:
    """A model's file in a store."""
    heads = versions.Heads.of(data)
    last = heads.versions[0]
    facts = data[last.start : last.start + last.n_facts]
    image = data[last.start + last.n_facts :][: last.n_image]
    if rng.random() < 0.8:
        facts = dumped(mutated(json.loads(facts), rng))
    if rng.random() < 0.2:
        image = damaged(image, rng)
    if rng.random() < 0.3:  # numbers of all kinds where the parameters are
        cells = np.frombuffer(image[: len(image) // 8 * 8], np.float64).copy()
        if len(cells):
            cells[rng.integers(len(cells), size=3)] = rng.choice([np.nan, np.inf, -1.0, 1e308, 2.0**62], 3)
        image = cells.tobytes() + image[len(cells) * 8 :]
    out = io.BytesIO(data)
    body = facts + image
    n = [len(facts), len(image), last.number, max(last.room, len(body))]
    if rng.random() < 0.15:
        n = [int(k) for k in rng.choice([*n, 0, 1, 2**31, 2**32 - 1], 4)]
    digest = hashlib.sha256(body).digest()
    forged = versions.Version(last.place, n[2], min(n[0], 2**32 - 1), n[1], n[3], digest)
    out.seek(last.place * versions.PLACE)
    out.write(forged.header())
    out.seek(last.start)
    out.write(body)
    if rng.random() < 0.1:  # format 1
        head = versions.FORMER.pack(versions.MAGIC, int(rng.choice([1, 1, 1, 0, 3])), n[0] % 2**32, n[1])
        return head + body + hashlib.sha256(head + body).digest()
    return out.getvalue()


# ---------------------------------------------------------------- reading and running
def attempt(base: Base, data: bytes, whole: bool, folder: Path, rng: np.random.Generator) -> str:
    """Read a file and run what is accepted: "refused", "accepted", "run" or what is wrong.

    whole : the file was not forged, so that what is accepted must be what was written.
    """
    reset_peak()
    before = peak_bytes()
    try:
        try:
            loaded = _read(base, data, folder)
        finally:
            took = peak_bytes() - before
        if took > LOADING_BYTES + LOADING_FACTOR * len(data):
            return f"reading {len(data)} bytes took {took} bytes"
    except (cv.ProgramError, cv.PlanError):
        return "refused"
    except cv.CalcError as error:
        return f"refused by a {type(error).__name__}: {error}"
    try:
        if isinstance(loaded, Program):
            if whole and loaded != base.program:
                return "damage was accepted: another program"
            loaded.disassemble()
            if loaded.heap_bytes > LARGEST_HEAP or loaded.batch_size > 4096:
                return "accepted"
            loaded = cv.CalcHeap(loaded.heap_bytes).create(loaded, seed=1)
        elif whole and _saved(loaded) != _saved(_read(base, base.data, folder)):
            return "damage was accepted: another model"
        if loaded.program.heap_bytes > LARGEST_HEAP or loaded.program.batch_size > 4096:
            return "accepted"
        return _run(loaded, rng)
    except cv.CalcError:
        return "accepted"
    finally:
        if base.store and not isinstance(loaded, Program):
            loaded.heap.close()


def _read(base: Base, data: bytes, folder: Path) -> Any:
    """A program, or a resident model."""
    if base.kind == "program":
        return load_program(io.BytesIO(data))
    if base.kind == "model":
        return cv.load(io.BytesIO(data))
    for name, content in base.store.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(data if name == base.name else content)
    store = cv.FileStore(folder, durable=False)
    try:
        return cv.CalcHeap(base.program.heap_bytes, store=store).open("m")
    except BaseException:
        store.close()
        raise


def _saved(resident: cv.Model) -> bytes:
    file = io.BytesIO()
    resident.save(file)
    resident.heap.close()
    return file.getvalue()


def _run(resident: cv.Model, rng: np.random.Generator) -> str:
    resident.record.workers = min(resident.record.workers, 2)
    model = resident
    x, y = samples(resident.program, rng)
    uses = (
        lambda: model.predict(x),
        lambda: model.fit(x, y, epochs=2, progress=False),
        lambda: model.evaluate(x, y),
        lambda: model.step(x[: model.batch_size], y[: model.batch_size]),
        lambda: [model[name] for name in model.program.info["variables"]],
        lambda: [model.grad(name) for name in model.parameters],
        lambda: dict(model.hyper),
        lambda: model.save(io.BytesIO()),
        lambda: resident.copy(heap=cv.CalcHeap(resident.program.heap_bytes)),
        lambda: resident.reset(2),
        lambda: cv.Fleet(resident.program.heap_bytes, workers=1).add(resident.program, data=(x, y)),
        lambda: resident.commit(),
    )
    done = 0
    for use in uses:
        try:
            use()
            done += 1
        except cv.CalcError:
            pass
    return "run" if done else "accepted"


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most resident memory since `reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    raise OSError("no VmHWM")


# ---------------------------------------------------------------- many files
def case(number: int, seed: int, files: list[Base]) -> tuple[Base, bytes, bool, np.random.Generator]:
    """The altered file of a number: its base, its bytes, whether it was merely damaged."""
    rng = np.random.default_rng([seed, number])
    base = files[int(rng.integers(len(files)))]
    forge = bool(number % 2)
    data = forged(base, rng) if forge else damaged(base.data, rng)
    return base, data, not forge, rng


def child(start: int, stop: int, seed: int, files: list[Base], progress: np.ndarray, out: int) -> None:
    """Files [start, stop), in a process that may die."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    counts: Counter[str] = Counter()
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(start, stop):
            progress[0] = number
            signal.alarm(HANG_SECONDS)
            base, data, whole, rng = case(number, seed, files)
            if whole and data == base.data:
                counts["unaltered"] += 1
                continue
            try:
                found = attempt(base, data, whole, Path(folder), rng)
            except BaseException as error:  # whatever it is, it is the finding
                last = traceback.extract_tb(error.__traceback__)[-1]
                found = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
            if found not in ("refused", "accepted", "run"):
                counts["wrong"] += 1
                os.write(out, f"file {number} of seed {seed} ({base.kind}): {found[:300]}\n".encode(errors="replace"))
            else:
                counts[f"{base.kind} {found}"] += 1
    progress[0] = stop
    os.write(out, (json.dumps(counts) + "\n").encode())


def campaign(count: int, seed: int = 0, start: int = 0) -> tuple[Counter[str], list[str]]:
    """Read ``count`` altered files; what became of them, and what is wrong."""
    files, counts, wrong = bases(), Counter[str](), []
    began, number = time.monotonic(), start
    shared = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)
    while number < start + count:
        stop = min(number + CHUNK, start + count)
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.close(read)
                child(number, stop, seed, files, shared, write)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(write)
        with open(read, "rb") as lines:
            for line in lines.read().decode(errors="replace").splitlines():
                if line.startswith("{"):
                    counts.update(json.loads(line))
                else:
                    wrong.append(line)
        _, status = os.waitpid(pid, 0)
        if status:
            what = (
                "hangs" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM else f"ends with {status}"
            )
            wrong.append(f"file {int(shared[0])} of seed {seed}: the process {what}")
            counts["died"] += 1
        number = stop if not status else int(shared[0]) + 1
    counts["files"], counts["seconds"] = count, int(time.monotonic() - began)
    return counts, wrong
