"""Reductions and softmax.  The shape of a sum follows from R (or N) alone: see `_reduce`."""

from __future__ import annotations

from calcvm.kernels_cuda._common import Ptr, kernel_from, share  # noqa: F401
from calcvm.kernels_cuda._cuda import as_f64, as_i64, device, like, shared, sync, thread, threads  # noqa: F401
from calcvm.kernels_cuda._math import exp, log  # noqa: F401
from calcvm.kernels_cuda._reduce import (  # noqa: F401
    add,
    divide,
    each,
    element,
    fold,
    group_before,
    group_in,
    joined,
    lane_in,
    lanes_of,
    larger,
    maximum,
    minimum,
    product,
    reduce,
    slot_of,
    slots_of,
    square,
)

INF = float("inf")

# ---------------------------------------------------------------- over (O, P, R0, R1, I)
FORWARD = '''\
def {name}_fwd(w, nw, O, P, R0, R1, I, by, x: Ptr, y: Ptr):
    """{equation}; x (O,P,R,I), y (O,P,I); O is shared, or I (by = 1); totals are {totals}."""
    units, each_has, ahead, end = (I, 1, I, O * P * I) if by == 1 else (O, P * I, 1, 1)
    lo, hi = share(units, w, nw)
    lo, hi = lo * each_has, hi * each_has
    totals, factor, o = {shared}, {factor}, 0
    while o < end:  # once, but for a leading axis of several that is not shared
        q = o + lo
        while q < o + hi:
            q += reduce({term}, {join}, like(x, {zero}), like(totals, {zero}), x, totals, _put, (y, factor), q, o + hi, R0 * R1, I)
        o += ahead
'''


@device
def _put(to, q, c, total):
    y, factor = to
    y[q + c] = like(y, total) * factor


WIDE = {"totals": "float64", "shared": "as_f64(shared(x))", "join": "add", "zero": "0"}
OWN = {"totals": "in the heap's dtype", "shared": "shared(x)", "term": "element"}
for _name, _equation, _factor, _how in (
    ("sum", "y = sum_r x", "like(x, 1)", WIDE | {"term": "element"}),
    ("mean", "y = sum_r x / R", "like(x, 1) / like(x, R0 * R1)", WIDE | {"term": "element"}),
    ("sum_squares", "y = sum_r x^2", "like(x, 1)", WIDE | {"term": "square"}),
    ("max", "y = max_r x", "like(x, 1)", OWN | {"join": "maximum", "zero": "-INF"}),
    ("min", "y = min_r x", "like(x, 1)", OWN | {"join": "minimum", "zero": "INF"}),
):
    kernel_from(FORWARD.format(name=_name, equation=_equation, factor=_factor, **_how), globals())

SPREAD = '''\
def {name}_bwd(w, nw, O, P, R0, R1, I, by, dy: Ptr, {x}dx: Ptr):
    """dx[o,p,r,i] = {equation}; all of dx is set{in_place}; O*R0 rows are shared (one of O and R0 is 1)."""
    lo, hi = share(O * R0, w, nw)
    e, stop, R = lo * P * R1 * I + thread(), hi * P * R1 * I, R0 * R1
    factor = {factor}
    if e < stop:  # the thread's element is (o, r, i); it walks by threads(), with carries
        o, r, i = _coordinates(e, R, I)
        o_step, r_step, i_step = _coordinates(threads(), R, I)
        while e < stop:
            dx[e] = {formula}
            e += threads()
            o, r, i = o + o_step, r + r_step, i + i_step
            if i >= I:
                r, i = r + 1, i - I
            if r >= R:
                o, r = o + 1, r - R
'''


@device
def _coordinates(e, R, I):
    """(o, r, i) of element e of (O, R, I)."""
    u = divide(e, I)
    o = divide(u, R)
    return o, u - o * R, e - u * I


FILLED = {"formula": "dy[o * I + i] * factor", "x": "", "in_place": ""}
TIMES_X = {"formula": "dy[o * I + i] * factor * x[e]", "x": "x: Ptr, ", "in_place": ", may be x"}
for _name, _equation, _factor, _how in (
    ("sum", "dy[o,p,i]", "like(dx, 1)", FILLED),
    ("mean", "dy[o,p,i] / R", "like(dx, 1) / like(dx, R)", FILLED),
    ("sum_squares", "2*dy[o,p,i]*x[o,p,r,i]", "like(dx, 2)", TIMES_X),
):
    kernel_from(SPREAD.format(name=_name, equation=_equation, factor=_factor, **_how), globals())

