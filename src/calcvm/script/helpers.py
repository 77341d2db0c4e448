"""Functions that scripts need besides NumPy's.  A script contains copies of those that it uses.

They need only NumPy, `math` and each other.  Images are stored channels last, (N, *sizes, C), weights of windows
(*window, C, F).  Windows, strides and the like have one number per spatial axis.
"""

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def"
import math

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15


# ---------------------------------------------------------------- elements
def sigmoid(x):
    """1/(1 + exp(-x)), without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def erf(x):
    """The error function, which NumPy lacks."""
    return np.vectorize(math.erf, otypes=[np.float64])(x).astype(np.result_type(x))


def normal_cdf(x):
    """(1 + erf(x/sqrt(2)))/2"""
    return (0.5 * np.vectorize(math.erfc, otypes=[np.float64])(-x * 0.5**0.5)).astype(np.result_type(x))


def to_integer(x, dtype):
    """x truncated towards 0, and clipped to the range of a type; NaN is 0."""
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    whole = np.trunc(np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=2.0**63, neginf=-(2.0**63)))
    inside = np.where((whole > low) & (whole < high), whole, 0).astype(dtype)
    return np.where(whole >= high, high, np.where(whole <= low, low, inside)).astype(dtype)


def strided(x, start, sizes, strides):
    """Elements start + sum_k i_k*strides[k] of an array in order, for all i below the sizes."""
    x = np.ascontiguousarray(x).reshape(-1)[start:]
    if 0 in sizes:
        return np.zeros(sizes, x.dtype)
    return np.lib.stride_tricks.as_strided(x, sizes, [s * x.itemsize for s in strides])


def unstrided(dy, start, sizes, strides, n):
    """n zeros, with dy in the elements that `strided` reads."""
    dx = np.zeros(n, dy.dtype)
    strided(dx, start, sizes, strides)[...] = dy
    return dx


# ---------------------------------------------------------------- along axes
def argsort(x, k, descending):
    """The first k places along axis 1 in order: NaN is the largest, and of equals the first comes first."""
    places = np.argsort(x[:, ::-1] if descending else x, 1, kind="stable")
    return (x.shape[1] - 1 - places[:, ::-1] if descending else places)[:, :k]


def stretched(x, axis, start, stop, beyond):
    """Elements from start to stop of an axis, with ``beyond`` for those outside of it."""
    n = x.shape[axis]
    x = np.moveaxis(x, axis, 0)[max(start, 0) : max(stop, 0)]
    more = [(min(max(-start, 0), stop - start), min(max(stop - n, 0), stop - start))] + [(0, 0)] * (x.ndim - 1)
    return np.moveaxis(np.pad(x, more, constant_values=beyond), 0, axis)


def elements(x, beyond, *places):
    """Elements at places, with ``beyond`` for a place beyond the ends, or not a whole number."""
    places = np.broadcast_arrays(*places)
    inside = np.all([(p % 1 == 0) & (p >= 0) & (p < n) for p, n in zip(places, x.shape)], 0)
    found = x[tuple(np.where(inside, p, 0).astype(int) for p in places)]
    return np.where(inside, found, x.dtype.type(beyond))


def inside(places, n):
    """Places from data, checked to lie inside an axis of n."""
    if not ((places >= 0) & (places < n)).all():
        raise IndexError(f"a place is beyond the ends of an axis of {n}")
    return places


def scan(step, axis, first, backwards, *given):
    """Along an axis, each element is ``step`` of the one before (``first`` at the start) and of elements of ``given``."""
    read = [np.moveaxis(x, axis, 0) for x in np.broadcast_arrays(*given)]
    y = np.empty(read[0].shape, np.result_type(*read))
    before = np.full(y.shape[1:], first, y.dtype)
    for k in reversed(range(len(y))) if backwards else range(len(y)):
        y[k] = before = step(before, *(x[k] for x in read))
    return np.moveaxis(y, 0, axis)


# ---------------------------------------------------------------- sums and softmax
def first_of(x, y, axes):
    """1 at the first element along axes that equals the extremum y, else 0."""
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    lead = [a for a in range(x.ndim) if a not in axes]
    order = lead + list(axes)
    flat = same.transpose(order).reshape([x.shape[a] for a in lead] + [-1])
    first = np.zeros(flat.shape, x.dtype)
    np.put_along_axis(first, flat.argmax(-1)[..., None], 1, -1)
    return first.reshape([x.shape[a] for a in order]).transpose(np.argsort(order))


def logsumexp(x, axis=None, keepdims=False):
    """log(sum(exp(x))) along axes."""
    top = x.max(axis, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    y = top + np.log(np.exp(x - top).sum(axis, keepdims=True))
    return y if keepdims else np.squeeze(y, axis)


def log_softmax(x):
    """log(softmax(x)), over the last axis."""
    z = x - x.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def times(q, x):
    """q*x, but 0 if q is 0, even if x is infinite."""
    return q * np.where(q == 0, 0, x)


def softmax(x):
    """exp(x) normalized to sum 1, over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def index_below(n, labels):
    """Labels as integers, checked to lie in [0, n)."""
    whole = labels.astype(np.int64)
    if not (labels == whole).all() or (whole < 0).any() or (whole >= n).any():
        raise ValueError(f"labels must be integers in [0, {n})")
    return whole


