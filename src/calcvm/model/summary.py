"""`Model.summary`."""

from __future__ import annotations

from calcvm.model.roles import LEARN, Roles, trained_paths
from calcvm.ops.dims import Affine, show
from calcvm.tables import laid_out
from calcvm.vm.memory.base_model import BaseModel
from calcvm.vm.program.program import Program


def layers(program: Program, path: str) -> list[str]:
    """A table of a path's layers; empty for programs of earlier versions, which lack them."""
    lines = program.info.get("layers", {}).get(path)
    if not lines:
        return []
    table = [
        [name, show(tuple(Affine(*n) for n in shape)), *(f"{n:,}" if n else "" for n in counts)]
        for name, shape, *counts in lines
    ]
    totals = ["total", "", *(f"{sum(column):,}" for column in list(zip(*lines))[2:])]
    return [
        *laid_out([["layer", "output", "parameters", "FLOPs", "bytes moved"], *table, totals]),
        f"{path} of {program.batch_size:,}: FLOPs and bytes are those of each operator alone, without fusion",
    ]


def summary(model: BaseModel, roles: Roles) -> str:
    """Tables of a model's layers and parameters, and lines about its training and resources."""
    program, loaded = model.program, model.loaded
    paths = [LEARN] if LEARN in loaded.paths else trained_paths(loaded)
    learn = [loaded.training(path) for path in paths]
    rows, total, trained = [["parameter", "shape", "elements", "trained"]], 0, 0
    for name in program.info["parameters"]:
        shape = loaded.shape(name, 1)
        trains = any(name in facts["gradients"] and facts.get("rates", {}).get(name) != 0 for facts in learn)
        n = loaded.symbol(name).elems.b
        rows.append([name, str(shape), f"{n:,}", "yes" if trains else "no"])
        total, trained = total + n, trained + n * trains

    def shapes(names: tuple[str, ...]) -> str:
        return ", ".join(f"{name} {show(loaded.forms[name])}" for name in names)

    spared = len({name for facts in learn for name in facts.get("no_decay", ())})
    losses = (f"loss {facts['loss']!r}, optimizer {facts['optimizer']}" for facts in learn)
    return "\n".join(
        [
            f"model {model.name!r}: {shapes(roles.inputs)} -> {shapes(roles.outputs)}",
            *layers(program, "predict" if "predict" in program.paths else paths[0]),
            *laid_out(rows),
            f"{total:,} parameters, of which {trained:,} are trained, {program.dtype}",
            "; ".join(losses)
            + (f", whose weight decay spares {spared} of the parameters" if spared else "")
            + f"; judged by {', '.join(roles.figures.values()) or 'nothing'}",
            f"heap {program.heap_bytes:,} bytes for batches up to {program.batch_size:,}, "
            f"device {program.info.get('device', 'cpu')}, workers {model.workers}; {model.facts['epochs']:,} epochs done",
        ]
    )
