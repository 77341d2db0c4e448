"""Paths that learn in turn on a simulated GPU: in all ways the bits of a loop over steps, and the numbers of the CPU."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn

RNG = np.random.default_rng(0)
ORDER = ("critic", "critic", "generator")
DATA = {name: RNG.standard_normal((13, n)).astype("float32") for name, n in (("real", 4), ("noise", 3))}
WAYS = {
    "one block": dict(mode="grid", workers=1),
    "grid": dict(mode="grid", workers=2),
    "graph": dict(mode="graph", workers=2),
}


def gan() -> cv.CalcGraph:
    critic, generator = nn.Linear(5) >> nn.Tanh() >> nn.Dropout(0.2) >> nn.Linear(1), nn.Linear(4)
    g = cv.CalcGraph()
    real, noise = g.placeholder("real", (None, 4)), g.placeholder("noise", (None, 3))
    with g.path("critic", backward=True) as path:
        fake = cv.stop_gradient(generator.build(noise, "generator.", training=True))
        a, b = (critic.build(x, "critic.", training=True) for x in (real, fake))
        path.minimize(cv.mean(cv.softplus(-a) + cv.softplus(b)), cv.Adam(1e-2), parameters=g.parameters("critic."))
    with g.path("generator", backward=True) as path:
        drawn = critic.build(generator.build(noise, "generator.", training=True), "critic.", training=True)
        path.minimize(cv.mean(cv.softplus(-drawn)), cv.SGD(1e-2), parameters=g.parameters("generator."))
    return g


def model(device, **how):
    return cv.Model(gan(), batch_size=4, device=device, seed=1, **how)


def bits(m):
    return {name: value.tobytes() for name, value in m.parameters.items()}


def near(a, b):
    for name, value in a.parameters.items():
        np.testing.assert_allclose(b.parameters[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_steps(gpu):
    cpu, found = model("cpu"), {}
    for way, how in WAYS.items():
        one, many = model("cuda", **how), model("cuda", **how)
        for m in (one, many, cpu):
            m["real"], m["noise"] = DATA["real"][:3], DATA["noise"][:3]
        losses = one.run_steps(2, order=ORDER)
        for _ in range(2):
            wanted = {path: many.run_steps(1, path=path) for path in ORDER}
        assert losses == wanted and bits(one) == bits(many) and one.steps_done == 6
        found[way] = bits(one)
    assert len({str(of) for of in found.values()}) == 1
    assert cpu.run_steps(2, order=ORDER) == pytest.approx(losses, rel=1e-5)
    near(cpu, one)


@pytest.mark.parametrize("learning", [None, 6])
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_fit(gpu, way, far, learning):
    gpu.reserved_bytes = 1 << 60 if far else 0
    cpu, m = model("cpu", learning_batch=learning), model("cuda", learning_batch=learning, **WAYS[way])
    a, b = (x.fit(DATA, order=ORDER, epochs=2, progress=False) for x in (cpu, m))
    assert a["critic.loss"] == pytest.approx(b["critic.loss"], rel=1e-5)
    assert a["generator.loss"] == pytest.approx(b["generator.loss"], rel=1e-5)
    near(cpu, m)
    assert m.steps_done == cpu.steps_done and not m.adding


@pytest.mark.parametrize("learning", [None, 6])
def test_fleets(gpu, learning):
    fleet = cv.Fleet("1 MiB", device="cuda")
    handles = [
        fleet.add(gan(), data=DATA, order=ORDER, batch_size=4, learning_batch=learning, seed=s) for s in (1, 2, 3)
    ]
    fleet.fit(epochs=2, progress=False)
    alone = model("cuda", learning_batch=learning, mode="grid", workers=1)
    history = alone.fit(DATA, order=ORDER, epochs=2, progress=False)
    assert bits(handles[0].model) == bits(alone) != bits(handles[1].model)
    assert handles[0].losses_of["generator.loss"].tolist() == history["generator.loss"]
    assert handles[0].losses.tolist() == history["critic.loss"] and handles[0].status == "done"


def test_paths_of_one_optimizer(gpu):
    def made(share, device="cuda", **how):
        g, first = cv.CalcGraph(), None
        x, t, net = g.placeholder("x", (None, 4)), g.placeholder("t", (None, 2)), nn.Linear(2)
        for name in "ab" if share else "a":
            with g.path(name, backward=True) as path:
                path.minimize(
                    cv.mse(net.build(x, "net.", training=True), t), None if first else cv.Adam(0.1), state_of=first
                )
            first = path
        program = cv.compile(g, batch_size=5, device=device, **how)
        return cv.CalcHeap(program.heap_bytes, device=device).create(program, seed=1)

    for how in WAYS.values():
        two, one = made(True, **how), made(False, **how)
        for path in "abba":
            x, t = RNG.standard_normal((5, 4)), RNG.standard_normal((5, 2))
            assert two.step(x, t, path=path) == one.step(x, t)
        assert bits(two) == bits(one) and two.steps_done == 4
