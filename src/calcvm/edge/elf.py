"""Object files in the format ELF: sizes, and functions that they lack."""

from __future__ import annotations

import struct

ALLOCATED, SYMBOLS, WITHOUT_BITS = 2, 2, 8  # of ELF: a flag, and types of sections


class Elf:
    """An object file in the format ELF: its sections, (name, type, flags, place, size, link, size of an entry)."""

    def __init__(self, code: bytes):
        self.code, self.wide = code, code[4] == 2
        place, *_ = struct.unpack_from("<Q" if self.wide else "<I", code, 40 if self.wide else 32)
        size, count = struct.unpack_from("<HH", code, 58 if self.wide else 46)
        form = "<IIQQQQIIQQ" if self.wide else "<IIIIIIIIII"
        found = [struct.unpack_from(form, code, place + k * size) for k in range(count)]
        self.sections = [
            (name, kind, flags, at, n, link, each) for name, kind, flags, _, at, n, link, _, _, each in found
        ]

    @property
    def flash(self) -> int:
        """Bytes of code and constants."""
        return sum(n for _, kind, flags, _, n, *_ in self.sections if flags & ALLOCATED and kind != WITHOUT_BITS)

    @property
    def undefined(self) -> tuple[str, ...]:
        """The functions that it calls and does not have."""
        names = []
        for _, kind, _, at, n, link, each in self.sections:
            if kind == SYMBOLS:
                texts = self.sections[link][3]
                for k in range(at + each, at + n, each):  # the first is none
                    (name,), (section,) = (
                        struct.unpack_from("<I", self.code, k),
                        struct.unpack_from("<H", self.code, k + (6 if self.wide else 14)),
                    )
                    if section == 0:
                        start = texts + name
                        names.append(self.code[start : self.code.index(0, start)].decode())
        return tuple(sorted(names))
