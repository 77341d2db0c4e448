"""PTX as text: separately compiled functions are joined to one module, which NVIDIA's assembler sees as if compiled together.

Other modules know only a function's own name, `calcvm_...`.  Its other parts, tables and functions that the compiler did not inline,
are named after it, so names never collide.  Everything except a kernel is local to the joined module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

VERSION = "8.0"  # any driver of CUDA 12 or later assembles it, and no more is used; NVVM writes its own, newer version
SHARED = ".extern .shared .align 16 .b8 calcvm_shared[];"  # as the compiler declares it

_ITEM = re.compile(r"^\.(?:[^;{}]*;|[^;{}]*=[^;]*;|[^;{}]*\n\{\n.*?^\}$)", re.M | re.S)  # ends with ";" or is a body
_NAME = re.compile(r"\.(?:func|entry)\s+(?:\([^)]*\)\s*)?([\w$]+)|([\w$]+)(?:\[\d*\])?\s*(?:=|;)")


class Piece(NamedTuple):
    """A function with all its parts, and the names of the functions that it calls."""

    text: str
    needs: tuple[str, ...]

    def stored(self) -> bytes:
        return f"{' '.join(self.needs)}\n{self.text}".encode()

    @classmethod
    def read(cls, stored: bytes) -> Piece:
        """The inverse of `stored`."""
        needs, _, text = stored.decode().partition("\n")
        return cls(text, tuple(needs.split()))


def piece(ptx: str, name: str) -> Piece:
    """The piece of a compiler's output whose only public function is called ``name``."""
    items = _ITEM.findall(ptx[ptx.index(".address_size") :].partition("\n")[2])
    names = [_name(item) for item in items]
    needs = [called for item, called in zip(items, names) if item.startswith(".extern .func")]
    known = {name, "calcvm_shared", *needs}
    own = [item for item, called in zip(items, names) if called not in known or called == name]
    kept = [item for item in own if not (item.startswith(".common") and _times(_name(item), own) == 1)]
    text = "\n".join(re.sub(r"^\.(?:visible|weak) \.func", ".func", item) for item in kept)
    others = {other: f"{name}${k}" for k, other in enumerate(dict.fromkeys(map(_name, kept))) if other != name}
    for other in sorted(others, key=len, reverse=True):  # a name may also be the prefix of parameters' names
        text = text.replace(other, others[other])
    return Piece(text, tuple(dict.fromkeys(needs)))


def _name(item: str) -> str:
    head = item.partition("\n{")[0].partition("=")[0] + ("=" if item.rstrip().endswith("};") else "")
    found = _NAME.search(head)
    assert found, head
    return found[1] or found[2]


def _times(name: str, items: Sequence[str]) -> int:
    return sum(item.count(name) for item in items)


def joined(pieces: Iterable[Piece], cc: tuple[int, int]) -> str:
    """A module of pieces, each after all that it calls."""
    major, minor = cc
    head = f".version {VERSION}\n.target sm_{major}{minor}\n.address_size 64\n\n{SHARED}\n"
    return "\n".join([head, *(piece.text for piece in pieces), ""])


# ---------------------------------------------------------------- dispatch
def dispatch(name: str, table: dict[int, str]) -> Piece:
    """The function that calls a row's kernel: a binary search for the number in the row's first word."""
    lines = [
        f".func (.param .b64 answer) {name}(",
        *_list("\t.param .b64 given{}{}", 5),
        ")",
        "{",
        "\t.reg .pred %p;",
        "\t.reg .b64 %rd<6>;",
    ]
    lines += [f"\tld.param.u64 %rd{k}, [given{k}];" for k in range(5)]
    lines += ["\tld.u64 %rd5, [%rd1];", *_search(sorted(table), table, "$L"), "$L_end:", "\tret;", "}"]
    return Piece("\n".join(lines), tuple(table[number] for number in sorted(table)))


def _search(numbers: Sequence[int], table: dict[int, str], label: str) -> Iterator[str]:
    if len(numbers) == 1:
        (number,) = numbers
        yield f"\tsetp.ne.s64 %p, %rd5, {number};"
        yield "\t@%p bra $L_end;"
        yield "\t{"
        for k in range(5):
            yield f"\t.param .b64 param{k};"
            yield f"\tst.param.b64 [param{k}], %rd{k};"
        yield "\t.param .b64 returned;"
        yield f"\tcall.uni (returned), {table[number]}, ({', '.join(f'param{k}' for k in range(5))});"
        yield "\t}"
        yield "\tbra.uni $L_end;"
    elif numbers:
        middle = len(numbers) // 2
        yield f"\tsetp.lt.s64 %p, %rd5, {numbers[middle]};"
        yield f"\t@%p bra {label}0;"
        yield from _search(numbers[middle:], table, f"{label}1")
        yield f"{label}0:"
        yield from _search(numbers[:middle], table, f"{label}0")


def _list(line: str, n: int) -> list[str]:
    return [line.format(k, "," if k < n - 1 else "") for k in range(n)]
