"""The base of every CUDA kernel: the kernel decorator, shares of the work, traps.

A worker is a *thread block*.  All its threads run the kernel (see `calcvm.kernel`) together, and the VM makes them wait for
each other after each row.  The compiler and the simulator see ``kernel(heap, row, worker, n_workers, phase)``.  The names and
order of a kernel's words must equal the operator table's; a test compares them.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pkgutil import iter_modules
from types import CodeType, FunctionType
from typing import Any

from calcvm.kernel import (  # noqa: F401  (Float and Ptr are for kernels)
    BAD_INDEX,
    FLAG_PC_SHIFT,
    TRAP_CODE,
    TRAP_PC,
    Float,
    Kernels,
    Me,
    Ptr,
    Words,
    arguments,
    simulated_arguments,
    types_of,
    words_of,
)
from calcvm.kernels_cuda._cuda import I64, WORDS, compiled_by, device, in_global, like, thread, types, wide
from calcvm.kernels_cuda._routines import Routine, ints
from calcvm.lazy import cached_property


# ---------------------------------------------------------------- shares
@device
def part_of(n, w, nw):
    """The half-open range of ``n`` units that worker ``w`` of ``nw`` owns."""
    if nw == 1:
        return 0, n
    return n * w // nw, n * (w + 1) // nw


@device
def share(me, n):
    """The half-open range of ``n`` units that this worker owns."""
    return part_of(n, me.worker, me.workers)


@device
def trap(me, code):
    """Record that the row met something it cannot compute; the VM raises an error after the call."""
    me.heap[TRAP_CODE] = like(me.heap, code)
    me.heap[TRAP_PC] = like(me.heap, me.row[1] >> FLAG_PC_SHIFT)


@device
def index_of(me, value, n):
    """A number of the data as an index; one that is no integer in [0, n) traps, and counts as 0."""
    value = wide(value)
    if value >= like(value, 0) and value < like(value, 1e18):
        k = int(value)
        if k < n and like(value, k) == value:
            return k
    trap(me, BAD_INDEX)
    return 0


@device
def is_first(w):
    """Whether this is thread 0 of worker 0."""
    return w == 0 and thread() == 0


@device
def first(me):
    """Whether this is the thread that writes scalars."""
    return is_first(me.worker)


def _given(tc, me, operand):
    def build(ctx, b, sig, args):
        heap = b.bitcast(b.extract_value(args[0], 0), args[1].type)
        return b.icmp_unsigned("!=", args[1], b.gep(heap, [I64(-1)]))

    return types.boolean(me, operand), build


@compiled_by(_given)
def given(me, operand):
    """Whether an operand is given; one left out has the offset -1."""
    return operand is not None


# ---------------------------------------------------------------- registry
def row_call(h: Any) -> Any:
    """The types of a row's native function, for the type of the heap's pointer."""
    return types.void(h, WORDS, *ints(3))


class Kernel:
    """The kernel of a row; ``words`` are its parameters, named and typed, in the order of the row's words."""

    def __init__(self, fn: Callable, name: str = "", words: Words | None = None):
        self.name, self.fn = name or fn.__name__, fn
        self.words = words_of(fn) if words is None else words
        self.instances: dict[str, Kernel] = {}

    def of(self, name: str, words: Words) -> Kernel:
        """An instance with another name and other types of its words."""
        return Kernel(self.fn, name, words)

    @cached_property
    def bound(self) -> Callable:
        """The kernel as a function of (h, r, w, nw, phase), for the simulator and for the compiler."""
        fn, taken = device(self.fn), _taken(self.words)

        def run(h, r, w, nw, phase):
            fn(*taken(in_global(h), r, w, nw, phase))

        return run

    @cached_property
    def routine(self) -> Routine:
        """The same, compiled: a separate function, so that its registers do not add to those of the loop that calls it."""
        return Routine(f"row_{self.name}", self.bound, row_call, self.modules, f"{self.mark} {self.words}")

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of calcvm that it depends on: its own, or for a kernel from elsewhere all that it may use."""
        module = str(self.fn.__globals__.get("__name__"))
        if module.startswith("calcvm."):
            return (
                module.removeprefix("calcvm.").replace("kernels_shared.", "kernels_cuda."),
            )  # of a shared text this package's file
        there = sys.modules[__name__.rpartition(".")[0]].__path__
        return tuple(sorted(f"kernels_cuda.{found.name}" for found in iter_modules(there)))

    @cached_property
    def mark(self) -> str:
        """A digest of its code, part of the cache key; it also covers kernels from elsewhere."""
        return hashlib.sha256("\n".join(_code(self.fn, set())).encode()).hexdigest()[:12]


def _taken(words: Words) -> Callable:
    """A function of (h, r, w, nw, phase) that returns a kernel's arguments: ``me`` and the row's words."""

    def codegen(tc, h, r, w, nw, phase):
        def build(ctx, b, sig, args):
            me = ctx.make_tuple(b, sig.return_type[0], args)
            return ctx.make_tuple(b, sig.return_type, [me, *arguments(b, words, args[0], args[1])])

        return types.Tuple(types_of(words, h, r, types))(h, r, *[types.int64] * 3), build

    @compiled_by(codegen)
    def taken(h, r, w, nw, phase):
        return Me(h, r, w, nw, phase), *simulated_arguments(words, h, r)

    return taken


def _code(x: Any, seen: set[int]) -> Iterator[str]:
    """A function's code, in pieces: its bytecode, its closure, and the functions it names in the same module or package.

    For calcvm's own functions only the closure, because their files are already in the digest.
    """
    if isinstance(x, CodeType):
        yield f"{x.co_code.hex()} {x.co_names} {x.co_varnames} {x.co_freevars}"
        for constant in x.co_consts:
            yield from _code(constant, seen)
    elif isinstance(x, tuple):
        for element in x:
            yield from _code(element, seen)
    elif is_dataclass(x):
        for part in fields(x):
            yield from _code(getattr(x, part.name), seen)
    elif isinstance(x, dict):
        for name, value in x.items():
            yield str(name)
            yield from _code(value, seen)
    elif not isinstance(x, FunctionType):
        yield repr(x) if isinstance(x, (bool, int, float, str, slice)) else type(x).__qualname__
    elif id(x) not in seen:
        seen.add(id(x))
        yield f"{x.__qualname__}{getattr(x, 'text', '')}"  # its text, if it was generated
        known = [cell.cell_contents for cell in x.__closure__ or ()]
        if not x.__module__.startswith("calcvm."):
            yield from _code(x.__code__, seen)
            known += [x.__globals__.get(name) for name in x.__code__.co_names]
        for other in known:
            yield from _code(other, seen)


KERNELS = Kernels(Kernel)
kernel, kernel_as = KERNELS.kernel, KERNELS.kernel_as
