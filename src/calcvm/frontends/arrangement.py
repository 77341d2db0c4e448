"""Variables whose axes are split, joined and in another order without a row.

Other libraries move axes about: attention alone splits heads off, moves them, and joins them again.  Their views cost nothing there, and
most of them undo one another.  So a view is only noted here; a row moves elements where an operator needs them in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from calcvm import functions as F
from calcvm.errors import ShapeError
from calcvm.graph import Variable
from calcvm.lazy import cached_property
from calcvm.ops.dims import ONE, Affine, Shape, affine, numel, show

Axis = tuple[int, ...]


class Columns:
    """Columns ``start`` to ``stop`` of a variable's last axis, which a row copies where they are read."""

    def __init__(self, of: Variable, start: int, stop: int):
        self.of, self.start, self.stop = of, start, stop

    @cached_property
    def variable(self) -> Variable:
        lead = (None,) * (self.of.rank - 1)
        return F.slice(self.of, (*lead, self.start), (*lead, self.stop))


class Arranged:
    """A variable in another arrangement.

    base : the variable, or columns of one.
    atoms : sizes of the parts of its axes, in its order; none is 1.
    axes : for each axis of the arrangement the atoms that it joins, outermost first; an axis of size 1 has none.
    """

    def __init__(self, base: Variable | Columns, atoms: Sequence[Affine], axes: Sequence[Axis]):
        self._base, self.atoms, self.axes = base, (*atoms,), (*axes,)

    @classmethod
    def of(cls, v: Variable) -> Arranged:
        """A variable as it is."""
        atoms = [n for n in v.shape if n != ONE]
        numbers = iter(range(len(atoms)))
        return cls(v, atoms, [() if n == ONE else (next(numbers),) for n in v.shape])

    @property
    def shape(self) -> Shape:
        return tuple([numel(tuple([self.atoms[k] for k in axis])) for axis in self.axes])

    @property
    def rank(self) -> int:
        return len(self.axes)

    @property
    def type(self) -> str:
        return (self._base.of if isinstance(self._base, Columns) else self._base).type

    @property
    def base(self) -> Variable:
        """The variable, whose elements are in the order of the atoms."""
        return self._base.variable if isinstance(self._base, Columns) else self._base

    @property
    def columns(self) -> Columns | None:
        """The columns that it arranges."""
        return self._base if isinstance(self._base, Columns) else None

    @property
    def order(self) -> list[int]:
        """The atoms in the order of the axes."""
        return [k for axis in self.axes for k in axis]

    def variable(self) -> Variable:
        """It as a variable."""
        v, order = self.base, self.order
        n = len(order)
        if order != [*range(n)]:
            images = n > 2 and v.shape == self.atoms
            if images and v.layout and order == [0, *range(2, n), 1]:
                v = F.channels_last(v)
            elif images and not v.layout and order == [0, n - 1, *range(1, n - 1)]:
                v = F.channels_first(v)
            else:
                v = F.transpose(_reshaped(v, self.atoms), order)
        v = _reshaped(v, self.shape)
        as_it_is = Arranged.of(v)
        self._base, self.atoms, self.axes = v, as_it_is.atoms, as_it_is.axes
        return v

    def again(self, f: Callable[..., Variable], *others: Any) -> Arranged:
        """A function of each element, in the same arrangement; ``others`` : numbers, or arranged alike."""
        return Arranged(
            f(self.base, *(x.base if isinstance(x, Arranged) else x for x in others)), self.atoms, self.axes
        )

    def like(self, other: Arranged) -> bool:
        """Whether elements at the same places lie at the same places of the bases."""
        return (self.atoms, self.axes) == (other.atoms, other.axes) and self.base.shape == other.base.shape

    # ------------------------------------------------------------ views
    def permuted(self, order: Sequence[int]) -> Arranged:
        return Arranged(self._base, self.atoms, [self.axes[k] for k in order])

    def swapped(self, a: int = -1, b: int = -2) -> Arranged:
        order = [*range(self.rank)]
        order[a], order[b] = order[b], order[a]
        return self.permuted(order)

    def reshaped(self, sizes: Sequence[Affine | int]) -> Arranged:
        """The same elements in another shape, of which one size may be -1."""
        whole = [affine(n) for n in sizes]
        if unknown := [k for k, n in enumerate(whole) if n == -1]:
            (k,) = unknown
            whole[k] = numel(self.shape) // numel(tuple(n for i, n in enumerate(whole) if i != k))
        return self._as_stored()._split(whole) or Arranged.of(_reshaped(self.variable(), whole))

    def _as_stored(self) -> Arranged:
        """The same on images as they are stored, (N, *sizes, C), so that parts of the channels lie side by side."""
        base = self._base
        if isinstance(base, Columns) or not base.layout or self.atoms != base.shape:
            return self
        n, (batch, channels, *sizes) = base.rank, base.shape
        place = [0, n - 1, *range(1, n - 1)]
        return Arranged(
            F.channels_last(base), [batch, *sizes, channels], [tuple(place[k] for k in axis) for axis in self.axes]
        )

    def _split(self, sizes: Sequence[Affine]) -> Arranged | None:
        """The same in another shape, if its axes are made of atoms, or of parts of them."""
        parts = [[self.atoms[k]] for k in range(len(self.atoms))]  # of each atom
        left, axes = self.order[::-1], []
        for size in sizes:
            axis: list[tuple[int, int]] = []
            while size != ONE:
                if not left:
                    return None
                k = left[-1]
                atom = parts[k][-1]
                if (rest := _quotient(size, atom)) is not None:
                    axis.append((k, len(parts[k]) - 1))
                    left.pop()
                    size = rest
                elif (rest := _quotient(atom, size)) is not None:
                    parts[k][-1:] = [size, rest]
                    axis.append((k, len(parts[k]) - 2))
                    size = ONE
                else:
                    return None
            axes.append(axis)
        if left:
            return None
        first = [sum(len(p) for p in parts[:k]) for k in range(len(parts))]
        atoms = [n for p in parts for n in p]
        return Arranged(self._base, atoms, [tuple(first[k] + part for k, part in axis) for axis in axes])

    def part(self, axis: int, start: int, stop: int) -> Arranged:
        """Elements ``start`` to ``stop`` of an axis that is not the batch."""
        if (start, stop) == (0, self.shape[axis]):
            return self
        of = self._as_stored() if len(self.axes[axis]) == 1 else Arranged.of(self.variable())
        if of.axes[axis] == ():
            raise ShapeError(f"elements {start} to {stop} of axis {axis} of {show(self.shape)}")
        (k,) = of.axes[axis]
        if not of.atoms[k].constant:
            raise ShapeError(f"elements {start} to {stop} of axis {axis} of {show(self.shape)}, which is the batch")
        atoms = [*of.atoms]
        atoms[k] = Affine(0, stop - start)
        columns = of._columns(k, start, stop)
        if columns is None:
            rest = len(atoms) - k - 1
            lead = (None,) * k
            columns = F.slice(  # type: ignore[assignment]
                _reshaped(of.base, of.atoms), (*lead, start, *(None,) * rest), (*lead, stop, *(None,) * rest)
            )
        return Arranged(columns, *_without_ones(atoms, of.axes))  # type: ignore[arg-type]

    def _columns(self, k: int, start: int, stop: int) -> Columns | None:
        """Elements of an atom as columns, if it begins the last axis of the base."""
        known = self.columns
        base = known.of if known else self.base
        inner = numel(self.atoms[k + 1 :])
        width = known.stop - known.start if known else base.shape[-1]
        if base.rank < 2 or base.layout or not inner.constant or inner * self.atoms[k] != width:
            return None
        first = known.start if known else 0
        return Columns(base, first + start * inner.b, first + stop * inner.b)

    def without(self, axes: Sequence[int]) -> Arranged:
        """It without axes of size 1."""
        return Arranged(self._base, self.atoms, [axis for k, axis in enumerate(self.axes) if k not in axes])

    def rows(self, f: Callable[[Variable], Variable]) -> Arranged:
        """A function of each vector along the last axis, which may give it another size."""
        axis = self.axes[-1]
        first = len(self.atoms) - len(axis)
        of = self if axis == (*range(first, len(self.atoms)),) and first and axis else Arranged.of(self.variable())
        k = of.axes[-1][0] if of.axes[-1] else len(of.atoms)
        x, size = of.base, of.shape[-1]
        y = f(x if x.shape[-1] == size else _reshaped(x, (*of.atoms[:k], size)))
        last = y.shape[-1]
        atoms, new = (of.atoms[:k], ()) if last == ONE else ((*of.atoms[:k], last), (k,))
        return Arranged(y, atoms, [*of.axes[:-1], new])


def _without_ones(atoms: Sequence[Affine], axes: Sequence[Axis]) -> tuple[list[Affine], list[Axis]]:
    kept = [k for k, n in enumerate(atoms) if n != ONE]
    return [atoms[k] for k in kept], [tuple(kept.index(k) for k in axis if k in kept) for axis in axes]


def _quotient(a: Affine, b: Affine) -> Affine | None:
    try:
        return a // b
    except (ArithmeticError, ZeroDivisionError):
        return None


def _reshaped(v: Variable, sizes: Sequence[Affine]) -> Variable:
    return v if v.shape == (*sizes,) else F.reshape(v, (*sizes,))
