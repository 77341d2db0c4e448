"""The instruction set: one `OpSpec` per operator, by family; data and small functions only."""

from __future__ import annotations

from importlib import import_module

from calcvm.ops.spec import OPS, ROWS, OpSpec, RowSpec, register

FAMILIES = (
    "contraction",
    "convolution",
    "elementwise",
    "reduction",
    "normalization",
    "pooling",
    "shape",
    "resizing",
    "random",
    "losses",
    "optimizers",
)
for _family in FAMILIES:
    import_module(f"calcvm.ops.{_family}")
for _rows in ("paging", "exchange"):  # that no operator has
    import_module(f"calcvm.ops.{_rows}")

__all__ = ["FAMILIES", "OPS", "ROWS", "OpSpec", "RowSpec", "register"]
