"""Kernels that enlarge or shrink axes: padding, and scaling of images.  A thread computes one element at a time."""

from __future__ import annotations

from calcvm.kernels_cuda._common import Float, Ptr, kernel, share
from calcvm.kernels_cuda._cuda import at, device, like, thread, threads
from calcvm.kernels_cuda._loops import digits, onward
from calcvm.kernels_cuda._reduce import divide
from calcvm.kernels_shared.resizing import padding_of, scaling, showing, shown


@device
def _split(k, n):
    q = divide(k, n)
    return q, k - q * n


_shows, _shown, _showing = device(padding_of), device(shown), device(showing)


# ---------------------------------------------------------------- padding
@kernel
def pad_fwd(me, d0, d1, d2, d3, d4, p0, p1, p2, p3, p4, q0, q1, q2, q3, q4, n, mode, value: Float, x: Ptr, y: Ptr):
    """y[i] = x[i - p], beyond its ends by mode.  x (d0..d4, n), y (d0 + p0 + q0, ..., n); its leading two axes are shared."""
    e1, e2, e3, e4 = d1 + p1 + q1, d2 + p2 + q2, d3 + p3 + q3, d4 + p4 + q4
    lo, hi = share(me, (d0 + p0 + q0) * e1)
    unit, inner, k = e2 * e3 * e4 * n, (1, e2, e3, e4, n), thread()
    y = at(y, lo * unit)
    if (hi - lo) * unit > 0:
        o, step = digits(thread(), inner), digits(threads(), inner)
        while k < (hi - lo) * unit:
            u0, u1 = _split(lo + o[0], e1)
            i0, i1 = _shows(mode, u0, d0, p0), _shows(mode, u1, d1, p1)
            i2, i3, i4 = _shows(mode, o[2], d2, p2), _shows(mode, o[3], d3, p3), _shows(mode, o[4], d4, p4)
            if min(min(i0, i1), min(min(i2, i3), i4)) < 0:
                y[k] = like(y, value)
            else:
                y[k] = x[((((i0 * d1 + i1) * d2 + i2) * d3 + i3) * d4 + i4) * n + o[5]]
            o = onward(o, step, inner)
            k += threads()


@kernel
def pad_bwd(me, d0, d1, d2, d3, d4, p0, p1, p2, p3, p4, q0, q1, q2, q3, q4, n, mode, dy: Ptr, dx: Ptr):
    """dx[i] = the sum of dy where y is x[i], in a fixed order.  The leading two axes of dx are shared."""
    e1, e2, e3, e4 = d1 + p1 + q1, d2 + p2 + q2, d3 + p3 + q3, d4 + p4 + q4
    lo, hi = share(me, d0 * d1)
    unit, inner, k = d2 * d3 * d4 * n, (1, d2, d3, d4, n), thread()
    dx = at(dx, lo * unit)
    if (hi - lo) * unit > 0:
        i, step = digits(thread(), inner), digits(threads(), inner)
        while k < (hi - lo) * unit:
            i0, i1 = _split(lo + i[0], d1)
            n0, n1 = _shown(mode, i0, d0, p0, q0), _shown(mode, i1, d1, p1, q1)
            n2, n3 = _shown(mode, i[2], d2, p2, q2), _shown(mode, i[3], d3, p3, q3)
            n4 = _shown(mode, i[4], d4, p4, q4)
            total, c = like(dx, 0), 0
            while c < n0 * n1 * n2 * n3 * n4:
                above, k4 = _split(c, n4)
                above, k3 = _split(above, n3)
                above, k2 = _split(above, n2)
                k0, k1 = _split(above, n1)
                o0, o1 = _showing(mode, i0, d0, p0, k0), _showing(mode, i1, d1, p1, k1)
                o2, o3 = _showing(mode, i[2], d2, p2, k2), _showing(mode, i[3], d3, p3, k3)
                o4 = _showing(mode, i[4], d4, p4, k4)
                total += dy[((((o0 * e1 + o1) * e2 + o2) * e3 + o3) * e4 + o4) * n + i[5]]
                c += 1
            dx[k] = total
            i = onward(i, step, inner)
            k += threads()


