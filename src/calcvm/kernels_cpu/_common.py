"""What every CPU kernel stands on: the kernel decorator, pointers, dtype-generic constants, the cache.

This is the one module that holds jit flags.  A kernel is written with its row's words as named
parameters, after the worker's number and the team's size:

    @kernel
    def sigmoid_fwd(w, nw, rows, cols, x: Ptr, y: Ptr): ...

and compiled as ``void(heap*, row*, int64, int64)`` for float32 or float64 heaps: an unannotated
parameter is an integer word, ``Float`` a float64 stored as its bits, ``Ptr`` the operand's own pointer
(``heap + offset``; two offsets into one array do not vectorise, two pointers do).  ``h`` and ``r``, the
heap and the row, are visible in the body.  Names and order must equal the operator table's; a test
compares them.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# ---------------------------------------------------------------- flags and types
FAST = {"contract", "nsz", "arcp"}  # NaN and Inf stay IEEE
REASSOC = FAST | {"reassoc"}  # reductions only: the order is fixed when the kernel is compiled
PREFIX = 2  # words before a row's own: opcode, flags
FLAG_SYNC = 1  # flags: a team barrier after this row
FLAG_PC_SHIFT = 8  # flags above this bit: the row's own index, for traps
TRAP_CODE, TRAP_PC = 0, 1  # heap elements that a trap writes (the heap's first block is reserved)

DTYPES = {"float32": types.float32, "float64": types.float64}
PI64 = types.CPointer(types.int64)
I1, I8, I32, I64 = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64)


class Ptr:
    """Annotation: the word is an element offset; the kernel sees a pointer to it."""


class Float:
    """Annotation: the word holds the bits of a float64."""


def kernel_signature(dtype: str) -> Any:
    """The one kernel signature: heap, row, worker, n_workers."""
    return types.void(types.CPointer(DTYPES[dtype]), PI64, types.int64, types.int64)


def njit(fn: Callable | None = None, *, fastmath: set[str] = FAST, inline: bool = False) -> Any:
    """A helper that kernels call: compiled into each kernel that uses it."""
    options: dict[str, Any] = {"fastmath": fastmath, "error_model": "numpy", "inline": "always" if inline else "never"}
    return numba.njit(**options) if fn is None else numba.njit(**options)(fn)


# ---------------------------------------------------------------- intrinsics
@intrinsic
def at(tc, base, off):
    """Pointer ``off`` elements past ``base``."""
    return base(base, types.int64), lambda ctx, b, sig, args: b.gep(args[0], [args[1]])


def _element(t: Any) -> Any:
    return t.dtype if isinstance(t, types.CPointer) else t


@intrinsic
def like(tc, x, c):
    """The number ``c`` in the dtype of ``x`` (a float, or a pointer to floats): dtype-generic constants."""
    target = _element(x)

    def codegen(ctx, b, sig, args):
        return ctx.cast(b, args[1], sig.args[1], target)

    return target(x, types.unliteral(c)), codegen


def _reinterpret(name: str, target: Any) -> Any:
    @intrinsic
    def view(tc, ptr):
        def codegen(ctx, b, sig, args):
            return b.bitcast(args[0], ctx.get_value_type(types.CPointer(target)))

        return types.CPointer(target)(ptr), codegen

    view.__name__ = name
    return view


as_f64 = _reinterpret("as_f64", types.float64)  # hyperparameters and counters are float64 in any heap
as_i64 = _reinterpret("as_i64", types.int64)


@intrinsic
def f64_of_bits(tc, word):
    """The float64 whose bits an integer word holds."""
    return types.float64(types.int64), lambda ctx, b, sig, args: b.bitcast(args[0], ir.DoubleType())


@intrinsic
def bits_of(tc, x):
    """The bits of a float as an integer of its width."""
    target = types.int32 if x == types.float32 else types.int64
    return target(x), lambda ctx, b, sig, args: b.bitcast(args[0], ctx.get_value_type(target))


@intrinsic
def from_bits(tc, i):
    """The float whose bits an int32 or int64 holds."""
    target = types.float32 if i == types.int32 else types.float64
    return target(i), lambda ctx, b, sig, args: b.bitcast(args[0], ctx.get_value_type(target))


def _llvm_float(name: str, arity: int) -> Any:
    """A dtype-generic LLVM intrinsic on floats, such as ``llvm.rint``."""

    def codegen(ctx, b, sig, args):
        t = ctx.get_value_type(sig.return_type)
        suffix = "f32" if sig.return_type == types.float32 else "f64"
        fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(t, [t] * arity), f"llvm.{name}.{suffix}")
        return b.call(fn, list(args))

    if arity == 1:

        @intrinsic
        def unary(tc, x):
            return x(x), codegen

        return unary
    if arity == 2:

        @intrinsic
        def binary(tc, x, y):
            return x(x, x), codegen

        return binary

    @intrinsic
    def ternary(tc, x, y, z):
        return x(x, x, x), codegen

    return ternary


rint = _llvm_float("rint", 1)
floor = _llvm_float("floor", 1)
fabs = _llvm_float("fabs", 1)
sqrt = _llvm_float("sqrt", 1)
fmin = _llvm_float("minnum", 2)  # ignores one NaN: for clamping only
fmax = _llvm_float("maxnum", 2)
minimum = _llvm_float("minimum", 2)  # propagates NaN
maximum = _llvm_float("maximum", 2)
copysign = _llvm_float("copysign", 2)
fma = _llvm_float("fma", 3)


@intrinsic
def to_int(tc, x):
    """Truncation to the integer of the float's width (the caller has bounded x)."""
    target = types.int32 if x == types.float32 else types.int64
    return target(x), lambda ctx, b, sig, args: b.fptosi(args[0], ctx.get_value_type(target))


