"""Random networks of sequences, valid by construction, each with the same written plainly in PyTorch and float64.

A part is a layer and a function ``of(x, p, there)``: x (N, T, F); ``p`` gives the layer's parameters by name (None: there is none);
there (N, T) says which steps there are.  Parameters are shaped as ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import calcvm as cv
from calcvm import nn

Plain = Callable[..., Tensor]


@dataclass
class Part:
    layer: nn.Layer
    of: Plain
    features: int  # of what it returns
    streams: bool = True  # it is built on single steps too, and sees no later ones
    moves: bool = False  # it moves steps, so that padding would get among them


# ---------------------------------------------------------------- written plainly
def linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return x @ w if b is None else x @ w + b


def cells(kind: str, x: Tensor, h: list[Tensor], w: list[Any], nonlinearity: str) -> list[Tensor]:
    """The states after a step, by PyTorch's order of gates."""
    i, n = linear(x, w[0], w[2]), linear(h[0], w[1], w[3])
    if kind == "RNN":
        return [torch.relu(i + n) if nonlinearity == "relu" else torch.tanh(i + n)]
    if kind == "GRU":
        (ri, zi, ni), (rn, zn, nn_) = i.chunk(3, -1), n.chunk(3, -1)
        r, z = torch.sigmoid(ri + rn), torch.sigmoid(zi + zn)
        return [(1 - z) * torch.tanh(ni + r * nn_) + z * h[0]]
    a, f, g, o = (i + n).chunk(4, -1)
    c = torch.sigmoid(f) * h[1] + torch.sigmoid(a) * torch.tanh(g)
    return [torch.sigmoid(o) * torch.tanh(c), c]


