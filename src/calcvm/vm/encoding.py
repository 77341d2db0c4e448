"""Rows as integers: one encoder and one decoder for all operators, driven by the operator table.

Word 0 is the opcode, word 1 the flags (bit 0: barrier after the row; from bit 8 on: the row's index),
then the spec's words in order, then an element offset for each operand (-1: left out).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from calcvm.ops.spec import HEADER_WORDS, MAX_WORDS, OPCODES, RowSpec

FLAG_SYNC = 1
FLAG_PC_SHIFT = 8
ABSENT = -1


def float_bits(x: float) -> int:
    return int(np.float64(x).view(np.int64))


def bits_float(word: int) -> float:
    return float(np.int64(word).view(np.float64))


def encode_row(
    spec: RowSpec, words: Mapping[str, Any], offsets: Mapping[str, int | None], flags: int = 0
) -> np.ndarray:
    """One row, int64[MAX_WORDS].  ``words`` are numbers here: batch forms are evaluated by the caller."""
    row = np.zeros(MAX_WORDS, np.int64)
    row[0], row[1] = spec.opcode, flags
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


def decode_row(row: np.ndarray) -> tuple[RowSpec, dict[str, Any], dict[str, int]]:
    """Spec, words by name and offsets by operand of an encoded row (KeyError: no such opcode)."""
    spec = OPCODES[int(row[0])]
    words: dict[str, Any] = {}
    k = HEADER_WORDS
    for word in spec.words:
        words[word.name] = bits_float(row[k]) if word.kind == "float" else int(row[k])
        k += 1
    return spec, words, {o.name: int(row[k + i]) for i, o in enumerate(spec.operands)}
