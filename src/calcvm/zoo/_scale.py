"""Parameters common to all networks of the zoo."""

from __future__ import annotations

from collections.abc import Callable

from calcvm import checks

LARGEST = 2**20


def scaled(name: str, classes: int, width: int, published: int, size: int, least: int) -> Callable[[int], int]:
    """Check the parameters.  Return a function from a published number of channels to that of a network of this width."""
    checks.integer(f"zoo.{name}: classes", classes, 1, LARGEST)
    checks.integer(f"zoo.{name}: width", width, 1, LARGEST)
    checks.integer(f"zoo.{name}: size", size, least, LARGEST)
    return lambda channels: max(channels * width // published, 1)
