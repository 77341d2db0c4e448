"""Statistics of a batch; totals are float64."""

from __future__ import annotations

from calcvm.kernel import words
from calcvm.kernels_cuda._common import Float, Ptr, kernel, kernel_as, share
from calcvm.kernels_cuda._cuda import as_f64, device, like, shared, thread, threads
from calcvm.kernels_cuda._reduce import add, divide, element, reduce


@device
def _put(to, q, c, total):
    mean, factor = to
    mean[q + c] = like(mean, total) * factor


@device
def _put_running(to, q, c, total):
    mean, factor, running, momentum = to
    m = like(mean, total) * factor
    mean[q + c] = m
    running[q + c] += momentum * (m - running[q + c])


@device
def _means(me, rows, cols, x, put, to):
    """``put`` the sum of each column; columns are shared."""
    q, hi = share(me, cols)
    totals = as_f64(shared(x))
    while q < hi:
        q += reduce(element, add, like(x, 0), like(totals, 0), x, totals, put, to, q, hi, rows, cols)


@kernel
def center_mean(me, rows, cols, momentum: Float, x: Ptr, t_m: Ptr, running: Ptr):
    """m = the mean of x over rows; running += momentum*(m - running); cols are shared."""
    _means(me, rows, cols, x, _put_running, (t_m, like(x, 1) / like(x, rows), running, like(x, momentum)))


@kernel
def center_mean_bwd(me, rows, cols, dy: Ptr, t_d: Ptr):
    """d = the mean of dy over rows; cols are shared."""
    _means(me, rows, cols, dy, _put, (t_d, like(dy, 1) / like(dy, rows)))


@kernel_as("center_fwd", words("rows cols", "", ("x", "t_m", "y")))
@kernel_as("center_bwd", words("rows cols", "", ("dy", "t_d", "dx")))
def _center(me, rows, cols, x, m, y):
    """y = x - m; rows are shared; y may be x."""
    lo, hi = share(me, rows)
    i, stop = lo * cols + thread(), hi * cols
    while i < stop:
        y[i] = x[i] - m[i - divide(i, cols) * cols]
        i += threads()
