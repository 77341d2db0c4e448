"""The statements of one path, or of one gradient, as lowering derives them, before fusion and planning."""

from __future__ import annotations

from dataclasses import dataclass

from calcvm.graph import Operation, Path, Variable
from calcvm.lowering.autodiff import Backward
from calcvm.lowering.emit import Emitter
from calcvm.lowering.sections import Lowering
from calcvm.ops.gradient import GRADIENT
from calcvm.ops.statement import Statement, Value


@dataclass(frozen=True)
class Derived:
    """Statements that compute a gradient, in order, from sources named after variables.

    ones : values that hold 1: gradients of the loss, and of other differentiated variables, with respect to themselves.
    """

    statements: tuple[Statement, ...]
    gradient: Value
    ones: tuple[Value, ...]
    sources: dict[Value, Variable]


class Forward:
    """A path's forward.

    sources : variables that it reads and does not compute, including results of other paths.
    operations : the operators of the path, or equivalent ones.
    """

    def __init__(self, path: Path, operations: list[Operation] | None = None):
        emit = self.emit = Emitter("float64", 1, "cpu", path.graph.variables)
        lowering = self.lowering = Lowering(path.graph, emit, accumulate=False, keep=set())
        emit.path, emit.phase = path.name, "forward"
        self.sources = [v for v in path.graph.variables.values() if v.kind != "result"]
        for v in self.sources:
            lowering.source(v)
        for op in path.operations:
            for v in op.inputs.values():
                if v not in emit.env and v.kind == "result" and v.path is not path:
                    emit.variable(v, "activation")
                    self.sources.append(v)
        self.operations = lowering.operations(path)[0] if operations is None else operations
        for op in self.operations:
            if op.spec is GRADIENT:
                lowering.gradient(op, self.operations)
            else:
                emit.forward(op)

    @property
    def ones(self) -> list[Value]:
        """The values that hold 1, the seeds of gradients in the path."""
        return [facts["symbol"] for facts in self.lowering.facts.state if facts["kind"] == "fill"]


def derived(path: Path, parameter: Variable) -> Derived:
    """The statements that `lower` emits for the gradient of a path's loss by a parameter, with all their inputs.

    Results of other paths are sources.
    """
    assert path.loss is not None
    forward = Forward(path)
    emit, sources, operations = forward.emit, forward.sources, forward.operations
    emit.phase = "backward"
    seed = emit.value(f"{path.name}.seed", "state", 1)
    target = emit.tensor(f"d{parameter.name}", "gradient", parameter.shape, layout=parameter.layout)
    Backward(emit, operations, False, {parameter: target}).run(path.loss, seed)
    needed = tuple(_needed(emit.statements, target))
    return Derived(needed, target, (seed, *forward.ones), {emit.env[v]: v for v in sources})


def _needed(statements: list[Statement], target: Value) -> list[Statement]:
    """The statements that a value depends on."""
    wanted, out = {target}, []
    for s in reversed(statements):
        if not wanted.isdisjoint(s.written_values):
            wanted.update(s.read_values)
            out.append(s)
    return out[::-1]
