"""Texts of normalizations."""

from __future__ import annotations

from typing import Any

from calcvm.ops.dims import Shape
from calcvm.script.derived import write
from calcvm.script.row import Row, writes


@writes(
    "center_mean", "center_mean_bwd", "batch_norm_stats", "batch_norm_sums", "batch_norm_inference_sums", "group_norm_fwd",
    "group_norm_bwd", "layer_norm_fwd", "layer_norm_bwd", "rms_norm_fwd", "rms_norm_bwd",
)  # fmt: skip
def _summed_wide(r: Row) -> None:
    write(r, wide=True)


# ---------------------------------------------------------------- by adjacent channels
def _images(r: Row) -> Shape:
    """The shape of the operand with channels on its last axis: as stored, or as rows of channels."""
    for name in ("x", "y", "dx"):
        if name in r and r.shape(name)[-1:] == (r.w.N,):
            return r.shape(name)
    return r.w.rows * r.w.inner, r.w.N


def _base(r: Row, x: Any) -> Any:
    size = r.integer("size")
    return r.number(r.w.k) + r.w.alpha / size * r.call("neighbours", x * x, size // 2, (size - 1) // 2)


@writes("local_response_norm_fwd")
def _local(r: Row) -> None:
    x = r.x("x", *_images(r))
    r.put("y", x * _base(r, x) ** -r.w.beta, *_images(r))


@writes("local_response_norm_bwd")
def _local_back(r: Row) -> None:
    x, dy, size = r.x("x", *_images(r)), r.x("dy", *_images(r)), r.integer("size")
    d = _base(r, x)
    others = r.call("neighbours", dy * x * d ** -(r.w.beta + 1), (size - 1) // 2, size // 2)
    r.put("dx", dy * d**-r.w.beta - 2 * r.w.alpha * r.w.beta / size * x * others, *_images(r))
