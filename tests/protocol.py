"""A model of the team's protocol (`calcvm.vm.run.loop.run_team`), and an explorer of all that can happen in it.

A thread is at a label; a step is what it does there with shared memory, at once: one atomic of the native code, or one
statement of the Python that calls it.  Loops that spin are steps that cannot be taken until what they wait for is there.
The atomics are sequentially consistent, as the code's are, so that interleavings of steps are all that can happen.

Callers are threads of Python: each runs jobs of given team sizes one after the other, frees a job's memory once its call is over,
and may be interrupted before and after any statement; it then drops the job and goes on with the next.  A job is rows with
a barrier between each and the next.  Workers live for ever.  What must hold is asserted in the steps and in `check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

BLOCKED: list[Any] = []
Step = list["State"]


class Violation(AssertionError):
    """Something that must hold does not: what, and the steps that lead there."""


class State:
    """Shared memory and where each thread is, by name; a copy for each step."""

    __slots__ = ("names", "values")

    def __init__(self, names: dict[Any, int], values: list[Any]):
        self.names, self.values = names, values

    def __getitem__(self, name: Any) -> Any:
        return self.values[self.names[name]]

    def __setitem__(self, name: Any, value: Any) -> None:
        self.values[self.names[name]] = value

    def copy(self) -> State:
        return State(self.names, self.values.copy())


class Protocol:
    """The protocol as the code has it.

    jobs : for each caller the team sizes that its jobs ask for.
    rows : of each job; a barrier is between two.
    """

    # The atomics and system calls of the native functions, in the order of their text: `STEPS` of a function are the labels
    # below whose steps these are.  A test compares them with the source.
    ATOMICS = {
        "that_fit": ["atomic_load FIT", "atomic_load CROWDED"],
        "run_team": ["atomic_swap BUSY", "atomic_load FIT", "atomic_store FIT", "atomic_load", "atomic_store BUSY"],
        "hire": ["_sem_init SEMAPHORE", "_pthread_create THREAD"],
        "post": ["atomic_store", "atomic_load PARKED", "atomic_swap PARKED", "_sem_post SEMAPHORE"],
        "serve": ["atomic_load", "atomic_store", "atomic_load FIT"],
        "park": ["atomic_store PARKED", "atomic_load", "atomic_swap PARKED", "_sem_wait SEMAPHORE"],
        "barrier": [
            "atomic_load GENERATION",
            "atomic_add ARRIVED",
            "atomic_store ARRIVED",
            "atomic_load FIT",
            "atomic_store TEAM",
            "atomic_store GENERATION",
            "atomic_load GENERATION",
            "atomic_load TEAM",
        ],
        "await_others": ["atomic_load", "atomic_store FIT"],
        "crowd": ["atomic_store CROWDED"],
    }
    STEPS = {
        "that_fit": ["fit", "fit"],  # CROWDED is a time, which may be over or not: a step of its own would tell no more
        "run_team": ["take", "raise_fit", "raise_fit", "await_box", "release"],
        "hire": ["hire", "hire"],  # a semaphore that nobody else knows yet: one step with the thread
        "post": ["post", "look", "lower", "wake"],
        "serve": ["serve", "clear", "serve"],  # what FIT says only brings it to bed sooner
        "park": ["raise_flag", "look_again", "lower_own", "sleep"],
        "barrier": ["generation", "arrive", "reset", "leaving", "leaving", "open", "wait", "stay"],
        "await_others": ["wait", "late"],  # of a box it is await_box
        "crowd": ["late"],
    }
    interrupts = True
    threads_may_lack = True

    def __init__(self, jobs: Sequence[Sequence[int]], rows: int = 2):
        self.jobs, self.rows = jobs, rows
        self.workers = range(1, max(n for own in jobs for n in own))
        self.threads = [("caller", c) for c in range(len(jobs))] + [("worker", w) for w in self.workers]
        self.all_jobs = [(c, k) for c, own in enumerate(jobs) for k in range(len(own))]

    # ------------------------------------------------------------ states
    def memory(self) -> dict[Any, Any]:
        """Shared memory, and what threads keep to themselves, as it is at the beginning."""
        m: dict[Any, Any] = {"BUSY": 0, "HIRED": 0, "ARRIVED": 0, "GENERATION": 0, "FIT": 1 + len(self.workers)}
        for w in self.workers:
            m |= {("BOX", w): None, ("PARKED", w): 0, ("TOKENS", w): 0}
        for job in self.all_jobs:
            m |= {("live", job): 1, ("TEAM", job): 0, ("done", job): ((),) * self.rows}  # by whom each row was run
        return m

    def initial(self) -> State:
        values = self.memory()
        for t in self.threads:
            values |= {("at", t): "python" if t[0] == "caller" else "unborn"}
            values |= {("job", t): None, ("mine", t): 0, ("team", t): 1, ("w", t): 0, ("g", t): None, ("row", t): 0}
            values |= {("n", t): 1} | ({("most", t): 1} if t[0] == "caller" else {})
        for c in range(len(self.jobs)):
            values["job", ("caller", c)] = (c, 0)
        names = {name: i for i, name in enumerate(values)}
        return State(names, list(values.values()))

    def steps(self, s: State) -> Iterator[tuple[str, State]]:
        """All that can happen next."""
        for t in self.threads:
            label = s["at", t]
            if label not in ("over", "unborn"):
                for after in getattr(self, label)(s.copy(), t):
                    yield f"{t[0]} {t[1]}: {label}", self.since(after)

    def since(self, s: State) -> State:
        """Count generations from the present one: they are only compared, and what has the same future is one state."""
        for t in self.threads:
            if s["g", t] is not None:
                s["g", t] -= s["GENERATION"]
        s["GENERATION"] = 0
        return s

    def ended(self, s: State) -> bool:
        """Whether all callers are done, and the team is as it should be then."""
        if any(s["at", t] != "over" for t in self.threads if t[0] == "caller"):
            return False
        return s["BUSY"] == 0 and all(s["BOX", w] is None for w in self.workers)

    # ------------------------------------------------------------ what must hold
    def require(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(what)

    def read(self, s: State, t: Any) -> Any:
        """A thread looks at its job."""
        job = s["job", t]
        self.require(s["live", job], f"{t} reads job {job}, which is freed")
        return job

    def inside(self, s: State) -> list[Any]:
        """Workers that have a job."""
        return [t for t in self.threads if t[0] == "worker" and s["at", t] in BODY]

    def check(self, s: State) -> None:
        """In every state."""
        for t in self.inside(s):
            self.require(s["BOX", t[1]] == s["job", t], f"{t} runs {s['job', t]}, its box holds {s['BOX', t[1]]}")
            self.require(not s["PARKED", t[1]] and not s["TOKENS", t[1]], f"{t} works and is marked as asleep")
        self.require(0 <= s["ARRIVED"] <= 1 + len(self.workers), "more have arrived than there are")

    # ------------------------------------------------------------ a caller: Python
    def go(self, s: State, t: Any, label: str) -> State:
        s["at", t] = label
        return s

    def drop(self, s: State, t: Any) -> State:
        """The job's memory goes back, and may be anything from now on; the next job, or the end."""
        c, k = s["job", t]
        s["live", (c, k)], s["TEAM", (c, k)], s["done", (c, k)] = 0, 0, ()  # who reads them is found by `live`
        s["mine", t], s["team", t], s["w", t], s["n", t], s["most", t] = 0, 1, 0, 1, 1
        more = k + 1 < len(self.jobs[c])
        s["job", t] = (c, k + 1) if more else None
        return self.go(s, t, "python" if more else "over")

    def python(self, s: State, t: Any) -> Step:
        """Statements before the call."""
        return [self.go(s.copy(), t, "fit"), *([self.drop(s, t)] if self.interrupts else [])]

    def returned(self, s: State, t: Any) -> Step:
        """Statements after the call: interrupted or not, the job is dropped."""
        job = s["job", t]
        self.require(all(whole(row) for row in s["done", job]), f"{job} is over and was not all run")
        return [self.drop(s, t)]

    # ------------------------------------------------------------ run_team
    def fit(self, s: State, t: Any) -> Step:
        """atomic_load(FIT): a job has no more workers, or the time of that is over."""
        c, k = s["job", t]
        fewer = s.copy()
        s["most", t], fewer["most", t] = self.jobs[c][k], s["FIT"]
        return [self.go(s, t, "take"), *([self.go(fewer, t, "take")] if s["FIT"] < s["most", t] else [])]

    def take(self, s: State, t: Any) -> Step:
        """atomic_swap(BUSY, 1).  Who has the team is the only one to write HIRED, FIT, and the boxes from 0."""
        if s["most", t] == 1 or s["BUSY"]:
            return [self.begin(s, t, 1)]
        s["BUSY"] = s["mine", t] = 1
        return [self.go(s, t, "raise_fit")]

    def raise_fit(self, s: State, t: Any) -> Step:
        """atomic_load(FIT), atomic_store(FIT, n): at once, since nobody else writes it now"""
        s["FIT"] = max(s["FIT"], s["most", t])
        return [self.go(s, t, "hire")]

    def hire(self, s: State, t: Any) -> Step:
        """A worker's semaphore and thread, or none are to be had; no step where enough are there."""
        wanted, w = s["most", t], s["HIRED"] + 1
        if w >= wanted:
            return [self.begin(s, t, wanted)]
        none = [self.begin(s.copy(), t, w)] if self.threads_may_lack else []
        self.go(s, ("worker", w), "serve")
        s["HIRED"] = w
        return [s, *none]

    def begin(self, s: State, t: Any, team: int) -> State:
        """Write TEAM and BARRIER, which nobody else sees yet."""
        job = self.read(s, t)
        s["TEAM", job], s["team", t], s["n", t], s["w", t] = team, team, team, 1
        if team > 1:
            self.require(not self.inside(s), f"{job} begins while {self.inside(s)} are inside another")
            self.require(s["ARRIVED"] == 0, f"{job} begins while some wait at the barrier")
        return self.go(s, t, "post" if team > 1 else "row")

    def post(self, s: State, t: Any) -> Step:
        """atomic_store(box, job)"""
        w = s["w", t]
        self.require(s["BOX", w] is None, f"the box of worker {w} is full")
        s["BOX", w] = s["job", t]
        return [self.go(s, t, "look")]

    def look(self, s: State, t: Any) -> Step:
        """atomic_load(PARKED)"""
        return [self.go(s, t, "lower") if s["PARKED", s["w", t]] else self.next_post(s, t)]

    def lower(self, s: State, t: Any) -> Step:
        """atomic_swap(PARKED, 0)"""
        w = s["w", t]
        was, s["PARKED", w] = s["PARKED", w], 0
        return [self.go(s, t, "wake") if was else self.next_post(s, t)]

    def wake(self, s: State, t: Any) -> Step:
        """sem_post"""
        s["TOKENS", s["w", t]] += 1
        return [self.next_post(s, t)]

    def next_post(self, s: State, t: Any) -> State:
        s["w", t] += 1
        return self.go(s, t, "post" if s["w", t] < s["team", t] else "row")

    def await_box(self, s: State, t: Any) -> Step:
        """atomic_load(box) == 0, of one worker after the other"""
        if s["BOX", s["w", t]] is not None:
            return self.late(s, t)
        s["w", t] += 1
        return [self.go(s, t, "await_box" if s["w", t] < s["team", t] else "release")]

    def release(self, s: State, t: Any) -> Step:
        """atomic_store(BUSY, 0)"""
        s["BUSY"] = 0
        return [self.go(s, t, "returned")]

    # ------------------------------------------------------------ a job: run_rows, and the barrier
    def row(self, s: State, t: Any) -> Step:
        """Run a row: each member of the team once, and after all have run the one before."""
        job, k = self.read(s, t), s["row", t]
        me, team = number(t), s["n", t]
        rows = list(s["done", job])
        self.require(me < team, f"{t} is not of the team of {job}")
        self.require(all(me != w for w, _ in rows[k]), f"{t} runs row {k} of {job} twice")
        self.require(k == 0 or whole(rows[k - 1]), f"{t} is past a barrier of {job} where {rows[k - 1]} have been")
        rows[k] = tuple(sorted((*rows[k], (me, team))))
        s["done", job] = tuple(rows)
        if k + 1 == self.rows:
            return [self.leave(s, t)]
        s["row", t] = k + 1
        return [self.go(s, t, "generation" if team > 1 else "row")]

    def leave(self, s: State, t: Any) -> State:
        s["row", t], s["g", t], s["n", t] = 0, None, 1
        if t[0] == "worker":
            return self.go(s, t, "clear")
        s["w", t] = 1
        return self.go(s, t, "await_box" if s["team", t] > 1 else "release" if s["mine", t] else "returned")

    def generation(self, s: State, t: Any) -> Step:
        """atomic_load(GENERATION)"""
        s["g", t] = s["GENERATION"]
        return [self.go(s, t, "arrive")]

    def arrive(self, s: State, t: Any) -> Step:
        """atomic_add(ARRIVED, 1)"""
        s["ARRIVED"] += 1
        return [self.go(s, t, "reset" if s["ARRIVED"] == s["n", t] else "wait")]

    def reset(self, s: State, t: Any) -> Step:
        """atomic_store(ARRIVED, 0)"""
        s["ARRIVED"] = 0
        return [self.go(s, t, "leaving")]

    def leaving(self, s: State, t: Any) -> Step:
        """atomic_load(FIT), atomic_store(TEAM, fit): at once, since others read it when the barrier is open"""
        s["TEAM", self.read(s, t)] = min(s["n", t], s["FIT"])
        return [self.go(s, t, "open")]

    def open(self, s: State, t: Any) -> Step:
        """atomic_store(GENERATION, g + 1)"""
        s["GENERATION"] = s["g", t] + 1
        return [self.go(s, t, "stay")]

    def wait(self, s: State, t: Any) -> Step:
        """atomic_load(GENERATION) != g"""
        return self.late(s, t) if s["GENERATION"] == s["g", t] else [self.go(s, t, "stay")]

    def late(self, s: State, t: Any) -> Step:
        """atomic_store(FIT, n), of worker 0 that waits for workers without a core: for any of them, at any time"""
        if number(t):
            return BLOCKED
        after = []
        for fit in range(1, min(s["FIT"], s["n", t])):
            after.append(s.copy())
            after[-1]["FIT"] = fit
        return after

    def stay(self, s: State, t: Any) -> Step:
        """atomic_load(TEAM): who is above it leaves"""
        s["n", t], s["g", t] = s["TEAM", self.read(s, t)], None
        return [self.go(s, t, "row") if number(t) < s["n", t] else self.leave(s, t)]

    # ------------------------------------------------------------ a worker: serve and park
    def serve(self, s: State, t: Any) -> Step:
        """atomic_load(box): a job, or after many looks to bed"""
        job = s["BOX", t[1]]
        if job is None:
            return [self.go(s, t, "raise_flag")]
        s["job", t] = job
        s["n", t] = s["TEAM", self.read(s, t)]
        return [self.go(s, t, "row")]

    def clear(self, s: State, t: Any) -> Step:
        """atomic_store(box, 0)"""
        s["BOX", t[1]] = s["job", t] = None
        return [self.go(s, t, "serve")]

    def raise_flag(self, s: State, t: Any) -> Step:
        """atomic_store(PARKED, 1)"""
        s["PARKED", t[1]] = 1
        return [self.go(s, t, "look_again")]

    def look_again(self, s: State, t: Any) -> Step:
        """atomic_load(box) == 0"""
        return [self.go(s, t, "sleep" if s["BOX", t[1]] is None else "lower_own")]

    def lower_own(self, s: State, t: Any) -> Step:
        """atomic_swap(PARKED, 0): where the caller was first, a token comes and must be taken"""
        was, s["PARKED", t[1]] = s["PARKED", t[1]], 0
        return [self.go(s, t, "serve" if was else "sleep")]

    def sleep(self, s: State, t: Any) -> Step:
        """sem_wait"""
        if not s["TOKENS", t[1]]:
            return BLOCKED
        s["TOKENS", t[1]] -= 1
        return [self.go(s, t, "serve")]


