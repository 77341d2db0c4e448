"""States that are carried from call to call, on the simulated GPU."""

import numpy as np
import pytest

import calcvm as cv
from tests.test_carry import START, Twin, X, compare, play, program


@pytest.mark.parametrize("mode", ["grid", "graph"])
def test_a_simulated_gpu_carries_the_states(gpu, mode):
    p = program(device="cuda", mode=mode, workers=2)
    heap = cv.CalcHeap(2 * p.heap_bytes, device="cuda")
    model = heap.create(p, seed=1)
    twin = Twin(model)
    play(model, twin, 12, np.random.default_rng(5))
    one, pair = model.stream(), model.stream(batch=2, place=3)
    for k in range(3):
        for stream, at in ((one, slice(0, 1)), (pair, slice(3, 5))):
            twin.h[at] = np.tanh(X[k, at] @ twin.W + twin.h[at] @ twin.U)
            np.testing.assert_allclose(stream(X[k, at]), twin.h[at], atol=1e-12)
    pair.reset()
    one.state = {"h": np.ones((1, 4))}
    twin.h[3:5], twin.trained[3:5], twin.h[0] = START, 0, 1
    compare(model, twin)
