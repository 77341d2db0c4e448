"""Operators that are declared by their equations: what follows of a declaration, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import warnings
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

import calcvm as cv
from calcvm.equations.declare import Declared, declare
from calcvm.equations.declared import DECLARED
from calcvm.kernels_cpu.plain import add
from calcvm.ops import OPS
from calcvm.ops.declared import around
from calcvm.ops.plain import spec_of
from calcvm.ops.spec import ROWS, Example, OpSpec, Word
from tests import rowrun
from tests.reference import by_equation
from tests.rowrun import CHECKS, Case, _row_runs, _run, cases, check_gradients, check_gradients_float32
from tests.test_script import same as script_does_the_same
from tests.test_script_rows import run_text, same

ONI = ((3, 7, 2), (None, 19, 1), (2, 1, 5))
SOFT = "y[o<O,n<N] = exp(x[o,n] - logsumexp[k<N] x[o,k])"
CROSS = "y[o<O,n<N,i<I] = x[o,n,i] + sum[k<N] x[o,k,i] + sum[j<I] x[o,n,j]"
DECAY = "y[o<O,n<N,i<I] = sin(x[o,n,i]) + tanh(y[o, n - 1, i; -2])"
# name: equation, sizes, what else declares it, shapes; rows with their texts and what may be in place
OPERATORS: dict[str, tuple[str, str, dict, tuple, dict[str, tuple[str, tuple]]]] = {
    "own_softmax": (
        SOFT, "O N", {"backward": {"dx": "dy y"}}, (((None, 37),), ((3, 1),)),
        {
            "own_softmax_fwd": (SOFT, (("y", "x"),)),
            "own_softmax_bwd": (
                "t2[o<O] = sum[n<N] dy[o,n]*y[o,n]; dx[o,n] = y[o,n]*(dy[o,n] - t2[o])", (("dx", "dy"), ("dx", "y")),
            ),
        },
    ),
    "own_cross": (  # what is summed reads elements whose places others are already in
        CROSS, "O N I", {}, tuple((s,) for s in ONI), {"own_cross_fwd": (CROSS, ())},
    ),
    "own_softmax_across": (  # in place on a device that sums once for all places of n, not on one that takes these in parallel
        "y[o<O,n<N,i<I] = exp(x[o,n,i])/sum[k<N] exp(x[o,k,i])", "O N I", {"backward": {"dx": "dy y"}}, tuple((s,) for s in ONI),
        {
            "own_softmax_across_fwd": ("y[o<O,n<N,i<I] = exp(x[o,n,i])/sum[k<N] exp(x[o,k,i])", ()),
            "own_softmax_across_bwd": (
                "t2[o<O,i<I] = sum[n<N] dy[o,n,i]*y[o,n,i]; dx[o,n,i] = y[o,n,i]*(dy[o,n,i] - t2[o,i])", (),
            ),
        },
    ),
    "own_scale": (
        "y[o<O,n<N] = x[o,n]*w[n]", "O N", {"inputs": "x w", "backward": {"dx": "dy w", "dw": "dy x"}},
        (((None, 7), (7,)), ((5, 33), (33,))),
        {
            "own_scale_fwd": ("y[o<O,n<N] = x[o,n]*w[n]", (("y", "x"),)),
            "own_scale_bwd_x": ("dx[o<O,n<N] = dy[o,n]*w[n]", (("dx", "dy"),)),
            "own_scale_bwd_w": ("dw[n<N] = sum[o<O] dy[o,n]*x[o,n]", ()),
        },
    ),
    "own_gate": (  # both gradients in one row
        "y[o<O,n<N] = x[o,n]*w[o,n]", "O N", {"inputs": "x w", "backward": {"dx dw": "dy x w"}}, (((None, 7), (None, 7)),),
        {
            "own_gate_fwd": ("y[o<O,n<N] = x[o,n]*w[o,n]", (("y", "x"), ("y", "w"))),
            "own_gate_bwd": (
                "dx[o<O,n<N] = dy[o,n]*w[o,n]; dw[o,n] = dy[o,n]*x[o,n]", (("dx", "w"), ("dw", "x")),
            ),
        },
    ),
    "own_decay": (  # whose gradient is another scan
        DECAY, "O N I", {"backward": {"t_dy dx": "dy x y"}}, tuple((s,) for s in ONI),
        {
            "own_decay_fwd": (DECAY, (("y", "x"),)),
            "own_decay_bwd": (
                "t_dy[o<O,n<N,i<I] = dy[o,n,i] + where(n + 1 < N, t_dy[o, n + 1, i]*(1 - tanh(y[o,n,i; -2])^2), 0); "
                "dx[o,n,i] = t_dy[o,n,i]*cos(x[o,n,i])",
                (("t_dy", "dy"), ("t_dy", "y"), ("dx", "x")),
            ),
        },
    ),
    "own_either": (
        "y[o<O,n<N] = logaddexp(x[o,n], w[o,n])", "O N", {"inputs": "x w", "backward": {"dx dw": "dy x w"}}, (((None, 7), (None, 7)),),
        {
            "own_either_fwd": ("y[o<O,n<N] = logaddexp(x[o,n], w[o,n])", (("y", "x"), ("y", "w"))),
            "own_either_bwd": (
                "dx[o<O,n<N] = dy[o,n]*where(x[o,n] == w[o,n] and |x[o,n]| == inf, 0.5, sigmoid(x[o,n] - w[o,n])); "
                "dw[o,n] = dy[o,n]*where(x[o,n] == w[o,n] and |x[o,n]| == inf, 0.5, sigmoid(w[o,n] - x[o,n]))", (),
            ),
        },
    ),
    "own_power": (
        "y[o<O,n<N] = |x[o,n]|^p + k*x[o,n]", "O N", {"integers": "k", "reals": "p", "backward": {"dx": "dy x"}}, (((None, 7),),),
        {
            "own_power_fwd": ("y[o<O,n<N] = |x[o,n]|^p + k*x[o,n]", (("y", "x"),)),
            "own_power_bwd": (
                "dx[o<O,n<N] = dy[o,n]*k + where(p == 0, 0, sign(x[o,n])*dy[o,n]*p*|x[o,n]|^(p - 1))", (("dx", "dy"), ("dx", "x")),
            ),
        },
    ),
}  # fmt: skip
NUMBERS = {"k": Word(name="k", kind="int", lo=0, hi=9), "p": Word(name="p", kind="float", lo=-9, hi=9)}


def declared(name: str) -> Declared:
    text, sizes, more, _, _ = OPERATORS[name]
    try:
        return declare(name, text, sizes, **more)
    finally:
        DECLARED.pop(name)


@cache
def with_kernels(name: str) -> Declared:
    """The declaration; its kernels are compiled once."""
    of = declared(name)
    for row in (of.forward, *of.backward):
        add(row.plain, own=True)
    return of


@pytest.fixture
def spec(request: Any, monkeypatch: pytest.MonkeyPatch) -> OpSpec:
    """An operator that is in no table, with its kernels."""
    name = request.param
    of = with_kernels(name)

    def words(shapes: Any, attrs: Any) -> dict[str, Any]:
        x = shapes["x"]
        return {**{k: n for k, n in around(x, [1]).items() if k in of.sizes}, "k": 3, "p": 2.5}

    numbers = [NUMBERS[n] for n in (*of.integers, *of.reals)]
    examples = tuple(Example(shapes=shapes) for shapes in OPERATORS[name][3])
    made = spec_of(of, lambda s, attrs: {"y": s["x"]}, words, numbers, category="reduction", examples=examples)
    monkeypatch.setattr(rowrun, "reference", lambda name: partial(by_equation, made, of))
    for row in made.rows:
        monkeypatch.setitem(ROWS, row.name, row)
    return made


# ---------------------------------------------------------------- what follows
@pytest.mark.parametrize("name", OPERATORS)
def test_rows_follow(name: str) -> None:
    of, rows = declared(name), OPERATORS[name][4]
    made = spec_of(of, None, None, [NUMBERS[n] for n in (*of.integers, *of.reals)], category="reduction")
    assert {row.name: (row.synopsis, row.in_place) for row in made.rows} == rows


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("spec", OPERATORS, indirect=True)
def test_what_follows_is_true(spec: OpSpec, dtype: str, whole: bool) -> None:
    """Extents, parts, what may be in place: as of every operator of the table."""
    if dtype == "float32" and not whole and spec.name not in ("own_softmax", "own_scale"):
        pytest.skip("takes --whole")
    rowrun.check_names(spec)
    for check in CHECKS.values():
        check(cases(spec, dtype))
    for case in cases(spec, dtype):
        (check_gradients if dtype == "float64" else check_gradients_float32)(case)
        rowrun.check_flops(case)


@pytest.mark.parametrize("spec", OPERATORS, indirect=True)
def test_their_text_in_numpy_does_what_kernels_do(spec: OpSpec) -> None:
    for case in cases(spec, "float64"):
        for row, values in _row_runs(case):
            want = _run(case, row, values)
            for pair in (None, *row.in_place):
                got, texts = run_text(case, row, values, pair)
                for o, w in want.items():
                    same(got[o].reshape(-1), w, "float64", f"{row.name}.{o} {case.shapes} {pair}\n" + "\n".join(texts))


@pytest.mark.parametrize("spec", ["own_cross"], indirect=True)
def test_what_is_not_in_place_would_be_wrong_there(spec: OpSpec) -> None:
    case = Case(spec, spec.examples[0], "float64", 3)
    want = case.forward()["y"]
    assert np.abs(case.forward(alias=("y", "x"))["y"] - want).max() > 1e-3


def test_an_import_reads_no_equation_and_derives_none() -> None:
    code = (
        "import sys, calcvm.ops; print([m for m in sys.modules if m.startswith('calcvm.equations.')]); "
        "print('synopsis' in vars(calcvm.ops.ROWS['var_bwd']))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["['calcvm.equations.declare', 'calcvm.equations.declared']", "False"]


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("text", "more", "told"),
    [
        (SOFT, {"backward": {"dx": "dy"}}, "the gradient dx reads x: declare that it reads dy, x (and results, instead of recomputing them)"),
        (SOFT, {"backward": {"dx": "dy x y"}}, "the gradient dx does not read x: declare that it reads dy, y ("),
        (
            "y[o<O,n<N] = y[o, n - 1]*x[o,n]", {"backward": {"dx": "dy x y"}},
            "the gradient also sets t_dy: write 't_dy dx' as the results of the backward row",
        ),
        (SOFT, {"backward": {"t_dy dx": "dy y"}}, "the gradient also sets no scan: write 'dx' as the results of the backward row"),
        (
            "y[o<O,n<N] = x[o,n] - mean[r<O] x[r,n]", {},
            "row 'none_fwd': workers share o, and each would compute the whole sum over r of x: make it a separate operator",
        ),
        (
            "s[o<O,n<N] = s[o, n - 1] + x[o,n]; y[o,n] = s[o,n]", {},
            "row 'none_fwd': the scan s is not an operand of the row: make it a result, or a separate operator",
        ),
        ("y[o<O,n] = x[o,n]", {}, "row 'none_fwd': the index n has no range: say it, as in n<rows"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_what_to_do(text: str, more: dict, told: str) -> None:
    try:
        of = declare("none", text, "O N", **more)
    finally:
        DECLARED.pop("none", None)
    with pytest.raises(cv.CalcError) as error:
        for row in (of.forward, *of.backward):
            _ = row.plain
    assert told in str(error.value)


# ---------------------------------------------------------------- the operators that there are
def computed(make: Any, x: np.ndarray, dtype: str = "float64", batch: bool = True) -> np.ndarray:
    g = cv.CalcGraph()
    v = g.placeholder("x", (None, *x.shape[1:]) if batch else x.shape)
    with g.path("look") as look:
        look.output = make(v).rename("found")
    program = cv.compile(g, batch_size=x.shape[0] if batch else 1, dtype=dtype)
    model = cv.CalcHeap(program.heap_bytes).create(program)
    model["x"] = x
    model.forward("look")
    return np.array(model["found"])


SPECIAL = np.array([[1, -np.inf, 2], [-np.inf] * 3, [np.inf, 1, 2], [np.nan, 1, 2], [np.inf, -np.inf, 0], [1e15, 1, 1]])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("axis", [0, 1])
def test_special_values_are_those_of_pytorch(dtype: str, axis: int) -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor(SPECIAL if axis else SPECIAL.T.copy(), dtype=getattr(torch, dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of what is not determined
        undetermined = x.var(axis, correction=3)
    for make, want in (
        (partial(cv.logsumexp, axis=axis), x.logsumexp(axis)),
        (partial(cv.var, axis=axis), x.var(axis, correction=0)),
        (partial(cv.std, axis=axis, correction=1), x.std(axis)),
        (partial(cv.var, axis=axis, correction=3), undetermined),
        (partial(cv.cumsum, axis=axis), x.cumsum(axis)),
        (partial(cv.cumsum, axis=axis, reverse=True), x.flip(axis).cumsum(axis).flip(axis)),
        (partial(cv.logcumsumexp, axis=axis), x.logcumsumexp(axis)),
    ):
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(
                computed(make, x.numpy(), dtype, axis == 0), want.numpy(), 1e-6, err_msg=str(make)
            )


CALLS: dict[str, tuple[Any, Any]] = {
    "cumsum": (lambda x: cv.cumsum(x, 1), lambda x: x.cumsum(1)),
    "cumsum of the last, from behind": (
        lambda x: cv.cumsum(x, -1, reverse=True),
        lambda x: x.flip(-1).cumsum(-1).flip(-1),
    ),
    "cumsum of the batch": (lambda x: cv.cumsum(x, axis=0), lambda x: x.cumsum(0)),
    "logcumsumexp": (lambda x: cv.logcumsumexp(x, -1), lambda x: x.logcumsumexp(-1)),
    "logcumsumexp of the first": (lambda x: cv.logcumsumexp(x, 1), lambda x: x.logcumsumexp(1)),
    "logcumsumexp of the batch": (lambda x: cv.logcumsumexp(x, axis=0), lambda x: x.logcumsumexp(0)),
    "logsumexp": (lambda x: cv.logsumexp(x, (1, 2)), lambda x: x.logsumexp((1, 2))),
    "logsumexp of the batch": (lambda x: cv.logsumexp(x, 0, keepdims=True), lambda x: x.logsumexp(0, keepdim=True)),
    "var": (lambda x: cv.var(x, -1, keepdims=True), lambda x: x.var(-1, correction=0, keepdim=True)),
    "var of all": (lambda x: cv.var(x), lambda x: x.var(correction=0)),
    "std": (lambda x: cv.std(x, (1, 2), correction=1), lambda x: x.std((1, 2))),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 4, 5), (3, 2, 1)])
@pytest.mark.parametrize("name", CALLS)
def test_values_slopes_and_slopes_of_slopes_are_those_of_pytorch(
    name: str, shape: tuple, dtype: str, whole: bool
) -> None:
    if dtype == "float32" and not whole and name not in ("cumsum", "std"):
        pytest.skip("takes --whole")
    torch = pytest.importorskip("torch")
    ours, theirs = CALLS[name]
    x = np.random.default_rng(1).normal(size=shape)
    t = torch.tensor(x, requires_grad=True)
    y = theirs(t)
    (slope,) = torch.autograd.grad((y * y).sum(), t, create_graph=True)
    (second,) = torch.autograd.grad((slope**3).sum(), t)

    def first(v: Any) -> Any:
        y = ours(v)
        return cv.gradient(cv.sum(y * y), v)

    for make, want in (
        (lambda v: ours(v) * 1.0, y),
        (first, slope),
        (lambda v: cv.gradient(cv.sum(cv.square(d := first(v)) * d), v), second),
    ):
        found, want = computed(make, x, dtype), want.detach().numpy()
        np.testing.assert_allclose(
            found, want, 0, {"float32": 5e-5, "float64": 1e-11}[dtype] * max(1, np.abs(want).max())
        )


def test_their_script_trains_as_the_program_does(tmp_path: Any) -> None:
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 6)), g.placeholder("t", (None, 3))
    w = g.parameter("w", (6, 12))
    with g.path("learn", backward=True) as learn:
        z = cv.reshape(x @ w, (-1, 3, 4))
        z = cv.cumsum(z, 2) + cv.cumsum(z, 1, reverse=True) + cv.logcumsumexp(z, 1)
        y = cv.logsumexp(z, 2) + cv.std(z, 2, correction=1) - cv.var(z, (1, 2), keepdims=True)[:, :, 0]
        learn.minimize(cv.mse(y, t), optimizer=cv.SGD(0.01), output=y)
    with g.path("predict") as predict:
        predict.output = y
    model = cv.Model(g, batch_size=8, workers=1, dtype="float64")
    rng = np.random.default_rng(4)
    data = {"x": rng.normal(size=(21, 6)).astype("f"), "t": rng.normal(size=(21, 3)).astype("f")}
    script_does_the_same(model, tmp_path, data, [(0, 8), (8, 16), (16, 21)])


@pytest.mark.parametrize("axes", [None, 0, 1, (0, 2), (-1,), (1, 2), (0, 1, 3), (3, 1), ()])
@pytest.mark.parametrize("keepdims", [False, True])
def test_any_axes(axes: Any, keepdims: bool) -> None:
    x = np.random.default_rng(0).normal(size=(4, 3, 5, 2))
    at = axes if axes is None or isinstance(axes, tuple) else (axes,)
    top = x.max(at, keepdims=True)
    lse = np.log(np.exp(x - top).sum(at, keepdims=True)) + top
    lse = lse if keepdims else lse.reshape(x.sum(at).shape)
    np.testing.assert_allclose(computed(lambda v: cv.logsumexp(v, axes, keepdims) * 1.0, x), lse, 1e-13)
    for fn, want in ((cv.var, x.var), (cv.std, x.std)):
        found = computed(lambda v, fn=fn: fn(v, axes, keepdims=keepdims) * 1.0, x)
        np.testing.assert_allclose(found, want(at, keepdims=keepdims), 1e-12)


def test_a_variance_keeps_its_digits_far_from_zero() -> None:
    x = (1000 + 0.01 * np.random.default_rng(0).normal(size=(64, 1000))).astype(np.float32)
    want = x.astype(np.float64).var(1)
    np.testing.assert_allclose(
        computed(lambda v: cv.var(v, 1), x, "float32"), want, 2e-4
    )  # the mean is two units off: in one pass 1000


def test_the_deviation_of_what_does_not_vary_has_no_slope() -> None:
    x = np.array([[2.0, 2.0, 2.0], [1.0, 2.0, 4.0]])
    found = computed(lambda v: cv.gradient(cv.sum(cv.std(v, 1)), v), x)
    assert (found[0] == 0).all()
    np.testing.assert_allclose(found[1], (x[1] - x[1].mean()) / (3 * x[1].std()), 1e-13)


@pytest.mark.parametrize("axis", [0, 1])
def test_running_logsumexps_of_large_and_infinite_numbers_have_slopes(axis: int) -> None:
    inf = np.inf
    x = np.array([
        [1000, 1000, -1000], [-1000, -1000, 1000], [1, -inf, 1], [-inf, 1, 1], [-inf, -inf, 0], [-inf, -inf, -inf],
    ])  # fmt: skip
    # of y[0] + 2*y[1] + 4*y[2]; of two equal -inf each has a half, where PyTorch says NaN
    want = np.array([[4, 3, 0], [2, 1, 4], [5, 0, 2], [1, 4, 2], [2, 1, 4], [3, 2, 2]], float)
    weights = np.array([1.0, 2.0, 4.0])

    def slopes(v: Any) -> Any:
        return cv.gradient(cv.sum(cv.logcumsumexp(v, axis) * (weights if axis else weights[:, None])), v)

    found = computed(slopes, x if axis else x.T.copy(), batch=False)
    np.testing.assert_allclose(found, want if axis else want.T, 0, 1e-12)


def test_integers_are_summed_as_floats() -> None:
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3), "int64")
    with g.path("look") as look:
        y = look.output = cv.cumsum(x, 1).rename("found")
    assert y.type == "float"
    model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=2))
    model["x"] = [[1, 2, 3], [-4, 5, 6]]
    model.forward("look")
    assert model["found"].tolist() == [[1, 3, 6], [-4, 1, 7]]


def test_along_axes_of_images_as_users_see_them() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 5))
    for axis in range(1, 4):
        found = computed(lambda v, axis=axis: cv.cumsum(cv.channels_first(cv.channels_last(cv.relu(v))), axis) * 1.0, x)
        np.testing.assert_allclose(found, np.maximum(x, 0).cumsum(axis), 1e-13)
        found = computed(
            lambda v, axis=axis: cv.logcumsumexp(cv.channels_first(cv.channels_last(cv.relu(v))), axis) * 1.0, x
        )
        np.testing.assert_allclose(found, np.logaddexp.accumulate(np.maximum(x, 0), axis), 1e-13)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda x: cv.cumsum(x, 2), "axis 2 does not fit shape (B, 3)"),
        (lambda x: cv.cumsum(x, -3), "axis -3 does not fit shape (B, 3)"),
        (lambda x: cv.cumsum(x, 1, reverse=1), "cumsum: reverse"),
        (lambda x: cv.logcumsumexp(x, 2), "axis 2 does not fit shape (B, 3)"),
        (lambda x: cv.var(x, (0, 2)), "axis (0, 2) is outside 2 dimensions"),
        (lambda x: cv.var(x, correction=-1), "var: correction must be an integer"),
        (lambda x: cv.std(x, 1, correction=0.5), "std: correction must be an integer"),
        (lambda x: cv.logsumexp(x, (1, 1)), "axis (1, 1) names a dimension twice"),
    ],
)
def test_wrong_arguments(call: Any, told: str) -> None:
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3))
    with g.path("look"), pytest.raises(cv.CalcError) as error:
        call(x)
    assert told in str(error.value)


def test_every_declaration_is_an_operator() -> None:
    assert {*DECLARED} <= {*OPS}
