"""The only module that imports numba-cuda, and the device functions that kernels use.

Each function here has two implementations of one name.  Called from Python it is the *simulation*: a CUDA thread is
then a greenlet (`calcvm.testing.cuda_threads`), and a pointer is a NumPy array.  Compiled by numba-cuda it is a device instruction.
So kernels are plain Python functions that run in both worlds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np

from calcvm.errors import MissingExtra
from calcvm.kernels_cuda._ptx import VERSION
from calcvm.without_signals import uncollected, without_signals

try:
    import numba_cuda  # noqa: F401  (else Numba's own, older CUDA target is used)
    from llvmlite import ir
    from numba import cuda
    from numba.cuda import dispatcher, types
    from numba.cuda.core.callconv import CUDACABICallConv  # noqa: F401  (of functions called by name)
    from numba.cuda.extending import lower_builtin, register_jitable
    from numba.cuda.typing.templates import AbstractTemplate, infer_global
except ImportError as error:
    raise MissingExtra("numba-cuda", "cuda", "the device 'cuda'") from error
try:
    from greenlet import getcurrent as _me  # the simulated thread that is running
except ImportError:  # nothing can be simulated; `calcvm.testing.cuda_threads` raises the error
    pass

I8, I32, I64, VOID = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.VoidType()
DTYPES = {"float32": types.float32, "float64": types.float64}
POINTERS = {name: types.CPointer(t) for name, t in DTYPES.items()}
WORDS = types.CPointer(types.int64)

TOGETHER = ("convergent",)  # calls that all threads of a warp make together; no pass may move them into a branch

# Dynamic shared memory of a block, in bytes: first the VM's own (`shared_words`), then scratch of the current row.
SCRATCH_AT = 2048


KNOWN: WeakSet[Callable] = WeakSet()  # functions known to the compiler: those with two implementations, and helpers


class Native(AbstractTemplate):
    """Types and lowers a function with two implementations, for any number of arguments."""

    codegen: Callable[..., Any]
    made: dict[tuple, Any]
    builds: dict[tuple, Callable[..., Any]]

    def generic(self, args, kws):
        if args not in self.made:
            self.made[args], build = self.codegen(self.context, *args)
            lower_builtin(build, *self.made[args].args)(build)
            self.builds.setdefault(self.made[args].args, build)
        return self.made[args]

    def get_impl_key(self, sig):
        return self.builds[sig.args]


def compiled_by(codegen: Callable[..., Any]) -> Callable[[Callable], Callable]:
    """Decorator of a simulation: the compiler uses the result of ``codegen(typingctx, *types)`` instead."""

    def mark(simulated: Callable) -> Callable:
        native = {"key": simulated, "codegen": staticmethod(codegen), "made": {}, "builds": {}}
        infer_global(simulated, types.Function(type(Native)(simulated.__name__, (Native,), native)))
        KNOWN.add(simulated)
        return simulated

    return mark


def call_of(tc: Any, fn: Any, args: Sequence[Any]) -> tuple[Any, Callable[..., Any]]:
    """For a codegen: the return type of ``fn`` (a function or its type) for these argument types, and a builder of the call."""
    fn = fn if isinstance(fn, types.Type) else tc.resolve_value_type(fn)
    sig = fn.get_call_type(tc, tuple(args), {})
    taken = list(sig.args)
    star = bool(taken) and isinstance(taken[-1], (types.StarArgTuple, types.StarArgUniTuple))
    if star:
        taken[-1:] = sig.args[-1]

    def build(ctx: Any, b: Any, values: Sequence[Any]) -> Any:
        native = ctx.get_function(fn, sig)
        ctx.add_linking_libs(getattr(native, "libs", ()))
        given = [ctx.cast(b, v, of, to) for v, of, to in zip(values, args, taken)]
        if star:
            given[len(sig.args) - 1 :] = [ctx.make_tuple(b, sig.args[-1], given[len(sig.args) - 1 :])]
        return native(b, given)

    return sig.return_type, build


def asm(b: Any, text: str, constraints: str, result: Any = VOID, args: Sequence[Any] = (), **how: Any) -> Any:
    """A line of PTX.  ``effect=False``: unused results may be dropped.  ``attrs=TOGETHER``: all threads of the warp reach it together."""
    line = ir.FunctionType(result, [x.type for x in args])
    return b.call(
        ir.InlineAsm(line, text, constraints, how.get("effect", True)), list(args), attrs=how.get("attrs", ())
    )


def device(fn: Callable | None = None, *, inline: bool = True) -> Any:
    """A helper that kernels call: always inlined, or if not ``inline`` as the compiler decides."""

    def mark(fn: Callable) -> Callable:
        if fn not in KNOWN:
            KNOWN.add(fn)
            (register_jitable(forceinline=True) if inline else register_jitable)(fn)
        return fn

    return mark if fn is None else mark(fn)


# ---------------------------------------------------------------- thread indexes
def special_register(name: str) -> Any:
    """An intrinsic that reads a PTX register."""

    def codegen(tc):
        def build(ctx, b, sig, args):
            return b.zext(asm(b, f"mov.u32 $0, %{name};", "=r", I32, effect=False), I64)

        return types.int64(), build

    return codegen


@compiled_by(special_register("tid.x"))
def thread():
    """The thread's number in its block."""
    return _me().number


