"""Optimizer updates, step counter and schedule, clipping, penalties (see `calcvm.ops.optimizers`).

In every update loop ``clip`` and ``decay`` are loop-invariant: the compiler makes a loop for each case.
"""

from __future__ import annotations

import math

from calcvm.kernels_cpu._common import (
    REASSOC,
    Float,
    Ptr,
    as_f64,
    at,
    kernel,
    like,
    maximum,
    minimum,
    njit,
    share,
    sqrt,
)

# Slots of ``hyper``; a test compares them with calcvm.ops.optimizers.HYPER_SLOTS.
LEARNING_RATE, BETA1, BETA2, EPS, WEIGHT_DECAY, CLIP_VALUE, CLIP_NORM = range(7)
STEP_SIZE, GAMMA, TOTAL_STEPS, MIN_LR, WARMUP_STEPS = range(7, 12)
T, BETA1_T, BETA2_T, GAMMA_T, LR_T, STEP_SIZE_T, INV_SQRT_CORRECTION2_T, CLIP_SCALE = range(12, 20)
N_SLOTS = 20
CONSTANT, STEP, EXPONENTIAL, COSINE, COSINE_RESTARTS = range(5)


@njit(inline=True)
def span(rows, cols, w, nw):
    """Elements of the rows that worker ``w`` owns."""
    lo, hi = share(rows, w, nw)
    return lo * cols, hi * cols


@njit(inline=True)
def slot(x, hyper, k):
    """A hyperparameter in the dtype of ``x``."""
    return like(x, as_f64(hyper)[k])


@njit(inline=True)
def gradient(g, p, clip, scale, decay):
    """Scaled if ``clip``, with L2 decay if there is any."""
    if clip:
        g *= scale
    if decay != 0:
        g += decay * p
    return g


# ---------------------------------------------------------------- updates
@kernel
def sgd(w, nw, rows, cols, clip, p: Ptr, g: Ptr, hyper: Ptr):
    """p -= lr_t*g'."""
    lo, hi = span(rows, cols, w, nw)
    lr, scale, decay = slot(p, hyper, LR_T), slot(p, hyper, CLIP_SCALE), slot(p, hyper, WEIGHT_DECAY)
    for i in range(lo, hi):
        p[i] -= lr * gradient(g[i], p[i], clip, scale, decay)


@kernel
def momentum(w, nw, rows, cols, clip, p: Ptr, g: Ptr, m: Ptr, hyper: Ptr):
    """m = beta1*m + g'; p -= lr_t*m."""
    lo, hi = span(rows, cols, w, nw)
    lr, scale, decay = slot(p, hyper, LR_T), slot(p, hyper, CLIP_SCALE), slot(p, hyper, WEIGHT_DECAY)
    mu = slot(p, hyper, BETA1)
    for i in range(lo, hi):
        mi = mu * m[i] + gradient(g[i], p[i], clip, scale, decay)
        m[i] = mi
        p[i] -= lr * mi


@kernel
def nesterov(w, nw, rows, cols, clip, p: Ptr, g: Ptr, m: Ptr, hyper: Ptr):
    """m = beta1*m + g'; p -= lr_t*(g' + beta1*m)."""
    lo, hi = span(rows, cols, w, nw)
    lr, scale, decay = slot(p, hyper, LR_T), slot(p, hyper, CLIP_SCALE), slot(p, hyper, WEIGHT_DECAY)
    mu = slot(p, hyper, BETA1)
    for i in range(lo, hi):
        gi = gradient(g[i], p[i], clip, scale, decay)
        mi = mu * m[i] + gi
        m[i] = mi
        p[i] -= lr * (gi + mu * mi)


@njit(inline=True)
def adam_steps(lo, hi, clip, p, g, m, v, hyper, step, c2):
    """m += (1-beta1)*(g' - m); v = beta2*v + (1-beta2)*g'^2; p -= step*m/(sqrt(v)*c2 + eps)."""
    scale, decay = slot(p, hyper, CLIP_SCALE), slot(p, hyper, WEIGHT_DECAY)
    eps, beta2 = slot(p, hyper, EPS), slot(p, hyper, BETA2)
    a1, a2 = like(p, 1 - as_f64(hyper)[BETA1]), like(p, 1 - as_f64(hyper)[BETA2])
    for i in range(lo, hi):
        gi = gradient(g[i], p[i], clip, scale, decay)
        mi = m[i] + a1 * (gi - m[i])
        vi = beta2 * v[i] + a2 * gi * gi
        m[i] = mi
        v[i] = vi
        p[i] -= step * mi / (sqrt(vi) * c2 + eps)


