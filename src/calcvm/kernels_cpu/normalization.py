"""Statistics of a batch and normalization: sums whose order depends only on sizes.

Rows are split into chunks, by their number.  The partial results of each chunk are in scratch; the second phase joins them in order.
"""

from __future__ import annotations

from operator import add

from calcvm.kernel import words
from calcvm.kernels_cpu import _formulas as F
from calcvm.kernels_cpu._columns import MOST_INV, joined_moments, moments, products, rows_of, vector_slopes
from calcvm.kernels_cpu._common import Float, Ptr, at, given, kernel, kernel_as, like, njit, share, sqrt
from calcvm.kernels_cpu._epilogues import after, block_of, finish, normalised
from calcvm.kernels_cpu._formulas import fma
from calcvm.kernels_cpu._math import column_reduction, copy, elementwise, exp, fill, log, reduction, rsum, sums
from calcvm.kernels_cpu._simd import stack
from calcvm.kernels_shared.normalization import chunking, register_channels, register_groups, register_vectors

_column_sums = column_reduction(add, 0.0)
_towards = elementwise(lambda r, m, a: r + a * (m - r), "vv", "f")
_less = elementwise(lambda x, m: x - m, "vv")


@kernel
def center_mean(me, rows, cols, momentum: Float, x: Ptr, t_m: Ptr, running: Ptr):
    """m = the mean of x over rows; running += momentum*(m - running); cols are shared."""
    lo, hi = share(me, cols)
    m, r = at(t_m, lo), at(running, lo)
    _column_sums(hi - lo, rows, cols, at(x, lo), m, like(x, 1) / like(x, rows))
    _towards(hi - lo, r, m, r, like(x, momentum))


@kernel
def center_mean_bwd(me, rows, cols, dy: Ptr, t_d: Ptr):
    """d = the mean of dy over rows; cols are shared."""
    lo, hi = share(me, cols)
    _column_sums(hi - lo, rows, cols, at(dy, lo), at(t_d, lo), like(dy, 1) / like(dy, rows))


@kernel_as("center_fwd", words("rows cols", "", ("x", "t_m", "y")))
@kernel_as("center_bwd", words("rows cols", "", ("dy", "t_d", "dx")))
def _center(me, rows, cols, x, m, y):
    """y = x - m; rows are shared; y may be x."""
    lo, hi = share(me, rows)
    for i in range(lo, hi):
        _less(cols, at(x, i * cols), m, at(y, i * cols))


# ---------------------------------------------------------------- of channels, over all samples and places
CHUNKS = 64  # as in ops.normalization
chunk_of, chunks_of, most_chunks = chunking(njit(inline=True), CHUNKS, 128)


def rsqrt(var, eps):
    return 1 / (var + eps).call("sqrt")


@njit(inline=True)
def in_range(inv):
    """Whether no square behind 1/sqrt(var + eps) has left the range of numbers; false for NaN."""
    return inv > 0 and inv < like(inv, MOST_INV)


@njit
def deviation(rows, stride, cols, x, centered, eps):
    """Mean (0 if not ``centered``), variance and 1/sqrt(var + eps) of x (rows, cols) of any magnitude: x is scaled by its largest."""
    top, n = 0.0, rows * cols
    for r in range(rows):
        for c in range(cols):
            top = max(top, abs(float(x[r * stride + c])))
    mean = squares = 0.0
    unit = top if top > 0 else 1.0
    for r in range(rows if centered else 0):
        for c in range(cols):
            mean += x[r * stride + c] / unit
    mean /= n
    for r in range(rows):
        for c in range(cols):
            d = x[r * stride + c] / unit - mean
            squares += d * d
    var = squares / n
    return mean * unit, var * unit * unit, 1 / (sqrt(var + eps / unit / unit) * unit)


normalise = rows_of(normalised, 1, "vv10", lambda m, inv, scale, shift: (m, inv * scale, shift))
slope = rows_of(
    lambda dy, x, m, a, p, q: fma(fma(x - m, p, dy), a, q),
    2,
    "vv1vv",
    lambda m, inv, scale, p, q: (m, inv * scale, p, q),
)
slope_of_groups = rows_of(
    lambda dy, x, m, a, s, p, q: fma(fma(x - m, p, dy * s), a, q), 2, "vv1vv", lambda *columns: columns
)
_times = elementwise(lambda x, y: x * y, "vv")
_by = elementwise(lambda g, inv, a: g * inv * a, "vv", "f")


