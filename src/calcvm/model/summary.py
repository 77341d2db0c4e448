"""`Model.summary`."""

from __future__ import annotations

from calcvm.model.roles import Roles
from calcvm.ops.dims import show
from calcvm.tables import laid_out
from calcvm.vm.memory.resident import Resident
from calcvm.vm.program.program import Program
from calcvm.vm.run.slices import work_of


def layers(program: Program, path: str) -> list[str]:
    """A table of a path's forward rows: what each makes, of which parameters, its operations and bytes at the largest batch."""
    span, batch = program.sections[path, "forward"], program.batch_size
    flops, touched = work_of(program, batch, span)
    rows = [["layer", "makes", "parameters", "FLOPs", "bytes moved"]]
    for pc, n_flops, n_elements in zip(range(*span), flops, touched):
        of = {o.access: program.symbol_of(pc, o.name) for o in reversed(program.spec(pc).operands)}
        used = [program.symbols[k] for k in program.operand_values[pc] if k >= 0]
        learnt = [symbol for symbol in used if symbol.kind == "parameter"]
        label = learnt[0].name.rpartition(".")[0] if learnt else program.labels[pc]
        made = show(program.symbols[of["w"]].shape) if of.get("w", -1) >= 0 else ""
        n = sum(symbol.elems.b for symbol in learnt)
        rows.append([label, made, f"{n:,}" if n else "", f"{n_flops:,.0f}", f"{int(n_elements) * program.itemsize:,}"])
    total = f"{flops.sum():,.0f} FLOPs, {int(touched.sum()) * program.itemsize:,} bytes moved: {path} of {batch:,}"
    return [*laid_out(rows), total]


def summary(model: Resident, roles: Roles) -> str:
    """Tables of a model's layers and parameters, and lines about what trains it and what it takes."""
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
            *layers(program, "predict" if "predict" in program.paths else "learn"),
            *laid_out(rows),
            f"{total:,} parameters, of which {trained:,} are trained, {program.dtype}",
            f"loss {hyper['loss']!r}, optimizer {hyper['optimizer']}; judged by {', '.join(roles.figures.values()) or 'nothing'}",
            f"heap {program.heap_bytes:,} bytes for batches up to {program.batch_size:,}, "
            f"device {program.info.get('device', 'cpu')}, workers {model.workers}; {model.facts['rounds']:,} epochs done",
        ]
    )
