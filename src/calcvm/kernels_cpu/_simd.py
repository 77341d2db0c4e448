"""Vector IR: the width of the target's vectors, an emitter for them, and GEMM's micro-kernels.

A kernel that LLVM's vectoriser would not find (accumulators in registers, broadcasts, masked tails,
transposes) is written here as vector IR, generic in the element type, and emitted once a module as an
internal function that jitted code calls (``native``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from calcvm.kernels_cpu._common import I1, I32, I64
from calcvm.kernels_cpu._native import cpu_features, cpu_name


def _vector_bits() -> tuple[int, int]:
    """Width and number of the vector registers that the code generator uses, read off its assembly."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    probe = """define void @f(ptr %p) {
        %x = load <16 x float>, ptr %p, align 4
        %y = fadd <16 x float> %x, %x
        store <16 x float> %y, ptr %p, align 4
        ret void }"""
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu=cpu_name(), features=cpu_features())
    text = machine.emit_assembly(llvm.parse_assembly(probe))
    if "zmm" in text:
        return 512, 32
    return (256, 16) if "ymm" in text else (128, 16 if "xmm" in text else 32)


VECTOR_BITS, VECTOR_REGISTERS = _vector_bits()
FREE_MASKS = VECTOR_BITS == 512  # masked loads cost nothing


def c64(v: int) -> Any:
    return ir.Constant(I64, v)


class Emit:
    """An IR builder with vectors of the target's width for one element type."""

    def __init__(self, b: ir.IRBuilder, element: Any):
        self.b, self.element = b, element
        self.size = 4 if isinstance(element, ir.FloatType) else 8
        self.tag = "f32" if self.size == 4 else "f64"
        self.lanes = VECTOR_BITS // 8 // self.size
        self.vec = ir.VectorType(element, self.lanes)
        self.mask_type = ir.VectorType(I1, self.lanes)
        self.zero = ir.Constant(self.vec, [0.0] * self.lanes)

    def fn(self, name: str, result: Any, *args: Any) -> Any:
        return cgutils.get_or_insert_function(self.b.module, ir.FunctionType(result, args), name)

    def at(self, p: Any, off: Any = None, plus: int = 0) -> Any:
        """The pointer ``off + plus`` elements past ``p``."""
        if off is not None:
            p = self.b.gep(p, [off])
        return self.b.gep(p, [c64(plus)]) if plus else p

    def phi(self, t: Any, *incoming: tuple[Any, Any]) -> Any:
        p = self.b.phi(t)
        for value, block in incoming:
            p.add_incoming(value, block)
        return p

    @staticmethod
    def indices(values: list[int]) -> Any:
        return ir.Constant(ir.VectorType(I32, len(values)), values)

    def smaller(self, i: int, top: Any) -> Any:
        """min(i, top)"""
        return self.b.select(self.b.icmp_signed("<", c64(i), top), c64(i), top) if i else c64(0)

    def splat(self, x: Any) -> Any:
        v = ir.VectorType(x.type, self.lanes)
        undef = ir.Constant(v, ir.Undefined)
        v1 = self.b.insert_element(undef, x, ir.Constant(I32, 0))
        return self.b.shuffle_vector(v1, undef, self.indices([0] * self.lanes))

    def lanes_below(self, n: Any) -> Any:
        """The mask of the first ``n`` lanes."""
        return self.b.icmp_signed("<", self.indices(list(range(self.lanes))), self.splat(self.b.trunc(n, I32)))

    def load(self, p: Any, mask: Any = None) -> Any:
        p = self.b.bitcast(p, self.vec.as_pointer())
        if mask is None:
            return self.b.load(p, align=self.size)
        f = self.fn(f"llvm.masked.load.v{self.lanes}{self.tag}.p0", self.vec, p.type, I32, self.mask_type, self.vec)
        return self.b.call(f, [p, ir.Constant(I32, self.size), mask, self.zero])

    def store(self, v: Any, p: Any, mask: Any = None) -> None:
        p = self.b.bitcast(p, self.vec.as_pointer())
        if mask is None:
            self.b.store(v, p, align=self.size)
            return
        f = self.fn(
            f"llvm.masked.store.v{self.lanes}{self.tag}.p0", ir.VoidType(), self.vec, p.type, I32, self.mask_type
        )
        self.b.call(f, [v, p, ir.Constant(I32, self.size), mask])

    def prefetch(self, p: Any, level: int = 3) -> None:
        """Ask for the cache line at ``p`` (3: into L1, 2: into L2); never faults."""
        p = self.b.bitcast(p, ir.IntType(8).as_pointer())
        f = self.fn("llvm.prefetch.p0", ir.VoidType(), p.type, I32, I32, I32)
        self.b.call(f, [p, *(ir.Constant(I32, v) for v in (0, level, 1))])

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """One rounding where the target has FMA, two where it has not; never a library call."""
        f = self.fn(f"llvm.fmuladd.v{self.lanes}{self.tag}", self.vec, self.vec, self.vec, self.vec)
        return self.b.call(f, [x, y, z])


