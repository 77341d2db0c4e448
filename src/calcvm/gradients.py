"""Gradients as variables of the graph, and attribution maps (saliency, Grad-CAM) built from them."""

from __future__ import annotations

from calcvm import checks
from calcvm import functions as F
from calcvm.errors import CalcError, ShapeError
from calcvm.graph import LATER, Operation, Path, Variable, reached
from calcvm.ops.dims import numel
from calcvm.ops.gradient import GRADIENT
from calcvm.ops.types import FLOAT, FLOATS

__all__ = ["grad_cam", "gradient", "saliency"]


def gradient(y: Variable, x: Variable) -> Variable:
    """dy/dx, in the shape of x, as a variable of the active path.  The path need not have ``backward=True``.

    Parameters
    ----------
    y : variable of one element, computed in the active path.  For the gradients of independent samples, take the sum of
        their scores.
    x : any variable that y is computed from in this path: a placeholder, a parameter, a result.

    Raises
    ------
    ShapeError : y has more than one element.
    CalcError : y belongs to another path, y has no gradient with respect to x, or a part of the gradient goes through a
        result of another path, at which gradients stop.

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x = g.placeholder("x", (None, 1))
    >>> with g.path("slope") as slope:
    ...     dx = cv.gradient(cv.sum(x * x * x), x)
    >>> slope.evaluate({"x": [[2.0]]})[dx.name]
    array([[12.]])
    """
    for v in (y, x):
        checks.one_of("gradient", v, Variable, "a variable")
    graph, path = y.graph, y.graph.active
    if numel(y.shape) != 1:
        raise ShapeError(f"gradient: {y} must have one element: take the sum of the elements")
    if y.path is not path:
        raise CalcError(f"gradient: {y.name!r} is not computed in path {path.name!r}")
    behind = reached(path.operations, y, exactly=True)
    again = any(op.spec is GRADIENT for op in behind)
    if again:
        LATER["write_out"](path, y)
        behind = reached(path.operations, y, exactly=True)
    between = {v for op in behind for n, v in op.inputs.items() if n in op.differentiable}
    if x not in between or x.type != FLOAT:
        raise CalcError(
            f"gradient: {y.name!r} has no gradient with respect to {x.name!r}: in path {path.name!r} nothing leads from one to the "
            "other, or only through integers, conditions and operators without a gradient"
            + "; the derivative of a linear term is constant and its gradient 0: leave out the terms built from it"
            * again
        )
    edge = _through_another(path, behind, x)
    if edge is not None:
        raise CalcError(
            f"gradient: a part of the gradient of {y.name!r} by {x.name!r} goes through {edge[0].name!r}, a result of path "
            f"{edge[1].name!r}, at which gradients stop: compute it in path {path.name!r} too, or put cv.stop_gradient "
            "around it to leave that part out"
        )
    name = graph.unique(f"d{x.name}")
    dx = graph._add(name, "result", x.shape, path=path, unnamed=True, layout=x.layout, settled=True)
    dx.producer = Operation(
        GRADIENT, {"y": y, "x": x}, {"dx": dx}, {"y": y.laid, "x": x.laid, "dx": dx.laid}, {}, {}, name
    )
    path.operations.append(dx.producer)
    return dx


def _through_another(path: Path, behind: list[Operation], x: Variable) -> tuple[Variable, Path] | None:
    """A result of another path that operators have gradients through and that depends on x, with its path."""

    def edges(of: Path, operations: list[Operation]) -> list[tuple[Variable, Path]]:
        read = dict.fromkeys(v for op in operations for v in _passing(op))
        return [(v, v.path) for v in read if v.path is not None and v.path is not of and v is not x]

    for edge in edges(path, behind):
        todo, seen = [edge], {edge}
        while todo:
            v, other = todo.pop()
            operations = reached(other.operations, v, exactly=True)
            if any(x in _passing(op) for op in operations):
                return edge
            todo += [more for more in edges(other, operations) if more not in seen]
            seen.update(todo)
    return None


def _passing(op: Operation) -> list[Variable]:
    """Inputs through which an operator passes gradients; for a gradient all its inputs."""
    return [v for n, v in op.inputs.items() if op.spec is GRADIENT or (n in op.differentiable and v.type in FLOATS)]


def saliency(scores: Variable, classes: Variable, x: Variable) -> Variable:
    """How much each pixel changes the score of a class: the maximum over channels of ``abs(d score / dx)``, (N, *sizes).

    Parameters
    ----------
    scores : (N, classes), before softmax, in the inference form (``net.build(x, training=False)``).
    classes : (N,), the class of interest for each image.
    x : (N, channels, *sizes), the images from which the active path computes the scores.

    References
    ----------
    Simonyan, Vedaldi and Zisserman 2014, Deep inside convolutional networks.

    Examples
    --------
    >>> net = nn.Conv2d(4, 3) >> nn.ReLU() >> nn.Flatten() >> nn.Linear(10)
    >>> g = cv.CalcGraph()
    >>> x, digit = g.placeholder("x", (None, 1, 8, 8)), g.placeholder("digit", (None,))
    >>> with g.path("seen"):
    ...     print(cv.saliency(net.build(x, training=False), digit, x))
    max (B, 8, 8)
    """
    return F.max(F.abs(_of_scores("saliency", scores, classes, x)), axis=1)


def grad_cam(scores: Variable, classes: Variable, maps: Variable) -> Variable:
    """Where the evidence for a class is: ``relu(sum_c mean(d score / d maps_c) * maps_c)``, (N, *sizes).

    Parameters
    ----------
    scores, classes : as in `saliency`.
    maps : (N, channels, *sizes), the result of a convolutional layer, usually the last one.

    References
    ----------
    Selvaraju et al. 2017, Grad-CAM: visual explanations from deep networks via gradient-based localization.

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x, digit = g.placeholder("x", (None, 1, 8, 8)), g.placeholder("digit", (None,))
    >>> with g.path("seen"):
    ...     maps = nn.Conv2d(4, 3).build(x, "conv", training=False)
    ...     scores = (nn.ReLU() >> nn.Flatten() >> nn.Linear(10)).build(maps, training=False)
    ...     print(cv.grad_cam(scores, digit, maps))
    relu_2 (B, 6, 6)
    """
    d = _of_scores("grad_cam", scores, classes, maps)
    weights = F.mean(d, axis=tuple(range(2, d.rank)), keepdims=True)
    return F.relu(F.sum(weights * maps, axis=1))


def _of_scores(what: str, scores: Variable, classes: Variable, x: Variable) -> Variable:
    """The gradient of each sample's class score with respect to x."""
    checks.one_of(what, x, Variable, "a variable")
    if x.rank < 3:
        raise ShapeError(f"{what}: {x} must be images, (N, channels, *sizes)")
    return gradient(F.sum(F.pick(scores, classes)), x)
