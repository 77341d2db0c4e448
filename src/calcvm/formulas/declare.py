"""Declarations of formulas, and the declared formulas: their operands, parameters, text and number of operations."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import field
from functools import cached_property
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CellType, CodeType, FunctionType
from typing import Any

from calcvm.formulas.number import ANY, CELLS, CONDITION, FLOAT, INSTEAD, Text, Trace, fma, operations, traced
from calcvm.frozen import frozen

HUGE = 1e300


@frozen
class Real:
    """A numeric parameter of a formula, in [lo, hi], or (lo, hi] if ``open``; if it has no default, it must be given."""

    default: float | None
    doc: str
    lo: float = -HUGE
    hi: float = HUGE
    open: bool = False

    def has(self, v: Any) -> bool:
        if isinstance(v, bool) or not isinstance(v, (int, float)) or not math.isfinite(v):
            return False
        return self.lo <= v <= self.hi and not (self.open and v == self.lo)


@frozen
class Choice:
    """A parameter that is one of two names; the formula gets the name."""

    names: tuple[str, str]
    doc: str

    @property
    def default(self) -> str:
        return self.names[0]

    def has(self, v: Any) -> bool:
        return v in self.names


Parameters = dict[str, "Real | Choice"]


# names used by `calcvm.apply`, in sizes, and as words that lowering sets
RESERVED = ("name", "inputs", "out", "types", "nw", "gpu", "small", "phases", "acc", "wn")


def check_params(params: Parameters) -> None:
    """Reject parameters that no formula can have (ValueError)."""
    if sum(isinstance(p, Choice) for p in params.values()) > 1:
        raise ValueError("a formula has at most one Choice: declare an operator for each of its names")
    for name, p in params.items():
        if isinstance(p, Real):
            if p.default is not None and not p.has(p.default):
                raise ValueError(f"{name}: the default {p.default!r} is none of the numbers that it may be")
        elif not isinstance(p, Choice):
            raise ValueError(f"{name}: a parameter is a Real or a Choice, not {p!r}")
        elif len({*p.names}) != 2 or not all(isinstance(of, str) for of in p.names):
            raise ValueError(f"{name}: a choice is one of two names, not of {p.names!r}")


def is_own(fn: Callable) -> bool:
    """Whether a function is defined outside calcvm's formulas."""
    return not (fn.__module__ or "").startswith("calcvm.formulas.")


def formulas_of(cls: type) -> dict[str, Callable]:
    """Its functions; users' functions with their current globals and cells, so that later changes do not affect their kernels."""
    return {key: _fixed(fn) if is_own(fn) else fn for key, fn in vars(cls).items() if isinstance(fn, FunctionType)}


def _fixed(fn: FunctionType) -> FunctionType:
    around = {name: fn.__globals__[name] for name in (*_names(fn.__code__), "__name__") if name in fn.__globals__}
    cells = tuple(CellType(cell.cell_contents) for cell in fn.__closure__ or ())
    made = FunctionType(fn.__code__, around, fn.__name__, fn.__defaults__, cells)
    made.__annotations__ = fn.__annotations__
    return made


def _names(code: CodeType) -> Iterator[str]:
    """The names that it, and functions inside it, refer to."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def arguments(fn: Callable) -> tuple[str, ...]:
    """Names of a function's parameters (ValueError: some are not plain names)."""
    code = fn.__code__
    if code.co_posonlyargcount or code.co_kwonlyargcount or code.co_flags & (CO_VARARGS | CO_VARKEYWORDS):
        raise ValueError(f"{fn.__name__}: each parameter has a name, without *")
    return code.co_varnames[: code.co_argcount]


class Cells:
    """Annotation of a formula's operand: any type, moved unchanged.  ``Any`` : a number of any type; ``bool`` : a condition."""


class To:
    """Annotation of a formula's result: its type may differ from the operand's."""


TYPES = {"Any": ANY, "Cells": CELLS, "To": "to", "bool": CONDITION}  # types of operands, by their annotations


