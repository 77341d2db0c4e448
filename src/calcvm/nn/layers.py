"""The base classes of layers, and layers for values of any shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, fields, is_dataclass
from functools import partial, wraps
from inspect import signature
from typing import Any, ClassVar, NoReturn
from weakref import WeakKeyDictionary

from calcvm import checks
from calcvm import functions as F
from calcvm.errors import CalcError, ShapeError, warn
from calcvm.graph import CalcGraph, Path, Variable, apply, ask
from calcvm.hints import Answering
from calcvm.init import Constant, initializer_of
from calcvm.ops.dims import shape_of, show
from calcvm.optim import regularizer_of

LARGEST_SIZE = 2**40  # elements of a value
AXES = 64  # more than any variable has
LAYERS_SHOWN = 8  # longer networks are shortened in their repr


def _whole(build: Callable[..., Variable]) -> Callable[..., Variable]:
    """Make a layer's ``build`` transactional: if it raises, the graph is as before.

    A network's scope ends with a dot and a layer's does not; both accept either form.  A layer built alone, without a
    scope, is a network of one layer.
    """

    @wraps(build)
    def built(self: Layer, x: Variable, *args: Any, **options: Any) -> Variable:
        network = isinstance(self, Sequential)
        if not (network or args or "scope" in options):
            return Sequential(self).build(x, **options)

        def scoped(value: Any) -> Any:
            if not isinstance(value, str):
                return value
            return value + "." * value[-1:].isalnum() if network else value.removesuffix(".")

        args, options = tuple(map(scoped, args)), {name: scoped(a) for name, a in options.items()}
        scope = args[0] if args else options.get("scope", "")
        with x.graph.whole(scope) if isinstance(x, Variable) else nullcontext():
            return build(self, x, *args, **options)

    return built


_owners: WeakKeyDictionary[Path, dict[str, Layer]] = WeakKeyDictionary()  # by name of a parameter


def _shared(layer: Layer, x: Variable, kind: str, name: str, shape: Sequence[Any], **options: Any) -> Variable:
    """A variable of the layer being built, by name: the known one, or a new one."""
    checks.one_of(f"{kind} of a layer", x, Variable, f'its input first, self.{kind}(x, "name", shape),')
    scope, owners = x.graph.scope, _owners.setdefault(x.graph.active, {})
    full = f"{scope}.{name}"
    v = x.graph.variables.get(full)
    if v is None:
        v, owners[full] = getattr(x.graph, kind)(full, shape, **options), layer
    elif owners.setdefault(full, layer) is not layer:
        raise CalcError(
            f"{full} belongs to another layer, {owners[full]!r}: layers inside a custom layer need separate scopes, such as "
            'self.a.build(x, f"{scope}.a", training)'
        )
    if v.shape != shape_of(tuple(shape)):
        raise ShapeError(f"{scope}: the input {x} does not fit its {name} {show(v.shape)}")
    return v


def owned(layer: Layer, x: Variable) -> dict[str, Variable]:
    """The parameters and buffers, by name, of a layer that the active path has built."""
    owners, known = _owners.get(x.graph.active, {}), x.graph.variables
    return {full.rpartition(".")[2]: known[full] for full, owner in owners.items() if owner is layer and full in known}


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and not hasattr(value, "shape") and value == default)


def one_step(x: Variable, scope: str) -> bool:
    """Whether a layer of sequences (N, steps, features) is built on the next step of each sample, (N, features).

    It then carries from step to step what it needs of those before, in a path that does not train.

    Raises
    ------
    ShapeError : it is neither, or a path that trains has one step.
    """
    if x.rank not in (2, 3) or not all(n.constant for n in x.shape[1:]):
        raise ShapeError(f"{scope}: the input {x} is not (N, steps, features), or (N, features) for one step")
    if x.rank == 2 and x.graph.active.backward:
        raise ShapeError(
            f"{scope}: the input {x} is one step of each sample, and a path that trains takes sequences, (N, steps, features)"
        )
    return x.rank == 2


class Layer(Answering):
    """Base class of layers.  ``layer.build(x, scope, training)`` adds its operators to the active path."""

    stateless: ClassVar[bool] = False  # it has no parameters, so a network may contain it several times
    takes: ClassVar[Any] = None  # the type of its data, if these are no floats
    random: bool = False  # it, or a layer inside it, draws random numbers in training

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "build" in vars(cls):
            try:
                signature(cls.build).bind(cls, None, "", True)
            except TypeError as error:
                raise CalcError(f"{cls.__name__}.build must take (self, x, scope, training): {error}") from None
            cls.build = _whole(cls.build)  # type: ignore[method-assign]

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise CalcError(
            f"{type(self).__name__} is not a function: layers are composed by >>, and a cv.Model of them has predict(X); inside a "
            "custom layer, call layer.build(x, scope, training)"
        )

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        """Build the layer and return its output.  Parameters of ``scope`` that the graph already has are shared."""
        raise CalcError(f"{type(self).__name__} has no method build(self, x, scope, training), which layers need")

    def parameter(self, x: Variable, name: str, shape: Sequence[Any], init: Any = None, **options: Any) -> Variable:
        """A parameter of the layer, for `build`: created once, and shared by every path that builds the layer.

        name : the parameter is called ``<scope>.<name>``.
        shape : integers, or sizes of x: ``x.shape[-1:]``.
        init, options : as in `CalcGraph.parameter`.

        Raises
        ------
        ShapeError : the layer was built before on an input that gave the parameter another shape.
        CalcError : another layer of the path has a parameter of this name.
        """
        return _shared(self, x, "parameter", name, shape, init=init, **options)

    def buffer(self, x: Variable, name: str, shape: Sequence[Any], init: Any = "zeros") -> Variable:
        """A buffer of the layer, such as a running mean (`CalcGraph.buffer`); otherwise as `parameter`."""
        return _shared(self, x, "buffer", name, shape, init=init)

    def carry(
        self, x: Variable, name: str, shape: Sequence[Any], init: Any = "zeros", steps: int | None = None
    ) -> Variable:
        """A state of each sample that the layer keeps from call to call (`CalcGraph.carry`), of this shape; otherwise as `parameter`."""
        return _shared(self, x, "carry", name, (None, *shape), init=init, steps=steps)

    def __rshift__(self, other: Layer) -> Sequential:
        return Sequential(self, other)

    def __rrshift__(self, other: Any) -> Sequential:
        return Sequential(other, self)

    def __repr__(self) -> str:
        """The constructor call, without settings that have their default."""
        settings: list[Any] = [f for f in fields(self) if f.repr] if is_dataclass(self) else []
        told = [
            f"{f.name}={checks.shown(value)}" for f in settings if not _same(value := getattr(self, f.name), f.default)
        ]
        return f"{type(self).__qualname__}({', '.join(told)})"

    def _given(self, x: Any) -> None:
        """Check an input, and the settings again, since the fields may have been changed."""
        checks.one_of(f"build of {self!r}", x, Variable, "a variable of a graph")
        getattr(self, "__post_init__", lambda: None)()

    def _warn_once(self, message: str) -> None:
        """Warn when the layer is made, and not again in each build."""
        if vars(self).get("_warned") != message:
            self._warned = message
            warn(message)

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()


class Complete(Layer):
    """Base class of layers that know what they take: a model of one needs no ``input_shape``, and to predict no loss."""

    def graph(self) -> CalcGraph:
        """A graph that only predicts."""
        raise NotImplementedError

    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        raise NotImplementedError


def _each(parts: Iterable[Any]) -> Iterator[Layer]:
    """The layers of layers, networks and lists, one by one."""
    for part in parts:
        if isinstance(part, (list, tuple, Sequential)):
            yield from _each(part)
        else:
            yield checks.one_of("a network", part, Layer, "a layer of calcvm.nn, such as nn.ReLU(),")


class Sequential(Layer):
    """Layers in sequence: ``Linear(64) >> Sigmoid() >> Linear(10)``, or a list, ``Sequential([Linear(64), Sigmoid()])``.

    Raises
    ------
    CalcError : something is not a layer, or a layer with parameters occurs twice.
    """

    layers: list[Layer]

    def __init__(self, *layers: Layer | Iterable[Layer]):
        self.layers = [*_each(layers)]
        known: set[int] = set()
        for layer in self.layers:
            if not layer.stateless and id(layer) in known:
                raise CalcError(
                    f"a network has the same {layer!r} twice, and layers do not share weights: make another "
                    f"{type(layer).__name__}, or build a graph that uses one parameter twice"
                )
            known.add(id(layer))
        self.random = any(layer.random for layer in self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __repr__(self) -> str:
        shown = [repr(layer) for layer in self.layers]
        if len(shown) > LAYERS_SHOWN:
            shown[LAYERS_SHOWN // 2 : 1 - LAYERS_SHOWN // 2] = [f"... ({len(shown)} layers)"]
        return " >> ".join(shown) or "Sequential()"

    def build(self, x: Variable, scope: str = "", training: bool = True) -> Variable:
        self._given(x)
        counts: dict[str, int] = {}
        for layer in self.layers:
            n = counts[layer.kind] = counts.get(layer.kind, 0) + 1
            name, path = f"{scope}{layer.kind}_{n}", x.graph.active
            start = len(path.operations)
            before, x = x, layer.build(x, name, training)
            checks.one_of(f"build of {layer!r} must return a variable", x, Variable, "a variable")
            if before.lengths is not None and x.rank > 2 and x.shape[1] == before.shape[1]:
                x.lengths = before.lengths  # its steps are those of the input
            for op in path.operations[start:]:
                op.layer = op.layer or name  # operators of inner layers keep theirs
            path.layers[name] = x, len(path.operations)
        return x


class Weighted(Layer):
    """Base class of layers with a weight and a bias.  Settings are fields of the layer.

    init, bias_init : initializers, their names, or arrays (default XavierUniform, Zeros).
    trainable : False freezes the layer.
    """

    bias: bool
    init: Any
    bias_init: Any
    regularizer: Any
    trainable: bool

    def _check_starts(self) -> None:
        name = type(self).__name__
        self.trainable = checks.flag(f"{name}: trainable", self.trainable)
        self.regularizer = regularizer_of(name, self.regularizer)
        for start in ("init", "bias_init"):  # shapes of arrays are checked when the inputs are known
            given = getattr(self, start)
            if given is not None and not hasattr(given, "__len__") or isinstance(given, str):
                setattr(self, start, initializer_of(f"{name}: {start}", given, (1, 1)))

    def _parameters(self, x: Variable, weight: tuple[int, ...], units: int) -> tuple[Variable, Variable | None]:
        make = partial(self.parameter, x, trainable=self.trainable)
        w = make("weight", weight, self.init, regularizer=self.regularizer)
        return w, make("bias", (units,), self.bias_init) if self.bias else None


@dataclass(repr=False, eq=False)
class Linear(Weighted):
    """``y = x @ weight + bias``: x (..., K), weight (K, units), bias (units,).

    init, bias_init : initializers of `calcvm.init`, their names, or arrays (default XavierUniform, Zeros).
    trainable : False freezes the layer.
    """

    units: int
    _: KW_ONLY
    bias: bool = True
    init: Any = None
    bias_init: Any = None
    regularizer: Any = None
    trainable: bool = True

    def __post_init__(self) -> None:
        self.units = checks.integer("Linear: units", self.units, 1, LARGEST_SIZE)
        self.bias = checks.flag("Linear: bias", self.bias)
        self._check_starts()

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        if x.rank < 2 or not x.shape[-1].constant:
            raise ShapeError(f"{scope}: the input {x} must have the batch first and a fixed last size")
        if x.layout and x.rank > 2 and training:
            warn(
                f"{scope}: Linear joins the elements of the last axis of the images {x}: did you mean nn.Flatten() before it?"
            )
        return F.linear(x, *self._parameters(x, (x.shape[-1].b, self.units), self.units))


@dataclass(repr=False, eq=False)
class Center(Layer):
    """x minus its mean over the batch in training, minus the running mean otherwise."""

    momentum: float = 0.1

    def __post_init__(self) -> None:
        self.momentum = checks.number("Center: momentum", self.momentum, 0, 1)

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        shape = x.shape[1:]
        if not x.rank or not all(n.constant for n in shape):
            raise ShapeError(f"{scope}: the input {x} must have the batch first and fixed sizes after it")
        return F.center(x, self.buffer(x, "running", shape), self.momentum, training)


@dataclass(repr=False, eq=False)
class Dropout(Layer):
    """Zero elements with probability ``rate`` in training; otherwise x unchanged."""

    stateless: ClassVar[bool] = True
    random = True
    function: ClassVar[Callable[..., Variable]] = staticmethod(F.dropout)
    rate: float = 0.5

    def __post_init__(self) -> None:
        self.rate = checks.number(f"{type(self).__name__}: rate", self.rate, 0, 1, ends="[)")

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        return type(self).function(x, self.rate) if training and self.rate else x


class Dropout2d(Dropout):
    """Zero channels of (N, C, *sizes), for any number of sizes, with probability ``rate`` in training."""

    function = staticmethod(F.dropout2d)


class Function(Layer):
    """A function of one variable as a layer: ``Function(cv.tanh)``, ``Function(lambda x: x * x)``."""

    stateless: ClassVar[bool] = True

    def __init__(self, fn: Callable[..., Variable], *args: Any, **kwargs: Any):
        if not callable(fn) or isinstance(fn, (type, Layer)):
            raise CalcError(f"Function takes a function of one variable, such as cv.tanh, not {checks.shown(fn)}")
        self._fn, self._args, self._kwargs = fn, args, kwargs

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        y = ask(repr(self), self._fn, x, *self._args, **self._kwargs)
        return checks.one_of(f"{self!r} must return a variable", y, Variable, "a variable")

    def __repr__(self) -> str:
        given = [*map(str, self._args), *(f"{k}={v!r}" for k, v in self._kwargs.items())]
        return f"Function {getattr(self._fn, '__name__', self._fn)}({', '.join(given)})"


@dataclass(repr=False, eq=False)
class Applied(Layer):
    """Base class of layers without parameters: a function of one variable, with the settings as fields of the layer."""

    stateless: ClassVar[bool] = True
    function: ClassVar[Callable[..., Variable]]

    def __init_subclass__(cls, function: Callable[..., Variable] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if function:
            cls.function = staticmethod(function)

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        return type(self).function(x, **vars(self))


class Activation(Applied):
    """Base class of layers that apply one operator to every element, or every row."""

    def __post_init__(self) -> None:
        """Fields are numbers unless a layer says otherwise."""
        for f in fields(self):
            setattr(
                self, f.name, checks.number(f"{type(self).__name__}: {f.name}", getattr(self, f.name), -1e300, 1e300)
            )


@dataclass(repr=False, eq=False)
class Scale(Activation, function=lambda x, a, b: apply("affine", x, a=a, b=b)):
    """``a * x + b`` with constants, for example to scale raw data."""

    a: float = 1.0
    b: float = 0.0


class Flatten(Activation, function=F.flatten):
    """(B, ...) as (B, n), n the elements per sample.  A view: it costs nothing."""


class Reshape(Layer):
    """Give each sample another shape: ``Reshape(8, 8)``."""

    stateless: ClassVar[bool] = True

    shape: tuple[int, ...]

    def __init__(self, *shape: int):
        given: tuple[Any, ...] = shape
        if len(given) == 1 and isinstance(given[0], (tuple, list)):
            given = tuple(given[0])
        self.shape = checks.sizes("Reshape: the shape of a sample", given, low=-1)

    def __repr__(self) -> str:
        return f"Reshape({', '.join(map(str, self.shape))})"

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        return F.reshape(x, (None, *self.shape))


class ReLU(Activation, function=F.relu):
    """max(x, 0)."""


@dataclass(repr=False, eq=False)
class LeakyReLU(Activation, function=F.leaky_relu):
    """x where positive, ``alpha * x`` elsewhere."""

    alpha: float = 0.01


class Sigmoid(Activation, function=F.sigmoid):
    """1 / (1 + exp(-x))."""


class Tanh(Activation, function=F.tanh):
    """Hyperbolic tangent."""


@dataclass(repr=False, eq=False)
class GELU(Activation, function=F.gelu):
    """x * Phi(x); Phi, the normal distribution function, is computed by erf ("none") or approximated by "tanh"."""

    approximate: str = "none"

    def __post_init__(self) -> None:
        checks.choice("GELU: approximate", self.approximate, ("none", "tanh"))


class SiLU(Activation, function=F.silu):
    """x / (1 + exp(-x)), also called swish."""


class SELU(Activation, function=F.selu):
    """1.0507 * x where positive, 1.0507 * 1.6733 * (exp(x) - 1) elsewhere."""


class Mish(Activation, function=F.mish):
    """x * tanh(softplus(x))."""


class HardSigmoid(Activation, function=F.hard_sigmoid):
    """x/6 + 1/2, clipped to [0, 1]."""


class HardSwish(Activation, function=F.hard_swish):
    """x * hard_sigmoid(x)."""


class ReLU6(Activation, function=F.relu6):
    """x clipped to [0, 6]."""


@dataclass(repr=False, eq=False)
class PReLU(Layer):
    """x where positive, a learned slope times x elsewhere: one slope, or one per channel (axis 1)."""

    per_channel: bool = False
    slope: float = 0.25

    def __post_init__(self) -> None:
        self.per_channel = checks.flag("PReLU: per_channel", self.per_channel)
        self.slope = checks.number("PReLU: slope", self.slope, -1e300, 1e300)

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        if self.per_channel and (x.rank < 2 or not x.shape[1].constant):
            raise ShapeError(f"{scope}: the input {x} has no axis of channels")
        shape = (x.shape[1].b, *(1,) * (x.rank - 2)) if self.per_channel else (1,)
        return F.prelu(x, self.parameter(x, "slope", shape, Constant(self.slope)))


class Softplus(Activation, function=F.softplus):
    """log(1 + exp(x))."""


@dataclass(repr=False, eq=False)
class ELU(Activation, function=F.elu):
    """x where positive, ``alpha * (exp(x) - 1)`` elsewhere."""

    alpha: float = 1.0


@dataclass(repr=False, eq=False)
class Softmax(Activation, function=F.softmax):
    """exp(x) normalized to sum 1 over the last axis, or 1, the channels of images (the default for what convolutions return)."""

    axis: int | None = None

    def __post_init__(self) -> None:
        if self.axis is not None:
            self.axis = checks.integer(f"{type(self).__name__}: axis", self.axis, -AXES, AXES)


class LogSoftmax(Softmax, function=F.log_softmax):
    """log(softmax(x)), over the same axis as `Softmax`."""
