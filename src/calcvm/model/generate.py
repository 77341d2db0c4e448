"""Generation: tokens one after the other, each drawn from the scores that a stream gives after the ones before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, ShapeError

if TYPE_CHECKING:
    from calcvm.model.stream import Stream


class Sampler:
    """Draws a token of scores: at random by their softmax, or the best one (``temperature`` 0)."""

    def __init__(self, temperature: Any, top_k: Any, top_p: Any, seed: Any):
        self.temperature = checks.number("generate: temperature", temperature, 0)
        self.top_k = None if top_k is None else checks.integer("generate: top_k", top_k)
        self.top_p = None if top_p is None else checks.number("generate: top_p", top_p, 0, 1, ends="(]")
        self.rng = np.random.default_rng(None if seed is None else checks.integer("generate: seed", seed, 0))

    def draw(self, scores: np.ndarray) -> np.ndarray:
        """A token for each row of scores (n, vocabulary); of equal scores the first counts as the higher one."""
        if not self.temperature:
            return scores.argmax(1)
        scores = scores.astype(np.float64) / self.temperature
        if self.top_k is not None or self.top_p is not None:
            order = np.argsort(-scores, 1, kind="stable")
            ranked = np.take_along_axis(scores, order, 1)
            ranked[:, scores.shape[1] if self.top_k is None else self.top_k :] = -np.inf
            if self.top_p is not None:
                p = np.exp(ranked - ranked[:, :1])
                before = np.cumsum(p, 1) - p
                ranked[before >= self.top_p * p.sum(1, keepdims=True)] = -np.inf
            np.put_along_axis(scores, order, ranked, 1)
        noise = self.rng.gumbel(size=scores.shape)  # the largest of scores with Gumbel noise is drawn by their softmax
        return (scores + noise).argmax(1)


def prompts_of(prompt: Any) -> tuple[np.ndarray, bool]:
    """Prompts as an array (n, length) of integers, and whether one was given alone."""
    array = np.asarray(prompt)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not array.shape[-1] or not len(array):
        raise CalcError(
            f"generate: the prompt is an array of tokens, (length,) or (n, length), not {checks.shown(prompt)}"
        )
    return np.atleast_2d(array).astype(np.int64), array.ndim == 1


def generated(stream: Stream, prompts: np.ndarray, tokens: int, sampler: Sampler, stop: int | None) -> np.ndarray:
    """So many tokens after each prompt, (n, tokens); after ``stop`` all are ``stop``."""
    stream.reset()
    for step in prompts.T:
        scores = stream(step)
    if scores.ndim != 2:
        raise ShapeError(
            f"generate: the model gives {scores.shape[1:]} for a step, and scores of the tokens, (vocabulary,), are wanted"
        )
    out = np.empty((len(prompts), tokens), np.int64)
    over = np.zeros(len(prompts), bool)
    for i in range(tokens):
        out[:, i] = np.where(over, stop or 0, sampler.draw(scores))
        if stop is not None:
            over |= out[:, i] == stop
            if over.all():
                out[:, i:] = stop
                break
        if i + 1 < tokens:
            scores = stream(out[:, i])
    return out