@frozen
class Formula:
    """One row's computation on an element: ``fn(reads..., params...)``, with its parameters in this order.

    name : of the row.
    factor : of a loss's slope: its last multiplication.
    """

    name: str
    fn: Callable
    writes: str
    params: Parameters = field(default_factory=dict)
    said: str = ""  # its text, if the text of its steps would be too long
    factor: float = 1

    @cached_property
    def names(self) -> tuple[str, ...]:
        return arguments(self.fn)

    @property
    def reads(self) -> tuple[str, ...]:
        """The operands that it reads, in order."""
        return tuple(name for name in self.names if name not in self.params)

    @cached_property
    def types(self) -> dict[str, str]:
        """The types of operands that do not have the program's own float type (`calcvm.ops.types`)."""
        return {name: TYPES[of] for name, of in self.annotations.items() if of in TYPES}

    @property
    def annotations(self) -> dict[str, str]:
        """The annotations of operands, as texts."""
        return {
            self.writes if name == "return" else name: of if isinstance(of, str) else getattr(of, "__name__", str(of))
            for name, of in self.fn.__annotations__.items()
            if name not in self.params
        }

    @property
    def words(self) -> dict[str, Real | Choice]:
        """Its own parameters, in the order of a row's words: a choice, which the kernel tests, and numbers."""
        return {
            name: p
            for kind in (Choice, Real)
            for name, p in self.params.items()
            if name in self.names and isinstance(p, kind)
        }

    @property
    def reals(self) -> tuple[str, ...]:
        return tuple(name for name, p in self.words.items() if isinstance(p, Real))

    @property
    def operands(self) -> tuple[str, ...]:
        """The operands that it reads and then the one that it writes, each once."""
        return tuple(dict.fromkeys((*self.reads, self.writes)))

    def variant(self, which: int = 0) -> Callable:
        """The formula as a function of numbers only, ``reads`` and ``reals``, for one name of a choice."""
        chosen = {name: p.names[which] for name, p in self.words.items() if isinstance(p, Choice)}
        fn, names = self.fn, (*self.reads, *self.reals)
        return lambda *numbers: fn(**dict(zip(names, numbers)), **chosen)

    def scaled(self) -> Callable:
        """The slope times a last number, the gradient of the mean, and times its factor."""
        fn = self.variant()

        def times(*numbers: Any) -> Any:
            share = numbers[-1] * fn(*numbers[:-1])
            return share if self.factor == 1 else self.factor * share

        return times

    def with_places(self, places: str, around: str, result: str) -> str:
        """Its equations over elements such as ``x[r,c]``; its value is put into a form such as "dy*{}"."""
        values = Trace()
        value = self.traced(0, values, places)
        return values.program(result, values.of(around, 4, ((value, 4),)), places)

    @property
    def text(self) -> str:
        """Its equations; if a choice gives two, one ``where`` of both."""
        if self.said:
            return f"{self.writes} = {self.said}"
        values = Trace()
        choice = next((name for name, p in self.words.items() if isinstance(p, Choice)), None)
        result = self.traced(0, values)
        if choice:
            result = values.of(f"where({choice} == 1, {{}}, {{}})", 9, ((self.traced(1, values), 0), (result, 0)))
        return values.program(self.writes, result)

    def traced(self, which: int = 0, values: Trace | None = None, places: str = "") -> Text:
        """Its value for texts of its operands, with ``places`` after their names, and of its parameters."""
        values, kinds = values or Trace(), self.types
        operands = [values.of(v + places, kind=kinds.get(v, FLOAT)) for v in self.reads]
        return traced(self.variant(which), *operands, *map(values.of, self.reals))

    @property
    def functions(self) -> set[str]:
        """Names of the functions that it calls."""
        return set(re.findall(r"\w+(?=\()", self.text)) - {"where"}

    @property
    def operations(self) -> int:
        return operations(self.variant(), len(self.reads) + len(self.reals))

    @property
    def own(self) -> bool:
        """Whether a user wrote it."""
        return is_own(self.fn)

    def check(self) -> None:
        """Reject formulas that no row can compute (ValueError)."""
        for of in self.annotations.values():
            if of not in (*TYPES, "float"):
                raise ValueError(f"{self.writes}: the annotation {of!r} is none of Any, Cells, bool and float")
        kinds, to = self.types, self.types.get(self.writes, FLOAT)
        if to in (ANY, CELLS) and to not in (kinds.get(name) for name in self.reads):
            raise ValueError(
                f"{self.writes} takes its type from an operand with the same annotation, of which there is none"
            )
        for which in range(1 if len(self.words) == len(self.reals) else 2):
            try:
                made = self.traced(which).kind
            except TypeError as error:
                raise ValueError(f"{self.writes}: {error}") from error
            if made == CONDITION != to:
                so = "annotate it so, def y(...) -> bool" if self.writes == "y" else "take where(condition, x, y)"
                raise ValueError(f"{self.writes} is a condition: {so}")
            if to == CONDITION != made:
                raise ValueError(f"{self.writes} is a number, annotated as a condition: compare it, such as x != 0")
            if (made == CELLS) != (to == CELLS):
                raise ValueError(f"{self.writes}: {INSTEAD[CELLS]}: annotate its result so too, -> Cells")

    @property
    def passes(self) -> bool:
        """Whether it is just the output's gradient."""
        return self.reads == ("dy",) and not self.types and self.traced().form == "dy"


