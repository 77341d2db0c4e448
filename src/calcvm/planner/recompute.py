"""Recomputation: values that are made again in the backward, so that they need not be kept since the forward.

A *schedule* says before which statement of the backward which statements of the forward run again.  Every read finds
the version of a value that was made last, and a version lives from where it is made to its last read.  So each
schedule is right, whatever its pairs: only its peak and its work differ.

What may run again: a statement before the backward whose results are transient and have no other writer, and whose inputs
still are what they were.  So dropout and running statistics repeat exactly: the random state and the statistics of the
batch are inputs that nothing writes in between, and what updates them is never run again.

Where there is a file for pages, a value may also be written to it once, where it is made, and read again (`calcvm.planner.paging`):
a *page step*, which a schedule runs like a statement that makes the value and reads none.  Page steps have numbers below 0.

The search takes no solver (they may look on: `calcvm.planner.portfolio`).  Greedily, a value that is idle at the peak is dropped
there and made again before its next read, with all that it needs and that has died before the peak: the drop that lowers
most for its work.  Then parts of the schedule are taken back and mended, and the cheaper one is kept.

Overhead of a step, reckoned and measured (Zen 4): ResNet-18, batch 8, in 75 % of its memory 1.1 and 0.5 %, in 62 % 6.1 and
5.2; UNet at 256, batch 2, in 75 % 0.5 and 0.0, in 50 % 13.3 and 11.3; MobileNetV2 at 224, batch 8, in 75 % 4.4 and 0.0, in
50 % 9.7 and 1.1.  The search takes 2 s; in 4 s it finds 0.0 to 0.2 points less, 3.3 a tenth above the floor of a UNet.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from calcvm.errors import PlanError
from calcvm.lazy import cached_property
from calcvm.ops.statement import Lowered, Statement, Value, Versions
from calcvm.planner.cost import seconds
from calcvm.planner.inplace import may_take
from calcvm.planner.lifetimes import Machine, always_live, at_most, effects, lifetimes, operands, other_ways
from calcvm.planner.paging import PAGE, File, is_paging, page_in, page_out
from calcvm.record import record

if TYPE_CHECKING:
    from calcvm.planner.portfolio import Solvers

Pair = tuple[int, int]  # (statement of the backward, statement that runs again before it)
EARLY = ("forward", "loss")
TRIALS = 6  # drops whose peak is worked out, of those that look best
EFFORT = 1_000_000  # statements that the search may follow to make a schedule cheaper: about two seconds
IDLE = 1000  # schedules in a row that were none cheaper: small programs have few
# And to find one: a chain of 300 layers in 80 % takes two seconds, of 600 in 60 %, or 1000 in 80 %, half a minute.
PATIENCE = 3000 * EFFORT
SEED = 0


@record
class Step:
    """A statement in numbers: of values those whose lifetime a schedule can change.

    uses, makes : values that were there before it, and values that it is the first to write.
    pairs : (made, used): the first may lie in the place of the second.
    scratch : bytes that it alone needs.
    until : the last statement before which it may run again; -1: never.
    cost : what running it again costs.
    """

    uses: tuple[int, ...]
    makes: tuple[int, ...]
    pairs: tuple[Pair, ...]
    scratch: int
    until: int
    cost: float = 0.0


class Run:
    """A schedule, followed: which version of a value lives when, and what is live.

    Times are *keys*, which sort as what runs does: statements that run again before a statement by their numbers, then it itself.
    So a schedule that differs little from another is followed where it differs alone.

    lives : of each value the keys at which each of its versions is touched.
    read : of what runs again and is read, the statement before which it, or which, is the first to do so.
    """

    keys: np.ndarray
    _table: np.ndarray

    def __init__(self, problem: Problem, chosen: Iterable[Pair], near: Run | None = None):
        self.problem, self.chosen = problem, frozenset(chosen)
        if near is None:
            known: frozenset[Pair] = frozenset()
            self.lives: list[list[list[int]]] = [[] for _ in problem.sizes]
            self.read: dict[Pair, int] = {}
            self._shared: dict[int, int] = {}  # by key, what lies in the place of what dies
            self._places: dict[int, tuple[int, ...]] = {}  # of what runs again the statements before which it does
            table = np.zeros(
                (4, len(problem.steps)), np.int64
            )  # keys; sizes of versions that begin, that end; what else is live
            table[0] = [problem.key(t, t) for t in range(len(problem.steps))]
            table[3] = [step.scratch for step in problem.steps]
            touched = [*range(len(problem.sizes))]
        else:
            known, table = near.chosen, near._table.copy()
            self.lives, self.read = [*near.lives], {**near.read}
            self._shared, self._places = {**near._shared}, {**near._places}
        new, gone = self.chosen - known, known - self.chosen
        for t, s in gone:
            self._places[s] = tuple([other for other in self._places[s] if other != t])
            self.read.pop((t, s), None)
        for t, s in new:
            self._places[s] = (*self._places.get(s, ()), t)
        if near is not None:
            touched = sorted({v for _, s in (*new, *gone) for v in (*problem.step(s).uses, *problem.step(s).makes)})
        before = [self.lives[v] for v in touched]
        ends = self._count(table, touched, -1)
        if gone:
            at = table[0].searchsorted(sorted([problem.key(t, s) for t, s in gone]))
            table = np.delete(table, at, axis=1)
        if new:
            own = sorted([problem.key(t, s) for t, s in new])
            at = table[0].searchsorted(own)
            scratch = [problem.step(problem.at(key)[1]).scratch for key in own]
            table = np.insert(table, at, [own, [0] * len(own), [0] * len(own), scratch], axis=1)
        self.keys, self._table = table[0], table
        for v in touched:
            self.lives[v] = problem.versions(v, self._places)
        ends |= self._count(table, touched, 1)
        self._share(table, {key for key in ends if problem.at(key) not in gone}, gone)
        lives = (life for v, old in zip(touched, before, strict=True) for life in (*old, *self.lives[v]))
        self._first_reads({problem.at(life[0]) for life in lives} & self.chosen)
        dead = table[2].cumsum() - table[2]
        self.counted = table[1].cumsum() - dead + table[3]
        self.paged = {problem.step(s).makes[0] for _, s in self.chosen if s < 0} if problem.pages else set[int]()
        self.cost = sum([problem.costs[s] for _, s in self.chosen]) + sum(problem.written[v] for v in self.paged)
        self.excess = int((self.counted - problem.limit).clip(0).sum())
        self.excess += max(0, sum(problem.sizes[v] for v in self.paged) - problem.room)

    def _count(self, table: np.ndarray, values: Sequence[int], sign: int) -> set[int]:
        """Add sizes where versions of some values begin and end; returns at which keys they end."""
        sizes = [sign * self.problem.sizes[v] for v in values for _ in self.lives[v]]
        ends = [life[-1] for v in values for life in self.lives[v]]
        np.add.at(table[1], table[0].searchsorted([life[0] for v in values for life in self.lives[v]]), sizes)
        np.add.at(table[2], table[0].searchsorted(ends), sizes)
        return {*ends}

    def _share(self, table: np.ndarray, at: set[int], gone: Iterable[Pair]) -> None:
        """What is made in the place of what dies counts once."""
        for t, s in gone:
            self._shared.pop(self.problem.key(t, s), None)
        for key in at:
            taken, placed, shared = set[int](), set[int](), 0
            for y, x in self.problem.step(self.problem.at(key)[1]).pairs:
                if x not in taken and y not in placed and any(life[-1] == key for life in self.lives[x]):
                    taken.add(x)
                    placed.add(y)
                    shared += self.problem.sizes[y]
            before = self._shared.get(key, 0)
            if shared != before:
                table[3, table[0].searchsorted(key)] += before - shared
                self._shared[key] = shared

    def _first_reads(self, pairs: Iterable[Pair]) -> None:
        for t, s in pairs:
            key, found = self.problem.key(t, s), []
            for v in self.problem.step(s).makes:
                life = next(life for life in self.lives[v] if life[0] == key)
                found += [self.problem.at(life[1])[0]] if len(life) > 1 else []
            if found:
                self.read[t, s] = min(found)
            else:
                self.read.pop((t, s), None)

    @cached_property
    def peak(self) -> int:
        return int(self.counted.max(initial=0))

    @cached_property
    def area(self) -> int:
        return int(self.counted.sum())

    @property
    def score(self) -> tuple[int, float]:
        return self.excess, self.cost

    def useless(self) -> set[Pair]:
        """Statements that run again although nothing reads what they make."""
        return {*self.chosen - self.read.keys()}

    def early(self, problem: Problem) -> dict[Pair, Pair]:
        """What runs again before a statement that does not need it yet, and the place at which it is needed first."""
        return {(t, s): (first, s) for (t, s), first in self.read.items() if t < first <= problem.step(s).until}

    def found(self, v: int, t: int) -> Sequence[int]:
        """Where the version of a value is touched that a statement which runs again before statement ``t`` finds."""
        lives, start = self.lives[v], self.problem.key(t, -len(self.problem.pages))
        return next((life for life in reversed(lives) if life[0] < start), lives[0])

    def over(self, p: int) -> Iterator[tuple[int, list[int]]]:
        """Values, and where the version of each is touched that is live at a key."""
        for v, lives in enumerate(self.lives):
            for life in lives:
                if life[0] <= p <= life[-1]:
                    yield v, life

    # ------------------------------------------------------------ place by place
    @cached_property
    def order(self) -> list[int]:
        """What runs, by number."""
        return [self.problem.at(key)[1] for key in self.keys.tolist()]

    @cached_property
    def stage(self) -> list[int]:
        """The statement before which each runs, or that it is."""
        return [self.problem.at(key)[0] for key in self.keys.tolist()]

    @cached_property
    def live(self) -> list[int]:
        return self.counted.tolist()

    @cached_property
    def _numbered(self) -> list[tuple[int, int, int]]:
        """First key, value and which of its versions: in the order in which they are made."""
        return sorted((life[0], v, k) for v, lives in enumerate(self.lives) for k, life in enumerate(lives))

    @cached_property
    def touches(self) -> list[list[int]]:
        """Of each version the places at which it is touched."""
        place = {key: p for p, key in enumerate(self.keys.tolist())}
        return [[place[key] for key in self.lives[v][k]] for _, v, k in self._numbered]

    @cached_property
    def versions(self) -> list[list[int]]:
        """Of each value its versions."""
        out: list[list[int]] = [[] for _ in self.lives]
        for u, (_, v, _) in enumerate(self._numbered):
            out[v].append(u)
        return out


class Problem:
    """The statements of a path, and a limit of the transient bytes that are live at once.

    pages : page steps, -1, -2, ... in a schedule.  written : of the values that they make, what writing costs.
    room : bytes that may be written.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        sizes: Sequence[int],
        backward: int,
        limit: int,
        pages: Sequence[Step] = (),
        written: Mapping[int, float] | None = None,
        room: int = 0,
    ):
        self.steps, self.sizes, self.backward, self.limit = steps, sizes, backward, limit
        self.pages, self.written, self.room = pages, written or {}, room
        self._all = [*steps, *reversed(pages)]  # by number: those of page steps are below 0
        self.costs = [step.cost for step in self._all]
        self.followed = 0
        self._width = len(steps) + len(pages) + 1
        self._own: list[list[tuple[int, bool]]] = [
            [] for _ in sizes
        ]  # keys at which each value is touched: is it made?
        self._again: list[list[tuple[int, bool]]] = [[] for _ in sizes]  # what may run again and touches it
        for s, step in [*enumerate(steps), *((-1 - k, page) for k, page in enumerate(pages))]:
            for v, made in [*((v, False) for v in step.uses), *((v, True) for v in step.makes)]:
                if s >= 0:
                    self._own[v].append((self.key(s, s), made))
                if s < backward:
                    self._again[v].append((s, made))
        self.maker = {v: s for s, step in enumerate(steps) for v in step.makes}
        self.page = {step.makes[0]: -1 - k for k, step in enumerate(pages)}

    def key(self, t: int, s: int) -> int:
        """When a statement runs before statement ``t``, or that itself."""
        return (t + 1) * self._width - 1 if s == t else t * self._width + s + len(self.pages)

    def at(self, key: int) -> Pair:
        """The pair of a key; of a statement itself, it twice."""
        t, s = divmod(key, self._width)
        return (t, t) if s + 1 == self._width else (t, s - len(self.pages))

    def versions(self, v: int, places: Mapping[int, Sequence[int]]) -> list[list[int]]:
        """The keys at which each version of a value is touched, where statements run again at some places."""
        again = [(self.key(t, s), made) for s, made in self._again[v] for t in places.get(s, ())]
        lives: list[list[int]] = []
        for key, made in sorted(self._own[v] + again) if again else self._own[v]:
            if made:
                lives.append([])
            lives[-1].append(key)
        return lives

    @cached_property
    def nothing(self) -> Run:
        """The statements as they are."""
        return Run(self, ())

    def run(self, chosen: Iterable[Pair], near: Run | None = None) -> Run:
        """A schedule without what it does in vain, and with nothing run earlier than it is read where that helps."""
        run = self._follow(chosen, near)
        while useless := run.useless():
            run = self._follow(run.chosen - useless, run)
        if early := run.early(self):
            later = self._follow((run.chosen - early.keys()) | set(early.values()), run)
            if not later.useless() and (later.excess, later.area) <= (run.excess, run.area):
                return later
        return run

    def without_pages(self) -> Problem:
        """The same, where no value may wait in a file."""
        return Problem(self.steps, self.sizes, self.backward, self.limit)

    def step(self, s: int) -> Step:
        """A statement, or a page step."""
        return self._all[s]

    def allows(self, chosen: Iterable[Pair]) -> bool:
        """Whether each statement, or page step, is there and may run before the statement that it is to run before."""
        there, before = range(-len(self.pages), self.backward), range(self.backward, len(self.steps))
        return all(s in there and t in before and t <= self.step(s).until for t, s in chosen)

    def _follow(self, chosen: Iterable[Pair], near: Run | None = None) -> Run:
        run = Run(self, chosen, near or self.nothing)
        self.followed += len(run.keys)
        return run

    @property
    def floor(self) -> tuple[int, int]:
        """Bytes that the largest statement alone needs, and which one it is: no schedule needs less."""
        alone = []
        for step in self.steps:
            shared = {y for y, _ in step.pairs}
            alone.append(sum(self.sizes[v] for v in {*step.uses, *step.makes} - shared) + step.scratch)
        floor = max(alone)
        return floor, alone.index(floor)

    # ------------------------------------------------------------ drops
    def drops(self, run: Run, p: int) -> list[frozenset[Pair]]:
        """What may run again so that a value need not be live at key ``p``, in the order of bytes by work."""
        found: dict[frozenset[Pair], float] = {}
        placed = {x for _, x in self.step(self.at(p)[1]).pairs}  # would give its place where it dies
        idle = sorted(
            (life[0], v, life[bisect_right(life, p)])
            for v, life in run.over(p)
            if life[0] < p < life[-1] and (v in placed or p not in life)
        )
        for _, v, next_read in idle:
            t = self.at(next_read)[0]
            for pairs in (self._again_before(run, v, t, p), self._read(run, v, t) - run.chosen):
                if pairs:
                    cost = sum(self._work(run, s) for _, s in pairs)
                    found[pairs] = found.get(pairs, 0) + self.sizes[v] / max(cost, 1e-12)
        return sorted(found, key=lambda pairs: (-found[pairs], sorted(pairs)))

    def _again_before(self, run: Run, value: int, t: int, p: int) -> frozenset[Pair]:
        """The statements that make a value before ``t`` from what is live at ``p`` or made after it (empty: it cannot be)."""
        out: set[Pair] = set()
        todo = [self.maker[value]]
        while todo:
            s = todo.pop()
            if not self.backward <= t <= self.steps[s].until:
                return frozenset()
            if (t, s) in out or (t, s) in run.chosen:
                continue
            out.add((t, s))
            for v in self.steps[s].uses:
                if run.found(v, t)[-1] < p:
                    maker = self.steps[self.maker[v]]
                    page = self._read(run, v, t)
                    if page and (t > maker.until or self._work(run, self.page[v]) < maker.cost):
                        out |= page
                    elif t <= maker.until:
                        todo.append(self.maker[v])
        return frozenset(out)

    def _read(self, run: Run, value: int, t: int) -> frozenset[Pair]:
        """The page step that brings a value back before ``t`` (empty: there is none, or no room)."""
        if value not in self.page or t < self.backward:
            return frozenset()
        needed = sum(self.sizes[v] for v in run.paged | {value})
        return frozenset([(t, self.page[value])] if needed <= self.room else ())

    def _work(self, run: Run, s: int) -> float:
        """What a step adds to a schedule; the first read of a page has it written too."""
        v = self.step(s).makes[0]
        return self.step(s).cost + (self.written[v] if s < 0 and v not in run.paged else 0.0)

    # ------------------------------------------------------------ search
    def mend(self, run: Run, choose: Callable[[Sequence[Run]], Run]) -> Run:
        """Drop values at the peaks until all is below the limit, or nothing lowers what is above it any more."""
        while run.excess and self.followed < PATIENCE and (better := self._lower(run)):
            run = choose(better)
        return run

    def _lower(self, run: Run) -> list[Run]:
        """Schedules with less above the limit, the one that lowers most for its work first: at the highest peak that has any."""
        over = np.flatnonzero(run.counted > self.limit)
        over = over[np.argsort(-run.counted[over], kind="stable")]
        for p in run.keys[over].tolist():
            better: list[Run] = []
            for n, chosen in enumerate(self._trials(run, p)):
                if n >= TRIALS and better:
                    break
                trial = self.run(chosen, run)
                if trial.excess < run.excess:
                    better.append(trial)
            if better:
                return sorted(better, key=lambda r: (r.excess - run.excess) / max(r.cost - run.cost, 1e-9))
        return []

    def _trials(self, run: Run, p: int) -> Iterator[frozenset[Pair]]:
        """Schedules in which less may be live at key ``p``: with a drop, or without something that is live there."""
        for pairs in self.drops(run, p):
            yield run.chosen | pairs
        here = {self.at(life[0]) for _, life in run.over(p)} & run.chosen
        for pair in sorted(here):
            yield run.chosen - {pair}

    def solve(self, known: Iterable[Run] = ()) -> Run:
        """The cheapest schedule found, none of those known is cheaper; what it exceeds the limit by is its `excess`."""
        rng = random.Random(SEED)
        greedy = self.mend(self.run(()), lambda found: found[0])
        best = min([greedy, *(self.run(run.chosen) for run in known)], key=lambda run: run.score)
        idle = 0
        while best.chosen and self.followed < EFFORT and idle < IDLE:
            kept = self._less(best, rng)
            run = self.mend(self.run(kept, best), lambda found: found[min(int(rng.expovariate(1.5)), len(found) - 1)])
            idle = 0 if run.score < best.score else idle + 1
            if run.score <= best.score:
                best = run
        return best

    def _less(self, run: Run, rng: random.Random) -> frozenset[Pair]:
        """A schedule without some of its statements: those before one statement, or some of all."""
        if rng.random() < 0.5:
            gone = {t for t, _ in run.chosen if rng.random() < 0.3} or {rng.choice(sorted(run.chosen))[0]}
            return frozenset(pair for pair in run.chosen if pair[0] not in gone)
        share = rng.choice((0.1, 0.3, 0.6))
        return frozenset(pair for pair in sorted(run.chosen) if rng.random() > share)


