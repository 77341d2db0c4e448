"""`from_keras`: a model of Keras as a layer, by its graph of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from calcvm import checks
from calcvm.errors import MissingExtra, warn
from calcvm.frontends.layer import NamedLayer

if TYPE_CHECKING:
    import keras


def from_keras(
    model: keras.Model,
    *,
    input_shape: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    logits: bool = False,
) -> KerasModel:
    """A model of Keras 3 as a layer of calcvm, with the model's weights and names.

    One layer serves training and inference: batch normalization and dropout do what the path needs that they are built in.  Layers and
    weights whose ``trainable`` is False stay frozen.  A warning tells what the model does in training besides, which is left out.

    Parameters
    ----------
    model : keras.Model
        Sequential or functional, with models inside.  It stays as it is.  Models start from copies of the weights that it has now.
    input_shape : sequence of int, or mapping of input names to such, optional
        The shape of a sample, without the batch, if the model leaves sizes open.
    logits : bool
        Leave out the softmax or sigmoid of the outputs, for losses that take scores: ``loss="softmax_cross_entropy"``.

    Returns
    -------
    KerasModel
        A layer.  ``cv.Model(net, loss=..., optimizer=...)`` trains it.  ``cv.Model(net)`` only predicts.  ``net >> nn.Linear(3)`` puts a
        layer behind it.  Names and arrays of ``model.state_dict()`` are the paths of the weights and their values in Keras.

    Raises
    ------
    MissingExtra : Keras is not installed (extra ``keras``).
    UnsupportedOperator : layers have no counterpart here, all of them with their names; or the model has no graph of layers.
    CalcError : sizes are open that are not the batch's.

    Examples
    --------
    >>> import keras
    >>> dense = keras.layers.Dense(2, name="dense")
    >>> net = cv.from_keras(keras.Sequential([keras.Input((3,)), dense], name="net"))
    >>> net
    <net of Keras: (B, 3) -> (B, 2)>
    >>> cv.Model(net).predict(np.ones((1, 3), "float32")).shape
    (1, 2)
    """
    try:
        import keras
    except ImportError as error:
        raise MissingExtra("Keras", "keras", "from_keras") from error
    checks.one_of("from_keras", model, keras.Model, "a keras.Model")
    from calcvm.frontends.keras_graph import imported

    made = imported(model, input_shape, checks.flag("from_keras: logits", logits))
    net = KerasModel(made)
    if made.left_out:
        warn(f"from_keras: {made.name} does in training what is left out here: {made.left_out}")
    return net


class KerasModel(NamedLayer):
    """A layer made of a model of Keras by `from_keras`.

    name : the model's.
    inputs : of each input, by name, the shape, None for the batch, and the type if its data are no floats.
    outputs : the shapes of the outputs, by name.

    Examples
    --------
    >>> import keras
    >>> x = keras.Input((3,), name="x")
    >>> net = cv.from_keras(keras.Model(x, keras.layers.ReLU(name="y")(x), name="net"))
    >>> net.name, net.inputs, net.outputs
    ('net', {'x': ((None, 3), None)}, {'y': (None, 3)})
    """

    of = "Keras"
