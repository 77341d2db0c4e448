"""Statistics of a batch (totals of means are float64), and normalization, which sums differences from an element."""

from __future__ import annotations

import math

from calcvm.kernel import words
from calcvm.kernels_cuda._common import Float, Ptr, given, kernel, kernel_as, share
from calcvm.kernels_cuda._cuda import as_f64, at, device, like, shared, sync, thread, threads
from calcvm.kernels_cuda._epilogues import by_column, completed
from calcvm.kernels_cuda._math import exp, fabs, fma, log, power, sqrt
from calcvm.kernels_cuda._reduce import (
    add,
    divide,
    each,
    element,
    group_before,
    group_in,
    lane_in,
    lanes_of,
    reduce,
)
from calcvm.kernels_cuda.reduction import sum_of
from calcvm.kernels_shared.normalization import chunking, register_channels, register_groups, register_vectors


@device
def _put(to, q, c, total):
    mean, factor = to
    mean[q + c] = like(mean, total) * factor


@device
def _put_running(to, q, c, total):
    mean, factor, running, momentum = to
    m = like(mean, total) * factor
    mean[q + c] = m
    running[q + c] += momentum * (m - running[q + c])


@device
def _means(me, rows, cols, x, put, to):
    """``put`` the sum of each column; columns are shared."""
    q, hi = share(me, cols)
    totals = as_f64(shared(x))
    while q < hi:
        q += reduce(element, add, like(x, 0), like(totals, 0), x, totals, put, to, q, hi, rows, cols)


@kernel
def center_mean(me, rows, cols, momentum: Float, x: Ptr, t_m: Ptr, running: Ptr):
    """m = the mean of x over rows; running += momentum*(m - running); cols are shared."""
    _means(me, rows, cols, x, _put_running, (t_m, like(x, 1) / like(x, rows), running, like(x, momentum)))


@kernel
def center_mean_bwd(me, rows, cols, dy: Ptr, t_d: Ptr):
    """d = the mean of dy over rows; cols are shared."""
    _means(me, rows, cols, dy, _put, (t_d, like(dy, 1) / like(dy, rows)))


@kernel_as("center_fwd", words("rows cols", "", ("x", "t_m", "y")))
@kernel_as("center_bwd", words("rows cols", "", ("dy", "t_d", "dx")))
def _center(me, rows, cols, x, m, y):
    """y = x - m; rows are shared; y may be x."""
    lo, hi = share(me, rows)
    i, stop = lo * cols + thread(), hi * cols
    while i < stop:
        y[i] = x[i] - m[i - divide(i, cols) * cols]
        i += threads()


# ---------------------------------------------------------------- shared code
CHUNKS = 256  # as in ops.normalization
chunk_of, chunks_of, most_chunks = chunking(device, CHUNKS, 32)
COLUMNS = 32  # columns of a chunk that a worker takes at once


@device
def sums(term, args, put, to, x, q, stop, R, I):
    """``put(to, q, 0, t)`` for outputs q to ``stop``, t the sum of its terms; then all threads see the results."""
    zero = like(x, 0)
    while q < stop:
        q += reduce(term, add, zero, zero, args, shared(x), put, to, q, stop, R, I)
    sync()


@device
def rsqrt(var, eps):
    return like(var, 1) / sqrt(var + like(var, eps))


@device
def in_range(inv):
    """Whether no square behind 1/sqrt(var + eps) has left the range of numbers; false for NaN."""
    return inv > like(inv, 0) and inv < like(inv, 1e15)


