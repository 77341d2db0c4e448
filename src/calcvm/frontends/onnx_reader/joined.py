"""Operators that exporters write as several nodes, and that are one row here: linear layers, attention, GELU, recurrent layers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import helper

from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.imported import Built, Imported, Node, Tensor, Value
from calcvm.frontends.onnx.recurrent import OF_TORCH
from calcvm.frontends.onnx_reader.known import computed

MOVES = ("Concat", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")


def join(imported: Imported, built: Built) -> None:
    """Replace nodes by those that do the work of several; nodes that nothing reads any more are left out."""
    found = _Joining(imported, built)
    nodes = imported.nodes
    for k, node in enumerate(nodes):
        if node.name in JOINS and (new := JOINS[node.name](found, node)) is not None:
            nodes[k] = found.made[node.value] = new
    read = {*_values(imported.results)}
    kept: list[Node] = []
    for node in reversed(nodes):
        if node.value in read:
            kept.append(node)
            read.update(_values(node.args))
    nodes[:] = kept[::-1]
    across = {t.value for t in imported.tensors if found.is_read_across(t, nodes)}
    imported.tensors[:] = [replace(t, across=t.value in across) for t in imported.tensors]


def _values(x: Any) -> Iterator[Value]:
    if isinstance(x, Value):
        yield x
    elif isinstance(x, list):
        for y in x:
            yield from _values(y)


class _Joining:
    """made : the node of a value.  weights : the parameters.  readers : how many nodes read a value."""

    def __init__(self, imported: Imported, built: Built):
        self.made = {node.value: node for node in imported.nodes}
        self.weights = {t.value: t for t in imported.tensors if not t.buffer}
        ends = np.cumsum([0, *(t.array.size for t in self.weights.values())]).tolist()
        self.first = dict(zip(self.weights, ends))
        self.readers = Counter(v for node in imported.nodes for v in _values(node.args))
        self.readers.update(_values(imported.results))
        self._built = built

    def alone(self, x: Any, *names: str) -> Node | None:
        """The node of one of these operators that gives x, if nothing else reads it."""
        node = self.made.get(x) if isinstance(x, Value) and self.readers[x] == 1 else None
        return node if node is not None and node.name in names else None

    def is_weight(self, x: Any, rank: int) -> bool:
        """Whether it is a parameter, maybe turned."""
        turned = self.alone(x, "Transpose")
        x = turned.args[0] if turned else x
        return isinstance(x, Value) and x in self.weights and len(self._built.values[x].shape) == rank

    def scaled(self, x: Any) -> tuple[Any, float]:
        """A value, and the number that it is multiplied by."""
        factor = 1.0
        while node := self.alone(x, "Mul", "Div"):
            numbers = [y for y in node.args if isinstance(y, np.ndarray) and y.size == 1]
            if len(numbers) != 1 or (node.name == "Div" and numbers[0] is not node.args[1]):
                break
            n = float(numbers[0].item())
            factor = factor * n if node.name == "Mul" else factor / n
            x = next(y for y in node.args if y is not numbers[0])
        return x, factor

    def places(self, x: Any) -> np.ndarray | None:
        """Which number of which weight each element is, counted through all weights, of a value that only moves them."""
        if isinstance(x, Value) and x in self.first:
            array = self.weights[x].array
            return np.arange(array.size).reshape(array.shape) + self.first[x]
        node = self.made.get(x) if isinstance(x, Value) else None
        if node is None or node.name not in MOVES:
            return None
        args = [y if isinstance(y, np.ndarray) else self.places(y) for y in node.args]
        if any(y is None for y in args):
            return None
        return computed(
            helper.make_node(node.name, [f"x{k}" for k in range(len(args))], ["y"], **node.options), args, node.options
        )[0]

    def is_read_across(self, t: Tensor, nodes: Sequence[Node]) -> bool:
        """Whether all that read a weight take it as (units, inputs)."""
        readers = [node for node in nodes if t.value in _values(node.args)]
        return bool(readers) and t.array.ndim == 2 and all(_across(node, t.value) for node in readers)

    # ------------------------------------------------------------ what is joined
    def recurrent(self, node: Node) -> Node | None:
        """A layer whose matrices are made of those of PyTorch, which has another order of gates."""
        gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[node.name]
        weights: list[Any] = [None, None, None]
        for k, x in enumerate(node.args[1:4]):
            if x is not None:
                halves, at = 1 + (k == 2), self.places(x)
                if at is None:
                    return None
                parts = at.reshape(len(at), halves, gates, -1)[:, :, OF_TORCH[gates]].reshape(len(at), halves, -1)
                found = [[self._whole(part) for part in direction] for direction in parts]
                if None in sum(found, []):
                    return None
                weights[k] = found if k == 2 else [direction[0] for direction in found]
        return replace(node, args=[node.args[0], *weights, *node.args[4:]])

    def _whole(self, places: np.ndarray) -> Value | None:
        """The weight whose numbers these are, all and in order."""
        value = next((v for v, first in self.first.items() if first == places[0]), None)
        if value is None or self.weights[value].array.size != places.size or (np.diff(places) != 1).any():
            return None
        return value

    def linear(self, node: Node) -> Node | None:
        """A product with a weight, and a bias."""
        for x, bias in (node.args, node.args[::-1]):
            product = self.alone(x, "MatMul")
            if product and self.is_weight(product.args[1], 2) and self.is_weight(bias, 1):
                return replace(node, name="linear", path=product.path or node.path, args=[*product.args, bias])
        return None

    def attention(self, node: Node) -> Node | None:
        """Shares of values, by the softmax of products of queries and keys."""
        shares = self.alone(node.args[0], "Softmax")
        if shares is None or shares.options.get("axis", -1) not in (-1, 3):
            return None
        z, mask = shares.args[0], None
        if added := self.alone(z, "Add"):
            sides = [x for x in added.args if isinstance(x, Value) and self.alone(self.scaled(x)[0], "MatMul")]
            if len(sides) != 1:
                return None
            z = sides[0]
            mask = next(x for x in added.args if x is not z)
        z, scale = self.scaled(z)
        product = self.alone(z, "MatMul")
        if product is None:
            return None
        (q, a), (k, b) = map(self.scaled, product.args)
        sizes = [self._sizes(x) for x in (q, k, node.args[1])]
        if any(s is None for s in sizes) or scale * a * b <= 0:
            return None
        (_, of_q), (of_k, _), (_, of_v) = (s[2:] for s in sizes)  # type: ignore[index]
        if len({s[:2] for s in sizes}) > 1 or not of_q == of_k == of_v:  # type: ignore[index]
            return None
        return replace(node, name="shares", args=[q, k, node.args[1], mask], options={"scale": scale * a * b})

    def _sizes(self, x: Any) -> Any:
        """The shape of (N, heads, ...), of which all but the batch is known."""
        y = self._built.values.get(x) if isinstance(x, Value) else None
        shape = y.shape if isinstance(y, Arranged) and y.rank == 4 else ()
        return shape if shape and all(n.constant for n in shape[1:]) else None

    def gelu(self, node: Node) -> Node | None:
        """x * (1 + erf(x / sqrt(2))) / 2, in any order."""
        whole, half = self.scaled(node.value) if self.readers[node.value] == 1 else (node.value, 1.0)
        inner = node if whole == node.value else self.made.get(whole)
        if inner is None or inner.name != "Mul":
            return None
        sides = [self.scaled(x) for x in inner.args]
        for (x, a), (y, b) in (sides, sides[::-1]):
            added = self.alone(y, "Add")
            erf = next((e for z in added.args if (e := self.alone(z, "Erf"))), None) if added else None
            if (
                added is None
                or erf is None
                or not any(isinstance(z, np.ndarray) and (z == 1).all() for z in added.args)
            ):
                continue
            of, factor = self.scaled(erf.args[0])
            if (
                of == x
                and math.isclose(factor, 0.5**0.5, rel_tol=1e-6)
                and math.isclose(half * a * b, 0.5, rel_tol=1e-6)
            ):
                return replace(node, name="Gelu", args=[x], options={})
        return None


def _across(node: Node, weight: Value) -> bool:
    if node.name == "Transpose":
        return node.options.get("perm", [1, 0]) == [1, 0]
    if node.name == "Gemm":
        return node.args[1] == weight != node.args[0] and bool(node.options.get("transB"))
    return node.name in ("GRU", "LSTM", "RNN") and any(
        isinstance(x, list) and weight in _values(x) for x in node.args[1:3]
    )


JOINS: dict[str, Callable[[_Joining, Node], Node | None]] = {
    "Add": _Joining.linear,
    "GRU": _Joining.recurrent,
    "LSTM": _Joining.recurrent,
    "MatMul": _Joining.attention,
    "Mul": _Joining.gelu,
    "RNN": _Joining.recurrent,
}
