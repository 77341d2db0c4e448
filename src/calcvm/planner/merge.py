"""Neighbouring updates merged into one row: parameters of one optimizer lie side by side in their block.

Parameters, their gradients and their optimizer state lie in the same relative order with the same
padding.  A *run* is a sequence of such parameters whose updates (and other rows over whole gradients)
become one row over a *block*: a separate value that spans the run's values and the padding between
them.  Padding must stay zero, which holds in persistent blocks only.  So if a run has padding inside, its
gradients are kept in the persistent gradient block if they are small; otherwise the run is cut there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace

from calcvm.frozen import frozen
from calcvm.ops.dims import ONE, Affine, affine
from calcvm.ops.statement import Lowered, Statement, Value, unique
from calcvm.ops.types import FLOAT
from calcvm.planner.lifetimes import Machine, effects, is_persistent, operands

PHASES = ("optimize", "end_round")  # phases whose rows over rows and columns are elementwise
MERGE_LIMIT = 65536  # elements in a run: above it the overhead of a row is negligible
LARGE = 16384  # elements from which on a parameter lies first, so that the small ones are neighbours
PADDED_LIMIT = 4096  # elements in a run whose gradients may become persistent because of padding


@frozen
class Groups:
    """Constraints from merging on the layout.

    blocks : members of each block, in order; a block starts where its first member starts.
    order : rank of a value inside its zone's persistent block (values without a rank come last).
    promoted : gradients to keep in the persistent gradient block.
    """

    blocks: Mapping[Value, tuple[Value, ...]] = field(default_factory=dict)
    order: Mapping[Value, tuple[int, ...]] = field(default_factory=dict)
    promoted: frozenset[Value] = frozenset()


@frozen
class _Candidate:
    """A row that may become part of a merged one.

    whole : its operands that are whole values.  signature : all else; rows merge only if theirs are equal.
    """

    index: int
    statement: Statement
    whole: Mapping[str, Value]
    signature: tuple


def merge_rows(lowered: Lowered, machine: Machine, enabled: bool = True) -> tuple[Lowered, Groups]:
    """The program with merged rows, and their constraints on the layout."""
    candidates = [c for t, st in enumerate(lowered.statements) if (c := _candidate(t, st)) is not None]
    updates = [c for c in candidates if _parameter(c) is not None]
    ranks, runs = _parameter_order(lowered, updates, machine)
    groups: dict[tuple, list[_Candidate]] = {}
    for c in updates:
        groups.setdefault(c.signature, []).append(c)
    order: dict[Value, tuple[int, ...]] = {p: (0, 0, r) for p, r in ranks.items()}
    for g, members in enumerate(groups.values()):
        for c in members:
            p = _parameter(c)
            assert p is not None
            for k, v in enumerate(c.whole.values()):
                order.setdefault(v, (g, k, ranks[p]))
    if not enabled:
        return lowered, Groups(order=order)
    return _Merger(lowered, machine, candidates, runs).result(order)


def _candidate(index: int, st: Statement) -> _Candidate | None:
    """The statement as a candidate: an elementwise row over whole values in an optimizer's phase, or an update elsewhere."""
    if st.phase not in PHASES and not any(o.access == "u" and v.kind == "parameter" for o, v in operands(st)):
        return None
    if {w.name for w in st.spec.words if w.kind == "dim"} != {"rows", "cols"}:
        return None
    elems = affine(st.words["rows"]) * affine(st.words["cols"])
    whole: dict[str, Value] = {}
    shared: list[tuple[str, int]] = []
    for o, v in operands(st):
        if (
            v.type == FLOAT
            and o.part == "rows"
            and o.access in "rwu"
            and st.extents[o.name] == elems == v.elems
            and elems.constant
        ):
            whole[o.name] = v
        elif o.access == "r":
            shared.append((o.name, id(v)))
        else:
            return None
    if st.shifts or not whole or len(set(whole.values())) != len(whole):
        return None
    rest = tuple((w.name, st.words[w.name]) for w in st.spec.words if w.kind != "dim")
    return _Candidate(index, st, whole, (st.path, st.phase, st.spec.name, rest, tuple(shared), tuple(whole)))


def _parameter(c: _Candidate) -> Value | None:
    """The parameter that a row updates."""
    for name, v in c.whole.items():
        if v.kind == "parameter" and c.statement.spec.operand(name).access == "u":
            return v
    return None


def _parameter_order(
    lowered: Lowered, updates: Sequence[_Candidate], machine: Machine
) -> tuple[dict[Value, int], list[list[Value]]]:
    """Ranks of all parameters in their block, and the runs of neighbours that may be merged.

    Sorted by optimizer, large parameters first, and whole cache lines before others, which need padding after them.
    """
    first_group: dict[Value, int] = {}
    number: dict[tuple, int] = {}
    gradients: dict[Value, list[Value]] = {}
    for c in updates:
        p = _parameter(c)
        assert p is not None
        first_group.setdefault(p, number.setdefault(c.signature, len(number)))
        gradients.setdefault(p, []).extend(v for v in c.whole.values() if v is not p and not is_persistent(v))
    parameters = [v for v in lowered.values if v.kind == "parameter"]

    def key(item: tuple[int, Value]) -> tuple[int, ...]:
        i, p = item
        n = p.elems.at(1)
        return (first_group.get(p, len(number)), -(n >= LARGE), machine.bytes(p).at(1) % machine.line != 0, i)

    ordered = [p for _, p in sorted(enumerate(parameters), key=key)]
    runs: list[list[Value]] = []
    total = 0
    for p in ordered:
        n = machine.up(machine.bytes(p).at(1)) // machine.itemsize
        joins = runs and first_group.get(p) == first_group.get(runs[-1][-1]) and total + n <= MERGE_LIMIT
        if not joins:
            runs.append([])
            total = 0
        runs[-1].append(p)
        total += n
    cut: list[list[Value]] = []
    for run in runs:
        small = sum(machine.up(machine.bytes(p).at(1)) for p in run) <= PADDED_LIMIT * machine.itemsize
        transient = any(gradients.get(p) for p in run)
        start = 0
        for i, p in enumerate(run):
            padded = machine.bytes(p).at(1) % machine.line != 0
            if i + 1 == len(run) or (padded and transient and not small):
                cut.append(run[start : i + 1])
                start = i + 1
    return {p: r for r, p in enumerate(ordered)}, [run for run in cut if len(run) > 1]


