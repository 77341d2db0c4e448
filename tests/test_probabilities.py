"""A loss of scores that is given probabilities is warned of, once; whatever may be meant is not."""

import warnings

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.errors import CalcError, CalcWarning

WRONG = {
    "softmax": ("softmax_cross_entropy", nn.Linear(3) >> nn.Softmax(), (4,)),
    "softmax, flat": ("softmax_cross_entropy", nn.Linear(3) >> nn.Softmax() >> nn.Flatten(), (4,)),
    "softmax, function": ("softmax_cross_entropy", nn.Linear(3) >> nn.Function(cv.softmax), (4,)),
    "softmax, dropout": ("softmax_cross_entropy", nn.Linear(3) >> nn.Softmax() >> nn.Reshape(3), (4,)),
    "softmax of images": ("softmax_cross_entropy", nn.Conv2d(3, 1) >> nn.Softmax(axis=1), (2, 4, 4)),
    "sigmoid": ("binary_cross_entropy", nn.Linear(1) >> nn.Sigmoid(), (4,)),
    "sigmoid, function": ("binary_cross_entropy", nn.Linear(1) >> nn.Function(cv.sigmoid), (4,)),
    "softmax, binary": ("binary_cross_entropy", nn.Linear(2) >> nn.Softmax(), (4,)),
}
RIGHT = {
    "plain": ("softmax_cross_entropy", nn.Linear(3), (4,)),
    "hidden softmax": ("softmax_cross_entropy", nn.Linear(5) >> nn.Softmax() >> nn.Linear(3), (4,)),
    "scaled softmax": ("softmax_cross_entropy", nn.Linear(3) >> nn.Softmax() >> nn.Scale(20.0), (4,)),
    "residual": ("softmax_cross_entropy", nn.Linear(4) >> nn.Residual(nn.Softmax()), (4,)),
    "hidden sigmoid": ("binary_cross_entropy", nn.Linear(3) >> nn.Sigmoid() >> nn.Linear(1), (4,)),
    "log_softmax": ("softmax_cross_entropy", nn.Linear(3) >> nn.LogSoftmax(), (4,)),
    "mse": ("mse", nn.Linear(3) >> nn.Sigmoid(), (4,)),
    "mae": ("mae", nn.Linear(3) >> nn.Softmax(), (4,)),
}


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("of", WRONG)
def test_probabilities_in_a_loss_of_scores(of, weights):
    loss, net, shape = WRONG[of]
    with pytest.warns(CalcWarning, match=f"{loss} takes scores and applies (softmax|sigmoid) itself") as told:
        cv.Model(net, input_shape=shape, loss=loss, optimizer="adam", batch_size=4, sample_weight=weights)
    assert len(told) == 1 and told[0].filename == __file__


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("of", RIGHT)
def test_what_may_be_meant_is_not_warned_of(of, weights):
    loss, net, shape = RIGHT[of]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cv.Model(net, input_shape=shape, loss=loss, optimizer="adam", batch_size=4, sample_weight=weights)


@pytest.mark.parametrize(
    ("squashed", "loss"),
    [
        (lambda z: cv.softmax(z), cv.softmax_cross_entropy),
        (lambda z: cv.reshape(cv.softmax(z), (None, 3)), cv.softmax_cross_entropy),
        (lambda z: cv.sigmoid(z), cv.binary_cross_entropy),
    ],
)
def test_graphs_by_hand(squashed, loss):
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, 4)), g.parameter("w", (4, 3))
    t = g.placeholder("t", (None,) if loss is cv.softmax_cross_entropy else (None, 3))
    with pytest.warns(CalcWarning, match="are probabilities already") as told, g.path("learn", backward=True) as learn:
        y = squashed(x @ w)
        learn.minimize(0.5 * loss(y, t) + cv.mean(cv.square(w)), cv.SGD(0.1), output=y)
    assert len(told) == 1 and told[0].filename == __file__


def test_attention_by_hand_is_not_warned_of():
    g = cv.CalcGraph()
    x, t, w = g.placeholder("x", (None, 3)), g.placeholder("t", (None,)), g.parameter("w", (3, 3))
    with warnings.catch_warnings(), g.path("learn", backward=True) as learn:
        warnings.simplefilter("error")
        y = cv.softmax(x @ w) * x
        learn.minimize(cv.softmax_cross_entropy(y, t), cv.SGD(0.1), output=y)


@pytest.mark.parametrize("name", ["mean", "sum", "concatenate", "where", "max", "dot"])
def test_numpys_functions_say_what_to_take(name):
    def loss(y, t):
        function = getattr(np, name)
        return {
            "concatenate": lambda: function([y, t]),
            "where": lambda: function(y, t, t),
            "dot": lambda: function(y, t),
        }.get(name, lambda: function((y - t) * (y - t)))()

    with pytest.raises(CalcError, match=rf"np\.{name} takes arrays, and .* is a variable of a graph: use .*cv\.mean"):
        cv.Model(nn.Linear(2), input_shape=(4,), loss=loss, optimizer="adam")
    if name == "mean":
        with pytest.raises(CalcError, match=r"np\.mean takes arrays"):
            cv.Model(nn.Linear(2), input_shape=(4,), loss=np.mean, optimizer="adam")
