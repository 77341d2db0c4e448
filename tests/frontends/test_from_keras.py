"""Models of Keras as layers: each layer and networks beside Keras's own results, training, names, and what is refused."""

from __future__ import annotations

import os
import pickle
import warnings

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")
L = keras.layers
pytestmark = [  # what Keras and PyTorch say of one another
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def same_weights():
    keras.utils.set_random_seed(0)


def randomized(model, seed=0):
    """The model with other weights than those of its initializers, such as zeros."""
    rng = np.random.default_rng(seed)
    for w in model.weights:
        if str(w.dtype) == "float32":
            spread = np.abs if "variance" in w.path else np.asarray
            w.assign(spread(rng.normal(0.3 if len(w.shape) == 1 else 0, 0.4, w.shape)).astype("float32") + 0.01)
    return model


def array(w):
    return w.value.detach().numpy()


def functional(build, *shapes, dtype="float32"):
    inputs = [keras.Input(shape, dtype=dtype, name=f"in{k}") for k, shape in enumerate(shapes)]
    return randomized(keras.Model(inputs if len(inputs) > 1 else inputs[0], build(*inputs)))


def data(net, batch, seed=1):
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(0, 7, (batch, *shape[1:])) if dtype else rng.standard_normal((batch, *shape[1:]), np.float32)
        for name, (shape, dtype) in net.inputs.items()
    }


def keras_results(model, given, training=False):
    found = model([*given.values()] if len(given) > 1 else [*given.values()][0], training=training)
    return [np.asarray(y.detach()) for y in (found if isinstance(found, (list, tuple)) else [found])]


def compare(model, batches=(3, 1), within=1e-5, **how):
    """The layer of a model, whose results are Keras's."""
    net = cv.from_keras(model, **how)
    own = cv.Model(net, batch_size=max(batches))
    for batch in batches:
        given = data(net, batch)
        for got, want in zip(own.run(given).values(), keras_results(model, given), strict=True):
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=within, atol=within)
    return net


# ---------------------------------------------------------------- each layer
def layer(name, *shapes, **options):
    """A case: a layer of one input."""
    return name, options, shapes


