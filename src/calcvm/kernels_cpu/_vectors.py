"""Vectors of LLVM IR under construction, as wide as the target's, and intrinsics built from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from calcvm.kernels_cpu._common import I1, I32, WORD, intrinsic_of
from calcvm.kernels_cpu._target import Target, current


def word(v: int) -> Any:
    return WORD(v)


def as_word(b: ir.IRBuilder, v: Any) -> Any:
    """An integer of data as one of code."""
    return v if v.type == WORD else b.trunc(v, WORD)


def bits_of(element: Any) -> int:
    return element.width if isinstance(element, ir.IntType) else 32 if isinstance(element, ir.FloatType) else 64


class Vectors:
    """An IR builder with vectors of the target's width (or of ``lanes``) for one element type.

    Elements in memory may have another type; vectors of them have as many lanes.
    """

    def __init__(self, b: ir.IRBuilder, element: Any, target: Target, lanes: int = 0):
        self.b, self.element, self.target, self.size = b, element, target, bits_of(element) // 8
        self.lanes = lanes or target.lanes(8 * self.size)
        self.vec, self.mask = ir.VectorType(element, self.lanes), ir.VectorType(I1, self.lanes)

    def fn(self, name: str, result: Any, *args: Any) -> Any:
        return cgutils.get_or_insert_function(self.b.module, ir.FunctionType(result, args), name)

    @staticmethod
    def indices(values: Sequence[int]) -> Any:
        return ir.Constant(ir.VectorType(I32, len(values)), [*values])

    def splat(self, x: Any) -> Any:
        undef = ir.Constant(ir.VectorType(x.type, self.lanes), ir.Undefined)
        one = self.b.insert_element(undef, x, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, undef, self.indices([0] * self.lanes))

    def lanes_below(self, n: Any) -> Any:
        """The mask of the first ``n`` lanes."""
        return self.b.icmp_signed("<", self.indices(range(self.lanes)), self.splat(self.b.trunc(n, I32)))

    def _memory(self, p: Any) -> tuple[Any, Any, int, str]:
        """The vector at a pointer: its address, its type, the bytes of an element, and its name in intrinsics."""
        element = p.type.pointee
        vec, bits = ir.VectorType(element, self.lanes), bits_of(element)
        tag = f"v{self.lanes}{'i' if isinstance(element, ir.IntType) else 'f'}{bits}.p0"
        return self.b.bitcast(p, vec.as_pointer()), vec, bits // 8, tag

    def load(self, p: Any, mask: Any = None) -> Any:
        p, vec, size, tag = self._memory(p)
        if mask is None:
            return self.b.load(p, align=size)
        f = self.fn(f"llvm.masked.load.{tag}", vec, p.type, I32, self.mask, vec)
        return self.b.call(f, [p, ir.Constant(I32, size), mask, ir.Constant(vec, [0] * self.lanes)])

    def store(self, v: Any, p: Any, mask: Any = None) -> None:
        p, vec, size, tag = self._memory(p)
        if mask is None:
            self.b.store(v, p, align=size)
            return
        f = self.fn(f"llvm.masked.store.{tag}", ir.VoidType(), vec, p.type, I32, self.mask)
        self.b.call(f, [v, p, ir.Constant(I32, size), mask])


def phi(b: ir.IRBuilder, t: Any, *incoming: tuple[Any, Any]) -> Any:
    p = b.phi(t)
    for value, block in incoming:
        p.add_incoming(value, block)
    return p


def emitted(
    of: type[Vectors], kinds: str, emit: Callable, result: int = 0, name: str | Callable[[Target], str] = ""
) -> Any:
    """An intrinsic with one argument per kind; ``emit(of(...), *arguments)`` builds its body.

    kinds : ``p`` pointer to heap elements, ``t`` to others, ``i`` integer, ``f`` float, ``d`` float64 in any heap.
    result : how many floats it returns; several as a tuple.
    name : makes it a separate function of that name (see `outline`); a function of the target if a module may have several versions.
    """

    def typing(*args: Any) -> Any:
        dtype = args[kinds.index("p")].dtype
        of_kind = {"i": types.intp, "l": types.int64, "f": dtype, "d": types.float64}
        returned = types.UniTuple(dtype, result) if result > 1 else dtype if result else types.void
        sig = returned(*(of_kind.get(kind, a) for a, kind in zip(args, kinds)))

        def codegen(ctx: Any, b: Any, sig: Any, values: Any) -> Any:
            element = ctx.get_value_type(dtype)
            if name:
                outline(b, name if isinstance(name, str) else name(current()), of, element, emit, values)
                return ctx.get_dummy_value()
            out = emit(of(b, element, current()), *values)
            if result > 1:
                return ctx.make_tuple(b, sig.return_type, out)
            return out if result else ctx.get_dummy_value()

        return sig, codegen

    return intrinsic_of(len(kinds), typing)


def outline(b: Any, name: str, of: type[Vectors], element: Any, emit: Callable, values: Sequence[Any]) -> None:
    """Call the emitted code as a separate function of each module, for kernels that call it from several places."""
    symbol = f"calcvm_{name}_{element.intrinsic_name}"
    f = b.module.globals.get(symbol)
    if f is None:
        f = ir.Function(b.module, ir.FunctionType(ir.VoidType(), [v.type for v in values]), symbol)
        f.linkage = "internal"
        f.attributes.add("nounwind")
        f.attributes.add("noinline")
        inner = ir.IRBuilder(f.append_basic_block("entry"))
        emit(of(inner, element, current()), *f.args)
        inner.ret_void()
    b.call(f, list(values))
