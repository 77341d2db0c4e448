"""Which of several devices runs which statement: the cheapest assignment within a memory budget for each.

Every statement runs once, in the program's order.  Persistent values and the user's data have a *home*; a statement elsewhere
that reads one gets its own copy.  A computed value is copied once, directly after it is made, to each other device that reads
it.  On every device it lives until its last read there.  Statements that write the same value run on one device, and the
statement that updates a persistent value runs on its home.

A value that is written in place of a dying one counts once, as in the planner.  Gaps of packing are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from calcvm.frozen import frozen
from calcvm.ops.statement import Lowered, Statement, Value
from calcvm.planner.inplace import may_take
from calcvm.planner.lifetimes import Machine, at_most, effects, is_persistent, operands

RARE = 1e-3  # weight of a path that does not train, relative to one that does

Costs = Callable[[Statement], float]


@frozen(kw_only=True)
class Site:
    """A device, as planning sees it.

    machine, lowered : the program as lowered for this device; statements and values of all sites correspond by index.
    cost : function from a statement to seconds.  memory : bytes (None: no limit).  watts : while it runs.
    """

    name: str
    machine: Machine
    lowered: Lowered
    cost: Costs
    memory: int | None = None
    watts: float = 0.0


@frozen
class Read:
    """A statement that reads a value with a home."""

    statement: int
    value: int


@frozen(kw_only=True)
class AssignmentProblem:
    """The assignment problem in numbers; a field that depends on the device is a tuple with one entry per device.

    cluster : the cluster of each statement.  cost, joules : per statement and device.
    homed : (bytes, cluster) of each value with a home.  reads : reads of these by statements outside their cluster.
    made : every other value: bytes, the statement that makes it, the statements that read it.
    kept : indices in ``made`` of values that stay readable: they keep their bytes, all the time, where they are made.
    scratch : scratch bytes per statement and device.
    copies : seconds to copy a number of bytes from one device to another: ``copies(source, target, bytes)``.
    fits : devices on which the whole program was planned and fits.
    pairs : per statement, pairs (y, x) of indices in ``made``: y may overwrite x if x (if kept: a copy of x) dies there;
        x below 0: y may overwrite the statement's copy of ``homed[~x]``.
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
        """Evaluate an assignment of clusters to devices: seconds, joules, bytes."""
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
        ends: list[dict[int, int]] = []  # per value in ``made``: its last read on each device
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


@frozen
class Assigned:
    """An assignment: the device of each cluster (``at``) and statement (``where``), and its cost.

    seconds, joules : per step; paths that do not train count a thousandth.
    peaks : bytes of each device.  copied : bytes from device to device in a run of all paths.
    excess : how far it exceeds the limits (0: feasible).
    bound : lower bound of the seconds of any assignment (None: no solver ran).
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
    """The values that all sites share, in the same order: all but scratch."""
    scratch = {v for st in lowered.statements for o, v in operands(st) if o.access == "s"}
    return [v for v in lowered.values if v not in scratch]


def problem_of(
    sites: Sequence[Site], batch: int, copies: Callable[[int, int, int], float], joules: float | None = None
) -> tuple[AssignmentProblem, dict[int, int]]:
    """The program in numbers, and the cluster of each value with a home, by the value's index."""
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
        if together and not has_home(i):  # keep readers of a partly written value with its writers
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
    problem = AssignmentProblem(
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
    """Pairs (y, x) of a statement where y may overwrite x on some device."""
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