@njit(inline=True)
def _partial_products(me, R, N, dy, x, mean, ws):
    """Sums of dy*(x - mean) and dy over each chunk of rows; chunks are shared."""
    chunk = chunk_of(R)
    lo, hi = share(me, chunks_of(R))
    for p in range(lo, hi):
        k = p * chunk * N
        products(N, min(chunk, R - p * chunk), N, at(dy, k), at(x, k), mean, at(ws, 2 * p * N), at(ws, (2 * p + 1) * N))


@njit(inline=True)
def there(me, operand):
    return 1 if given(me, operand) else 0


@kernel
def batch_norm_stats(
    me, phases, rows, inner, N, eps: Float, momentum: Float, wn,
    x: Ptr, mean: Ptr, inv: Ptr, running_mean: Ptr, running_var: Ptr, ws: Ptr,
):  # fmt: skip
    """Mean, 1/sqrt(var + eps) and running statistics of channels.  x (R, N), R = rows*inner; others (N).

    Chunks of rows are shared.  The second phase joins their partial results; it shares channels.
    """
    R = rows * inner
    chunk = chunk_of(R)
    if me.phase == 0:
        lo, hi = share(me, chunks_of(R))
        for p in range(lo, hi):
            moments(N, min(chunk, R - p * chunk), N, at(x, p * chunk * N), at(ws, 2 * p * N), at(ws, (2 * p + 1) * N))
        return
    lo, hi = share(me, N)
    if R > 0:
        joined_moments(hi - lo, R, N, chunk, at(x, lo), at(ws, lo), at(mean, lo), at(inv, lo), at(running_mean, lo),
                       at(running_var, lo), like(x, eps), like(x, momentum))  # fmt: skip
        for c in range(lo, hi):
            if not in_range(inv[c]):
                m, var, a = deviation(R, N, 1, at(x, c), True, eps)
                mean[c], inv[c] = like(x, m), like(x, a)
                running_mean[c] += like(x, momentum) * (mean[c] - running_mean[c])
                if R > 1:
                    var = like(x, var * R / (R - 1))
                    running_var[c] += like(x, momentum) * (var - running_var[c])
    else:
        fill(hi - lo, at(mean, lo), like(x, 0))
        fill(hi - lo, at(inv, lo), like(x, 0))


@kernel
def batch_norm_fwd(
    me, rows, inner, N, act, alpha: Float, x: Ptr, scale: Ptr, shift: Ptr, mean: Ptr, inv: Ptr, y: Ptr, other: Ptr
):
    """y = act((x - mean)*inv*scale + shift + other).  x, y, other (rows*inner, N), the rest (N).  Rows are shared.  y may be x."""
    lo, hi = share(me, rows)
    todo = after(me, act, alpha, other)
    _in_blocks_of_rows(
        lo * inner, hi * inner, N, x, y, mean, inv, scale, there(me, scale), shift, there(me, shift), todo
    )


@njit
def _in_blocks_of_rows(lo, hi, N, x, y, mean, inv, scale, scaled, shift, shifted, todo):
    """y = (x - mean)*inv*scale + shift of rows [lo, hi), then the epilogue."""
    step = block_of(N, hi - lo, todo)
    for i in range(lo, hi, step):
        m = min(step, hi - i)
        normalise(N, m, N, at(x, i * N), at(y, i * N), mean, inv, scale, scaled, shift, shifted)
        finish(m, N, N, y, i * N, todo)


@njit(inline=True)
def _joined_products(me, R, N, scale, inv, dscale, dshift, p, q, ws):
    """Add the partial sums; turn them into the coefficients of dx."""
    chunks = chunks_of(R)
    lo, hi = share(me, N)
    n = hi - lo
    inv, p, q, one = at(inv, lo), at(p, lo), at(q, lo), like(ws, 1)
    _column_sums(n, chunks, 2 * N, at(ws, lo), p, one)
    _column_sums(n, chunks, 2 * N, at(ws, N + lo), q, one)
    _times(n, p, inv, p)
    if given(me, dscale):
        copy(n, p, at(dscale, lo))
    if given(me, dshift):
        copy(n, q, at(dshift, lo))
    if given(me, scale):
        _times(n, q, at(scale, lo), q)
    less = like(ws, -1) / like(ws, max(R, 1))
    _by(n, p, inv, p, less)
    _by(n, q, inv, q, less)


