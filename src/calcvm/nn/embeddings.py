"""Layers for integers such as words: learned vectors, and the scores of all of them."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from calcvm import checks, gathers
from calcvm import functions as F
from calcvm.errors import CalcError, ShapeError
from calcvm.graph import Variable
from calcvm.init import Normal, PaddedNormal
from calcvm.nn.layers import LARGEST_SIZE, Layer, Weighted, owned


@dataclass(repr=False, eq=False)
class Embedding(Weighted):
    """A learned vector for each of ``num_embeddings`` integers: x (B, ...) of integers gives (B, ..., embedding_dim).

    As the first layer of a `calcvm.Model` it makes the input int64.  An integer outside [0, num_embeddings) raises an error.

    Parameters
    ----------
    num_embeddings : int
    embedding_dim : int
    padding_idx : int, optional
        The integer of padding: its vector starts at 0 and gets no gradient here, so that it stays 0, unless a `TiedLinear` trains it.
    init : initializer, its name, or array of shape (num_embeddings, embedding_dim)
        Of ``weight``; default ``Normal(0, 1)``, as in PyTorch.  A given one fills the vector of ``padding_idx`` too.
    trainable : False freezes the layer.

    Examples
    --------
    >>> net = nn.Embedding(1000, 64, padding_idx=0) >> nn.Flatten() >> nn.Linear(3)
    >>> model = cv.Model(net, input_shape=(12,), optimizer=cv.Adam(1e-3), loss="softmax_cross_entropy")
    >>> words = np.random.default_rng(0).integers(0, 1000, (100, 12))
    >>> model.predict(words).shape
    (100, 3)
    """

    takes: ClassVar[Any] = "int64"
    bias: ClassVar[bool] = False  # type: ignore[misc]
    bias_init: ClassVar[Any] = None  # type: ignore[misc]
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None = None
    _: KW_ONLY
    init: Any = None
    regularizer: Any = None
    trainable: bool = True

    def __post_init__(self) -> None:
        for name in ("num_embeddings", "embedding_dim"):
            setattr(self, name, checks.integer(f"Embedding: {name}", getattr(self, name), 1, LARGEST_SIZE))
        if self.padding_idx is not None:
            self.padding_idx = checks.integer(
                "Embedding: padding_idx", self.padding_idx, 0, self.num_embeddings - 1, unless=" (or None)"
            )
        self._check_starts()

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        init = self.init
        if init is None:
            init = Normal(0.0, 1.0) if self.padding_idx is None else PaddedNormal(0.0, 1.0, padding=self.padding_idx)
        w = self.parameter(
            x,
            "weight",
            (self.num_embeddings, self.embedding_dim),
            init,
            regularizer=self.regularizer,
            trainable=self.trainable,
        )
        return gathers.embedding(x, w, self.padding_idx)


@dataclass(repr=False, eq=False)
class TiedLinear(Layer):
    """``y = x @ weight.T``, the weight of an `Embedding` in front of it: x (..., embedding_dim) gives (..., num_embeddings).

    Both layers train one weight, as the input and output of a language model do (Press and Wolf 2017).

    Parameters
    ----------
    embedding : Embedding
        A layer of the same network, built before this one.
    bias : whether a learned bias is added.

    Examples
    --------
    >>> words = nn.Embedding(1000, 64)
    >>> net = words >> nn.Linear(64) >> nn.Tanh() >> nn.TiedLinear(words)
    >>> model = cv.Model(net, input_shape=(12,), optimizer=cv.Adam(1e-3), loss="softmax_cross_entropy")
    >>> sorted(model.parameters), model.predict(np.zeros((1, 12), int)).shape
    (['embedding_1.weight', 'linear_1.bias', 'linear_1.weight'], (1, 12, 1000))
    """

    embedding: Embedding
    _: KW_ONLY
    bias: bool = False

    def __post_init__(self) -> None:
        checks.one_of("TiedLinear: embedding", self.embedding, Embedding, "a layer nn.Embedding(...) of the network")
        self.bias = checks.flag("TiedLinear: bias", self.bias)

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        weight = owned(self.embedding, x).get("weight")
        if weight is None:
            raise CalcError(f"{scope}: {self.embedding!r} is not in the network before it: its weight is not known yet")
        if x.rank < 2 or x.shape[-1] != weight.shape[1]:
            raise ShapeError(f"{scope}: the last size of the input {x} is not the {weight.shape[1]} of {weight}")
        y = F.matmul(x, weight, transpose_b=True)
        return y + self.parameter(x, "bias", weight.shape[:1], "zeros") if self.bias else y