@frozen
class Elementwise:
    """An operator on elements: its forward formula, and one for each gradient, by name.

    params : attributes.  low, high : range of the inputs that tests draw.  cases, types : attributes, and types besides the
    program's float, that tests run it with.
    """

    name: str
    forward: Formula
    backward: dict[str, Formula]
    params: Parameters
    onnx: tuple[str, ...]
    low: float
    cases: tuple[dict[str, Any], ...]
    source: str
    types: tuple[str, ...] = ()
    exact: bool = False
    high: float = 2.0

    @property
    def formulas(self) -> tuple[Formula, ...]:
        """The formulas that are rows."""
        return (self.forward, *(f for f in self.backward.values() if not f.passes))

    def strided(self, f: Formula) -> tuple[str, ...]:
        """Operands of a formula that are broadcast: the inputs, if there are several; an output's gradient is whole."""
        inputs = self.forward.reads
        return tuple(v for v in f.reads if v in inputs) if len(inputs) > 1 else ()


ELEMENTWISE: dict[str, Elementwise] = {}
MOST_INPUTS = 3
AXES = 6  # broadcast axes: the leading one, which is never merged with others, and five more after merging
TAKEN = ("y", "dy", "me", "rows", "cols", *(f"d{i}" for i in range(AXES)))


def elementwise(
    *,
    onnx: str = "",
    low: float = -2.0,
    high: float = 2.0,
    cases: tuple[dict[str, Any], ...] = ({},),
    source: str = "",
    types: tuple[str, ...] = ("int64",),
    text: str = "",
    exact: bool = False,
    **params: Real | Choice,
) -> Callable[[type], Elementwise]:
    """Decorator of a class of formulas: ``y`` of inputs and parameters, and a ``d<input>`` for each gradient.

    text : of ``y``, if its steps would be too long.  exact : see `Elementwise`.
    A gradient's formula names the values that it reads: ``dy``, inputs, ``y``.  An input without one has a gradient of 0
    wherever it has any.
    """

    def declare(cls: type) -> Elementwise:
        name = cls.__name__
        check_params(params)
        found = formulas_of(cls)
        if "y" not in found:
            raise ValueError("a formula y of the inputs is missing")
        forward = Formula(f"{name}_fwd", found.pop("y"), "y", params, text)
        single = len(forward.reads) == 1
        backward = {
            key[1:]: Formula(f"{name}_bwd" if single else f"{name}_bwd_{key[1:]}", fn, key, params)
            for key, fn in found.items()
        }
        _check_names(forward, backward)
        if len(forward.reads) > 1 and any(isinstance(p, Choice) for p in params.values()):
            raise ValueError("a Choice is of an operator of one input: declare an operator for each of its names")
        if "to" in forward.types.values():
            raise ValueError("To is what cast makes: annotate y with Any, or cast it")
        for f in (forward, *backward.values()):
            if f.types and f.words and (len(f.words) > len(f.reals) or all(v in f.types for v in f.operands)):
                raise ValueError(f"{f.name}: parameters combine with floats: an operand must be without annotation")
        typed = types if {*forward.types.values()} & {"any", "cells"} else ()
        spec = Elementwise(
            name, forward, backward, params, (onnx,) if onnx else (), low, cases, source, typed, exact, high
        )
        ELEMENTWISE[name] = spec
        return spec

    return declare


