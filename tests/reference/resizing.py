"""Float64 definitions of the operators that scale and pad axes."""

import numpy as np


def pad(x, pads, mode="constant", value=0.0):
    n = np.ndim(x)
    how = {"constant_values": value} if mode == "constant" else {}
    return np.pad(x, [*zip(pads[:n], pads[n:])], mode, **how)


def upsample(x, sizes=None, scales=None, mode="nearest", align_corners=False):
    for axis in range(1, np.ndim(x) - 1):
        n = x.shape[axis]
        scale = None if scales is None else scales[axis - 1]
        to = sizes[axis - 1] if scale is None else int(n * scale)
        o = np.arange(to)
        if mode == "nearest":
            place = np.float32(o * (n / to if scale is None else 1 / scale))
            x = np.take(x, np.minimum(place.astype(int), n - 1), axis)
            continue
        if align_corners:
            place = o * ((n - 1) / (to - 1) if to > 1 else 0.0)
        else:
            step = 1 if to == n else n / to if scale is None else 1 / scale
            place = np.maximum((o + 0.5) * step - 0.5, 0)
        below = np.minimum(place.astype(int), n - 1)
        t = np.minimum(place - below, 1).reshape(-1, *[1] * (np.ndim(x) - 1 - axis))
        x = np.take(x, below, axis) * (1 - t) + np.take(x, np.minimum(below + 1, n - 1), axis) * t
    return x
