"""Attention and the layers of transformers, beside PyTorch; memory, teams, wrong input."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn

torch = pytest.importorskip("torch")
sdpa = torch.nn.functional.scaled_dot_product_attention

SIZES = [  # N, T, S, heads, kv_heads, size of a head
    (2, 1, 1, 1, 1, 1),
    (3, 5, 7, 4, 2, 3),
    (2, 31, 29, 2, 2, 16),
    (1, 53, 53, 3, 1, 17),
    (2, 24, 300, 2, 1, 8),
    (1, 290, 290, 1, 1, 5),
]
KINDS: dict[str, dict] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 9},
    "long window": {"causal": True, "window": 270},
    "capped": {"softcap": 1.7},
    "scaled": {"scale": 0.21, "causal": True},
    "bias": {"bias": 2},
    "bias of heads": {"bias": 3, "softcap": 2.5},
    "bias of samples": {"bias": 4, "causal": True},
    "lengths": {"lengths": True},
    "all": {"lengths": True, "bias": 4, "causal": True, "window": 4, "softcap": 3.0, "scale": 0.4},
}


def drawn(sizes, kind, packed=False, seed=0):
    """The inputs by name, and the settings."""
    N, T, S, H, G, D = sizes
    rng = np.random.default_rng(seed)
    S = T if packed else S
    x = {"q": rng.normal(size=(N, T, H * D)), "k": rng.normal(size=(N, S, G * D)), "v": rng.normal(size=(N, S, G * D))}
    how = {"heads": H, "kv_heads": G, **kind}
    if how.pop("lengths", False):
        x["lengths"] = rng.integers(0, S + 1, N)
        x["lengths"][:2] = [0, 1][:N]
    if rank := how.pop("bias", 0):
        x["bias"] = rng.normal(size=(N, H, T, S)[4 - rank :])
        x["bias"].reshape(-1, S)[0] = -np.inf  # a query that sees nothing
    return x, how


def ours(x, how, dtype="float64", workers=1, packed=False, device="cpu"):
    """The result and gradients of q, k and v, for a loss that weighs elements by their number."""
    g, names = cv.CalcGraph(), ("qkv",) if packed else ("q", "k", "v")
    values = {"qkv": np.concatenate([x[n] for n in "qkv"], 2)} if packed else {n: x[n] for n in "qkv"}
    given = [g.parameter(n, values[n].shape, init=values[n]) for n in names]
    lengths = g.constant("lengths", x["lengths"], "int64") if "lengths" in x else None
    with g.path("learn", backward=True) as learn:
        y = cv.attention(*given, lengths=lengths, bias=x.get("bias"), **how).rename("y")
        weight = g.constant(
            "weight", np.cos(np.arange(np.prod([n.b for n in y.shape]))).reshape([n.b for n in y.shape])
        )
        learn.minimize(cv.sum(y * weight), optimizer=cv.SGD(1.0), output=y)
    program = cv.compile(g, batch_size=1, dtype=dtype, workers=workers, device=device)
    model = cv.CalcHeap(program.heap_bytes, device=device).create(program)
    before = {n: np.array(model.parameters[n], np.float64) for n in names}
    model.forward("learn")
    y = np.array(model["y"])
    model.backward("learn")
    model.optimize("learn")
    gradients = [before[n] - model.parameters[n] for n in names]
    if packed:
        cuts = np.cumsum([x["q"].shape[2], x["k"].shape[2]])
        gradients = np.split(gradients[0], cuts, 2)
    return y, gradients


def theirs(x, how):
    """The same by PyTorch: sdpa where it has the setting, and the formula with its masks."""
    how = dict(how)
    H, G = how.pop("heads"), how.pop("kv_heads")
    q, k, v = (torch.tensor(x[n], requires_grad=True) for n in "qkv")
    (N, T, width), S = q.shape, k.shape[1]
    by_heads = [z.reshape(N, -1, n, width // H).transpose(1, 2) for z, n in ((q, H), (k, G), (v, G))]
    causal, window, cap, scale = (how.get(n) for n in ("causal", "window", "softcap", "scale"))
    plain = not (window or cap or "lengths" in x or "bias" in x)
    if plain:
        y = sdpa(*by_heads, is_causal=bool(causal), scale=scale, enable_gqa=True)
    else:
        queries, keys, values = by_heads
        keys, values = (z.repeat_interleave(H // G, 1) for z in (keys, values))
        z = queries @ keys.transpose(2, 3) * (scale or (width // H) ** -0.5)
        z = cap * torch.tanh(z / cap) if cap else z
        if "bias" in x:
            z = z + torch.tensor(x["bias"])
        i, j = torch.arange(T)[:, None], torch.arange(S)
        seen = (j <= i) & (i - j < (window or T)) if causal else torch.ones(T, S, dtype=torch.bool)
        if "lengths" in x:
            seen = seen & (j < torch.tensor(x["lengths"])[:, None, None, None])
        z = torch.where(seen, z, -torch.inf)
        p = torch.where(z.amax(-1, keepdim=True) > -torch.inf, z, 0.0).softmax(-1) * (z > -torch.inf)
        y = p @ values
    y = y.transpose(1, 2).reshape(N, T, width)
    (y * torch.cos(torch.arange(y.numel(), dtype=torch.float64)).reshape(y.shape)).sum().backward()
    return y.detach().numpy(), [z.grad.numpy() for z in (q, k, v)]


def close(got, want, tolerance):
    for a, b in zip((got[0], *got[1]), (want[0], *want[1])):
        assert np.abs(a - b).max() <= tolerance * max(1, np.abs(b).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_as_pytorch_computes_it(sizes, kind):
    x, how = drawn(sizes, KINDS[kind])
    want = theirs(x, how)
    close(ours(x, how), want, 1e-9)
    close(ours(x, how, "float32"), want, 1e-5 * sizes[2] ** 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_as_apart(kind):
    for sizes in ((3, 5, 5, 4, 2, 3), (2, 60, 60, 2, 2, 16)):
        x, how = drawn(sizes, KINDS[kind], packed=True)
        close(ours(x, how, packed=True), ours(x, how), 1e-12)


@pytest.mark.parametrize("kind", ["plain", "all"])
def test_by_another_blas(kind):
    pytest.importorskip("scipy")
    x, how = drawn((3, 50, 41, 4, 2, 8), KINDS[kind])
    close(ours(x, how, device="blas"), ours(x, how), 1e-12)


@pytest.mark.parametrize("kind", ["plain", "all"])
def test_any_team_gives_the_same_bits(kind):
    x, how = drawn((3, 50, 41, 4, 2, 8), KINDS[kind])
    one = ours(x, how, "float32")
    for workers in (2, 3):
        y, gradients = ours(x, how, "float32", workers)
        assert y.tobytes() == one[0].tobytes() and [d.tobytes() for d in gradients] == [d.tobytes() for d in one[1]]


def test_gradients_of_some_inputs_alone():
    x, how = drawn((2, 5, 7, 4, 2, 3), {"causal": True})
    want = ours(x, how)[1]
    for chosen in ("q", "k", "v", "kv"):
        g = cv.CalcGraph()
        given = [g.parameter(n, x[n].shape, init=x[n]) if n in chosen else g.constant(n, x[n]) for n in "qkv"]
        with g.path("learn", backward=True) as learn:
            y = cv.attention(*given, **how)
            weight = np.cos(np.arange(x["q"].size)).reshape(x["q"].shape)
            learn.minimize(cv.sum(y * weight), optimizer=cv.SGD(1.0), output=y)
        model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=1, dtype="float64"))
        for section in (model.forward, model.backward, model.optimize):
            section("learn")
        for n, d in zip("qkv", want):
            if n in chosen:
                np.testing.assert_allclose(x[n] - model.parameters[n], d, 1e-12, 1e-12)


# ---------------------------------------------------------------- lengths of samples, lengths of sequences
def look(T, **how):
    """A path over a batch of sequences and their lengths."""
    g = cv.CalcGraph()
    x, lengths = g.placeholder("x", (None, T, 12)), g.placeholder("lengths", (None,), "int64")
    with g.path("look") as path:
        path.output = cv.attention(x, heads=2, lengths=lengths, **how).rename("y")
    return cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=4, dtype="float64"))


def test_what_lies_behind_the_length_is_not_read():
    model, x = look(6), np.random.default_rng(1).normal(size=(4, 6, 12))
    for sample, n in enumerate((0, 1, 4, 6)):
        x[sample, n:, 4:] = np.nan
    model["x"], model["lengths"] = x, [0, 1, 4, 6]
    model.forward("look")
    assert np.isfinite(model["y"]).all() and (model["y"][0] == 0).all()
    np.testing.assert_allclose(model["y"][1], np.broadcast_to(x[1, 0, 8:], (6, 4)), 1e-14)


@pytest.mark.parametrize("wrong", [-1, 7, 2**40])
def test_a_length_beyond_the_keys_is_refused(wrong):
    model = look(6)
    with pytest.raises(cv.CalcError, match=r"'lengths': indexes and labels must be integers in \[0, 7\)"):
        model["lengths"] = [0, 6, wrong, 3]


@pytest.mark.parametrize("wrong", [-1, 3.5, 7, np.nan, np.inf])
def test_a_computed_length_beyond_the_keys_traps(wrong):
    g = cv.CalcGraph()
    x, lengths = g.placeholder("x", (None, 6, 12)), g.placeholder("lengths", (None,))
    with g.path("look") as path:
        path.output = cv.attention(x, heads=2, lengths=lengths * 1.0 + 0.0)
    model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=4, dtype="float64"))
    model["x"], model["lengths"] = np.zeros((4, 6, 12)), [0, 6, wrong, 3]
    with pytest.raises(cv.Trap, match="attention"):
        model.forward("look")


def test_a_sequence_of_any_length_in_one_program():
    """The steps are the batch's symbol, so one program takes them all."""
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 12))
    with g.path("look") as path:
        path.output = cv.attention(cv.reshape(x, (1, None, 12)), heads=2, causal=True).rename("y")
    model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=300, dtype="float64"))
    data = np.random.default_rng(2).normal(size=(300, 12))
    q, k, v = (torch.tensor(data[:, 4 * i : 4 * i + 4]).reshape(1, 300, 2, 2).transpose(1, 2) for i in range(3))
    want = sdpa(q, k, v, is_causal=True).transpose(1, 2).reshape(300, 4).numpy()
    for steps in (1, 7, 300):
        model["x"] = data[:steps]
        model.forward("look")
        np.testing.assert_allclose(model["y"][0, :steps], want[:steps], 1e-12)


