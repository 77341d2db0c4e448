"""Float64 definitions of the reductions."""

import numpy as np


def sum(x, axes=None, keepdims=False):  # noqa: A001
    return np.sum(x, axis=axes, keepdims=keepdims)


def sum_squares(x, axes=None, keepdims=False):
    return np.sum(x**2, axis=axes, keepdims=keepdims)


def mean(x, axes=None, keepdims=False):
    return np.mean(x, axis=axes, keepdims=keepdims)


def max(x, axes=None, keepdims=False):  # noqa: A001
    return np.max(x, axis=axes, keepdims=keepdims)


def min(x, axes=None, keepdims=False):  # noqa: A001
    return np.min(x, axis=axes, keepdims=keepdims)


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def log_softmax(x, axis=-1):
    z = x - x.max(axis, keepdims=True)
    return z - np.log(np.exp(z).sum(axis, keepdims=True))


def cumsum(x, axis=-1):
    return np.cumsum(x, axis)


def reverse_cumsum(x, axis=-1):
    return np.flip(np.cumsum(np.flip(x, axis), axis), axis)


def argsort(x, axis=-1, k=None, descending=False):
    back = np.flip(x, axis) if descending else x  # NaN comes last, and of equals the first comes first
    places = np.argsort(np.asarray(back), axis, kind="stable")
    places = np.flip(x.shape[axis] - 1 - places, axis) if descending else places
    return np.take(places, range(k or x.shape[axis]), axis)
