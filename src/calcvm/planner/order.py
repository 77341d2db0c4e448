"""The order of statements inside each section: cheap alternatives, compared by their peak.

The order of lowering is kept unless another one has a strictly lower peak.  One alternative is greedy list scheduling: of the
ready statements, the one that leaves the least alive runs next, so a gradient is used up as soon as it is final.  Another one
sorts by height: statements with the shortest chain of predecessors first (after Zhao et al. 2017, DeepDSL).  Each is improved
by swaps of neighbours.  Then the part with the peak, between two statements that no other may pass, is ordered by its downsets
(`calcvm.planner.downsets`), then the part with the next peak, as long as that helps.  Every order respects the reads and writes
of every value.

A ResNet-18 of batch 8 takes 220.6 MB (with swaps alone 222.1), a ResNet-34 of batch 32 takes 1099.2 (1102.4).

The number of trials is limited, which costs very wide graphs memory: 100 parallel branches take 0.6 % more at batch 16 than
without the limit, and 1.3 % more at batch 64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import accumulate, groupby

from calcvm.ops.statement import Lowered, Statement, Value
from calcvm.planner.downsets import Downsets, Item, Touch
from calcvm.planner.inplace import may_take
from calcvm.planner.lifetimes import Machine, always_live, at_most, effects, lifetimes_of, scratch_sizes
from calcvm.planner.packing.pack import load

WIDTH = 8  # downsets that are followed at once
EFFORT = 400_000  # steps for all parts together: about a second; the zoo takes at most 59 thousand
EACH = 2000  # steps per statement of the program


def improve(lowered: Lowered, batch: int, machine: Machine, passes: int = 4, width: int = WIDTH) -> Lowered:
    """The program in the order with the lowest liveness peak found, for this batch."""
    statements = list(lowered.statements)
    size = _sizes(lowered, batch, machine)
    if not size:
        return lowered
    touched = {st: [v for v in st.touched if v in size] for st in statements}
    pairs = _pairs(statements, size, machine)
    best, lowest = statements, peak(statements, size, touched, pairs)
    floor = max(_alone(st, size, touched, pairs) for st in statements)
    if lowest <= floor:
        return lowered  # one statement alone needs as much
    before = _dependencies(lowered, statements)
    for seed in (
        statements,
        _greedy(statements, before, size, touched, lowered),
        _by_height(statements, before, lowered),
    ):
        order = _swap(seed, before, size, touched, passes)
        reached = peak(order, size, touched, pairs)
        if reached < lowest:
            best, lowest = order, reached
    if lowest > floor:
        best = _by_parts(best, before, size, touched, pairs, floor, width)
    return lowered if best is statements else replace(lowered, statements=tuple(best))


Pairs = Mapping[Statement, Sequence[tuple[Value, Value]]]
Touched = Mapping[Statement, Sequence[Value]]  # the values with a size that each touches


def live_bytes(
    statements: Sequence[Statement], spans: Mapping[Value, tuple[int, int]], size: Mapping[Value, int], pairs: Pairs
) -> list[int]:
    """Live sizes at each statement; a value written in place of a dying one counts once."""
    first, last = zip(*spans.values(), strict=True) if spans else ((), ())
    live = load([size[v] for v in spans], first, last)
    live += [0] * (len(statements) - len(live))
    for t, st in enumerate(statements) if pairs else ():
        taken: set[Value] = set()
        for made, read in pairs.get(st, ()):
            if spans[made][0] == t and spans[read][1] == t > spans[read][0] and not taken & {made, read}:
                taken |= {made, read}
                live[t] -= size[made]
    return live


def peak(statements: Sequence[Statement], size: Mapping[Value, int], touched: Touched, pairs: Pairs) -> int:
    """The largest total of live sizes."""
    return max(live_bytes(statements, _spans(statements, touched), size, pairs), default=0)


def _spans(statements: Sequence[Statement], touched: Touched) -> dict[Value, tuple[int, int]]:
    """Lifetimes of the values with a size."""
    return lifetimes_of([touched[st] for st in statements])


def _pairs(statements: Sequence[Statement], size: Mapping[Value, int], machine: Machine) -> Pairs:
    """Pairs (made, read) of each statement where the first may overwrite the second."""
    out: dict[Statement, list[tuple[Value, Value]]] = {}
    for st in statements:
        for written, read in st.spec.in_place:
            y, x = st.operands.get(written), st.operands.get(read)
            if y in size and x in size and y is not x and may_take(st, written, read, machine):
                assert y is not None and x is not None
                out.setdefault(st, []).append((y, x))
    return out


def _alone(st: Statement, size: Mapping[Value, int], touched: Touched, pairs: Pairs) -> int:
    """Bytes that a statement needs in any order."""
    own = sum([size[v] for v in touched[st]])
    return own - sum(size[made] for made in {made for made, _ in pairs.get(st, ())})


def _by_height(
    statements: Sequence[Statement], before: Mapping[Statement, set[Statement]], lowered: Lowered
) -> list[Statement]:
    """Statements sorted by the longest chain of others that must come before them."""
    out: list[Statement] = []
    for start, stop in lowered.sections().values():
        height: dict[Statement, int] = {}
        for st in statements[start:stop]:
            height[st] = 1 + max((height[b] for b in before[st]), default=-1)
        out += sorted(height, key=lambda st: height[st])
    return out


# ---------------------------------------------------------------- part by part
def _by_parts(
    statements: Sequence[Statement],
    before: Mapping[Statement, set[Statement]],
    size: Mapping[Value, int],
    touched: Touched,
    pairs: Pairs,
    floor: int,
    width: int,
) -> list[Statement]:
    """Reorder the part with the peak, then the next one, until a part cannot be improved."""
    order = list(statements)
    parts = _parts(order, before)
    spans = _spans(order, touched)
    live = live_bytes(order, spans, size, pairs)
    firsts, lasts = zip(*spans.values(), strict=True)
    into = load([size[v] for v in spans], [f + 1 for f in firsts], lasts)  # live before and at each statement
    highest = [(-max(live[start:stop]), k) for k, (start, stop) in enumerate(parts)]
    heapify(highest)
    done, left = set[int](), min(EFFORT, EACH * len(order))
    while True:
        lowered, k = heappop(highest)
        if k in done or -lowered <= floor:
            return order
        done.add(k)
        start, stop = parts[k]
        search = _downsets(order[start:stop], (start, stop), into[start], spans, before, size, touched, pairs)
        found = search.best(max(floor, -highest[0][0] if highest else 0), -lowered, width, left)
        if found is None:
            return order
        left -= search.steps
        order[start:stop] = [order[start + i] for i in found]
        heappush(highest, (-search.peak(found), k))


def _parts(order: Sequence[Statement], before: Mapping[Statement, set[Statement]]) -> list[tuple[int, int]]:
    """[start, stop) of the parts of sections: all of a section's other statements come before or after a part."""
    place = {st: t for t, st in enumerate(order)}
    n = len(order)
    after, behind = [n] * n, [-1] * n  # per statement: its first successor and its last predecessor
    for t, st in enumerate(order):
        for b in before[st]:
            after[place[b]] = min(after[place[b]], t)
            behind[t] = max(behind[t], place[b])
    out: list[tuple[int, int]] = []
    for _, members in groupby(range(n), key=lambda t: (order[t].path, order[t].phase)):
        own = [*members]
        least = [*accumulate((behind[t] for t in reversed(own)), min)][::-1]  # of each statement and all later ones
        start, reach = own[0], -1
        for k, t in enumerate(own):
            # a part ends at t if all others must precede or follow t: no nearest successor or predecessor skips t
            if k + 1 == len(own) or (reach <= t <= least[k + 1]):
                out.append((start, t + 1))
                start, reach = t + 1, -1
            else:
                reach = max(reach, after[t])
    return out