# Labels of a worker inside a job.
BODY = {"enough", "row", "generation", "arrive", "reset", "leaving", "open", "wait", "stay", "clear"}


def number(t: Any) -> int:
    """Of a worker; a caller is worker 0."""
    return 0 if t[0] == "caller" else t[1]


def whole(row: Any) -> bool:
    """Whether all of one team have run their shares of a row, each a (worker, size of its team)."""
    return bool(row) and list(row) == [(w, len(row)) for w in range(len(row))]


def explore(protocol: Any, most: int = 5_000_000) -> int:
    """Visit every state that can be reached; returns how many there are.

    Raises
    ------
    Violation : something does not hold, or there is a state from which the end cannot be reached (a deadlock, a lost
        wake-up); with the steps that lead there.
    """
    start = protocol.initial()
    key = tuple(start.values)
    came: dict[tuple[Any, ...], tuple[tuple[Any, ...], str] | None] = {key: None}
    before: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    ends, todo = [], [key]
    for at in todo:  # breadth first: the shortest way to what is wrong
        state = State(start.names, list(at))
        name = ""
        try:
            protocol.check(state)
            if protocol.ended(state):
                ends.append(at)
            for name, after in protocol.steps(state):
                to = tuple(after.values)
                before.setdefault(to, []).append(at)
                if to not in came:
                    came[to] = at, name
                    todo.append(to)
        except Violation as error:
            raise Violation(f"{error}\n{_way(came, at)}") from None
        if len(came) > most:
            raise MemoryError(f"more than {most} states")
    reaches, todo = set(ends), ends
    while todo:
        for earlier in before.get(todo.pop(), ()):
            if earlier not in reaches:
                reaches.add(earlier)
                todo.append(earlier)
    for at in came:
        if at not in reaches:
            raise Violation(f"the end cannot be reached any more\n{_way(came, at)}")
    return len(came)


