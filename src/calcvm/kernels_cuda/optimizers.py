"""Optimizer updates, step counter and schedule, clipping, penalties (see `calcvm.ops.optimizers`).

An update is bound by memory.  So a thread takes four elements at a time, a block apart, and all their loads are on their
way before the first is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from calcvm.kernels_cuda._common import Float, Ptr, first, kernel, kernel_as, share, words
from calcvm.kernels_cuda._cuda import as_f64, at, device, lane, like, loaded, shared, sync, thread, threads, warp_size
from calcvm.kernels_cuda._math import cos, sqrt
from calcvm.kernels_cuda._reduce import warp, warp_sum, warps
from calcvm.kernels_cuda._tuples import ats, likes, loads, mapped, stores

# Slots of ``hyper``, in the order of calcvm.ops.optimizers.HYPER_SLOTS.
LEARNING_RATE, BETA1, BETA2, EPS, WEIGHT_DECAY, CLIP_VALUE, CLIP_NORM = range(7)
STEP_SIZE, GAMMA, TOTAL_STEPS, MIN_LR, WARMUP_STEPS = range(7, 12)
T, BETA1_T, BETA2_T, GAMMA_T, LR_T, STEP_SIZE_T, INV_SQRT_CORRECTION2_T, CLIP_SCALE = range(12, 20)
N_SLOTS = 20
CONSTANT, STEP, EXPONENTIAL, COSINE, COSINE_RESTARTS = range(5)

CHUNKS = 8  # of a total: each is a warp's, whatever the number of warps


@device
def span(me, rows, cols):
    """First element of this thread, and the end, of the rows that this worker owns."""
    lo, hi = share(me, rows)
    return lo * cols + thread(), hi * cols


@device
def gradient(g, p, scale, decay):
    """Scaled, with L2 decay if there is any."""
    g *= scale
    return g + decay * p if decay != 0 else g


_loaded = device(lambda i, xs: loads(ats(xs, i)))


@device
def _stored(i, stop, xs, ys):
    if i < stop:
        stores(ats(xs, i), ys)


_zipped = device(lambda a, b, c, d: (a, b, c, d))


def each(formula: Callable) -> Callable:
    """A loop ``each(me, rows, cols, reads, writes, params)``: writes[i]... = formula(reads[i]..., params...).

    Rows are shared, four elements a thread at a time.  An element past the end is the last one again, not stored.
    """
    f = device(formula)

    @device
    def loop(me, rows, cols, reads, writes, params):
        i, stop = span(me, rows, cols)
        step, last = threads(), stop - 1
        while i < stop:
            a, b = _loaded(i, reads), _loaded(min(i + step, last), reads)
            c, d = _loaded(min(i + 2 * step, last), reads), _loaded(min(i + 3 * step, last), reads)
            loaded()
            a, b, c, d = mapped(f, mapped(_zipped, (a, b, c, d)), *params)
            _stored(i, stop, writes, a)
            _stored(i + step, stop, writes, b)
            _stored(i + 2 * step, stop, writes, c)
            _stored(i + 3 * step, stop, writes, d)
            i += 4 * step

    return loop


# ---------------------------------------------------------------- updates
_decay = device(lambda s: s[WEIGHT_DECAY])
_no_decay = device(lambda s: 0.0)


def update(name: str, state: str, following: Callable, slots: Callable, decay: Callable = _decay) -> None:
    """Register an update: ``following`` gives an element's (p, *state) for its (p, g', *state, *slots)."""
    n, after = len(state.split()), len(state.split()) + 2
    next_of = device(following)

    def of_gradient(p, g, *given):
        scale, decay = given[n], given[n + 1]
        return next_of(p, gradient(g, p, scale, decay), *given[:n], *given[after:])

    loop, numbers = each(of_gradient), device(slots)

    @kernel_as(name, words("rows cols clip", "", ["p", "g", *state.split(), "hyper"]))
    def run(me, rows, cols, clip, p, g, *more):
        s, kept = as_f64(more[-1]), more[:-1]
        params = (like(p, s[CLIP_SCALE] if clip else 1.0), like(p, decay(s)), *likes(p, numbers(s)))
        loop(me, rows, cols, (p, g, *kept), (p, *kept), params)


@device
def sgd_next(p, g, lr):
    return (p - lr * g,)


@device
def momentum_next(p, g, m, lr, mu):
    m = mu * m + g
    return p - lr * m, m


@device
def nesterov_next(p, g, m, lr, mu):
    m = mu * m + g
    return p - lr * (g + mu * m), m


@device
def adam_next(p, g, m, v, size, c2, eps, beta2, a2, a1):
    m += a1 * (g - m)
    v = beta2 * v + a2 * g * g
    return p - size * m / (sqrt(v) * c2 + eps), m, v


@device
def adamw_next(p, g, m, v, size, c2, eps, beta2, a2, a1, keep):
    return adam_next(keep * p, g, m, v, size, c2, eps, beta2, a2, a1)


@device
def rmsprop_next(p, g, v, lr, eps, beta2, a2):
    v = beta2 * v + a2 * g * g
    return p - lr * g / (sqrt(v) + eps), v


@device
def rmsprop_momentum_next(p, g, v, m, lr, eps, beta2, a2, mu):
    v = beta2 * v + a2 * g * g
    m = mu * m + g / (sqrt(v) + eps)
    return p - lr * m, v, m


@device
def adagrad_next(p, g, v, lr, eps):
    v += g * g
    return p - lr * g / (sqrt(v) + eps), v


_squares = device(lambda s: (s[EPS], s[BETA2], 1 - s[BETA2]))
_moments = device(lambda s: (s[EPS], s[BETA2], 1 - s[BETA2], 1 - s[BETA1]))
_adam = device(lambda s: (s[STEP_SIZE_T], s[INV_SQRT_CORRECTION2_T], *_moments(s)))


# g' = g*clip_scale + weight_decay*p
update("sgd", "", sgd_next, lambda s: (s[LR_T],))  # p -= lr_t*g'
update("momentum", "m", momentum_next, lambda s: (s[LR_T], s[BETA1]))  # m = beta1*m + g'; p -= lr_t*m
update("nesterov", "m", nesterov_next, lambda s: (s[LR_T], s[BETA1]))  # the same m; p -= lr_t*(g' + beta1*m)
# m += (1-beta1)*(g' - m); v = beta2*v + (1-beta2)*g'^2; p -= step_size_t*m/(sqrt(v)*c2 + eps)
update("adam", "m v", adam_next, _adam)
update("adamhat", "m v", adam_next, lambda s: (s[STEP_SIZE_T] / s[INV_SQRT_CORRECTION2_T], 1.0, *_moments(s)))
# p *= 1 - lr_t*weight_decay; then as adam without decay
update("adamw", "m v", adamw_next, lambda s: (*_adam(s), 1 - s[LR_T] * s[WEIGHT_DECAY]), decay=_no_decay)
# the same v; p -= lr_t*g'/(sqrt(v) + eps)
update("rmsprop", "v", rmsprop_next, lambda s: (s[LR_T], *_squares(s)))
# m = beta1*m + g'/(sqrt(v) + eps); p -= lr_t*m
update("rmsprop_momentum", "v m", rmsprop_momentum_next, lambda s: (s[LR_T], *_squares(s), s[BETA1]))
update("adagrad", "v", adagrad_next, lambda s: (s[LR_T], s[EPS]))  # v += g'^2; p -= lr_t*g'/(sqrt(v) + eps)


# ---------------------------------------------------------------- the step
@kernel
def tick(me, schedule, hyper: Ptr):
    """t += 1; the powers of beta1 and beta2; the rate of this step; Adam's corrections.

    One thread.  k counts the schedule's steps, from 0 after the warm-up.
    """
    if first(me):
        s = as_f64(hyper)
        t = s[T] + 1
        s[T] = t
        lr = s[LEARNING_RATE]
        k = t - 1 - s[WARMUP_STEPS]
        if k < 0:
            lr = lr * t / s[WARMUP_STEPS]
        elif schedule == COSINE or schedule == COSINE_RESTARTS:
            total = s[TOTAL_STEPS]
            if schedule == COSINE_RESTARTS:
                begin = s[GAMMA_T] - 1
                total += begin * (s[GAMMA] - 1)  # the geometric series: this cycle's length from all before it
                if k - begin >= total:
                    total += (k - begin) * (s[GAMMA] - 1)
                    begin = k
                    s[GAMMA_T] = begin + 1
                k -= begin
            part = k / total if k < total else 1.0
            lr = s[MIN_LR] + (lr - s[MIN_LR]) * 0.5 * (1 + cos(math.pi * part))
        elif schedule != CONSTANT:
            if k > 0 and (schedule == EXPONENTIAL or k % s[STEP_SIZE] == 0):
                s[GAMMA_T] = s[GAMMA_T] * s[GAMMA]
            lr = lr * s[GAMMA_T]
        b1, b2 = s[BETA1_T] * s[BETA1], s[BETA2_T] * s[BETA2]
        s[BETA1_T] = b1
        s[BETA2_T] = b2
        s[LR_T] = lr
        s[STEP_SIZE_T] = lr / (1 - b1)
        s[INV_SQRT_CORRECTION2_T] = 1 / sqrt(1 - b2)


@kernel
def rate_table(me, n, every, table: Ptr, hyper: Ptr):
    """lr_t *= f; step_size_t *= f; f = table[min(max(0, t - 1 - warmup_steps) // every, n - 1)].  One thread."""
    if first(me):
        s = as_f64(hyper)
        k = s[T] - 1 - s[WARMUP_STEPS]
        k = k / every if k > 0 else 0.0
        f = table[int(k) if k < n - 1 else n - 1]
        s[LR_T] *= f
        s[STEP_SIZE_T] *= f


@kernel
def rate_scale(me, factor: Float, hyper: Ptr, scaled: Ptr):
    """scaled = hyper, its lr_t and step_size_t times factor.  One thread."""
    if first(me):
        s, y = as_f64(hyper), as_f64(scaled)
        k = 0
        while k < N_SLOTS:
            y[k] = s[k]
            k += 1
        y[LR_T] *= factor
        y[STEP_SIZE_T] *= factor


# ---------------------------------------------------------------- clipping
@device
def clamp(x, c):
    """min(max(x, -c), c), NaN stays."""
    x = -c if x < -c else x
    return c if x > c else x


_clip = each(lambda g, c: (clamp(g, c),))


@kernel
def clip_value(me, rows, cols, g: Ptr, hyper: Ptr):
    """g = min(max(g, -clip_value), clip_value), NaN stays."""
    _clip(me, rows, cols, (g,), (g,), (like(g, as_f64(hyper)[CLIP_VALUE]),))


@device
def part_of_sum(x, n, i, step, zero, term):
    """Sum of term(x[i]), term(x[i + step]), ... below n, in four chains."""
    a, b, c, d = zero, zero, zero, zero
    while i + 3 * step < n:
        a += term(x[i])
        b += term(x[i + step])
        c += term(x[i + 2 * step])
        d += term(x[i + 3 * step])
        i += 4 * step
    while i < n:
        a += term(x[i])
        i += step
    return (a + b) + (c + d)


square = device(lambda x: x * x)
wide = device(lambda x: float(x))


@kernel
def sumsq(me, rows, cols, g: Ptr, s: Ptr):
    """s[r] = sum_c g[r,c]^2.  Rows are shared: a row is a warp's, or one thread's if it is shorter than a warp."""
    lo, hi = share(me, rows)
    if cols < warp_size():
        r = lo + thread()
        while r < hi:
            s[r] = part_of_sum(at(g, r * cols), cols, 0, 1, like(g, 0.0), square)
            r += threads()
    else:
        r = lo + warp()
        while r < hi:
            total = warp_sum(part_of_sum(at(g, r * cols), cols, lane(), warp_size(), like(g, 0.0), square))
            if lane() == 0:
                s[r] = total
            r += warps()


@kernel
def clip_norm_scale(me, n, s: Ptr, hyper: Ptr):
    """clip_scale = min(1, clip_norm/(sqrt(sum_i s[i]) + 1e-6)), NaN stays.

    Worker 0 alone: chunks are warps', in float64, and one thread adds them in order.
    """
    if me.worker != 0:
        return
    h = as_f64(hyper)
    totals, chunk = shared(h), warp()
    while chunk < CHUNKS:
        total = warp_sum(part_of_sum(s, n, chunk * warp_size() + lane(), CHUNKS * warp_size(), 0.0, wide))
        if lane() == 0:
            totals[chunk] = total
        chunk += warps()
    sync()
    if thread() == 0:
        total = 0.0
        for chunk in range(CHUNKS):
            total += totals[chunk]
        scale = h[CLIP_NORM] / (sqrt(total) + 1e-6)
        h[CLIP_SCALE] = 1.0 if scale > 1 else scale


# ---------------------------------------------------------------- penalties, zero
@device
def sign(x, one):
    """``one`` with the sign of x, 0 at 0."""
    none = like(x, 0)
    return one if x > none else (-one if x < none else none)


_penalty = each(lambda p, g, a1, a2: (g + (sign(p, a1) + a2 * p),))


@kernel
def penalty(me, rows, cols, l1: Float, l2: Float, p: Ptr, g: Ptr):
    """g += l1*sign(p) + 2*l2*p; sign(0) = 0."""
    _penalty(me, rows, cols, (p, g), (g,), (like(p, l1), like(p, 2 * l2)))


@kernel
def zero(me, rows, cols, g: Ptr):
    """g = 0.  Rows are shared, their elements among threads."""
    i, stop = span(me, rows, cols)
    while i < stop:
        g[i] = like(g, 0)
        i += threads()