def _check_names(forward: Formula, backward: dict[str, Formula]) -> None:
    """Reject formulas of an operator that cannot be rows (ValueError)."""
    inputs = forward.reads
    if not 1 <= len(inputs) <= MOST_INPUTS:
        raise ValueError(f"y has {len(inputs)} inputs: one to {MOST_INPUTS} are possible")
    if taken := [name for name in forward.names if name in TAKEN]:
        raise ValueError(f"{taken[0]!r} is a word of every such row: name the input or parameter otherwise")
    if len(inputs) > 1:  # the row has a stride of each input along each axis
        strides = [f"{v}{i}" for v in inputs for i in range(AXES)]
        if taken := [name for name in strides if name in (*TAKEN, *forward.names) or strides.count(name) > 1]:
            raise ValueError(
                f"{taken[0]!r} is a word of the row, a stride of {taken[0][:-1]!r}: name an input otherwise"
            )
    for key, f in backward.items():
        if key not in inputs:
            raise ValueError(f"d{key} is the gradient of no input; inputs are {', '.join(inputs)}")
        for name in f.reads:
            if name not in ("dy", "y", *inputs):
                raise ValueError(f"d{key} reads {name!r}: a gradient reads dy, y and inputs ({', '.join(inputs)})")
            if name in inputs and f.types.get(name) != forward.types.get(name):
                raise ValueError(f"d{key}: {name!r} has another annotation than in y")
        if f.writes in f.types:
            raise ValueError(f"d{key}: gradients are floats, which have no annotation")


# ---------------------------------------------------------------- losses over pairs
@frozen
class PairLoss:
    """A loss that is the mean of a term over pairs of elements x and t: the term, and its slopes by x and by t."""

    name: str
    term: Formula
    slopes: dict[str, Formula]
    params: Parameters
    source: str


PAIR_LOSSES: dict[str, PairLoss] = {}


def pair_loss(*, source: str = "", **params: Real | Choice) -> Callable[[type], PairLoss]:
    """Decorator of a class of formulas: ``term`` of x, t and parameters, and its slopes ``dx`` and ``dt``, times ``factor`` (1)."""

    def declare(cls: type) -> PairLoss:
        name, found = cls.__name__, formulas_of(cls)
        check_params(params)
        if missing := [key for key in ("term", "dx", "dt") if key not in found]:
            raise ValueError(f"a formula {missing[0]} is wanted, beside the others of term, dx and dt")
        term = Formula(f"{name}_fwd", found["term"], "t_l", params)
        factor = vars(cls).get("factor", 1)
        slopes = {v: Formula(f"{name}_bwd_{v}", found[f"d{v}"], f"d{v}", params, factor=factor) for v in "xt"}
        for f in (term, *slopes.values()):
            if other := {*f.reads} - {"x", "t"}:
                raise ValueError(f"{f.fn.__name__} reads {min(other)!r}: formulas of a loss read x, t and parameters")
            if f.types:
                raise ValueError(f"{f.fn.__name__}: losses are of floats, which have no annotation")
        if term.reads != ("x", "t"):
            raise ValueError("term is a formula of x, t and parameters, in this order")
        spec = PairLoss(name, term, slopes, params, source)
        PAIR_LOSSES[name] = spec
        return spec

    return declare