@kernel
def adam(w, nw, rows, cols, clip, p: Ptr, g: Ptr, m: Ptr, v: Ptr, hyper: Ptr):
    """p -= step_size_t*m/(sqrt(v)*c2 + eps), c2 the root's correction."""
    lo, hi = span(rows, cols, w, nw)
    adam_steps(lo, hi, clip, p, g, m, v, hyper, slot(p, hyper, STEP_SIZE_T), slot(p, hyper, INV_SQRT_CORRECTION2_T))


@kernel
def adamhat(w, nw, rows, cols, clip, p: Ptr, g: Ptr, m: Ptr, v: Ptr, hyper: Ptr):
    """p -= step_size_t/c2*m/(sqrt(v) + eps): eps is added to the root before its correction."""
    lo, hi = span(rows, cols, w, nw)
    step = like(p, as_f64(hyper)[STEP_SIZE_T] / as_f64(hyper)[INV_SQRT_CORRECTION2_T])
    adam_steps(lo, hi, clip, p, g, m, v, hyper, step, like(p, 1.0))


@kernel
def adamw(w, nw, rows, cols, clip, p: Ptr, g: Ptr, m: Ptr, v: Ptr, hyper: Ptr):
    """p *= 1 - lr_t*weight_decay; then as adam without decay."""
    lo, hi = span(rows, cols, w, nw)
    step, scale = slot(p, hyper, STEP_SIZE_T), slot(p, hyper, CLIP_SCALE)
    c2, eps, beta2 = slot(p, hyper, INV_SQRT_CORRECTION2_T), slot(p, hyper, EPS), slot(p, hyper, BETA2)
    a1, a2 = like(p, 1 - as_f64(hyper)[BETA1]), like(p, 1 - as_f64(hyper)[BETA2])
    keep = like(p, 1 - as_f64(hyper)[LR_T] * as_f64(hyper)[WEIGHT_DECAY])
    none = like(p, 0.0)
    for i in range(lo, hi):
        gi = gradient(g[i], p[i], clip, scale, none)
        mi = m[i] + a1 * (gi - m[i])
        vi = beta2 * v[i] + a2 * gi * gi
        m[i] = mi
        v[i] = vi
        p[i] = keep * p[i] - step * mi / (sqrt(vi) * c2 + eps)


@kernel
def rmsprop(w, nw, rows, cols, clip, p: Ptr, g: Ptr, v: Ptr, hyper: Ptr):
    """v = beta2*v + (1-beta2)*g'^2; p -= lr_t*g'/(sqrt(v) + eps)."""
    lo, hi = span(rows, cols, w, nw)
    lr, scale, decay = slot(p, hyper, LR_T), slot(p, hyper, CLIP_SCALE), slot(p, hyper, WEIGHT_DECAY)
    alpha, eps, a2 = slot(p, hyper, BETA2), slot(p, hyper, EPS), like(p, 1 - as_f64(hyper)[BETA2])
    for i in range(lo, hi):
        gi = gradient(g[i], p[i], clip, scale, decay)
        vi = alpha * v[i] + a2 * gi * gi
        v[i] = vi
        p[i] -= lr * gi / (sqrt(vi) + eps)


@kernel
def rmsprop_momentum(w, nw, rows, cols, clip, p: Ptr, g: Ptr, v: Ptr, m: Ptr, hyper: Ptr):
    """v = beta2*v + (1-beta2)*g'^2; m = beta1*m + g'/(sqrt(v) + eps); p -= lr_t*m."""
    lo, hi = span(rows, cols, w, nw)
    lr, scale, decay = slot(p, hyper, LR_T), slot(p, hyper, CLIP_SCALE), slot(p, hyper, WEIGHT_DECAY)
    alpha, eps, a2 = slot(p, hyper, BETA2), slot(p, hyper, EPS), like(p, 1 - as_f64(hyper)[BETA2])
    mu = slot(p, hyper, BETA1)
    for i in range(lo, hi):
        gi = gradient(g[i], p[i], clip, scale, decay)
        vi = alpha * v[i] + a2 * gi * gi
        mi = mu * m[i] + gi / (sqrt(vi) + eps)
        v[i] = vi
        m[i] = mi
        p[i] -= lr * mi


@kernel
def adagrad(w, nw, rows, cols, clip, p: Ptr, g: Ptr, v: Ptr, hyper: Ptr):
    """v += g'^2; p -= lr_t*g'/(sqrt(v) + eps)."""
    lo, hi = span(rows, cols, w, nw)
    lr, scale, decay = slot(p, hyper, LR_T), slot(p, hyper, CLIP_SCALE), slot(p, hyper, WEIGHT_DECAY)
    eps = slot(p, hyper, EPS)
    for i in range(lo, hi):
        gi = gradient(g[i], p[i], clip, scale, decay)
        vi = v[i] + gi * gi
        v[i] = vi
        p[i] -= lr * gi / (sqrt(vi) + eps)


