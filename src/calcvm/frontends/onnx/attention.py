"""Attention, what turns its queries and keys, and layers that keep a state of the steps before."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from calcvm import functions as F
from calcvm import images
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.aten.layers import packed
from calcvm.frontends.aten.shapes import cat
from calcvm.frontends.building import Building, Cannot, arranged, given, plain, variable, whole
from calcvm.frontends.onnx.declared import floats, is_known, onnx, rank_of, type_of
from calcvm.gathers import take
from calcvm.graph import Variable, reached
from calcvm.ops.dims import ONE

Bias = Any  # what is added to scores: an array, a variable, or None for nothing


# ---------------------------------------------------------------- what queries see
def _visible(condition: Any) -> Bias:
    """0 where a condition is true and -inf elsewhere, or None if it is known to be true everywhere."""
    if not is_known(condition):
        return F.where(condition, 0.0, -np.inf)
    return None if condition.all() else np.where(condition, 0.0, -np.inf)


def _of_mask(b: Building, mask: Any, keys: Any) -> Bias:
    """The bias of a mask, which may end before the keys do."""
    if mask is None:
        return None
    bias, missing = plain(b, mask), keys - mask.shape[-1]
    if type_of(mask) == "bool":
        bias = (np if is_known(bias) else F).where(bias, 0.0, -np.inf)
    if missing == 0:
        return bias
    end = [(0, 0)] * (len(bias.shape) - 1) + [(0, whole(missing))]
    longer = np.pad(bias, end) if is_known(bias) else images.pad(bias, end)
    return longer + np.where(np.arange(whole(keys)) < whole(mask.shape[-1]), 0.0, -np.inf)


def _band(queries: Any, keys: Any, offset: Any, left: int, right: int) -> Bias:
    """Keys from ``left`` before to ``right`` behind a query's own, which is ``offset`` behind its number; -1: any."""
    if left < 0 and right < 0:
        return None
    behind = np.arange(whole(keys)) - np.arange(whole(queries))[:, None] - offset
    conditions = [behind >= -left] * (left >= 0) + [behind <= right] * (right >= 0)
    return _visible(reduce(lambda c, d: c & d, conditions))


def _together(*parts: Bias) -> Bias:
    some = [p for p in parts if p is not None]
    return reduce(lambda x, y: x + y, sorted(some, key=is_known)) if some else None


def _learned(b: Building, bias: Bias) -> bool:
    """Whether weights lead to a bias: they need its gradient, which the row of attention does not give."""
    if not isinstance(bias, Variable):
        return False
    behind = reached(b.graph.active.operations, bias, exactly=True)
    leading = {bias, *(v for op in behind for name, v in op.inputs.items() if name in op.differentiable)}
    return any(v.kind == "parameter" and v.trainable for v in leading)