IMAGE, IMAGES_1D, IMAGES_3D = (7, 6, 4), (9, 4), (5, 4, 6, 2)
CASES = [
    layer("Dense", (5,), units=3),
    layer("Dense", (4, 5), units=3, activation="gelu", use_bias=False),
    layer("Dense", (2, 3, 5), units=3, activation="softmax"),
    layer("EinsumDense", (4, 6), equation="abc,cde->abde", output_shape=(4, 2, 5), bias_axes="de", activation="relu"),
    layer("Activation", (5,), activation="tanh"),
    layer("Identity", (5,)),
    layer("ReLU", (5,)), layer("ReLU", (5,), max_value=6), layer("ReLU", (5,), negative_slope=0.1, max_value=0.7, threshold=0.2),
    layer("LeakyReLU", (5,), negative_slope=0.2), layer("ELU", (5,), alpha=0.7), layer("PReLU", (5,)),
    layer("PReLU", IMAGE, shared_axes=[1, 2]), layer("Softmax", (4, 5), axis=1), layer("Softmax", (4, 5)),
    layer("Conv1D", IMAGES_1D, filters=3, kernel_size=3),
    layer("Conv1D", IMAGES_1D, filters=3, kernel_size=3, padding="causal", dilation_rate=2, activation="relu"),
    layer("Conv1D", IMAGES_1D, filters=4, kernel_size=4, padding="same", strides=2, groups=2),
    layer("Conv2D", IMAGE, filters=3, kernel_size=3), layer("Conv2D", (8, 8, 1), filters=3, kernel_size=(3, 2)),
    layer("Conv2D", IMAGE, filters=3, kernel_size=(3, 2), padding="same", strides=(2, 1), use_bias=False),
    layer("Conv2D", IMAGE, filters=4, kernel_size=2, padding="same", groups=2, activation="silu"),
    layer("Conv2D", IMAGE, filters=3, kernel_size=2, padding="same", dilation_rate=(2, 3)),
    layer("Conv2D", (7, 1, 4), filters=3, kernel_size=(3, 1)), layer("Conv2D", (7, 6, 4), filters=1, kernel_size=3),
    layer("Conv3D", IMAGES_3D, filters=3, kernel_size=2, padding="same"),
    layer("Conv3D", IMAGES_3D, filters=3, kernel_size=(2, 1, 3), strides=2),
    layer("DepthwiseConv1D", IMAGES_1D, kernel_size=3), layer("DepthwiseConv2D", IMAGE, kernel_size=3, padding="same"),
    layer("DepthwiseConv2D", IMAGE, kernel_size=(2, 3), depth_multiplier=2, strides=2, activation="relu6"),
    layer("SeparableConv1D", IMAGES_1D, filters=5, kernel_size=3, padding="same"),
    layer("SeparableConv2D", IMAGE, filters=5, kernel_size=3, depth_multiplier=2, strides=2, activation="relu"),
    layer("Conv1DTranspose", IMAGES_1D, filters=3, kernel_size=3, strides=2, padding="same"),
    layer("Conv1DTranspose", IMAGES_1D, filters=3, kernel_size=2, strides=4),
    layer("Conv2DTranspose", IMAGE, filters=3, kernel_size=3), layer("Conv2DTranspose", IMAGE, filters=3, kernel_size=3, padding="same"),
    layer("Conv2DTranspose", IMAGE, filters=3, kernel_size=(4, 3), strides=2, padding="same", activation="relu"),
    layer("Conv2DTranspose", IMAGE, filters=3, kernel_size=2, strides=(3, 2), output_padding=1),
    layer("Conv2DTranspose", IMAGE, filters=3, kernel_size=2, strides=3, padding="same"),
    layer("Conv2DTranspose", IMAGE, filters=3, kernel_size=3, dilation_rate=2),
    layer("Conv3DTranspose", IMAGES_3D, filters=3, kernel_size=2, strides=2, padding="same"),
    layer("MaxPooling1D", IMAGES_1D), layer("MaxPooling2D", IMAGE, pool_size=3, strides=2, padding="same"), layer("MaxPooling2D", IMAGE),
    layer("MaxPooling3D", IMAGES_3D), layer("AveragePooling1D", IMAGES_1D, pool_size=3, padding="same"),
    layer("AveragePooling2D", IMAGE, pool_size=2), layer("AveragePooling2D", (7, 7, 4), pool_size=3, strides=2, padding="same"),
    layer("AveragePooling3D", IMAGES_3D, pool_size=(2, 2, 3)),
    layer("GlobalAveragePooling1D", IMAGES_1D), layer("GlobalAveragePooling2D", IMAGE), layer("GlobalAveragePooling3D", IMAGES_3D),
    layer("GlobalMaxPooling1D", IMAGES_1D), layer("GlobalMaxPooling2D", IMAGE, keepdims=True), layer("GlobalMaxPooling3D", IMAGES_3D),
    layer("AdaptiveAveragePooling2D", IMAGE, output_size=(3, 2)), layer("AdaptiveMaxPooling1D", IMAGES_1D, output_size=4),
    layer("BatchNormalization", (5,)), layer("BatchNormalization", IMAGE), layer("BatchNormalization", IMAGES_1D, axis=1),
    layer("BatchNormalization", IMAGE, scale=False), layer("BatchNormalization", IMAGE, axis=2, center=False, epsilon=0.1),
    layer("LayerNormalization", (5,)), layer("LayerNormalization", (4, 5), scale=False), layer("LayerNormalization", IMAGE, axis=[1, 2, 3]),
    layer("LayerNormalization", IMAGE, axis=[2, 3]), layer("RMSNormalization", (4, 5)), layer("UnitNormalization", (4, 5)),
    layer("GroupNormalization", IMAGE, groups=2), layer("GroupNormalization", IMAGE, groups=-1),
    layer("GroupNormalization", (8,), groups=2), layer("GroupNormalization", IMAGES_1D, groups=3, axis=1),
    layer("Dropout", (5,), rate=0.5), layer("SpatialDropout1D", IMAGES_1D, rate=0.5), layer("SpatialDropout2D", IMAGE, rate=0.5),
    layer("SpatialDropout3D", IMAGES_3D, rate=0.5),
    layer("Flatten", IMAGE), layer("Flatten", (5,)), layer("Reshape", IMAGE, target_shape=(4, -1, 7)), layer("Permute", IMAGE, dims=(3, 1, 2)),
    layer("RepeatVector", (5,), n=3), layer("ZeroPadding1D", IMAGES_1D, padding=(1, 2)), layer("ZeroPadding1D", IMAGES_1D, padding=2),
    layer("ZeroPadding2D", IMAGE, padding=((1, 2), (0, 3))), layer("ZeroPadding3D", IMAGES_3D, padding=(1, 2, 0)),
    layer("Cropping1D", IMAGES_1D, cropping=(1, 2)), layer("Cropping2D", IMAGE, cropping=((1, 2), (0, 3))), layer("Cropping3D", IMAGES_3D),
    layer("UpSampling1D", IMAGES_1D, size=3), layer("UpSampling2D", IMAGE, size=(2, 3)),
    layer("UpSampling2D", IMAGE, interpolation="bilinear"), layer("UpSampling3D", IMAGES_3D),
    layer("Rescaling", IMAGE, scale=1 / 255, offset=-1), layer("Rescaling", IMAGE, scale=[1.0, 2.0, 3.0, 4.0]),
    layer("Normalization", (3,), mean=[1.0, 2.0, 3.0], variance=[1.0, 4.0, 0.0]),
    layer("SimpleRNN", (6, 3), units=4), layer("SimpleRNN", (6, 3), units=4, activation="softsign", return_sequences=True),
    layer("SimpleRNN", (6, 3), units=4, activation=None, use_bias=False), layer("SimpleRNN", (6, 3), units=4, activation="relu"),
    layer("GRU", (6, 3), units=4), layer("GRU", (6, 3), units=4, return_sequences=True, go_backwards=True),
    layer("GRU", (6, 3), units=4, reset_after=False), layer("GRU", (6, 3), units=4, reset_after=False, use_bias=False, return_sequences=True),
    layer("GRU", (6, 3), units=4, recurrent_activation="hard_sigmoid"), layer("GRU", (6, 3), units=4, use_bias=False),
    layer("LSTM", (6, 3), units=4), layer("LSTM", (6, 3), units=4, return_sequences=True, go_backwards=True),
    layer("LSTM", (6, 3), units=4, activation="relu", recurrent_activation="hard_sigmoid"),
    layer("LSTM", (6, 3), units=4, return_state=True), layer("LSTM", (6, 3), units=4, use_bias=False, return_sequences=True, return_state=True),
]  # fmt: skip
FIRST = [
    layer("Conv2D", (4, 7, 6), filters=3, kernel_size=3, padding="same"), layer("Conv2DTranspose", (4, 7, 6), filters=3, kernel_size=3),
    layer("SeparableConv2D", (4, 7, 6), filters=3, kernel_size=3), layer("DepthwiseConv1D", (4, 9), kernel_size=3),
    layer("MaxPooling2D", (4, 7, 6)), layer("GlobalAveragePooling2D", (4, 7, 6)), layer("UpSampling2D", (4, 7, 6)),
    layer("ZeroPadding2D", (4, 7, 6)), layer("Cropping2D", (4, 7, 6)), layer("Flatten", (4, 7, 6)),
    layer("SpatialDropout2D", (4, 7, 6), rate=0.5), layer("AveragePooling1D", (4, 9), pool_size=2),
]  # fmt: skip


