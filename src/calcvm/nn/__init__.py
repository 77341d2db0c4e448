"""Layers: parts of a network that make their own parameters, composed with ``>>``."""

from calcvm.nn.blocks import Concat, Residual
from calcvm.nn.images import (
    AdaptiveAvgPool,
    AdaptiveMaxPool,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    Conv1d,
    Conv2d,
    Conv3d,
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
    Activation,
    Center,
    Dropout,
    Flatten,
    Function,
    Layer,
    LeakyReLU,
    Linear,
    LogSoftmax,
    ReLU,
    Reshape,
    Scale,
    Sequential,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)

__all__ = ["Activation", "AdaptiveAvgPool", "AdaptiveMaxPool", "AvgPool1d", "AvgPool2d", "AvgPool3d", "Center", "Concat", "Conv1d", "Conv2d", "Conv3d", "Dropout", "ELU", "Flatten", "Function", "GELU", "GlobalAvgPool", "GlobalMaxPool", "LPPool2d", "Layer", "LeakyReLU", "Linear", "LogSoftmax", "MaxPool1d", "MaxPool2d", "MaxPool3d", "Pad", "ReLU", "Reshape", "Residual", "Scale", "Sequential", "SiLU", "Sigmoid", "Softmax", "Softplus", "Tanh", "Upsample"]  # fmt: skip
