"""Texts of pooling."""

from __future__ import annotations

from typing import Any

from calcvm.ops.dims import ONE, Shape
from calcvm.script.code import show
from calcvm.script.row import Row, writes

AXES = "dhw"


class Pool:
    """The words of a window, without axes that have no effect."""

    def __init__(self, r: Row):
        w, slides = r.w, hasattr(r.w, "kh")

        def idle(v: str) -> bool:
            ones = getattr(w, v.upper()) == ONE == getattr(w, f"O{v.upper()}")
            return ones and (not slides or (getattr(w, f"k{v}") == ONE and getattr(w, f"p{v}") == 0))

        rank = len(r.shape("x" if "x" in r else "dx")) - 2
        kept = [v for v in AXES if not idle(v)]
        for v in "dwh":  # axes of size 1 that the image has
            if len(kept) < min(max(rank, 1), 3) and v not in kept:
                kept.append(v)
        kept.sort(key=AXES.index)

        def each(letter: str) -> tuple[Any, ...]:
            return tuple(getattr(w, letter + v) for v in kept)

        self.size = tuple(getattr(w, v.upper()) for v in kept)
        self.out = tuple(getattr(w, f"O{v.upper()}") for v in kept)
        if slides:
            self.window, self.stride, self.padding, self.dilation = each("k"), each("s"), each("p"), each("d")
        self.after = each("q") if hasattr(w, "qh") else ()
        self.image: Shape = (w.N, *self.size, w.C)
        self.result: Shape = (w.N, *self.out, w.C)


@writes("max_pool_fwd")
def _max(r: Row) -> None:
    o = Pool(r)
    found = r.call("max_pool", r.x("x", *o.image), o.window, o.stride, o.padding, o.dilation, o.out)
    _both(r, found, o)


def _both(r: Row, found: Any, o: Pool) -> None:
    if r.shape("y") == o.result and ("index" not in r or r.shape("index") == o.result):
        r.put_all(found, "y", "index")
    else:
        r.put("y", found[0], *o.result)
        r.put("index", found[1], *o.result)


@writes("max_pool_bwd")
def _max_back(r: Row) -> None:
    o = Pool(r)
    dy, index = r.x("dy", *o.result), r.x("index", *o.result)
    r.put("dx", r.call("max_pool_back", dy, index, o.size, o.window, o.stride, o.padding, o.dilation), *o.image)


@writes("adaptive_max_pool_fwd")
def _adaptive_max(r: Row) -> None:
    o = Pool(r)
    _both(r, r.call("adaptive_max", r.x("x", *o.image), o.out), o)


@writes("adaptive_max_pool_bwd")
def _adaptive_max_back(r: Row) -> None:
    o = Pool(r)
    dx = r.call("adaptive_max_back", r.x("dy", *o.result), r.x("index", *o.result), o.size)
    r.put("dx", dx, *o.image)


def _count(r: Row, o: Pool, of: str) -> Any:
    """The number of counted elements of each window; a single number if it is the same for all."""
    padded = hasattr(r.w, "padded") and r.w.padded == 1
    after = o.after if padded else (-1,) * len(o.size)
    window = [n.b for n in o.window]
    ends = zip(o.size, o.out, o.window, o.stride, o.padding, o.after or (0,) * len(o.size))
    inside = all((p == 0 or padded) and (out.b - 1) * s.b - p.b + k.b <= n.b + (q.b if padded else 0)
                 for n, out, k, s, p, q in ((*e[:5], e[5] if padded else ONE) for e in ends))  # fmt: skip
    if inside:
        total = 1
        for n in window:
            total *= n
        return r.number(total)
    named = {} if r.dtype(of) == "float64" else {"dtype": f"np.{r.dtype(of)}"}
    args = (o.size, o.window, o.stride, o.padding, after, o.out)
    said = [*map(show, args), *(f"{key}={value}" for key, value in named.items())]
    return r.trace.of(f"counts({', '.join(said)})")


@writes("avg_pool_fwd")
def _avg(r: Row) -> None:
    o = Pool(r)
    y = r.call("sum_pool", r.x("x", *o.image), o.window, o.stride, o.padding, o.out)
    r.put("y", y / _count(r, o, "y"), *o.result)


@writes("avg_pool_bwd")
def _avg_back(r: Row) -> None:
    o = Pool(r)
    dy = r.x("dy", *o.result) / _count(r, o, "dx")
    r.put("dx", r.call("sum_pool_back", dy, o.size, o.window, o.stride, o.padding), *o.image)


@writes("adaptive_avg_pool_fwd")
def _adaptive_avg(r: Row) -> None:
    o = Pool(r)
    r.put("y", r.call("adaptive_mean", r.x("x", *o.image), o.out), *o.result)


@writes("adaptive_avg_pool_bwd")
def _adaptive_avg_back(r: Row) -> None:
    o = Pool(r)
    r.put("dx", r.call("adaptive_mean_back", r.x("dy", *o.result), o.size), *o.image)


def _share(r: Row, o: Pool, of: str) -> Any:
    """The factor by which a window that leaves the image weighs more."""
    total = 1
    for n in o.window:
        total *= n.b
    count = _count(r, o, of)
    return r.number(1) if count.form == str(total) else r.number(total) / count


@writes("lp_pool_fwd")
def _lp(r: Row) -> None:
    o, p = Pool(r), r.w.power
    total = r.call("sum_pool", r.x("x", *o.image) ** p, o.window, o.stride, o.padding, o.out)
    r.put("y", (total * _share(r, o, "y")) ** (1 / p), *o.result)


@writes("lp_pool_bwd_y")
def _lp_back_y(r: Row) -> None:
    w = r.w
    shape = (w.N, w.OD, w.OH, w.OW, w.C)
    dy, y = r.x("dy", *shape), r.x("y", *shape)

    class All(Pool):
        def __init__(self) -> None:
            self.size, self.out = (w.D, w.H, w.W), (w.OD, w.OH, w.OW)
            self.window, self.stride, self.padding = (w.kd, w.kh, w.kw), (w.sd, w.sh, w.sw), (w.pd, w.ph, w.pw)
            self.after = ()

    g = _share(r, All(), "t_g") * dy * y.select(y.equals(0), y.const(1), y) ** (1 - w.power)
    r.put("t_g", g.select(y.equals(0), g.const(0), g), *shape)


@writes("lp_pool_bwd")
def _lp_back(r: Row) -> None:
    o = Pool(r)
    back = r.call("sum_pool_back", r.x("t_g", *o.result), o.size, o.window, o.stride, o.padding)
    r.put("dx", r.x("x", *o.image) ** (r.w.power - 1) * back, *o.image)
