"""Layers and functions of Keras by operators of calcvm."""

from calcvm.frontends.keras import activations, attention, layers, merging, operations, recurrent, shapes, windows
from calcvm.frontends.keras.declared import KERAS, LEFT_OUT, TRAINING, counterpart

__all__ = [
    "KERAS", "LEFT_OUT", "TRAINING", "activations", "attention", "counterpart", "layers", "merging", "operations", "recurrent", "shapes",
    "windows",
]  # fmt: skip
