"""The sampler of `Model.generate` beside its definition in NumPy: the tokens to draw one of, the one that is drawn, how often."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from calcvm import CalcError
from calcvm.kernels_shared.random import hashing
from calcvm.model.generate import Sampler

_, key, bits = hashing(lambda f: f, lambda x: np.asarray(x).astype(np.uint64), lambda z, n: z >> np.uint64(n))
WAYS = [
    {"temperature": t, "top_k": k, "top_p": p}
    for t in (0.3, 1.0, 2.5)
    for k in (None, 1, 3, 40, 1000)
    for p in (None, 1e-9, 0.4, 0.9, 1.0)
]


def sampler(n: int, size: int, dtype: str = "float64", seed: int = 0, tokens: int = 1, **how) -> Sampler:
    return Sampler(
        [np.zeros(1, int)] * n, tokens, (size, np.dtype(dtype).itemsize), [(seed, i) for i in range(n)], **how
    )


def drawn(scores: np.ndarray, **how) -> np.ndarray:
    """A token for each row of scores."""
    found = sampler(*scores.shape, dtype=scores.dtype.name, **how)
    found.draw(scores)
    assert found.over
    return found.drawn()[:, 0]


def leading(
    scores: np.ndarray, temperature: float, top_k: int | None, top_p: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that may be drawn of a row of scores, in order, and their weights."""
    weights = np.exp((scores.astype("f8") - scores.max()) / temperature)
    if (top_k or len(scores)) >= len(scores) and (top_p or 1.0) == 1.0:
        return np.arange(len(scores)), weights
    order = np.argsort(-scores, kind="stable")[:top_k]
    weights = weights[order]
    if top_p is not None:
        n = np.count_nonzero(np.cumsum(weights) - weights < top_p * weights.sum())
        order, weights = order[:n], weights[:n]
    return order, weights


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_each_token_is_that_of_the_definition(dtype):
    rng, n = np.random.default_rng(0), 40
    share = (bits(key(np.full(n, 7), np.arange(n), 0), 0) >> np.uint64(9)) * 2.0**-53
    assert ((0 <= share) & (share < 1)).all()
    for size in (1, 2, 7, 65, 300):
        scores = (3 * rng.standard_normal((n, size))).astype(dtype)
        scores[:, : size // 3] = scores[:, size // 2 : size // 2 + size // 3]  # equal scores
        scores[::4, size // 2 + 1 :] = -np.inf
        for how in WAYS:
            found = drawn(scores, seed=7, **how)
            for i in range(n):
                order, weights = leading(scores[i], **how)
                wanted = order[np.argmax(np.cumsum(weights) > share[i] * weights.sum())]
                assert found[i] == wanted, (size, how, i)
        assert (drawn(scores, temperature=0.0, top_k=2, top_p=0.5) == scores.argmax(1)).all()


@pytest.mark.parametrize(
    "how", [{}, {"top_k": 4}, {"top_p": 0.83}, {"top_k": 6, "top_p": 0.9}, {"temperature": 0.6}], ids=str
)
def test_how_often_a_token_is_drawn(how):
    """Chi-square beside the softmax of the tokens that may be drawn: below its 0.9999 quantile."""
    scores, n = np.random.default_rng(1).standard_normal(12).astype("f4"), 100_000
    order, weights = leading(scores, **{"temperature": 1.0, "top_k": None, "top_p": None, **how})
    found = np.bincount(drawn(np.tile(scores, (n, 1)), **how), minlength=12)
    assert {*np.flatnonzero(found)} == {*order.tolist()}
    wanted = n * weights / weights.sum()
    quantile = {
        12: 37.4,
        9: 33.7,
        6: 27.9,
        5: 25.7,
        4: 23.5,
        3: 21.1,
    }  # of 11, 8, 5, 4, 3, 2 degrees of freedom, or less strict
    assert ((found[order] - wanted) ** 2 / wanted).sum() < quantile[max(k for k in quantile if k <= len(order))]


def test_one_number_for_each_token_of_each_sample():
    """Texts of a sample and of a seed are independent: no number comes twice, and neighbours do not follow each other."""
    n, tokens, scores = 100, 100, np.zeros((100, 2**16))
    of_seed = {}
    for seed in (0, 1):
        one = sampler(n, 2**16, seed=seed, tokens=tokens)
        while not one.over:
            one.draw(scores)
        of_seed[seed] = one.drawn() / 2**16
    both = np.stack([*of_seed.values()])
    assert len(np.unique(both)) > 17_000  # of 20 000 draws of 65 536 numbers 17 250 differ
    for axis in range(3):
        a, b = (np.take(both, range(k, both.shape[axis] - 1 + k), axis) for k in (0, 1))
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.04


def test_prompts_come_before_and_ends_stay():
    prompts, tokens = [np.array([3, 4, 5]), np.array([1])], 4
    one = Sampler(prompts, tokens, (6, 8), [(0, 0), (0, 1)], temperature=0.0, stop=2)
    best = [[0, 2], [0, 1], [5, 0], [2, 0], [0, 0], [0, 0]]  # of each step
    steps = 0
    while not one.over:
        one.draw(np.eye(6)[best[steps]])
        steps += 1
    assert steps == 4  # both are complete before the last steps
    assert one.text[: steps + 1].tolist() == [[3, 1], [4, 2], [5, 2], [5, 2], [2, 2]]
    assert one.drawn().tolist() == [[5, 2, 2, 2], [2, 2, 2, 2]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_that_are_not_finite(bad, temperature):
    for scores in ([[0.0, 1.0], [0.0, bad]], [[0.0, 1.0], [bad, 0.0]], [[0.0, 1.0], [-np.inf, -np.inf]]):
        one = sampler(2, 2, temperature=temperature)
        one.draw(np.array(scores))
        with pytest.raises(CalcError, match="the scores of sample 1 after 1 tokens are not finite"):
            one.over  # noqa: B018
        assert one.text[1, 1] == -1
    assert drawn(np.array([[-np.inf, 5.0, -np.inf]]), temperature=temperature).tolist() == [1]


def test_extreme_temperatures():
    scores = np.array([[0.0, 1e-3, 2e-3]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert {int(drawn(scores, temperature=5e-324, seed=s)[0]) for s in range(30)} == {2}
        assert {int(drawn(scores, temperature=1e300, seed=s)[0]) for s in range(30)} == {0, 1, 2}
        assert {int(drawn(np.array([[1e308, -1e308]]), seed=s)[0]) for s in range(30)} == {0}
