"""Attention, by the whole matrix of scores."""

from __future__ import annotations

import numpy as np


def attention(
    q, k, v, lengths=None, bias=None, heads=1, kv_heads=None, causal=False, window=None, softcap=None, scale=None
):
    (N, T, width), S = q.shape, k.shape[1]
    D, groups = width // heads, kv_heads or heads
    q = q.reshape(N, T, heads, D)
    k, v = (np.repeat(x.reshape(N, S, groups, D), heads // groups, axis=2) for x in (k, v))
    z = np.einsum("nihc,njhc->nhij", q, k) * (D**-0.5 if scale is None else scale)
    z = z if softcap is None else softcap * np.tanh(z / softcap)
    z = z if bias is None else z + bias
    i, j = np.arange(T)[:, None], np.arange(S)
    seen = np.broadcast_to(~(causal & (j > i)) & (i - j < (window or i + 1)), z.shape)
    seen = seen if lengths is None else seen & (j < lengths[:, None, None, None])
    z = np.where(seen, z, -np.inf)
    top = z.max(-1, keepdims=True)
    p = np.exp(z - np.where(top > -np.inf, top, 0))
    total = p.sum(-1, keepdims=True)
    y = np.einsum("nhij,njhc->nihc", p / np.where(total > 0, total, 1), v).reshape(N, T, width)
    lse = np.where(total > 0, top + np.log(np.where(total > 0, total, 1)), 0)
    return {"y": y, "lse": lse[..., 0]}


def attention_packed(qkv, *masks, heads=1, kv_heads=None, **attrs):
    D = qkv.shape[-1] // (heads + 2 * (kv_heads or heads))
    k = heads * D
    v = (k + qkv.shape[-1]) // 2
    return attention(qkv[..., :k], qkv[..., k:v], qkv[..., v:], *masks, heads=heads, kv_heads=kv_heads, **attrs)


def put_line(x, v, place):
    y = x.copy()
    y[np.arange(len(x)), place.astype(int)] = v
    return y
