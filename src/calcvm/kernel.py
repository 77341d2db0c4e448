"""The definition of a kernel, for every device: its parameters, its view of the worker, and how a row's words become arguments.

A kernel is an ordinary function.  Its first argument describes the worker; the others are the row's words and operands:

    @kernel
    def sigmoid_fwd(me, rows, cols, x: Ptr, y: Ptr): ...

The native function of a row always has the signature ``(heap, row, worker, workers, phase)``.  Each device builds it from
the kernel and `arguments`.  A row of several phases is called once per phase; all workers meet in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

PREFIX = 2  # words before a row's own: instruction, flags
# Flags: a row of several phases, whose number is its first word; above a bit the row's own index, for traps.
FLAG_PHASES, FLAG_PC_SHIFT = 2, 8
AXES = 6  # axes of a shape that operands are broadcast to
TRAP_CODE, TRAP_PC = 0, 1  # heap elements that a trap writes (the heap's first block is reserved)
PAGES = 6  # the int64 of the heap's first block that holds the descriptor of the page file, plus 1
BAD_INDEX = 1  # the trap of a row that meets an index of data outside its range
LOST_PAGES = 2  # the trap of a row that cannot write or read its pages


class Me(NamedTuple):
    """A kernel's view of its worker: the pointers ``heap`` and ``row``, the worker's number, the number of workers, and the phase."""

    heap: Any
    row: Any
    worker: Any
    workers: Any
    phase: Any


class Ptr:
    """Annotation: the word is an element offset and the kernel gets a pointer (for an operand left out, see ``given``).

    The elements have the program's float type; ``Ptr.int64`` and so on name another type (`calcvm.ops.types`).
    """

    float32 = float64 = int64 = int32 = uint8 = int8 = bool = cells = any = index = Any


for _type in [name for name, value in vars(Ptr).items() if value is Any]:
    setattr(Ptr, _type, type(f"Ptr.{_type}", (), {}))  # for modules whose annotations are objects, not text


class Float:
    """Annotation: the word holds the bits of a float64."""


Words = tuple[
    tuple[str, str], ...
]  # of a kernel: (name, kind) pairs; a kind is "int", "float" (its bits), "ptr", "ptr.int64" ...
CONCRETE = ("float32", "float64", "int64", "int32", "uint8", "int8", "bool")  # types that are not type variables


def words_of(fn: Callable) -> Words:
    """The words that a kernel takes after ``me``."""
    parameters = list(inspect.signature(fn, eval_str=False).parameters.values())[1:]
    return tuple((p.name, _kind(p.annotation)) for p in parameters)


def _kind(annotation: Any) -> str:
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    kind, _, of = name.partition(".")
    return {"Ptr": f"ptr.{of}" if of else "ptr", "Float": "float"}.get(kind, "int")


def element_of(kind: str) -> str:
    """The element type of a pointer's kind: "" for the program's own float, and for a type variable."""
    of = kind.partition(".")[2]
    return of if of in CONCRETE else ""


def typed(words: Words, types: Sequence[str]) -> Words:
    """The words of a kernel's instance, with a type in place of each type variable (see `calcvm.ops.types`)."""
    kinds = [kind.partition(".")[2] for _, kind in words]
    variables = [of for of in dict.fromkeys(kinds) if of and of not in CONCRETE]
    by = dict(zip(variables, types, strict=True))
    return tuple((name, f"ptr.{by[of]}" if of in by else kind) for (name, kind), of in zip(words, kinds))


class Kernels(dict[str, Any]):
    """Kernels by row.  A row's name may end with types; the kernel's instance for them is created on first use."""

    def __init__(self, make: Callable[..., Any]):
        self.make = make

    def kernel(self, fn: Callable) -> Callable:
        """Register the kernel of the row of the same name."""
        return self.kernel_as(fn.__name__)(fn)

    def kernel_as(self, name: str, *how: Any, **more: Any) -> Callable:
        """Register a kernel by another name; its words may differ from its parameters, see a device's ``Kernel``."""

        def register(fn: Callable) -> Callable:
            self[name] = self.make(fn, name, *how, **more)
            return fn

        return register

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(name.partition(".")[0])

    def __missing__(self, name: str) -> Any:
        stem, _, types = name.partition(".")
        if not types:
            raise KeyError(name)
        base = self[stem]
        if name not in base.instances:
            base.instances[name] = base.of(name, typed(base.words, types.split(".")))
        return base.instances[name]


