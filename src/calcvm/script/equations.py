"""Gradients as equations, from the statements that lowering derives: the rows' own texts, put into each other."""

from __future__ import annotations

import re
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
from calcvm.ops.types import dtype_of
from calcvm.script.code import number, trace
from calcvm.script.code import show as show_sizes
from calcvm.script.latex import latex
from calcvm.script.names import HELPERS, Names
from calcvm.script.row import Made, Row, Seen, writer_of

DTYPE = "float32"
INLINE = {"accumulate", "zero", "fill", "cast_fwd", "pow_fwd", "pow_bwd"}  # beside formulas: an element of one of each


@dataclass(frozen=True)
class Equations:
    """The gradient of a path's loss by a parameter as equations, in NumPy's notation: ``print(it)``.

    Attributes
    ----------
    parameter : str
        Its name.
    name : str
        Of the last equation, which is the gradient.
    equations : tuple of (str, str)
        Names of values and what they are, each after those that it reads.  ``B`` is the batch; functions that NumPy has not,
        such as sigmoid and conv, are those of `calcvm.script.helpers`.
    sources : mapping of str to str
        What equations read and do not compute: the names of variables by their names here.
    """

    parameter: str
    name: str
    equations: tuple[tuple[str, str], ...]
    sources: Mapping[str, str]
    _lying: Mapping[str, Any] = field(repr=False)  # by variable: shape as it lies, layout
    _constants: Mapping[str, Any] = field(repr=False)
    _layout: str = field(repr=False, default="")

    def __str__(self) -> str:
        return "\n".join(f"{name} = {text}" for name, text in self.equations)

    __repr__ = __str__

    def _repr_latex_(self) -> str:
        """The equations for notebooks."""
        return latex(self.equations)

    def evaluate(self, values: Mapping[str, Any]) -> np.ndarray:
        """The gradient for values of the sources, by the variables' names, as the printed equations say it.

        Parameters
        ----------
        values : arrays in the shapes that the graph's variables have; others are not looked at, constants need not be given.

        Returns
        -------
        ndarray, in the parameter's shape

        Raises
        ------
        CalcError, ShapeError : a value is missing, or has another shape; batches differ.
        """
        checks.one_of("evaluate", values, Mapping, "a mapping of arrays by the names of variables")
        values = {**self._constants, **values}
        scope: dict[str, Any] = {}
        batch = None
        for name, variable in self.sources.items():
            if variable not in values:
                raise CalcError(f"evaluate: no value of {variable!r}; {', '.join(self.sources.values())} are wanted")
            shape, layout = self._lying[variable]
            array = np.asarray(values[variable])
            array = array.transpose(axes(layout, array.ndim)) if array.ndim == len(shape) and layout else array
            batch = _batch(variable, array, shape, batch)
            scope[name] = array
        scope["B"] = 1 if batch is None else batch
        exec(str(self), {**HELPERS, "np": np}, scope)
        found = np.asarray(scope[self.name])
        return found.transpose(back(self._layout, found.ndim)) if self._layout else found


def _batch(name: str, array: np.ndarray, shape: Shape, batch: int | None) -> int | None:
    """The batch of an array, if its shape says one; the same as that of others."""
    fits = array.ndim == len(shape)
    for size, n in zip(array.shape, shape) if fits else ():
        if n.a and batch is None and (size - n.b) % n.a == 0:
            batch = (size - n.b) // n.a
        fits = fits and size == n.at(0 if batch is None else batch)
    if not fits:
        raise ShapeError(f"evaluate: {name!r} of shape {array.shape}, {show(shape)} is wanted, of one batch for all")
    return batch


def gradient_of(path: Path, parameter: Any) -> Equations:
    """See `Path.gradient_of`."""
    if path.loss is None:
        raise CalcError(
            f"gradient_of: path {path.name!r} minimizes no loss, of which there could be a gradient: open it with "
            f"g.path({path.name!r}, backward=True) and call {path.name}.minimize(loss, optimizer)"
        )
    trained = path.trained_behind(path.loss) if path.parameters is None else [*path.parameters]
    found = path.graph.variables.get(parameter) if isinstance(parameter, str) else parameter
    if not isinstance(found, Variable) or found not in trained:
        said = found.name if isinstance(found, Variable) else parameter
        raise CalcError(
            f"gradient_of: {checks.shown(said)} is no parameter that path {path.name!r} trains; these are: "
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
            alone = variable.kind == "constant" and variable.init.size == 1
            self.now[v] = number(self.trace, float(variable.init.item())) if alone else self._leaf(v)

    def _leaf(self, v: Value) -> Any:
        return self.trace.of(self.names.of(v, v.name))

    def equations(self) -> Equations:
        for s in self.of.statements:
            self._statement(s)
        target = self.of.gradient
        name = self.names.of(target, target.name)
        none = self.trace.of(f"np.zeros({show_sizes(_lies(target)[0])})")  # between them are signs, or comparisons
        self.results.append((name, self.now.get(target, none)))
        found = _behind(self.trace.equations(self.results, self.called), name)
        needed = {
            target for target, _ in found
        }  # what else the same rows make is left out, and what it shares with these is not shared
        found = self.trace.equations([result for result in self.results if result[0] in needed], self.called)
        text = " ".join(said for _, said in found)
        leaves = {self.names[v]: v for v in self.of.sources if v in self.names}
        used = {name: self.of.sources[v] for name, v in leaves.items() if _reads(text, name)}
        lying = {v.name: _lies(value) for value, v in self.of.sources.items()}
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
            operands[o.name] = Seen(self._leaf(v) if text is None else text, _lies(v)[0], dtype_of(v.type, DTYPE))
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
            return  # buffers: the gradient reads what the batch itself has
        value = self.now[v] + made.value if made.add and v in self.now else made.value
        if v is self.of.gradient or stem_of(s.spec.name) in _formulas():
            self.now[v] = value
            self.called[id(value)] = self.names.of(v, v.name)
        else:
            self.results.append((self.names.of(v, v.name), value))
            self.now[v] = self._leaf(v)


def _formulas() -> set[str]:
    """Rows of which an element depends on one element of each operand: put into what reads them."""
    slopes = {f.name for loss in PAIR_LOSSES.values() for f in loss.slopes.values()}
    return INLINE | {f.name for op in ELEMENTWISE.values() for f in op.formulas} | slopes


def _lies(v: Value) -> tuple[Shape, str]:
    """The shape of a value as it lies, and its layout."""
    if v.shape is None:
        assert isinstance(v.elems, Affine)
        return (v.elems,), ""
    return laid(tuple(map(affine, v.shape)), v.layout), v.layout


def _behind(equations: list[tuple[str, str]], name: str) -> list[tuple[str, str]]:
    """Those that the equation of a name needs, and it last."""
    wanted, out = {name}, []
    for target, text in reversed(equations):
        if wanted & {*target.split(", ")}:
            wanted |= {*re.findall(r"(?<![\w.])[A-Za-z_]\w*", text)}
            out.append((target, text))
    out.reverse()
    return sorted(out, key=lambda equation: equation[0] == name)


def _reads(text: str, name: str) -> bool:
    return bool(re.search(rf"(?<![\w.]){name}\b", text))