def _way(came: Any, at: Any) -> str:
    lines = []
    while came[at] is not None:
        at, name = came[at]
        lines.append(name)
    return "\n".join(reversed(lines))


# ---------------------------------------------------------------- defects, put in on purpose
class FreedEarly(Protocol):
    """The caller does not wait for the boxes: a job goes back while workers run it."""

    def leave(self, s: State, t: Any) -> State:
        s = super().leave(s, t)
        return self.go(s, t, "release") if s["at", t] == "await_box" else s


class NoReset(Protocol):
    """The last to arrive at a barrier does not set the count back."""

    def reset(self, s: State, t: Any) -> Step:
        return [self.go(s, t, "leaving")]


class OpenFirst(Protocol):
    """The barrier opens before the count is set back."""

    def arrive(self, s: State, t: Any) -> Step:
        (s,) = super().arrive(s, t)
        return [self.go(s, t, "open") if s["at", t] == "reset" else s]

    def open(self, s: State, t: Any) -> Step:
        s["GENERATION"] = s["g", t] + 1
        return [self.go(s, t, "reset")]

    def reset(self, s: State, t: Any) -> Step:
        s["ARRIVED"] = 0
        return [self.go(s, t, "stay")]


class WakeFirst(Protocol):
    """The caller looks whether a worker sleeps before it posts the job."""

    def begin(self, s: State, t: Any, team: int) -> State:
        s = super().begin(s, t, team)
        return self.go(s, t, "look") if team > 1 else s

    def next_post(self, s: State, t: Any) -> State:
        return self.go(s, t, "post")

    def post(self, s: State, t: Any) -> Step:
        s["BOX", s["w", t]] = s["job", t]
        s["w", t] += 1
        return [self.go(s, t, "look" if s["w", t] < s["team", t] else "row")]


