"""Kernels that enlarge or shrink axes: padding, and scaling of images."""

from __future__ import annotations

from calcvm.kernels_cpu._common import Float, Ptr, at, kernel, like, njit, share
from calcvm.kernels_cpu._math import copy, elementwise, fill, scale
from calcvm.kernels_shared.resizing import padding_of, scaling, showing, shown

CONSTANT = 0
_shows, _shown, _showing = njit(padding_of), njit(shown), njit(showing)
_add = elementwise(lambda x, y: x + y, "vv")  # _add(n, x, y, z): z = x + y; z may be y
_add_scaled = elementwise(lambda x, y, a: y + a * x, "vv", "f")  # _add_scaled(n, x, y, z, a): z = y + a*x; z may be y
_mix2 = elementwise(lambda a, b, u, v: u * a + v * b, "vv", "ff")
_add_mix2 = elementwise(lambda a, b, y, u, v: y + (u * a + v * b), "vvv", "ff")  # y may be z
_mix4 = elementwise(lambda a, b, c, d, u, v, s, t: s * (u * a + v * b) + t * (u * c + v * d), "vvvv", "ffff")


# ---------------------------------------------------------------- padding
@njit
def _line(mode, d, p, q, n, value, x, y):
    """y = x with p elements before its d and q after them, of n numbers each."""
    copy(d * n, x, at(y, p * n))
    if mode == CONSTANT:
        fill(p * n, y, value)
        fill(q * n, at(y, (p + d) * n), value)
        return
    for k in range(p + q):
        o = k if k < p else d + k
        copy(n, at(x, _shows(mode, o, d, p) * n), at(y, o * n))


@njit
def _fold(mode, first, d, p, q, n, dy, dx):
    """dx = (or += if not ``first``) the gradient of `_line`: the sum of dy over the places of each element."""
    if first:
        copy(d * n, at(dy, p * n), dx)
    else:
        _add(d * n, at(dy, p * n), dx, dx)
    if mode != CONSTANT:
        for k in range(p + q):
            o = k if k < p else d + k
            to = at(dx, _shows(mode, o, d, p) * n)
            _add(n, at(dy, o * n), to, to)


