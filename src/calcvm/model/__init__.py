"""`Model`: a network with a loss and an optimizer, trained, evaluated, saved."""

from __future__ import annotations

from calcvm.model.callbacks import Callback, EarlyStopping, ReduceOnPlateau
from calcvm.model.data import pad_sequences
from calcvm.model.files import persistent
from calcvm.model.history import History
from calcvm.model.model import CalcHeap, Model, load
from calcvm.model.networks import build_graph
from calcvm.model.roles import Roles
from calcvm.model.stream import Stream

__all__ = [
    "CalcHeap", "Callback", "EarlyStopping", "History", "Model", "ReduceOnPlateau", "Roles", "Stream", "build_graph", "load",
    "pad_sequences", "persistent",
]  # fmt: skip
