"""`from_torch`: a PyTorch module as a layer, by the graph that `torch.export` makes of it before it is decomposed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, MissingExtra, warn
from calcvm.frontends.layer import ImportedLayer

if TYPE_CHECKING:
    import torch

    from calcvm.frontends.imported import Shape


def from_torch(module: torch.nn.Module, *example: Any, batch_axes: Sequence[int | None] | None = None) -> TorchModule:
    """A PyTorch module as a layer of calcvm, with the module's weights and names.

    One layer serves training and inference: batch norm and dropout do what the path needs that they are built in.  Those that `eval()`
    was called of, in a module that trains, stay frozen, and so do parameters whose ``requires_grad`` is False.  All else is as in
    evaluation; a warning tells what the module does in training besides.

    Parameters
    ----------
    module : torch.nn.Module
        It stays as it is.  Models start from copies of the weights that it has now.
    example : tensors or arrays
        The module's inputs.  They fix all sizes but the batch; their numbers do not matter.
    batch_axes : sequence of int or None, optional
        The axis of the batch in each input, None where there is none.  Default: axis 0 of all that are as long there as the first.

    Returns
    -------
    TorchModule
        A layer: ``cv.Model(net, input_shape=(3, 224, 224), loss=..., optimizer=...)``, or part of a network, ``net >> nn.Linear(3)``.
        For several inputs or outputs `TorchModule.call` adds it to a graph.  ``model.state_dict()`` has the module's names.

    Raises
    ------
    MissingExtra : PyTorch is not installed (extra ``torch``).
    UnsupportedOperator : operators have no counterpart here; the message has all of them, and the modules that call them.
    CalcError : PyTorch cannot export the module: the message has its reason, and what to change.

    Examples
    --------
    >>> import torch
    >>> module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> net = cv.from_torch(module, torch.zeros(1, 4))
    >>> model = cv.Model(net, input_shape=(4,), loss="mse", optimizer=cv.Adam(1e-3))
    >>> x = np.ones((2, 4), "float32")
    >>> bool(np.allclose(model.predict(x), module(torch.from_numpy(x)).detach(), atol=1e-6))
    True
    >>> [*model.state_dict()]
    ['0.weight', '0.bias', '2.weight', '2.bias']
    """
    try:
        import torch
    except ImportError as error:
        raise MissingExtra("PyTorch", "torch", "from_torch") from error
    checks.one_of("from_torch", module, torch.nn.Module, "a torch.nn.Module")
    if not example:
        raise CalcError("from_torch: an example of the module's input is wanted, such as torch.zeros(2, 3, 224, 224)")
    inputs = [_tensor(f"from_torch: example {k}", x) for k, x in enumerate(example)]
    if batch_axes is None:
        axes = [0 if x.ndim and inputs[0].ndim and len(x) == len(inputs[0]) else None for x in inputs]
    else:
        axes = [*checks.items("from_torch: batch_axes", batch_axes, "an axis, or None, for each input")]
        if len(axes) != len(inputs):
            raise CalcError(f"from_torch: batch_axes has {len(axes)} axes for {len(inputs)} inputs")
        axes = [
            a if a is None else checks.integer("from_torch: batch_axes", a, 0, x.ndim - 1) for a, x in zip(axes, inputs)
        ]
    from calcvm.frontends.torch_graph import exported

    made = exported(module, inputs, axes)
    net = TorchModule(made)
    if made.left_out:
        warn(
            f"from_torch: {made.name} does in training what it does not in evaluation, and what is left out here: {made.left_out}"
        )
    return net


def _tensor(what: str, x: Any) -> torch.Tensor:
    import torch

    if isinstance(x, torch.Tensor):
        return x.detach()
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "biuf":
        raise CalcError(f"{what}: a tensor or an array of numbers is wanted, not {checks.called(x)}")
    return torch.from_numpy(x.astype(np.float32) if x.dtype == np.float64 else x.copy())


class TorchModule(ImportedLayer):
    """A layer made of a PyTorch module by `from_torch`.

    name : the module's class.
    inputs : of each input the shape, None for the batch, and the type if its data are no floats.
    outputs : the shapes of the outputs.

    Examples
    --------
    >>> import torch
    >>> net = cv.from_torch(torch.nn.Linear(4, 2), torch.zeros(1, 4))
    >>> net.name, net.inputs, net.outputs
    ('Linear', [((None, 4), None)], [(None, 2)])
    """

    of = "PyTorch"

    @property
    def inputs(self) -> list[tuple[Shape, str | None]]:
        return [(shape, dtype) for _, shape, dtype in self._imported.inputs]
