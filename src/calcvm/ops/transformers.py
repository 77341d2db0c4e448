"""Attention, softmax(scale * q k^T) v of each head, in one row: scores are computed in blocks, and computed again in the backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calcvm.ops.dims import ONE, ZERO, Shape, affine, show
from calcvm.ops.sizes import On
from calcvm.ops.spec import WN, Attr, Example, Operand, R, RowSpec, S, Shapes, W, Word, choice, dims, operator

QUERIES, KEYS, FEW = 24, 256, 128  # of a block of scores: as in kernels_cpu/transformers.py

MASKS = (
    choice("masked", 2),  # there are lengths
    choice("causal", 2),
    Word(name="window", kind="int", hi=2**40),  # keys that a query sees, its own the last; 0: all
    choice("biased", 2),  # there is a bias
    choice("bn", 2),  # one for each sample
    choice("bh", 2),  # one for each head
    Word(name="scale", kind="float", lo=0, hi=1e30),
    Word(name="cap", kind="float", lo=0, hi=1e30),  # 0: none
)


def _words(packed: bool) -> tuple[Word, ...]:
    """Samples, queries, keys (if they are not as many), groups of heads, heads of a group, elements of a head."""
    return (*dims("N T G R D" if packed else "N T S G R D"), *MASKS, WN)


# ---------------------------------------------------------------- workspace
def _blocks(keys: Any, D: Any, turned: int, rows: int) -> Any:
    """So many of a head's keys and values, turned, and as many blocks of scores, and ``rows`` numbers for each query of a block."""
    tall = 2 * QUERIES if keys <= FEW else QUERIES
    return turned * (D * (keys + 15) + tall * min(KEYS, keys + 15)) + rows * tall


def fwd_workspace(w: Any, on: On) -> tuple[Any, Any]:
    n = 0 if on.gpu else _blocks(getattr(w, "S", w.T), w.D, 1, 5)
    return n, n


def bwd_workspace(w: Any, on: On) -> tuple[Any, Any]:
    n = 0 if on.gpu else _blocks(getattr(w, "S", w.T), w.D, 2, 1)
    return n, n


# ---------------------------------------------------------------- equations
BIAS = "bias[e<where(bn == 1, N, 1),f<where(bh == 1, G*R, 1),i,j] = 0; lengths[n] = 0"


def _scores(q: str, k: str, keys: str) -> str:
    """z : the scores, -inf where a query does not see a key.  slope : of the cap."""
    return (
        f"raw[n<N,g<G,r<R,i<T,j<{keys}] = scale*(sum[c<D] {q}*{k}); "
        "bent[n,g,r,i,j] = tanh(raw[n,g,r,i,j]/max(cap, 1e-30)); "
        f"z[n,g,r,i,j] = where(j < where(masked == 1, lengths[n], {keys}) and j <= where(causal == 1, i, {keys}) "
        "and i - j < where(window > 0, window, T), "
        "where(cap > 0, cap*bent[n,g,r,i,j], raw[n,g,r,i,j]) + bias[bn*n, bh*(g*R + r), i, j], -inf); "
    )


