"""P9: 1000 small models, each with separate data and initial weights, in microseconds per model step.

The models first have one shape, beside peers that train them stacked or one by one; then 40 shapes.  No time is
printed for a contestant if a model's mean loss over the first epoch differs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness import QUICK_REPEATS, REPEATS, Result, idlest_core, interleave, n_cores, number, ratio, turn_ratio
from bench.many import CONTESTANTS, NAMES, ONE_BY_ONE, SAMPLED, Team
from bench.peers import Task

SIZES, BATCH, BATCHES, MODELS = [16, 32, 32, 4], 32, 30, 1000
DEPTHS, WIDTHS = (1, 2, 3, 4), (8, 12, 16, 20, 24, 32, 40, 48, 56, 64)
SHAPES = [[SIZES[0], *[width] * depth, SIZES[-1]] for depth in DEPTHS for width in WIDTHS]
QUICK_MODELS, QUICK_SHAPES = 8, SHAPES[:20:5]
TOLERANCE = 1e-4  # relative, between each model's mean losses
TARGETS = {"jax_vmap": 5.0, "jax_devices": 5.0, "torch_one": 100.0}  # least ratio of a peer's time to ours
FLOP_TARGET = 1.3  # time per FLOP for many shapes over that for one


def job(sizes: list[int], models: int) -> dict[str, Any]:
    return {"sizes": sizes, "models": models, "batch": BATCH, "batches": BATCHES}


def step_flops(tasks: Sequence[Mapping[str, Any]]) -> float:
    """FLOPs of a model step, averaged over the tasks' models."""
    total = sum(t["models"] for t in tasks)
    return sum(t["models"] * Task(t["sizes"]).step_flops(t["batch"]) for t in tasks) / total


def start_all(
    result: Result, who: Sequence[str], tasks: list[dict[str, Any]], threads: int, what: str, epochs: int = 1
) -> dict[str, Team]:
    """The contestants that start and agree with our losses; errors of the others are noted."""
    core = idlest_core() if threads == 1 else None
    teams: dict[str, Team] = {}
    for name in who:
        try:
            team = Team(name, tasks, threads, epochs, core)
        except RuntimeError as error:
            text = f"{NAMES[name]} left out of {what}, {threads} thread(s): {error}"
            result.fail(text) if name.startswith("ours") else result.note(text)
            continue
        reference = next(iter(teams.values()), team).losses
        worst = team.compare(reference)
        if worst > TOLERANCE:
            result.fail(f"{NAMES[name]} DISAGREES in {what}: a model's mean loss differs by {worst:.1e}")
            team.close()
            continue
        teams[name] = team
    return teams


def time_models(
    result: Result, who: Sequence[str], tasks: list[dict[str, Any]], threads: int, what: str, quick: bool
) -> dict[str, list[float]]:
    """Time contestants on the same models and print their table; return seconds per model step of every turn."""
    what = f"{what}, {threads} thread{'s' if threads > 1 else ''}"
    teams = start_all(result, who, tasks, threads, what)
    try:
        runs = {name: lambda t=team: t.seconds(1) / (t.models * BATCHES) for name, team in teams.items()}
        times = interleave(runs, QUICK_REPEATS if quick else REPEATS)
        limit = step_flops(tasks) / (result.data["limits"]["fma_gflops"] * 1e9 * threads)
        rows = []
        for name, t in times.items():
            team = teams[name]
            notes = [team.note] if team.note else []
            if team.models < sum(task["models"] for task in tasks):
                notes.append(f"{team.models} models")
            if len(team.processes) > 1:
                notes.append(f"{len(team.processes)} processes")
            rows.append(
                [
                    NAMES[name] + (f" ({', '.join(notes)})" if notes else ""),
                    number(min(t) * 1e6),
                    number(statistics.median(t) * 1e6),
                    number(ratio(t, times["ours"])) if "ours" in times else "-",
                    number(turn_ratio(t, times["ours"])) if "ours" in times else "-",
                    f"{100 * limit / min(t):.0f} %",
                    number(team.setup + team.first),
                    f"{team.losses.mean():.7g}",
                ]
            )
        header = ["us per model step", "min", "median", "times ours", "by turns", "of limit", "setup s", "mean loss"]
        result.table(what, header, rows)
        return times
    finally:
        for team in teams.values():
            team.close()


