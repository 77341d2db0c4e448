"""Every operator of the table x its examples x dtypes: values, gradients, and each declared property."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from calcvm.equations.declared import DECLARED
from calcvm.kernels_cpu import _common
from calcvm.kernels_cpu._common import Ptr, share
from calcvm.ops import OPS
from calcvm.ops.dims import shape_of
from calcvm.ops.sizes import reads
from calcvm.ops.spec import Example, R, W
from calcvm.script.evaluation import row_values
from calcvm.script.helpers import first_of
from tests import rowrun
from tests.conftest import by_turns
from tests.reference import reference
from tests.rowrun import CHECKS, Case, cases, words_of

DTYPES = ("float32", "float64")
NAMES = sorted(OPS)
DIFFERENTIABLE = [n for n in NAMES if OPS[n].differentiable and OPS[n].category != "optimizer"]


@pytest.mark.parametrize("name", NAMES)
def test_complete(name):
    spec = OPS[name]
    assert reference(name) is not None, f"{name} has no reference"
    assert any(not e.bench for e in spec.examples), f"{name} has no example"
    rowrun.check_names(spec)


def pytest_generate_tests(metafunc):
    """Each check of each operator in one of the types, unless --whole, by turns."""
    if metafunc.function is test_declared:
        by_turns(metafunc, 2, name=NAMES, dtype=DTYPES, check=CHECKS)


def test_declared(name, dtype, check):
    CHECKS[check](cases(OPS[name], dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [n for n in NAMES if any(row.takes for row in OPS[n].rows)])
def test_epilogues(name, dtype):
    for case in cases(OPS[name], dtype):
        rowrun.check_epilogues(case)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name, whole):
    """Of operators with many or slow cases, those for images and those declared by equations, every third, unless --whole."""
    for case in [*cases(OPS[name], "float64")][:: 3 if (OPS[name].layouts or name in DECLARED) and not whole else 1]:
        rowrun.check_gradients(case)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_float32(name):
    for case in cases(OPS[name], "float32"):
        rowrun.check_gradients_float32(case)


@pytest.mark.parametrize("name", NAMES)
def test_flops(name):
    for example in OPS[name].examples:
        rowrun.check_flops(Case(OPS[name], example, "float64", example.batch))


@pytest.mark.parametrize("name", [n for n in NAMES if any(None in s for e in OPS[n].examples for s in e.shapes)])
def test_empty_batch(name):
    """No row touches anything, or divides by the batch on its own account, when the batch is empty."""
    for example in OPS[name].examples:
        if example.bench or not any(None in s for s in example.shapes):
            continue
        case = Case(OPS[name], example, "float32", 0)
        values = case.forward(n_workers=2)
        if OPS[name].differentiable:
            case.backward(values | case.output_gradients(), n_workers=2)


# ---------------------------------------------------------------- the checks themselves catch lies
def lying(name, row=0, bwd=False, **changes):
    spec = OPS[name]
    rows = list(spec.bwd if bwd else spec.fwd)
    rows[row] = replace(rows[row], **changes)
    return replace(spec, **{"bwd" if bwd else "fwd": tuple(rows)})


def operands(name, replaced, row=0, bwd=False):
    rows = OPS[name].bwd if bwd else OPS[name].fwd
    by_name = {o.name: o for o in replaced}
    return tuple(by_name.get(o.name, o) for o in rows[row].operands)


SIZE = "rows*cols"


def idle(me, rows, cols, dy: Ptr, y: Ptr, dx: Ptr):
    lo, hi = share(me, rows)
    for i in range(lo * cols, hi * cols):
        dx[i] = dy[i]


def adds(me, rows, cols, dy: Ptr, y: Ptr, dx: Ptr):
    lo, hi = share(me, rows)
    for i in range(lo * cols, hi * cols):
        dx[i] += dy[i] * y[i]


def counts_its_team(me, rows, cols, dy: Ptr, y: Ptr, dx: Ptr):
    lo, hi = share(me, rows)
    for i in range(lo * cols, hi * cols):
        dx[i] = dy[i] * y[i] * me.workers


def does_everything(me, rows, cols, dy: Ptr, y: Ptr, dx: Ptr):
    for i in range(rows * cols):
        dx[i] = dy[i] * y[i]


def reads_its_neighbours(me, rows, cols, dy: Ptr, y: Ptr, dx: Ptr):
    lo, hi = share(me, rows)
    for i in range(lo * cols, hi * cols):
        dx[i] = dy[i] * y[rows * cols - 1 - i]


def one_too_many(me, rows, cols, dy: Ptr, y: Ptr, dx: Ptr):
    lo, hi = share(me, rows)
    for i in range(lo * cols, hi * cols + 1):
        dx[i] = dy[i] * y[i]


def one_too_few(me, rows, cols, dy: Ptr, y: Ptr, dx: Ptr):
    lo, hi = share(me, rows)
    for i in range(lo * cols, hi * cols - 1):
        dx[i] = dy[i] * y[i]


def writes_before_it_reads(me, rows, cols, dy: Ptr, y: Ptr, dx: Ptr):
    lo, hi = share(me, rows)
    for i in range(lo * cols, hi * cols):
        dx[i] = y[i]
    for i in range(lo * cols, hi * cols):
        dx[i] *= dy[i]


def truth(me, rows, cols, dy: Ptr, y: Ptr, dx: Ptr):
    lo, hi = share(me, rows)
    for i in range(lo * cols, hi * cols):
        dx[i] = dy[i] * y[i]


# Kernels that do something else than their spec says, and the check that sees it.
SEEN_BY = {
    idle: "reads",
    adds: "workers",
    counts_its_team: "workers",
    does_everything: "parts",
    reads_its_neighbours: "parts",
    one_too_many: "workers",
    one_too_few: "workers",
    writes_before_it_reads: "in_place",
}


def toy(kernel, monkeypatch):
    """The operator exp with a backward of its own."""
    row = replace(OPS["exp"].bwd[0], name="toy")
    monkeypatch.setitem(_common.KERNELS, "toy", _common.Kernel(kernel, "toy"))
    return replace(OPS["exp"], bwd=(row,))


@pytest.mark.parametrize("kernel", SEEN_BY)
def test_lying_kernel_is_caught(kernel, monkeypatch):
    spec = toy(kernel, monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[SEEN_BY[kernel]](cases(spec, "float64"))


@pytest.mark.parametrize("check", CHECKS)
def test_honest_kernel_passes(check, monkeypatch):
    CHECKS[check](cases(toy(truth, monkeypatch), "float64"))


LIES = {
    "declares to write what it reads": (
        "reads",
        lambda: lying("exp", bwd=True, operands=operands("exp", [W("dy", SIZE, "rows")], bwd=True)),
    ),
    "not in place": ("in_place", lambda: lying("transpose", in_place=(("y", "x"),))),
    "writes outside its share": ("parts", lambda: lying("sum", operands=operands("sum", [W("y", "O*K0*K1*I", "O")]))),
    "reads outside its share": (
        "parts",
        lambda: lying("transpose", operands=operands("transpose", [R("x", "d0*d1*d2*d3*d4*d5", "d0")])),
    ),
    "worker 0 alone": ("parts", lambda: lying("relu", operands=operands("relu", [W("y", SIZE, "w0")]))),
    "extent too small": ("extents", lambda: lying("relu", operands=operands("relu", [W("y", "rows*cols - 1")]))),
    "extent too large": ("extents", lambda: lying("relu", operands=operands("relu", [W("y", "rows*cols + 1")]))),
    "requires what does not hold": ("workers", lambda: lying("relu", require=("rows - 100",))),
}


@pytest.mark.parametrize("lie", LIES)
def test_lie_is_caught(lie):
    check, make = LIES[lie]
    spec = make()
    with pytest.raises(AssertionError):
        CHECKS[check](cases(spec, "float64"))


def test_wrong_reference_is_caught(monkeypatch):
    monkeypatch.setattr(rowrun, "reference", lambda name: lambda x: np.tanh(x) * (1 + 1e-9))
    with pytest.raises(AssertionError, match="relative error"):
        rowrun.check_forward(cases(OPS["tanh"], "float64")[0])
    with pytest.raises(AssertionError, match="relative error"):
        monkeypatch.setattr(rowrun, "reference", lambda name: lambda x: np.tanh(x) * (1 + 1e-4))
        rowrun.check_gradients(cases(OPS["tanh"], "float64")[0])


def test_wrong_names_are_caught():
    spec = lying("exp", bwd=True, operands=OPS["exp"].bwd[0].operands[:1])
    with pytest.raises(AssertionError, match="kernel has"):
        rowrun.check_names(spec)


def test_wrong_flops_are_caught():
    for flops in (f"20*{SIZE}", "cols", f"{SIZE} + 7"):
        with pytest.raises(AssertionError):
            rowrun.check_flops(cases(lying("exp", flops=flops), "float64")[1])


def test_damaged_guards_are_caught():
    """A row that writes past a declared extent is seen, whatever the size of its value."""
    case = cases(OPS["relu"], "float64")[0]
    row = replace(OPS["relu"].fwd[0], operands=operands("relu", [W("y", "rows*cols - 1")]))
    with pytest.raises(AssertionError, match="outside its operands"):
        rowrun.run_row(row, case.words, case.values, "float64")
    row = replace(OPS["relu"].fwd[0], operands=operands("relu", [W("y", "rows*cols + 1")]))
    with pytest.raises(AssertionError, match="did not set"):
        rowrun.run_row(row, case.words, case.values, "float64")


def test_worker_dependence_is_caught():
    """Kernels that ignore the team leave a worker's share unset or write it twice: seen by `parts`."""
    spec = lying("rng_advance", operands=(replace(OPS["rng_advance"].fwd[0].operands[0], part="2"),))
    with pytest.raises(AssertionError):
        rowrun.check_parts(cases(spec, "float64")[0])


