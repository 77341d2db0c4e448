"""Schedules of recomputation: which statements of the forward run again before which statement of the backward.

    forward                    backward
    a   b   c   d     loss     d'  [a b] c'  b'  a'        the pairs (c', a), (c', b): a and b run again before c'
    |---------- a kept until a' reads it -------|
    |---|                           |-----------|          with these pairs a has two short lives in place of a long one

Every read finds the latest version of a value, and a version lives from where it is made to its last read.  So every set of
pairs is a correct schedule: schedules differ only in peak and work.

A statement may run again if it comes before the backward, its results are transient and have no other writer, and its inputs
have not changed.  So dropout and running statistics repeat exactly: the random state and the statistics of the batch are inputs
that nothing writes in between, and the statements that update them never run again.

With a page file, a value may also be written to it once, where it is made, and be read again (`calcvm.planner.paging`).  That is
a *page step*: a schedule runs it like a statement that makes the value and reads none.  Page steps have negative numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from calcvm.frozen import frozen
from calcvm.lazy import cached_property

Pair = tuple[int, int]  # (statement of the backward, statement that runs again before it)


@frozen
class Step:
    """A statement in numbers, with the values whose lifetimes a schedule can change.

    uses, makes : values that existed before it, and values that it is the first to write.
    pairs : (made, used): the first may overwrite the second.
    scratch : bytes of scratch.
    until : the last statement before which it may run again; -1: never.
    cost : cost of running it again.
    """

    uses: tuple[int, ...]
    makes: tuple[int, ...]
    pairs: tuple[Pair, ...]
    scratch: int
    until: int
    cost: float = 0.0


class Run:
    """A schedule, replayed: the lifetime of each version of each value, and the live bytes.

    Times are *keys*, which sort in execution order: before each statement those recomputed for it, by number, then the statement.
    So a schedule is replayed from a similar one at the cost of the difference.

    lives : per value, the keys at which each of its versions is touched.
    read : per recomputed statement whose result is read, the stage of the first reader.
    """

    keys: np.ndarray
    _table: np.ndarray

    def __init__(self, problem: RecomputationProblem, chosen: Iterable[Pair], near: Run | None = None):
        self.problem, self.chosen = problem, frozenset(chosen)
        if near is None:
            known: frozenset[Pair] = frozenset()
            self.lives: list[list[list[int]]] = [[] for _ in problem.sizes]
            self.read: dict[Pair, int] = {}
            self._shared: dict[int, int] = {}  # by key, bytes that are written in place
            self._places: dict[int, tuple[int, ...]] = {}  # per recomputed statement, the stages before which it runs
            table = np.zeros(
                (4, len(problem.steps)), np.int64
            )  # keys; sizes of versions that begin; that end; other live bytes
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
        """Add sizes where versions of some values begin and end; return the keys at which they end."""
        sizes = [sign * self.problem.sizes[v] for v in values for _ in self.lives[v]]
        ends = [life[-1] for v in values for life in self.lives[v]]
        np.add.at(table[1], table[0].searchsorted([life[0] for v in values for life in self.lives[v]]), sizes)
        np.add.at(table[2], table[0].searchsorted(ends), sizes)
        return {*ends}

    def _share(self, table: np.ndarray, at: set[int], gone: Iterable[Pair]) -> None:
        """Count a value that overwrites a dying one only once."""
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
        """Recomputed statements whose results nothing reads."""
        return {*self.chosen - self.read.keys()}

    def early(self, problem: RecomputationProblem) -> dict[Pair, Pair]:
        """Pairs that run too early, each with the pair that runs just before the first reader."""
        return {(t, s): (first, s) for (t, s), first in self.read.items() if t < first <= problem.step(s).until}

    def found(self, v: int, t: int) -> Sequence[int]:
        """The keys that touch the version of a value which a statement recomputed before ``t`` reads."""
        lives, start = self.lives[v], self.problem.key(t, -len(self.problem.pages))
        return next((life for life in reversed(lives) if life[0] < start), lives[0])

    def over(self, p: int) -> Iterator[tuple[int, list[int]]]:
        """Values that are live at a key, each with the keys that touch its live version."""
        for v, lives in enumerate(self.lives):
            for life in lives:
                if life[0] <= p <= life[-1]:
                    yield v, life

    # ------------------------------------------------------------ position by position
    @cached_property
    def order(self) -> list[int]:
        """The statements in execution order, by number."""
        return [self.problem.at(key)[1] for key in self.keys.tolist()]

    @cached_property
    def stage(self) -> list[int]:
        """The statement before which each is recomputed, or the statement itself."""
        return [self.problem.at(key)[0] for key in self.keys.tolist()]

    @cached_property
    def live(self) -> list[int]:
        return self.counted.tolist()

    @cached_property
    def _numbered(self) -> list[tuple[int, int, int]]:
        """First key, value and version index of all versions, in the order in which they are made."""
        return sorted((life[0], v, k) for v, lives in enumerate(self.lives) for k, life in enumerate(lives))

    @cached_property
    def touches(self) -> list[list[int]]:
        """Per version, the positions in `order` at which it is touched."""
        place = {key: p for p, key in enumerate(self.keys.tolist())}
        return [[place[key] for key in self.lives[v][k]] for _, v, k in self._numbered]

    @cached_property
    def versions(self) -> list[list[int]]:
        """Per value, its versions."""
        out: list[list[int]] = [[] for _ in self.lives]
        for u, (_, v, _) in enumerate(self._numbered):
            out[v].append(u)
        return out


class RecomputationProblem:
    """The statements of a path, and a limit of the transient bytes that are live at once.

    pages : page steps, numbered -1, -2, ... in a schedule.  written : per value that they make, the cost of writing it.
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
        self._all = [*steps, *reversed(pages)]  # by number: page steps have negative ones
        self.costs = [step.cost for step in self._all]
        self.followed = 0
        self._width = len(steps) + len(pages) + 1
        self._own: list[list[tuple[int, bool]]] = [
            [] for _ in sizes
        ]  # per value, the keys that touch it; is it made there?
        self._again: list[list[tuple[int, bool]]] = [
            [] for _ in sizes
        ]  # the repeatable statements that touch each value
        for s, step in [*enumerate(steps), *((-1 - k, page) for k, page in enumerate(pages))]:
            for v, made in [*((v, False) for v in step.uses), *((v, True) for v in step.makes)]:
                if s >= 0:
                    self._own[v].append((self.key(s, s), made))
                if s < backward:
                    self._again[v].append((s, made))
        self.maker = {v: s for s, step in enumerate(steps) for v in step.makes}
        self.page = {step.makes[0]: -1 - k for k, step in enumerate(pages)}

    def key(self, t: int, s: int) -> int:
        """The key of statement ``s`` recomputed before statement ``t``, or of ``t`` itself if they are equal."""
        return (t + 1) * self._width - 1 if s == t else t * self._width + s + len(self.pages)

    def at(self, key: int) -> Pair:
        """The pair of a key: (t, s), or (t, t) for statement t itself."""
        t, s = divmod(key, self._width)
        return (t, t) if s + 1 == self._width else (t, s - len(self.pages))

    def versions(self, v: int, places: Mapping[int, Sequence[int]]) -> list[list[int]]:
        """The keys that touch each version of a value.

        places : per recomputed statement, the stages before which it runs.
        """
        again = [(self.key(t, s), made) for s, made in self._again[v] for t in places.get(s, ())]
        lives: list[list[int]] = []
        for key, made in sorted(self._own[v] + again) if again else self._own[v]:
            if made:
                lives.append([])
            lives[-1].append(key)
        return lives

    @cached_property
    def nothing(self) -> Run:
        """The schedule that recomputes nothing."""
        return Run(self, ())

    def run(self, chosen: Iterable[Pair], near: Run | None = None) -> Run:
        """Replay a schedule without its useless pairs, and with early pairs delayed until the first reader if that helps."""
        run = self._follow(chosen, near)
        while useless := run.useless():
            run = self._follow(run.chosen - useless, run)
        if early := run.early(self):
            later = self._follow((run.chosen - early.keys()) | set(early.values()), run)
            if not later.useless() and (later.excess, later.area) <= (run.excess, run.area):
                return later
        return run

    def without_pages(self) -> RecomputationProblem:
        """The same problem without a page file."""
        return RecomputationProblem(self.steps, self.sizes, self.backward, self.limit)

    def step(self, s: int) -> Step:
        """A statement, or a page step."""
        return self._all[s]

    def allows(self, chosen: Iterable[Pair]) -> bool:
        """Whether all pairs are valid: each statement or page step exists and may run before its stage."""
        there, before = range(-len(self.pages), self.backward), range(self.backward, len(self.steps))
        return all(s in there and t in before and t <= self.step(s).until for t, s in chosen)

    def _follow(self, chosen: Iterable[Pair], near: Run | None = None) -> Run:
        run = Run(self, chosen, near or self.nothing)
        self.followed += len(run.keys)
        return run

    @property
    def floor(self) -> tuple[int, int]:
        """Bytes of the largest single statement, and its number: no schedule needs less."""
        alone = []
        for step in self.steps:
            shared = {y for y, _ in step.pairs}
            alone.append(sum(self.sizes[v] for v in {*step.uses, *step.makes} - shared) + step.scratch)
        floor = max(alone)
        return floor, alone.index(floor)