def one_hot(labels, n, dtype=np.float64):
    """(...,) labels as (..., n) numbers, 1 at the label."""
    return np.eye(n, dtype=dtype)[index_below(n, labels)]


# ---------------------------------------------------------------- normalization
def mean_of(x, *axes):
    """Mean over axes, summed in float64."""
    return x.mean(axes, dtype=np.float64).astype(x.dtype)


def sum_of(x, *axes):
    """Sum over axes, summed in float64."""
    return x.sum(axes, dtype=np.float64).astype(x.dtype)


def neighbours(x, before, after):
    """For each channel, on the last axis, the sum from ``before`` to ``after`` it."""
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(before, after)])
    return sum(padded[..., j : j + x.shape[-1]] for j in range(before + after + 1))


# ---------------------------------------------------------------- windows
def padded(x, window, stride, before, dilation, out, value=0):
    """x padded, or cut, to exactly the extent of its windows."""
    pairs, cut = [(0, 0)], [slice(None)]
    for n, k, s, p, d, o in zip(x.shape[1:-1], window, stride, before, dilation, out):
        more = (o - 1) * s + (k - 1) * d + 1 - p - n
        pairs.append((p, max(more, 0)))
        cut.append(slice(0, n + p + max(more, 0) + min(more, 0)))
    return np.pad(x, [*pairs, (0, 0)], constant_values=value)[tuple(cut)]


def at_tap(tap, stride, dilation, out):
    """The index of the elements that one tap of all windows reads in a padded image."""
    return (slice(None), *(slice(t * d, t * d + (o - 1) * s + 1, s) for t, s, d, o in zip(tap, stride, dilation, out)))


