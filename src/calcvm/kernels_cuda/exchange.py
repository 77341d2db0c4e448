"""Kernels of values copied from device to device between two rows."""

from __future__ import annotations

from calcvm.kernels_cuda._common import kernel
from calcvm.kernels_shared.exchange import receive, send

kernel(send)
kernel(receive)
