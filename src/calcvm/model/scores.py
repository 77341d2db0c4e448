"""Outputs that are scores of classes, as determined from a program's loss."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from calcvm.errors import CalcError
from calcvm.ops.elementwise import WHERE_ROW
from calcvm.ops.losses import SCORES, SOFTMAX
from calcvm.ops.shape import COPY_ROW
from calcvm.ops.spec import stem_of
from calcvm.vm.program.program import Program


class Scores(NamedTuple):
    """The meaning of predict's output for its loss.  axis : that of the classes; None: each output is one class."""

    axis: int | None

    @np.errstate(all="ignore")  # independent of the caller's NumPy settings: underflow gives 0
    def probabilities(self, scores: np.ndarray) -> np.ndarray:
        return sigmoid(scores) if self.axis is None else softmax(scores, self.axis)

    def classes(self, scores: np.ndarray, above: float = 0) -> np.ndarray:
        """The class of the largest score, int64; the lowest among equals.  Without an axis: 1 if a score is ``above``, else 0."""
        return (scores > above).astype(np.int64) if self.axis is None else scores.argmax(axis=self.axis)

    def votes(self, scores: np.ndarray) -> np.ndarray:
        """1 for the predicted class, 0 elsewhere."""
        if self.axis is None:
            return scores > 0
        return np.moveaxis(np.eye(scores.shape[self.axis])[self.classes(scores)], -1, self.axis)


def scores_of(program: Program) -> Scores | None:
    """The kind of scores that the output of path predict holds; None: it holds none."""
    name = program.info["paths"]["predict"]["output"]
    facts = None if name is None else program.info["variables"][name]
    if facts is None or facts["symbol"] is None:
        return None
    output = program.copied_from("predict", facts["symbol"])
    image = facts.get("layout", program.symbols[output].layout) and len(facts["shape"]) > 2
    # copies of the output, with the axis of their last one; also values that differ from it only in ignored rows
    seen = {facts["symbol"]: -1, output: 1 if image else -1}
    for pc in range(*program.sections.get(("predict", "loss"), (0, 0))):
        row = stem_of(program.spec(pc).name)
        if row == WHERE_ROW and program.symbol_of(pc, "a") in seen:
            seen[program.symbol_of(pc, "y")] = seen[program.symbol_of(pc, "a")]
        if row == COPY_ROW and program.symbol_of(pc, "x") in seen:
            y = program.symbol_of(pc, "y")
            seen[y] = 1 if program.symbols[y].layout else -1
        if row in SCORES and (axis := seen.get(program.symbol_of(pc, SCORES[row]))):
            return Scores(axis if row == SOFTMAX else None)
    return None


def needed(program: Program) -> Scores:
    """As `scores_of` (CalcError: the outputs are no scores)."""
    scores = scores_of(program)
    if scores is None:
        raise CalcError("the model has no classes: its loss is no cross-entropy of scores (N, classes); use predict")
    return scores


def softmax(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    """exp(scores), normalized to sum 1 over an axis."""
    p = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return p / p.sum(axis=axis, keepdims=True)


def sigmoid(scores: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-scores))."""
    return np.exp(-np.logaddexp(0, -scores))
