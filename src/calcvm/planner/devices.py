"""Which of several devices runs which statement: the cheapest assignment within a budget of memory for each.

Every statement runs once, in the program's order.  What persists and the user's data have a *home*, and a statement elsewhere
that reads them gets a copy for itself.  What statements compute is copied, once, directly after it is made, to each other device
that reads it, and lives there until its last read; where it was made it lives until the last read there.  Statements that write
the same value run on one device, and so does what updates what persists with it.

What a statement makes in the place of what dies there counts once, as where it is planned; what packing adds is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from calcvm.ops.statement import Lowered, Statement, Value
from calcvm.planner.inplace import may_take
from calcvm.planner.lifetimes import Machine, at_most, effects, is_persistent, operands
from calcvm.record import record

RARE = 1e-3  # what a path that does not train counts, as a part of one that does

Costs = Callable[[Statement], float]


@record(kw_only=True)
class Site:
    """A device as its planning sees it.

    machine, lowered : the program as it is for this device; statements and values of all sites correspond by their places.
    cost : seconds of a statement.  memory : bytes (None: no limit).  watts : while it runs.
    """

    name: str
    machine: Machine
    lowered: Lowered
    cost: Costs
    memory: int | None = None
    watts: float = 0.0


@record
class Read:
    """A statement that reads a value which has a home."""

    statement: int
    value: int


@record(kw_only=True)
class Problem:
    """An assignment in numbers: what depends on the device is a tuple with an entry for each.

    cluster : of each statement, and of each value that has a home.  cost, joules : of a statement by device.
    homed : bytes of values with a home.  reads : of these, beside the statements of their cluster.
    made : of the other values bytes, statement that makes it, statements that read it.
    kept : places in ``made`` of what stays readable: it keeps its bytes, all the time, where it is made.
    scratch : bytes that a statement needs for itself, by device.
    copies : seconds of a copy of some bytes from a device to another.
    fits : devices on which all was planned and fits.
    pairs : of each statement (y, x), places in ``made``: y may lie in the place of x, where that dies (of what is kept, a copy);
        x below 0: in that of its copy of ``homed[~x]``.
    """

    cluster: tuple[int, ...]
    cost: tuple[tuple[float, ...], ...]
    joules: tuple[tuple[float, ...], ...]
    scratch: tuple[tuple[int, ...], ...]
    homed: tuple[tuple[int, int], ...]  # bytes, cluster
    reads: tuple[Read, ...]
    made: tuple[tuple[int, int, tuple[int, ...]], ...]
    weight: tuple[float, ...]
    memory: tuple[int | None, ...]
    copies: Callable[[int, int, int], float]
    joules_allowed: float | None = None
    n_clusters: int = 0
    kept: frozenset[int] = frozenset()
    fits: frozenset[int] = frozenset()
    pairs: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def devices(self) -> range:
        return range(len(self.memory))

    def evaluate(self, at: Sequence[int]) -> Assigned:
        """What an assignment of clusters to devices takes."""
        n = len(self.cluster)
        where = [at[c] for c in self.cluster]
        seconds = sum(w * c[d] for w, c, d in zip(self.weight, self.cost, where))
        joules = sum(w * j[d] for w, j, d in zip(self.weight, self.joules, where))
        change = [[0] * (n + 1) for _ in self.devices]
        fixed = [0] * len(self.memory)
        copied = 0
        for size, c in self.homed:
            fixed[at[c]] += size
        for s, d in enumerate(where):
            change[d][s] += self.scratch[s][d]
            change[d][s + 1] -= self.scratch[s][d]
        for read in self.reads:
            (size, c), d, s = self.homed[read.value], where[read.statement], read.statement
            if at[c] != d:
                seconds += self.weight[s] * self.copies(at[c], d, size)
                copied += size
                change[d][s] += size
                change[d][s + 1] -= size
        ends: list[dict[int, int]] = []  # of what is made the last read on each device
        for v, (size, s, readers) in enumerate(self.made):
            last = {where[s]: s}
            ends.append(last)
            for r in readers:
                last[where[r]] = max(r, last.get(where[r], 0))
            if v in self.kept:
                last[where[s]] = n - 1
                change[where[s]][0] += size
                change[where[s]][s] -= size
            for d, end in last.items():
                change[d][s] += size
                change[d][end + 1] -= size
                if d != where[s]:
                    seconds += self.weight[s] * self.copies(where[s], d, size)
                    copied += size
        for s, own in enumerate(self.pairs):
            taken, d = set[int](), where[s]
            for y, x in own:
                if x in self.kept and where[self.made[x][1]] == d:
                    continue
                dies = ends[x].get(d) == s if x >= 0 else at[self.homed[~x][1]] != d
                if dies and taken.isdisjoint((y, x)):
                    taken |= {y, x}
                    change[d][s] -= self.made[y][0]
                    change[d][s + 1] += self.made[y][0]
        peaks, excess = [], 0
        for d in self.devices:
            live, most = fixed[d], fixed[d]
            for more in change[d]:
                live += more
                most = max(most, live)
            peaks.append(most)
            allowed = self.memory[d]
            excess += 0 if allowed is None else max(0, most - allowed)
        if len({*where}) == 1 and where[0] in self.fits:
            excess = 0
        if self.joules_allowed is not None and joules > self.joules_allowed * (1 + 1e-9):
            excess += 1 + int(2**40 * (joules / max(self.joules_allowed, 1e-30) - 1))
        return Assigned(tuple(at), tuple(where), seconds, joules, tuple(peaks), copied, excess)


@record
class Assigned:
    """Devices of clusters and of statements, and what they take.

    seconds, joules : of a step; paths that do not train count a thousandth.
    peaks : bytes of each device.  copied : bytes from device to device in a run of all paths.
    excess : what it is above what is allowed (0: it is feasible).
    bound : seconds that no assignment is faster than (None: no solver was asked).
    """

    at: tuple[int, ...]
    where: tuple[int, ...]
    seconds: float
    joules: float
    peaks: tuple[int, ...]
    copied: int
    excess: int
    bound: float | None = None
    solver: str = ""

    @property
    def score(self) -> tuple[int, float]:
        return self.excess, self.seconds

    @property
    def proved(self) -> bool:
        return self.bound is not None and self.seconds <= self.bound * (1 + 1e-6)


def shared_values(lowered: Lowered) -> list[Value]:
    """Values that all sites have, in an order that is the same for all: all but scratch."""
    scratch = {v for st in lowered.statements for o, v in operands(st) if o.access == "s"}
    return [v for v in lowered.values if v not in scratch]


def problem_of(
    sites: Sequence[Site], batch: int, copies: Callable[[int, int, int], float], joules: float | None = None
) -> tuple[Problem, dict[int, int]]:
    """The program in numbers, and the cluster of each value that has a home, by the value's place."""
    lowered, machine = sites[0].lowered, sites[0].machine
    common = shared_values(lowered)
    place = {v: i for i, v in enumerate(common)}
    statements = lowered.statements
    writers: dict[int, list[int]] = {}
    readers: dict[int, list[int]] = {}
    paths: dict[int, set[str]] = {}
    for s, st in enumerate(statements):
        read, written = effects(st)
        for v in (read | written) & place.keys():
            paths.setdefault(place[v], set()).add(st.path)
        for v in written & place.keys():
            writers.setdefault(place[v], []).append(s)
        for v in read & place.keys():
            readers.setdefault(place[v], []).append(s)

    def has_home(i: int) -> bool:
        v = common[i]
        first = min(readers.get(i, [len(statements)]))
        early = first <= min(writers.get(i, [len(statements)]))
        return is_persistent(v) or v.kind == "placeholder" or len(paths.get(i, ())) > 1 or early

    values = [i for i, v in enumerate(common) if i in paths or is_persistent(v) or v.kind == "placeholder"]
    root = list(range(len(statements) + len(values)))

    def find(k: int) -> int:
        while root[k] != k:
            root[k] = root[root[k]]
            k = root[k]
        return k

    for k, i in enumerate(values, len(statements)):
        together = writers.get(i, [])
        if together and not has_home(i):  # nobody reads what is written in part
            together = [*together, *(r for r in readers.get(i, ()) if r < together[-1])]
        for s in together:
            root[find(s)] = find(together[0])
        if has_home(i) and i in writers:
            root[find(k)] = find(writers[i][0])
    number: dict[int, int] = {}
    cluster = [number.setdefault(find(s), len(number)) for s in range(len(statements))]
    home: dict[int, int] = {}
    homed: list[tuple[int, int]] = []
    reads: list[Read] = []
    made: list[tuple[int, int, tuple[int, ...]]] = []
    kept: set[int] = set()
    numbered: dict[Value, int] = {}
    size = {i: machine.up(at_most(machine.bytes(common[i]), batch)) for i in values}
    for k, i in enumerate(values, len(statements)):
        if has_home(i):
            home[i] = number.setdefault(find(k), len(number))
            reads += [Read(s, len(homed)) for s in readers.get(i, ()) if cluster[s] != home[i]]
            numbered[common[i]] = ~len(homed)
            homed.append((size[i], home[i]))
        else:
            numbered[common[i]] = len(made)
            if common[i].resident:
                kept.add(len(made))
            made.append((size[i], writers[i][0], (*readers.get(i, ()), *writers[i][1:])))
    trains = {st.path for st in statements if st.phase == "backward"}
    problem = Problem(
        cluster=tuple(cluster),
        cost=tuple(tuple(site.cost(site.lowered.statements[s]) for site in sites) for s in range(len(statements))),
        joules=tuple(
            tuple(site.cost(site.lowered.statements[s]) * site.watts for site in sites) for s in range(len(statements))
        ),
        scratch=tuple(
            tuple(_scratch(site, site.lowered.statements[s], batch) for site in sites) for s in range(len(statements))
        ),
        homed=tuple(homed),
        reads=tuple(reads),
        made=tuple(made),
        weight=tuple(1.0 if st.path in trains or not trains else RARE for st in statements),
        memory=tuple(None if site.memory is None else site.memory - _reserved(site) for site in sites),
        copies=copies,
        joules_allowed=joules,
        n_clusters=len(number),
        kept=frozenset(kept),
        pairs=tuple(
            _pairs(s, [site.lowered.statements[s] for site in sites], sites, numbered, made, kept)
            for s in range(len(statements))
        ),
    )
    return problem, home


def _pairs(
    s: int,
    own: Sequence[Statement],
    sites: Sequence[Site],
    numbered: Mapping[Value, int],
    made: Sequence[tuple[int, int, tuple[int, ...]]],
    kept: Collection[int],
) -> tuple[tuple[int, int], ...]:
    """(y, x) of a statement, if y may lie in the place of x on some device."""
    st, out = own[0], []
    for written, read in st.spec.in_place:
        y, x = (numbered.get(v) if v is not None else None for v in (st.operands.get(written), st.operands.get(read)))
        if y is None or x is None or y == x or y < 0 or made[y][1] != s or y in kept:
            continue
        if any(may_take(each, written, read, site.machine) for each, site in zip(own, sites, strict=True)):
            out.append((y, x))
    return tuple(out)


def _reserved(site: Site) -> int:
    from calcvm.planner.layout import RESERVED

    return site.machine.up(RESERVED * site.machine.itemsize)


def _scratch(site: Site, st: Statement, batch: int) -> int:
    machine = site.machine
    return sum(machine.up(at_most(machine.extent(o, st), batch)) for o, _ in operands(st) if o.access == "s")