def named(case):
    return f"{case[0]}-{'-'.join(f'{k}={v}' for k, v in case[1].items())}"


@pytest.mark.parametrize("name, options, shapes", CASES, ids=map(named, CASES))
def test_layer(name, options, shapes):
    compare(functional(getattr(L, name)(**options), *shapes))


@pytest.mark.parametrize("name, options, shapes", FIRST, ids=map(named, FIRST))
def test_layer_with_channels_first(name, options, shapes):
    compare(functional(getattr(L, name)(data_format="channels_first", **options), *shapes))


@pytest.mark.parametrize(
    "activation",
    "celu elu exponential gelu glu hard_shrink hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu linear log_sigmoid log_softmax mish "
    "relu relu6 selu sigmoid silu soft_shrink softmax softplus softsign sparse_plus sparse_sigmoid squareplus swish tanh tanh_shrink".split(),
)
def test_activation(activation):
    compare(functional(L.Dense(4, activation=activation), (5,)), within=3e-5)


def test_activation_that_is_a_layer():
    compare(functional(L.Dense(4, activation=L.LeakyReLU(negative_slope=0.3)), (5,)))


def test_average_pooling_leaves_out_the_padding():
    """As with TensorFlow and JAX; with PyTorch, Keras repeats the edges where the padding differs before and behind."""
    x = np.arange(6, dtype=np.float32).reshape(1, 6, 1)
    model = functional(L.AveragePooling1D(3, 2, "same"), (6, 1))
    assert cv.Model(cv.from_keras(model), batch_size=1).predict(x).ravel().tolist() == [1, 3, 4.5]


