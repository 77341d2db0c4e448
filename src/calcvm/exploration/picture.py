"""A picture of a search: every trial's learning curve, and the best value over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from os import PathLike

from calcvm import files
from calcvm.errors import MissingExtra
from calcvm.exploration.trial import Trial

COLOURS = {"complete": "tab:blue", "pruned": "0.7", "failed": "tab:red", "interrupted": "tab:orange"}


def draw(trials: Sequence[Trial], metric: str, maximize: bool, path: str | PathLike[str]) -> None:
    """Write the picture; the suffix of ``path`` gives its format."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "plot", "a picture") from error
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    counts = Counter(t.status for t in trials)
    curves, times = figure.subplots(1, 2, sharey=True)
    for status in sorted(counts, key=list(COLOURS).index, reverse=True):
        label = f"{counts[status]} {status}"
        for trial in (t for t in trials if t.status == status):
            values = trial.curves.get(metric, [])
            style = {"lw": 0.7, "marker": "." if len(values) == 1 else "", "ms": 2}
            curves.plot(range(1, len(values) + 1), values, color=COLOURS[status], label=label, **style)
            label = "_"
    done = sorted((t.seconds, t.value) for t in trials if t.status == "complete" and t.value is not None)
    seconds, values = [s for s, _ in done], [v for _, v in done]
    times.plot(seconds, values, ".", color=COLOURS["complete"], label="complete trials")
    best = accumulate(values, max if maximize else min)
    times.step(seconds, list(best), where="post", color="black", label="best so far")
    curves.set(xlabel="epoch", ylabel=metric, title="learning curves")
    times.set(xlabel="seconds", title="best value over time")
    for axes in (curves, times):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    files.picture(path, figure, dpi=120)
