"""Where the memory of a training goes, and what brings it down: each means of the planner, one after the other.

A multilayer perceptron and a network of four convolutions for digits, with Adam, planned as for a microcontroller
(``device="small"``).  Draws out/waterfall.png.

Needs ``pip install "calcvm[plot]"``.

    python examples/waterfall.py [--quick] [--out FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import calcvm as cv
from calcvm import nn

MLP = nn.Linear(64) >> nn.ReLU() >> nn.Linear(64) >> nn.ReLU() >> nn.Linear(10)
LAYERS = [layer for _ in range(4) for layer in (nn.Conv2d(8, 3, padding=1), nn.BatchNorm(), nn.ReLU())]
CONVOLUTIONS = nn.Sequential(*LAYERS, nn.GlobalAvgPool(), nn.Flatten(), nn.Linear(10))
NETWORKS = {
    "64-64-64-10, a batch of 1": (MLP, (64,), 1),
    "four convolutions of 16x16, a batch of 8": (CONVOLUTIONS, (1, 16, 16), 8),
}


def live_bytes(plan: cv.Plan) -> int:
    """The most bytes that live at once if no two values share memory."""
    live = [0] * len(plan.statements)
    for value in plan.to_dict()["values"]:
        first, last = (0, len(live) - 1) if value["persistent"] else (value["first"], value["last"])
        for t in range(first, last + 1):
            live[t] += value["bytes"]
    return plan.zones["reserved"].bytes + max(live)


def least_bytes(graph: cv.CalcGraph, most: int, **options) -> int:
    """The smallest heap, to 64 bytes, in which values computed again still fit."""
    least = 0
    while most - least > 64:
        middle = (least + most) // 2
        try:
            most = cv.plan(graph, memory=middle, **options).heap_bytes
        except cv.PlanError:
            least = middle
    return most


def waterfall(net: object, shape: tuple[int, ...], batch: int) -> dict[str, int]:
    """Bytes of a training, with one means more from entry to entry."""
    graph = cv.build_graph(net, shape, "softmax_cross_entropy", cv.Adam(1e-3))
    options = {"batch_size": batch, "device": "small"}
    kept = cv.plan(graph, accumulate=True, recompute=False, **options)
    inlined = cv.plan(graph, accumulate=False, recompute=False, **options)
    lasting = sum(v["bytes"] for v in inlined.to_dict()["values"] if v["persistent"])
    return {
        "every value apart": kept.save_all_bytes,
        "shared by lifetimes": live_bytes(kept),
        "written in place": kept.heap_bytes,
        "updates where gradients are made": inlined.heap_bytes,
        "values computed again": least_bytes(graph, inlined.heap_bytes, **options),
        "weights and Adam's moments alone": lasting,
    }


def picture(found: dict[str, dict[str, int]], path: Path) -> None:
    """Draw a bar for each means."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3), layout="constrained")
    for axes, (name, stages) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items()):
        colours = ["C0"] * (len(stages) - 1) + ["0.7"]
        bars = axes.barh(list(stages), [b / 1000 for b in stages.values()], color=colours)
        axes.bar_label(bars, [f"{b:,}" for b in stages.values()], padding=3, fontsize=8)
        axes.set(title=name, xlabel="kB", xlim=(0, max(stages.values()) / 800))
        axes.invert_yaxis()
        if axes.get_subplotspec().colspan.start:
            axes.set_yticks([])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the first network alone")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    given = parser.parse_args()
    found = {name: waterfall(*NETWORKS[name]) for name in [*NETWORKS][: 1 if given.quick else None]}
    for stages in zip(*(stages.items() for stages in found.values())):
        print(f"{stages[0][0]:34}" + "".join(f"{b:>12,}" for _, b in stages))
    picture(found, given.out / "waterfall.png")


if __name__ == "__main__":
    main()
