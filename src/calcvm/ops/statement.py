"""What lowering produces and the planner reads: values, and statements over them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from calcvm.lazy import cached_property
from calcvm.ops.dims import Shape
from calcvm.ops.sizes import Extent, extent
from calcvm.ops.spec import Operand, RowSpec
from calcvm.ops.types import FLOAT
from calcvm.record import record

# kinds of values, and the zone each belongs to
ZONE_OF = {
    "parameter": "forward",  # persistent
    "buffer": "forward",  # persistent: what forwards of paths that train update, such as running statistics
    "state": "forward",  # persistent: counters, hyperparameters
    "placeholder": "forward",  # written by the user or the fetch; kept from step to step, not switched
    "activation": "forward",
    "gradient": "gradient",  # persistent where rounds add up, else transient
    "optimizer": "optimizer",  # persistent
    "workspace": "workspace",
    "page": "pages",  # what other values hold meanwhile, outside the heap
}


def unique(stem: str, taken: Container[str], counts: dict[str, int]) -> str:
    """``stem`` or ``stem_2``, ``stem_3``, ...: a name that is not taken; ``counts`` keeps how far each stem is."""
    while True:
        n = counts[stem] = counts.get(stem, 0) + 1
        name = stem if n == 1 else f"{stem}_{n}"
        if name not in taken:
            return name


@dataclass(kw_only=True, eq=False)
class Value:
    """One value of a program.

    name : for people; values are told apart by what they are, never by it.
    elems : size for each batch; ``a*B + b`` but for scratch.
    type : of its elements.
    persistent : lives between steps, inside its zone's persistent block (a model switch copies it).
    resident : its storage is never shared: placeholders, kept results, values used by several paths.
    layout : how it lies, where that is not as users see its ``shape`` (`calcvm.ops.layouts`).
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

    shifts : elements by which an operand starts inside its value (0 where not named).
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
        """The statement on other values in place of some."""
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
        """Whether it reads what an operand held before."""
        return o.access in "ru" or (o.access == "a" and self.words.get("acc") == 1)


class Versions:
    """The values of a program, and more that are made of them, each with a name of its own."""

    def __init__(self, values: Iterable[Value]):
        self.values = [*values]
        self._names, self._counts = {v.name for v in self.values}, dict[str, int]()

    def another(self, v: Value, what: str, **changes: Any) -> Value:
        """A value like one, named after it and what it is."""
        name = unique(f"{v.name}.{what}", self._names, self._counts)
        self._names.add(name)
        self.values.append(replace(v, name=name, **changes))
        return self.values[-1]


PHASES = ("forward", "loss", "backward", "optimize", "end_round")


@record(kw_only=True)
class Lowered:
    """A graph as statements: what the planner takes and the program is encoded from.

    paged : values that persist in the file of pages; statements read and write copies of them.
    """

    values: tuple[Value, ...]
    statements: tuple[Statement, ...]
    paths: tuple[str, ...]
    info: Mapping[str, Any] = field(default_factory=dict)
    paged: frozenset[Value] = frozenset()

    def sections(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(path, phase) -> [start, stop) of statements; statements are in this order already."""
        out, i = {}, 0
        for path in self.paths:
            for phase in PHASES:
                start = i
                while i < len(self.statements) and (self.statements[i].path, self.statements[i].phase) == (path, phase):
                    i += 1
                out[path, phase] = (start, i)
        return out
