"""Losses and metrics: against their definitions, central differences, PyTorch; extremes; wrong labels."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm.ops import OPS
from calcvm.ops.dims import affine, show
from tests.reference import losses as reference
from tests.rowcall import ROW_INDEX, Heap

EPS = {"float32": 1.2e-7, "float64": 2.2e-16}
DTYPES = pytest.mark.parametrize("dtype", EPS)
PAIRS = ("binary_cross_entropy", "mse", "mae", "huber")
SHAPES = [(1, 1), (1, 3), (5, 1), (7,), (4, 3, 2), (33, 17), (3, 150), (200, 1)]


def rng(seed=0):
    return np.random.default_rng(seed)


def run(op, inputs, dtype, n_workers=1, backward="", alias=None, **attrs):
    """The heap after the operator's forward rows, and after the backward row that writes ``backward``."""
    spec = OPS[op]
    values = dict(zip(spec.inputs, (np.asarray(v, float) for v in inputs)))
    shapes = {name: tuple(map(affine, v.shape)) for name, v in values.items()}
    given = {a.name: a.default for a in spec.attrs} | attrs
    shapes |= spec.shape(shapes, given)
    words = {name: int(w.b) if hasattr(w, "b") else w for name, w in spec.words(shapes, given).items()}
    made = {
        n: np.zeros([s.b for s in shapes[n]]) for n in (*spec.outputs, *spec.saved, "t_l") if n not in (alias or {})
    }
    if backward:
        made |= {"dloss": np.array([1.5])}
        if backward not in (alias or {}):
            made[backward] = np.zeros([s.b for s in shapes[backward[1:]]])
    heap = Heap(dtype, values | made, alias=alias)
    for row in spec.fwd:
        heap.call(row.name, n_workers, **words)
    for row in spec.bwd:
        if backward in {o.name for o in row.writes}:
            heap.call(row.name, n_workers, **words)
    return heap


def labels(shape, n, seed=0):
    return rng(seed).integers(0, n, shape).astype(float)


def probabilities(shape, seed=0):
    p = rng(seed).uniform(0.1, 1, shape)
    return p / p.sum(-1, keepdims=True)


CE_CASES = {
    "labels": ((8, 3), lambda s: labels(s[:-1], s[-1]), {}),
    "one row": ((1, 10), lambda s: labels(s[:-1], s[-1]), {}),
    "a vector": ((33, 16), lambda s: labels(s[:-1], s[-1]), {}),
    "a column of labels": ((32, 10), lambda s: labels((*s[:-1], 1), s[-1]), {}),
    "more than a vector": ((5, 17), lambda s: labels(s[:-1], s[-1]), {}),
    "many classes": ((3, 1000), lambda s: labels(s[:-1], s[-1]), {}),
    "smoothed": ((9, 10), lambda s: labels(s[:-1], s[-1]), {"label_smoothing": 0.1}),
    "positions": ((3, 4, 6), lambda s: labels(s[:-1], s[-1]), {}),
    "probabilities": ((6, 5), probabilities, {}),
    "unnormalized": ((6, 5), lambda s: 3 * probabilities(s), {}),
    "smoothed probabilities": ((4, 3, 37), probabilities, {"label_smoothing": 0.3}),
    "any weights": ((6, 16), lambda s: rng(5).normal(size=s), {"label_smoothing": 0.2}),
    "any weights of many": ((6, 40), lambda s: rng(5).normal(size=s), {}),
    "one class": ((4, 1), lambda s: np.ones(s), {}),
    "no batch": ((7,), lambda s: labels((), 7), {}),
}


def case(name):
    shape, target, attrs = CE_CASES[name]
    return 3 * rng(7).normal(size=shape), target(shape), attrs


# ---------------------------------------------------------------- values
@DTYPES
@pytest.mark.parametrize("op", [*PAIRS, "rmse"])
def test_pair_forward(op, dtype):
    for shape in SHAPES:
        x, t = 2 * rng().normal(size=shape).astype(dtype), 2 * rng(1).normal(size=shape).astype(dtype)
        heap = run(op, (x, t), dtype, n_workers=2)
        expected = getattr(reference, op)(x.astype(float), t.astype(float))
        np.testing.assert_allclose(heap[OPS[op].outputs[0]], expected, rtol=20 * EPS[dtype], err_msg=str(shape))


