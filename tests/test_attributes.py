"""An attribute that nothing reads is refused, with the one that may have been meant."""

import dataclasses

import pytest

import calcvm as cv
from calcvm import nn
from calcvm.errors import CalcError
from tests.test_layer_names import layers


def graph():
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, 4)), g.parameter("w", (4, 2))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mean(x @ w), "adam")
    return g


OBJECTS = {
    "Model": (lambda: cv.Model(nn.Linear(2), input_shape=(4,), loss="mse", optimizer="adam"), "note", "notes"),
    "CalcGraph": (graph, "path_", "path"),
    "Path": (lambda: graph().paths["learn"], "ouput", "output"),
    "Linear": (lambda: nn.Linear(2), "trainabel", "trainable"),
    "Dropout": (lambda: nn.Dropout(0.1), "rat", "rate"),
}


@pytest.mark.parametrize("of", OBJECTS)
def test_a_slip_of_the_pen_is_answered(of):
    make, slip, meant = OBJECTS[of]
    with pytest.raises((CalcError, AttributeError), match=f"a {of} has no '{slip}': did you mean {meant}\\?"):
        setattr(make(), slip, 1)


@pytest.mark.parametrize(("name", "layer", "shape"), [*layers()], ids=[name for name, *_ in layers()])
def test_no_layer_takes_what_it_has_not(name, layer, shape):
    with pytest.raises(CalcError, match=f"an? {name} has no 'nonsense'"):
        layer.nonsense = 1
    for field in dataclasses.fields(layer) if dataclasses.is_dataclass(layer) else ():
        setattr(layer, field.name, getattr(layer, field.name))


def test_classes_of_users_have_any_attribute():
    class Mine(cv.Model):
        pass

    class Own(nn.Layer):
        def build(self, x, scope, training):
            return x

    mine, own = Mine(nn.Linear(2), input_shape=(4,), loss="mse", optimizer="adam"), Own()
    mine.anything, own.anything = 1, 2
    assert (mine.anything, own.anything) == (1, 2)
    plain = OBJECTS["Model"][0]()
    plain.step = lambda x, y: 3.0  # what it has may be set
    assert plain.step(1, 2) == 3.0
