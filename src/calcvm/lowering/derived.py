"""The statements that one gradient is made of, as lowering derives them, before fusion and planning."""

from __future__ import annotations

from dataclasses import dataclass

from calcvm.graph import Path, Variable
from calcvm.lowering.autodiff import Backward
from calcvm.lowering.emit import Emitter
from calcvm.lowering.fuse import fuse_bias
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


def derived(path: Path, parameter: Variable) -> Derived:
    """What `lower` emits for the gradient of a path's loss by a parameter, and for what that reads.

    Results of other paths are sources.
    """
    assert path.loss is not None
    emit = Emitter("float64", 1, False, path.graph.variables)
    lowering = Lowering(path.graph, emit, accumulate=False, keep=set())
    emit.path, emit.phase = path.name, "forward"
    sources = [v for v in path.graph.variables.values() if v.kind != "result"]
    for v in sources:
        lowering.source(v)
    for op in path.operations:
        for v in op.inputs.values():
            if v not in emit.env and v.kind == "result" and v.path is not path:
                emit.variable(v, "activation")
                sources.append(v)
    operations = fuse_bias(path, lowering.kept)
    for op in operations:
        if op.spec is GRADIENT:
            lowering.gradient(op, operations)
        else:
            emit.forward(op)
    emit.phase = "backward"
    seed = emit.value(f"{path.name}.seed", "state", 1)
    target = emit.tensor(f"d{parameter.name}", "gradient", parameter.shape, layout=parameter.layout)
    Backward(emit, operations, False, {parameter: target}).run(path.loss, seed)
    asked = [facts["symbol"] for facts in lowering.facts.state if facts["kind"] == "fill"]
    return Derived(tuple(_needed(emit.statements, target)), target, (seed, *asked), {emit.env[v]: v for v in sources})


def _needed(statements: list[Statement], target: Value) -> list[Statement]:
    """Those that a value depends on."""
    wanted, out = {target}, []
    for s in reversed(statements):
        if not wanted.isdisjoint(s.written_values):
            wanted.update(s.read_values)
            out.append(s)
    return out[::-1]