@kernel
def batch_norm_bwd(
    me, rows, inner, N, dy: Ptr, x: Ptr, scale: Ptr, mean: Ptr, inv: Ptr, t_p: Ptr, t_q: Ptr, dx: Ptr
):  # fmt: skip
    """dx = scale*inv*(dy + (x - mean)*p) + q.  dy, x, dx (rows*inner, N), others (N).  Rows are shared.  dx may be dy or x."""
    lo, hi = share(me, rows)
    k = lo * inner * N
    slope(N, (hi - lo) * inner, N, at(dy, k), at(x, k), at(dx, k), mean, inv, scale, there(me, scale), t_p, t_q)


# ---------------------------------------------------------------- of channels, with given statistics
_slope_by = rows_of(lambda dy, a: dy * a, 1, "v1", lambda var, scale, eps: (scale * rsqrt(var, eps),), "f")
_times_rsqrt = elementwise(lambda x, var, eps: x * rsqrt(var, eps), "vv", "f")


@kernel
def batch_norm_inference_factor(me, N, eps: Float, scale: Ptr, running_var: Ptr, t_factor: Ptr):
    """factor = scale/sqrt(var + eps).  All (N).  Channels are shared."""
    lo, hi = share(me, N)
    factor, var = at(t_factor, lo), at(running_var, lo)
    if given(me, scale):
        copy(hi - lo, at(scale, lo), factor)
    else:
        fill(hi - lo, factor, like(var, 1))
    _times_rsqrt(hi - lo, factor, var, factor, like(var, eps))


@kernel
def batch_norm_inference_fwd(
    me, rows, inner, N, act, alpha: Float, x: Ptr, t_factor: Ptr, shift: Ptr, running_mean: Ptr, y: Ptr, other: Ptr
):
    """y = act((x - mean)*factor + shift + other).  x, y, other (rows*inner, N), the rest (N).  Rows are shared.  y may be x."""
    lo, hi = share(me, rows)
    todo = after(me, act, alpha, other)
    _in_blocks_of_rows(lo * inner, hi * inner, N, x, y, running_mean, t_factor, x, 0, shift, there(me, shift), todo)


@njit(inline=True)
def _joined_inference(me, R, N, eps, running_var, dscale, dshift, ws):
    """Add the partial sums."""
    chunks = chunks_of(R)
    lo, hi = share(me, N)
    if given(me, dscale):
        d = at(dscale, lo)
        _column_sums(hi - lo, chunks, 2 * N, at(ws, lo), d, like(ws, 1))
        _times_rsqrt(hi - lo, d, at(running_var, lo), d, like(ws, eps))
    if given(me, dshift):
        _column_sums(hi - lo, chunks, 2 * N, at(ws, N + lo), at(dshift, lo), like(ws, 1))


register_channels(kernel, _partial_products, _joined_products, _joined_inference)


@kernel
def batch_norm_inference_bwd(me, rows, inner, N, eps: Float, dy: Ptr, scale: Ptr, running_var: Ptr, dx: Ptr):
    """dx = dy*scale/sqrt(var + eps).  dy, dx (rows*inner, N), others (N).  Rows are shared.  dx may be dy."""
    lo, hi = share(me, rows)
    k = lo * inner * N
    _slope_by(N, (hi - lo) * inner, N, at(dy, k), at(dx, k), running_var, scale, there(me, scale), like(dy, eps))


# ---------------------------------------------------------------- of each sample, by groups of channels
_off = elementwise(lambda x, m, k: (x - k) + m, "vv", "f")
_spread = reduction(add, 0.0, lambda m, m2, mu, count: fma(count * (m - mu), m - mu, m2), "vv", 2)
_plus = elementwise(lambda x, y: x + y, "vv")
_rsqrt_of = elementwise(lambda m2, part, eps: rsqrt(m2 * part, eps), "v", "ff")


