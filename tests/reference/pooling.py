"""Float64 definitions of pooling, a window after the other; images are channels last."""

import itertools

import numpy as np


def _windows(x, kernel, stride, padding, dilation, ceil_mode):
    """Sizes of the output; of each place in it the elements (N, taps, C) of x, taps by their numbers, and counted ones."""
    rank, sizes = len(kernel), x.shape[1:-1]
    stride = stride or kernel
    padding, dilation = padding or (0,) * 2 * rank, dilation or (1,) * rank
    before, after = padding[:rank], padding[rank:]
    out = []
    for size, k, s, p, q, d in zip(sizes, kernel, stride, before, after, dilation):
        room = size + p + q - (k - 1) * d - 1
        n = (-(-room // s) if ceil_mode else room // s) + 1
        out.append(n - 1 if (n - 1) * s >= size + p else n)
    found = {}
    for place in itertools.product(*map(range, out)):
        taps, counted = [], 0
        for number, tap in enumerate(itertools.product(*map(range, kernel))):
            at = [o * s - p + t * d for o, s, p, t, d in zip(place, stride, before, tap, dilation)]
            counted += all(i < size + q for i, size, q in zip(at, sizes, after))
            if all(0 <= i < size for i, size in zip(at, sizes)):
                taps.append((number, x[(slice(None), *at)]))
        found[place] = taps, counted
    return out, found


def _pooled(x, out, values):
    y = np.zeros((len(x), *out, x.shape[-1]))
    for place, value in values.items():
        y[(slice(None), *place)] = value
    return y


def max_pool(x, kernel, stride=None, padding=None, dilation=None, ceil_mode=False):
    out, found = _windows(x, kernel, stride, padding, dilation, ceil_mode)
    y, index = {}, {}
    for place, (taps, _) in found.items():
        numbers, values = np.array([t for t, _ in taps]), np.stack([v for _, v in taps])
        y[place] = values.max(0)
        index[place] = numbers[np.argmax(values, 0)]
    return {"y": _pooled(x, out, y), "index": _pooled(x, out, index)}


def avg_pool(x, kernel, stride=None, padding=None, ceil_mode=False, count_include_pad=True):
    out, found = _windows(x, kernel, stride, padding, None, ceil_mode)
    y = {
        place: sum(v for _, v in taps) / (counted if count_include_pad else len(taps))
        for place, (taps, counted) in found.items()
    }
    return _pooled(x, out, y)


def lp_pool(x, kernel, p=2.0, stride=None, ceil_mode=False):
    out, found = _windows(x, kernel, stride, None, None, ceil_mode)
    y = {
        place: (sum(v**p for _, v in taps) * np.prod(kernel) / len(taps)) ** (1 / p)
        for place, (taps, _) in found.items()
    }
    return _pooled(x, out, y)


def _adapted(x, sizes, pool):
    y = np.zeros((len(x), *sizes, x.shape[-1]))
    for place in itertools.product(*map(range, sizes)):
        ends = [(o * n // m, -(-(o + 1) * n // m)) for o, n, m in zip(place, x.shape[1:-1], sizes)]
        window = x[(slice(None), *(slice(*end) for end in ends))]
        y[(slice(None), *place)] = pool(window, axis=tuple(range(1, x.ndim - 1)))
    return y


def adaptive_avg_pool(x, sizes):
    return _adapted(x, sizes, np.mean)


def adaptive_max_pool(x, sizes):
    return _adapted(x, sizes, np.max)


def global_avg_pool(x):
    return np.mean(x, tuple(range(1, x.ndim - 1)), keepdims=True)


def global_max_pool(x):
    return np.max(x, tuple(range(1, x.ndim - 1)), keepdims=True)
