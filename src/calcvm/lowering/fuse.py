"""Fusion: fewer rows and fewer passes over memory, with the same results.

Before autodiff, on operators: ``matmul`` + ``add`` of a bias become ``linear``.
After autodiff, on statements: an activation moves into the ``linear`` row that feeds it, and an
activation's derivative into the ``linear_bwd_x`` row that produces its gradient.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from calcvm.graph import Operation, Path, Variable
from calcvm.ops import OPS
from calcvm.ops.contraction import ACTIVATIONS
from calcvm.ops.statement import Statement, Value


def fuse_bias(path: Path, needed_elsewhere: set[Variable]) -> list[Operation]:
    """The path's operators with ``matmul(x, w) + b`` as one ``linear``."""
    uses = Counter(v for op in path.operations for v in op.inputs.values())
    out: list[Operation] = []
    for op in path.operations:
        pair = _bias_of(op) if op.spec.name == "add" else None
        if pair:
            product, bias = pair
            y = product.outputs["y"]
            if product in out and uses[y] == 1 and y not in needed_elsewhere:
                a, b = product.inputs["a"], product.inputs["b"]
                inputs = {"x": a, "wt": b, "b": bias}
                out.remove(product)
                op = Operation(OPS["linear"], inputs, op.outputs, {}, {}, op.name)
        out.append(op)
    return out


def _bias_of(op: Operation) -> tuple[Operation, Variable] | None:
    for product, bias in ((op.inputs["a"], op.inputs["b"]), (op.inputs["b"], op.inputs["a"])):
        m = product.producer
        if m is None or m.spec.name != "matmul" or any(m.attrs.values()):
            continue
        w = m.inputs["b"].shape
        if len(w) == 2 and all(n.constant for n in w) and bias.shape == product.shape[-1:]:
            return m, bias
    return None


def fuse_activations(statements: list[Statement], kept: set[Value]) -> list[Statement]:
    """Move activations into linear rows, and their derivatives into linear_bwd_x rows."""
    statements = _fuse(statements, kept, "linear_fwd", "y", "_fwd", "x", lambda s: {"y": s.operands["y"]})
    return _fuse(
        statements, kept, "linear_bwd_x", "dx", "_bwd", "dy",
        lambda s: {"dx": s.operands["dx"], "ya": s.operands["y"]},
    )  # fmt: skip


def _fuse(statements, kept, host, product, suffix, operand, operands_of):  # type: ignore[no-untyped-def]
    """Fold ``<activation><suffix>`` into the ``host`` row whose ``product`` only it reads."""
    rows = {f"{a}{suffix}": a for a in ACTIVATIONS}
    readers = Counter(v for s in statements for v in s.read_values)
    hosts = {s.operands[product]: i for i, s in enumerate(statements) if s.spec.name == host}
    out: list[Statement | None] = list(statements)
    for i, s in enumerate(statements):
        act = rows.get(s.spec.name)
        z = s.operands.get(operand) if act else None
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
        words = {**h.words, "act": ACTIVATIONS.index(act), "alpha": s.words.get("alpha", 0.0)}
        out[k] = replace(h, words=words, operands={**h.operands, **operands_of(s)}, label=f"{h.label} {s.label}")
        out[i] = None
        hosts[next(iter(operands_of(s).values()))] = k
    return [s for s in out if s is not None]


def _between_free(statements: list[Statement | None], k: int, i: int, s: Statement) -> bool:
    """Nothing that ``s`` reads besides the fused product is written between ``k`` and ``i``."""
    reads = set(s.read_values)
    return not any(v in reads for t in statements[k + 1 : i] if t is not None for v in t.written_values)