@njit
def _statistics(inner, groups, D, eps, x, m, a):
    """m, a: for each channel the mean and 1/sqrt(var + eps) of its group, for one sample x (inner, groups*D)."""
    N = groups * D
    moments(N, inner, N, x, m, a)
    part = like(x, 1) / like(x, inner * D)
    if D == 1:
        _plus(N, m, x, m)
        _rsqrt_of(N, a, a, part, eps)
        for c in range(N):
            if not in_range(a[c]):
                mu, _, inv = deviation(inner, N, 1, at(x, c), True, eps)
                m[c], a[c] = like(x, mu), like(x, inv)
        return
    for g in range(groups):
        mg, ag, first = at(m, g * D), at(a, g * D), x[g * D]
        _off(D, at(x, g * D), mg, mg, first)
        mu = rsum(D, mg) / like(x, D)
        var = _spread(D, mg, ag, mu, like(x, inner)) * part
        fill(D, mg, first + mu)
        fill(D, ag, like(x, 1) / sqrt(var + eps))
        if not in_range(ag[0]):
            of_all, _, inv = deviation(inner, N, D, at(x, g * D), True, eps)
            fill(D, mg, like(x, of_all))
            fill(D, ag, like(x, inv))


@kernel
def group_norm_fwd(
    me, rows, inner, groups, D, eps: Float, act, alpha: Float, wn, x: Ptr, scale: Ptr, shift: Ptr, y: Ptr, mean: Ptr,
    inv: Ptr, other: Ptr, ws: Ptr,
):  # fmt: skip
    """y = act((x - mean)*inv*scale + shift + other).

    x, y, other (rows, inner, groups*D), scale, shift (groups*D), mean, inv (rows, groups).

    y may be x.  Rows are shared.
    """
    lo, hi = share(me, rows)
    N = groups * D
    m, a = at(ws, me.worker * wn), at(ws, me.worker * wn + N)
    todo = after(me, act, alpha, other)
    for i in range(lo, hi if inner * D > 0 else lo):
        k = i * inner
        _statistics(inner, groups, D, like(x, eps), at(x, k * N), m, a)
        if given(me, mean):
            for g in range(groups):
                mean[i * groups + g] = m[g * D]
        if given(me, inv):
            for g in range(groups):
                inv[i * groups + g] = a[g * D]
        _in_blocks_of_rows(k, k + inner, N, x, y, m, a, scale, there(me, scale), shift, there(me, shift), todo)


@njit(inline=True)
def _expand(groups, D, x, y):
    """Each group's number, repeated for each of its channels."""
    if D == 1:
        copy(groups, x, y)
    else:
        for g in range(groups):
            fill(D, at(y, g * D), x[g])


@njit
def _coefficients(groups, D, inv, scale, scaled, less, p, q):
    """Turn the sums of dy*(x - mean) in p and dy in q into the coefficients of dx; ``less`` : -1 / the size of a group."""
    N = groups * D
    if D == 1:
        if scaled:
            _times(N, q, scale, q)
        _by(N, q, inv, q, less)
        _by(N, p, inv, p, less)
        _times(N, p, inv, p)
        return
    if scaled:
        _times(N, p, scale, p)
        _times(N, q, scale, q)
    for g in range(groups):
        a = inv[g]
        pg, qg = at(p, g * D), at(q, g * D)
        fill(D, pg, rsum(D, pg) * a * less * a)
        fill(D, qg, rsum(D, qg) * a * less)


@njit
def _slopes_of_groups(me, chunk, chunks, rows, inner, groups, D, affine, dy, x, scale, mean, inv, dx, ws):
    """dx of chunks of samples, and their part of dscale and dshift if ``affine``."""
    N = groups * D
    less = like(x, -1) / like(x, inner * D)
    lo, hi = share(me, chunks)
    for c in range(lo, hi):
        total = at(ws, 6 * N * c)
        own = at(total, 2 * N) if affine else at(ws, 4 * N * me.worker)
        m, a, p, q = own, at(own, N), at(own, 2 * N), at(own, 3 * N)
        if affine:
            fill(2 * N, total, like(x, 0))
        for i in range(c * chunk, min((c + 1) * chunk, rows)):
            k, g = i * inner * N, i * groups
            _expand(groups, D, at(mean, g), m)
            _expand(groups, D, at(inv, g), a)
            products(N, inner, N, at(dy, k), at(x, k), m, p, q)
            if affine:
                _add_times(N, total, p, a, total)
                _plus(N, at(total, N), q, at(total, N))
            if given(me, dx):
                _coefficients(groups, D, at(inv, g), scale, given(me, scale), less, p, q)
                if D == 1:
                    slope(N, inner, N, at(dy, k), at(x, k), at(dx, k), m, a, scale, there(me, scale), p, q)
                else:
                    slope_of_groups(N, inner, N, at(dy, k), at(x, k), at(dx, k), m, a, scale, there(me, scale), p, q)


