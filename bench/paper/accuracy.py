"""4.2: the accuracy of a single model over the rounds: the curves of all contestants must be one curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.harness import Result, n_cores
from bench.mlp import ROUNDS, start
from bench.paper.samples import Source
from bench.peers import NAMES

WHO = ("ours", "torch_eager", "jax_step")
QUICK_ROUNDS, QUICK_SAMPLES = 8, 100
EVERY = 4  # rounds between two looks at the accuracy
LOSS_TOLERANCE, ACCURACY_TOLERANCE = 1e-3, 0.005  # of the losses, relative; of the accuracies: rounding adds up


def run(result: Result, sources: Sequence[Source], quick: bool) -> None:
    """Curves of every source: a table, and one picture."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    found = {}
    for given in sources[-1 if quick else 0 :]:
        source = given.first(QUICK_SAMPLES) if quick else given
        found[source.name] = curves(result, source, rounds, quick)
        compare(result, source, found[source.name], rounds)
    title = f"4.2: accuracy on unseen samples over {rounds} rounds, from the same weights"
    result.picture("paper-4.2", title, lambda figure: draw(figure, found))


def curves(result: Result, source: Source, rounds: int, quick: bool) -> dict[str, dict[str, np.ndarray]]:
    """Losses of each round and accuracies of every fourth, by contestant."""
    found = {}
    with source.files() as (train, test):
        for who in WHO[: 2 if quick else None]:
            try:
                process = start(who, source.sizes, len(source.x), n_cores(), None, data=train)
            except RuntimeError as error:
                text = f"{NAMES[who]} left out of 4.2: {error}"
                result.fail(text) if who == "ours" else result.note(text)
                continue
            reply = process.ask(curve=rounds, every=EVERY, test=test)
            process.close()
            found[who] = {name: np.array(values) for name, values in reply.items()}
    return found


def compare(result: Result, source: Source, found: dict[str, dict[str, np.ndarray]], rounds: int) -> None:
    """How far the peers' curves are from ours."""
    if "ours" not in found:
        return
    ours, rows = found["ours"], []
    for who, theirs in found.items():
        loss = float(np.abs(theirs["losses"] / ours["losses"] - 1).max())
        points = float(np.abs(theirs["accuracies"] - ours["accuracies"]).max())
        rows.append(
            [
                NAMES[who],
                f"{theirs['losses'][-1]:.6f}",
                f"{100 * theirs['accuracies'][-1]:.2f} %",
                f"{100 * theirs['accuracies'].max():.2f} %",
                f"{loss:.1e}" if who != "ours" else "-",
                f"{100 * points:.2f}" if who != "ours" else "-",
            ]
        )
        if loss > LOSS_TOLERANCE or points > ACCURACY_TOLERANCE:
            result.fail(f"4.2, {source.name}: {NAMES[who]}'s curve is not ours ({loss:.1e} of the loss, {points:.1%})")
    header = ["4.2", "last loss", "last accuracy", "best", "loss differs by at most", "accuracy by, points"]
    name = "-".join(map(str, source.sizes))
    result.table(f"4.2: {source.name}, {name}, {rounds} rounds of {len(source.x)} samples", header, rows)


def draw(figure: Any, found: dict[str, dict[str, dict[str, np.ndarray]]]) -> None:
    """Accuracy by round, a part for each source: ours as a line, the others as marks on it."""
    for axes, (name, contestants) in zip(np.atleast_1d(figure.subplots(1, len(found))), found.items()):
        for i, (who, curve) in enumerate(contestants.items()):
            rounds = EVERY * np.arange(1, len(curve["accuracies"]) + 1)
            if who == "ours":
                axes.plot(rounds, 100 * curve["accuracies"], color="C3", label=NAMES[who])
            else:
                some = slice(3 * i, None, 10)
                style = {"marker": "ox"[i % 2], "linestyle": "", "fillstyle": "none", "color": f"C{i - 1}"}
                axes.plot(rounds[some], 100 * curve["accuracies"][some], label=NAMES[who], **style)
        axes.set(title=name, xlabel="round", ylabel="accuracy on unseen samples, %")
        axes.legend(loc="lower right")
