"""Paths that learn in turn: an order of paths in one call has the bits of a loop over steps in Python."""

import signal
from collections import Counter

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.vm.memory.epoch import Epoch, shuffling_key
from calcvm.vm.memory.order import turns_of

RNG = np.random.default_rng(0)
ORDER = ("critic", "critic", "generator")
X, Z = RNG.standard_normal((45, 4)).astype("float32"), RNG.standard_normal((45, 3)).astype("float32")
DATA = {"real": X, "noise": Z}


def gan(drop: float = 0.3, size: int = 8) -> cv.CalcGraph:
    """The paths critic and generator, which train their own parameters, and draw."""
    critic = nn.Linear(size) >> nn.Tanh() >> nn.Dropout(drop) >> nn.Linear(1)
    generator = nn.Linear(size) >> nn.Tanh() >> nn.Linear(4)
    g = cv.CalcGraph()
    real, noise = g.placeholder("real", (None, 4)), g.placeholder("noise", (None, 3))
    with g.path("critic", backward=True) as path:
        fake = cv.stop_gradient(generator.build(noise, "generator.", training=True))
        of_real, of_drawn = (critic.build(x, "critic.", training=True) for x in (real, fake))
        loss = cv.mean(cv.softplus(-of_real)) + cv.mean(cv.softplus(of_drawn))
        path.minimize(loss, cv.Adam(1e-2), parameters=g.parameters("critic."))
    with g.path("generator", backward=True) as path:
        of_drawn = critic.build(generator.build(noise, "generator.", training=True), "critic.", training=True)
        path.minimize(
            cv.mean(cv.softplus(-of_drawn)), cv.SGD(1e-2, momentum=0.9), parameters=g.parameters("generator.")
        )
    with g.path("draw") as path:
        path.output = generator.build(noise, "generator.", training=False).rename("drawn")
    return g


def actor_critic() -> cv.CalcGraph:
    """Two paths that train, learn and value, both on what the path body computes; and predict."""
    g = cv.CalcGraph()
    state, action, returns = (
        g.placeholder("state", (None, 4)),
        g.placeholder("action", (None,)),
        g.placeholder("returns", (None, 1)),
    )
    with g.path("body") as body:
        body.output = hidden = nn.Tanh().build(nn.Linear(6).build(state, "body", False), "", False).rename("hidden")
    with g.path("value", backward=True) as value:
        value.minimize(cv.mse(nn.Linear(1).build(hidden, "value", True), returns), cv.SGD(0.1))
    with g.path("learn", backward=True) as learn:
        gain = cv.stop_gradient(returns - nn.Linear(1).build(hidden, "value", False))
        log_p = cv.pick(cv.log_softmax(nn.Linear(2).build(hidden, "actor", True)), action)
        learn.minimize(-cv.mean(cv.reshape(log_p, (None, 1)) * gain), cv.Adam(0.05), parameters=g.parameters("actor"))
    with g.path("predict") as predict:
        predict.output = cv.softmax(nn.Linear(2).build(hidden, "actor", False)).rename("chances")
        cv.mse(nn.Linear(1).build(hidden, "value", False), returns).rename("predict.loss")
    return g


PLAY = {
    "state": X, "action": RNG.integers(0, 2, 45), "returns": RNG.standard_normal((45, 1)).astype("float32")
}  # fmt: skip
KINDS = {"gan": (gan, DATA, ORDER), "agent": (actor_critic, PLAY, ("value", "learn", "value"))}


def alone(model):
    """A copy in a heap of its own."""
    return model.copy(heap=cv.CalcHeap(model.program.heap_bytes))


def same(a, b):
    """Whether all that lasts is equal; gradients are left over from the last step."""
    with a, b:
        return a.slot.get_image().tobytes() == b.slot.get_image().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_one_call_is_a_loop_over_steps(kind, workers, dtype):
    graph, data, order = KINDS[kind]
    one = cv.Model(graph(), batch_size=8, workers=workers, dtype=dtype, seed=1)
    many = alone(one)
    for n in (8, 5):
        for model in (one, many):
            for name, array in data.items():
                model[name] = array[:n]
        found = one.run_steps(7, order=order)
        for _ in range(7):
            wanted = {path: many.run_steps(1, path=path) for path in order}
        assert found == {path: wanted[path] for path in dict.fromkeys(order)} and same(one, many)
        assert one.steps_done == many.steps_done == (21 if n == 8 else 42)
        ran, arena = one.record.ran, one.record.arena
        assert ran == many.record.ran and arena == many.record.arena and one.record.graded == many.record.graded
    for path in set(order):
        names = [n for n, k in one.loaded.paths[path]["gradients"].items() if k is not None]
        assert names and all(np.array_equal(one.grad(n, path), many.grad(n, path)) for n in names)