def _rows(packed: bool) -> tuple[RowSpec, RowSpec]:
    """Forward and backward."""
    name = "attention_packed" if packed else "attention"
    keys = "T" if packed else "S"
    if packed:
        q, k, v = (f"qkv[{place}, c]" for place in ("n, i, g*R + r", "n, j, G*R + g", "n, j, G*R + G + g"))
        given: tuple[Operand, ...] = (R("qkv", "N*T*(R + 2)*G*D"),)
        gradients = "dqkv"
        declares = f"qkv[n,i,a<(R + 2)*G,c]; {BIAS}"
        of = {"dq": "xq", "dk": "xk", "dv": "xv"}
        joined = (
            "; dqkv[n,i,a<(R + 2)*G,c] = (sum[r] xq[n, i, (a - r)/R, r, c]) + xk[n, i, a - G*R, c] "
            "+ xv[n, i, a - G*R - G, c]"
        )
        made: tuple[Operand, ...] = (W(gradients, "N*T*(R + 2)*G*D"),)
    else:
        q, k, v = "q[n,i,g,r,c]", "k[n,j,g,c]", "v[n,j,g,c]"
        sizes = {"q": "N*T*G*R*D", "k": "N*S*G*D", "v": "N*S*G*D"}
        given = tuple(R(x, n) for x, n in sizes.items())
        declares, joined, of = BIAS, "", {f"d{x}": f"d{x}" for x in sizes}
        made = tuple(W(f"d{x}", n, optional=True) for x, n in sizes.items())
    given += (
        R("lengths", "N", type="index", below=f"{keys} + 1", optional="masked == 0"),
        R("bias", f"(N if bn else 1)*(G*R if bh else 1)*T*{keys} if biased else 0", optional="biased == 0"),
    )
    result, lse = "N*T*G*R*D", "N*G*R*T"
    scratch = S("ws", "wn if gpu else nw*wn")
    fwd = RowSpec(
        name=f"{name}_fwd",
        synopsis=_scores(q, k, keys) + "top[n,g,r,i] = logsumexp[j] z[n,g,r,i,j]; "
        "lse[n,g,r,i] = where(top[n,g,r,i] > -inf, top[n,g,r,i], 0); "
        f"y[n,i,g,r,c] = sum[j] exp(z[n,g,r,i,j] - lse[n,g,r,i])*{v}",
        declares=declares,
        words=_words(packed),
        operands=(*given, W("y", result), W("lse", lse, optional=True), scratch),
        workspace=fwd_workspace,
        flops=f"(4*D + 8)*N*G*R*T*{keys}",
    )
    bwd = RowSpec(
        name=f"{name}_bwd",
        synopsis=_scores(q, k, keys) + "p[n,g,r,i,j] = exp(z[n,g,r,i,j] - lse[n,g,r,i]); "
        "own[n,g,r,i] = sum[c] dy[n,i,g,r,c]*y[n,i,g,r,c]; "
        f"s[n,g,r,i,j] = p[n,g,r,i,j]*((sum[c] dy[n,i,g,r,c]*{v}) - own[n,g,r,i])"
        "*scale*where(cap > 0, 1 - bent[n,g,r,i,j]^2, 1); "
        f"{of['dq']}[n,i,g,r,c] = sum[j] s[n,g,r,i,j]*{k}; "
        f"{of['dk']}[n,j,g,c] = sum[r,i] s[n,g,r,i,j]*{q}; "
        f"{of['dv']}[n,j,g,c] = sum[r,i] p[n,g,r,i,j]*dy[n,i,g,r,c]{joined}",
        declares=declares,
        words=_words(packed),
        operands=(*given, R("y", result), R("lse", lse), R("dy", result), *made, scratch),
        workspace=bwd_workspace,
        flops=f"(10*D + 12)*N*G*R*T*{keys}",
    )
    return fwd, bwd


FWD, BWD = _rows(packed=False)
PACKED_FWD, PACKED_BWD = _rows(packed=True)


# ---------------------------------------------------------------- shapes
def _heads(attrs: Mapping[str, Any]) -> tuple[int, int]:
    """Heads of queries, and of keys and values."""
    heads = attrs["heads"]
    kv = attrs.get("kv_heads") or heads
    if heads % kv:
        raise ValueError(f"{heads} heads of queries are no multiple of kv_heads, {kv}")
    if attrs.get("window") and not attrs.get("causal"):
        raise ValueError("a window looks back from each query: give causal=True too")
    return heads, kv


def _head_size(what: str, x: Shape, heads: int) -> int:
    n = x[-1] if len(x) == 3 else ZERO
    if len(x) != 3 or not n.constant or n.b < 1 or n.b % heads:
        raise ValueError(f"{what} {show(x)} is not (samples, steps, {heads} heads * size of a head)")
    return n.b // heads


