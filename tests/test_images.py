"""Operators on images by graphs, against PyTorch: random settings, batches below the planned one, any number of workers."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm.ops import OPS
from calcvm.ops.spec import Example
from tests.rowrun import CHECKS, Case

BATCHES = (5, 3, 1)  # of three steps; the first is planned
LARGE = {  # several panels of weights, packed and not, and blocks of taps and pixels: too much for a simulated GPU
    "conv": (
        Example(shapes=((None, 8, 8, 32), (3, 3, 32, 80), (80,)), attrs={"padding": (1, 1, 1, 1)}, batch=2),
        Example(shapes=((1, 300, 17), (3, 17, 66)), attrs={"padding": (1, 1)}),
        Example(shapes=((1, 6, 50, 33), (5, 5, 33, 7)), attrs={"stride": (1, 2), "padding": (2, 2, 2, 2)}),
    ),
    "conv_transpose": (
        Example(shapes=((None, 4, 6, 80), (4, 4, 66, 80), (66,)), attrs={"stride": (2, 2)}, batch=2),
        Example(shapes=((1, 150, 5), (9, 40, 5), (40,)), attrs={"stride": (2,), "padding": (3, 4)}),
    ),
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", LARGE)
def test_large(name, check):
    CHECKS[check]([Case(OPS[name], e, "float32", e.batch) for e in LARGE[name]])


# ---------------------------------------------------------------- convolution
def drawn(op, rng):
    """Sizes and settings of a convolution or its transpose of 1 to 3 axes, of which something is left."""
    while True:
        n = int(rng.integers(1, 4))

        def each(low, high, n=n):
            return tuple(map(int, rng.integers(low, high, n)))

        groups, sizes, window = int(rng.choice((1, 1, 2, 3))), each(1, 8 - n), each(1, 4)
        of = {"stride": each(1, 4), "dilation": each(1, 3), "groups": groups}
        of["padding"] = tuple(zip(each(0, 3), each(0, 3)))
        ins, outs = groups * int(rng.integers(1, 5)), groups * int(rng.integers(1, 20))
        if op == "conv_transpose":
            of["output_padding"] = tuple(int(rng.integers(0, max(a))) for a in zip(of["stride"], of["dilation"]))
            spans = [(s - 1) * a + (k - 1) * d + 1 + more for s, a, k, d, more in zip(
                sizes, of["stride"], window, of["dilation"], of["output_padding"])]  # fmt: skip
            fits = all(span > sum(pads) for span, pads in zip(spans, of["padding"]))
        else:
            fits = all((k - 1) * d + 1 <= s + sum(p) for s, k, d, p in zip(
                sizes, window, of["dilation"], of["padding"]))  # fmt: skip
        if fits:
            shape = (outs, ins // groups) if op == "conv" else (ins, outs // groups)
            return n, (ins, *sizes), (*shape, *window), outs, of


def torch_conv(torch, op, n, x, w, b, of):
    """PyTorch's, whose padding is the same on both sides."""
    f, pads = torch.nn.functional, of["padding"]
    how = {name: value for name, value in of.items() if name != "padding"}
    if op == "conv":
        around = [p for pair in reversed(pads) for p in pair]
        return getattr(f, f"conv{n}d")(f.pad(x, around), w, b, **how)
    y = getattr(f, f"conv_transpose{n}d")(x, w, b, **how)
    return y[(..., *(slice(a, size - z) for (a, z), size in zip(pads, y.shape[2:])))]


