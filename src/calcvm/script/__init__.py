"""Programs as scripts that need NumPy alone, and gradients as equations."""

from __future__ import annotations

from calcvm.script import (  # noqa: F401  (each registers the texts of a family's rows)
    contraction,
    elementwise,
    normalization,
    optimizers,
    pooling,
    reduction,
    shape,
    stated,
)