def _optional(shapes: Shapes, N: Any, heads: int, T: Any, keys: Any) -> tuple[int, int]:
    """Whether each sample, and each head, has its own bias."""
    lengths, bias = shapes["lengths"], shapes["bias"]
    if lengths is not None and lengths != (N,):
        raise ValueError(f"lengths {show(lengths)} is not {show((N,))}, a number of keys for each sample")
    if bias is None:
        return 0, 0
    lead = (ONE,) * (4 - len(bias)) + bias[:-2]
    fits = 2 <= len(bias) <= 4 and bias[-2:] == (T, keys)
    if not fits or lead[0] not in (ONE, N) or lead[1] not in (ONE, affine(heads)):
        raise ValueError(
            f"bias {show(bias)} is not {show((T, keys))}, (queries, keys), with {heads} heads and {show((N,))} samples before it "
            "or without"
        )
    return int(lead[0] == N != ONE), int(lead[1] != ONE)


def _shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    (heads, kv), q, k, v = _heads(attrs), shapes["q"], shapes["k"], shapes["v"]
    D = _head_size("q", q, heads)
    if _head_size("k", k, kv) != D or v != k or k[0] != q[0]:
        raise ValueError(
            f"k {show(k)} and v {show(v)} are not both (samples, keys, {kv * D}), as q {show(q)} with {heads} heads and "
            f"{kv} of keys and values asks for"
        )
    _optional(shapes, q[0], heads, q[1], k[1])
    return {"y": q, "lse": (q[0], affine(heads), q[1])}


def _packed_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    (heads, kv), qkv = _heads(attrs), shapes["qkv"]
    D = _head_size("q, k and v in one", qkv, heads + 2 * kv)
    _optional(shapes, qkv[0], heads, qkv[1], qkv[1])
    return {"y": (*qkv[:2], affine(heads * D)), "lse": (qkv[0], affine(heads), qkv[1])}


