"""Outputs that are scores of classes: what a program's loss says of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from calcvm.errors import CalcError
from calcvm.ops.losses import SCORES, SOFTMAX
from calcvm.ops.spec import stem_of
from calcvm.vm.program.program import Program


def loss_of_scores(program: Program) -> str:
    """The row that makes a loss of the path predict's output as scores of classes; "" where there is none."""
    name = program.info["paths"]["predict"]["output"]
    output = -1 if name is None else program.info["variables"][name]["symbol"]
    for pc in range(*program.sections.get(("predict", "loss"), (0, 0))):
        name = stem_of(program.spec(pc).name)
        if name in SCORES and program.symbol_of(pc, SCORES[name]) == output:
            return name
    return ""


def needed(program: Program) -> str:
    """As `loss_of_scores` (CalcError: the outputs are no scores)."""
    loss = loss_of_scores(program)
    if not loss:
        raise CalcError("the model has no classes: its loss is no cross-entropy of scores (N, classes), take predict")
    return loss


def probabilities_of(loss: str) -> Callable[[np.ndarray], np.ndarray]:
    """What makes probabilities of scores."""
    return softmax if loss == SOFTMAX else sigmoid


def softmax(scores: np.ndarray) -> np.ndarray:
    """exp(scores), normalized to sum 1 over the last axis."""
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def sigmoid(scores: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-scores))."""
    return np.exp(-np.logaddexp(0, -scores))
