"""Networks of sequences: language models, GPT, BERT, an encoder that classifies, an LSTM that answers, temporal convolutions."""

from __future__ import annotations

from collections.abc import Mapping

from calcvm import checks, nn
from calcvm.init import Normal
from calcvm.nn import Sequential
from calcvm.nn.published import AnsweringLSTM, BertEmbedding
from calcvm.zoo._scale import LARGEST


def _checked(name: str, sizes: Mapping[str, int]) -> None:
    for what, size in sizes.items():
        checks.integer(f"zoo.{name}: {what}", size, 1, LARGEST)


def char_lstm(classes: int = 256, width: int = 128, layers: int = 1) -> Sequential:
    """A language model of characters, as in Karpathy 2015: integers (B, T) to scores (B, T, classes) of the next one.

    width : features of a character, and units of each LSTM.
    """
    _checked("char_lstm", {"classes": classes, "width": width, "layers": layers})
    return nn.Embedding(classes, width) >> nn.LSTM(width, num_layers=layers) >> nn.Linear(classes)


def gpt(
    classes: int = 50257, width: int = 768, layers: int = 12, heads: int = 12, steps: int = 1024, dropout: float = 0.0
) -> Sequential:
    """GPT-2: integers (B, T) to scores (B, T, classes) of the next one, by the weight of the embedding: Radford et al. 2019.

    steps : the most steps of a sequence.  dropout : of what each part adds.
    """
    _checked("gpt", {"classes": classes, "width": width, "layers": layers, "heads": heads, "steps": steps})
    words = nn.Embedding(classes, width, init=Normal(0.0, 0.02))
    net = words >> nn.PositionalEmbedding(steps)
    for _ in range(layers):
        net = net >> _encoder(heads, 4 * width, dropout, causal=True)
    return net >> nn.LayerNorm() >> nn.TiedLinear(words)


def bert(
    classes: int = 30522,
    width: int = 768,
    layers: int = 12,
    heads: int = 12,
    steps: int = 512,
    types: int = 2,
    dropout: float = 0.0,
) -> Sequential:
    """BERT: integers (B, T), some of them masked, to scores (B, T, classes) of what they were; Devlin et al. 2019.

    The input may also be (B, T, 2): each token with its type, such as the number of its sentence.  Otherwise all types are 0.
    Targets are the tokens themselves, with the model's ``ignore_index`` in place of those that are not masked.

    classes : of tokens, with the one that masks.  steps : the most steps of a sequence.  dropout : of what each part adds.
    """
    sizes = {"classes": classes, "width": width, "layers": layers, "heads": heads, "steps": steps, "types": types}
    _checked("bert", sizes)
    words, eps = nn.Embedding(classes, width, init=Normal(0.0, 0.02)), 1e-12
    net = BertEmbedding(words, types) >> nn.PositionalEmbedding(steps) >> nn.LayerNorm(eps=eps) >> nn.Dropout(dropout)
    for _ in range(layers):
        net = net >> nn.TransformerEncoderLayer(
            heads, dim_feedforward=4 * width, dropout=dropout, activation="gelu", layer_norm_eps=eps
        )
    return net >> nn.Linear(width) >> nn.GELU() >> nn.LayerNorm(eps=eps) >> nn.TiedLinear(words, bias=True)


def transformer_classifier(
    classes: int = 2, width: int = 64, layers: int = 2, heads: int = 4, steps: int = 128, vocabulary: int = 10_000
) -> Sequential:
    """An encoder whose steps are averaged: integers (B, T) below ``vocabulary`` to scores (B, classes); Vaswani et al. 2017.

    steps : the most steps of a sequence.
    """
    sizes = {"classes": classes, "width": width, "layers": layers, "heads": heads, "steps": steps}
    _checked("transformer_classifier", {**sizes, "vocabulary": vocabulary})
    net = nn.Embedding(vocabulary, width) >> nn.PositionalEmbedding(steps)
    for _ in range(layers):
        net = net >> _encoder(heads, 2 * width, 0.0)
    return net >> nn.LayerNorm() >> nn.MeanOverSteps() >> nn.Linear(classes)


def tcn(classes: int = 1, width: int = 32, layers: int = 4, kernel: int = 3) -> Sequential:
    """A temporal convolution network: (B, T, features) to (B, T, classes), which runs step by step too; Bai et al. 2018.

    layers : residual blocks of two convolutions each, with dilations 1, 2, 4, ...
    """
    _checked("tcn", {"classes": classes, "width": width, "layers": layers, "kernel": kernel})
    blocks = nn.Linear(width) >> nn.ReLU()
    for layer in range(layers):
        convolutions = nn.CausalConv1d(width, kernel, 2**layer) >> nn.ReLU() >> nn.CausalConv1d(width, kernel, 2**layer)
        blocks = blocks >> nn.Residual(convolutions >> nn.ReLU()) >> nn.ReLU()
    return blocks >> nn.Linear(classes)


def seq2seq(classes: int = 10_000, width: int = 512, layers: int = 2, source: int = 50) -> Sequential:
    """A sequence to another: an LSTM reads it, a second one with attention answers; Sutskever et al. 2014, Luong et al. 2015.

    The input is both, integers (B, source + T): what is read, then a token that means "answer" and the answer without its last token.
    Scores (B, T, classes) are those of the answer, each token from the true ones before it.  `Model.generate` answers a prompt
    of source + 1 tokens, each from those that it gave before.

    source : steps that are read; shorter ones are padded with a token, best in front.
    width : features of a token, and units of each LSTM.  layers : LSTMs above each other that read, and that answer.
    """
    _checked("seq2seq", {"classes": classes, "width": width, "layers": layers, "source": source})
    return (
        AnsweringLSTM(nn.Embedding(classes, width), layers, source)
        >> nn.Linear(width, bias=False)
        >> nn.Tanh()
        >> nn.Linear(classes)
    )


def _encoder(heads: int, hidden: int, dropout: float, causal: bool = False) -> nn.Layer:
    return nn.TransformerEncoderLayer(
        heads, dim_feedforward=hidden, dropout=dropout, activation="gelu", norm_first=True, causal=causal
    )