class _Merger:
    """Merges the candidates run by run; leaves a run unchanged if it cannot be merged."""

    def __init__(
        self, lowered: Lowered, machine: Machine, candidates: Sequence[_Candidate], runs: Sequence[Sequence[Value]]
    ):
        self.lowered, self.machine, self.candidates = lowered, machine, candidates
        self.runs = runs
        self.home: dict[Value, tuple[int, int]] = {p: (r, i) for r, run in enumerate(runs) for i, p in enumerate(run)}
        self.block_of: dict[tuple[Value, ...], Value] = {}
        self.promoted: set[Value] = set()
        self.in_block: set[Value] = set()
        self.names, self.counts = {v.name for v in lowered.values}, dict[str, int]()
        self.readers: dict[Value, list[int]] = {}
        self.writers: dict[Value, list[int]] = {}
        for t, st in enumerate(lowered.statements):
            for values, touching in zip(effects(st), (self.readers, self.writers)):
                for v in values:
                    touching.setdefault(v, []).append(t)

    def result(self, order: Mapping[Value, tuple[int, ...]]) -> tuple[Lowered, Groups]:
        for c in self.candidates:  # gradients and state have the home of their parameter
            p = _parameter(c)
            if p in self.home:
                for v in c.whole.values():
                    self.home.setdefault(v, self.home[p])
        sets: dict[tuple, dict[int, _Candidate]] = {}
        for c in self.candidates:
            if c.statement.phase not in PHASES:
                continue  # an update inside the backward frees its gradient early
            homes = {self.home.get(v) for v in c.whole.values()}
            home = homes.pop()
            if homes or home is None:
                continue
            key = (*c.signature, home[0])
            if sets.setdefault(key, {}).setdefault(home[1], c) is not c:
                sets[key][-1] = c  # a value is updated twice: do not merge
        statements: list[Statement | None] = list(self.lowered.statements)
        for key, members in sets.items():
            run = self.runs[key[-1]]
            if sorted(members) != list(range(len(run))):
                continue
            rows = [members[i] for i in range(len(run))]
            if self._may_move(rows) and self._claim(rows, run):
                last = max(c.index for c in rows)
                statements[last] = self._statement(rows, run)
                for c in rows:
                    if c.index != last:
                        statements[c.index] = None
        merged = replace(
            self.lowered,
            values=(*self.lowered.values, *self.block_of.values()),
            statements=tuple(st for st in statements if st is not None),
        )
        blocks = {block: members for members, block in self.block_of.items()}
        return merged, Groups(blocks, order, frozenset(self.promoted))

    def _may_move(self, rows: Sequence[_Candidate]) -> bool:
        """Whether all rows may move to the place of the last one."""
        chosen = {c.index for c in rows}
        last = max(chosen)

        def between(touching: Mapping[Value, Sequence[int]], values: Iterable[Value], start: int) -> bool:
            """Whether another row after ``start`` and before the last touches one of the values."""
            for v in values:
                places = touching.get(v, ())
                for k in range(bisect_right(places, start), bisect_left(places, last)):
                    if places[k] not in chosen:
                        return True
            return False

        for c in rows:
            read, written = effects(c.statement)
            if between(self.writers, read | written, c.index) or between(self.readers, written, c.index):
                return False
        return True

    def _claim(self, rows: Sequence[_Candidate], run: Sequence[Value]) -> bool:
        """Create a block for each operand's values; False if one of them is in another block already, or padding forbids it."""
        tracks = [tuple(c.whole[name] for c in rows) for name in rows[0].whole]
        padded = any(self.machine.bytes(p).at(1) % self.machine.line for p in run[:-1])
        for track in tracks:
            if len({(v.kind, is_persistent(v), v.resident) for v in track}) > 1 or len(set(track)) < len(track):
                return False
            if track not in self.block_of and self.in_block & set(track):
                return False
            if padded and not is_persistent(track[0]) and track[0].kind != "gradient":
                return False
        for track in tracks:
            if track in self.block_of:
                continue
            self.in_block.update(track)
            if padded and not is_persistent(track[0]):
                self.promoted.update(track)
            name = unique(f"{track[0].name}..{track[-1].name}", self.names, self.counts)
            self.names.add(name)
            self.block_of[track] = replace(track[0], name=name, elems=Affine(0, self._total(run)), shape=None)
        return True

    def _total(self, run: Sequence[Value]) -> int:
        up, itemsize = self.machine.up, self.machine.itemsize
        return sum(up(self.machine.bytes(p).at(1)) for p in run[:-1]) // itemsize + run[-1].elems.at(1)

    def _statement(self, rows: Sequence[_Candidate], run: Sequence[Value]) -> Statement:
        st = rows[-1].statement
        blocks = {name: self.block_of[tuple(c.whole[name] for c in rows)] for name in rows[0].whole}
        return Statement(
            spec=st.spec,
            words={**st.words, "rows": Affine(0, self._total(run)), "cols": ONE},
            operands={**st.operands, **blocks},
            path=st.path,
            phase=st.phase,
            label=f"{rows[0].statement.label} .. {rows[-1].statement.label}",
        )
