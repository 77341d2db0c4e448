"""Operators of one's own: what declares them.  Their kernels are written with `calcvm.operators.cpu` and ``.cuda``.

CONTRIBUTING.md has the recipe; ``from calcvm.operators import ...`` is the same as what the library's own are made of.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from calcvm.errors import CalcError
from calcvm.ops import spec as _spec
from calcvm.ops.dims import Affine, Shape, numel
from calcvm.ops.sizes import MACHINE, reads
from calcvm.ops.spec import (
    ACC,
    OWN_OPCODES,
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
    rows_cols,
    same_shape,
)

__all__ = [
    "ACC", "A", "Affine", "Attr", "Example", "OpSpec", "Operand", "R", "RowSpec", "S", "Shape", "U", "W", "Word", "choice",
    "dims", "numel", "register_op", "rows_cols", "same_shape",
]  # fmt: skip

ANNOTATIONS = {"int": "", "float": ": Float", "ptr": ": Ptr"}  # of a kernel's parameters


def register_op(spec: OpSpec) -> OpSpec:
    """Add an operator to the table, for `calcvm.apply`.

    Its rows have opcodes made of their names: leave them out.  They are the same in every process, so that stored programs
    find them; two names that meet are refused.

    Raises
    ------
    CalcError : it is no `OpSpec`; its name, or the name or opcode of a row, is taken or not for users; an expression of a
        row reads what is no word of it, or an operand is nothing that the operator has.
    """
    for row in spec.rows if isinstance(spec, OpSpec) else ():
        if row.opcode not in OWN_OPCODES and _spec.ROWS.get(row.name) is not row and row.opcode not in _spec.OPCODES:
            raise CalcError(
                f"operator {spec.name!r}: opcode {row.opcode} of row {row.name!r} is kept for calcvm's own: leave it out"
            )
        if row.opcode in OWN_OPCODES:
            check_row(spec, row)
        for device in ("cpu", "cuda"):
            known = sys.modules.get(f"calcvm.kernels_{device}._common")
            if known is not None and row.name in known.KERNELS and row.opcode in OWN_OPCODES:
                check_kernel(known.KERNELS[row.name], row)
    again = _spec.OPS.get(spec.name) if isinstance(spec, OpSpec) else None
    if again is not None and again.rows == spec.rows and all(row.opcode in OWN_OPCODES for row in spec.rows):
        _spec.OPS[spec.name] = spec = replace(spec, fwd=again.fwd, bwd=again.bwd)  # a notebook's cell, run again
        return spec
    return _spec.register(spec)


def check_row(spec: OpSpec, row: RowSpec) -> None:
    """Refuse a row that could not be lowered, planned or verified."""

    def wrong(what: str) -> CalcError:
        return CalcError(f"operator {spec.name!r}, row {row.name!r}: {what}")

    words, operands = [word.name for word in row.words], {operand.name: operand for operand in row.operands}
    values = (*spec.inputs, *spec.outputs, *spec.saved)
    allowed = {*values, *(f"d{name}" for name in (*spec.inputs, *spec.outputs))}
    for name in (*words, *(operand.name for operand in row.operands)):
        if not name.isidentifier() or [*words, *(operand.name for operand in row.operands)].count(name) > 1:
            raise wrong(f"{name!r} is no name of one word or operand: kernels have them as their parameters")
    expressions = [(f"require {text!r}", text) for text in row.require] + [("flops", row.flops)]
    for name, operand in operands.items():
        if operand.access not in ("r", "w", "a", "u", "s"):
            raise wrong(f"operand {name!r} has access {operand.access!r}: R, W, A, U and S make operands")
        if operand.access != "s" and name not in allowed and not name.startswith("t_"):
            raise wrong(
                f"operand {name!r} is no value of the operator: there are {', '.join(sorted(allowed))}, and temporaries t_..."
            )
        if operand.access == "a" and "acc" not in words:
            raise wrong(f"operand {name!r} may be added to, which the word ACC says: add it to the words")
        texts = {"elems": operand.elems, "part": operand.part, "optional": operand.optional}
        expressions += [
            (f"{what} of operand {name!r}", text)
            for what, text in texts.items() if isinstance(text, str) and (what, text) not in (("part", ""), ("part", "w0"))
        ]  # fmt: skip
    for what, text in expressions:
        try:
            unknown = [name for name in reads(text) if name not in (*words, *MACHINE)]
        except SyntaxError as error:
            raise wrong(f"{what}: {text!r} is no expression ({error.msg})") from None
        if unknown:
            raise wrong(f"{what}: {text!r} reads {unknown[0]!r}; the row's words are {', '.join(words) or 'none'}")
    for pair in row.in_place:
        known = [operands.get(name) for name in pair]
        if len(known) != 2 or known[0] is None or known[1] is None or not (known[0].writes and known[1].reads):
            raise wrong(f"in_place has pairs of an operand that is written and one that is read, not {pair!r}")


def check_kernel(kernel: Any, row: RowSpec | None = None) -> None:
    """Refuse a kernel that does not have the words and operands of its row, if that is known, or that is calcvm's own."""
    row = row or _spec.ROWS.get(kernel.name)
    if row is None:
        return
    if row.opcode not in OWN_OPCODES:
        raise CalcError(f"kernel {kernel.name!r}: the row of that name is calcvm's own: take another name")
    kinds: dict[str, tuple[str, ...]] = {"float": ("float",), "dim": ("int",), "int": ("int",)}
    wanted = [(word.name, kinds[word.kind]) for word in row.words]
    wanted += [(operand.name, ("ptr", "optional")) for operand in row.operands]
    first = [*inspect.signature(kernel.fn, eval_str=False).parameters][:2]
    fits = len(wanted) == len(kernel.words) and all(
        name == other and kind in allowed for (name, kind), (other, allowed) in zip(kernel.words, wanted)
    )
    if first != ["w", "nw"] or not fits:
        written = ["w", "nw", *(f"{name}{ANNOTATIONS[allowed[0]]}" for name, allowed in wanted)]
        raise CalcError(f"kernel {kernel.name!r}: its parameters must be ({', '.join(written)}), as its row says")


def register_kernel(common: Any, fn: Callable) -> Callable:
    """Register the kernel of the row of its name with a device's ``_common``; what was there stays if it does not fit."""
    before = common.KERNELS.pop(fn.__name__, None)
    common.kernel(fn)
    try:
        check_kernel(common.KERNELS[fn.__name__])
    except CalcError:
        del common.KERNELS[fn.__name__]
        if before is not None:
            common.KERNELS[fn.__name__] = before
        raise
    return fn
