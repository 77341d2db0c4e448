"""The base of every CPU kernel: the kernel decorator, pointers, dtype-generic constants, compilation.

Only this module holds jit flags.  A kernel (see `calcvm.kernel`) is compiled as
``void(heap*, row*, int64, int64, int64)`` for float32 or float64 heaps.  Each operand is a separate pointer: LLVM vectorises
loops over two pointers, but not over two offsets into one array.  The names and order of a kernel's words must equal
the operator table's; a test compares them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from importlib import import_module
from itertools import count
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils, ir_utils
from numba.core.compiler import Flags, compile_extra
from numba.core.compiler_lock import global_compiler_lock
from numba.core.cpu import FastMathOptions
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys
from numba.extending import intrinsic

from calcvm.errors import CalcError
from calcvm.kernel import (  # noqa: F401  (Float and Ptr are for kernels)
    BAD_INDEX,
    FLAG_PC_SHIFT,
    TRAP_CODE,
    TRAP_PC,
    Float,
    Kernels,
    Ptr,
    Words,
    arguments,
    types_of,
    words_of,
)
from calcvm.kernels_cpu import _codegen, _native
from calcvm.kernels_cpu._codegen import Helper, Variant, context_of
from calcvm.kernels_cpu._target import Target, current, host, on_target
from calcvm.without_signals import uncollected


# ---------------------------------------------------------------- flags and types
class FastMath(set[str]):
    """LLVM's flags.  Numba names a function by their text, which is the same in every process; so object files are reproducible."""

    def __repr__(self) -> str:
        return repr(sorted(self))


FAST = FastMath(("contract", "nsz", "arcp"))  # NaN and Inf stay IEEE
REASSOC = FastMath((*FAST, "reassoc"))  # reductions only: their order is fixed at compile time

DTYPES = {"float32": types.float32, "float64": types.float64}
# integers of code, sizes and offsets: as wide as pointers, so 32 bits for a processor of 32 (`calcvm.edge.narrow`)
INT, PINT = types.intp, types.CPointer(types.intp)
I1, I8, I32, I64, WORD = *map(ir.IntType, (1, 8, 32, 64)), ir.IntType(types.intp.bitwidth)


def kernel_signature(dtype: str) -> Any:
    """The one kernel signature: heap, row, worker, n_workers, phase."""
    return types.void(types.CPointer(DTYPES[dtype]), types.CPointer(types.int64), *[INT] * 3)


def njit(fn: Callable | None = None, *, fastmath: set[str] = FAST, inline: bool = False) -> Any:
    """A helper that is compiled into each kernel that calls it."""
    options: dict[str, Any] = {"fastmath": fastmath, "error_model": "numpy", "inline": "always" if inline else "never"}
    return (lambda fn: Helper(fn, options)) if fn is None else Helper(fn, options)


# ---------------------------------------------------------------- intrinsics
@intrinsic
def at(tc, base, off):
    """The pointer ``off`` elements past ``base``."""
    return base(base, INT), lambda ctx, b, sig, args: b.gep(args[0], [args[1]])


def _element(t: Any) -> Any:
    return t.dtype if isinstance(t, types.CPointer) else t


@intrinsic
def like(tc, x, c):
    """The number ``c`` in the dtype of ``x`` (a number or a pointer to numbers), for dtype-generic code."""
    target = _element(x)

    def codegen(ctx, b, sig, args):
        return ctx.cast(b, args[1], sig.args[1], target)

    return target(x, types.unliteral(c)), codegen


@intrinsic
def alike(tc, a, b):
    """Whether two pointers have one type: a constant at compile time."""
    return types.boolean(a, b), lambda ctx, bld, sig, args: ctx.get_constant(types.boolean, a == b)


@intrinsic
def seen_as(tc, pointer, b):
    """A pointer cast to ``b``'s type, for branches where they are `alike`."""
    return b(pointer, b), lambda ctx, bld, sig, args: bld.bitcast(args[0], args[1].type)