@device
def deviation(rows, stride, cols, x, centered, eps):
    """Mean (0 if not ``centered``), variance and 1/sqrt(var + eps) of x (rows, cols) of any magnitude: x is scaled by its largest.

    One thread computes it serially, because such large squares are rare.
    """
    zero, n = like(x, 0), like(x, rows * cols)
    top, mean, squares = zero, zero, zero
    k = 0
    while k < rows * cols:
        v = fabs(x[divide(k, cols) * stride + k - divide(k, cols) * cols])
        top = v if v > top else top
        k += 1
    unit = top if top > zero else like(x, 1)
    k = 0
    while k < rows * cols and centered:
        mean += x[divide(k, cols) * stride + k - divide(k, cols) * cols] / unit / n
        k += 1
    k = 0
    while k < rows * cols:
        d = x[divide(k, cols) * stride + k - divide(k, cols) * cols] / unit - mean
        squares += d * d / n
        k += 1
    inv = like(x, 1) / (sqrt(squares + like(x, eps) / unit / unit) * unit)
    return mean * unit, squares * unit * unit, inv


@device
def or_one(me, scale, c, x):
    return scale[c] if given(me, scale) else like(x, 1)


@device
def normalised(me, x, m, a, scale, shift, c):
    """(x - m)*a*scale + shift."""
    return by_column(me, x, m, a * or_one(me, scale, c, x), shift, c)


# ---------------------------------------------------------------- of channels, over all samples and places
@device
def _off_first(args, q, k):
    return args[k] - args[q]


@device
def _square_off(args, q, k):
    x, means = args
    d = (x[k] - x[q]) - means[q]
    return d * d


@device
def _put_part(to, q, c, total):
    out, factor = to
    out[q + c] = total * factor


@device
def _off_dy(args, q, k):
    dy, x, mean = args
    return dy[k] * (x[k] - mean[q])


@device
def _chunk_means(R, chunk, args, q, k):
    """The rows of the chunk of element k of (chunks, N), and its mean less the column's first element."""
    x, ws, N = args
    p = divide(k, N)
    return (
        like(x, min(chunk, R - p * chunk)),
        (x[p * chunk * N + q] - x[q]) + ws[2 * p * N + q],
        ws[(2 * p + 1) * N + q],
    )


@device
def _mean_term(args, q, k):
    R, chunk, parts = args
    count, mean, _ = _chunk_means(R, chunk, parts, q, k)
    return count * mean


@device
def _squares_term(args, q, k):
    R, chunk, parts, mu = args
    count, mean, squares = _chunk_means(R, chunk, parts, q, k)
    return fma(count * (mean - mu[q]), mean - mu[q], squares)


@device
def _put_mean(to, q, c, total):
    x, R, mean, inv = to
    inv[q + c] = total / like(x, R)  # until the variance is known
    mean[q + c] = x[q + c] + inv[q + c]


@device
def _put_inv(to, q, c, total):
    x, R, N, eps, momentum, mean, inv, running_mean, running_var = to
    a = rsqrt(total / like(mean, R), eps)
    if not in_range(a):
        mean[q + c], var, a = deviation(R, N, 1, at(x, q + c), True, eps)
        total = var * like(mean, R)
    inv[q + c] = a
    by = like(mean, momentum)
    running_mean[q + c] = fma(by, mean[q + c] - running_mean[q + c], running_mean[q + c])
    if R > 1:
        var = total / like(mean, R - 1)
        running_var[q + c] = fma(by, var - running_var[q + c], running_var[q + c])


