"""Float64 definitions of recurrent cells, a sample and a step after the other."""

import numpy as np


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _lstm(z, h, c, wh, b):
    i, f, g, o = np.split(z + h @ wh + b, 4)
    i, f, g, o = _sigmoid(i), _sigmoid(f), np.tanh(g), _sigmoid(o)
    c = f * c + i * g
    return o * np.tanh(c), c, {"gates": np.concatenate([i, f, g, o]), "c": c}


def _gru(z, h, c, wh, b):
    n = len(h)
    of_h = h @ wh + b
    r, u = _sigmoid(z[:n] + of_h[:n]), _sigmoid(z[n : 2 * n] + of_h[n : 2 * n])
    g = np.tanh(z[2 * n :] + r * of_h[2 * n :])
    return g + u * (h - g), c, {"gates": np.concatenate([r, u, g]), "more": of_h[2 * n :]}


def _rnn(z, h, c, wh, b):
    return np.tanh(z + h @ wh + b), c, {}


def _rnn_relu(z, h, c, wh, b):
    return np.maximum(z + h @ wh + b, 0), c, {}


def _run(step, z, wh, b, h0, c0, lengths, reverse):
    (N, T, _), H = z.shape, len(wh)
    b = np.zeros(wh.shape[1]) if b is None else b
    made = {"y": np.zeros((N, T, H)), "hn": np.zeros((N, H)), "cn": np.zeros((N, H))}
    for n in range(N):
        h, c = (np.zeros(H) if s is None else s[n] for s in (h0, c0))
        length = T if lengths is None else int(lengths[n])
        for t in range(length)[::-1] if reverse else range(length):
            h, c, kept = step(z[n, t], h, c, wh, b)
            made["y"][n, t] = h
            for name, value in kept.items():
                made.setdefault(name, np.full((N, T, len(value)), 0.0))[n, t] = value
        made["hn"][n], made["cn"][n] = h, c
    return made


def lstm(z, wh, b=None, h0=None, c0=None, lengths=None, reverse=False):
    return _run(_lstm, z, wh, b, h0, c0, lengths, reverse)


def _of_one_state(step):
    def run(z, wh, b=None, h0=None, lengths=None, reverse=False):
        made = _run(step, z, wh, b, h0, None, lengths, reverse)
        del made["cn"]
        return made

    return run


gru, rnn, rnn_relu = _of_one_state(_gru), _of_one_state(_rnn), _of_one_state(_rnn_relu)
