"""The rows of a step's computations on hyperparameters (`calcvm.formulas.steps`)."""

from __future__ import annotations

from calcvm.formulas import steps
from calcvm.kernel import Float, Ptr


def register(kernel, compiled, first):
    """Register the kernels; only one thread computes, for which ``first(me)`` holds."""
    _tick, _rate_table, _rate_scale, _decay_scale = map(
        compiled, (steps.tick, steps.rate_table, steps.rate_scale, steps.decay_scale)
    )

    @kernel
    def tick(me, schedule, hyper: Ptr.float64):
        """t += 1, and the values that depend only on it."""
        if first(me):
            _tick(hyper, schedule)

    @kernel
    def rate_table(me, n, every, table: Ptr, hyper: Ptr.float64):
        """lr_t *= f; step_size_t *= f; f = table[min(max(0, t - 1 - warmup_steps) // every, n - 1)]."""
        if first(me):
            _rate_table(hyper, n, every, table)

    @kernel
    def rate_scale(me, factor: Float, hyper: Ptr.float64, scaled: Ptr.float64):
        """scaled = hyper, its lr_t and step_size_t times factor."""
        if first(me):
            _rate_scale(hyper, scaled, factor)

    @kernel
    def decay_scale(me, factor: Float, scaled: Ptr.float64):
        """scaled's weight_decay *= factor."""
        if first(me):
            _decay_scale(scaled, factor)
