"""Texts of attention."""

from __future__ import annotations

from typing import Any

from calcvm.script.row import Row, writes


def _given(r: Row, *more: str) -> tuple[list[Any], dict[str, Any]]:
    """q, k and v by groups of heads and other operands of the shape of q, and what else the functions take."""
    w = r.w
    queries = (w.N, w.T, w.G, w.R, w.D)
    if "qkv" in r:
        S, G = w.T, w.G.b
        qkv = r.x("qkv", w.N, S, (w.R.b + 2) * G, w.D)
        cuts = [w.R.b * G + k * G for k in range(3)]
        q = qkv[f":, :, :{cuts[0]}"].reshape(*queries)
        values = [q, *(qkv[f":, :, {i}:{j}"] for i, j in zip(cuts, cuts[1:]))]
    else:
        S = w.S
        values = [r.x("q", *queries), *(r.x(name, w.N, S, w.G, w.D) for name in "kv")]
    values += [r.x(name, *((w.N, w.G, w.R, w.T) if name == "lse" else queries)) for name in more]
    how = {"scale": w.scale, "causal": w.causal == 1, "window": w.window.b, "softcap": w.cap}
    how = {name: value for name, value in how.items() if value}
    if "lengths" in r:
        how["lengths"] = r.x("lengths")
    if "bias" in r:
        heads = (w.G, w.R) if w.bh == 1 else (1, 1)
        how["bias"] = r.x("bias", w.N if w.bn == 1 else 1, *heads, w.T, S)
    return values, how


@writes("attention_fwd", "attention_packed_fwd")
def _attention(r: Row) -> None:
    values, how = _given(r)
    w, found = r.w, r.call("attention", *values, **how)
    r.put("y", found[0], w.N, w.T, w.G.b * w.R.b * w.D)
    r.put("lse", found[1], w.N, w.G, w.R, w.T, 1)


@writes("attention_bwd", "attention_packed_bwd")
def _attention_back(r: Row) -> None:
    values, how = _given(r, "y", "lse", "dy")
    found = r.call("attention_back", *values, **how)
    r.put("dqkv", r.call("np.concatenate", found, 2))
    for k, name in enumerate(("dq", "dk", "dv")):
        r.put(name, found[k])
