"""What a path trains: all behind its loss, chosen parameters, and nothing through what stops gradients."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import Counter

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn

RNG = np.random.default_rng(0)
X, Z = RNG.standard_normal((6, 4)), RNG.standard_normal((6, 3))


def two_networks(**chosen: list[str] | None) -> cv.CalcGraph:
    """A critic of data and of what a generator makes of noise; each path trains what it is told to."""
    critic, generator = nn.Linear(5) >> nn.Tanh() >> nn.Linear(1), nn.Linear(7) >> nn.Tanh() >> nn.Linear(4)
    g = cv.CalcGraph()
    x, z = g.placeholder("x", (None, 4)), g.placeholder("z", (None, 3))
    with g.path("critic", backward=True) as path:
        made = generator.build(z, "generator.", True)
        loss = cv.mean(cv.softplus(-critic.build(x, "critic.", True)))
        loss = loss + cv.mean(cv.softplus(critic.build(made, "critic.", True)))
        path.minimize(loss, cv.SGD(0.1), parameters=chosen.get("critic"))
    with g.path("generator", backward=True) as path:
        made = generator.build(z, "generator.", True)
        loss = cv.mean(cv.softplus(-critic.build(made, "critic.", True)))
        path.minimize(loss, cv.SGD(0.1), parameters=chosen.get("generator"))
    return g


def names(g: cv.CalcGraph, prefix: str) -> list[str]:
    return [p.name for p in g.parameters(prefix)]


@pytest.mark.parametrize("accumulate", [False, True])
def test_each_path_trains_its_own_as_in_pytorch(accumulate):
    torch = pytest.importorskip("torch")
    own = two_networks()
    g = two_networks(critic=names(own, "critic."), generator=names(own, "generator."))
    program = cv.compile(g, batch_size=6, dtype="float64", accumulate=accumulate)
    assert {p: {*program.info["paths"][p]["gradients"]} for p in ("critic", "generator")} == {
        "critic": {*names(g, "critic.")}, "generator": {*names(g, "generator.")}
    }  # fmt: skip
    model = cv.CalcHeap(program.heap_bytes).create(program, seed=0)
    w = {name: torch.tensor(np.array(v), requires_grad=True) for name, v in model.parameters.items()}

    def net(scope, v):
        h = torch.tanh(v @ w[f"{scope}linear_1.weight"] + w[f"{scope}linear_1.bias"])
        return h @ w[f"{scope}linear_2.weight"] + w[f"{scope}linear_2.bias"]

    def step(scope, loss):
        mine = [v for name, v in w.items() if name.startswith(scope)]
        for v, grad in zip(mine, torch.autograd.grad(loss, mine)):
            v.data -= 0.1 * grad
        return loss.item()

    x, z, softplus = torch.tensor(X), torch.tensor(Z), torch.nn.functional.softplus
    for _ in range(3):
        want = step(
            "critic.", softplus(-net("critic.", x)).mean() + softplus(net("critic.", net("generator.", z))).mean()
        )
        assert model.step(X, Z, path="critic") == pytest.approx(want, rel=1e-12)
        want = step("generator.", softplus(-net("critic.", net("generator.", z))).mean())
        assert model.step(Z, path="generator") == pytest.approx(want, rel=1e-12)
    for name, view in model.parameters.items():
        np.testing.assert_allclose(view, w[name].detach().numpy(), rtol=1e-10, atol=1e-12, err_msg=name)


def test_what_is_not_chosen_has_no_gradient_no_state_and_no_row():
    everything, some = (
        cv.compile(two_networks(critic=chosen), batch_size=6) for chosen in (None, ["critic.linear_1.weight"])
    )
    assert [*some.info["paths"]["critic"]["gradients"]] == ["critic.linear_1.weight"]
    assert len(some.rows) < len(everything.rows) and some.heap_bytes < everything.heap_bytes
    rows = some.disassemble().split("critic / optimize")[1].split("\n\n")[0]
    assert rows.count("sgd") == 1


def test_the_choice_is_kept_by_copies_and_told_by_the_form():
    g = two_networks(generator=["generator.linear_1.bias"])
    for other in (pickle.loads(pickle.dumps(g)), copy.deepcopy(g)):
        assert cv.compile(other, batch_size=6).hash == cv.compile(g, batch_size=6).hash
    assert g.form != two_networks().form


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ([], "parameters is empty"),
        (["nothing"], "the graph has no parameter 'nothing'"),
        ([3], "the graph has no parameter 3"),
        ("critic.linear_1.bias", "a list of parameters or their names is wanted"),
        (["x"], "'x' is no parameter, and cannot be trained; trainable are: a, b"),
        (["frozen"], "'frozen' is frozen"),
        (["other"], "'other' has no part in the loss 'loss'"),
        (["stopped"], "'stopped' has no part in the loss 'loss'"),
    ],
)
def test_what_cannot_be_trained_is_refused(chosen, why):
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 2))
    a, b, other, stopped = (g.parameter(name, (2, 2)) for name in ("a", "b", "other", "stopped"))
    frozen = g.parameter("frozen", (2, 2), trainable=False)
    with g.path("learn", backward=True) as learn:
        loss = cv.mean(x @ a @ b @ frozen @ cv.stop_gradient(stopped)).rename("loss")
        with pytest.raises(cv.CalcError, match=why):
            learn.minimize(loss, cv.SGD(0.1), parameters=chosen)
        assert learn.loss is None
        learn.minimize(loss, cv.SGD(0.1), parameters=[b, "a", b])
    assert learn.parameters == (a, b) and other not in learn.trained_behind(loss)


def test_parameters_of_another_graph_are_refused():
    g, other = cv.CalcGraph(), cv.CalcGraph()
    x, w = g.placeholder("x", (None, 2)), g.parameter("w", (2, 2))
    with g.path("learn", backward=True) as learn:
        loss = cv.mean(x @ w)
        with pytest.raises(cv.CalcError, match="has no parameter"):
            learn.minimize(loss, cv.SGD(0.1), parameters=[other.parameter("w", (2, 2))])


# ---------------------------------------------------------------- stop_gradient
@pytest.mark.parametrize("accumulate", [False, True])
def test_no_gradient_goes_through_what_stops_it(accumulate):
    torch = pytest.importorskip("torch")
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 4))
    v, w = g.parameter("v", (4, 4)), g.parameter("w", (4, 4))
    with g.path("learn", backward=True) as learn:
        h = cv.tanh(x @ v)
        y = cv.stop_gradient(h) @ w + h * cv.stop_gradient(w[0:1])
        loss = cv.mean(cv.square(y - cv.stop_gradient(cv.sigmoid(y))))
        learn.minimize(loss, cv.SGD(0.1))
    program = cv.compile(g, batch_size=6, dtype="float64", accumulate=accumulate)
    model = cv.CalcHeap(program.heap_bytes).create(program, seed=1)
    tv, tw = (torch.tensor(np.array(model[n]), requires_grad=True) for n in ("v", "w"))
    h = torch.tanh(torch.tensor(X) @ tv)
    y = h.detach() @ tw + h * tw.detach()[0:1]
    (y - torch.sigmoid(y).detach()).square().mean().backward()
    want = [p.detach().numpy() - 0.1 * p.grad.numpy() for p in (tv, tw)]
    model.step(X)
    for name, w1 in zip("vw", want):
        np.testing.assert_allclose(model[name], w1, rtol=1e-12, atol=1e-14)


def test_a_loss_behind_a_stop_alone_trains_nothing():
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, 2)), g.parameter("w", (2, 2))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mean(cv.stop_gradient(x @ w)), cv.SGD(0.1))
    with pytest.raises(cv.CalcError, match="depends on no trainable parameter"):
        cv.compile(g, batch_size=2)


def test_an_operator_without_a_gradient_may_stand_behind_a_stop():
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 2)), g.placeholder("t", (None, 2))
    w = g.parameter("w", (2, 2))
    with g.path("learn", backward=True) as learn:
        y = x @ w
        loss = cv.mse(y, t) / cv.stop_gradient(cv.apply("rmse", y, t))
        learn.minimize(loss, cv.SGD(0.1))
    model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=2))
    assert np.isfinite(model.step(X[:2, :2], Z[:2, :2]))
    with g.extend("learn"), pytest.raises(cv.CalcError, match="minimizes"):
        learn.minimize(cv.apply("rmse", y, t), cv.SGD(0.1))


def test_a_loss_that_nothing_minimizes_is_said():
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, 2)), g.parameter("w", (2, 2))
    with g.path("predict") as predict:
        predict.loss = cv.mean(x @ w)
    with pytest.raises(cv.CalcError, match="a loss that nothing minimizes: call predict.minimize"):
        cv.compile(g, batch_size=2)


# ---------------------------------------------------------------- pick
def test_a_policy_gradient_with_pick_is_that_of_pytorch():
    torch = pytest.importorskip("torch")
    g = cv.CalcGraph()
    x, a, gain = g.placeholder("x", (None, 4)), g.placeholder("a", (None,)), g.placeholder("gain", (None,))
    w = g.parameter("w", (4, 3))
    with g.path("learn", backward=True) as learn:
        learn.minimize(-cv.mean(cv.pick(cv.log_softmax(x @ w), a) * gain), cv.SGD(1.0))
    model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=6, dtype="float64"))
    actions, gains = np.array([0, 2, 1, 1, 0, 2]), RNG.standard_normal(6)
    tw = torch.tensor(np.array(model["w"]), requires_grad=True)
    log_p = torch.log_softmax(torch.tensor(X) @ tw, -1)
    loss = -(log_p[range(6), actions] * torch.tensor(gains)).mean()
    loss.backward()
    assert model.step(X, actions, gains) == pytest.approx(loss.item(), rel=1e-12)
    np.testing.assert_allclose(model["w"], (tw - tw.grad).detach().numpy(), rtol=1e-12)
    with pytest.raises(cv.CalcError, match=r"labels must be integers in \[0, 3\)"):
        model.step(X, actions + 1, gains)


def test_what_pick_cannot_take_is_refused():
    g = cv.CalcGraph()
    x, a = g.placeholder("x", (None, 4)), g.placeholder("a", (None, 1))
    with g.path("p"), pytest.raises(cv.ShapeError, match=r"index \(B, 1\) is not of the shape of x \(B, 4\)"):
        cv.pick(x, a)


# ---------------------------------------------------------------- rates of parameters, schedules that are functions
OPTIMIZERS = {
    "sgd": (lambda **o: cv.SGD(0.1, **o), lambda torch, groups: torch.optim.SGD(groups)),
    "momentum": (
        lambda **o: cv.SGD(0.1, momentum=0.9, nesterov=True, **o),
        lambda torch, groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
    ),
    "adam": (lambda **o: cv.Adam(0.1, **o), lambda torch, groups: torch.optim.Adam(groups)),
    "adamw": (
        lambda **o: cv.AdamW(0.1, weight_decay=0.2, **o),
        lambda torch, groups: torch.optim.AdamW(groups, weight_decay=0.2),
    ),
    "rmsprop": (lambda **o: cv.RMSProp(0.1, **o), lambda torch, groups: torch.optim.RMSprop(groups)),
    "adagrad": (lambda **o: cv.Adagrad(0.1, **o), lambda torch, groups: torch.optim.Adagrad(groups)),
}
RATES = {"b": 0.25, "c.": 3.0, "c.w": 0.0}


def layers(optimizer, rates=None):
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 4))
    with g.path("learn", backward=True) as learn:
        y = cv.tanh(x @ g.parameter("a", (4, 5)) + g.parameter("b", (5,))) @ g.parameter("c.w", (5, 3))
        learn.minimize(cv.mean(cv.square(y + g.parameter("c.b", (3,)) - 1.0)), optimizer, rates=rates)
    return g


def test_settings_of_a_parameter_stay_where_it_is_renamed():
    g, same = layers(cv.AdamW(no_decay="c."), RATES), layers(cv.AdamW(no_decay="c."), RATES)
    g.variables["c.w"].rename("b.w")
    g.variables["b"].rename("c")
    learn = g.paths["learn"]
    assert learn.rates == {"c": 0.25, "b.w": 0.0, "c.b": 3.0} and learn.no_decay == ("b.w", "c.b")
    renamed, before = (cv.compile(graph, batch_size=6, workers=1).rows for graph in (g, same))
    np.testing.assert_array_equal(renamed, before)


def torch_step(torch, groups, w, clip):
    """PyTorch's step of the network of `layers`, whose parameters are ``w``."""
    groups.zero_grad()
    y = torch.tanh(torch.tensor(X) @ w["a"] + w["b"]) @ w["c.w"] + w["c.b"] - 1
    y.square().mean().backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(w.values(), clip)
    groups.step()


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("early", [False, True])
def test_rates_of_parameters_are_pytorchs_groups(name, accumulate, clip, early, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("calcvm.lowering.sections.LARGE_PARAMETER", 2 if early else 16384)
    ours, theirs = OPTIMIZERS[name]
    schedule = cv.Sampled(lambda k: 1.0 / (1 + k), 4, every=2, warmup_steps=2)
    g = layers(ours(clip_norm=clip, schedule=schedule), RATES)
    program = cv.compile(g, batch_size=6, dtype="float64", accumulate=accumulate, workers=2)
    model = cv.CalcHeap(program.heap_bytes).create(program, seed=0)
    w = {n: torch.tensor(np.array(v), requires_grad=True) for n, v in model.parameters.items()}
    factors = {"a": 1.0, "b": 0.25, "c.w": 0.0, "c.b": 3.0}
    groups = theirs(torch, [{"params": [w[n]], "lr": 0.1 * f} for n, f in factors.items()])
    for step in range(8):
        late = max(0, step - 2)
        scale = (min(step + 1, 2) / 2 if step < 2 else 1.0) * (1.0 / (1 + min(late // 2 * 2, 2)))
        for group, f in zip(groups.param_groups, factors.values()):
            group["lr"] = 0.1 * f * scale
        torch_step(torch, groups, w, clip)
        model.step(X)
        for n, value in model.parameters.items():
            np.testing.assert_allclose(value, w[n].detach().numpy(), rtol=1e-7, atol=1e-9, err_msg=f"{n}, step {step}")


DECAYING = {
    "sgd": (cv.SGD, {}, lambda torch, groups: torch.optim.SGD(groups)),
    "nesterov": (
        cv.SGD, {"momentum": 0.9, "nesterov": True}, lambda torch, groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True)
    ),
    "adam": (cv.Adam, {}, lambda torch, groups: torch.optim.Adam(groups)),
    "adamw": (cv.AdamW, {}, lambda torch, groups: torch.optim.AdamW(groups)),
    "rmsprop": (cv.RMSProp, {"momentum": 0.5}, lambda torch, groups: torch.optim.RMSprop(groups, momentum=0.5)),
    "adagrad": (cv.Adagrad, {}, lambda torch, groups: torch.optim.Adagrad(groups)),
}  # fmt: skip
SPARED = {
    "1d": {"b", "c.b"},
    ".b": {"c.b"},
    ("b",): {"b"},
    ("c.",): {"c.w", "c.b"},
    ("1d", "a"): {"a", "b", "c.b"},
}
CASES = [*itertools.product(DECAYING, SPARED, (None, 0.05), (None, RATES), (False, True), (False, True))]


def test_parameters_that_the_decay_spares_are_pytorchs_groups(whole, monkeypatch):
    """Of every optimizer, by every way to name them, with rates, clipping, in rounds, and updated inside the backward."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    chosen = CASES if whole else [CASES[i] for i in rng.choice(len(CASES), 40, replace=False)]
    for case in chosen:
        name, spared, clip, rates, accumulate, early = case
        monkeypatch.setattr("calcvm.lowering.sections.LARGE_PARAMETER", 2 if early else 16384)
        kind, options, theirs = DECAYING[name]
        g = layers(kind(0.1, weight_decay=0.3, no_decay=spared, clip_norm=clip, **options), rates)
        program = cv.compile(g, batch_size=6, dtype="float64", accumulate=accumulate, workers=2)
        model = cv.CalcHeap(program.heap_bytes).create(program, seed=0)
        w = {n: torch.tensor(np.array(v), requires_grad=True) for n, v in model.parameters.items()}
        factors = {"a": 1.0, "b": 0.25, "c.w": 0.0, "c.b": 3.0} if rates else dict.fromkeys(w, 1.0)
        decay = {n: 0.0 if n in SPARED[spared] else 0.3 for n in w}
        groups = theirs(torch, [{"params": [w[n]], "lr": 0.1 * factors[n], "weight_decay": decay[n]} for n in w])
        for step in range(6):
            if step == 3:  # it is a value of the heap, and holds from the next step on
                model.hyper("learn")["weight_decay"] = 0.05
                for n, group in zip(w, groups.param_groups):
                    group["weight_decay"] = min(decay[n], 0.05)
            torch_step(torch, groups, w, clip)
            model.step(X)
            for n, value in model.parameters.items():
                np.testing.assert_allclose(
                    value, w[n].detach().numpy(), rtol=1e-7, atol=1e-9, err_msg=f"{n}, step {step}, {case}"
                )


@pytest.mark.parametrize(
    ("spared", "why"),
    [(".x", "AdamW: no_decay: no trained parameter is called '.x'; there are a, b"), (["w"], "is called 'w'"),
     (3, "AdamW: no_decay: names of parameters such as"), ([None], 'or "1d", is wanted, not None'), (b"1d", "AdamW: no_decay")],
)  # fmt: skip
def test_parameters_that_cannot_be_spared_are_refused(spared, why):
    with pytest.raises(cv.CalcError, match=why):
        layers(cv.AdamW(0.1, no_decay=spared))


def test_who_spares_nothing_has_the_rows_of_before():
    """And who spares some has two more, and an update for all that decay and one for all others."""

    def rows(**options):
        program = cv.compile(layers(cv.AdamW(0.1, **options)), batch_size=6, accumulate=True)
        return Counter(program.spec(pc).name for pc in range(len(program.rows)))

    assert rows()["adamw"] == 1 and rows()["rate_scale"] == 0
    assert rows(no_decay="1d") - rows() == {"rate_scale": 1, "decay_scale": 1, "adamw": 1, "zero": 1}


def test_a_decay_of_nothing_cannot_be_set():
    every = cv.compile(layers(cv.AdamW(0.1, no_decay=["1d", "a", ".w"])), batch_size=6)
    model = cv.CalcHeap("1 MiB").create(every)
    with pytest.raises(cv.CalcError, match="weight_decay"):
        model.hyper("learn")["weight_decay"] = 0.1
    model.hyper("learn")["learning_rate"] = 0.1


def test_an_optimizer_without_a_decay_has_none_to_spare():
    class Plainest(cv.optim.Optimizer):
        pass

    with pytest.raises(cv.CalcError, match="Plainest has no weight_decay"):
        Plainest(0.1, no_decay="1d")


def test_a_rate_that_is_set_holds_for_all_by_their_factors():
    g = layers(cv.SGD(0.0), {"b": 2.0})
    model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=6, dtype="float64"))
    before = {n: np.array(v) for n, v in model.parameters.items()}
    model.step(X)
    for n, value in model.parameters.items():
        np.testing.assert_array_equal(value, before[n])
    model.hyper("learn")["learning_rate"] = 0.1
    model.step(X)
    np.testing.assert_allclose(before["b"] - model["b"], 0.2 * model.grad("b"), rtol=1e-9)
    np.testing.assert_allclose(before["a"] - model["a"], 0.1 * model.grad("a"), rtol=1e-9)


@pytest.mark.parametrize(
    ("rates", "why"),
    [({"d": 1}, "no trained parameter is called 'd'; there are a, b"), ({"c": 1}, "is called 'c'"),
     ({"a": -1}, "the rate's factor of 'a' must be a number >= 0"), ([0.1], "a mapping such as"), ({3: 1}, "is called 3")],
)  # fmt: skip
def test_rates_that_are_none_are_refused(rates, why):
    with pytest.raises(cv.CalcError, match=why):
        layers(cv.SGD(0.1), rates)


def test_a_model_of_layers_has_rates_too():
    net = nn.Linear(5) >> nn.Tanh() >> nn.Linear(3)
    model = cv.Model(net, input_shape=(4,), optimizer=cv.SGD(0.1), batch_size=6, rates={"linear_1.": 0.0})
    before = model.get_weights()
    model.step(X, np.zeros(6))
    after = model.get_weights()
    assert [n for n in before if (before[n] != after[n]).any()] == ["linear_2.weight", "linear_2.bias"]


def test_a_schedule_that_is_a_function_is_kept_in_files_and_told_apart():
    def halves(k):
        return 0.5**k

    a, b, c = (layers(cv.SGD(0.1, schedule=cv.Sampled(f, 5))) for f in (halves, halves, lambda k: 1.0))
    assert a.form == b.form != c.form
    program = cv.compile(a, batch_size=6)
    model = cv.CalcHeap("1 MiB").create(program)
    rates = []
    for _ in range(7):
        model.step(X)
        rates.append(model.hyper("learn")["lr_t"])
    assert rates == pytest.approx([0.1 * 0.5 ** min(k, 4) for k in range(7)], rel=1e-6)
    assert cv.compile(pickle.loads(pickle.dumps(a)), batch_size=6) == program


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: cv.Sampled(3, 10), "Sampled: a function of the step is wanted, not 3"),
        (lambda: cv.Sampled(lambda k: -1.0, 10), "Sampled: the factor of step 0 must be a number >= 0, not -1.0"),
        (lambda: cv.Sampled(lambda k: "a", 10), "the factor of step 0"),
        (lambda: cv.Sampled(lambda k: 1.0, 0), "Sampled: total_steps must be an integer"),
        (lambda: cv.Sampled(lambda k: 1.0, 10**9), "more than 10,000,000 numbers"),
        (lambda: cv.Sampled(lambda k: 1.0, 10, every=0), "Sampled: every must be an integer"),
        (lambda: cv.Adam(schedule=lambda k: 1.0), r"or cv.Sampled\(function, total_steps\)"),
    ],
)
def test_schedules_that_are_none_are_refused(make, why):
    with pytest.raises(cv.CalcError, match=why):
        make()
