"""A simulated GPU for the tests of this folder: programs run on it as on a real one, but for the compiler."""

from __future__ import annotations

import gc

import pytest

from calcvm.vm.cuda import device as module
from calcvm.vm.cuda.device import Cuda
from calcvm.vm.cuda.driver import Driver
from calcvm.vm.cuda.simulated import Library


@pytest.fixture
def gpu(monkeypatch):
    """A device of two multiprocessors of its own."""
    library = Library(1 << 24, multiprocessors=2)
    cuda = Cuda(Driver(library), compiled=False, threads=4, fleet_threads=4)
    cuda.library = library
    monkeypatch.setattr(module, "_device", cuda)
    from calcvm.vm import binding

    monkeypatch.setattr(binding, "_bindings", type(binding._bindings)())  # those of other devices
    yield cuda
    gc.collect()
