"""Declare custom operators.  Their kernels are written with `calcvm.operators.cpu` and ``.cuda``.

CONTRIBUTING.md has the recipe.  The library's own operators use the same functions.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import FunctionType
from typing import Any

from calcvm.errors import CalcError
from calcvm.formulas import declare
from calcvm.formulas.declare import Choice, Real
from calcvm.formulas.optimizers import COEFFICIENTS
from calcvm.ops import spec as _spec
from calcvm.ops.declarations import check_row, check_spec
from calcvm.ops.dims import Affine, Shape, numel
from calcvm.ops.spec import (
    ACC,
    A,
    Attr,
    Example,
    Operand,
    OpSpec,
    R,
    RowSpec,
    S,
    U,
    W,
    Word,
    choice,
    dims,
    is_own,
    rows_cols,
    same_shape,
)
from calcvm.ops.types import FLOAT

__all__ = [
    "ACC", "A", "Affine", "Attr", "Example", "OpSpec", "Operand", "R", "RowSpec", "S", "Shape", "U", "W", "Word", "choice",
    "dims", "numel", "register_op", "rows_cols", "same_shape", "Real", "Choice", "elementwise", "pair_loss", "update",
]  # fmt: skip

ANNOTATIONS = {"int": "", "float": ": Float"}  # of kernel parameters


def register_op(spec: OpSpec) -> OpSpec:
    """Add an operator to the table, for `calcvm.apply`.

    Stored programs find its rows by name.

    Raises
    ------
    CalcError : it is not an `OpSpec`; its name or that of a row is taken; it could not be lowered, planned or verified (an
        expression reads a word that its row lacks, no row computes an output or a gradient, ...).
    """
    check_spec(spec)
    return _register(spec)


def _register(spec: OpSpec) -> OpSpec:
    own = [row for row in spec.rows if is_own(row)]
    for row in own if spec.name not in _spec.OPS else ():
        _spec.check_free(spec, row)
    for row in own:
        for device in ("cpu", "cuda") if row.name in _spec.OWN or row.name not in _spec.ROWS else ():
            known = sys.modules.get(f"calcvm.kernels_{device}._common")
            if known is not None and row.name in known.KERNELS:
                check_kernel(known.KERNELS[row.name], row)
    again = _spec.OPS.get(spec.name)
    if again is not None and again.rows == spec.rows and {row.name for row in spec.rows} <= _spec.OWN:
        _spec.OPS[spec.name] = spec = replace(spec, fwd=again.fwd, bwd=again.bwd)  # a notebook cell that runs again
        return spec
    _forget(*spec.rows)
    _spec.register(spec)
    _spec.OWN.update(row.name for row in own)
    return spec


# ---------------------------------------------------------------- custom formulas
def elementwise(cls: type | None = None, /, **how: Any) -> Any:
    """Decorator that turns a class of formulas into an operator for `calcvm.apply`, on every device.

    Parameters
    ----------
    how : ``source``, and the operator's parameters by name: `Real`, or with a single input `Choice`.  Formulas take them after
        the values that they read.

    The class has a function ``y`` of one to three inputs, such as x, which are broadcast.  For each input with a gradient it
    has a function such as ``dx``, which reads ``dy``, inputs and ``y`` (for a slope of 0 everywhere ``return 0.0 * dy``).
    An input without one passes no gradient on.  Formulas are written with ``calcvm.formulas.number``.  If ``y`` is a
    condition, annotate it: ``def y(a, b) -> bool``.

    Raises
    ------
    CalcError : the name of the operator or of a row is taken, or a formula cannot be applied to numbers.
    """
    return _declared("elementwise", "elementwise", how, "ELEMENTWISE", "add", cls)


def pair_loss(cls: type | None = None, /, **how: Any) -> Any:
    """As `elementwise`, for a loss that is the mean over pairs of x and target t: ``term``, and its slopes ``dx`` and ``dt``."""
    return _declared("pair_loss", "losses", how, "PAIR_LOSSES", "add_loss", cls)


def update(cls: type | None = None, /, **how: Any) -> Any:
    """As `elementwise`, for an optimizer's update (a subclass of `calcvm.optim.Optimizer` whose ``row`` has its name).

    The class has one function for each value that changes: p and then its state, in order.  They read p, its gradient g,
    the state and hyperparameters (`calcvm.formulas.optimizers.HYPER_SLOTS`).  ``decay=False``: do not add weight_decay*p to
    the gradient first.
    """
    how = {"coefficients": COEFFICIENTS, "source": "", **how}
    return _declared("update", "optimizers", how, "UPDATES", "add_update", cls)


def _declared(kind: str, family: str, how: dict[str, Any], table: str, add: str, of: type | None) -> Any:
    """A decorator that declares formulas and registers their operator and kernels; given a class, its result for that class."""

    def decorate(cls: type) -> Any:
        if not isinstance(cls, type):
            raise CalcError(f"{kind} decorates a class of formulas, not {cls!r}")
        if not cls.__name__.isidentifier() or not cls.__name__.isascii():
            raise CalcError(
                f"{kind} {cls.__name__!r}: the name of the class, which is the operator's, must be an identifier in ASCII"
            )
        meant = (*declare.RESERVED, *inspect.signature(getattr(declare, kind)).parameters)
        if taken := [name for name, value in how.items() if isinstance(value, (Real, Choice)) and name in meant]:
            raise CalcError(
                f"{kind} {cls.__name__!r}: a parameter cannot be called {taken[0]!r}, which has another meaning"
            )
        if not isinstance(how.get("source", ""), str):
            raise CalcError(f"{kind} {cls.__name__!r}: source must be a text, not {how['source']!r}")
        commons = [sys.modules.get(f"calcvm.kernels_{device}._common") for device in ("cpu", "cuda")]
        kernels = [common.KERNELS for common in commons if common is not None]
        before = [(known, dict(known)) for known in (getattr(declare, table), _spec.OPS, _spec.ROWS, *kernels)]
        try:
            op = getattr(declare, kind)(**how)(cls)
            spec = import_module(f"calcvm.ops.{family}").spec_of(op)
            # a missing slope is not taken as 0: it may have been forgotten
            if kind == "elementwise" and "y" not in op.forward.types:
                spec = replace(spec, flat=tuple(name for name in spec.flat if name in op.forward.types))
            for row in spec.rows:
                if is_own(row):
                    check_row(spec, row)
            _withdraw(_spec.OPS.get(spec.name), kernels)  # a notebook cell that was changed and runs again
            _register(spec)
        except Exception as error:
            for known, then in before:
                for name in {*known} - {*then}:
                    del known[name]
                known.update(then)
            if isinstance(error, CalcError):
                raise
            raise CalcError(f"{kind} {cls.__name__!r}: {error}") from error
        getattr(import_module(f"calcvm.kernels_cpu.{family}"), add)(op)
        cuda = sys.modules.get(f"calcvm.kernels_cuda.{family}")  # a later import reads the table
        if cuda is not None:
            getattr(cuda, add)(op)
        _forget(*spec.rows)
        return op

    return decorate if of is None else decorate(of)


def _withdraw(former: OpSpec | None, kernels: list[dict[str, Any]]) -> None:
    """Remove a custom operator from the tables, with its rows and their kernels."""
    own = [row.name for row in former.rows if row.name in _spec.OWN] if former else []
    if former and own:
        del _spec.OPS[former.name]
        for known in (_spec.ROWS, *kernels):
            for name in own:
                known.pop(name, None)


# ---------------------------------------------------------------- kernels
def check_kernel(kernel: Any, row: RowSpec | None = None) -> None:
    """Raise CalcError if a kernel's parameters do not fit its row, if that is known, or the row is calcvm's own."""
    row = row or _spec.ROWS.get(kernel.name)
    if row is None:
        return
    if not is_own(row):
        raise CalcError(f"kernel {kernel.name!r}: the row of that name is calcvm's own: choose another name")
    wanted = [(word.name, "float" if word.kind == "float" else "int") for word in row.words]
    wanted += [(operand.name, "ptr" if operand.type == FLOAT else f"ptr.{operand.type}") for operand in row.operands]
    first = [*inspect.signature(kernel.fn, eval_str=False).parameters][:1]
    if first != ["me"] or tuple(wanted) != kernel.words:
        written = ["me", *(f"{name}{ANNOTATIONS.get(kind, f': P{kind[1:]}')}" for name, kind in wanted)]
        raise CalcError(f"kernel {kernel.name!r}: its parameters must be ({', '.join(written)}), as its row says")


def register_kernel(common: Any, fn: Callable) -> Callable:
    """Register the kernel of the row of its name in a device's ``_common``.  If it does not fit, the former one stays."""
    if not isinstance(fn, FunctionType) or not fn.__name__.isidentifier():
        raise CalcError(f"@kernel takes a function named like a row, not {fn!r}")
    steps = [(step.opname, step.argval) for step in dis.get_instructions(fn)]
    if ("LOAD_GLOBAL", "print") in steps or {name for name, _ in steps} & {"RAISE_VARARGS", "YIELD_VALUE"}:
        raise CalcError(
            f"kernel {fn.__name__!r}: compiled code cannot raise, assert, yield or print: trap(...) ends a call"
        )
    before = common.KERNELS.pop(fn.__name__, None)
    common.kernel(fn)
    try:
        check_kernel(common.KERNELS[fn.__name__])
    except CalcError:
        del common.KERNELS[fn.__name__]
        if before is not None:
            common.KERNELS[fn.__name__] = before
        raise
    _forget(_spec.ROWS.get(fn.__name__))
    return fn


def _forget(*rows: RowSpec | None) -> None:
    """Drop cached code, so that programs loaded from now on use the current kernels of these rows."""
    loaded = sys.modules.get("calcvm.vm.run.loaded")
    if loaded is not None:
        loaded.forget({row.name for row in rows if row is not None})