@DTYPES
@pytest.mark.parametrize("name", CE_CASES)
def test_cross_entropy_forward(name, dtype):
    x, t, attrs = case(name)
    x, t = x.astype(dtype).astype(float), t.astype(dtype).astype(float)
    heap = run("softmax_cross_entropy", (x, t), dtype, 2, **attrs)
    expected = reference.softmax_cross_entropy(x, t, **attrs)
    np.testing.assert_allclose(heap["loss"], expected, rtol=40 * EPS[dtype], atol=20 * EPS[dtype])
    e = np.exp(x - x.max(-1, keepdims=True))
    np.testing.assert_allclose(heap["p"], e / e.sum(-1, keepdims=True), rtol=20 * EPS[dtype])
    assert heap.trap == (0, 0)


@DTYPES
def test_accuracy(dtype):
    scores, t = rng().normal(size=(50, 4)), labels((50,), 4)
    expected = np.mean(scores.argmax(1) == t)
    assert 0 < expected < 1
    for target in (t, t[:, None], np.eye(4)[t.astype(int)]):
        assert run("accuracy", (scores, target), dtype, 3)["y"] == pytest.approx(expected, rel=1e-6)
    tie = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    assert run("accuracy", (tie, np.array([0.0, 1.0])), dtype)["y"] == 0.5  # the first of equals
    inner = rng().normal(size=(5, 6, 3)), labels((5, 6), 3)
    assert run("accuracy", inner, dtype)["y"] == pytest.approx(reference.accuracy(*inner), rel=1e-6)


# ---------------------------------------------------------------- gradients
def differences(f, x, h):
    out = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i] += h
        down[i] -= h
        out[i] = (f(up) - f(down)) / (2 * h)
    return out


@pytest.mark.parametrize("shape", [(1, 1), (4,), (3, 5)])
@pytest.mark.parametrize("op", PAIRS)
def test_pair_gradients(op, shape):
    f = getattr(reference, op)
    x, t = 2 * rng(2).normal(size=shape), 2 * rng(3).normal(size=shape)
    dx = run(op, (x, t), "float64", 2, "dx")["dx"]
    np.testing.assert_allclose(dx, 1.5 * differences(lambda v: f(v, t), x, 1e-6), atol=1e-9)
    dt = run(op, (x, t), "float64", 2, "dt")["dt"]
    np.testing.assert_allclose(dt, 1.5 * differences(lambda v: f(x, v), t, 1e-6), atol=1e-9)


def test_huber_delta():
    x, t = np.array([0.0, 0.0, 0.0]), np.array([0.1, 0.3, -5.0])
    heap = run("huber", (x, t), "float64", backward="dx", delta=0.25)
    assert heap["loss"] == pytest.approx(reference.huber(x, t, 0.25), rel=1e-14)
    np.testing.assert_allclose(heap["dx"], 1.5 / 3 * np.array([-0.1, -0.25, 0.25]), rtol=1e-14)


@pytest.mark.parametrize("name", [n for n in CE_CASES if n != "many classes"])
def test_cross_entropy_gradient(name):
    x, t, attrs = case(name)
    d = run("softmax_cross_entropy", (x, t), "float64", 2, "dlogits", **attrs)["dlogits"]
    expected = differences(lambda v: reference.softmax_cross_entropy(v, t, **attrs), x, 1e-6)
    np.testing.assert_allclose(d, 1.5 * expected, atol=1e-8)


@pytest.mark.peers
@DTYPES
@pytest.mark.parametrize("name", CE_CASES)
def test_cross_entropy_agrees_with_torch(name, dtype):
    torch = pytest.importorskip("torch")
    x, t, attrs = case(name)
    if t.shape == x.shape:
        target = torch.tensor(t).reshape(-1, x.shape[-1])
    else:
        target = torch.tensor(t).long().reshape(-1)
    logits = torch.tensor(x, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, x.shape[-1]), target, **attrs)
    (1.5 * loss).backward()
    heap = run("softmax_cross_entropy", (x, t), dtype, 1, "dlogits", **attrs)
    np.testing.assert_allclose(heap["loss"], loss.item(), rtol=40 * EPS[dtype], atol=40 * EPS[dtype])
    np.testing.assert_allclose(heap["dlogits"], logits.grad.numpy(), rtol=1e-9, atol=20 * EPS[dtype])