def main(quick: bool = False) -> bool:
    """Run the workload; True if all agree."""
    result = Result("fleet", "Many models", quick)
    models, shapes = (QUICK_MODELS, QUICK_SHAPES) if quick else (MODELS, SHAPES)
    mixed = [job(sizes, models // len(shapes)) for sizes in shapes]
    name = "-".join(map(str, SIZES))
    for threads in [1] if quick else sorted({1, n_cores()}):
        who = [w for w in CONTESTANTS if w != "ours_apart" and (w != "jax_devices" or threads > 1)]
        who = ["ours", "torch_stacked"] if quick else who
        same = f"{models} models of {name}, batch {BATCH}, {BATCHES} steps"
        times = time_models(result, who, [job(SIZES, models)], threads, same, quick)
        for peer, least in TARGETS.items():
            if peer in who:
                value = ratio(times[peer], times["ours"]) if {peer, "ours"} <= times.keys() else None
                result.target("P9", f"{same}, {threads} thread(s), against {NAMES[peer]}", value, least, "x")
        many_shapes(result, mixed, threads, quick)
    widths = ", ".join(map(str, WIDTHS))
    result.note(
        f"The {len(SHAPES)} shapes are {SIZES[0]} inputs, 1 to {max(DEPTHS)} hidden layers of one width of {widths}, "
        f"and {SIZES[-1]} outputs, {MODELS // len(SHAPES)} models each.  Contestants that train one by one do so in a "
        f"process for each core, of {', '.join(f'{NAMES[w]}: {SAMPLED[w]}' for w in ONE_BY_ONE)} models of the {MODELS}."
    )
    return result.save()


def many_shapes(result: Result, mixed: list[dict[str, Any]], threads: int, quick: bool) -> None:
    """Models of many shapes at once, against the same models shape by shape, and against one shape, per FLOP."""
    models = sum(task["models"] for task in mixed)
    what = f"{models} models of {len(mixed)} architectures"
    peers = [] if quick or threads == 1 else ["jax_vmap", "torch_stacked"]
    times = time_models(result, ["ours", "ours_apart", *peers], mixed, threads, what, quick)
    teams = {
        "one shape": Team("ours", [job(SIZES, models)], threads),
        "many shapes": Team("ours", mixed, threads),
    }
    flops = {"one shape": step_flops([job(SIZES, models)]), "many shapes": step_flops(mixed)}
    try:
        runs = {n: lambda n=n: teams[n].seconds(1) / (teams[n].models * BATCHES * flops[n]) for n in teams}
        per_flop = interleave(runs, QUICK_REPEATS if quick else REPEATS)
    finally:
        for team in teams.values():
            team.close()
    rows = [
        [n, f"{flops[n]:,.0f}", number(min(t) * 1e12), number(statistics.median(t) * 1e12)] for n, t in per_flop.items()
    ]
    title = f"{what} and of one, {threads} thread{'s' if threads > 1 else ''}"
    result.table(title, ["calcvm fleet", "FLOPs of a step", "ps per FLOP", "median"], rows)
    label = f"{what}, {threads} thread(s)"
    value = ratio(per_flop["many shapes"], per_flop["one shape"])
    result.target("P9", f"{label}: time per FLOP over that of one shape", value, FLOP_TARGET, "x", at_most=True)
    if {"ours", "ours_apart"} <= times.keys():
        value = ratio(times["ours"], times["ours_apart"])
        result.target("P9", f"{label}: time over that of each alone", value, FLOP_TARGET, "x", at_most=True)
