"""Compiled code as object files: the cache, and a loader that needs llvmlite alone.

A function is compiled once, by Numba, to an object file with one symbol; from then on a process links the
file and never imports Numba.  On 2 cores of a Zen 5 server the first training step of a process comes
after 0.25 s instead of 0.75 s, and takes 60 MB less memory, than with Numba's own cache.

A file is named after its symbol, in a folder named after a hash of all kernel sources, the versions and
the processor: Numba does not notice changes in imported files, this does.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path

import llvmlite.binding as llvm

MAGIC = b"calcvm object 1\n"
SOURCES = Path(__file__).parent
JITTED = tuple(SOURCES.parent / "vm" / f"{name}.py" for name in ("atomics", "job", "loop", "samples"))

Build = Callable[[str], tuple[bytes, tuple[str, ...]]]  # symbol -> object file, symbols that it calls

_LOCK = threading.RLock()
_addresses: dict[str, int] = {}


def symbol_of(name: str, dtype: str, device: str = "cpu") -> str:
    return f"calcvm_{name}_{dtype}_{device}"


def address(symbol: str, build: Build) -> int:
    """Address of a function, linked from the cache or built, with all that it calls, at first use."""
    with _LOCK:
        if symbol not in _addresses:
            code, needs = _read(symbol) or _write(symbol, *build(symbol))
            for need in needs:
                address(need, build)
            _addresses[symbol] = _link(symbol, code)
        return _addresses[symbol]


# ---------------------------------------------------------------- the processor
def cpu_name() -> str:
    """The processor that code is compiled for (``NUMBA_CPU_NAME`` overrides the host's)."""
    return os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()


def cpu_features() -> str:
    """Its features as LLVM spells them (``NUMBA_CPU_FEATURES`` overrides the host's)."""
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if features is not None:
        return features
    return "" if os.environ.get("NUMBA_CPU_NAME") else llvm.get_host_cpu_features().flatten()


# ---------------------------------------------------------------- linking
@cache
def _engine() -> llvm.ExecutionEngine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def _link(symbol: str, code: bytes) -> int:
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    found = engine.get_function_address(symbol)
    llvm.add_symbol(symbol, found)
    return found


# ---------------------------------------------------------------- the cache
def cache_root() -> Path:
    """Where compiled code is kept: ``CALCVM_CACHE_DIR``, else the user's cache folder."""
    root = os.environ.get("CALCVM_CACHE_DIR")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "calcvm"


def source_key() -> str:
    """What compiled code depends on, as a hash."""
    digest = hashlib.sha256()
    for path in (*sorted(SOURCES.glob("*.py")), *JITTED):
        digest.update(path.read_bytes())
    packages = [version(name) for name in ("numba", "llvmlite", "numpy")]
    digest.update(repr((platform.python_version(), packages, cpu_name(), cpu_features())).encode())
    return digest.hexdigest()[:20]


@cache
def folder() -> Path:
    """This version's folder; a temporary one where the user's cannot be written."""
    path = cache_root() / source_key()
    try:
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="calcvm-cache-"))


def _read(symbol: str) -> tuple[bytes, tuple[str, ...]] | None:
    """A function's object file and needs; None if it is not there whole."""
    try:
        data = (folder() / f"{symbol}.o").read_bytes()
    except OSError:
        return None
    magic, digest, body = data[: len(MAGIC)], data[len(MAGIC) : len(MAGIC) + 32], data[len(MAGIC) + 32 :]
    if magic != MAGIC or hashlib.sha256(body).digest() != digest:
        return None
    needs, _, code = body.partition(b"\n")
    return code, tuple(json.loads(needs))


def _write(symbol: str, code: bytes, needs: tuple[str, ...]) -> tuple[bytes, tuple[str, ...]]:
    body = json.dumps(needs).encode() + b"\n" + code
    path = folder() / f"{symbol}.o"
    temporary = path.with_suffix(f".{os.getpid()}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(MAGIC + hashlib.sha256(body).digest() + body)
        os.replace(temporary, path)  # whole or not at all, also where processes race
    except OSError:  # a full disk: this process has what it needs
        temporary.unlink(missing_ok=True)
    return code, needs
