"""Activations, as layers and by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from calcvm import functions as F
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.aten.elementwise import ATEN
from calcvm.frontends.aten.layers import glu
from calcvm.frontends.building import Building, Cannot, arranged, over_axis
from calcvm.frontends.keras.declared import keras
from calcvm.graph import Variable


def _relu(x: Variable, negative_slope: float = 0.0, max_value: float | None = None, threshold: float = 0.0) -> Variable:
    if threshold == 0 and max_value is None:
        return F.leaky_relu(x, negative_slope) if negative_slope else F.relu(x)
    if threshold == negative_slope == 0 and max_value is not None:
        return F.relu6(x) if max_value == 6 else F.clip(x, 0.0, max_value)
    y = F.where(F.greater(x, threshold) if threshold else F.greater_equal(x, 0.0), x, negative_slope * (x - threshold))
    return y if max_value is None else F.minimum(y, max_value)


def _sparse_plus(x: Variable) -> Variable:
    return F.where(F.less(x, 1.0), F.square(F.maximum(x, -1.0) + 1.0) * 0.25, x)


def _outside(x: Variable, y: Variable, threshold: float) -> Variable:
    return F.where(F.greater(F.abs(x), threshold), y, 0.0)


FUNCTIONS: dict[str, Callable[..., Variable]] = {  # of each element
    "celu": lambda x, alpha=1.0: F.elu(x / alpha, 1.0) * alpha,
    "elu": lambda x, alpha=1.0: F.elu(x, alpha),
    "exponential": F.exp,
    "gelu": lambda x, approximate=False: F.gelu(x, "tanh" if approximate else "none"),
    "hard_shrink": lambda x, threshold=0.5: _outside(x, x, threshold),
    "hard_sigmoid": F.hard_sigmoid,
    "hard_silu": F.hard_swish,
    "hard_tanh": lambda x: F.clip(x, -1.0, 1.0),
    "leaky_relu": lambda x, negative_slope=0.2: F.leaky_relu(x, negative_slope),
    "log_sigmoid": lambda x: -F.softplus(-x),
    "mish": F.mish,
    "relu": _relu,
    "relu6": F.relu6,
    "selu": F.selu,
    "sigmoid": F.sigmoid,
    "silu": F.silu,
    "soft_shrink": lambda x, threshold=0.5: _outside(x, x - F.sign(x) * threshold, threshold),
    "softplus": F.softplus,
    "softsign": lambda x: x / (F.abs(x) + 1.0),
    "sparse_plus": _sparse_plus,
    "sparse_sigmoid": lambda x: F.clip((x + 1.0) * 0.5, 0.0, 1.0),
    "squareplus": lambda x, b=4: (x + F.sqrt(F.square(x) + float(b))) * 0.5,
    "tanh": F.tanh,
    "tanh_shrink": lambda x: x - F.tanh(x),
    "threshold": lambda x, threshold, default_value: F.where(F.greater(x, threshold), x, default_value),
}
FUNCTIONS |= {"hard_swish": FUNCTIONS["hard_silu"], "swish": FUNCTIONS["silu"]}
OVER_AXIS: dict[str, Callable[..., Variable]] = {  # of the vectors along an axis
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "softmax": lambda x: F.softmax(x, -1),
}


def activated(b: Building, x: Arranged, activation: Any) -> Arranged:
    """A function of x: by its name, or a layer as [class, configuration]."""
    if activation in (None, "linear"):
        return x
    if isinstance(activation, list):
        return LAYERS[activation[0]](b, x, **activation[1]) if activation[0] in LAYERS else _no(activation[0])
    if activation in FUNCTIONS:
        return x.again(FUNCTIONS[activation])
    if activation in OVER_AXIS:
        return over_axis(x, -1, OVER_AXIS[activation])
    return glu(b, x) if activation == "glu" else _no(activation)


def _no(activation: str) -> Any:
    raise Cannot(f"its activation {activation} has no counterpart")


@keras("Activation")
def activation(b: Building, x: Any, *, activation: Any, **_: Any) -> Arranged:
    return activated(b, arranged(b, x), activation)


def _layer(function: str, *names: str) -> Callable[..., Arranged]:
    """The layer of a function, of which it has some arguments in its configuration."""

    def layer(b: Building, x: Any, **options: Any) -> Arranged:
        given = {name: options[name] for name in names if options.get(name) is not None}
        return arranged(b, x).again(lambda v: FUNCTIONS[function](v, **given))

    return layer


@keras("Softmax")
def softmax(b: Building, x: Any, *, axis: Any = -1, **_: Any) -> Arranged:
    if isinstance(axis, (list, tuple)):
        if len(axis) > 1:
            raise Cannot("it is over several axes")
        (axis,) = axis
    return over_axis(arranged(b, x), axis, OVER_AXIS["softmax"])


LAYERS: dict[str, Callable[..., Arranged]] = {
    "ELU": _layer("elu", "alpha"),
    "LeakyReLU": _layer("leaky_relu", "negative_slope"),
    "ReLU": _layer("relu", "negative_slope", "max_value", "threshold"),
    "Softmax": softmax,
}
for _name, _function in LAYERS.items():
    keras(_name)(_function)


@keras("PReLU")
def prelu(b: Building, x: Any, *, alpha: Any, **_: Any) -> Arranged:
    v, slope = arranged(b, x).variable(), alpha.variable()
    return Arranged.of(F.relu(v) - slope * F.relu(-v))


for _name in FUNCTIONS:
    keras(f"ops.{_name.replace('_', '')}")(
        lambda b, x, f=FUNCTIONS[_name], **given: arranged(b, x).again(lambda v: f(v, **given))
    )
for _name in OVER_AXIS:
    keras(f"ops.{_name.replace('_', '')}")(
        lambda b, x, f=OVER_AXIS[_name], axis=-1, **_: over_axis(arranged(b, x), axis, f)
    )
keras("ops.glu")(lambda b, x, axis=-1, **_: ATEN["glu"](b, arranged(b, x), axis))