def test_paths_with_batches_of_their_own():
    g = cv.CalcGraph()
    a, b, w = g.placeholder("a", (None, 3)), g.placeholder("b", (None, 3)), g.parameter("w", (3, 1))
    for name, x, y in (("first", a, 1.0), ("second", b, -1.0)):
        with g.path(name, backward=True) as path:
            path.minimize(cv.mean(cv.square(x @ w - y)), cv.SGD(0.1))
    one = cv.Model(g, batch_size=8)
    many = alone(one)
    for model in (one, many):
        model["a"], model["b"] = X[:3, :3], X[:8, :3]
    found = one.run_steps(3, order=["second", "first"])
    for _ in range(3):
        wanted = {path: many.run_steps(1, path=path) for path in ("second", "first")}
    assert found == wanted and same(one, many)


def test_every_turn_has_a_batch_of_its_own():
    assert turns_of(("a", "b"), 10, 4, 4) == tuple((path, k) for k in range(3) for path in "ab")
    assert " ".join(f"{path[0]}{k}" for path, k in turns_of(ORDER, 20, 4, 4)) == "c0 c1 g0 c2 c3 g1 c4 g2"
    assert " ".join(f"{path}{k}" for path, k in turns_of(("a", "b"), 7, 2, 4)) == "a0 a1 b0 b1 a2 a3 b2 b3"
    for n in (1, 3, 11, 64):
        seen = Counter(turns_of(("a", "b", "b", "a", "b"), n, 4, 8))
        assert max(seen.values()) == 1 and {("b", k) for k in range(-(-n // 4))} <= seen.keys() and ("a", 0) in seen


def looped(model, data, order, epochs, shuffle):
    """The losses of epochs by `Model.step`, and the samples that each path saw."""
    figures = []
    for _ in range(epochs):
        n, at = len(X), np.arange(len(X))
        if shuffle:  # the order of samples, read out by a model that learns nothing
            at = order_of(n, shuffling_key(model.seed, model.epochs_done))
        sums, seen = Counter(), Counter()
        for path, k in turns_of(order, n, model.batch_size, model.batch_size):
            part = at[k * model.batch_size : (k + 1) * model.batch_size]
            loss = model.step(*(data[name][part] for name in model.loaded.feeds(path)), path=path)
            sums[path] += np.float64(loss) * len(part)
            seen[path] += len(part)
        model.facts["epochs"] += 1
        figures.append({f"{path}.loss": sums[path] / seen[path] for path in dict.fromkeys(order)})
    return figures


def order_of(n, key):
    from calcvm.vm.run.entry import entry

    places = np.zeros(32 * -(-n // 32), np.int64)
    for first in range(0, n, 32):
        entry("permute")(places[first:].ctypes.data, first, n - 1, n, key)
    assert sorted(places[:n]) == [*range(n)]
    return places[:n]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_fit_is_a_loop_over_steps(kind, shuffle, workers):
    graph, data, order = KINDS[kind]
    one = cv.Model(graph(), batch_size=8, workers=workers, seed=1)
    many = alone(one)
    history = one.fit(data, order=order, epochs=3, shuffle=shuffle, progress=False)
    wanted = looped(many, data, order, 3, shuffle)
    assert same(one, many) and one.epochs_done == 3 and one.steps_done == many.steps_done
    for epoch, figures in zip(history, wanted):
        assert epoch.keys() == {*figures, "seconds"}
        assert all(epoch[name] == pytest.approx(value, rel=1e-6) for name, value in figures.items())


@pytest.mark.parametrize("workers", [1, 2])
def test_learning_batches_of_several_rounds(workers):
    one = cv.Model(gan(), batch_size=4, learning_batch=10, workers=workers, seed=2)
    many = alone(one)
    history = one.fit(DATA, order=ORDER, epochs=2, shuffle=False, progress=False)
    sums = Counter()
    for _ in range(2):
        sums.clear()
        for path, k in turns_of(ORDER, 45, 10, 10):
            loss = many.loaded.training(path)["loss"]
            data = {name: DATA[name] for name in many.loaded.feeds(path)}
            part = Epoch(many, data, path, samples=slice(10 * k, 10 * k + 10), train=True, learning=10, results=[loss])
            part.whole(1.0)
            sums[path] += part.mean(loss) * part.samples
    assert same(one, many) and not one.adding and one.steps_done == 2 * (5 + 3)
    assert history["critic.loss"][-1] == pytest.approx(sums["critic"] / 45)
    assert history["generator.loss"][-1] == pytest.approx(sums["generator"] / 30)


def test_path_learn_alone_is_the_fit_without_order():
    net = nn.Linear(8) >> nn.Tanh() >> nn.Dropout(0.2) >> nn.Linear(3)
    options = {"input_shape": (4,), "optimizer": "adam", "batch_size": 8, "learning_batch": 20, "sample_weight": True}
    one, y = cv.Model(net, **options), RNG.integers(0, 3, 45)
    many = alone(one)
    given = {"epochs": 3, "validation": 0.2, "sample_weight": RNG.uniform(0, 2, 45), "patience": 1, "progress": False}
    a, b = one.fit(X, y, order=["learn"], **given), many.fit(X, y, **given)
    assert same(one, many) and a["learn.loss"] == b["loss"] and a["val_loss"] == b["val_loss"]


def test_torch_learns_the_same():
    torch = pytest.importorskip("torch")
    model = cv.Model(gan(drop=0.0), batch_size=9, dtype="float64", seed=4)
    params = {n: torch.tensor(v, dtype=torch.float64, requires_grad=True) for n, v in model.get_weights().items()}
    history = model.fit(DATA, order=ORDER, epochs=2, shuffle=False, progress=False)

    def run(x, net):
        (w1, b1, w2, b2) = (p for n, p in params.items() if n.startswith(net))
        return torch.tanh(x @ w1 + b1) @ w2 + b2

    of = {net: [p for n, p in params.items() if n.startswith(net)] for net in ("critic.", "generator.")}
    optimizers = {
        "critic": torch.optim.Adam(of["critic."], 1e-2),
        "generator": torch.optim.SGD(of["generator."], 1e-2, 0.9),
    }
    x, z = torch.tensor(X, dtype=torch.float64), torch.tensor(Z, dtype=torch.float64)
    softplus, losses = torch.nn.functional.softplus, Counter()
    for epoch in range(2):
        for path, k in turns_of(ORDER, 45, 9, 9):
            part = slice(9 * k, 9 * k + 9)
            drawn = run(z[part], "generator.")
            if path == "critic":
                loss = softplus(-run(x[part], "critic.")).mean() + softplus(run(drawn.detach(), "critic.")).mean()
            else:
                loss = softplus(-run(drawn, "critic.")).mean()
            optimizers[path].zero_grad()
            loss.backward()
            optimizers[path].step()
            losses[epoch, path] += loss.item() / (5 if path == "critic" else 3)
    for name, value in model.get_weights().items():
        np.testing.assert_allclose(value, params[name].detach().numpy(), rtol=1e-9, atol=1e-12)
    assert history["critic.loss"] == pytest.approx([losses[e, "critic"] for e in (0, 1)])
    assert history["generator.loss"] == pytest.approx([losses[e, "generator"] for e in (0, 1)])


# ---------------------------------------------------------------- fleets, files, interrupts
@pytest.mark.parametrize("memory", ["1 MiB", "20 KiB"])
def test_fleets_have_the_bits_of_each_model_alone(memory):
    graph = gan()
    fleet = cv.Fleet(memory, workers=2)
    handles = [
        fleet.add(graph, data=DATA, order=ORDER, batch_size=8, seed=seed, hyper={"learning_rate": 0.02})
        for seed in range(50)
    ]
    results = fleet.fit(epochs=3, progress=False)
    assert [h.status for h in results] == 50 * ["done"] and (fleet.heap.stats.switches > 0) == (memory == "20 KiB")
    program = handles[0].model.program
    for seed in (0, 1, 17, 49):
        model = cv.CalcHeap(program.heap_bytes).create(program, seed=seed, workers=1)
        for path in ("critic", "generator"):
            model.hyper(path)["learning_rate"] = 0.02
        history = model.fit(DATA, order=ORDER, epochs=3, progress=False)
        assert same(model, handles[seed].model), seed
        assert handles[seed].losses_of["generator.loss"].tolist() == history["generator.loss"]
        assert handles[seed].losses.tolist() == history["critic.loss"] and handles[seed].model.steps_done == 27
        assert handles[seed].figures == {k: v[-1] for k, v in handles[seed].losses_of.items()}
    assert "generator.loss" in str(results) and results.best(1, by="critic.loss")


def test_fleets_of_learning_batches_go_on_in_files(tmp_path):
    data, order, new = PLAY, ("value", "learn"), {"batch_size": 4, "seed": 3}
    given = {"data": data, "order": order, "learning_batch": 9, "validation": slice(10)}
    with cv.Fleet("1 MiB", store=cv.FileStore(tmp_path)) as first:
        first.add(actor_critic(), name="a", **given, **new)
        first.fit(epochs=2, progress=False)
    fleet = cv.Fleet("1 MiB", store=cv.FileStore(tmp_path))
    handle = fleet.add("a", **given)
    fleet.fit(epochs=3, progress=False)
    assert handle.epochs_done == 5 and not handle.model.adding
    assert handle.figures.keys() == {"value.loss", "learn.loss", "val_loss"}
    model = cv.Model(actor_critic(), learning_batch=9, **new)
    history = model.fit(data, order=order, epochs=5, progress=False, validation=tuple_of(data, model))
    assert same(model, handle.model) and history["val_loss"][-1] == handle.val_loss


def tuple_of(data, model):
    """The first ten samples, as a model's X and y."""
    roles = model.roles
    part = [{n: data[n][:10] for n in names} for names in (roles.inputs, roles.labels)]
    return tuple(next(iter(of.values())) if len(of) == 1 else of for of in part)


def test_files_continue_the_order(tmp_path):
    model = cv.Model(gan(), batch_size=8, seed=1)
    model.fit(DATA, order=ORDER, epochs=2, progress=False)
    model.save(tmp_path / "m")
    other = cv.load(tmp_path / "m")
    for m in (model, other):
        m.fit(DATA, order=ORDER, epochs=2, progress=False)
    assert same(model, other) and other.epochs_done == 4


def test_interrupts_come_between_steps():
    model = cv.Model(gan(size=32), batch_size=8, workers=2, seed=1)
    many = alone(model)
    for m in (model, many):
        m["real"], m["noise"] = X[:8], Z[:8]
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.15)
    try:
        with pytest.raises(KeyboardInterrupt):
            model.run_steps(10**9, order=ORDER)
    finally:
        signal.signal(signal.SIGALRM, before)
    done = int(model.hyper("critic")["t"]), int(model.hyper("generator")["t"])
    assert sum(done) > 3 and done[0] - 2 <= 2 * done[1] <= done[0]
    steps = 0
    while steps < sum(done):
        many.run_steps(1, path=ORDER[steps % 3])
        steps += 1
    assert same(model, many)


def test_a_fit_that_is_interrupted_drops_what_it_added():
    class Stop(cv.Callback):
        every = 2

        def on_step(self, model, step, loss):
            image.append(model.copy(heap=cv.CalcHeap(model.program.heap_bytes)))
            return "enough" if step == 4 else None

    image = []
    model = cv.Model(gan(), batch_size=4, learning_batch=8, seed=2)
    history = model.fit(DATA, order=("critic", "generator"), epochs=1, callbacks=[Stop()], progress=False)
    assert history.stopped == "enough" and not model.adding and model.steps_done == 4
    assert not image[0].adding and [m.steps_done for m in image] == [2, 4] and same(image[1], model)


def test_a_loss_that_is_not_finite():
    far = {"real": X, "noise": np.full_like(Z, np.nan)}
    fleet = cv.Fleet("1 MiB")
    handle = fleet.add(gan(), data=far, order=ORDER, batch_size=8)
    fleet.fit(epochs=3, progress=False)
    assert handle.status == "not finite" and handle.epochs_done == 1
    model = cv.Model(gan(), batch_size=8)
    history = model.fit(far, order=("critic", "generator"), epochs=3, terminate_on_nan=True, progress=False)
    assert "critic.loss of epoch 1 is nan" in history.stopped


def test_the_best_state_by_a_path_s_loss():
    model = cv.Model(gan(), batch_size=8, seed=3)
    watch = cv.EarlyStopping(None, figure="generator.loss", keep_best=True)
    history = model.fit(DATA, order=ORDER, epochs=5, callbacks=[watch], progress=False)
    assert history.kept in (None, int(np.argmin(history["generator.loss"])))


# ---------------------------------------------------------------- models of such graphs
def test_models_of_graphs_with_several_paths_that_train(tmp_path):
    model = cv.Model(gan(), batch_size=8, seed=1)
    assert "paths critic, generator, draw" in repr(model)
    assert "Adam; loss" in model.summary() and "optimizer SGD" in model.summary()
    assert model.step(X[:8], Z[:8], path="critic") > 0 and model.step(Z[:8], path="generator") > 0
    with pytest.raises(
        cv.CalcError, match=r"give the order in which they learn, such as order=\('critic', 'generator'\)"
    ):
        model.fit(DATA, progress=False)
    for call in (model.predict, model.evaluate, lambda x: model.run({"noise": x})):
        with pytest.raises(cv.CalcError, match="no path 'predict'; there are critic, generator, draw"):
            call(Z)
    with pytest.raises(cv.CalcError, match="no path 'learn'"):
        model.to_python(tmp_path / "gan.py")
    model["noise"] = Z[:8]
    model.forward("draw")
    assert model["drawn"].shape == (8, 4)
    again = cv.Model(actor_critic(), batch_size=8)
    again.fit(PLAY, order=("value", "learn"), validation=0.2, keep_best=True, patience=2, epochs=3, progress=False)
    assert again.predict(X).shape == (45, 2)


def test_wrong_orders():
    model = cv.Model(gan(), batch_size=8)
    model["real"], model["noise"] = X[:8], Z[:8]
    image = model.image()
    for order, text in (
        ((), r"order: it is empty; the paths that train, in their order, such as \('critic', 'generator'\)"),
        (("critic", "generatr"), "order: no path 'generatr'"),
        (("critic", "draw"), "order: path 'draw' does not train"),
        ("critic", "order: the paths that train, .* is wanted, not"),
        (3, "is wanted, not"),
        ((None,), "no path None"),
    ):
        for call in (
            lambda order=order: model.run_steps(1, order=order),
            lambda order=order: model.fit(DATA, order=order),
        ):
            with pytest.raises(cv.CalcError, match=text):
                call()
        with pytest.raises(cv.CalcError, match=text):
            cv.Fleet("1 MiB").add(gan(), data=DATA, order=order, batch_size=8)
    with pytest.raises(cv.CalcError, match="leave path= out"):
        model.run_steps(1, "critic", order=ORDER)
    with pytest.raises(cv.CalcError, match="several paths that train: give the order"):
        cv.Fleet("1 MiB").add(gan(), data=DATA, batch_size=8)
    with pytest.raises(cv.CalcError, match="there is none for 'noise'"):
        model.fit({"real": X}, order=ORDER, progress=False)
    with pytest.raises(cv.CalcError, match=r"call step\(..., path=...\) for each"):
        model.fit(iter([(X, Z)]), order=ORDER, progress=False)
    with pytest.raises(cv.CalcError, match="keep_best watches one loss"):
        model.fit(DATA, order=ORDER, keep_best=True, progress=False)
    with pytest.raises(cv.ShapeError, match="path 'critic' reads batches of different sizes"):
        model["noise"] = Z[:5]
        model.run_steps(1, order=ORDER)
    assert model.image().tobytes() == image.tobytes() and model.steps_done == 0


def test_a_device_without_it(monkeypatch):
    model = cv.Model(gan(), batch_size=8)
    monkeypatch.setattr(model.loaded.device, "stops", False)
    with pytest.raises(cv.UnsupportedOperator, match=r"not on device 'cpu': call step\(..., path=...\)"):
        model.run_steps(1, order=ORDER)