@pytest.mark.peers
@pytest.mark.parametrize("op", PAIRS)
def test_pair_gradients_agree_with_torch(op):
    torch = pytest.importorskip("torch")
    names = {"binary_cross_entropy": "binary_cross_entropy_with_logits", "mse": "mse_loss", "mae": "l1_loss"}
    x, t = rng().normal(size=(33, 7)), rng(1).uniform(0, 1, size=(33, 7))
    t[0] = x[0]  # kinks
    a = torch.tensor(x, requires_grad=True)
    loss = getattr(torch.nn.functional, names.get(op, "huber_loss"))(a, torch.tensor(t))
    (1.5 * loss).backward()
    heap = run(op, (x, t), "float64", 1, "dx")
    np.testing.assert_allclose(heap["loss"], loss.item(), rtol=1e-14)
    np.testing.assert_allclose(heap["dx"], a.grad.numpy(), rtol=1e-13, atol=1e-17)


# ---------------------------------------------------------------- declared properties
@DTYPES
@pytest.mark.parametrize("op", [*PAIRS, "rmse", "accuracy", *CE_CASES])
def test_any_team_gives_the_same_bits(op, dtype):
    if op in CE_CASES:
        x, t, attrs = case(op)
        op, backward = "softmax_cross_entropy", "dlogits"
    elif op == "accuracy":
        x, t, attrs, backward = rng().normal(size=(19, 5)), labels((19,), 5), {}, ""
    else:
        x, t, attrs = rng().normal(size=(19, 23)), rng(1).normal(size=(19, 23)), {}
        backward = "" if op == "rmse" else "dx"
    heaps = [run(op, (x, t), dtype, n, backward, **attrs).cells.tobytes() for n in (1, 2, 3, 5, 40)]
    assert len(set(heaps)) == 1


@DTYPES
@pytest.mark.parametrize("name", CE_CASES)
def test_cross_entropy_in_place(name, dtype):
    """p over logits, dlogits over p."""
    x, t, attrs = case(name)
    apart = run("softmax_cross_entropy", (x, t), dtype, 2, "dlogits", **attrs)
    together = run(
        "softmax_cross_entropy", (x, t), dtype, 2, "dlogits", alias={"p": "logits", "dlogits": "logits"}, **attrs
    )
    np.testing.assert_array_equal(together["loss"], apart["loss"])
    np.testing.assert_array_equal(together["dlogits"], apart["dlogits"])


@pytest.mark.parametrize("op", PAIRS)
@pytest.mark.parametrize("over", ["x", "t"])
def test_pair_gradients_in_place(op, over):
    x, t = rng().normal(size=(9, 5)), rng(1).normal(size=(9, 5))
    for d in ("dx", "dt"):
        if (op, d, over) == ("binary_cross_entropy", "dt", "t"):
            continue  # dt does not read t
        apart = run(op, (x, t), "float32", 2, d)
        np.testing.assert_array_equal(run(op, (x, t), "float32", 2, d, alias={d: over})[d], apart[d])


# ---------------------------------------------------------------- extremes
@DTYPES
@pytest.mark.parametrize("n", [3, 40])
def test_large_scores_do_not_overflow(n, dtype):
    x = np.zeros((3, n))
    x[0, 0], x[1, 1], x[2, :] = 1e4, -1e4, 1e30
    heap = run("softmax_cross_entropy", (x, np.array([0.0, 1.0, 2.0])), dtype, 1, "dlogits")
    expected = (0 + (1e4 + np.log(n - 1)) + np.log(n)) / 3
    np.testing.assert_allclose(heap["loss"], expected, rtol=10 * EPS[dtype])
    assert np.isfinite(heap["dlogits"]).all()
    heap = run("binary_cross_entropy", (np.array([1e4, -1e4, 1e4]), np.array([1.0, 0.0, 0.0])), dtype, 1, "dx")
    np.testing.assert_allclose(heap["loss"], 1e4 / 3, rtol=EPS[dtype])
    np.testing.assert_allclose(heap["dx"], [0, 0, 0.5], atol=1e-30)


