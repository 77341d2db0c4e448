"""Figures that judge a model: which way one is better."""

from __future__ import annotations

import re

from calcvm.errors import CalcError

# Words of a figure's name.  One that says both, or neither, is asked for.
SMALL = frozenset(
    "loss losses mse mae rmse msle rmsle mape smape huber cosh nll cross xent error errors cost deviance perplexity wer cer "
    "brier seconds bytes".split()
)
LARGE = frozenset(
    "accuracy acc r2 f1 f2 fbeta auc auroc auprc precision recall sensitivity specificity iou miou jaccard dice mcc kappa "
    "psnr ssim bleu rouge ndcg".split()
)
TURNED = frozenset("neg negative minus inverse non not".split())  # they turn round what others say


def largest_is_best(name: str) -> bool | None:
    """Whether the largest of a figure is the best, by its name; None: the name does not say."""
    words = {*re.split(r"[^a-z0-9]+", name.lower())}
    small, large = not words.isdisjoint(SMALL), not words.isdisjoint(LARGE)
    return None if small == large or not words.isdisjoint(TURNED) else large


def largest_of(what: str, name: str, largest: bool | None, option: str = "largest") -> bool:
    """``largest`` where it is given, else `largest_is_best` (CalcError: nobody has said it)."""
    if largest is None:
        largest = largest_is_best(name)
    if largest is None:
        raise CalcError(
            f"{what}: whether a large or a small {name!r} is the better one, its name does not say: give {option}=True or "
            f"{option}=False"
        )
    return largest
