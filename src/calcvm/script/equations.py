"""Gradients as equations: the texts of the statements that lowering derives, substituted into each other."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, ShapeError
from calcvm.formulas.declare import ELEMENTWISE, PAIR_LOSSES
from calcvm.graph import Path, Variable
from calcvm.lowering.derived import Derived, derived
from calcvm.ops.dims import Affine, Shape, affine, show
from calcvm.ops.layouts import axes, back, laid
from calcvm.ops.spec import stem_of
from calcvm.ops.statement import Statement, Value
from calcvm.ops.types import FLOAT, dtype_of
from calcvm.script.code import number, trace
from calcvm.script.code import show as show_sizes
from calcvm.script.derived import writer_of
from calcvm.script.latex import latex
from calcvm.script.names import HELPERS, Names
from calcvm.script.row import Made, Row, Seen
from calcvm.vm.run.feeds import numbers, numeric

DTYPE = "float64"  # for evaluation
INLINE = {"accumulate", "zero", "fill", "cast_fwd", "pow_fwd", "pow_bwd"}  # elementwise rows that are not formulas


@dataclass(frozen=True)
class Equations:
    """The gradient of a path's loss with respect to a parameter, in NumPy's notation: ``print(it)``.

    Attributes
    ----------
    parameter : str
        The parameter's name.
    name : str
        The name of the gradient, which is the last equation.
    equations : tuple of (str, str)
        Names and expressions, each after those that it reads.  ``B`` is the batch.  Functions that NumPy lacks, such as
        sigmoid and conv, are those of `calcvm.script.helpers`.
    sources : mapping of str to str
        The inputs of the equations: by their names here, the names of variables.
    """

    parameter: str
    name: str
    equations: tuple[tuple[str, str], ...]
    sources: Mapping[str, str]
    _lying: Mapping[str, Lying] = field(repr=False)
    _constants: Mapping[str, Any] = field(repr=False)
    _layout: str = field(repr=False, default="")

    def __str__(self) -> str:
        return "\n".join(f"{name} = {text}" for name, text in self.equations)

    __repr__ = __str__

    def _repr_latex_(self) -> str:
        """The equations for notebooks."""
        return latex(self.equations)

    def evaluate(self, values: Mapping[str, Any]) -> np.ndarray:
        """Evaluate the printed equations for values of the sources, given by the variables' names.

        Parameters
        ----------
        values : arrays in the shapes of the graph's variables.  Others are ignored; constants may be omitted.

        Returns
        -------
        ndarray, in the parameter's shape

        Raises
        ------
        CalcError, ShapeError : a value is missing, or its type or shape does not fit its variable, or batches differ.
        """
        checks.one_of("evaluate", values, Mapping, "a mapping of arrays by the names of variables")
        values = {**self._constants, **values}
        scope: dict[str, Any] = {}
        batch = None
        for name, variable in self.sources.items():
            if variable not in values:
                raise CalcError(f"evaluate: no value of {variable!r}; {', '.join(self.sources.values())} are needed")
            scope[name], batch = as_lies(variable, values[variable], self._lying[variable], batch)
        if batch is None and any("B" in _names(text) for _, text in self.equations):
            batch = self._batch_of_others(values)
        scope["B"] = batch
        exec(str(self), {**HELPERS, "np": np}, scope)
        found = np.asarray(scope[self.name])
        return found.transpose(back(self._layout, found.ndim)) if self._layout else found

    def _batch_of_others(self, values: Mapping[str, Any]) -> int:
        """The batch from other given values, if no input of the equations depends on it."""
        of_batch = [name for name, (shape, *_) in self._lying.items() if any(n.a for n in shape)]
        for name in of_batch:
            if name in values:
                _, batch = as_lies(name, values[name], self._lying[name], None)
                assert batch is not None
                return batch
        raise CalcError(f"evaluate: the gradient depends on the batch: give a value of {' or '.join(of_batch)} too")


Lying = tuple[Shape, str, str]  # a variable's stored shape, layout, type


def as_lies(name: str, value: Any, lying: Lying, batch: int | None) -> tuple[np.ndarray, int | None]:
    """A variable's value in its stored layout, and the batch, if this or an earlier value determines it."""
    shape, layout, type_ = lying
    array = numeric(name, numbers(name, value, "" if type_ == FLOAT else type_))
    array = array.astype(DTYPE, copy=False) if type_ == FLOAT else array
    array = array.transpose(axes(layout, array.ndim)) if array.ndim == len(shape) and layout else array
    return array, _batch(name, array, shape, batch)


def _batch(name: str, array: np.ndarray, shape: Shape, batch: int | None) -> int | None:
    """The batch of an array, if its shape determines one; it must agree with that of others."""
    fits = array.ndim == len(shape)
    for size, n in zip(array.shape, shape) if fits else ():
        if n.a and batch is None and (size - n.b) % n.a == 0 and size > n.b:
            batch = (size - n.b) // n.a
        fits = fits and size == n.at(batch or 0)
    if not fits:
        raise ShapeError(f"evaluate: {name!r} has shape {array.shape}, expected {show(shape)}, with one batch for all")
    return batch


