"""Reductions, softmax and losses by the CUDA kernels: accuracy, special values, and the same bits for every grid."""

from __future__ import annotations

import numpy as np
import pytest

from calcvm.equations.declared import DECLARED
from calcvm.ops import OPS
from calcvm.ops.spec import Example
from tests import rowrun
from tests.cuda.simulated import Simulated
from tests.rowrun import EPS, Case, Cpu, cases, close, run_row, same_bits

TAKES = {name: {a.name for a in OPS[name].attrs} for name in DECLARED}
REDUCTIONS = ["sum", "mean", "sum_squares", "max", "min", *(name for name in TAKES if "axes" in TAKES[name])]
SOFTMAX = ["softmax", "log_softmax"]
ALONG = [name for name in TAKES if "axis" in TAKES[name] and OPS[name].category == "reduction"]
PAIRS = ["mse", "mae", "huber", "log_cosh", "binary_cross_entropy", "rmse"]
SCORES = ["softmax_cross_entropy", "accuracy"]
GRIDS = ((4, 2), (4, 3), (4, 5), (16, 1), (16, 2), (16, 3), (64, 1), (64, 2))  # threads of a block, blocks
SAMPLE = ((4, 3), (16, 2))
LARGE = {"sum": ((64, 2),), "softmax_cross_entropy": ((64, 2),)}  # a thread of the simulator takes its time

# Sizes beyond those of the table: rows and columns of many slots, rows of a whole warp and more, many places to a row.
LONG = {
    **dict.fromkeys(
        REDUCTIONS,
        [
            Example(shapes=((None, 331),), attrs={"axes": (1,)}, batch=3),
            Example(shapes=((None, 67, 3),), attrs={"axes": (1,)}, batch=5),
            Example(shapes=((None, 3),), attrs={"axes": (0,)}, batch=300),
            Example(shapes=((None, 9),), attrs={"axes": None}, batch=101),
        ],
    ),
    **dict.fromkeys([*SOFTMAX, *ALONG], [Example(shapes=((None, 203),), batch=5)]),
    **dict.fromkeys(PAIRS, [Example(shapes=((None, 300),) * 2, batch=3), Example(shapes=((None,),) * 2, batch=301)]),
    **dict.fromkeys(
        SCORES,
        [
            Example(shapes=((None, 21, 9), (None, 21)), integer={"target": 9}, batch=3),
            Example(shapes=((None, 300, 3), (None, 300)), integer={"target": 3}, batch=2),
            Example(shapes=((None, 19, 6), (None, 19, 6)), low=0.1, high=1.0, batch=3),
            Example(shapes=((None, 130), (None,)), integer={"target": 130}, batch=3),
        ],
    ),
}
NAMES = [n for n in OPS if n in LONG]


def with_long(name: str, dtype: str) -> list[Case]:
    return cases(OPS[name], dtype) + [Case(OPS[name], e, dtype, e.batch) for e in LONG[name]]


def on(monkeypatch, threads):
    monkeypatch.setattr(rowrun, "backend", Simulated(threads))


def test_all_are_here():
    categories = {"reduction", "loss", "metric"}
    assert set(NAMES) == {n for n, spec in OPS.items() if spec.category in categories}


@pytest.mark.parametrize("name", NAMES)
def test_same_bits_on_every_grid(name, whole, monkeypatch):
    for case in with_long(name, "float32"):
        on(monkeypatch, 4)
        for row, values in rowrun._row_runs(case):
            on(monkeypatch, 4)
            want = run_row(row, case.words, values, case.dtype, known=case.known())
            for threads, blocks in GRIDS if whole else SAMPLE + LARGE.get(name, ()):
                on(monkeypatch, threads)
                got = run_row(
                    row, case.words, values, case.dtype, known=case.known(), n_workers=blocks, reverse=threads == 16
                )
                for operand, v in want.items():
                    assert same_bits(got[operand], v), f"{row.name}: {operand}, {blocks} blocks of {threads} threads"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_long(name, dtype, monkeypatch):
    """The reference, with the bounds of the table's own examples; gradients as the CPU's kernels give them."""
    for e in LONG[name]:
        case = Case(OPS[name], e, dtype, e.batch)
        on(monkeypatch, 16)
        rowrun.check_forward(case)
        values = case.forward() | case.output_gradients()
        got = case.backward(values)
        monkeypatch.setattr(rowrun, "backend", Cpu())
        for operand, want in case.backward(values).items():
            close(got[operand], want, 64 * EPS[dtype], f"{name}: {operand}")


