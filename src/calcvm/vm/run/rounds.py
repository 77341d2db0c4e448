"""Rounds of a pass over the samples: functions that the loops of both devices compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy import int64, uint64

from calcvm.vm.run import job as J


def round_of(n, batch, learning, k):  # type: ignore[no-untyped-def]
    """Round ``k`` of a pass over n samples: its first sample, its size, the size of its learning batch, whether it ends that."""
    per_learning = (learning + batch - 1) // batch
    start = k // per_learning * learning
    stop = start + learning if start + learning < n else n
    base = start + k % per_learning * batch
    m = batch if base + batch < stop else stop - base
    return base, m, stop - start, base + m == stop


def rows_of(words, m, of_learning):  # type: ignore[no-untyped-def]
    """Address of the rows patched for a round of ``m`` samples."""
    if m == words[J.BATCH]:
        return words[J.ROWS_FULL]
    return words[J.ROWS_SHORT] if of_learning == words[J.LEARNING] else words[J.ROWS_LAST]


def epoch_key(seed, epoch):  # type: ignore[no-untyped-def]
    """As `calcvm.vm.memory.epoch.shuffling_key`."""
    key = uint64(seed) * uint64(0x9E3779B97F4A7C15) + uint64(epoch) * uint64(0xD1342543DE82EF95) + uint64(1)
    return int64(key & uint64(2**63 - 1))


def status_of(words, loss):  # type: ignore[no-untyped-def]
    """The status of a task after an epoch; words[SINCE] epochs have passed since the judge's best."""
    if not loss - loss == 0.0:
        return J.NOT_FINITE
    stops = words[J.JUDGE] and words[J.SINCE] > 0 and 0 <= words[J.PATIENCE] <= words[J.SINCE]
    return J.STOPPED if stops else words[J.STATUS]


def passes(compiled: Callable, i64_at: Any, f64_at: Any) -> tuple[Any, Any, Any, Any]:
    """The functions that find the path of a round, that start a pass, that write its means to MEANS at its end, and that read its loss."""

    @compiled
    def turn_of(words, k):  # type: ignore[no-untyped-def]
        """The address of the words of the path that learns in round ``k`` (0: the job's), and the round of that path's own pass."""
        if words[J.ORDER] == 0:
            return int64(0), k
        turn = i64_at(words[J.ORDER] + 16 * (k % words[J.N_ORDER]))
        return turn[0], turn[1]

    @compiled
    def begin(words):  # type: ignore[no-untyped-def]
        for k in range(words[J.N_RESULTS]):
            f64_at(words[J.SUMS])[k] = 0.0

    @compiled
    def average(words):  # type: ignore[no-untyped-def]
        sums, means = f64_at(words[J.SUMS]), f64_at(words[J.MEANS])
        for k in range(words[J.N_RESULTS]):
            means[k] = sums[k] / words[J.N_SAMPLES]
        if words[J.ORDER]:
            for k in range(words[J.N_RESULTS]):
                means[k] = sums[k] / f64_at(words[J.COUNTED])[k]

    @compiled
    def loss_of(words):  # type: ignore[no-untyped-def]
        """The first mean; NaN if the loss of another path is not finite."""
        means = f64_at(words[J.MEANS])
        loss = means[0]
        if words[J.ORDER]:
            for k in range(words[J.N_RESULTS]):
                loss += 0.0 * means[k]
        return loss

    return turn_of, begin, average, loss_of