def native(name: str, signature: str, emit: Callable) -> Any:
    """An intrinsic that calls a function emitted once a module (``p`` pointer, ``i`` int64)."""

    def call(tc: Any, *args: Any) -> Any:
        pointer = args[signature.index("p")]
        sig = types.void(*[pointer if k == "p" else types.int64 for k in signature])

        def codegen(ctx: Any, b: Any, sig: Any, values: Any) -> Any:
            element = ctx.get_value_type(pointer.dtype)
            symbol = f"calcvm_{name}_{element.intrinsic_name}"
            f = b.module.globals.get(symbol)
            if f is None:
                f = ir.Function(b.module, ir.FunctionType(ir.VoidType(), [v.type for v in values]), symbol)
                f.linkage = "internal"
                f.attributes.add("nounwind")
                f.attributes.add("noinline")
                inner = ir.IRBuilder(f.append_basic_block("entry"))
                emit(Emit(inner, element), *f.args)
                inner.ret_void()
            b.call(f, list(values))
            return ctx.get_dummy_value()

        return sig, codegen

    names = ", ".join(f"a{i}" for i in range(len(signature)))
    scope: dict[str, Any] = {"call": call}
    exec(f"def {name}(tc, {names}): return call(tc, {names})", scope)
    return intrinsic(scope[name])


