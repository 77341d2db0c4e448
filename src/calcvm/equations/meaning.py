"""The meaning of equations: their values in float64, by NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from calcvm.equations.places import size
from calcvm.equations.ranges import Ranges, ranges
from calcvm.equations.tree import Call, Element, Equation, Name, Node, Number, Reduction, own_elements
from calcvm.formulas import functions as formulas

Array = np.ndarray
Function = Callable[..., Any]


def _power(x: Any, y: Any) -> Any:
    return np.power(np.asarray(x, np.float64), y)


def _quotient(a: Any, b: Any) -> Any:
    """The quotient rounded down; for floats it is computed in floating point first."""
    whole = all(np.asarray(x).dtype.kind in "iub" for x in (a, b))
    return np.floor_divide(a, b) if whole else np.floor(np.true_divide(a, b))


def _sigmoid(x: Any) -> Any:
    e = np.exp(-np.abs(x))
    return np.where(np.asarray(x) < 0, e, 1) / (1 + e)


def _log_add_exp(a: Any, b: Any) -> Any:
    least, most = np.minimum(a, b), np.maximum(a, b)
    return most + np.log1p(np.exp(np.where(least == most, 0, least - most)))


def _log_sum_exp(x: Array, axis: tuple[int, ...]) -> Array:
    most = x.max(axis, keepdims=True)
    most = np.where(np.isfinite(most), most, 0)
    return np.squeeze(most, axis) + np.log(np.exp(x - most).sum(axis))


FUNCTIONS: dict[str, Function] = {
    f.equation: getattr(np, f.numpy.removeprefix("np.").removesuffix("({})"))
    for f in formulas.FUNCTIONS.values()
    if f.derivative and f.numpy.startswith("np.") and f.numpy.endswith("({})")
}
FUNCTIONS |= {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.true_divide,
    "//": _quotient,
    "%": np.mod,
    "^": _power,
    "neg": np.negative,
    "==": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "where": np.where,
    "max": np.maximum,
    "min": np.minimum,
    "stop": lambda x: x,
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "sigmoid": _sigmoid,
    "float32": lambda x: np.asarray(x, np.float32).astype(np.float64),
    "relu": lambda x: np.maximum(x, 0),
    "softplus": lambda x: np.logaddexp(0, x),
    "logaddexp": _log_add_exp,
}
REDUCE: dict[str, Function] = {"logsumexp": _log_sum_exp} | {
    how: getattr(np, how) for how in ("sum", "prod", "max", "min", "mean", "var", "any", "all")
}


def evaluate(
    equations: Sequence[Equation],
    values: Mapping[str, Any],
    parameters: Mapping[str, Any] | None = None,
    functions: Mapping[str, Function] | None = None,
) -> dict[str, Array]:
    """The results of checked equations, by name.

    Parameters
    ----------
    values : arrays of the operands, in the shapes that the equations read; floats are converted to float64, integers to int64.
    parameters : numbers by name.
    functions : further functions of arrays, by name.

    Raises
    ------
    ShapeError : the ranges of indexes do not fit; see `calcvm.equations.ranges`.
    """
    given = {name: _as_computed(value) for name, value in values.items()}
    numbers = dict(parameters or {})
    whole = {k: v for k, v in numbers.items() if not isinstance(v, float)}
    found = ranges(equations, {name: value.shape for name, value in given.items()}, whole)
    meaning = _Meaning(found, given, numbers, {**FUNCTIONS, **(functions or {})})
    with np.errstate(all="ignore"):
        return {equation.name: meaning.result(equation) for equation in equations}


def _as_computed(value: Any) -> Array:
    array = np.asanyarray(value)
    return array if array.dtype.kind == "b" else array.astype(np.float64 if array.dtype.kind == "f" else np.int64)


class _Meaning:
    def __init__(
        self, found: Ranges, values: dict[str, Array], numbers: dict[str, Any], functions: Mapping[str, Function]
    ):
        self.extents, self.sizes = found.extents, {**found.sizes, **numbers}
        self.values, self.functions = values, functions
        self.at: dict[str, int] = {}  # the current places of scans' indexes

    def result(self, equation: Equation) -> Array:
        axes = tuple(i.name for i in equation.kept or ())
        if equation.name not in self.values and (own := own_elements(equation)):
            value = self.scan(equation, own, axes)
        elif equation.kept is None:
            value = np.array(self.of(equation.value, ()))
        else:
            shape = tuple(self.extents[v] for v in axes)
            value = np.broadcast_to(np.asarray(self.of(equation.value, axes)), shape).copy()
        self.values[equation.name] = value
        return value

    def scan(self, equation: Equation, own: list[Element], axes: tuple[str, ...]) -> Array:
        """A scan: an equation that reads its own result at places before (or after) along one index."""
        (along,) = {v for n in own for v, place in zip(axes, n.places) if place != Name(v)}
        out = self.values[equation.name] = np.zeros(tuple(self.extents[v] for v in axes))
        k = axes.index(along)
        rest = axes[:k] + axes[k + 1 :]
        forward = any(size(n.places[k], {along: 0}) < 0 for n in own)
        for at in range(self.extents[along]) if forward else reversed(range(self.extents[along])):
            self.at[along] = at
            out[(slice(None),) * k + (at,)] = self.of(equation.value, rest)
        del self.at[along], self.values[equation.name]
        return out

    # ------------------------------------------------------------ nodes
    def of(self, node: Node, axes: tuple[str, ...]) -> Any:
        """A value that broadcasts to the extents of ``axes``."""
        if isinstance(node, Number):
            return node.value
        if isinstance(node, Name):
            return self.named(node.name, axes)
        if isinstance(node, Element):
            return self.element(node, axes)
        if isinstance(node, Reduction):
            return self.reduction(node, axes)
        assert isinstance(node, Call)
        return self.functions[node.function](*[self.of(argument, axes) for argument in node.arguments])

    def named(self, name: str, axes: tuple[str, ...]) -> Any:
        if name in self.at:
            return self.at[name]
        if name in axes:
            return np.arange(self.extents[name]).reshape([-1 if v == name else 1 for v in axes])
        return self.values[name] if name in self.values else self.sizes[name]

    def element(self, node: Element, axes: tuple[str, ...]) -> Any:
        x = self.values[node.array]
        names = [place.name if isinstance(place, Name) else "" for place in node.places]
        plain = all(v in axes and self.extents[v] == n for v, n in zip(names, x.shape)) and len({*names}) == len(names)
        if plain:
            order = sorted(range(len(names)), key=lambda k: axes.index(names[k]))
            return x.transpose(order).reshape([self.extents[v] if v in names else 1 for v in axes])
        at, inside = [], np.array(True)
        for place, n in zip(node.places, x.shape):
            where, exact = self.place(place, axes)
            inside = inside & exact & (where >= 0) & (where < n)
            at.append(np.clip(where, 0, max(n - 1, 0)))
        whole = x.dtype.kind in "iu" and node.beyond.is_integer()  # a float cannot hold all 64-bit integers
        beyond = np.int64(node.beyond) if whole else node.beyond
        if 0 in x.shape:
            return np.full(inside.shape, beyond)
        found = x[tuple(np.broadcast_arrays(*at))]
        return found if inside.all() else np.where(inside, found, beyond)

    def place(self, node: Node, axes: tuple[str, ...]) -> tuple[Array, Array]:
        """A place, and whether it exists: a division must leave no remainder."""
        if isinstance(node, Call) and node.function == "/":
            (above, exact), (below, _) = (self.place(argument, axes) for argument in node.arguments)
            return above // below, exact & (above % below == 0)
        return np.asarray(self.of(node, axes)).astype(np.int64), np.array(True)

    def reduction(self, node: Reduction, axes: tuple[str, ...]) -> Any:
        over = tuple(i.name for i in node.indexes)
        inner = axes + over
        if node.how == "sum" and len(factors := _factors(node.body)) > 1:
            return self.contracted(factors, axes, over)
        x = np.asarray(self.of(node.body, inner))
        x = x.reshape((1,) * (len(inner) - x.ndim) + x.shape)
        x = np.broadcast_to(x, x.shape[: len(axes)] + tuple(self.extents[v] for v in over))
        where = tuple(range(len(axes), len(inner)))
        if node.how in ("argmax", "argmin"):  # the first of equals, in the order of all indexes
            return getattr(np, node.how)(x.reshape(*x.shape[: len(axes)], -1), -1)
        return REDUCE[node.how](x, axis=where)

    def contracted(self, factors: list[Node], axes: tuple[str, ...], over: tuple[str, ...]) -> Array:
        """A sum of products, without an intermediate array over all indexes."""
        inner = axes + over
        operands: list[Any] = []
        used: set[int] = set()
        for factor in factors:
            x = np.asarray(self.of(factor, inner), np.float64)
            x = x.reshape((1,) * (len(inner) - x.ndim) + x.shape)
            wide = [k for k in range(x.ndim) if x.shape[k] != 1]
            operands += [x.reshape([x.shape[k] for k in wide]), wide]
            used |= {*wide}
        kept = [k for k in range(len(axes)) if k in used]
        out = np.einsum(*operands, kept, optimize=len(factors) > 2)
        alone = math.prod(self.extents[v] for k, v in enumerate(inner) if k >= len(axes) and k not in used)
        return alone * out.reshape([self.extents[v] if k in kept else 1 for k, v in enumerate(axes)])


def _factors(node: Node) -> list[Node]:
    if isinstance(node, Call) and node.function == "*":
        return [*_factors(node.arguments[0]), *_factors(node.arguments[1])]
    return [node]