@compiled_by(special_register("ntid.x"))
def threads():
    """Threads per block: a power of 4, at least 64 (in the simulator at least 4)."""
    return _me().block.threads


@compiled_by(special_register("ctaid.x"))
def block():
    """The block's number in its grid."""
    return _me().block.number


@compiled_by(special_register("nctaid.x"))
def blocks():
    """Blocks of the grid."""
    return _me().block.blocks


@compiled_by(special_register("laneid"))
def lane():
    """The thread's number in its warp."""
    return _me().number % _me().block.warp


def _warp_size(tc):
    return types.int64(), lambda ctx, b, sig, args: I64(32)


@compiled_by(_warp_size)
def warp_size():
    """Threads per warp (in the simulator fewer than 32)."""
    return _me().block.warp


# ---------------------------------------------------------------- waiting
def ptx_line(text: str, constraints: str = "", result: Any = types.void) -> Any:
    """An intrinsic without arguments that is one line of PTX; synchronizing lines are not moved into branches."""

    def codegen(tc):
        def build(ctx, b, sig, args):
            value = VOID if result is types.void else ctx.get_value_type(result)
            out = asm(b, text, constraints, value, attrs=TOGETHER if "sync" in text else ())
            return ctx.get_dummy_value() if result is types.void else out

        return result(), build

    return codegen


@compiled_by(ptx_line("bar.sync 0;", "~{memory}"))
def sync():
    """Wait for all threads of the block; every thread must call it."""
    _me().sync()


@compiled_by(ptx_line("bar.warp.sync -1;", "~{memory}"))
def sync_warp():
    """Wait for all threads of the warp; then each can read what the others wrote to shared memory."""
    _me().sync_warp()


@compiled_by(ptx_line("fence.acq_rel.gpu;", "~{memory}"))
def fence():
    """Order this thread's memory accesses as seen by all blocks."""


@compiled_by(ptx_line("nanosleep.u32 40;", "~{memory}"))
def pause():
    """Wait for a moment."""
    _me().pause()


@compiled_by(ptx_line("", "~{memory}"))
def loaded():
    """Keep the loads before it there: a division's slow path is a branch, and would delay loads moved behind it."""


@compiled_by(ptx_line("mov.u64 $0, %globaltimer;", "=l", types.int64))
def now():
    """The device's clock, in nanoseconds."""
    return _me().block.now()


# ---------------------------------------------------------------- pointers
def _at(tc, base, off):
    return base(base, types.int64), lambda ctx, b, sig, args: b.gep(args[0], [args[1]])


@compiled_by(_at)
def at(base, off):
    """The pointer ``off`` elements past ``base``; an operand left out may be passed, since its pointer is never followed."""
    return None if base is None else base[off:]


def _in_global(tc, pointer):
    def build(ctx, b, sig, args):
        element = args[0].type.pointee
        address = asm(b, "cvta.to.global.u64 $0, $1;", "=l,l", I64, args, effect=False)
        return b.addrspacecast(b.inttoptr(address, ir.PointerType(element, 1)), args[0].type)

    return pointer(pointer), build


@compiled_by(_in_global)
def in_global(pointer):
    """The pointer, known to point to global memory: accesses through a generic pointer take longer."""
    return pointer


def _reinterpret(target: Any) -> Any:
    def codegen(tc, pointer):
        def build(ctx, b, sig, args):
            return b.bitcast(args[0], ctx.get_value_type(sig.return_type))

        return types.CPointer(target)(pointer), build

    return codegen


def _wide_number(tc, x):
    if not isinstance(x, types.Integer):
        return x(x), lambda ctx, b, sig, args: args[0]
    return types.int64(x), lambda ctx, b, sig, args: ctx.cast(b, args[0], x, types.int64)


@compiled_by(_wide_number)
def wide(x):
    """A float unchanged, an integer as int64."""
    return np.int64(x) if x.dtype.kind in "iu" else x


