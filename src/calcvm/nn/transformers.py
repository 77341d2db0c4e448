"""Layers of transformers.  The inputs are sequences, (N, steps, features)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np

from calcvm import checks, gathers
from calcvm import functions as F
from calcvm.errors import CalcError, ShapeError
from calcvm.graph import Variable, apply
from calcvm.init import Normal
from calcvm.nn.layers import Layer, Linear, Weighted, one_step
from calcvm.nn.norms import LayerNorm


def _features(x: Variable, scope: str, heads: int = 1) -> int:
    """The features of an input: a sequence, or one step."""
    one_step(x, scope)
    features = x.shape[-1].b
    if features % heads:
        raise ShapeError(f"{scope}: the features of the input {x} are no multiple of {heads} heads")
    return features


def _part(layer: Layer, name: str, part: Any) -> Any:
    """A layer inside a layer, made once for the same settings: paths that build the layer share its parameters."""
    return vars(layer).setdefault("_parts", {}).setdefault((name, repr(part)), part)


@dataclass(repr=False, eq=False)
class MultiHeadAttention(Weighted):
    """Attention of a sequence to itself, or to ``memory``: Vaswani et al. 2017, `calcvm.attention`.

    Parameters are PyTorch's, turned as those of `Linear` are: for E features in_proj_weight (E, E + 2 * kv_heads * E / num_heads),
    in_proj_bias, out_proj.weight (E, E), out_proj.bias.

    kv_heads, causal, window, softcap : as in `calcvm.attention`.
    rotary : the base of rotary positions of queries and keys, such as 10000.0 (`calcvm.rotary`); None: no positions.
    dropout : of weights must be 0: they are not stored.
    bias, init, bias_init, regularizer, trainable : as in `Linear`.

    In a custom layer, ``build(x, scope, training, memory=None, lengths=None, mask=None)`` takes more inputs: keys and values are
    made of ``memory`` (N, S, E); ``lengths`` (N,) is how many keys each sample has; ``mask`` is a bias of the scores.

    Raises
    ------
    CalcError : the heads are no multiple of kv_heads, or there is dropout.
    ShapeError : the input is no sequence, or its features do not divide into heads.
    """

    num_heads: int
    _: KW_ONLY
    kv_heads: int | None = None
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    rotary: float | None = None
    dropout: float = 0.0
    bias: bool = True
    init: Any = None
    bias_init: Any = None
    regularizer: Any = None
    trainable: bool = True

    def __post_init__(self) -> None:
        name = type(self).__name__
        self.num_heads = checks.integer(f"{name}: num_heads", self.num_heads)
        if self.kv_heads is not None:
            self.kv_heads = checks.integer(f"{name}: kv_heads", self.kv_heads, 1, self.num_heads)
            if self.num_heads % self.kv_heads:
                raise CalcError(f"{name}: num_heads, {self.num_heads}, must be a multiple of kv_heads, {self.kv_heads}")
        if checks.number(f"{name}: dropout", self.dropout, 0, 1, ends="[)"):
            raise CalcError(
                f"{name}: weights of attention are not stored and cannot be dropped: write dropout=0.0, and nn.Dropout behind it"
            )
        self.bias, self.causal = (checks.flag(f"{name}: {f}", getattr(self, f)) for f in ("bias", "causal"))
        if self.window is not None and not self.causal:
            raise CalcError(f"{name}: a window looks back from each step: give causal=True too")
        self._check_starts()

    def build(
        self,
        x: Variable,
        scope: str,
        training: bool,
        memory: Variable | None = None,
        lengths: Variable | None = None,
        mask: Any = None,
    ) -> Variable:
        self._given(x)
        E = _features(x, scope, self.num_heads)
        kv_heads = self.kv_heads or self.num_heads
        K = E // self.num_heads * kv_heads
        make = partial(self.parameter, x, trainable=self.trainable)
        w = make("in_proj_weight", (E, E + 2 * K), self.init, regularizer=self.regularizer)
        b = make("in_proj_bias", (E + 2 * K,), self.bias_init) if self.bias else None
        how: dict[str, Any] = {
            "heads": self.num_heads, "kv_heads": self.kv_heads, "causal": self.causal, "window": self.window,
            "softcap": self.softcap, "lengths": x.lengths if lengths is None and memory is None else lengths, "bias": mask,
        }  # fmt: skip
        if x.rank == 3:
            self._steps = x.shape[1].b
        if x.rank == 2:
            y = self._step(x, F.linear(x, w, b), K, scope)
        elif memory is None and self.rotary is None:
            y = F.attention(F.linear(x, w, b), **how)
        else:
            if memory is None:
                q, k, v = F.split(F.linear(x, w, b), [E, E + K], axis=2)
            else:
                q = F.linear(x, w[:, :E], None if b is None else b[:E])
                k, v = F.split(F.linear(memory, w[:, E:], None if b is None else b[E:]), 2, axis=2)
            if self.rotary is not None:
                q, k = F.rotary(q, self.num_heads, self.rotary), F.rotary(k, kv_heads, self.rotary)
            y = F.attention(q, k, v, **how)
        return self._projected(y, scope, training)

    def _step(self, x: Variable, qkv: Variable, K: int, scope: str) -> Variable:
        """One step (N, E): its query, and the keys and values of all steps so far, of which the newest take the place of the oldest."""
        if not self.causal or (steps := self.window or vars(self).get("_steps")) is None:
            raise CalcError(
                f"{scope}: attention runs step by step if it is causal, and was built on whole sequences before, which says how many "
                "steps it keeps"
            )
        E, kv_heads = x.shape[1].b, self.kv_heads or self.num_heads
        seen = self.carry(x, "seen", (), steps=None if self.window else steps)
        q, *new = F.split(qkv, [E, E + K], axis=1)
        if self.rotary is not None:
            q, new[0] = (_turned(v, seen, n, self.rotary) for v, n in ((q, self.num_heads), (new[0], kv_heads)))
        place = self.carry(x, "place", ())
        kept = []
        for name, v in zip(("keys", "values"), new):
            past = self.carry(x, name, (steps, K))
            kept.append(F.carry(past, apply("put_line", past, v, place)))
        count = F.minimum(seen + 1.0, float(steps))
        F.carry(seen, seen + 1.0)
        F.carry(place, (place + 1.0) % float(steps))
        y = F.attention(
            F.expand_dims(q, 1),
            *kept,
            heads=self.num_heads,
            kv_heads=self.kv_heads,
            softcap=self.softcap,
            lengths=count,
        )
        return F.reshape(y, (None, E))

    def _projected(self, y: Variable, scope: str, training: bool) -> Variable:
        E = y.shape[-1].b
        same = {name: getattr(self, name) for name in ("bias", "init", "bias_init", "regularizer", "trainable")}
        return _part(self, "out_proj", Linear(E, **same)).build(y, f"{scope}.out_proj", training)


def _turned(x: Variable, step: Variable, heads: int, base: float) -> Variable:
    """`calcvm.rotary` of one step: x (N, heads * d), step (N,)."""
    half = x.shape[1].b // heads // 2
    angle = F.expand_dims(step, 1) * base ** (-np.arange(half) / half)[None]
    cos, sin = (F.expand_dims(f(angle), 1) for f in (F.cos, F.sin))
    a, b = F.split(F.reshape(x, (None, heads, 2 * half)), 2, axis=2)
    return F.reshape(F.concat([a * cos - b * sin, b * cos + a * sin], axis=2), (None, x.shape[1].b))


@dataclass(repr=False, eq=False)
class _Transformer(Layer):
    """Settings of both layers of transformers."""

    nhead: int
    _: KW_ONLY
    dim_feedforward: int = 2048
    dropout: float = 0.0
    activation: str | Callable[[Variable], Variable] = "relu"
    layer_norm_eps: float = 1e-5
    norm_first: bool = False
    bias: bool = True
    kv_heads: int | None = None
    rotary: float | None = None
    causal: bool = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        self.dim_feedforward = checks.integer(f"{name}: dim_feedforward", self.dim_feedforward)
        self.dropout = checks.number(f"{name}: dropout", self.dropout, 0, 1, ends="[)")
        self.layer_norm_eps = checks.number(f"{name}: layer_norm_eps", self.layer_norm_eps, 0, 1, ends="[)")
        for flag in ("norm_first", "bias"):
            setattr(self, flag, checks.flag(f"{name}: {flag}", getattr(self, flag)))
        if not callable(self.activation):
            checks.choice(f"{name}: activation", self.activation, ("relu", "gelu", "silu"))
        self._attention()
        self.random = self.dropout > 0

    def _attention(self, name: str = "", causal: bool = False, **more: Any) -> MultiHeadAttention:
        return _part(self, name, MultiHeadAttention(self.nhead, causal=causal, bias=self.bias, **more))

    def _to_itself(self, x: Variable, scope: str, training: bool, lengths: Variable | None, mask: Any) -> Variable:
        """x plus its attention to itself."""
        _features(x, scope, self.nhead)
        own = self._attention("self_attn", self.causal, kv_heads=self.kv_heads, rotary=self.rotary)
        return self._added(
            x, scope, training, "norm1",
            lambda x: own.build(x, f"{scope}.self_attn", training, lengths=lengths, mask=mask),
        )  # fmt: skip

    def _linear(self, units: int, x: Variable, scope: str, name: str, training: bool) -> Variable:
        return _part(self, name, Linear(units, bias=self.bias)).build(x, f"{scope}.{name}", training)

    def _added(
        self, x: Variable, scope: str, training: bool, norm: str, branch: Callable[[Variable], Variable]
    ) -> Variable:
        """x plus a branch, normalized before or after."""

        def normed(x: Variable) -> Variable:
            return _part(self, norm, LayerNorm(eps=self.layer_norm_eps, bias=self.bias)).build(
                x, f"{scope}.{norm}", training
            )

        if self.norm_first:
            return x + self._dropped(branch(normed(x)), training)
        return normed(x + self._dropped(branch(x), training))

    def _dropped(self, x: Variable, training: bool) -> Variable:
        return F.dropout(x, self.dropout) if training and self.dropout else x

    def _feedforward(self, x: Variable, scope: str, training: bool) -> Variable:
        apply = self.activation if callable(self.activation) else getattr(F, self.activation)
        y = self._dropped(apply(self._linear(self.dim_feedforward, x, scope, "linear1", training)), training)
        return self._linear(x.shape[-1].b, y, scope, "linear2", training)


@dataclass(repr=False, eq=False)
class TransformerEncoderLayer(_Transformer):
    """Attention of a sequence to itself, then a network on each step, each added to its input: Vaswani et al. 2017.

    ``norm(x + attention(x))``, or with ``norm_first`` ``x + attention(norm(x))``, and so the network of two layers.

    nhead, dim_feedforward, activation, layer_norm_eps, norm_first, bias : as in PyTorch; its ``d_model`` is the input's last size.
    dropout : of what is added, and of the hidden values of the network; weights of attention are not dropped.
    causal, kv_heads, rotary : as in `MultiHeadAttention`.

    Parameters have PyTorch's names, with scale and shift for those of norms: self_attn.in_proj_weight, linear1.weight, norm1.scale.
    In a custom layer, ``build(x, scope, training, lengths=None, mask=None)`` takes what `MultiHeadAttention` takes.

    Raises
    ------
    ShapeError : the input is no sequence, or its features do not divide into heads.
    """

    def build(
        self, x: Variable, scope: str, training: bool, lengths: Variable | None = None, mask: Any = None
    ) -> Variable:
        self._given(x)
        x = self._to_itself(x, scope, training, x.lengths if lengths is None else lengths, mask)
        return self._added(x, scope, training, "norm2", lambda x: self._feedforward(x, scope, training))


@dataclass(repr=False, eq=False)
class TransformerDecoderLayer(_Transformer):
    """Causal attention of a sequence to itself, attention to a memory, then a network on each step: Vaswani et al. 2017.

    Settings are as in `TransformerEncoderLayer`.  A layer of ``>>`` has one input, so this one is built in a custom layer or a graph:
    ``layer.build(x, scope, training, memory, lengths=None, memory_lengths=None)``, with memory (N, S, E), and how many steps
    of both each sample has.

    Raises
    ------
    CalcError : there is no memory.
    ShapeError : an input is no sequence, or its features do not divide into heads.
    """

    causal: bool = True

    def build(
        self,
        x: Variable,
        scope: str,
        training: bool,
        memory: Variable | None = None,
        lengths: Variable | None = None,
        memory_lengths: Variable | None = None,
    ) -> Variable:
        self._given(x)
        if memory is None:
            raise CalcError(
                f"{scope}: TransformerDecoderLayer reads a memory, which layers of >> do not have: in a custom layer call "
                "layer.build(x, scope, training, memory); a model of one sequence is made of "
                "nn.TransformerEncoderLayer(nhead, causal=True)"
            )
        other = self._attention("multihead_attn", kv_heads=self.kv_heads)
        x = self._to_itself(x, scope, training, lengths, None)
        x = self._added(
            x, scope, training, "norm2",
            lambda x: other.build(x, f"{scope}.multihead_attn", training, memory=memory, lengths=memory_lengths),
        )  # fmt: skip
        return self._added(x, scope, training, "norm3", lambda x: self._feedforward(x, scope, training))


@dataclass(repr=False, eq=False)
class PositionalEmbedding(Layer):
    """x plus a learned vector for each step: weight (max_length, features), for x (N, steps, features) of at most so many steps.

    init : of the vectors (default: normally distributed with a standard deviation of 0.02, as in GPT-2).

    Raises
    ------
    ShapeError : the input is no sequence, or a longer one.
    """

    max_length: int
    init: Any = None

    def __post_init__(self) -> None:
        self.max_length = checks.integer("PositionalEmbedding: max_length", self.max_length)

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        E = _features(x, scope)
        w = self.parameter(x, "weight", (self.max_length, E), Normal(0.0, 0.02) if self.init is None else self.init)
        if x.rank == 2:
            step = self.carry(x, "step", (), steps=self.max_length)
            F.carry(step, step + 1.0)
            return x + gathers.embedding(step, w)
        T = x.shape[1].b
        if self.max_length < T:
            raise ShapeError(f"{scope}: the input {x} has more than max_length={self.max_length} steps")
        return x + (w if self.max_length == T else w[:T])