def intrinsic_of(n: int, typing: Callable) -> Any:
    """An intrinsic of ``n`` arguments; ``typing`` returns its signature and its code generator from their types."""

    def template(tc: Any, *args: Any) -> Any:
        return typing(*args)

    names = ("tc", *(f"a{i}" for i in range(n)))
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    template.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  (Numba counts them)
    return intrinsic(template)


def _llvm_float(name: str, arity: int) -> Any:
    """A dtype-generic LLVM intrinsic on floats, such as ``llvm.floor``."""

    def codegen(ctx, b, sig, args):
        t = ctx.get_value_type(sig.return_type)
        suffix = "f32" if sig.return_type == types.float32 else "f64"
        fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(t, [t] * arity), f"llvm.{name}.{suffix}")
        return b.call(fn, list(args))

    return intrinsic_of(arity, lambda x, *_: (x(*[x] * arity), codegen))


floor, fabs, sqrt = (_llvm_float(name, 1) for name in ("floor", "fabs", "sqrt"))
minimum, maximum = _llvm_float("minimum", 2), _llvm_float("maximum", 2)  # propagate NaN


@intrinsic
def lanes(tc, x):
    """Elements of a vector of the target, for the dtype of the pointer ``x``: a constant at compile time."""
    return INT(x), lambda ctx, b, sig, args: WORD(current().lanes(x.dtype.bitwidth))


def fact(of: Callable[[Target], Any], type_: Any = INT) -> Any:
    """An intrinsic without arguments that returns a fact about the target: a constant at compile time."""

    @intrinsic
    def constant(tc):
        return type_(), lambda ctx, b, sig, args: ctx.get_constant(type_, of(current()))

    return constant


free_masks = fact(lambda target: target.free_masks, types.boolean)


@intrinsic
def given(tc, me, operand):
    """Whether an operand is given; one left out has the offset -1, in straight code no address."""

    def codegen(ctx, b, sig, args):
        if _codegen.variant.straight:
            return b.icmp_unsigned("!=", args[1], args[1].type(None))
        heap = b.bitcast(b.extract_value(args[0], 0), args[1].type)
        return b.icmp_unsigned("!=", args[1], b.gep(heap, [WORD(-1)]))

    return types.boolean(me, operand), codegen


@njit(inline=True)
def share(me, n):
    """The half-open range of ``n`` units that this worker owns."""
    w, nw = me.worker, me.workers
    if nw == 1:
        return 0, n
    return n * w // nw, n * (w + 1) // nw


@njit(inline=True)
def first(me):
    """Whether this is the worker that writes scalars."""
    return me.worker == 0


@njit(inline=True)
def trap(me, code):
    """Record that the row met something it cannot compute; the VM raises an error after the call."""
    h = me.heap
    h[TRAP_CODE] = like(h, code)
    h[TRAP_PC] = like(h, me.row[1] >> FLAG_PC_SHIFT)


@njit(inline=True)
def index_of(me, value, n):
    """A number of the data as an index; one that is no integer in [0, n) traps, and counts as 0."""
    if value >= 0 and value < n:
        k = int(value)
        if like(value, k) == value:  # compared as `value` is: not as float64, which small processors lack
            return k
    trap(me, BAD_INDEX)
    return 0


# ---------------------------------------------------------------- registry
PACKAGES = (__package__, "calcvm.kernels_shared")  # a shared text counts as the file of its name in this one
_OWN = count(1)  # numbers functions defined elsewhere: each definition is a new one


