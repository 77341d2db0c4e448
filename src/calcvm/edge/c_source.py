"""Straight code as one C99 file, for compilers that LLVM has no back end of, and for certified ones.

What a program is made of is few instructions of LLVM: each value is a variable, each block a label.  Integers are unsigned, and signed
where an instruction reads them so: nothing overflows.  An instruction that is not among them is refused.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator
from operator import mul
from textwrap import wrap
from typing import Any

import llvmlite.binding as llvm

from calcvm.errors import CalcError

C_TYPES = {
    "i1": "uint8_t", "i8": "uint8_t", "i16": "uint16_t", "i32": "uint32_t", "i64": "uint64_t", "float": "float", "double": "double",
    "ptr": "char *", "void": "void",
}  # fmt: skip
MEMORY = {t: f"in_memory_{t}" for t in ("i8", "i16", "i32", "i64", "float", "double", "ptr")}
SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "float": 4, "double": 8}
ONE_LANE = re.compile(r"<1 x (\w+)>")
ARRAY = re.compile(r"\[(\d+) x (.+)\]")
FLOAT = re.compile(r"0x([0-9A-F]+)$")
STRUCT = re.compile(r"\{ (\w+(?:, \w+)*) \}")
OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^", "shl": "<<", "lshr": ">>", "udiv": "/", "urem": "%",
    "fadd": "+", "fsub": "-", "fmul": "*", "fdiv": "/",
}  # fmt: skip
SIGNED = {"ashr": ">>", "sdiv": "/", "srem": "%"}
ORDER = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
NOT = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}
IGNORED = ("llvm.lifetime", "llvm.experimental.noalias", "llvm.assume", "llvm.prefetch")
CALLS = {  # of an intrinsic's arguments, as text
    "arithmetic.fence": "{0}", "fmuladd": "{0} * {1} + {2}", "abs": "(int{n}_t){0} < 0 ? 0u - {0} : {0}",
    "smax": "(int{n}_t){0} > (int{n}_t){1} ? {0} : {1}", "smin": "(int{n}_t){0} < (int{n}_t){1} ? {0} : {1}",
    "umax": "{0} > {1} ? {0} : {1}", "umin": "{0} < {1} ? {0} : {1}",
    "maximum": "{0} > {1} || {0} != {0} ? {0} : {1}", "minimum": "{0} < {1} || {0} != {0} ? {0} : {1}",
    "memcpy": "memcpy({0}, {1}, {2})", "memmove": "memmove({0}, {1}, {2})", "memset": "memset({0}, {1}, {2})",
}  # fmt: skip
OF_MATH = {"sqrt", "fabs", "floor", "ceil", "trunc", "rint", "copysign", "fma"}  # functions of math.h
SATURATED = "{0} != {0} ? 0u : {0} < -0x1p{m}f ? (uint{n}_t)1 << {m} : {0} >= 0x1p{m}f ? ((uint{n}_t)1 << {m}) - 1u : (uint{n}_t)(int{n}_t){0}"
HEAD = """/* {name}: see {name}.h.  C99, without allocation or recursion; of the library memcpy and memset{more}.
   Compile it without -ffast-math. */
#include "{name}.h"
{includes}#include <string.h>

#if defined(__GNUC__)
#define IN_MEMORY __attribute__((may_alias)) /* numbers lie in a heap of bytes */
#else
#define IN_MEMORY
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Waggressive-loop-optimizations" /* it tells of loops that are skipped, too */
#endif
typedef uint8_t IN_MEMORY in_memory_i8;
typedef uint16_t IN_MEMORY in_memory_i16;
typedef uint32_t IN_MEMORY in_memory_i32;
typedef uint64_t IN_MEMORY in_memory_i64;
typedef float IN_MEMORY in_memory_float;
typedef double IN_MEMORY in_memory_double;
typedef char *IN_MEMORY in_memory_ptr;