def gradient_of(path: Path, parameter: Any) -> Equations:
    """See `Path.gradient_of`."""
    if path.loss is None:
        raise CalcError(
            f"gradient_of: path {path.name!r} minimizes no loss, so it has no gradient: open it with "
            f"g.path({path.name!r}, backward=True) and call {path.name}.minimize(loss, optimizer)"
        )
    trained = path.trained_behind(path.loss) if path.parameters is None else [*path.parameters]
    found = path.graph.variables.get(parameter) if isinstance(parameter, str) else parameter
    if not isinstance(found, Variable) or found not in trained:
        said = found.name if isinstance(found, Variable) else parameter
        raise CalcError(
            f"gradient_of: path {path.name!r} does not train a parameter {checks.shown(said)}; it trains "
            f"{', '.join(v.name for v in trained)}"
        )
    return _Writing(derived(path, found), found).equations()


class _Writing:
    def __init__(self, of: Derived, parameter: Variable):
        self.of, self.parameter = of, parameter
        self.trace = trace()
        self.names: Names[Value] = Names()
        self.results: list[tuple[str, Any]] = []
        self.called: dict[int, str] = {}
        self.now: dict[Value, Any] = dict.fromkeys(of.ones, number(self.trace, 1))
        self.read = {v for s in of.statements for v in s.read_values} | {of.gradient}
        for v, variable in of.sources.items():
            alone = variable.kind == "constant" and variable.init.size == 1 and variable.type != "bool"
            self.now[v] = number(self.trace, variable.init.item()) if alone else self._leaf(v)

    def _leaf(self, v: Value) -> Any:
        return self.trace.of(self.names.of(v, v.name))

    def equations(self) -> Equations:
        for s in self.of.statements:
            self._statement(s)
        target = self.of.gradient
        name, shape = self.names.of(target, target.name), lies(target)[0]
        none = self.trace.of(f"np.zeros({show_sizes(shape)})")  # signs or comparisons are in between
        value = self.now.get(target, none)
        self.results.append((name, value.reshape(*shape) if value.scalar else value))
        found = _behind(self.trace.equations(self.results, self.called), name)
        needed = {
            target for target, _ in found
        }  # other results of the same rows are dropped, with names that only these share
        kept = [result for result in self.results if result[0] in needed]
        found = _behind(self.trace.equations(kept, self.called), name)
        read = {said for _, text in found for said in _names(text)}
        leaves = {self.names[v]: v for v in self.of.sources if v in self.names}
        used = {name: self.of.sources[v] for name, v in leaves.items() if name in read}
        lying = {v.name: (*lies(value), value.type) for value, v in self.of.sources.items()}
        constants = {v.name: v.init for v in used.values() if v.kind == "constant"}
        of = {k: v.name for k, v in used.items()}
        return Equations(self.parameter.name, name, tuple(found), of, lying, constants, target.layout)

    def _statement(self, s: Statement) -> None:
        operands = {}
        for o in s.spec.operands:
            v = s.operands.get(o.name)
            if v is None or o.access == "s" or (o.access == "w" and v not in self.read):
                continue
            text = self.now.get(v)
            operands[o.name] = Seen(self._leaf(v) if text is None else text, lies(v)[0], dtype_of(v.type, DTYPE))
        r = Row(s.spec, s.words, operands, self.trace)
        writer_of(s.spec.name)(r)
        for made in r.made:
            self._set(s, made)

    def _set(self, s: Statement, made: Made) -> None:
        values = [None if name is None else s.operands[name] for name in made.names]
        if len(values) > 1:
            named = [v and self.names.of(v, v.name) for v in values]
            self.results.append((", ".join(name or "_" for name in named), made.value))
            self.now.update({v: self._leaf(v) for v in values if v is not None})
            return
        (v,) = values
        if v is None or s.spec.operand(str(made.names[0])).access == "u" and s.spec.name != "accumulate":
            return  # buffers: the gradient reads the batch's own statistics
        value = made.value
        if made.add and v in self.now:
            self.called.pop(id(self.now[v]), None)  # the name is for the sum
            value = self.now[v] + value
        if value.scalar or not value.parts:
            self.now[v] = value
        elif v is self.of.gradient or stem_of(s.spec.name) in _formulas():
            self.now[v] = value
            self.called[id(value)] = self.names.of(v, v.name)
        else:
            self.results.append((self.names.of(v, v.name), value))
            self.now[v] = self._leaf(v)


def _formulas() -> set[str]:
    """Elementwise rows, which are substituted into their readers."""
    slopes = {f.name for loss in PAIR_LOSSES.values() for f in loss.slopes.values()}
    return INLINE | {f.name for op in ELEMENTWISE.values() for f in op.formulas} | slopes


def lies(v: Value) -> tuple[Shape, str]:
    """The stored shape of a value, and its layout."""
    if v.shape is None:
        assert isinstance(v.elems, Affine)
        return (v.elems,), ""
    return laid(tuple(map(affine, v.shape)), v.layout), v.layout


def _behind(equations: list[tuple[str, str]], name: str) -> list[tuple[str, str]]:
    """The equation of a name and those that it needs, in order of evaluation."""
    of = {said: equation for equation in equations for said in equation[0].split(", ")}
    out: dict[tuple[str, str], None] = {}
    todo = [(of[name], False)]
    while todo:
        equation, read = todo.pop()
        if read:
            out[equation] = None
        elif equation not in out:
            todo.append((equation, True))
            todo += [(of[said], False) for said in reversed(_names(equation[1])) if said in of]
    return [*out]


def _names(text: str) -> list[str]:
    """The names that an expression reads, in order."""
    return [node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)]
