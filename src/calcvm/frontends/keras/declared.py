"""The table of layers of Keras, by the names of their classes; of functions of keras.ops by "ops." and theirs.

A function of the table gets the `Building`, then the inputs of the call, and by name: the weights, the layer's configuration, and other
arguments of the call.  It returns an output, or a tuple of outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from calcvm import functions as F
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.building import declaring
from calcvm.graph import Variable
from calcvm.ops.dims import ONE

KERAS: dict[str, Callable[..., Any]] = {}
# layers that do something else in training
TRAINING = "BatchNormalization Dropout SpatialDropout1D SpatialDropout2D SpatialDropout3D StochasticDepth".split()
# layers that do something in training alone, which is left out
LEFT_OUT = (
    "ActivityRegularization AlphaDropout GaussianDropout GaussianNoise RandomBrightness RandomColorJitter RandomContrast RandomCrop "
    "RandomErasing RandomFlip RandomHue RandomRotation RandomSaturation RandomTranslation RandomZoom"
).split()
keras = declaring(KERAS)


def counterpart(name: str) -> Callable[..., Any] | None:
    return KERAS.get(name)


# ---------------------------------------------------------------- channels
FIRST = "channels_first"


def image(x: Arranged, data_format: str | None = None) -> Variable:
    """(N, *sizes, C) as images (N, C, *sizes): a view, if it is stored as images are."""
    if data_format == FIRST:
        return x.variable()
    y = x.permuted([0, x.rank - 1, *range(1, x.rank - 1)])
    return y.variable() if y.order == sorted(y.order) else F.channels_first(x.variable())


def of_image(v: Variable, data_format: str | None = None) -> Arranged:
    """Images (N, C, *sizes) as (N, *sizes, C)."""
    if data_format == FIRST:
        return Arranged.of(v)
    if ONE in v.shape[1:]:
        return Arranged.of(F.channels_last(v))
    return Arranged.of(v).permuted([0, *range(2, v.rank), 1])


def spatial(x: Arranged, data_format: str | None = None) -> range:
    """The axes between the batch and the channels, or behind both."""
    return range(2, x.rank) if data_format == FIRST else range(1, x.rank - 1)
