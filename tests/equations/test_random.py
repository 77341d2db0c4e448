"""Random equations: values beside a number at a time, gradients beside differences, second derivatives beside those of gradients.

In `make test` a sample; ``pytest --whole tests/equations/test_random.py`` runs 1 000.  ``generate(seed)`` draws a failing one again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.equations.derive import Derived
from tests.equations.generate import Drawn, generate
from tests.equations.interpreter import interpret

SAMPLE, WHOLE, PARTS = 100, 1_000, 10
EXACT, SLOPE = 1e-11, 1e-6  # of the largest element, or of 1
NEAR, FAR = 1e-5, 2e-4  # steps
SECOND_OF = 3  # of so many one


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max(initial=0) / max(1, np.abs(want).max(initial=0)))


def slope_error(got: float, f: Callable[[np.ndarray], float], x: np.ndarray, along: np.ndarray) -> float:
    """Beside differences of three orders: near ones err where the third derivative is large, far ones beside kinks.

    What the rounding of ``f`` may make of a difference is no error.
    """

    def difference(step: float) -> float:
        return (f(x + step * along) - f(x - step * along)) / (2 * step)

    def wrong(want: float, step: float) -> float:
        rounding = 4 * np.finfo(float).eps * abs(f(x)) / step
        return max(0.0, abs(got - want) - rounding) / max(1.0, abs(want))

    near = wrong(difference(NEAR), NEAR)
    if near < SLOPE:
        return near
    a, b, c = (difference(k * FAR) for k in (1, 2, 4))
    return min(near, wrong((4 * a - b) / 3, FAR), wrong((64 * a - 20 * b + c) / 45, FAR))


def examine(seed: int) -> dict[str, float]:
    """The errors of one equation."""
    drawn, rng = generate(seed), np.random.default_rng(seed)
    made = Derived(drawn.text, drawn.values, {}, drawn.wrt)
    value, dy = made.value(), rng.normal(size=made.shape)
    found = {
        "value": error(value, interpret(made.equations, drawn.values, made.found.extents, made.found.sizes)[made.out])
    }
    found["forward"] = error(made.forward(), value)
    if drawn.einsum:
        found["einsum"] = error(value, np.einsum(drawn.einsum, *(drawn.values[k] for k in drawn.wrt)))
    got = made.gradient(dy)
    plain = interpret(made.first, {**drawn.values, made.seed: dy}, made.ranges.extents, made.ranges.sizes)
    for k in drawn.wrt:
        along = rng.normal(size=drawn.values[k].shape)
        f = lambda x: float((made.value(**{k: x}) * dy).sum())  # noqa: B023
        wrong = slope_error(float((got[k] * along).sum()), f, drawn.values[k], along)
        found["gradient"] = max(found.get("gradient", 0), wrong)
        found["by numbers"] = max(found.get("by numbers", 0), error(got[k], plain[made.made.of[k]]))
    if seed % SECOND_OF == 0:
        found["second"] = second(made, drawn, dy, rng)
    return found


def second(made: Derived, drawn: Drawn, dy: np.ndarray, rng: np.random.Generator) -> float:
    of = drawn.wrt[0]
    with_ = rng.normal(size=drawn.values[of].shape)
    made.derive_again(of, dy)
    got = made.second_gradient(dy, with_)
    worst = 0.0
    for k in drawn.wrt:
        along = rng.normal(size=drawn.values[k].shape)
        f = lambda x: float((made.gradient(dy, **{k: x})[of] * with_).sum())  # noqa: B023
        worst = max(worst, slope_error(float((got[k] * along).sum()), f, drawn.values[k], along))
    along = rng.normal(size=dy.shape)
    f = lambda x: float((made.gradient(x)[of] * with_).sum())
    return max(worst, slope_error(float((got[made.seed] * along).sum()), f, dy, along))


@pytest.mark.parametrize("part", range(PARTS))
def test_random_equations(part: int, whole: bool) -> None:
    for seed in range(part, WHOLE if whole else SAMPLE, PARTS):
        try:
            found = examine(seed)
        except Exception as failure:
            raise AssertionError(f"generate({seed}): {generate(seed).text}") from failure
        for what, wrong in found.items():
            most = SLOPE if what in ("gradient", "second") else EXACT
            assert wrong < most, f"{what} {wrong:.1e} of generate({seed}): {generate(seed).text}"