def micro(mr: int, nv: int, masked: bool, prefetch: bool = False) -> Any:
    """C[:m, nv vectors] = init + sum_k A[i*ars + k*acs] * B[k*brs + j], for 1 <= m <= mr rows.

    Rows past ``m`` repeat row m-1: they compute and store the same bits, so one instance serves every
    remainder.  ``masked``: the last vector has ``rem`` live lanes.  mode 0 starts from zero, 1 from init.
    """

    def emit(e, m, k, a, ars, acs, b_start, brs, c, crs, init, irs, mode, rem, ahead=None):  # type: ignore[no-untyped-def]
        b = e.b
        mask = e.lanes_below(rem) if masked else None
        masks = [None] * (nv - 1) + [mask]
        top = b.sub(m, c64(1))
        rows = [e.smaller(i, top) for i in range(mr)]
        starts = [e.at(a, b.mul(ars, i)) for i in rows]

        def each(base, stride, visit):  # type: ignore[no-untyped-def]
            for i, row in enumerate(rows):
                p = e.at(base, b.mul(stride, row))
                for j in range(nv):
                    visit(i * nv + j, e.at(p, None, j * e.lanes), masks[j])

        fresh = b.icmp_signed("==", mode, c64(0))
        with b.if_then(b.not_(fresh)):
            each(init, irs, lambda t, p, mask: e.prefetch(p))
        head, loop, done = b.block, b.append_basic_block("k"), b.append_basic_block("done")
        zeros = [e.zero] * (mr * nv)
        b.cbranch(b.icmp_signed(">", k, c64(0)), loop, done)

        b.position_at_end(loop)
        left, bp = e.phi(I64, (k, head)), e.phi(a.type, (b_start, head))
        ap = [e.phi(a.type, (p, head)) for p in starts]
        acc = [e.phi(e.vec, (v, head)) for v in zeros]
        bv = [e.load(e.at(bp, None, j * e.lanes), masks[j]) for j in range(nv)]
        av = [e.splat(b.load(p, align=e.size)) for p in ap]
        new = [e.fma(av[i], bv[j], acc[i * nv + j]) for i in range(mr) for j in range(nv)]
        if prefetch:
            for p in ap[0], ap[-1]:
                e.prefetch(e.at(p, ahead), 2)
        rest = b.sub(left, c64(1))
        left.add_incoming(rest, loop)
        bp.add_incoming(e.at(bp, brs), loop)
        for p in ap:
            p.add_incoming(e.at(p, acs), loop)
        for p, v in zip(acc, new):
            p.add_incoming(v, loop)
        b.cbranch(b.icmp_signed("==", rest, c64(0)), done, loop)

        b.position_at_end(done)
        out = [e.phi(e.vec, (f, head), (v, loop)) for f, v in zip(zeros, new)]
        with b.if_else(fresh) as (set_, add):
            with set_:
                each(c, crs, lambda t, p, mask: e.store(out[t], p, mask))
            with add:
                sums = list(out)

                def add_init(t, p, mask):  # type: ignore[no-untyped-def]
                    sums[t] = b.fadd(out[t], e.load(p, mask))

                each(init, irs, add_init)
                each(c, crs, lambda t, p, mask: e.store(sums[t], p, mask))

    return native(f"gemm_{mr}x{nv}{'m' if masked else ''}", "iipiipipipiiii" if prefetch else "iipiipipipiii", emit)


def pack_rows(nv: int, masked: bool) -> Any:
    """dst[k, nv vectors] = src[k*rs + j]; the last vector has ``rem`` live lanes, the others read as zero."""

    def emit(e, k, src, rs, dst, rem):  # type: ignore[no-untyped-def]
        mask = e.lanes_below(rem) if masked else None
        with cgutils.for_range(e.b, k) as loop:
            p, q = e.at(src, e.b.mul(loop.index, rs)), e.at(dst, e.b.mul(loop.index, c64(nv * e.lanes)))
            for j in range(nv):
                e.store(e.load(e.at(p, None, j * e.lanes), mask if j == nv - 1 else None), e.at(q, None, j * e.lanes))

    return native(f"gemm_pack{nv}{'m' if masked else ''}", "ipipi", emit)


def transpose() -> Any:
    """dst[k*dst_rs + j] = src[j*rs + k] for k and j below the vector's length; columns past ``n`` repeat n-1."""

    def emit(e, n, src, rs, dst, dst_rs):  # type: ignore[no-untyped-def]
        b, lanes = e.b, e.lanes
        top = b.sub(n, c64(1))
        rows = [e.smaller(i, top) for i in range(lanes)]
        v = [e.load(e.at(src, b.mul(rs, i))) for i in rows]
        s = 1
        while s < lanes:  # swap the off-diagonal s x s blocks
            low = [x if not x & s else lanes + x - s for x in range(lanes)]
            high = [x + s if not x & s else lanes + x for x in range(lanes)]
            for i in range(lanes):
                if not i & s:
                    x, y = v[i], v[i + s]
                    v[i], v[i + s] = (b.shuffle_vector(x, y, e.indices(t)) for t in (low, high))
            s *= 2
        for i in range(lanes):
            e.store(v[i], e.at(dst, b.mul(dst_rs, c64(i))))

    return native("gemm_transpose", "ipipi", emit)


@intrinsic
def lanes_of(tc, p):
    """Elements of ``p`` in a vector register: a constant when compiled."""
    lanes = VECTOR_BITS // p.dtype.bitwidth
    return types.int64(p), lambda ctx, b, sig, args: c64(lanes)
