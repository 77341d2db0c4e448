"""Texts of convolutions."""

from __future__ import annotations

from typing import Any

from calcvm.ops.dims import ONE, Shape
from calcvm.script.code import show_axes
from calcvm.script.elementwise import activated, derived
from calcvm.script.row import Row, writes


class Windows:
    """The words of a convolution, without leading axes that have no effect."""

    def __init__(self, r: Row):
        w = r.w

        def idle(i: int) -> bool:
            ones = all(getattr(w, f"{v}{i}") == ONE for v in ("I", "O", "K", "S"))
            return ones and getattr(w, f"P{i}") == 0

        first = next((i for i in range(2) if not idle(i)), 2)
        axes = range(first, 3)

        def each(letter: str) -> tuple[Any, ...]:
            return tuple(getattr(w, f"{letter}{i}") for i in axes)

        self.size, self.out, self.window = each("I"), each("O"), each("K")
        self.stride, self.padding, self.dilation = each("S"), each("P"), each("L")
        self.groups = w.G
        self.image: Shape = (w.N, *self.size, w.G * w.C)
        self.result: Shape = (w.N, *self.out, w.G * w.F)
        self.weights: Shape = (*self.window, w.C, w.G * w.F)
        self.axes = tuple(range(len(self.size) + 1))

    def forward(self, r: Row, x: Any, wt: Any) -> Any:
        return r.call("conv", x, wt, self.stride, self.padding, self.dilation, self.groups, self.out)

    def back(self, r: Row, dy: Any, wt: Any) -> Any:
        return r.call("conv_back", dy, wt, self.size, self.stride, self.padding, self.dilation, self.groups)

    def of_weights(self, r: Row, x: Any, dy: Any) -> Any:
        return r.call("conv_weights", x, dy, self.window, self.stride, self.padding, self.dilation, self.groups)


def _completed(r: Row, y: Any, shape: Shape) -> Any:
    """Apply bias, the known parts of a normalization, an added array, and the activation."""
    channels = shape[-1]
    y = y + r.x("b", channels) if "b" in r else y
    if "factor" in r:
        y = (y - r.x("mean", channels) if "mean" in r else y) * r.x("factor", channels)
        y = y + r.x("offset", channels) if "offset" in r else y
    y = y + r.x("other", *shape) if "other" in r else y
    return activated(r, y)


def _derived(r: Row, dx: Any, shape: Shape) -> Any:
    dx = dx + r.x("other", *shape) if "other" in r else dx
    return derived(r, dx, r.x("ya", *shape) if "ya" in r else None)


def _through(r: Row, name: str, forward: bool) -> tuple[Any, Shape]:
    """Apply the windows to an operand, forward from image to result or backward; the result, and its shape."""
    o = Windows(r)
    run, source, made = (o.forward, o.image, o.result) if forward else (o.back, o.result, o.image)
    return run(r, r.x(name, *source), r.x("wt", *o.weights)), made


@writes("conv_fwd", "conv_transpose_fwd")
def _conv(r: Row) -> None:
    y, shape = _through(r, "x", r.spec.name == "conv_fwd")
    r.put("y", _completed(r, y, shape), *shape)


@writes("conv_bwd_x", "conv_transpose_bwd_x")
def _conv_x(r: Row) -> None:
    dx, shape = _through(r, "dy", r.spec.name != "conv_bwd_x")
    r.put("dx", _derived(r, dx, shape), *shape)


@writes("conv_bwd_w")
def _conv_w(r: Row) -> None:
    o = Windows(r)
    dy = r.x("dy", *o.result)
    r.put("dwt", o.of_weights(r, r.x("x", *o.image), dy), *o.weights, add=r.w.acc == 1)
    r.put("db", dy.method(f"sum({show_axes(o.axes)})"), o.result[-1], add=r.w.acc == 1)


@writes("conv_transpose_bwd_w")
def _conv_transpose_w(r: Row) -> None:
    o = Windows(r)
    dy = r.x("dy", *o.image)
    r.put("dwt", o.of_weights(r, dy, r.x("x", *o.result)), *o.weights, add=r.w.acc == 1)
    r.put("db", dy.method(f"sum({show_axes(o.axes)})"), o.image[-1], add=r.w.acc == 1)
