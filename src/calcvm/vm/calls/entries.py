"""Functions that the interpreter calls for a model's methods, one per method, from the first model on.

They call the compiled `compiled.method` once it exists, and until then the Python method; references taken early therefore
get the compiled method later.  These functions are written in LLVM IR, so nothing else needs to be compiled for them.
"""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir

from calcvm.kernels_cpu._target import Target
from calcvm.vm.run.entry import METHODS, OWN, STREAMS, TUPLE_SIZE

I64 = ir.IntType(64)


def build(symbol: str, target: Target) -> bytes:
    """An object file with the function ``symbol``: k -> address of method k's code, or of `method`'s variable (last k)."""
    module = ir.Module(symbol)
    module.triple = target.triple
    compiled = ir.GlobalVariable(module, I64, "compiled")
    compiled.linkage, compiled.initializer = "internal", I64(0)
    handing = _hand_on(module)
    names = (*METHODS.values(), *STREAMS.values(), "bound_step")
    codes = [_method(module, k, name, compiled, handing) for k, name in enumerate(names)]
    addresses = [*(code.ptrtoint(I64) for code in codes), compiled.ptrtoint(I64)]
    table = ir.GlobalVariable(module, ir.ArrayType(I64, len(addresses)), "table")
    table.linkage, table.initializer = "internal", ir.Constant(table.value_type, addresses)
    function = ir.Function(module, ir.FunctionType(I64, [I64]), symbol)
    b = ir.IRBuilder(function.append_basic_block())
    b.ret(b.load(b.gep(table, [I64(0), function.args[0]])))
    return target.machine(2).emit_object(llvm.parse_assembly(str(module)))


def _method(module: ir.Module, k: int, name: str, compiled: ir.GlobalVariable, handing: ir.Function) -> ir.Function:
    """A method's code, with (self, arguments, their number, names): METH_FASTCALL | METH_KEYWORDS."""
    function = ir.Function(module, ir.FunctionType(I64, [I64] * 4), name)
    function.linkage = "internal"
    text = bytearray(f"{OWN}{name}\0".encode())
    of_python = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), len(text)), f"{name}.text")
    of_python.linkage, of_python.initializer = "internal", ir.Constant(of_python.value_type, text)
    b = ir.IRBuilder(function.append_basic_block())
    code = b.load(compiled)
    with b.if_then(b.icmp_signed("==", code, I64(0)), likely=False):
        b.ret(b.call(handing, [*function.args, b.ptrtoint(of_python, I64)]))
    method = b.inttoptr(code, ir.FunctionType(I64, [I64] * 5).as_pointer())
    b.ret(b.call(method, [*function.args, I64(k)], tail=True))
    return function


def _hand_on(module: ir.Module) -> ir.Function:
    """A function that calls the Python method with a name, with the same objects."""
    intern, call, forget, copy = (
        ir.Function(module, ir.FunctionType(result, [I64] * n), name)
        for name, result, n in (
            ("PyUnicode_InternFromString", I64, 1), ("PyObject_VectorcallMethod", I64, 4),
            ("Py_DecRef", ir.VoidType(), 1), ("memcpy", I64, 3),
        )
    )  # fmt: skip
    function = ir.Function(module, ir.FunctionType(I64, [I64] * 5), "hand_on")
    function.linkage = "internal"
    self, args, n, names, text = function.args
    b = ir.IRBuilder(function.append_basic_block())
    start = b.block
    with b.if_then(b.icmp_signed("!=", names, I64(0))):
        named = b.load(b.inttoptr(b.add(names, I64(TUPLE_SIZE)), I64.as_pointer()))
        counted = b.block
    many = b.phi(I64)
    many.add_incoming(I64(0), start)
    many.add_incoming(named, counted)
    all_ = b.add(n, many)
    objects = b.alloca(I64, b.add(all_, I64(1)))
    b.store(self, objects)
    b.call(copy, [b.ptrtoint(b.gep(objects, [I64(1)]), I64), args, b.mul(all_, I64(8))])
    name = b.call(intern, [text])
    answer = b.call(call, [name, b.ptrtoint(objects, I64), b.add(n, I64(1)), names])
    b.call(forget, [name])
    b.ret(answer)
    return function