@kernel
def pad_fwd(me, d0, d1, d2, d3, d4, p0, p1, p2, p3, p4, q0, q1, q2, q3, q4, n, mode, value: Float, x: Ptr, y: Ptr):
    """y[i] = x[i - p], beyond its ends by mode.  x (d0..d4, n), y (d0 + p0 + q0, ..., n); its leading two axes are shared."""
    e1, e2, e3, line = d1 + p1 + q1, d2 + p2 + q2, d3 + p3 + q3, (d4 + p4 + q4) * n
    lo, hi = share(me, (d0 + p0 + q0) * e1)
    for u in range(lo, hi):
        i0, i1 = _shows(mode, u // e1, d0, p0), _shows(mode, u % e1, d1, p1)
        for o2 in range(e2):
            i2 = _shows(mode, o2, d2, p2)
            for o3 in range(e3):
                i3 = _shows(mode, o3, d3, p3)
                to = at(y, ((u * e2 + o2) * e3 + o3) * line)
                if min(i0, i1, i2, i3) < 0:
                    fill(line, to, like(x, value))
                else:
                    start = (((i0 * d1 + i1) * d2 + i2) * d3 + i3) * d4 * n
                    _line(mode, d4, p4, q4, n, like(x, value), at(x, start), to)


@kernel
def pad_bwd(me, d0, d1, d2, d3, d4, p0, p1, p2, p3, p4, q0, q1, q2, q3, q4, n, mode, dy: Ptr, dx: Ptr):
    """dx[i] = the sum of dy where y is x[i], in a fixed order.  The leading two axes of dx are shared."""
    e1, e2, e3, line = d1 + p1 + q1, d2 + p2 + q2, d3 + p3 + q3, (d4 + p4 + q4) * n
    lo, hi = share(me, d0 * d1)
    for u in range(lo, hi):
        i0, i1 = u // d1, u % d1
        n0, n1 = _shown(mode, i0, d0, p0, q0), _shown(mode, i1, d1, p1, q1)
        for i2 in range(d2):
            n2 = _shown(mode, i2, d2, p2, q2)
            for i3 in range(d3):
                n3 = _shown(mode, i3, d3, p3, q3)
                to = at(dx, ((u * d2 + i2) * d3 + i3) * d4 * n)
                for k in range(n0 * n1 * n2 * n3):
                    o0 = _showing(mode, i0, d0, p0, k // (n1 * n2 * n3))
                    o1 = _showing(mode, i1, d1, p1, k // (n2 * n3) % n1)
                    o2 = _showing(mode, i2, d2, p2, k // n3 % n2)
                    o3 = _showing(mode, i3, d3, p3, k % n3)
                    start = (((o0 * e1 + o1) * e2 + o2) * e3 + o3) * line
                    _fold(mode, k == 0, d4, p4, q4, n, at(dy, start), to)


# ---------------------------------------------------------------- scaling
_place, _first, _weight = scaling(njit, like)


@njit(inline=True)
def _between(n, x, apart, t, y):
    """y = the weighted mean of n elements and those ``apart`` from them, which have weight t."""
    if t == 0:
        copy(n, x, y)
    else:
        _mix2(n, x, at(x, apart), y, like(x, 1) - t, t)


@njit
def _blend(n, x, below, t_below, line, t_line, y):
    """y = the weighted mean of lines of n elements, ``below`` and ``line`` apart if their weights are not 0."""
    if t_below == 0:
        _between(n, x, line, t_line, y)
    elif t_line == 0:
        _between(n, x, below, t_below, y)
    else:
        one, z = like(x, 1), at(x, below)
        _mix4(n, x, at(x, line), z, at(z, line), y, one - t_line, t_line, one - t_below, t_below)


@njit
def _gather(mode, align, w, g, G, W, C, step, dy, dx):
    """dx = the sum of dy (G, C) by the weight of element w of W, from the g-th on, two at a time."""
    empty = True
    while g < G:
        i, t = _place(mode, align, g, W, step)
        if i > w:
            break
        x, u = at(dy, g * C), like(step, 1) - t if i == w else t
        i, t = _place(mode, align, g + 1, W, step)
        if g + 1 < G and i <= w:
            v = like(step, 1) - t if i == w else t
            if empty:
                _mix2(C, x, at(x, C), dx, u, v)
            else:
                _add_mix2(C, x, at(x, C), dx, dx, u, v)
            g += 2
        else:
            if empty:
                scale(C, x, dx, u)
            else:
                _add_scaled(C, x, dx, dx, u)
            g += 1
        empty = False
    if empty:
        fill(C, dx, like(step, 0))


@kernel
def upsample_fwd(me, N, D, H, W, E, F, G, C, mode, align, sd: Float, sh: Float, sw: Float, wn, x: Ptr, y: Ptr, ws: Ptr):
    """y (N,E,F,G,C) = x (N,D,H,W,C) at places scaled by sd, sh, sw.  N*E is shared; N*F if D and E are 1.

    ws: a line interpolated between neighbouring lines of x.
    """
    line, own, per = W * C, at(ws, me.worker * wn), F if D * E > 1 else 1
    lo, hi = share(me, N * E if D * E > 1 else N * E * F)
    step_d, step_h, step_w = like(x, sd), like(x, sh), like(x, sw)
    last = -1
    for r in range(lo * per, hi * per):
        f, e, i = r % F, r // F % E, r // F // E
        d, t_d = _place(mode, align, e, D, step_d)
        h, t_h = _place(mode, align, f, H, step_h)
        start = ((i * D + d) * H + h) * line
        src, to = at(x, start), at(y, r * G * C)
        if mode == 0 and start == last:
            copy(G * C, at(y, (r - 1) * G * C), to)
            continue
        last = start
        if G == W and sw == 1:
            _blend(line, src, H * line, t_d, line, t_h, to)
            continue
        if t_d != 0 or t_h != 0:
            _blend(line, src, H * line, t_d, line, t_h, own)
            src = own
        for g in range(G):
            w, t = _place(mode, align, g, W, step_w)
            if C == 1:
                to[g] = src[w] if t == 0 else (like(x, 1) - t) * src[w] + t * src[w + 1]
            else:
                _between(C, at(src, w * C), C, t, at(to, g * C))


@kernel
def upsample_bwd(
    me, N, D, H, W, E, F, G, C, mode, align, sd: Float, sh: Float, sw: Float, wn, dy: Ptr, dx: Ptr, ws: Ptr
):
    """dx[i] = sum_o dy[o] * the weight of x[i] in y[o], in a fixed order.  N*D is shared; N*H if D and E are 1.

    ws: a line, the sum of the lines of dy that a line of x contributes to.
    """
    line, whole, per = G * C, G == W and sw == 1, H if D * E > 1 else 1
    lo, hi = share(me, N * D if D * E > 1 else N * D * H)
    step_d, step_h, step_w = like(dy, sd), like(dy, sh), like(dy, sw)
    for r in range(lo * per, hi * per):
        h, d, i = r % H, r // H % D, r // H // D
        to = at(dx, r * W * C)
        total = to if whole else at(ws, me.worker * wn)
        empty = True
        e0, e1 = _first(mode, align, d - mode, D, E, step_d), _first(mode, align, d + 1, D, E, step_d)
        f0, f1 = _first(mode, align, h - mode, H, F, step_h), _first(mode, align, h + 1, H, F, step_h)
        for e in range(e0, e1):
            by_d = _weight(mode, align, e, d, D, step_d)
            for f in range(f0, f1):
                by = by_d * _weight(mode, align, f, h, H, step_h)
                src = at(dy, ((i * E + e) * F + f) * line)
                if by == 0:
                    continue
                if empty:
                    scale(line, src, total, by)
                else:
                    _add_scaled(line, src, total, total, by)
                empty = False
        if empty:
            fill(W * C, to, like(dy, 0))
        elif not whole:
            g = 0
            for w in range(W):
                while g < G and _place(mode, align, g, W, step_w)[0] < w - mode:
                    g += 1
                _gather(mode, align, w, g, G, W, C, step_w, total, at(to, w * C))
