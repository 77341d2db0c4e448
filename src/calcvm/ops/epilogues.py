"""Epilogues: what a row does to its result for the rows after it, while that is still in cache.

A row says which kinds it takes, in the order in which it applies them, and a row that can be one says as which.  Each
kind has words and operands that every row has which takes it.  Lowering's fusion knows these declarations, and no operator.
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
    """Words of a row that takes these."""
    return (ACT, ALPHA) if {"activation", "derivative"} & {*takes} else ()


def operands_of(takes: tuple[str, ...], size: str, part: str, columns: str = "") -> tuple[Operand, ...]:
    """Its operands, for a result of this size and part, of so many columns."""
    of = {
        "normalization": [R(name, columns, optional=True) for name in ("mean", "factor", "offset")],
        "addition": [R("other", size, part, optional=True)],
        "derivative": [R("ya", size, part, optional="act == 0")],
    }
    return tuple(o for kind in takes for o in of.get(kind, ()))


def of_formula(name: str, reads: tuple[str, ...], params: Iterable[str]) -> tuple[Epilogue, ...]:
    """What the row of a formula is: of activations the forward, and the backward, if that reads the gradient and the output."""
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
