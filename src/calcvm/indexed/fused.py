"""Decides which parts of users' equations become separate rows.

Products, convolutions, pooling and softmax never do.  Any other part does if operators of the table would write more elements in
between than the part reads and produces.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from calcvm.equations.functions import ARGUMENTS
from calcvm.equations.places import placed
from calcvm.equations.tree import (
    OPERATORS,
    Call,
    Element,
    Equation,
    Index,
    Name,
    Node,
    Number,
    Reduction,
    call,
    own_elements,
    rewritten,
    substituted,
    walk,
    with_parts,
)
from calcvm.errors import UnsupportedOperator
from calcvm.indexed import patterns
from calcvm.indexed.elements import Elements
from calcvm.indexed.operators import FOLDS
from calcvm.indexed.products import count, varies
from calcvm.indexed.rows import FEW, At, Row, Unfit
from calcvm.indexed.values import Value, numel, size_of
from calcvm.ops.dims import Quadratic

LEAST = 1 << 16  # elements in between; below this a kernel is not worth compiling
COMPUTED = {*ARGUMENTS, *OPERATORS}  # functions that a row computes
TWICE = ("sum", "mean", "max", "min", "prod", "any", "all")  # reductions that can be applied in two steps


class Fused:
    """Decides for one text.  ``choice`` : None: by cost; True: wherever a row can; False: never."""

    def __init__(self, of: Elements, choice: bool | None):
        self.of, self.choice = of, choice

    # ------------------------------------------------------------ decisions
    def instead(self, node: Element | Reduction, order: Sequence[str], always: bool = False) -> Value | None:
        """The value of a node by a separate row, if that is better than operators; always: it is."""
        if self.choice is False or self.is_product(node) or not (self.choice or always or self.pays(node)):
            return None
        try:
            return self.row(node, order)
        except Unfit:
            return None

    def gathered(self, node: Element, order: Sequence[str]) -> Value | None:
        """An element at places from data, by a separate row; one place per row of x is left to the table's row."""
        by = [{*self.of.indexes(place)} for place in node.places if self.arrays(place)]
        rest = set().union(*(self.of.indexes(place) for place in node.places if not self.arrays(place)))
        return self.instead(node, order, always=True) if by and by != [rest] else None

    def after(self, node: Node, order: Sequence[str], compose: Callable[[], Value]) -> Value:
        """The value by operators, or by a separate row if they refuse it."""
        path, known, made = self.of.graph.active, {**self.of.known}, {**self.of.made}
        n, variables = len(path.operations), {**self.of.graph.variables}
        try:
            return compose()
        except UnsupportedOperator:
            if self.choice is False:
                raise
            del path.operations[n:]
            self.of.graph.variables, self.of.known, self.of.made = variables, known, made
            try:
                return self.row(node, order)
            except Unfit:
                pass
            raise

    def pays(self, node: Element | Reduction) -> bool:
        """Whether operators would write many elements in between: more than are read and produced."""
        between = self.volume(node.body if isinstance(node, Reduction) else node)
        return between >= LEAST and between > self.volume(node) + sum(map(self.elements, self.arrays(node)))

    def is_product(self, node: Node) -> bool:
        """Whether a row of products or of convolution sums it."""
        sums = isinstance(node, Reduction) and node.how in ("sum", "mean")
        return sums and self.of.is_product(node.body, [i.name for i in node.indexes])  # type: ignore[union-attr]

    def is_layer(self, node: Node) -> bool:
        """Whether one row of products computes all of it: the sum, an addend, an activation."""
        node = self.of.opened(node)
        if isinstance(node, Call) and (len(node.arguments) == 1 or node.function == "+"):
            return any(map(self.is_layer, node.arguments))
        return self.is_product(node)

    def volume(self, node: Node) -> int:
        try:
            return count(numel(self.of.extents[v] for v in self.of.indexes(node)))
        except Quadratic:
            return sys.maxsize  # more than any array has

    def arrays(self, node: Node) -> set[str]:
        return {n.array for n in walk(node) if isinstance(n, Element)}

    def elements(self, name: str) -> int:
        return count(numel(map(size_of, self.of.found.shapes[name])))

    # ------------------------------------------------------------ construction
    def row(self, node: Node, order: Sequence[str]) -> Value:
        """The value of a node by a new operator (Unfit: there is none)."""
        free = self.of.indexes(node)
        kept = [v for v in order if v in free] + [v for v in free if v not in order]
        if not kept and isinstance(node, Reduction) and node.how in TWICE and len(node.indexes) > 1:
            first, *rest = node.indexes  # workers share the first
            inner = self.row(Reduction(node.how, tuple(rest), node.body, node.at), (first.name,))
            return self.of.reduced(node, inner, [first.name], order)
        return self.equation(Equation("", tuple(map(Index, kept)), node))

    def whole(self, equation: Equation) -> Value | None:
        """The value of an equation by one row, if ``choice`` requires that and the table has no row for it."""
        value = equation.value
        if not self.choice or equation.kept is None or self.is_layer(value) or isinstance(value, (Name, Number)):
            return None
        if patterns.rewritten(value, self.of.opened, self.of.extents) is not None:
            return None
        try:
            return self.equation(equation)
        except Unfit:
            return None

    def scan(self, name: str) -> Value:
        """The value of an equation that reads its own result before, or after."""
        equation = self.of.parts[name]
        own = own_elements(equation)[0]
        if self.choice is False:
            raise self.of.wrong(
                own,
                f"{name} is read by its own equation, and operators compute only running sums so, {name}[r,i] = {name}[r,i - 1] + ..., or "
                f"{name}[r,i + 1]: leave out fused=False, or write each step as an equation",
            )
        try:
            return self.equation(replace(equation, value=rewritten(equation.value, lambda n: self.terms(name, n))))
        except Unfit as error:
            raise self.of.wrong(
                own,
                f"{name} is read by its own equation, but no row can compute it: {error}; write each step as an equation",
            ) from None

    def terms(self, scan: str, node: Node) -> Node:
        """A reduction over a scan's elements written out term by term; a row would compute it before the scan."""
        if not isinstance(node, Reduction) or scan not in self.arrays(node):
            return node
        over = [i.name for i in node.indexes]
        n = numel(self.of.extents[v] for v in over)
        if node.how not in FOLDS or varies(n) or int(n) > FEW:
            raise self.of.wrong(
                node, f"{scan} is read by its own equation in {node.how} over {n}: only a sum, a mean, a product, max or min of up to "
                f"{FEW} can be written out"
            )  # fmt: skip
        made = None
        for at in product(*(range(int(self.of.extents[v])) for v in over)):
            by: dict[str, Node] = dict(zip(over, map(Number, at)))
            term = rewritten(substituted(node.body, by), _placed)
            made = term if made is None else call(FOLDS[node.how], made, term)
        assert made is not None
        return call("/", made, Number(int(n))) if node.how == "mean" else made

    def equation(self, equation: Equation) -> Value:
        """The row of an equation; in literal form if deriving its gradient requires known sizes."""
        try:
            return Row(self.of.extents, lambda node: self.opened(equation, node)).value(equation)
        except Unfit:
            return Row(self.of.extents, lambda node: self.opened(equation, node), literal=True).value(equation)

    def opened(self, equation: Equation, node: Node) -> Node | At:
        """The node in the row, or an operand: large intermediate values are part of the row, all others are operands."""
        of = self.of
        if isinstance(node, Element) and node.array in of.parts and own_elements(of.parts[node.array]) == []:
            inside = of.opened(node)
            if inside is not node and node.array not in of.made and self.is_large(equation, node):
                return self.opened(equation, inside)
        if isinstance(node, (Element, Name)):
            return self.operand(node)
        if node is equation.value or isinstance(node, Number) or equation.name in self.arrays(node):
            return node
        if patterns.rewritten(node, of.opened, of.extents) is None:
            if isinstance(node, Call) and node.function in COMPUTED:
                return node
            if (
                isinstance(node, Reduction)
                and (self.choice or self.is_large(equation, node))
                and not self.is_product(node)
            ):
                return node
        return self.valued(node)

    def operand(self, node: Element | Name) -> Node | At:
        of = self.of
        name = node.array if isinstance(node, Element) else node.name
        if name in of.operands or name in of.parts:
            x = of.whole(name)
            if isinstance(node, Name) and x.rank:
                raise Unfit(f"{name} is a whole array")
            return (
                x,
                node.places if isinstance(node, Element) else (),
                node.beyond if isinstance(node, Element) else 0.0,
            )
        n = of.numbers.get(name, of.found.sizes.get(name))
        if not isinstance(size_of(n), (int, float)):
            raise Unfit(f"{name} is a size of the batch")
        return Number(size_of(n))  # type: ignore[arg-type]

    def valued(self, node: Node) -> Node | At:
        v = self.of.value(node)
        if v.constant and not v.axes:
            return Number(v.data)
        v = self.of.variable(v)
        return v.data, tuple(map(Name, v.axes)), 0.0

    def is_large(self, equation: Equation, node: Node) -> bool:
        """Whether a part has more elements than the equation's result and all arrays that are read, together."""
        given = sum(self.elements(name) for name in self.arrays(equation.value) if name in self.of.operands)
        made = count(numel(self.of.extents[i.name] for i in equation.kept or ()))
        return self.volume(node) > made + given


def _placed(node: Node) -> Node:
    """The node with places in canonical form."""
    return with_parts(node, tuple(map(placed, node.places))) if isinstance(node, Element) else node
