"""A simulated GPU beside the processor: one plan, two heaps, the numbers of one device to rounding."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.errors import DeviceError


def test_a_gpu_beside_the_processor(gpu) -> None:
    net = nn.Linear(32) >> nn.Tanh() >> nn.Linear(32) >> nn.Sigmoid() >> nn.Linear(4)
    graph = cv.build_graph(net, (8,), "mse", cv.Adam(1e-3))
    whole = cv.plan(graph, batch_size=8, workers=1)
    allowed = int(0.8 * whole.heap_bytes)
    processors = [
        cv.Processor("cpu", memory=allowed),
        cv.Processor("gpu", device="cuda", workers=2, memory=allowed, speed=10),
    ]
    plan = cv.plan_devices(graph, processors, batch_size=8, solver_seconds=5)
    assert plan.alone == (None, None) and all(0 < b <= allowed for b in plan.heap_bytes.values())
    one = cv.CalcHeap(whole.heap_bytes).create(cv.compile(graph, plan=whole), seed=3)
    split = cv.SplitModel(plan, seed=3)
    rng = np.random.default_rng(0)
    for batch in (8, 3, 1):
        data = rng.normal(size=(batch, 8)), rng.normal(size=(batch, 4))
        np.testing.assert_allclose(split.step(*data), one.step(*data), rtol=1e-5)
    for name, value in one.parameters.items():
        np.testing.assert_allclose(split.parameters[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    gpu.library.lose_after(20)  # in the middle of a step
    with pytest.raises(DeviceError) as error:
        for _ in range(5):
            split.step(*data)
    assert error.value.lost
