"""Values that lie otherwise than users see them: images channels-last, weights window first."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.ops import OPS, layouts
from calcvm.ops.layouts import LAST, LAYOUTS, WINDOW
from tests.reference import reference


@pytest.mark.parametrize("layout", ["", *LAYOUTS])
@pytest.mark.parametrize("rank", [3, 4, 5])
def test_orders_lead_back(layout, rank):
    shape = tuple(range(2, 2 + rank))
    assert layouts.seen(layouts.laid(shape, layout), layout) == shape
    x = np.zeros(shape).transpose(layouts.axes(layout, rank))
    assert x.shape == layouts.laid(shape, layout)
    assert x.transpose(layouts.back(layout, rank)).shape == shape
    for other in LAYOUTS:
        assert x.transpose(layouts.between(layout, other, rank)).shape == layouts.laid(shape, other)


def test_what_lies_how():
    assert layouts.laid("NCHW", LAST) == (*"NHWC",)
    assert layouts.laid("OIHW", WINDOW) == (*"HWIO",)
    assert layouts.laid("NC", LAST) == (*"NC",)


def conv(x, w, b=0.0):
    """Of stride 1, padding 1, windows of 3 by 3."""
    x = np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)])
    seen = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))
    return np.einsum("nchwij,fcij->nfhw", seen, w) + np.reshape(b, (-1, 1, 1) if np.ndim(b) else ())


RNG = np.random.default_rng(0)
X, W = RNG.standard_normal((5, 3, 6, 7)), RNG.standard_normal((4, 3, 3, 3))
V = RNG.standard_normal((2, 4, 3, 3))


def forward(build, *, batch=5, **parameters):
    """What a function of x and parameters makes of `X`, and the model."""
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, *X.shape[1:]))
    named = {name: g.parameter(name, value.shape, init=value) for name, value in parameters.items()}
    with g.path("predict") as path:
        path.output = build(x, **named)
    model = cv.CalcHeap("8 MiB").create(cv.compile(g, batch_size=batch, dtype="float64"))
    model["x"] = X[:batch]
    model.forward("predict")
    return model


def rows(model):
    return [name for name, _ in model.program.instructions]


def test_arrays_are_seen_channels_first():
    model = forward(lambda x, w: cv.conv2d(x, w, padding=1), w=W)
    np.testing.assert_allclose(model["conv"], conv(X, W), atol=1e-12)
    view = model.parameters["w"]
    assert view.shape == W.shape and (view == W).all()
    view[...] = 2 * W
    model.forward("predict")
    np.testing.assert_allclose(model["conv"], conv(X, 2 * W), atol=1e-12)
    model.set_parameters({"w": W})
    assert (model.parameters["w"] == W).all()


def test_only_where_two_disagree_is_a_copy():
    def two(x, w, v):
        return cv.relu(cv.conv2d(cv.tanh(cv.conv2d(x, w, padding=1)), v, padding=1) * 3 + 1)

    model = forward(two, w=W, v=V)
    names = [model.program.spec(pc).name for pc in range(len(model.program.rows))]
    assert names.count("transpose_fwd") == 2  # x before, the result behind
    expected = np.maximum(conv(np.tanh(conv(X, W)), V) * 3 + 1, 0)
    np.testing.assert_allclose(model[model.program.info["paths"]["predict"]["output"]], expected, atol=1e-12)


@pytest.mark.parametrize(
    "other",
    [
        RNG.standard_normal((4, 1, 1)),
        RNG.standard_normal((6, 7)),
        RNG.standard_normal((4, 6, 7)),
        RNG.standard_normal((1, 4, 6, 1)),
        RNG.standard_normal(7),
        RNG.standard_normal(()),
    ],
    ids=lambda a: str(a.shape),
)
def test_broadcast_operands_have_any_rank(other):
    model = forward(lambda x, w, o: (cv.conv2d(x, w, padding=1) - o) * o, w=W, o=other)
    expected = (conv(X, W) - other) * other
    np.testing.assert_allclose(model[model.program.info["paths"]["predict"]["output"]], expected, atol=1e-12)


def test_images_meet_what_lies_as_it_is_seen():
    def build(x, w, skip):
        return cv.conv2d(x, w, padding=1) + cv.conv2d(x, skip, padding=1) + cv.sum(x, 1, True)

    skip = RNG.standard_normal(W.shape)
    model = forward(build, w=W, skip=skip)
    expected = conv(X, W) + conv(X, skip) + X.sum(1, keepdims=True)
    np.testing.assert_allclose(model[model.program.info["paths"]["predict"]["output"]], expected, atol=1e-12)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("n", [2, 3, 8, 9])
def test_images_are_joined_along_axes_as_seen(n, axis):
    if axis == 0 and n > 3:
        return
    model = forward(lambda x, w: cv.concat([cv.conv2d(x, w, padding=1) * k for k in range(n)], axis=axis), w=W)
    name = model.program.info["paths"]["predict"]["output"]
    np.testing.assert_allclose(model[name], np.concatenate([conv(X, W) * k for k in range(n)], axis), atol=1e-12)
    names = [model.program.spec(pc).name for pc in range(len(model.program.rows))]
    assert names.count("transpose_fwd") == 2


def test_weights_that_something_else_has_read_first():
    def build(x, w):
        size = cv.sum(cv.square(w), (1, 2, 3))
        return cv.conv2d(x, w, padding=1) + cv.reshape(size, (4, 1, 1))

    model = forward(build, w=W)
    expected = conv(X, W) + (W**2).sum((1, 2, 3)).reshape(4, 1, 1)
    np.testing.assert_allclose(model[model.program.info["paths"]["predict"]["output"]], expected, atol=1e-12)


def test_a_path_reads_the_images_of_another():
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, *X.shape[1:])), g.parameter("w", W.shape, init=W)
    with g.path("see"):
        y = cv.conv2d(x, w, padding=1)
    with g.path("use"):
        z = cv.sum(cv.exp(y * 0.1), (2, 3))
    model = cv.CalcHeap("8 MiB").create(cv.compile(g, batch_size=5, dtype="float64"))
    model["x"] = X
    model.forward("see")
    model.forward("use")
    np.testing.assert_allclose(model[z.name], np.exp(conv(X, W) * 0.1).sum((2, 3)), atol=1e-10)


def network():
    return nn.Conv2d(4, 3, padding=1) >> nn.ReLU() >> nn.Conv2d(2, 3, stride=2) >> nn.Flatten() >> nn.Linear(3)


def trained(**settings):
    y = np.arange(40) % 3
    x = np.random.default_rng(1).standard_normal((40, 3, 6, 7)).astype(np.float32)
    settings = {"batch_size": 8, "seed": 3, **settings}
    model = cv.Model(
        network(), input_shape=(3, 6, 7), loss="softmax_cross_entropy", optimizer=cv.Adam(1e-2), **settings
    )
    model.fit(x, y, epochs=2)
    return model, x, y


def test_models_are_saved_and_loaded(tmp_path):
    model, x, _ = trained()
    model.save(tmp_path / "m.calc")
    again = cv.load(tmp_path / "m.calc")
    assert again.program.hash == model.program.hash
    assert (again.predict(x) == model.predict(x)).all()
    for name, value in model.parameters.items():
        assert value.shape == again.parameters[name].shape and (value == again.parameters[name]).all()


@pytest.mark.parametrize("settings", [{"workers": 2}, {"learning_batch": 8, "batch_size": 4}], ids=["team", "rounds"])
def test_bits_are_those_of_one_worker(settings):
    one, x, _ = trained(workers=1)
    other, *_ = trained(**settings)
    if "workers" in settings:
        assert all((a == other.parameters[n]).all() for n, a in one.parameters.items())
    np.testing.assert_allclose(one.predict(x), other.predict(x), atol=1e-4)


def test_weights_begin_as_their_fans_say():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 32, 8, 8))
    seen = []

    def mine(shape, rng):
        seen.append(shape)
        return np.zeros(shape)

    w = g.parameter("w", (64, 32, 3, 3), init="he_normal")
    v = g.parameter("v", (8, 64, 1, 1), init=mine)
    with g.path("predict"):
        cv.conv2d(cv.conv2d(x, w), v)
    model = cv.CalcHeap("8 MiB").create(cv.compile(g, batch_size=2))
    assert np.std(model.parameters["w"]) == pytest.approx((2 / (32 * 9)) ** 0.5, rel=0.03)
    assert seen == [(8, 64, 1, 1)]


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda x: cv.conv2d(x, np.zeros((4, 2, 3, 3))), cv.ShapeError, r"x \(B, 3, 6, 7\) has 3 channels.* take 2"),
        (lambda x: cv.conv2d(x, np.zeros((4, 3, 9, 3))), cv.ShapeError, r"window .* is larger than x \(B, 3, 6, 7\)"),
        (lambda x: cv.conv2d(x, np.zeros((4, 1, 3, 3)), groups=3), cv.ShapeError, "4 output channels .* groups=3"),
        (lambda x: cv.conv1d(x, np.zeros((4, 3, 3))), cv.ShapeError, "must have 3 axes"),
        (
            lambda x: cv.conv2d(x, np.zeros((4, 3, 3, 3)), np.zeros(3)),
            cv.ShapeError,
            r"bias \(3,\) must have shape \(4,\)",
        ),
        (lambda x: cv.conv2d(x, np.zeros((4, 3, 3, 3)), stride=0), cv.CalcError, "stride"),
        (lambda x: cv.conv2d(x, np.zeros((4, 3, 3, 3)), padding=(1, 2, 3)), cv.CalcError, "padding"),
        (lambda x: cv.conv2d(x, np.zeros((4, 3, 3, 3)), padding="same", stride=2), cv.CalcError, "stride 1"),
        (lambda x: cv.conv2d(x, np.zeros((4, 3, 3, 3)), padding="full"), cv.CalcError, "padding"),
    ],
)
def test_bad_input_is_refused_with_shapes_as_seen(build, error, text):
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3, 6, 7))
    with g.path("predict"), pytest.raises(error, match=text):
        build(x)


DRAWN = {
    "dropout_mask": {"axis": 1},
    "crop": {"sizes": (3, 7), "padding": (0, 2), "flips": (0.5, 0.5), "first": 2},
}


@pytest.mark.parametrize("spec", [s for s in OPS.values() if s.anyhow], ids=lambda s: s.name)
def test_what_is_said_to_lie_anyhow_does(spec):
    """Of inputs in another order of their axes the result is that of the same inputs, in that order."""
    rng, axes = np.random.default_rng(2), (0, 2, 3, 1)
    x = [rng.uniform(0.2, 0.9, (2, 3, 4, 5)) for _ in spec.inputs]
    of = reference(spec.name)
    if spec.name == "dropout" or of is None:  # draws by the place in the heap
        return
    if spec.name in DRAWN:
        state = [np.array([3, 4]), np.float64(0.5)][: len(spec.inputs) - 1]
        result = of(x[0].transpose(axes), *state, **spec.relaid(DRAWN[spec.name], axes))
        np.testing.assert_array_equal(result, of(x[0], *state, **DRAWN[spec.name]).transpose(axes))
        return
    if spec.name == "pad":
        pads = {"pads": (0, 1, 2, 0, 0, 3, 0, 1), "mode": "edge", "value": 0.0}
        result = of(x[0].transpose(axes), **spec.relaid(pads, axes))
        np.testing.assert_array_equal(result, of(x[0], **pads).transpose(axes))
        return
    attrs = {a.name: 1.5 for a in spec.attrs if a.default is None} if spec.name != "cast" else {"to": "int64"}
    if "axis" in {a.name for a in spec.attrs}:
        attrs["axis"] = 1
    there = spec.relaid(attrs, axes) if spec.relaid else attrs
    found = of(*x, **attrs), of(*(v.transpose(axes) for v in x), **there)
    here, result = (y["y"] if isinstance(y, dict) else y for y in found)
    np.testing.assert_array_equal(result, here.transpose(axes))


def test_images_that_a_path_shows_are_read_and_shown_by_others():
    """Output of one path, read by another, and output of a third: each sees the same numbers."""
    rng, g = np.random.default_rng(0), cv.CalcGraph()
    x, w = g.placeholder("x", (None, 2, 4, 4)), g.parameter("w", (3, 2, 1, 1))
    with g.path("predict") as predict:
        y = cv.conv2d(x, w).rename("y")
        predict.output = y
    with g.path("look"):
        cv.mean(cv.tanh(y)).rename("seen")
    with g.path("show") as show:
        show.output = y
    program = cv.compile(g, batch_size=3, dtype="float64", workers=1, keep=["seen"])
    with cv.CalcHeap(program.heap_bytes) as heap:
        model = heap.create(program, seed=3)
        data = rng.standard_normal((3, 2, 4, 4))
        model["x"] = data
        for path in ("predict", "look", "show"):
            model.forward(path)
        want = np.einsum("bchw,oc->bohw", data, model.parameters["w"][:, :, 0, 0])
        np.testing.assert_allclose(model["y"], want, rtol=1e-12)
        np.testing.assert_allclose(model["seen"], np.tanh(want).mean(), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("to", ["float32", "float64", "int64"])
def test_a_cast_of_images_is_seen_as_they_are(dtype, to):
    """Also where it is no row: of the program's own floats."""
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 4, 5), channels_last=True)
    with g.path("p"):
        typed = cv.cast(x, to)
        back = cv.cast(typed, None)
    program = cv.compile(g, batch_size=2, dtype=dtype, keep=[typed.name, back.name])
    model, images = cv.CalcHeap(program.heap_bytes).create(program), np.arange(40).reshape(2, 4, 5)
    model["x"] = images
    model.forward("p")
    for v in (typed, back):
        np.testing.assert_array_equal(model[v.name], images.transpose(0, 2, 1))


def test_a_shape_as_of_channels_that_are_last_is_told():
    with pytest.warns(cv.CalcWarning, match=r"input_shape \(9, 9, 3\) has 9 channels, 9 by 3: .* channels_last=True"):
        cv.build_graph(nn.Conv2d(4, 3), (9, 9, 3), "mse", "adam")
    cv.build_graph(nn.Conv2d(4, 3), (9, 9, 3), "mse", "adam", channels_last=True)
    cv.build_graph(nn.Flatten() >> nn.Linear(4), (9, 9, 3), "mse", "adam")
    cv.build_graph(nn.Conv2d(4, 3), (3, 9, 9), "mse", "adam")
