"""The output of lowering and the input of the planner: values, and statements over them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from calcvm.frozen import frozen
from calcvm.lazy import cached_property
from calcvm.ops.dims import Shape
from calcvm.ops.sizes import Extent, extent
from calcvm.ops.spec import Operand, RowSpec
from calcvm.ops.types import FLOAT

# kinds of values, with their zones
ZONE_OF = {
    "parameter": "forward",  # persistent
    "buffer": "forward",  # persistent: updated by forwards of training paths, such as running statistics
    "carry": "carry",  # persistent, for each sample: what forwards leave for the next call
    "state": "forward",  # persistent: counters, hyperparameters
    "placeholder": "forward",  # written by the user or the fetch; kept between steps, not switched
    "activation": "forward",
    "gradient": "gradient",  # persistent, unless the backward updates its parameter
    "optimizer": "optimizer",  # persistent
    "workspace": "workspace",
    "page": "pages",  # holds another value meanwhile, outside the heap
}


def unique(stem: str, taken: Container[str], counts: dict[str, int]) -> str:
    """``stem`` or ``stem_2``, ``stem_3``, ...: a name that is not taken; ``counts`` records the last number of each stem."""
    while True:
        n = counts[stem] = counts.get(stem, 0) + 1
        name = stem if n == 1 else f"{stem}_{n}"
        if name not in taken:
            return name


@dataclass(kw_only=True, eq=False)
class Value:
    """One value of a program.

    name : for people; values are distinguished by identity, never by name.
    elems : size for each batch; ``a*B + b`` except for scratch.
    type : of its elements.
    persistent : lives between steps, inside its zone's persistent block (a model switch copies it).
    resident : its storage is never shared: placeholders, kept results, values used by several paths.
    layout : its layout, if it is not stored as users see its ``shape`` (`calcvm.ops.layouts`).
    """

    name: str
    kind: str
    elems: Extent
    shape: Shape | None = None
    persistent: bool = False
    resident: bool = False
    type: str = FLOAT
    layout: str = ""

    @property
    def zone(self) -> str:
        return ZONE_OF[self.kind]


@dataclass(frozen=True, kw_only=True, eq=False)
class Statement:
    """One row before it has offsets: a spec, its words, and a value for each operand (None: left out).

    shifts : elements by which an operand starts inside its value (default 0).
    """

    spec: RowSpec
    words: Mapping[str, Any]  # int, Extent or float
    operands: Mapping[str, Value | None]
    path: str
    phase: str  # forward | loss | backward | optimize | end_round
    shifts: Mapping[str, int] = field(default_factory=dict)
    label: str = ""  # the operator and variable it serves, for messages and listings
    extents: Mapping[str, Extent] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sizes = {
            o.name: extent(o.elems, self.words)
            for o in self.spec.operands
            if o.access != "s" and self.operands.get(o.name) is not None
        }
        object.__setattr__(self, "extents", sizes)

    def __repr__(self) -> str:
        return f"<{self.spec.name} of {self.label!r}, {self.path}.{self.phase}>"

    def with_values(self, other: Mapping[Value, Value]) -> Statement:
        """The statement with some values replaced."""
        if not any(v in other for v in self.operands.values() if v is not None):
            return self
        return replace(self, operands={n: None if v is None else other.get(v, v) for n, v in self.operands.items()})

    def words_at(self, batch: int) -> dict[str, Any]:
        """The words as numbers."""
        return {name: v.at(batch) if isinstance(v, Extent) else v for name, v in self.words.items()}

    @cached_property
    def present(self) -> tuple[tuple[Operand, Value], ...]:
        """The operands that are not left out, with their values."""
        return tuple([(o, v) for o in self.spec.operands if (v := self.operands.get(o.name)) is not None])

    @cached_property
    def touched(self) -> tuple[Value, ...]:
        """The values of its operands, each once."""
        return tuple(dict.fromkeys([v for _, v in self.present]))

    @cached_property
    def read_values(self) -> tuple[Value, ...]:
        return tuple([v for o, v in self.present if self.needs(o)])

    @cached_property
    def written_values(self) -> tuple[Value, ...]:
        return tuple([v for o, v in self.present if o.writes and o.access != "s"])

    @cached_property
    def effects(self) -> tuple[frozenset[Value], frozenset[Value]]:
        """Values that it reads, and values that it writes (scratch among them)."""
        return frozenset(self.read_values), frozenset([v for o, v in self.present if o.writes])

    def needs(self, o: Operand) -> bool:
        """Whether it reads the old value of an operand."""
        return o.access in "ru" or (o.access == "a" and self.words.get("acc") == 1)


class Versions:
    """The values of a program, and further ones derived from them, each with a unique name."""

    def __init__(self, values: Iterable[Value]):
        self.values = [*values]
        self._names, self._counts = {v.name for v in self.values}, dict[str, int]()

    def another(self, v: Value, what: str, **changes: Any) -> Value:
        """A value derived from another, named after it and its purpose."""
        name = unique(f"{v.name}.{what}", self._names, self._counts)
        self._names.add(name)
        self.values.append(replace(v, name=name, **changes))
        return self.values[-1]


PHASES = ("forward", "loss", "backward", "optimize", "end_round")


@frozen(kw_only=True)
class Lowered:
    """A graph as statements: the planner's input, from which the program is encoded.

    paged : persistent values in the page file; statements read and write copies of them.
    """

    values: tuple[Value, ...]
    statements: tuple[Statement, ...]
    paths: tuple[str, ...]
    info: Mapping[str, Any] = field(default_factory=dict)
    paged: frozenset[Value] = frozenset()

    def sections(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(path, phase) -> [start, stop) of statements; statements are already in this order."""
        out, i = {}, 0
        for path in self.paths:
            for phase in PHASES:
                start = i
                while i < len(self.statements) and (self.statements[i].path, self.statements[i].phase) == (path, phase):
                    i += 1
                out[path, phase] = (start, i)
        return out
