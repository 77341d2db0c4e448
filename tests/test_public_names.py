"""The paper's algorithms 2 to 6 with the public names, word for word, and what surrounds them."""

import inspect
import pkgutil

import numpy as np
import pytest

import calcvm as cv
from calcvm.functions import __all__ as FUNCTIONS
from calcvm.gathers import __all__ as GATHERS
from calcvm.images import __all__ as IMAGES


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

    plan = cv.plan(g, batch_size=100, accumulate=True)
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
    model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=4, accumulate=True))
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
    model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=4, keep=["a", "b", "c", "d"]))
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


def softmax(a: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(a - a.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def cross_entropy(a: np.ndarray, axis: int = -1) -> np.ndarray:
    return -np.log(softmax(np.moveaxis(a, axis, -1)))[..., 0].mean()


# public functions with an axis: NumPy's function, and the axes to try besides those that every function takes
REDUCED = [None, (0,), (1, 2), (0, -1), (2, 1, 0)]
OVER = {
    "sum": (np.sum, REDUCED), "mean": (np.mean, REDUCED), "max": (np.max, REDUCED), "min": (np.min, REDUCED),
    "sum_squares": (lambda a, axis=None: np.sum(a * a, axis), REDUCED), "var": (np.var, REDUCED), "std": (np.std, REDUCED),
    "logsumexp": (lambda a, axis=None: np.log(np.sum(np.exp(a), axis)), REDUCED),
    "cumsum": (np.cumsum, []),
    "logcumsumexp": (lambda a, axis: np.log(np.cumsum(np.exp(a), axis)), []),
    "softmax": (softmax, []), "log_softmax": (lambda a, axis=-1: np.log(softmax(a, axis)), []),
    "expand_dims": (np.expand_dims, [3, -4, (0, 2), (-1, 1), (0, 1, 2, 3, 4)]), "squeeze": (np.squeeze, [(0,), (0, -1), None, ()]),
    "concat": (lambda a, axis=-1: np.concatenate([a, 2 * a], axis), []), "stack": (lambda a, axis=0: np.stack([a, 2 * a], axis), [3, -4]),
    "split": (lambda a, axis: np.split(a, 2, axis), []),
    "pick": (lambda a, axis=-1: np.take(a, 0, axis), []), "take": (lambda a, axis=0: np.take(a, [1], axis), []),
    "take_along_axis": (lambda a, axis: np.take_along_axis(a, np.zeros(a.shape, int), axis), []),
    "scatter_add": (lambda a, axis=0: np.concatenate([np.take(a, [0], axis), 2 * np.take(a, [1], axis), np.delete(a, [0, 1], axis)], axis), []),
    "argmax": (np.argmax, [None]), "argmin": (np.argmin, [None]), "sort": (np.sort, []), "argsort": (np.argsort, []),
    "top_k": (lambda a, axis=-1: [np.max(a, axis, keepdims=True), np.argmax(a, axis, keepdims=True)], []),
    "cumprod": (np.cumprod, []), "cummax": (np.maximum.accumulate, []), "cummin": (np.minimum.accumulate, []),
    "softmax_cross_entropy": (cross_entropy, []), "accuracy": (lambda a, axis=-1: (a.argmax(axis) == 0).mean(), []),
}  # fmt: skip
AXES = {"softmax": [1, 2, -1, -2], "squeeze": [0, 2, -1, -3]}
AXES |= dict.fromkeys(("log_softmax", "softmax_cross_entropy", "accuracy"), AXES["softmax"])


def built(name: str, x: cv.Variable, **given: object) -> list[cv.Variable]:
    inputs = {"concat": ([x, 2 * x],), "stack": ([x, 2 * x],), "split": (x, 2), "top_k": (x, 1)}.get(name, (x,))
    if name in ("take", "scatter_add", "take_along_axis"):
        updates = [cv.take(x, [1], given.get("axis", 0))] if name == "scatter_add" else []
        inputs = (x, np.zeros((2, 4, 6), int) if name == "take_along_axis" else [1], *updates)
    if name in ("softmax_cross_entropy", "accuracy", "pick"):
        sizes = np.zeros((2, 4, 6))
        inputs = (x, x.graph.constant(x.graph.unique("label"), sizes.min(given.get("axis", -1)), "int64"))
    y = getattr(cv, name)(*inputs, **given)
    return [*y] if isinstance(y, (list, tuple)) else [y]


def test_an_axis_is_called_axis_everywhere():
    """An integer, from either end, or a tuple where several make sense; the values are NumPy's."""
    named = {n: {*inspect.signature(getattr(cv, n)).parameters} for n in (*FUNCTIONS, *GATHERS, *IMAGES)}
    assert {n for n, p in named.items() if "axis" in p} == {*OVER, "random_flip"}
    assert {n for n, p in named.items() if "axes" in p} == {"transpose"}
    rng, tried = np.random.default_rng(0), 0
    for name, (wanted, more) in OVER.items():
        a = rng.standard_normal((1, 4, 1) if name == "squeeze" else (2, 4, 6))
        defaults = [{}] * (
            inspect.signature(getattr(cv, name)).parameters["axis"].default is not inspect.Parameter.empty
        )
        for given in [*defaults, *({"axis": k} for k in (*AXES.get(name, [0, 1, 2, -1, -3]), *more))]:
            g = cv.CalcGraph()
            x = g.constant("x", a)
            with g.path("p", adopt=False) as path:
                results = built(name, x, **given)
                results += [getattr(x, name)(**given)] if hasattr(cv.Variable, name) else []
            values, want = path.evaluate({}), wanted(a, **given)
            wants = want if isinstance(want, list) else [want] * len(results)
            for y, w in zip(results, wants, strict=True):
                assert values[y.name].shape == np.shape(w), (name, given)
                np.testing.assert_allclose(values[y.name], w, 1e-12, 1e-12, err_msg=f"{name} {given}")
                tried += 1
    assert tried > 150


def test_methods_of_a_variable_are_numpys():
    """Also as a program runs them, with the batch open."""
    g = cv.CalcGraph()
    x, data = g.placeholder("x", (None, 4, 6)), np.random.default_rng(0).standard_normal((3, 4, 6))
    with g.path("run") as path:
        results = {
            "sum": (x.sum((1, -1), True), data.sum((1, -1), keepdims=True)), "T": (x.T, data.T), "mean": (x.mean(0), data.mean(0)),
            "reshape": (x.reshape(None, 8, -1), data.reshape(3, 8, -1)), "of a tuple": (x.reshape((-1, 6)), data.reshape(-1, 6)),
            "of sizes": (x.reshape(x.shape[0], x.shape[1], 2, 3), data.reshape(3, 4, 2, 3)), "one": (x.reshape(-1), data.reshape(-1)),
            "of a whole batch": (x.reshape(-1, 3, 2).reshape(x.reshape(-1, 3, 2).shape), data.reshape(-1, 3, 2)),
            "transpose": (x.transpose(0, 2, 1), data.transpose(0, 2, 1)), "by a tuple": (x.transpose((2, 0, 1)), data.transpose(2, 0, 1)),
            "turned": (x.transpose(), data.transpose()), "from behind": (x.transpose(-1, 0, -2), data.transpose(-1, 0, -2)), "flatten": (x.flatten(), data.reshape(3, -1)), "abs": (abs(x), abs(data)),
            "astype": (x.astype("int32"), data.astype("int32")), "cumsum": (x.cumsum(1), data.cumsum(1)), "var": (x.var(2), data.var(2)),
            "stack": (cv.stack([x, x + 1], axis=1), np.stack([data, data + 1], axis=1)),
            "stacked": (cv.stack([x, x, x]), np.stack([data] * 3)), "split": (cv.split(x, [1, 3], 1)[1], np.split(data, [1, 3], 1)[1]),
            "squeeze": (cv.squeeze(cv.expand_dims(x, (0, -1))), data), "max": (x.max(-1), data.max(-1)), "min": (x.min(1), data.min(1)),
        }  # fmt: skip
        for wrong, why in (
            (lambda: cv.split(x, 5, -1), r"the 6 elements of axis 2 do not make 5 equal parts"), (lambda: cv.split(x, 3, 0), "axis 0 is the batch"),
            (lambda: cv.squeeze(x, 1), "axis 1 must have size 1"), (lambda: cv.squeeze(x, 0), "axis 0 must have size 1"),
            (lambda: cv.expand_dims(x, 4), "axis 4 is outside 4 dimensions"), (lambda: cv.expand_dims(x, (0, -5)), "names a dimension twice"),
            (lambda: cv.stack([x, x[:, 1:]]), "the other sizes must agree"), (lambda: cv.stack(x), "stack: give a list of variables"),
            (lambda: x.sum(axis=3), r"axis 3 is outside 3 dimensions"), (lambda: x.mean(axis=(1, -2)), "names a dimension twice"),
        ):  # fmt: skip
            with pytest.raises(cv.ShapeError, match=why):
                wrong()
    values = path.evaluate({"x": data})
    program = cv.compile(g, batch_size=5, dtype="float64", keep=[y.name for y, _ in results.values()])
    model = cv.CalcHeap("1 MiB").create(program)
    model["x"] = data
    model.forward("run")
    for name, (y, want) in results.items():
        for got in (values[y.name], model[y.name]):
            assert got.shape == want.shape, name
            np.testing.assert_allclose(got, want, 1e-12, 1e-12, err_msg=name)


def test_functions_say_what_they_are():
    for name in (*FUNCTIONS, *IMAGES):
        function = getattr(cv, name)
        assert function.__name__ == name and function.__doc__ and inspect.signature(function).return_annotation, name
    assert str(inspect.signature(cv.relu)) == "(x: 'Variable') -> 'Variable'" and cv.relu.__doc__ == "max(x, 0)."


def test_no_package_hides_a_function():
    """Python sets the attribute `calcvm.x` when a module calcvm/x.py is imported."""
    modules = {found.name for found in pkgutil.iter_modules(cv.__path__)}
    assert modules & {*cv.__all__, *FUNCTIONS} == {"init", "nn", "zoo"}
