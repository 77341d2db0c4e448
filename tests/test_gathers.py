"""Elements at places that are data, places in order, embeddings: beside PyTorch, for any team, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from tests.rowrun import same_bits
from tests.test_script import same as script_does_the_same

torch = pytest.importorskip("torch")
F = torch.nn.functional
BATCH = 5
INT = "int64"


def places(n: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, n, shape)


def run(
    make: Callable, given: dict[str, np.ndarray], types: dict[str, Any], wrt: str, dtype: str, workers: int = 1
) -> list:
    """The values that ``make`` returns, and the gradient of a sum of the first by ``wrt``; x, i, u and m have the batch."""
    g = cv.CalcGraph()
    vs = {
        name: g.placeholder(name, (None, *a.shape[1:]) if name in "xium" else a.shape, types.get(name))
        for name, a in given.items()
    }
    with g.path("look") as look:
        found = make(**vs)
        found = [*found] if isinstance(found, tuple) else [found]
        if wrt:
            y = found[0]
            found.append(cv.gradient(cv.sum(y * cv.sin(y) + y), vs[wrt]))
        look.output = tuple(v.rename(f"found{k}") for k, v in enumerate(found))
    n = next((len(a) for name, a in given.items() if name in "xium"), 1)
    program = cv.compile(g, batch_size=n, dtype=dtype, workers=workers)
    model = cv.CalcHeap(program.heap_bytes).create(program)
    for name, a in given.items():
        model[name] = a
    model.forward("look")
    return [np.array(model[f"found{k}"]) for k in range(len(found))]


X, TABLE = (np.random.default_rng(7).normal(size=s) for s in ((BATCH, 7, 3), (11, 19)))
U = np.random.default_rng(8).normal(size=(BATCH, 4, 3))
TIES = np.random.default_rng(9).integers(0, 3, (BATCH, 7, 3)).astype(float)
MASK = np.random.default_rng(10).random((BATCH, 7, 3)) < 0.4
MASK[0] = False
ROWS = np.array([1, 1, 6, 1])  # repeated
# name: ours, theirs, arrays, whose gradient
CASES: dict[str, tuple[Callable, Callable, dict[str, np.ndarray], str]] = {
    "take": (lambda t, i: cv.take(t, i), lambda t, i: t[i], {"t": TABLE, "i": places(11, BATCH, 4)}, "t"),
    "take of the batch": (lambda x, i: cv.take(x, i), lambda x, i: x[i], {"x": X, "i": places(BATCH, BATCH)}, "x"),
    "take one per sample": (lambda t, i: cv.take(t, i, 1), lambda t, i: t[:, i], {"t": TABLE, "i": places(19, BATCH)}, "t"),
    "take by an array": (lambda x: cv.take(x, [[0, 6], [6, 6]], 1), lambda x: x[:, [[0, 6], [6, 6]]], {"x": X}, "x"),
    "take of the last": (lambda x: cv.take(x, np.array([2, 0]), -1), lambda x: x[..., [2, 0]], {"x": X}, "x"),
    "take one": (lambda x: cv.take(x, 2, 1), lambda x: x[:, 2], {"x": X}, "x"),
    "embedding": (lambda t, i: cv.embedding(i, t), lambda t, i: F.embedding(i, t), {"t": TABLE, "i": places(11, BATCH, 2, 3)}, "t"),
    "embedding with padding": (
        lambda t, i: cv.embedding(i, t, 2), lambda t, i: F.embedding(i, t, padding_idx=2), {"t": TABLE, "i": places(4, BATCH, 9)}, "t",
    ),
    "take_along_axis": (
        lambda x, i: cv.take_along_axis(x, i, 1), lambda x, i: x.gather(1, i), {"x": X, "i": places(7, BATCH, 4, 3)}, "x",
    ),
    "take_along_axis of the batch": (
        lambda x, k: cv.take_along_axis(x, k, 0), lambda x, k: x.gather(0, k), {"x": X, "k": places(BATCH, 9, 7, 3)}, "x",
    ),
    "take_along_axis of the last": (
        lambda x, i: cv.take_along_axis(x, i, -1), lambda x, i: x.gather(-1, i), {"x": X, "i": places(3, BATCH, 7, 5)}, "x",
    ),
    "pick": (lambda x, i: cv.pick(x, i), lambda x, i: x.gather(-1, i[..., None])[..., 0], {"x": X, "i": places(3, BATCH, 7)}, "x"),
    "pick of an axis": (lambda x, i: cv.pick(x, i, 1), lambda x, i: x.gather(1, i[:, None])[:, 0], {"x": X, "i": places(7, BATCH, 3)}, "x"),
    "one_hot": (lambda i: cv.one_hot(i, 6), lambda i: F.one_hot(i, 6), {"i": places(6, BATCH, 2)}, ""),
    "scatter_add, of u": (
        lambda t, i, u: cv.scatter_add(t, i, u), lambda t, i, u: t.index_add(0, i, u),
        {"t": TABLE, "i": places(3, BATCH), "u": np.random.default_rng(1).normal(size=(BATCH, 19))}, "",
    ),
    "scatter_add": (
        lambda x, u: cv.scatter_add(x, ROWS, u, 1), lambda x, u: x.index_add(1, torch.tensor(ROWS), u), {"x": X, "u": U}, "u",
    ),
    "scatter_add, of x": (
        lambda x, u: cv.scatter_add(x, ROWS, u, 1), lambda x, u: x.index_add(1, torch.tensor(ROWS), u), {"x": X, "u": U}, "x",
    ),
    "scatter_add of rank 2": (
        lambda x, u: cv.scatter_add(x, ROWS.reshape(2, 2), cv.reshape(u, (-1, 2, 2, 3)), -2),
        lambda x, u: x.index_add(1, torch.tensor(ROWS), u), {"x": X, "u": U}, "u",
    ),
    **{
        f"{name}{suffix}": (
            lambda x, name=name, axis=axis: getattr(cv, name)(x, axis), lambda x, name=name, axis=axis: getattr(torch, name)(x, axis), {"x": of}, "",
        )
        for name in ("argmax", "argmin")
        for suffix, axis, of in (("", 1, X), (" of the batch", 0, X), (" of the last", -1, TIES), (" of all", None, X))
    },
    "argmax that keeps": (lambda x: cv.argmax(x, 1, keepdims=True), lambda x: x.argmax(1, keepdim=True), {"x": X}, ""),
    "argmax of all that keeps": (lambda x: cv.argmax(x, keepdims=True), lambda x: x.argmax().reshape(1, 1, 1), {"x": X}, ""),
    **{
        f"sort of axis {axis}, {down}": (
            lambda x, axis=axis, down=down: (cv.sort(x, axis, descending=down), cv.argsort(x, axis, descending=down)),
            lambda x, axis=axis, down=down: torch.sort(x, dim=axis, descending=down, stable=True), {"x": of}, "x",
        )
        for axis, of in ((0, X), (1, TIES), (-1, X))
        for down in (False, True)
    },
    "top_k": (lambda x: cv.top_k(x, 3, 1), lambda x: x.topk(3, 1), {"x": X}, "x"),
    "top_k of all": (lambda x: cv.top_k(x, 3), lambda x: x.topk(3), {"x": X}, "x"),
    "cumprod": (lambda x: cv.cumprod(x, 1), lambda x: x.cumprod(1), {"x": X}, "x"),
    "cumprod of zeros": (lambda x: cv.cumprod(x, 1), lambda x: x.cumprod(1), {"x": TIES}, "x"),
    "cummax": (lambda x: cv.cummax(x, 1), lambda x: x.cummax(1).values, {"x": TIES}, "x"),
    "cummin": (lambda x: cv.cummin(x, -1), lambda x: x.cummin(-1).values, {"x": TIES}, "x"),
    **{
        f"softmax where, of axis {axis}": (
            lambda x, m, axis=axis: cv.softmax(x, axis, where=m),
            lambda x, m, axis=axis: x.masked_fill(~m, -torch.inf).softmax(axis).masked_fill(~m, 0), {"x": X, "m": MASK}, "x",
        )
        for axis in (1, -1)
    },
    "softmax where broadcasts": (
        lambda x: cv.softmax(x, 1, where=np.array([True, False, True, True, False, True, False])[:, None]),
        lambda x: F.pad(x[:, [0, 2, 3, 5]].softmax(1), (0, 0, 0, 3))[:, [0, 4, 1, 2, 5, 3, 6]], {"x": X}, "x",
    ),
}  # fmt: skip
ATOL = {"float32": 3e-6, "float64": 1e-12}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_pytorch_for_any_team(name: str, dtype: str) -> None:
    ours, theirs, given, wrt = CASES[name]
    types = {k: "bool" if a.dtype == bool else INT for k, a in given.items() if a.dtype.kind in "bi"}
    found = run(ours, given, types, wrt, dtype)
    t = {k: torch.tensor(a, requires_grad=k == wrt) for k, a in given.items()}
    want = theirs(*t.values())
    want = [*want] if isinstance(want, tuple) else [want]
    if wrt:
        y = want[0].nan_to_num() if "where" in name else want[0]
        want += torch.autograd.grad((y * y.sin() + y).sum(), t[wrt])
    for f, w in zip(found, want, strict=True):
        w = w.detach().numpy()
        assert f.shape == w.shape and (f.dtype == INT) == (w.dtype == INT and name != "one_hot")
        w = np.nan_to_num(w) if "where" in name else w  # PyTorch's, of samples without a place that counts
        np.testing.assert_allclose(f, w, 0, ATOL[dtype] * max(1, np.abs(w).max()))
    for workers in (2, 3):
        for f, other in zip(found, run(ours, given, types, wrt, dtype, workers), strict=True):
            assert same_bits(f, other), f"{workers} workers"


@pytest.mark.parametrize("type_", ["int32", INT, "uint8", None])
def test_indexes_of_any_type(type_: str | None) -> None:
    i = places(11, BATCH, 4)
    found, slope = run(lambda t, i: cv.take(t, i), {"t": TABLE, "i": i}, {"i": type_}, "t", "float64")
    assert (found == TABLE[i]).all() and slope.shape == TABLE.shape
    (hot,) = run(lambda i: cv.one_hot(i, 11), {"i": i}, {"i": type_}, "", "float32")
    assert (hot == np.eye(11)[i]).all() and hot.dtype == "float32"


def test_repeated_indexes_add_in_their_order() -> None:
    """1e8 + 1 is 1e8 in float32: the sum says in which order it was made."""
    u, zero = np.array([1.0, 1e8, 1.0, -1e8]), np.zeros(2)
    (found,) = run(lambda t, v: cv.scatter_add(t, [1, 1, 1, 1], v), {"t": zero, "v": u}, {}, "", "float32")
    one = np.float32(0)
    for x in u.astype("float32"):
        one += x
    assert found.tolist() == [0, one]


SPECIAL = np.array([[2, np.nan, 1, np.nan, -np.inf], [np.inf, np.nan, np.inf, 0.0, -0.0], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nan_is_the_largest_and_of_equals_the_first_comes_first(dtype: str) -> None:
    def order(x: Any) -> tuple:
        return (
            cv.argsort(x),
            cv.argsort(x, descending=True),
            cv.top_k(x, 3)[1],
            cv.argmax(x, 1),
            cv.argmin(x, 1),
            cv.sort(x),
        )

    up, down, top, most, least, y = run(order, {"x": SPECIAL}, {}, "", dtype)
    x = torch.tensor(SPECIAL)
    assert (up == x.sort(stable=True).indices.numpy()).all() and (up == np.argsort(SPECIAL, kind="stable")).all()
    assert (down == x.sort(stable=True, descending=True).indices.numpy()).all() and (top == down[:, :3]).all()
    assert (most == SPECIAL.argmax(1)).all() and (least == SPECIAL.argmin(1)).all()
    np.testing.assert_array_equal(y, np.sort(SPECIAL))


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, 1e300])
def test_what_is_masked_has_no_part_in_a_softmax(special: float) -> None:
    x = np.where(MASK, X, special)
    y, slope = run(lambda x, m: cv.softmax(x, 1, where=m), {"x": x, "m": MASK}, {"m": "bool"}, "x", "float64")
    want, of = run(lambda x, m: cv.softmax(x, 1, where=m), {"x": X, "m": MASK}, {"m": "bool"}, "x", "float64")
    assert same_bits(y, want) and same_bits(slope, of) and (slope[~MASK] == 0).all() and (y[0] == 0).all()


@pytest.mark.parametrize("n", [1, 2, 3, 64, 513, 1000])
@pytest.mark.parametrize("axis", [1, 0])
def test_long_lines_are_in_order(n: int, axis: int) -> None:
    """Beyond 512 elements, or if they do not lie together, by another algorithm."""
    rng = np.random.default_rng(n)
    some = rng.normal(size=(3, n))
    some[rng.random(some.shape) < 0.1] = np.nan
    for x in (some, rng.integers(0, 5, (3, n)).astype(float), -np.arange(3.0 * n).reshape(3, n)):
        x, k = (x if axis else x.T.copy()), max(1, n // 10)

        def order(t: Any, k: int = k) -> tuple:
            return cv.argsort(t, axis), cv.argsort(t, axis, descending=True), cv.top_k(t, k, axis)[1], cv.sort(t, axis)

        up, down, top, y = run(order, {"t": x}, {}, "", "float64")
        want = torch.tensor(x).sort(dim=axis, descending=True, stable=True).indices.numpy()
        assert (up == np.argsort(x, axis, kind="stable")).all() and (down == want).all()
        assert (top == np.take(want, range(k), axis)).all()
        np.testing.assert_array_equal(y, np.sort(x, axis))


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda x, i, t: cv.take(t, [11]), cv.CalcError, r"take of t \(11, 19\): index 11 is not in \[0, 11\); negative ones do not count"),
        (lambda x, i, t: cv.take(x, [-1]), cv.CalcError, r"take of x \(B, 7, 3\): index -1 is not in \[0, B\)"),
        (lambda x, i, t: cv.take(x, [0.5]), cv.CalcError, r"indexes are integers, at least one, not \[0.5\]"),
        (lambda x, i, t: cv.take(x, []), cv.CalcError, r"indexes are integers, at least one, not \[\]"),
        (lambda x, i, t: cv.take(x, i, 3), cv.CalcError, r"take of x \(B, 7, 3\): axis must be an integer from -3 to 2, not 3"),
        (lambda x, i, t: cv.take(i, [0]), cv.CalcError, r"take of i \(B,\) gives floats, .* use cv.cast\(x, None\)"),
        (lambda x, i, t: cv.take(x, x > 0), cv.CalcError, r"are bools, and indexes are integers: a mask is for cv.where"),
        (lambda x, i, t: cv.take(cv.sum(x), [0]), cv.ShapeError, r"take of sum\w* \(\): a number has no axis"),
        (lambda x, i, t: cv.take(x, i, 1), cv.CalcError, r"the result \(B, B, 3\) has the batch more than once"),
        (lambda x, i, t: cv.take_along_axis(x, i, 1), cv.ShapeError, r"indexes \(B,\) are not of the shape of x \(B, 7, 3\), but for axis 1"),
        (lambda x, i, t: cv.pick(x, i, 1), cv.ShapeError, r"indexes \(B, 1\) are not of the shape of x \(B, 7, 3\), but for axis 1"),
        (lambda x, i, t: cv.scatter_add(t, i, x), cv.ShapeError, r"updates \(B, 7, 3\) are not of the shape \(B, 19\)"),
        (lambda x, i, t: cv.scatter_add(x, [0], t, 1), cv.ShapeError, r"updates t \(11, 19\) must have 3 axes"),
        (lambda x, i, t: cv.top_k(x, 8, 1), cv.ShapeError, r"k 8 is more than the 7 elements of axis 1"),
        (lambda x, i, t: cv.top_k(x, 0), cv.CalcError, r"top_k of x \(B, 7, 3\): k must be an integer >= 1, not 0"),
        (lambda x, i, t: cv.top_k(x, 1, 0), cv.ShapeError, r"k 1 is more than the B elements of axis 0 \(the batch"),
        (lambda x, i, t: cv.one_hot(i, 0), cv.CalcError, r"one_hot: num_classes must be an integer >= 1, not 0"),
        (lambda x, i, t: cv.one_hot(3, 4), cv.CalcError, r"one_hot"),
        (lambda x, i, t: cv.embedding(i, t, 11), cv.CalcError, r"padding_idx must be an integer from 0 to 10, not 11"),
        (lambda x, i, t: cv.argmax(x, 3), cv.CalcError, r"argmax of x \(B, 7, 3\): axis must be an integer from -3 to 2"),
        (lambda x, i, t: cv.argmax(i, 0), cv.CalcError, r"argmax of i \(B,\) gives floats"),
        (lambda x, i, t: cv.argsort(x, 3), cv.CalcError, r"argsort of x \(B, 7, 3\): axis must be an integer"),
        (lambda x, i, t: cv.cumprod(x, 3), cv.ShapeError, r"axis 3 does not fit shape \(B, 7, 3\)"),
        (lambda x, i, t: cv.softmax(x, where=True), cv.CalcError, r"softmax: where is a mask, one bool per element"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_when_the_graph_is_built(make: Callable, error: type, told: str) -> None:
    g = cv.CalcGraph()
    x, i, t = g.placeholder("x", (None, 7, 3)), g.placeholder("i", (None,), INT), g.parameter("t", (11, 19))
    with g.path("look"), pytest.raises(error, match=told):
        make(x, i, t)


@pytest.mark.parametrize("wrong", [-1, 11, 2**40, -(2**40)])
@pytest.mark.parametrize("name", ["take", "take_along_axis", "one_hot", "scatter_add", "embedding"])
def test_an_index_outside_is_refused_or_traps(name: str, wrong: int) -> None:
    """As data it is refused before it is stored; computed by the graph, it traps."""
    make = {
        "take": lambda t, i: cv.take(t, i),
        "take_along_axis": lambda t, i: cv.take_along_axis(t[:, 0], i, 0),
        "one_hot": lambda t, i: cv.one_hot(i, 11),
        "scatter_add": lambda t, i: cv.scatter_add(t, i, cv.take(t, [0, 1, 2])),
        "embedding": lambda t, i: cv.embedding(i, t, padding_idx=0),
    }[name]
    g = cv.CalcGraph()
    t, i, j = g.parameter("t", (11, 19)), g.placeholder("i", (3,), INT), g.placeholder("j", (3,), INT)
    for path in ("look", "computed"):
        with g.path(path) as look:
            look.output = make(t, i if path == "look" else cv.where(j > 5, j, j))
    program = cv.compile(g, batch_size=1)
    model = cv.CalcHeap(program.heap_bytes).create(program)
    model["i"] = [0, 10, 3]
    model.forward("look")
    if name != "scatter_add":  # which the row that checks reads first
        with pytest.raises(
            cv.CalcError, match=rf"'i': indexes and labels must be integers in \[0, 11\); found .*{wrong}"
        ):
            model["i"] = [0, wrong, 3]
    model["j"] = [0, wrong, 3]
    with pytest.raises(cv.Trap, match=r"row \d+ \("):
        model.forward("computed")
    model["j"] = [0, 10, 3]
    model.forward("computed")


# ---------------------------------------------------------------- layers
def test_an_embedding_trains_as_pytorchs() -> None:
    net = nn.Embedding(30, 8, padding_idx=3) >> nn.Flatten() >> nn.Linear(3)
    model = cv.Model(
        net,
        input_shape=(6,),
        optimizer=cv.SGD(0.3),
        loss="softmax_cross_entropy",
        batch_size=16,
        dtype="float64",
        seed=4,
    )
    weights = model.get_weights()
    assert (weights["embedding_1.weight"][3] == 0).all() and weights["embedding_1.weight"].std() > 0.7
    theirs = torch.nn.Sequential(
        torch.nn.Embedding(30, 8, padding_idx=3), torch.nn.Flatten(), torch.nn.Linear(48, 3)
    ).double()
    with torch.no_grad():
        theirs[0].weight.copy_(torch.tensor(weights["embedding_1.weight"]))
        theirs[2].weight.copy_(torch.tensor(weights["linear_1.weight"].T))
        theirs[2].bias.copy_(torch.tensor(weights["linear_1.bias"]))
    X, y = places(30, 16, 6), places(3, 16, seed=1)
    descent = torch.optim.SGD(theirs.parameters(), 0.3)
    for _ in range(5):
        loss = F.cross_entropy(theirs(torch.tensor(X)), torch.tensor(y))
        descent.zero_grad()
        loss.backward()
        descent.step()
        assert model.step(X, y) == pytest.approx(loss.item(), rel=1e-12)
    np.testing.assert_allclose(model.get_weights()["embedding_1.weight"], theirs[0].weight.detach(), 0, 1e-13)
    np.testing.assert_allclose(model.predict(X.astype("uint8")), theirs(torch.tensor(X)).detach(), 0, 1e-12)
    for wrong, found in ((X + 30, "found 30 to"), (X - 30, "found -30 to"), (X + 0.5, r"found \d+\.5")):
        with pytest.raises(cv.CalcError, match=rf"'input': indexes and labels must be integers in \[0, 30\); {found}"):
            model.predict(wrong)


@pytest.mark.parametrize("bias", [False, True])
def test_a_tied_layer_trains_the_embedding(bias: bool) -> None:
    words = nn.Embedding(20, 8)
    net = words >> nn.Linear(8) >> nn.Tanh() >> nn.TiedLinear(words, bias=bias)
    options = {
        "optimizer": cv.SGD(0.5),
        "loss": "softmax_cross_entropy",
        "ignore_index": -100,
        "dtype": "float64",
        "batch_size": 7,
    }
    model = cv.Model(net, input_shape=(6,), **options)
    assert [*model.parameters] == [
        "embedding_1.weight",
        "linear_1.weight",
        "linear_1.bias",
        *["tiedlinear_1.bias"] * bias,
    ]
    w = {k: torch.tensor(v, requires_grad=True) for k, v in model.get_weights().items()}
    X, y = places(20, 7, 6), places(20, 7, 6, seed=1)
    y[:, 2:4] = -100
    y[3] = -100
    for _ in range(4):
        h = torch.tanh(w["embedding_1.weight"][torch.tensor(X)] @ w["linear_1.weight"] + w["linear_1.bias"])
        scores = h @ w["embedding_1.weight"].T + (w["tiedlinear_1.bias"] if bias else 0)
        loss = F.cross_entropy(scores.flatten(0, 1), torch.tensor(y).flatten(), ignore_index=-100)
        slopes = torch.autograd.grad(loss, list(w.values()))
        found = model.evaluate(X, y)
        counts = y != -100
        right = (scores.argmax(-1).numpy() == y)[counts].mean()
        assert found["accuracy"] == pytest.approx(right) and found["loss"] == pytest.approx(loss.item(), rel=1e-12)
        assert model.step(X, y) == pytest.approx(loss.item(), rel=1e-12)
        w = {k: (v - 0.5 * d).detach().requires_grad_() for (k, v), d in zip(w.items(), slopes)}
    for k, v in model.get_weights().items():
        np.testing.assert_allclose(v, w[k].detach(), 0, 1e-12)


def test_sequences_are_judged_over_batches() -> None:
    """Mean over what is not ignored, in batches of which the last is smaller."""
    net = nn.Embedding(9, 4) >> nn.Linear(5)
    model = cv.Model(
        net,
        input_shape=(3,),
        loss="softmax_cross_entropy",
        optimizer=cv.SGD(0.1),
        ignore_index=-1,
        batch_size=4,
        dtype="float64",
    )
    X, y = places(9, 10, 3), places(5, 10, 3, seed=2)
    y[1:7] = -1
    scores = torch.tensor(model.predict(X))
    found = model.evaluate(X, y)
    assert found["loss"] == pytest.approx(
        F.cross_entropy(scores.flatten(0, 1), torch.tensor(y).flatten(), ignore_index=-1).item()
    )
    assert found["accuracy"] == pytest.approx((scores.argmax(-1).numpy() == y)[y != -1].mean())
    history = model.fit(X, y, epochs=2, progress=False)
    assert np.isfinite(history["loss"]).all()


def test_scripts_do_the_same(tmp_path: Any) -> None:
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 6), INT), g.placeholder("t", (None, 3))
    table, mask = g.parameter("table", (12, 5), init=cv.init.Normal(0, 1)), np.array([True] * 4 + [False])
    with g.path("learn", backward=True) as learn:
        z = cv.embedding(x, table, padding_idx=2)
        z = cv.take(z, [0, 3, 3, 5], 1) + cv.sort(z, 1)[:, :4] + cv.scatter_add(z, [1, 1], z[:, :2], 1)[:, 1:5]
        z = cv.softmax(z, where=mask) * cv.cumprod(z, 1) + cv.cummax(z, 2) - cv.cummin(z, 1)
        z = z + cv.one_hot(cv.argmax(z, 1), 4).transpose((0, 2, 1)) + cv.cast(cv.argmin(z, 2, keepdims=True), None)
        largest, places = cv.top_k(z, 3, 2)
        y = cv.mean(largest, 1) + cv.mean(cv.take_along_axis(z, places, 2), 1) + cv.pick(z, cv.argmin(z, 1), 1)[:, :3]
        learn.minimize(cv.mse(y, t), optimizer=cv.SGD(0.01), output=y)
    with g.path("predict") as predict:
        predict.output = y
    model = cv.Model(g, batch_size=8, workers=1, dtype="float64")
    data = {
        "x": np.random.default_rng(3).integers(0, 12, (21, 6)),
        "t": np.random.default_rng(4).normal(size=(21, 3)).astype("f"),
    }
    script_does_the_same(model, tmp_path, data, [(0, 8), (8, 16), (16, 21)])


def test_gradients_of_rounds_add_up() -> None:
    X, y = places(20, 40, 6), places(20, 40, 6, seed=1)
    weights = []
    for batch in (20, 5, 3):
        net = nn.Embedding(20, 8, padding_idx=1) >> nn.Linear(20)
        options = {"loss": "softmax_cross_entropy", "optimizer": cv.SGD(0.3), "dtype": "float64", "learning_batch": 20}
        model = cv.Model(net, input_shape=(6,), batch_size=batch, **options)
        model.fit(X, y, epochs=2, shuffle=False, progress=False)
        weights.append(model.get_weights()["embedding_1.weight"])
    for other in weights[1:]:
        np.testing.assert_allclose(other, weights[0], 0, 1e-13)


def test_figures_of_places_are_means_over_batches() -> None:
    """Each sample's places depend on that sample only, so that batches may be joined."""

    def among_three(output: cv.Variable, target: cv.Variable) -> cv.Variable:
        found = cv.equal(cv.top_k(output, 3)[1], cv.expand_dims(target, -1))
        return cv.mean(cv.max(cv.cast(found, None), -1))

    def others(output: cv.Variable, target: cv.Variable) -> cv.Variable:
        hot, index = cv.one_hot(cv.argmax(output, 1), 4), cv.argmin(output, 1, keepdims=True)
        y = cv.take_along_axis(output, index, 1) + cv.take(output, [1, 1], 1) + hot[:, 1:3] + cv.sort(output)[:, :2]
        places = output.graph.constant(output.graph.unique("places"), [0, 2, 0, 3], "int64")
        y += cv.scatter_add(output, [0, 0], output[:, :2], 1)[:, 2:] + cv.scatter_add(output, places, output, 1)[:, :2]
        return cv.mean(y + cv.cumprod(output, 1)[:, 2:])

    def along_the_batch(output: cv.Variable, target: cv.Variable) -> cv.Variable:
        return cv.mean(cv.take(output, cv.cast(target, "int64")))

    net = nn.Embedding(9, 4) >> nn.Flatten() >> nn.Linear(4)
    options = {"input_shape": (6,), "loss": "softmax_cross_entropy", "optimizer": cv.SGD(0.1), "dtype": "float64"}
    X, y = places(9, 23, 6), places(4, 23)
    few, all_ = (cv.Model(net, batch_size=n, metrics=[among_three, others], **options) for n in (7, 23))
    scores, found, want = few.predict(X), few.evaluate(X, y), all_.evaluate(X, y)
    assert found["among_three"] == pytest.approx((np.argsort(-scores, 1)[:, :3] == y[:, None]).any(1).mean())
    assert found["others"] == pytest.approx(want["others"], rel=1e-12)
    model = cv.Model(net, batch_size=7, metrics=[along_the_batch], **options)
    with pytest.raises(cv.CalcError, match=r"'along_the_batch' of 23 samples in batches of 7: .* embedding"):
        model.evaluate(X, y)


