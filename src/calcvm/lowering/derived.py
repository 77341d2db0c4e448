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
    """Statements that compute a gradient, in order, from sources that have the names of variables.

    ones : gradients of the loss, and of what else a gradient is asked of, by themselves: 1.
    """

    statements: tuple[Statement, ...]
    gradient: Value
    ones: tuple[Value, ...]
    sources: dict[Value, Variable]


class Forward:
    """A path's forward.

    sources : what it reads and does not compute; results of other paths are among them.
    operations : those of the path, or others that do the same.
    """

    def __init__(self, path: Path, operations: list[Operation] | None = None):
        emit = self.emit = Emitter("float64", 1, False, path.graph.variables)
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
        """What is 1 where a gradient in the path begins."""
        return [facts["symbol"] for facts in self.lowering.facts.state if facts["kind"] == "fill"]


def derived(path: Path, parameter: Variable) -> Derived:
    """What `lower` emits for the gradient of a path's loss by a parameter, and for what that reads.

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
    """Those that a value depends on."""
    wanted, out = {target}, []
    for s in reversed(statements):
        if not wanted.isdisjoint(s.written_values):
            wanted.update(s.read_values)
            out.append(s)
    return out[::-1]
