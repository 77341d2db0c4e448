"""The graph: operators on variables, in paths that share the variables (CalcGraph, algorithms 2 to 6)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from calcvm import checks, dtypes
from calcvm.errors import CalcError, NoNumber, ShapeError, UnsupportedOperator, warn
from calcvm.hints import NAMES, Answering
from calcvm.ops import OPS, OpSpec
from calcvm.ops.declarations import sizes_of
from calcvm.ops.dims import ONE, Affine, Shape, check_linear, numel, shape_of, show
from calcvm.ops.layouts import LAST, axes, back, between, laid, seen
from calcvm.ops.spec import Attr, is_own
from calcvm.ops.statement import unique
from calcvm.ops.types import CELLS, FLOAT, RANKS, VARIABLES, promoted
from calcvm.tables import html

if TYPE_CHECKING:
    from calcvm.init import Initializer
    from calcvm.optim import Optimizer, Regularizer


@dataclass(frozen=True)
class TensorDescriptor:
    """The shape of a variable: generic, with the batch open, and current, for one batch size.

    generic : tuple of int, None (the batch) or Affine (a linear function of the batch).

    Examples
    --------
    >>> x = cv.CalcGraph().placeholder("x", (None, 4))
    >>> x.descriptor.generic, x.descriptor.current(8)
    ((None, 4), (8, 4))
    """

    shape: Shape

    @property
    def generic(self) -> tuple[int | None | Affine, ...]:
        return tuple(s.b if s.constant else (None if s == Affine(1, 0) else s) for s in self.shape)

    def current(self, batch_size: int) -> tuple[int, ...]:
        return tuple(s.at(batch_size) for s in self.shape)

    @property
    def elems(self) -> Affine:
        return numel(self.shape)

    def __str__(self) -> str:
        return show(self.shape)


class Traced:
    """Base of the values that a Python equation is traced with (`calcvm.indexed`). Operators and functions given one call it."""

    def _element(self, x: Variable, places: tuple[Any, ...]) -> Any:
        """The element ``x[places]``, if one of the places is traced."""
        raise NotImplementedError

    def _called(self, operator: str, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        """The result of an operator, if one of the inputs is traced."""
        raise NotImplementedError

    def _reduced(self, how: str, over: Any) -> Any:
        """This value reduced over indexes."""
        raise NotImplementedError


@dataclass(eq=False)
class Variable(Answering):
    """A tensor of the graph: placeholder, parameter, buffer, carry, constant or the result of an operator.

    Arithmetic (``+ - * / % @ **``, unary minus, ``abs``, slices), comparisons (``< <= > >=``) and conditions (``& | ^ ~``)
    build operators in the active path.  ``==`` compares identity: use `calcvm.equal` for elements.  The other side may be a
    number or an array, which becomes a constant of the graph.  Methods are those of NumPy's arrays, such as ``x.sum(axis=1)``.

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x = g.placeholder("x", (None, 2))
    >>> with g.path("line"):
    ...     y = 2 * x[:, 0] - 1
    >>> print(x, y)
    x (B, 2) y (B,)
    """

    def __array_ufunc__(self, function: Any, method: str, *operands: Any, **options: Any) -> Any:
        """``array * variable`` calls the variable's operator; other NumPy functions take arrays only."""
        reflected = REFLECTED.get(function.__name__)
        if reflected and method == "__call__" and not options and not isinstance(operands[0], Variable):
            return getattr(self, reflected)(operands[0])
        return self.__array_function__(function, (), operands, options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        name, other = function.__name__, "a function of calcvm, such as cv.mean(x)"
        meant = f"x.{name}" if hasattr(type(self), name) else NAMES["Variable"].get(name, other)
        raise NoNumber(f"np.{name} takes arrays, and {self} is a variable of a graph: use {meant}")

    def _no_number(self, *_: Any, **__: Any) -> Any:
        raise NoNumber(
            f"{self} is a variable of a graph and has no numbers until the program runs: compute with functions of calcvm, such as "
            "cv.exp(x)"
        )

    __array__ = __float__ = __int__ = __complex__ = __index__ = __len__ = _no_number
    __round__ = __floor__ = __ceil__ = __trunc__ = _no_number

    def __format__(self, form: str) -> str:
        return self._no_number() if form else str(self)

    graph: CalcGraph = field(repr=False)
    name: str
    kind: str  # placeholder | parameter | buffer | carry | constant | state | result
    descriptor: TensorDescriptor
    type: str = FLOAT  # element type (`calcvm.ops.types`)
    layout: str = ""  # axis order in the heap (`calcvm.ops.layouts`)
    path: Path | None = field(default=None, repr=False)
    producer: Operation | None = field(default=None, repr=False)
    init: Any = field(default=None, repr=False)
    regularizer: Any = field(default=None, repr=False)
    trainable: bool = False
    settled: bool = field(default=False, repr=False)  # the layout is fixed, because something reads it
    unnamed: bool = field(default=False, repr=False)  # the name is automatic: a variable named by the user may take it
    steps: int | None = field(default=None, repr=False)  # of a carry: the most that it has room for
    turned: bool | None = field(default=None, repr=False)  # whether it is in state dicts (None: its reader decides)
    lengths: Variable | None = field(default=None, repr=False)  # of sequences (N, T, ...): steps of each sample, (N,)

    def rename(self, name: str) -> Variable:
        """Rename the variable, and return it."""
        checks.text("a variable's name", name, "x")
        self.graph._claim(name, self)
        for path in self.graph.paths.values():  # settings stored by name
            path.rates = {name if n == self.name else n: factor for n, factor in path.rates.items()}
            path.no_decay = tuple([name if n == self.name else n for n in path.no_decay])
        self._call(name)
        self.unnamed = False
        return self

    def _call(self, name: str) -> None:
        self.graph.variables = {name if v is self else key: v for key, v in self.graph.variables.items()}
        self.name = name

    @property
    def source(self) -> Variable:
        """The variable that holds the value: itself, or the one that it is a view of."""
        v = self
        while v.producer is not None and v.producer.spec.view:
            v = v.producer.inputs[v.producer.spec.inputs[0]]
        return v

    @property
    def form(self) -> tuple[Any, ...]:
        """The part of `CalcGraph.form` for a variable that is no result."""
        init: Any = self.init
        if isinstance(init, np.ndarray):
            init = (init.shape, init.dtype.str, init.tobytes())
        elif isinstance(init, Mapping):
            init = tuple(init.items())
        return (
            self.name,
            self.kind,
            self.shape,
            self.type,
            self.layout,
            init,
            self.regularizer,
            self.trainable,
            self.turned,
            self.steps,
        )

    @property
    def shape(self) -> Shape:
        return self.descriptor.shape

    @property
    def laid(self) -> Shape:
        """The shape as stored in the heap."""
        return laid(self.shape, self.layout)

    @property
    def rank(self) -> int:
        return len(self.shape)

    if TYPE_CHECKING:  # functions.py sets them

        def sum(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Variable: ...
        def mean(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Variable: ...
        def max(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Variable: ...
        def min(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Variable: ...
        def var(
            self, axis: int | Sequence[int] | None = None, correction: int = 0, keepdims: bool = False
        ) -> Variable: ...
        def std(
            self, axis: int | Sequence[int] | None = None, correction: int = 0, keepdims: bool = False
        ) -> Variable: ...
        def cumsum(self, axis: int, reverse: bool = False) -> Variable: ...
        def flatten(self) -> Variable: ...
        def astype(self, dtype: Any) -> Variable: ...

    def reshape(self, *shape: Any) -> Variable:
        """`calcvm.reshape`: ``x.reshape(None, 8)`` or ``x.reshape((None, 8))``."""
        return LATER["reshape"](self, _several(shape))

    def transpose(self, *axes: Any) -> Variable:
        """`calcvm.transpose`: ``x.transpose(0, 2, 1)`` or ``x.transpose((0, 2, 1))``; without axes `T`."""
        return LATER["transpose"](self, _several(axes) or None)

    @property
    def T(self) -> Variable:
        """x with its axes reversed."""
        return apply("transpose", self)

    def __str__(self) -> str:
        return f"{self.name} {self.descriptor}"

    def __add__(self, other: Operand) -> Variable:
        x = _operand(self, "+", other)
        return apply("add", self, x) if isinstance(x, _TENSOR) else apply("affine", self, a=1.0, b=x)

    def __radd__(self, other: Operand) -> Variable:
        return self + other

    def __sub__(self, other: Operand) -> Variable:
        x = _operand(self, "-", other)
        return apply("sub", self, x) if isinstance(x, _TENSOR) else apply("affine", self, a=1.0, b=-x)

    def __rsub__(self, other: Operand) -> Variable:
        x = _operand(self, "-", other)
        return apply("sub", x, self) if isinstance(x, _TENSOR) else apply("affine", self, a=-1.0, b=x)

    def __mul__(self, other: Operand) -> Variable:
        x = _operand(self, "*", other)
        return apply("mul", self, x) if isinstance(x, _TENSOR) else apply("affine", self, a=x, b=0.0)

    def __rmul__(self, other: Operand) -> Variable:
        return self * other

    def __truediv__(self, other: Operand) -> Variable:
        x = _operand(self, "/", other)
        if isinstance(x, _TENSOR):
            return apply("div", self, x)
        if x == 0:
            raise CalcError(f"{self.name} / 0: division by zero")
        return apply("affine", self, a=1.0 / x, b=0.0)

    def __rtruediv__(self, other: Operand) -> Variable:
        x = _operand(self, "/", other)
        return apply("div", x, self) if isinstance(x, _TENSOR) else x * apply("pow", self, exponent=-1.0)

    def __matmul__(self, other: Variable | np.ndarray) -> Variable:
        return apply("matmul", self, other)

    def __rmatmul__(self, other: np.ndarray) -> Variable:
        return apply("matmul", other, self)

    def __pow__(self, exponent: Any) -> Variable:
        if isinstance(exponent, _TENSOR):
            raise CalcError(
                f"{self.name} ** variable: the exponent must be a number; write cv.exp(exponent * cv.log(x))"
            )
        return apply("pow", self, exponent=exponent)

    def __rpow__(self, base: Any) -> Variable:
        raise CalcError(f"number ** {self.name}: write cv.exp(x * np.log(number))")

    def __floordiv__(self, other: Any) -> Variable:
        raise CalcError(f"{self.name} // number: variables have no //: write cv.floor(x / y)")

    __rfloordiv__ = __divmod__ = __rdivmod__ = __floordiv__

    def __iter__(self) -> Iterator[Variable]:
        raise NoNumber(f"{self} is one variable, not a sequence: take parts of it by slices")

    def __pos__(self) -> Variable:
        return self

    def __neg__(self) -> Variable:
        return apply("neg", self)

    def __abs__(self) -> Variable:
        return apply("abs", self)

    def __mod__(self, other: Operand) -> Variable:
        if not isinstance(_operand(self, "%", other), _TENSOR) and other == 0:
            raise CalcError(f"{self.name} % 0: division by zero")
        return apply("mod", self, other)

    def __rmod__(self, other: Operand) -> Variable:
        return apply("mod", other, self)

    def __lt__(self, other: Operand) -> Variable:  # type: ignore[misc]
        return apply("less", self, other)

    def __le__(self, other: Operand) -> Variable:  # type: ignore[misc]
        return apply("less_equal", self, other)

    def __gt__(self, other: Operand) -> Variable:  # type: ignore[misc]
        return apply("greater", self, other)

    def __ge__(self, other: Operand) -> Variable:  # type: ignore[misc]
        return apply("greater_equal", self, other)

    def __and__(self, other: Operand) -> Variable:
        return apply("logical_and", self, _operand(self, "&", other))

    def __or__(self, other: Operand) -> Variable:
        return apply("logical_or", self, _operand(self, "|", other))

    def __xor__(self, other: Operand) -> Variable:
        return apply("logical_xor", self, _operand(self, "^", other))

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __invert__(self) -> Variable:
        return apply("logical_not", self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, float, np.ndarray, np.generic)):
            raise CalcError(
                f"{self.name} == number: == asks whether two are one variable; cv.equal(x, y) compares elements"
            )
        return self is other

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        if self.kind in ("placeholder", "result"):
            raise NoNumber(
                f"{self.name} has no value until the program runs: use cv.where(condition, x, y) for an if, and x is not None to "
                "test for a variable"
            )
        return True  # for `graph.variables.get(name) or graph.parameter(name, ...)`

    def __setitem__(self, index: Any, value: Any) -> None:
        raise CalcError(
            f"{self.name}[...] = value: variables cannot be assigned to; build a new one, such as cv.where(condition, value, x) or "
            "cv.concat([x[:, :2], value], axis=1)"
        )

    def __getitem__(self, index: Any) -> Variable:
        """Slice the leading dimensions by constant bounds with step 1, or integers; the batch dimension takes ``:``.

        With indexes from `calcvm.indexes` the result is an element in an equation.
        """
        index = index if isinstance(index, tuple) else (index,)
        for i in index:
            if isinstance(i, Traced):
                return i._element(self, index)
        picked = [axis for axis, i in enumerate(index) if checks.is_integer(i)]
        slices = [i for axis, i in enumerate(index) if axis not in picked]
        if len(index) > self.rank or not all(isinstance(i, slice) and i.step in (None, 1) for i in slices):
            raise ShapeError(
                f"slice of {self}: give a slice with step 1, or an integer, for each dimension, at most {self.rank}"
            )
        if any(n is not None and not checks.is_integer(n) for i in slices for n in (i.start, i.stop)):
            raise ShapeError(f"slice of {self}: the bounds of {index} must be integers")
        bounds = [self._one(axis, i) if axis in picked else i for axis, i in enumerate(index)]
        ends = [i.indices(n.b)[:2] if n.constant else (i.start, i.stop) for n, i in zip(self.shape, bounds)]
        y = apply("slice", self, starts=tuple(a for a, _ in ends), stops=tuple(b for _, b in ends))
        if not picked:
            return y
        left = [n for axis, n in enumerate(y.shape) if axis not in picked]
        return apply("reshape", y, shape=tuple(n.b if n.constant else -1 for n in left))

    def _one(self, axis: int, i: Any) -> slice:
        """The slice that selects element ``i`` along an axis."""
        n, i = self.shape[axis], int(checks.plain(i))
        if not n.constant or not -n.b <= i < n.b:
            why = "is the batch: a single sample cannot be selected" if not n.constant else f"has {n.b} elements"
            raise ShapeError(f"{self}[...{i}...]: axis {axis} {why}")
        return slice(i % n.b, i % n.b + 1)


# NumPy functions of two operands, and the Variable methods for an array on the left.
REFLECTED = {
    "add": "__radd__", "subtract": "__rsub__", "multiply": "__rmul__", "divide": "__rtruediv__", "matmul": "__rmatmul__",
    "remainder": "__rmod__", "power": "__rpow__", "float_power": "__rpow__", "floor_divide": "__rfloordiv__",
    "less": "__gt__", "less_equal": "__ge__", "greater": "__lt__", "greater_equal": "__le__", "equal": "__eq__",
    "not_equal": "__ne__", "bitwise_and": "__rand__", "bitwise_or": "__ror__", "bitwise_xor": "__rxor__",
}  # fmt: skip
HUGE = 2**1000  # still fits a float
OWN_SIZES = "it has no batch: give a number for None, or leave None out"
_TENSOR = (Variable, np.ndarray, Traced)
Operand = Variable | np.ndarray | Traced | float


def _several(given: tuple[Any, ...]) -> Any:
    """Arguments, or the tuple that they are in."""
    return given[0] if len(given) == 1 and not checks.is_integer(given[0]) else given


def _operand(x: Variable, sign: str, other: Any) -> Any:
    """The other side of an operator: a variable, a number, or an array (also as a list of numbers)."""
    if isinstance(other, (Variable, Traced)):
        return other
    if isinstance(other, (bool, np.bool_)):
        raise CalcError(
            f"{x.name} {sign} {other}: == and != ask whether two are one variable; cv.equal(x, y) compares elements"
        )
    if checks.is_number(other):
        return checks.number(f"{x.name} {sign} number: it", other)
    return as_numbers(f"{x.name} {sign} {type(other).__name__}", other)


def as_numbers(what: str, value: Any) -> np.ndarray:
    """Convert to an array of numbers or bools."""
    if checks.is_integer(value) and not -(2**63) <= value < 2**63 and -HUGE < value < HUGE:
        raise CalcError(f"{what}: {value} is beyond int64: as a float it is {float(value)!r}")
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "fiub":
            raise TypeError
        return array
    except (TypeError, ValueError, OverflowError):
        raise CalcError(f"{what}: a variable, a number or an array is wanted, not {checks.shown(value)}") from None


@dataclass(eq=False)
class Operation:
    """An operator applied to variables.

    laid : shapes of inputs and outputs as stored, which is how the operator's rows see them.
    saved : shapes of the values kept for the backward pass.
    layer : scope of the network layer that the operator belongs to.
    """

    spec: OpSpec
    inputs: dict[str, Variable]
    outputs: dict[str, Variable]
    laid: dict[str, Shape]
    saved: dict[str, Shape]
    attrs: dict[str, Any]
    name: str
    layer: str = ""

    @property
    def is_copy(self) -> bool:
        """Whether calcvm inserted this copy, because a reader needs its input in another layout."""
        if self.spec is not OPS["transpose"]:
            return False
        x, y = self.inputs["x"], self.outputs["y"]
        return not same_order(x.shape, x.layout, y.layout)

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Inputs that have gradients.  A cast of floats to floats passes its result's gradient on."""
        floats = self.spec.casts and not {v.type for v in (*self.inputs.values(), *self.outputs.values())} & {*RANKS}
        return self.spec.inputs if floats else self.spec.differentiable

    @property
    def attrs_as_seen(self) -> Mapping[str, Any]:
        """The attributes with axes as users see them, not as values lie."""
        layout = self.outputs[self.spec.outputs[0]].layout
        if self.spec.relaid is None or not layout:
            return self.attrs
        return self.spec.relaid(self.attrs, back(layout, max(v.rank for v in self.inputs.values())))

    @property
    def form(self) -> tuple[Any, ...]:
        """The part of `CalcGraph.form` for an operation."""
        names = (*((n, v.name) for n, v in (*self.inputs.items(), *self.outputs.items())),)
        return (self.spec.name, self.name, names, tuple(self.attrs.items()), self.layer)

    def shapes(self) -> dict[str, Any]:
        """Shape of every input, output and saved value, by the spec's names; None for an omitted input."""
        return {**dict.fromkeys(self.spec.inputs), **self.laid, **self.saved}


SQUASHED = {  # loss: the function it applies to its scores, and the operators that have already applied one
    "softmax_cross_entropy": ("softmax", {"softmax"}),
    "binary_cross_entropy": ("sigmoid", {"sigmoid", "softmax"}),
}


def check_scores(loss: str, x: Variable) -> None:
    """Warn if a loss that takes scores is given probabilities, the result of a softmax or sigmoid."""
    itself, squashing = SQUASHED.get(loss, ("", set()))
    v, name = x, ""
    while v.producer is not None and itself:
        name = v.producer.spec.name
        if name in squashing:
            warn(
                f"{loss} takes scores and applies {itself} itself, but {x.name!r} are probabilities already, from a "
                f"{name}: leave that out (model.predict_proba gives the probabilities)"
            )
        if name not in ("transpose", "cast", "where") and not v.producer.spec.view:
            break
        v = v.producer.inputs["a" if name == "where" else v.producer.spec.inputs[0]]


def ask(what: str, function: Callable[..., Any], *given: Any, **options: Any) -> Variable:
    """Call a user's function with variables and return its result.

    Raises
    ------
    CalcError : the function raised another exception, or used a variable as an array or a number.  That exception is the cause.
    """
    try:
        return function(*given, **options)
    except CalcError as error:
        if not isinstance(error, (AttributeError, TypeError)):
            raise
        caught: Exception = error
    except Exception as error:
        caught = error
    name = getattr(function, "__name__", type(function).__name__)
    raise CalcError(
        f"{what}: {name}({', '.join(map(str, given))}) raised {type(caught).__name__}: "
        f"{' '.join(str(caught).split())[:300]}; its arguments are variables of a graph, for functions of calcvm such as cv.mean(x)"
    ) from caught


LATER: dict[str, Callable[..., Any]] = {}  # functions that higher packages register here, by name


@dataclass(eq=False)
class Path(Answering):
    """A part of the graph that runs as a unit: forward only, or with a backward pass that minimizes a loss.

    layers : by scope of a network's layer, its result and the number of operators in the path when it was built.
        A layer may add no operators.

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x = g.placeholder("x", (None, 2))
    >>> with g.path("norms") as norms:
    ...     y = cv.sqrt(cv.sum_squares(x, 1))
    >>> norms.evaluate({"x": [[3.0, 4.0]]})[y.name]
    array([5.])
    """

    graph: CalcGraph = field(repr=False)
    name: str
    backward: bool
    adopt: bool = True
    operations: list[Operation] = field(default_factory=list, repr=False)
    loss: Variable | None = None
    output: Variable | tuple[Variable, ...] | None = None
    optimizer: Any = None
    parameters: tuple[Variable, ...] | None = None
    rates: Mapping[str, float] = field(default_factory=dict)  # factors of the learning rate that differ from 1, by name
    no_decay: tuple[str, ...] = ()  # parameters exempt from weight decay
    state_of: Path | None = field(default=None, repr=False)  # the path whose optimizer's state this one uses
    layers: dict[str, tuple[Variable, int]] = field(default_factory=dict, repr=False)
    carries: dict[Variable, Variable] = field(default_factory=dict, repr=False)  # what a forward leaves in each carry

    def __repr__(self) -> str:
        of = f", which minimizes {self.loss.name!r}" if self.loss is not None else ""
        return f"<Path {self.name!r}: {len(self.operations)} operators{of}>"

    def __enter__(self) -> Path:
        self.graph._active.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self.graph._active.pop()
        if self.adopt:
            self._adopt_names(sys._getframe(1).f_locals)

    def _adopt_names(self, scope: Mapping[str, Any]) -> None:
        """Name results after the Python variables that hold them when the ``with`` block ends: ``R = cv.rmse(Y, O)``."""
        taken = self.graph.variables
        for name, v in list(scope.items()):
            if isinstance(v, Variable) and v.path is self and v.unnamed and name not in taken and name[0] != "_":
                v.rename(name)

    def minimize(
        self,
        loss: Variable,
        optimizer: Optimizer | str | None = None,
        output: Variable | tuple[Variable, ...] | None = None,
        parameters: Iterable[Variable | str] | None = None,
        rates: Mapping[str, float] | Mapping[Variable, float] | None = None,
        *,
        state_of: Path | None = None,
    ) -> None:
        """Train the trainable parameters that ``loss`` depends on.

        Parameters
        ----------
        loss : variable of one element.
        optimizer : optimizer, or its name such as ``"adam"``.  Each path has its own state (moments, steps, learning rate), also
            if two are given one optimizer; see ``state_of``.
        output : the network's result, or a tuple of results.  Operators that the output does not need form the section
            "loss", so the network can run forward without targets.
        parameters : the parameters to train, or their names (`CalcGraph.parameters` finds them by a prefix).  The others
            keep their values in this path.  Default: all that the loss depends on.
        rates : factors of the learning rate, by parameter, by name, by a prefix that ends with a dot such as
            ``"linear_1."``, or by a suffix that begins with one such as ``".bias"``.  If several match, the last one wins.
        state_of : a path that trains the same parameters.  Both are then one optimizer, as in PyTorch: with the same moments, count
            of steps and learning rate, and the same factors of it.  For example, one path for each length of sequences.  Leave out
            ``optimizer``, ``parameters`` and ``rates``.

        Raises
        ------
        ShapeError : the loss has more than one element.
        CalcError : the path is forward only or has a loss already, or the loss does not depend on the given parameters.

        Examples
        --------
        >>> g = cv.CalcGraph()
        >>> w = g.parameter("w", (2, 1))
        >>> short, long = g.placeholder("short", (None, 4, 2)), g.placeholder("long", (None, 8, 2))
        >>> with g.path("of_4", backward=True) as of_4:
        ...     of_4.minimize(cv.mean(cv.square(short @ w - 1)), "adam")
        >>> with g.path("of_8", backward=True) as of_8:
        ...     of_8.minimize(cv.mean(cv.square(long @ w - 1)), state_of=of_4)
        >>> model = cv.Model(g, batch_size=3)
        >>> model.step(np.ones((3, 4, 2)), path="of_4") > model.step(np.ones((3, 8, 2)), path="of_8")
        True
        >>> model.steps_done, model.hyper("of_4")["t"], model.hyper("of_8")["t"]
        (2, 2.0, 2.0)
        """
        from calcvm.optim import optimizer_of

        checks.one_of("minimize", loss, Variable, "a variable, the loss,")
        outputs_of("minimize: output", output)
        if not self.backward:
            raise CalcError(f"path {self.name!r} is forward only: open it with g.path({self.name!r}, backward=True)")
        if self.loss is not None:
            raise CalcError(f"path {self.name!r} minimizes {self.loss.name!r} already: a path has one loss")
        if numel(loss.shape) != 1:
            raise ShapeError(f"minimize: loss {loss} must have one element: reduce it, for example by mean")
        if loss.path is not self:
            raise CalcError(f"minimize: {loss.name!r} is not computed in path {self.name!r}")
        if any(op.spec.name == "gradient" for op in reached(self.operations, loss, exactly=True)):
            self.graph._active.append(self)
            LATER["write_out"](self, loss)
            self.graph._active.pop()
        if state_of is not None:
            optimizer, parameters, rates = self._as_in(
                state_of, loss, {"optimizer": optimizer, "parameters": parameters, "rates": rates}
            )
        optimizer = optimizer_of(optimizer)
        trained = None if parameters is None else self._to_train(loss, parameters)
        behind = self.trained_behind(loss) if trained is None else trained
        if behind and not {*behind} & {v for op in reached(self.operations, loss, True) for v in op.inputs.values()}:
            raise CalcError(
                f"minimize: the loss {loss.name!r} has no gradient with respect to {behind[0].name!r}: between them are integers, "
                "conditions, or operators without a gradient, such as sign or a custom one without dx"
            )
        factors, spared = self._factors(behind, rates), self._spared(behind, optimizer)
        for op in reached(self.operations, loss):
            check_scores(op.spec.name, op.inputs[op.spec.inputs[0]])
        self.loss, self.optimizer, self.output = loss, optimizer, output
        self.parameters, self.rates, self.no_decay = trained, factors, spared
        self.state_of = state_of and (state_of.state_of or state_of)

    def carry(self, state: Variable, new: Variable) -> None:
        """As `calcvm.carry`, in this path."""
        for what, v in (("state", state), ("new", new)):
            if checks.one_of(f"carry: {what}", v, Variable, "a variable").graph is not self.graph:
                raise CalcError(f"carry: {v.name!r} belongs to another graph")
        if state.kind != "carry":
            raise CalcError(f"carry: the {state.kind} {state.name!r} is no state: make one by g.carry(name, shape)")
        if (new.shape, new.type) != (state.shape, state.type):
            raise ShapeError(f"carry: {new} of {new.type} does not fit the state {state} of {state.type}")
        if state in self.carries:
            raise CalcError(
                f"carry: path {self.name!r} updates {state.name!r} already, by {self.carries[state].name!r}"
            )
        if new.kind == "result" and new.path is not self:
            raise CalcError(f"carry: {new.name!r} is not computed in path {self.name!r}")
        self.carries[state] = new

    def _as_in(self, other: Any, loss: Variable, given: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """The optimizer, parameters and rates of a path with whose optimizer's state this one trains."""
        what = f"minimize: state_of={checks.shown(getattr(other, 'name', other))}"
        if not isinstance(other, Path) or other.graph is not self.graph or other.loss is None:
            raise CalcError(f"{what}: a path of this graph is wanted whose loss an optimizer minimizes already")
        for name, value in given.items():
            if value is not None:
                raise CalcError(f"{what}: {name} is that of the path: leave it out")
        theirs = other.trained_behind(other.loss) if other.parameters is None else other.parameters
        ours = [v for v in self.trained_behind(loss) if other.parameters is None or v in theirs]
        if differ := {*theirs} ^ {*ours}:
            first = min(v.name for v in differ)
            raise CalcError(
                f"{what}: one optimizer trains the same parameters in both paths, and {first!r} is trained in one only"
            )
        return other.optimizer, other.parameters, other.rates

    def _factors(self, trained: Sequence[Variable], given: Any) -> dict[str, float]:
        """Factors of the learning rate that differ from 1, by name."""
        factors: dict[str, float] = {}
        if given is None:
            return factors
        wanted = 'a mapping such as {"linear_1.": 0.1}'
        for key, factor in checks.one_of("minimize: rates", given, Mapping, wanted).items():
            key = key.name if isinstance(key, Variable) and key.graph is self.graph else key
            found = _called("minimize: rates", key, trained)
            factors |= dict.fromkeys(found, checks.number(f"minimize: the rate's factor of {key!r}", factor, 0))
        return {name: float(factor) for name, factor in factors.items() if factor != 1}

    @staticmethod
    def _spared(trained: Sequence[Variable], optimizer: Optimizer) -> tuple[str, ...]:
        """The trained parameters that are exempt from the optimizer's weight decay, in order."""
        what, found = f"{type(optimizer).__name__}: no_decay", set[str]()
        for key in optimizer.no_decay:
            found |= {v.name for v in trained if v.rank < 2} if key == "1d" else {*_called(what, key, trained)}
        return tuple([v.name for v in trained if v.name in found])

    def _to_train(self, loss: Variable, given: Any) -> tuple[Variable, ...]:
        """The parameters to train, given as objects or names, in the graph's order.  The loss must have a gradient for each."""
        behind = self.trained_behind(loss)
        chosen = set[Variable]()
        for p in checks.items("minimize: parameters", given, "a list of parameters or their names"):
            found = self.graph.variables.get(p) if isinstance(p, str) else p
            if not isinstance(found, Variable) or found.graph is not self.graph:
                raise CalcError(f"minimize: the graph has no parameter {checks.shown(p)}")
            if found not in behind:
                why = "is no parameter" if found.kind != "parameter" else "is frozen" if not found.trainable else ""
                raise CalcError(
                    f"minimize: {found.name!r} {why or f'has no part in the loss {loss.name!r}'}, and cannot be trained; "
                    f"trainable are: {', '.join(v.name for v in behind) or 'none'}"
                )
            chosen.add(found)
        if not chosen:
            raise CalcError("minimize: parameters is empty: leave it out to train all parameters of the loss")
        return tuple(v for v in behind if v in chosen)

    def gradient_of(self, parameter: Variable | str) -> Any:
        """The gradient of the path's loss with respect to a trained parameter, as equations: ``print(path.gradient_of(W))``.

        The equations are the rows that lowering derives, before fusion and planning.  Elementwise rows are substituted
        into each other, and written as in NumPy.  The result is a `calcvm.script.equations.Equations`: ``str`` gives the
        text, ``equations`` the data, ``evaluate`` the numbers, and notebooks show LaTeX.

        Raises
        ------
        CalcError : the path minimizes nothing, or does not train this parameter.
        UnsupportedOperator : a row has no text, such as that of a custom operator that is not a formula.
        """
        return LATER["gradient_of"](self, parameter)

    def evaluate(self, values: Mapping[Any, Any], seed: int = 0) -> dict[str, Any]:
        """Compute all results of the path in float64 from the equations of its rows, as a step-by-step run would show them.

        No kernel runs.  If a program gives another result, its row is wrong.

        Parameters
        ----------
        values : arrays by variable or name, in the variables' shapes: placeholders, results of other paths, and the
            parameters and buffers that differ from a model's initial values (``{"x": X, **model.parameters}``).  A given
            result of this path is used as it is.
        seed : the seed of the parameters that are not given, as in ``heap.create(program, seed=seed)``.

        Returns
        -------
        dict of ndarray, by name: the path's results in the order of computation, and its output, which may be a given value.
            Results that depend on a missing placeholder, such as a loss on its target, are left out.

        Raises
        ------
        CalcError, ShapeError : a value is unknown or has the wrong shape, batches differ, a label or an index is out of
            range, or nothing can be computed from the given values.
        UnsupportedOperator : a row has no equation, because it draws random numbers or is custom: give its result.

        Examples
        --------
        >>> g = cv.CalcGraph()
        >>> x, W = g.placeholder("x", (None, 2)), g.parameter("W", (2, 1))
        >>> with g.path("predict") as predict:
        ...     y = x @ W
        >>> predict.evaluate({"x": [[1.0, 2.0]], "W": [[3.0], [4.0]]})["y"]
        array([[11.]])
        """
        return LATER["evaluate"](self, values, checks.integer("evaluate: seed", seed, 0, 2**63 - 1))

    def trained_behind(self, loss: Variable) -> list[Variable]:
        """Trainable parameters for which a loss of this path has a gradient, in the graph's order."""
        inputs = {v for op in reached(self.operations, loss) for v in op.inputs.values()}
        return [v for v in self.graph.variables.values() if v in inputs and v.kind == "parameter" and v.trainable]

    @property
    def outputs(self) -> tuple[Variable, ...]:
        """The network's results, ``output``, as a tuple."""
        return outputs_of(f"path {self.name!r}: output", self.output)

    @property
    def form(self) -> tuple[Any, ...]:
        """The part of `CalcGraph.form` for a path."""
        ends = (None if self.loss is None else self.loss.name, *(v.name for v in self.outputs))
        optimizer = self.optimizer and self.optimizer.form
        trained = None if self.parameters is None else tuple([v.name for v in self.parameters])
        rates, layers = (*self.rates.items(),), tuple([(scope, v.name, n) for scope, (v, n) in self.layers.items()])
        operations = tuple([op.form for op in self.operations])
        carries = tuple([(state.name, new.name) for state, new in self.carries.items()])
        shared = self.state_of and self.state_of.name
        return (
            self.name,
            self.backward,
            *ends,
            optimizer,
            trained,
            rates,
            self.no_decay,
            layers,
            operations,
            carries,
            shared,
        )

    @property
    def variables(self) -> Iterator[Variable]:
        for op in self.operations:
            yield from op.outputs.values()


def _called(what: str, key: Any, parameters: Sequence[Variable]) -> list[str]:
    """Names of the parameters that match a name, a prefix that ends with a dot, or a suffix that begins with one."""
    names = [v.name for v in parameters]
    found = [
        n
        for n in names
        if isinstance(key, str)
        and (n == key or (key[-1:] == "." and n.startswith(key)) or (key[:1] == "." and n.endswith(key)))
    ]
    if not found:
        raise CalcError(f"{what}: no trained parameter is called {checks.shown(key)}; there are {', '.join(names)}")
    return found


def reached(operations: Sequence[Operation], loss: Variable, exactly: bool = False) -> list[Operation]:
    """Operators that the loss has gradients through, in order; ``exactly``: without gradients that are 0 everywhere."""
    wanted, out = {loss}, []
    for op in reversed(operations):
        if not op.spec.stops and any(v in wanted for v in op.outputs.values()):
            flat = {n for n in op.spec.flat if n not in op.differentiable}
            wanted.update(v for n, v in op.inputs.items() if not exactly or (n not in flat and v.type not in RANKS))
            out.append(op)
    return out[::-1]


def outputs_of(what: str, given: Any) -> tuple[Variable, ...]:
    """None, a variable or several, as a tuple."""
    several = tuple(given) if isinstance(given, (tuple, list)) else () if given is None else (given,)
    for v in several:
        checks.one_of(what, v, Variable, "a variable, or a tuple of them,")
    return several


class CalcGraph(Answering):
    """A graph of operators in paths that share variables.

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x, t = g.placeholder("x", (None, 6)), g.placeholder("t", (None, 3))
    >>> W = g.parameter("W", (6, 3))
    >>> with g.path("learn", backward=True) as learn:
    ...     Y = x @ W
    ...     learn.minimize(cv.mse(Y, t), cv.SGD(0.1), output=Y)
    >>> with g.path("predict") as predict:
    ...     predict.output = x @ W
    >>> cv.Model(g, batch_size=8).predict(np.zeros((2, 6))).shape
    (2, 3)
    """

    variables: dict[str, Variable]
    states: dict[str, Variable]
    paths: dict[str, Path]
    adapts: dict[str, tuple[Variable, int | None]]
    scope: str | None

    def __init__(self) -> None:
        self.variables: dict[str, Variable] = {}
        self.states: dict[str, Variable] = {}  # by purpose
        self.paths: dict[str, Path] = {}
        self.adapts: dict[
            str, tuple[Variable, int | None]
        ] = {}  # layers adapted to data before training: their input, and the axis
        self._active: list[Path] = []
        self._counts: dict[str, int] = {}
        self._streams = 0  # streams of random numbers in use by operators
        self.scope = None  # of the layer being built; a text inside `whole`

    def __repr__(self) -> str:
        kinds = [v.kind for v in self.variables.values()]
        counts = ", ".join(f"{kinds.count(kind)} {kind}s" for kind in ("placeholder", "parameter", "result"))
        return f"<CalcGraph: {counts}; paths {', '.join(self.paths) or 'none'}>"

    @property
    def extent(self) -> tuple[int, ...]:
        """The number of variables, and of operators in each path.  It changes when the graph grows."""
        return len(self.variables), *(len(p.operations) for p in self.paths.values())

    def _repr_html_(self) -> str:
        rows = [[v.kind, v.name, str(v.descriptor)] for v in self.variables.values() if v.kind != "result"]
        rows += [["path", p.name, " ".join(op.spec.name for op in p.operations)] for p in self.paths.values()]
        return html(repr(self), ["kind", "name", "shape, or operators"], rows)

    def placeholder(
        self, name: str, shape: Sequence[int | None], dtype: Any = None, channels_last: bool = False
    ) -> Variable:
        """Add data that the user sets.

        Parameters
        ----------
        shape : sizes; None for the batch, at most once.
        dtype : "int64", "int32", "uint8", "int8", "bool", "float32", "float64" or the NumPy types of these names: the data
            are stored in this type, and cast for operators that compute in the graph's float.  None is that float.
        channels_last : ``shape`` is (N, *sizes, C), as the data are given.  Operators still see (N, C, *sizes).
        """
        dims = shape_of(checks.sizes(f"placeholder {name!r}: shape", shape, batch=True))
        if sum(not s.constant for s in dims) > 1:
            raise ShapeError(
                f"placeholder {name!r}: shape {show(dims)} has the batch more than once: give numbers instead"
            )
        layout = LAST if checks.flag(f"placeholder {name!r}: channels_last", channels_last) else ""
        if layout and len(dims) < 3:
            raise ShapeError(f"placeholder {name!r}: shape {show(dims)} is not (N, *sizes, channels)")
        type_ = dtypes.type_of(f"placeholder {name!r}", dtype)
        return self._add(name, "placeholder", seen(dims, layout), type=type_, layout=layout)

    def parameter(
        self,
        name: str,
        shape: Sequence[int],
        init: Initializer | np.ndarray | str | Callable[..., Any] | None = None,
        regularizer: Regularizer | None = None,
        trainable: bool = True,
    ) -> Variable:
        """Add a value that training changes, or a frozen one with ``trainable=False``.

        init : an initializer of `calcvm.init` (default `XavierUniform`, `Zeros` for vectors), its name such as
            ``"he_normal"``, or an array.
        """
        from calcvm.init import initializer_of
        from calcvm.optim import regularizer_of

        what = f"parameter {name!r}"
        sizes = checks.sizes(f"{what}: shape", shape, no_batch=OWN_SIZES)
        trainable = checks.flag(f"{what}: trainable", trainable)
        init, regularizer = initializer_of(what, init, sizes), regularizer_of(what, regularizer)
        return self._add(name, "parameter", shape_of(sizes), init=init, regularizer=regularizer, trainable=trainable)

    def buffer(
        self,
        name: str,
        shape: Sequence[int],
        init: Initializer | np.ndarray | str | Callable[..., Any] = "zeros",
    ) -> Variable:
        """Add a value that the forward pass of a training path updates and other paths read, such as a running mean.

        init : as in `parameter`.
        """
        from calcvm.init import initializer_of

        what = f"buffer {name!r}"
        sizes = checks.sizes(f"{what}: shape", shape, no_batch=OWN_SIZES)
        return self._add(name, "buffer", shape_of(sizes), init=initializer_of(what, init, sizes))

    def carry(
        self,
        name: str,
        shape: Sequence[int | None],
        init: Initializer | np.ndarray | str | Callable[..., Any] = "zeros",
        steps: int | None = None,
    ) -> Variable:
        """Add a state that a model keeps for each sample from call to call; `calcvm.carry` says what a path leaves in it.

        shape : sizes, with None for the batch first: (None, 64).
        init : as in `parameter`, for one sample; every sample starts from it.
        steps : the most steps from the start on that it has room for, such as keys of attention: `Model.generate` takes no more.
        """
        from calcvm.init import initializer_of

        what = f"carry {name!r}"
        sizes = checks.sizes(f"{what}: shape", shape, batch=True)
        if sizes[:1] != (None,) or None in sizes[1:]:
            raise ShapeError(f"{what}: its shape has the batch first, such as (None, 64), not {checks.shown(shape)}")
        steps = None if steps is None else checks.integer(f"{what}: steps", steps)
        return self._add(name, "carry", shape_of(sizes), init=initializer_of(what, init, sizes[1:]), steps=steps)

    def parameters(self, prefix: str = "") -> list[Variable]:
        """Parameters whose names begin with ``prefix``, such as the scope of a layer."""
        checks.one_of("parameters: prefix", prefix, str, "a text such as 'linear_1.'")
        return [v for v in self.variables.values() if v.kind == "parameter" and v.name.startswith(prefix)]

    def constant(self, name: str, value: np.ndarray, dtype: Any = None) -> Variable:
        """Add a fixed array.

        dtype : as in `placeholder`; default: the graph's float.
        """
        what = f"constant {name!r}"
        type_, value = dtypes.type_of(what, dtype), as_numbers(what, value)
        if not value.size:
            raise ShapeError(f"constant {name!r}: shape {value.shape} has no elements")
        value = value.astype(np.float64) if type_ == FLOAT else dtypes.as_type(what, value, type_)
        return self._add(name, "constant", shape_of(value.shape), type=type_, init=value)

    def path(self, name: str, backward: bool = False, adopt: bool = True) -> Path:
        """Add a path; operators built inside ``with`` belong to it.

        adopt : name results after the Python variables that hold them when the ``with`` block ends.
        """
        checks.text("a path's name", name, "learn")
        if name in self.paths:
            raise CalcError(f"path {name!r} exists already: paths of a graph have different names")
        backward, adopt = checks.flag("backward", backward), checks.flag("adopt", adopt)
        path = self.paths[name] = Path(self, name, backward, adopt)
        return path

    @contextmanager
    def extend(self, name: str) -> Iterator[Path]:
        """Reopen a path, to add operators."""
        if not isinstance(name, str) or name not in self.paths:
            raise CalcError(f"no path {checks.shown(name)}; there are {', '.join(self.paths) or 'none'}")
        with self.paths[name] as path:
            yield path

    def text(self) -> str:
        """The graph as text.  `calcvm.read_graph` reads it back, and compiles to the same program.

        A line is a placeholder, a parameter, an operator with its attributes, or the objective of a path.  Numbers have all
        their digits.  Equal graphs have equal texts.  Arrays of more than 64 elements are written as bytes, in base64.
        Initializers that are functions are written by name, as in files.

        Raises
        ------
        CalcError : something has no text: a custom optimizer or schedule class, or an operator that is no longer declared.

        Examples
        --------
        >>> g = cv.CalcGraph()
        >>> x = g.placeholder("x", (None, 2))
        >>> with g.path("double"):
        ...     y = x * 2
        >>> print(g.text())
        calcvm graph 1
        x = placeholder[None, 2]
        <BLANKLINE>
        path double:
            y = affine(x, a=2.0)
        <BLANKLINE>
        """
        return LATER["text"](self)

    def layer_results(self) -> dict[str, Variable]:
        """The results of layers, by layer name.  A layer in several paths gives that of "predict"; all are ``"learn.relu_1"`` too.

        A name chosen by the user stays with its variable.  An automatic name yields to the layer.
        """
        found: dict[str, Variable] = {}
        for path in sorted(self.paths.values(), key=lambda path: path.name != "predict"):
            for scope, (v, _) in path.layers.items():
                found.setdefault(scope, v)
                found.setdefault(f"{path.name}.{scope}", v)
        chosen = {name for name, v in self.variables.items() if not v.unnamed}
        return {name: v for name, v in found.items() if name not in chosen}

    def state(self, name: str, elems: int, type_: str, init: Mapping[str, Any]) -> Variable:
        """Numbers in the heap's persistent state, such as counters and rates, shared by name."""
        known = self.states.get(name)
        if known is None:
            known = self._add(self.unique(name), "state", shape_of((elems,)), type=type_, init=init, unnamed=True)
            self.states[name] = known
        return known

    @contextmanager
    def drawing(self) -> Iterator[tuple[Variable, int]]:
        """The state of the random numbers, and an unused stream of them.

        States created for an operator that is then rejected are removed.
        """
        n_states, n_variables = len(self.states), len(self.variables)
        try:
            yield self.state("rng", 2, "int64", {"kind": "rng"}), self._streams
            self._streams += 1
        except CalcError:
            while len(self.states) > n_states:
                self.states.popitem()
            while len(self.variables) > n_variables:
                self.variables.popitem()
            raise

    @contextmanager
    def whole(self, scope: str = "") -> Iterator[None]:
        """Build all or nothing: if a part raises CalcError, everything built inside the outermost ``whole`` is removed."""
        outer, self.scope = self.scope, scope
        if outer is not None:
            try:
                yield
            finally:
                self.scope = outer
            return
        states, variables, streams = {**self.states}, {**self.variables}, self._streams
        paths = [(path, len(path.operations), {**path.layers}) for path in self.paths.values()]
        try:
            yield
        except CalcError:
            self.states, self.variables, self._streams = states, variables, streams
            for name, v in variables.items():
                v.name = name
            for path, n, layers in paths:
                del path.operations[n:]
                path.layers = layers
            raise
        finally:
            self.scope = None

    @property
    def form(self) -> tuple[Any, ...]:
        """Equal for graphs that compile to one program, up to hyperparameters.

        Hyperparameters are the optimizers' `slots`.  Everything else is compared: names, shapes, operators, initializers.
        """
        sources = [v for v in self.variables.values() if v.kind != "result"]
        return (*(v.form for v in sources), *(path.form for path in self.paths.values()))

    @property
    def active(self) -> Path:
        if not self._active:
            raise CalcError("operators belong to a path: build them inside `with g.path(name):`")
        return self._active[-1]

    def unique(self, stem: str) -> str:
        """``stem`` or ``stem_2``, ``stem_3``, ...: a name that no variable has yet."""
        return unique(stem, self.variables, self._counts)

    def _claim(self, name: str, new: Variable | None = None) -> None:
        """Free a name for a variable.  A name chosen by the user cannot be taken."""
        taken = self.variables.get(name)
        if taken is not None and taken is not new:
            if not taken.unnamed:
                raise CalcError(f"variable {name!r} exists already: variables of a graph have different names")
            taken._call(self.unique(name))

    def _add(self, name: str, kind: str, shape: Shape, **fields: Any) -> Variable:
        checks.text("a variable's name", name, "x")
        self._claim(name)
        v = self.variables[name] = Variable(self, name, kind, TensorDescriptor(shape), **fields)
        return v


def apply(
    name: str, *inputs: Variable | np.ndarray | Traced | float | None, out: str | None = None, **attrs: Any
) -> Variable:
    """Apply the operator ``name`` of the table and return its first output.

    Raises
    ------
    ShapeError : the inputs' shapes do not fit; the message names operator, variables and shapes.
    UnsupportedOperator : the table has no such operator.
    CalcError : an attribute is unknown or out of range.

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x = g.placeholder("x", (None, 3))
    >>> with g.path("forward"):
    ...     print(cv.apply("leaky_relu", x, alpha=0.1))
    leaky_relu (B, 3)
    """
    spec = OPS.get(name) if isinstance(name, str) else None
    if spec is None:
        raise UnsupportedOperator(f"operator {checks.shown(name)} is not in the table; known: {', '.join(sorted(OPS))}")
    for v in inputs:
        if isinstance(v, Traced):
            return v._called(name, inputs, attrs)
    return applied(spec, *inputs, out=out, **attrs)  # type: ignore[arg-type]  # none is Traced


def applied(
    spec: OpSpec, *inputs: Variable | np.ndarray | float | None, out: str | None = None, **attrs: Any
) -> Variable:
    """`apply` for a spec, which need not be in the table."""
    name = spec.stem
    graph = next((v.graph for v in inputs if isinstance(v, Variable)), None)
    if graph is None:
        others = ", ".join(map(checks.shown, inputs)) or "none"
        raise CalcError(f"{name}: at least one input must be a variable of a graph, not {others}")
    path = graph.active
    operands: dict[str, Variable | np.ndarray] = {}
    for slot, v in zip(spec.inputs, inputs):
        if isinstance(v, Variable) and v.graph is not graph:
            raise CalcError(f"{name}: {v.name!r} belongs to another graph")
        if v is not None:
            operands[slot] = v if isinstance(v, Variable) else as_numbers(f"{name}: {slot}", v)
    missing = [s for s in spec.inputs if s not in operands and s not in spec.optional_inputs]
    if missing and len(inputs) == len(spec.inputs):
        raise CalcError(f"{name}: {missing[0]} is None: a variable, a number or an array is wanted")
    if missing or len(inputs) > len(spec.inputs):
        raise CalcError(f"{name}: takes inputs {', '.join(spec.inputs)}; got {len(inputs)}")
    if spec.category not in ("optimizer", "system"):
        for slot in spec.updates:
            _check_buffer(name, path, operands[slot])
    attrs = _checked_attrs(spec, attrs)
    if spec.exact and (
        of := [v for v in operands.values() if isinstance(v, Variable) and v.type in ("int32", "int64")]
    ):
        raise CalcError(
            f"{name} computes in floats, which cannot represent every {of[0].type}, the type of {of[0].name!r}: if its numbers are "
            "small enough (below 2**24, in float64 2**53), use cv.cast(x, None)"
        )
    types = _types(spec, operands, attrs)
    found = layouts_of(spec, operands)
    if spec.relaid and (layout := found[spec.outputs[0]]):
        attrs = spec.relaid(attrs, axes(layout, max(len(v.shape) for v in operands.values())))
    given = {s: shape_of(v.shape) for s, v in operands.items()}
    of_inputs: dict[str, Any] = dict.fromkeys(spec.inputs)
    padded = {s: _padded(spec, s, given) if found[s] else shape for s, shape in given.items()}
    of_inputs |= {s: laid(shape, found[s]) for s, shape in padded.items()}
    try:
        own = any(map(is_own, spec.rows))
        shapes = sizes_of(spec, of_inputs, attrs) if own else spec.shape(of_inputs, attrs)
        check_linear(shapes)
        spec.words({**of_inputs, **shapes}, attrs)
    except ValueError as e:
        told = (str(v) if isinstance(v, Variable) else f"array {show(shape_of(v.shape))}" for v in operands.values())
        why = str(e)
        for s, shape in given.items():
            why = why.replace(show(of_inputs[s]), show(shape))
        raise ShapeError(f"{name}({', '.join(told)}): {why}") from None
    named: dict[str, Variable] = {}
    for slot, operand in operands.items():  # all checks have passed: arrays become constants
        if not isinstance(operand, Variable):
            operand = operand != 0 if types[slot] == "bool" else operand
            operand = graph.constant(graph.unique(f"{name}_{slot}"), operand, types[slot])
            operand.unnamed = True
        operand = operand if operand.type == types[slot] else _cast(path, operand, types[slot])
        named[slot] = _lying(path, operand, found[slot], padded[slot])
    op_name = out or graph.unique(name)
    outputs = {}
    for i, slot in enumerate(spec.outputs):
        v_name = op_name if i == 0 else f"{op_name}.{slot}"
        v = graph._add(
            v_name, "result", seen(shapes[slot], found[slot]), type=types.get(slot, FLOAT), path=path,
            unnamed=out is None, layout=found[slot],
        )  # fmt: skip
        outputs[slot] = v
    saved = {n: s for n, s in shapes.items() if n not in outputs}
    lying = {n: s for n, s in (*of_inputs.items(), *shapes.items()) if n in named or n in outputs}
    op = Operation(spec, named, outputs, lying, saved, attrs, op_name)
    for v in outputs.values():
        v.producer = op
    path.operations.append(op)
    return next(iter(outputs.values()))


def layouts_of(spec: OpSpec, operands: Mapping[str, Variable | np.ndarray]) -> dict[str, str]:
    """The layout of each input and output."""
    common = ""
    if spec.anyhow:
        rank = max(len(v.shape) for v in operands.values())
        lie = [v.layout for v in operands.values() if isinstance(v, Variable) and len(v.shape) == rank]
        common = next(filter(None, lie), "")
    alike = {slot for slot, v in operands.items() if spec.broadcast or len(v.shape) == rank} if common else ()
    return {
        slot: common if slot in alike or (common and slot in spec.outputs) else spec.layouts.get(slot, "")
        for slot in (*operands, *spec.outputs)
    }


def _padded(spec: OpSpec, slot: str, shapes: Mapping[str, Shape]) -> Shape:
    """The shape of an operand with leading axes of 1 added, if the operator broadcasts."""
    shape = shapes[slot]
    return (ONE,) * (max(map(len, shapes.values())) - len(shape)) + shape if spec.broadcast else shape


def in_same_order(v: Variable) -> bool:
    """Whether a variable is stored in the axis order that users see."""
    return same_order(v.shape, v.layout, "")


def _lying(path: Path, v: Variable, layout: str, shape: Shape) -> Variable:
    """The variable in a layout, for an operand of the given shape.

    The first reader of a parameter sets the parameter's layout.  Other variables are copied, once per path.
    """
    if v.rank < len(shape) and layout:  # broadcast
        v = _lying(path, v, "", v.shape)
        if not same_order(shape, "", layout):
            v = apply("reshape", v, shape=tuple(n.b if n.constant else -1 for n in shape))
    elif v.kind == "parameter" and not v.settled:
        v.layout = layout
    v.settled = True
    if same_order(shape, v.layout, layout):
        return v
    copies = (op for op in path.operations if op.spec.name == "transpose" and op.inputs["x"] is v)
    known = next((op.outputs["y"] for op in copies if op.outputs["y"].layout == layout), None)
    return copied(path, v, layout) if known is None else known


def same_order(shape: Shape, *layouts: str) -> bool:
    """Whether axes of more than one element are in the same order in all layouts."""
    orders = ([axis for axis in axes(layout, len(shape)) if shape[axis] != ONE] for layout in layouts)
    return len({*map(tuple, orders)}) == 1


def copied(path: Path, v: Variable, layout: str) -> Variable:
    """A copy of a variable in another layout."""
    name = v.graph.unique(f"{v.name}.{layout.replace(' ', '_') or 'as_seen'}")
    y = v.graph._add(name, "result", v.shape, type=v.type, path=path, unnamed=True, layout=layout, settled=True)
    moves = {"axes": between(v.layout, layout, v.rank)}
    op = Operation(OPS["transpose"], {"x": v}, {"y": y}, {"x": v.laid, "y": y.laid}, {}, moves, name)
    y.producer = op
    path.operations.append(op)
    return y


def _types(spec: OpSpec, operands: Mapping[str, Variable | np.ndarray], attrs: Mapping[str, Any]) -> dict[str, str]:
    """The types of inputs and outputs.  Inputs of another type are cast."""
    meet: dict[str, list[str]] = {}
    for slot, v in operands.items():
        if (of := spec.types.get(slot, FLOAT)) in VARIABLES and isinstance(v, Variable):
            meet.setdefault(of, []).append(v.type)
    looked_at = {"any"} - {spec.types.get(slot) for slot in spec.outputs}  # no output has the inputs' type
    bound = {variable: promoted(types, variable in looked_at) for variable, types in meet.items()}
    for slot, v in operands.items():  # numbers take the type of the variables they meet, if it can represent them
        if (of := spec.types.get(slot, FLOAT)) in VARIABLES and not isinstance(v, Variable):
            bound[of] = _with_numbers(bound.get(of), v, of in looked_at)
    for variable, type_ in bound.items():
        if variable != CELLS and type_ not in VARIABLES[variable]:
            bound[variable] = "int64" if type_ in RANKS else FLOAT
    if "to" in attrs:
        bound["to"] = attrs["to"]
    return {slot: bound.get(of := spec.types.get(slot, FLOAT), of) for slot in (*operands, *spec.outputs)}


def _cast(path: Path, v: Variable, type_: str) -> Variable:
    """A variable cast to another type, once per path."""
    casts = (op for op in path.operations if op.spec.casts and op.inputs["x"] is v and op.attrs["to"] == type_)
    known = next(casts, None)
    return known.outputs["y"] if known else apply("cast", v, to=type_)


def _with_numbers(type_: str | None, numbers: np.ndarray, wide: bool) -> str:
    """The common type of numbers and a type (None: numbers alone); ``wide`` as in `promoted`."""
    kind = numbers.dtype.kind
    if kind == "b":
        return promoted(("bool", type_ or "bool"))
    if kind == "f" or type_ not in (None, *RANKS):
        return promoted((type_ or FLOAT, FLOAT), wide)
    least, most = (int(numbers.min()), int(numbers.max())) if numbers.size else (0, 0)
    fits = (t for t in RANKS[1:] if np.iinfo(t).min <= least and most <= np.iinfo(t).max)
    return promoted((type_ or "int64", next((t for t in fits if t == type_), "int64")))


def _check_buffer(name: str, path: Path, v: Variable | np.ndarray) -> None:
    """Raise CalcError unless the forward pass can update ``v``."""
    if not isinstance(v, Variable) or v.kind != "buffer":
        what = f"the {v.kind} {v.name!r}" if isinstance(v, Variable) else "an array"
        raise CalcError(f"{name} updates {what}: give it a buffer, g.buffer(name, shape)")
    if not path.backward:
        raise CalcError(
            f"{name} updates the buffer {v.name!r}, but path {path.name!r} does not train: use the inference form "
            f"(training=False), or open the path with g.path({path.name!r}, backward=True)"
        )


def _checked_attrs(spec: OpSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    known = {a.name: a for a in spec.attrs}
    unknown = [n for n in given if n not in known]
    if unknown:
        raise CalcError(f"{spec.name}: unknown attribute {unknown[0]!r}; it takes {', '.join(known) or 'none'}")
    attrs = {a.name: checks.plain(given.get(a.name, a.default)) for a in spec.attrs}
    for n, value in attrs.items():
        if not _allowed(known[n], value):
            raise CalcError(f"{spec.name}: attribute {n}={checks.shown(value)} is not allowed ({known[n].doc})")
    return attrs


def _allowed(attr: Attr, value: Any) -> bool:
    try:
        return bool(attr.check(value))
    except Exception:  # not comparable with the range
        return False