MERGING = "Add Subtract Multiply Average Maximum Minimum Concatenate".split()


@pytest.mark.parametrize("name", MERGING)
def test_merging(name):
    shapes = [(5, 4, 3)] * (2 if name == "Subtract" else 3)
    compare(functional(lambda *x: getattr(L, name)()(x), *shapes))
    if name != "Concatenate":
        compare(functional(lambda *x: getattr(L, name)()(x), (5, 4, 3), (3,)))
    else:
        compare(functional(lambda *x: L.Concatenate(axis=1)(x), (5, 4), (2, 4)))


@pytest.mark.parametrize("shapes, axes", [(((5,), (5,)), 1), (((4, 5), (3, 5)), 2), (((4, 5), (4, 3)), 1), (((5,), (3, 5)), (1, 2)), (((3, 5), (5,)), (2, 1))])  # fmt: skip
@pytest.mark.parametrize("normalize", [False, True])
def test_dot(shapes, axes, normalize):
    compare(functional(lambda *x: L.Dot(axes, normalize=normalize)(x), *shapes))


def test_embedding():
    for dtype in ("float32", "int32"):
        net = compare(functional(L.Embedding(7, 3), (6,), dtype=dtype))
        assert net.inputs["in0"] == ((None, 6), "int64")
    compare(functional(lambda x: L.Embedding(7, 3)(x + 0), (6,), dtype="int32"))


@pytest.mark.parametrize("merge_mode", ["concat", "sum", "ave", "mul", None])
@pytest.mark.parametrize("sequences", [False, True])
def test_bidirectional(merge_mode, sequences):
    for kind in (L.LSTM, L.GRU):
        compare(functional(L.Bidirectional(kind(4, return_sequences=sequences), merge_mode=merge_mode), (6, 3)))
    compare(functional(L.Bidirectional(L.LSTM(4, return_sequences=sequences, return_state=True)), (6, 3)))


def test_states():
    compare(functional(lambda x, h: L.GRU(4)(x, initial_state=h), (6, 3), (4,)))
    compare(functional(lambda x, h, c: L.LSTM(4, return_sequences=True)(x, initial_state=[h, c]), (6, 3), (4,), (4,)))
    both = L.Bidirectional(L.LSTM(4))
    compare(functional(lambda x, *s: both(x, initial_state=[*s]), (6, 3), *[(4,)] * 4))
    compare(functional(L.RNN(L.LSTMCell(4), return_sequences=True), (6, 3)))
    compare(functional(L.RNN(L.GRUCell(4)), (6, 3)))


def test_time_distributed():
    compare(functional(L.TimeDistributed(L.Dense(4, activation="relu")), (6, 3)))
    compare(functional(L.TimeDistributed(L.Conv2D(3, 2)), (3, 5, 4, 2)))
    inner = keras.Sequential([keras.Input((5, 4, 2)), L.Conv2D(3, 2), L.Flatten(), L.Dense(2)])
    compare(functional(L.TimeDistributed(inner), (3, 5, 4, 2)))


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal):
    def own(x):
        return L.MultiHeadAttention(2, 3)(x, x, use_causal_mask=causal)

    compare(functional(own, (5, 6)))
    compare(functional(lambda x, y: L.MultiHeadAttention(2, 3, value_dim=4, output_shape=5)(x, y), (5, 6), (4, 7)))
    compare(functional(lambda x, y: L.MultiHeadAttention(2, 3, use_bias=False)(x, y, return_attention_scores=True), (5, 6), (4, 6)))  # fmt: skip
    compare(functional(lambda x: L.GroupQueryAttention(4, 4, 2)(x, x, use_causal_mask=causal), (5, 6)))
    compare(functional(lambda x, y: L.Attention()([x, y], use_causal_mask=causal), (4, 6), (4, 6)))
    visible = np.tril(np.ones((1, 5, 5), bool))
    compare(functional(lambda x: L.MultiHeadAttention(2, 3)(x, x, attention_mask=keras.ops.convert_to_tensor(visible)), (5, 6)))  # fmt: skip


