"""4.4: many models for many rounds, each on its own samples of the digits, against torch and JAX at their best.

A round is a pass over a model's own 256 samples, 8 steps of 32; models have their own weights from the start and
train with Adam.  Peers train as many of the models as takes reasonable time, and the rest is reckoned.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from bench.fleet import TOLERANCE
from bench.harness import Result, interleave, n_cores, number
from bench.many import NAMES, Team
from bench.paper.samples import Source
from bench.peers import Task

BATCH, BATCHES, HIDDEN = 32, 8, [64, 64]
MODELS, ROUNDS = (1, 10, 100, 1000), (1, 10, 30)
QUICK_MODELS, QUICK_ROUNDS = (1,), (1, 2)
FAMILIES = {
    "calcvm": ("ours",),
    "torch": ("torch_one", "torch_stacked", "torch_compiled"),
    "JAX": ("jax_one", "jax_devices"),
}
# least and most models for which a contestant can be its family's best
RANGE = {"torch_one": (1, 10), "torch_stacked": (10, 1000), "torch_compiled": (100, 1000)}
RANGE |= {"jax_one": (1, 10), "jax_devices": (10, 1000)}
MOST = 200  # models that a stacking contestant trains, where there are more: they go through its chunks alike
REPEATS, TURN_SECONDS, QUICK_TURN_SECONDS = 5, 0.02, 0.002


def run(result: Result, sources: Sequence[Source], quick: bool) -> None:
    """Every number of models by every number of rounds: a table and a picture."""
    digits = sources[-1].name == "the digits"
    sizes = [sources[-1].sizes[0], *HIDDEN, 10]
    if not digits:
        result.note("4.4 is of made-up data: the digits need scikit-learn")
    data = "digits" if digits else "made up"
    best: dict[tuple[str, int, int], tuple[float, str]] = {}
    setup: dict[tuple[str, int], float] = {}
    sampled: dict[str, int] = {}
    for models in QUICK_MODELS if quick else MODELS:
        task = {"sizes": sizes, "models": models, "batch": BATCH, "batches": BATCHES, "data": data}
        for (who, rounds), (seconds, trained, first) in measure(result, task, quick).items():
            family = next(f for f, members in FAMILIES.items() if who in members)
            taken = seconds * models / trained
            if trained < models:
                sampled[who] = trained
            if taken < best.get((family, models, rounds), (np.inf, ""))[0]:
                best[family, models, rounds] = taken, who
                setup[family, models] = first  # in the end, of the fastest at the most rounds
    name = f"{'-'.join(map(str, sizes))}, {data}"
    tabulate(result, name, best, setup, Task(sizes))
    samples = ", ".join(f"{NAMES[who]}: {n}" for who, n in sampled.items())
    result.note(
        "4.4: a family's fastest contestant is named in each cell; those that train one by one run in a process for "
        f"each core.  Of more models, {samples or 'none'} were trained and the rest reckoned.  A first use (the choice "
        "of chunks apart) is building, compiling and one training of the longest kind."
    )
    title = f"4.4: models x rounds, {name}: seconds, every model {BATCHES} steps of {BATCH} a round"
    result.picture("paper-4.4", title, lambda figure: draw(figure, best))


def contestants(models: int, quick: bool) -> list[str]:
    """The contestants: ours, and the best of each family for so many models."""
    ranges = {who: RANGE.get(who, (1, models)) for members in FAMILIES.values() for who in members}
    able = [who for who, (least, most) in ranges.items() if least <= models <= most]
    return able[:2] if quick else able


def measure(result: Result, task: dict[str, Any], quick: bool) -> dict[tuple[str, int], tuple[float, int, float]]:
    """By contestant and rounds: seconds, models trained, seconds of a first use."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    teams: dict[str, Team] = {}
    found = {}
    try:
        for who in contestants(task["models"], quick):
            part = task if who == "ours" else {**task, "models": min(task["models"], MOST)}
            try:
                team = Team(who, [part], n_cores(), max(rounds))
            except RuntimeError as error:
                text = f"{NAMES[who]} left out of 4.4, {task['models']} models: {error}"
                result.fail(text) if who == "ours" else result.note(text)
                continue
            teams[who] = team
            if "ours" in teams and (worst := team.compare(teams["ours"].losses)) > TOLERANCE:
                result.fail(f"{NAMES[who]} DISAGREES in 4.4, {task['models']} models: a loss differs by {worst:.1e}")
                teams.pop(who).close()
        for n in rounds:
            turns, counts = {}, {}
            for who, team in teams.items():
                team.seconds(n)  # JAX compiles for each number of rounds
                counts[who] = max(1, round((QUICK_TURN_SECONDS if quick else TURN_SECONDS) / team.seconds(n)))
                turns[who] = partial(turn, team, n, counts[who])
            for who, t in interleave(turns, 1 if quick else REPEATS).items():
                found[who, n] = min(t), teams[who].models, teams[who].first + teams[who].setup * (who == "ours")
    finally:
        for team in teams.values():
            team.close()
    return found


