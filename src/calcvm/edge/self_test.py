"""The self-test of a pack: a device computes from data of a formula what the PC has computed from them.

So a wrong option of a compiler or linker is found, such as another convention for floats, with which a pack may train wrongly
without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from calcvm.edge.description import Array, Function
from calcvm.edge.on_board import TOLERANCE, _pattern
from calcvm.errors import Trap
from calcvm.ops.statement import PHASES

if TYPE_CHECKING:
    from calcvm.vm.memory.base_model import BaseModel

MOST = 16  # elements of an output that are compared


def expected(
    model: BaseModel, functions: Mapping[str, Function], arrays: Mapping[str, Array]
) -> dict[str, dict[str, list[float]]]:
    """What a model computes of the data, each path once, in order: by function and output its first elements.

    An output that is another if the data differ by rounding alone is left out: such as after a step of Adam by a gradient that is
    nothing but rounding, which that of a bias before a batch norm is.

    functions : by path.
    """
    found, beside = (_computed(model, functions, arrays, by) for by in (1, 1 + 3e-7))
    if not beside:
        return {}
    return {
        function: {name: values for name, values in outputs.items() if _near(beside[function][name], values)}
        for function, outputs in found.items()
    }


def _near(found: list[float], wanted: list[float]) -> bool:
    return np.abs(np.subtract(found, wanted)).max() <= TOLERANCE / 4 * max(1e-6, *map(abs, wanted))


def _computed(
    model: BaseModel, functions: Mapping[str, Function], arrays: Mapping[str, Array], by: float
) -> dict[str, dict[str, list[float]]]:
    """What it computes of the data times a number; nothing if it cannot, or some of it is not finite."""
    host = model.copy(heap=type(model.heap)(model.program.heap_bytes))  # type: ignore[attr-defined]
    found: dict[str, dict[str, list[float]]] = {}
    try:
        for path, function in functions.items():
            for name in function.feeds:
                of = asdict(arrays[name])
                host[name] = _pattern(of) * (by if of["dtype"].startswith("float") and not of["classes"] else 1)
            host.run_round(path, PHASES if host.loaded.paths[path]["backward"] else PHASES[:1])
            outputs = {
                name: host[name].ravel()[:MOST] for name in function.outputs if arrays[name].dtype == host.program.dtype
            }
            if not all(np.isfinite(values).all() for values in outputs.values()):
                return {}
            found[function.name] = {name: values.tolist() for name, values in outputs.items()}
    except Trap:
        return {}
    finally:
        host.close()
    return found
