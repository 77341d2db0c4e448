"""Training against PyTorch: 20 steps with every optimizer, from the same start, on the same data."""

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.vm.memory.epoch import Epoch

OPTIMIZERS = {
    "sgd": (cv.SGD(0.05), lambda t, p: t.optim.SGD(p, lr=0.05)),
    "sgd decay": (cv.SGD(0.05, weight_decay=0.01), lambda t, p: t.optim.SGD(p, lr=0.05, weight_decay=0.01)),
    "momentum": (cv.SGD(0.05, momentum=0.9), lambda t, p: t.optim.SGD(p, lr=0.05, momentum=0.9)),
    "nesterov": (
        cv.SGD(0.05, momentum=0.9, nesterov=True),
        lambda t, p: t.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    ),
    "adam": (cv.Adam(0.01), lambda t, p: t.optim.Adam(p, lr=0.01)),
    "adamw": (cv.AdamW(0.01, weight_decay=0.05), lambda t, p: t.optim.AdamW(p, lr=0.01, weight_decay=0.05)),
    "rmsprop": (cv.RMSProp(0.01), lambda t, p: t.optim.RMSprop(p, lr=0.01)),
    "rmsprop momentum": (cv.RMSProp(0.005, momentum=0.9), lambda t, p: t.optim.RMSprop(p, lr=0.005, momentum=0.9)),
    "adagrad": (cv.Adagrad(0.05), lambda t, p: t.optim.Adagrad(p, lr=0.05)),
}
STEPS = 20


def network():
    return nn.Linear(17) >> nn.Tanh() >> nn.Linear(12) >> nn.Sigmoid() >> nn.Linear(5)


def data(n=23):
    rng = np.random.default_rng(3)
    return rng.standard_normal((n, 7)), rng.integers(0, 5, n)


def torch_network(torch, model, dtype):
    net = torch.nn.Sequential(
        torch.nn.Linear(7, 17), torch.nn.Tanh(), torch.nn.Linear(17, 12), torch.nn.Sigmoid(), torch.nn.Linear(12, 5)
    ).to(dtype)
    with torch.no_grad():
        for i, layer in enumerate([net[0], net[2], net[4]], 1):
            layer.weight.copy_(torch.tensor(model.parameters[f"linear_{i}.weight"].T.copy()))
            layer.bias.copy_(torch.tensor(model.parameters[f"linear_{i}.bias"].copy()))
    return net


def torch_losses(torch, net, optimizer, X, y, *, schedule=None, clip_value=None, clip_norm=None, penalty=None):
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(X), y)
        losses.append(loss.item())
        (loss + penalty(net) if penalty else loss).backward()
        if clip_value:
            torch.nn.utils.clip_grad_value_(net.parameters(), clip_value)
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        optimizer.step()
        if schedule:
            schedule.step()
    return np.array(losses)


def compare(torch, ours, theirs, dtype, **how):
    X, y = data()
    model = cv.Model(network(), input_shape=(7,), optimizer=ours, batch_size=23, seed=1, dtype=dtype)
    kind = getattr(torch, dtype)
    net = torch_network(torch, model, kind)
    optimizer, schedule = theirs(net)
    expected = torch_losses(
        torch, net, optimizer, torch.tensor(X, dtype=kind), torch.tensor(y), schedule=schedule, **how
    )
    got = np.array([model.step(X, y) for _ in range(STEPS)])
    rtol = {"float32": 1e-4, "float64": 1e-9}[dtype]
    np.testing.assert_allclose(got, expected, rtol=rtol)
    assert got[-1] < got[0]
    for i, layer in enumerate([net[0], net[2], net[4]], 1):
        ours_w, theirs_w = model.parameters[f"linear_{i}.weight"], layer.weight.detach().numpy().T
        np.testing.assert_allclose(ours_w, theirs_w, rtol=rtol, atol=rtol * np.abs(theirs_w).max())


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.mark.peers
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_agrees_with_pytorch(torch, name, dtype):
    ours, theirs = OPTIMIZERS[name]
    compare(torch, ours, lambda net: (theirs(torch, net.parameters()), None), dtype)


