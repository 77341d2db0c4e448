"""Figures that judge a model: whether larger or smaller is better."""

from __future__ import annotations

import re

from calcvm.errors import CalcError

# Words in a figure's name.  If a name has words of both kinds, or none, the user must decide.
SMALL = frozenset(
    "loss losses mse mae rmse msle rmsle mape smape huber cosh nll cross xent error errors cost deviance perplexity wer cer "
    "brier seconds bytes".split()
)
LARGE = frozenset(
    "accuracy acc r2 f1 f2 fbeta auc auroc auprc precision recall sensitivity specificity iou miou jaccard dice mcc kappa "
    "psnr ssim bleu rouge ndcg".split()
)
TURNED = frozenset("neg negative minus inverse non not".split())  # they reverse the meaning of other words


def largest_is_best(name: str) -> bool | None:
    """Whether larger values of a figure are better, by its name; None: the name does not tell."""
    words = {*re.split(r"[^a-z0-9]+", name.lower())}
    small, large = not words.isdisjoint(SMALL), not words.isdisjoint(LARGE)
    return None if small == large or not words.isdisjoint(TURNED) else large


def largest_of(what: str, name: str, largest: bool | None, option: str = "largest") -> bool:
    """``largest`` if given, else `largest_is_best` (CalcError: the name does not tell)."""
    if largest is None:
        largest = largest_is_best(name)
    if largest is None:
        raise CalcError(
            f"{what}: the name {name!r} does not tell whether larger or smaller values are better: give {option}=True or "
            f"{option}=False"
        )
    return largest