# ---------------------------------------------------------------- the step
@kernel
def tick(w, nw, schedule, hyper: Ptr):
    """t += 1; the powers of beta1 and beta2; the rate of this step; Adam's corrections.

    Worker 0 alone.  k counts the schedule's steps, from 0 after the warm-up.
    """
    if w != 0:
        return
    s = as_f64(hyper)
    t = s[T] + 1
    s[T] = t
    lr = s[LEARNING_RATE]
    k = t - 1 - s[WARMUP_STEPS]
    if k < 0:
        lr = lr * t / s[WARMUP_STEPS]
    elif schedule != CONSTANT:
        if schedule == COSINE or schedule == COSINE_RESTARTS:
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
            lr = s[MIN_LR] + (lr - s[MIN_LR]) * 0.5 * (1 + math.cos(math.pi * part))
        else:
            if k > 0 and (schedule == EXPONENTIAL or k % s[STEP_SIZE] == 0):
                s[GAMMA_T] = s[GAMMA_T] * s[GAMMA]
            lr = lr * s[GAMMA_T]
    b1, b2 = s[BETA1_T] * s[BETA1], s[BETA2_T] * s[BETA2]
    s[BETA1_T] = b1
    s[BETA2_T] = b2
    s[LR_T] = lr
    s[STEP_SIZE_T] = lr / (1 - b1)
    s[INV_SQRT_CORRECTION2_T] = 1 / math.sqrt(1 - b2)


@kernel
def rate_table(w, nw, n, every, table: Ptr, hyper: Ptr):
    """lr_t *= f; step_size_t *= f; f = table[min(max(0, t - 1 - warmup_steps) // every, n - 1)].  Worker 0 alone."""
    if w != 0:
        return
    s = as_f64(hyper)
    k, x = 0, (s[T] - 1 - s[WARMUP_STEPS]) / every
    if x > 0:  # and no NaN
        k = int(x) if x < n - 1 else n - 1
    f = table[k]
    s[LR_T] *= f
    s[STEP_SIZE_T] *= f


@kernel
def rate_scale(w, nw, factor: Float, hyper: Ptr, scaled: Ptr):
    """scaled = hyper, its lr_t and step_size_t times factor.  Worker 0 alone."""
    if w != 0:
        return
    s, y = as_f64(hyper), as_f64(scaled)
    for k in range(N_SLOTS):
        y[k] = s[k]
    y[LR_T] *= factor
    y[STEP_SIZE_T] *= factor


# ---------------------------------------------------------------- clipping
@kernel
def clip_value(w, nw, rows, cols, g: Ptr, hyper: Ptr):
    """g = min(max(g, -clip_value), clip_value), NaN stays."""
    lo, hi = span(rows, cols, w, nw)
    c = slot(g, hyper, CLIP_VALUE)
    for i in range(lo, hi):
        g[i] = minimum(maximum(g[i], -c), c)


@njit(fastmath=REASSOC)
def sum_of_squares(g, n):
    s = like(g, 0.0)
    for i in range(n):
        s += g[i] * g[i]
    return s


@njit(fastmath=REASSOC)
def sum_f64(x, n):
    s = 0.0
    for i in range(n):
        s += x[i]
    return s


@kernel
def sumsq(w, nw, rows, cols, g: Ptr, s: Ptr):
    """s[r] = sum_c g[r,c]^2; rows shared."""
    lo, hi = share(rows, w, nw)
    if cols == 1:
        for r in range(lo, hi):
            s[r] = g[r] * g[r]
    else:
        for r in range(lo, hi):
            s[r] = sum_of_squares(at(g, r * cols), cols)


@kernel
def clip_norm_scale(w, nw, n, s: Ptr, hyper: Ptr):
    """clip_scale = min(1, clip_norm/(sqrt(sum_i s[i]) + 1e-6)); worker 0 alone.  NaN stays."""
    if w != 0:
        return
    scale = as_f64(hyper)[CLIP_NORM] / (math.sqrt(sum_f64(s, n)) + 1e-6)
    as_f64(hyper)[CLIP_SCALE] = 1.0 if scale > 1 else scale


# ---------------------------------------------------------------- penalties, zero
@kernel
def penalty(w, nw, rows, cols, l1: Float, l2: Float, p: Ptr, g: Ptr):
    """g += l1*sign(p) + 2*l2*p; sign(0) = 0."""
    lo, hi = span(rows, cols, w, nw)
    a1, a2, none = like(p, l1), like(p, 2 * l2), like(p, 0.0)
    if l1 == 0:
        for i in range(lo, hi):
            g[i] += a2 * p[i]
    else:
        for i in range(lo, hi):
            x = p[i]
            sign = a1 if x > none else (-a1 if x < none else none)
            g[i] += sign + a2 * x


@kernel
def zero(w, nw, rows, cols, g: Ptr):
    """g = 0."""
    lo, hi = span(rows, cols, w, nw)
    for i in range(lo, hi):
        g[i] = like(g, 0.0)