@kernel
def batch_norm_stats(
    me, phases, rows, inner, N, eps: Float, momentum: Float, wn,
    x: Ptr, mean: Ptr, inv: Ptr, running_mean: Ptr, running_var: Ptr, ws: Ptr,
):  # fmt: skip
    """Mean, 1/sqrt(var + eps) and running statistics of channels.  Chunks of rows are shared, channels in the second phase."""
    R = rows * inner
    chunk, chunks, wide = chunk_of(R), chunks_of(R), (N + COLUMNS - 1) // COLUMNS
    if me.phase == 0:
        u = me.worker
        while u < chunks * wide:
            p = divide(u, wide)
            c, part = (u - p * wide) * COLUMNS, at(ws, 2 * p * N)
            xp, n, stop = at(x, p * chunk * N), min(chunk, R - p * chunk), min(c + COLUMNS, N)
            sums(_off_first, xp, _put_part, (part, like(x, 1) / like(x, n)), x, c, stop, n, N)
            sums(_square_off, (xp, part), _put_part, (at(part, N), like(x, 1)), x, c, stop, n, N)
            u += me.workers
    else:
        lo, hi = share(me, N)
        if R > 0:
            parts = (x, ws, N)
            sums(_mean_term, (R, chunk, parts), _put_mean, (x, R, mean, inv), x, lo, hi, chunks, N)
            to = (x, R, N, eps, momentum, mean, inv, running_mean, running_var)
            sums(_squares_term, (R, chunk, parts, inv), _put_inv, to, x, lo, hi, chunks, N)
        else:
            c = lo + thread()
            while c < hi:
                mean[c] = like(x, 0)
                inv[c] = like(x, 0)
                c += threads()


@kernel
def batch_norm_fwd(
    me, rows, inner, N, act, alpha: Float, x: Ptr, scale: Ptr, shift: Ptr, mean: Ptr, inv: Ptr, y: Ptr, other: Ptr
):
    """y = act((x - mean)*inv*scale + shift + other).  Rows are shared; in place."""
    lo, hi = share(me, rows)
    e, stop = lo * inner * N + thread(), hi * inner * N
    while e < stop:
        c = e - divide(e, N) * N
        y[e] = completed(me, normalised(me, x[e], mean[c], inv[c], scale, shift, c), e, act, alpha, other)
        e += threads()


@device
def _partial_products(me, R, N, dy, x, mean, ws):
    """Sums of dy*(x - mean) and dy over each chunk of rows; chunks are shared."""
    chunk, wide = chunk_of(R), (N + COLUMNS - 1) // COLUMNS
    u, to = me.worker, like(x, 1)
    while u < chunks_of(R) * wide:
        p = divide(u, wide)
        c, k, part = (u - p * wide) * COLUMNS, p * chunk * N, at(ws, 2 * p * N)
        n, stop = min(chunk, R - p * chunk), min(c + COLUMNS, N)
        sums(_off_dy, (at(dy, k), at(x, k), mean), _put_part, (part, to), x, c, stop, n, N)
        sums(element, at(dy, k), _put_part, (at(part, N), to), x, c, stop, n, N)
        u += me.workers


@device
def _put_products(to, q, c, total):
    me, R, inv, dscale, t_p = to
    q += c
    g = total * inv[q]
    if given(me, dscale):
        dscale[q] = g
    t_p[q] = -g * inv[q] / like(g, R)


@device
def _put_sums(to, q, c, total):
    me, R, scale, inv, dshift, t_q, N = to
    q += c - N
    if given(me, dshift):
        dshift[q] = total
    t_q[q] = -(total * or_one(me, scale, q, total)) * inv[q] / like(total, R)


@device
def _joined_products(me, R, N, scale, inv, dscale, dshift, p, q, ws):
    lo, hi = share(me, N)
    chunks, R = chunks_of(R), max(R, 1)
    sums(element, ws, _put_products, (me, R, inv, dscale, p), ws, lo, hi, chunks, 2 * N)
    sums(element, ws, _put_sums, (me, R, scale, inv, dshift, q, N), ws, N + lo, N + hi, chunks, 2 * N)


@kernel
def batch_norm_bwd(
    me, rows, inner, N, dy: Ptr, x: Ptr, scale: Ptr, mean: Ptr, inv: Ptr, t_p: Ptr, t_q: Ptr, dx: Ptr
):  # fmt: skip
    """dx = scale*inv*(dy + (x - mean)*p) + q.  Rows are shared; in place over dy or x."""
    lo, hi = share(me, rows)
    e, stop = lo * inner * N + thread(), hi * inner * N
    while e < stop:
        c = e - divide(e, N) * N
        dx[e] = fma(fma(x[e] - mean[c], t_p[c], dy[e]), inv[c] * or_one(me, scale, c, dy[e]), t_q[c])
        e += threads()


