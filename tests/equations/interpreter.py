"""The language of equations, computed a number at a time by loops: the definition, which shares no code with `calcvm.equations.meaning`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from calcvm.equations.tree import Call, Element, Equation, Name, Node, Number, Reduction

BEYOND = object()  # a place that does not divide


def _divided(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1, b)


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf if x == 0 else math.nan


def _power(a: float, b: float) -> float:
    if a == 0 and b < 0:
        return math.inf
    out = a**b
    return math.nan if isinstance(out, complex) else out


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _divided,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "^": _power,
    "neg": lambda a: -a,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "not": lambda a: not a,
    "max": lambda a, b: a if a >= b else b,
    "min": lambda a, b: a if a <= b else b,
    "stop": lambda a: a,
    "abs": abs,
    "sign": lambda a: (a > 0) - (a < 0),
    "rint": round,
    "log": _log,
    "log1p": lambda a: _log(1 + a) if abs(a) > 1e-3 else math.log1p(a),
    "sqrt": lambda a: math.sqrt(a) if a >= 0 else math.nan,
    "sigmoid": lambda a: 1 / (1 + math.exp(-a)) if a > -700 else 0.0,
    "relu": lambda a: a if a > 0 else 0,
    "logaddexp": np.logaddexp,
    "softplus": lambda a: max(a, 0) + math.log1p(math.exp(-abs(a))),
} | {f: getattr(math, f) for f in "exp expm1 floor ceil sin cos tan asin acos atan sinh cosh tanh erf".split()}


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _log_sum_exp(values: list[float]) -> float:
    most = max(values)
    return most if math.isinf(most) else most + math.log(math.fsum(math.exp(v - most) for v in values))


REDUCTIONS: dict[str, Callable[[list], Any]] = {
    "sum": lambda v: sum(v) if all(isinstance(x, int) for x in v) else float(np.sum(np.array(v, float))),
    "prod": math.prod,
    "max": max,
    "min": min,
    "mean": _mean,
    "var": lambda v: _mean([(x - _mean(v)) ** 2 for x in v]),
    "logsumexp": _log_sum_exp,
    "argmax": lambda v: v.index(max(v)),
    "argmin": lambda v: v.index(min(v)),
    "any": any,
    "all": all,
}


def interpret(
    equations: Sequence[Equation], values: Mapping[str, Any], extents: Mapping[str, int], sizes: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Results by name.  extents : of all indexes.  sizes : numbers of other names."""
    known = {name: np.asarray(value) for name, value in values.items()}
    made = {}
    for equation in equations:
        assert equation.kept is not None or not any(known[n].ndim for n in known if _reads(equation.value, n))
        axes = [i.name for i in equation.kept or ()]
        out = np.zeros([extents[v] for v in axes])
        if equation.name not in known:  # or it reads what was there
            known[equation.name] = out
        values = []
        orders = [_order(equation, v, k, extents[v]) for k, v in enumerate(axes)]
        for at in itertools.product(*orders):
            values.append(_Value(known, extents, {**sizes, **dict(zip(axes, at))}).of(equation.value))
            out[at] = values[-1]
        if all(isinstance(value, int) for value in values):
            out = out.astype(int)  # which may be places
        made[equation.name] = known[equation.name] = out
    return made


def _reads(node: Node, name: str) -> bool:
    if isinstance(node, Name):
        return node.name == name
    below = node.arguments if isinstance(node, Call) else (node.body,) if isinstance(node, Reduction) else ()
    return any(_reads(part, name) for part in below)


def _order(equation: Equation, index: str, k: int, n: int) -> Sequence[int]:
    """Backwards along an axis where it reads its own result at places behind."""
    todo: list[Node] = [equation.value]
    while todo:
        node = todo.pop()
        if isinstance(node, Element):
            if node.array == equation.name and _Value({}, {}, {index: 0}).behind(node.places[k]):
                return range(n)[::-1]
            todo += node.places
        else:
            todo += node.arguments if isinstance(node, Call) else [node.body] if isinstance(node, Reduction) else []
    return range(n)


class _Value:
    def __init__(self, known: Mapping[str, np.ndarray], extents: Mapping[str, int], at: Mapping[str, Any]):
        self.known, self.extents, self.at = known, extents, at

    def behind(self, place: Node) -> bool:
        return isinstance(place, Call) and self.of(place) > 0

    def of(self, node: Node) -> Any:
        if isinstance(node, Number):
            return node.value
        if isinstance(node, Name):
            return self.at[node.name] if node.name in self.at else self.known[node.name].item()
        if isinstance(node, Element):
            places = [self.place(place) for place in node.places]
            array = self.known[node.array]
            inside = all(p is not BEYOND and 0 <= p < n for p, n in zip(places, array.shape))
            return array[tuple(places)].item() if inside else node.beyond
        if isinstance(node, Reduction):
            names = [i.name for i in node.indexes]
            tuples = itertools.product(*[range(self.extents[v]) for v in names])
            each = [_Value(self.known, self.extents, {**self.at, **dict(zip(names, t))}).of(node.body) for t in tuples]
            return REDUCTIONS[node.how](each)
        assert isinstance(node, Call)
        a = node.arguments
        if node.function == "where":
            return self.of(a[1]) if self.of(a[0]) else self.of(a[2])
        if node.function == "and":
            return self.of(a[0]) and self.of(a[1])
        if node.function == "or":
            return self.of(a[0]) or self.of(a[1])
        return FUNCTIONS[node.function](*[self.of(argument) for argument in a])

    def place(self, node: Node) -> Any:
        if isinstance(node, Call) and node.function == "/":
            above, below = map(self.of, node.arguments)
            return BEYOND if above % below else int(above // below)
        return int(self.of(node))  # beyond the ends of integers lies 0.0
