"""Gradients as variables of the graph, and the pictures of what a network looks at that are made of them."""

from __future__ import annotations

from calcvm import checks
from calcvm import functions as F
from calcvm.errors import CalcError, ShapeError
from calcvm.graph import LATER, Operation, Path, Variable, reached
from calcvm.ops.dims import numel
from calcvm.ops.gradient import GRADIENT
from calcvm.ops.types import FLOAT

__all__ = ["grad_cam", "gradient", "saliency"]


def gradient(y: Variable, x: Variable) -> Variable:
    """dy/dx, of the shape of x: a variable of the active path, which needs no ``backward=True`` for it.

    Parameters
    ----------
    y : variable of one element that the active path computes: of scores of samples that know nothing of each other, their
        sum, whose gradient is that of each sample's.
    x : any variable that y is computed from in this path: a placeholder, a parameter, a result.

    Raises
    ------
    ShapeError : y has more than one element.
    CalcError : y is of another path, no gradient of it comes to x, or a part of it comes through a result of another path,
        at which gradients stop.
    """
    for v in (y, x):
        checks.one_of("gradient", v, Variable, "a variable")
    graph, path = y.graph, y.graph.active
    if numel(y.shape) != 1:
        raise ShapeError(f"gradient: {y} must have one element: take the sum of what the gradients are wanted of")
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
            f"gradient: no gradient of {y.name!r} comes to {x.name!r}: in path {path.name!r} nothing leads from one to the "
            "other, or integers, conditions, and operators that have none"
            + "; the derivative of what is linear has no gradient: leave out the term that is made of it, which is 0"
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
    """A result of another path that operators have gradients through, and that itself depends on x; and that path."""

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
    """Inputs that an operator has a gradient of; of a gradient all that it is made of."""
    return [v for n, v in op.inputs.items() if op.spec is GRADIENT or (n in op.differentiable and v.type == FLOAT)]


def saliency(scores: Variable, classes: Variable, x: Variable) -> Variable:
    """How much each pixel changes the score of a class: the largest of its channels' ``abs(d score / dx)``, (N, *sizes).

    Parameters
    ----------
    scores : (N, classes), as they are before softmax, in the form for inference (``net.build(x, training=False)``).
    classes : (N,), of each image the class that is asked for.
    x : (N, channels, *sizes), the images that the scores are computed from in the active path.

    References
    ----------
    Simonyan, Vedaldi and Zisserman 2014, Deep inside convolutional networks.
    """
    return F.max(F.abs(_of_scores("saliency", scores, classes, x)), axes=1)


def grad_cam(scores: Variable, classes: Variable, maps: Variable) -> Variable:
    """Where what speaks for a class was seen: ``relu(sum_c mean(d score / d maps_c) * maps_c)``, (N, *sizes).

    Parameters
    ----------
    scores, classes : as of `saliency`.
    maps : (N, channels, *sizes), what a convolutional layer has made, mostly the last one.

    References
    ----------
    Selvaraju et al. 2017, Grad-CAM: visual explanations from deep networks via gradient-based localization.
    """
    d = _of_scores("grad_cam", scores, classes, maps)
    weights = F.mean(d, axes=tuple(range(2, d.rank)), keepdims=True)
    return F.relu(F.sum(weights * maps, axes=1))


def _of_scores(what: str, scores: Variable, classes: Variable, x: Variable) -> Variable:
    """Of each sample the gradient of its class's score with respect to x."""
    checks.one_of(what, x, Variable, "a variable")
    if x.rank < 3:
        raise ShapeError(f"{what}: {x} must be images, (N, channels, *sizes)")
    return gradient(F.sum(F.pick(scores, classes)), x)