def turn(team: Team, rounds: int, count: int) -> float:
    return sum(team.seconds(rounds) for _ in range(count)) / count


def tabulate(
    result: Result,
    name: str,
    best: dict[tuple[str, int, int], tuple[float, str]],
    setup: dict[tuple[str, int], float],
    task: Task,
) -> None:
    """A row for each number of models and rounds, and a target for each family of peers."""
    rows: list[list[str]] = []
    least: dict[str, float] = {}
    cells = sorted({(models, rounds) for _, models, rounds in best})
    limit = task.step_flops(BATCH) * BATCHES / (result.data["limits"]["fma_gflops"] * 1e9 * n_cores())
    for models, rounds in cells:
        row = [f"{models:,}", str(rounds)]
        ours = best.get(("calcvm", models, rounds), (float("nan"), ""))[0]
        for family in FAMILIES:
            seconds, who = best.get((family, models, rounds), (float("nan"), ""))
            named = f" ({NAMES[who]})" if who and family != "calcvm" else ""
            row.append(number(seconds * 1e3) + named if who else "-")
            if family != "calcvm":
                row.append(number(seconds / ours) if who else "-")
                if not np.isnan(seconds / ours):
                    least[family] = min(least.get(family, np.inf), seconds / ours)
        row.append(f"{100 * limit * models * rounds / ours:.0f} %")
        row += [f"{setup[family, models]:.2f}" if (family, models) in setup else "-" for family in FAMILIES]
        rows.append(row)
    header = ["models", "rounds", "calcvm ms", "torch ms", "times ours", "JAX ms", "times ours", "ours of limit"]
    result.table(f"4.4: {name}", [*header, *(f"first use, {family}, s" for family in FAMILIES)], rows)
    for family, value in least.items():
        what = f"4.4, {name}: least ratio of {family} at its best to ours over {len(cells)} cells"
        result.target("§4.4", what, float(value), 1.0, "x")


def draw(figure: Any, best: dict[tuple[str, int, int], tuple[float, str]]) -> None:
    """Seconds by models times rounds, both logarithmic; a colour for each family, a mark for each number of models."""
    axes = figure.subplots()
    marks = dict(zip(sorted({models for _, models, _ in best}), "osD^"))
    for (family, colour), (models, mark) in ((f, m) for f in zip(FAMILIES, ("C3", "C1", "C0")) for m in marks.items()):
        points = [(models * rounds, t) for (f, m, rounds), (t, _) in best.items() if (f, m) == (family, models)]
        if points:
            label = f"{family}, {models:,} model{'s' if models > 1 else ''}"
            axes.scatter(*zip(*points), marker=mark, color=colour, label=label, alpha=0.8)
    axes.set(xscale="log", yscale="log", xlabel="models x rounds", ylabel="seconds")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
