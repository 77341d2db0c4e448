"""The paper's algorithms 2 to 6 with the public names, word for word, and what surrounds them."""

import numpy as np
import pytest

import calcvm as cv


def test_algorithms_2_to_6():
    rng = np.random.default_rng(0)
    x, t = rng.standard_normal((100, 6)).astype("float32"), rng.standard_normal((100, 3)).astype("float32")

    g = cv.CalcGraph()
    I = g.placeholder("I", (None, 6))  # noqa: E741
    O = g.placeholder("O", (None, 3))  # noqa: E741
    W = g.parameter("W", (6, 3), init=cv.init.Uniform(0.1, 0.9), regularizer=cv.L2(1e-4))
    with g.path("learn", backward=True) as learn:
        Y = cv.matmul(I, W)
        learn.minimize(cv.mean(cv.abs(Y - O)), optimizer=cv.SGD(1e-3))
    with g.path("score") as score:
        R = cv.rmse(Y, O)

    plan = cv.plan(g, batch_size=100)
    assert (plan.batch_size, plan.heap_bytes) == (100, plan.heap_elems * 4) and "forward" in plan.zones
    assert f"{plan.heap_bytes:,}" in str(plan)
    program = cv.compile(g, plan=plan)
    assert "matmul_fwd" in program.disassemble()
    heap = cv.CalcHeap("64 MiB")
    model = heap.create(program, seed=0)
    w0 = model["W"].copy()
    assert w0.min() >= 0.1 and w0.max() < 0.9
    model["I"] = x
    model["O"] = t
    model.forward("learn")
    model.backward("learn")
    dw = model.grad("W")
    model.optimize("learn")
    w1 = model["W"].copy()
    model.end_round("learn")
    assert not model.grad("W").any()
    model.forward("score")

    sign = np.sign(x @ w0 - t)
    np.testing.assert_allclose(dw, x.T @ sign / 300, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(w1, w0 - 1e-3 * (dw + 2e-4 * w0), rtol=1e-5)
    np.testing.assert_allclose(model["R"], np.sqrt(np.mean((x @ w0 - t) ** 2)), rtol=1e-5)  # Y is the last forward's
    assert (Y.name, R.name, score.name) == ("Y", "R", "score")


def test_two_rounds_accumulate_until_end_round():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 2))
    w = g.parameter("w", (2, 1), init=cv.init.Ones())
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mean(x @ w), optimizer=cv.SGD(0.5))
    model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=4))
    for _ in range(2):
        model["x"] = np.ones((4, 2))
        model.forward("learn")
        model.backward("learn")
    np.testing.assert_array_equal(model.grad("w"), 2.0 * np.ones((2, 1)))
    model.optimize("learn")
    np.testing.assert_array_equal(model["w"], np.zeros((2, 1)))


def test_paths_share_memory_so_a_backward_needs_its_own_forward():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 2))
    w = g.parameter("w", (2, 3))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mean(cv.square(x @ w)), optimizer=cv.SGD(0.5))
    with g.path("other"):
        z = cv.exp(x)
    model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=4))
    model["x"] = np.ones((4, 2))
    with pytest.raises(cv.CalcError, match=r"call forward\('learn'\) first"):
        model.backward("learn")
    model.forward("learn")
    model.forward("other")
    np.testing.assert_allclose(model[z.name], np.full((4, 2), np.e), rtol=1e-6)
    with pytest.raises(cv.CalcError, match=r"'other' has run since forward\('learn'\)"):
        model.backward("learn")
    model.forward("learn")
    model.backward("learn")


def test_memory_gives_the_batch():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 100))
    w = g.parameter("w", (100, 10))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mean(cv.square(x @ w)), optimizer=cv.Adam())
    plan = cv.plan(g, memory="1 MB")
    assert plan.heap_bytes <= 10**6 < cv.plan(g, batch_size=plan.batch_size + 3).heap_bytes
    with pytest.raises(cv.PlanError) as error:
        cv.plan(g, memory=1000)
    assert error.value.allowed == 1000 and error.value.needed == cv.plan(g, batch_size=1).heap_bytes


def test_a_smaller_last_batch_needs_no_new_plan():
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((1065, 6)), rng.integers(0, 3, 1065)
    model = cv.Model(cv.nn.Linear(3), input_shape=(6,), optimizer=cv.SGD(0.1), batch_size=100, dtype="float64")
    rows, address = model.program.rows.copy(), model.heap_address
    w = {k: v.copy() for k, v in model.parameters.items()}
    model.fit(X, y, epochs=1, shuffle=False, progress=False)
    for i in range(0, 1065, 100):  # the same by hand: 10 batches of 100, one of 65
        xb, yb = X[i : i + 100], y[i : i + 100]
        z = xb @ w["linear_1.weight"] + w["linear_1.bias"]
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(yb)), yb] -= 1
        w["linear_1.weight"] -= 0.1 * xb.T @ p / len(yb)
        w["linear_1.bias"] -= 0.1 * p.mean(0)
    np.testing.assert_allclose(model.parameters["linear_1.weight"], w["linear_1.weight"], rtol=1e-10)
    np.testing.assert_array_equal(model.program.rows, rows)
    assert model.heap_address == address


def test_integers_pick_along_an_axis():
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, 3, 4)), g.parameter("w", (5, 4))
    with g.path("learn", backward=True) as learn:
        a, b, c, d = x[:, 1], x[:, -1, 2], x[:, 0:2, 3], w[2]
        loss = cv.mean(cv.square(a - d)) + cv.mean(b) + cv.mean(c)
        learn.minimize(loss, cv.SGD(0.0))
    model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=4, keep=["a", "b", "c", "d"], accumulate=False))
    data = np.random.default_rng(0).standard_normal((3, 3, 4)).astype("float32")
    model["x"] = data
    model.forward("learn")
    for name, want in (("a", data[:, 1]), ("b", data[:, -1, 2]), ("c", data[:, 0:2, 3]), ("d", model["w"][2])):
        np.testing.assert_array_equal(model[name], want)
    model.backward("learn")
    gradient = model.grad("w")
    assert (gradient[[0, 1, 3, 4]] == 0).all() and (gradient[2] != 0).all()
    with g.path("other"):
        for wrong, why in ((lambda: x[0], "is the batch"), (lambda: x[:, 3], "axis 1 has 3 elements"), (lambda: x[:, -4], "axis 1"),
                           (lambda: x[:, True], "a slice with step 1, or an integer"), (lambda: x[:, 0, 0, 0], "at most 3")):  # fmt: skip
            with pytest.raises(cv.ShapeError, match=why):
                wrong()