def test_operations():
    ops = keras.ops

    def build(x, y):
        z = (1 - x) * y / 2 + ops.relu(x) ** 2 - abs(-y)
        z = ops.concatenate([z, ops.sqrt(ops.square(z) + 1)], axis=-1)
        z = ops.transpose(ops.reshape(z, (-1, 4, 2, 3)), (0, 2, 1, 3))
        z = ops.mean(z, axis=1) + ops.max(z, axis=[1], keepdims=False)
        return z[:, 1:, 0] + ops.squeeze(ops.expand_dims(z[:, 0], 1), 1), ops.stack([x, y], axis=1), ops.softmax(x)

    compare(functional(build, (4, 3), (4, 3)))


# ---------------------------------------------------------------- networks
def mlp():
    return keras.Sequential(
        [keras.Input((5,)), L.Dense(8, activation="relu"), L.Dense(8, activation="tanh"), L.Dense(3)]
    )


def cnn():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)), L.Conv2D(4, 3, padding="same"), L.BatchNormalization(), L.ReLU(), L.MaxPooling2D(),
            L.Conv2D(6, 3, activation="relu"), L.GlobalAveragePooling2D(), L.Dense(3),
        ]
    )  # fmt: skip


def residual():
    def block(x, filters, strides):
        y = L.Conv2D(filters, 3, strides, "same", use_bias=False)(x)
        y = L.Activation("relu")(L.BatchNormalization()(y))
        y = L.BatchNormalization()(L.Conv2D(filters, 3, padding="same", use_bias=False)(y))
        if strides > 1:
            x = L.BatchNormalization()(L.Conv2D(filters, 1, strides, use_bias=False)(x))
        return L.ReLU()(L.Add()([x, y]))

    x = keras.Input((8, 8, 3))
    y = block(block(L.Conv2D(4, 3, padding="same")(x), 4, 1), 6, 2)
    return keras.Model(x, L.Dense(3)(L.Flatten()(y)))


def lstm():
    return keras.Sequential(
        [keras.Input((6,)), L.Embedding(7, 4), L.LSTM(5, return_sequences=True), L.Bidirectional(L.GRU(4)), L.Dense(3)]
    )


def encoder():
    x = keras.Input((6, 8))
    y = L.LayerNormalization()(x + L.MultiHeadAttention(2, 4)(x, x))
    y = L.LayerNormalization()(y + L.Dense(8)(L.Dense(16, activation="gelu")(y)))
    return keras.Model(x, L.Dense(3)(L.GlobalAveragePooling1D()(y)))


def nested():
    """A layer and a model that are used twice."""
    inner = keras.Sequential([keras.Input((5,)), L.Dense(4, activation="relu"), L.Dense(4)], name="inner")
    x, y = keras.Input((5,)), keras.Input((5,))
    shared = L.Dense(5, activation="tanh")
    return keras.Model([x, y], L.Dense(3)(L.Subtract()([inner(shared(x)), inner(shared(shared(y)))])))


def autoencoder():
    return keras.Sequential(
        [
            keras.Input((8, 8, 2)), L.Conv2D(4, 3, 2, "same", activation="relu"), L.SeparableConv2D(6, 3, padding="same"),
            L.Conv2DTranspose(4, 3, 2, "same", activation="relu"), L.UpSampling2D(), L.AveragePooling2D(2), L.Conv2D(2, 3, padding="same"),
        ]
    )  # fmt: skip


NETWORKS = {f.__name__: f for f in (mlp, cnn, residual, lstm, encoder, nested, autoencoder)}


@pytest.mark.parametrize("name", NETWORKS)
def test_network(name):
    model = randomized(NETWORKS[name]())
    net = compare(model, within=1e-4)
    assert net.name == model.name
    own = cv.Model(pickle.loads(pickle.dumps(net)), batch_size=3)
    state = own.state_dict()
    assert {*state} == {w.path for w in model.weights if "seed" not in w.path}
    assert all(np.array_equal(state[w.path], array(w)) for w in model.weights)


