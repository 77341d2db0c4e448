"""Rows as straight code: each row's kernel is called with the row's words as constants, as by the only worker.

There is no loop over rows, no table and no indirect call, and LLVM knows every size.  Packs for other processors are made of it
(`calcvm.edge.straight`), and sections of specialized programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba.core.compiler_lock import global_compiler_lock

from calcvm.kernel import FLAG_PHASES, PREFIX, Words, element_of
from calcvm.kernels_cpu import _native, find
from calcvm.kernels_cpu._codegen import context_of
from calcvm.kernels_cpu._common import (
    I8,
    I32,
    I64,
    ROUTINES,
    WORD,
    Native,
    entry_of,
    kernel_signature,
    lowered,
    on_device,
)
from calcvm.kernels_cpu._target import Target, on_target

MAGIC = b"calcvm body 1\n"  # of the files of bodies, which the cache keeps as LLVM's bitcode
ROUNDS = 2  # of LLVM's passes: what became constant in one is used in the next
ELEMENTS = {"float32": ir.FloatType(), "float64": ir.DoubleType(), "int64": I64, "int32": I32}
# routines of which little is left where their choice is known
INLINED = ("activate", "scale_by_derivative", "complete")


class StraightRows:
    """Rows whose kernels are called one after the other; ``names`` : those of the instructions, in the order of their numbers.

    module : the kernels' bodies.  calls : the functions that call them.
    """

    def __init__(self, rows: np.ndarray, names: Sequence[str], dtype: str, device: str, target: Target):
        self.rows, self.names, self.dtype, self.device, self.target = rows, names, dtype, device, target
        self.element = ELEMENTS[dtype]
        self.bodies = dict[str, tuple[str, Words]]()  # by kernel: its body, and its words
        self.calls, self.module = ir.Module(), llvm.parse_assembly("")
        self.machine = target.machine(2)
        self.module.triple, self.module.data_layout = target.triple, str(self.machine.target_data)

    # ------------------------------------------------------------ bodies
    def link(self, rows: Iterable[int]) -> None:
        """Link the kernels of rows in, with all that they call."""
        with on_device(self.device, straight=True), on_target(self.target):
            for pc in rows:
                if (name := self.name(pc)) not in self.bodies:
                    kernel, words = self.kernel(name)
                    self.bodies[name] = self._linked(kernel, words), words
            self._routines()

    def name(self, pc: int) -> str:
        return self.names[self.rows[pc, 0]]

    def kernel(self, name: str) -> tuple[Any, Words]:
        """A row's kernel for the target, and its words."""
        kernel = find(name)
        return kernel, kernel.words

    def _linked(self, fn: Native, words: Any) -> str:
        """Link a kernel or routine in; the name of its body."""
        name = f"{fn.symbol(self.dtype, self.device)}.body"
        path = _native.folder((*fn.modules(self.device), "kernels_cpu._straight"), self.target) / f"{name}.bc"
        code = None if fn.mark else _native.fetch(path, MAGIC)
        if code is None:
            library, body = lowered(fn.fn, fn.signature(self.dtype), words, self.target)
            part = library._final_module
            for value in (*part.functions, *part.global_variables):
                if not value.is_declaration and value.name != body:
                    value.linkage = "internal"
            part.get_function(body).name = name
            code = part.as_bitcode()
            if not fn.mark:
                _native.store(path, MAGIC, code, "compiled code")
        self.module.link_in(llvm.parse_bitcode(code))
        return name

    def _routines(self) -> None:
        """Link in all routines that are called by their symbols."""
        known = {routine.symbol(self.dtype): routine for routine in ROUTINES.values()}
        while wanted := [f.name for f in self.module.functions if f.is_declaration and f.name in known]:
            for symbol in wanted:
                routine = known[symbol]
                body, signature = self._linked(routine, None), routine.signature(self.dtype)
                entry = entry_of(context_of(self.target), signature, body, symbol)
                self.module.link_in(llvm.parse_assembly(entry))
                for name in (symbol, body) if routine.name in INLINED else (body,):
                    self.module.get_function(name).add_function_attribute("alwaysinline")

    # ------------------------------------------------------------ calls
    def call_rows(self, b: ir.IRBuilder, heap: Any, rows: Iterable[int]) -> None:
        """Call the kernels of rows, in every phase."""
        for pc in rows:
            for phase in range(self.rows[pc, PREFIX] if self.rows[pc, 1] & FLAG_PHASES else 1):
                self._call(b, heap, pc, phase)

    def function(self, name: str, returned: Any, taken: Sequence[Any]) -> tuple[ir.Function, ir.IRBuilder]:
        """Begin a function that calls rows."""
        f = ir.Function(self.calls, ir.FunctionType(returned, taken), name)
        b = ir.IRBuilder(f.append_basic_block())
        # Numba's functions write a result and an exception through their first two arguments; nothing reads these
        self.answer = b.alloca(I8.as_pointer()), b.alloca(I8.as_pointer())
        return f, b

    def _call(self, b: ir.IRBuilder, heap: Any, pc: int, phase: int) -> None:
        body, words = self.bodies[self.name(pc)]
        args = [heap, self._head(b, pc), WORD(0), WORD(1), WORD(phase)]
        for (word, kind), value in zip(words, self.rows[pc, PREFIX:].tolist()):
            if kind == "float":
                args.append(ir.DoubleType()(np.int64(value).view(np.float64).item()))
                continue
            self.check(pc, word, value)
            if kind == "int":
                args.append(WORD(value))
            elif value < 0:
                args.append(pointer_to(element_of(kind) or self.dtype)(None))
            else:
                args.append(self.operand(b, heap, word, element_of(kind) or self.dtype, value))
        given = [*self.answer, *args]
        f = self.calls.globals.get(body) or ir.Function(self.calls, ir.FunctionType(I32, [a.type for a in given]), body)
        b.call(f, given)

    def check(self, pc: int, word: str, value: int) -> None:
        """A subclass raises a CalcError if its processor has no such integers."""

    def operand(self, b: ir.IRBuilder, heap: Any, word: str, dtype: str, offset: int) -> Any:
        """The address of an operand, whose elements have a type, at an offset of the program's heap."""
        return b.gep(b.bitcast(heap, pointer_to(dtype)), [WORD(offset)], inbounds=True)

    def _head(self, b: ir.IRBuilder, pc: int) -> Any:
        """The first words of a row, which traps read."""
        name = f"row_{pc}"
        if name not in self.calls.globals:
            t = ir.ArrayType(I64, PREFIX)
            g = ir.GlobalVariable(self.calls, t, name)
            g.linkage, g.global_constant, g.initializer = "internal", True, t([0, int(self.rows[pc, 1])])
        return b.gep(self.calls.globals[name], [I32(0), I32(0)])

    # ------------------------------------------------------------ code
    def join(self, entries: Iterable[str], inlined: Iterable[str]) -> None:
        """Join calls and bodies: only entries stay visible, and the bodies of some kernels are inlined into their calls."""
        self.module.link_in(llvm.parse_assembly(str(self.calls)))
        self.visible = {*entries}
        for f in self.module.functions:
            if not f.is_declaration and f.name not in self.visible:
                f.linkage = "internal"
        for name in inlined:
            self.module.get_function(self.bodies[name][0]).add_function_attribute("alwaysinline")

    def optimize(self, prefix: str, vectorize: bool = True, unroll: bool = True) -> None:
        """Optimize all, and name what is left beside the entries by numbers after a prefix."""
        for _ in range(ROUNDS):
            tuning = llvm.create_pipeline_tuning_options(2)
            tuning.loop_vectorization = tuning.slp_vectorization = vectorize
            tuning.loop_unrolling = unroll
            builder = llvm.create_pass_builder(self.machine, tuning)
            builder.getModulePassManager().run(self.module, builder)
            more = llvm.create_new_module_pass_manager()
            more.add_ipsccp_pass()
            more.add_dead_arg_elimination_pass()
            more.add_merge_functions_pass()
            more.add_constant_merge_pass()
            more.add_global_dead_code_eliminate_pass()
            more.run(self.module, builder)
        hidden = (f for f in self.module.functions if not f.is_declaration and f.name not in self.visible)
        for k, f in enumerate(hidden):  # LLVM's linker would take a routine's remains for the routine
            f.name = f"{prefix}{k}"


def pointer_to(dtype: str) -> Any:
    return ELEMENTS.get(dtype, I8).as_pointer()


def section(symbol: str, rows: np.ndarray, names: Sequence[str], dtype: str, device: str, target: Target) -> bytes:
    """The object file of one kernel (see `kernel_signature`) that runs all of these rows."""
    with global_compiler_lock:
        made = StraightRows(rows, names, dtype, device, target)
        made.link(range(len(rows)))
        types = [context_of(target).get_value_type(t) for t in kernel_signature(dtype).args]
        f, b = made.function(symbol, ir.VoidType(), types)
        made.call_rows(b, f.args[0], range(len(rows)))
        b.ret_void()
        made.join([symbol], made.bodies)
        made.optimize(f"{symbol}_")
        return made.machine.emit_object(made.module)
