"""Programs as scripts that need only NumPy, and gradients as equations."""

from __future__ import annotations

from calcvm.script import (  # noqa: F401  (each registers the writers of a family of rows)
    contraction,
    elementwise,
    normalization,
    optimizers,
    pooling,
    quantized,
    recurrent,
    reduction,
    shape,
    stated,
    transformers,
)
