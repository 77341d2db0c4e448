"""A Numba whose integers of code, ``types.intp``, have 32 bits, as Numba has on machines of 32 bits.

Sizes, offsets and indexes are then typed with 32 bits from the first line of IR on, and nothing is rewritten.  Numba reads the width
once, when it is imported, so a separate process (`calcvm.edge.emission`) calls `narrow` first.  That all numbers fit is checked
where they become constants (`calcvm.edge.straight`).
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

CONFIG = "numba.core.config"


class _Narrow:
    """Finds Numba's configuration, and sets the width once its module has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != CONFIG:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = find_spec(name)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            vars(module).update(MACHINE_BITS=32, IS_32BITS=True)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def narrow() -> None:
    """Make the Numba that this process imports later one of 32 bits."""
    assert "numba" not in sys.modules, "Numba is there already"
    sys.meta_path.insert(0, _Narrow())  # type: ignore[arg-type]
