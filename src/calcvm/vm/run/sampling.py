"""The sampler of `Model.generate`: the next token of each sample, from the scores that its last step gave.

A sampler is an array of words (`calcvm.vm.run.job`).  `draw` runs after each step, called by `run_rounds` or by Python:

    step       0   1   2   3   4   5       what the steps read: a row for each, with a token of each sample
    sample 0   p   p   d   d   d   d       p: of its prompt; d: drawn after the step before
    sample 1   p   d   d   e   e   e       e: the token that ends a text, and stays

Each drawn token takes one random number, the hash of (seed, sample, how many were drawn before it): nothing else changes a text.
It is the first token whose weight, with those of the tokens before it, exceeds this share of all weights.
"""

from __future__ import annotations

import numpy as np
from numpy import uint64

from calcvm.kernels_cpu._formulas import exp
from calcvm.kernels_cpu._math import elementwise
from calcvm.kernels_shared.random import hashing
from calcvm.vm.run import job as J
from calcvm.vm.run.atomics import f32_at, f64_at, i64_at
from calcvm.vm.run.samples import helper, inlined

_, key, bits = hashing(inlined, uint64, inlined(lambda z, n: z >> uint64(n)))
weigh = elementwise(lambda x, top, temperature: exp((x - top) / temperature), "v", "ff")


@inlined
def better(scores, a, b):
    """Whether token a ranks before token b: its score is higher, or the same and its number lower."""
    return scores[a] > scores[b] or (scores[a] == scores[b] and a < b)


@helper
def sink(scores, heap, n, at):
    """Move a token of a heap of n tokens, the best at its top, down to its place."""
    token, child = heap[at], 2 * at + 1
    while child < n:
        if child + 1 < n and better(scores, heap[child + 1], heap[child]):
            child += 1
        if better(scores, token, heap[child]):
            break
        heap[at] = heap[child]
        at, child = child, 2 * child + 1
    heap[at] = token


@helper
def take(scores, heap, n):
    """Move the best of a heap of n tokens behind the other ones."""
    best, heap[0] = heap[0], heap[n - 1]
    sink(scores, heap, n - 1, 0)
    heap[n - 1] = best


@helper
def leading(scores, weights, order, n, most, limit):
    """How many of the best tokens may be drawn: at most ``most``, as long as those before weigh less than ``limit`` of these together.

    The best one comes last in ``order``, and the others before it.
    """
    total, kept, reached = 0.0, 0, 0.0
    for c in range(n):
        order[c] = c
        total += weights[c]
    for c in range(n // 2 - 1, -1, -1):
        sink(scores, order, n, c)
    if most < n:
        total = 0.0
        for k in range(most):
            take(scores, order, n - k)
            total += weights[order[n - 1 - k]]
    if limit >= 1.0:
        return most
    while kept < most and reached < limit * total:
        if most == n:
            take(scores, order, n - kept)
        reached += weights[order[n - 1 - kept]]
        kept += 1
    return kept


@helper
def drawn(words, given, share):
    """The token that a row of scores gives for a random number from [0, 1); -1: a score is NaN or inf, or all are -inf."""
    n, best, strange = words[J.VOCABULARY], 0, False
    space, most = words[J.SPACE], words[J.TOP_K]
    scores, weights, order = f64_at(space), f64_at(space + 8 * n), i64_at(space + 16 * n)
    temperature, limit = f64_at(words[J.REALS])[0], f64_at(words[J.REALS])[1]
    for c in range(n):
        x = np.float64(f32_at(given)[c]) if words[J.SCORE_BYTES] == 4 else f64_at(given)[c]
        if x != x:
            strange = True
        scores[c] = x
        if x > scores[best]:
            best = c
    if strange or scores[best] - scores[best] != 0.0:
        return -1
    if temperature == 0.0:
        return best
    weigh(n, scores, weights, scores[best], temperature)
    if most < n or limit < 1.0:
        n_drawn = leading(scores, weights, order, n, most, limit)
    else:
        n_drawn = n
        for c in range(n):
            order[n - 1 - c] = c
    total, reached, k = 0.0, weights[order[n - 1]], 0
    for c in range(n_drawn):
        total += weights[order[n - 1 - c]]
    while reached <= share * total and k + 1 < n_drawn:
        k += 1
        reached += weights[order[n - 1 - k]]
    return order[n - 1 - k]


def draw(sampler, scores):
    """Set the tokens of the next step: each sample's of its prompt, its end, or the one that its row of scores gives."""
    words = i64_at(sampler)
    n, step, over = words[J.SAMPLES], words[J.STEPPED], 1
    last, lengths, seeds = i64_at(words[J.TEXT] + 8 * n * step), i64_at(words[J.LENGTHS]), i64_at(words[J.SEEDS])
    words[J.STEPPED] += 1
    for i in range(n):
        k = step + 1 - lengths[i]
        if k >= 0:
            token = words[J.END]
            if k == 0 or last[i] != token:
                share = np.float64(bits(key(seeds[2 * i], seeds[2 * i + 1], 0), k) >> uint64(9)) * 2.0**-53
                token = drawn(words, scores + i * words[J.SCORE_BYTES] * words[J.VOCABULARY], share)
            if token < 0:
                words[J.OVER] = J.STRANGE + i
                return
            last[n + i] = token
        if k + 1 < words[J.TOKENS] and (k < 0 or last[n + i] != words[J.END]):
            over = 0
    words[J.OVER] = over