# ---------------------------------------------------------------- attention
def _heads(b: Building, x: Any, heads: int | None) -> Arranged:
    """(N, heads, T, size) of this, or of (N, T, heads * size)."""
    x = arranged(b, x)
    if x.rank == 4:
        return x
    if not heads:
        raise Cannot("inputs of 3 axes ask for the numbers of heads")
    n, steps, width = x.shape
    return x.reshaped([n, steps, heads, width // heads]).swapped(1, 2)


def _beside(x: Arranged) -> Arranged:
    """(N, heads, T, size) as (N, T, heads * size)."""
    n, heads, steps, size = x.shape
    return x.swapped(1, 2).reshaped([n, steps, heads * size])


def _in_one_row(q: Arranged, k: Arranged, v: Arranged, bias: Bias, **how: Any) -> Arranged:
    n, heads, steps, size = q.shape
    if is_known(bias):
        bias = np.broadcast_to(bias, (*bias.shape[:-2], whole(steps), whole(k.shape[2])))
    elif bias is not None and bias.shape[-2:] != (steps, k.shape[2]):
        bias = bias + np.zeros((whole(steps), whole(k.shape[2])))
    side = [_beside(x) for x in (q, k, v)]
    together = packed(side)
    operands = [x.variable() for x in side] if together is None else [together]
    y = F.attention(*operands, heads=whole(heads), kv_heads=whole(k.shape[1]), bias=bias, **how)
    return Arranged.of(y).reshaped([n, steps, heads, size]).swapped(1, 2)


def _grouped(x: Arranged, groups: Any) -> Variable:
    """(N, heads, T, size) as (N, groups, heads of a group * T, size)."""
    n, heads, steps, size = x.shape
    return x.reshaped([n, groups, heads // groups * steps, size]).variable()


def _scores(q: Arranged, k: Arranged, bias: Bias, scale: float, softcap: float, stage: int) -> Arranged:
    """Products of queries and keys (N, heads, T, S); from stage 1 on capped, from 2 on with the bias, at 3 as shares."""
    n, heads, steps, _ = q.shape
    products = F.matmul(_grouped(q.again(lambda v: v * scale), k.shape[1]), k.variable(), transpose_b=True)
    z = F.reshape(products, (n, heads, steps, k.shape[2]))
    if stage >= 1 and softcap:
        z = F.tanh(z / softcap) * softcap
    if stage >= 2 and bias is not None:
        z = z + bias
    if stage == 3:
        z = F.softmax(z, -1, where=None if bias is None else bias > -np.inf)
    return Arranged.of(z)


@onnx("Attention")
def attention(
    b: Building, q: Any, k: Any, v: Any, attn_mask: Any = None, past_key: Any = None, past_value: Any = None,
    nonpad_kv_seqlen: Any = None, *, is_causal: int = 0, kv_num_heads: int | None = None, left_window_size: int = -1,
    q_num_heads: int | None = None, qk_matmul_output_mode: int = 0, right_window_size: int = -1, scale: float | None = None,
    softcap: float = 0.0, softmax_precision: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Shares are computed in the network's floats, whatever the precision says."""
    flat, lengths = rank_of(q) == 3, given(b, nonpad_kv_seqlen)
    q, k, v = _heads(b, q, q_num_heads), _heads(b, k, kv_num_heads), _heads(b, v, kv_num_heads)
    if lengths is not None and past_key is not None:
        raise Cannot("nonpad_kv_seqlen and past_key exclude one another")
    offset: Any = 0
    if past_key is not None:
        offset, k, v = whole(past_key.shape[2]), cat(b, [past_key, k], 2), cat(b, [past_value, v], 2)
    (_, _, queries, size), keys = q.shape, k.shape[2]
    mask, ends = _of_mask(b, attn_mask, keys), None
    if lengths is not None:
        ends = F.reshape(lengths, (lengths.shape[0], 1, 1, 1))
        offset = F.cast(ends, None) - float(whole(queries))
    left, right = left_window_size, 0 if is_causal else right_window_size
    scale = float(whole(size)) ** -0.5 if scale is None else scale

    def band() -> Bias:
        return _band(queries, keys, offset, left, right)

    def everything() -> Bias:
        return _together(mask, band(), None if ends is None else _visible(ends > np.arange(whole(keys))))

    def scores(stage: int) -> Arranged:
        return _scores(q, k, everything(), scale, softcap, stage)

    if scale > 0 and size == v.shape[3] and not _learned(b, mask):
        causal = right == 0 and isinstance(offset, int) and offset == 0
        last = ends is not None and queries == ONE and left < 0 <= right  # the query is behind all of its keys
        bias = mask if causal or last else _together(mask, band())
        window = left + 1 if causal and left >= 0 else None
        how: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap or None, "scale": scale}
        y = _in_one_row(q, k, v, bias, lengths=lengths, **how)
    else:
        shares = F.matmul(_grouped(scores(3), k.shape[1]), v.variable())
        y = Arranged.of(F.reshape(shares, (*q.shape[:3], v.shape[3])))
    return _beside(y) if flat else y, k, v, lambda: scores(qk_matmul_output_mode)


@onnx("shares")
def shares(b: Building, q: Any, k: Any, v: Any, mask: Any = None, *, scale: float) -> Arranged:
    """Attention as nodes write it, with keys (N, heads, size, S): an operator of no file."""
    return attention(b, q, arranged(b, k).swapped(), v, mask, scale=scale)[0]


@onnx("FlexAttention")
def flex_attention(
    b: Building, q: Any, k: Any, v: Any, *, prob_mod: Any = None, scale: float | None = None, score_mod: Any = None,
    softmax_precision: int | None = None,
) -> Arranged:  # fmt: skip
    if score_mod is not None or prob_mod is not None:
        raise Cannot("graphs change its scores or shares")
    return attention(b, q, k, v, scale=scale)[0]


@onnx("RotaryEmbedding")
def rotary_embedding(
    b: Building, x: Any, cos_cache: Any, sin_cache: Any, position_ids: Any = None, *, interleaved: int = 0,
    num_heads: int | None = None, rotary_embedding_dim: int = 0,
) -> Arranged:  # fmt: skip
    flat = rank_of(x) == 3
    x = _heads(b, x, num_heads).swapped(1, 2)
    size = whole(x.shape[3])
    turned = rotary_embedding_dim or size
    half = turned // 2
    cos, sin = (_angles(b, table, position_ids) for table in (cos_cache, sin_cache))
    if interleaved:
        pairs = x.part(3, 0, turned).reshaped([*x.shape[:3], half, 2])
        first, second = (pairs.part(4, k, k + 1).without([4]).variable() for k in (0, 1))
    else:
        first, second = (x.part(3, k, k + half).variable() for k in (0, half))
    sides = [cos * first - sin * second, sin * first + cos * second]
    y = F.reshape(F.stack(sides, 4), (*x.shape[:3], turned)) if interleaved else F.concat(sides, 3)
    y = F.concat([y, x.part(3, turned, size).variable()], 3) if turned < size else y
    return Arranged.of(y).reshaped([*x.shape[:2], x.shape[2] * size]) if flat else Arranged.of(y).swapped(1, 2)


def _angles(b: Building, table: Any, positions: Any) -> Variable:
    """A function of the angles of each step, (N, T, 1, size)."""
    if positions is None:
        return F.expand_dims(floats(b, table), 2)
    if is_known(table) and is_known(positions):
        return b.constant(table[positions][:, :, None])
    return F.expand_dims(take(floats(b, table), plain(b, positions)), 2)


# ---------------------------------------------------------------- states of the steps before
@onnx("LinearAttention")
def linear_attention(
    b: Building, query: Any, key: Any, value: Any, past_state: Any = None, decay: Any = None, beta: Any = None, *,
    chunk_size: int = 64, kv_num_heads: int, q_num_heads: int, scale: float = 0.0, update_rule: str = "gated_delta",
) -> tuple[Arranged, Arranged]:  # fmt: skip
    """Step after step: its rows are in proportion to the steps."""
    if (decay is not None, beta is not None) != ("gated" in update_rule, "delta" in update_rule):
        raise Cannot(f'decay and beta do not fit the rule "{update_rule}"')
    heads, (n, steps, _) = kv_num_heads, query.shape
    width, v_width = query.shape[2] // q_num_heads, value.shape[2] // heads
    scale, state, found = scale or float(whole(width)) ** -0.5, given(b, past_state), []
    query = arranged(b, query).again(lambda v: v * scale)
    kept = None if decay is None else arranged(b, decay).again(F.exp)

    def at(x: Any, t: int, *sizes: Any) -> Variable:
        return arranged(b, x).part(1, t, t + 1).reshaped([n, *sizes]).variable()

    for t in range(whole(steps)):
        k, v = at(key, t, heads, width, 1), at(value, t, heads, 1, v_width)
        if state is not None and kept is not None:
            state = state * at(kept, t, heads, -1, 1)
        if beta is not None:
            known = 0.0 if state is None else F.matmul(k, state, transpose_a=True)
            v = (v - known) * at(beta, t, -1, 1, 1)
        state = k * v if state is None else state + k * v
        y = F.matmul(at(query, t, heads, q_num_heads // heads, width), state)
        found.append(F.reshape(y, (n, 1, v_width * q_num_heads)))
    return Arranged.of(F.concat(found, 1)), Arranged.of(state)


@onnx("CausalConvWithState")
def causal_conv(
    b: Building, x: Any, weight: Any, bias: Any = None, past_state: Any = None, *, activation: str = "none"
) -> tuple[Any, ...]:
    w, before = variable(b, weight), whole(weight.shape[2]) - 1
    if past_state is not None:
        padded = cat(b, [past_state, x], 2)
    else:
        padded = Arranged.of(images.pad(floats(b, x), ((before, 0),))) if before else arranged(b, x)
    y = images.conv1d(padded.variable(), w, given(b, bias), groups=whole(x.shape[1]))

    def state() -> Any:
        n, channels, length = padded.shape
        if not before:
            return np.zeros((whole(n), whole(channels), 0), np.float32)
        return padded.part(2, whole(length) - before, whole(length))

    return Arranged.of(y if activation == "none" else F.silu(y)), state
