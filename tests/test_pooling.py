"""Pooling beside PyTorch, at the edges of its windows, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from calcvm.ops import OPS
from calcvm.ops.dims import shape_of
from calcvm.ops.spec import Example
from tests import rowrun
from tests.cuda.simulated import Simulated
from tests.rowrun import Case, close


def run(name, x, n_workers=1, **attrs):
    """y, and the gradient of a weighted sum of it."""
    dtype = str(x.dtype)
    case = Case(OPS[name], Example(shapes=(x.shape,), attrs=attrs), dtype, len(x))
    case.values["x"] = x.reshape(-1).copy()
    values = case.forward(n_workers=n_workers)
    seeds = case.output_gradients()
    dx = case.backward(values | seeds, n_workers=n_workers)["dx"]
    shape = case.shapes["y"]
    return values["y"].reshape(shape), dx.reshape(x.shape), seeds["dy"].reshape(shape)


def beside_torch(name, x, fn, tolerance=1e-12, **attrs):
    torch = pytest.importorskip("torch")
    y, dx, dy = run(name, x, **attrs)
    theirs = torch.tensor(np.moveaxis(x, -1, 1).copy(), requires_grad=True)
    out = fn(theirs)
    close(y, np.moveaxis(out.detach().numpy(), 1, -1), tolerance, f"{name} of {x.shape} {attrs}")
    out.backward(torch.tensor(np.moveaxis(dy, -1, 1).copy()))
    close(dx, np.moveaxis(theirs.grad.numpy(), 1, -1), tolerance, f"{name} of {x.shape} {attrs}: gradient")


def draw(rank, rng, padding=True, dilation=False):
    """Sizes of an image and a window that fits."""
    while True:
        sizes, kernel = rng.integers(1, 12, rank), rng.integers(1, 5, rank)
        attrs = {"kernel": kernel, "stride": rng.integers(1, 5, rank)}
        spans = kernel
        if dilation:
            attrs["dilation"] = rng.integers(1, 4, rank)
            spans = (kernel - 1) * attrs["dilation"] + 1
        before = rng.integers(0, kernel // 2 + 1) if padding else 0 * kernel
        room = sizes + (2 * before if rank < 3 else 0)  # avg_pool3d wants an image as large as its window
        if (spans <= room).all() and (sizes >= spans - before).all():
            attrs["padding"] = np.concatenate([before, before])
            return sizes, {k: tuple(map(int, v)) for k, v in attrs.items()}


@pytest.mark.peers
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("name", ["max_pool", "avg_pool", "lp_pool"])
def test_any_window_is_that_of_torch(name, rank):
    f = pytest.importorskip("torch").nn.functional
    rng = np.random.default_rng(rank)
    for k in range(60):
        sizes, attrs = draw(rank, rng, name != "lp_pool", name == "max_pool")
        x = rng.uniform(0.1, 1.0, (2, *sizes, int(rng.choice([1, 2, 3, 8, 19]))))
        attrs["ceil_mode"] = bool(k % 2)
        given = {"kernel_size": attrs["kernel"], "stride": attrs["stride"], "ceil_mode": attrs["ceil_mode"]}
        if name == "lp_pool":
            attrs.pop("padding")
            given["kernel_size"] = given["kernel_size"] if rank > 1 else given["kernel_size"][0]
            p = (2.0, 1.0, 3.0)[k % 3]
            of = getattr(f, f"lp_pool{rank}d")
            beside_torch(name, x, lambda t, of=of, p=p, given=given: of(t, p, **given), 1e-10, p=p, **attrs)
            continue
        given["padding"] = attrs["padding"][:rank]
        if name == "max_pool":
            given["dilation"] = attrs["dilation"]
        elif rng.integers(2):
            given["count_include_pad"] = attrs["count_include_pad"] = False
        of = getattr(f, f"{name}{rank}d")
        beside_torch(name, x, lambda t, of=of, given=given: of(t, **given), **attrs)


@pytest.mark.peers
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("name", ["avg", "max"])
def test_adaptive_windows_are_those_of_torch(name, rank):
    of = getattr(pytest.importorskip("torch").nn.functional, f"adaptive_{name}_pool{rank}d")
    rng = np.random.default_rng(rank)
    for _ in range(40):
        sizes, out = rng.integers(1, 9, rank), tuple(map(int, rng.integers(1, 7, rank)))
        x = rng.standard_normal((2, *sizes, int(rng.choice([1, 3, 17]))))
        beside_torch(f"adaptive_{name}_pool", x, lambda t, out=out: of(t, out), sizes=out)


def test_teams_give_the_same_bits_where_windows_overlap():
    rng = np.random.default_rng(0)
    attrs = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1)}
    for name, c in itertools.product(("max_pool", "avg_pool"), (1, 8, 16, 33)):
        x = rng.standard_normal((3, 9, 8, c)).astype(np.float32)
        want = run(name, x, **attrs)
        for n_workers in (2, 5, 11):
            for a, b in zip(run(name, x, n_workers, **attrs), want):
                assert a.tobytes() == b.tobytes(), (name, c, n_workers)


@pytest.mark.parametrize("channels", [1, 16, 40])
def test_the_first_of_equals_has_the_gradient(channels):
    x = np.zeros((1, 4, 4, channels), np.float32)
    x[0, 3, 2:] = 1.0
    _, dx, dy = run("max_pool", x, kernel=(2, 2))
    want = np.zeros_like(x)
    want[0, ::2, ::2] = dy[0]
    want[0, 2, 2], want[0, 3, 2] = 0, dy[0, 1, 1]
    assert np.array_equal(dx, want)


LARGEST = {"max_pool": {"kernel": (2, 2)}, "adaptive_max_pool": {"sizes": (2, 2)}, "global_max_pool": {}}


@pytest.mark.parametrize("on", [None, 4])
@pytest.mark.parametrize("channels", [1, 20])
@pytest.mark.parametrize("name", LARGEST)
def test_the_first_nan_has_the_gradient(name, channels, on, monkeypatch):
    """By kernels of both devices, as equations and scripts have it."""
    if on:
        monkeypatch.setattr(rowrun, "backend", Simulated(on))
    x = np.zeros((1, 4, 4, channels), np.float32)
    x[0, 0] = [[0], [np.nan], [0], [np.inf]]
    x[0, 1, :, :] = np.nan
    _, dx, dy = run(name, x, **LARGEST[name])
    want = np.zeros_like(x)
    if name == "global_max_pool":
        want[0, 0, 1] = dy.reshape(channels)
    else:
        want[0, [0, 1], [1, 2]], want[0, 2, ::2] = dy[0, 0], dy[0, 1]
    assert np.array_equal(dx, want)


@pytest.mark.parametrize("channels", [1, 20])
@pytest.mark.parametrize("name", LARGEST)
def test_nan_is_the_largest(name, channels):
    x = np.full((1, 4, 4, channels), -np.inf, np.float32)
    x[0, 2, 3] = np.nan
    y = run(name, x, **LARGEST[name])[0]
    assert np.isnan(y[0, -1, -1]).all()
    assert np.isnan(y).sum() == channels and (y[~np.isnan(y)] == -np.inf).all()


def test_a_window_without_anything_has_no_gradient():
    """The p-norm of zeros, whose derivative there is none."""
    x = np.zeros((1, 2, 4, 3))
    x[0, :, 2:] = 1.0
    y, dx, _ = run("lp_pool", x, kernel=(2, 2), p=2.0)
    assert (y[0, 0, 0] == 0).all() and (dx[0, :, :2] == 0).all() and (dx[0, :, 2:] != 0).all()


@pytest.mark.parametrize(
    ("name", "shape", "attrs", "message"),
    [
        ("max_pool", (None, 4), {"kernel": (2,)}, r"1 to 3 spatial axes.*\(B, 4\)"),
        ("max_pool", (5, None, 4, 3), {"kernel": (2, 2)}, r"not along the batch: \(5, B, 4, 3\)"),
        ("max_pool", (None, 4, 4, 3), {"kernel": (2,)}, r"kernel \(2,\): the image \(B, 4, 4, 3\) has 2 spatial axes"),
        ("max_pool", (None, 4, 4, 3), {"kernel": (2, 2), "stride": (1, 1, 1)}, r"stride \(1, 1, 1\)"),
        ("max_pool", (None, 4, 4, 3), {"kernel": (2, 5)}, r"window of 5 spans 5, and 4 of \(B, 4, 4, 3\)"),
        ("max_pool", (None, 5, 3), {"kernel": (3,), "dilation": (3,)}, "window of 3, 3 apart, spans 7, and 5 of"),
        ("max_pool", (None, 0, 3), {"kernel": (2,), "padding": (1, 1)}, "spans 2, and 0 of"),
        ("max_pool", (None, 4, 3), {"kernel": (2,), "padding": (2, 0)}, r"padding \(2, 0\) is no smaller"),
        ("max_pool", (None, 40, 40, 3), {"kernel": (17, 16)}, "more than 256 elements"),
        ("avg_pool", (None, 4, 4, 3), {"kernel": (2, 2), "padding": (0, 0)}, r"padding \(0,\)"),
        ("adaptive_avg_pool", (None, 4, 4, 3), {"sizes": (2,)}, r"sizes \(2,\): the image"),
        ("adaptive_max_pool", (None, 0, 3), {"sizes": (2,)}, "nothing to pool"),
        ("global_avg_pool", (None, 3), {}, "1 to 3 spatial axes"),
    ],
)
def test_refused(name, shape, attrs, message):
    attrs = {a.name: a.default for a in OPS[name].attrs} | attrs
    with pytest.raises(ValueError, match=message):
        OPS[name].shape({"x": shape_of(shape)}, attrs)