# ---------------------------------------------------------------- updates of optimizers
@frozen
class Update:
    """An optimizer's update of an element: ``steps`` in order, each gives a value's new number; the last is p's.

    decay : whether weight_decay * p is first added to the gradient.
    """

    name: str
    steps: dict[str, Callable]
    decay: bool
    coefficients: dict[str, Callable]
    source: str

    def coefficient(self, name: str, slot: Callable[[str], Any]) -> Any:
        """One of `uses`, computed from the numbers that ``slot`` gives for slots of hyperparameters."""
        of = self.coefficients.get(name)
        return of(*map(slot, arguments(of))) if of else slot(name)

    @cached_property
    def state(self) -> tuple[str, ...]:
        return tuple(name for name in self.steps if name != "p")

    @cached_property
    def uses(self) -> tuple[str, ...]:
        """The numbers that are not operands."""
        names = dict.fromkeys(name for fn in self.steps.values() for name in arguments(fn))
        return tuple(name for name in names if name not in ("p", "g", *self.state))

    @property
    def slots(self) -> set[str]:
        """The slots of hyperparameters that `uses` depend on."""
        made = [self.coefficients.get(name) for name in self.uses]
        return {*self.uses} | {slot for of in made if of for slot in arguments(of)}

    def __call__(self, clip_scale: Any, weight_decay: Any, p: Any, g: Any, *others: Any) -> tuple[Any, ...]:
        """The new p and state, from numbers: p, g, state, `uses`; None stands for no scale or no decay."""
        if weight_decay is not None:
            g = fma(weight_decay, p, g) if clip_scale is None else fma(g, clip_scale, weight_decay * p)
        elif clip_scale is not None:
            g = g * clip_scale
        values = dict(zip(("p", "g", *self.state, *self.uses), (p, g, *others)))
        for name, fn in self.steps.items():
            values[name] = fn(*(values[v] for v in arguments(fn)))
        return tuple(values[v] for v in ("p", *self.state))

    @property
    def own(self) -> bool:
        return any(map(is_own, self.steps.values()))

    @property
    def text(self) -> str:
        """Equations, with ``step`` for the gradient after scale and decay; the scale is 1 if the word ``clip`` is 0."""
        scaled = "where(clip == 1, clip_scale*g, g)"
        clauses = [f"step = {scaled} + weight_decay*p" if self.decay else f"step = {scaled}"]
        for name, fn in self.steps.items():
            said = self._said(fn)
            clause = said.trace.program(name, said)
            clauses.append(
                clause.replace(f"{name} = {name} - ", f"{name} -= ").replace(f"{name} = {name} + ", f"{name} += ")
            )
        return "; ".join(clauses)

    def check(self) -> None:
        """Reject updates that no row can compute (ValueError)."""
        for name, fn in self.steps.items():
            if fn.__annotations__:
                raise ValueError(f"{name}: updates are of floats, which have no annotation")
            if self._said(fn).kind != FLOAT:
                raise ValueError(f"{name} is a condition: take where(condition, x, y)")

    def _said(self, fn: Callable) -> Text:
        """The text of a step, with its coefficients inserted."""
        values = Trace()

        def named(name: str) -> Text:
            return self.coefficient(name, values.of) if name != "g" else values.of("step")

        return traced(fn, *map(named, arguments(fn)))

    @property
    def operations(self) -> int:
        return operations(lambda *numbers: self(None, None, *numbers)[0], 2 + len(self.state) + len(self.uses))


UPDATES: dict[str, Update] = {}


def update(*, coefficients: dict[str, Callable], source: str, decay: bool = True) -> Callable[[type], Update]:
    """Decorator of a class of formulas: a function for each updated value, in order."""

    def declare(cls: type) -> Update:
        UPDATES[cls.__name__] = Update(cls.__name__, formulas_of(cls), decay, coefficients, source)
        return UPDATES[cls.__name__]

    return declare
