"""Epilogues: what rows do to their results for the rows after them, seen in listings, and the same bits as alone."""

from __future__ import annotations

import re

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.lowering import sections
from calcvm.ops import ROWS
from calcvm.ops.epilogues import ALL, operands_of, words_of


def conv(channels, kernel=3, **kw):
    return nn.Conv2d(channels, kernel, padding=kernel // 2, **kw)


def normed(channels, kernel=3, **kw):
    return conv(channels, kernel, bias=False, **kw) >> nn.BatchNorm()


# Networks, and rows that there must be: of a training step and of inference, the operator and its activation
NETWORKS = {
    "convolution, activation": (
        conv(5) >> nn.ReLU() >> conv(4) >> nn.Tanh(),
        [r"conv_fwd .* = relu\(sum\[\S*c\] .*bias", r"conv_fwd .* = tanh\(sum\[\S*c\]", r"conv_bwd_x .* = drelu\(relu\S*\)\*sum\[\S*f\]"],
    ),
    "residual addition, activation": (
        conv(6) >> nn.LeakyReLU(0.2) >> nn.Residual(conv(6) >> nn.Sigmoid() >> conv(6)) >> nn.Sigmoid(),
        [
            r"conv_fwd .* = sigmoid\(sum\[\S*c\] .* \+ leaky_relu\S*\)",
            r"conv_bwd_x .* = dleaky_relu\(.*\)\*\(sum\[\S*f\] .* \+ d\S+\)",
            r"conv_bwd_x .* = dsigmoid",
        ],
    ),
    "projected residual": (
        nn.Residual(normed(7, stride=2) >> nn.ReLU() >> normed(7), normed(7, 1, stride=2)) >> nn.ReLU(),
        [
            r"batch_norm_fwd .* = relu\(.*shift\S*\)",
            r"batch_norm_fwd .* = relu\(.* \+ batch_norm\S*\)",
            r"conv_fwd .* = relu\(\(sum\[\S*c\] .* - \S*running_mean\S*\)\*\S*factor\S* \+ \S*shift\S*\)",
            r"conv_fwd .* = relu\(\(sum\[\S*c\] .* - \S*running_mean\S*\)\*\S*factor\S* \+ \S*shift\S* \+ batch_norm_inference\S*\)",
        ],
    ),
    "groups, depthwise": (
        conv(6, 1) >> nn.BatchNorm() >> nn.ReLU6() >> conv(6, groups=6, stride=2) >> nn.GroupNorm(2) >> nn.ReLU6()
        >> conv(4, 1) >> nn.InstanceNorm(affine=False) >> nn.HardSwish(),
        [
            r"group_norm_fwd .* = relu6\(", r"conv_bwd_x .* = drelu6\(", r"group_norm_fwd .* = hard_swish\(",
            r"conv_fwd .* = relu6\(\(sum\[\S*c\] .* \+ conv2d_1.bias\S* - \S*running_mean",
        ],
    ),
    "transposed": (
        nn.ConvTranspose2d(5, 2, stride=2) >> nn.ReLU() >> nn.ConvTranspose2d(4, 3, stride=2) >> nn.BatchNorm() >> nn.SiLU(),
        [
            r"conv_transpose_fwd .* = relu\(", r"conv_transpose_bwd_x .* = drelu\(",
            r"conv_transpose_fwd .* = silu\(\(sum\[\S*f\] .* - \S*running_mean",
        ],
    ),
    "few channels": (
        conv(3, 5) >> nn.Tanh() >> conv(40) >> nn.ReLU() >> conv(70, 1) >> nn.ReLU() >> conv(2),
        [r"conv_bwd_x .* = dtanh\(", r"conv_fwd .* = relu\("],
    ),
}  # fmt: skip


def trained(net, dtype, workers):
    """Listing, and what three steps and an inference make."""
    model = cv.Model(
        net >> nn.Flatten() >> nn.Linear(3), input_shape=(3, 8, 6), loss="softmax_cross_entropy",
        optimizer=cv.SGD(0.1), batch_size=5, seed=0, dtype=dtype, workers=workers,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    losses = []
    for batch in 5, 5, 2:
        losses.append(model.step(rng.standard_normal((batch, 3, 8, 6)), rng.integers(0, 3, batch)))
    states = {**model.parameters, **model.buffers}
    made = {name: value.copy() for name, value in states.items()}
    return model.program.disassemble(), {**made, "losses": np.array(losses), "y": model.predict(np.ones((4, 3, 8, 6)))}


@pytest.mark.parametrize(("dtype", "workers"), [("float32", 1), ("float32", 3), ("float64", 2)])
@pytest.mark.parametrize("network", NETWORKS)
def test_rows_do_what_follows_with_the_same_bits(network, dtype, workers, monkeypatch):
    net, expected = NETWORKS[network]
    listing, found = trained(net, dtype, workers)
    for row in expected:
        assert re.search(row, listing), f"{row}\n{listing}"
    monkeypatch.setattr(sections, "fuse_epilogues", lambda statements, kept: statements)
    alone, want = trained(net, dtype, workers)
    assert not any(re.search(row, alone) for row in expected)
    assert len(alone.splitlines()) > len(listing.splitlines())
    for name, value in want.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_what_is_read_elsewhere_stays():
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, 3, 5, 5)), g.parameter("w", (4, 3, 3, 3))
    with g.path("run"):
        z = cv.conv2d(x, w)
        cv.relu(z) + cv.tanh(z)
    rows = [line.split()[1] for line in cv.compile(g, batch_size=2).disassemble().splitlines() if "@" in line]
    assert {"conv_fwd", "relu_fwd", "tanh_fwd", "add_fwd"} <= {*rows}


def test_a_broadcast_addition_is_none():
    g = cv.CalcGraph()
    x, w, b = g.placeholder("x", (None, 3, 5, 5)), g.parameter("w", (4, 3, 3, 3)), g.parameter("b", (4, 1, 1))
    with g.path("run"):
        cv.relu(cv.conv2d(x, w) + b)
    assert "add_fwd" in cv.compile(g, batch_size=2).disassemble()


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.takes or row.epilogues], ids=lambda row: row.name)
def test_declarations_are_whole(row):
    """A row has the words and operands of all that it takes, and says of itself what it has."""
    size, part, columns = "", "", ""
    names = {o.name for o in operands_of(row.takes, size, part, columns)} | {w.name for w in words_of(row.takes)}
    assert names <= {o.name for o in row.operands} | {w.name for w in row.words}
    assert [*row.takes] == [kind for kind in (*ALL, "derivative") if kind in row.takes]
    for by in row.epilogues:
        assert {o for _, o in by.operands} | {by.reads} <= {o.name for o in row.operands}
        assert {w for _, w in by.words if isinstance(w, str)} <= {w.name for w in row.words}
        assert {o for o, _ in by.operands} <= {o.name for o in operands_of((by.kind,), size, part, columns)}