def _cells(tc, pointer):
    to = types.CPointer(types.uint8) if pointer.dtype == types.boolean else pointer
    return to(pointer), lambda ctx, b, sig, args: b.bitcast(args[0], ctx.get_value_type(to))


@compiled_by(_cells)
def cells(pointer):
    """A pointer to bools as one to bytes; others unchanged."""
    return pointer.view(np.uint8) if pointer.dtype == np.bool_ else pointer


def _alike(tc, a, b):
    return types.boolean(a, b), lambda ctx, bld, sig, args: ctx.get_constant(types.boolean, a == b)


@compiled_by(_alike)
def alike(a, b):
    """Whether two pointers have one type: a constant at compile time."""
    return a.dtype == b.dtype


def _seen_as(tc, pointer, other):
    return other(pointer, other), lambda ctx, b, sig, args: b.bitcast(args[0], args[1].type)


@compiled_by(_seen_as)
def seen_as(pointer, other):
    """A pointer cast to another's type, for branches where they are `alike`."""
    return pointer if pointer.dtype == other.dtype else other


@compiled_by(_reinterpret(types.float64))
def as_f64(pointer):
    """The memory at a pointer as float64."""
    return _wide(pointer, np.float64)


@compiled_by(_reinterpret(types.int64))
def as_i64(pointer):
    """The memory at a pointer as int64."""
    return _wide(pointer, np.int64)


@compiled_by(_reinterpret(types.int32))
def as_i32(pointer):
    """The memory at a pointer as int32."""
    return pointer.view(np.int32)


