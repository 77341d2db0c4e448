"""Optimizer updates, step counter and schedule, clipping, penalties (see `calcvm.ops.optimizers`).

An update is bound by memory.  So a thread takes four elements at a time, a block apart, and all their loads are on their
way before the first is computed.
"""

from __future__ import annotations

import math

from calcvm.kernels_cuda._common import (
    Float,  # noqa: F401  (in text below)
    Ptr,
    first,
    kernel,
    kernel_from,
    share,
)
from calcvm.kernels_cuda._cuda import (
    as_f64,
    at,
    device,
    lane,
    like,
    loaded,  # noqa: F401  (in text below)
    shared,
    sync,
    thread,
    threads,
    warp_size,
)
from calcvm.kernels_cuda._math import cos, sqrt
from calcvm.kernels_cuda._reduce import warp, warp_sum, warps

# Slots of ``hyper``, in the order of calcvm.ops.optimizers.HYPER_SLOTS.
LEARNING_RATE, BETA1, BETA2, EPS, WEIGHT_DECAY, CLIP_VALUE, CLIP_NORM = range(7)
STEP_SIZE, GAMMA, TOTAL_STEPS, MIN_LR, WARMUP_STEPS = range(7, 12)
T, BETA1_T, BETA2_T, GAMMA_T, LR_T, STEP_SIZE_T, INV_SQRT_CORRECTION2_T, CLIP_SCALE = range(12, 20)
N_SLOTS = 20
CONSTANT, STEP, EXPONENTIAL, COSINE, COSINE_RESTARTS = range(5)

AT_ONCE = 4  # elements of a thread whose loads are on their way together
CHUNKS = 8  # of a total: each is a warp's, whatever the number of warps


@device
def span(rows, cols, w, nw):
    """First element of this thread, and the end, of the rows that worker ``w`` owns."""
    lo, hi = share(rows, w, nw)
    return lo * cols + thread(), hi * cols


@device
def gradient(g, p, scale, decay):
    """Scaled, with L2 decay if there is any."""
    g *= scale
    return g + decay * p if decay != 0 else g


_EACH = '''
def {name}(w, nw, rows, cols, {parameters}):
    """{doc}

    Rows are shared, {at_once} elements a thread at a time.  An element past the end is the last one again, not stored.
    """
    i, stop = span(rows, cols, w, nw)
    step, last = threads(), stop - 1
    {setup}
    while i < stop:
        {body}
'''


def each(name: str, doc: str, parameters: str, setup: list[str], loads: str, stores: str, formula: str) -> None:
    """Register a kernel of elements: ``formula`` gives ``stores`` of ``loads``, "{k}" after an operand's name its element."""
    numbers = range(AT_ONCE)
    body = [f"i{k} = min(i + {k} * step, last)" for k in numbers]
    body += [f"{n}{k} = {n}[i{k}]" for k in numbers for n in loads.split()]
    body.append("loaded()")
    for k in numbers:
        body.append(", ".join(f"{n}{k}" for n in stores.split()) + " = " + formula.format(k=k))
    for k in numbers:
        body.append(f"if i + {k} * step < stop:")
        body += [f"    {n}[i{k}] = {n}{k}" for n in stores.split()]
    body.append(f"i += {AT_ONCE} * step")
    lines = {"setup": "\n    ".join(setup), "body": "\n        ".join(body)}
    kernel_from(_EACH.format(name=name, doc=doc, parameters=parameters, at_once=AT_ONCE, **lines), globals())


# ---------------------------------------------------------------- updates
def update(
    name: str, state: str, slots: dict[str, str], doc: str, decay: str = "s[WEIGHT_DECAY]", of: str = ""
) -> None:
    """Register an update: NAME_next, or ``of``, gives an element's (p, *state) for its (p, g', *state, *slots)."""
    setup = ["s = as_f64(hyper)", "scale = like(p, s[CLIP_SCALE] if clip else 1.0)", f"decay = like(p, {decay})"]
    setup += [f"{n} = like(p, {value})" for n, value in slots.items()]
    given = "".join(f", {n}{{k}}" for n in state.split()) + "".join(f", {n}" for n in slots)
    formula = f"{of or name + '_next'}(p{{k}}, gradient(g{{k}}, p{{k}}, scale, decay){given})"
    parameters = "clip, p: Ptr, g: Ptr, " + "".join(f"{n}: Ptr, " for n in state.split()) + "hyper: Ptr"
    each(name, doc, parameters, setup, f"p g {state}", f"p {state}", formula)


@device
def sgd_next(p, g, lr):
    return p - lr * g


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


