"""Raw memory access for the jitted VM: loads, stores and atomics at addresses, and calls through an address."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from calcvm.kernels_cpu._target import current
from calcvm.vm.run.entry import ANSWERS, ARGUMENTS, symbol

I64 = ir.IntType(64)
_ELEMENTS = {
    "f32": (ir.FloatType(), types.float32),
    "f64": (ir.DoubleType(), types.float64),
    "u8": (ir.IntType(8), types.uint8),
    "i32": (ir.IntType(32), types.int32),
    "i64": (I64, types.int64),
}


def pointer_to(element: str):  # type: ignore[no-untyped-def]
    """An intrinsic that converts an address to a pointer to elements of a type."""
    llvm_type, numba_type = _ELEMENTS[element]

    @intrinsic
    def cast(tc, address):
        def codegen(ctx, b, sig, args):
            return b.inttoptr(args[0], llvm_type.as_pointer())

        return types.CPointer(numba_type)(types.int64), codegen

    return cast


f32_at, f64_at, u8_at, i32_at, i64_at = (pointer_to(e) for e in ("f32", "f64", "u8", "i32", "i64"))


def _caller(n: int):  # type: ignore[no-untyped-def]
    def codegen(ctx, b, sig, args):
        ft = ir.FunctionType(ir.VoidType(), [I64] * n)  # pointers and integers are passed in the same way
        b.call(b.inttoptr(args[0], ft.as_pointer()), list(args[1:]))
        return ctx.get_dummy_value()

    return types.void(*[types.int64] * (n + 1)), codegen


@intrinsic
def call_kernel(tc, address, heap, row, worker, n_workers, phase):
    """Call the kernel at a native address."""
    return _caller(5)


@intrinsic
def call_job(tc, address, job, worker):
    """Call a job's code."""
    return _caller(2)


def call_entry(name: str):  # type: ignore[no-untyped-def]
    """Signature and code of a call to another entry (one that the caller's entry NEEDS), by symbol."""
    n, answers = ARGUMENTS[name], name in ANSWERS

    def codegen(ctx, b, sig, args):
        ft = ir.FunctionType(I64 if answers else ir.VoidType(), [I64] * n)
        answer = b.call(cgutils.get_or_insert_function(b.module, ft, symbol(name)), list(args))
        return answer if answers else ctx.get_dummy_value()

    return (types.int64 if answers else types.void)(*[types.int64] * n), codegen


@intrinsic
def atomic_add(tc, address, value):
    """Add to the int64 at an address; returns the old value."""

    def codegen(ctx, b, sig, args):
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_swap(tc, address, value):
    """Store an int64 at an address; returns the old value."""

    def codegen(ctx, b, sig, args):
        return b.atomic_rmw("xchg", b.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(tc, address):
    def codegen(ctx, b, sig, args):
        return b.load_atomic(b.inttoptr(args[0], I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(tc, address, value):
    def codegen(ctx, b, sig, args):
        b.store_atomic(args[1], b.inttoptr(args[0], I64.as_pointer()), "seq_cst", 8)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def flush_line(tc, address):
    """Write the cache line at an address back to memory, and remove it from all caches."""

    def codegen(ctx, b, sig, args):
        if current().x86:
            pointer = ir.IntType(8).as_pointer()
            ft = ir.FunctionType(ir.VoidType(), [pointer])
            code = cgutils.get_or_insert_function(b.module, ft, "llvm.x86.sse2.clflush")
            b.call(code, [b.inttoptr(args[0], pointer)])
        return ctx.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def pause(tc):
    """Hint to the processor that this is a spin loop."""

    def codegen(ctx, b, sig, args):
        if current().x86:
            ft = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, ft, "llvm.x86.sse2.pause"), [])
        return ctx.get_dummy_value()

    return types.void(), codegen
