"""Random operators: no mask is stored, every number is a hash of (seed, step, stream, element).

``rng`` is two int64 in the heap: the seed, and a counter that `rng_advance` increments once per forward pass, before
the first row that reads it.  So a backward recomputes the numbers that its forward drew, results do not depend on the
team, and saving the heap saves the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calcvm.ops.dims import ONE, Shape, affine, numel, show
from calcvm.ops.resizing import BEYOND, CONSTANT, LARGEST_PAD, REFLECT
from calcvm.ops.spec import (
    SIZE,
    Attr,
    Example,
    R,
    RowSpec,
    Shapes,
    U,
    W,
    Word,
    choice,
    dims,
    operator,
    rows_cols,
    same_shape,
)
from calcvm.ops.types import CELLS

STREAM = Word(name="stream", kind="int", lo=0, hi=2**31 - 1)
OF_STREAM = Attr(
    name="stream",
    default=0,
    check=lambda v: isinstance(v, int) and 0 <= v < 2**31,
    doc="rows of one graph that must draw independently need different streams",
)
DRAWN = "it draws random numbers by a counter"
DRAWS = (R("rng", "2", type="int64"), R("rate", "1", type="float64"))


def _row(name: str, x: str, y: str) -> RowSpec:
    return RowSpec(
        name=name,
        synopsis=f"{y}[i] = {x}[i]/(1 - rate) if u(seed, counter, stream, i) >= rate else 0",
        no_equation=DRAWN,
        words=(*dims("rows cols"), STREAM),
        operands=(R(x, SIZE, "rows"), *DRAWS, W(y, SIZE, "rows")),
        in_place=((y, x),),
        flops=f"2*{SIZE}",
    )


operator(
    name="dropout",
    synopsis="y[i] = x[i]/(1 - rate) with probability 1 - rate, else 0",
    category="random",
    inputs=("x", "rng", "rate"),
    attrs=(OF_STREAM,),
    shape=same_shape,
    words=lambda shapes, attrs: {**rows_cols(shapes["x"]), "stream": attrs.get("stream", 0)},
    fwd=(_row("dropout_fwd", "x", "y"),),
    bwd=(_row("dropout_bwd", "dy", "dx"),),
    anyhow=True,
    differentiable=("x",),
    onnx=("Dropout",),
    examples=(
        Example(shapes=((None, 5), (2,), ()), low=0.1, high=0.9),
        Example(shapes=((None, 19), (2,), ()), low=0.1, high=0.9, attrs={"stream": 3}),
        Example(shapes=((37,), (2,), ()), low=0.1, high=0.9, attrs={"stream": 2**31 - 1}),
        Example(shapes=((None, 64), (2,), ()), low=0.1, high=0.9, batch=256, bench=True),
    ),
    source="Srivastava et al. 2014, inverted scaling; the hash is SplitMix64's (Steele et al. 2014)",
)


def _check_state(shapes: Shapes) -> None:
    for name, n in (("rng", 2), ("rate", 1)):
        if (given := shapes.get(name)) is not None and numel(given) != n:
            raise ValueError(f"{name} {show(given)} must have {n} elements")


def _one_a_channel(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    _check_state(shapes)
    x, axis = shapes["x"], attrs["axis"]
    if len(x) <= axis:
        raise ValueError(f"{show(x)} has no channels, which would be its axis {axis}")
    return {"y": tuple(n if i in (0, axis) else ONE for i, n in enumerate(x))}


operator(
    name="dropout_mask",
    synopsis="y = 1/(1 - rate) with probability 1 - rate, else 0, for each sample and channel of x",
    category="random",
    inputs=("x", "rng", "rate"),
    attrs=(Attr(name="axis", default=1, check=lambda v: isinstance(v, int) and v > 0, doc="the channels"), OF_STREAM),
    shape=_one_a_channel,
    words=lambda shapes, attrs: {**rows_cols(shapes["y"]), "stream": attrs["stream"]},
    fwd=(
        RowSpec(
            name="dropout_mask_fwd",
            synopsis="y[i] = 1/(1 - rate) if u(seed, counter, stream, i) >= rate else 0",
            no_equation=DRAWN,
            words=(*dims("rows cols"), STREAM),
            operands=(*DRAWS, W("y", SIZE, "rows")),
            flops=SIZE,
        ),
    ),
    anyhow=True,
    relaid=lambda attrs, order: {**attrs, "axis": order.index(attrs["axis"])},
    flat=("x",),
    examples=(
        Example(shapes=((None, 5, 3, 2), (2,), ()), low=0.1, high=0.9),
        Example(shapes=((None, 4, 19), (2,), ()), low=0.1, high=0.9, attrs={"axis": 2, "stream": 3}),
    ),
    source="Tompson et al. 2015; drawn like dropout",
)


# ---------------------------------------------------------------- augmentation of images
MOST_AXES = 3


def _numbers(check: Any) -> Any:
    return lambda v: isinstance(v, tuple) and 1 <= len(v) <= MOST_AXES and all(map(check, v))


def _crop_axes(x: Shape, attrs: Mapping[str, Any]) -> list[tuple[int, int, int, float]]:
    """(size, size of the result, padding on either side, rate of flips) of each spatial axis."""
    first, sizes = attrs["first"], attrs["sizes"]
    spatial = x[first : first + len(sizes)]
    if len(x) != len(sizes) + 2 or not len(sizes) == len(attrs["padding"]) == len(attrs["flips"]):
        raise ValueError(
            f"{show(x)} is not an image with a size, a padding and a rate for each of its spatial axes: {sizes}, "
            f"{attrs['padding']}, {attrs['flips']}"
        )
    for d, e, p in zip(spatial, sizes, attrs["padding"]):
        if not d.constant:
            raise ValueError(f"a spatial axis of {show(x)} is the batch")
        if e > d.b + 2 * p:
            raise ValueError(f"a crop of {e} is larger than {d} of {show(x)} with {p} before and after: {d.b + 2 * p}")
        if p and (attrs["mode"] == "reflect" and p >= d.b or attrs["mode"] != "constant" and not d.b):
            raise ValueError(
                f"padding {p} of {d} in {show(x)}: reflection needs less than the size, and the other modes at least one element"
            )
    return [(d.b, *numbers) for d, *numbers in zip(spatial, sizes, attrs["padding"], attrs["flips"])]


def _cropped(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    _check_state(shapes)
    x, first = shapes["x"], attrs["first"]
    axes = _crop_axes(x, attrs)
    return {"y": (*x[:first], *(affine(e) for _, e, _, _ in axes), *x[first + len(axes) :])}


def _crop_words(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The batch, channels before the spatial axes, these axes, channels after them."""
    x, first = shapes["x"], attrs["first"]
    axes = _crop_axes(x, attrs)
    words: dict[str, Any] = {"N": x[0], "A": numel(x[1:first]), "C": numel(x[first + len(axes) :])}
    three = (axes[0], *((1, 1, 0, 0.0),) * (MOST_AXES - len(axes)), *axes[1:])
    for name, (d, e, p, rate) in zip("dhw", three):
        words |= {name.upper(): affine(d), f"E{name.upper()}": affine(e), f"p{name}": p, f"f{name}": float(rate)}
    return words | {"mode": BEYOND.index(attrs["mode"]), "stream": attrs["stream"]}


