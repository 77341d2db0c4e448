"""The layer that is a network of another library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary

from calcvm import checks
from calcvm.errors import CalcError, ShapeError
from calcvm.frontends.imported import Built
from calcvm.graph import CalcGraph, Variable
from calcvm.nn.layers import Complete
from calcvm.ops.dims import shape_of, show

if TYPE_CHECKING:
    from calcvm.frontends.imported import Imported, Shape

# the scopes of layers that `call` has built
_scopes: WeakKeyDictionary[CalcGraph, WeakKeyDictionary[ImportedLayer, str]] = WeakKeyDictionary()


class ImportedLayer(Complete):
    """A layer made of a network of another library.

    name : the network's.
    """

    of: ClassVar[str]  # the library
    name: str
    takes: str | None  # type: ignore[misc]
    _imported: Imported

    def __init__(self, imported: Imported):
        self.name, self._imported = imported.name, imported
        self.takes = "int64" if imported.inputs[0][2] in ("int32", "int64") else None
        self.random = any(node.trains and "batch" not in node.name.lower() for node in imported.nodes)
        g = CalcGraph()  # in both forms, so that what has no counterpart is named now, and not when a model is made
        given = [g.placeholder(f"x{k}", shape, dtype) for k, (_, shape, dtype) in enumerate(imported.inputs)]
        for training in (True, False):
            with g.path("learn" if training else "predict", backward=training, adopt=False):
                made = self._built(given, f"{self.kind}_1", training)
        self._shapes = [v.shape for v in made]
        self._sizes: list[Shape] = [tuple(n.b if n.constant else None for n in shape) for shape in self._shapes]

    @property
    def outputs(self) -> list[Shape]:
        return self._sizes

    def __repr__(self) -> str:
        shapes = ([shape_of(shape) for _, shape, _ in self._imported.inputs], self._shapes)
        taken, given = (", ".join(map(show, several)) for several in shapes)
        return f"<{self.name} of {self.of}: {taken} -> {given}>"

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        outputs = self._built((x,), scope, training)
        if len(outputs) > 1:
            raise CalcError(
                f"{scope}: {self!r} has {len(outputs)} outputs: in a graph, net.call(x, training=...) gives a list of them"
            )
        return outputs[0]

    def call(self, *inputs: Variable, training: bool) -> list[Variable]:
        """Its outputs, for a graph of several inputs or outputs; a graph's paths share its parameters, such as
        ``torchmodule_1.<name>``.

        Parameters
        ----------
        inputs : Variable, of the shapes of the network's inputs, with any batch
        training : bool
            Whether batch norm takes the batch's statistics, and dropout drops.

        Examples
        --------
        >>> import torch
        >>> net = cv.from_torch(torch.nn.PairwiseDistance(), torch.zeros(1, 3), torch.zeros(1, 3))
        >>> g = cv.CalcGraph()
        >>> x, y = g.placeholder("x", (None, 3)), g.placeholder("y", (None, 3))
        >>> with g.path("predict") as predict:
        ...     (distance,) = net.call(x, y, training=False)
        >>> distance.shape
        (B,)
        """
        for x in inputs:
            checks.one_of(f"call of {self!r}", x, Variable, "a variable of a graph")
        if not inputs:
            raise CalcError(f"call of {self!r}: give {len(self._imported.inputs)} variables of a graph")
        scopes = _scopes.setdefault(inputs[0].graph, WeakKeyDictionary())
        scope = scopes.get(self) or f"{self.kind}_{len(scopes) + 1}"
        outputs = self._built(inputs, scope, checks.flag(f"call of {self!r}: training", training))
        scopes[self] = scope
        return outputs

    def graph(self) -> CalcGraph:
        """A graph of its inputs by name with one path, predict, whose outputs have their names there: ``cv.Model(net)`` is made of it."""
        g = CalcGraph()
        given = [g.placeholder(name, shape, dtype) for name, shape, dtype in self._imported.inputs]
        with g.path("predict", adopt=False) as predict:
            results = self.call(*given, training=False)
            predict.output = tuple([_named(g, v, name) for v, name in zip(results, self._imported.outputs)])
        return g

    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample, for ``cv.Model(net, loss=...)`` (CalcError: it has several inputs, or no batch)."""
        (name, shape, _), *others = self._imported.inputs
        if others:
            names = ", ".join(name for name, _, _ in self._imported.inputs)
            raise CalcError(
                f"{self!r} has the inputs {names}: build a graph, and net.call(..., training=True) in its path learn"
            )
        if shape[:1] != (None,):
            raise ShapeError(
                f"the input {name!r} of {self!r} has no batch as its first axis: load it with batch_axes=[0], or with sizes="
            )
        return shape[1:]  # type: ignore[return-value]

    def _built(self, inputs: Sequence[Variable], scope: str, training: bool) -> list[Variable]:
        wanted = self._imported.inputs
        if len(inputs) != len(wanted):
            raise CalcError(f"{scope}: {self!r} takes {len(wanted)} inputs, not {len(inputs)}")
        for x, (name, shape, _) in zip(inputs, wanted):
            if len(shape) != x.rank or any(n is not None and m != n for n, m in zip(shape, x.shape)):
                raise ShapeError(
                    f"{scope}: {x} has not the shape of the input {name!r}, {str(shape).replace('None', 'B')}"
                )
        with inputs[0].graph.whole(scope):
            return Built(self, self._imported, inputs, scope, training).results()


class NamedLayer(ImportedLayer):
    """A layer whose inputs and outputs have names there."""

    @property
    def inputs(self) -> dict[str, tuple[Shape, str | None]]:
        return {name: (shape, dtype) for name, shape, dtype in self._imported.inputs}

    @property
    def outputs(self) -> dict[str, Shape]:  # type: ignore[override]
        return dict(zip(self._imported.outputs, self._sizes))


def _named(g: CalcGraph, v: Variable, name: str) -> Variable:
    """A result by its name there; by another one, if that is an input's, or another result's."""
    known = g.variables.get(name, v)
    return v.rename(name if known is v or known.unnamed else g.unique(name))