class Native:
    """A function compiled to one object file with one symbol, for each dtype and device."""

    words: Words | None = None  # a kernel's
    sources: _native.Modules

    def __init__(self, fn: Callable, name: str = "", own: bool = False):
        self.name, self.fn = name or fn.__name__, fn
        package, _, module = str(fn.__globals__.get("__name__")).rpartition(
            "."
        )  # in an archive the name of its file differs
        if own or package not in PACKAGES:  # from elsewhere: its sources are unknown, so it is not cached
            self.sources, self.mark = (), f".{next(_OWN)}"
        else:
            self.sources, self.mark = _native.modules_of(module), ""

    def address(self, dtype: str, device: str = "cpu") -> int:
        """Address for heaps of ``dtype``; at first use it is compiled, or linked from the cache."""
        return _native.address(self.symbol(dtype, device), build, self.modules(device), kept=not self.mark)

    def symbol(self, dtype: str, device: str = "cpu") -> str:
        return _native.symbol_of(self.name, dtype, device) + self.mark

    def modules(self, device: str = "cpu") -> _native.Modules:
        """The modules that its compiled code depends on."""
        return self.sources + _native.of_device(device)

    def compile(self, dtype: str, device: str, target: Target | None = None) -> _native.ObjectCode:
        with on_device(device):
            try:
                code, calls = compile_object(
                    self.fn, self.signature(dtype), self.symbol(dtype, device), words=self.words, target=target
                )
            except Exception as error:  # Numba raises several kinds
                raise CalcError(f"kernel {self.name!r} cannot be compiled for {dtype}: {error}") from error
        routines = {r.symbol(dtype): r.modules() for r in ROUTINES.values()}
        return _native.ObjectCode(
            self.modules(device), code, {call: routines[call] for call in calls if call in routines}
        )

    def signature(self, dtype: str) -> Any:
        raise NotImplementedError


class Kernel(Native):
    """The kernel of a row; ``words`` are its parameters, named and typed, in the order of the row's words."""

    def __init__(self, fn: Callable, name: str = "", words: Words | None = None, own: bool = False):
        super().__init__(fn, name, own)
        self.words = words_of(fn) if words is None else words
        self.instances: dict[str, Kernel] = {}

    def of(self, name: str, words: Words) -> Kernel:
        """An instance with another name and other types of its words."""
        out = copy(self)
        out.name, out.words, out.instances = name, words, {}
        return out

    def signature(self, dtype: str) -> Any:
        return kernel_signature(dtype)


class Routine(Native):
    """A native function that kernels call by symbol: its code is compiled once, not once per kernel."""

    def __init__(self, fn: Callable, kinds: str):
        super().__init__(fn)
        self.kinds = kinds

    def signature(self, dtype: str) -> Any:
        return types.void(*_types(self.kinds, dtype))


def build(symbol: str, places: tuple[_native.Modules, ...], target: Target | None = None) -> _native.ObjectCode:
    """Compile a kernel or routine, by its symbol, from the first of the places that has it."""
    name, dtype, device = symbol.removeprefix("calcvm_").rsplit("_", 2)
    for modules in places:
        if name in ROUTINES or name in KERNELS:
            break
        import_module(f"calcvm.{modules[0]}")
    return (ROUTINES[name] if name in ROUTINES else KERNELS[name]).compile(dtype, device.partition(".")[0], target)


KERNELS = Kernels(Kernel)  # Kernel's ``own`` : it comes from a user's formula
kernel, kernel_as = KERNELS.kernel, KERNELS.kernel_as
ROUTINES: dict[str, Routine] = {}


def routine(signature: str) -> Any:
    """Register a native routine; returns the function that kernels call.

    ``signature`` has one letter per argument: ``p`` a pointer to heap elements, ``t`` one to integers of code, ``i`` such an
    integer, ``d`` a float64.
    """

    def register(fn: Callable) -> Any:
        ROUTINES[fn.__name__] = Routine(fn, signature)
        return intrinsic_of(len(signature), lambda *args: _call_symbol(fn.__name__, signature, args))

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


# A device may replace routines with its own, of the same arguments: {device: {routine: routine}}.
DEVICES: dict[str, dict[str, str]] = {"cpu": {}}


@contextmanager
def on_device(device: str, straight: bool = False) -> Iterator[None]:
    """Compile with a device's routines; the cache keeps the code of different devices apart.  ``straight`` : see `Variant`."""
    for module in _native.of_device(device):  # which registers them
        import_module(f"calcvm.{module}")
    saved, _codegen.variant = _codegen.variant, Variant(device, straight)
    try:
        yield
    finally:
        _codegen.variant = saved