# ---------------------------------------------------------------- of channels, with given statistics
@kernel
def batch_norm_inference_factor(me, N, eps: Float, scale: Ptr, running_var: Ptr, t_factor: Ptr):
    """factor = scale/sqrt(var + eps).  Channels are shared."""
    lo, hi = share(me, N)
    c = lo + thread()
    while c < hi:
        t_factor[c] = or_one(me, scale, c, running_var[c]) * rsqrt(running_var[c], eps)
        c += threads()


@kernel
def batch_norm_inference_fwd(
    me, rows, inner, N, act, alpha: Float, x: Ptr, t_factor: Ptr, shift: Ptr, running_mean: Ptr, y: Ptr, other: Ptr
):
    """y = act((x - mean)*factor + shift + other).  Rows are shared; in place."""
    lo, hi = share(me, rows)
    e, stop = lo * inner * N + thread(), hi * inner * N
    while e < stop:
        c = e - divide(e, N) * N
        y[e] = completed(me, by_column(me, x[e], running_mean[c], t_factor[c], shift, c), e, act, alpha, other)
        e += threads()


@device
def _put_given(to, q, c, total):
    me, before, var, eps, scaled, out = to
    if given(me, out):
        q += c - before
        out[q] = total * rsqrt(var[q], eps) if scaled else total


@device
def _joined_inference(me, R, N, eps, running_var, dscale, dshift, ws):
    lo, hi = share(me, N)
    chunks = chunks_of(R)
    sums(element, ws, _put_given, (me, 0, running_var, eps, True, dscale), ws, lo, hi, chunks, 2 * N)
    sums(element, ws, _put_given, (me, N, running_var, eps, False, dshift), ws, N + lo, N + hi, chunks, 2 * N)


register_channels(kernel, _partial_products, _joined_products, _joined_inference)


@kernel
def batch_norm_inference_bwd(me, rows, inner, N, eps: Float, dy: Ptr, scale: Ptr, running_var: Ptr, dx: Ptr):
    """dx = dy*scale/sqrt(var + eps).  Rows are shared; in place."""
    lo, hi = share(me, rows)
    e, stop = lo * inner * N + thread(), hi * inner * N
    while e < stop:
        c = e - divide(e, N) * N
        dx[e] = dy[e] * (or_one(me, scale, c, dy[e]) * rsqrt(running_var[c], eps))
        e += threads()


# ---------------------------------------------------------------- of each sample, by groups of channels
@device
def _in_group(args, q, k):
    """Element k of (groups, inner*D), at its place in x (inner, groups, D), less the group's first."""
    x, groups, D, R = args
    r = k - q * R
    i = divide(r, D)
    return x[(i * groups + q) * D + r - i * D] - x[q * D]


@device
def _square_in_group(args, q, k):
    of_group, means = args
    d = _in_group(of_group, q, k) - means[q]
    return d * d


@device
def _statistics(inner, groups, D, eps, x, m, a):
    """m, a: the mean and 1/sqrt(var + eps) of each group, for one sample x (inner, groups, D)."""
    R = inner * D
    part = like(x, 1) / like(x, R)
    if D == 1:
        sums(_off_first, x, _put_part, (m, part), x, 0, groups, R, groups)
        sums(_square_off, (x, m), _put_part, (a, part), x, 0, groups, R, groups)
    else:
        of_group = (x, groups, D, R)
        sums(_in_group, of_group, _put_part, (m, part), x, 0, groups, R, 1)
        sums(_square_in_group, (of_group, m), _put_part, (a, part), x, 0, groups, R, 1)
    g = thread()
    while g < groups:
        m[g] += x[g * D]
        a[g] = rsqrt(a[g], eps)
        if not in_range(a[g]):
            m[g], _, a[g] = deviation(inner, groups * D, D, at(x, g * D), True, eps)
        g += threads()
    sync()


