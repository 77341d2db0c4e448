"""Plain data: frozen dataclasses for which `dataclass` generates only ``__init__``.

Otherwise it would compile five more functions per class, 0.2 ms of import: with a hundred classes a fifth of calcvm's import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**options: Any) -> Any:
        return lambda decorator: decorator


@dataclass_transform(frozen_default=True)
def frozen(cls: Any = None, *, kw_only: bool = False) -> Any:
    """Like ``@dataclass(frozen=True)``: equality by fields, a repr like the call, and no assignment."""
    if cls is None:
        return lambda cls: frozen(cls, kw_only=kw_only)
    for name in ("__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__"):
        if name not in vars(cls):
            setattr(cls, name, vars(_Record)[name])
    above = [base.__dataclass_params__ for base in cls.__mro__[1:] if "__dataclass_params__" in vars(base)]
    for params in above:
        params.frozen = False
    made = dataclass(repr=False, eq=False, kw_only=kw_only)(cls)
    for params in (*above, made.__dataclass_params__):  # `dataclass` requires it of base classes, if users derive some
        params.frozen = True
    return made


def shown(self: Any) -> str:
    """The repr, like the call that made it."""
    given = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr)
    return f"{type(self).__qualname__}({given})"


_compares: Callable[[Any], tuple[str, ...]] = cache(lambda cls: tuple([f.name for f in fields(cls) if f.compare]))


class _Record:
    """The methods of all records."""

    __repr__ = shown

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        for name in _compares(type(self)):  # most differ in the first field, so the loop ends early
            a, b = getattr(self, name), getattr(other, name)
            if a is not b and a != b:
                return False
        return True

    def __hash__(self) -> int:
        return hash(tuple([getattr(self, name) for name in _compares(type(self))]))

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if name in own or name not in self.__dataclass_fields__:  # type: ignore[attr-defined]
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        own[name] = value  # in half the time of `object.__setattr__`: an import sets 28,000

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")
