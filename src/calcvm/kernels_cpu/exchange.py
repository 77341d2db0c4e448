"""Kernels of values copied from device to device between two rows: they do nothing."""

from __future__ import annotations

from calcvm.kernels_cpu._common import Ptr, kernel


@kernel
def send(me, n, x: Ptr.cells):
    """x (n) is copied to another device after this row."""


@kernel
def receive(me, n, y: Ptr.cells):
    """y (n) has been copied from another device before this row."""
