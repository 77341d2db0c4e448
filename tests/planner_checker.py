"""An independent check of plans: the memory simulated cell by cell, no code shared with the planner.

Every cell holds a tag that says what was last written into it.  Running the planned rows of all paths,
in several orders of the paths and for several batch sizes, every read must find the value that the
program without a plan would find.  The cells that workers touch between two barriers are enumerated
for several team sizes: no two workers may meet in a cell that one of them writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calcvm.ops.sizes import Extent, evaluate
from calcvm.ops.spec import Operand
from calcvm.ops.statement import Lowered, Statement, Value
from calcvm.ops.types import bytes_of

RESERVED = 16


class Broken(AssertionError):
    """The plan is wrong."""


def numbers(plan: Any, st: Statement, batch: int) -> dict[str, Any]:
    """A statement's words at a batch; its workspace is that of the planned one."""
    at = {k: plan.batch_size if k == "wn" else batch for k in st.words}
    return {k: w.at(at[k]) if isinstance(w, Extent) else w for k, w in st.words.items()}


def extent(o: Operand, names: dict[str, int]) -> int:
    return int(evaluate(o.elems, names))


def size_of(plan: Any, of: Any) -> int:
    """Cells of an element: of four bytes, or of one where a value is of smaller elements."""
    small = any(bytes_of(v.type, 4) < 4 for v in plan.offsets)
    return bytes_of(of.type, plan.itemsize) // (1 if small else 4)


def cells(plan: Any, o: Operand, st: Statement, batch: int) -> range:
    names, size = {"nw": plan.workers, "gpu": 0, **numbers(plan, st, batch)}, size_of(plan, o)
    start = (plan.offsets[st.operands[o.name]] + st.shifts.get(o.name, 0)) * size
    return range(start, start + extent(o, names) * size)


def check(plan: Any, original: Lowered, batches: Sequence[int], teams: Sequence[int] = (1, 2, 3, 5)) -> None:
    """Raise `Broken` unless the plan runs ``original`` correctly."""
    check_rows(plan, original)
    check_shape(plan)
    check_live(plan)
    for batch in batches:
        paths = list(original.paths)
        for order in (paths, paths[::-1], [p for p in paths for _ in range(2)] + paths):
            Memory(plan, batch).run(order)
        for team in teams:
            if team <= plan.workers or plan.workers == 1:
                check_team(plan, batch, team)


def check_rows(plan: Any, original: Lowered) -> None:
    """The planned rows do what the original rows do, each once, in an order that respects dependencies.

    Statements that run again make another version of a value, from versions that are as those that the original read.
    """
    version_of: dict[Any, Any] = {}
    for st in plan.statements:
        if pages(st):
            page, other = st.operands["page"], st.operands.get("x", st.operands.get("y"))
            if other is not None:  # a page holds what was written to it, or is the value itself where that persists
                source, made = (other, page) if page.kind == "page" and "x" in st.operands else (page, other)
                made_of = version_of.get(source, source)
                if version_of.setdefault(made, made_of) is not made_of:
                    raise Broken(f"{st.label}: {made.name} is a version of two values")
    for copy, st in plan.recomputed.items():
        for n, v in copy.operands.items():
            if version_of.setdefault(v, st.operands[n]) is not st.operands[n]:
                raise Broken(f"{copy.label}: {v.name} is a version of two values")

    def member_rows(st: Statement) -> list[tuple]:
        """(what is done to which values, to which versions of them)."""
        head = (st.path, plan.recomputed.get(st, st).phase, st.spec.name)
        blocks = {n: v for n, v in st.operands.items() if v in plan.blocks}
        if not blocks:
            own = tuple(st.operands.items())
            return [((*head, tuple((n, version_of.get(v, v)) for n, v in own)), own)]
        count = {len(plan.blocks[v]) for v in blocks.values()}
        if len(count) != 1:
            raise Broken(f"{st.label}: blocks of different lengths")
        inner = {tuple(plan.offsets[m] - plan.offsets[v] for m in plan.blocks[v]) + (v.elems,) for v in blocks.values()}
        if len(inner) != 1:
            raise Broken(f"{st.label}: blocks are not parallel")
        members = [
            tuple((n, plan.blocks[v][i] if n in blocks else v) for n, v in st.operands.items())
            for i in range(count.pop())
        ]
        return [((*head, own), own) for own in members]

    planned = [(row, st in plan.recomputed or pages(st)) for st in plan.statements for row in member_rows(st)]
    wanted = [(row, False) for st in original.statements for row in member_rows(st)]
    once = [repr_row(row) for (row, _), again in planned if not again]
    if sorted(once) != sorted(repr_row(row) for (row, _), _ in wanted):
        raise Broken("rows were lost, added or changed")
    if any(st.spec is not copy.spec or st.words != copy.words for copy, st in plan.recomputed.items()):
        raise Broken("what runs again is not what ran before")
    keys = [(original.paths.index(st.path), PHASES.index(st.phase)) for st in plan.statements]
    if keys != sorted(keys):
        raise Broken("a row left its section")
    # what each row reads must have been written by the same row as before
    if producers(planned, original) != producers(wanted, original):
        raise Broken("a row reads another row's result than before")