@pytest.mark.parametrize("name", NETWORKS)
def test_training_is_that_of_keras(name):
    """The losses of five steps of gradient descent; the weights go back by their paths."""
    model = randomized(NETWORKS[name]())
    net, g = cv.from_keras(model), cv.CalcGraph()
    given = data(net, 4)
    (want,) = keras_results(model, given)
    target = np.random.default_rng(2).standard_normal(want.shape, np.float32)
    inputs = [g.placeholder(k, shape, dtype) for k, (shape, dtype) in net.inputs.items()]
    t = g.placeholder("t", (None, *target.shape[1:]))
    with g.path("learn", backward=True) as learn:
        (y,) = net.call(*inputs, training=True)
        learn.minimize(cv.mse(y, t), cv.SGD(0.05))
    with g.path("predict") as predict:
        predict.output = tuple(net.call(*inputs, training=False))
    own = cv.Model(g, batch_size=4)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    arrays = [*given.values()]
    losses = [
        float(np.ravel(model.train_on_batch(arrays if len(arrays) > 1 else arrays[0], target))[0]) for _ in range(5)
    ]
    found = [own.step(*arrays, target) for _ in range(5)]
    np.testing.assert_allclose(found, losses, rtol=2e-4)
    state = own.state_dict()
    for w in model.trainable_weights:
        np.testing.assert_allclose(state[w.path], array(w), rtol=1e-3, atol=1e-4)
    for w in model.weights:
        w.assign(state[w.path])


def test_training_of_a_classifier():
    """A model of probabilities, with a loss that takes scores."""
    model = keras.Sequential(
        [keras.Input((4,)), L.Dense(8, activation="relu"), L.Dropout(0.1), L.Dense(3, activation="softmax")]
    )
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 4)).astype("float32")
    y = x[:, :3].argmax(1)
    own = cv.Model(
        cv.from_keras(model, logits=True), loss="softmax_cross_entropy", optimizer=cv.Adam(0.02), batch_size=30, seed=0
    )
    own.fit(x, y, epochs=30, progress=False)
    assert own.evaluate(x, y)["accuracy"] > 0.9
    state = own.state_dict()
    for w in model.weights:
        w.assign(state[w.path])
    scores = own.predict(x)
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    np.testing.assert_allclose(model.predict(x, verbose=0), shares, atol=1e-5)


@pytest.mark.parametrize(
    "layer, axes",
    [
        (L.Dropout(0.5), ()),
        (L.Dropout(0.5, noise_shape=(None, 1, 5)), (1,)),
        (L.Dropout(0.5, noise_shape=(None, 4, 1)), (2,)),
        (L.Dropout(0.5, noise_shape=(None, 1, 1)), (1, 2)),
        (L.SpatialDropout1D(0.5), (1,)),
    ],
)
def test_what_is_dropped_together(layer, axes):
    net, g = cv.from_keras(functional(layer, (4, 5))), cv.CalcGraph()
    x = g.placeholder("x", (None, 4, 5))
    with g.path("learn", backward=True) as learn:
        (y,) = net.call(x * g.parameter("w", (5,), "ones"), training=True)
        learn.minimize(cv.mse(y, x), cv.SGD(0.1))
    with g.path("predict") as predict:
        (predict.output,) = net.call(x, training=True)
    values = cv.Model(g, batch_size=50, seed=0).predict(np.ones((50, 4, 5), np.float32))
    assert {*np.unique(values)} == {0, 2}
    for axis in (1, 2):
        assert (np.ptp(values, axis) == 0).all() == (axis in axes)


def test_scores_of_each_pixel():
    """The classes are the last axis, as in Keras."""
    model = randomized(keras.Sequential([keras.Input((6, 5, 2)), L.Conv2D(3, 3, padding="same")]))
    own = cv.Model(cv.from_keras(model), loss="softmax_cross_entropy", optimizer=cv.SGD(0.1), batch_size=4)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((4, 6, 5, 2), np.float32), rng.integers(0, 3, (4, 6, 5))
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    losses = [float(np.ravel(model.train_on_batch(x, y))[0]) for _ in range(3)]
    np.testing.assert_allclose([own.step(x, y) for _ in range(3)], losses, rtol=1e-4)


def test_weights_of_another_model():
    one, other = randomized(cnn()), randomized(cnn(), seed=5)
    own = cv.Model(cv.from_keras(one), batch_size=2)
    own.load_state_dict({w.path: array(v) for w, v in zip(one.weights, other.weights)})
    x = np.random.default_rng(0).standard_normal((2, 8, 8, 1), np.float32)
    np.testing.assert_allclose(own.predict(x), keras_results(other, {"x": x})[0], rtol=1e-5, atol=1e-5)


