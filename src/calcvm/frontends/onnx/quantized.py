"""Integers that stand for floats: number = (integer - zero point) * scale.

Products of integers are computed in floats: their sums are exact below 2^24, in a network of float64 below 2^53.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from calcvm import functions as F
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.aten.shapes import repeat_interleave
from calcvm.frontends.building import Building, Cannot, arranged, whole
from calcvm.frontends.onnx.declared import floats, in_type, is_known, onnx, place_of, type_of
from calcvm.frontends.onnx.layers import conv, product
from calcvm.graph import Variable
from calcvm.ops.dims import numel

TYPES = {2: "uint8", 3: "int8"}  # by their numbers in files


def _number(b: Building, x: Any) -> Any:
    """An array of floats if it is known, else a variable."""
    return x.astype(float) if is_known(x) else floats(b, x)


def _moved(b: Building, x: Any, zero: Any) -> Any:
    """Integers less their zero point."""
    return _number(b, x) if zero is None or (is_known(zero) and not zero.any()) else _number(b, x) - _number(b, zero)


def _saturated(x: Variable, zero: Any, kind: str) -> Arranged:
    """The nearest integers, which a cast saturates, with their zero point added."""
    y = F.round(x)
    return Arranged.of(in_type(y if zero is None else y + zero, kind))


def _kind(zero: Any, code: int = 0) -> str:
    """The type of integers."""
    kind = TYPES.get(code, str(code)) if code else "uint8" if zero is None else type_of(zero)
    if kind not in TYPES.values():
        raise Cannot(f"its integers are {kind}: int8 and uint8 have a counterpart")
    return kind


def _shaped(x: Any, *sizes: int) -> Any:
    """A number for each row or channel, where it broadcasts; one number, and more axes, as they are."""
    return x if x is None or len(x.shape) != 1 or x.shape[0] == 1 else _reshaped(x, sizes)


def _reshaped(x: Any, sizes: Sequence[int]) -> Any:
    return x.reshape(sizes) if is_known(x) else x.reshaped(sizes)


# ---------------------------------------------------------------- products
def _product(b: Building, x: Any, x_zero: Any, y: Any, y_zero: Any) -> Variable:
    return product(b, _moved(b, x, _shaped(x_zero, -1, 1)), _moved(b, y, y_zero)).variable()


def _conv(b: Building, x: Any, x_zero: Any, w: Any, w_zero: Any, bias: Any = None, **how: Any) -> Variable:
    of_channels = _shaped(w_zero, -1, *(1,) * (len(w.shape) - 1))
    bias = None if bias is None else _number(b, bias)
    return conv(b, _moved(b, x, x_zero), _moved(b, w, of_channels), bias, **how).variable()


@onnx("MatMulInteger")
def matmul_integer(b: Building, x: Any, y: Any, x_zero: Any = None, y_zero: Any = None) -> Arranged:
    return Arranged.of(in_type(_product(b, x, x_zero, y, y_zero), "int32"))


@onnx("ConvInteger")
def conv_integer(b: Building, x: Any, w: Any, x_zero: Any = None, w_zero: Any = None, **how: Any) -> Arranged:
    return Arranged.of(in_type(_conv(b, x, x_zero, w, w_zero, **how), "int32"))


@onnx("QLinearMatMul")
def qlinear_matmul(
    b: Building, x: Any, x_scale: Any, x_zero: Any, y: Any, y_scale: Any, y_zero: Any, scale: Any, zero: Any
) -> Arranged:
    factor = _number(b, _shaped(x_scale, -1, 1)) * _number(b, y_scale) / _number(b, scale)
    return _saturated(_product(b, x, x_zero, y, y_zero) * factor, _number(b, zero), _kind(zero))


@onnx("QLinearConv")
def qlinear_conv(
    b: Building, x: Any, x_scale: Any, x_zero: Any, w: Any, w_scale: Any, w_zero: Any, scale: Any, zero: Any, bias: Any = None,
    **how: Any,
) -> Arranged:  # fmt: skip
    of_channels = _shaped(w_scale, -1, *(1,) * (len(w.shape) - 2))
    factor = _number(b, x_scale) * _number(b, of_channels) / _number(b, scale)
    return _saturated(_conv(b, x, x_zero, w, w_zero, bias, **how) * factor, _number(b, zero), _kind(zero))


# ---------------------------------------------------------------- from floats and to floats
def _spread(b: Building, x: Any, like: Any, axis: int, block: int) -> Any:
    """Scales or zero points, where they broadcast with a tensor: one for all, for each place of an axis, or for blocks of places."""
    if x is None:
        return None
    rank = len(like.shape)
    if not block:
        at = place_of(axis, rank) if numel(x.shape) != 1 else 0
        sizes = [-1 if k == at else 1 for k in range(rank)]
        return _number(b, _reshaped(x, sizes))
    at = place_of(axis, rank)
    size = whole(like.shape[at])
    if is_known(x):
        return np.repeat(x, block, at).take(range(size), at).astype(float)
    return floats(b, repeat_interleave(b, arranged(b, x), block, at).part(at, 0, size))


def _over(v: Variable, scale: Any) -> Variable:
    """v / scale, rounded as a quotient is: a divisor of all would become a factor, and integers between two others."""
    return F.div(v, F.cast(F.less(v, v), None) + scale)


@onnx("QuantizeLinear")
def quantize(
    b: Building, x: Any, scale: Any, zero: Any = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0,
    precision: int = 0, saturate: int = 1,
) -> Arranged:  # fmt: skip
    kind = _kind(zero, output_dtype)
    by, more = (_spread(b, v, x, axis, block_size) for v in (scale, zero))
    return _saturated(_over(floats(b, x), by), more, kind)


@onnx("DequantizeLinear")
def dequantize(
    b: Building, x: Any, scale: Any, zero: Any = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0
) -> Arranged:
    by, less = (_spread(b, v, x, axis, block_size) for v in (scale, zero))
    v = floats(b, x)
    return Arranged.of((v if less is None else v - less) * by)


@onnx("DynamicQuantizeLinear")
def dynamic_quantize(b: Building, x: Any) -> tuple[Arranged, ...]:
    v = floats(b, x)
    least, largest = F.minimum(F.min(v), 0.0), F.maximum(F.max(v), 0.0)
    scale = F.div(F.where(F.equal(least, largest), 1.0, largest - least), b.constant(np.float64(255)))
    zero = F.round(-least / scale)
    return _saturated(_over(v, scale), zero, "uint8"), Arranged.of(scale), Arranged.of(in_type(zero, "uint8"))
