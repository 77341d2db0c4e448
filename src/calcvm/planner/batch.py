"""The largest batch for a budget: doubling, then bisection, with the packer inside.

After algorithm 1 of the CalcGraph paper.  A batch whose liveness bound exceeds the budget is never packed.
Packed peaks are not monotone in the batch size, so the two batches above the result are tried too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from calcvm.errors import PlanError
from calcvm.ops.sizes import evaluate
from calcvm.ops.statement import Statement

MAX_BATCH = 2**40  # the largest that rows can encode; the result if memory does not depend on the batch


def cannot_count(statements: Iterable[Statement], batch: int) -> Statement | None:
    """The first statement that can run a batch of 1 but cannot encode this batch, or whose kernel cannot count it."""

    def fails(st: Statement, batch: int) -> bool:
        words = st.words_at(batch)
        beyond = any(word.kind == "dim" and words[word.name] > word.hi for word in st.spec.words if word.name in words)
        return beyond or any(evaluate(text, words) < 0 for text in st.spec.require)

    return next((st for st in statements if fails(st, batch) and not fails(st, 1)), None)


def largest_batch(
    allowed: int,
    bound: Callable[[int], int],
    required: Callable[[int], int],
    counts: Callable[[int], bool] = lambda batch: True,
) -> int:
    """The largest batch size found that needs at most ``allowed`` bytes.

    Parameters
    ----------
    bound : lower bound of the bytes that a batch needs.
    required : bytes that the packer needs for a batch.
    counts : whether rows can encode a batch.

    Raises
    ------
    PlanError
        If not even a batch of one fits.
    """

    def fits(batch: int) -> bool:
        return bound(batch) <= allowed and required(batch) <= allowed and counts(batch)

    if not fits(1):
        needed = required(1)
        raise PlanError(
            f"a batch of 1 needs {needed:,} bytes, {allowed:,} are allowed ({needed - allowed:,} too few): "
            "allow more memory, make the model smaller, or let values be recomputed: give batch_size=",
            needed,
            allowed,
        )
    good, bad = 1, 2
    while bad <= MAX_BATCH and fits(bad):
        good, bad = bad, 2 * bad
    if bad > MAX_BATCH:
        return good
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return next(batch for batch in (good + 2, good + 1, good) if batch == good or fits(batch))
