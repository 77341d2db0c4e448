"""The table of operators of PyTorch's library ATen.

A function of the table gets the `Building`, then the operator's arguments, types by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from calcvm.frontends.building import declaring

RANDOM = "bernoulli multinomial normal normal_functional rand rand_like randint randint_like randn randn_like randperm uniform".split()
CHECKS = "_assert_async _assert_scalar _assert_tensor_metadata sym_constrain_range sym_constrain_range_for_size".split()
# the argument with weights that rows read as (inputs, outputs)
ACROSS = {"linear": 1, "lstm": 2, "gru": 2, "rnn_tanh": 2, "rnn_relu": 2}
GETITEM, SIZE = "getitem", "sym_size"

ATEN: dict[str, Callable[..., Any]] = {}
aten = declaring(ATEN)  # by names of operators without their forms: "max" for aten.max.dim


def counterpart(name: str) -> Callable[..., Any] | None:
    """The function for an operator, which may work in place, or None."""
    return ATEN.get(name) or ATEN.get(name.removesuffix("_"))
