"""The order of statements inside each section: the cheap alternatives, measured by their peak.

Lowering's order is kept unless another has a strictly lower peak.  Alternatives: greedy list scheduling
(of the ready statements, the one that leaves least alive: a gradient is used up as soon as it is final),
and swaps of neighbours.  Every order respects the reads and writes of every value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from calcvm.ops.statement import Lowered, Statement, Value
from calcvm.planner.lifetimes import Machine, always_live, at_most, effects, lifetimes, operands
from calcvm.planner.offsets import load


def improve(lowered: Lowered, batch: int, machine: Machine, passes: int = 4) -> Lowered:
    """The program in the order of the lowest liveness peak found, for batches of ``batch``."""
    statements = list(lowered.statements)
    size = _sizes(lowered, batch, machine)
    if not size:
        return lowered
    best, lowest = statements, peak(statements, size)
    if lowest <= max(sum(size.get(v, 0) for v in {v for _, v in operands(st)}) for st in statements):
        return lowered  # one statement alone needs as much
    before = _dependencies(lowered, statements)
    for seed in (statements, _greedy(statements, before, size, lowered)):
        order = _swap(seed, before, size, passes)
        reached = peak(order, size)
        if reached < lowest:
            best, lowest = order, reached
    return lowered if best is statements else replace(lowered, statements=tuple(best))


def peak(statements: Sequence[Statement], size: Mapping[Value, int]) -> int:
    """Largest total of live sizes (values that share storage count twice: in-place work comes later)."""
    live = {v: t for v, t in lifetimes(statements).items() if v in size}
    first, last = zip(*live.values(), strict=True) if live else ((), ())
    return max(load([size[v] for v in live], first, last), default=0)


def _sizes(lowered: Lowered, batch: int, machine: Machine) -> dict[Value, int]:
    """Sizes of the values whose lifetime the order can change."""
    always = always_live(lowered)
    scratch = {v for st in lowered.statements for o, v in operands(st) if o.access == "s"}
    touched = {v for st in lowered.statements for _, v in operands(st)}
    return {v: machine.up(at_most(machine.bytes(v), batch)) for v in touched - always - scratch}


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
    lowered: Lowered,
) -> list[Statement]:
    touched = {st: [v for v in {v for _, v in operands(st)} if v in size] for st in statements}
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
        ready = [st for st in position if not waiting[st]]
        while ready:

            def cost(st: Statement, rank: Mapping[Statement, int] = position) -> tuple[int, int]:
                grows = sum(size[v] for v in touched[st] if v not in alive)
                frees = sum(size[v] for v in touched[st] if uses[v] == 1)
                return grows - frees, rank[st]

            st = min(ready, key=cost)
            ready.remove(st)
            out.append(st)
            for v in touched[st]:
                uses[v] -= 1
                (alive.add if uses[v] else alive.discard)(v)
            for a in after.get(st, ()):
                waiting[a] -= 1
                if not waiting[a]:
                    ready.append(a)
    return out


def _swap(
    seed: Sequence[Statement], before: Mapping[Statement, set[Statement]], size: Mapping[Value, int], passes: int
) -> list[Statement]:
    """Swap neighbours wherever that lowers the larger, or the sum, of their live sizes."""
    order = list(seed)
    live = {v: list(span) for v, span in lifetimes(order).items()}
    touched = {st: [v for v in {v for _, v in operands(st)} if v in size] for st in order}
    for _ in range(passes):
        changed = False
        for t in range(len(order) - 1):
            a, b = order[t], order[t + 1]
            if (a.path, a.phase) != (b.path, b.phase) or a in before[b]:
                continue
            # live at t and t+1, but for what is live at both in either order
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