def test_inputs_and_outputs_by_name():
    x, y = keras.Input((3,), name="b"), keras.Input((3,), name="a")
    model = keras.Model({"b": x, "a": y}, {"sum": L.Add(name="s")([x, y]), "less": L.Subtract(name="d")([x, y])})
    own = cv.Model(cv.from_keras(model), batch_size=2)
    given = {"a": np.ones((2, 3), np.float32), "b": np.full((2, 3), 3, np.float32)}
    found, wanted = own.run(given), model(given)
    assert {*found} == {*wanted} and all((found[k] == wanted[k].detach().numpy()).all() for k in wanted)


def test_models_inside_take_mappings():
    x, y = keras.Input((3,), name="b"), keras.Input((3,), name="a")
    inner = keras.Model({"b": x, "a": y}, L.Subtract()([L.Dense(2)(x), L.Dense(2)(y)]))
    compare(functional(lambda x, y: inner({"a": x, "b": y}), (3,), (3,)))


def test_logits():
    x = keras.Input((3,))
    y = L.Dense(2, activation="softmax", name="y")(x)
    for outputs in (
        y,
        L.Softmax()(L.Dense(2)(x)),
        keras.ops.sigmoid(L.Dense(2)(x)),
        L.Activation("sigmoid")(L.Dense(2)(x)),
    ):
        model = randomized(keras.Model(x, outputs))
        scores = cv.Model(cv.from_keras(model, logits=True), batch_size=4).predict(np.ones((4, 3), np.float32))
        assert (abs(scores.sum(1) - 1) > 1e-3).all()
        shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        wanted = keras_results(model, {"x": np.ones((4, 3), np.float32)})[0]
        np.testing.assert_allclose(
            shares if abs(wanted.sum(1) - 1).max() < 1e-5 else 1 / (1 + np.exp(-scores)), wanted, atol=1e-5
        )
    compare(functional(L.SimpleRNN(3, activation="sigmoid"), (4, 3)), logits=True)
    for behind in (L.Flatten(), L.Dropout(0.3)):
        with pytest.raises(cv.CalcError, match="y is not the last layer"):
            cv.from_keras(keras.Model(x, behind(y)), logits=True)
    with pytest.raises(cv.CalcError, match="probabilities of y"):
        cv.from_keras(keras.Model(x, [y, L.Dense(2)(y)]), logits=True)


@pytest.mark.parametrize("training", [True, False])
def test_what_a_path_is_for_decides_and_not_the_call(training):
    """As with Keras's fit and predict."""
    x = keras.Input((5,))
    model = randomized(keras.Model(x, L.Dropout(0.5)(L.BatchNormalization()(x, training=training), training=training)))
    compare(model)
    net, g = cv.from_keras(model), cv.CalcGraph()
    x = g.placeholder("x", (None, 5))
    with g.path("learn", backward=True) as learn:
        (y,) = net.call(x, training=True)
        learn.minimize(cv.mse(y, x), cv.SGD(0.1))
    assert {"batch_norm", "dropout"} <= {op.spec.name for op in learn.operations}


@pytest.mark.parametrize("name", ["MobileNetV2", "EfficientNetB0", "DenseNet121", "ConvNeXtTiny"])
@pytest.mark.slow
def test_published_networks(name):
    model = getattr(keras.applications, name)(weights=None, input_shape=(32, 32, 3), classes=10)
    rng = np.random.default_rng(0)
    for w in model.weights:
        if "gamma" in w.path or "variance" in w.path:
            w.assign(rng.uniform(0.5, 2, w.shape))
    x = rng.uniform(0, 255, (2, 32, 32, 3)).astype("float32")
    found = cv.Model(cv.from_keras(model), batch_size=2).predict(x)
    np.testing.assert_allclose(found, keras_results(model, {"x": x})[0], rtol=1e-3, atol=1e-5)


