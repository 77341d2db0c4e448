"""`Model.summary`."""

from __future__ import annotations

from calcvm.model.roles import Roles
from calcvm.ops.dims import show
from calcvm.tables import laid_out
from calcvm.vm.memory.resident import Resident


def summary(model: Resident, roles: Roles) -> str:
    """A table of a model's parameters, and lines about what trains it and what it takes."""
    program, loaded = model.program, model.loaded
    learn = loaded.training("learn")
    rows, total, trained = [["parameter", "shape", "elements", "trained"]], 0, 0
    for name in program.info["parameters"]:
        shape, trains = loaded.shape(name, 1), name in learn["gradients"]
        n = loaded.symbol(name).elems.b
        rows.append([name, str(shape), f"{n:,}", "yes" if trains else "no"])
        total, trained = total + n, trained + n * trains

    def shapes(names: tuple[str, ...]) -> str:
        return ", ".join(f"{name} {show(loaded.forms[name])}" for name in names)

    hyper = loaded.program.info["paths"]["learn"]
    return "\n".join(
        [
            f"model {model.name!r}: {shapes(roles.inputs)} -> {shapes(roles.outputs)}",
            *laid_out(rows),
            f"{total:,} parameters, of which {trained:,} are trained, {program.dtype}",
            f"loss {hyper['loss']!r}, optimizer {hyper['optimizer']}; judged by {', '.join(roles.figures.values()) or 'nothing'}",
            f"heap {program.heap_bytes:,} bytes for batches up to {program.batch_size:,}, "
            f"device {program.info.get('device', 'cpu')}, workers {model.workers}; {model.facts['rounds']:,} epochs done",
        ]
    )
