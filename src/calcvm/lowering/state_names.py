"""The names of parameters and buffers in state dicts of PyTorch, and their form there.

    calcvm                      state dict     form
    linear_1.weight             0.weight       turned    as `linear` reads it
    batchnorm_1.scale           1.weight                 as `batch_norm` reads it
    net_1.encoder.gru_1.bias    0.encoder.0.bias         of a custom layer, whose scopes stay

The operator that reads a parameter decides, or, of an imported network, its file; its shape says nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from calcvm.graph import CalcGraph, Variable

RENAMED = {"scale": "weight", "shift": "bias", "slope": "weight"}  # parameters of layers, read as these inputs
TURNED, FLAT = "turned", "flat"
IMPORTED = re.compile(r"(^|\.)(torchmodule|onnxmodel|kerasmodel)_\d+\.")


def state_names(graph: CalcGraph) -> dict[str, dict[str, Any]]:
    """For each parameter and buffer its "names" in a state dict, by their names here, and its "form" there, if it is another.

    The layers of a network have their numbers as names; a single layer has none.
    """
    numbers = _numbers(graph)

    def known(name: str) -> str:
        scope, _, last = name.rpartition(".")
        own = numbers.get(name, last)
        return ".".join(filter(None, (known(scope) if scope else "", own)))

    found: dict[str, dict[str, Any]] = {
        v.name: {"names": {v.name: known(v.name)}}
        for v in graph.variables.values()
        if v.kind in ("parameter", "buffer")
    }
    for path in graph.paths.values():
        for op in path.operations:
            for slot, given in op.inputs.items():
                v = _root(given)
                facts, own = found.get(v.name), v.name.rpartition(".")[2]
                if facts is None:
                    continue
                if v.turned or (v.turned is None and (slot == "wh" or (op.spec.name, slot) == ("linear", "wt"))):
                    facts["form"] = TURNED
                elif slot == own and own in RENAMED and not IMPORTED.search(v.name.removesuffix(f".{own}") + "."):
                    facts["names"][v.name] = known(v.name.removesuffix(own) + RENAMED[own])
                    facts |= {"form": FLAT} if slot == "slope" else {}
                elif op.spec.name == "matmul" and op.attrs["transpose_b"] and op.layer and v is op.inputs["b"]:
                    if not v.name.startswith(f"{op.layer}."):  # tied to a linear layer, which has it too
                        facts["names"][f"{op.layer}.{own}"] = known(f"{op.layer}.{own}")
    return {name: facts for name, facts in found.items() if facts != {"names": {name: name}}}


def _root(v: Variable) -> Variable:
    """The parameter that a slice is of."""
    while v.producer is not None and v.producer.spec.name == "slice":
        v = v.producer.inputs["x"]
    return v


def _numbers(graph: CalcGraph) -> dict[str, str]:
    """The places of layers in their networks, by scope; the modules inside a module of PyTorch keep their names."""
    counts, numbers = Counter[str](), dict[str, str]()
    for scope in dict.fromkeys(
        scope for path in graph.paths.values() for scope in path.layers if not IMPORTED.search(scope)
    ):
        network = scope.rpartition(".")[0]
        numbers[scope] = str(counts[network])
        counts[network] += 1
    return numbers if counts[""] > 1 else {**numbers, **{scope: "" for scope in numbers if "." not in scope}}
