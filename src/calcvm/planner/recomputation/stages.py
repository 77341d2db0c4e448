"""The stages before which statements may run again, and the values that this concerns: the common input of all solvers.

Stages are the statements of the backward that read values of the forward, in order.  Recomputed statements run just before a
stage, in their original order.  Values smaller than a thousandth of the limit, such as statistics of a batch, are always kept.

The problem is not contracted further, since fusion has done that.  The remaining candidates are forward statements whose result
has one reader and is no larger than the reader's result.  ResNet-18 has three; VGG-16, UNet and MobileNetV2 have none.  All three
are read together with a second large value, so merging them with the reader would exclude schedules.
"""

from __future__ import annotations

from calcvm.frozen import frozen
from calcvm.planner.recomputation.schedule import RecomputationProblem, Run

SMALL = 1000  # values below the limit divided by this are always kept


@frozen
class Answer:
    """The cheapest schedule found, and a lower bound of the cost of any schedule, in seconds of a step."""

    run: Run
    bound: float


class SolverChannel:
    """The channel of a running solver to and from its caller.  This base class is connected to nothing."""

    def found(self, run: Run) -> None:
        """Report a schedule that is cheaper than all before."""

    def bound(self, bound: float) -> None:
        """Report a lower bound of the cost of any schedule."""

    def settled(self, versions: int) -> None:
        """Report that no cheaper schedule computes each value at most ``versions`` times, the first included."""

    def latest(self) -> Run | None:
        """The cheapest schedule found by others, if there is a new one."""
        return None


def cheaper(one: Run, other: Run | None) -> Run:
    """The better of two schedules: the smaller excess over the limit, then the lower cost; ``one`` on a tie."""
    return one if other is None or one.score <= other.score else other


class Stages:
    """A problem's values of the forward, and its stages.

    early : values of the forward that are not always kept.
    touches : per value, the statements that make or use it, in order.
    at : the statement of each stage.  of : the stage of a statement.
    places : stages before which statements may run again.  again : per statement, the stages before which it may.
    """

    def __init__(self, problem: RecomputationProblem):
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
        """The values in ``early`` that a statement reads."""
        return self.early & {*self.problem.steps[s].uses}

    def _all_there(self, k: int) -> bool:
        """Whether a stage directly follows one that keeps all that it reads."""
        t = self.at[k]
        return k > 0 and t == self.at[k - 1] + 1 and self.reads(t) <= self._stay(t - 1)

    def _stay(self, s: int) -> set[int]:
        """Values that a statement reads and cannot overwrite."""
        return self.reads(s) - {x for _, x in self.problem.steps[s].pairs}

    def most(self, cost: float) -> dict[int, int]:
        """Per statement, how often a schedule below this cost can rerun it, each time for a reader."""
        steps, out = self.problem.steps, dict[int, int]()
        for i in sorted(self.again, reverse=True):
            own = {*steps[i].makes}
            needed = sum(bool(own & {*steps[t].uses}) for t in self.at)
            needed += sum(out.get(j, 0) for j in range(i + 1, self.problem.backward) if own & {*steps[j].uses})
            afforded = cost / steps[i].cost if steps[i].cost > 0 else needed
            out[i] = int(min(needed, afforded + 1e-6, len(self.again[i])))
        return out