@kernel
def group_norm_fwd(
    me, rows, inner, groups, D, eps: Float, act, alpha: Float, wn, x: Ptr, scale: Ptr, shift: Ptr, y: Ptr, mean: Ptr,
    inv: Ptr, other: Ptr, ws: Ptr,
):  # fmt: skip
    """y = act((x - mean)*inv*scale + shift + other) of each sample and group.  Rows are shared; in place."""
    i, hi = share(me, rows)
    N = groups * D
    m, a = at(ws, me.worker * wn), at(ws, me.worker * wn + N)
    while i < hi and inner * D > 0:
        k = i * inner * N
        _statistics(inner, groups, D, eps, at(x, k), m, a)
        g = thread()
        while g < groups:
            if given(me, mean):
                mean[i * groups + g] = m[g]
            if given(me, inv):
                inv[i * groups + g] = a[g]
            g += threads()
        e = thread()
        while e < inner * N:
            c = e - divide(e, N) * N
            g = divide(c, D)
            z = normalised(me, x[k + e], m[g], a[g], scale, shift, c)
            y[k + e] = completed(me, z, k + e, act, alpha, other)
            e += threads()
        sync()
        i += 1


@device
def _of_group(args, q, k):
    x, me, scale = args
    return x[k] * or_one(me, scale, k, x[k])


@device
def _put_coefficient(to, q, c, total):
    out, inv, less, squared = to
    a = inv[q + c]
    out[q + c] = total * a * less * (a if squared else like(a, 1))


@device
def _slopes_of_groups(me, chunk, chunks, rows, inner, groups, D, affine, dy, x, scale, mean, inv, dx, ws):
    N = groups * D
    one, less = like(x, 1), like(x, -1) / like(x, inner * D)
    c, hi = share(me, chunks)
    while c < hi:
        total = at(ws, 6 * N * c)
        own = at(total, 2 * N) if affine else at(ws, 4 * N * me.worker)
        m, p, q, t = own, at(own, N), at(own, 2 * N), at(own, 3 * N)
        i = c * chunk
        while i < min((c + 1) * chunk, rows):
            k, g, first = i * inner * N, i * groups, i == c * chunk
            j = thread()
            while j < N:
                m[j] = mean[g + divide(j, D)]
                j += threads()
            sync()
            sums(_off_dy, (at(dy, k), at(x, k), m), _put_part, (p, one), x, 0, N, inner, N)
            sums(element, at(dy, k), _put_part, (q, one), x, 0, N, inner, N)
            j = thread()
            while j < N and affine:
                total[j] = fma(p[j], inv[g + divide(j, D)], like(x, 0) if first else total[j])
                total[N + j] = q[j] + (like(x, 0) if first else total[N + j])
                j += threads()
            if given(me, dx):
                a = at(inv, g)
                sums(_of_group, (p, me, scale), _put_coefficient, (m, a, less, True), x, 0, groups, D, 1)
                sums(_of_group, (q, me, scale), _put_coefficient, (t, a, less, False), x, 0, groups, D, 1)
                e = thread()
                while e < inner * N:
                    j = e - divide(e, N) * N
                    b = divide(j, D)
                    d = dy[k + e]
                    d *= or_one(me, scale, j, d)
                    dx[k + e] = fma(fma(x[k + e] - mean[g + b], m[b], d), a[b], t[b])
                    e += threads()
            sync()
            i += 1
        c += 1


@device
def _put_given_at(to, q, c, total):
    me, before, out = to
    if given(me, out):
        out[q + c - before] = total


@device
def _add_up(me, N, chunks, apart, dscale, dshift, ws, shifted):
    """Add the chunks' two vectors of N, which lie ``apart``; the second if ``shifted``.  Columns are shared."""
    lo, hi = share(me, N)
    sums(element, ws, _put_given_at, (me, 0, dscale), ws, lo, hi, chunks, apart)
    if shifted:
        sums(element, ws, _put_given_at, (me, N, dshift), ws, N + lo, N + hi, chunks, apart)