# ---------------------------------------------------------------- shapes that are refused
@pytest.mark.parametrize(
    ("name", "shapes", "attrs", "message"),
    [
        ("add", ((None, 3), (4,)), {}, "broadcast"),
        ("max", ((2, 3, 4),), {"axes": (0, 2)}, "split"),
        ("sum", ((2,) * 8,), {"axes": (0, 2, 4, 6)}, "more than 3 blocks"),
        ("sum", ((2, 3),), {"axes": (2,)}, "axes"),
        ("softmax", ((None, 3, 4),), {"axis": 1}, "transpose first"),
        ("reshape", ((None, 6),), {"shape": (3, 4)}, "unknown batch"),
        ("reshape", ((4, 6),), {"shape": (5, -1)}, "unknown batch in a reshape, or no whole size"),
        ("reshape", ((4, 6),), {"shape": (-1, -1)}, "at most one"),
        ("transpose", ((4, 6),), {"axes": (0, 0)}, "permutation"),
        ("concat", ((4, 6), (3, 5)), {"axis": 1}, "agree"),
        ("concat_many", ((4, 6), (4, 6), (3, 5)), {"axis": 1}, "agree"),
        ("pad", ((None, 6),), {"pads": (0, 1)}, "one number before each axis"),
        ("pad", ((None, 6),), {"pads": (0, -1, 0, 1)}, "must not be negative"),
        ("pad", ((None, 6),), {"pads": (1, 0, 0, 0)}, "batch"),
        ("pad", ((None, 6),), {"pads": (0, 6, 0, 0), "mode": "reflect"}, "below its size"),
        ("pad", ((None, 0),), {"pads": (0, 6, 0, 0), "mode": "edge"}, "nothing to pad it with"),
        ("pad", ((2,) * 8,), {"pads": (1, 0) * 8}, "more than 3 groups"),
        ("upsample", ((None, 6),), {"scales": (2,)}, "spatial axes"),
        ("upsample", ((None, 6, 3),), {}, "either sizes or scales"),
        ("upsample", ((None, 6, 3),), {"scales": (2, 2)}, "one number for each of 1"),
        ("upsample", ((None, 6, 3),), {"scales": (0.1,)}, "would have 0"),
        ("upsample", ((4, None, 3),), {"scales": (2,)}, "batch"),
        ("upsample", ((None, 6, 3),), {"scales": (2,), "align_corners": True}, "nearest has none"),
        ("slice", ((None, 6),), {"starts": (1,), "stops": (None,)}, "batch"),
        ("slice", ((4, 6),), {"starts": (3,), "stops": (1,)}, "range"),
        ("batch_norm", ((None,), (3,), (3,)), {}, "no axis of channels"),
        ("batch_norm", ((None, 3), (4,), (3,)), {}, r"running_mean \(4,\) is not \(3,\)"),
        ("batch_norm", ((1, 1, 3), (3,), (3,)), {}, r"x \(1, 1, 3\) has one value per channel"),
        ("batch_norm_inference", ((1, 3), (3,), (3,), (1,)), {}, r"scale \(1,\) is not \(3,\)"),
        ("group_norm", ((None, 5, 6),), {"groups": 4}, "6 channels .* into 4 equal groups"),
        ("group_norm", ((None, 6),), {"groups": 6}, "one value per group"),
        ("instance_norm", ((None, 1, 1, 6),), {}, "one value per group"),
        ("layer_norm", ((None, 3), (2,)), {}, r"scale \(2,\) is not of the shape \(3,\)"),
        ("layer_norm", ((None, 3),), {"axes": 3}, "not have 3 axes"),
        ("rms_norm", ((None, 3), (None, 3)), {}, "is not of the shape"),
        ("local_response_norm", ((5,),), {}, "no axis of channels"),
    ],
)
def test_refused_shape(name, shapes, attrs, message):
    spec = OPS[name]
    attrs = {a.name: a.default for a in spec.attrs} | attrs
    with pytest.raises(ValueError, match=message):
        given = dict.fromkeys(spec.inputs) | dict(zip(spec.inputs, map(shape_of, shapes)))
        spec.words(given | spec.shape(given, attrs), attrs)


