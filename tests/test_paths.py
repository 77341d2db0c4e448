"""Paths that learn in turn: an order of paths in one call has the bits of a loop over steps in Python."""

import copy
import importlib.util
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
    """A copy in another heap."""
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
        assert one.steps_done == many.steps_done == (21 if n == 8 else 45)
        assert one.run_steps(1, order=order) == many.run_steps(1, order=order)
        ran, arena = one.record.ran, one.record.arena
        assert ran == many.record.ran and arena == many.record.arena and one.record.graded == many.record.graded
    assert same(copy.deepcopy(one), many)
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


# ---------------------------------------------------------------- one optimizer for several paths
def buckets(lengths=(4, 8), optimizer=None, size=6, names=None, share=True, **options):
    """A path for each length of sequences, all training the same network, with one optimizer."""
    net = nn.Linear(size) >> nn.Tanh() >> nn.Linear(size) >> nn.Tanh() >> nn.Linear(1)
    g, first = cv.CalcGraph(), None
    for k, n in enumerate(lengths):
        name = names[k] if names else f"of_{n}"
        x, t = g.placeholder(f"x.{name}", (None, n, 2)), g.placeholder(f"t.{name}", (None, 1))
        with g.path(name, backward=True) as path:
            loss = cv.mse(cv.mean(net.build(x, "net.", training=True), axis=1), t)
            if first is None or not share:
                path.minimize(loss, optimizer or cv.Adam(1e-2), **options)
            else:
                path.minimize(loss, state_of=first)
        first = path  # of three paths, the third names the second
    return g


