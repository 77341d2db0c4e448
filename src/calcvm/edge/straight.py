"""A program as straight code: one LLVM module in which each row's kernel is called with the row's words as constants.

There is no loop over rows, no table and no indirect call: what a step takes, of instructions and of stack, can be read off the code.
The rows are the truth: the module is made of a verified program.

An entry is ``int32_t NAME(void *heap)``.  It returns 0, or the code of a trap and, above `TRAP_SHIFT` bits, the row where it was met.
It ends with the span of rows that has met one: a wrong label changes no parameter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from calcvm.edge.description import Labels
from calcvm.edge.elf import Elf
from calcvm.edge.libm import libm_of
from calcvm.edge.places import Places
from calcvm.edge.targets import Processor
from calcvm.errors import CalcError
from calcvm.formulas.optimizers import UPDATES
from calcvm.kernel import TRAP_CODE, TRAP_PC, Words
from calcvm.kernels_cpu._common import I8, I32, WORD
from calcvm.kernels_cpu._straight import StraightRows, pointer_to
from calcvm.ops.types import BYTES
from calcvm.vm.program.program import Program

OF_LIBM = re.compile(r"^llvm\.(\w+)\.(?:v1)?f32$")
DEFINITION = re.compile(r"^(define [^{]*\)(?: (?:local_)?unnamed_addr)?)( [^{]*)?\{$", re.MULTILINE)
ALLOCATION = re.compile(r"alloca (?:\[(\d+) x )?(\w+)")
BYTES_OF = {"i8": 1, "i32": 4, "float": 4, "ptr": 4, "i64": 8, "double": 8}
TRAP_SHIFT, NO_CLASS = 8, 1
I64, BOOL = ir.IntType(64), ir.IntType(1)


class Straight(StraightRows):
    """The module of a program's entries, for a batch.

    entries : for each name the spans of its rows.  labels : for some what is looked at before any row runs.
    """

    def __init__(
        self,
        program: Program,
        batch: int,
        entries: Mapping[str, Sequence[tuple[int, int]]],
        processor: Processor,
        objective: str,
        places: Places,
        constants: bytes,
        labels: Mapping[str, Sequence[Labels]],
    ):
        names = [name for name, _ in program.instructions]
        device = "small" if processor.scalar else program.info.get("device", "cpu")
        super().__init__(program.rows_for(batch), names, program.dtype, device, processor.target)
        self.processor, self.places, self.entries = processor, places, dict(entries)
        self.smallest = objective == "size" and processor.scalar
        self.constants = self._constant("constants", constants, align=8)
        self.small = import_module("calcvm.kernels_cpu._small") if processor.bits == 32 else None
        self.link(pc for spans in entries.values() for span in spans for pc in range(*span))
        for name, spans in entries.items():
            self._entry(name, spans, labels.get(name, ()))

    def start(self, name: str, place: int, image: bytes) -> None:
        """An entry that sets the heap to 0, but for an image at a place."""
        f = ir.Function(self.calls, ir.FunctionType(I32, [self.element.as_pointer()]), name)
        f.attributes.add("optsize")
        f.attributes.add("minsize")
        self.entries[name] = []
        b = ir.IRBuilder(f.append_basic_block())
        heap, n, constant = b.bitcast(f.args[0], I8.as_pointer()), len(image), self._constant(f"{name}_image", image)
        for start, stop in ((0, place), (place + n, self.places.ram)):
            args = [b.gep(heap, [WORD(start)]), I8(0), WORD(stop - start), BOOL(0)]
            b.call(self._intrinsic("llvm.memset.p0", args), args)
        if n:
            args = [b.gep(heap, [WORD(place)]), b.bitcast(constant, I8.as_pointer()), WORD(n), BOOL(0)]
            b.call(self._intrinsic("llvm.memcpy.p0.p0", args), args)
        b.ret(I32(0))

    def _constant(self, name: str, data: bytes, align: int = 1) -> ir.GlobalVariable:
        t = ir.ArrayType(I8, len(data))
        out = ir.GlobalVariable(self.calls, t, name)
        out.linkage, out.global_constant, out.initializer, out.align = "internal", True, t(bytearray(data)), align
        return out

    def _intrinsic(self, name: str, args: list[Any]) -> Any:
        full = f"{name}.i{WORD.width}"
        known = self.calls.globals.get(full)
        return known or ir.Function(self.calls, ir.FunctionType(ir.VoidType(), [a.type for a in args]), full)

    # ------------------------------------------------------------ rows
    def kernel(self, name: str) -> tuple[Any, Words]:
        small = self.small
        if small is None:
            return super().kernel(name)
        kernel = small.KERNELS.get(name) or super().kernel(name)[0]
        return kernel, tuple((word, "ptr.float32" if word in small.HYPER else kind) for word, kind in kernel.words)

    def _entry(self, name: str, spans: Sequence[tuple[int, int]], labels: Sequence[Labels]) -> None:
        f, b = self.function(name, I32, [self.element.as_pointer()])
        (heap,) = f.args
        heap.add_attribute("nonnull")
        for of in labels:
            self._look_at(b, heap, *of)
        code, where = (b.gep(heap, [I32(place)]) for place in (TRAP_CODE, TRAP_PC))
        end = f.append_basic_block()
        for span in spans:
            self.call_rows(b, heap, range(*span))
            going = f.append_basic_block()
            b.cbranch(b.fcmp_ordered("==", b.load(code), self.element(0.0)), going, end)
            b.position_at_end(going)
        b.branch(end)
        b.position_at_end(end)
        trap = b.add(b.fptosi(b.load(code), I32), b.shl(b.fptosi(b.load(where), I32), I32(TRAP_SHIFT)))
        for place in (code, where):
            b.store(self.element(0.0), place)
        b.ret(trap)

    def _look_at(
        self, b: ir.IRBuilder, heap: Any, at: int, dtype: str, n: int, classes: int, ignored: int | None, row: int
    ) -> None:
        """Return a trap if a label is no class, before anything has changed."""
        f, begin = b.function, b.block
        loop, inside, outside, following, trap, done = (f.append_basic_block() for _ in range(6))
        place = b.bitcast(b.gep(b.bitcast(heap, I8.as_pointer()), [WORD(at)]), pointer_to(dtype))
        b.branch(loop)
        b.position_at_end(loop)
        k = b.phi(WORD)
        label = b.load(b.gep(place, [k]))
        if floats := isinstance(label.type, (ir.FloatType, ir.DoubleType)):
            limits = (">=", 0.0), ("<", float(classes))
            is_class = b.and_(*(b.fcmp_ordered(sign, label, label.type(limit)) for sign, limit in limits))
        else:
            label = (b.zext if dtype in ("uint8", "bool") else b.sext)(label, I64) if label.type != I64 else label
            is_class = b.icmp_unsigned("<", label, I64(classes))
        b.cbranch(is_class, inside, outside)
        b.position_at_end(inside)
        whole = b.fcmp_ordered("==", b.sitofp(b.fptosi(label, I32), label.type), label) if floats else BOOL(1)
        b.cbranch(whole, following, trap)
        b.position_at_end(outside)
        if ignored is None:
            b.branch(trap)
        else:
            same = (
                b.fcmp_ordered("==", label, label.type(float(ignored)))
                if floats
                else b.icmp_signed("==", label, I64(ignored))
            )
            b.cbranch(same, following, trap)
        b.position_at_end(following)
        further = b.add(k, WORD(1))
        k.add_incoming(WORD(0), begin)
        k.add_incoming(further, following)
        b.cbranch(b.icmp_signed("<", further, WORD(n)), loop, done)
        b.position_at_end(trap)
        b.ret(I32(NO_CLASS + (row << TRAP_SHIFT)))
        b.position_at_end(done)

    def check(self, pc: int, word: str, value: int) -> None:
        if not -(2 ** (WORD.width - 1)) <= value < 2 ** (WORD.width - 1):
            raise CalcError(
                f"row {pc}: {word}={value} is beyond integers of {WORD.width} bits, which {self.processor.name} has"
            )

    def operand(self, b: ir.IRBuilder, heap: Any, word: str, dtype: str, offset: int) -> Any:
        narrowed = self.small is not None and word in self.small.HYPER  # the offset is of float64
        at, constant = self.places.of(offset * (8 if narrowed else BYTES[dtype]))
        base = b.bitcast(self.constants if constant else heap, I8.as_pointer())
        return b.bitcast(b.gep(base, [WORD(at)], inbounds=True), pointer_to(dtype))

    # ------------------------------------------------------------ code
    def finish(self) -> None:
        """Make ``code``, the object, and ``calls_of``, by function those that it calls; and ``frames``, where LLVM tells of none."""
        # the smallest code has one copy of what a row does for each parameter
        self.join(self.entries, (name for name in self.bodies if not (self.smallest and name in UPDATES)))
        for f in self.module.functions:
            if self.smallest and not f.is_declaration:
                f.add_function_attribute("minsize")
                f.add_function_attribute("optsize")
        self.optimize("part_", not self.smallest, not self.smallest and not self.processor.wasm)
        # LLVM tells the frame of each function as a warning
        module = _measured(str(self.module))
        module.verify()
        self.code = self.machine.emit_object(module)
        if not self.processor.wasm and (text := libm_of(Elf(self.code).undefined)):
            module.link_in(_measured(text), preserve=True)
            self.code = self.machine.emit_object(module)
        self.calls_of = {f.name: _called(f) for f in module.functions if not f.is_declaration}
        self.frames = {f.name: _allocated(f) for f in module.functions if self.processor.wasm and not f.is_declaration}


def _measured(text: str) -> llvm.ModuleRef:
    """A module of whose functions LLVM tells the frames."""
    return llvm.parse_assembly(DEFINITION.sub(r'\1 "warn-stack-size"="0"\2{', text))


def _allocated(f: llvm.ValueRef) -> int:
    """Bytes that a function takes of WebAssembly's stack in memory, which has arrays alone."""
    found = [ALLOCATION.search(str(i)) for block in f.blocks for i in block.instructions if i.opcode == "alloca"]
    return sum(-(-int(m[1] or 1) * BYTES_OF[m[2]] // 16) * 16 for m in found if m)


def _called(f: llvm.ValueRef) -> list[str]:
    """The functions that a function calls, and those of libm that it may call for an intrinsic."""
    calls = [i for block in f.blocks for i in block.instructions if i.opcode in ("call", "invoke")]
    names = [[*call.operands][-1].name for call in calls]
    names = [OF_LIBM.sub(r"\1f", name) for name in names]
    return [name for name in dict.fromkeys(names) if name and not name.startswith("llvm.")]