SCHEDULES = {
    "step": (cv.Step(5, 0.5), lambda t, o: t.optim.lr_scheduler.StepLR(o, 5, 0.5)),
    "exponential": (cv.Exponential(0.9), lambda t, o: t.optim.lr_scheduler.ExponentialLR(o, 0.9)),
    "cosine": (cv.Cosine(20), lambda t, o: t.optim.lr_scheduler.CosineAnnealingLR(o, 20)),
    "restarts": (
        cv.CosineRestarts(4, 2),
        lambda t, o: t.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2),
    ),
    "warm-up": (
        cv.Constant(warmup_steps=5),
        lambda t, o: t.optim.lr_scheduler.LambdaLR(o, lambda k: min(1, (k + 1) / 5)),
    ),
}


@pytest.mark.peers
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_agree_with_pytorch(torch, name):
    schedule, theirs = SCHEDULES[name]

    def optimizer(net):
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        return opt, theirs(torch, opt)

    compare(torch, cv.SGD(0.1, schedule=schedule), optimizer, "float64")


@pytest.mark.peers
@pytest.mark.parametrize("how", [{"clip_value": 0.01}, {"clip_norm": 0.05}], ids=["value", "norm"])
def test_clipping_agrees_with_pytorch(torch, how):
    compare(torch, cv.SGD(0.1, **how), lambda net: (torch.optim.SGD(net.parameters(), lr=0.1), None), "float64", **how)


@pytest.mark.peers
def test_regularizers_agree_with_pytorch(torch):
    def net():
        return nn.Linear(17, regularizer=cv.Elastic(1e-3, 1e-2)) >> nn.Tanh() >> nn.Linear(5, regularizer=cv.L2(0.1))

    X, y = data()
    model = cv.Model(net(), input_shape=(7,), optimizer=cv.SGD(0.1), batch_size=23, dtype="float64")
    w1, b1, w2, b2 = (torch.tensor(v.copy(), requires_grad=True) for v in model.parameters.values())
    opt = torch.optim.SGD([w1, b1, w2, b2], lr=0.1)
    for _ in range(STEPS):
        opt.zero_grad()
        out = torch.tanh(torch.tensor(X) @ w1 + b1) @ w2 + b2
        loss = torch.nn.functional.cross_entropy(out, torch.tensor(y))
        expected = loss.item()
        (loss + 1e-3 * w1.abs().sum() + 1e-2 * (w1**2).sum() + 0.1 * (w2**2).sum()).backward()
        opt.step()
        assert model.step(X, y) == pytest.approx(expected, rel=1e-9)


def test_rounds_add_up_to_the_learning_batch():
    """Ten technical batches of one learning batch give the step of the whole batch."""
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((105, 7)), rng.integers(0, 5, 105)
    whole = cv.Model(network(), input_shape=(7,), optimizer=cv.Adam(0.01), batch_size=105, seed=2, dtype="float64")
    parts = cv.Model(
        network(), input_shape=(7,), optimizer=cv.Adam(0.01), batch_size=10, learning_batch=105, seed=2, dtype="float64"
    )
    for m in (whole, parts):
        m.fit(X, y, epochs=5, shuffle=False, progress=False)
    for name, value in whole.parameters.items():
        np.testing.assert_allclose(parts.parameters[name], value, rtol=1e-9, atol=1e-12)
    assert parts.program.heap_bytes < whole.program.heap_bytes