def test_frozen_layers_stay():
    model = randomized(cnn())
    model.layers[0].trainable = model.layers[1].trainable = False
    own = cv.Model(
        cv.from_keras(model) >> nn.Linear(2), input_shape=(8, 8, 1), loss="mse", optimizer=cv.SGD(0.1), batch_size=4
    )
    before = own.state_dict()
    own.fit(np.ones((8, 8, 8, 1), np.float32), np.ones((8, 2), np.float32), epochs=2, progress=False)
    changed = {name for name, array in own.state_dict().items() if not np.array_equal(array, before[name])}
    left = {name for name in before if not any(part in name for part in ("batch_normalization", "conv2d/"))}
    stays = {w.path for layer in model.layers[:2] for w in layer.weights}
    assert changed == {name for name in before if name.partition(".")[2] not in stays} and left


def test_summary_has_a_line_for_each_layer():
    own = cv.Model(cv.from_keras(residual()), loss="mse", optimizer=cv.SGD(0.1), batch_size=2)
    told = str(own.summary())
    for name in ("conv2d", "batch_normalization", "dense", "add"):
        assert name in told


def test_open_sizes():
    model = randomized(keras.Sequential([keras.Input((None, 3)), L.LSTM(4), L.Dense(2)]))
    with pytest.raises(cv.CalcError, match="input_shape"):
        cv.from_keras(model)
    compare(model, input_shape=(6, 3))
    name = model.inputs[0].name
    compare(model, input_shape={name: (5, 3)})
    for wrong in ((6, 4), (6,), {"no": (6, 3)}, 6, "63", (0, 3), (6.5, 3), {name: None}, {1: (6, 3)}, object()):
        with pytest.raises(cv.CalcError):
            cv.from_keras(model, input_shape=wrong)


# ---------------------------------------------------------------- what is refused
class Own(L.Layer):
    def call(self, x):
        return x * 2


class Subclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = L.Dense(2)

    def call(self, x):
        return self.dense(x)


def test_layers_without_a_counterpart_are_all_named():
    model = functional(lambda x: L.ConvLSTM1D(2, 2, name="there")(Own(name="here")(x)), (3, 4, 5))
    with pytest.raises(cv.UnsupportedOperator, match=r"Own \(here\), ConvLSTM1D \(there\)"):
        cv.from_keras(model)


@pytest.mark.parametrize(
    "build, told",
    [
        (lambda x: L.Dense(2, activation=lambda y: y * 2)(x), "activation"),
        (lambda x: L.LSTM(2, stateful=True)(x), "stateful"),
        (lambda x: L.Embedding(5, 2, mask_zero=True)(x), "mask_zero"),
        (lambda x: L.Dropout(0.5, noise_shape=(1, 4, 3))(x), "noise_shape"),
        (lambda x: L.LSTM(2)(x, mask=keras.ops.ones((1, 4), bool)), "mask"),
        (lambda x: L.MultiHeadAttention(2, 3)(x, x, value_mask=keras.ops.ones((1, 4), bool)), "mask"),
    ],
)
@pytest.mark.filterwarnings("ignore:The object being serialized")
def test_uses_without_a_counterpart(build, told):
    x = keras.Input(batch_shape=(2, 4, 3))
    with pytest.raises(cv.UnsupportedOperator, match=told):
        cv.from_keras(keras.Model(x, build(x)))


def test_weights_without_a_counterpart():
    model = functional(L.Dense(2, name="dense"), (4,))
    model.layers[1].enable_lora(1)
    with pytest.raises(cv.UnsupportedOperator, match="Dense in dense: no counterpart of its lora_kernel"):
        cv.from_keras(model)


def test_models_without_a_graph():
    with pytest.raises(cv.UnsupportedOperator, match="Subclass has no graph"):
        cv.from_keras(Subclass())
    with pytest.raises(cv.UnsupportedOperator, match="build"):
        cv.from_keras(keras.Sequential([L.Dense(2)]))
    with pytest.raises(cv.CalcError, match=r"keras\.Model"):
        cv.from_keras(L.Dense(2))


def test_what_is_left_out_is_told():
    model = keras.Sequential(
        [keras.Input((4,)), L.GaussianNoise(0.1, name="noise"), L.Dense(2, kernel_regularizer="l2", name="dense")]
    )
    with pytest.warns(cv.CalcWarning, match="GaussianNoise of noise; regularizer of dense"):
        net = cv.from_keras(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert cv.Model(net, batch_size=2).predict(np.ones((2, 4), np.float32)).shape == (2, 2)


def test_einsum():
    x = keras.Input((3, 4))
    compare(keras.Model(x, keras.ops.einsum("bij,bkj->bik", x, x)))
