"""Definitions of inference in int8, in Python's integers."""

import numpy as np

from tests.reference import convolution, pooling


def _rounded(total, shift, lo):
    return np.clip(np.floor((np.floor(total / 2.0**shift) + 1) / 2), lo, 127)


def _rescaled(total, scale, lo):
    scale = scale.astype(np.int64)
    return _rounded(np.floor(total * (scale % 2**15) / 2**16), scale // 2**15 % 32, lo)


def linear_int8(x, wt, b, scale, lo=-128):
    x, wt, b = (a.astype(np.float64) for a in (x, wt, b))
    return _rescaled(x @ wt.T + b, scale, lo)


def conv_int8(x, wt, b, scale, stride=None, padding=None, dilation=None, groups=1, lo=-128):
    x, wt, b = (a.astype(np.float64) for a in (x, wt, b))
    return _rescaled(convolution.conv(x, np.moveaxis(wt, 0, -1), b, stride, padding, dilation, groups), scale, lo)


def max_pool_int8(x, kernel, stride=None, padding=None, dilation=None, ceil_mode=False):
    return pooling.max_pool(x, kernel, stride, padding, dilation, ceil_mode)["y"]


def add_int8(a, b, factor_a, factor_b, shift, lo=-128):
    return _rounded(a.astype(np.float64) * factor_a + b.astype(np.float64) * factor_b, shift, lo)
