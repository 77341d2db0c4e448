"""Dropout draws the same numbers on every device."""

from __future__ import annotations

import numpy as np
import pytest

from calcvm.ops import OPS
from calcvm.ops.spec import Example
from tests import rowrun
from tests.cuda.simulated import Simulated
from tests.rowrun import Case, Cpu, same_bits

STATES = [
    (3, 5, 0),
    (0, 0, 0),
    (-7, 2**40, 2**31 - 1),
    (2**63 - 1, 1, 17),
    (-(2**63), 2**63 - 1, 1),
]  # seed, counter, stream


def dropped(backend, monkeypatch, dtype, state, rate, shape=(23, 11), n_workers=1):
    """Forward and backward of ones."""
    monkeypatch.setattr(rowrun, "backend", backend)
    *rng, stream = state
    case = Case(OPS["dropout"], Example(shapes=(shape, (2,), ()), attrs={"stream": stream}), dtype, 1)
    ones = np.ones(int(np.prod(shape)), dtype)
    case.values |= {"x": ones, "rng": np.array(rng), "rate": np.array([rate])}
    values = case.forward(n_workers=n_workers) | {"dy": ones}
    return values["y"], case.backward(values, n_workers=n_workers)["dx"]


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.97, 1.0, -1.0, 2.0, np.nan])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_same_bits_as_on_the_cpu(monkeypatch, dtype, rate):
    for state in STATES:
        want = dropped(Cpu(), monkeypatch, dtype, state, rate)
        for threads, n_workers in ((4, 1), (16, 3)):
            got = dropped(Simulated(threads), monkeypatch, dtype, state, rate, n_workers=n_workers)
            assert all(map(same_bits, got, want)), (state, threads)


def test_masks_differ_by_seed_counter_and_stream(monkeypatch):
    masks = {dropped(Simulated(), monkeypatch, "float32", state, 0.5)[0].tobytes() for state in STATES}
    assert len(masks) == len(STATES)


def test_one_thread_advances(monkeypatch):
    monkeypatch.setattr(rowrun, "backend", Simulated(16))
    case = Case(OPS["rng_advance"], Example(shapes=((2,),)), "float32", 1)
    case.values["rng"] = np.array([-9, 41])
    assert case.forward(n_workers=3)["rng"].tolist() == [-9, 42]
