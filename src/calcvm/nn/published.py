"""Layers of published networks that other networks have no use for: `calcvm.zoo`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from calcvm import functions as F
from calcvm import gathers, sequences
from calcvm.errors import CalcError, ShapeError
from calcvm.graph import Variable
from calcvm.init import Normal, Uniform
from calcvm.nn.embeddings import Embedding
from calcvm.nn.layers import Layer


@dataclass(repr=False, eq=False)
class BertEmbedding(Layer):
    """The vectors of tokens (N, T), or of tokens with their types (N, T, 2), plus those of the types."""

    takes: ClassVar[Any] = "int64"
    words: Embedding
    types: int

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        if x.rank != 2 and (x.rank != 3 or x.shape[2] != 2):
            raise ShapeError(
                f"{scope}: the input {x} is not (N, steps), tokens, or (N, steps, 2), tokens and their types"
            )
        y = self.words.build(x if x.rank == 2 else x[:, :, 0], f"{scope}.words", training)
        table = self.parameter(x, "types", (self.types, self.words.embedding_dim), Normal(0.0, 0.02))
        return y + (table[:1] if x.rank == 2 else gathers.embedding(x[:, :, 1], table))


@dataclass(repr=False, eq=False)
class AnsweringLSTM(Layer):
    """What the answering LSTM sees and says at each step: (N, T, 2 * width), of one step (N, 2 * width)."""

    takes: ClassVar[Any] = "int64"

    words: Embedding
    layers: int
    source: int

    @property
    def width(self) -> int:
        return self.words.embedding_dim

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        if x.rank > 2 or (x.rank == 2 and x.shape[1].b <= self.source):
            raise ShapeError(
                f"{scope}: the input {x} is not (N, steps), the {self.source} that are read and at least one of the answer"
            )
        if x.lengths is not None:
            raise CalcError(
                f"{scope}: lengths are of the whole input, and it is two sequences: pad what is read in front, and leave out steps "
                "behind an answer by ignore_index="
            )
        words = self.words.build(x, f"{scope}.words", training)
        if x.rank == 1:
            return self._step(F.expand_dims(words, 1))
        read, states = self._lstm("read", words[:, : self.source], [()] * self.layers)
        answer, _ = self._lstm("answer", words[:, self.source :], states)
        return F.concat([F.attention(answer, read, read, heads=1), answer], axis=2)

    def _step(self, word: Variable) -> Variable:
        """The next step (N, 1, width).  While steps are read, the answering LSTM takes the states of the reading one."""
        seen, kept = self.carry(word, "seen", ()), self.carry(word, "kept", (self.source, self.width))
        reads = F.expand_dims(seen < float(self.source), 1)
        reading, answering = (
            [[self.carry(word, f"{name}_{s}_l{layer}", (self.width,)) for s in "hc"] for layer in range(self.layers)]
            for name in ("read", "answer")
        )
        read, found = self._lstm("read", word, reading)
        answer, then = self._lstm("answer", word, answering)
        for layer in range(self.layers):
            for r, a, of, new in zip(reading[layer], answering[layer], found[layer], then[layer]):
                F.carry(a, F.where(reads, F.carry(r, of), new))
        all_read = F.concat([kept[:, 1:], read], axis=1) if self.source > 1 else read
        F.carry(kept, F.where(F.expand_dims(reads, 2), all_read, kept))
        F.carry(seen, seen + 1.0)
        both = F.concat([F.attention(answer, kept, kept, heads=1), answer], axis=2)
        return F.reshape(both, (None, 2 * self.width))

    def _lstm(self, name: str, x: Variable, states: list[Any]) -> tuple[Variable, list[Any]]:
        """LSTMs above each other: the outputs of the last, and the last states of all."""
        start, wide, after = Uniform(-(self.width**-0.5), self.width**-0.5), 4 * self.width, []
        shapes = {
            "weight_ih": (self.width, wide),
            "weight_hh": (self.width, wide),
            "bias_ih": (wide,),
            "bias_hh": (wide,),
        }
        for layer in range(self.layers):
            weights = [self.parameter(x, f"{name}_{of}_l{layer}", shape, start) for of, shape in shapes.items()]
            x, *last = sequences.lstm(x, *weights, *states[layer])
            after.append(last)
        return x, after
