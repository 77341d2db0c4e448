"""Checks across rows: reads find the intended values, and no worker meets another's write."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NoReturn

from calcvm.errors import ProgramError
from calcvm.ops.dims import Affine
from calcvm.vm.program.encoding import FLAG_PHASES, FLAG_SYNC
from calcvm.vm.program.verify.facts import check_info
from calcvm.vm.program.verify.row import Access, Rows


class Shadow:
    """The symbol that last wrote each byte, as ordered, disjoint intervals."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []
        self.owners: list[int] = []

    def write(self, start: int, stop: int, owner: int) -> None:
        i = bisect_right(self.stops, start)  # the first interval that ends after start
        j = bisect_left(self.starts, stop)  # the first that begins at stop or later
        starts, stops, owners = [start], [stop], [owner]
        if i < j:
            if self.starts[i] < start:
                starts.insert(0, self.starts[i])
                stops.insert(0, start)
                owners.insert(0, self.owners[i])
            if self.stops[j - 1] > stop:
                starts.append(stop)
                stops.append(self.stops[j - 1])
                owners.append(self.owners[j - 1])
        self.starts[i:j], self.stops[i:j], self.owners[i:j] = starts, stops, owners

    def foreign(self, start: int, stop: int, owner: int) -> tuple[int, int] | None:
        """The first cell of [start, stop) that ``owner`` did not write last, and its last writer (-1: none)."""
        i, cell = bisect_right(self.stops, start), start
        while cell < stop:
            if i == len(self.starts) or self.starts[i] > cell:
                return cell, -1
            if self.owners[i] != owner:
                return cell, self.owners[i]
            cell = self.stops[i]
            i += 1
        return None


