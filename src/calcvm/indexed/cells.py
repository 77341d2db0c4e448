"""``cv.cell``: recurrent cells of users, whose functions are traced once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from calcvm import checks
from calcvm.equations.cells import OwnCell, equations_of
from calcvm.equations.functions import ARGUMENTS
from calcvm.equations.grammar import read
from calcvm.equations.text import show_equations
from calcvm.equations.tree import OPERATORS, Call, Name, Node, Number, substituted
from calcvm.errors import CalcError
from calcvm.formulas.declare import ELEMENTWISE
from calcvm.formulas.number import Trace
from calcvm.indexed.tracing import Traced
from calcvm.ops.cells import operator_of
from calcvm.sequences import recurrent


def cell(gates: int, *, apart: int = 0) -> Callable[[Callable], OwnCell]:
    """Decorator of a recurrent cell: a function of one unit that returns its new states.

    Its parameters are the sums of the gates ``z``, each x_t weight_ih + bias_ih + h weight_hh + bias_hh; then the states, the
    first of which is h, whose products with the weights are in z; then, after ``*``, numbers of each unit that are trained, such
    as peepholes.  A parameter's default is its initial value.  The function is traced once: it has + - * / ** and functions such
    as `calcvm.sigmoid`, and `calcvm.where` instead of ``if``.  Its gradient is derived.

    Parameters
    ----------
    gates : int, how many sums each unit has
    apart : int, for so many of the last gates, z has the input's part alone, and a second parameter, before the states, has
        h weight_hh + bias_hh: a gate can scale it before they are added, as in a GRU

    Returns
    -------
    The cell, for `calcvm.recurrent` and `calcvm.nn.Recurrent`.  ``text`` : its equations.

    Raises
    ------
    CalcError : the function does not return one number for each state, does what equations cannot, or ignores a gate.

    Examples
    --------
    >>> @cv.cell(gates=2)
    ... def mgu(z, h):
    ...     f = cv.sigmoid(z[0])
    ...     return h + f * (cv.tanh(z[1]) - h)
    >>> print(mgu.text)
    t1 = sigmoid(z0); t2 = tanh(z1); new_h = h + t1*(t2 - h)

    Sources: the minimal gated unit, Zhou et al. 2016; peepholes, Gers and Schmidhuber 2000.
    """
    gates = checks.integer("cell: gates", gates, 1, 16)
    apart = checks.integer("cell: apart", apart, 0, gates)

    def declare(function: Callable) -> OwnCell:
        if not isinstance(function, FunctionType):
            raise CalcError(f"cell: a function of sums and states is wanted, not {checks.shown(function)}")
        try:
            own = _traced(function, gates, apart).checked()
            operator_of(own)
        except RecursionError:
            raise CalcError(f"cell {function.__name__!r}: too many operations") from None
        except CalcError as error:
            error.args = (f"cell {function.__name__!r}: {error}", *error.args[1:])
            raise
        return own

    return declare


def _traced(function: FunctionType, gates: int, apart: int) -> OwnCell:
    given = inspect.signature(function).parameters.values()
    plain = [p.name for p in given if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    trained = [p for p in given if p.kind is p.KEYWORD_ONLY]
    first = 2 if apart else 1
    if len(plain) + len(trained) < len(given) or len(plain) <= first:
        raise CalcError(
            f"its parameters are {'z, m, h' if apart else 'z, h'} and other states, without defaults; and after * those that are "
            f"trained; not {inspect.signature(function)}"
        )
    starts = [
        None if p.default is p.empty else checks.number(f"{p.name}: its initial value", p.default) for p in trained
    ]
    states, parameters = tuple(plain[first:]), tuple(p.name for p in trained)
    if taken := {*parameters} & {*inspect.signature(recurrent).parameters}:
        raise CalcError(f"the parameter {min(taken)!r} would be an argument of cv.recurrent: choose another name")
    own = OwnCell(function.__name__, "", gates, apart, states, parameters, tuple(starts))
    values = {name: Traced(Name(name), {}) for name in own.reads}
    sums = [tuple(values[name] for name in names) for names in (own.sums, own.mores)[:first]]
    try:
        out = function(*sums, *(values[name] for name in states), **{name: values[name] for name in parameters})
    except IndexError:
        raise CalcError(f"it reads a sum that is not there: gates={gates}, apart={apart}") from None
    found = out if isinstance(out, (tuple, list)) else (out,)
    if out is None or len(found) != len(states):
        what = "None" if out is None else f"{len(found)} value{'s' * (len(found) != 1)}"
        raise CalcError(f"it returns {what}, and its states are {', '.join(states)}: return the new one of each")
    news = {f"new_{name}": _node(name, value) for name, value in zip(states, found)}
    text = show_equations(equations_of(news))
    return OwnCell(own.name, text, gates, apart, states, parameters, own.starts)


def _node(name: str, value: Any) -> Node:
    if checks.is_number(value):
        return Number(float(checks.number(f"the new {name}", value)))
    if not isinstance(value, Traced):
        raise CalcError(
            f"the new {name} must be a number of the cell, as its arguments are, not {checks.called(value)}"
        )
    if value.arrays:
        v = next(iter(value.arrays.values()))
        raise CalcError(f"it reads the variable {v.name!r}: make it a parameter of the cell, after *")
    return _written_out(value.node, {})


def _written_out(node: Node, known: dict[int, tuple[Node, Node]]) -> Node:
    """The node with functions of the table that equations lack, such as silu, replaced by their own equations."""
    if not isinstance(node, Call):
        return node
    if id(node) not in known:
        given = tuple(_written_out(part, known) for part in node.arguments)
        new: Node = Call(node.function, given)
        if node.function not in (*OPERATORS, *ARGUMENTS):
            new = _of_table(node.function, given)
        known[id(node)] = node, new
    return known[id(node)][1]


def _of_table(function: str, given: tuple[Node, ...]) -> Node:
    found = ELEMENTWISE.get(function)
    try:
        if found is None or len(found.forward.reads) != len(given):
            raise CalcError(function)
        by = dict(zip(found.forward.reads, given))
        by |= {name: Number(found.params[name].default) for name in found.forward.reals}  # type: ignore[arg-type]
        trace = Trace()
        for e in read(trace.program("y", found.forward.traced(0, trace))):
            by[e.name] = substituted(e.value, by)
        return by["y"]
    except (CalcError, KeyError):
        raise CalcError(f"there is no function {function} in a cell: write it by others") from None
