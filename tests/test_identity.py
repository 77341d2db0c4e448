"""What a value is depends neither on where it lies nor on what it is called: views, paths, names, gradients by path."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.errors import CalcError, ProgramError, ShapeError
from calcvm.graph import apply
from calcvm.kernels_cpu import _common
from calcvm.kernels_cpu._common import Ptr, given, like, share
from calcvm.lowering import lower
from calcvm.model import build_graph
from calcvm.ops.spec import OPS, ROWS, OpSpec, R, RowSpec, W, dims, register, rows_cols
from calcvm.planner import plan
from calcvm.vm.program.assemble import assemble
from calcvm.vm.program.program import load_program


def load(graph, batch=8, seed=0, **options):
    program = cv.compile(graph, batch_size=batch, **options)
    return cv.CalcHeap(program.heap_bytes).create(program, seed=seed)


RNG = np.random.default_rng(0)
X = RNG.standard_normal((40, 2, 2)).astype("f4")
Y = (X[:, 0, 0] > 0).astype(int)


# ---------------------------------------------------------------- views are no placeholders and no producers
NETS = {
    "flat": (nn.Linear(3), nn.Scale(0.5) >> nn.Flatten()),
    "flatten first": (nn.Flatten() >> nn.Linear(3), nn.Scale(0.5)),
    "flatten twice": (nn.Flatten() >> nn.Flatten() >> nn.Linear(3), nn.Scale(0.5)),
    "views all along": (nn.Flatten() >> nn.Linear(3), nn.Flatten() >> nn.Scale(0.5) >> nn.Reshape(2, 2)),
}


@pytest.mark.parametrize("net", list(NETS)[1:])
def test_preprocessing_runs_before_networks_that_begin_with_views(net):
    """The same numbers wherever the data are reshaped, in whole data sets and in single steps."""

    def numbers(name):
        network, preprocess = NETS[name]
        m = cv.Model(network, input_shape=(2, 2), preprocess=preprocess, optimizer=cv.Adam(0.05), batch_size=16, seed=1)
        losses = m.fit(X, Y, epochs=2, progress=False)["loss"]
        losses += [m.step(X[:n], Y[:n]) for n in (16, 5)]
        return [*losses, *m.evaluate(X, Y).values(), *m.predict(X).ravel(), *m.run({"input": X[:3]})["output"].ravel()]

    assert numbers(net) == numbers("flat")


def test_networks_that_begin_with_views_ask_for_their_placeholders():
    m = cv.Model(nn.Flatten() >> nn.Linear(3), input_shape=(2, 2), optimizer=cv.SGD(0.1), batch_size=16)
    assert m.loaded.feeds("learn") == ("input", "target")
    assert np.isfinite(m.step(X[:16], Y[:16]))
    fleet = cv.Fleet("1 MiB", workers=1)
    handle = fleet.add(m.program, data=(X, Y))
    fleet.fit(1, progress=False)
    assert np.isfinite(handle.loss)
    on = handle.model
    assert cv.Ensemble([on, on]).predict(X).shape == (40, 3)


def test_a_network_may_begin_and_end_with_views_in_files(tmp_path):
    net = nn.Flatten() >> nn.Linear(4) >> nn.Reshape(2, 2)
    m = cv.Model(net, input_shape=(2, 2), loss="mse", optimizer=cv.Adam(0.05), batch_size=16)
    m.fit(X, X, epochs=2, progress=False)
    m.save(tmp_path / "m.calc")
    again = cv.load(tmp_path / "m.calc")
    np.testing.assert_array_equal(again.predict(X), m.predict(X))
    assert again.fit(X, X, epochs=1, progress=False)["loss"] == m.fit(X, X, epochs=1, progress=False)["loss"]
    assert m.predict(X).shape == (40, 2, 2)
    ensemble = cv.Ensemble([m, again])
    assert ensemble.evaluate(X, X)["loss"] == pytest.approx(m.evaluate(X, X)["loss"], rel=1e-6)


def test_views_of_results_placeholders_and_parameters_are_read_in_every_path():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 2, 3))
    W = g.parameter("W", (3, 2), init=np.arange(6.0).reshape(3, 2))
    with g.path("first"):
        h = x * 2.0
        flat_h = cv.flatten(h)
        flat_x = cv.flatten(x)
        cv.reshape(W, (2, 3)).rename("V")
    with g.path("second") as second:
        again = cv.reshape(flat_h, (None, 3, 2))
        cv.sum(again, axis=(1, 2)).rename("summed")
        second.output = cv.reshape(flat_x, (None, 2, 3)).rename("output")
    with g.path("third") as third:
        third.output = flat_h
    m = load(g, batch=4)
    loaded = m.loaded
    assert [loaded.feeds(path) for path in ("first", "second", "third")] == [("x",)] * 3
    assert loaded.before("second") == (("first", ("forward",)),) == loaded.before("third")
    data = np.arange(18.0).reshape(3, 2, 3)
    m["x"] = data
    m.run_steps(1, "third")
    np.testing.assert_array_equal(m["flat_h"], 2 * data.reshape(3, 6))
    m.run_steps(1, "second")
    np.testing.assert_array_equal(m["summed"], 2 * data.sum((1, 2)))
    np.testing.assert_array_equal(m["output"], data)
    np.testing.assert_array_equal(m["again"], 2 * data.reshape(3, 3, 2))
    np.testing.assert_array_equal(m["V"], np.arange(6.0).reshape(2, 3))
    m["x"] = data[:1]
    np.testing.assert_array_equal(m["flat_x"], data[:1].reshape(1, 6))  # a view shows what its source holds now
    np.testing.assert_array_equal(m["h"], 2 * data)


def test_a_kept_view_of_what_is_overwritten_is_readable_and_others_say_why():
    def graph():
        g = cv.CalcGraph()
        x, W = g.placeholder("x", (None, 6)), g.parameter("W", (6, 4), init=np.eye(6, 4))
        with g.path("learn", backward=True) as learn:
            a = cv.exp(x @ W)
            v = cv.reshape(a, (None, 2, 2))
            learn.minimize(cv.mean(cv.square(cv.tanh(v))), cv.SGD(0.1))
        return g

    data = np.ones((3, 6))
    kept = load(graph(), keep=["v"])
    kept["x"] = data
    kept.run_steps(1)
    np.testing.assert_allclose(kept["v"], np.full((3, 2, 2), np.e), rtol=1e-6)
    np.testing.assert_allclose(kept["a"], np.full((3, 4), np.e), rtol=1e-6)  # it is the same value
    lost = load(graph())
    lost["x"] = data
    lost.run_steps(1)
    for name in ("a", "v"):
        with pytest.raises(CalcError, match=rf"'{name}' cannot be read: .* compile with keep=\['{name}'\]"):
            lost[name]


def test_a_parameter_or_placeholder_may_be_a_paths_output():
    g = cv.CalcGraph()
    x, W = g.placeholder("x", (None, 3)), g.parameter("W", (3, 2), init=np.ones((3, 2)))
    with g.path("p") as p:
        p.output = W
        y = x @ W
    with g.path("q") as q:
        q.output = x
        z = cv.sum(y)
    m = load(g)
    m["x"] = np.ones((2, 3))
    assert m.loaded.feeds("p", ("forward",)) == () and m.loaded.feeds("p") == ("x",) == m.loaded.feeds("q")
    m.run_steps(1, "q")
    assert m["z"] == 12 and (m["W"] == 1).all()
    assert (y.name, z.name) == ("y", "z")


def test_one_result_may_be_read_by_several_paths():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3))
    with g.path("a"):
        h = x * 2.0
    for name in ("b", "c", "d"):
        with g.path(name, adopt=False):
            cv.sum(cv.flatten(h) if name == "c" else h).rename(f"{name}.sum")
    m = load(g)
    m["x"] = np.ones((5, 3))
    for name in ("b", "c", "d"):
        m.run_steps(1, name)
        assert m[f"{name}.sum"] == 30


def test_a_path_may_be_extended_by_what_reads_a_later_one_but_not_in_circles():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 2))
    with g.path("early"):
        a = x * 2.0
    with g.path("late"):
        b = x + 1.0
    with g.extend("early"):
        cv.sum(a * b).rename("c")
    m = load(g)
    assert m.program.paths == ("late", "early")
    m["x"] = np.ones((3, 2))
    m.run_steps(1, "early")
    assert m["c"] == 24
    with g.extend("late"):
        cv.sum(b * a)
    with pytest.raises(CalcError, match="paths read each other's results .*early -> late -> early"):
        cv.compile(g, batch_size=4)


# ---------------------------------------------------------------- what runs, for which batch
def chain():
    g = cv.CalcGraph()
    x, u = g.placeholder("x", (None, 3)), g.placeholder("u", (None, 4))
    W = g.parameter("W", (3, 4), init=np.ones((3, 4)))
    with g.path("features"):
        H = cv.tanh(x @ W)
    with g.path("middle"):
        K = cv.flatten(H) * 2.0
    with g.path("summary"):
        M = cv.mean(K)
    with g.path("mixed"):
        P = cv.sum(H * u)
    with g.path("constant"):
        N = M * 3.0
    assert (M.name, P.name, N.name) == ("M", "P", "N")
    return g


def test_a_path_of_results_runs_for_the_batch_of_those_results():
    m = load(chain(), batch=8)
    for n, sign in ((8, 1), (2, -1), (5, 1)):
        m["x"] = sign * np.ones((n, 3))
        m.run_steps(1, "summary")
        assert m["M"] == pytest.approx(2 * np.tanh(3 * sign), rel=1e-6)
        m.run_steps(1, "constant")
        assert m["N"] == pytest.approx(6 * np.tanh(3 * sign), rel=1e-6)
    for path in ("features", "middle", "summary"):
        m.forward(path)
    assert m["K"].shape == (5, 4)
    m["x"] = np.zeros((3, 3))
    m.forward("features")
    assert m["K"].shape == (5, 4)  # of the run that it is of
    m.forward("middle")
    assert m["K"].shape == (3, 4) and (m["K"] == 0).all()


def test_a_path_that_mixes_batches_says_so():
    m = load(chain(), batch=8)
    m["x"], m["u"] = np.ones((8, 3)), np.ones((2, 4))
    with pytest.raises(ShapeError, match="path 'mixed' reads batches of different sizes .'H': 8, 'u': 2"):
        m.run_steps(1, "mixed")
    m["x"] = np.ones((2, 3))
    with pytest.raises(ShapeError, match="'H': 8, 'u': 2"):  # features has not run on the new data
        m.forward("mixed")
    m.run_steps(1, "mixed")
    assert m["P"] == pytest.approx(8 * np.tanh(3), rel=1e-6)


def test_results_that_were_never_made_are_not_read():
    m = load(chain(), batch=8)
    m["u"] = np.ones((2, 4))
    with pytest.raises(CalcError, match=r"'H' belongs to path 'features'.*call forward\('features'\) first"):
        m.forward("mixed")
    with pytest.raises(CalcError, match=r"forward\('features'\)"):
        m.forward("middle")


def test_run_needs_the_inputs_of_its_section_alone():
    """Targets belong to the loss: outputs need none, and leave no loss behind that could be read."""
    net = nn.Flatten() >> nn.Linear(3)
    m = cv.Model(net, input_shape=(2, 2), preprocess=nn.Scale(2.0), optimizer=cv.SGD(0.1), batch_size=8)
    np.testing.assert_array_equal(m.run({"input": X[:4]})["output"], m.predict(X[:4]))
    with pytest.raises(CalcError, match=r"'predict.loss'.*call forward\('predict'\) first"):
        m["predict.loss"]
    m["input"] = X[:4]
    m.forward("preprocess")
    with pytest.raises(CalcError, match="placeholder 'target' was never set"):
        m.forward("predict")
    m["target"] = Y[:4]
    m.run_round("predict")
    assert m["predict.loss"] == pytest.approx(m.evaluate(X[:4], Y[:4])["loss"], rel=1e-6)
    m["input"], m["target"] = X[:8], Y[:4]
    m.run_round("predict", ("forward",))
    with pytest.raises(ShapeError, match="'target': 4, 'path predict': 8"):
        m.run_section("predict", "loss")


def test_backward_is_of_the_data_that_forward_read():
    m = cv.Model(nn.Linear(3), input_shape=(2, 2), preprocess=nn.Flatten(), optimizer=cv.SGD(0.1), batch_size=8)
    m["input"], m["target"] = X[:4], Y[:4]
    m.forward("learn")
    m["input"] = X[4:8]
    with pytest.raises(CalcError, match="data that forward.'learn'. read have been set again: call forward"):
        m.backward("learn")
    m.forward("learn")
    m.backward("learn")


def test_data_for_every_placeholder_of_a_pass_are_asked_for():
    from calcvm.vm.memory.epoch import Epoch

    m = load(chain(), batch=8)
    out = np.zeros((9, 4), "f4")
    with pytest.raises(CalcError, match="path 'mixed' needs data for 'x' too"):
        Epoch(m, {"u": out}, "mixed")
    Epoch(m, {"x": np.ones((9, 3), "f4")}, "middle", outputs={"K": out}).whole(1.0)
    np.testing.assert_allclose(out, 2 * np.tanh(3), rtol=1e-6)


# ---------------------------------------------------------------- names
NASTY = [
    ("dt", "t"), ("t", "dt"), ("W", "W.m"), ("W.m", "W"), ("learn.seed", "learn.hyper"), ("rng", "dropout.rate"),
    ("mse.t_l", "dmse"), ("ddt", "dt"), ("loss", "dloss"), ("dropout", "ddropout"), ("p..q", "add"), ("mul", "sub_a"),
    ("clip.sumsq", "dp"), ("W.v", "Größe"), ("dt_2", "dt"), ("  ", " "),
]  # fmt: skip


@pytest.mark.parametrize("names", NASTY)
@pytest.mark.parametrize("accumulate", [False, True])
def test_parameters_may_be_called_anything(names, accumulate):
    def losses(first, second):
        g = cv.CalcGraph()
        x, y = g.placeholder("x", (None, 3)), g.placeholder("y", (None, 3))
        p = g.parameter(first, (3,), init=np.ones(3))
        with g.path("learn", backward=True, adopt=False) as learn:
            z = cv.dropout(x * p, 0.0)
            q = g.parameter(second, (3,), init=np.full(3, 2.0))
            learn.minimize(cv.mse(z + q - np.zeros(3), y), cv.Adam(0.1, clip_norm=100.0))
        m = load(g, batch=4, accumulate=accumulate)
        told = [m.step(np.ones((4, 3)), np.zeros((4, 3))) for _ in range(3)]
        return told, *m.parameters.values()

    for ours, theirs in zip(losses(*names), losses("a", "b")):
        np.testing.assert_array_equal(ours, theirs)


def test_names_that_nobody_chose_make_room():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3))
    with g.path("p"):
        cv.dropout(cv.exp(x), 0.5)
        first = cv.exp(x) - np.ones(3)
    taken = set(g.variables)
    for name in sorted(taken - {"x", "first"}):
        g.parameter(name, (2,))
    with pytest.raises(CalcError, match="variable 'x' exists already"):
        g.parameter("x", (2,))
    with pytest.raises(CalcError, match="variable 'first' exists already"):
        g.placeholder("first", (2,))
    assert {v.name: v for v in g.variables.values()} == g.variables and len(g.variables) == 2 * len(taken) - 2
    assert g.variables["rng"].kind == "parameter" and first.name == "first"
    cv.compile(g, batch_size=2)


def test_symbols_of_one_name_are_refused():
    g = build_graph(nn.Linear(3), (4,), "mse", cv.SGD(0.1))
    lowered, facts = lower(g)
    lowered.values[-1].name = lowered.values[0].name
    planned = plan(lowered, itemsize=4, batch_size=4)
    with pytest.raises(ProgramError, match=f"two values of the program are called '{lowered.values[0].name}'"):
        assemble(lowered, planned, "float32", vars(facts))


# ---------------------------------------------------------------- gradients and optimizer state, by path
def test_the_gradient_of_a_parameter_is_the_whole_of_it():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3))
    s, b = g.parameter("s", (3,), init=np.ones(3)), g.parameter("b", (3,), init=np.ones(3))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mean(cv.square((x * s + b) * b)), cv.SGD(0.1))
    for accumulate in (False, True):
        m = load(g, batch=5, accumulate=accumulate, dtype="float64")
        m["x"] = np.ones((5, 3))
        m.forward("learn")
        m.backward("learn")
        np.testing.assert_allclose(m.grad("s"), np.full(3, 4 / 3), rtol=1e-14)
        np.testing.assert_allclose(m.grad("b"), np.full(3, 4.0), rtol=1e-14)


@pytest.mark.parametrize("view", [False, True])
def test_a_parameter_behind_an_input_without_a_gradient_is_refused(view):
    g = cv.CalcGraph()
    x, p = g.placeholder("x", (None, 3)), g.parameter("p", (3,), init=np.ones(3))
    with g.path("learn", backward=True) as learn:
        metric = cv.apply("rmse", cv.reshape(p, (3,)) if view else p, cv.mean(x, axis=0))
        learn.minimize(metric + cv.mean(x * p), cv.SGD(0.1))
    with pytest.raises(cv.UnsupportedOperator, match="'rmse' has no gradient for its input .*trainable=False"):
        cv.compile(g, batch_size=4)


def two_paths(optimizer, accumulate, dtype="float64"):
    g = cv.CalcGraph()
    x, t, u = g.placeholder("input", (None, 3)), g.placeholder("target", (None, 2)), g.placeholder("u", (None, 3))
    normal = cv.init.Normal(0, 0.5)
    W, V, U = g.parameter("W", (3, 4), normal), g.parameter("V", (4, 2), normal), g.parameter("U", (4, 3), normal)
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mse(cv.tanh(x @ W) @ V, t).rename("loss"), optimizer())
    with g.path("other", backward=True) as other:
        other.minimize(cv.mse(cv.tanh(x @ W) @ U, u), optimizer())
    with g.path("predict") as predict:
        predict.output = (cv.tanh(x @ W) @ V).rename("output")
        cv.mse(predict.output, t).rename("predict.loss")
    return cv.compile(g, batch_size=8, accumulate=accumulate, dtype=dtype)


A = RNG.standard_normal((8, 3))
TARGETS = {"learn": RNG.standard_normal((8, 2)), "other": RNG.standard_normal((8, 3))}
OPTIMIZERS = {"adam": lambda: cv.Adam(1e-2), "adagrad": lambda: cv.Adagrad(0.1, initial_accumulator=0.5)}


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_paths_that_train_one_parameter_have_gradients_and_state_of_their_own(optimizer, accumulate):
    torch = pytest.importorskip("torch")
    program = two_paths(OPTIMIZERS[optimizer], accumulate)
    m = cv.CalcHeap(program.heap_bytes).create(program, seed=3)
    start = {name: torch.tensor(view.copy(), requires_grad=True) for name, view in m.parameters.items()}
    head = {"learn": "V", "other": "U"}
    make = {
        "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    }[optimizer]
    theirs = {path: make([start["W"], start[h]]) for path, h in head.items()}
    m["input"], m["target"], m["u"] = A, TARGETS["learn"], TARGETS["other"]
    for path in ("learn", "other", "other", "learn", "other", "learn"):
        theirs[path].zero_grad()
        y = torch.tanh(torch.tensor(A) @ start["W"]) @ start[head[path]]
        torch.mean((y - torch.tensor(TARGETS[path])) ** 2).backward()
        m.forward(path)
        m.backward(path)
        for name in ("W", head[path]):
            np.testing.assert_allclose(m.grad(name, path), start[name].grad, rtol=1e-12, atol=1e-15)
        theirs[path].step()
        m.optimize(path)
        m.end_round(path)
    for name, value in start.items():
        np.testing.assert_allclose(m[name], value.detach(), rtol=1e-12)


@pytest.mark.parametrize("accumulate", [False, True])
def test_state_of_every_path_survives_files_copies_and_switches(accumulate, tmp_path):
    program = two_paths(OPTIMIZERS["adagrad"], accumulate)

    def train(m, rounds=3):
        return [m.step(A, TARGETS[path], path=path) for _ in range(rounds) for path in ("learn", "other")]

    alone = cv.CalcHeap(program.heap_bytes).create(program, seed=3)
    expected = train(alone, 5)
    m = cv.CalcHeap(program.heap_bytes).create(program, seed=3)
    assert train(m) == expected[:6]
    m.save(tmp_path / "two.calc")
    copy = m.copy("copy", cv.CalcHeap(program.heap_bytes))
    program.save(tmp_path / "program")
    assert load_program(tmp_path / "program") == program
    assert train(cv.load(tmp_path / "two.calc"), 2) == expected[6:]
    assert train(copy, 2) == expected[6:]
    m.heap.create(program, seed=4).step(A, TARGETS["learn"], path="learn")  # takes its place
    assert train(m, 2) == expected[6:]


def test_settling_a_path_drops_its_own_gradients():
    program = two_paths(OPTIMIZERS["adam"], accumulate=True)
    m = cv.CalcHeap(program.heap_bytes).create(program, seed=3)
    m["input"], m["target"], m["u"] = A, TARGETS["learn"], TARGETS["other"]
    for path in ("learn", "other"):
        m.forward(path)
        m.backward(path)
    kept = m.grad("W", "learn")
    m.settle("other")
    assert kept.any() and (m.grad("W", "learn") == kept).all()
    assert not m.grad("W", "other").any() and not m.grad("U", "other").any()


@pytest.mark.parametrize("ends", ["a step", "a pass"])
def test_what_a_path_has_added_up_survives_a_switch_after_another_path_has_ended(ends):
    from calcvm.vm.memory.epoch import Epoch

    def weights(switched):
        program = two_paths(OPTIMIZERS["adam"], accumulate=True)
        heap = cv.CalcHeap(program.heap_bytes)
        m = heap.create(program, seed=3)
        m["input"], m["target"], m["u"] = A, TARGETS["learn"], TARGETS["other"]
        m.forward("learn")
        m.backward("learn")
        if ends == "a step":
            m.step(A, TARGETS["other"], path="other")
        else:
            Epoch(m, {"input": A, "u": TARGETS["other"]}, "other", train=True, results=[]).whole(1.0)
        if switched:
            heap.create(program, seed=4).step(A, TARGETS["learn"], path="learn")
        m.optimize("learn")
        return m["W"], m["V"]

    for kept, alone in zip(weights(True), weights(False)):
        np.testing.assert_array_equal(kept, alone)


def test_a_path_has_gradients_after_a_backward_of_its_own():
    program = two_paths(OPTIMIZERS["adam"], accumulate=False)
    m = cv.CalcHeap(program.heap_bytes).create(program, seed=3)
    m.step(A, TARGETS["learn"], path="learn")
    assert m.grad("W").any()
    with pytest.raises(CalcError, match=r"'W' has no gradient .*call backward\('other'\) first"):
        m.grad("W", "other")


# ---------------------------------------------------------------- operators of several outputs
def pair_fwd(me, rows, cols, x: Ptr, y: Ptr, z: Ptr):
    lo, hi = share(me, rows)
    for i in range(lo * cols, hi * cols):
        y[i] = x[i] * x[i]
        z[i] = x[i] * x[i] * x[i]


def pair_bwd_t(me, rows, cols, x: Ptr, t_s: Ptr):
    lo, hi = share(me, rows)
    for i in range(lo * cols, hi * cols):
        t_s[i] = like(x, 3.0) * x[i] * x[i]


def pair_bwd_idle(me, rows, cols, x: Ptr, t_u: Ptr):
    lo, hi = share(me, rows)
    for i in range(lo * cols, hi * cols):
        t_u[i] = x[i]


def pair_bwd_x(me, rows, cols, x: Ptr, t_s: Ptr, dy: Ptr, dz: Ptr, dx: Ptr):
    lo, hi = share(me, rows)
    for i in range(lo * cols, hi * cols):
        g = like(x, 0.0)
        if given(me, dy):
            g += like(x, 2.0) * dy[i] * x[i]
        if given(me, dz):
            g += dz[i] * t_s[i]
        dx[i] = g


SIZE = "rows*cols"


def pair(optional: bool) -> OpSpec:
    """y = x^2, z = x^3; a row of the backward writes only what another reads, and one what none reads."""
    name = "pair_optional" if optional else "pair"

    def row(suffix, *operands):
        return RowSpec(name=name + suffix, synopsis="", words=dims("rows cols"), operands=operands)

    x, t = R("x", SIZE, "rows"), R("t_s", SIZE, "rows")
    dy, dz = (R(name, SIZE, "rows", optional=optional) for name in ("dy", "dz"))
    return OpSpec(
        name=name, synopsis="", category="unary", inputs=("x",), outputs=("y", "z"), saved=("t_s", "t_u"),
        shape=lambda shapes, attrs: dict.fromkeys(("y", "z", "t_s", "t_u"), shapes["x"]),
        words=lambda shapes, attrs: rows_cols(shapes["x"]), differentiable=("x",),
        fwd=(row("_fwd", x, W("y", SIZE, "rows"), W("z", SIZE, "rows")),),
        bwd=(
            row("_bwd_t", x, W("t_s", SIZE, "rows")),
            row("_bwd_idle", x, W("t_u", SIZE, "rows")),
            row("_bwd_x", x, t, dy, dz, W("dx", SIZE, "rows")),
        ),
    )  # fmt: skip


@pytest.fixture(params=[False, True], ids=["zeros", "left out"])
def registered(request, monkeypatch):
    """The operator in the table for the time of a test."""
    for table in (OPS, ROWS, _common.KERNELS):
        before = dict(table)
        request.addfinalizer(lambda table=table, before=before: (table.clear(), table.update(before)))
    spec = register(pair(request.param))
    for kernel in (pair_fwd, pair_bwd_t, pair_bwd_idle, pair_bwd_x):
        _common.kernel_as(kernel.__name__.replace("pair", spec.name))(kernel)
    return spec


@pytest.mark.parametrize("used", [("y",), ("z",), ("y", "z")])
def test_a_loss_may_use_some_outputs_of_an_operator(registered, used):
    g = cv.CalcGraph()
    x, p = g.placeholder("x", (None, 3)), g.parameter("p", (3,), init=np.array([1.0, 2.0, -1.0]))
    with g.path("learn", backward=True) as learn:
        y = apply(registered.name, x * p)
        outputs = [y.producer.outputs[slot] for slot in used]
        learn.minimize(cv.sum(outputs[0] if len(outputs) == 1 else outputs[0] + outputs[1]), cv.SGD(0.1))
    m = load(g, dtype="float64", workers=2)
    names = [m.program.spec(pc).name.removeprefix(registered.name) for pc in range(len(m.program.rows))]
    assert names.count("_bwd_t") == names.count("_bwd_x") == 1 and "_bwd_idle" not in names
    data = RNG.standard_normal((5, 3))
    m["x"] = data
    m.forward("learn")
    m.backward("learn")
    v = data * m["p"]
    slope = {"y": 2 * v, "z": 3 * v**2}
    np.testing.assert_allclose(m.grad("p"), sum((slope[s] * data).sum(0) for s in used), rtol=1e-12)