def _substitute(name: str) -> str:
    return DEVICES[_codegen.variant.device].get(name, name)


def _types(kinds: str, dtype: str) -> list:
    of_kind = {"p": types.CPointer(DTYPES[dtype]), "t": PINT, "i": INT, "d": types.float64}
    return [of_kind[kind] for kind in kinds]


# ---------------------------------------------------------------- compilation
def compile_object(
    fn: Callable,
    signature: Any,
    symbol: str,
    fastmath: set[str] = FAST,
    words: Words | None = None,
    target: Target | None = None,
) -> tuple[bytes, list[str]]:
    """Compile ``fn`` to an object file that exports only the C function ``symbol``; also returns the functions that this calls.

    words : of a kernel, which takes ``me`` and them; the C function then has the signature of a row.
    target : the host if omitted.

    Numba's body takes two more arguments (result, exception), and its C wrapper calls it.  Here the body is inlined into our
    function instead.  The wrapper copies stack arguments with vector loads, which wait for the caller's narrower stores
    (5 ns per call, as much as a product 1x3x16 on Zen 5).
    """
    target = target or host()
    with global_compiler_lock, on_target(target):
        library, body = lowered(fn, signature, words, target, fastmath)
        module = library._final_module
        module.link_in(llvm.parse_assembly(entry_of(context_of(target), signature, body, symbol, words)))
        if any(f.is_declaration and f.name.startswith("NRT_") for f in module.functions):  # a user's kernel
            module.link_in(rtsys.library._get_module_for_linking(), preserve=True)
        calls = []
        for value in (*module.functions, *module.global_variables):
            if value.is_declaration:
                calls.append(value.name)
            elif value.name != symbol:
                value.linkage = "internal"
        module.get_function(body).add_function_attribute("alwaysinline")
        library.optimize()
        return library._codegen._tm.emit_object(module), calls


def lowered(
    fn: Callable, signature: Any, words: Words | None, target: Target, fastmath: set[str] = FAST
) -> tuple[Any, str]:
    """Numba's library of a function, with all that it calls in one module that is not optimized, and the name of its body."""
    cpu_target.target_context.refresh()
    # Numba numbers the blocks of inlined functions on and on, doubling at each level: in a long process until LLVM refuses their names
    ir_utils._the_max_label._value = 0
    flags = Flags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model, flags.fastmath = "numpy", FastMathOptions(fastmath)
    taken = list(signature.args if words is None else types_of(words, *signature.args[:2], types))
    if fn.__code__.co_flags & inspect.CO_VARARGS:
        n = fn.__code__.co_argcount
        taken[n:] = [types.StarArgTuple.from_types(taken[n:])]
    returned = signature.return_type if words is None else types.none
    result = uncollected(
        lambda: compile_extra(cpu_target.typing_context, context_of(target), fn, tuple(taken), returned, flags, {})
    )
    library = result.library
    for other in dict.fromkeys(library._linking_libraries):
        library._final_module.link_in(other._get_module_for_linking(), preserve=True)
    return library, result.fndesc.mangled_name


def entry_of(context: Any, signature: Any, body: str, symbol: str, words: Words | None = None) -> str:
    """The C function around a body in Numba's calling convention, as LLVM IR."""
    module = ir.Module()
    void = signature.return_type == types.void
    result = I8.as_pointer() if void else I64
    given = [context.get_value_type(t) for t in signature.args]
    entry = ir.Function(module, ir.FunctionType(ir.VoidType() if void else I64, given), symbol)
    b = ir.IRBuilder(entry.append_basic_block())
    args = [*entry.args, *(arguments(b, words, *entry.args[:2]) if words is not None else ())]
    answer, error = b.alloca(result), b.alloca(I8.as_pointer())
    taken = [answer.type, error.type, *(a.type for a in args)]
    b.call(ir.Function(module, ir.FunctionType(I32, taken), body), [answer, error, *args])
    if void:
        b.ret_void()
    else:
        b.ret(b.load(answer))
    return str(module)