def test_memory_is_linear_in_the_steps():
    def heap(steps):
        net = nn.TransformerEncoderLayer(4, dim_feedforward=32) >> nn.Flatten() >> nn.Linear(1)
        g = cv.build_graph(net, input_shape=(steps, 16), loss="mse", optimizer="adam")
        return cv.plan(g, batch_size=2).heap_bytes

    assert heap(512) <= 2.2 * heap(256)


# ---------------------------------------------------------------- layers
def loaded(model, module, prefix):
    """The module's parameters, turned where ours are, in a model."""
    names = {"norm1.weight": "norm1.scale", "norm2.weight": "norm2.scale", "norm3.weight": "norm3.scale"}
    names |= {name.replace("weight", "bias"): new.replace("scale", "shift") for name, new in names.items()}
    for name, value in module.named_parameters():
        value = value.detach().numpy()
        model.parameters[f"{prefix}.{names.get(name, name)}"][...] = value.T


def randomized(module):
    """With biases and norms that are not 0 and 1."""
    for p in module.parameters():
        with torch.no_grad():
            p.add_(0.1 * torch.randn_like(p))
    return module.double()


def stepped(net, shape, module, target, steps=5):
    """Losses of some steps on a model whose first layers are a torch module's, and the output before."""
    model = cv.Model(
        net, input_shape=shape[1:], loss="mse", optimizer=cv.SGD(0.05), batch_size=shape[0], dtype="float64"
    )
    for prefix, part in module.items():
        loaded(model, part, prefix)
    x = np.random.default_rng(3).normal(size=shape)
    before = model.predict(x)
    return before, [float(model.step(x, target)) for _ in range(steps)], model


