"""The instruction set: one `OpSpec` per operator, by family; data and small functions only."""

from __future__ import annotations

# isort: off
# their order is the table's
from calcvm.ops import (
    contraction,
    transformers,
    convolution,
    elementwise,
    reduction,
    declared,
    recurrent,
    normalization,
    pooling,
    quantized,
    shape,
    resizing,
    random,
    losses,
    optimizers,
)
from calcvm.ops import paging, exchange  # noqa: F401  (rows that no operator has)

# isort: on
from calcvm.ops.spec import OPS, ROWS, OpSpec, RowSpec, register

FAMILIES = tuple(
    family.__name__.rpartition(".")[2]
    for family in (
        contraction,
        transformers,
        convolution,
        elementwise,
        reduction,
        declared,
        recurrent,
        normalization,
        pooling,
        quantized,
        shape,
        resizing,
        random,
        losses,
        optimizers,
    )
)

__all__ = ["FAMILIES", "OPS", "ROWS", "OpSpec", "RowSpec", "register"]