register_groups(kernel, CHUNKS, _add_up, _slopes_of_groups)


# ---------------------------------------------------------------- of vectors: by lanes of a warp
@device
def _less(args, q, k):
    x, m = args
    return x[k] - m


@device
def _square_less(args, q, k):
    x, m = args
    return (x[k] - m) * (x[k] - m)


@device
def _normalised_at(args, q, k):
    me, x, start, scale, shift, m, a, centered = args
    if centered:
        return normalised(me, x[k], m, a, scale, shift, k - start)
    return x[k] * (a * or_one(me, scale, k - start, a))


@device
def _vectors_fwd(me, rows, inner, N, eps, x, scale, shift, y, mean, inv, centered):
    lo, hi = share(me, rows)
    hi, g, zero = hi * inner, lanes_of(N), like(x, 0)
    before = lo * inner + group_before(g)
    while before < hi:
        row = before + group_in(g)
        start = min(row, hi - 1) * N
        k, last, m = start + lane_in(g), start + N - 1 if row < hi else -1, zero
        if centered and N > 0:
            first = x[start]
            m = first + sum_of(_less, (x, first), zero, k, last, g) / like(x, N)
        a = rsqrt(sum_of(_square_less, (x, m), zero, k, last, g) / like(x, N), eps)
        if not in_range(a) and N > 0:
            m, _, a = deviation(1, N, N, at(x, start), centered, eps)
        if lane_in(g) == 0 and row < hi:
            if centered and given(me, mean):
                mean[row] = m
            if given(me, inv):
                inv[row] = a
        each(_normalised_at, (me, x, start, scale, shift, m, a, centered), 0, y, k, last, 1 << g)
        before += threads() >> g


@device
def _scaled_off(args, q, k):
    (me, dy, x, start, scale, m), a = args
    return dy[k] * or_one(me, scale, k - start, m) * ((x[k] - m) * a)


@device
def _scaled_dy(args, q, k):
    me, dy, x, start, scale, m = args
    return dy[k] * or_one(me, scale, k - start, m)


@device
def _slope_at(args, q, k):
    of, a, p, r = args
    me, dy, x, start, scale, m = of
    return fma(fma(x[k] - m, p, dy[k] * or_one(me, scale, k - start, m)), a, r)


@device
def _off_of_row(args, q, k):
    dy, x, mean, inv, N, centered = args
    row = divide(k, N)
    return dy[k] * ((x[k] - (mean[row] if centered else like(x, 0))) * inv[row])


@device
def _vectors_bwd(me, chunk, chunks, R, N, affine, dy, x, scale, mean, inv, dx, ws, centered):
    c, last_chunk = share(me, chunks)
    g, zero, one = lanes_of(N), like(x, 0), like(x, 1)
    less = like(x, -1) / like(x, N)
    while c < last_chunk:
        i = c * chunk
        hi = min(i + chunk, R)
        if affine:
            k, total = i * N, at(ws, 2 * c * N)
            args = (at(dy, k), at(x, k), at(mean, i), at(inv, i), N, centered)
            sums(_off_of_row, args, _put_part, (total, one), x, 0, N, hi - i, N)
            sums(element, at(dy, k), _put_part, (at(total, N), one), x, 0, N, hi - i, N)
        before = i + group_before(g)
        while before < hi and given(me, dx):
            row = min(before + group_in(g), hi - 1)
            start = row * N
            k, last = start + lane_in(g), start + N - 1 if before + group_in(g) < hi else -1
            a, m = inv[row], mean[row] if centered else zero
            of = (me, dy, x, start, scale, m)
            p = sum_of(_scaled_off, (of, a), zero, k, last, g) * less * a
            r = sum_of(_scaled_dy, of, zero, k, last, g) * less * a if centered else zero
            each(_slope_at, (of, a, p, r), 0, dx, k, last, 1 << g)
            before += threads() >> g
        sync()
        c += 1