@njit(inline=True)
def share(n, w, nw):
    """Half-open range of ``n`` units that worker ``w`` of ``nw`` owns."""
    if nw == 1:
        return 0, n
    return n * w // nw, n * (w + 1) // nw


@njit(inline=True)
def trap(h, r, code):
    """Record that row ``r`` met what it cannot compute; the VM turns it into an error after the call."""
    h[TRAP_CODE] = like(h, code)
    h[TRAP_PC] = like(h, r[1] >> FLAG_PC_SHIFT)


# ---------------------------------------------------------------- registry, compilation, cache
class Kernel:
    """One row kernel: its parameters, and its native address for each dtype once compiled."""

    def __init__(self, fn: Callable, needs: tuple[str, ...]):
        self.name = fn.__name__
        self.needs = needs
        parameters = list(inspect.signature(fn, eval_str=False).parameters.values())[2:]
        self.words = tuple((p.name, _kind(p.annotation)) for p in parameters)
        self.source = fn
        self._compiled: dict[tuple[str, str], Any] = {}

    def address(self, dtype: str, device: str = "cpu") -> int:
        """Address of the C-callable kernel for heaps of ``dtype``, compiled or loaded from the cache at first use."""
        return self._native(dtype, device).address

    def body(self, dtype: str, device: str = "cpu") -> int:
        """Address of the same code in Numba's calling convention, without the C wrapper: what the VM calls."""
        return _inner_address(self._native(dtype, device))

    def _native(self, dtype: str, device: str) -> Any:
        key = dtype, device if self.needs else "cpu"
        with _LOCK:
            if key not in self._compiled:
                with on_device(key[1]):
                    for name in self.needs:
                        ROUTINES[_substitute(name)].address(dtype)
                    self._compiled[key] = compile_native(_bind(self), kernel_signature(dtype))
            return self._compiled[key]


class Routine:
    """A native function that kernels call by symbol, so that its code is compiled once, not per kernel."""

    def __init__(self, fn: Callable, signature: str):
        self.name, self.fn, self.kinds = fn.__name__, fn, signature
        self._compiled: dict[str, Any] = {}

    def address(self, dtype: str) -> int:
        with _LOCK:
            if dtype not in self._compiled:
                compiled = compile_native(self.fn, types.void(*_types(self.kinds, dtype)))
                llvm.add_symbol(_symbol(self.name, dtype), _inner_address(compiled))
                self._compiled[dtype] = compiled
            return self._compiled[dtype].address


KERNELS: dict[str, Kernel] = {}
ROUTINES: dict[str, Routine] = {}
_LOCK = threading.RLock()


def kernel(fn: Callable | None = None, *, needs: tuple[str, ...] = ()) -> Any:
    """Register a row kernel; ``needs`` names the routines it calls."""

    def register(fn: Callable) -> Callable:
        KERNELS[fn.__name__] = Kernel(fn, needs)
        return fn

    return register if fn is None else register(fn)


def kernel_from(text: str, scope: dict[str, Any]) -> None:
    """Register the kernel that ``text`` spells, in the module globals ``scope``: for kernels alike but for a formula."""
    exec(compile(text, scope["__file__"], "exec"), scope)
    definition = ast.parse(text).body[0]
    assert isinstance(definition, ast.FunctionDef)
    fn = scope[definition.name]
    fn.text = text
    kernel(fn)


def routine(signature: str) -> Any:
    """Register a native routine; returns what kernels call.

    ``signature`` has a letter an argument: ``p`` a pointer to heap elements, ``i`` an int64.  A kernel
    that calls it must name it in ``needs``.
    """

    def register(fn: Callable) -> Any:
        ROUTINES[fn.__name__] = Routine(fn, signature)
        names = ", ".join(f"a{i}" for i in range(len(signature)))
        scope: dict[str, Any] = {"name": fn.__name__, "kinds": signature, "call": _call_symbol}
        exec(f"def {fn.__name__}(tc, {names}): return call(name, kinds, ({names},))", scope)
        return intrinsic(scope[fn.__name__])

    return register