@pytest.mark.parametrize("n", [1, 2, 7, 31, 128, 255, 1000, 5003])
def test_long_sums(n, monkeypatch):
    """Totals are float64 where the table's sums are: what is left are sums of four, and the result's own rounding."""
    on(monkeypatch, 16)
    rng = np.random.default_rng(n)
    for inner in (1, 3):
        x = (1 + rng.uniform(0, 1, (n, inner))).astype(np.float32)
        for name, want in (("sum", x.astype(float).sum(0)), ("mean", x.astype(float).mean(0))):
            row = OPS[name].fwd[0]
            words = dict.fromkeys(("O", "K0", "R1", "K1", "R2"), 1) | {"R0": n, "I": inner, "by": int(inner > 1)}
            got = run_row(row, words, {"x": x.reshape(-1)}, "float32")["y"]
            assert (np.abs(got - want) <= 2 * EPS["float32"] * want).all(), name
    (mean,) = (r for r in OPS["mse"].fwd if r.name == "loss_mean")
    for dtype in ("float32", "float64"):
        t_l = rng.uniform(0, 1, n).astype(dtype)
        got = run_row(mean, {"rows": n, "count": n}, {"t_l": t_l}, dtype)["loss"]
        additions = n / (4 * 8 * 4) + 12  # on the longest way to the total: 8 warps of slots, four at a time
        assert np.abs(got - t_l.astype(float).mean()) <= additions * EPS[dtype] * t_l.astype(float).mean()


# ---------------------------------------------------------------- special values
def _both(row, words, values, monkeypatch, dtype="float32"):
    """What the CUDA kernel gives, and what the CPU's does."""
    with np.errstate(all="ignore"):
        on(monkeypatch, 16)
        got = run_row(row, words, values, dtype)
        monkeypatch.setattr(rowrun, "backend", Cpu())
        return got, run_row(row, words, values, dtype)


@pytest.mark.parametrize("n", [1, 3, 10, 40])
@pytest.mark.parametrize("name", SOFTMAX)
def test_special_values_of_softmax(name, n, monkeypatch):
    """NaN, infinities and masked scores give what they give on the CPU: a row of its own is spoiled, and no other."""
    specials = [[np.nan], [np.inf], [-np.inf], [np.inf, -np.inf], [-np.inf] * n, [1e38, -1e38], [88.8], [-104.5], [0.0]]
    x = np.random.default_rng(n).uniform(-3, 3, (2 * len(specials), n)).astype(np.float32)
    for i, values in enumerate(specials):
        x[2 * i, : len(values)] = values[:n]  # at the row's start, and at its end
        x[2 * i + 1, max(n - len(values), 0) :] = values[:n]
    words = {"rows": len(x), "inner": 1, "N": n}
    got, want = (y["y"].reshape(x.shape) for y in _both(OPS[name].fwd[0], words, {"x": x.reshape(-1)}, monkeypatch))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    finite = np.isfinite(x).all(1)
    assert np.isfinite(got[finite]).all()
    assert np.isnan(got[np.isnan(x).any(1) | (x == np.inf).any(1)]).any(1).all()
    if name == "softmax" and n > 1:
        assert (got[4:6][x[4:6] == -np.inf] == 0).all() and np.isfinite(got[4:6]).all()