_add_times = elementwise(lambda s, x, y: fma(x, y, s), "vvv")


@njit(inline=True)
def _add_up(me, N, chunks, apart, dscale, dshift, ws, shifted):
    """Add the chunks' two vectors of N, which lie ``apart``; the second if ``shifted``.  Columns are shared."""
    lo, hi = share(me, N)
    if given(me, dscale):
        _column_sums(hi - lo, chunks, apart, at(ws, lo), at(dscale, lo), like(ws, 1))
    if shifted and given(me, dshift):
        _column_sums(hi - lo, chunks, apart, at(ws, N + lo), at(dshift, lo), like(ws, 1))


register_groups(kernel, CHUNKS, _add_up, _slopes_of_groups)


# ---------------------------------------------------------------- of vectors
_less_sum = reduction(add, 0.0, lambda x, k: x - k, "v", 1)
_squares = reduction(add, 0.0, lambda x, m: (x - m) * (x - m), "v", 1)
_both = sums(lambda dy, x, m, a: (dy * ((x - m) * a), dy), "vv", 2, 2)
_both_scaled = sums(lambda dy, x, w, m, a: (dy * w * ((x - m) * a), dy * w), "vvv", 2, 2)
_plain = elementwise(lambda x, m, a: (x - m) * a, "v", "ff")
_scaled = elementwise(lambda x, w, m, a: (x - m) * (a * w), "vv", "ff")
_shifted = elementwise(lambda x, c, m, a: fma(x - m, a, c), "vv", "ff")
_scaled_shifted = elementwise(lambda x, w, c, m, a: fma(x - m, a * w, c), "vvv", "ff")
TOGETHER = 8  # vectors at most whose sums come before their slopes, which then find them in cache
_slopes_and_sums, _slopes, _sums_alone = (
    vector_slopes(True, True),
    vector_slopes(True, False),
    vector_slopes(False, True),
)
_room = stack(4 * TOGETHER)


@njit(inline=True)
def _write(me, N, x, scale, shift, y, m, a, centered):
    """y = (x - m)*a*scale + shift of a vector; without shift if not ``centered``."""
    if centered and given(me, scale) and given(me, shift):
        _scaled_shifted(N, x, scale, shift, y, m, a)
    elif given(me, scale):
        _scaled(N, x, scale, y, m, a)
    elif centered and given(me, shift):
        _shifted(N, x, shift, y, m, a)
    else:
        _plain(N, x, y, m, a)


@njit(inline=True)
def _of_vector(N, x, centered, eps):
    """Mean (0 if not ``centered``) and 1/sqrt(var + eps) of a vector."""
    m = x[0] + _less_sum(N, x, x[0]) / like(x, N) if centered else like(x, 0)
    a = like(x, 1) / sqrt(_squares(N, x, m) / like(x, N) + like(x, eps))
    if in_range(a):
        return m, a
    mean, _, inv = deviation(1, N, N, x, centered, eps)
    return like(x, mean), like(x, inv)


@njit(inline=True)
def _vectors_fwd(me, rows, inner, N, eps, x, scale, shift, y, mean, inv, centered):
    """y of all vectors; rows are shared."""
    lo, hi = share(me, rows)
    for i in range(lo * inner, hi * inner if N > 0 else 0):
        xi = at(x, i * N)
        m, a = _of_vector(N, xi, centered, eps)
        if centered and given(me, mean):
            mean[i] = m
        if given(me, inv):
            inv[i] = a
        _write(me, N, xi, scale, shift, at(y, i * N), m, a, centered)


@njit(inline=True)
def _numbers(me, vectors, N, dy, x, scale, mean, inv, of, centered):
    """The numbers m, a, p and q of each vector, for dx = (dy*scale + (x - m)*p)*a + q."""
    for i in range(vectors):
        k, a = i * N, inv[i]
        m = mean[i] if centered else like(x, 0)
        if given(me, scale):
            p, q = _both_scaled(N, at(dy, k), at(x, k), scale, m, a)
        else:
            p, q = _both(N, at(dy, k), at(x, k), m, a)
        less = like(x, -1) / like(x, N) * a
        of[4 * i], of[4 * i + 1], of[4 * i + 2] = m, a, p * less
        of[4 * i + 3] = q * less if centered else like(x, 0)


