"""Rows as integers: one encoder and one decoder for all operators, driven by the operator table.

Word 0 is the instruction, as an index into the program's list.  Word 1 has the flags.  Bit 0: a barrier follows the row; bit 1: the
row has several phases, whose number is its first spec word; from bit 8 on: the row's index.  Then come the spec's words in
order, and an element offset for each operand (-1: left out).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from calcvm.ops.spec import HEADER_WORDS, RowSpec, row_words
from calcvm.ops.types import BYTES

FLAG_SYNC, FLAG_PHASES, FLAG_SKIPS = 1, 2, 4  # the last: see `calcvm.vm.run.specialized`
FLAG_PC_SHIFT = 8
ABSENT = -1
ALIGN_BYTES = 64  # a cache line; rows and storage start on one
FORMAT_VERSION = 3
MODEL_VERSION = 2  # of a model's file, which holds its program
RESERVED = 16  # elements at a heap's start that are closed to operands: the first two hold a trap
ITEMSIZE = {"float32": 4, "float64": 8}  # bytes of a heap element


def aligned(nbytes: int) -> np.ndarray:
    """Zeroed bytes that start on a cache line."""
    block = np.zeros(nbytes + ALIGN_BYTES, np.uint8)
    start = -block.ctypes.data % ALIGN_BYTES
    return block[start : start + nbytes]


def copied(rows: np.ndarray) -> np.ndarray:
    """A writable copy of rows that starts on a cache line."""
    copy = aligned(rows.nbytes).view(rows.dtype).reshape(rows.shape)
    copy[...] = rows
    return copy


class Instruction(NamedTuple):
    """A program's reference to an instruction of its rows: its name, and a digest of its form."""

    name: str
    form: str


def instructions(specs: Iterable[RowSpec]) -> tuple[Instruction, ...]:
    """The instruction list of a program whose rows use these specs."""
    return tuple(Instruction(spec.name, form_of(spec)) for spec in sorted(set(specs), key=lambda spec: spec.name))


@cache
def form_of(spec: RowSpec) -> str:
    """A digest of an instruction's words and operands."""
    return hashlib.sha256(repr((spec.name, *form_parts(spec))).encode()).hexdigest()[:16]


def form_parts(spec: RowSpec) -> tuple[list[tuple], list[tuple]]:
    """The properties that rows rely on: an instruction with the same name but other properties is a different one."""
    typed = {o.name: (o.type,) for o in spec.operands if o.type in BYTES}
    operands = [(o.name, o.access, o.elems, o.optional, *typed.get(o.name, ())) for o in spec.operands]
    return [(w.name, w.kind) for w in spec.words], operands


def float_bits(x: float) -> int:
    return int(np.float64(x).view(np.int64))


def bits_float(word: int) -> float:
    return float(np.int64(word).view(np.float64))


def encode_row(
    spec: RowSpec, words: Mapping[str, Any], offsets: Mapping[str, int | None], flags: int = 0, instruction: int = 0
) -> np.ndarray:
    """One row, int64, of whole cache lines.  ``words`` are numbers: the caller evaluates expressions of the batch."""
    row = np.zeros(row_words([spec]), np.int64)
    row[0], row[1] = instruction, flags
    k = HEADER_WORDS
    for word in spec.words:
        value = words[word.name]
        row[k] = float_bits(value) if word.kind == "float" else int(value)
        k += 1
    for operand in spec.operands:
        offset = offsets.get(operand.name)
        row[k] = ABSENT if offset is None else offset
        k += 1
    return row


def phases_of(row: np.ndarray) -> int:
    """Number of phases of an encoded row."""
    return int(row[HEADER_WORDS]) if row[1] & FLAG_PHASES else 1


def decode_row(spec: RowSpec, row: np.ndarray) -> tuple[dict[str, Any], dict[str, int]]:
    """Words by name and offsets by operand of an encoded row."""
    words: dict[str, Any] = {}
    k = HEADER_WORDS
    for word in spec.words:
        words[word.name] = bits_float(row[k]) if word.kind == "float" else int(row[k])
        k += 1
    return words, {o.name: int(row[k + i]) for i, o in enumerate(spec.operands)}