class FlagLate(Protocol):
    """A worker looks into its box for the last time before it raises its flag."""

    def raise_flag(self, s: State, t: Any) -> Step:
        s["PARKED", t[1]] = 1
        return [self.go(s, t, "sleep")]


class TokenLeft(Protocol):
    """A worker that finds a job while it lies down does not ask whether the caller was about to wake it."""

    def lower_own(self, s: State, t: Any) -> Step:
        s["PARKED", t[1]] = 0
        return [self.go(s, t, "serve")]


class Unlocked(Protocol):
    """Two callers take the team at once."""

    def take(self, s: State, t: Any) -> Step:
        s["BUSY"] = 0
        return super().take(s, t)


class ClearedEarly(Protocol):
    """A worker empties its box before it runs the job."""

    def serve(self, s: State, t: Any) -> Step:
        (s,) = super().serve(s, t)
        if s["at", t] == "row":
            s["BOX", t[1]] = None
        return [s]

    def check(self, s: State) -> None:
        """What a job's end finds is enough."""


class CountedFirst(Protocol):
    """A worker is counted though the system had no thread for it."""

    def hire(self, s: State, t: Any) -> Step:
        after = super().hire(s, t)
        for lacking in after[1:]:
            lacking["HIRED"] += 1
        return after


class ShrunkLate(Protocol):
    """The barrier opens before it says how many stay."""

    def reset(self, s: State, t: Any) -> Step:
        s["ARRIVED"] = 0
        return [self.go(s, t, "open")]

    def open(self, s: State, t: Any) -> Step:
        s["GENERATION"] = s["g", t] + 1
        return [self.go(s, t, "leaving")]

    def leaving(self, s: State, t: Any) -> Step:
        (s,) = super().leaving(s, t)
        return [self.go(s, t, "stay")]