@njit(inline=True)
def _vectors_bwd(me, chunk, chunks, R, N, affine, dy, x, scale, mean, inv, dx, ws, centered):
    """dx of chunks of the R vectors, and their part of dscale and dshift if ``affine``."""
    lo, hi = share(me, chunks)
    of, scaled = _room(x), there(me, scale)
    together = TOGETHER if N >= 512 else 4
    for c in range(lo, hi):
        total = at(ws, 2 * c * N)
        if affine:
            fill(2 * N, total, like(x, 0))
        last = min((c + 1) * chunk, R)
        for i in range(c * chunk, last, together):
            k, vectors = i * N, min(together, last - i)
            dyi, xi, dxi = at(dy, k), at(x, k), at(dx, k)
            _numbers(me, vectors, N, dyi, xi, scale, at(mean, i), at(inv, i), of, centered)
            if affine and given(me, dx):
                _slopes_and_sums(N, vectors, N, of, dyi, xi, scale, scaled, dxi, total, R * N)
            elif affine:
                _sums_alone(N, vectors, N, of, dyi, xi, scale, scaled, dxi, total, R * N)
            elif given(me, dx):
                _slopes(N, vectors, N, of, dyi, xi, scale, scaled, dxi, total, R * N)


register_vectors(kernel, njit(inline=True), most_chunks, _vectors_fwd, _add_up, _vectors_bwd)


# ---------------------------------------------------------------- by neighbouring channels
INF = float("inf")


def _upper(x):
    """A factor that brings a quotient by a square back into range; it is divided out later."""
    return x.pick(2.0**63, 2.0**511)


_square = elementwise(lambda x, a: x * x * a, "v", "f")
_start = elementwise(lambda x, k: x + k, "v", "f")
_plus_and_sum = reduction(add, 0.0, lambda x, y: x + y, "vv", store=True)
_product3 = elementwise(lambda t, x, d, a: t * (x * _upper(x) / d) * a, "vvv", "f")
_less_product = elementwise(lambda t, x, s: fma(x * (-1 / _upper(x)), s, t), "vvv")
_root34 = elementwise(lambda x, d: x / (d.call("sqrt") * d.call("sqrt").call("sqrt")), "vv")  # d^1.5 may overflow