OPTIMIZERS = {
    "adam": {"optimizer": cv.AdamW(1e-2, weight_decay=0.1, no_decay="1d", schedule=cv.Cosine(20))},
    "clipped": {"optimizer": cv.Adam(1e-2, clip_norm=0.1), "rates": {"net.linear_1.": 0.5}},
    "momentum": {"optimizer": cv.SGD(1e-2, momentum=0.9, schedule=cv.Sampled(lambda k: 0.9**k, 30))},
    "large": {"optimizer": cv.Adagrad(1e-2), "size": 80},
    "several rounds": {"optimizer": cv.RMSProp(1e-3)},
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_paths_of_one_optimizer_that_alternate_are_one_path(kind, workers, dtype):
    accumulate = kind == "several rounds"
    made = [
        cv.compile(
            buckets(n * [4], names="abc"[:n], **OPTIMIZERS[kind]),
            batch_size=5,
            workers=3,
            dtype=dtype,
            accumulate=accumulate,
        )
        for n in (3, 1)
    ]
    three, one = (cv.CalcHeap(program.heap_bytes).create(program, seed=3, workers=workers) for program in made)
    x, t = RNG.standard_normal((9, 5, 4, 2)), RNG.standard_normal((9, 5, 1))
    for k, path in enumerate("abacbbcac"):
        assert three.step(x[k], t[k], path=path) == one.step(x[k], t[k], path="a"), k
    assert three.steps_done == one.steps_done == 9
    for path in "abc":
        assert dict(three.hyper(path)) == dict(one.hyper) and three.hyper(path)["lr_t"] == one.hyper["lr_t"]
    for name, value in one.parameters.items():
        assert value.tobytes() == three.parameters[name].tobytes(), name
    moments = [m.loaded.paths["a"]["moments"] for m in (three, one)]
    for name, states in moments[1].items():
        for state, symbol in states.items():
            of = [
                m.slot.cells(m.program.symbols[s]).tobytes()
                for m, s in ((three, moments[0][name][state]), (one, symbol))
            ]
            assert of[0] == of[1], (name, state)
    assert three.loaded.paths["c"]["moments"] == moments[0]
    three.hyper("b")["learning_rate"] = 0.5
    assert three.hyper("a")["learning_rate"] == three.hyper["learning_rate"] == 0.5


def test_torch_has_one_optimizer_for_two_lengths():
    torch = pytest.importorskip("torch")
    program = cv.compile(buckets(optimizer=cv.Adam(1e-2)), batch_size=5, dtype="float64")
    model = cv.CalcHeap(program.heap_bytes).create(program, seed=3)
    params = [torch.tensor(v, requires_grad=True) for v in model.get_weights().values()]
    optimizer = torch.optim.Adam(params, 1e-2)
    for k, n in enumerate((4, 8, 8, 4, 8, 4, 4)):
        x, t = RNG.standard_normal((5, n, 2)), RNG.standard_normal((5, 1))
        w1, b1, w2, b2, w3, b3 = params
        h = torch.tanh(torch.tanh(torch.tensor(x) @ w1 + b1) @ w2 + b2) @ w3 + b3
        loss = (h.mean(1) - torch.tensor(t)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert model.step(x, t, path=f"of_{n}") == pytest.approx(loss.item(), rel=1e-12), k
    for value, wanted in zip(model.get_weights().values(), params):
        np.testing.assert_allclose(value, wanted.detach().numpy(), rtol=1e-9, atol=1e-12)


def test_one_optimizer_given_to_two_paths_has_two_states():
    """`examples/gan.py` gives one object to two paths, which have two states."""
    program = cv.compile(buckets(share=False, optimizer=cv.Adam(1e-2)), batch_size=5)
    model = cv.CalcHeap(program.heap_bytes).create(program)
    model.step(X[:40].reshape(5, 8, -1)[:, :, :2], X[:5, :1], path="of_8")
    assert model.hyper("of_4")["t"] == 0 and model.hyper("of_8")["t"] == 1 and model.steps_done == 1
    shared = cv.compile(buckets(), batch_size=5)
    assert program.heap_bytes > shared.heap_bytes and program.hash != shared.hash


def sequences(n, dtype="float32"):
    return {
        f"{what}.of_{k}": RNG.standard_normal((n, k, 2) if what == "x" else (n, 1)).astype(dtype)
        for k in (4, 8) for what in "xt"
    }  # fmt: skip


def test_files_texts_and_fleets_keep_the_optimizer_shared(tmp_path):
    graph, data, order = buckets((4, 8)), sequences(12), ("of_4", "of_8", "of_8")
    again = cv.read_graph(graph.text())
    assert (
        "minimize(mse_2, state_of=of_4)" in graph.text() and again.text() == graph.text() and again.form == graph.form
    )
    program = cv.compile(graph, batch_size=5)
    assert cv.compile(again, batch_size=5) == program and buckets(share=False).form != graph.form
    model = cv.Model(graph, batch_size=5, seed=1)
    other = cv.Model(again, batch_size=5, seed=1)
    for k in range(3):
        history = model.fit(data, order=order, epochs=1, progress=False)
        other.fit(data, order=order, epochs=1, progress=False)
        other.save(tmp_path / "m")
        other = cv.load(tmp_path / "m")
        assert same(model, other) and model.steps_done == other.steps_done == (k + 1) * 5
    fleet = cv.Fleet(4 * program.heap_bytes, store=cv.FileStore(tmp_path / "store"), workers=2)
    handles = [fleet.add(graph, data=data, order=order, batch_size=5, seed=seed) for seed in (1, *range(2, 9))]
    fleet.fit(epochs=3, progress=False)
    assert same(handles[0].model, model) and handles[0].losses_of["of_8.loss"][-1] == history["of_8.loss"][-1]
    assert fleet.heap.stats.switches


def test_fleets_share_programs_of_other_rates_where_one_path_has_them():
    def both(rate):
        g = gan()
        g.paths["critic"].optimizer = cv.Adam(rate)
        return g

    fleet, data = cv.Fleet("1 MiB"), sequences(12)
    a, b = (fleet.add(both(rate), data=DATA, order=ORDER, batch_size=8) for rate in (0.1, 0.2))
    assert (a.model.hyper("critic")["learning_rate"], b.model.hyper("critic")["learning_rate"]) == (0.1, 0.2)
    assert a.model.hyper("generator")["learning_rate"] == b.model.hyper("generator")["learning_rate"] == 0.01

    def play(rate):
        g = actor_critic()
        g.paths["value"].optimizer = cv.SGD(rate)
        return g

    e, f = (fleet.add(play(rate), data=(X, PLAY["action"], PLAY["returns"]), batch_size=8) for rate in (0.1, 0.2))
    assert [h.model.hyper("value")["learning_rate"] for h in (e, f)] == [0.1, 0.2]
    assert [h.model.hyper["learning_rate"] for h in (e, f)] == [0.05, 0.05]
    c, d = (
        fleet.add(
            buckets(optimizer=cv.Adam(rate)), data=data, order=("of_8", "of_4"), batch_size=8, hyper={"beta1": 0.5}
        )
        for rate in (0.1, 0.2)
    )
    assert (c.model.hyper("of_4")["learning_rate"], d.model.hyper("of_8")["learning_rate"]) == (0.1, 0.2)
    assert c.model.hyper("of_4")["beta1"] == d.model.hyper("of_4")["beta1"] == 0.5


def test_split_models_and_scripts_of_one_optimizer(tmp_path):
    graph = buckets((4, 8), names=("learn", "long"), optimizer=cv.Adam(1e-2), size=16)
    with graph.path("predict") as predict:
        x = graph.variables["x.learn"]
        predict.output = (nn.Linear(16) >> nn.Tanh() >> nn.Linear(16) >> nn.Tanh() >> nn.Linear(1)).build(
            x, "net.", False
        )
    model = cv.Model(graph, batch_size=4, seed=2, workers=1)
    plan = cv.plan_devices(graph, [cv.Processor("a"), cv.Processor("b", workers=2)], batch_size=4)
    split = cv.SplitModel(plan, seed=2)
    model.to_python(tmp_path / "train.py")
    spec = importlib.util.spec_from_file_location("train", tmp_path / "train.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for path in ("learn", "long", "long", "learn", "long"):
        x, t = RNG.standard_normal((4, 8 if path == "long" else 4, 2)).astype("float32"), X[:4, :1]
        loss = model.step(x, t, path=path)
        assert split.step(x, t, path=path) == loss
        step = script.step if path == "learn" else script.long_step
        assert step(x, t) == pytest.approx(loss, rel=1e-5)
    assert all(np.array_equal(split.parameters[name], value) for name, value in model.parameters.items())


def test_wrong_states():
    g = buckets((4,))
    w, x = g.parameter("w", (2, 1)), g.variables["x.of_4"]
    first, foreign = g.paths["of_4"], buckets((4,)).paths["of_4"]
    with g.path("plain") as plain:
        cv.mean(x)
    with g.path("other", backward=True) as other:
        wrong, bare = cv.mean(cv.square(x @ w)), cv.mean(cv.square(x))
        right = cv.mean(
            cv.square((nn.Linear(6) >> nn.Tanh() >> nn.Linear(6) >> nn.Tanh() >> nn.Linear(1)).build(x, "net.", True))
        )
    for options, text in (
        ({}, "optimizer: one such as"),
        ({"state_of": "of_4"}, "state_of='of_4': a path of this graph is wanted"),
        ({"state_of": foreign}, "a path of this graph is wanted"),
        ({"state_of": plain}, "whose loss an optimizer minimizes already"),
        ({"state_of": other}, "whose loss an optimizer minimizes already"),
        ({"state_of": first, "optimizer": cv.Adam(1e-2)}, "optimizer is that of the path: leave it out"),
        ({"state_of": first, "rates": {"w": 2}}, "rates is that of the path"),
        ({"state_of": first, "parameters": ["w"]}, "parameters is that of the path"),
        ({"state_of": first}, "'net.linear_1.bias' is trained in one only"),
    ):
        with pytest.raises(cv.CalcError, match=text):
            other.minimize(wrong, **options)
    with pytest.raises(cv.CalcError, match="is trained in one only"):
        other.minimize(bare, state_of=first)
    other.minimize(right, state_of=first)
    assert other.state_of is first and other.optimizer is first.optimizer
    text = g.text()
    for there, instead, why in (
        ("state_of=of_4", "state_of=of_5", "the name of a path that a line above begins"),
        ("state_of=of_4", "state_of=3", "the name of a path that a line above begins"),
        ("state_of=of_4", "state_of=other", "whose loss an optimizer minimizes already"),
        ("state_of=of_4", "state_of=of_4, optimizer=Adam()", "leave it out"),
        ("state_of=of_4", "", "minimize needs an optimizer"),
    ):
        with pytest.raises(cv.CalcError, match=why):
            cv.read_graph(text.replace(there, instead))
