"""Identifiers in scripts and equations, and the sources of the functions that they call."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

from calcvm.script import helpers
from calcvm.script.optimizers import SLOTS, STEPS, UPDATES, function, source_of

HELPERS: dict[str, Any] = {
    name: value for name, value in vars(helpers).items() if getattr(value, "__module__", "") == helpers.__name__
}
OWN = {
    "B", "BATCH", "GOLDEN", "N_SLOTS", "Path", "SINE", "argparse", "evaluate", "feed", "heap", "main", "math", "n", "np", "of_batch",
    "parts", "predict", "samples_of", "start", "step", "sums", "total_loss", "view",
}  # fmt: skip
BUILTINS = {*dir(builtins)} - {"all", "any", "filter", "hash", "id", "input", "object", "type"}  # unused ones


Key = TypeVar("Key", bound=Hashable)


class Names(dict[Key, str]):
    """Identifiers by key; ``taken``: names with another meaning."""

    def __init__(self, taken: Iterable[str] = ()):
        self._taken = {*OWN, *HELPERS, *SLOTS, *STEPS, *UPDATES, *BUILTINS, *keyword.kwlist, *taken}

    def of(self, key: Key, name: str) -> str:
        """The identifier of ``key``, derived from ``name`` on first use."""
        if key not in self:
            found = identifier(name)
            while found in self._taken or re.fullmatch(r"u\d+", found):
                found += "_"
            self._taken.add(found)
            self[key] = found
        return self[key]


def identifier(text: str) -> str:
    """A text as a Python identifier other than ``_``, which marks unused values."""
    found = re.sub(r"\W", "_", text, flags=re.ASCII)
    if not found.strip("_"):
        return "v"
    return f"v{found}" if found[0].isdigit() or found[:2] == "__" else found


def plain(text: str) -> str:
    """Any text in printable form, with escapes for other characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def functions(texts: Iterable[str]) -> list[str]:
    """Sources of the functions that texts call, directly or indirectly, in order of declaration."""
    source = {**HELPERS, **dict.fromkeys((*UPDATES, *STEPS))}
    found: dict[str, str] = {}
    todo = [*texts]
    while todo:
        for name in sorted({*re.findall(r"\b[a-z_]\w*(?=\()", todo.pop())} & source.keys() - found.keys()):
            found[name] = source_of(name) if source[name] is None else function(helpers, name)
            todo.append(found[name])
    return [found[name] for name in source if name in found]