"""


def c_source(module: llvm.ModuleRef, name: str) -> str:
    """The text of a module of one lane, whose public functions the header ``name.h`` declares.

    Raises
    ------
    CalcError : an instruction has no translation.
    """
    manager = llvm.create_new_module_pass_manager()
    manager.add_lower_switch_pass()
    manager.add_instruction_namer_pass()
    target = llvm.Target.from_triple(module.triple).create_target_machine()
    manager.run(module, llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(0)))
    elsewhere = {f.name for f in module.functions if f.is_declaration}
    functions = [_Function(f, elsewhere) for f in module.functions if not f.is_declaration]
    texts = [f.text() for f in functions]
    called = sorted({m for f in functions for m in f.math})
    more = f", of math.h {', '.join(called)}" if called else ""
    head = HEAD.format(name=name, more=more, includes="#include <math.h>\n" * bool(called))
    head += "".join(f"static inline {text}\n" for called, text in BITS.items() if any(f"{called}(" in t for t in texts))
    structs = {kind for f in functions for kind in (_c_type(f.returns), *f.variables) if kind.startswith("struct")}
    head += "".join(f"{_struct(kind)}\n" for kind in sorted(structs))
    constants = [_constant(g) for g in module.global_variables]
    private = [f"{f.signature()};" for f in functions if f.static]
    return head + "\n".join([*constants, *private, "", *texts])


BITS = {
    "bits_of": "uint32_t bits_of(float x) { uint32_t y; memcpy(&y, &x, 4); return y; }",
    "float_of": "float float_of(uint32_t x) { float y; memcpy(&y, &x, 4); return y; }",
    "bits_of_double": "uint64_t bits_of_double(double x) { uint64_t y; memcpy(&y, &x, 8); return y; }",
    "double_of": "double double_of(uint64_t x) { double y; memcpy(&y, &x, 8); return y; }",
}
CONVERSIONS = {
    ("float", "i32"): "bits_of", ("i32", "float"): "float_of", ("double", "i64"): "bits_of_double", ("i64", "double"): "double_of",
}  # fmt: skip


def _scalar(kind: Any) -> str:
    """A type, where a vector of one lane is its element."""
    return ONE_LANE.sub(r"\1", str(kind))


def _c_type(kind: str) -> str:
    """A type in C (KeyError: there is none)."""
    if found := STRUCT.fullmatch(kind):
        return f"struct of_{found[1].replace(', ', '_')}"
    return C_TYPES[kind]


def _memory(kind: str) -> str:
    return MEMORY.get(kind) or _c_type(kind)


def _struct(kind: str) -> str:
    parts = kind.split("of_")[1].split("_")
    fields = " ".join(_declared(t, f"_{k}") + ";" for k, t in enumerate(parts))
    return f"{kind} {{ {fields} }};"


def _name(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _constant(g: llvm.ValueRef) -> str:
    found = re.match(r"@(\S+) = .*?constant \[(\d+) x (i\d+)\] (.*?)(?:, align \d+)?$", str(g))
    if not found:
        raise CalcError(f"export: no C for {str(g)[:80]}")
    name, n, kind, data = found.groups()
    if data.startswith("c"):
        values = [
            ord(c or h) if c or h == "\\" else int(h, 16) for h, c in re.findall(r"\\([0-9A-F]{2}|\\)|(.)", data[2:-1])
        ]
    else:
        values = [int(v) for v in re.findall(r"i\d+ (-?\d+)", data)] or [0]
    bits = int(kind[1:])
    rows = [", ".join(str(v % 2**bits) for v in values[k : k + 24]) for k in range(0, len(values), 24)]
    lines = ",\n    ".join(rows)
    return f"static const {C_TYPES[kind]} {_name(name)}[{max(int(n), 1)}] = {{\n    {lines}}};"


class _Function:
    """A function.  elsewhere : names of functions that the module has not.  math : those of math.h that this one calls."""

    def __init__(self, f: llvm.ValueRef, elsewhere: set[str]):
        self.elsewhere = elsewhere
        self.f, self.static, self.math = f, f.linkage != llvm.Linkage.external, set[str]()
        self.names: dict[str, str] = {}
        self.variables: dict[str, list[str]] = {}  # by their types
        self.lines: list[str] = []
        self.blocks = {b.name: b for b in f.blocks}
        self.labels = {name: f"L{k}" for k, name in enumerate(self.blocks)}
        self.phis = {b.name: [i for i in b.instructions if i.opcode == "phi"] for b in f.blocks}
        self.returns = _scalar(str(f.global_value_type).split(" (")[0])
        self.args = [(_scalar(a.type), self._id(a.name)) for a in f.arguments]
        self.read = {o.name for b in f.blocks for i in b.instructions for o in i.operands if o.name}

    def signature(self) -> str:
        if not self.static:
            return f"int32_t {self.f.name}(void *heap)"
        args = ", ".join(_declared(t, n) for t, n in self.args)
        return f"static {_declared(self.returns, _name(self.f.name))}({args or 'void'})"

    def text(self) -> str:
        entry = next(iter(self.blocks))
        for name, block in self.blocks.items():
            if name != entry:
                self.lines.append(f"{self.labels[name]}:")
            for i in block.instructions:
                self._instruction(i, name)
        declared = [f"char *{self.args[0][1]} = (char *)heap;"] * (not self.static)
        for kind, names in self.variables.items():
            star = "*" * kind.endswith("*")
            declared += wrap(
                f"{kind.rstrip('*')}{' ' * (not star)}{', '.join(star + name for name in names)};",
                120,
                subsequent_indent="    ",
            )
        unread = [f"(void){self._id(a.name)};" for a in self.f.arguments if a.name not in self.read]
        lines = [line if line.endswith(":") else f"    {line}" for line in (*declared, *unread, *self.lines)]
        return "\n".join([self.signature(), "{", *lines, "}", ""])

    # ------------------------------------------------------------ names and values
    def _id(self, name: str) -> str:
        return self.names.setdefault(name, f"v{len(self.names)}")

    def _value(self, v: llvm.ValueRef) -> str:
        if not v.is_constant:
            return self._id(v.name)
        kind, text = _scalar(v.type), str(v)
        if v.value_kind == llvm.ValueKind.global_variable:
            return f"(char *){_name(v.name)}"
        text = text.removeprefix(f"{v.type} ")
        text = re.sub(r"^splat \(\w+ (.*)\)$|^<\w+ (.*)>$", lambda m: m[1] or m[2], text)
        if text in ("zeroinitializer", "null", "poison", "undef", "none", "false"):
            return "0"
        if text == "true":
            return "1"
        if found := re.match(
            r"getelementptr (?:inbounds |nuw |nusw )*\((.+), ptr @([\w.]+)((?:, i\d+ -?\d+)+)\)$", text
        ):
            index = [int(n) for n in re.findall(r"i\d+ (-?\d+)", found[3])]
            return f"((char *){_name(found[2])} + {sum(map(mul, index, _steps(found[1], len(index))))})"
        if kind in ("float", "double"):
            return _number(text, kind)
        if re.fullmatch(r"-?\d+", text):
            bits = int(kind[1:])
            return f"{int(text) % 2**bits}u" + "ll" * (bits == 64)
        raise CalcError(f"export: no C for the constant {str(v)[:80]}")

    def _first(self, i: llvm.ValueRef) -> str:
        return self._value(next(iter(i.operands)))

    def _set(self, i: llvm.ValueRef, text: str) -> None:
        if i.name not in self.read:
            return
        self._declare(i, self._id(i.name), _scalar(i.type))
        self.lines.append(f"{self._id(i.name)} = {text};")

    def _declare(self, i: llvm.ValueRef, name: str, kind: str) -> None:
        try:
            self.variables.setdefault(_c_type(kind), []).append(name)
        except KeyError:
            raise _untold(i) from None

    # ------------------------------------------------------------ instructions
    def _instruction(self, i: llvm.ValueRef, block: str) -> None:
        op = i.opcode
        if op == "phi":
            self._declare(i, self._id(i.name), _scalar(i.type))
            return
        handler: Callable[..., None] | None = getattr(self, f"_{op}", None)
        if op in OPERATORS or op in SIGNED:
            self._set(i, self._operation(i, op))
        elif op == "br":
            self._br(i, block)
        elif handler is None:
            raise _untold(i)
        else:
            handler(i)

    def _operation(self, i: llvm.ValueRef, op: str) -> str:
        kind, (a, b) = _scalar(i.type), map(self._value, i.operands)
        if op in SIGNED:
            to = f"(int{kind[1:]}_t)"
            return f"({C_TYPES[kind]})({to}{a} {SIGNED[op]} {to}{b})"
        text = f"{a} {OPERATORS[op]} {b}"
        return f"({C_TYPES[kind]})({text})" if kind in ("i1", "i8", "i16") else text

    def _fneg(self, i: llvm.ValueRef) -> None:
        self._set(i, f"-{self._first(i)}")

    def _icmp(self, i: llvm.ValueRef) -> None:
        order = re.search(r"icmp (?:samesign )?(\w+)", str(i))[1]  # type: ignore[index]
        (x, y), kind = i.operands, _scalar(next(iter(i.operands)).type)
        to = f"(int{kind[1:]}_t)" if order[0] == "s" else ""
        self._set(i, f"{to}{self._value(x)} {ORDER[order[-2:]]} {to}{self._value(y)}")

    def _fcmp(self, i: llvm.ValueRef) -> None:
        words = str(i).split(" fcmp ")[1].split()
        order = next(w for w in words if w in ("ord", "uno") or (w[0] in "ou" and w[1:] in ORDER))
        a, b = map(self._value, i.operands)
        sign = ORDER.get(order[1:], "")
        if order in ("ord", "uno"):
            joined, how = ("&&", "==") if order == "ord" else ("||", "!=")
            texts = [f"{v} {how} {v}" for v in (a, b) if v.startswith("v")]
            text = f" {joined} ".join(dict.fromkeys(texts))
        elif order in ("oeq", "une"):
            text = f"{a} {sign} {b}"
        elif order in ("one", "ueq"):
            text = f"{'!' * (order == 'ueq')}({a} < {b} || {a} > {b})"
        else:
            text = f"{a} {sign} {b}" if order[0] == "o" else f"!({a} {NOT[sign]} {b})"
        self._set(i, text)

    def _select(self, i: llvm.ValueRef) -> None:
        c, a, b = map(self._value, i.operands)
        self._set(i, f"{c} ? {a} : {b}")

    def _load(self, i: llvm.ValueRef) -> None:
        kind = _scalar(i.type)
        self._set(i, f"*(const {_memory(kind)} *)({self._first(i)})")

    def _store(self, i: llvm.ValueRef) -> None:
        value, to = i.operands
        kind = _scalar(value.type)
        self.lines.append(f"*({_memory(kind)} *)({self._value(to)}) = {self._value(value)};")

    def _alloca(self, i: llvm.ValueRef) -> None:
        found = re.search(r"alloca (\{.*?\}|[^,]+)(?:, i32 (\d+))?", str(i))
        kind, n = _scalar(found[1]), int(found[2] or 1)  # type: ignore[index]
        while array := ARRAY.fullmatch(kind):
            kind, n = array[2], n * int(array[1])
        self._declare(i, f"{self._id(i.name)}_of[{n}]", kind)
        self._set(i, f"(char *){self._id(i.name)}_of")

    def _getelementptr(self, i: llvm.ValueRef) -> None:
        kind = _scalar(re.search(r"getelementptr (?:(?:inbounds|nuw|nusw) )*(\[.+?\]|\w+|<1 x \w+>),", str(i))[1])  # type: ignore[index]
        base, *index = i.operands
        texts = []
        for of, size in zip(index, _steps(kind, len(index))):
            value = self._value(of)
            bits = int(_scalar(of.type)[1:])
            if of.is_constant:
                n = int(value.rstrip("ul"))
                n -= 2**bits * (n >= 2 ** (bits - 1))
                texts += [f" {'-' if n < 0 else '+'} {abs(n) * size}"] * bool(n)
            elif size > 1 and bits >= 32:
                texts.append(f" + (int{bits}_t)({value} * {size}u)")
            else:
                texts.append(f" + (int{bits}_t){value}" + f" * {size}" * (size > 1))
        self._set(i, self._value(base) + "".join(texts))

    def _sext(self, i: llvm.ValueRef) -> None:
        of = next(iter(i.operands))
        small, large = _scalar(of.type), _scalar(i.type)
        text = f"0u - {self._value(of)}" if small == "i1" else f"(int{large[1:]}_t)(int{small[1:]}_t){self._value(of)}"
        self._set(i, f"({C_TYPES[large]})({text})")

    def _cast(self, i: llvm.ValueRef) -> None:
        self._set(i, f"({C_TYPES[_scalar(i.type)]}){self._first(i)}")

    _zext = _uitofp = _fptrunc = _fpext = _fptoui = _cast

    def _ptrtoint(self, i: llvm.ValueRef) -> None:  # differences of addresses; nothing goes back to a pointer
        self._set(i, f"({C_TYPES[_scalar(i.type)]})(uintptr_t){self._first(i)}")

    def _trunc(self, i: llvm.ValueRef) -> None:
        kind, value = _scalar(i.type), self._first(i)
        self._set(i, f"({C_TYPES[kind]}){f'({value} & 1u)' if kind == 'i1' else value}")

    def _sitofp(self, i: llvm.ValueRef) -> None:
        of = next(iter(i.operands))
        kind, value = _scalar(of.type), self._value(of)
        self._set(
            i, f"({C_TYPES[_scalar(i.type)]})" + (f"-(int){value}" if kind == "i1" else f"(int{kind[1:]}_t){value}")
        )

    def _fptosi(self, i: llvm.ValueRef) -> None:
        kind = _scalar(i.type)
        self._set(i, f"({C_TYPES[kind]})(int{kind[1:]}_t){self._first(i)}")

    def _bitcast(self, i: llvm.ValueRef) -> None:
        of = next(iter(i.operands))
        kinds = _scalar(of.type), _scalar(i.type)
        value = self._value(of)
        self._set(i, value if kinds[0] == kinds[1] else f"{CONVERSIONS[kinds]}({value})")

    def _same(self, i: llvm.ValueRef) -> None:
        self._set(i, self._first(i))

    _freeze = _extractelement = _shufflevector = _same

    def _insertelement(self, i: llvm.ValueRef) -> None:
        self._set(i, self._value([*i.operands][1]))

    def _call(self, i: llvm.ValueRef) -> None:
        *args, callee = i.operands
        name, values = callee.name, [self._value(a) for a in args]
        if name.startswith(IGNORED):
            return
        if name.startswith(("llvm.masked.load", "llvm.masked.gather")):  # of one lane
            self._set(i, f"{values[-2]} ? *(const {_memory(_scalar(i.type))} *)({values[0]}) : {values[-1]}")
        elif name.startswith("llvm.masked.store"):
            self.lines.append(f"if ({values[-1]}) *({_memory(_scalar(args[0].type))} *)({values[1]}) = {values[0]};")
        elif name.startswith("llvm.fptosi.sat"):
            n = int(_scalar(i.type)[1:])
            self._set(i, SATURATED.format(*values, n=n, m=n - 1))
        elif name.startswith("llvm."):
            self._intrinsic(i, name, values)
        else:
            if name in self.elsewhere:
                self._of_math(i, name)
            text = f"{_name(name)}({', '.join(values)})"
            if _scalar(i.type) == "void" or i.name not in self.read:
                self.lines.append(f"{text};")
            else:
                self._set(i, text)

    def _insertvalue(self, i: llvm.ValueRef) -> None:
        (into, value), place = i.operands, str(i).rsplit(", ", 1)[1].split()[0]
        self._declare(i, self._id(i.name), _scalar(i.type))
        self.lines += [f"{self._id(i.name)} = {self._value(into)};"] * (not into.is_constant)
        self.lines.append(f"{self._id(i.name)}._{place} = {self._value(value)};")

    def _extractvalue(self, i: llvm.ValueRef) -> None:
        self._set(i, f"{self._first(i)}._{str(i).rsplit(', ', 1)[1].split()[0]}")

    def _intrinsic(self, i: llvm.ValueRef, name: str, values: list[str]) -> None:
        kind = next((k for k in (*CALLS, *OF_MATH) if name.startswith(f"llvm.{k}.")), None)
        if kind is None:
            raise CalcError(f"export: no C for {name}")
        of = _scalar(i.type)
        if kind in OF_MATH:
            function = kind + "f" * (of == "float")
            self._of_math(i, function)
            self._set(i, f"{function}({', '.join(values)})")
        elif of == "void":
            self.lines.append(f"{CALLS[kind].format(*values)};")
        else:
            self._set(i, CALLS[kind].format(*values, n=of[1:]))

    def _of_math(self, i: llvm.ValueRef, name: str) -> None:
        if name.removesuffix("f") not in OF_MATH:
            raise _untold(i)
        self.math.add(name)

    def _ret(self, i: llvm.ValueRef) -> None:
        value = "".join(f" {self._value(v)}" for v in i.operands)
        self.lines.append(f"return{' (int32_t)' + value.strip() if value and not self.static else value};")

    def _unreachable(self, i: llvm.ValueRef) -> None:
        self.lines.append("for (;;) { }")

    # ------------------------------------------------------------ control
    def _br(self, i: llvm.ValueRef, block: str) -> None:
        operands = [*i.operands]
        if len(operands) == 1:
            self.lines += self._go(block, operands[0].name)
            return
        condition, no, yes = operands
        self.lines.append(f"if ({self._value(condition)}) {{")
        self.lines += [f"    {line}" for line in self._go(block, yes.name)]
        self.lines.append("}")
        self.lines += self._go(block, no.name)

    def _go(self, block: str, to: str) -> list[str]:
        """A jump, with what the phis there become, all at once."""
        sets = []
        for phi in self.phis[to]:
            value = next(v for v, b in zip(phi.operands, phi.incoming_blocks) if b.name == block)
            sets.append((self._id(phi.name), self._value(value), _c_type(_scalar(phi.type))))
        sets = [s for s in sets if s[0] != s[1]]
        changed = {name for name, *_ in sets}
        lines = []
        if any(value in changed for _, value, _ in sets):
            lines += [f"{kind} next_{name} = {value};" for name, value, kind in sets]
            lines += [f"{name} = next_{name};" for name, *_ in sets]
            lines = ["{", *[f"    {line}" for line in lines], "}"]
        else:
            lines = [f"{name} = {value};" for name, value, _ in sets]
        return [*lines, f"goto {self.labels[to]};"]


def _untold(i: llvm.ValueRef) -> CalcError:
    return CalcError(f"export: no C for {str(i).strip()[:120]}")


def _declared(kind: str, name: str) -> str:
    t = _c_type(kind)
    return f"{t}{name}" if t.endswith("*") else f"{t} {name}"


def _size(kind: str) -> int:
    """Bytes of a type."""
    if array := ARRAY.fullmatch(kind):
        return int(array[1]) * _size(array[2])
    return SIZES[kind]


def _steps(kind: str, n: int) -> Iterator[int]:
    """Bytes of a step of each of n indexes into a type."""
    for k in range(n):
        if k and (array := ARRAY.fullmatch(kind)):
            kind = array[2]
        yield _size(kind)


def _number(text: str, kind: str) -> str:
    found = FLOAT.search(text)
    x = struct.unpack(">d", bytes.fromhex(found[1].zfill(16)))[0] if found else float(text)
    single = kind == "float"
    if not math.isfinite(x):
        (bits,) = struct.unpack(*("<I", struct.pack("<f", x)) if single else ("<Q", struct.pack("<d", x)))
        return f"float_of({bits}u)" if single else f"double_of({bits}ull)"
    if not single:  # of long double, since some builds take all others for floats (-fsingle-precision-constant)
        return f"((double){x.hex()}L)"
    text = f"{x.hex()}f"
    return f"({text})" if text[0] == "-" else text