def _downsets(
    part: Sequence[Statement],
    at: tuple[int, int],
    live: int,
    spans: Mapping[Value, tuple[int, int]],
    before: Mapping[Statement, set[Statement]],
    size: Mapping[Value, int],
    touched: Touched,
    pairs: Pairs,
) -> Downsets:
    """A part of an order in numbers.

    at : [start, stop) of the part.  live : bytes that are live when it begins.
    """
    place = {st: k for k, st in enumerate(part)}
    by: dict[Value, int] = {}
    for st, k in place.items():
        for v in touched[st]:
            by[v] = by.get(v, 0) | 1 << k
    touch = {v: Touch(size[v], mask, spans[v][0] >= at[0], spans[v][1] < at[1]) for v, mask in by.items()}
    tasks = []
    for st in place:
        values = touched[st]
        own_at = {v: j for j, v in enumerate(values)}
        own = tuple((own_at[made], own_at[read]) for made, read in pairs.get(st, ()))
        earlier = sum(1 << place[b] for b in before[st] if b in place)
        tasks.append(Item(tuple(touch[v] for v in values), own, earlier))
    return Downsets(tasks, live)


def _sizes(lowered: Lowered, batch: int, machine: Machine) -> dict[Value, int]:
    """Sizes of the values that may share storage."""
    always, scratch = always_live(lowered), scratch_sizes(lowered, machine)
    shared = {v for st in lowered.statements for v in st.touched} - always
    return {v: machine.up(at_most(scratch.get(v) or machine.bytes(v), batch)) for v in shared}


