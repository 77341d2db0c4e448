"""Matrix products by tiles in shared memory."""

from __future__ import annotations


def shared_bytes(threads: int, itemsize: int) -> int:
    """Shared scratch that the largest tile of a block of so many threads takes: what kernels may use."""
    return 32 * threads * itemsize * 2