PHASES = ("forward", "loss", "backward", "optimize", "end_round")


def pages(st: Statement) -> bool:
    """Whether a statement moves a value to or from the file."""
    return st.spec.name.partition(".")[0] in ("page_out", "page_in", "page_ahead")


def repr_row(row: tuple) -> str:
    return repr((row[0], row[1], row[2], [(n, id(v)) for n, v in row[3]]))


def producers(rows: Sequence[tuple[tuple, bool]], original: Lowered) -> dict[str, list[tuple]]:
    """For each row, which row wrote each operand last (rows by content, occurrences in order; again counts once)."""
    specs = {st.spec.name: st.spec for st in original.statements}
    writer: dict[Value, str] = {}
    out: dict[str, list[tuple]] = {}
    for (row, versions), again in rows:
        values = dict(versions)
        if row[2].startswith("page_"):
            if (source := values.get("x", values["page"])) in writer and (made := values.get("y", values["page"])):
                writer[made] = writer[source]
            continue
        present = [o for o in specs[row[2]].operands if values.get(o.name) is not None]
        found = tuple((o.name, writer.get(values[o.name])) for o in present if o.access in "rua")
        before = out.setdefault(repr_row(row), [])
        if not again or found not in before:
            before.append(found)
        for o in present:
            if o.access in "wua":
                writer[values[o.name]] = repr_row(row)
    kept = {v for st in original.statements for v in st.operands.values()}
    out["at the end"] = sorted((id(v), row) for v, row in writer.items() if v in kept)
    return out


def check_shape(plan: Any) -> None:
    """Alignment, zones, the heap's end."""
    for v, offset in plan.offsets.items():
        size = bytes_of(v.type, plan.itemsize)
        start, stop = offset * size, (offset + v.elems.at(plan.batch_size)) * size
        paged = v.kind == "page" or v in plan.lowered.paged
        low, high = (
            (plan.heap_bytes, plan.page_bytes + plan.heap_bytes)
            if paged
            else (RESERVED * plan.itemsize, plan.heap_bytes)
        )
        if start % 64 or start < low or stop > high:
            raise Broken(f"{v.name} at {offset} is misaligned or outside the heap")
        zone = plan.zones["pages" if paged else v.zone] if v.persistent else None
        if zone and not (zone.start_elems * plan.itemsize <= start and stop <= zone.stop_elems * plan.itemsize):
            raise Broken(f"{v.name} persists outside its zone")
    if plan.heap_bytes < plan.lower_bound_bytes:
        raise Broken("a heap below its lower bound")


LINE = 64