@pytest.mark.peers
@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("op", ["conv", "conv_transpose"])
def test_convolution_against_torch(op, seed):
    """Three steps of SGD through a convolution and one of single pixels before it, whose gradient comes through the other."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    n, shape, weights, outs, of = drawn(op, rng)
    start = {
        "before": rng.uniform(-1, 1, (shape[0], 2, *(1,) * n)),
        "w": rng.uniform(-1, 1, weights),
        "b": rng.uniform(-1, 1, outs) if rng.random() < 0.7 else None,
    }
    theirs = {name: None if v is None else torch.tensor(v, requires_grad=True) for name, v in start.items()}
    learned = [v for v in theirs.values() if v is not None]
    xs = [rng.uniform(-1, 1, (batch, 2, *shape[1:])) for batch in BATCHES]
    steps = []
    for x in xs:
        h = torch.tanh(getattr(torch.nn.functional, f"conv{n}d")(torch.tensor(x), theirs["before"]))
        y = torch_conv(torch, op, n, h, theirs["w"], theirs["b"], of)
        target = rng.uniform(-1, 1, y.shape)
        gradients = torch.autograd.grad(torch.nn.functional.mse_loss(y, torch.tensor(target)), learned)
        with torch.no_grad():
            for v, gradient in zip(learned, gradients):
                v -= 0.5 * gradient
        steps.append((x, target, y.detach().numpy()))

    found = {}
    for workers in (1, 2):
        g = cv.CalcGraph()
        x, t = g.placeholder("x", (None, *xs[0].shape[1:])), g.placeholder("t", (None, *steps[0][1].shape[1:]))
        own = {name: v if v is None else g.parameter(name, v.shape, init=v) for name, v in start.items()}
        with g.path("learn", backward=True) as learn:
            h = cv.tanh(getattr(cv, f"conv{n}d")(x, own["before"]))
            y = getattr(cv, f"{op}{n}d")(h, own["w"], own["b"], **of)
            learn.minimize(cv.mse(y, t), cv.SGD(0.5), output=y)
        program = cv.compile(g, batch_size=max(BATCHES), dtype="float64", workers=workers)
        m = cv.CalcHeap(program.heap_bytes).create(program)
        for given, target, want in steps:
            m["x"], m["t"] = given, target
            m.forward("learn")
            np.testing.assert_allclose(m["y"], want, rtol=1e-10, atol=1e-10)
            m.step(given, target)
        found[workers] = {name: m[name].copy() for name, v in own.items() if v is not None}
        for name, value in found[workers].items():
            np.testing.assert_allclose(value, theirs[name].detach().numpy(), rtol=1e-10, atol=1e-10)
    assert all(found[1][name].tobytes() == found[2][name].tobytes() for name in found[1])


# ---------------------------------------------------------------- settings
def variables(x, w):
    g = cv.CalcGraph()
    g.path("p").__enter__()
    return g.placeholder("x", x), g.parameter("w", w)


def sizes(y):
    return [n.b for n in y.shape[1:]]


def test_paddings():
    x, w = variables((None, 3, 7, 6), (4, 3, 2, 5))
    same = cv.conv2d(x, w, padding="same", dilation=(3, 1))
    assert sizes(same) == [4, 7, 6]
    assert same.producer.attrs["padding"] == (1, 2, 2, 2)
    assert sizes(cv.conv2d(x, w, padding="valid")) == sizes(cv.conv2d(x, w)) == [4, 6, 2]
    for given in (2, (2, 2), ((2, 2), (2, 2))):
        assert sizes(cv.conv2d(x, w, padding=given)) == [4, 10, 6]
    x, w = variables((None, 4, 7, 6), (4, 3, 2, 5))
    assert sizes(cv.conv_transpose2d(x, w)) == [3, 8, 10]
    assert sizes(cv.conv_transpose2d(x, w, padding="same")) == [3, 7, 6]
    assert sizes(cv.conv_transpose2d(x, w, stride=2, padding=((0, 1), 2), output_padding=1)) == [3, 14, 12]


REFUSED = [
    ("conv2d", (None, 3, 7), (4, 3, 2, 2), {}, "must have 4 axes"),
    ("conv2d", (None, 3, 7, 6), (4, 2, 2, 2), {}, r"\(B, 3, 7, 6\) has 3 channels, weights \(4, 2, 2, 2\) take 2"),
    ("conv2d", (None, 4, 7, 6), (3, 2, 2, 2), {"groups": 2}, "not divisible by groups=2"),
    ("conv1d", (None, 3, 7), (4, 3, 5), {"dilation": 2}, "larger than x"),
    ("conv1d", (None, 3, 7), (4, 3, 5), {"stride": 2, "padding": "same"}, "needs stride 1"),
    ("conv1d", (None, 3, 7), (4, 3, 5), {"stride": (2, 2)}, "stride"),
    ("conv1d", (None, 3, 7), (4, 3, 5), {"padding": ((1, 2), (3, 4))}, "padding"),
    ("conv1d", (None, 3, 7), (4, 3, 5), {"stride": 0}, "stride"),
    ("conv_transpose1d", (None, 3, 7), (4, 3, 5), {}, "has 3 channels"),
    ("conv_transpose1d", (None, 3, 7), (3, 4, 5), {"groups": 2}, "groups=2"),
    ("conv_transpose1d", (None, 3, 7), (3, 4, 5), {"stride": 2, "output_padding": 2}, "output_padding"),
    ("conv_transpose1d", (None, 3, 7), (3, 4, 5), {"padding": 6}, "nothing is left"),
    ("conv_transpose2d", (None, 3, 7), (3, 4, 5), {}, r"\(channels, out channels / groups, 2 sizes\)"),
]


@pytest.mark.parametrize("name, x, w, how, why", REFUSED)
def test_refused(name, x, w, how, why):
    x, w = variables(x, w)
    with pytest.raises(cv.CalcError, match=why):
        getattr(cv, name)(x, w, **how)
    assert not x.graph.active.operations


def test_local_response_norm_of_large_numbers():
    """d^0.75 may be there where d^1.5 is not."""
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3, 1, 1))
    with g.path("p"):
        y = cv.local_response_norm(x, 1, 1.0)
    program = cv.compile(g, batch_size=2)
    m = cv.CalcHeap(program.heap_bytes).create(program)
    data = np.array([1e13, -3e15, 0.5, 1e10, 2.0, 0.0]).reshape(2, 3, 1, 1)
    m["x"] = data
    m.forward("p")
    np.testing.assert_allclose(m[y.name], data / (1 + data**2) ** 0.75, rtol=1e-5)
