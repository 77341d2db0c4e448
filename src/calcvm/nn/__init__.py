"""Layers: parts of a network that create their own parameters, composed with ``>>``."""

from calcvm import hints
from calcvm.nn.augment import Normalize, RandomCrop, RandomHorizontalFlip, RandomShift, RandomVerticalFlip
from calcvm.nn.blocks import Concat, Residual
from calcvm.nn.embeddings import Embedding, TiedLinear
from calcvm.nn.images import (
    AdaptiveAvgPool,
    AdaptiveMaxPool,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    CausalConv1d,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    GlobalAvgPool,
    GlobalMaxPool,
    LPPool2d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
    Pad,
    Upsample,
)
from calcvm.nn.layers import (
    ELU,
    GELU,
    SELU,
    Activation,
    Center,
    Dropout,
    Dropout2d,
    Flatten,
    Function,
    HardSigmoid,
    HardSwish,
    Layer,
    LeakyReLU,
    Linear,
    LogSoftmax,
    Mish,
    PReLU,
    ReLU,
    ReLU6,
    Reshape,
    Scale,
    Sequential,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)
from calcvm.nn.norms import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, LocalResponseNorm, RMSNorm
from calcvm.nn.recurrent import GRU, LSTM, RNN, MeanOverSteps, Recurrent
from calcvm.nn.standardize import Standardize
from calcvm.nn.transformers import (
    MultiHeadAttention,
    PositionalEmbedding,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
)

__all__ = [
    "Activation", "AdaptiveAvgPool", "AdaptiveMaxPool", "AvgPool1d", "AvgPool2d", "AvgPool3d", "BatchNorm",
    "CausalConv1d", "Center", "Concat", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d",
    "Dropout", "Dropout2d", "ELU", "Embedding", "Flatten", "Function", "GELU", "GRU", "GlobalAvgPool", "GlobalMaxPool", "GroupNorm",
    "HardSigmoid", "HardSwish", "InstanceNorm", "LPPool2d", "LSTM", "Layer", "LayerNorm", "LeakyReLU", "Linear",
    "LocalResponseNorm", "LogSoftmax", "MaxPool1d", "MaxPool2d", "MaxPool3d", "MeanOverSteps", "Mish", "MultiHeadAttention", "Normalize", "PReLU", "Pad",
    "PositionalEmbedding",
    "RMSNorm", "RNN", "RandomCrop", "RandomHorizontalFlip", "RandomShift", "RandomVerticalFlip", "ReLU", "ReLU6", "Recurrent",
    "Reshape", "Residual", "SELU", "Scale", "Sequential", "SiLU", "Sigmoid", "Softmax", "Softplus", "Standardize", "Tanh",
    "TiedLinear", "TransformerDecoderLayer", "TransformerEncoderLayer", "Upsample",
]  # fmt: skip
hints.hint(globals(), __all__)


def __getattr__(name: str) -> object:
    raise hints.unknown_name(__name__, name, {layer: f"nn.{layer}" for layer in __all__})
