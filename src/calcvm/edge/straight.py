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
import numpy as np
from llvmlite import ir

from calcvm.edge.elf import Elf
from calcvm.edge.libm import libm_of
from calcvm.edge.places import Places
from calcvm.edge.targets import Processor
from calcvm.errors import CalcError
from calcvm.formulas.optimizers import UPDATES
from calcvm.kernel import PREFIX, TRAP_CODE, TRAP_PC, Words, element_of
from calcvm.kernels_cpu import find
from calcvm.kernels_cpu._codegen import context_of
from calcvm.kernels_cpu._common import I8, I32, I64, ROUTINES, WORD, entry_of, lowered, on_device
from calcvm.kernels_cpu._target import on_target
from calcvm.ops.types import BYTES
from calcvm.vm.program.encoding import ABSENT, phases_of
from calcvm.vm.program.program import Program

DEFINITION = re.compile(r"^(define [^{]*\)(?: (?:local_)?unnamed_addr)?)( [^{]*)?\{$", re.MULTILINE)
ALLOCATION = re.compile(r"alloca (?:\[(\d+) x )?(\w+)")
BYTES_OF = {"i8": 1, "i32": 4, "float": 4, "ptr": 4, "i64": 8, "double": 8}
TRAP_SHIFT = 8
ROUNDS = 2  # of LLVM's passes: what became constant in one is used in the next
ELEMENTS = {"float32": ir.FloatType(), "float64": ir.DoubleType(), "int64": I64, "int32": I32}
# routines of which little is left where their choice is known
INLINED = ("activate", "scale_by_derivative", "complete")