def torch_steps(forward, module, shape, target, steps=5):
    x = torch.tensor(np.random.default_rng(3).normal(size=shape))
    optimizer = torch.optim.SGD([p for part in module.values() for p in part.parameters()], 0.05)
    before, losses = forward(x).detach().numpy(), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = ((forward(x) - torch.tensor(target)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return before, losses


def same_training(net, module, forward, shape):
    target = np.random.default_rng(4).normal(size=forward(torch.zeros(shape, dtype=torch.float64)).shape)
    before, losses, model = stepped(net, shape, module, target)
    want, theirs_ = torch_steps(forward, module, shape, target)
    np.testing.assert_allclose(before, want, 1e-9, 1e-9)
    np.testing.assert_allclose(losses, theirs_, 1e-9)
    for prefix, part in module.items():
        after = {name: np.array(value) for name, value in model.parameters.items()}
        loaded(model, part, prefix)
        for name, value in model.parameters.items():
            np.testing.assert_allclose(after[name], value, 1e-8, 1e-9, err_msg=name)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_multi_head_attention_as_in_pytorch(causal, bias):
    part = randomized(torch.nn.MultiheadAttention(12, 3, bias=bias, batch_first=True))
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    same_training(
        nn.MultiHeadAttention(3, causal=causal, bias=bias), {"multiheadattention_1": part},
        lambda x: part(x, x, x, attn_mask=mask, need_weights=False)[0], (2, 7, 12),
    )  # fmt: skip


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoders_train_as_in_pytorch(activation, norm_first):
    parts = [
        randomized(
            torch.nn.TransformerEncoderLayer(
                12, 2, 20, dropout=0.0, activation=activation, norm_first=norm_first, batch_first=True
            )
        )
        for _ in range(2)
    ]
    last = randomized(torch.nn.Linear(12, 3))
    layers = [
        nn.TransformerEncoderLayer(2, dim_feedforward=20, activation=activation, norm_first=norm_first)
        for _ in range(2)
    ]
    module = {f"transformerencoderlayer_{i}": part for i, part in enumerate(parts, 1)} | {"linear_1": last}
    same_training([*layers, nn.Linear(3)], module, lambda x: last(parts[1](parts[0](x))), (3, 6, 12))


class Decoded(nn.Layer):
    """The layer for decoders, on the first steps of a sequence, with the others as its memory."""

    def __init__(self, **how):
        self.inner = nn.TransformerDecoderLayer(2, dim_feedforward=20, **how)

    def build(self, x, scope, training):
        return self.inner.build(x[:, :4], f"{scope}.inner", training, memory=x[:, 4:])


@pytest.mark.parametrize("norm_first", [True, False])
def test_decoders_train_as_in_pytorch(norm_first):
    part = randomized(torch.nn.TransformerDecoderLayer(12, 2, 20, dropout=0.0, norm_first=norm_first, batch_first=True))
    mask = torch.nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    same_training(
        Decoded(norm_first=norm_first), {"decoded_1.inner": part},
        lambda x: part(x[:, :4], x[:, 4:], tgt_mask=mask, tgt_is_causal=True), (3, 9, 12),
    )  # fmt: skip


class Padded(nn.Layer):
    """An encoder's layer that sees the first steps of a sample: 1 and as many as begin with a positive number, at most all."""

    def __init__(self):
        self.inner = nn.TransformerEncoderLayer(2, dim_feedforward=20)

    def build(self, x, scope, training):
        lengths = cv.minimum(1.0 + cv.sum(cv.cast(x[:, :, 0] > 0, None), axis=1), 6.0)
        return self.inner.build(x, f"{scope}.inner", training, lengths=lengths)


def test_padding_as_in_pytorch():
    part = randomized(torch.nn.TransformerEncoderLayer(12, 2, 20, dropout=0.0, batch_first=True))

    def forward(x):
        mask = torch.arange(6) > (x[:, :, 0] > 0).sum(1)[:, None]
        return part(x, src_key_padding_mask=mask)

    same_training(Padded(), {"padded_1.inner": part}, forward, (3, 6, 12))


def test_fewer_heads_of_keys_and_rotary_positions():
    """Scores depend on distances alone: the same steps, later, give the same."""
    x = np.random.default_rng(0).normal(size=(1, 10, 16))
    g = cv.CalcGraph()
    data = g.constant("data", x)
    with g.path("look") as path:
        turned = cv.rotary(data, heads=2, base=100.0)
        path.output = turned.rename("turned")
    got = path.evaluate({})["turned"].reshape(10, 2, 2, 4)
    angles = np.outer(np.arange(10), 100.0 ** (-np.arange(4) / 4))[:, None]
    a, b = np.moveaxis(x.reshape(10, 2, 2, 4), 2, 0)
    np.testing.assert_allclose(got[:, :, 0], a * np.cos(angles) - b * np.sin(angles), 1e-12, 1e-14)
    np.testing.assert_allclose(got[:, :, 1], b * np.cos(angles) + a * np.sin(angles), 1e-12, 1e-14)
    net = nn.TransformerEncoderLayer(4, dim_feedforward=8, kv_heads=2, rotary=100.0, causal=True) >> nn.Linear(1)
    model = cv.Model(net, input_shape=(10, 16), loss="mse", optimizer="adam", batch_size=2)
    assert model.parameters["transformerencoderlayer_1.self_attn.in_proj_weight"].shape == (16, 32)
    losses = [float(model.step(np.repeat(x, 2, 0).astype("f4"), np.ones((2, 10, 1), "f4"))) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]


def test_positions_are_learned():
    model = cv.Model(
        nn.PositionalEmbedding(9, init="zeros"), input_shape=(5, 3), loss="mse", optimizer=cv.SGD(0.1), batch_size=2
    )
    x = np.random.default_rng(0).random((2, 5, 3)).astype("f4")
    np.testing.assert_array_equal(model.predict(x), x)
    model.step(x, np.zeros_like(x))
    w = model.parameters["positionalembedding_1.weight"]
    np.testing.assert_allclose(w[:5], -0.1 * 2 * x.sum(0) / x.size, 1e-5)
    assert (w[5:] == 0).all()


def test_dropout_is_of_training_alone():
    net = nn.TransformerEncoderLayer(2, dim_feedforward=8, dropout=0.5)
    model = cv.Model(net, input_shape=(5, 4), loss="mse", optimizer=cv.SGD(0.0), batch_size=2)
    x = np.random.default_rng(0).random((2, 5, 4)).astype("f4")
    assert net.random and np.array_equal(model.predict(x), model.predict(x))
    assert len({float(model.step(x, np.zeros_like(x))) for _ in range(4)}) == 4


# ---------------------------------------------------------------- wrong input
def in_graph(*shapes, **how):
    g = cv.CalcGraph()
    with g.path("look"):
        return cv.attention(*(g.placeholder(n, s) for n, s in zip("qkv", shapes)), **how)


APART = ((None, 5, 12), (None, 7, 12), (None, 7, 12))


@pytest.mark.parametrize(
    ("shapes", "how", "message"),
    [
        (APART[:2], {"heads": 2}, "k and v are given both"),
        (APART, {"heads": 5}, r"q \(B, 5, 12\) is not .*5 heads"),
        (((None, 12),), {"heads": 2}, "is not .samples, steps"),
        (((None, 5, 12),), {"heads": 3, "kv_heads": 2}, "no multiple of kv_heads, 2"),
        ((APART[0], APART[1], (None, 6, 12)), {"heads": 2}, r"v \(B, 6, 12\) are not both"),
        (APART, {"heads": 2, "kv_heads": 1}, r"are not both \(samples, keys, 6\)"),
        (APART, {"heads": 2, "window": 3}, "give causal=True too"),
        (APART, {"heads": 0}, "heads"),
        (APART, {"heads": 2, "scale": -1.0}, "scale"),
        (APART, {"heads": 2, "softcap": 0.0}, "softcap"),
        (APART, {"heads": 2, "bias": np.zeros((5, 6))}, r"bias \(5, 6\) is not \(5, 7\)"),
        (APART, {"heads": 2, "bias": np.zeros((3, 5, 7))}, "with 2 heads"),
        (APART, {"heads": 2, "bias": np.zeros((5, 7), bool)}, "cv.where"),
    ],
)
def test_wrong_inputs_say_what_to_do(shapes, how, message):
    with pytest.raises(cv.CalcError, match=message):
        in_graph(*shapes, **how)


def test_lengths_are_one_for_each_sample():
    g = cv.CalcGraph()
    with g.path("look"), pytest.raises(cv.ShapeError, match=r"lengths \(B, 1\) is not \(B,\)"):
        cv.attention(g.placeholder("x", (None, 5, 12)), heads=2, lengths=g.placeholder("n", (None, 1), "int64"))


def test_a_bias_is_not_trained():
    g = cv.CalcGraph()
    x, bias = g.placeholder("x", (None, 5, 12)), g.parameter("bias", (5, 5))
    with g.path("learn", backward=True) as learn:
        y = cv.attention(x, heads=2, bias=bias)
        learn.minimize(cv.sum(y), optimizer=cv.SGD(1.0), output=y)
    with pytest.raises(cv.UnsupportedOperator, match="no gradient for its input 'bias'"):
        cv.compile(g, batch_size=1)


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (lambda: nn.MultiHeadAttention(0), (5, 12), "num_heads"),
        (lambda: nn.MultiHeadAttention(4, kv_heads=3), (5, 12), "multiple of kv_heads, 3"),
        (lambda: nn.MultiHeadAttention(4, dropout=0.1), (5, 12), "nn.Dropout behind it"),
        (lambda: nn.MultiHeadAttention(4, window=3), (5, 12), "causal=True"),
        (lambda: nn.MultiHeadAttention(5), (5, 12), "multiple of 5 heads"),
        (lambda: nn.MultiHeadAttention(4), (12,), "takes sequences, .N, steps, features"),
        (lambda: nn.TransformerEncoderLayer(4, activation="rel"), (5, 12), "relu"),
        (lambda: nn.TransformerEncoderLayer(4, dropout=1.0), (5, 12), "dropout"),
        (lambda: nn.TransformerDecoderLayer(4), (5, 12), "memory"),
        (lambda: nn.PositionalEmbedding(4), (5, 12), "more than max_length=4"),
        (lambda: nn.MultiHeadAttention(4, rotary=100.0), (5, 12), "even size"),
    ],
)
def test_wrong_layers_say_what_to_do(layer, shape, message):
    with pytest.raises(cv.CalcError, match=message):
        cv.Model(layer(), input_shape=shape, loss="mse", optimizer=cv.SGD(0.1), batch_size=2)
