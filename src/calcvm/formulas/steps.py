"""A step's computations on an optimizer's hyperparameters: functions of their float64 slots that each device compiles."""

from __future__ import annotations

import math

# Slots, in the order of `calcvm.formulas.optimizers.HYPER_SLOTS`.
LEARNING_RATE, BETA1, BETA2, EPS, WEIGHT_DECAY, CLIP_VALUE, CLIP_NORM = range(7)
STEP_SIZE, GAMMA, TOTAL_STEPS, MIN_LR, WARMUP_STEPS = range(7, 12)
T, BETA1_T, BETA2_T, GAMMA_T, LR_T, STEP_SIZE_T, INV_SQRT_CORRECTION2_T, CLIP_SCALE = range(12, 20)
N_SLOTS = 20
CONSTANT, STEP, EXPONENTIAL, COSINE, COSINE_RESTARTS = range(5)
# sin(pi/2 x)/x in x^2, for x of at most 1/2: Taylor's series to 1e-19.  (The bits of libm's cosine depend on the processor.)
SINE = tuple((-1) ** k * (math.pi / 2) ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(8, -1, -1))


def tick(s, schedule):  # type: ignore[no-untyped-def]
    """t += 1; the powers of beta1 and beta2; the rate of this step; Adam's corrections.

    k counts the schedule's steps, from 0 after the warm-up.
    """
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
            total += begin * (s[GAMMA] - 1)  # the geometric series gives this cycle's length from that of all before it
            if k - begin >= total - k * 1e-12:  # as 10 + 10 * (1.1 - 1) are 11 but for rounding
                total += (k - begin) * (s[GAMMA] - 1)
                begin = k
                s[GAMMA_T] = begin + 1
            k -= begin
        part = k / total if k < total else 1.0
        near = part if part < 0.5 else 1 - part  # to the closer end
        z, sine = near * near, 0.0
        for c in SINE:
            sine = sine * z + c
        sine *= near
        share = 1 - sine * sine if part < 0.5 else sine * sine  # (1 + cos(pi part)) / 2
        lr = s[MIN_LR] + (lr - s[MIN_LR]) * share
    elif schedule != CONSTANT:
        if k > 0 and (schedule == EXPONENTIAL or k % s[STEP_SIZE] == 0):
            s[GAMMA_T] = s[GAMMA_T] * s[GAMMA]
        lr = lr * s[GAMMA_T]
    b1, b2 = s[BETA1_T] * s[BETA1], s[BETA2_T] * s[BETA2]
    s[BETA1_T] = b1
    s[BETA2_T] = b2
    s[LR_T] = lr
    s[STEP_SIZE_T] = lr / (1 - b1)
    s[INV_SQRT_CORRECTION2_T] = 1 / math.sqrt(1 - b2)


def rate_table(s, n, every, table):  # type: ignore[no-untyped-def]
    """lr_t *= f; step_size_t *= f; f = table[min(max(0, t - 1 - warmup_steps) // every, n - 1)]."""
    k, x = 0, (s[T] - 1 - s[WARMUP_STEPS]) / every
    if x > 0:  # and not NaN
        k = int(x) if x < n - 1 else n - 1
    f = table[k]
    s[LR_T] *= f
    s[STEP_SIZE_T] *= f


def rate_scale(s, scaled, factor):  # type: ignore[no-untyped-def]
    """scaled = s, its lr_t and step_size_t times factor."""
    for k in range(N_SLOTS):
        scaled[k] = s[k]
    scaled[LR_T] *= factor
    scaled[STEP_SIZE_T] *= factor


def decay_scale(s, factor):  # type: ignore[no-untyped-def]
    """weight_decay *= factor."""
    s[WEIGHT_DECAY] *= factor
