"""Attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from calcvm import functions as F
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.aten.layers import linear
from calcvm.frontends.aten.shapes import unsqueeze
from calcvm.frontends.building import Building, Cannot, arranged, whole
from calcvm.frontends.keras.declared import keras
from calcvm.frontends.onnx.attention import attention as attention_of


def _projected(b: Building, x: Any, kernel: Arranged, bias: Any, inputs: int) -> Arranged:
    """x @ kernel, whose first axes are those of the inputs, plus bias; both with their other axes side by side."""
    rows = int(np.prod([whole(n) for n in kernel.shape[:inputs]]))
    matrix = kernel.reshaped([rows, -1])
    return linear(b, x, matrix.swapped(), None if bias is None else arranged(b, bias).reshaped([-1]))


def _mask(b: Building, mask: Any, window: int | None, queries: int, keys: int) -> Any:
    """A mask (N, T, S) for all heads, with the band of a window."""
    if mask is not None:
        mask = unsqueeze(b, arranged(b, mask), 1)
        mask = mask if mask.type == "bool" else mask.again(lambda v: F.not_equal(v, 0.0))
    if window is None:
        return mask
    band = np.abs(np.arange(queries)[:, None] - np.arange(keys)) < window
    return band if mask is None else Arranged.of(F.logical_and(mask.variable(), b.constant(band)))


@keras("MultiHeadAttention", "GroupedQueryAttention")
def multi_head_attention(
    b: Building, query: Any, value: Any, key: Any = None, *, query_kernel: Arranged, key_kernel: Arranged, value_kernel: Arranged,
    attention_output_kernel: Arranged, query_bias: Any = None, key_bias: Any = None, value_bias: Any = None, attention_output_bias: Any = None,
    attention_mask: Any = None, use_causal_mask: bool = False, return_attention_scores: bool = False, sliding_window: int | None = None,
    use_gate: bool = False, attention_axes: Any = None, **_: Any,
) -> Any:  # fmt: skip
    if use_gate:
        raise Cannot("use_gate=True has no counterpart")
    if len(query.shape) != 3 or attention_axes not in (None, [1], (1,)):
        raise Cannot("sequences (N, T, features) have a counterpart")
    q, k, v = (
        _projected(b, x, w, bias, 1)
        for x, w, bias in (
            (query, query_kernel, query_bias),
            (value if key is None else key, key_kernel, key_bias),
            (value, value_kernel, value_bias),
        )
    )
    mask = _mask(b, attention_mask, sliding_window, whole(q.shape[1]), whole(k.shape[1]))
    y, _k, _v, scores = attention_of(
        b, q, k, v, mask, q_num_heads=whole(query_kernel.shape[1]), kv_num_heads=whole(key_kernel.shape[1]), is_causal=int(use_causal_mask),
        qk_matmul_output_mode=3, scale=float(whole(query_kernel.shape[2])) ** -0.5,
    )  # fmt: skip
    y = _projected(b, y, attention_output_kernel, attention_output_bias, 2)
    return (y, scores()) if return_attention_scores else y


@keras("Attention")
def attention(
    b: Building, inputs: Sequence[Any], *, score_mode: str = "dot", scale: Any = None, use_causal_mask: bool = False,
    return_attention_scores: bool = False, **_: Any,
) -> Any:  # fmt: skip
    if score_mode != "dot" or scale is not None:
        raise Cannot("score_mode='dot' without use_scale has a counterpart")
    q, v, *k = (arranged(b, x) for x in inputs)
    y, _k, _v, scores = attention_of(
        b, q, *k or [v], v, q_num_heads=1, kv_num_heads=1, is_causal=int(use_causal_mask), scale=1.0, qk_matmul_output_mode=3
    )  # fmt: skip
    return (y, scores().without([1])) if return_attention_scores else y
