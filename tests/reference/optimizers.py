"""Float64 definitions of the optimizer rows: one step; each returns the new value of what it writes."""

import numpy as np

from calcvm.ops.optimizers import HYPER_SLOTS


def named(hyper):
    return dict(zip(HYPER_SLOTS, (float(v) for v in hyper)))


def gradient(p, g, hyper, clip):
    h = named(hyper)
    return h, (h["clip_scale"] if clip else 1.0) * g + h["weight_decay"] * p


def sgd(p, g, hyper, clip=0):
    h, g = gradient(p, g, hyper, clip)
    return {"p": p - h["lr_t"] * g}


def momentum(p, g, m, hyper, clip=0):
    h, g = gradient(p, g, hyper, clip)
    m = h["beta1"] * m + g
    return {"p": p - h["lr_t"] * m, "m": m}


def nesterov(p, g, m, hyper, clip=0):
    h, g = gradient(p, g, hyper, clip)
    m = h["beta1"] * m + g
    return {"p": p - h["lr_t"] * (g + h["beta1"] * m), "m": m}


def _adam(p, g, m, v, h):
    m = h["beta1"] * m + (1 - h["beta1"]) * g
    v = h["beta2"] * v + (1 - h["beta2"]) * g**2
    return {"p": p - h["step_size_t"] * m / (np.sqrt(v) * h["inv_sqrt_correction2_t"] + h["eps"]), "m": m, "v": v}


def adam(p, g, m, v, hyper, clip=0):
    h, g = gradient(p, g, hyper, clip)
    return _adam(p, g, m, v, h)


def adamhat(p, g, m, v, hyper, clip=0):
    h, g = gradient(p, g, hyper, clip)
    root = h["inv_sqrt_correction2_t"]
    return _adam(p, g, m, v, {**h, "step_size_t": h["step_size_t"] / root, "inv_sqrt_correction2_t": 1.0})


def adamw(p, g, m, v, hyper, clip=0):
    h = named(hyper)
    return _adam(p * (1 - h["lr_t"] * h["weight_decay"]), g * (h["clip_scale"] if clip else 1), m, v, h)


def lion(p, g, m, hyper, clip=0):
    h = named(hyper)
    g = g * (h["clip_scale"] if clip else 1)
    step = np.sign(h["beta1"] * m + (1 - h["beta1"]) * g)
    m = h["beta2"] * m + (1 - h["beta2"]) * g
    return {"p": p * (1 - h["lr_t"] * h["weight_decay"]) - h["lr_t"] * step, "m": m}


def rmsprop(p, g, v, hyper, clip=0):
    h, g = gradient(p, g, hyper, clip)
    v = h["beta2"] * v + (1 - h["beta2"]) * g**2
    return {"p": p - h["lr_t"] * g / (np.sqrt(v) + h["eps"]), "v": v}


def rmsprop_momentum(p, g, v, m, hyper, clip=0):
    h, g = gradient(p, g, hyper, clip)
    v = h["beta2"] * v + (1 - h["beta2"]) * g**2
    m = h["beta1"] * m + g / (np.sqrt(v) + h["eps"])
    return {"p": p - h["lr_t"] * m, "v": v, "m": m}


def adagrad(p, g, v, hyper, clip=0):
    h, g = gradient(p, g, hyper, clip)
    v = v + g**2
    return {"p": p - h["lr_t"] * g / (np.sqrt(v) + h["eps"]), "v": v}


def tick(hyper, schedule=0):
    h = named(hyper)
    h["t"] += 1
    k = h["t"] - 1 - h["warmup_steps"]
    lr = h["learning_rate"]
    if k < 0:
        lr *= h["t"] / h["warmup_steps"]
    elif schedule in (1, 2):
        if k > 0 and (schedule == 2 or k % h["step_size"] == 0):
            h["gamma_t"] *= h["gamma"]
        lr *= h["gamma_t"]
    elif schedule == 3:
        part = min(k / h["total_steps"], 1)
        lr = h["min_lr"] + (lr - h["min_lr"]) * (1 + np.cos(np.pi * part)) / 2
    elif schedule == 4:
        begin = h["gamma_t"] - 1
        length = h["total_steps"] + begin * (h["gamma"] - 1)
        if k - begin >= length:
            begin, length = k, h["total_steps"] + k * (h["gamma"] - 1)
            h["gamma_t"] = k + 1
        part = min((k - begin) / length, 1)
        lr = h["min_lr"] + (lr - h["min_lr"]) * (1 + np.cos(np.pi * part)) / 2
    h["lr_t"] = lr
    h["beta1_t"] *= h["beta1"]
    h["beta2_t"] *= h["beta2"]
    h["step_size_t"] = lr / (1 - h["beta1_t"])
    h["inv_sqrt_correction2_t"] = 1 / np.sqrt(1 - h["beta2_t"])
    return {"hyper": np.array([h[name] for name in HYPER_SLOTS])}


def rate_table(table, hyper, every=1):
    h = named(hyper)
    k = int(max(0, h["t"] - 1 - h["warmup_steps"]) // every)
    return {"hyper": rated(h, table[min(k, len(table) - 1)])}


def rate_scale(hyper, factor=1.0):
    return {"scaled": rated(named(hyper), factor)}


def decay_scale(scaled, factor=1.0):
    h = named(scaled)
    h["weight_decay"] *= factor
    return {"scaled": np.array([h[name] for name in HYPER_SLOTS])}


def rated(h, factor):
    h = h | {name: h[name] * factor for name in ("lr_t", "step_size_t")}
    return np.array([h[name] for name in HYPER_SLOTS])


def clip_value(g, hyper):
    c = named(hyper)["clip_value"]
    return {"g": np.clip(g, -c, c)}


def sumsq(g):
    return {"s": np.sqrt((g.reshape(g.shape[0], -1) ** 2).sum(1))}


def clip_norm_scale(s, hyper):
    h = named(hyper)
    h["clip_scale"] = min(1.0, h["clip_norm"] / (np.sqrt((s * s).sum()) + 1e-6))
    return {"hyper": np.array([h[name] for name in HYPER_SLOTS])}


def penalty(p, g, l1=0.0, l2=0.0):
    return {"g": g + l1 * np.sign(p) + 2 * l2 * p}


def zero(shape=(1,)):
    return {"g": np.zeros(shape)}