def test_an_interrupted_learning_batch_leaves_nothing_behind():
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((105, 7)), rng.integers(0, 5, 105)
    models = [
        cv.Model(network(), input_shape=(7,), optimizer=cv.SGD(0.1), batch_size=10, learning_batch=105, seed=2)
        for _ in range(2)
    ]
    cut = Epoch(models[1], {"input": X, "target": y}, "learn", train=True, learning=105)
    cut.begin(None)
    rounds = cut.slices(0.0)
    next(rounds)
    assert any(models[1].grad(name).any() for name in models[1].parameters)
    rounds.close()  # as an exception in the loop's body does
    for model in models:
        model.fit(X, y, epochs=2, shuffle=False, progress=False)
        model.step(X[:10], y[:10])  # a step of its own weighs in full
    for name, value in models[0].parameters.items():
        np.testing.assert_array_equal(models[1].parameters[name], value)
    alone = cv.Model(network(), input_shape=(7,), optimizer=cv.SGD(0.1), batch_size=10, learning_batch=105, seed=2)
    for name, value in alone.parameters.items():
        value[...] = models[0].parameters[name]
    moved = [{k: v.copy() for k, v in m.parameters.items()} for m in (alone, models[0])]
    for m in (alone, models[0]):
        m.step(X[:10], y[:10])
    for name in moved[0]:
        np.testing.assert_array_equal(alone.parameters[name], models[0].parameters[name])
        assert (alone.parameters[name] != moved[0][name]).any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_same_seed_same_bits_for_any_team(dtype):
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((211, 7)).astype(dtype), rng.integers(0, 5, 211)
    net = nn.Linear(33) >> nn.ReLU() >> nn.Dropout(0.3) >> nn.Linear(12) >> nn.Tanh() >> nn.Linear(5)
    results = []
    for workers in (1, 2, 3, 2):
        model = cv.Model(net, input_shape=(7,), optimizer=cv.AdamW(0.01, clip_norm=1.0), batch_size=50, seed=7,
                         dtype=dtype, workers=workers)  # fmt: skip
        history = model.fit(X, y, epochs=3, validation=0.2, progress=False)
        results.append((history["loss"], history["val_loss"], {k: v.copy() for k, v in model.parameters.items()}))
    for losses, val_losses, parameters in results[1:]:
        assert (losses, val_losses) == results[0][:2]
        for name, value in parameters.items():
            np.testing.assert_array_equal(value, results[0][2][name])


def test_dropouts_of_one_graph_draw_differently():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 400))
    with g.path("run"):
        a, b = cv.dropout(x, 0.5), cv.dropout(x, 0.5)
    model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=5, keep=[a.name, b.name]))
    model["x"] = np.ones((5, 400))
    model.forward("run")
    first = model[a.name]
    share = np.mean((first > 0) == (model[b.name] > 0))
    assert 0.45 < share < 0.55 and 0.45 < np.mean(first > 0) < 0.55
    model.forward("run")
    assert 0.45 < np.mean((first > 0) == (model[a.name] > 0)) < 0.55  # another step, another mask


def test_dropout_on_both_sides_of_the_output_keeps_its_mask_in_the_backward():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 60))
    w = g.parameter("w", (60,), init=cv.init.Ones())
    with g.path("learn", backward=True) as learn:
        y = cv.dropout(x * w, 0.5)
        learn.minimize(cv.sum(cv.dropout(y, 0.5)), optimizer=cv.SGD(0.0), output=y)
    model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=1, dtype="float64"))
    model["x"] = np.ones((1, 60))
    model.forward("learn")
    model.backward("learn")
    dw = model.grad("w")
    assert set(dw) <= {0.0, 4.0} and dw.any()
    assert not dw[model["y"][0] == 0].any()  # what the first dropout zeroed has no gradient
    assert model[learn.loss.name] == dw.sum()


def test_frozen_parameters_do_not_move_and_prune_the_backward():
    net = nn.Linear(8, trainable=False) >> nn.Tanh() >> nn.Linear(3)
    model = cv.Model(net, input_shape=(4,), optimizer=cv.Adam(0.1), batch_size=16)
    full = cv.Model(nn.Linear(8) >> nn.Tanh() >> nn.Linear(3), input_shape=(4,), optimizer=cv.Adam(0.1), batch_size=16)
    before = model.parameters["linear_1.weight"].copy()
    rng = np.random.default_rng(0)
    model.step(rng.standard_normal((16, 4)), rng.integers(0, 3, 16))
    np.testing.assert_array_equal(model.parameters["linear_1.weight"], before)
    assert len(model.program.rows) < len(full.program.rows)
    with pytest.raises(cv.CalcError, match="linear_1.weight.*has no gradient"):
        model.grad("linear_1.weight")


def test_sums_of_squares_over_axes_that_are_no_neighbours():
    x = np.random.default_rng(3).normal(size=(3, 2, 5))
    g = cv.CalcGraph()
    p = g.parameter("p", x.shape, init=x)
    with g.path("learn", backward=True) as learn:
        y = cv.sum_squares(p, axis=(0, 2))  # squares the first block, and only adds the second up
        learn.minimize(cv.sum(y * np.array([1.0, 3.0])), optimizer=cv.SGD(1.0))
    model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=1, dtype="float64"))
    model.forward("learn")
    model.backward("learn")
    np.testing.assert_allclose(model.grad("p"), 2 * x * np.array([1.0, 3.0])[:, None])