class EachLooks(Protocol):
    """Each worker sees for itself how many are to stay."""

    def stay(self, s: State, t: Any) -> Step:
        s["TEAM", self.read(s, t)] = min(s["TEAM", s["job", t]], s["FIT"])
        return super().stay(s, t)

    def leaving(self, s: State, t: Any) -> Step:
        return [self.go(s, t, "open")]


class InterruptedInside(Protocol):
    """An interrupt can come between posting and waiting: the call is two, with Python between them."""

    def next_post(self, s: State, t: Any) -> State:
        s = super().next_post(s, t)
        return self.go(s, t, "between") if s["at", t] == "row" else s

    def between(self, s: State, t: Any) -> Step:
        interrupted = s.copy()
        interrupted["BUSY"] = 0  # finally
        return [self.go(s, t, "row"), self.drop(interrupted, t)]


DEFECTS: list[Callable[..., Protocol]] = [
    FreedEarly, NoReset, OpenFirst, WakeFirst, FlagLate, TokenLeft, Unlocked, ClearedEarly, CountedFirst, ShrunkLate, EachLooks,
    InterruptedInside,
]  # fmt: skip


class Deadline(Protocol):
    """Rows are steps, and the team may agree to end early (`loop.enough`): worker 0 says so one step ahead, at any of them."""

    ahead = 2

    def memory(self) -> dict[Any, Any]:
        return super().memory() | {("UNTIL", job): 0 for job in self.all_jobs}

    def row(self, s: State, t: Any) -> Step:
        """A step, and after it for worker 0 the clock: atomic_load(UNTIL), atomic_store(UNTIL, k + 2)"""
        job, k = s["job", t], s["row", t]
        (s,) = super().row(s, t)
        if k + 1 == self.rows:
            return [s]
        s = self.go(s, t, "enough")
        if t[0] == "worker" or s["UNTIL", job]:
            return [s]
        late = s.copy()
        late["UNTIL", job] = k + self.ahead
        return [s, late]

    def enough(self, s: State, t: Any) -> Step:
        """atomic_load(UNTIL) == k + 1; if not, the next step, which begins with a barrier"""
        job = self.read(s, t)
        if s["UNTIL", job] == s["row", t]:
            return [self.leave(s, t)]
        return [self.go(s, t, "generation" if s["n", t] > 1 else "row")]

    def returned(self, s: State, t: Any) -> Step:
        job = s["job", t]
        n, done = s["UNTIL", job] or self.rows, s["done", job]
        self.require(
            all(map(whole, done[:n])) and not any(done[n:]), f"{job} ended before step {n}, and these were run: {done}"
        )
        return [self.drop(s, t)]


