"""Fusion: fewer rows and fewer passes over memory, with the same results.

Before autodiff, on operators: a product and the addition of a bias become one (``BIAS``).
After autodiff, on statements: an activation moves into the row that feeds it, and an activation's derivative into
the row that produces its gradient (``EPILOGUES``, both declared in `calcvm.ops.contraction`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from calcvm.graph import Operation, Path, Variable
from calcvm.ops import OPS
from calcvm.ops.contraction import BIAS, EPILOGUES, Epilogue
from calcvm.ops.statement import Statement, Value


def fuse_bias(path: Path, needed_elsewhere: set[Variable]) -> list[Operation]:
    """The path's operators with ``x @ w + b`` as one operator."""
    uses = Counter(v for op in path.operations for v in op.inputs.values())
    out: list[Operation] = []
    for op in path.operations:
        pair = _bias_of(op) if op.spec.name == BIAS.sum else None
        if pair:
            product, bias = pair
            y = product.outputs["y"]
            if product in out and uses[y] == 1 and y not in needed_elsewhere:
                spec = OPS[BIAS.into]
                inputs = dict(zip(spec.inputs, (*product.inputs.values(), bias)))
                out.remove(product)
                lying = {n: v.laid for n, v in (*inputs.items(), *op.outputs.items())}
                op = Operation(spec, inputs, op.outputs, lying, {}, {}, op.name)
        out.append(op)
    return out


def _bias_of(op: Operation) -> tuple[Operation, Variable] | None:
    for product, bias in ((op.inputs["a"], op.inputs["b"]), (op.inputs["b"], op.inputs["a"])):
        m = product.producer
        if m is None or m.spec.name != BIAS.product or any(m.attrs.values()):
            continue
        w = m.inputs["b"].shape
        if len(w) == 2 and all(n.constant for n in w) and bias.shape == product.shape[-1:]:
            return m, bias
    return None


def fuse_activations(statements: list[Statement], kept: set[Value]) -> list[Statement]:
    """Move activations into the rows that make what they read, and their derivatives likewise."""
    for epilogue in EPILOGUES:
        statements = _fuse(statements, kept, epilogue)
    return statements


def _fuse(statements: list[Statement], kept: set[Value], by: Epilogue) -> list[Statement]:
    """Fold rows into the host rows whose product only they read."""
    readers = Counter(v for s in statements for v in s.read_values)
    hosts = {s.operands[by.product]: i for i, s in enumerate(statements) if s.spec.name == by.host}
    out: list[Statement | None] = list(statements)
    for i, s in enumerate(statements):
        act = by.rows.get(s.spec.name)
        z = s.operands.get(by.reads) if act else None
        if z is None or z not in hosts or readers[z] != 1 or z in kept or z.persistent:
            continue
        k = hosts[z]
        h = out[k]
        if (
            h is None
            or h.words["act"] != 0
            or (h.path, h.phase) != (s.path, s.phase)
            or not _between_free(out, k, i, s)
        ):
            continue
        words = {**h.words, "act": act, "alpha": s.words.get("alpha", 0.0)}
        takes = {own: s.operands[other] for own, other in by.takes.items()}
        out[k] = replace(h, words=words, operands={**h.operands, **takes}, label=f"{h.label} {s.label}")
        out[i] = None
        hosts[takes[by.product]] = k
    return [s for s in out if s is not None]


def _between_free(statements: list[Statement | None], k: int, i: int, s: Statement) -> bool:
    """Nothing that ``s`` reads besides the fused product is written between ``k`` and ``i``."""
    reads = set(s.read_values)
    return not any(v in reads for t in statements[k + 1 : i] if t is not None for v in t.written_values)