# ---------------------------------------------------------------- values a user can see
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name",
    [n for n in NAMES if OPS[n].category == "unary" and n != "pow" and not OPS[n].types] + ["softmax", "log_softmax"],
)
def test_special_values(name, dtype):
    """NaN, infinities and zeros give what NumPy gives."""
    for special in SPECIAL:
        case = Case(OPS[name], Example(shapes=((2, 3),), attrs=OPS[name].examples[0].attrs), dtype, 1)
        x = np.array([special, 0.5, -0.5, 1.5, special, 0.25])
        case.values["x"] = x.astype(dtype)
        with np.errstate(all="ignore"):
            want = next(iter(case.expected().values())).reshape(-1)
            got = case.forward()["y"].astype(float)
        if name == "gelu" and special == -np.inf:
            want = np.where(np.isnan(want), got, want)  # -inf * 0: both nan and 0 are in use
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-12, err_msg=f"{name}({special})")


@pytest.mark.parametrize("exponent", [-3.0, -2.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 17.0])
def test_pow_of_any_base(exponent):
    x = np.array([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, np.nan, np.inf])
    case = Case(OPS["pow"], Example(shapes=((9,),), attrs={"exponent": exponent}), "float64", 1)
    case.values["x"] = x
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(case.forward()["y"], np.power(x, exponent), rtol=1e-13)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 63, 64, 65, 127, 129, 4095, 4097, 100_003])
def test_long_sums(n):
    """A float32 sum of n numbers errs far less than n roundings; its gradient and columns do too."""
    rng = np.random.default_rng(n)
    x = rng.uniform(0, 1, n).astype(np.float32)
    for shape, attrs in (((n,), {"axes": None}), ((n, 2), {"axes": (0,)})):
        case = Case(OPS["mean"], Example(shapes=(shape,), attrs=attrs), "float32", 1)
        case.values["x"] = np.repeat(x, int(np.prod(shape)) // n)
        got = case.forward()["y"]
        np.testing.assert_allclose(got, np.full(got.shape, x.astype(float).mean()), rtol=16 * 2.0**-23)


def test_wide_columns():
    """Columns are summed in the same order whether four vectors of them go together or one, for any team."""
    x = np.random.default_rng(0).standard_normal((300, 211)).astype(np.float32)
    case = Case(OPS["sum"], Example(shapes=((300, 211),), attrs={"axes": (0,)}), "float32", 1)
    case.values["x"] = x.reshape(-1)
    want = case.forward()["y"]
    np.testing.assert_allclose(want, x.astype(float).sum(0), rtol=1e-4, atol=1e-4)
    for n_workers in (2, 3, 7, 50, 211, 300):
        assert np.array_equal(case.forward(n_workers=n_workers)["y"], want)


@pytest.mark.parametrize("name", ["max", "min"])
def test_extrema_send_the_gradient_to_the_first(name):
    """Kernel, equation and script; NaN is the extremum."""
    case = Case(OPS[name], Example(shapes=((3, 4),), attrs={"axes": (1,)}), "float64", 1)
    x = np.array([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [9.0, np.nan, np.nan, 9.0]])
    case.values["x"] = (x if name == "max" else -x).reshape(-1)
    values = case.forward() | {"dy": np.array([10.0, 20.0, 30.0])}
    want = [[0, 10, 0, 0], [20, 0, 0, 0], [0, 30, 0, 0]]
    assert case.backward(values)["dx"].reshape(3, 4).tolist() == want
    (row,) = case.spec.bwd
    assert row_values(row, words_of(row, case.words), values)["dx"].reshape(3, 4).tolist() == want
    x, y, dy = case.values["x"].reshape(3, 4), values["y"].reshape(3, 1), values["dy"].reshape(3, 1)
    assert (dy * first_of(x, y, (1,))).tolist() == want


def test_parts_without_a_gradient_are_left_out():
    """Of a concatenation: those of the others have the same bits."""
    for case in cases(OPS["concat_many"], "float32"):
        values = case.forward() | case.output_gradients()
        (row,) = case.spec.bwd
        whole = case.backward(values)
        for left in case.given:
            got = rowrun.run_row(row, case.words, values, "float32", known=case.known() - {f"d{left}"}, n_workers=2)
            assert got.keys() == whole.keys() - {f"d{left}"}
            assert all(rowrun.same_bits(v, whole[name]) for name, v in got.items())


@pytest.mark.peers
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_nearest_element_is_that_of_torch(dtype):
    """Also where places are whole numbers but for rounding."""
    pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    for n in rng.integers(1, 300, 40).tolist():
        scale = rng.choice([rng.uniform(0.3, 4), rng.integers(1, 30) / rng.integers(1, 30), 1 + 1 / (n + 1)])
        to = max(int(n * scale), 1)
        for attrs in ({"sizes": (to,)}, {"scales": (max(float(scale), 1 / n),)}):
            case = Case(OPS["upsample"], Example(shapes=((1, n, 1),), attrs=attrs), dtype, 1)
            case.values["x"] = np.arange(n).astype(dtype)
            import torch

            want = _upsample(torch.tensor(case.values["x"].reshape(1, n, 1)), **attrs)
            assert case.forward()["y"].tolist() == want.flatten().tolist(), (n, attrs)


# ---------------------------------------------------------------- normalization
def normalised(name, shape, dtype="float32", scaled=True, batch=1, offset=0.0, **attrs):
    """A case with standard normal data around ``offset``."""
    of_channels = ((shape[-1],),) * ({"batch_norm": 4, "local_response_norm": 0}.get(name, 2) if scaled else 0)
    case = Case(OPS[name], Example(shapes=(shape, *of_channels), attrs=attrs), dtype, batch)
    size = int(np.prod(case.shapes["x"]))
    x = np.random.default_rng(size).standard_normal(size) + offset
    case.values["x"] = x.astype(np.float32).astype(dtype)
    return case


FAR = [("batch_norm", (9000, 5)), ("batch_norm", (4, 6, 7, 40)), ("instance_norm", (2, 40, 9, 3))] + [
    ("group_norm", (2, 40, 9, 6)), ("layer_norm", (3, 10_000)), ("layer_norm", (70, 33))
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape"), FAR)
def test_a_mean_far_larger_than_the_deviation(name, shape):
    """Statistics err by some last places of the deviation, and the mean by its own rounding: 5e-4 of 1e4."""
    case = normalised(name, shape, offset=1e4)
    values, want = case.forward(), case.expected()
    np.testing.assert_allclose(case.array("inv", values["inv"]), want["inv"], rtol=2e-6)
    np.testing.assert_allclose(case.array("mean", values["mean"]), want["mean"], rtol=2.0**-24 * 1.01)
    scale = np.abs(case.values["scale"]).max()
    np.testing.assert_allclose(case.array("y", values["y"]), want["y"], atol=5e-4 * scale * want["inv"].max())


@pytest.mark.parametrize("first", [1e4, 3.0])
def test_batch_norm_of_outliers(first):
    """Of blocks whose first row, from which others are subtracted, is far from all others."""
    case = normalised("batch_norm", (256, 5))
    x = case.values["x"].reshape(256, 5)
    x[::128] = first
    np.testing.assert_allclose(case.forward()["inv"], case.expected()["inv"], rtol=2e-5)


@pytest.mark.parametrize(
    ("name", "shape", "attrs"),
    [("batch_norm", (20_000, 3), {}), ("batch_norm", (700, 150), {}), ("batch_norm", (5, 9, 9, 100), {})]
    + [("batch_norm_inference", (9000, 37), {}), ("group_norm", (150, 3, 20), {"groups": 4})]
    + [
        ("instance_norm", (3, 130, 20), {}),
        ("layer_norm", (300, 70), {}),
        ("rms_norm", (300, 530), {}),
        ("layer_norm", (21, 40_000), {}),
    ],
)
def test_normalization_of_many_chunks(name, shape, attrs):
    """float32 agrees with float64, and has the same bits for any team."""
    case, exact = (normalised(name, shape, dtype, **attrs) for dtype in ("float32", "float64"))
    for c in (case, exact):
        rng = np.random.default_rng(1)
        for n in case.given[1:]:
            c.values[n] = rng.uniform(0.5, 1.5, c.values[n].size).astype(np.float32).astype(c.dtype)
    seeds = case.output_gradients()
    values = case.forward()
    got = case.backward(values | seeds)
    wide = exact.forward()
    want = exact.backward(wide | {n: v.astype(float) for n, v in seeds.items()})
    rowrun.close(values["y"].astype(float), wide["y"], 1e-6, name)
    for n, g in got.items():
        rowrun.close(g.astype(float), want[n], 3e-6, f"{name}: {n}")
    for n_workers in (2, 7, 50):
        team = case.forward(n_workers=n_workers)
        for n, v in (team | case.backward(values | seeds, n_workers=n_workers)).items():
            assert np.array_equal(v, (values | got)[n]), (n, n_workers)


def test_batch_norm_of_one_value():
    """Only the size of a batch can be 1 unseen: the variance is then 0, and the running one what it was."""
    case = normalised("batch_norm", (None, 5), eps=1.0)
    values = case.forward()
    np.testing.assert_array_equal(values["y"], case.values["shift"])
    np.testing.assert_array_equal(values["running_var"], case.values["running_var"])


@pytest.mark.peers
def test_running_statistics_are_those_of_torch():
    torch = pytest.importorskip("torch")
    case = normalised("batch_norm", (8, 5, 7, 6), momentum=0.3)
    running = [torch.tensor(case.values[n]) for n in ("running_mean", "running_var")]
    torch.nn.functional.batch_norm(torch.tensor(case.values["x"].reshape(-1, 6)), *running, None, None, True, 0.3)
    values = case.forward()
    for n, r in zip(("running_mean", "running_var"), running):
        np.testing.assert_allclose(values[n], r.numpy(), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- dropout
def dropped(rate, seed=3, counter=5, stream=0, n=200_000, n_workers=1):
    case = Case(OPS["dropout"], Example(shapes=((n,), (2,), ()), attrs={"stream": stream}), "float32", 1)
    case.values |= {"x": np.ones(n, np.float32), "rng": np.array([seed, counter]), "rate": np.array([rate])}
    return case.forward(n_workers=n_workers)["y"]


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_dropout_statistics(rate):
    y = dropped(rate)
    kept = y != 0
    assert np.allclose(y[kept], 1 / (1 - rate))
    error = 5 * np.sqrt(rate * (1 - rate) / y.size)
    assert abs(kept.mean() - (1 - rate)) <= error
    for lag in (1, 2, 16, 64):  # neighbours are independent
        both = (kept[lag:] & kept[:-lag]).mean()
        assert abs(both - (1 - rate) ** 2) <= 2 * error


def test_dropout_of_everything():
    assert not dropped(1.0).any()


def test_dropout_depends_on_seed_step_and_stream():
    base = dropped(0.5) != 0
    for other in ({"seed": 4}, {"counter": 6}, {"stream": 1}, {"seed": -3}):
        agreement = ((dropped(0.5, **other) != 0) == base).mean()
        assert abs(agreement - 0.5) < 0.01, other
    assert np.array_equal(dropped(0.5, n_workers=3) != 0, base)


# ---------------------------------------------------------------- PyTorch
def _pad(x, pads, mode="constant", value=0.0):
    """PyTorch pads at most three axes by other than a constant, below two that stay; it has no `wrap` beyond a size."""
    import torch

    n = x.dim()
    if mode == "constant":
        return torch.nn.functional.pad(x, [k for i in reversed(range(n)) for k in (pads[i], pads[n + i])], value=value)
    for i, (p, q) in enumerate(zip(pads[:n], pads[n:])):
        places = np.pad(np.arange(x.shape[i]), (p, q), mode)
        x = x.index_select(i, torch.tensor(places))
    return x


def _upsample(x, sizes=None, scales=None, mode="nearest", align_corners=False):
    import torch

    n = x.dim() - 2
    how = {"mode": "nearest"} if mode == "nearest" else {"align_corners": align_corners, "mode": MODES[n - 1]}
    y = torch.nn.functional.interpolate(x.movedim(-1, 1), size=sizes, scale_factor=scales, **how)
    return y.movedim(1, -1)


MODES = ("linear", "bilinear", "trilinear")


def torch_functions():
    torch = pytest.importorskip("torch")
    f = torch.nn.functional

    def last(fn):
        """Of channels, which the heap has last."""
        return lambda x, *rest, **attrs: fn(x.movedim(-1, 1), *rest, **attrs).movedim(1, -1)

    def vectors(fn):
        return lambda x, *rest, axes=1, eps: fn(x, x.shape[x.dim() - axes :], *rest, eps=eps)

    def theirs(name):
        """PyTorch's function of this name, over one axis or several: () are all to it, and none to calcvm."""
        back, fn = name.startswith("reverse_"), getattr(torch, name.removeprefix("reverse_"), None)
        defaults = {a.name: a.default for a in OPS[name].attrs}

        def run(x, *rest, **attrs):
            attrs = defaults | attrs
            given = {"keepdim" if k == "keepdims" else k: v for k, v in attrs.items() if k not in ("axis", "axes")}
            if "axis" in attrs:
                y = fn(x.flip(attrs["axis"]) if back else x, *rest, dim=attrs["axis"], **given)
                return y.flip(attrs["axis"]) if back else y
            if "axes" in attrs:
                x = x[..., None] if attrs["axes"] == () else x
                given["dim"] = attrs["axes"] or tuple(range(attrs["axes"] is None and -x.dim() or -1, 0))
            return fn(x, *rest, **given)

        return run if fn else None

    return {
        "batch_norm": last(
            lambda x, m, v, w=None, b=None, momentum=0.1, eps=1e-5: f.batch_norm(x, m, v, w, b, True, momentum, eps)
        ),
        "batch_norm_inference": last(
            lambda x, m, v, w=None, b=None, eps=1e-5: f.batch_norm(x, m, v, w, b, False, 0.0, eps)
        ),
        "group_norm": last(lambda x, w=None, b=None, groups=1, eps=1e-5: f.group_norm(x, groups, w, b, eps)),
        "instance_norm": last(lambda x, w=None, b=None, eps=1e-5: f.instance_norm(x, None, None, w, b, eps=eps)),
        "layer_norm": vectors(f.layer_norm),
        "rms_norm": vectors(f.rms_norm),
        "local_response_norm": last(
            lambda x, size=5, alpha=1e-4, beta=0.75, k=1.0: f.local_response_norm(x[..., None], size, alpha, beta, k)[
                ..., 0
            ]
        ),
        "neg": lambda x: -x,
        "abs": torch.abs,
        "sqrt": torch.sqrt,
        "square": torch.square,
        "exp": torch.exp,
        "log": torch.log,
        **{name: getattr(torch, name) for name in "expm1 log1p erf sin cos tan asin acos atan sinh cosh".split()},
        "pow": lambda x, exponent: x**exponent,
        "relu": torch.relu,
        "leaky_relu": lambda x, alpha=0.01: f.leaky_relu(x, alpha),
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "gelu": lambda x, approximate="none": f.gelu(x, approximate=approximate),
        "softplus": f.softplus,
        "elu": lambda x, alpha=1.0: f.elu(x, alpha),
        "add": torch.add,
        "sub": torch.sub,
        "mul": torch.mul,
        "div": torch.div,
        "sum": lambda x, axes=None, keepdims=False: (
            x.sum() if axes is None else x if axes == () else x.sum(axes, keepdim=keepdims)
        ),
        "mean": lambda x, axes=None, keepdims=False: (
            x.mean() if axes is None else x if axes == () else x.mean(axes, keepdim=keepdims)
        ),
        **{name: theirs(name) for name in DECLARED},
        **{name: (lambda run: lambda x, axis: run(x, axis=axis).values)(theirs(name)) for name in ("cummax", "cummin")},
        "embedding": lambda x, i, padding=-1: torch.where(
            (i == padding)[(..., *(None,) * (x.dim() - 1))], x.detach()[i.long()], x[i.long()]
        ),
        "take": lambda x, i, axis: x[(slice(None),) * (axis % x.dim()) + (i.long(),)],
        "take_along_axis": lambda x, i, axis: x.gather(axis, i.long()),
        "one_hot": lambda x, i: torch.nn.functional.one_hot(i.long(), len(x)) * x,
        "scatter_add": lambda x, i, u: x.index_add(0, i.reshape(-1).long(), u.reshape(-1, *x.shape[1:])),
        "softmax": lambda x, axis=-1: torch.softmax(x, axis),
        "log_softmax": lambda x, axis=-1: torch.log_softmax(x, axis),
        "transpose": lambda x, axes=None: x.permute(tuple(reversed(range(x.dim()))) if axes is None else axes),
        "pick": lambda x, index: x.gather(-1, index.long()[..., None])[..., 0],
        "concat": lambda a, b, axis=-1: torch.cat([a, b], axis),
        "concat_many": lambda *parts, axis=-1: torch.cat(parts, axis),
        "pad": _pad,
        "upsample": _upsample,
        "linear": lambda x, w, b=None: x @ w + (0 if b is None else b),
        "mse": f.mse_loss,
        "mae": f.l1_loss,
        "huber": lambda x, t, delta=1.0: f.huber_loss(x, t, delta=delta),
    }


PEERS = sorted(
    [*DECLARED]
    + "neg abs sqrt square exp log expm1 log1p erf sin cos tan asin acos atan sinh cosh pow relu leaky_relu sigmoid tanh gelu softplus elu add sub mul div sum mean "
    "softmax log_softmax transpose pick concat concat_many pad upsample linear mse mae huber batch_norm batch_norm_inference "
    "group_norm instance_norm layer_norm rms_norm local_response_norm".split()
)


@pytest.mark.peers
@pytest.mark.parametrize("name", PEERS)
def test_against_torch(name):
    fn = torch_functions()[name]
    import torch

    if fn is None:
        pytest.skip("PyTorch has none of this name")
    for case in cases(OPS[name], "float32"):
        if case.example.types:
            continue  # their values are compared with NumPy's, and they have no gradient
        inputs = [
            torch.tensor(case.values[n].reshape(case.shapes[n]), requires_grad=n in OPS[name].differentiable)
            for n in case.given
        ]
        y = fn(*inputs, **case.example.attrs)
        values, seeds = case.forward(), case.output_gradients()
        (out,) = OPS[name].outputs
        rowrun.close(case.array(out, values[out]), y.detach().numpy(), 1e-5, f"{name} against torch")
        if not y.requires_grad:
            continue
        y.backward(torch.tensor(seeds[f"d{out}"].reshape(tuple(y.shape))))
        gradients = case.backward(values | seeds)
        for n, x in zip(case.given, inputs):
            if x.requires_grad:
                got = case.gradient(n, gradients, seeds[f"d{out}"])
                rowrun.close(got, x.grad.numpy(), 2e-5, f"{name}: gradient of {n} against torch")


# ---------------------------------------------------------------- sizes that bound loops
LONG = 2**36  # a loop of so many turns would take half a minute


def bounded(row):
    """Words that what a row must have, or what it requires, bounds: the heap bounds their loops."""
    sizes = [o.elems for o in row.operands if o.access != "s" and o.optional is False]
    return {name for text in (*sizes, *row.require) for name in reads(text)}


@pytest.mark.parametrize("name", NAMES)
def test_every_size_that_bounds_a_loop_is_bounded_by_an_extent(name):
    """A row whose other sizes are enormous, such as a number to divide by, is done as fast."""
    case = next(c for c in cases(OPS[name], "float32"))
    for row, values in rowrun._row_runs(case):
        given = {"wn", "phases"}  # lie in the scratch, and follow from the other words
        free = {w.name for w in row.words if w.kind != "float" and w.hi > 64} - bounded(row) - given
        begin = time.perf_counter()
        for word in row.words:
            if word.name in free:
                huge = {**case.words, word.name: int(min(word.hi, LONG))}
                rowrun.run_row(row, huge, values, "float32", known=case.known())
        assert time.perf_counter() - begin < 5