class Straight:
    """The module of a program's entries, for a batch; ``entries`` : for each name the spans of its rows."""

    def __init__(
        self,
        program: Program,
        batch: int,
        entries: Mapping[str, Sequence[tuple[int, int]]],
        processor: Processor,
        objective: str,
        places: Places,
        constants: bytes,
    ):
        self.program, self.rows, self.processor = program, program.rows_for(batch), processor
        self.places, self.smallest = places, objective == "size" and processor.scalar
        self.entries, self.element = dict(entries), ELEMENTS[program.dtype]
        self.bodies: dict[str, tuple[str, Words]] = {}  # by kernel: the name of its body, and its words
        self.calls = ir.Module()
        self.constants = self._constant("constants", constants, align=8)
        self.small = import_module("calcvm.kernels_cpu._small") if processor.bits == 32 else None
        device = "small" if processor.scalar else program.info.get("device", "cpu")
        with on_device(device, straight=True), on_target(processor.target):
            self.module = llvm.parse_assembly("")
            self.module.triple = processor.target.triple
            self.module.data_layout = str(processor.target.machine().target_data)
            for pc in (pc for spans in entries.values() for span in spans for pc in range(*span)):
                if (name := self._name(pc)) not in self.bodies:
                    kernel, words = self._kernel(name)
                    self.bodies[name] = self._lowered(kernel, words), words
            self._routines()
        for name, spans in entries.items():
            self._entry(name, spans)

    def _name(self, pc: int) -> str:
        return self.program.instructions[self.rows[pc, 0]].name

    def start(self, name: str, place: int, image: bytes) -> None:
        """An entry that sets the heap to 0, but for an image at a place."""
        f = ir.Function(self.calls, ir.FunctionType(I32, [self.element.as_pointer()]), name)
        f.attributes.add("optsize")
        f.attributes.add("minsize")
        self.entries[name] = []
        b = ir.IRBuilder(f.append_basic_block())
        heap, n, constant = b.bitcast(f.args[0], I8.as_pointer()), len(image), self._constant(f"{name}_image", image)
        for start, stop in ((0, place), (place + n, self.places.ram)):
            args = [b.gep(heap, [WORD(start)]), I8(0), WORD(stop - start), ir.IntType(1)(0)]
            b.call(self._intrinsic("llvm.memset.p0", args), args)
        if n:
            args = [b.gep(heap, [WORD(place)]), b.bitcast(constant, I8.as_pointer()), WORD(n), ir.IntType(1)(0)]
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

    # ------------------------------------------------------------ bodies
    def _kernel(self, name: str) -> tuple[Any, Words]:
        """A row's kernel on this processor, and its words."""
        kernel, small = find(name), self.small
        if small is None:
            return kernel, kernel.words
        kernel = small.KERNELS[name] if name in small.KERNELS else kernel
        return kernel, tuple((word, "ptr.float32" if word in small.HYPER else kind) for word, kind in kernel.words)

    def _lowered(self, fn: Any, words: Any) -> str:
        """Link a kernel or routine in; the name of its body."""
        library, body = lowered(fn.fn, fn.signature(self.program.dtype), words, self.processor.target)
        part = library._final_module
        for value in (*part.functions, *part.global_variables):
            if not value.is_declaration and value.name != body:
                value.linkage = "internal"
        self.module.link_in(part)
        return body

    def _routines(self) -> None:
        """Link in all routines that are called by their symbols."""
        known = {routine.symbol(self.program.dtype): routine for routine in ROUTINES.values()}
        while wanted := [f.name for f in self.module.functions if f.is_declaration and f.name in known]:
            for symbol in wanted:
                routine = known[symbol]
                body = self._lowered(routine, None)
                self.module.link_in(
                    llvm.parse_assembly(
                        entry_of(context_of(self.processor.target), routine.signature(self.program.dtype), body, symbol)
                    )
                )
                for name in (symbol, body) if routine.name in INLINED else (body,):
                    self.module.get_function(name).add_function_attribute("alwaysinline")

    # ------------------------------------------------------------ entries
    def _entry(self, name: str, spans: Sequence[tuple[int, int]]) -> None:
        f = ir.Function(self.calls, ir.FunctionType(I32, [self.element.as_pointer()]), name)
        b = ir.IRBuilder(f.append_basic_block())
        (heap,) = f.args
        heap.add_attribute("nonnull")
        self.answer = (
            b.alloca(I8.as_pointer()),
            b.alloca(I8.as_pointer()),
        )  # of a kernel in Numba's convention, which nothing reads
        code, where = (b.gep(heap, [I32(place)]) for place in (TRAP_CODE, TRAP_PC))
        end = f.append_basic_block()
        for span in spans:
            for pc in range(*span):
                for phase in range(phases_of(self.rows[pc])):
                    self._call(b, heap, pc, phase)
            going = f.append_basic_block()
            b.cbranch(b.fcmp_ordered("==", b.load(code), self.element(0.0)), going, end)
            b.position_at_end(going)
        b.branch(end)
        b.position_at_end(end)
        trap = b.add(b.fptosi(b.load(code), I32), b.shl(b.fptosi(b.load(where), I32), I32(TRAP_SHIFT)))
        for place in (code, where):
            b.store(self.element(0.0), place)
        b.ret(trap)

    def _call(self, b: ir.IRBuilder, heap: Any, pc: int, phase: int) -> None:
        """Call a row's kernel, in Numba's convention, as the only worker."""
        body, words = self.bodies[self._name(pc)]
        args = [heap, self._head(b, pc), WORD(0), WORD(1), WORD(phase)]
        for (word, kind), value in zip(words, self.rows[pc, PREFIX:].tolist()):
            if kind == "float":
                args.append(ir.DoubleType()(np.int64(value).view(np.float64).item()))
                continue
            if not -(2 ** (WORD.width - 1)) <= value < 2 ** (WORD.width - 1):
                raise CalcError(
                    f"row {pc}: {word}={value} is beyond integers of {WORD.width} bits, which {self.processor.name} has"
                )
            if kind == "int":
                args.append(WORD(value))
            else:
                narrowed = self.small is not None and word in self.small.HYPER  # the offset is of float64
                args.append(self._operand(b, heap, element_of(kind) or self.program.dtype, value, 8 if narrowed else 0))
        given = [*self.answer, *args]
        f = self.calls.globals.get(body) or ir.Function(self.calls, ir.FunctionType(I32, [a.type for a in given]), body)
        b.call(f, given)

    def _operand(self, b: ir.IRBuilder, heap: Any, dtype: str, offset: int, itemsize: int) -> Any:
        """The address of an operand, in elements of ``itemsize`` bytes (0: of its type) from the start of the program's heap."""
        pointer = ELEMENTS.get(dtype, I8).as_pointer()
        if offset == ABSENT:
            return pointer(None)
        at, constant = self.places.of(offset * (itemsize or BYTES[dtype]))
        base = b.bitcast(self.constants if constant else heap, I8.as_pointer())
        return b.bitcast(b.gep(base, [WORD(at)], inbounds=True), pointer)

    def _head(self, b: ir.IRBuilder, pc: int) -> Any:
        """The first words of a row, which traps read."""
        name = f"row_{pc}"
        if name not in self.calls.globals:
            t = ir.ArrayType(I64, PREFIX)
            g = ir.GlobalVariable(self.calls, t, name)
            g.linkage, g.global_constant, g.initializer = "internal", True, t([0, int(self.rows[pc, 1])])
        return b.gep(self.calls.globals[name], [I32(0), I32(0)])

    # ------------------------------------------------------------ code
    def finish(self) -> None:
        """Make ``code``, the object, and ``calls_of``, by function those that it calls; and ``frames``, where LLVM tells of none."""
        self.module.link_in(llvm.parse_assembly(str(self.calls)))
        bodies = {body for body, _ in self.bodies.values()}
        if self.smallest:  # one copy of what a row does for each parameter
            bodies -= {body for name, (body, _) in self.bodies.items() if name in UPDATES}
        for f in self.module.functions:
            if f.is_declaration:
                continue
            if f.name not in self.entries:
                f.linkage = "internal"
            if self.smallest:
                f.add_function_attribute("minsize")
                f.add_function_attribute("optsize")
            if f.name in bodies:
                f.add_function_attribute("alwaysinline")
        machine = self.processor.target.machine(2)
        for _ in range(ROUNDS):
            tuning = llvm.create_pipeline_tuning_options(2)
            tuning.loop_vectorization = tuning.slp_vectorization = not self.smallest
            tuning.loop_unrolling = not self.smallest and not self.processor.wasm
            builder = llvm.create_pass_builder(machine, tuning)
            builder.getModulePassManager().run(self.module, builder)
            more = llvm.create_new_module_pass_manager()
            more.add_ipsccp_pass()
            more.add_dead_arg_elimination_pass()
            more.add_merge_functions_pass()
            more.add_constant_merge_pass()
            more.add_global_dead_code_eliminate_pass()
            more.run(self.module, builder)
        for k, f in enumerate(f for f in self.module.functions if not f.is_declaration and f.name not in self.entries):
            f.name = f"part_{k}"  # LLVM would tell of it by a readable form of its name
        # LLVM tells the frame of each function as a warning
        module = llvm.parse_assembly(DEFINITION.sub(r'\1 "warn-stack-size"="0"\2{', str(self.module)))
        module.verify()
        self.calls_of = {f.name: _called(f) for f in module.functions if not f.is_declaration}
        self.frames = {f.name: _allocated(f) for f in module.functions if self.processor.wasm and not f.is_declaration}
        self.code = machine.emit_object(module)
        if not self.processor.wasm and (text := libm_of(Elf(self.code).undefined)):
            module.link_in(llvm.parse_assembly(text), preserve=True)
            self.code = machine.emit_object(module)


def _allocated(f: llvm.ValueRef) -> int:
    """Bytes that a function takes of WebAssembly's stack in memory, which has arrays alone."""
    found = [ALLOCATION.search(str(i)) for block in f.blocks for i in block.instructions if i.opcode == "alloca"]
    return sum(-(-int(m[1] or 1) * BYTES_OF[m[2]] // 16) * 16 for m in found if m)


def _called(f: llvm.ValueRef) -> list[str]:
    """The functions that a function calls."""
    calls = [i for block in f.blocks for i in block.instructions if i.opcode in ("call", "invoke")]
    names = [[*call.operands][-1].name for call in calls]
    return [name for name in dict.fromkeys(names) if name and not name.startswith("llvm.")]
