"""Windows that slide along the spatial axes of an image: sizes, padding, messages; for pooling and convolution.

An image is stored channels last, (N, *sizes, C), with 1 to 3 spatial axes.  Rows see three of them, (L, 1, 1), (H, 1, W) or
(D, H, W), so that workers share it by N times the first, as in other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from calcvm.ops.dims import Affine, Shape, affine, show
from calcvm.ops.spec import Attr, Word, dims

MOST = 2**20  # largest number of a window, so that its product with a size fits 64 bits


class Axis(NamedTuple):
    """One spatial axis of the input and of the output, and the window that slides along it."""

    size: int
    out: int
    kernel: int = 1
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1


ALONE = Axis(1, 1)


# ---------------------------------------------------------------- attributes
def _of_numbers(least: int, lengths: tuple[int, ...] = (1, 2, 3)) -> Callable[[Any], bool]:
    def check(v: Any) -> bool:
        return isinstance(v, tuple) and len(v) in lengths and all(type(n) is int and least <= n <= MOST for n in v)

    return check


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: v is None or check(v)


KERNEL = Attr(name="kernel", check=_of_numbers(1), doc="sizes of the window, one per axis")
STRIDE = Attr(name="stride", check=_or_none(_of_numbers(1)), doc="steps of the window; None: its sizes")
PADDING = Attr(
    name="padding",
    check=_or_none(_of_numbers(0, (2, 4, 6))),
    doc="elements before each axis, then those after each; None: none",
)
DILATION = Attr(name="dilation", check=_or_none(_of_numbers(1)), doc="distance between taps; None: 1")
CEIL = Attr(
    name="ceil_mode",
    default=False,
    check=lambda v: isinstance(v, bool),
    doc="also count a last window that leaves the padded image, if it begins before the padding that follows",
)
OUT = Attr(name="sizes", check=_of_numbers(1), doc="sizes of the output, one per axis")


# ---------------------------------------------------------------- sizes
def sizes_of(x: Shape) -> tuple[int, ...]:
    """Spatial sizes of an image.

    Raises
    ------
    ValueError : it is not an image, or one of them is the batch.
    """
    if not 3 <= len(x) <= 5:
        raise ValueError(f"an image has a batch, 1 to 3 spatial axes and channels, in the heap last: not {show(x)}")
    for n in x[1:-1]:
        if not n.constant:
            raise ValueError(f"a window slides along axes of known sizes, not along the batch: {show(x)}")
    return tuple(n.b for n in x[1:-1])


def _one_each(x: Shape, **numbers: tuple[int, ...]) -> None:
    for name, v in numbers.items():
        if len(v) != len(x) - 2:
            raise ValueError(f"{name} {v}: the image {show(x)} has {len(x) - 2} spatial axes")


def slid(
    x: Shape,
    kernel: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
    padding: tuple[int, ...] | None = None,
    dilation: tuple[int, ...] | None = None,
    ceil_mode: bool = False,
) -> tuple[Axis, ...]:
    """The axes of an image along which a window slides.

    stride, dilation : None means 1.  padding : before each axis, then after each.
    """
    sizes = sizes_of(x)
    ones = (1,) * len(sizes)
    stride, dilation = stride or ones, dilation or ones
    padding = padding or (0,) * 2 * len(sizes)
    before, after = padding[: len(padding) // 2], padding[len(padding) // 2 :]
    _one_each(x, kernel=kernel, stride=stride, padding=before, dilation=dilation)
    numbers = zip(sizes, kernel, stride, before, after, dilation)
    return tuple(_axis(x, n, k, s, p, q, d, ceil_mode) for n, k, s, p, q, d in numbers)


def _axis(x: Shape, size: int, k: int, s: int, before: int, after: int, d: int, ceil_mode: bool) -> Axis:
    spans, padded = (k - 1) * d + 1, size + before + after
    window = f"window of {k}" + (f", {d} apart," if d > 1 else "")
    if max(before, after) >= spans:
        raise ValueError(f"padding ({before}, {after}) is no smaller than the span of the {window}: {spans}")
    last = padded - spans + (s - 1 if ceil_mode else 0)  # the last place where a window may begin
    if last < 0 or size == 0:
        raise ValueError(f"{window} spans {spans}, and {size} of {show(x)} with its padding only {padded}")
    out = last // s + 1
    if (out - 1) * s >= size + before:  # it would begin in the padding that follows
        out -= 1
    if d > size and any((o * s - before) % d >= size for o in range(min(out, -(-before // s)))):
        raise ValueError(
            f"a {window} beside an axis of {size} of {show(x)} would see padding ({before}, {after}) alone"
        )
    return Axis(size, out, k, s, before, after, d)


def adapted(x: Shape, sizes: tuple[int, ...]) -> tuple[Axis, ...]:
    """The axes of an image whose windows follow from the sizes of the output."""
    found = sizes_of(x)
    _one_each(x, sizes=sizes)
    if 0 in found:
        raise ValueError(f"{show(x)} has an axis of 0: there is nothing to pool for {sizes}")
    return tuple(Axis(n, out) for n, out in zip(found, sizes))


def out_shape(x: Shape, axes: tuple[Axis, ...]) -> Shape:
    """The shape of the output, with as many channels."""
    return (x[0], *(affine(a.out) for a in axes), x[-1])


# ---------------------------------------------------------------- words
def _integers(names: str, lo: int) -> tuple[Word, ...]:
    return tuple(Word(name=n, kind="int", lo=lo, hi=MOST) for n in names.split())


SIZES = dims("N D H W C OD OH OW")
WINDOW = (*_integers("kd kh kw sd sh sw", 1), *_integers("pd ph pw", 0), *_integers("dd dh dw", 1))
AFTER = _integers("qd qh qw", 0)
X, Y = "N*D*H*W*C", "N*OD*OH*OW*C"
X_ROWS, Y_ROWS = "N*D", "N*OD"  # the units that workers share


def words(x: Shape, axes: tuple[Axis, ...]) -> Mapping[str, Any]:
    """The values of all these words."""
    three = (axes[0], *(ALONE,) * (3 - len(axes)), *axes[1:])
    out: dict[str, Affine | int] = {"N": x[0], "C": x[-1]}
    for name, a in zip("dhw", three):
        out |= {name.upper(): affine(a.size), f"O{name.upper()}": affine(a.out)}
        numbers = zip("kspqd", (a.kernel, a.stride, a.before, a.after, a.dilation))
        out |= {f"{letter}{name}": n for letter, n in numbers}
    return out
