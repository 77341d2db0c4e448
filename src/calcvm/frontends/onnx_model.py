"""`load_onnx`: a file of ONNX as a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, BinaryIO

from calcvm.errors import CalcError, MissingExtra
from calcvm.frontends.layer import NamedLayer

if TYPE_CHECKING:
    import onnx


def load_onnx(
    source: str | PathLike[str] | bytes | BinaryIO | onnx.ModelProto,
    *,
    sizes: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
    batch_axes: Sequence[int | None] | Mapping[str, int | None] | None = None,
    trainable: bool | Sequence[str] = True,
) -> OnnxModel:
    """A file of ONNX as a layer of calcvm, with the file's weights and names.

    It predicts what ONNX's reference gives, and it trains: batch normalization and dropout then do what training needs, also in a file
    that was written for inference.  Those of frozen weights stay as they are.

    Parameters
    ----------
    source : path, bytes, an open binary file, or onnx.ModelProto
        Arrays in other files are read from the folder of the path alone.
    sizes : mapping, optional
        Sizes that the file leaves open, by their names, ``{"sequence": 128}``; or whole shapes of inputs, ``{"x": (None, 3, 224, 224)}``,
        None for the batch.
    values : mapping of str to array, optional
        Numbers of inputs that give shapes, axes, repeats or scales.
    batch_axes : sequence or mapping of int or None, optional
        The axis of the batch in each input, None where there is none.  Default: an open axis 0, and axes of the same name.
    trainable : bool or sequence of str
        Which weights train: all, none, or those of the names, ``"fc.weight"``; ``"fc."`` is all whose names begin so.

    Returns
    -------
    OnnxModel
        A layer.  ``cv.Model(net, loss=..., optimizer=...)`` trains it.  ``cv.Model(net)`` only predicts.  ``net >> nn.Linear(3)`` puts a
        layer behind it.  Names and arrays of ``model.state_dict()`` are the file's.

    Raises
    ------
    MissingExtra : onnx is not installed (extra ``onnx``).
    UnsupportedOperator : operators have no counterpart here, all of them with the names of their nodes; or a shape depends on data.
    CalcError : the file is damaged, or sizes are open that are not the batch's.

    Examples
    --------
    >>> from onnx import parser
    >>> text = '''<ir_version: 10, opset_import: ["" : 22]>
    ... net (float[N, 3] x) => (float[N, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}> {y = MatMul(x, w)}'''
    >>> net = cv.load_onnx(parser.parse_model(text))
    >>> net
    <net of ONNX: (B, 3) -> (B, 2)>
    >>> cv.Model(net).predict(np.ones((1, 3), "float32"))
    array([[ 9., 12.]], dtype=float32)
    """
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise MissingExtra("onnx", "onnx", "load_onnx") from error
    from calcvm.frontends.onnx_reader import imported

    try:
        network = imported(source, sizes or {}, values or {}, batch_axes, trainable)
    except CalcError:
        raise
    except Exception as error:  # whatever onnx makes of a damaged file
        raise CalcError(f"load_onnx: the file is damaged: {type(error).__name__}: {error}") from error
    return OnnxModel(network)


class OnnxModel(NamedLayer):
    """A layer made of a file of ONNX by `load_onnx`.

    name : the graph's.
    inputs : of each input, by name, the shape, None for the batch, and the type if its data are no floats.
    outputs : the shapes of the outputs, by name.

    Examples
    --------
    >>> from onnx import parser
    >>> text = '<ir_version: 10, opset_import: ["" : 22]> net (float[N, 3] x) => (float[N, 3] y) {y = Tanh(x)}'
    >>> net = cv.load_onnx(parser.parse_model(text))
    >>> net.name, net.inputs, net.outputs
    ('net', {'x': ((None, 3), None)}, {'y': (None, 3)})
    """

    of = "ONNX"
