"""Fourier transforms, as products with known matrices, and counts of sequences of words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np

from calcvm import functions as F
from calcvm import images
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.building import Building, Cannot, Filled, arranged, variable, whole
from calcvm.frontends.onnx.declared import floats, is_known, number, onnx, place_of
from calcvm.graph import Variable
from calcvm.indexed import equation
from calcvm.ops.dims import ONE


# ---------------------------------------------------------------- Fourier transforms
def _transform(n: int, length: int, inverse: bool, onesided: bool) -> np.ndarray:
    """The matrix (n, parts, bins, parts) of a transform of ``length`` elements, of which n are given; parts: real, imaginary."""
    bins = length // 2 + 1
    turns = np.outer(np.arange(n), np.arange(length)) % length / length
    w = np.round(np.exp((2j if inverse else -2j) * np.pi * turns), 15) / (length if inverse else 1)
    w[(bins if inverse and onesided else length) :] = 0
    if onesided and inverse:  # a bin that is not given is the conjugate of one that is
        w[1 : (length + 1) // 2] *= 2
    elif onesided:
        w = w[:, :bins]
    return np.array([[w.real, w.imag], [-w.imag, w.real]]).transpose(2, 0, 3, 1)


@onnx("DFT")
def dft(
    b: Building, x: Arranged, dft_length: Any = None, axis: Any = None, *, inverse: int = 0, onesided: int = 0
) -> Arranged:
    real = bool(inverse and onesided)
    along = place_of(-2 if axis is None else int(number(axis, "the axis")), x.rank)
    order = [*(k for k in range(x.rank - 1) if k != along), along, x.rank - 1]
    turned = x.permuted(order)
    *lead, n, parts = turned.shape
    length = 2 * (whole(n) - 1) if real else whole(n)
    length = length if dft_length is None else whole(number(dft_length, "the length of the transform"))
    matrix = _transform(whole(n), length, bool(inverse), bool(onesided))[:, : whole(parts), :, : 1 if real else 2]
    w = b.constant(matrix.reshape(whole(n * parts), -1))
    y = turned.reshaped([*(lead or [ONE]), n * parts]).rows(lambda v: F.matmul(v, w))
    return y.reshaped([*lead, *matrix.shape[2:]]).permuted([order.index(k) for k in range(x.rank)])


@onnx("STFT")
def stft(
    b: Building, signal: Any, frame_step: Any, window: Any = None, frame_length: Any = None, *, onesided: int = 1
) -> Arranged:
    x = arranged(b, signal)
    x = x if x.rank == 3 else x.reshaped([*x.shape, 1])
    length = x.shape[1] if window is None else window.shape[0]
    length = whole(length if frame_length is None else number(frame_length, "the length of frames"))
    matrix = _transform(length, length, False, bool(onesided))[:, : whole(x.shape[2])]
    kernels = matrix.transpose(2, 3, 1, 0).reshape(-1, matrix.shape[1], length)
    w = kernels if window is None else kernels * window if is_known(window) else floats(b, window) * kernels
    step = whole(number(frame_step, "the step between frames"))
    y = Arranged.of(images.conv1d(floats(b, x.swapped(1, 2)), variable(b, w), stride=step)).swapped(1, 2)
    return y.reshaped([*y.shape[:2], matrix.shape[2], 2])


# ---------------------------------------------------------------- sequences of words
def _found(x: Variable, words: np.ndarray, distance: int) -> Variable:
    """How often sequences of words (sequences, length) occur in each row of x, with their words so far apart."""
    same = " and ".join(f"x[n, i + {k * distance}] == w[g,{k}]" for k in range(words.shape[1]))
    starts = whole(x.shape[1]) - (words.shape[1] - 1) * distance
    return equation(f"y[n,g] = sum[i<{starts}] where({same}, 1, 0)", fused=True, x=x, w=words)


@onnx("TfIdfVectorizer")
def tf_idf(
    b: Building, x: Arranged, *, max_gram_length: int, max_skip_count: int, min_gram_length: int, mode: str,
    ngram_counts: Sequence[int], ngram_indexes: Sequence[int], pool_int64s: Sequence[int] = (), pool_strings: Any = None,
    weights: Sequence[float] | None = None,
) -> Any:  # fmt: skip
    if mode == "IDF" and len({*ngram_indexes}) < len(ngram_indexes):
        raise Cannot("two of its sequences have one place in the result, and are not counted")
    rows = x if x.rank == 2 else x.reshaped([1, -1])
    (n, steps), made = rows.shape, max(ngram_indexes) + 1
    counts: list[Variable] = []
    numbers: list[int] = []
    first = 0
    for length, (start, stop) in enumerate(pairwise([*ngram_counts, len(pool_int64s)]), 1):
        words = np.reshape(pool_int64s[start:stop], (-1, length))
        own, first = range(first, first + len(words)), first + len(words)
        apart = range(1, 2 + (max_skip_count if length > 1 else 0))
        fits = [d for d in apart if min_gram_length <= length <= max_gram_length and (length - 1) * d < whole(steps)]
        if own and fits:
            counts.append(reduce(F.add, [_found(rows.variable(), words, d) for d in fits]))
            numbers += own
    shape: list[Any] = [*x.shape[:-1], made]
    if not counts:
        return np.zeros([whole(m) for m in shape], np.float32) if n.constant else Filled(0.0, shape)
    y = counts[0] if len(counts) == 1 else F.concat(counts, 1)
    y = F.minimum(y, 1.0) if mode == "IDF" else y
    y = y * np.array([weights[g] for g in numbers]) if weights and mode != "TF" else y
    places = np.array([ngram_indexes[g] for g in numbers])
    y = equation("y[n,o<O] = sum[g] where(o == k[g], v[n,g], 0)", v=y, k=places, O=made)
    return Arranged.of(y).reshaped(shape)