# ---------------------------------------------------------------- of statements
@record
class Recomputed:
    """A program in which statements run again, and values are read from pages.

    again : each of the statements that run again, and the one that it repeats.
    overhead : their cost as a fraction of that of their path's own statements: the largest of any path.
    lower_bound : what no schedule costs less than, as the same fraction (None: no solver worked).
    proved : it was shown that none costs less than these.
    solver : what the solvers did, in words.
    solver_seconds : what they took.
    """

    lowered: Lowered
    again: Mapping[Statement, Statement] = field(default_factory=dict)
    overhead: float = 0.0
    lower_bound: float | None = None
    proved: bool = False
    solver: str = ""
    solver_seconds: float = 0.0


def recompute_within(
    lowered: Lowered,
    batch: int,
    machine: Machine,
    memory: int,
    fixed: int,
    cost: Callable[[Statement], float],
    solvers: Solvers | None = None,
    again: bool = True,
    file: File | None = None,
) -> Recomputed:
    """The program with statements that run again, or values that wait in a file, so that it needs at most ``memory`` bytes.

    Parameters
    ----------
    fixed : bytes beside the transient values.
    cost : of a statement, in seconds.
    solvers : that look on, for as long as they may (None: none is asked).
    again : whether statements may run again.
    file : where values may wait (None: nowhere).

    Raises
    ------
    PlanError
        If that is not found: with the least that was, and with the statement that alone needs most; if a cost is none.
    """
    size = _sizes(lowered, batch, machine)
    repeated: dict[Statement, Statement] = {}
    statements: list[Statement] = []
    versions = Versions(lowered.values)
    overhead, bound = 0.0, 0.0
    for path in lowered.paths:
        own = [st for st in lowered.statements if st.path == path]
        problem, numbered = _problem(own, size, machine, batch, memory - fixed, again, file)
        floor, s = problem.floor
        if floor <= problem.limit:  # what is refused anyhow is not costed
            problem = _costed(problem, own, cost)
        run = problem.run(())
        least = 0.0
        if run.excess and floor <= problem.limit:
            reckoned = partial(seconds, batch=batch, machine=machine)
            run, *others = _searched(problem, own, reckoned)
            if solvers is not None:
                answer = solvers.improve(problem, run, paging_of(own, cost)[1], others)
                run, least = answer.run, answer.bound
        if run.excess:
            below = floor > problem.limit
            needed = fixed + (floor if below else run.peak)
            what = "needs at least" if below else "was found to need no less than"
            how = " or ".join(["made again"] * again + ["moved to a file"] * (file is not None))
            other = "" if below or file is not None else ", let values wait in a file (page_bytes=)"
            raise PlanError(
                f"a batch of {batch} {what} {needed:,} bytes even where values are {how}, {memory:,} are allowed: allow more "
                f"memory{other}{other_ways(batch, machine.workers)} ({own[s].label or own[s].spec.name} alone needs {fixed + floor:,})",
                needed,
                memory,
            )
        moved, whole = paging_of(own, cost)
        overhead, bound = max(overhead, (moved + run.cost) / whole), max(bound, (moved + least) / whole)
        current: dict[Value, Value] = {}

        pages = {numbered[v]: versions.another(numbered[v], "page", **PAGE) for v in sorted(run.paged)}
        scheduled: list[Statement] = []
        for s, t in zip(run.order, run.stage, strict=True):
            if s < 0:
                v = numbered[problem.step(s).makes[0]]
                current[v] = versions.another(v, "again")
                scheduled.append(page_in(pages[v], current[v], own[t], machine.itemsize))
                continue
            st = own[s]
            if s == t:
                scheduled.append(st.with_values(current))
                made = [numbered[v] for v in problem.steps[s].makes if v in run.paged]
                scheduled += [page_out(v, pages[v], st, machine.itemsize) for v in made]
                continue
            for o, v in operands(st):
                if o.writes:
                    current[v] = versions.another(v, "again")
            copy = replace(st.with_values(current), phase=own[t].phase, label=f"{st.label} again")
            repeated[copy] = st
            scheduled.append(copy)
        statements += scheduled
    done = replace(lowered, statements=tuple(statements), values=tuple(versions.values))
    return Recomputed(done, repeated, overhead, bound if solvers is not None and solvers.used else None)