def columns(x, window, stride, padding, dilation, out, groups):
    """(groups, places, taps*C): the elements that each window reads, by group of channels."""
    x = padded(x, window, stride, padding, dilation, out)
    n, *steps, last = x.strides
    strides = (n, *(a * s for a, s in zip(steps, stride)), *(a * d for a, d in zip(steps, dilation)), last)
    seen = np.lib.stride_tricks.as_strided(x, (len(x), *out, *window, x.shape[-1]), strides)
    seen = seen.reshape(-1, math.prod(window), groups, x.shape[-1] // groups)
    return seen.transpose(2, 0, 1, 3).reshape(groups, len(seen), -1)


def by_group(y, groups):
    """(groups, places, F): images split into groups of channels."""
    return y.reshape(-1, groups, y.shape[-1] // groups).transpose(1, 0, 2)


def filters(wt, groups):
    """(groups, taps*C, F): weights (*window, C, groups*F) by group."""
    return wt.reshape(-1, groups, wt.shape[-1] // groups).transpose(1, 0, 2)


def conv(x, wt, stride, padding, dilation, groups, out):
    """y[n,o,f] = sum_k,c x[n,o*S+k*L-P,c]*wt[k,c,f]"""
    y = columns(x, wt.shape[:-2], stride, padding, dilation, out, groups) @ filters(wt, groups)
    return y.transpose(1, 0, 2).reshape(len(x), *out, -1)


def conv_weights(x, dy, window, stride, padding, dilation, groups):
    """dwt[k,c,f] = sum_n,o x[n,o*S+k*L-P,c]*dy[n,o,f]"""
    seen = columns(x, window, stride, padding, dilation, dy.shape[1:-1], groups)
    dwt = seen.transpose(0, 2, 1) @ by_group(dy, groups)
    return dwt.transpose(1, 0, 2).reshape(*window, -1, dy.shape[-1])


def conv_back(dy, wt, size, stride, padding, dilation, groups):
    """dx[n,i,c] = sum_k,f dy[n,(i+P-k*L)/S,f]*wt[k,c,f], of spatial sizes ``size``."""
    window = wt.shape[:-2]
    seen = by_group(dy, groups) @ filters(wt, groups).transpose(0, 2, 1)
    seen = seen.reshape(groups, -1, math.prod(window), wt.shape[-2]).transpose(2, 1, 0, 3)
    parts = seen.reshape(len(seen), *dy.shape[:-1], groups * wt.shape[-2])
    return pool_back(parts, size, window, stride, padding, dilation)


def max_pool(x, window, stride, padding, dilation, out):
    """The largest element of each window, and the first tap that has it."""
    seen = padded(np.ones_like(x, bool), window, stride, padding, dilation, out)
    x = padded(x, window, stride, padding, dilation, out, -np.inf)
    y = np.full((len(x), *out, x.shape[-1]), -np.inf, x.dtype)
    index, found = np.zeros(y.shape, np.int32), np.zeros(y.shape, bool)
    for number, tap in enumerate(np.ndindex(*window)):
        at = at_tap(tap, stride, dilation, out)
        part, there = x[at], seen[at]
        better = there & (~found | (part > y) | (np.isnan(part) & ~np.isnan(y)))
        y, index, found = np.where(better, part, y), np.where(better, number, index), found | there
    return y, index


def int8(total, shift, lo):
    """total/2^(shift + 1), rounded, in [lo, 127]."""
    return np.clip((total >> shift) + 1 >> 1, lo, 127).astype(np.int8)


def conv_int8(x, wt, b, scale, lo, stride, padding, dilation, groups, out):
    """y = (sum x*wt + b)*factor/2^(17 + shift); float64 is exact here."""
    total = conv(x.astype(float), np.moveaxis(wt, 0, -1).astype(float), stride, padding, dilation, groups, out)
    return int8((total.astype(int) + b) * (scale & 0x7FFF) >> 16, scale >> 15 & 31, lo)


def max_pool_int8(x, window, stride, padding, dilation, out):
    """The largest element of each window."""
    return max_pool(x.astype(float), window, stride, padding, dilation, out)[0].astype(np.int8)


def add_int8(a, b, factor_a, factor_b, shift, lo):
    """y = (a*factor_a + b*factor_b)/2^(shift + 1)"""
    return int8(a.astype(int) * factor_a + b.astype(int) * factor_b, shift, lo)


def max_pool_back(dy, index, size, window, stride, padding, dilation):
    """dy at the largest element of each window."""
    return pool_back(
        [np.where(index == t, dy, 0) for t in range(math.prod(window))], size, window, stride, padding, dilation
    )


def sum_pool(x, window, stride, padding, out):
    """The sum of each window."""
    once = (1,) * len(window)
    x = padded(x, window, stride, padding, once, out)
    return sum(x[at_tap(tap, stride, once, out)] for tap in np.ndindex(*window))


def sum_pool_back(dy, size, window, stride, padding):
    """For each element, the sum of dy over the windows that contain it."""
    return pool_back([dy] * math.prod(window), size, window, stride, padding, (1,) * len(window))


def pool_back(parts, size, window, stride, padding, dilation):
    """Add the part of each tap of the windows into an image."""
    out = parts[0].shape[1:-1]
    spans = zip(size, out, window, stride, padding, dilation)
    shape = [max(n + p, (o - 1) * s + (k - 1) * d + 1) for n, o, k, s, p, d in spans]
    dx = np.zeros((len(parts[0]), *shape, parts[0].shape[-1]), parts[0].dtype)
    for tap, part in zip(np.ndindex(*window), parts):
        dx[at_tap(tap, stride, dilation, out)] += part
    cut = (slice(None), *(slice(p, p + n) for p, n in zip(padding, size)))
    return dx[cut]


def counts(size, window, stride, padding, after, out, dtype=np.float64):
    """(*out, 1): the number of counted elements per window, from -padding to size + after along each axis."""
    total = np.ones((), dtype)
    for n, k, s, p, q, o in zip(size, window, stride, padding, after, out):
        start = np.arange(o) * s - p
        first = np.maximum(start, 0) if q < 0 else start  # q = -1: padding is not counted
        total = total[..., None] * (np.minimum(start + k, n + max(q, 0)) - first).astype(dtype)
    return total[..., None]


def adaptive(n, out):
    """Windows from floor(o*n/out) to ceil((o + 1)*n/out)."""
    return [(o * n // out, -(-(o + 1) * n // out)) for o in range(out)]


def adaptive_windows(size, out):
    """For each place of the output, its index and the index of its window."""
    ends = [adaptive(n, o) for n, o in zip(size, out)]
    for place in np.ndindex(*out):
        at = tuple(slice(*axis[o]) for axis, o in zip(ends, place))
        yield (slice(None), *place), (slice(None), *at)


def adaptive_mean(x, out):
    """The mean of each adaptive window."""
    y = np.zeros((len(x), *out, x.shape[-1]), x.dtype)
    for place, at in adaptive_windows(x.shape[1:-1], out):
        y[place] = x[at].mean(tuple(range(1, x.ndim - 1)))
    return y


def adaptive_mean_back(dy, size):
    dx = np.zeros((len(dy), *size, dy.shape[-1]), dy.dtype)
    for place, at in adaptive_windows(size, dy.shape[1:-1]):
        dx[at] += (dy[place] / math.prod(s.stop - s.start for s in at[1:])).reshape(len(dy), *[1] * len(size), -1)
    return dx


def adaptive_max(x, out):
    """The largest element of each adaptive window, and the first tap that has it, numbered in a window of the largest size."""
    size = x.shape[1:-1]
    room = [n // o if n >= o and n % o == 0 else n // o + 2 for n, o in zip(size, out)]
    y = np.zeros((len(x), *out, x.shape[-1]), x.dtype)
    index = np.zeros(y.shape, np.int32)
    for place, at in adaptive_windows(size, out):
        window = x[at].reshape(len(x), -1, x.shape[-1])
        best = np.where(np.isnan(window), np.inf, window).argmax(1)
        y[place] = np.take_along_axis(window, best[:, None], 1)[:, 0]
        taps = np.unravel_index(best, [s.stop - s.start for s in at[1:]])
        index[place] = np.ravel_multi_index(taps, room)
    return y, index


def adaptive_max_back(dy, index, size):
    out = dy.shape[1:-1]
    room = [n // o if n >= o and n % o == 0 else n // o + 2 for n, o in zip(size, out)]
    dx = np.zeros((len(dy), *size, dy.shape[-1]), dy.dtype)
    for place, at in adaptive_windows(size, out):
        taps = np.unravel_index(index[place], room)
        where = [s.start + t for s, t in zip(at[1:], taps)]
        np.add.at(dx, (np.arange(len(dy))[:, None], *where, np.arange(dy.shape[-1])[None]), dy[place])
    return dx


# ---------------------------------------------------------------- padding, scaling
def pad_back(dy, pads, mode):
    """Add each dy to the element that `np.pad` copied."""
    for axis, (p, q) in enumerate(pads):
        if p + q:
            n = dy.shape[axis] - p - q
            if mode == "constant":
                dy = dy.take(range(p, p + n), axis)
                continue
            dx = np.zeros((n, *np.moveaxis(dy, axis, 0).shape[1:]), dy.dtype)
            np.add.at(dx, np.pad(np.arange(n), (p, q), mode), np.moveaxis(dy, axis, 0))
            dy = np.moveaxis(dx, 0, axis)
    return dy


def weights_of_scaling(n, to, step, linear, align, dtype):
    """(to, n): the weight of each element of an axis in each element of the scaled axis."""
    o = np.arange(to)
    if not linear:
        place = np.float32(o.astype(dtype) * dtype(step))
    else:
        place = (
            o.astype(dtype) * dtype(step)
            if align
            else np.maximum((o.astype(dtype) + dtype(0.5)) * dtype(step) - dtype(0.5), 0)
        )
    below = np.minimum(place.astype(np.int64), n - 1)
    t = np.where(below < n - 1, place - below, 0).astype(dtype) if linear else np.zeros(to, dtype)
    weights = np.zeros((to, n), dtype)
    weights[o, below] = 1 - t
    weights[o, np.minimum(below + 1, n - 1)] += t
    return weights


def scaled(x, sizes, steps, linear, align, back=False):
    """x with its spatial axes scaled to sizes; ``back``: the gradient, from dy back to sizes."""
    for axis, (n, step) in enumerate(zip(sizes, steps), 1):
        ends = (n, x.shape[axis]) if back else (x.shape[axis], n)
        weights = weights_of_scaling(*ends, step, linear, align, x.dtype.type)
        x = np.moveaxis(np.tensordot(weights.T if back else weights, x, (1, axis)), 0, axis)
    return x


# ---------------------------------------------------------------- recurrent cells
def numbers(x, n):
    """Arrays (..., n) of the numbers that each of n units has side by side."""
    return [] if x is None else [x[..., k : k + n] for k in range(0, x.shape[-1], n)]


def beside(like, values):
    """The inverse, in the shape of an array for each number."""
    return np.concatenate([like[:, :0], *(np.broadcast_to(v, like.shape) for v in values)], 1)


def cell_step(cell, z, h, c, of_h):
    """The new h and c, and what the gradient reads; z are the sums of the inputs, of_h those of the state."""
    n = h.shape[1]
    if not isinstance(cell, str):
        step, apart, p = cell
        zs, of_hs = numbers(z, n), numbers(of_h, n)
        sums = [a + b if k < len(zs) - apart else a for k, (a, b) in enumerate(zip(zs, of_hs))]
        kept, (h_after, *c_after) = step(sums, of_hs[len(zs) - apart :], [h, *numbers(c, n)], numbers(p, n))
        return beside(h, [h_after]), beside(h, c_after), beside(h, kept), of_h[:, z.shape[1] - apart * n :]
    if cell == "gru":
        r, u = np.split(sigmoid(z[:, : 2 * n] + of_h[:, : 2 * n]), 2, 1)
        g = np.tanh(z[:, 2 * n :] + r * of_h[:, 2 * n :])
        return g + u * (h - g), c, np.concatenate([r, u, g], 1), of_h[:, 2 * n :]
    z = z + of_h
    if cell == "lstm":
        i, f, o = (sigmoid(z[:, k * n : (k + 1) * n]) for k in (0, 1, 3))
        g = np.tanh(z[:, 2 * n : 3 * n])
        c = f * c + i * g
        return o * np.tanh(c), c, np.concatenate([i, f, g, o], 1), None
    return np.tanh(z) if cell == "rnn" else np.maximum(z, 0), c, None, None


def cell_back(cell, gates, more, h, c, h_after, c_after, dh, dc):
    """The gradients of the sums, of what is added to none of them, of h beside the products, of c, and of parameters of units."""
    if not isinstance(cell, str):
        back, _, p = cell
        n = dh.shape[1]
        before, after, d = ([x, *numbers(y, n)] for x, y in ((h, c), (h_after, c_after), (dh, dc)))
        dz, dmore, dh_, dc_, dp = back(numbers(gates, n), numbers(more, n), before, numbers(p, n), after, d)
        return beside(dh, dz), beside(dh, dmore), beside(dh, dh_), beside(dh, dc_), beside(dh, dp)
    if cell == "gru":
        r, u, g = np.split(gates, 3, 1)
        dg = dh * (1 - u) * (1 - g * g)
        return np.concatenate([dg * more * r * (1 - r), dh * (h - g) * u * (1 - u), dg], 1), dg * r, dh * u, dc, None
    if cell == "lstm":
        (i, f, g, o), t = np.split(gates, 4, 1), np.tanh(c_after)
        e = dh * o * (1 - t * t) + dc
        slopes = e * g * i * (1 - i), e * c * f * (1 - f), e * i * (1 - g * g), dh * t * o * (1 - o)
        return np.concatenate(slopes, 1), None, 0 * dh, e * f, None
    return dh * (1 - h_after * h_after) if cell == "rnn" else np.where(h_after <= 0, 0, dh), None, 0 * dh, dc, None


def running(T, lengths, n, s, reverse):
    """The samples that have a step s, and the place of the step in each."""
    lengths = np.full(n, T) if lengths is None else lengths.astype(np.int64)
    rows = np.flatnonzero(lengths > s)
    return rows, lengths[rows] - 1 - s if reverse else np.full(len(rows), s)


def recurrent(cell, z, x, wi, bi, wh, b, h0, c0, lengths, reverse, others=1, kept=None, apart=1):
    """All steps of a cell: y, the last h and c, and what the gradient reads: gates, more, c.

    others, kept, apart : how many numbers of a unit c, gates, more have.
    """
    if z is None:
        z = x @ wi if bi is None else x @ wi + bi
    n, T, size = z.shape[0], z.shape[1], wh.shape[0]
    h, c = (np.zeros((n, k * size), z.dtype) if s is None else s.copy() for s, k in ((h0, 1), (c0, others)))
    widths = size, others * size, z.shape[2] if kept is None else kept * size, apart * size
    y, cs, gates, more = (np.zeros((n, T, width), z.dtype) for width in widths)
    for s in range(T):
        rows, t = running(T, lengths, n, s, reverse)
        of_h = h[rows] @ wh if b is None else h[rows] @ wh + b
        h[rows], c[rows], to_gates, to_more = cell_step(cell, z[rows, t], h[rows], c[rows], of_h)
        y[rows, t], cs[rows, t] = h[rows], c[rows]
        if to_gates is not None:
            gates[rows, t] = to_gates
        if to_more is not None:
            more[rows, t] = to_more
    return y, h, c, gates, more, cs


def before_steps(y, h0, rows, t, s, reverse):
    """A state before step s."""
    if s:
        return y[rows, t + 1 if reverse else t - 1]
    return np.zeros((len(rows), y.shape[2]), y.dtype) if h0 is None else h0[rows]


def recurrent_back(
    cell, n, T, wh, h0, c0, lengths, y, gates, more, c, dy, dhn, dcn, reverse, others=1, apart=1, of_units=0
):
    """The gradients of z, of what is added to none of the sums, of h0, of c0, and of parameters of units at each step.

    others, apart, of_units : how many numbers of a unit c, more have; how many parameters.
    """
    size = wh.shape[0]
    y, c = (np.zeros((n, T, k * size), wh.dtype) if s is None else s for s, k in ((y, 1), (c, others)))
    dz, dmore, dp = (np.zeros((n, T, width), wh.dtype) for width in (wh.shape[1], apart * size, of_units * size))
    dh, dc = (np.zeros((n, k * size), wh.dtype) if d is None else d.copy() for d, k in ((dhn, 1), (dcn, others)))
    for s in range(T - 1, -1, -1):
        rows, t = running(T, lengths, n, s, reverse)
        d = dh[rows] if dy is None else dh[rows] + dy[rows, t]
        h_before, c_before = before_steps(y, h0, rows, t, s, reverse), before_steps(c, c0, rows, t, s, reverse)
        kept, of_apart = None if gates is None else gates[rows, t], None if more is None else more[rows, t]
        found = cell_back(cell, kept, of_apart, h_before, c_before, y[rows, t], c[rows, t], d, dc[rows])
        dz[rows, t], of_more, direct, dc[rows], of_p = found
        of_h = dz[rows, t].copy()
        if of_more is not None:
            dmore[rows, t] = of_h[:, of_h.shape[1] - apart * size :] = of_more
        if of_p is not None:
            dp[rows, t] = of_p
        dh[rows] = direct + of_h @ wh.T
    return dz, dmore, dh, dc, dp


def recurrent_weights(y, h0, lengths, dz, dmore, reverse):
    """The gradients of the state's weights and of their bias."""
    (n, T, size), of_h = y.shape, dz.copy()
    if dmore is not None:
        of_h[..., -dmore.shape[2] :] = dmore
    before = np.zeros_like(y)
    for s in range(T):
        rows, t = running(T, lengths, n, s, reverse)
        before[rows, t] = before_steps(y, h0, rows, t, s, reverse)
    return before.reshape(-1, size).T @ of_h.reshape(n * T, -1), of_h.sum((0, 1))


# ---------------------------------------------------------------- attention
def scores(q, k, scale, causal=False, window=None, softcap=None, lengths=None, bias=None):
    """Scores of queries (N, T, G, R, D) and keys (N, S, G, D), -inf for keys that are not seen, and the slope of the cap."""
    z, slope = np.einsum("nigrc,njgc->ngrij", q, k) * scale, 1
    if softcap is not None:
        bent = np.tanh(z / softcap)
        z, slope = softcap * bent, 1 - bent**2
    if bias is not None:
        z = z + bias
    t, s = z.shape[-2:]
    i, j = np.arange(t)[:, None], np.arange(s)
    seen = j < (s if lengths is None else lengths.reshape(-1, 1, 1, 1, 1))
    if causal:
        seen = seen & (j <= i) & (i - j < (window or t))
    return np.where(seen, z, -np.inf), slope


def attention(q, k, v, **how):
    """Values weighed by exp of their scores, heads side by side, and the log of the weights' sum; 0 where no key is seen."""
    z, _ = scores(q, k, **how)
    top = z.max(-1, keepdims=True)
    top = np.where(top > -np.inf, top, 0)
    p = np.exp(z - top)
    total = p.sum(-1, keepdims=True)
    total = np.where(total > 0, total, 1)
    y = np.einsum("ngrij,njgc->nigrc", p / total, v)
    return y.reshape(*y.shape[:2], -1), top + np.log(total)


def attention_back(q, k, v, y, lse, dy, scale, **how):
    """The gradients of q, k and v, heads side by side."""
    z, slope = scores(q, k, scale, **how)
    p = np.exp(z - lse[..., None])
    own = np.einsum("nigrc,nigrc->ngri", dy, y)[..., None]
    s = p * (np.einsum("nigrc,njgc->ngrij", dy, v) - own) * scale * slope
    found = (
        np.einsum("ngrij,njgc->nigrc", s, k),
        np.einsum("ngrij,nigrc->njgc", s, q),
        np.einsum("ngrij,nigrc->njgc", p, dy),
    )
    return [d.reshape(*d.shape[:2], -1) for d in found]


# ---------------------------------------------------------------- random numbers
def mix(z):
    """SplitMix64's finalizer, in wrapping 64-bit integers."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def random_bits(rng, stream, n):
    """62 random bits for each of n elements: a hash of seed, counter, stream and index."""
    seed, counter = rng.astype(np.int64).view(np.uint64)[:, None]
    golden, stream = np.uint64(GOLDEN), np.array([stream], np.uint64)
    key = mix(mix(mix(seed * golden + np.uint64(1)) + counter * golden) + stream * golden)
    return mix(key + np.arange(n, dtype=np.uint64) * golden) >> np.uint64(2)


def dropout_mask(rng, rate, stream, shape, dtype=np.float64):
    """1/(1 - rate) for elements that stay, else 0; the same on every call within a step."""
    p = min(max(float(rate.reshape(())), 0.0), 1.0)
    keep = random_bits(rng, stream, math.prod(shape)).reshape(shape) >= np.uint64(int(p * 2.0**62))
    return np.where(keep, dtype(1 / (1 - p)) if p < 1 else dtype(0), dtype(0))


def crop(x, rng, stream, sizes, pads, flips, mode):
    """(N, A, *sizes, C): a random crop of each image, mirrored at random; without rng the center crop."""
    x = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in pads), (0, 0)], mode)
    drawn = None if rng is None else random_bits(rng, stream, 6 * len(x)).astype(np.int64).reshape(-1, 6)
    y = np.empty((*x.shape[:2], *sizes, x.shape[-1]), x.dtype)
    for k, image in enumerate(x):
        for axis, (e, rate) in enumerate(zip(sizes, flips)):
            room = image.shape[1 + axis] - e
            start = room // 2 if drawn is None else drawn[k, axis] % (room + 1)
            image = image.take(range(start, start + e), 1 + axis)
            if drawn is not None and drawn[k, 3 + axis] < int(rate * 2.0**62):
                image = np.flip(image, 1 + axis)
        y[k] = image
    return y
