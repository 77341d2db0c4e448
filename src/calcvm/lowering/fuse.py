"""Fusion: fewer rows and fewer passes over memory, with the same results.

Before autodiff, on operators: a product and the addition of a bias become one (``BIAS`` in `calcvm.ops.contraction`).
After it, on statements: a recurrent row takes over the products of its inputs (`calcvm.ops.recurrent`), and a row becomes an
epilogue of the row that produces its input, if it can (`calcvm.ops.epilogues`).
Epilogues are activations, their derivatives, additions, and normalization by known statistics.

If the derivative of an activation reads its input, the activation is fused in inference only.  Weights are not scaled by a
normalization beforehand, as other frameworks do.  So inference follows training at once and has the bits of the unfused rows
(`tests/test_epilogues.py`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from calcvm.graph import Operation, Path, Variable
from calcvm.lowering.emit import Emitter
from calcvm.ops import OPS
from calcvm.ops.contraction import BIAS, LINEAR_FWD
from calcvm.ops.recurrent import FEW, INNER, PROJECTED
from calcvm.ops.sizes import MAX_BATCH
from calcvm.ops.spec import Epilogue
from calcvm.ops.statement import Statement, Value


def fuse_bias(path: Path, needed_elsewhere: set[Variable]) -> list[Operation]:
    """The path's operators with ``x @ w + b`` as one operator."""
    uses = Counter(v for op in path.operations for v in op.inputs.values())
    out: dict[Operation, None] = {}
    for op in path.operations:
        pair = _bias_of(op) if op.spec.name == BIAS.sum else None
        if pair:
            product, bias = pair
            y = product.outputs["y"]
            if product in out and uses[y] == 1 and y not in needed_elsewhere:
                spec = OPS[BIAS.into]
                inputs = dict(zip(spec.inputs, (*product.inputs.values(), bias)))
                del out[product]
                lying = {n: v.laid for n, v in (*inputs.items(), *op.outputs.items())}
                op = Operation(spec, inputs, op.outputs, lying, {}, {}, op.name, op.layer)
        out[op] = None
    return [*out]


def _bias_of(op: Operation) -> tuple[Operation, Variable] | None:
    for product, bias in ((op.inputs["a"], op.inputs["b"]), (op.inputs["b"], op.inputs["a"])):
        m = product.producer
        if m is None or m.spec.name != BIAS.product or any(m.attrs.values()):
            continue
        w = m.inputs["b"].shape
        if len(w) == 2 and all(n.constant for n in w) and bias.shape == product.shape[-1:]:
            return m, bias
    return None


def fuse_epilogues(statements: list[Statement], kept: set[Value]) -> list[Statement]:
    """Merge rows as epilogues into the rows that produce their input, if nothing else reads it."""
    readers = Counter(v for s in statements for v in s.read_values)
    hosts: dict[Value, tuple[int, int]] = {}  # by result: the row's place, its next kind of epilogue
    rows = _Rows(statements)
    out = rows.out
    for i, s in enumerate(statements):
        for by in s.spec.epilogues:
            z = s.operands[by.reads]
            if z is None or z not in hosts or readers[z] != 1 or z in kept or z.persistent:
                continue
            k, done = hosts[z]
            host = out[k]
            assert host is not None
            if by.kind not in host.spec.takes[done:] or (host.path, host.phase) != (s.path, s.phase):
                continue
            fused, at = _completed(host, s, by), _place(host, rows, k, i, s)
            if fused is not None and at is not None:
                out[k] = out[i] = None
                rows.put((k, i)[at], fused)
                hosts[_made(fused)] = (k, i)[at], host.spec.takes.index(by.kind) + 1
                break
        else:
            if s.spec.takes:
                hosts[_made(s)] = i, 0
    return [s for s in out if s is not None]