def _searched(problem: Problem, own: Sequence[Statement], reckoned: Callable[[Statement], float]) -> list[Run]:
    """The cheapest schedule that is found, and, if values may wait in a file, the cheapest without.

    Where none is found by what statements cost, one is looked for by what they are reckoned to.
    """
    without = _searched(problem.without_pages(), own, reckoned) if problem.pages else []
    run = problem.solve(without)
    if run.excess:
        other = _costed(problem, own, reckoned)
        if [step.cost for step in other.steps] != [step.cost for step in problem.steps]:
            run = problem.solve([other.solve()])
    return [run, *without]


def paging_of(statements: Sequence[Statement], cost: Callable[[Statement], float]) -> tuple[float, float]:
    """What statements that read and write pages cost, and what all others do."""
    moving = [cost(st) for st in statements if is_paging(st)]
    return sum(moving), max(sum(map(cost, statements)) - sum(moving), 1e-12)


def _sizes(lowered: Lowered, batch: int, machine: Machine) -> dict[Value, int]:
    """Bytes of the values that a schedule may drop or must keep: transient ones, scratch apart."""
    always = always_live(lowered)
    scratch = {v for st in lowered.statements for o, v in operands(st) if o.access == "s"}
    touched = lifetimes(lowered.statements)
    return {v: machine.up(at_most(machine.bytes(v), batch)) for v in touched if v not in always and v not in scratch}


