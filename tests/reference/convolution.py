"""Float64 definition of convolution, tap by tap."""

from itertools import product

import numpy as np


def conv(x, wt, b=None, stride=None, padding=None, dilation=None, groups=1):
    n = x.ndim - 2
    stride, dilation, padding = stride or (1,) * n, dilation or (1,) * n, padding or (0,) * 2 * n
    x = np.pad(x, [(0, 0), *zip(padding[:n], padding[n:]), (0, 0)])
    sizes = [(x.shape[1 + i] - (wt.shape[i] - 1) * dilation[i] - 1) // stride[i] + 1 for i in range(n)]
    filters = wt.shape[-1] // groups
    y = np.zeros((x.shape[0], *sizes, wt.shape[-1]))
    for tap in product(*map(range, wt.shape[:n])):
        at = [slice(t * d, t * d + (o - 1) * s + 1, s) for t, d, o, s in zip(tap, dilation, sizes, stride)]
        part = x[(slice(None), *at)]
        for g in range(groups):
            channels, out = slice(g * wt.shape[n], (g + 1) * wt.shape[n]), slice(g * filters, (g + 1) * filters)
            y[..., out] += part[..., channels] @ wt[tap][..., out]
    return y if b is None else y + b


def conv_transpose(x, wt, b=None, stride=None, padding=None, dilation=None, output_padding=None, groups=1):
    n = x.ndim - 2
    stride, dilation, padding = stride or (1,) * n, dilation or (1,) * n, padding or (0,) * 2 * n
    more, outs, ins = output_padding or (0,) * n, wt.shape[n], x.shape[-1] // groups
    spans = [(x.shape[1 + i] - 1) * stride[i] + (wt.shape[i] - 1) * dilation[i] + 1 + more[i] for i in range(n)]
    y = np.zeros((x.shape[0], *spans, outs * groups))
    for tap in product(*map(range, wt.shape[:n])):
        at = [slice(t * d, t * d + (o - 1) * s + 1, s) for t, d, o, s in zip(tap, dilation, x.shape[1:], stride)]
        for g in range(groups):
            out, channels = slice(g * outs, (g + 1) * outs), slice(g * ins, (g + 1) * ins)
            y[(slice(None), *at, out)] += x[..., channels] @ wt[tap][:, channels].T
    y = y[(slice(None), *(slice(a, s - b) for a, s, b in zip(padding[:n], spans, padding[n:])))]
    return y if b is None else y + b