register_vectors(kernel, device, most_chunks, _vectors_fwd, _add_up, _vectors_bwd)


# ---------------------------------------------------------------- by neighbouring channels
@device
def _base(x, row, c, N, size, part, k):
    """k + part * sum of x^2 over ``size`` channels around c."""
    j, stop = max(c - size // 2, 0), min(c + (size + 1) // 2, N)
    total = like(x, 0)
    while j < stop:
        total = fma(x[row + j], x[row + j], total)
        j += 1
    return fma(total, like(x, part), like(x, k))


@device
def _root_of(x, row, N):
    """The divisor of x in a row whose squares overflow: its largest finite magnitude, at least 1."""
    unit, j = like(x, 1), row
    while j < row + N:
        v = fabs(x[j])
        unit = v if v > unit and v < like(x, math.inf) else unit
        j += 1
    return unit


@device
def _small_base(x, row, c, N, size, part, k, unit):
    """(k + part * sum of x^2 over ``size`` channels around c) / unit^2"""
    j, stop = max(c - size // 2, 0), min(c + (size + 1) // 2, N)
    total = like(x, 0)
    while j < stop:
        total = fma(x[row + j] / unit, x[row + j] / unit, total)
        j += 1
    return fma(total, like(x, part), like(x, k) / unit / unit)


@kernel
def local_response_norm_fwd(me, rows, inner, N, size, alpha: Float, beta: Float, k: Float, wn, x: Ptr, y: Ptr, ws: Ptr):
    """y = x * d^-beta.  Rows are shared."""
    lo, hi = share(me, rows)
    e, stop = lo * inner * N + thread(), hi * inner * N
    while e < stop:
        row = divide(e, N) * N
        d = _base(x, row, e - row, N, size, alpha / size, k)
        if d < like(x, math.inf):
            y[e] = x[e] / sqrt(d) * power(d, like(x, 0.5 - beta))
        else:
            unit = _root_of(x, row, N)
            d = _small_base(x, row, e - row, N, size, alpha / size, k, unit)
            y[e] = x[e] / unit * exp(like(x, 1 - 2 * beta) * log(unit) - like(x, beta) * log(d))
        e += threads()


@kernel
def local_response_norm_bwd(
    me, rows, inner, N, size, alpha: Float, beta: Float, k: Float, wn, dy: Ptr, x: Ptr, dx: Ptr, ws: Ptr
):
    """dx = dy*d^-beta - 2*alpha*beta/size * x * sum of dy*x*d^-(beta + 1).  Rows are shared."""
    lo, hi = share(me, rows)
    e, stop = lo * inner * N + thread(), hi * inner * N
    while e < stop:
        row = divide(e, N) * N
        c = e - row
        j, end = max(c - (size - 1) // 2, 0), min(c + size // 2 + 1, N)
        total, own, large = like(x, 0), like(x, 0), False
        upper = like(x, 2.0**511)  # brings quotients by a square back into range; divided out below
        upper = upper if upper < like(x, math.inf) else like(x, 2.0**63)
        while j < end:
            d = _base(x, row, j, N, size, alpha / size, k)
            large = large or not d < like(x, math.inf)
            t = dy[row + j] * power(d, like(x, -beta))
            total = fma(t, x[row + j] * upper / d, total)
            own = t if j == c else own
            j += 1
        by = x[e] / upper
        if large:
            unit = _root_of(x, row, N)
            j, total, by = max(c - (size - 1) // 2, 0), like(x, 0), x[e] / unit
            while j < end:
                d = _small_base(x, row, j, N, size, alpha / size, k, unit)
                t = dy[row + j] * power(d, like(x, -beta)) * power(unit, like(x, -2 * beta))
                total = fma(t, x[row + j] / unit / d, total)
                own = t if j == c else own
                j += 1
        dx[e] = fma(-by * like(x, 2 * alpha * beta / size), total, own)
        e += threads()
