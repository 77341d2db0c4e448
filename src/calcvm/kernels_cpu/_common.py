"""What every CPU kernel stands on: the kernel decorator, pointers, dtype-generic constants, compilation.

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
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.compiler import Flags, compile_extra
from numba.core.compiler_lock import global_compiler_lock
from numba.core.cpu import FastMathOptions
from numba.core.errors import NumbaError
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from calcvm.errors import CalcError
from calcvm.kernels_cpu import _native

# ---------------------------------------------------------------- flags and types
FAST = {"contract", "nsz", "arcp"}  # NaN and Inf stay IEEE
REASSOC = FAST | {"reassoc"}  # reductions only: the order is fixed when the kernel is compiled
PREFIX = 2  # words before a row's own: opcode, flags
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


# ---------------------------------------------------------------- registry
_OWN = count(1)  # functions from elsewhere, each definition another


class Native:
    """A function that is compiled for each dtype (and device) to an object file of one symbol."""

    def __init__(self, fn: Callable, needs: tuple[str, ...] = ()):
        self.name, self.fn, self.needs = fn.__name__, fn, needs
        file = Path(fn.__code__.co_filename)
        self.sources = _native.modules_of(file.stem)
        self.mark = ""
        if file.parent != _native.SOURCES:  # from elsewhere: nobody knows all that it is made of, so it is not kept
            self.sources = tuple(sorted(f"kernels_cpu.{path.stem}" for path in _native.SOURCES.glob("*.py")))
            self.mark = f".{next(_OWN)}"

    def address(self, dtype: str, device: str = "cpu") -> int:
        """Address for heaps of ``dtype``, compiled or linked from the cache at first use."""
        return _native.address(self.symbol(dtype, device), build, self.modules(device), kept=not self.mark)

    def symbol(self, dtype: str, device: str = "cpu") -> str:
        return _native.symbol_of(self.name, dtype, device) + self.mark

    def modules(self, device: str = "cpu") -> _native.Modules:
        """Those that compiled code comes from."""
        return self.sources + _native.of_device(device)

    def compile(self, dtype: str, device: str) -> _native.Compiled:
        with on_device(device):
            routines = [ROUTINES[_substitute(n)] for n in self.needs]
            try:
                code = compile_object(self.bound(), self.signature(dtype), self.symbol(dtype, device))
            except NumbaError as error:
                raise CalcError(f"kernel {self.name!r} cannot be compiled for {dtype}: {error}") from error
            return _native.Compiled(self.modules(device), code, {r.symbol(dtype): r.modules() for r in routines})

    def bound(self) -> Callable:
        return self.fn

    def signature(self, dtype: str) -> Any:
        raise NotImplementedError


class Kernel(Native):
    """One row kernel: ``words`` are its parameters, named and typed, in the order of the row's words."""

    def __init__(self, fn: Callable, needs: tuple[str, ...]):
        super().__init__(fn, needs)
        parameters = list(inspect.signature(fn, eval_str=False).parameters.values())[2:]
        self.words = tuple((p.name, _kind(p.annotation)) for p in parameters)

    def bound(self) -> Callable:
        return _bind(self)

    def signature(self, dtype: str) -> Any:
        return kernel_signature(dtype)


class Routine(Native):
    """A native function that kernels call by symbol, so that its code is compiled once, not per kernel."""

    def __init__(self, fn: Callable, kinds: str):
        super().__init__(fn)
        self.kinds = kinds

    def signature(self, dtype: str) -> Any:
        return types.void(*_types(self.kinds, dtype))


def build(symbol: str, places: tuple[_native.Modules, ...]) -> _native.Compiled:
    """A kernel or routine, by its symbol, from the first of the places that has it."""
    name, dtype, device = symbol.removeprefix("calcvm_").rsplit("_", 2)
    for source, *_ in places:
        if name in ROUTINES or name in KERNELS:
            break
        import_module(f"calcvm.{source}")
    return (ROUTINES.get(name) or KERNELS[name]).compile(dtype, device.partition(".")[0])


KERNELS: dict[str, Kernel] = {}
ROUTINES: dict[str, Routine] = {}


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
        symbol = ROUTINES[_substitute(name)].symbol(dtype)
        ft = ir.FunctionType(ir.VoidType(), [v.type for v in values])
        b.call(cgutils.get_or_insert_function(b.module, ft, symbol), list(values))
        return ctx.get_dummy_value()

    return signature, codegen


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


def _types(kinds: str, dtype: str) -> list:
    return [types.CPointer(DTYPES[dtype]) if k == "p" else types.int64 for k in kinds]


def _kind(annotation: Any) -> str:
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return {"Ptr": "ptr", "Float": "float"}.get(name, "int")


_UNPACK = {"int": "{n} = r[{k}]", "float": "{n} = f64_of_bits(r[{k}])", "ptr": "{n} = at(h, r[{k}])"}


def _bind(k: Kernel) -> Callable:
    """The kernel as a function of (h, r, w, nw): its parameters become reads of the row's words."""
    fn = k.fn
    try:
        text = getattr(fn, "text", None) or inspect.getsource(fn)
    except OSError:
        raise CalcError(f"kernel {k.name!r}: its source cannot be read: define it in a file or a notebook") from None
    tree = ast.parse(textwrap.dedent(text))
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


# ---------------------------------------------------------------- compilation
def compile_object(fn: Callable, signature: Any, symbol: str, fastmath: set[str] = FAST) -> bytes:
    """Compile ``fn`` to an object file that exports the C function ``symbol`` and nothing else.

    Numba's own body takes two more arguments (result, exception) and is called by its C wrapper; here it is
    inlined into ours: through a wrapper, arguments on the stack are copied by vectors, which must wait for the
    caller's narrower stores (5 ns a call, as much as a product 1x3x16 on Zen 5).
    """
    with global_compiler_lock:
        target = cpu_target
        target.target_context.refresh()
        flags = Flags()
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        flags.error_model, flags.fastmath = "numpy", FastMathOptions(fastmath)
        result = compile_extra(
            target.typing_context, target.target_context, fn, signature.args, signature.return_type, flags, {}
        )
        library, body = result.library, result.fndesc.mangled_name
        for other in dict.fromkeys(library._linking_libraries):
            library._final_module.link_in(other._get_module_for_linking(), preserve=True)
        module = llvm.parse_assembly(str(library._final_module) + _wrapper(signature, body, symbol))
        for value in (*module.functions, *module.global_variables):
            if not value.is_declaration and value.name != symbol:
                value.linkage = "internal"
        module.get_function(body).add_function_attribute("alwaysinline")
        library._final_module = module
        library._optimize_final_module()
        return library._codegen._tm.emit_object(module)


def _wrapper(signature: Any, body: str, symbol: str) -> str:
    """The C function around a body in Numba's calling convention, as LLVM IR."""
    kinds = ["ptr" if isinstance(t, types.CPointer) else "i64" for t in signature.args]
    params = ", ".join(f"{t} %a{i}" for i, t in enumerate(kinds))
    given = "".join(f", {t} %a{i}" for i, t in enumerate(kinds))
    value = "ptr" if signature.return_type == types.void else "i64"
    result = "void" if value == "ptr" else value
    last = "ret void" if value == "ptr" else f"%v = load {value}, ptr %r\n  ret {value} %v"
    return (
        f'\ndefine {result} @"{symbol}"({params}) {{\n  %r = alloca {value}\n  %e = alloca ptr\n'
        f'  %s = call i32 @"{body}"(ptr %r, ptr %e{given})\n  {last}\n}}\n'
    )
