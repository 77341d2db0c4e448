"""Properties that are computed once, without a lock: a forked child could inherit a lock that another thread holds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property
else:

    class cached_property:  # noqa: N801
        """`functools.cached_property` as from Python 3.12 on: two threads may both compute the value; one result stays."""

        def __init__(self, func: Any):
            self.func, self.__doc__ = func, func.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            if instance is None:
                return self
            return instance.__dict__.setdefault(self.name, self.func(instance))


__all__ = ["cached_property"]
