"""Float64 definitions of the matrix products."""

import numpy as np


def linear(x, wt, b=None):
    return np.einsum("...k,kn->...n", x, wt) + (0 if b is None else b)


def matmul(a, b, transpose_a=False, transpose_b=False):
    a = np.swapaxes(a, -1, -2) if transpose_a else a
    b = np.swapaxes(b, -1, -2) if transpose_b else b
    return np.matmul(a, b)