class Together(Rows):
    """The sequence of a path's rows is valid, and kept values share no cells."""

    def check(self) -> None:
        """Run all checks (ProgramError: the first error)."""
        self.check_form()
        self.check_sections()
        self.check_zones()
        self.check_symbols()
        self.check_patches()
        check_info(self.program)
        self.accesses = [self.check_row(i, row, values) for i, (row, values) in enumerate(self.decoded)]
        self.check_kept_apart()
        self.check_needs()
        for path in self.program.paths:
            span = self.spans[path]
            if span:
                self.check_barriers(span)
                self.check_dataflow(span, largest=True)
                if len(self.program.patches) and self.batch > 1:
                    self.check_dataflow(span, largest=False)

    def check_kept_apart(self) -> None:
        """Values that are kept, or that several paths use, share no cells at any time."""
        p = self.program
        self.kept = [s.kept for s in p.symbols]
        users: list[str | None] = [None] * len(p.symbols)
        for path in p.paths:
            for i in self.spans[path]:
                for access in self.accesses[i]:
                    for leaf in p.symbols[access.symbol].members or (access.symbol,):
                        if users[leaf] is None:
                            users[leaf] = path
                        elif users[leaf] != path:
                            self.kept[leaf] = True
        ordered = sorted(
            (s.start, s.start + self.sizes[i][1], i)
            for i, s in enumerate(p.symbols)
            if not s.members and self.sizes[i][1]
        )
        last: tuple[int, int] = (0, -1)  # end and index of the symbol that reaches farthest so far
        last_kept: tuple[int, int] = (0, -1)
        for start, stop, i in ordered:
            other = last if self.kept[i] else last_kept
            if other[0] > start:
                raise ProgramError(
                    f"symbols {self.name(other[1])} and {self.name(i)} share cells from {p.symbols[i].offset} on, but "
                    f"{self.name(i if self.kept[i] else other[1])} must keep its own"
                )
            last = max(last, (stop, i))
            if self.kept[i]:
                last_kept = max(last_kept, (stop, i))

    def check_needs(self) -> None:
        """A path reads only values that it computes, or that ``info`` lists as its needs, in any shape."""
        p = self.program
        if not p.info.get("paths"):
            return
        maker = {a.symbol: path for path in p.paths for i in self.spans[path] for a in self.accesses[i] if a.writes}
        for path in p.paths:
            names = [name for names in p.info["paths"][path]["needs"].values() for name in names]
            needed = {p.info["variables"][name]["symbol"] for name in names}
            needed |= {x for symbol in needed if symbol is not None for x in p.copies.get(symbol, {}).values()}
            for i in self.spans[path]:
                for a in self.accesses[i]:
                    s = p.symbols[a.symbol]
                    outside = s.kind == "placeholder" or (not s.persistent and maker.get(a.symbol, path) != path)
                    if a.reads and outside and a.symbol not in needed:
                        self.fail(i, f'operand {a.operand.name} reads {s.name!r}, and info["paths"] says nothing of it')

    def check_dataflow(self, span: range, *, largest: bool) -> None:
        """Every read of a transient value finds that value, written earlier in the path."""
        shadow = Shadow()
        for i in span:
            accesses = [a for a in self.accesses[i] if not self.kept[a.symbol]]
            for a in accesses:
                if a.reads:
                    for start, stop, owner in self.cells(a, largest):
                        found = shadow.foreign(start, stop, owner)
                        if found:
                            cell, other = found
                            batch = self.batch if largest else 1
                            self.fail(
                                i,
                                f"operand {a.operand.name} reads {self.name(owner)} "
                                f"[{start // a.size}, {stop // a.size}), but cell {cell // a.size} holds "
                                f"{self.name(other)} there (batch {batch})",
                            )
            for a in accesses:
                if a.writes:
                    for start, stop, owner in self.cells(a, largest):
                        shadow.write(start, stop, owner)

    def cells(self, a: Access, largest: bool) -> list[tuple[int, int, int]]:
        """[start, stop) and symbol of an access; for a block, those of its members."""
        stop = a.start + (a.last if largest else a.first)
        symbols = self.program.symbols
        if not symbols[a.symbol].members:
            return [(a.start, stop, a.symbol)] if stop > a.start else []
        out = []
        for m in symbols[a.symbol].members:
            start, end = symbols[m].start, symbols[m].start + symbols[m].bytes.b
            if start < stop and a.start < end and not self.kept[m]:
                out.append((max(start, a.start), min(end, stop), m))
        return out

    def check_barriers(self, span: range) -> None:
        """Between two barriers, no worker reads or writes cells that another worker writes."""
        if not self.decoded[span[-1]][0][1] & FLAG_SYNC:
            self.fail(span[-1], "the last row of a path must be followed by a barrier")
        group: list[Access] = []
        for i in span:
            group += self.accesses[i]
            if self.decoded[i][0][1] & FLAG_PHASES and self.patched.get(i, {}).get(0, Affine(0, 2)).at(1) > 1:
                self.check_group(group)  # all workers meet inside the row
                group = [*self.accesses[i]]
            if self.decoded[i][0][1] & FLAG_SYNC:
                self.check_group(group)
                group = []

    def check_group(self, group: list[Access]) -> None:
        merged: dict[tuple[int, int, bool, object], list[Access]] = {}
        for a in group:
            merged.setdefault((a.start, a.start + a.last, a.writes, a.how), []).append(a)
        active: list[tuple[int, bool, object, list[Access]]] = []
        for (start, stop, writes, how), accesses in sorted(merged.items(), key=lambda item: item[0][:3]):
            active = [entry for entry in active if entry[0] > start]
            if writes and how is None and len({a.row for a in accesses}) > 1:
                self.race(accesses[0], accesses[-1])
            for _, wrote, before, others in active:
                if (writes or wrote) and (how is None or how != before):
                    for other in others:
                        for a in accesses:
                            if a.row != other.row:
                                self.race(other, a)
            active.append((stop, writes, how, accesses))

    def race(self, a: Access, b: Access) -> NoReturn:
        if a.row > b.row:
            a, b = b, a
        self.fail(
            b.row,
            f"operand {b.operand.name} ({self.name(b.symbol)}) {b} meets operand "
            f"{a.operand.name} ({self.name(a.symbol)}) {a} of row {a.row} "
            "with no barrier between them",
        )