def check_live(plan: Any) -> None:
    """At each statement as many bytes are live as the plan says: cells of what it or both earlier and later ones touch."""
    spans: dict[Value, tuple[int, int]] = {}
    elems: dict[Value, int] = {}
    for t, st in enumerate(plan.statements):
        for o in st.spec.operands:
            v = st.operands.get(o.name)
            if v is None:
                continue
            for m in (v, *plan.blocks.get(v, ())):
                spans[m] = (spans.get(m, (t, t))[0], t)
            if o.access == "s":
                names = {"nw": plan.workers, "gpu": 0, **numbers(plan, st, plan.batch_size)}
                elems[v] = max(elems.get(v, 0), extent(o, names))
    for block, members in plan.blocks.items():  # is one piece of the heap
        own = [spans[v] for v in (block, *members) if v in spans]
        if own:
            spans[block] = min(first for first, _ in own), max(last for _, last in own)
    lasting = plan.zones["arena"].start_elems * plan.itemsize  # below it lies what is never shared
    for v in {
        *kept_values(plan),
        *(v for v, k in plan.offsets.items() if k * bytes_of(v.type, plan.itemsize) < lasting),
    }:
        spans[v] = 0, max(len(plan.statements) - 1, 0)
    for t, said in enumerate(plan.live_bytes):
        taken = [(0, RESERVED * plan.itemsize)]
        for v, (first, last) in spans.items():
            if first <= t <= last:
                size = bytes_of(v.type, plan.itemsize)
                start = plan.offsets[v] * size
                taken.append((start, start + elems.get(v, v.elems.at(plan.batch_size)) * size))
        live, end = 0, 0
        within = [(start, -(-stop // LINE) * LINE) for start, stop in taken if start < plan.heap_bytes]
        for start, stop in sorted(within):
            live += max(stop - max(start, end), 0)
            end = max(end, stop)
        if live != said:
            raise Broken(f"statement {t}: {live:,} bytes are live, the plan says {said:,}")


class Memory:
    """Cells with tags: ("value", name of the value, writes so far, index)."""

    def __init__(self, plan: Any, batch: int):
        self.plan, self.batch = plan, batch
        self.tag: list[Any] = [None] * (plan.heap_bytes + plan.page_bytes)
        self.writes: dict[Value, int] = {}
        self.owner: dict[int, Value] = {}  # cells of what lives between steps: there from the start
        for v in kept_values(plan):
            for i, cell in enumerate(self.own(v)):
                if self.owner.setdefault(cell, v) is not v:
                    raise Broken(f"{v.name} overlaps {self.owner[cell].name}: both live between steps")
                self.tag[cell] = (v, 0, i)

    def own(self, v: Value) -> range:
        """All cells of a value."""
        size = size_of(self.plan, v)
        return range(self.plan.offsets[v] * size, (self.plan.offsets[v] + v.elems.at(self.batch)) * size)

    def run(self, paths: Sequence[str]) -> None:
        for path in paths:
            written: set[Value] = set()
            for st in self.plan.statements:
                if st.path == path:
                    self.step(st, written)

    def members(self, v: Value) -> tuple[Value, ...]:
        return self.plan.blocks.get(v, (v,))

    def step(self, st: Statement, written: set[Value]) -> None:
        plan, batch = self.plan, self.batch
        present = [(o, st.operands[o.name]) for o in st.spec.operands if st.operands.get(o.name) is not None]
        span = {o.name: cells(plan, o, st, batch) for o, _ in present}
        for o, v in present:
            if o.access in "ru" or (o.access == "a" and st.words["acc"] == 1):
                self.read(o, v, span[o.name], st, written)
        for o, _ in present:
            if o.access == "r":
                continue
            for p, _ in present:  # operands of one row overlap only where the operator allows it
                if p is not o and meet(span[o.name], span[p.name]):
                    same = span[o.name].start == span[p.name].start
                    if not (same and ({(o.name, p.name), (p.name, o.name)} & set(st.spec.in_place))):
                        raise Broken(f"{st.label}: {o.name} and {p.name} overlap")
        for o, v in present:
            if o.access == "s":
                for i in span[o.name]:
                    self.put(i, v, ("scratch", st.label))
            elif o.access in "wua":
                self.write(v, span[o.name], written)

    def read(self, o: Operand, v: Value, span: range, st: Statement, written: set[Value]) -> None:
        for m in self.members(v):
            for k, i in enumerate(self.own(m)):
                if i in span and self.tag[i] != (m, self.writes.get(m, 0), k):
                    raise Broken(f"{st.label}: {o.name} ({m.name}) finds {self.tag[i]}")
        inside = {i for m in self.members(v) for i in self.own(m)}
        for i in span:  # the padding of a block is as it was when the heap was made
            if i not in inside and self.tag[i] is not None:
                raise Broken(f"{st.label}: padding of {v.name} holds {self.tag[i]}")

    def write(self, v: Value, span: range, written: set[Value]) -> None:
        for m in self.members(v):
            written.add(m)
            self.writes[m] = self.writes.get(m, 0) + 1
            for k, i in enumerate(self.own(m)):
                old = self.tag[i]
                if i in span or (isinstance(old, tuple) and old[0] is m):  # a shifted write changes its part alone
                    self.put(i, m, (m, self.writes[m], k))

    def put(self, cell: int, v: Value, tag: tuple) -> None:
        if self.owner.get(cell, v) is not v:
            raise Broken(f"{v.name} is written onto {self.owner[cell].name}, which lives between steps")
        self.tag[cell] = tag


def kept_values(plan: Any) -> list[Value]:
    """Values that live between steps: declared so, or read by a path before it writes them."""
    out = [v for v in plan.offsets if v.persistent or v.resident or v.kind == "placeholder"]
    for path in {st.path for st in plan.statements}:
        written: set[Value] = set()
        for st in plan.statements:
            if st.path == path:
                for o in st.spec.operands:
                    for v in plan.blocks.get(st.operands.get(o.name), (st.operands.get(o.name),)):
                        reads = o.access in "ru" or (o.access == "a" and st.words["acc"] == 1)
                        if v is not None and reads and v not in written:
                            out.append(v)
                written |= {v for o in st.spec.operands if o.writes and (v := st.operands.get(o.name)) is not None}
    return [v for v in dict.fromkeys(out) if v not in plan.blocks]


def meet(a: range, b: range) -> bool:
    return len(a) > 0 and len(b) > 0 and a.start < b.stop and b.start < a.stop


# ---------------------------------------------------------------- teams
def worker_cells(plan: Any, o: Operand, st: Statement, batch: int, team: int) -> list[set[int]]:
    """Cells that each worker may touch."""
    span = cells(plan, o, st, batch)
    if o.part == "w0":
        return [set(span)] + [set() for _ in range(team - 1)]
    words = {
        "nw": plan.workers,
        "gpu": 0,
        **numbers(plan, st, batch),
    }
    units = int(evaluate(o.part, words)) if o.part else 0
    if units:
        size = len(span) // units
        return [set(span[units * w // team * size : units * (w + 1) // team * size]) for w in range(team)]
    if o.access == "s" and phases(plan, st, batch) == 1:
        return [set(span[len(span) * w // team : len(span) * (w + 1) // team]) for w in range(team)]
    return [set(span) for _ in range(team)]


def phases(plan: Any, st: Statement, batch: int) -> int:
    """How often a statement is run."""
    names = {"nw": plan.workers, "gpu": 0, **numbers(plan, st, batch)}
    return int(evaluate(st.spec.phases, names))


def check_team(plan: Any, batch: int, team: int) -> None:
    """No two workers meet between barriers, whatever their relative speed."""
    readers: dict[int, dict[int, set[int]]] = {}  # cell -> row -> workers
    writers: dict[int, dict[int, set[int]]] = {}
    for t, st in enumerate(plan.statements):
        touched = []
        for o in st.spec.operands:
            if st.operands.get(o.name) is None:
                continue
            for w, own in enumerate(worker_cells(plan, o, st, batch, team)):
                touched += [(i, w, o.access != "r") for i in own]
        for i, w, writes in touched:
            for kind in (writers,) if not writes else (writers, readers):
                for row, others in kind.get(i, {}).items():
                    if row != t and others - {w}:
                        raise Broken(f"cell {i}: worker {w} in row {t} meets {others} of row {row}")
            (writers if writes else readers).setdefault(i, {}).setdefault(t, set()).add(w)
        if phases(plan, st, batch) > 1:  # all meet inside the row: only what it touches itself is met after it
            for kind in (readers, writers):
                for i in list(kind):
                    kind[i] = {row: who for row, who in kind[i].items() if row == t}
        last = t + 1 == len(plan.statements) or plan.statements[t + 1].path != st.path
        if last and not plan.sync[t]:
            raise Broken(f"row {t} ends path {st.path} without a barrier")
        if plan.sync[t]:
            readers.clear()
            writers.clear()
