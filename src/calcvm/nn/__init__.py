"""Layers: parts of a network that make their own parameters, composed with ``>>``."""

from calcvm.nn.blocks import Concat, Residual
from calcvm.nn.images import Conv1d, Conv2d, Conv3d
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

__all__ = [
    "ELU", "GELU", "Activation", "Center", "Concat", "Conv1d", "Conv2d", "Conv3d", "Dropout", "Flatten", "Function", "Layer",
    "LeakyReLU", "Linear", "LogSoftmax", "ReLU", "Reshape", "Residual", "Scale", "Sequential", "SiLU", "Sigmoid", "Softmax",
    "Softplus", "Tanh",
]  # fmt: skip
