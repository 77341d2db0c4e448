"""Float64 definitions of normalization and of statistics of a batch."""

import numpy as np


def center(x, running, momentum=0.1):
    m = x.mean(0)
    return {"y": x - m, "running": running + momentum * (m - running)}


def _scaled(x, scale, shift):
    x = x if scale is None else x * scale
    return x if shift is None else x + shift


def batch_norm(x, running_mean, running_var, scale=None, shift=None, eps=1e-5, momentum=0.1):
    axes = tuple(range(x.ndim - 1))
    m = x.mean(axes)
    count = x.size // x.shape[-1]
    var = ((x - m) ** 2).mean(axes)
    inv = 1 / np.sqrt(var + eps)
    return {
        "y": _scaled((x - m) * inv, scale, shift),
        "mean": m,
        "inv": inv,
        "running_mean": running_mean + momentum * (m - running_mean),
        "running_var": running_var + momentum * (count > 1) * (var * count / max(count - 1, 1) - running_var),
    }


def batch_norm_inference(x, running_mean, running_var, scale=None, shift=None, eps=1e-5):
    return _scaled((x - running_mean) / np.sqrt(running_var + eps), scale, shift)


def group_norm(x, scale=None, shift=None, groups=1, eps=1e-5):
    n, c = x.shape[0], x.shape[-1]
    g = x.reshape(n, -1, groups, c // groups)
    m = g.mean((1, 3))
    inv = 1 / np.sqrt(((g - m[:, None, :, None]) ** 2).mean((1, 3)) + eps)
    y = (g - m[:, None, :, None]) * inv[:, None, :, None]
    return {"y": _scaled(y.reshape(x.shape), scale, shift), "mean": m, "inv": inv}


def instance_norm(x, scale=None, shift=None, eps=1e-5):
    return group_norm(x, scale, shift, x.shape[-1], eps)


def layer_norm(x, scale=None, shift=None, axes=1, eps=1e-5):
    last = tuple(range(x.ndim - axes, x.ndim))
    m = x.mean(last, keepdims=True)
    inv = 1 / np.sqrt(((x - m) ** 2).mean(last, keepdims=True) + eps)
    lead = x.shape[: x.ndim - axes]
    return {"y": _scaled((x - m) * inv, scale, shift), "mean": m.reshape(lead), "inv": inv.reshape(lead)}


def rms_norm(x, scale=None, axes=1, eps=1e-5):
    inv = 1 / np.sqrt((x**2).mean(tuple(range(x.ndim - axes, x.ndim)), keepdims=True) + eps)
    return {"y": _scaled(x * inv, scale, None), "inv": inv.reshape(x.shape[: x.ndim - axes])}


def local_response_norm(x, size=5, alpha=1e-4, beta=0.75, k=1.0):
    channels = x.shape[-1]
    squares = np.pad(x**2, [(0, 0)] * (x.ndim - 1) + [(size // 2, (size - 1) // 2)])
    sums = sum(squares[..., j : j + channels] for j in range(size))
    return x / (k + alpha / size * sums) ** beta
