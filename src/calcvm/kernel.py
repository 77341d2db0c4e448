"""What a kernel is, on any device: its parameters, what it knows of its worker, and how a row's words become its arguments.

A kernel is an ordinary function.  Its first argument tells it of its worker, the others are the row's words and operands:

    @kernel
    def sigmoid_fwd(me, rows, cols, x: Ptr, y: Ptr): ...

What is called for a row is always ``(heap, row, worker, workers, phase)``; each device makes it of a kernel and of `arguments`.
A row of several phases is called once for each, and all workers meet in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

PREFIX = 2  # words before a row's own: instruction, flags
FLAG_PC_SHIFT = 8  # flags above this bit: the row's own index, for traps
AXES = 6  # of a shape that operands are broadcast to
TRAP_CODE, TRAP_PC = 0, 1  # heap elements that a trap writes (the heap's first block is reserved)


class Me(NamedTuple):
    """What a kernel knows of its worker: ``heap`` and ``row`` (pointers), its number of how many ``workers``, and the phase."""

    heap: Any
    row: Any
    worker: Any
    workers: Any
    phase: Any


class Ptr:
    """Annotation: the word is an element offset; the kernel sees a pointer to it (of an operand left out: see ``given``)."""


class Float:
    """Annotation: the word holds the bits of a float64."""


Words = tuple[tuple[str, str], ...]  # of a kernel: a name and a kind ("int", "float" or "ptr") each


def words_of(fn: Callable) -> Words:
    """The words that a kernel takes after ``me``."""
    parameters = list(inspect.signature(fn, eval_str=False).parameters.values())[1:]
    return tuple((p.name, _kind(p.annotation)) for p in parameters)


def _kind(annotation: Any) -> str:
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return {"Ptr": "ptr", "Float": "float"}.get(name, "int")


def words(ints: str, floats: str, pointers: Iterable[str]) -> Words:
    """The words of a kernel whose parameters do not name them."""
    of = {"int": ints.split(), "float": floats.split(), "ptr": pointers}
    return tuple((name, kind) for kind, names in of.items() for name in names)


def words_for(f: Any, sizes: str, strided: Sequence[str] = (), before: Sequence[str] = ()) -> Words:
    """The words of the row of a formula (`calcvm.formulas.declare.Formula`): sizes, strides, parameters, operands.

    strided : operands that have six strides each.  before : operands before the formula's own.
    """
    strides = [f"{s}{k}" for s in strided for k in range(AXES)]
    params = [(name, "float" if name in f.reals else "int") for name in f.words]
    return (*((n, "int") for n in (*sizes.split(), *strides)), *params, *((n, "ptr") for n in (*before, *f.operands)))


def types_of(words: Words, heap: Any, row: Any, types: Any) -> list[Any]:
    """The types of a kernel's arguments, of a device's ``types``."""
    of = {"int": types.int64, "float": types.float64, "ptr": heap}
    return [types.NamedTuple([heap, row, *[types.int64] * 3], Me), *(of[kind] for _, kind in words)]


def arguments(b: Any, words: Words, heap: Any, row: Any) -> Iterator[Any]:
    """What a kernel gets after ``me``, read from the row by the IR builder ``b``."""
    from llvmlite import ir

    for k, (_, kind) in enumerate(words, PREFIX):
        word = b.load(b.gep(row, [ir.IntType(64)(k)]))
        if kind == "float":
            yield b.bitcast(word, ir.DoubleType())
        else:
            yield b.gep(heap, [word]) if kind == "ptr" else word


def simulated_arguments(words: Words, heap: Any, row: Sequence[int]) -> Iterator[Any]:
    """The same in Python, for arrays: None for an operand left out."""
    import numpy as np

    for k, (_, kind) in enumerate(words, PREFIX):
        word = int(row[k])
        if kind == "float":
            yield np.int64(word).view(np.float64)
        elif kind == "ptr":
            yield heap[word:] if word >= 0 else None
        else:
            yield word
