"""A simulated GPU for the tests of this folder: programs run on it as on a real one, but for the compiler."""

from __future__ import annotations

import gc

import pytest

from calcvm.testing.cuda_driver import Library
from calcvm.vm.run.cuda import device as module
from calcvm.vm.run.cuda.device import Cuda
from calcvm.vm.run.cuda.driver import Driver


@pytest.fixture
def gpu(monkeypatch):
    """A device of two multiprocessors of its own."""
    library = Library(1 << 24, multiprocessors=2)
    cuda = Cuda(Driver(library), compiled=False, threads=4, fleet_threads=4)
    cuda.library = library
    monkeypatch.setattr(module, "_device", cuda)
    from calcvm.vm.run import loaded

    monkeypatch.setattr(loaded, "_loaded", type(loaded._loaded)())  # those of other devices
    yield cuda
    gc.collect()