def words(ints: str, floats: str, pointers: Iterable[str]) -> Words:
    """The words of a kernel whose parameters are not annotated.  A pointer's type follows its name: "rng.int64"."""
    named = [(name, "int") for name in ints.split()] + [(name, "float") for name in floats.split()]
    for pointer in pointers:
        name, dot, of = pointer.partition(".")
        named.append((name, f"ptr{dot}{of}"))
    return tuple(named)


def words_for(f: Any, sizes: str, strided: Sequence[str] = (), before: Sequence[str] = ()) -> Words:
    """The words of a formula's row (`calcvm.formulas.declare.Formula`): sizes, strides, parameters, operands.

    strided : operands that have six strides each.  before : operands that precede the formula's own.
    """
    strides = [f"{s}{k}" for s in strided for k in range(AXES)]
    params = [(name, "float" if name in f.reals else "int") for name in f.words]
    operands = [(n, f"ptr.{f.types[n]}" if n in f.types else "ptr") for n in (*before, *f.operands)]
    return (*((n, "int") for n in (*sizes.split(), *strides)), *params, *operands)


def words_of_cell(cell: Any, row: str, sizes: str) -> Words:
    """The words of a recurrent cell's row (`calcvm.formulas.cells.Cell`): sizes and operands."""
    kinds = {"lengths": ".index", "order": ".int64", "counts": ".int64"}
    return words(sizes, "", [name + kinds.get(name, "") for name in cell.operands(row)])


# ---------------------------------------------------------------- a kernel's arguments
def types_of(words: Words, heap: Any, row: Any, types: Any) -> list[Any]:
    """The types of a kernel's arguments, taken from a device's module ``types``."""
    of = {"int": types.intp, "float": types.float64, "ptr": heap}
    taken = [of.get(kind) or _pointer(element_of(kind), heap, types) for _, kind in words]
    return [types.NamedTuple([heap, row, *[types.intp] * 3], Me), *taken]


def _pointer(element: str, heap: Any, types: Any) -> Any:
    return types.CPointer(getattr(types, "boolean" if element == "bool" else element)) if element else heap


def arguments(b: Any, words: Words, heap: Any, row: Any) -> Iterator[Any]:
    """The kernel's arguments after ``me``, which the IR builder ``b`` reads from the row."""
    from llvmlite import ir

    for k, (_, kind) in enumerate(words, PREFIX):
        word = b.load(b.gep(row, [ir.IntType(64)(k)]))
        if kind == "float":
            yield b.bitcast(word, ir.DoubleType())
        elif kind == "int":
            yield word
        else:
            of = element_of(kind)
            yield b.gep(b.bitcast(heap, _IR[of](ir).as_pointer()) if of else heap, [word])


_IR: dict[str, Any] = {
    "float32": lambda ir: ir.FloatType(),
    "float64": lambda ir: ir.DoubleType(),
    "int64": lambda ir: ir.IntType(64),
    "int32": lambda ir: ir.IntType(32),
    **dict.fromkeys(("uint8", "int8", "bool"), lambda ir: ir.IntType(8)),
}


def simulated_arguments(words: Words, heap: Any, row: Sequence[int]) -> Iterator[Any]:
    """The same in Python, for arrays; an operand left out is None."""
    import numpy as np

    for k, (_, kind) in enumerate(words, PREFIX):
        word = int(row[k])
        if kind == "float":
            yield np.int64(word).view(np.float64)
        elif kind == "int":
            yield word
        else:
            of = element_of(kind)
            yield (seen_as(heap, of) if of else heap)[word:] if word >= 0 else None


def seen_as(heap: Any, dtype: str) -> Any:
    """A heap as an array of another type."""
    import numpy as np

    size = np.dtype(dtype).itemsize
    return heap.view(np.uint8)[: heap.nbytes // size * size].view(dtype)
