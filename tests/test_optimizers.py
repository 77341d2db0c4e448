"""Optimizers against PyTorch over many steps; schedules, clipping, penalties; the front end's data."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from calcvm import optim
from calcvm.errors import CalcError
from calcvm.formulas import steps
from calcvm.ops import OPS, ROWS
from calcvm.ops.optimizers import HYPER_SLOTS, SCHEDULES
from calcvm.vm.program.encoding import form_of
from tests.reference import optimizers as reference
from tests.rowcall import Heap

RTOL = {"float32": 1e-4, "float64": 1e-10}
SHAPE = (7, 5)
STEPS = 20


def test_slots_and_schedules_lie_where_kernels_look_for_them():
    assert [getattr(steps, name.upper()) for name in HYPER_SLOTS] == list(range(steps.N_SLOTS))
    assert [getattr(steps, name.upper()) for name in SCHEDULES] == list(range(len(SCHEDULES)))


def hyper_of(optimizer):
    return np.array([optimizer.slots()[name] for name in HYPER_SLOTS])


def rng(seed=0):
    return np.random.default_rng(seed)


def train(optimizer, p, gradients, dtype, n_workers=1):
    """Parameter and heap after one step for each gradient, clipping included."""
    state = {name: np.full(p.shape, start) for name, start in optimizer.state.items()}
    heap = Heap(dtype, {"p": p, "g": p, **state, "hyper": hyper_of(optimizer), "s": np.zeros(len(p))})
    words = {"rows": p.shape[0], "cols": p.shape[1]}
    for g in gradients:
        heap["g"][...] = g
        if optimizer.clip_value is not None:
            heap.call("clip_value", n_workers, **words)
        if optimizer.clip_norm is not None:
            heap.call("sumsq", n_workers, **words).call("clip_norm_scale", n_workers, n=len(p))
        heap.call("tick", n_workers, schedule=optimizer.schedule_code)
        heap.call(optimizer.row, n_workers, **words, clip=int(optimizer.clip_norm is not None))
    return heap["p"].copy(), heap


# ---------------------------------------------------------------- against PyTorch
PAIRS = {
    "sgd": (optim.SGD(0.1), "SGD", {"lr": 0.1}),
    "sgd decay": (optim.SGD(0.1, weight_decay=0.02), "SGD", {"lr": 0.1, "weight_decay": 0.02}),
    "momentum": (
        optim.SGD(0.1, 0.9, weight_decay=0.01),
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    ),
    "nesterov": (
        optim.SGD(0.05, momentum=0.8, nesterov=True, weight_decay=0.01),
        "SGD",
        {"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    ),
    "adam": (optim.Adam(), "Adam", {}),
    "adam decay": (
        optim.Adam(0.01, 0.8, 0.95, 1e-3, weight_decay=0.1),
        "Adam",
        {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
    ),
    "adamw": (optim.AdamW(0.01, weight_decay=0.3), "AdamW", {"lr": 0.01, "weight_decay": 0.3}),
    "adamw default": (optim.AdamW(), "AdamW", {}),
    "rmsprop": (optim.RMSProp(0.01, weight_decay=0.1), "RMSprop", {"lr": 0.01, "weight_decay": 0.1}),
    "rmsprop default": (optim.RMSProp(), "RMSprop", {}),
    "rmsprop momentum": (
        optim.RMSProp(0.01, alpha=0.9, eps=1e-3, momentum=0.7),
        "RMSprop",
        {"lr": 0.01, "alpha": 0.9, "eps": 1e-3, "momentum": 0.7},
    ),
    "adagrad": (optim.Adagrad(0.1, weight_decay=0.1), "Adagrad", {"lr": 0.1, "weight_decay": 0.1}),
    "adagrad default": (optim.Adagrad(), "Adagrad", {}),
    "adagrad start": (
        optim.Adagrad(0.1, initial_accumulator=0.5),
        "Adagrad",
        {"lr": 0.1, "initial_accumulator_value": 0.5},
    ),
    "clip norm": (optim.Adam(0.1, clip_norm=0.5), "Adam", {"lr": 0.1}),
    "clip norm sgd": (optim.SGD(0.1, clip_norm=0.5), "SGD", {"lr": 0.1}),
    "clip norm adamw": (optim.AdamW(0.1, clip_norm=0.5), "AdamW", {"lr": 0.1}),
    "clip value": (optim.SGD(0.1, clip_value=0.3), "SGD", {"lr": 0.1}),
    "clip both": (optim.SGD(0.1, clip_value=0.3, clip_norm=1.0), "SGD", {"lr": 0.1}),
}


@pytest.mark.peers
@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize("name", PAIRS)
def test_steps_agree_with_torch(name, dtype):
    torch = pytest.importorskip("torch")
    ours, theirs, options = PAIRS[name]
    start, gradients = rng().normal(size=SHAPE), rng(1).normal(size=(STEPS, *SHAPE))
    p = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = getattr(torch.optim, theirs)([p], **options)
    for g in gradients:
        p.grad = torch.tensor(g)
        if ours.clip_value is not None:
            torch.nn.utils.clip_grad_value_([p], ours.clip_value)
        if ours.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([p], ours.clip_norm)
        optimizer.step()
    expected = p.detach().numpy()
    got, _ = train(ours, start, gradients, dtype)
    moved = np.abs(expected - start).max()
    np.testing.assert_allclose(got, expected, rtol=0, atol=RTOL[dtype] * moved)


@pytest.mark.peers
@pytest.mark.parametrize("dtype", RTOL)
def test_adamhat_agrees_with_scikit_learn(dtype):
    sklearn = pytest.importorskip("sklearn.neural_network._stochastic_optimizers")
    start, gradients = rng().normal(size=SHAPE), rng(1).normal(size=(STEPS, *SHAPE))
    expected = start.copy()
    theirs = sklearn.AdamOptimizer([expected], 0.01, 0.8, 0.95, 1e-2)
    for g in gradients:
        theirs.update_params([expected], [g])
    got, _ = train(optim.AdamHat(0.01, 0.8, 0.95, 1e-2), start, gradients, dtype)
    np.testing.assert_allclose(got, expected, rtol=0, atol=RTOL[dtype] * np.abs(expected - start).max())


def rates(schedule, steps, rate):
    """The learning rate of each step."""
    ours = optim.SGD(rate, schedule=schedule)
    heap = Heap("float32", {"hyper": hyper_of(ours)})
    at = HYPER_SLOTS.index("lr_t")
    return np.array([heap.call("tick", schedule=ours.schedule_code)["hyper"][at] for _ in range(steps)])


@pytest.mark.peers
@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (optim.Constant(), lambda s, o: s.ConstantLR(o, 1.0)),
        (optim.Step(4, 0.5), lambda s, o: s.StepLR(o, 4, 0.5)),
        (optim.Exponential(0.9), lambda s, o: s.ExponentialLR(o, 0.9)),
        (optim.Cosine(STEPS), lambda s, o: s.CosineAnnealingLR(o, STEPS)),
        (optim.Cosine(25, min_lr=0.01), lambda s, o: s.CosineAnnealingLR(o, 25, 0.01)),
        (optim.CosineRestarts(1), lambda s, o: s.CosineAnnealingWarmRestarts(o, 1)),
        (optim.CosineRestarts(7, min_lr=0.01), lambda s, o: s.CosineAnnealingWarmRestarts(o, 7, 1, 0.01)),
        (optim.CosineRestarts(3, 2), lambda s, o: s.CosineAnnealingWarmRestarts(o, 3, 2)),
        (optim.CosineRestarts(1, 3, min_lr=0.2), lambda s, o: s.CosineAnnealingWarmRestarts(o, 1, 3, 0.2)),
        (
            optim.CosineRestarts(4, warmup_steps=5),
            lambda s, o: s.SequentialLR(o, [s.LinearLR(o, 1 / 5, 1, 4), s.CosineAnnealingWarmRestarts(o, 4)], [5]),
        ),
        (
            optim.Exponential(0.8, warmup_steps=5),
            lambda s, o: s.SequentialLR(o, [s.LinearLR(o, 1 / 5, 1, 4), s.ExponentialLR(o, 0.8)], [5]),
        ),
        (
            optim.Constant(warmup_steps=10),
            lambda s, o: s.LinearLR(o, 1 / 10, 1, 9),
        ),
    ],
    ids=lambda v: type(v).__name__,
)
def test_rates_agree_with_torch(schedule, make):
    torch = pytest.importorskip("torch")
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=0.1)
    theirs = make(torch.optim.lr_scheduler, optimizer)
    expected = []
    for _ in range(STEPS):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    np.testing.assert_allclose(rates(schedule, STEPS, 0.1), expected, rtol=1e-12)


# ---------------------------------------------------------------- the step
def test_cosine_stays_down():
    got = rates(optim.Cosine(3, min_lr=0.02), 6, 0.1)
    np.testing.assert_allclose(got, [0.1, 0.08, 0.04, 0.02, 0.02, 0.02], rtol=1e-12)


def test_restarts_do_not_drift():
    got = rates(optim.CosineRestarts(10, 3), 200_000, 1.0)  # cycles of 10 * 3**i steps
    starts = np.cumsum([0, *(10 * 3**i for i in range(9))])
    assert np.flatnonzero(got == 1.0).tolist() == starts.tolist()
    last = got[starts[-2] : starts[-1]]
    np.testing.assert_allclose(last, (1 + np.cos(np.pi * np.arange(len(last)) / len(last))) / 2, atol=1e-15)


@pytest.mark.parametrize(("factor", "lengths"), [(1.0, [4, 4, 4]), (1.5, [4, 6, 9, 14]), (1.1, [4, 5, 5, 6])])
def test_cycles_are_whole_and_start_at_the_full_rate(factor, lengths):
    got = rates(optim.CosineRestarts(4, factor), sum(lengths) + 1, 1.0)
    assert np.flatnonzero(got == 1.0).tolist() == [0, *np.cumsum(lengths)]
    for start, n in zip(np.cumsum([0, *lengths]), lengths):
        cycle = got[start : start + n]
        assert (np.diff(cycle) < 0).all() and 0 < cycle[-1] < 0.2


@pytest.mark.parametrize("factor", ["1.1", "1.3", "1.05", "2.5"])
def test_cycles_end_where_exact_arithmetic_ends_them(factor):
    starts = [0]
    while starts[-1] < 20_000:
        starts.append(starts[-1] + math.ceil(10 + starts[-1] * (Fraction(factor) - 1)))
    got = rates(optim.CosineRestarts(10, float(factor)), starts[-1] + 1, 1.0)
    assert np.flatnonzero(got == 1.0).tolist() == starts


def test_a_period_made_shorter_restarts_at_once():
    ours = optim.SGD(1.0, schedule=optim.CosineRestarts(100))
    heap = Heap("float32", {"hyper": hyper_of(ours)})
    for _ in range(50):
        heap.call("tick", schedule=4)
    heap["hyper"][HYPER_SLOTS.index("total_steps")] = 2
    at = HYPER_SLOTS.index("lr_t")
    got = [heap.call("tick", schedule=4)["hyper"][at] for _ in range(4)]
    np.testing.assert_allclose(got, [1, 0.5, 1, 0.5], rtol=1e-15)


def test_programs_saved_with_fewer_schedules_still_load():
    """A stored program names its instructions with a digest of their form, and its schedule with a number."""
    assert form_of(ROWS["tick"]) == "c3950748ad7c46aa"
    assert SCHEDULES[:5] == ("constant", "step", "exponential", "cosine", "cosine_restarts")


def test_a_changed_rate_takes_effect_at_once():
    ours = optim.SGD(0.1, schedule=optim.Exponential(0.5))
    heap = Heap("float32", {"hyper": hyper_of(ours)})
    heap.call("tick", schedule=2).call("tick", schedule=2)
    heap["hyper"][HYPER_SLOTS.index("learning_rate")] = 8.0
    assert heap.call("tick", schedule=2)["hyper"][HYPER_SLOTS.index("lr_t")] == 2.0


def test_corrections_stay_accurate():
    """Running products instead of powers: after 10 000 steps within 1e-12 of the power."""
    ours = optim.Adam()
    heap = Heap("float32", {"hyper": hyper_of(ours)})
    for _ in range(10_000):
        heap.call("tick", schedule=0)
    h = dict(zip(HYPER_SLOTS, heap["hyper"]))
    assert h["t"] == 10_000
    assert h["beta2_t"] == pytest.approx(0.999**10_000, rel=1e-12)
    assert h["inv_sqrt_correction2_t"] == pytest.approx(1 / math.sqrt(1 - 0.999**10_000), rel=1e-14)


def test_only_worker_0_counts():
    heap = Heap("float32", {"hyper": hyper_of(optim.Adam())})
    heap.call("tick", n_workers=3, schedule=0)
    assert heap["hyper"][HYPER_SLOTS.index("t")] == 1


# ---------------------------------------------------------------- rows
UPDATES = ["sgd", "momentum", "nesterov", "adam", "adamw", "rmsprop", "rmsprop_momentum", "adagrad"]


def operands_of(row, shape, seed=0):
    out = {}
    for k, o in enumerate(ROWS[row].operands):
        size = (len(HYPER_SLOTS),) if o.name == "hyper" else shape
        out[o.name] = rng(seed + k).uniform(0.1, 0.9, size)
    return out


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize("clip", [0, 1])
@pytest.mark.parametrize("row", UPDATES)
def test_update_against_reference(row, clip, dtype):
    for shape in [(1, 1), (3, 1), (1, 17), (13, 37), (0, 4), (4, 0)]:
        given = operands_of(row, shape)
        expected = getattr(reference, row)(*(given[name] for name in OPS[row].inputs), clip=clip)
        heap = Heap(dtype, given).call(row, 2, rows=shape[0], cols=shape[1], clip=clip)
        for name, value in expected.items():
            rtol = 1e-6 if dtype == "float32" else 1e-14
            np.testing.assert_allclose(heap[name], value, rtol=20 * rtol, atol=rtol, err_msg=f"{name} {shape}")
        np.testing.assert_array_equal(heap["g"], given["g"].astype(dtype))
        np.testing.assert_array_equal(heap["hyper"], given["hyper"])


@pytest.mark.parametrize("row", [*UPDATES, "clip_value", "sumsq", "penalty"])
def test_any_team_gives_the_same_bits(row):
    shape, results = (11, 19), []
    for n_workers in (1, 2, 3, 5, 16):
        given = operands_of(row, shape) if row != "sumsq" else {"g": rng().normal(size=shape), "s": np.zeros(11)}
        words = {"rows": 11, "cols": 19, "clip": 1, "l1": 0.1, "l2": 0.2}
        heap = Heap("float32", given).call(row, n_workers, **words)
        results.append(heap.cells[16:].tobytes())
    assert len(set(results)) == 1


@pytest.mark.parametrize("dtype", RTOL)
def test_infinite_parameters_stay_infinite_without_decay(dtype):
    given = {"p": [[np.inf, 1.0]], "g": [[1.0, 1.0]], "hyper": hyper_of(optim.SGD(0.1))}
    heap = Heap(dtype, given).call("tick", schedule=0).call("sgd", rows=1, cols=2, clip=0)
    assert heap["p"][0, 0] == np.inf


def test_clip_value_keeps_nan():
    h = hyper_of(optim.SGD(0.1, clip_value=0.5))
    heap = Heap("float32", {"g": [[-2.0, 0.2, np.nan, np.inf]], "hyper": h}).call("clip_value", rows=1, cols=4)
    np.testing.assert_array_equal(heap["g"], np.array([[-0.5, 0.2, np.nan, 0.5]], np.float32))


@pytest.mark.parametrize("dtype", RTOL)
def test_norm_over_several_gradients(dtype):
    """Each gradient writes its slice of one array; the norm is over all of them."""
    a, b = rng().normal(size=(4, 67)), rng(1).normal(size=(9, 1))
    ours = optim.SGD(0.1, clip_norm=1.5)
    sums = []
    for g in (a, b):
        heap = Heap(dtype, {"g": g, "s": np.zeros(len(g))}).call("sumsq", 3, rows=g.shape[0], cols=g.shape[1])
        sums.append(heap["s"])
    np.testing.assert_allclose(sums[0], np.sqrt((a**2).sum(1)), rtol=1e-6 if dtype == "float32" else 1e-14)
    heap = Heap(dtype, {"s": np.concatenate(sums), "hyper": hyper_of(ours)}).call("clip_norm_scale", 2, n=13)
    norm = math.sqrt((a**2).sum() + (b**2).sum())
    got = heap["hyper"][HYPER_SLOTS.index("clip_scale")]
    assert got == pytest.approx(1.5 / (norm + 1e-6), rel=1e-6 if dtype == "float32" else 1e-14)
    small = Heap(dtype, {"s": [1e-4], "hyper": hyper_of(ours)}).call("clip_norm_scale", n=1)
    assert small["hyper"][HYPER_SLOTS.index("clip_scale")] == 1
    bad = Heap(dtype, {"s": [np.nan], "hyper": hyper_of(ours)}).call("clip_norm_scale", n=1)
    assert np.isnan(bad["hyper"][HYPER_SLOTS.index("clip_scale")])


@pytest.mark.parametrize("regularizer", [optim.L1(0.3), optim.L2(0.2), optim.Elastic(0.3, 0.2)])
def test_penalty_is_the_derivative(regularizer):
    p, g, h = rng().normal(size=(3, 21)), rng(1).normal(size=(3, 21)), 1e-6

    def value(p):
        return regularizer.l1 * np.abs(p) + regularizer.l2 * p**2

    words = {"rows": 3, "cols": 21, "l1": regularizer.l1, "l2": regularizer.l2}
    heap = Heap("float64", {"p": p, "g": g}).call("penalty", 2, **words)
    np.testing.assert_allclose(heap["g"] - g, (value(p + h) - value(p - h)) / (2 * h), atol=1e-8)


def test_zero():
    heap = Heap("float32", {"g": np.full((5, 7), np.nan)}).call("zero", 2, rows=5, cols=7)
    assert (heap["g"] == 0).all()


# ---------------------------------------------------------------- data
@pytest.mark.parametrize("name", PAIRS)
def test_front_end_names_rows_and_state_that_exist(name):
    ours = PAIRS[name][0]
    row = ROWS[ours.row]
    assert {"p", "g", "hyper", *ours.state} == {o.name for o in row.operands}
    assert tuple(ours.slots()) == HYPER_SLOTS
    assert all(isinstance(v, float) for v in ours.slots().values())


def test_positional_rate():
    assert optim.SGD(1e-3).learning_rate == 1e-3
    assert optim.SGD(1e-3, 0.9).row == "momentum"
    assert optim.SGD(1e-3, 0.9, True).row == "nesterov"
    assert optim.Adam().slots()["learning_rate"] == 1e-3


@pytest.mark.parametrize(
    "make",
    [
        lambda: optim.SGD(-1.0),
        lambda: optim.SGD(float("nan")),
        lambda: optim.SGD("fast"),
        lambda: optim.SGD(0.1, nesterov=True),
        lambda: optim.SGD(0.1, momentum=-0.1),
        lambda: optim.Adam(beta1=1.0),
        lambda: optim.Adam(eps=-1e-8),
        lambda: optim.Adam(clip_norm=0.0),
        lambda: optim.Adam(clip_value=-1.0),
        lambda: optim.Adam(schedule="cosine"),
        lambda: optim.RMSProp(alpha=1.5),
        lambda: optim.Adagrad(weight_decay=-1),
        lambda: optim.Step(0),
        lambda: optim.Cosine(10.5),
        lambda: optim.CosineRestarts(0),
        lambda: optim.CosineRestarts(10, 0.5),
        lambda: optim.CosineRestarts(10, float("inf")),
        lambda: optim.CosineRestarts(10, min_lr=-0.1),
        lambda: optim.Exponential(-0.1),
        lambda: optim.Constant(warmup_steps=-1),
        lambda: optim.L1(-1.0),
        lambda: optim.Elastic(0.1, float("inf")),
    ],
)
def test_bad_values(make):
    with pytest.raises(CalcError):
        make()