class DeadlineAtOnce(Deadline):
    """Worker 0 ends with the step that it has done, which others may have gone on from."""

    ahead = 1


class Broadcast(Protocol):
    """What the protocol was before boxes: one place for the job, a number that all watch, a count of those who are done.

    Posting, waking and joining are calls of their own, with Python between them.
    """

    def __init__(self, jobs: Sequence[Sequence[int]], rows: int = 2, interrupts: bool = True):
        super().__init__(jobs, rows)
        self.interrupts, self.threads_may_lack = interrupts, False

    def memory(self) -> dict[Any, Any]:
        return super().memory() | {"SEQ": 0, "JOB": None, "DONE": 0} | {("seen", w): 0 for w in self.workers}

    def ended(self, s: State) -> bool:
        return all(s["at", t] == "over" for t in self.threads if t[0] == "caller") and s["BUSY"] == 0

    def check(self, s: State) -> None:
        """What the steps assert is enough."""

    def interrupted(self, s: State, t: Any) -> list[State]:
        if not self.interrupts:
            return []
        s = s.copy()
        s["BUSY"] = 0  # finally
        return [self.drop(s, t)]

    def hire(self, s: State, t: Any) -> Step:
        for w in range(s["HIRED"] + 1, s["most", t]):
            s["seen", w], s["HIRED"] = s["SEQ"], w
            self.go(s, ("worker", w), "serve")
        return [self.begin(s, t, s["most", t])]

    def post(self, s: State, t: Any) -> Step:
        s["JOB"] = s["job", t]
        return [self.go(s, t, "none_done"), *self.interrupted(s, t)]

    def none_done(self, s: State, t: Any) -> Step:
        s["DONE"] = 0
        return [self.go(s, t, "number")]

    def number(self, s: State, t: Any) -> Step:
        s["SEQ"] += 1
        return [self.go(s, t, "rouse")]

    def rouse(self, s: State, t: Any) -> Step:
        """A statement for each worker that sleeps."""
        stopped, w = self.interrupted(s, t), s["w", t]
        if s["PARKED", w]:
            s["PARKED", w] = 0
            s["TOKENS", w] += 1
        s["w", t] += 1
        return [self.go(s, t, "rouse" if s["w", t] < s["team", t] else "join"), *stopped]

    def join(self, s: State, t: Any) -> Step:
        return [self.go(s.copy(), t, "row"), *self.interrupted(s, t)]

    def leave(self, s: State, t: Any) -> State:
        s = super().leave(s, t)
        return self.go(s, t, "await_all") if s["at", t] == "await_box" else s

    def await_all(self, s: State, t: Any) -> Step:
        return [self.go(s, t, "release")] if s["DONE"] >= s["team", t] - 1 else BLOCKED

    def serve(self, s: State, t: Any) -> Step:
        if s["SEQ"] == s["seen", t[1]]:
            return [self.go(s, t, "raise_flag")]
        s["seen", t[1]] = s["SEQ"]
        return [self.go(s, t, "which")]

    def which(self, s: State, t: Any) -> Step:
        s["job", t] = s["JOB"]
        return [self.go(s, t, "belongs")]

    def belongs(self, s: State, t: Any) -> Step:
        """Look at the job's TEAM, also where it is none of the worker's."""
        s["n", t] = s["TEAM", self.read(s, t)]
        return [self.go(s, t, "row" if t[1] < s["n", t] else "serve")]

    def late(self, s: State, t: Any) -> Step:
        return BLOCKED

    def clear(self, s: State, t: Any) -> Step:
        s["DONE"] += 1
        return [self.go(s, t, "serve")]

    def look_again(self, s: State, t: Any) -> Step:
        return [self.go(s, t, "sleep" if s["SEQ"] == s["seen", t[1]] else "lower_own")]