def _problem(
    own: Sequence[Statement],
    size: Mapping[Value, int],
    machine: Machine,
    batch: int,
    limit: int,
    again: bool = True,
    file: File | None = None,
) -> tuple[Problem, list[Value]]:
    """The statements of one path in numbers, without costs, and the values by theirs."""
    number = {v: i for i, v in enumerate(v for v in lifetimes(own) if v in size)}
    writers: dict[Value, list[int]] = {}
    for s, st in enumerate(own):
        for v in effects(st)[1]:
            writers.setdefault(v, []).append(s)
    steps: list[Step] = []
    met: set[int] = set()
    for s, st in enumerate(own):
        at = {o.name: number[v] for o, v in operands(st) if v in number}
        makes = set(at.values()) - met
        uses = set(at.values()) & met
        met |= makes
        steps.append(
            Step(
                uses=tuple(sorted(uses)),
                makes=tuple(sorted(makes)),
                pairs=tuple(
                    (at[y], at[x])
                    for y, x in st.spec.in_place
                    if at.get(y) in makes and at.get(x) in uses and may_take(st, y, x, machine)
                ),
                scratch=sum(
                    machine.up(at_most(machine.extent(o, st), batch)) for o, _ in operands(st) if o.access == "s"
                ),
                until=_until(s, st, number, writers, len(own) - 1) if again else -1,
            )
        )
    backward = next((s for s, st in enumerate(own) if st.phase == "backward"), len(own))
    values = [*number]
    sizes = [size[v] for v in values]
    if file is None:
        return Problem(steps, sizes, backward, limit), values
    may = [number[v] for v in values if len(writers.get(v, ())) == 1 and writers[v][0] < backward]
    pages = [Step((), (v,), (), 0, len(own) - 1, file.seconds(sizes[v])) for v in may]
    written = {v: file.seconds(sizes[v]) for v in may}
    return Problem(steps, sizes, backward, limit, pages, written, file.room), values


def _costed(problem: Problem, own: Sequence[Statement], cost: Callable[[Statement], float]) -> Problem:
    """The problem, with what its statements cost."""
    steps = [replace(step, cost=_cost(st, cost)) for step, st in zip(problem.steps, own, strict=True)]
    return Problem(steps, problem.sizes, problem.backward, problem.limit, problem.pages, problem.written, problem.room)


def _cost(st: Statement, cost: Callable[[Statement], float]) -> float:
    """What a statement costs, if it is a cost."""
    found = float(cost(st))
    if not 0 <= found < float("inf"):
        raise PlanError(
            f"{st.label or st.spec.name}: costs {found} seconds: give costs that are finite, and not below zero"
        )
    return found


def _until(s: int, st: Statement, number: Mapping[Value, int], writers: Mapping[Value, Sequence[int]], end: int) -> int:
    """The last statement before which a statement may run again: its results are its alone, its inputs as they were."""
    read, _ = effects(st)
    results = {v for o, v in operands(st) if o.writes and o.access != "s"}
    alone = all(v in number and writers[v] == [s] for v in results) and not results & read
    if st.phase not in EARLY or not results or not alone:
        return -1
    return min((w for v in read for w in writers.get(v, ()) if w > s), default=end)