@DTYPES
@pytest.mark.parametrize("n", [3, 40])
def test_a_masked_class_has_no_part(n, dtype):
    """A score of -inf, as a mask sets it, leaves loss and gradient finite."""
    x = rng().normal(size=(4, n))
    x[:, 2] = -np.inf
    t = np.zeros((4, n))
    t[:, 1] = 1
    for target in (np.ones(4), t):
        heap = run("softmax_cross_entropy", (x, target), dtype, 1, "dlogits")
        assert np.isfinite(heap["loss"]) and np.isfinite(heap["dlogits"]).all()
        assert (heap["p"][:, 2] == 0).all()


@DTYPES
@pytest.mark.parametrize("n", [3, 40])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_reach_the_loss(n, bad, dtype):
    for j in (0, 1, n - 1):
        x = rng().normal(size=(4, n))
        x[2, j] = bad
        heap = run("softmax_cross_entropy", (x, np.ones(4)), dtype, 1, "dlogits")
        assert np.isnan(heap["loss"]) and np.isnan(heap["dlogits"][2]).any()
        assert np.isfinite(heap["dlogits"][[0, 1, 3]]).all()


@pytest.mark.parametrize("op", PAIRS)
def test_nan_reaches_pair_losses(op):
    x, t = np.zeros((3, 5)), np.ones((3, 5))
    x[1, 2] = np.nan
    heap = run(op, (x, t), "float32", 1, "dx")
    assert np.isnan(heap["loss"])
    assert np.isnan(heap["dx"][1, 2]) and np.isnan(heap["dx"]).sum() == 1


@DTYPES
@pytest.mark.parametrize("shape", [(4, 3), (4, 40), (2, 2, 3)])
@pytest.mark.parametrize("bad", [-1.0, 3000.0, 0.5, np.nan, np.inf, -np.inf, 1e30, 2.0**63])
def test_wrong_labels_trap(bad, shape, dtype):
    t = np.zeros(shape[:-1])
    t[(1,) * t.ndim] = bad
    x = rng().normal(size=shape)
    assert run("softmax_cross_entropy", (x, t), dtype).trap == (1, ROW_INDEX)
    assert run("accuracy", (x, t), dtype).trap == (1, ROW_INDEX)
    heap = run("softmax_cross_entropy", (x, np.zeros(shape[:-1])), dtype, 1, "dlogits")
    assert heap.trap == (0, 0)
    heap["target"][...] = t  # the backward reads the labels again, and trusts them no more
    words = {"rows": shape[0], "inner": int(np.prod(shape[1:-1])), "N": shape[-1], "dense": 0, "smoothing": 0}
    heap.call("softmax_cross_entropy_bwd", **words, count=t.size)
    assert heap.trap == (1, ROW_INDEX)


def test_an_empty_batch_has_no_mean():
    for op, x, t in [("mse", (0, 3), (0, 3)), ("softmax_cross_entropy", (0, 3), (0,))]:
        assert np.isnan(run(op, (np.zeros(x), np.zeros(t)), "float32")["loss"])


def test_a_long_mean_is_accurate():
    """float32 over 100 000 rows: within 1e-6 where one running sum is off by 1e-4."""
    x = rng().uniform(0, 2, (100_000, 1)).astype(np.float32)
    heap = run("mae", (x, np.zeros_like(x)), "float32")
    np.testing.assert_allclose(heap["loss"], x.astype(float).mean(), rtol=1e-6)


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        ("mse", ((3, 4), (3, 5))),
        ("mae", ((3,), (3, 1))),
        ("softmax_cross_entropy", ((3, 4), (4,))),
        ("softmax_cross_entropy", ((3, 4), (3, 5))),
        ("softmax_cross_entropy", ((), ())),
        ("accuracy", ((3, 4, 2), (3,))),
    ],
)
def test_shapes_that_do_not_fit(op, shapes):
    a, b = (tuple(map(affine, s)) for s in shapes)
    with pytest.raises(ValueError) as error:
        OPS[op].shape(dict(zip(OPS[op].inputs, (a, b))), {"label_smoothing": 0.0})
    assert not a or (show(a) in str(error.value) and show(b) in str(error.value))


def test_pick_says_what_it_takes():
    g = cv.CalcGraph()
    i, table = g.placeholder("i", (None,), dtype="int64"), g.parameter("E", (10, 4))
    with (
        g.path("learn", backward=True),
        pytest.raises(cv.ShapeError, match=r"of each row it takes its own element, .*\(an embedding\)"),
    ):
        cv.pick(table, i)