LR, MU, ROOT = {"lr": "s[LR_T]"}, {"mu": "s[BETA1]"}, {"eps": "s[EPS]"}
SQUARES = ROOT | {"beta2": "s[BETA2]", "a2": "1 - s[BETA2]"}
MOMENTS = SQUARES | {"a1": "1 - s[BETA1]"}
ADAM = {"size": "s[STEP_SIZE_T]", "c2": "s[INV_SQRT_CORRECTION2_T]"} | MOMENTS
ADAMHAT = {"size": "s[STEP_SIZE_T] / s[INV_SQRT_CORRECTION2_T]", "c2": "1.0"} | MOMENTS
KEEP = {"keep": "1 - s[LR_T] * s[WEIGHT_DECAY]"}
V = "v = beta2*v + (1-beta2)*g'^2"
M_V = f"m += (1-beta1)*(g' - m); {V}"

update("sgd", "", LR, "p -= lr_t*g'.")
update("momentum", "m", LR | MU, "m = beta1*m + g'; p -= lr_t*m.")
update("nesterov", "m", LR | MU, "m = beta1*m + g'; p -= lr_t*(g' + beta1*m).")
update("adam", "m v", ADAM, f"{M_V}; p -= step_size_t*m/(sqrt(v)*c2 + eps).")
update("adamhat", "m v", ADAMHAT, f"{M_V}; p -= step_size_t/c2*m/(sqrt(v) + eps).", of="adam_next")
update("adamw", "m v", ADAM | KEEP, "p *= 1 - lr_t*weight_decay; then as adam without decay.", decay="0.0")
update("rmsprop", "v", LR | SQUARES, f"{V}; p -= lr_t*g'/(sqrt(v) + eps).")
update("rmsprop_momentum", "v m", LR | SQUARES | MU, f"{V}; m = beta1*m + g'/(sqrt(v) + eps); p -= lr_t*m.")
update("adagrad", "v", LR | ROOT, "v += g'^2; p -= lr_t*g'/(sqrt(v) + eps).")


# ---------------------------------------------------------------- the step
@kernel
def tick(w, nw, schedule, hyper: Ptr):
    """t += 1; the powers of beta1 and beta2; the rate of this step; Adam's corrections.

    One thread.  k counts the schedule's steps, from 0 after the warm-up.
    """
    if first(w):
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
def rate_table(w, nw, n, every, table: Ptr, hyper: Ptr):
    """lr_t *= f; step_size_t *= f; f = table[min(max(0, t - 1 - warmup_steps) // every, n - 1)].  One thread."""
    if first(w):
        s = as_f64(hyper)
        k = s[T] - 1 - s[WARMUP_STEPS]
        k = k / every if k > 0 else 0.0
        f = table[int(k) if k < n - 1 else n - 1]
        s[LR_T] *= f
        s[STEP_SIZE_T] *= f


@kernel
def rate_scale(w, nw, factor: Float, hyper: Ptr, scaled: Ptr):
    """scaled = hyper, its lr_t and step_size_t times factor.  One thread."""
    if first(w):
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


each(
    "clip_value", "g = min(max(g, -clip_value), clip_value), NaN stays.", "g: Ptr, hyper: Ptr",
    ["c = like(g, as_f64(hyper)[CLIP_VALUE])"], "g", "g", "clamp(g{k}, c)",
)  # fmt: skip


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


@device
def square(x):
    return x * x


@device
def wide(x):
    return float(x)


@kernel
def sumsq(w, nw, rows, cols, g: Ptr, s: Ptr):
    """s[r] = sum_c g[r,c]^2.  Rows are shared: a row is a warp's, or one thread's if it is shorter than a warp."""
    lo, hi = share(rows, w, nw)
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
def clip_norm_scale(w, nw, n, s: Ptr, hyper: Ptr):
    """clip_scale = min(1, clip_norm/(sqrt(sum_i s[i]) + 1e-6)), NaN stays.

    Worker 0 alone: chunks are warps', in float64, and one thread adds them in order.
    """
    if w != 0:
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


each(
    "penalty", "g += l1*sign(p) + 2*l2*p; sign(0) = 0.", "l1: Float, l2: Float, p: Ptr, g: Ptr",
    ["a1, a2 = like(p, l1), like(p, 2 * l2)"], "p g", "g", "g{k} + (sign(p{k}, a1) + a2 * p{k})",
)  # fmt: skip


@kernel
def zero(w, nw, rows, cols, g: Ptr):
    """g = 0.  Rows are shared, their elements among threads."""
    i, stop = span(rows, cols, w, nw)
    while i < stop:
        g[i] = like(g, 0)
        i += threads()