@njit(inline=True)
def _scaled_base(N, size, part, k, x, c, unit):
    """(k + part * sum of x^2 over ``size`` channels around c) / unit^2."""
    total = 0.0
    for j in range(max(c - size // 2, 0), min(c + (size + 1) // 2, N)):
        total += (x[j] / unit) * (x[j] / unit)
    return k / unit / unit + part * total


@njit(inline=True)
def _largest(N, x):
    """The largest finite magnitude of an element, at least 1."""
    top = 1.0
    for c in range(N):
        size = abs(float(x[c]))
        top = size if top < size < INF else top
    return top


@njit
def _large_forward(N, size, part, beta, k, x, y):
    """y = x * d^-beta, for a row whose squares overflow."""
    unit = _largest(N, x)
    for c in range(N):
        base = _scaled_base(N, size, part, k, x, c, unit)
        y[c] = like(x, x[c] / unit * exp((1 - 2 * beta) * log(unit) - beta * log(base)))


@njit
def _large_backward(N, size, part, beta, k, dy, x, dx):
    """dx, for a row whose squares overflow."""
    unit = _largest(N, x)
    for c in range(N):
        total = own = 0.0
        for j in range(max(c - (size - 1) // 2, 0), min(c + size // 2 + 1, N)):
            base = _scaled_base(N, size, part, k, x, j, unit)
            t = dy[j] * exp(-beta * (log(base) + 2 * log(unit)))
            total += t * (x[j] / unit) / base
            own = t if j == c else own
        dx[c] = like(x, own - 2 * part * beta * (x[c] / unit) * total)


_power = elementwise(lambda x, d, beta: x / d.call("sqrt") * F.exp(F.log(d) * (0.5 - beta)), "vv", "f")  # as above


@njit(inline=True)
def _by_power(N, x, d, y, beta):
    """y = x / d^beta."""
    if beta == like(x, 0.75):
        _root34(N, x, d, y)
    else:
        _power(N, x, d, y, beta)


ROOM = 256  # elements of scratch that rows of few channels share, as in ops.normalization


@njit(inline=True)
def _window_sums(L, size, first, padded, d):
    """d = first + the sum of ``size`` neighbours in ``padded``, for L places."""
    if size == 0:
        fill(L, d, first)
        return
    _start(L, padded, d, first)
    for j in range(1, size):
        _plus(L, d, at(padded, j), d)


@njit(inline=True)
def _bases(rows, N, size, part, k, x, padded, d):
    """d = k + part * sum of x^2 over ``size`` channels; rows are N + size apart, with zeros between those of x^2.

    Returns their sum.  It is finite if all are finite and not huge.
    """
    S = N + size
    for r in range(rows):
        _square(N, at(x, r * N), at(padded, r * S + size // 2), part)
    L = rows * S - size
    _window_sums(L, size - 1, k, padded, d)
    return _plus_and_sum(L, d, at(padded, size - 1), d)


@kernel
def local_response_norm_fwd(me, rows, inner, N, size, alpha: Float, beta: Float, k: Float, wn, x: Ptr, y: Ptr, ws: Ptr):
    """y = x * d^-beta.  x, y (rows*inner, N).  Rows are shared."""
    lo, hi = share(me, rows)
    S = N + size
    together = max(ROOM // S, 1)
    padded, d = at(ws, me.worker * wn), at(ws, me.worker * wn + together * S)
    if lo < hi:
        fill(together * S, padded, like(x, 0))
    for i in range(lo * inner, hi * inner, together):
        n = min(together, hi * inner - i)
        total = _bases(n, N, size, like(x, alpha / size), like(x, k), at(x, i * N), padded, d)
        for r in range(n):
            _by_power(N, at(x, (i + r) * N), at(d, r * S), at(y, (i + r) * N), like(x, beta))
        if not total < INF:
            for r in range(n):
                if not rsum(N, at(d, r * S)) < INF:
                    _large_forward(N, size, alpha / size, beta, k, at(x, (i + r) * N), at(y, (i + r) * N))


@kernel
def local_response_norm_bwd(
    me, rows, inner, N, size, alpha: Float, beta: Float, k: Float, wn, dy: Ptr, x: Ptr, dx: Ptr, ws: Ptr
):
    """dx = dy*d^-beta - 2*alpha*beta/size * x * sum of dy*x*d^-(beta + 1).  dy, x, dx (rows*inner, N).

    Rows are shared.
    """
    lo, hi = share(me, rows)
    S = N + size
    together = max(ROOM // S, 1)
    own, each_has = me.worker * wn, together * S
    padded, terms, d, t = at(ws, own), at(ws, own + each_has), at(ws, own + 2 * each_has), at(ws, own + 3 * each_has)
    if lo < hi:
        fill(2 * each_has, padded, like(x, 0))
    factor = like(x, 2 * alpha * beta / size)
    for i in range(lo * inner, hi * inner, together):
        n = min(together, hi * inner - i)
        total = _bases(n, N, size, like(x, alpha / size), like(x, k), at(x, i * N), padded, d)
        for r in range(n):
            at_row, tr, dr = (i + r) * N, at(t, r * S), at(d, r * S)
            _by_power(N, at(dy, at_row), dr, tr, like(x, beta))
            _product3(N, tr, at(x, at_row), dr, at(terms, r * S + (size - 1) // 2), factor)
        if not total < INF:
            for r in range(n):
                if not rsum(N, at(d, r * S)) < INF:
                    t[r * S] = like(x, INF)  # marks the row for below, where d has been overwritten
        _window_sums(n * S - size, size, like(x, 0), terms, d)
        for r in range(n):
            at_row = (i + r) * N
            _less_product(N, at(t, r * S), at(x, at_row), at(d, r * S), at(dx, at_row))
        if not total < INF:
            for r in range(n):
                at_row = (i + r) * N
                if not abs(t[r * S]) < INF:
                    _large_backward(N, size, alpha / size, beta, k, at(dy, at_row), at(x, at_row), at(dx, at_row))
