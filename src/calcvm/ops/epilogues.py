"""Epilogues: work for later rows that a row does on its result while it is still in cache.

A row declares which kinds it takes, in the order in which it applies them; a row that can become an epilogue declares as which.
Each kind has words and operands, which every row that takes it has.  Lowering's fusion knows these declarations, but no operator.
"""

from __future__ import annotations

from collections.abc import Iterable

from calcvm.formulas.elementwise import ACTIVATIONS
from calcvm.ops.spec import Epilogue, Operand, R, Word

ACT = Word(name="act", kind="int", lo=0, hi=len(ACTIVATIONS) - 1, default=0)
ALPHA = Word(name="alpha", kind="float", lo=-1e30, hi=1e30, default=0.0)  # slope of leaky_relu, alpha of elu
FORWARD, BACKWARD = ("addition", "activation"), ("addition", "derivative")
ALL = ("normalization", *FORWARD)


def words_of(takes: tuple[str, ...]) -> tuple[Word, ...]:
    """The words of a row that takes these."""
    return (ACT, ALPHA) if {"activation", "derivative"} & {*takes} else ()


def operands_of(takes: tuple[str, ...], size: str, part: str, columns: str = "") -> tuple[Operand, ...]:
    """Its operands, for a result of this size and part, with so many columns."""
    of = {
        "normalization": [R(name, columns, optional=True) for name in ("mean", "factor", "offset")],
        "addition": [R("other", size, part, optional=True)],
        "derivative": [R("ya", size, part, optional="act == 0")],
    }
    return tuple(o for kind in takes for o in of.get(kind, ()))


def of_formula(name: str, reads: tuple[str, ...], params: Iterable[str]) -> tuple[Epilogue, ...]:
    """The epilogues of a formula's row: an activation's forward, and its backward if that reads the gradient and the output."""
    if name == "add_fwd":
        return tuple(Epilogue(kind="addition", reads=z, operands=(("other", r),)) for z, r in (("a", "b"), ("b", "a")))
    act = name.rpartition("_")[0]
    if act not in ACTIVATIONS[1:] or reads not in (("x",), ("dy", "y")):
        return ()
    words: tuple[tuple[str, int | str], ...] = (
        ("act", ACTIVATIONS.index(act)),
        *(("alpha", param) for param in params),
    )
    if reads == ("x",):
        return (Epilogue(kind="activation", reads="x", words=words),)
    return (Epilogue(kind="derivative", reads="dy", words=words, operands=(("ya", "y"),)),)


_BY_WHAT_IS_KNOWN = (("mean", "running_mean"), ("factor", "t_factor"), ("offset", "shift"))
NORMALIZATION = Epilogue(kind="normalization", reads="x", operands=_BY_WHAT_IS_KNOWN)
