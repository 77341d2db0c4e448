"""1000 sensors, one model each, learning online: each forecasts its sensor's next value, then learns it.

Every sensor has a different rhythm, and half-way all of them change: the models adapt.  They share one heap, whose size is
known beforehand, and are kept in a folder.  Run the program again, and they continue.

    python examples/online.py [--sensors N] [--samples N] [--quick]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

import calcvm as cv
from calcvm import nn

PAST = 8  # values that a forecast reads
NOISE = 0.05


def swings(sensors: int, samples: int, seed: int) -> np.ndarray:
    """The sensors' values, (samples + PAST, sensors): two waves each, with other frequencies from the middle on."""
    rng = np.random.default_rng(seed)
    t = np.arange(samples + PAST)[:, None]
    halves = []
    for _ in range(2):
        periods, phases = rng.uniform(6, 40, (2, sensors)), rng.uniform(0, 2 * np.pi, (2, sensors))
        halves.append(sum(np.sin(2 * np.pi * t / p + phase) for p, phase in zip(periods, phases)) / 2)
    shown = np.where(t < PAST + samples // 2, *halves)
    return (shown + NOISE * rng.standard_normal(shown.shape)).astype("float32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sensors", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=2000, help="of each sensor")
    parser.add_argument("--store", type=Path, default=Path("out/sensors"), help="folder that keeps the models")
    parser.add_argument("--quick", action="store_true", help="few sensors and samples: shows that it runs")
    args = parser.parse_args()
    sensors, samples = (40, 600) if args.quick else (args.sensors, args.samples)

    graph = cv.build_graph(nn.Linear(16) >> nn.Tanh() >> nn.Linear(1), (PAST,), "mse", cv.Adam(5e-3))
    program = cv.compile(graph, batch_size=1, workers=1)
    room = -(-program.heap_bytes // 64) * 64
    print(f"a model takes {room:,} bytes, {sensors:,} of them {sensors * room:,}: the heap, and nothing more later")
    with cv.CalcHeap(sensors * room, store=cv.FileStore(args.store)) as heap:
        names, known = [f"sensor-{k}" for k in range(sensors)], {*heap.names}
        models = [
            heap.open(name) if name in known else heap.create(program, seed=k, name=name)
            for k, name in enumerate(names)
        ]
        shown = swings(sensors, samples, seed=len(known))
        errors = np.zeros((samples, sensors), "float32")
        seconds = -time.perf_counter()
        for t in range(samples):
            past = np.ascontiguousarray(shown[t : t + PAST].T)[:, None]  # (sensors, 1, PAST): a batch of one per sensor
            truth = shown[t + PAST][:, None, None]
            for k, model in enumerate(models):
                errors[t, k] = model.predict(past[k])[0, 0] - truth[k, 0, 0]
                model.step(past[k], truth[k])
        seconds += time.perf_counter()
    each = seconds / (samples * sensors)
    print(f"{len(known)} models found in {args.store}, {sensors - len(known)} made")
    print(f"{samples * sensors:,} forecasts and steps in {seconds:.1f} s: {1e6 * each:.2f} us for both")

    still = shown[PAST - 1 : -1] - shown[PAST:]  # error of forecasting the value before
    middle, window = samples // 2, samples // 10
    for what, start in (
        ("at first", 0), ("before the change", middle - window), ("after it", middle), ("at last", samples - window),
    ):  # fmt: skip
        ours, theirs = (np.sqrt(np.mean(e[start : start + window] ** 2)) for e in (errors, still))
        print(f"error {what:17} {ours:.3f}, of the value before {theirs:.3f}; noise alone {NOISE}")


if __name__ == "__main__":
    main()