@pytest.mark.parametrize("n, inner", [(6, 1), (100, 1), (6, 3), (100, 3)])
@pytest.mark.parametrize("name", ["max", "min"])
def test_extrema(name, n, inner, monkeypatch):
    """The gradient goes to the first of equals alone; NaN is the extremum, and the first of several has it."""
    spec = OPS[name]
    x = np.random.default_rng(n).integers(0, 3, (5, n, inner)).astype(np.float32)
    x[1, n // 2 :] = np.nan
    x[2, 0] = x[2, -1] = np.inf if name == "max" else -np.inf
    x[3] = 1
    x[4] = -0.0
    x[4, -1] = 0.0
    words = {"O": 5, "P": 1, "R0": 1, "R1": n, "I": inner, "by": 0}
    fwd, on_cpu = _both(spec.fwd[0], words, {"x": x.reshape(-1)}, monkeypatch)
    np.testing.assert_array_equal(fwd["y"], on_cpu["y"])
    assert np.isnan(fwd["y"].reshape(5, inner)[1]).all()
    dy = np.arange(1, 5 * inner + 1, dtype=np.float32)
    values = {"x": x.reshape(-1), "y": fwd["y"], "dy": dy}
    bwd, on_cpu = _both(spec.bwd[0], words, values, monkeypatch)
    np.testing.assert_array_equal(bwd["dx"], on_cpu["dx"])
    dx = bwd["dx"].reshape(x.shape)
    first = x.argmax(1) if name == "max" else x.argmin(1)
    np.testing.assert_array_equal(np.take_along_axis(dx, first[:, None], 1)[:, 0], dy.reshape(5, inner))
    assert (dx != 0).sum() == 5 * inner


@pytest.mark.parametrize("bad", [-1.0, 7.0, 0.5, np.nan, np.inf, -np.inf, 1e30, 2.0**63])
@pytest.mark.parametrize("row", [OPS[n].rows[0] for n in SCORES] + [OPS[SCORES[0]].bwd[0]], ids=lambda r: r.name)
def test_bad_labels_trap(row, bad, monkeypatch):
    on(monkeypatch, 4)
    words = {"rows": 3, "inner": 2, "N": 7, "dense": 0, "smoothing": 0.0, "count": 6}
    scores, target = np.zeros(42, np.float32), np.arange(6, dtype=np.float32)
    values = dict.fromkeys(("logits", "p", "scores"), scores) | {"target": target, "dloss": np.ones(1, np.float32)}
    run_row(row, words, values, "float32", n_workers=2)
    target[4] = bad
    with pytest.raises(AssertionError, match="trapped"):
        run_row(row, words, values, "float32", n_workers=2)


@pytest.mark.parametrize("n", [3, 10, 40])
def test_first_largest_score(n, monkeypatch):
    """Accuracy counts the first of equals; NaN is never larger than another score, nor is another than a NaN ahead."""
    rng = np.random.default_rng(n)
    scores = rng.integers(0, 3, (24, n)).astype(np.float32)
    scores[3], scores[5, 0], scores[6, 1:], scores[7, -1], scores[8] = 1, np.nan, np.nan, np.nan, -np.inf
    target = np.array([int((row > row[0]).any() and np.nanargmax(row)) for row in scores], np.float32)
    target[12:] = rng.integers(0, n, 12)
    words = {"rows": 24, "inner": 1, "N": n, "dense": 0, "count": 24}
    values = {"scores": scores.reshape(-1), "target": target}
    got, want = _both(OPS["accuracy"].fwd[0], words, values, monkeypatch)
    np.testing.assert_array_equal(got["t_l"], want["t_l"])
    assert got["t_l"][:12].all()


def test_masked_class(monkeypatch):
    """A score of -inf, as a mask sets it, leaves loss and gradient finite where the target is 0 there."""
    x = np.random.default_rng(0).uniform(-2, 2, (4, 12)).astype(np.float32)
    target = np.full((4, 12), 1 / 11, np.float32)
    x[:, 2], target[:, 2] = -np.inf, 0
    words = {"rows": 4, "inner": 1, "N": 12, "dense": 1, "smoothing": 0.0}
    values = dict.fromkeys(("logits", "p"), x.reshape(-1)) | {"target": target.reshape(-1)}
    got, want = _both(OPS["softmax_cross_entropy"].fwd[0], words, values, monkeypatch)
    assert np.isfinite(got["t_l"]).all()
    for operand in ("t_l", "p"):
        np.testing.assert_allclose(got[operand], want[operand], rtol=2e-6)
