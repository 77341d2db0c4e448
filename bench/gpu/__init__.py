"""P12: calcvm's CUDA device beside its peers on the same GPU, and what the GPU itself allows.

``python -m bench gpu [--part mlp,tiny,fleet,machine] [--who NAME,...] [--quick]``.  Each part stores its own result, so
that a short lease of a GPU can be spent on one of them.  Without a GPU the command says so and exits with status 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

PARTS = ("mlp", "tiny", "fleet", "machine")
NOT_MEASURED = "no GPU was there: not measured"


class NoGpu(Exception):
    """There is nothing to measure on; the text says what is missing."""


def open_driver() -> Any:
    """The driver of the GPU (NoGpu: there is none, or numba-cuda is missing)."""
    errors = import_module("calcvm.errors")
    try:
        import_module("calcvm.kernels_cuda._cuda")
        return import_module("calcvm.vm.run.cuda.driver").Driver.open()
    except (errors.DeviceError, errors.MissingExtra) as error:
        raise NoGpu(str(error)) from None


def main(quick: bool = False, parts: Sequence[str] = (), who: Sequence[str] = ()) -> bool:
    """Run the parts (default all) with the contestants ``who`` (default all); True when every check held.

    Raises
    ------
    NoGpu : no part was run.
    """
    unknown = {*parts} - {*PARTS}
    if unknown:
        raise SystemExit(f"--part {','.join(sorted(unknown))}: take some of {','.join(PARTS)}")
    limits = import_module("bench.gpu.limits").measure(open_driver(), quick)
    correct = True
    for part in parts or PARTS:
        if part == "machine":
            correct &= import_module("bench.gpu.machine").main(limits, quick)
        elif part == "fleet":
            correct &= import_module("bench.gpu.fleet").main(limits, quick, who)
        else:
            correct &= import_module("bench.gpu.mlp").main(limits, part, quick, who)
    return correct