def recurrent(kind: str, layer: Any, last: dict[str, Tensor]) -> Plain:
    """``last`` gets the states after the last step, by the names of the layer's carries."""

    def of(x: Tensor, p: Any, there: Tensor) -> Tensor:
        for k in range(layer.num_layers):
            outs = []
            for end in ("", "_reverse")[: 1 + layer.bidirectional]:
                w = [p(f"{name}_l{k}{end}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
                h = [x.new_zeros(len(x), layer.hidden_size)] * len(layer.states)
                ys = [torch.zeros(())] * x.shape[1]
                for t in reversed(range(x.shape[1])) if end else range(x.shape[1]):
                    on = there[:, t, None]
                    new = cells(kind, x[:, t], h, w, getattr(layer, "nonlinearity", "tanh"))
                    h = [torch.where(on, a, b) for a, b in zip(new, h)]
                    ys[t] = torch.where(on, h[0], 0.0)
                last.update({f"{name}_l{k}": state for name, state in zip(layer.states, h)})
                outs.append((torch.stack(ys, 1), h[0]))
            x, end_state = (torch.cat(found, -1) for found in zip(*outs))
        return x if layer.return_sequences else end_state

    return of


def softmax(x: Tensor, where: Tensor, axis: int) -> Tensor:
    """Over the elements where a mask is true; 0 if there is none."""
    x = torch.where(where, x, -torch.inf)
    e = torch.exp(x - x.detach().amax(axis, keepdim=True).clamp(min=-1e300))
    total = e.sum(axis, keepdim=True)
    return e / torch.where(total > 0, total, 1.0)


def attention(q: Tensor, k: Tensor, v: Tensor, a: Any, there: Tensor, bias: Any = None) -> Tensor:
    """Each head's softmax over the keys that a query sees, all written out; ``there`` (N, S)."""
    (N, T, E), S = q.shape, k.shape[1]
    d = E // a.num_heads
    q, k, v = (x.reshape(N, x.shape[1], -1, d).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(a.num_heads // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / d**0.5
    if a.softcap:
        scores = a.softcap * torch.tanh(scores / a.softcap)
    if bias is not None:
        scores = scores + torch.as_tensor(bias)
    i, j = torch.arange(T)[:, None], torch.arange(S)
    seen = (
        there[:, None, None, :] & ((j <= i) if a.causal else (j >= 0)) & ((j > i - a.window) if a.window else (j >= 0))
    )
    return (softmax(scores, seen, -1) @ v).transpose(1, 2).reshape(N, T, E)


def rotated(x: Tensor, heads: int, base: float) -> Tensor:
    N, T, E = x.shape
    half = E // heads // 2
    angle = torch.outer(torch.arange(T).double(), base ** (-torch.arange(half).double() / half))[:, None]
    a, b = x.reshape(N, T, heads, 2, half).unbind(3)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).reshape(N, T, E)


def heads(x: Tensor, p: Any, a: Any, there: Tensor, memory: Tensor | None = None, bias: Any = None) -> Tensor:
    """`nn.MultiHeadAttention`, to ``memory`` whose steps ``there`` tells of."""
    E, of = x.shape[-1], x if memory is None else memory
    kv = a.kv_heads or a.num_heads
    K, w, b = E // a.num_heads * kv, p("in_proj_weight"), p("in_proj_bias")
    q = linear(x, w[:, :E], b if b is None else b[:E])
    k, v = linear(of, w[:, E:], b if b is None else b[E:]).split(K, -1)
    if a.rotary is not None:
        q, k = rotated(q, a.num_heads, a.rotary), rotated(k, kv, a.rotary)
    return linear(attention(q, k, v, a, there, bias), p("out_proj.weight"), p("out_proj.bias"))


def normed(x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-5) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], scale, shift, eps)


def transformer(layer: Any, x: Tensor, p: Any, there: Tensor, memory: Tensor | None = None, seen: Any = None) -> Tensor:
    """Both layers of transformers; a decoder has a ``memory`` whose steps ``seen`` tells of."""

    def of(name: str) -> Any:
        return lambda end: p(f"{name}.{end}")

    def added(x: Tensor, norm: str, branch: Plain) -> Tensor:
        n = lambda x: normed(x, p(f"{norm}.scale"), p(f"{norm}.shift"), layer.layer_norm_eps)  # noqa: E731
        return x + branch(n(x)) if layer.norm_first else n(x + branch(x))

    def feedforward(x: Tensor) -> Tensor:
        hidden = getattr(torch.nn.functional, layer.activation)(linear(x, p("linear1.weight"), p("linear1.bias")))
        return linear(hidden, p("linear2.weight"), p("linear2.bias"))

    own = nn.MultiHeadAttention(layer.nhead, causal=layer.causal, kv_heads=layer.kv_heads, rotary=layer.rotary)
    x = added(x, "norm1", lambda x: heads(x, of("self_attn"), own, there))
    if memory is not None:
        other = nn.MultiHeadAttention(layer.nhead, kv_heads=layer.kv_heads)
        x = added(x, "norm2", lambda x: heads(x, of("multihead_attn"), other, seen, memory))
    return added(x, "norm2" if memory is None else "norm3", feedforward)


# ---------------------------------------------------------------- custom layers, for what >> cannot give
class Attending(nn.Layer):
    """Attention with a bias of the scores, or to the first steps of the same sequence as its memory."""

    def __init__(self, inner: nn.MultiHeadAttention, memory: int | None, bias: np.ndarray | None):
        self.inner, self.memory, self.bias = inner, memory, bias

    def build(self, x, scope, training):  # type: ignore[no-untyped-def]
        lengths, more = x.lengths, {}
        if self.memory:
            more["memory"] = x[:, : self.memory]
            lengths = None if lengths is None else cv.minimum(cv.cast(lengths, None), float(self.memory))
        return self.inner.build(x, f"{scope}.inner", training, lengths=lengths, mask=self.bias, **more)

    def plain(self, x: Tensor, p: Any, there: Tensor) -> Tensor:
        memory = x[:, : self.memory] if self.memory else None
        return heads(x, inner(p), self.inner, there[:, : self.memory], memory, self.bias)


class Decoding(nn.Layer):
    """A decoder's layer whose memory is made of the same sequence."""

    def __init__(self, inner: nn.TransformerDecoderLayer):
        self.inner = inner

    def build(self, x, scope, training):  # type: ignore[no-untyped-def]
        return self.inner.build(x, f"{scope}.inner", training, cv.tanh(x), x.lengths, x.lengths)

    def plain(self, x: Tensor, p: Any, there: Tensor) -> Tensor:
        return transformer(self.inner, x, inner(p), there, torch.tanh(x), there)


class Pooled(nn.Layer):
    """A vector of a sequence: of the steps that are there the mean, the largest, the last, or a mean by learned weights."""

    def __init__(self, how: str):
        self.how = how

    def build(self, x, scope, training):  # type: ignore[no-untyped-def]
        T, F = x.shape[1].b, x.shape[2].b
        full = cv.sum(x * 0.0, (1, 2)) + float(T)
        n = full if x.lengths is None else cv.cast(x.lengths, None)
        there = np.arange(T)[None] < cv.expand_dims(n, 1)
        if self.how == "mean":
            return cv.sum(cv.where(cv.expand_dims(there, 2), x, 0.0), 1) / cv.expand_dims(cv.maximum(n, 1.0), 1)
        if self.how == "largest":
            return cv.max(cv.where(cv.expand_dims(there, 2), x, -10.0), 1)
        if self.how == "last":
            at = cv.maximum(n - 1.0, 0.0)
            return cv.sum(x * cv.expand_dims(cv.one_hot(cv.cast(at, "int64"), T), 2), 1)
        w = self.parameter(x, "weight", (F, 1))
        return cv.sum(x * cv.softmax(cv.matmul(x, w), axis=1, where=cv.expand_dims(there, 2)), 1)

    def plain(self, x: Tensor, p: Any, there: Tensor) -> Tensor:
        on, n = there[:, :, None], there.sum(1)
        if self.how == "mean":
            return torch.where(on, x, 0.0).sum(1) / n.clamp(min=1)[:, None]
        if self.how == "largest":
            return torch.where(on, x, -10.0).amax(1)
        if self.how == "last":
            return x[torch.arange(len(x)), (n - 1).clamp(min=0)]
        return (x * softmax(x @ p("weight"), on, 1)).sum(1)


def inner(p: Any) -> Any:
    return lambda name: p(f"inner.{name}")


def affine(x: Tensor, p: Any, there: Tensor) -> Tensor:
    return linear(x, p("weight"), p("bias"))


# ---------------------------------------------------------------- parts, drawn
def _recurrent(rng, F, T, last):  # type: ignore[no-untyped-def]
    kind = str(rng.choice(["RNN", "GRU", "LSTM"]))
    more = {"nonlinearity": str(rng.choice(["tanh", "relu"]))} if kind == "RNN" else {}
    both = rng.random() < 0.3
    layer = getattr(nn, kind)(
        int(rng.choice([1, 2, 5, 8, 16, 17])), num_layers=int(rng.integers(1, 3)), bias=bool(rng.random() < 0.8),
        bidirectional=both, **more,
    )  # fmt: skip
    return Part(layer, recurrent(kind, layer, last), layer.hidden_size * (1 + both), streams=not both)


def _attention(rng, F, T, last):  # type: ignore[no-untyped-def]
    n, kv = _heads(rng, F)
    causal = rng.random() < 0.7
    layer = nn.MultiHeadAttention(
        n, kv_heads=kv, causal=causal, window=int(rng.integers(1, T + 2)) if causal and rng.random() < 0.4 else None,
        softcap=float(rng.uniform(0.5, 3)) if rng.random() < 0.3 else None, rotary=_rotary(rng, F, n),
        bias=bool(rng.random() < 0.7),
    )  # fmt: skip
    return Part(layer, lambda x, p, there: heads(x, p, layer, there), F, streams=causal)


def _attending(rng, F, T, last):  # type: ignore[no-untyped-def]
    n, kv = _heads(rng, F)
    memory = int(rng.integers(1, T + 1)) if rng.random() < 0.5 else None
    bias = None
    if memory is None or rng.random() < 0.3:
        shape = (*((n,) if rng.random() < 0.5 else ()), T, memory or T)
        bias = np.where(rng.random(shape) < 0.2, -np.inf, rng.standard_normal(shape))
        bias[..., 0] = 0.0
    layer = Attending(nn.MultiHeadAttention(n, kv_heads=kv, causal=memory is None and rng.random() < 0.5), memory, bias)
    return Part(layer, layer.plain, F, streams=False)


def _encoder(rng, F, T, last):  # type: ignore[no-untyped-def]
    n, kv = _heads(rng, F)
    causal = rng.random() < 0.7
    layer = nn.TransformerEncoderLayer(n, causal=causal, rotary=_rotary(rng, F, n), kv_heads=kv, **_block(rng))
    return Part(layer, lambda x, p, there: transformer(layer, x, p, there), F, streams=causal)


def _decoder(rng, F, T, last):  # type: ignore[no-untyped-def]
    n, kv = _heads(rng, F)
    layer = Decoding(nn.TransformerDecoderLayer(n, kv_heads=kv, **_block(rng)))
    return Part(layer, layer.plain, F, streams=False)


def _block(rng) -> dict[str, Any]:  # type: ignore[no-untyped-def]
    return {
        "dim_feedforward": int(rng.choice([1, 7, 16, 20])), "activation": str(rng.choice(["relu", "gelu", "silu"])),
        "norm_first": bool(rng.random() < 0.5), "bias": bool(rng.random() < 0.8),
    }  # fmt: skip


def _heads(rng, F: int) -> tuple[int, int | None]:  # type: ignore[no-untyped-def]
    n = int(rng.choice([n for n in range(1, F + 1) if F % n == 0]))
    return n, int(rng.choice([k for k in range(1, n + 1) if n % k == 0])) if rng.random() < 0.5 else None


def _rotary(rng, F: int, n: int) -> float | None:  # type: ignore[no-untyped-def]
    return float(rng.choice([10.0, 10000.0])) if F // n % 2 == 0 and rng.random() < 0.4 else None


def _convolution(rng, F, T, last):  # type: ignore[no-untyped-def]
    layer = nn.CausalConv1d(
        int(rng.integers(1, 9)), int(rng.integers(1, 5)), int(rng.integers(1, 5)), bias=bool(rng.random() < 0.7)
    )

    def of(x: Tensor, p: Any, there: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x.transpose(1, 2), ((layer.kernel - 1) * layer.dilation, 0))
        return torch.nn.functional.conv1d(x, p("weight"), p("bias"), dilation=layer.dilation).transpose(1, 2)

    return Part(layer, of, layer.channels)


def _norm(rng, F, T, last):  # type: ignore[no-untyped-def]
    if rng.random() < 0.5:
        return Part(nn.LayerNorm(eps=1e-3), lambda x, p, there: normed(x, p("scale"), p("shift"), 1e-3), F)
    return Part(
        nn.RMSNorm(eps=1e-3), lambda x, p, there: torch.nn.functional.rms_norm(x, x.shape[-1:], p("scale"), 1e-3), F
    )


def _linear(rng, F, T, last):  # type: ignore[no-untyped-def]
    layer = nn.Linear(int(rng.choice([1, 2, 4, 6, 12, 16])))
    return Part(layer, affine, layer.units)


def _positions(rng, F, T, last):  # type: ignore[no-untyped-def]
    return Part(
        nn.PositionalEmbedding(int(T + rng.integers(0, 3))), lambda x, p, there: x + p("weight")[: x.shape[1]], F
    )


def _function(rng, F, T, last):  # type: ignore[no-untyped-def]
    """Of a step's features, or over the steps."""
    order = rng.permutation(T)
    mask, places = rng.random(F) < 0.6, rng.integers(0, F, 3)
    k = int(rng.integers(1, F + 1))

    def ranks(x: Tensor) -> Tensor:  # PyTorch leaves open which of equals comes first
        return torch.argsort(-x, dim=-1, stable=True)

    found = {
        "tanh": (cv.tanh, torch.tanh), "gelu": (cv.gelu, torch.nn.functional.gelu),
        "softmax": (lambda x: cv.softmax(x, where=mask), lambda x: softmax(x, torch.tensor(mask), -1)),
        "top": (lambda x: cv.top_k(x, k)[0], lambda x: torch.gather(x, -1, ranks(x)[..., :k])),
        "sort": (lambda x: cv.sort(x, descending=True), lambda x: torch.gather(x, -1, ranks(x))),
        "hot": (lambda x: x + cv.one_hot(cv.argmax(x, -1), F), lambda x: x + torch.nn.functional.one_hot(x.argmax(-1), F)),
        "take": (lambda x: cv.take(x, places, -1), lambda x: x[..., places]),
        "scatter": (
            lambda x: cv.scatter_add(x, places, cv.take(x, places, -1), -1),
            lambda x: x.index_add(-1, torch.tensor(places), x[..., places]),
        ),
        "sums": (lambda x: cv.cumsum(x, 1) * 0.5, lambda x: x.cumsum(1) * 0.5),
        "products": (lambda x: cv.cumprod(cv.sigmoid(x) + 0.5, 1), lambda x: (torch.sigmoid(x) + 0.5).cumprod(1)),
        "largest": (lambda x: cv.cummax(x, 1), lambda x: x.cummax(1).values),
        "order": (lambda x: cv.take(x, order, 1), lambda x: x[:, order]),
        "along": (
            lambda x: cv.take_along_axis(x, cv.argsort(x, 1), 1),
            lambda x: torch.gather(x, 1, torch.argsort(x, dim=1, stable=True)),
        ),
    }  # fmt: skip
    name = str(rng.choice([*found]))
    ours, theirs = found[name]
    streams = name not in ("sums", "products", "largest", "order", "along")
    features = {"top": k, "take": len(places)}.get(name, F)
    return Part(nn.Function(ours), lambda x, p, there: theirs(x), features, streams, moves=name in ("order", "along"))


def _residual(rng, F, T, last):  # type: ignore[no-untyped-def]
    """The branch's own parts, and a linear one that gives it the features of its input."""
    part, found = rng.choice([_norm, _positions, _convolution, _attention])(rng, F, T, last), nn.Linear(F)

    def of(x: Tensor, p: Any, there: Tensor) -> Tensor:
        kind = part.layer.kind
        y = part.of(x, lambda name: p(f"branch.{kind}_1.{name}"), there)
        return x + affine(y, lambda name: p(f"branch.linear_1.{name}"), there)

    return Part(nn.Residual(part.layer >> found), of, F, part.streams)


PARTS = (
    _recurrent, _recurrent, _recurrent, _attention, _attention, _attending, _encoder, _encoder, _decoder, _convolution, _convolution,
    _norm, _linear, _positions, _function, _function, _residual,
)  # fmt: skip
KEEPING = _recurrent, _attention, _encoder, _positions  # a state from step to step, if they stream


# ---------------------------------------------------------------- networks
class Network:
    """A random network, its data, and its parameters; ``stream``: it is made of parts that stream."""

    def __init__(self, number: int, stream: bool):
        rng = np.random.default_rng([number, stream])
        self.stream, self.parts, self.last = stream, [], {}
        self.n, self.steps, F = int(rng.integers(1, 8)), int(rng.integers(1, 13)), int(rng.choice([1, 2, 4, 6, 8, 12]))
        self.ragged, words = bool(rng.random() < 0.6), None
        self.shape: tuple[int, ...] = (self.steps, F)
        if rng.random() < 0.3:
            vocabulary, self.shape = int(rng.integers(2, 12)), (self.steps,)
            padding = int(rng.integers(vocabulary)) if rng.random() < 0.3 else None
            words = nn.Embedding(vocabulary, F, padding)
            self._add(Part(words, lambda x, p, there: torch.nn.functional.embedding(x, p("weight"), padding), F))
        drawn = [PARTS] * int(rng.integers(1, 5))
        if stream:
            drawn[rng.integers(len(drawn))] = KEEPING
        for parts in drawn:
            F = self._grown(rng, F, parts)
        self._ended(rng, F, words)
        self.loss = str(rng.choice(["mse", "huber", "softmax_cross_entropy"][: 2 + (self.parts[-1].features > 1)]))
        self.graph = cv.build_graph(
            nn.Sequential([part.layer for part in self.parts]), self.shape, self.loss, cv.SGD(0.02), lengths=self.ragged, stream=stream
        )  # fmt: skip
        self.graph.paths["learn"].output.rename("out")
        sizes = {name: [n.at(self.n) for n in v.shape] for name, v in self.graph.variables.items()}
        self.weights = {
            name: rng.standard_normal(sizes[name]) / max(1, sizes[name][0]) ** 0.5
            for name, v in self.graph.variables.items()
            if v.kind == "parameter"
        }
        x = rng.standard_normal(sizes["input"]) if words is None else rng.integers(0, vocabulary, sizes["input"])
        labels = self.loss == "softmax_cross_entropy"
        t = (
            rng.integers(0, self.parts[-1].features, sizes["target"])
            if labels
            else rng.standard_normal(sizes["target"])
        )
        self.data = {"input": x, "target": t}
        if self.ragged:
            self.data["lengths"] = rng.choice([0, 1, self.steps, *rng.integers(0, self.steps + 1, 3)], self.n)

    def _add(self, part: Part) -> int:
        self.parts.append(part)
        return part.features

    def _grown(self, rng: Any, F: int, parts: tuple[Any, ...]) -> int:
        """One of the parts that fits what there is; others are drawn anew."""
        while True:
            last: dict[str, Tensor] = {}
            part = rng.choice(parts)(rng, F, self.steps, last)
            if (part.streams or not self.stream) and not (part.moves and self.ragged):
                self.last[f"{part.layer.kind}_{1 + sum(p.layer.kind == part.layer.kind for p in self.parts)}"] = last
                return self._add(part)

    def _ended(self, rng: Any, F: int, words: nn.Embedding | None) -> None:
        """What comes last: scores by the embedding's weight, a vector of the sequence, or neither; something is learnt."""
        end = rng.random()
        if words is not None and end < 0.5:
            self._add(Part(nn.Linear(words.embedding_dim), affine, words.embedding_dim))
            tied = nn.TiedLinear(words, bias=bool(rng.random() < 0.5))
            of = lambda x, p, there: linear(x, self.p["embedding_1.weight"].T, p("bias"))  # noqa: E731
            self._add(Part(tied, of, words.num_embeddings))
        elif not self.stream and end < 0.75:
            pooled = Pooled(str(rng.choice(["mean", "largest", "last", "weighted"])))
            F = self._add(Part(pooled, pooled.plain, F))
        elif not self.stream and end < 0.9:
            layer = nn.GRU(5, return_sequences=False, bidirectional=bool(rng.random() < 0.5))
            F = self._add(Part(layer, recurrent("GRU", layer, {}), 5 * (1 + layer.bidirectional)))
        if (
            end >= 0.5
            and rng.random() < 0.5
            or all(isinstance(part.layer, (nn.Function, Pooled)) for part in self.parts)
        ):
            self._add(Part(nn.Linear(3), affine, 3))

    def __str__(self) -> str:
        return (
            f"{self.loss} of {self.shape}, {self.n} samples{', ragged' * self.ragged}: {[p.layer for p in self.parts]}"
        )

    # ------------------------------------------------------------ PyTorch's
    def learn(self) -> dict[str, Tensor]:
        """Parameters of PyTorch, as the network's are at first."""
        self.p = {name: torch.tensor(w, requires_grad=True) for name, w in self.weights.items()}
        return self.p

    def there(self) -> Tensor:
        lengths = torch.tensor(self.data.get("lengths", np.full(self.n, self.steps)))
        return torch.arange(self.steps) < lengths[:, None]

    def expected(self, x: np.ndarray, there: Tensor) -> Tensor:
        y, counts = torch.tensor(x), dict[str, int]()
        for part in self.parts:
            n = counts[part.layer.kind] = counts.get(part.layer.kind, 0) + 1
            scope = f"{part.layer.kind}_{n}"
            y = part.of(y, lambda name, scope=scope: self.p.get(f"{scope}.{name}"), there)
        return y

    def states(self) -> dict[str, Tensor]:
        """After the last `expected`, what recurrent layers carry, by name."""
        return {f"{scope}.{name}": state for scope, last in self.last.items() for name, state in last.items()}

    def expected_loss(self, y: Tensor) -> Tensor:
        """The mean over what is there; 0 if nothing is."""
        t, on = torch.tensor(self.data["target"]), self.there() if y.ndim == 3 else torch.ones(len(y), dtype=torch.bool)
        if self.loss == "softmax_cross_entropy":
            terms = -torch.log_softmax(y, -1).gather(-1, t[..., None])
        else:
            far = (y - t).abs()
            terms = far**2 if self.loss == "mse" else torch.where(far < 1, 0.5 * far**2, far - 0.5)
        return terms[on].sum() / max(1, terms[on].numel())
