"""Where statements may run again, and the values that this decides about: what all solvers start from.

Stages are the statements of the backward that read what the forward made, in order; statements run again just before
one, in their own order.  Values below a thousandth of the limit are always kept: statistics of a batch, scales.

There is no contraction: fusion has done it.  Of what is left, a statement of the forward whose result one other alone reads, and
which is no larger than what is made of it, three are in ResNet-18, none in VGG-16, UNet and MobileNetV2, and all three
are read beside a second large value, so that running them together would cost schedules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from calcvm.record import record

if TYPE_CHECKING:
    from calcvm.planner.recompute import Problem, Run

SMALL = 1000  # values below this part of the limit are always kept


@record
class Answer:
    """The cheapest schedule found, and what no schedule costs less than; both in seconds of a step."""

    run: Run
    bound: float


class News:
    """What a solver says while it works, and hears; this one is for one that nobody listens to."""

    def found(self, run: Run) -> None:
        """A schedule that is cheaper than those before."""

    def bound(self, bound: float) -> None:
        """No schedule costs less."""

    def settled(self, versions: int) -> None:
        """None is cheaper that makes a value at most so often, the first time included."""

    def latest(self) -> Run | None:
        """The cheapest schedule that others have found."""
        return None


def cheaper(one: Run, other: Run | None) -> Run:
    """Of two schedules: the one that exceeds the limit least, then the cheaper; the first, where they are alike."""
    return one if other is None or one.score <= other.score else other


class Stages:
    """A problem's values of the forward, and its stages.

    early : values of the forward that are not always kept.
    touches : statements that make or use a value, in order.
    at : the statement of each stage; ``of`` is the stage of a statement.
    places : stages before which anything is done.  again : those in which a statement may run again.
    """

    def __init__(self, problem: Problem):
        self.problem, steps, first = problem, problem.steps, problem.backward
        small = problem.limit / SMALL
        self.early = {v for v, s in problem.maker.items() if s < first and problem.sizes[v] > small}
        self.touches: dict[int, list[int]] = {}
        for s, step in enumerate(steps):
            for v in (*step.uses, *step.makes):
                self.touches.setdefault(v, []).append(s)
        self.at = [s for s in range(first, len(steps)) if self.reads(s)]
        self.of = {s: k for k, s in enumerate(self.at)}
        self.places = [k for k in range(len(self.at)) if not self._all_there(k)]
        self.again = {
            i: [k for k in self.places if self.at[k] <= step.until]
            for i, step in enumerate(steps[:first])
            if self.early & {*step.makes}
        }

    def reads(self, s: int) -> set[int]:
        """Values that a statement reads, of those that are decided about."""
        return self.early & {*self.problem.steps[s].uses}

    def _all_there(self, k: int) -> bool:
        """Whether a stage follows one that leaves all that it reads."""
        t = self.at[k]
        return k > 0 and t == self.at[k - 1] + 1 and self.reads(t) <= self._stay(t - 1)

    def _stay(self, s: int) -> set[int]:
        """What a statement reads, and cannot be the place of what it makes."""
        return self.reads(s) - {x for _, x in self.problem.steps[s].pairs}

    def most(self, cost: float) -> dict[int, int]:
        """How often a schedule of less than this cost can run a statement again, each time for something that reads it."""
        steps, out = self.problem.steps, dict[int, int]()
        for i in sorted(self.again, reverse=True):
            own = {*steps[i].makes}
            needed = sum(bool(own & {*steps[t].uses}) for t in self.at)
            needed += sum(out.get(j, 0) for j in range(i + 1, self.problem.backward) if own & {*steps[j].uses})
            afforded = cost / steps[i].cost if steps[i].cost > 0 else needed
            out[i] = int(min(needed, afforded + 1e-6, len(self.again[i])))
        return out
