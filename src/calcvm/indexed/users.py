"""The functions that users call: equations as texts on variables of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np

from calcvm import checks
from calcvm.equations.check import check, check_places
from calcvm.equations.functions import ARGUMENTS
from calcvm.equations.grammar import NAME, WORDS, read, wrong
from calcvm.equations.kinds import CONDITION, INTEGER, NUMBER
from calcvm.equations.ranges import ranges
from calcvm.equations.tree import REDUCTIONS, Element, Equation, Name, Node, arrays, bound, names, walk
from calcvm.errors import CalcError, ShapeError, UnsupportedOperator
from calcvm.graph import CalcGraph, Variable, as_numbers
from calcvm.indexed.lowering import Lowering, functions
from calcvm.indexed.products import varies
from calcvm.indexed.tracing import Index, Kept, Traced, traced_equation
from calcvm.indexed.values import size_of
from calcvm.ops.dims import show
from calcvm.ops.types import RANKS


class Equations:
    """``cv.equation``: adds operators to the active path, as index equations state them."""

    @overload
    def __call__(
        self, text: str, /, results: None | str = None, fused: bool | None = None, **operands: Any
    ) -> Variable: ...
    @overload
    def __call__(
        self, text: str, /, results: Sequence[str], fused: bool | None = None, **operands: Any
    ) -> tuple[Variable, ...]: ...
    def __call__(self, text: str, /, results: Any = None, fused: Any = None, **operands: Any) -> Any:
        """The results of equations such as ``y[b,o] = sum[i] x[b,i]*w[i,o] + v[o]``; ";" separates several.

        Sums of products become rows of matrix products or of convolution, windows become rows of pooling, softmax its row.  Everything
        else becomes elementwise operators and reductions, or rows compiled from the equation.  Equal parts are computed once.

        Parameters
        ----------
        text : equations; those before the last one are parts, which it may read.  docs/equations.md describes the language.
        results : the name of the result to return, or several names, which return a tuple.  Default: the last one.
        fused : whether parts other than such products become separate rows, compiled for the equation.  None: if operators
            would write large intermediate arrays, or cannot compute the part; True: always; False: never.
        operands : the variables, arrays or numbers that the equations read, by name; integers may be sizes (``t<K``).

        Raises
        ------
        ShapeError : axes and indexes do not fit; a caret shows where.
        UnsupportedOperator : no row computes a part of it yet; the message names the part and an alternative.
        CalcError : the text is not an equation, or an operand is missing, is never read, or is invalid.

        Examples
        --------
        >>> import calcvm as cv
        >>> g = cv.CalcGraph()
        >>> x, w = g.placeholder("x", (None, 4)), g.parameter("w", (4, 3))
        >>> with g.path("forward"):
        ...     y = cv.equation("y[b,o] = sum[i] x[b,i]*w[i,o]", x=x, w=w)
        >>> print(y)
        y (B, 3)
        """
        if results is not None and not isinstance(results, (str, list, tuple)):  # an operand of this name
            operands["results"], results = results, None
        if not isinstance(fused, (bool, type(None))):  # likewise
            operands["fused"], fused = fused, None
        return built("equation", text, results, operands, fused)

    def __getitem__(self, indexes: Any) -> Kept:
        """``cv.equation[b, o](cv.sum(i, x[b, i]*w[i, o]))``: the same, with indexes from `indexes`."""
        return Kept(indexes if isinstance(indexes, tuple) else (indexes,), _of_traced)

    @staticmethod
    def reduce(how: str, index: Any, value: Any) -> Any:
        """Any reduction of a traced equation by name, such as ``cv.equation.reduce("logsumexp", k, x[r, k])``."""
        checks.choice("equation.reduce: how", how, REDUCTIONS)
        if not isinstance(value, Traced):
            raise CalcError(
                f"equation.reduce: {how} takes elements such as x[r, k], at indexes that cv.indexes makes, not {checks.called(value)}"
            )
        return value._reduced(how, index)

    def __repr__(self) -> str:
        return "cv.equation"


def _of_traced(kept: Sequence[Index], value: Any) -> Variable:
    text, operands = traced_equation(kept, value)
    return built("equation", text, None, operands)


def built(what: str, text: str, results: Any, given: Mapping[str, Any], fused: bool | None = None) -> Any:
    """Results of equations as variables of the active path; on an error nothing is added."""
    equations = _within(what, lambda: read(text))
    graph = _graph(what, given)
    with graph.whole():
        return _within(what, lambda: _built(graph, equations, results, given, fused))


def _within(what: str, make: Any) -> Any:
    try:
        return make()
    except CalcError as error:
        if not str(error).startswith(f"{what}: "):
            error.args = (f"{what}: {error}", *error.args[1:])
        raise


def _graph(what: str, given: Mapping[str, Any]) -> CalcGraph:
    graphs = {id(v.graph): v.graph for v in given.values() if isinstance(v, Variable)}
    if len(graphs) != 1:
        why = "is a variable of a graph: give at least one" if not graphs else "may be of another graph than the others"
        raise CalcError(f"{what}: {'no' if len(graphs) > 1 else 'none of the'} operand{'s' * (not graphs)} {why}")
    (graph,) = graphs.values()
    _ = graph.active  # a path must be open before anything is added
    return graph


def _built(
    graph: CalcGraph, equations: Sequence[Equation], results: Any, given: Mapping[str, Any], fused: bool | None
) -> Any:
    text = equations[0].text
    wanted = _results(equations, results)
    operands, parameters = _operands(graph, given)
    for equation in equations:
        _of_rows(equation, {*operands, *parameters}, [e.name for e in equations])
    kinds = {name: _kind(v) for name, v in operands.items()}
    check_places(equations, parameters)
    check(
        equations,
        kinds,
        {name: INTEGER if isinstance(n, int) else NUMBER for name, n in parameters.items()},
        {**ARGUMENTS, **functions()},
    )
    _all_read(text, equations, wanted, given)
    shapes = {name: tuple(map(size_of, v.shape)) for name, v in operands.items()}
    _batch_in_places(equations, shapes)
    found = ranges(equations, shapes, {name: n for name, n in parameters.items() if isinstance(n, int)})
    for e in equations:
        for i in bound(e):
            if not varies(n := found.extents[i.name]) and n < 1:
                raise wrong(
                    e.text, i.at, f"the index {i.name} runs over {n} places: at least one is needed", ShapeError
                )
    _batch_in_ranges(equations, found.extents, found.shapes)
    variables = {
        name: v if isinstance(v, Variable) else graph.constant(graph.unique(name), v, _type(v))
        for name, v in operands.items()
    }
    for name, v in variables.items():
        v.unnamed = v.unnamed or v is not operands[name]
    lowering = Lowering(graph, equations, variables, parameters, found, fused)
    before = len(graph.active.operations)
    made = {name: lowering.result(name) for name in wanted}
    new = {id(v) for op in graph.active.operations[before:] for v in op.outputs.values()}
    for name, v in made.items():
        if id(v) in new and v.unnamed:
            v.rename(graph.unique(name)).unnamed = True
    return made[wanted[0]] if results is None or isinstance(results, str) else tuple(made[name] for name in wanted)


# ---------------------------------------------------------------- arguments
def _results(equations: Sequence[Equation], results: Any) -> list[str]:
    known = [e.name for e in equations]
    wanted = [known[-1]] if results is None else [results] if isinstance(results, str) else [*results]
    for name in wanted:
        if name not in known:
            raise CalcError(f"results: there is no equation of {checks.shown(name)}; there are {', '.join(known)}")
    if not wanted:
        raise CalcError("results: no name is given: leave it out to get the last one")
    return wanted


def _operands(graph: CalcGraph, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int | float]]:
    """Variables and arrays, and numbers, by name."""
    operands: dict[str, Any] = {}
    parameters: dict[str, int | float] = {}
    for name, value in given.items():
        if name in WORDS or name in REDUCTIONS or not NAME.fullmatch(name):
            raise CalcError(f"the operand {name!r} needs another name: this is a word of the language, or not a name")
        if isinstance(value, Traced):
            raise CalcError(
                f"the operand {name} is an expression of indexes: give the variable, and write its places in the text"
            )
        if isinstance(value, Variable):
            operands[name] = value
        elif isinstance(value, (bool, np.bool_)):
            raise CalcError(f"the operand {name} is {value}: give a variable, an array or a number")
        elif checks.is_integer(value):
            parameters[name] = int(checks.plain(value))
        elif checks.is_number(value):
            parameters[name] = float(checks.number(f"the operand {name}", value))
        else:
            array = as_numbers(f"the operand {name}", value)
            if not array.ndim:
                parameters[name] = array.item()
            else:
                operands[name] = array
    return operands, parameters


def _kind(v: Any) -> str:
    if isinstance(v, Variable):
        return CONDITION if v.type == "bool" else INTEGER if v.type in RANKS else NUMBER
    return {"b": CONDITION, "f": NUMBER}.get(v.dtype.kind, INTEGER)


def _type(v: Any) -> Any:
    return {"b": "bool", "f": None}.get(v.dtype.kind, "int64")


# ---------------------------------------------------------------- checks before sizes are known
def _of_rows(equation: Equation, given: set[str], known: Sequence[str]) -> None:
    def refused(what: str, at: int = equation.at, error: type[CalcError] = CalcError) -> CalcError:
        return wrong(equation.text, at, what, error)

    if equation.name in given:
        raise refused(f"{equation.name} is an operand, and a variable is not written to: give the result another name")
    if known.count(equation.name) > 1:
        raise refused(f"{equation.name} is set by several equations: give each its own name")
    for index in bound(equation):
        if index.name in known:
            raise refused(f"{index.name} is the name of a result: name the index otherwise", index.at)
    if Name(equation.name) in walk(equation.value):
        raise refused(
            f"{equation.name} is read by its own equation as a whole array: a scan reads elements, such as {equation.name}[r,i - 1]",
            error=UnsupportedOperator,
        )


def _all_read(text: str, equations: Sequence[Equation], wanted: Sequence[str], given: Mapping[str, Any]) -> None:
    """Reject operands and results that nothing reads."""
    read_: set[str] = set()
    for e in equations:
        extents = [i.extent for i in e.kept or () if i.extent is not None]
        nodes = [e.value, *extents, *(i.extent for n in walk(e.value) for i in getattr(n, "indexes", ()) if i.extent)]
        for node in nodes:
            inside = (part for n in walk(node) for part in (n.places if isinstance(n, Element) else ()))
            read_ |= {*arrays(node), *names(node)}.union(*map(names, inside))
    if "results" in given and "results" not in read_:
        what = "results: the name of a result, or a list of names, is wanted"
        raise CalcError(f"{what}, not {checks.shown(given['results'])}")
    if "fused" in given and "fused" not in read_:
        raise CalcError(f"fused: True, False or None is wanted, not {checks.shown(given['fused'])}")
    for name in given:
        if name not in read_:
            raise CalcError(f"the operand {name} is never read: leave it out, or read it, in the equation {text!r}")
    for e in equations:
        if e.name not in read_ and e.name not in wanted:
            raise wrong(text, e.at, f"{e.name} is never read: leave it out, or name it in results")


def _direct(place: Node) -> list[Name]:
    """The names in a place itself, not in arrays that it depends on."""
    if isinstance(place, Name):
        return [place]
    return [n for part in getattr(place, "arguments", ()) for n in _direct(part)]


def _batch_in_places(equations: Sequence[Equation], shapes: Mapping[str, tuple]) -> None:
    """Reject windows along the batch."""
    for e in equations:
        for node in walk(e.value):
            if isinstance(node, Element) and len(shapes.get(node.array, ())) == len(node.places):
                for place, n in zip(node.places, shapes[node.array]):
                    if varies(n) and not isinstance(place, Name):
                        raise wrong(
                            e.text,
                            node.at,
                            f"axis {node.places.index(place)} of {node.array} {show(shapes[node.array])} is the batch, whose samples "
                            "are independent: its place must be a plain index",
                            ShapeError,
                        )


def _batch_in_ranges(equations: Sequence[Equation], extents: Mapping[str, Any], shapes: Mapping[str, tuple]) -> None:
    """Reject places that count the batch, parts of the batch, and results that have it twice."""
    for e in equations:
        if e.kept is not None and len(twice := [i for i in e.kept if varies(extents[i.name])]) > 1:
            raise wrong(
                e.text,
                twice[1].at,
                f"{e.name} would have the batch twice, along {twice[0].name} and {twice[1].name}: sizes are linear in the batch",
                ShapeError,
            )
        for node in walk(e.value):
            if not isinstance(node, Element):
                continue
            for place, n in zip(node.places, shapes[node.array]):
                for name in _direct(place):
                    far = extents.get(name.name)
                    if far is not None and (varies(far) or varies(n)) and not (place == name and far == n):
                        raise wrong(
                            e.text,
                            name.at,
                            f"{name.name} runs over {far}, and {node.array} has {n} there: the batch is read as a whole, each place by "
                            "a plain index",
                            ShapeError,
                        )