def _dependencies(lowered: Lowered, statements: Sequence[Statement]) -> dict[Statement, set[Statement]]:
    """Statements of the same section that must come before each statement."""
    out: dict[Statement, set[Statement]] = {}
    for start, stop in lowered.sections().values():
        writer: dict[Value, Statement] = {}
        readers: dict[Value, list[Statement]] = {}
        for st in statements[start:stop]:
            read, written = effects(st)
            need = {writer[v] for v in read | written if v in writer}
            for v in written:
                need.update(readers.pop(v, ()))
            for v in written:
                writer[v] = st
            for v in read - written:
                readers.setdefault(v, []).append(st)
            need.discard(st)
            out[st] = need
    return out


def _greedy(
    statements: Sequence[Statement],
    before: Mapping[Statement, set[Statement]],
    size: Mapping[Value, int],
    touched: Touched,
    lowered: Lowered,
) -> list[Statement]:
    uses: dict[Value, int] = {}
    for st in statements:
        for v in touched[st]:
            uses[v] = uses.get(v, 0) + 1
    alive: set[Value] = set()
    out: list[Statement] = []
    for start, stop in lowered.sections().values():
        position = {st: t for t, st in enumerate(statements[start:stop])}
        waiting = {st: len(before[st]) for st in position}
        after: dict[Statement, list[Statement]] = {}
        for st in position:
            for b in before[st]:
                after.setdefault(b, []).append(st)
        readers: dict[Value, list[Statement]] = {}
        for st in position:
            for v in touched[st]:
                readers.setdefault(v, []).append(st)

        def leaves(st: Statement) -> int:
            grows = sum(size[v] for v in touched[st] if v not in alive)
            return grows - sum(size[v] for v in touched[st] if uses[v] == 1)

        ready = [(leaves(st), rank, st) for st, rank in position.items() if not waiting[st]]
        heapify(ready)
        known = {st: more for more, _, st in ready}  # of the ready statements; heap entries that differ are outdated
        while known:
            more, _, st = heappop(ready)
            if known.get(st) != more:
                continue
            del known[st]
            out.append(st)
            for v in touched[st]:
                uses[v] -= 1
                fewer = size[v] * ((v not in alive) + (uses[v] == 1))  # at the first use and before the last one
                (alive.add if uses[v] else alive.discard)(v)
                for a in readers[v] if fewer else ():
                    if a in known:
                        known[a] -= fewer
                        heappush(ready, (known[a], position[a], a))
            for a in after.get(st, ()):
                waiting[a] -= 1
                if not waiting[a]:
                    known[a] = leaves(a)
                    heappush(ready, (known[a], position[a], a))
    return out


def _swap(
    seed: Sequence[Statement],
    before: Mapping[Statement, set[Statement]],
    size: Mapping[Value, int],
    touched: Touched,
    passes: int,
) -> list[Statement]:
    """Swap neighbours if that lowers the larger, or else the sum, of their live sizes."""
    order = list(seed)
    live = {v: list(span) for v, span in _spans(order, touched).items()}
    for _ in range(passes):
        changed = False
        for t in range(len(order) - 1):
            a, b = order[t], order[t + 1]
            if (a.path, a.phase) != (b.path, b.phase) or a in before[b]:
                continue
            # live at t and t+1, without values that are live at both in either order
            both = {*touched[a], *touched[b]}
            now = [0, 0]
            then = [0, 0]
            moved = {}
            for v in both:
                f, e = live[v]
                in_a, in_b = v in touched[a], v in touched[b]
                f2 = f if f < t else t + (in_a and not in_b)
                e2 = e if e > t + 1 else t + in_a
                moved[v] = [f2, e2]
                for k in (0, 1):
                    now[k] += size[v] if f <= t + k <= e else 0
                    then[k] += size[v] if f2 <= t + k <= e2 else 0
            if (max(then), sum(then)) < (max(now), sum(now)):
                order[t], order[t + 1] = b, a
                live.update(moved)
                changed = True
        if not changed:
            break
    return order
