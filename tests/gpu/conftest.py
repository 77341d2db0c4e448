"""What tests on a GPU share."""

from __future__ import annotations

import gc

import pytest

from tests.conftest import simulated


@pytest.fixture(autouse=True)
def no_collection_in_a_simulated_thread():
    """A simulated launch holds the device; a finalizer that the collector ran in one of its threads would wait for ever."""
    if not simulated():
        yield
        return
    gc.disable()
    yield
    gc.enable()
    gc.collect()