NOWHERE = 1 << 62
SELECT = '''\
def {name}_bwd(w, nw, O, P, R0, R1, I, by, dy: Ptr, x: Ptr, y: Ptr, dx: Ptr):
    """dx = dy at the first r where x = y, else 0; all of dx is set, may be x; O is shared."""
    lo, hi = share(O, w, nw)
    q, stop, R = lo * P * I, hi * P * I, R0 * R1
    found = as_i64(shared(x))
    while q < stop:
        n = reduce(_place, min, NOWHERE, NOWHERE, (x, y), found, _keep, found, q, stop, R, I)
        _set_at(found, q, n, R, I, dy, dx)
        sync()
        q += n
'''


@device
def _place(args, q, k):
    """k where x[k] is the extremum."""
    x, y = args
    return k if x[k] == y[q] else NOWHERE


@device
def _keep(found, q, c, k):
    found[c] = k


@device
def _set_at(found, q, n, R, I, dy, dx):
    """dx = dy at found[c] in the columns of outputs q + c, c < n, else 0; each thread sets what it sought."""
    shift = slots_of(R)
    u = thread()
    while u < n << shift:
        c, slot, k, last = slot_of(u, n, shift, q, R, I)
        each(_one_hot, (found[c], dy[q + c]), 0, dx, k, last, I << shift)
        u += threads()


@device
def _one_hot(args, q, k):
    at, dy = args
    return dy if k == at else like(dy, 0)


kernel_from(SELECT.format(name="max"), globals())
kernel_from(SELECT.format(name="min"), globals())

# ---------------------------------------------------------------- softmax
OVER_ROWS = '''\
def {name}(w, nw, rows, inner, N, {operands}):
    """{equation}; (rows*inner, N); rows are shared, a row by some lanes of a warp; {in_place}."""
    lo, hi = share(rows, w, nw)
    hi, g, zero = hi * inner, lanes_of(N), like(h, 0)
    before = lo * inner + group_before(g)
    while before < hi:
        row = before + group_in(g)
        k, last, step = row * N + lane_in(g), (row + 1) * N - 1 if row < hi else -1, 1 << g
        {totals}
        each({term}, {args}, 0, {out}, k, last, step)
        before += threads() >> g
'''


@device
def exp_below(args, q, k):
    """exp(x - top)."""
    x, top = args
    return exp(x[k] - top)


@device
def _softmax(args, q, k):
    x, top, scale = args
    return exp(x[k] - top) * scale


@device
def _softmax_dx(args, q, k):
    dy, y, d = args
    return y[k] * (dy[k] - d)


@device
def _log_softmax(args, q, k):
    x, top, spread = args
    return (x[k] - top) - spread


@device
def _log_softmax_dx(args, q, k):
    dy, y, s = args
    return dy[k] - exp(y[k]) * s


_JOINED = "joined({join}, fold({term}, {join}, {zero}, {zero}, {args}, 0, k, last, step), g)".format
_TOP = "top = " + _JOINED(join="larger", term="element", zero="like(h, -INF)", args="x")
_TOTAL = "total = " + _JOINED(join="add", term="exp_below", zero="zero", args="(x, top)")
_FWD = {"operands": "x: Ptr, y: Ptr", "totals": f"{_TOP}\n        {_TOTAL}", "out": "y", "in_place": "y may be x"}
_BWD = {"operands": "dy: Ptr, y: Ptr, dx: Ptr", "out": "dx", "in_place": "dx may be dy or y"}
_SUM = _JOINED(join="add", term="element", zero="zero", args="dy")
_DOT = _JOINED(join="add", term="product", zero="zero", args="(dy, y)")
for _name, _equation, _how in (
    (
        "softmax_fwd",
        "y = exp(x - max x) / sum of the same",
        _FWD | {"term": "_softmax", "args": "(x, top, like(h, 1) / total)"},
    ),
    (
        "softmax_bwd",
        "dx = y*(dy - sum dy*y)",
        _BWD | {"totals": f"d = {_DOT}", "term": "_softmax_dx", "args": "(dy, y, d)"},
    ),
    (
        "log_softmax_fwd",
        "y = x - max x - log(sum exp(x - max x))",
        _FWD | {"term": "_log_softmax", "args": "(x, top, log(total))"},
    ),
    (
        "log_softmax_bwd",
        "dx = dy - exp(y)*sum dy",
        _BWD | {"totals": f"s = {_SUM}", "term": "_log_softmax_dx", "args": "(dy, y, s)"},
    ),
):
    kernel_from(OVER_ROWS.format(name=_name, equation=_equation, **_how), globals())
