"""The text of a row that is a user's equation.  Each index is an axis of every array, kept indexes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from calcvm.equations.scans import is_scan
from calcvm.equations.tree import Element, Name, Reduction, bound, walk
from calcvm.errors import UnsupportedOperator
from calcvm.ops.dims import ONE, Shape, numel
from calcvm.ops.spec import EQUATION
from calcvm.script.derived import Axes, Value, _counted
from calcvm.script.row import FALLBACKS, Row, Writer, writes


class Stated(Axes):
    """Axes in one common order: a value has those of its indexes, and size 1 or no leading axis for others."""

    def _line_up(self, lying: Any) -> None:
        self.dims: dict[str, Shape] = {v: (n,) for v, n in self.extents.items()}

    def write(self) -> None:
        r, access = self.r, {o.name: o.access for o in self.r.spec.operands}
        self.codes: dict[str, Any] = {}  # values other than operands
        for e in self.equations:
            kept = tuple(i.name for i in e.kept or ())
            self.order = (*kept, *(i.name for i in bound(e) if i.name not in kept))
            if len({*self.order}) < len(self.order):
                raise UnsupportedOperator(f"row {r.spec.name!r}: reductions over indexes of one name have no text")
            value = self.scanned(e, kept) if is_scan(e) else self.value(e.value, kept)
            code = value.code
            if {*value.axes} < {*kept} and not (code.scalar and e.name in r):
                code = r.call("np.broadcast_to", code, self.full(kept))
            if not is_scan(e) and len(kept) < len(self.order) and not code.scalar:
                code = code.reshape(*self.shape(kept))
            if e.name in r:
                r.put_shaped(e.name, code, self.shape(kept), access[e.name] == "a" and self.known.get("acc") == 1)
            else:
                self.codes[e.name], self.operand_axes[e.name] = code, tuple(Name(i.name.upper()) for i in e.kept or ())

    def full(self, axes: Any) -> Shape:
        """A shape with one axis per index, of size 1 except for these."""
        return tuple(self.extents[v] if v in axes else ONE for v in self.order)

    def at(self, v: Value, axes: tuple[str, ...]) -> Any:
        """A value as an array of all elements of kept indexes."""
        code = self.r.call("np.broadcast_to", v.code, self.full(axes)) if {*v.axes} != {*axes} else v.code
        return code.reshape(*self.shape(axes)) if len(axes) < len(self.order) else code

    def joined(self, apply: Callable[..., Any], *parts: Value) -> Value:
        return Value(
            tuple(v for v in self.order if any(v in part.axes for part in parts)), apply(*(p.code for p in parts))
        )

    def placed(self, code: Any, axes: tuple[str, ...]) -> Value:
        """An array over indexes in their order, with axes of size 1 for the others."""
        at = [self.order.index(v) for v in axes]
        shape = tuple(self.extents[v] if v in axes else ONE for v in self.order[min(at, default=0) :])
        return Value(axes, code if len(shape) == len(axes) else code.reshape(*shape))

    def named(self, name: str) -> Value:
        if name not in self.extents:
            return Value((), self.r.shaped(name, ()))
        return self.placed(self.r.trace.of(f"np.arange({self.extents[name]})"), (name,))

    def element(self, node: Element) -> Value:
        r, lengths = self.r, tuple(self.lengths(node.array))
        code = self.codes[node.array] if node.array in self.codes else r.shaped(node.array, lengths)
        own = tuple(p.name for p in node.places if isinstance(p, Name))
        if code.scalar or not node.places:
            return Value((), code)
        if len({*own}) == len(node.places) and [self.extents.get(v) for v in own] == [*lengths]:
            turned = sorted(range(len(own)), key=lambda k: self.order.index(own[k]))
            moved = turned == [*range(len(own))]
            return self.placed(
                code if moved else code.method(f"transpose{tuple(turned)}"), tuple(own[k] for k in turned)
            )
        at = []
        for place, n in zip(node.places, lengths):
            data = node.beyond == 0 and any(isinstance(part, Element) for part in walk(place))
            value = self.value(place, ())
            at.append(self.joined(lambda v, n=n: r.call("inside", v, n), value) if data else value)  # type: ignore[misc]
        return self.joined(lambda *at: r.call("elements", code, r.number(node.beyond), *at), *at)

    def reduced(self, node: Reduction, over: tuple[str, ...]) -> Value:
        how, gone = node.how, tuple(i.name for i in node.indexes)
        v = self.value(_counted(node.body) if how == "sum" else node.body, over)
        axes = tuple(a for a in self.order if a in (*v.axes, *gone))
        code = (
            v.code if axes == v.axes and not v.code.scalar else self.r.call("np.broadcast_to", v.code, self.full(axes))
        )
        at = sorted(self.order.index(a) - len(self.order) for a in gone)
        kept = tuple(a for a in v.axes if a not in gone)
        if how in ("argmax", "argmin"):  # the result counts along all reduced axes as one
            first, end = len(self.order) + at[0], len(self.order) + at[-1] + 1
            shape = self.full(axes)
            flat = code.reshape(*shape[:first], numel(shape[first:end]), *shape[end:])
            code = flat.method(f"{how}({first})").reshape(*self.full(kept))
        elif how == "logsumexp":
            code = self.r.call("logsumexp", code, tuple(at), keepdims=True)
        else:
            code = code.method(f"{how}({tuple(at)}, keepdims=True)")
        return Value(kept, code)


@writes(
    "argmax_fwd", "argmin_fwd", "embedding_fwd", "embedding_bwd", "inside_fwd", "one_hot_fwd", "scatter_add_fwd", "scatter_add_bwd",
    "take_fwd", "take_bwd", "take_along_axis_fwd", "take_along_axis_bwd",
)  # fmt: skip
def _at_places(r: Row) -> None:
    Stated(r).write()


def _stated_row(stem: str) -> Writer | None:
    return (lambda r: Stated(r).write()) if stem.startswith(f"{EQUATION}_") else None


FALLBACKS.append(_stated_row)