# ---------------------------------------------------------------- scaling
_place, _first, _weight = scaling(device, like)


@device
def _mean(x, apart, t):
    """The weighted mean of the element here and the one ``apart`` from it, which has weight t."""
    return x[0] if t == 0 else (like(x, 1) - t) * x[0] + t * x[apart]


@device
def _mean2(x, apart, t, below, t_below):
    if t_below == 0:
        return _mean(x, apart, t)
    return (like(x, 1) - t_below) * _mean(x, apart, t) + t_below * _mean(at(x, below), apart, t)


@kernel
def upsample_fwd(me, N, D, H, W, E, F, G, C, mode, align, sd: Float, sh: Float, sw: Float, wn, x: Ptr, y: Ptr, ws: Ptr):
    """y (N,E,F,G,C) = x (N,D,H,W,C) at places scaled by sd, sh, sw.  N*E is shared; N*F if D and E are 1."""
    step_d, step_h, step_w = like(x, sd), like(x, sh), like(x, sw)
    per = F if D * E > 1 else 1
    lo, hi = share(me, N * E if D * E > 1 else N * E * F)
    unit, inner, k, line = G * C, (1, 1, 1, G, C), thread(), W * C
    lo, stop = lo * per, (hi - lo) * per * unit
    y = at(y, lo * unit)
    if stop > 0:
        o, step = digits(thread(), inner), digits(threads(), inner)
        while k < stop:
            above, f = _split(lo + o[0], F)
            i, e = _split(above, E)
            d, t_d = _place(mode, align, e, D, step_d)
            h, t_h = _place(mode, align, f, H, step_h)
            w, t_w = _place(mode, align, o[4], W, step_w)
            x_i = at(x, ((i * D + d) * H + h) * line + w * C + o[5])
            if t_d == 0:
                y[k] = _mean2(x_i, C, t_w, line, t_h)
            else:
                below = _mean2(at(x_i, H * line), C, t_w, line, t_h)
                y[k] = (like(x, 1) - t_d) * _mean2(x_i, C, t_w, line, t_h) + t_d * below
            o = onward(o, step, inner)
            k += threads()


@kernel
def upsample_bwd(
    me, N, D, H, W, E, F, G, C, mode, align, sd: Float, sh: Float, sw: Float, wn, dy: Ptr, dx: Ptr, ws: Ptr
):
    """dx[i] = sum_o dy[o] * the weight of x[i] in y[o], in a fixed order.  N*D is shared; N*H if D and E are 1."""
    step_d, step_h, step_w = like(dy, sd), like(dy, sh), like(dy, sw)
    per = H if D * E > 1 else 1
    lo, hi = share(me, N * D if D * E > 1 else N * D * H)
    unit, inner, k, line = W * C, (1, 1, 1, W, C), thread(), G * C
    lo, stop = lo * per, (hi - lo) * per * unit
    dx = at(dx, lo * unit)
    if stop > 0:
        o, step = digits(thread(), inner), digits(threads(), inner)
        while k < stop:
            above, h = _split(lo + o[0], H)
            i, d = _split(above, D)
            w, total = o[4], like(dy, 0)
            e, e1 = _first(mode, align, d - mode, D, E, step_d), _first(mode, align, d + 1, D, E, step_d)
            f0, f1 = _first(mode, align, h - mode, H, F, step_h), _first(mode, align, h + 1, H, F, step_h)
            g0, g1 = _first(mode, align, w - mode, W, G, step_w), _first(mode, align, w + 1, W, G, step_w)
            while e < e1:
                by_d, f = _weight(mode, align, e, d, D, step_d), f0
                while f < f1:
                    by, g = by_d * _weight(mode, align, f, h, H, step_h), g0
                    dy_f = at(dy, ((i * E + e) * F + f) * line + o[5])
                    while g < g1:
                        by_g = by * _weight(mode, align, g, w, W, step_w)
                        if by_g != 0:
                            total += by_g * dy_f[g * C]
                        g += 1
                    f += 1
                e += 1
            dx[k] = total
            o = onward(o, step, inner)
            k += threads()
