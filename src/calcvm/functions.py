"""Operators on variables, as functions.  Each adds an operator to the active path and returns its result.

Shapes follow NumPy: elementwise operators broadcast, reductions take ``axis`` (one, several, None for all) and ``keepdims``.  The operator
reference (``docs/operators.md``, generated from the table) has the equations and sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np

from calcvm import checks
from calcvm.dtypes import as_type, type_of
from calcvm.errors import CalcError, ShapeError
from calcvm.graph import LATER, Traced, Variable, apply
from calcvm.ops.dims import BATCH, ONE, Affine, shape_of, show
from calcvm.ops.reduction import BLOCKS
from calcvm.ops.spec import EQUATION
from calcvm.ops.types import FLOAT

__all__ = [
    "abs", "accuracy", "acos", "add", "asin", "atan", "attention", "binary_cross_entropy", "cast", "ceil", "center",
    "carry", "channels_first", "channels_last", "clip", "concat", "cos", "cosh", "cumsum", "div", "dropout", "dropout2d", "elu",
    "equal", "erf", "exp", "expand_dims", "expm1", "fake_quantize", "flatten", "floor", "gelu", "greater", "greater_equal",
    "hard_sigmoid", "hard_swish", "huber", "layer_norm", "leaky_relu", "less", "less_equal", "linear", "log", "log1p",
    "log_cosh", "log_softmax", "logcumsumexp", "logical_and", "logical_not", "logical_or", "logical_xor", "logsumexp",
    "mae", "matmul", "max", "maximum", "mean", "min", "minimum", "mish", "mod", "mse", "mul", "neg", "not_equal",
    "pick", "pow", "prelu", "relu", "relu6", "reshape", "rms_norm", "rmse", "rotary", "round", "selu", "sigmoid", "sign", "silu",
    "sin", "sinh", "slice", "softmax", "softmax_cross_entropy", "softplus", "split", "sqrt", "square", "squeeze",
    "stack", "std", "stop_gradient", "sub", "sum", "sum_squares", "tan", "tanh", "transpose", "var", "where",
]  # fmt: skip

Axes = int | Sequence[int] | Variable | None  # in an equation: the variable to reduce
Reduced = Variable | tuple[Any, ...]  # in an equation: a tuple of indexes
MOST_JOINED = 8  # inputs of concat_many


def matmul(a: Variable, b: Variable, transpose_a: bool = False, transpose_b: bool = False) -> Variable:
    """Matrix product over the last two axes.  Leading axes are batches; one operand may have none."""
    return apply("matmul", a, b, transpose_a=transpose_a, transpose_b=transpose_b)


def linear(x: Variable, weight: Variable, bias: Variable | None = None) -> Variable:
    """``x @ weight + bias``: x (..., K), weight (K, N), bias (N,)."""
    return apply("linear", x, weight, bias)


def _pair(name: str, a: Any, b: Any) -> None:
    """Require a variable among the operands.  Without one, Python would silently compute something else."""
    if not isinstance(a, (Variable, Traced)) and not isinstance(b, (Variable, Traced)):
        raise CalcError(f"{name}: a variable is wanted, not {checks.called(a)} and {checks.called(b)}")


def add(a: Variable, b: Variable) -> Variable:
    """a + b, broadcasting."""
    _pair("add", a, b)
    return a + b


def sub(a: Variable, b: Variable) -> Variable:
    """a - b, broadcasting."""
    _pair("sub", a, b)
    return a - b


def mul(a: Variable, b: Variable) -> Variable:
    """a * b, broadcasting."""
    _pair("mul", a, b)
    return a * b


def div(a: Variable, b: Variable) -> Variable:
    """a / b, broadcasting."""
    _pair("div", a, b)
    return a / b


class Elementwise(Protocol):
    """A function of one variable, of the same shape."""

    def __call__(self, x: Variable) -> Variable: ...


def _elementwise(name: str, doc: str) -> Elementwise:
    """The function of an operator, with its docstring."""

    def function(x: Variable) -> Variable:
        return apply(name, x)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


neg = _elementwise("neg", "-x.")
abs = _elementwise("abs", "|x|; its derivative at 0 is 0.")
sqrt = _elementwise("sqrt", "Square root.")
square = _elementwise("square", "x * x.")
exp = _elementwise("exp", "e to the x.")
log = _elementwise("log", "Natural logarithm.")
expm1 = _elementwise("expm1", "exp(x) - 1, without cancellation if x is near 0.")
log1p = _elementwise("log1p", "log(1 + x), without loss of precision if x is near 0.")
erf = _elementwise("erf", "The error function, 2/sqrt(pi) times the integral of exp(-t^2) from 0 to x.")
sin = _elementwise("sin", "Sine of x in radians, of any size.")
cos = _elementwise("cos", "Cosine of x in radians, of any size.")
tan = _elementwise("tan", "Tangent of x in radians, of any size.")
asin = _elementwise("asin", "The angle in [-pi/2, pi/2] whose sine is x; NaN if x is outside [-1, 1].")
acos = _elementwise("acos", "The angle in [0, pi] whose cosine is x; NaN if x is outside [-1, 1].")
atan = _elementwise("atan", "The angle in [-pi/2, pi/2] whose tangent is x.")
sinh = _elementwise("sinh", "Hyperbolic sine, (exp(x) - exp(-x))/2.")
cosh = _elementwise("cosh", "Hyperbolic cosine, (exp(x) + exp(-x))/2.")
sign = _elementwise("sign", "-1, 0 or 1.  No gradient goes through it.")
floor = _elementwise("floor", "The largest integer not above x.  No gradient goes through it.")
ceil = _elementwise("ceil", "The smallest integer not below x.  No gradient goes through it.")
round = _elementwise("round", "The nearest integer, ties to even.  No gradient goes through it.")

relu = _elementwise("relu", "max(x, 0).")
sigmoid = _elementwise("sigmoid", "1 / (1 + exp(-x)).")
tanh = _elementwise("tanh", "Hyperbolic tangent.")
silu = _elementwise("silu", "x / (1 + exp(-x)), also called swish.")
selu = _elementwise("selu", "1.0507 * x where positive, 1.7581 * (exp(x) - 1) elsewhere; preserves mean 0, variance 1.")
mish = _elementwise("mish", "x * tanh(softplus(x)).")
hard_sigmoid = _elementwise("hard_sigmoid", "x/6 + 1/2, clipped to [0, 1], as in PyTorch.")
hard_swish = _elementwise("hard_swish", "x * hard_sigmoid(x).")
relu6 = _elementwise("relu6", "x clipped to [0, 6].")
softplus = _elementwise("softplus", "log(1 + exp(x)).")


def pow(x: Variable, exponent: float) -> Variable:  # noqa: A001
    """x to a constant power."""
    return apply("pow", x, exponent=exponent)


def leaky_relu(x: Variable, alpha: float = 0.01) -> Variable:
    """x where positive, alpha * x elsewhere."""
    return apply("leaky_relu", x, alpha=alpha)


def gelu(x: Variable, approximate: str = "none") -> Variable:
    """x * Phi(x); Phi, the normal distribution function, is computed by erf ("none") or approximated by "tanh"."""
    return apply("gelu", x, approximate=approximate)


def prelu(x: Variable, slope: Variable) -> Variable:
    """x where positive, ``slope * x`` elsewhere.  The slope broadcasts: (C, 1, 1) has one per channel of images."""
    return apply("prelu", x, slope)


def elu(x: Variable, alpha: float = 1.0) -> Variable:
    """x where positive, alpha * (exp(x) - 1) elsewhere."""
    return apply("elu", x, alpha=alpha)


def clip(x: Variable, lo: float, hi: float) -> Variable:
    """x clipped to [``lo``, ``hi``].  For a single bound, take `maximum` or `minimum`."""
    return apply("clip", x, lo=lo, hi=hi)


def fake_quantize(x: Variable, scale: float) -> Variable:
    """x rounded as in int8: to a multiple of ``scale`` in [-128*scale, 127*scale].

    Gradients pass as if it were not rounded, so a network that trains with it learns to predict well once `calcvm.quantize` makes it
    one of int8, where this value has this scale.
    """
    return apply("fake_quantize", x, scale=scale)


def maximum(a: Variable | float, b: Variable | float) -> Variable:
    """The larger of two, elementwise, broadcasting; NaN if either is NaN (`max` reduces over axes)."""
    return _of_two("maximum", a, b)


def minimum(a: Variable | float, b: Variable | float) -> Variable:
    """The smaller of two, elementwise, broadcasting; NaN if either is NaN (`min` reduces over axes)."""
    return _of_two("minimum", a, b)


def mod(a: Variable, b: Variable) -> Variable:
    """a % b for floats: the remainder of the division, with the sign of b.

    int8, uint8 and bool are cast to floats.  int32 and int64 raise, because a float cannot represent all of them.
    """
    return _of_two("mod", a, b)


# ---------------------------------------------------------------- types, comparisons, conditions
def cast(x: Variable, dtype: Any) -> Variable:
    """x as another type (see `CalcGraph.placeholder`).  Gradients go through casts from floats to floats.

    Floats are truncated towards 0 and saturate at the ends of an integer type; NaN becomes 0.  Integers that are too large
    keep their lowest bits.  As a bool, everything but 0 is true.
    """
    to = type_of("cast", dtype)
    return x if isinstance(x, Variable) and x.type == to else apply("cast", x, to=to)


def equal(a: Variable | float, b: Variable | float) -> Variable:
    """Whether a = b, elementwise, broadcasting.  (``==`` tests whether two are the same variable.)"""
    return _of_two("equal", a, b)


def not_equal(a: Variable | float, b: Variable | float) -> Variable:
    """Whether a and b differ.  NaN differs from everything."""
    return _of_two("not_equal", a, b)


def less(a: Variable | float, b: Variable | float) -> Variable:
    """Whether a < b."""
    return _of_two("less", a, b)


def less_equal(a: Variable | float, b: Variable | float) -> Variable:
    """Whether a <= b."""
    return _of_two("less_equal", a, b)


def greater(a: Variable | float, b: Variable | float) -> Variable:
    """Whether a > b."""
    return _of_two("greater", a, b)


def greater_equal(a: Variable | float, b: Variable | float) -> Variable:
    """Whether a >= b."""
    return _of_two("greater_equal", a, b)


def logical_and(a: Variable, b: Variable) -> Variable:
    """Whether both are true.  Numbers other than 0 are true; bits are not combined.  Also ``a & b``."""
    return _of_two("logical_and", a, b)


def logical_or(a: Variable, b: Variable) -> Variable:
    """Whether at least one is true.  Also ``a | b``."""
    return _of_two("logical_or", a, b)


def logical_xor(a: Variable, b: Variable) -> Variable:
    """Whether exactly one is true.  Also ``a ^ b``."""
    return _of_two("logical_xor", a, b)


logical_not = _elementwise("logical_not", "Whether x is false.  Also ``~x``.")


def where(condition: Any, x: Variable | float, y: Variable | float) -> Variable:
    """x where the condition is true, else y, broadcasting.  The gradient goes to the chosen one."""
    if isinstance(condition, bool):
        raise CalcError(
            "where: the condition is a bool of Python's; == asks whether two are one variable: take cv.equal(a, b)"
        )
    return apply("where", condition, x, y)


def _of_two(name: str, a: Any, b: Any) -> Variable:
    _pair(name, a, b)
    return apply(name, a, b)


def softmax(x: Variable, axis: int | None = None, where: Any = None) -> Variable:
    """exp(x) normalized to sum 1 over an axis: the last, or 1.  Default: as in `softmax_cross_entropy`.

    where : a mask that broadcasts with x; elements where it is false get 0, and do not count.  If none counts, all are 0.

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x = g.constant("x", [[1.0, 1.0, 5.0], [1.0, 2.0, 3.0]])
    >>> with g.path("look") as look:
    ...     y = cv.softmax(x, where=np.array([[True, True, False], [False, False, False]]))
    >>> look.evaluate({})[y.name].tolist()
    [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]
    """
    if where is None:
        return _over_classes("softmax", x, axis)
    if isinstance(where, bool):
        raise CalcError("softmax: where is a mask, one bool per element, not a bool of Python's")
    axis = class_axis(x) if axis is None and isinstance(x, Variable) else axis
    return apply("where", where, _over_classes("softmax", apply("where", where, x, -np.inf), axis), 0.0)


def log_softmax(x: Variable, axis: int | None = None) -> Variable:
    """log(softmax(x)), over the same axes."""
    return _over_classes("log_softmax", x, axis)


def _over_classes(name: str, x: Variable, axis: int | None) -> Variable:
    if axis is None:
        axis = class_axis(x) if isinstance(x, Variable) else -1
    if isinstance(x, Variable) and x.rank > 2 and axis in (1, 1 - x.rank):
        return channels_first(apply(name, channels_last(x)))
    return apply(name, x, axis=axis)


def _reduce(name: str, x: Any, axis: Any, keepdims: bool, blocks: int = BLOCKS, then: str = "") -> Variable:
    """Reduce over any axes.  One operator takes up to ``blocks`` blocks of adjacent axes, from the right; ``then`` the rest.

    In an equation the indexes come first and the operand last: ``cv.sum(i, x[b, i])``.
    """
    if isinstance(axis, Traced):
        return axis._reduced(name, x)
    if axis is None or not isinstance(x, Variable):
        return apply(name, x, axes=None, keepdims=keepdims)
    chosen = _chosen(name, x, axis, x.rank)
    while chosen:
        taken, left = [chosen.pop()], blocks
        while chosen and (left := left - (chosen[-1] != taken[0] - 1)):
            taken.insert(0, chosen.pop())
        x, name = apply(name, x, axes=tuple(taken), keepdims=keepdims), then or name
    return x


def _chosen(name: str, x: Variable, axis: Any, rank: int) -> list[int]:
    """Axes as sorted numbers in [0, ``rank``); ShapeError if one occurs twice or is out of range."""
    given = _axes(f"{name}: axis", axis)
    chosen = sorted({a + rank if a < 0 else a for a in given})
    if not all(0 <= a < rank for a in chosen):
        raise ShapeError(f"{name} of {x}: axis {axis} is outside {rank} dimensions")
    if len(chosen) < len(given):
        raise ShapeError(f"{name} of {x}: axis {axis} names a dimension twice: give each once")
    return chosen


def _axes(what: str, axes: Any) -> tuple[int, ...]:
    given = (axes,) if checks.is_integer(axes) else axes
    if not isinstance(given, (tuple, list)) or not all(map(checks.is_integer, given)):
        raise ShapeError(f"{what} {checks.shown(axes)}: give an integer, or a tuple of them")
    return checks.plain(tuple(given))


def sum(x: Reduced, axis: Axes = None, keepdims: bool = False) -> Variable:  # noqa: A001
    """Sum over axes (default all).  In an equation over indexes: ``sum(i, x[b, i])`` (`equation`); so mean, max and min."""
    return _reduce("sum", x, axis, keepdims)


def sum_squares(x: Variable, axis: Axes = None, keepdims: bool = False) -> Variable:
    """Sum of the squares over axes (default all)."""
    return _reduce("sum_squares", x, axis, keepdims, then="sum")


def mean(x: Reduced, axis: Axes = None, keepdims: bool = False) -> Variable:
    """Mean over axes (default all)."""
    return _reduce("mean", x, axis, keepdims)


def max(x: Reduced, axis: Axes = None, keepdims: bool = False) -> Variable:  # noqa: A001
    """Largest element over axes (default all)."""
    return _reduce("max", x, axis, keepdims, blocks=1)


def min(x: Reduced, axis: Axes = None, keepdims: bool = False) -> Variable:  # noqa: A001
    """Smallest element over axes (default all)."""
    return _reduce("min", x, axis, keepdims, blocks=1)


def cumsum(x: Variable, axis: int, reverse: bool = False) -> Variable:
    """Cumulative sum along an axis; ``reverse``: from each element to the last.

    Parameters
    ----------
    x : Variable, any shape but ()
    axis : int, which may be the batch
    Examples
    --------
    >>> import calcvm as cv
    >>> g = cv.CalcGraph()
    >>> x = g.constant("x", [1.0, 2.0, 3.0])
    >>> with g.path("sums") as sums:
    ...     y = cv.cumsum(x, axis=0, reverse=True)
    >>> sums.evaluate({})[y.name]
    array([6., 5., 3.])
    """
    return apply("reverse_cumsum" if checks.flag("cumsum: reverse", reverse) else "cumsum", x, axis=axis)


def logsumexp(x: Reduced, axis: Axes = None, keepdims: bool = False) -> Variable:
    """log(sum(exp(x))) over axes (default all), without overflow.  It is -inf if all elements are."""
    return _reduce("logsumexp", x, axis, keepdims, blocks=1)


def logcumsumexp(x: Variable, axis: int) -> Variable:
    """Cumulative logsumexp along an axis, without overflow; -inf up to the first element that is not -inf.

    Parameters
    ----------
    x : Variable, any shape but ()
    axis : int, which may be the batch

    Examples
    --------
    >>> import calcvm as cv
    >>> g = cv.CalcGraph()
    >>> x = g.constant("x", [1000.0, 1000.0, -1000.0])
    >>> with g.path("sums") as sums:
    ...     y = cv.logcumsumexp(x, axis=0)
    >>> sums.evaluate({})[y.name].round(3)
    array([1000.   , 1000.693, 1000.693])
    """
    return apply("logcumsumexp", x, axis=axis)


def var(x: Reduced, axis: Axes = None, correction: int = 0, keepdims: bool = False) -> Variable:
    """Variance over axes (default all), in two passes: the sum of squared deviations from the mean, divided by n - ``correction``.

    Parameters
    ----------
    x : Variable, any shape
    axis : int or sequence of int
        The axes to reduce.
    correction : int
        0 as in NumPy, 1 for the unbiased estimate that is PyTorch's default.  If n - ``correction`` is not positive, the
        result is NaN for equal elements and infinite otherwise.
    keepdims : bool
        Whether reduced axes stay, with size 1.

    Examples
    --------
    >>> import calcvm as cv
    >>> g = cv.CalcGraph()
    >>> x = g.placeholder("x", (None, 3, 5))
    >>> with g.path("spread"):
    ...     print(cv.var(x, axis=-1), cv.std(x, axis=(0, 2), correction=1))
    var (B, 3) std (3,)
    """
    return _spread("var", x, axis, correction, keepdims)


def std(x: Variable, axis: Axes = None, correction: int = 0, keepdims: bool = False) -> Variable:
    """Standard deviation over axes, the root of `var`.  Its gradient is 0 where the deviation is 0."""
    return _spread("std", x, axis, correction, keepdims)


def _spread(name: str, x: Any, axis: Any, correction: int, keepdims: bool) -> Variable:
    """var or std over any axes.  Axes that are not adjacent are first transposed to the end."""
    correction = checks.integer(f"{name}: correction", correction, 0, 1 << 24)
    if isinstance(axis, Traced) or axis is None or not isinstance(x, Variable):
        return _reduce(name, x, axis, keepdims)
    taken = _chosen(name, x, axis, x.rank)
    if taken and taken[-1] - taken[0] >= len(taken):
        order = [*(k for k in range(x.rank) if k not in taken), *taken]
        y = apply(name, transpose(x, order), axes=tuple(range(x.rank - len(taken), x.rank)), correction=correction)
        return reshape(y, [1 if k in taken else n for k, n in enumerate(x.shape)]) if keepdims else y
    return apply(name, x, axes=tuple(taken), correction=correction, keepdims=keepdims)


def center(x: Variable, running: Variable, momentum: float = 0.1, training: bool | None = None) -> Variable:
    """x minus its mean over the batch, with a running mean in a buffer.  Without training: x minus the buffer.

    Parameters
    ----------
    x : Variable, shape (B, ...)
    running : buffer (`CalcGraph.buffer`) of the shape of x without its leading axis.  Each training step moves it by
        ``momentum`` towards the mean of its batch.
    training : whether to use the mean of the batch; default: whether the path trains.
    """
    checks.one_of("center", x, Variable, "a variable")
    train = x.graph.active.backward if training is None else checks.flag("center: training", training)
    if train:
        return apply("center", x, running, momentum=checks.number("center: momentum", momentum, 0, 1))
    return apply("sub", x, running)


def layer_norm(
    x: Variable,
    scale: Variable | None = None,
    shift: Variable | None = None,
    normalized_axes: int = 1,
    eps: float = 1e-5,
) -> Variable:
    """(x - mean) / deviation over the last ``normalized_axes`` axes, times scale, plus shift.  Both have the shape of these axes."""
    return apply("layer_norm", x, scale, shift, **_of_last("layer_norm", normalized_axes, eps))


def rms_norm(x: Variable, scale: Variable | None = None, normalized_axes: int = 1, eps: float = 1e-5) -> Variable:
    """x divided by its root mean square over the last ``normalized_axes`` axes, times scale, which has their shape."""
    return apply("rms_norm", x, scale, **_of_last("rms_norm", normalized_axes, eps))


def _of_last(name: str, axes: Any, eps: Any) -> dict[str, Any]:
    axes = checks.integer(f"{name}: normalized_axes", axes, 1, 64)
    return {"axes": axes, "eps": checks.number(f"{name}: eps", eps, 0, 1e30)}


def attention(
    q: Variable,
    k: Variable | None = None,
    v: Variable | None = None,
    *,
    heads: int,
    kv_heads: int | None = None,
    causal: bool = False,
    lengths: Variable | None = None,
    bias: Any = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Variable:
    """softmax(scale * q k^T + bias) v of each head, as linear layers leave q, k and v: heads lie side by side on the last axis.

    The scores are never stored, in the backward either, so that memory is linear in the number of steps.

    Parameters
    ----------
    q : Variable, shape (N, T, heads * d)
        Queries.  Without k and v: all three, shape (N, T, (heads + 2 * kv_heads) * d), first q, then k, then v.
    k, v : Variable, shape (N, S, kv_heads * d)
        Keys and values.
    heads, kv_heads : int
        Heads of queries; of keys and values, if fewer: each serves ``heads / kv_heads`` neighbouring heads of queries.
    causal : bool
        Whether query i sees keys 0 to i alone, also if there are not as many keys as queries (PyTorch's ``is_causal``).
    lengths : Variable, shape (N,), integers from 0 to S
        The keys of each sample, those behind are not seen.  A query that sees no key gives 0, with a gradient of 0.
    bias : Variable or ndarray, shape (T, S), (heads, T, S), (N, heads, T, S) or with 1 in place of N or heads
        Added to the scores; -inf hides a key.  It has no gradient.
    window : int
        With ``causal``: a query sees the last ``window`` keys, its own included.
    softcap : float
        Scores are ``softcap * tanh(score / softcap)`` before the bias is added.
    scale : float
        Positive; default 1 / sqrt(d).

    Raises
    ------
    ShapeError : the shapes do not fit, or a window is given without ``causal``.
    CalcError : the bias is a condition.

    Examples
    --------
    >>> import calcvm as cv
    >>> g = cv.CalcGraph()
    >>> qkv, lengths = g.placeholder("qkv", (None, 10, 3 * 64)), g.placeholder("lengths", (None,), "int64")
    >>> with g.path("look"):
    ...     print(cv.attention(qkv, heads=4, causal=True, lengths=lengths))
    attention_packed (B, 10, 64)

    References
    ----------
    Vaswani et al. 2017.  Online softmax: Milakov and Gimelshein 2018.  Backward: Dao et al. 2022.
    """
    if (k is None) != (v is None):
        raise CalcError("attention: k and v are given both, or neither if q holds all three")
    if str(getattr(bias, "type", getattr(bias, "dtype", ""))) == "bool":
        raise CalcError("attention: the bias is added to scores: for a mask write cv.where(mask, 0.0, -numpy.inf)")
    packed = k is None
    return apply(
        "attention_packed" if packed else "attention", *((q,) if packed else (q, k, v)), lengths, bias, heads=heads,
        kv_heads=kv_heads, causal=causal, window=window, softcap=softcap, scale=scale,
    )  # fmt: skip


def rotary(x: Variable, heads: int, base: float = 10000.0) -> Variable:
    """x with its heads turned by angles that grow with the step, so that products of queries and keys see their distance.

    Element c of the first half of a head and of the second are turned by ``t * base**(-2 c / d)`` at step t.

    Parameters
    ----------
    x : Variable, shape (N, T, heads * d), d even
        Queries or keys of `attention`, T a number.
    heads : int
    base : float

    Raises
    ------
    ShapeError : the shape does not fit.

    Examples
    --------
    >>> import calcvm as cv
    >>> g = cv.CalcGraph()
    >>> q, k, v = (g.placeholder(name, (None, 10, 64)) for name in "qkv")
    >>> with g.path("look"):
    ...     print(cv.attention(cv.rotary(q, heads=4), cv.rotary(k, heads=4), v, heads=4))
    attention (B, 10, 64)

    References
    ----------
    Su et al. 2021, with the halves of a head as in GPT-NeoX and Llama.
    """
    checks.one_of("rotary", x, Variable, "a variable")
    heads, base = checks.integer("rotary: heads", heads), checks.number("rotary: base", base, 0, ends="()")
    if x.rank != 3 or not (x.shape[1].constant and x.shape[2].constant) or x.shape[2].b % (2 * heads):
        raise ShapeError(f"rotary of {x}: it must be (N, T, {heads} heads * an even size), T a number")
    T, half = x.shape[1].b, x.shape[2].b // (2 * heads)
    angles = np.outer(np.arange(T), base ** (-np.arange(half) / half))
    known, name = x.graph.variables, f"{{}}_{T}_{half}_{base:g}"
    tables = [
        known.get(name.format(f)) or x.graph.constant(name.format(f), getattr(np, f)(angles)) for f in ("cos", "sin")
    ]
    return apply("rotary", x, *tables, heads=heads)


def reshape(x: Variable, shape: Sequence[int | None | Affine]) -> Variable:
    """The same elements in another shape: None is the batch, one -1 is inferred.  A view: it costs nothing."""
    if not isinstance(shape, (tuple, list)):
        raise ShapeError(f"reshape: shape {checks.shown(shape)}: give a tuple such as (None, 8), None for the batch")
    sizes = (n if not isinstance(n, Affine) else n.b if n.constant else None if n == BATCH else -1 for n in shape)
    y = apply("reshape", x, shape=tuple(sizes))
    if any(isinstance(n, Affine) and n != m for n, m in zip(shape, y.shape)):
        raise ShapeError(f"reshape: {x} has not the elements of {show(shape_of(tuple(shape)))}")
    return y


def squeeze(x: Variable, axis: int | Sequence[int] | None = None) -> Variable:
    """x without these axes, which have size 1 (default: all that do).  A view: it costs nothing."""
    checks.one_of("squeeze", x, Variable, "a variable")
    ones = [k for k, n in enumerate(x.shape) if n == ONE]
    gone = ones if axis is None else _chosen("squeeze", x, axis, x.rank)
    if not {*gone} <= {*ones}:
        raise ShapeError(f"squeeze of {x}: axis {axis} must have size 1")
    return reshape(x, [n for k, n in enumerate(x.shape) if k not in gone])


def expand_dims(x: Variable, axis: int | Sequence[int]) -> Variable:
    """x with new axes of size 1, at these places of the result.  A view: it costs nothing."""
    checks.one_of("expand_dims", x, Variable, "a variable")
    rank = x.rank + len(_axes("expand_dims: axis", axis))
    new, sizes = _chosen("expand_dims", x, axis, rank), iter(x.shape)
    return reshape(x, [1 if k in new else next(sizes) for k in range(rank)])


def flatten(x: Variable) -> Variable:
    """(B, ...) as (B, n), n the elements per sample.  A view: it costs nothing."""
    return apply("flatten", x)


def stop_gradient(x: Variable) -> Variable:
    """x as a constant for the backward pass: nothing behind it is trained through it.  A view: it costs nothing."""
    return apply("stop_gradient", x)


def carry(state: Variable, new: Variable) -> Variable:
    """Leave ``new`` in a state, for the next call of this path or of another one; returns ``new``.

    The path reads the state as it was before the call, wherever its operators stand.  No gradient goes back to earlier calls.

    Parameters
    ----------
    state : made by `CalcGraph.carry`.
    new : of the same shape and type, computed in this path.

    Raises
    ------
    CalcError, ShapeError : there is no such state, the path updates it already, or ``new`` does not fit.

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x, total = g.placeholder("x", (None, 1)), g.carry("total", (None, 1))
    >>> with g.path("add") as add:
    ...     add.output = cv.carry(total, total + x)
    >>> program = cv.compile(g, batch_size=1)
    >>> model = cv.CalcHeap(program.heap_bytes).create(program)
    >>> for number in (1.0, 2.0, 3.0):
    ...     model["x"] = [[number]]
    ...     model.forward("add")
    >>> model["total"]
    array([[6.]], dtype=float32)
    """
    checks.one_of("carry: state", state, Variable, "a state, made by g.carry(name, shape),")
    state.graph.active.carry(state, new)
    return new


def transpose(x: Variable, axes: Sequence[int] | None = None) -> Variable:
    """x with its axes in another order (default reversed)."""
    if axes is not None:
        rank = x.rank if isinstance(x, Variable) else 0
        axes = tuple(a + rank if -rank <= a < 0 else a for a in _axes("transpose: axes", axes))
    return apply("transpose", x, axes=axes)


def channels_last(x: Variable) -> Variable:
    """x (N, C, *sizes) as (N, *sizes, C), a view if x is stored that way, as the results of convolutions are."""
    return apply("channels_last", x)


def channels_first(x: Variable) -> Variable:
    """x (N, *sizes, C) as images (N, C, *sizes), a view stored channels last.  Custom operators that make such data need it."""
    return apply("channels_first", x)


def concat(variables: Sequence[Variable], axis: int = -1) -> Variable:
    """Join variables along an axis."""
    parts = _listed("concat", variables)
    while len(parts) > 1:  # more than one row can take: join the first ones
        few = parts[:MOST_JOINED]
        name = "concat" if len(few) == 2 else "concat_many"
        missing = [None] * (MOST_JOINED - len(few) if name == "concat_many" else 0)
        parts[: len(few)] = [apply(name, *few, *missing, axis=axis)]
    return parts[0]


def stack(variables: Sequence[Variable], axis: int = 0) -> Variable:
    """Join variables of one shape along a new axis."""
    parts = _listed("stack", variables)
    axis = checks.integer("stack: axis", axis, -1 - parts[0].rank, parts[0].rank)
    return concat([expand_dims(v, axis) for v in parts], axis)


def _listed(name: str, variables: Any) -> list[Variable]:
    if not isinstance(variables, (list, tuple)) or not variables:
        raise ShapeError(f"{name}: give a list of variables to join, such as [a, b], not {checks.shown(variables)}")
    checks.one_of(name, variables[0], Variable, "a list of variables")
    return list(variables)


def split(x: Variable, sections: int | Sequence[int], axis: int) -> list[Variable]:
    """Parts of x along an axis that is not the batch: so many equal ones, or cut before the given places, as in NumPy.

    No part may be without elements, so that PyTorch's list of sizes is refused.
    """
    checks.one_of("split", x, Variable, "a variable")
    (axis,) = _chosen("split", x, checks.integer("split: axis", axis, -64), x.rank)
    n, before = x.shape[axis], (None,) * axis
    if not n.constant:
        raise ShapeError(f"split of {x}: axis {axis} is the batch, which cannot be cut")
    if checks.is_integer(sections):
        size, rest = divmod(n.b, checks.integer("split: sections", sections))
        if rest or not size:
            raise ShapeError(f"split of {x}: the {n.b} elements of axis {axis} do not make {sections} equal parts")
        sections = range(size, n.b, size)
    given = checks.items("split: sections", sections, "a number of parts, or a list of places,")
    cuts = [0, *(checks.integer("split: sections", at, 0, n.b) for at in given), n.b]
    if not all(start < stop for start, stop in pairwise(cuts)):
        sizes = [*accumulate(cuts[1:-1])]
        instead = f": for parts of these sizes write {sizes[:-1]}" if sizes[-1:] == [n.b] and 0 not in given else ""
        raise ShapeError(
            f"split of {x}: {cuts[1:-1]} are places of cuts, not sizes, and leave a part without elements{instead}"
        )
    return [slice(x, (*before, start), (*before, stop)) for start, stop in pairwise(cuts)]


def dropout(x: Variable, rate: float = 0.5) -> Variable:
    """Zero each element with probability ``rate`` and scale the others by 1 / (1 - rate).

    The mask is a function of the model's seed, the step and the element.  It is not stored.
    """
    return _drawn("dropout", "dropout", x, rate)


def dropout2d(x: Variable, rate: float = 0.5) -> Variable:
    """Zero each channel of each sample of x (N, C, *sizes) with probability ``rate``, and scale the others by 1 / (1 - rate).

    The mask has one number per sample and channel, a function of the model's seed, the step and the position.
    """
    return x * _drawn("dropout2d", "dropout_mask", x, rate)


def _drawn(what: str, op: str, x: Variable, rate: float) -> Variable:
    """An operator that drops with a probability, which is stored in the heap."""
    checks.one_of(what, x, Variable, "a variable")
    rate = checks.number(f"{what} of {x}: rate", rate, 0, 1, ends="[)")
    g, _ = x.graph, x.graph.active  # raises before anything is added if no path is open
    with g.drawing() as (rng, stream):
        name = g.unique(what)
        state = g.state(f"{name}.rate", 1, "float64", {"kind": "float64", "value": rate})
        y = apply(op, x, rng, state, out=name, stream=stream)
    y.unnamed = True
    return y


def pick(x: Variable, index: Variable, axis: int = -1) -> Variable:
    """One element per row, ``x[..., index]``: x (..., N), index (...) of integers in [0, N), which has the shape of x without the axis.

    x has one row per index, with the batch first.  For rows of a table take `embedding`, for several per row `take_along_axis`.
    """
    checks.one_of("pick", x, Variable, "a variable")
    axis = checks.integer(f"pick of {x}: axis", axis, -1 - x.rank, x.rank)
    if axis in (-1, x.rank - 1):
        return apply("pick", x, index)
    return squeeze(apply("take_along_axis", x, expand_dims(index, axis % x.rank), axis=axis), axis)


def slice(x: Variable, starts: Sequence[int | None], stops: Sequence[int | None]) -> Variable:  # noqa: A001
    """``x[starts[0]:stops[0], ...]``, also written as Python slices; None: from the start, to the end."""
    for what, bounds in (("starts", starts), ("stops", stops)):
        if not isinstance(bounds, (tuple, list)):
            raise ShapeError(f"slice: {what} {checks.shown(bounds)}: give a tuple with a bound for each axis")
    return apply("slice", x, starts=tuple(starts), stops=tuple(stops))


def softmax_cross_entropy(
    logits: Variable,
    target: Variable,
    label_smoothing: float = 0.0,
    axis: int | None = None,
    ignore_index: int | None = None,
) -> Variable:
    """Mean cross entropy of softmax(logits) (B, N) against labels (B,) or probabilities (B, N).

    axis : of the classes, the last or 1.  Default: 1 for images, as convolutions return them, else the last.  Logits
        (B, N, *sizes) take labels (B, *sizes), one per pixel.
    ignore_index : the label, in [0, N) or not, of rows to ignore.  They do not affect the loss or its gradients, whatever
        their logits are.  The mean is over the other rows.  Without any, loss and gradients are 0 (PyTorch gives NaN).
    """
    if isinstance(logits, Variable) and logits.rank and logits.shape[class_axis(logits, axis)] == 1:
        raise ShapeError(
            f"softmax_cross_entropy of {logits}: the softmax of a single output is 1 and its loss 0, whatever it is: use one output "
            "per class (nn.Flatten() after pools), or binary_cross_entropy"
        )
    smoothing = checks.number("softmax_cross_entropy: label_smoothing", label_smoothing, 0, 1, ends="[)")
    if ignore_index is None:
        return apply("softmax_cross_entropy", *_classes_last(logits, target, axis), label_smoothing=smoothing)
    logits, label, counts = counting("softmax_cross_entropy", logits, target, axis, ignore_index, 0)
    loss = apply("softmax_cross_entropy", logits, label)
    if smoothing:
        n = logits.shape[-1].b
        uniform = apply("where", counts, np.full(n, 1 / n), 0.0)  # ignored rows get 0, which makes their loss 0
        loss = (1 - smoothing) * loss + smoothing * apply("softmax_cross_entropy", logits, uniform)
    return loss / share_of(counts)


def binary_cross_entropy(logits: Variable, target: Variable) -> Variable:
    """Mean cross entropy of sigmoid(logits) against targets in [0, 1] of the same shape."""
    return apply("binary_cross_entropy", logits, target)


def mse(x: Variable, target: Variable) -> Variable:
    """Mean squared error."""
    return apply("mse", x, target)


def mae(x: Variable, target: Variable) -> Variable:
    """Mean absolute error."""
    return apply("mae", x, target)


def huber(x: Variable, target: Variable, delta: float = 1.0) -> Variable:
    """Mean Huber loss: a parabola within ``delta``, a line beyond."""
    return apply("huber", x, target, delta=delta)


def log_cosh(x: Variable, target: Variable) -> Variable:
    """Mean of log(cosh(x - target)): a parabola near 0, a line far from it."""
    return apply("log_cosh", x, target)


def rmse(x: Variable, target: Variable) -> Variable:
    """Root of the mean squared error."""
    return sqrt(mse(x, target))


def accuracy(scores: Variable, target: Variable, axis: int | None = None, ignore_index: int | None = None) -> Variable:
    """Share of rows whose largest score is the target's class: labels (B,) or one-hot (B, N).

    axis, ignore_index : as in `softmax_cross_entropy`.

    Raises
    ------
    ShapeError : there is only one class, which always has the largest score.
    """
    if isinstance(scores, Variable) and scores.rank and scores.shape[class_axis(scores, axis)] == 1:
        raise ShapeError(
            f"accuracy of {scores}: a single score is always the largest: compare it, as in "
            "cv.mean(cv.cast(cv.equal(scores > 0, target > 0.5), None)), or use one output per class"
        )
    if ignore_index is None:
        return apply("accuracy", *_classes_last(scores, target, axis))
    scores, label, counts = counting("accuracy", scores, target, axis, ignore_index, -1)  # ignored rows predict class 0
    return apply("accuracy", scores, label) / share_of(counts)


def counting(
    what: str, scores: Variable, target: Variable, axis: int | None, ignore_index: int, instead: int
) -> tuple[Variable, Variable, Variable]:
    """Scores with the classes last, labels, and whether each row counts, shape (..., 1).

    An ignored row gets the scores 0, -inf, -inf, ... and the label ``instead``.  With label 0 its cross entropy and gradients are 0.
    """
    ignored = checks.integer(f"{what}: ignore_index", ignore_index, -(2**63))
    for v in (scores, target):
        checks.one_of(what, v, Variable, "a variable")
    scores, target = _classes_last(scores, target, axis)
    if target.shape == scores.shape:
        raise ShapeError(f"{what}: ignore_index needs labels, and {target} has one number per class of {scores}")
    if target.type != FLOAT:
        as_type(f"{what}: ignore_index of labels {target}", np.array(ignored), target.type)
    counts, n = not_equal(target, ignored), scores.shape[-1].b
    label = where(counts, target, range(n)[instead])
    label.rename(label.graph.unique(f"{target.name}.counted")).unnamed = True  # named for messages
    if target.rank < scores.rank:
        counts = reshape(counts, (*counts.descriptor.generic, 1))
    return apply("where", counts, scores, np.array([0.0] + [-np.inf] * (n - 1))), label, counts


def share_of(counts: Variable) -> Variable:
    """The share of rows that count, or 1 if none does: a divisor for sums that are then 0."""
    share = mean(cast(counts, None))
    some = apply("greater", share, 0.0, out=share.graph.unique("ignore_index"))  # named for messages
    some.unnamed = True
    return where(some, share, 1.0)


def steps_there(x: Variable, terms: Variable) -> Variable:
    """Whether the steps of terms (N, T, ...) are within the lengths of the sequences x."""
    assert x.lengths is not None
    steps = x.shape[1].b
    there = apply("greater", reshape(x.lengths, (None, 1)), np.arange(steps)[None])
    return reshape(there, (None, steps, *[1] * (terms.rank - 2)))


def class_axis(scores: Variable, axis: int | None = None) -> int:
    """The axis of the classes, 1 or -1; the default is 1 for images, as convolutions return them, else -1.

    ShapeError : an axis is neither, or is not given and unclear, since operators moved the axes of images.
    """
    what, last = f"classes of {scores}: axis", scores.rank - 1
    if axis is None and last > 1 and (axis := _channels_of(scores)) is None:
        raise ShapeError(
            f"{what} 1 or -1? It is made of images whose axes were moved: give one, as in softmax(x, axis=1), or for a model "
            "loss=lambda output, target: cv.softmax_cross_entropy(output, target, axis=1), target_shape=..."
        )
    given = last if axis is None else checks.integer(what, axis, -1 - last, last) % (last + 1)
    if given not in (1, last):
        raise ShapeError(f"{what} {axis} is neither 1 nor the last: transpose first")
    return -1 if given == last else 1


def _channels_of(x: Variable) -> int | None:
    """The axis of a variable's channels: 1 or -1 (None: unclear).  Images have it on axis 1, and what `linear` makes on the last."""
    if x.layout:
        return 1
    found: dict[Variable, int | None] = {}  # of what is made of images
    for op in (op for path in x.graph.paths.values() for op in path.operations):
        name, made = op.spec.name, op.outputs.values()
        images = [v for v in op.inputs.values() if isinstance(v, Variable) and (v.layout or v in found)]
        for y in made if images else ():
            seen = {1 if v.layout else found[v] for v in images if v.rank == y.rank}
            moved = op.spec.category == EQUATION or name in ("reshape", "transpose") and not images[0].layout
            if y.layout:
                found[y] = 1
            elif name in ("linear", "matmul", "channels_last"):
                found[y] = -1
            else:
                found[y] = seen.pop() if len(seen) == 1 and not moved else None
    return found.get(x, -1)


def _classes_last(scores: Any, target: Any, axis: int | None) -> tuple[Any, Any]:
    """Scores with the classes on the last axis, and the target.  One number per class becomes floats, in the same order."""
    if not isinstance(scores, Variable) or not scores.rank:
        return scores, target
    turned = class_axis(scores, axis) == 1
    if isinstance(target, Variable) and target.shape == scores.shape:
        target = cast(target, None)
        target = channels_last(target) if turned else target
    return (channels_last(scores) if turned else scores), target


_METHODS = (sum, mean, max, min, var, std, cumsum, flatten, cast)  # graph.py names their types
for _name, _function in zip("sum mean max min var std cumsum flatten astype".split(), _METHODS):
    setattr(Variable, _name, _function)
LATER |= {"reshape": reshape, "transpose": transpose}