def fuse_inputs(emit: Emitter, statements: list[Statement], kept: set[Value]) -> list[Statement]:
    """Merge the products of inputs into the recurrent rows that alone read them."""
    readers = Counter(v for s in statements for v in s.read_values)
    rows = _Rows(statements)
    makers = {_made(s): i for i, s in enumerate(statements) if s.spec is LINEAR_FWD}
    for i, s in enumerate(statements):
        z = s.operands.get("z")
        if INNER not in s.spec.words or z is None or z not in makers or readers[z] != 1 or z in kept:
            continue
        maker = statements[makers[z]]
        same = (maker.path, maker.phase) == (s.path, s.phase) and not (maker.shifts or s.shifts)
        few = maker.extents["wt"].bounds(MAX_BATCH)[1] <= FEW
        if same and few and not rows.any_writes(maker.read_values, makers[z], i):
            operands = {**s.operands, "z": None} | {own: maker.operands[name] for own, name in PROJECTED.items()}
            emit.path, emit.phase = s.path, s.phase
            label = f"{maker.label} {s.label}"
            rows.put(i, emit.row(s.spec, {**s.words, "K": maker.words["K"]}, operands, label))
            rows.out[makers[z]] = None
    return [s for s in rows.out if s is not None]


def _result(s: Statement) -> str:
    """The operand on which epilogues work: the first that the row writes."""
    return s.spec.writes[0].name


def _made(s: Statement) -> Value:
    value = s.operands[_result(s)]
    assert value is not None
    return value


def _completed(host: Statement, s: Statement, by: Epilogue) -> Statement | None:
    """The row ``host`` with ``s`` as an epilogue; None if an operand has the wrong size, or is not a whole value."""
    result = _result(host)
    of = {result: _result(s), **dict(by.operands)}
    if host.shifts or s.shifts or s.extents[by.reads] != host.extents[result]:
        return None
    words = {own: s.words[v] if isinstance(v, str) else v for own, v in by.words}
    operands = {own: s.operands[name] for own, name in of.items()}
    label = f"{host.label} {s.label}"
    fused = replace(host, words={**host.words, **words}, operands={**host.operands, **operands}, label=label)
    return fused if all(fused.extents.get(own) == s.extents.get(name) for own, name in of.items()) else None


def _place(host: Statement, rows: _Rows, k: int, i: int, s: Statement) -> int | None:
    """The place of the merged row: 0, that of ``host``, or 1, that of ``s``; None if neither is possible.

    0 requires that no row in between writes an input of ``s``.  1 requires that none writes an input or result of ``host``,
    or reads its result.
    """
    if not rows.any_writes(s.read_values, k, i):
        return 0
    made = host.written_values
    apart = not rows.any_writes([*host.read_values, *made], k, i) and not rows.any_reads(made, k, i)
    return 1 if apart else None


class _Rows:
    """Statements under fusion, by place, with the readers and writers of each value.

    out : the statements; None in place of a row that was merged into another.
    """

    def __init__(self, statements: list[Statement]):
        self.out: list[Statement | None] = [*statements]
        self.readers: dict[Value, list[int]] = {}
        self.writers: dict[Value, list[int]] = {}
        for i, s in enumerate(statements):
            self.put(i, s)

    def put(self, i: int, s: Statement) -> None:
        """Put a statement at a place; a previous one stays in the lists, but lookups skip it."""
        self.out[i] = s
        for values, touching in ((s.read_values, self.readers), (s.written_values, self.writers)):
            for v in values:
                insort(touching.setdefault(v, []), i)

    def any_reads(self, values: Iterable[Value], k: int, i: int) -> bool:
        """Whether a row between two places reads one of the values."""
        return any((t := self.out[at]) and v in t.read_values for v in values for at in _between(self.readers, v, k, i))

    def any_writes(self, values: Iterable[Value], k: int, i: int) -> bool:
        """Whether a row between two places writes one of the values."""
        return any(
            (t := self.out[at]) and v in t.written_values for v in values for at in _between(self.writers, v, k, i)
        )


def _between(touching: dict[Value, list[int]], v: Value, k: int, i: int) -> Iterator[int]:
    places = touching.get(v, [])
    return (places[j] for j in range(bisect_right(places, k), bisect_left(places, i)))