def _call_symbol(name: str, kinds: str, args: tuple) -> Any:
    dtype = next(str(a.dtype) for a, kind in zip(args, kinds) if kind == "p")
    signature = types.void(*_types(kinds, dtype))

    def codegen(ctx, b, sig, values):
        ft = ctx.call_conv.get_function_type(sig.return_type, sig.args)
        f = cgutils.get_or_insert_function(b.module, ft, _symbol(_substitute(name), dtype))
        ctx.call_conv.call_function(b, f, sig.return_type, sig.args, values)
        return ctx.get_dummy_value()

    return signature, codegen


def _inner_address(compiled: Any) -> int:
    """Address of a C-callable's body, in Numba's calling convention.

    The wrapper would copy the arguments on the stack once more, by vectors, which must wait for the caller's
    narrower stores: 5 ns a call (1x3x16 on Zen 5), as much as a tiny product itself.
    """
    name = compiled._wrapper_name.removeprefix("cfunc.")
    return compiled._library.get_pointer_to_function(name)


# A device may replace routines by its own of the same arguments: {device: {routine: routine}}.
DEVICES: dict[str, dict[str, str]] = {"cpu": {}}
_device = "cpu"


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """Compile with the routines of a device; compiled code of different devices is cached apart."""
    global _device
    saved, _device = _device, device
    try:
        yield
    finally:
        _device = saved


def _substitute(name: str) -> str:
    return DEVICES[_device].get(name, name)


def _symbol(name: str, dtype: str) -> str:
    return f"calcvm_{name}_{dtype}"


def _types(kinds: str, dtype: str) -> list:
    return [types.CPointer(DTYPES[dtype]) if k == "p" else types.int64 for k in kinds]


def _kind(annotation: Any) -> str:
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return {"Ptr": "ptr", "Float": "float"}.get(name, "int")


_UNPACK = {"int": "{n} = r[{k}]", "float": "{n} = f64_of_bits(r[{k}])", "ptr": "{n} = at(h, r[{k}])"}


def _bind(k: Kernel) -> Callable:
    """The kernel as a function of (h, r, w, nw): its parameters become reads of the row's words."""
    fn = k.source
    tree = ast.parse(getattr(fn, "text", None) or textwrap.dedent(inspect.getsource(fn)))
    node = tree.body[0]
    assert isinstance(node, ast.FunctionDef)
    lines = [_UNPACK[kind].format(n=name, k=i + PREFIX) for i, (name, kind) in enumerate(k.words)]
    node.decorator_list = []
    node.args = ast.parse("def f(h, r, w, nw): pass").body[0].args  # type: ignore[attr-defined]
    node.body = [*ast.parse("\n".join(lines)).body, *node.body]
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, fn.__code__.co_firstlineno - 1)
    scope: dict[str, Any] = {}
    names = fn.__globals__
    names.update(at=at, f64_of_bits=f64_of_bits)
    exec(compile(tree, fn.__code__.co_filename, "exec"), names, scope)
    return scope[fn.__name__]


def compile_native(fn: Callable, signature: Any) -> Any:
    """Compile ``fn`` to a C-callable function of ``signature``, through the cache."""
    with cache_directory():
        return numba.cfunc(signature, cache=True, fastmath=FAST, error_model="numpy")(fn)


def cache_root() -> Path:
    """Where compiled code is kept: ``CALCVM_CACHE_DIR``, else the user's cache folder."""
    root = os.environ.get("CALCVM_CACHE_DIR")
    if root:
        return Path(root)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "calcvm"


def _source_key() -> str:
    """Numba's cache does not notice changes in imported files: key the folder by all kernel sources."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*here.glob("*.py"), *(here.parent / "vm" / name for name in ("atomics.py", "loop.py"))]):
        digest.update(path.read_bytes())
    versions = (sys.version, numba.__version__, llvmlite.__version__, np.__version__)
    digest.update(repr((versions, cpu_name(), cpu_features())).encode())
    return digest.hexdigest()[:20]


def cpu_name() -> str:
    """The processor that Numba compiles for (``NUMBA_CPU_NAME`` overrides the host's)."""
    return numba.config.CPU_NAME or llvm.get_host_cpu_name()


def cpu_features() -> str:
    """Its features as LLVM spells them (``NUMBA_CPU_FEATURES`` overrides the host's)."""
    if numba.config.CPU_FEATURES is not None:
        return numba.config.CPU_FEATURES
    return "" if numba.config.CPU_NAME else llvm.get_host_cpu_features().flatten()


_cache_dir: str | None = None


@contextmanager
def cache_directory() -> Iterator[None]:
    """Point Numba's cache at our folder while one of our functions is compiled or loaded."""
    global _cache_dir
    if _cache_dir is None:
        path = cache_root() / _source_key()
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.W_OK):
                raise PermissionError(path)
        except OSError:  # read-only home: compile anew in each process
            path = Path(tempfile.mkdtemp(prefix="calcvm-cache-"))
        _cache_dir = str(path)
    with _LOCK:
        folder = _cache_dir if _device == "cpu" else os.path.join(_cache_dir, _device)
        saved, numba.config.CACHE_DIR = numba.config.CACHE_DIR, folder
        try:
            yield
        finally:
            numba.config.CACHE_DIR = saved