def _wide(pointer: np.ndarray, dtype: Any) -> np.ndarray:
    size = pointer.itemsize
    return pointer[: pointer.size // (8 // size) * (8 // size)].view(dtype)


def _memory_of(native: Any, simulated: Any) -> Callable:
    """A function from an address to the memory there, as numbers of a type."""

    def codegen(tc, address):
        def build(ctx, b, sig, args):
            return b.inttoptr(args[0], ctx.get_value_type(sig.return_type))

        return types.CPointer(native)(types.int64), build

    @compiled_by(codegen)
    def memory(address):
        return _me().block.memory(address, simulated)

    return memory


f32_at, f64_at = _memory_of(types.float32, np.float32), _memory_of(types.float64, np.float64)
u8_at, i32_at, i64_at = (_memory_of(getattr(types, n), getattr(np, n)) for n in ("uint8", "int32", "int64"))


def _shared(offset: int, target: Any = None) -> Any:
    def codegen(tc, *like):
        element = target or like[0].dtype

        def build(ctx, b, sig, args):
            name = "calcvm_shared"
            memory = b.module.globals.get(name)
            if memory is None:
                memory = ir.GlobalVariable(b.module, ir.ArrayType(I8, 0), name, addrspace=3)
                memory.linkage, memory.align = "external", 16
            at = b.addrspacecast(memory, I8.as_pointer())
            return b.bitcast(b.gep(at, [I64(offset)]), ctx.get_value_type(sig.return_type))

        return types.CPointer(element)(*like), build

    return codegen


def _shared_scratch(tc, like):
    return _shared(SCRATCH_AT)(tc, like)


@compiled_by(_shared_scratch)
def shared(like):
    """The block's shared scratch, with the element type of the pointer ``like``; it is free when a kernel begins."""
    return _me().block.shared[SCRATCH_AT:].view(like.dtype)


def _shared_words(tc):
    return _shared(0, types.int64)(tc)


@compiled_by(_shared_words)
def shared_words():
    """Shared memory reserved for the VM: `SCRATCH_AT` bytes of int64."""
    return _me().block.shared[:SCRATCH_AT].view(np.int64)


def _copy_async(tc, to, of):
    def build(ctx, b, sig, args):
        text = (
            "{ .reg .u64 a; .reg .u32 s; cvta.to.shared.u64 a, $0; cvt.u32.u64 s, a; "
            "cp.async.ca.shared.global [s], [$1], 16; }"
        )
        asm(b, text, "l,l,~{memory}", args=args)
        return ctx.get_dummy_value()

    return types.void(to, of), build


@compiled_by(_copy_async)
def copy_async(to, of):
    """Start copying 16 bytes (two int64, aligned) from global to shared memory; `copy_wait` completes it."""
    to[:2] = of[:2]


@compiled_by(ptx_line("cp.async.wait_all;", "~{memory}"))
def copy_wait():
    """Wait for this thread's copies; other threads see them after a `sync`."""


# ---------------------------------------------------------------- numbers
def _like(tc, x, c):
    target = x.dtype if isinstance(x, types.CPointer) else x
    return target(x, types.unliteral(c)), lambda ctx, b, sig, args: ctx.cast(b, args[1], sig.args[1], target)


@compiled_by(_like)
def like(x, c):
    """The number ``c`` in the dtype of ``x`` (a float or a pointer to floats), for dtype-generic code."""
    return x.dtype.type(c)


def _f64_of_bits(tc, word):
    return types.float64(types.int64), lambda ctx, b, sig, args: b.bitcast(args[0], ir.DoubleType())


@compiled_by(_f64_of_bits)
def f64_of_bits(word):
    """The float64 whose bits an integer word holds."""
    return np.array(word, np.int64).view(np.float64)[()]


# ---------------------------------------------------------------- exchange between threads
def _bit_length(tc, n):
    def build(ctx, b, sig, args):
        return b.sub(I64(64), b.ctlz(args[0], ir.IntType(1)(0)))

    return types.int64(types.int64), build


@compiled_by(_bit_length)
def bit_length(n):
    """The number of bits of an integer >= 0; 0 for 0."""
    return int(n).bit_length()


def _shuffle(tc, x, mask):
    wide = x in (types.float64, types.int64)

    def build(ctx, b, sig, args):
        value, mask = args[0], b.trunc(args[1], I32)

        def moved(part: Any) -> Any:
            return asm(b, "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", "=r,r,r", I32, [part, mask], attrs=TOGETHER)

        bits = b.bitcast(value, I64 if wide else I32)
        if not wide:
            return b.bitcast(moved(bits), value.type)
        low, high = (b.zext(moved(b.trunc(part, I32)), I64) for part in (bits, b.lshr(bits, I64(32))))
        return b.bitcast(b.or_(low, b.shl(high, I64(32))), value.type)

    return x(x, types.int64), build


@compiled_by(_shuffle)
def shuffle_xor(x, mask):
    """``x`` of the thread in this warp whose lane differs in the bits of ``mask``; the whole warp must call it.

    It does not order memory: a `sync_warp` must come before other lanes overwrite what this one has read there.
    """
    return _me().exchange(x, mask)


def _atomic(tc, pointer, value):
    def build(ctx, b, sig, args):
        return asm(b, "atom.acq_rel.gpu.add.u64 $0, [$1], $2;", "=l,l,l,~{memory}", I64, args)

    return types.int64(pointer, types.int64), build


@compiled_by(_atomic)
def atomic_add(pointer, value):
    """Add to the int64 at a pointer; returns its old value.  Orders memory like `fence`."""
    old = int(pointer[0])
    pointer[0] = old + value
    return old


def _load(tc, pointer):
    def build(ctx, b, sig, args):
        return asm(b, "ld.acquire.gpu.u64 $0, [$1];", "=l,l,~{memory}", I64, args)

    return types.int64(pointer), build


@compiled_by(_load)
def atomic_load(pointer):
    """The int64 at a pointer, as last written by other blocks."""
    return int(pointer[0])


# ---------------------------------------------------------------- compilation
_LOCK = threading.Lock()


def compile_ptx(
    fn: Callable, signature: tuple, name: str, cc: tuple[int, int], max_threads: int, min_blocks: int
) -> str:
    """PTX of a kernel called ``name``, for a compute capability; needs no driver.

    max_threads, min_blocks : threads of a block, and blocks that must fit one multiprocessor: they limit registers.
    """
    how = {"device": False, "abi": "numba", "launch_bounds": (max_threads, min_blocks)}
    return without_signals(lambda: _named(_compiled(fn, signature, cc, how), name))


def compile_function(fn: Callable, signature: Any, name: str, cc: tuple[int, int]) -> str:
    """The same for a function called ``name``, which kernels in other PTX texts call."""
    how = {"device": True, "abi": "c", "abi_info": {"abi_name": name}}
    return without_signals(lambda: _compiled(fn, signature, cc, how))


def _compiled(fn: Callable, signature: Any, cc: tuple[int, int], how: dict[str, Any]) -> str:
    with _LOCK:
        before = dispatcher.get_current_device  # helpers ask for the current device, and there may be none
        dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)
        try:
            ptx, _ = uncollected(lambda: cuda.compile(fn, signature, cc=cc, output="ptx", **how))
        finally:
            dispatcher.get_current_device = before
    lines = ptx.replace("\0", "").splitlines()
    return "\n".join(f".version {VERSION}" if line.startswith(".version") else line for line in lines)


def _named(ptx: str, name: str) -> str:
    """The PTX, with a plain name for its only entry."""
    (mangled,) = {line.split("(")[0].split()[-1] for line in ptx.splitlines() if ".entry " in line}
    return ptx.replace(mangled, name)