def test_a_graph_of_them_is_a_text() -> None:
    words = nn.Embedding(20, 8, padding_idx=3)
    g = cv.build_graph(
        words >> nn.Linear(8) >> nn.TiedLinear(words, bias=True), (6,), "softmax_cross_entropy", cv.SGD(0.1)
    )
    text = g.text()
    assert "init=PaddedNormal(std=1.0, padding=3)" in text and "embedding(embedding_1.weight, input, padding=3)" in text
    assert cv.read_graph(text).text() == text


def test_embeddings_are_saved_and_copied(tmp_path: Any) -> None:
    words = nn.Embedding(12, 4, padding_idx=0)
    net = words >> nn.Linear(4) >> nn.TiedLinear(words)
    model = cv.Model(net, input_shape=(3,), loss="softmax_cross_entropy", optimizer=cv.Adam(0.01), batch_size=4, seed=2)
    X = places(12, 8, 3)
    model.fit(X, X, epochs=2, progress=False)
    model.save(tmp_path / "words.cvm")
    again = cv.load(tmp_path / "words.cvm")
    assert same_bits(again.predict(X), model.predict(X)) and same_bits(model.copy().predict(X), model.predict(X))
    assert again.step(X[:4], X[:4]) == model.step(X[:4], X[:4])


def test_integers_are_the_input_of_an_embedding_alone() -> None:
    options = {"loss": "mse", "optimizer": cv.SGD(0.1), "batch_size": 2}
    for net, more, types in (
        (nn.Embedding(3, 4), {}, {"input": "int64"}),
        (nn.Linear(4), {}, {}),
        (nn.Embedding(3, 4), {"input_dtype": "uint8"}, {"input": "uint8"}),
    ):
        assert cv.Model(net, input_shape=(2,), **options, **more).loaded.own_types == types
    model = cv.Model(nn.Embedding(3, 4), input_shape=(), **options)  # one integer per sample
    assert model.predict([2, 0]).shape == (2, 4)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: nn.Embedding(0, 4), "Embedding: num_embeddings must be an integer"),
        (lambda: nn.Embedding(3, 4.5), "Embedding: embedding_dim must be an integer"),
        (lambda: nn.Embedding(3, 4, padding_idx=3), r"Embedding: padding_idx must be an integer from 0 to 2 \(or None\), not 3"),
        (lambda: nn.TiedLinear(nn.Linear(3)), r"TiedLinear: embedding: a layer nn.Embedding\(...\) of the network is wanted"),
        (
            lambda: cv.Model(nn.Linear(3) >> nn.TiedLinear(nn.Embedding(5, 3)), input_shape=(2,), loss="mse", optimizer=cv.SGD(0.1)),
            r"tiedlinear_1: Embedding\(num_embeddings=5, embedding_dim=3\) is not in the network before it",
        ),
        (
            lambda: cv.Model((e := nn.Embedding(5, 3)) >> nn.Linear(4) >> nn.TiedLinear(e), input_shape=(2,), loss="mse", optimizer=cv.SGD(0.1)),
            r"tiedlinear_1: the last size of the input .* is not the 3 of embedding_1.weight \(5, 3\)",
        ),
        (lambda: cv.init.PaddedNormal(padding=-1), "PaddedNormal: padding must be an integer >= 0, not -1"),
        (lambda: cv.init.PaddedNormal(padding=1.5), "PaddedNormal: padding must be an integer >= 0, not 1.5"),
        (lambda: cv.init.PaddedNormal(padding=4)((4, 2), np.random.default_rng(0)), r"the shape \(4, 2\) has no row 4"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_are_refused(make: Callable, told: str) -> None:
    with pytest.raises(cv.CalcError, match=told):
        make()