operator(
    name="crop",
    synopsis="y = of each image of x, padded, a part at a place that is drawn, mirrored by chance; without rng its middle",
    category="random",
    inputs=("x", "rng"),
    optional_inputs=("rng",),
    attrs=(
        Attr(name="sizes", check=_numbers(lambda n: type(n) is int and n >= 0), doc="of the result, one per axis"),
        Attr(
            name="padding",
            check=_numbers(lambda n: type(n) is int and 0 <= n <= LARGEST_PAD),
            doc="elements before and after each axis",
        ),
        Attr(name="flips", check=_numbers(lambda p: 0 <= p <= 1), doc="the probability that an axis is mirrored"),
        Attr(name="mode", default="constant", check=lambda v: v in BEYOND, doc="the padding: zeros, or as for pad"),
        Attr(name="first", default=2, check=lambda v: v in (1, 2), doc="the first spatial axis"),
        OF_STREAM,
    ),
    shape=_cropped,
    words=_crop_words,
    fwd=(
        RowSpec(
            name="crop_fwd",
            synopsis="y[n, a, o, c] = padded x[n, a, start + (o or E - 1 - o), c]; start and which drawn by (seed, counter, stream, n)",
            no_equation=DRAWN,
            words=(
                *dims("N A D H W C ED EH EW"),
                *(Word(name=f"p{v}", kind="int", lo=0, hi=LARGEST_PAD) for v in "dhw"),
                choice("mode", len(BEYOND)),
                STREAM,
                *(Word(name=f"f{v}", kind="float", lo=0, hi=1) for v in "dhw"),
            ),
            operands=(
                R("x", "N*A*D*H*W*C", type=CELLS),
                R("rng", "2", type="int64", optional=True),
                W("y", "N*A*ED*EH*EW*C", "N*A*ED", type=CELLS),
            ),
            require=(
                *(f"{v.upper()} + 2*p{v} - E{v.upper()}" for v in "dhw"),
                *(
                    f"{v.upper()} - 1 - (p{v} if mode == {REFLECT} else 0) if mode != {CONSTANT} and p{v} > 0 else 0"
                    for v in "dhw"
                ),
            ),
        ),
    ),
    anyhow=True,
    relaid=lambda attrs, order: {**attrs, "first": order.index(attrs["first"])},
    examples=(
        Example(shapes=((None, 3, 4, 5), (2,)), attrs={"sizes": (4, 5), "padding": (1, 2), "flips": (0.0, 0.5)}),
        Example(
            shapes=((None, 6, 5, 3), (2,)),
            attrs={"sizes": (3, 7), "padding": (1, 1), "flips": (0.5, 1.0), "first": 1, "stream": 3},
            types={CELLS: "uint8"},
        ),
        Example(
            shapes=((None, 2, 3, 4, 5), (2,)),
            attrs={"sizes": (5, 3, 6), "padding": (2, 0, 1), "flips": (0.2, 0.0, 0.7), "mode": "reflect"},
            types={CELLS: "int64"},
        ),
        Example(shapes=((None, 2, 9), (2,)), attrs={"sizes": (12,), "padding": (8,), "flips": (0.5,), "mode": "wrap"}),
        Example(
            shapes=((None, 2, 6, 5),), attrs={"sizes": (3, 6), "padding": (0, 1), "flips": (0.0, 0.5), "mode": "edge"}
        ),
        Example(
            shapes=((None, 32, 32, 3), (2,)),
            attrs={"sizes": (32, 32), "padding": (4, 4), "flips": (0.0, 0.5), "first": 1},
            batch=64,
            bench=True,
        ),
    ),
    source="Krizhevsky et al. 2012; drawn like dropout, by the image's number in the batch",
)

operator(
    name="rng_advance",
    synopsis="counter += 1",
    category="system",
    inputs=("rng",),
    outputs=("rng",),
    shape=lambda shapes, attrs: {"rng": shapes["rng"]},
    words=lambda shapes, attrs: {},
    fwd=(
        RowSpec(
            name="rng_advance",
            synopsis="rng.counter += 1",
            no_equation="its state is 64 bits in two floats",
            words=(),
            operands=(U("rng", "2", "w0", type="int64"),),
        ),
    ),
    examples=(Example(shapes=((2,),)),),
)