def _given(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    (heads, kv), y = _heads(attrs), shapes["y"]
    keys = shapes["k"][1] if "k" in shapes else y[1]
    D = y[2].b // heads
    bn, bh = _optional(shapes, y[0], heads, y[1], keys)
    return {
        "N": y[0], "T": y[1], "S": keys, "G": kv, "R": heads // kv, "D": D,
        "masked": int(shapes["lengths"] is not None), "causal": int(attrs["causal"]), "window": attrs["window"] or 0,
        "biased": int(shapes["bias"] is not None), "bn": bn, "bh": bh, "scale": D**-0.5 if attrs["scale"] is None else attrs["scale"], "cap": attrs["softcap"] or 0.0,
    }  # fmt: skip


def _is_size(v: Any) -> bool:
    return type(v) is int and v >= 1


ATTRS = (
    Attr(name="heads", default=1, check=_is_size, doc="heads of queries"),
    Attr(name="kv_heads", check=lambda v: v is None or _is_size(v), doc="heads of keys and values, if fewer"),
    Attr(name="causal", default=False, check=lambda v: isinstance(v, bool), doc="query i sees keys up to i"),
    Attr(name="window", check=lambda v: v is None or _is_size(v), doc="the last keys that a query sees, with causal"),
    Attr(name="softcap", check=lambda v: v is None or v > 0, doc="scores are softcap * tanh(score / softcap)"),
    Attr(name="scale", check=lambda v: v is None or v > 0, doc="of scores; None: 1 / sqrt(size of a head)"),
)

LENGTHS = {"lengths": 6}

operator(
    name="attention",
    synopsis="y = softmax(scale*q k^T + bias) v, by heads along the last axis",
    category="contraction",
    inputs=("q", "k", "v", "lengths", "bias"),
    optional_inputs=("lengths", "bias"),
    saved=("lse",),
    attrs=ATTRS,
    shape=_shape,
    words=_given,
    fwd=(FWD,),
    bwd=(BWD,),
    differentiable=("q", "k", "v"),
    onnx=("Attention",),
    examples=(
        Example(shapes=((None, 3, 4), (None, 5, 4), (None, 5, 4)), attrs={"heads": 2, "causal": True}, batch=2),
        Example(
            shapes=((None, 4, 6), (None, 5, 2), (None, 5, 2), (None,)), attrs={"heads": 3, "kv_heads": 1, "causal": True},
            integer=LENGTHS, batch=4,
        ),
        Example(
            shapes=((None, 3, 4), (None, 5, 4), (None, 5, 4), (None,), (None, 2, 3, 5)), attrs={"heads": 2, "softcap": 1.5},
            integer=LENGTHS, batch=3,
        ),
        Example(
            shapes=((2, 7, 3), (2, 5, 3), (2, 5, 3), (2,), (3, 7, 5)), integer=LENGTHS,
            attrs={"heads": 3, "causal": True, "window": 3, "scale": 0.3},
        ),
        Example(shapes=((None, 27, 2), (None, 3, 2), (None, 3, 2)), batch=2),
        Example(
            shapes=((None, 1, 8), (None, 37, 4), (None, 37, 4), (None,)), attrs={"heads": 4, "kv_heads": 2},
            integer={"lengths": 38}, batch=5,
        ),
        Example(shapes=((None, 32, 64), (None, 32, 64), (None, 32, 64)), attrs={"heads": 4}, batch=8, bench=True),
    ),
    source="Vaswani et al. 2017; online softmax: Milakov and Gimelshein 2018; backward: Dao et al. 2022",
)  # fmt: skip


operator(
    name="attention_packed",
    synopsis="y = softmax(scale*q k^T + bias) v, for q, k and v side by side along the last axis",
    category="contraction",
    inputs=("qkv", "lengths", "bias"),
    optional_inputs=("lengths", "bias"),
    saved=("lse",),
    attrs=ATTRS,
    shape=_packed_shape,
    words=_given,
    fwd=(PACKED_FWD,),
    bwd=(PACKED_BWD,),
    differentiable=("qkv",),
    examples=(
        Example(shapes=((None, 3, 12),), attrs={"heads": 2, "causal": True}, batch=2),
        Example(
            shapes=((None, 5, 12), (None,)), attrs={"heads": 4, "kv_heads": 1, "causal": True}, integer=LENGTHS, batch=4
        ),
        Example(
            shapes=((2, 5, 9), (2,), (2, 1, 5, 5)), integer=LENGTHS,
            attrs={"heads": 1, "causal": True, "window": 2, "softcap": 2.0},
        ),
        Example(shapes=((None, 32, 192),), attrs={"heads": 4}, batch=8, bench=True),
    ),
    source="the same",
)  # fmt: skip


# ---------------------------------------------------------------- keys and values of the steps before
PUT_LINE = "put_line"  # lowering lets it change a carry where that lies


def _put(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    x, v, place = (shapes[name] for name in ("x", "v", "place"))
    if len(x) != 3 or v != (x[0], x[2]) or place != x[:1]:
        raise ValueError(
            f"x {show(x)} is not (samples, lines, features), of which v {show(v)} is a line of each, at {show(place)}"
        )
    return {"y": x}


operator(
    name=PUT_LINE,
    synopsis="y = x, with v as one of the lines of each sample",
    category="shape",
    inputs=("x", "v", "place"),
    shape=_put,
    words=lambda shapes, attrs: dict(zip("NSK", shapes["x"])),
    fwd=(
        RowSpec(
            name="put_line_fwd",
            synopsis="y[n<N,s<S,k<K] = where(s == place[n], v[n,k], x[n,s,k])",
            words=dims("N S K"),
            operands=(
                R("x", "N*S*K", "N"),
                R("v", "N*K", "N"),
                R("place", "N", "N", type="index", below="S"),
                W("y", "N*S*K", "N"),
            ),
            in_place=(("y", "x"),),
        ),
    ),
    examples=(
        Example(shapes=((None, 3, 4), (None, 4), (None,)), integer={"place": 3}, batch=2),
        Example(shapes=((2, 1, 5), (2, 5), (2,)), integer={"place": 1}),
        Example(shapes=((None, 17, 3), (None, 3), (None,)), integer={"place": 17}, batch=5, types={"index": "int64"}),
        Example(shapes=((None, 64, 64), (None, 64), (None,)), integer={"place": 64}, batch=8, bench=True),
    ),
    source="a cache of keys or values, whose oldest line the newest one replaces",
)  # fmt: skip
