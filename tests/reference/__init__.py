"""The float64 definition of every operator, in plain NumPy: what kernels are tested against.

A reference takes the operator's inputs as arrays and its attributes by name, and returns the output, or
a dict of outputs and saved values by name (for rows that update in place: their new values).  An operator that is declared by
its equation and has none here is compared with the equation, and with PyTorch in tests/test_operators.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from calcvm.equations.declare import Declared
from calcvm.equations.declared import DECLARED
from calcvm.equations.meaning import evaluate
from calcvm.equations.places import size
from calcvm.equations.rows import read_ranged
from calcvm.ops import FAMILIES, OPS, OpSpec
from calcvm.ops.dims import shape_of


def reference(name: str) -> Callable | None:
    """The reference of an operator; None if nobody wrote it."""
    for family in FAMILIES:
        try:
            module = import_module(f"tests.reference.{family}")
        except ModuleNotFoundError:
            continue
        found = getattr(module, name, None)
        if found is not None and getattr(found, "__module__", "") == module.__name__:
            return found
    return partial(by_equation, OPS[name], DECLARED[name]) if name in DECLARED else None


def by_equation(spec: OpSpec, declared: Declared, *inputs: np.ndarray, **attrs: Any) -> dict[str, np.ndarray]:
    """What an operator that is declared by its equation computes, by the equation."""
    plain = declared.forward.plain
    attrs = {a.name: a.default for a in spec.attrs} | attrs
    given = dict(zip(spec.inputs, inputs))
    shapes = {slot: shape_of(x.shape) for slot, x in given.items()}
    made = spec.shape(shapes, attrs)
    words = {word: n if isinstance(n, float) else int(n) for word, n in spec.words(shapes | made, attrs).items()}
    values = {slot: x.reshape([size(n, words) for n in plain.axes[slot]]) for slot, x in given.items()}
    found = evaluate(read_ranged(plain.text, plain.declares, plain.operands).equations, values, words)
    return {slot: found[slot].reshape([n.b for n in made[slot]]) for slot in spec.outputs}
