"""A small GRU watches the sensors of a machine, one reading at a time, and tells when they do not fit together.

The machine is synthetic, and so are its faults: a load that changes at random drives speed, power, pressure, temperature, vibration and a
fan, and the sensors have noise.  The network has learnt, without faults, to predict the next reading of all sensors.  `Model.stream`
answers each reading in compiled code and keeps the state.  Twenty readings are scored by the mean square error of their worst sensor;
beside it, in the same way, by the rolling z-score, with the window that is best for these faults.

Needs ``pip install "calcvm[plot]"`` for the picture, out/anomalies.png.

    python examples/anomalies.py [--quick] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

import calcvm as cv
from calcvm import nn

SENSORS = ("speed", "power", "pressure", "temperature", "vibration", "fan")
FAULTS = ("spike", "stuck", "offset", "swapped")
STEPS, NOISE, PART = 64, 0.02, 20  # readings that training sees at once; of the sensors; readings of a fault


def machine(readings: int, rng: np.random.Generator) -> np.ndarray:
    """Readings of the sensors (readings, 6), each about 0 to 1."""
    load = np.repeat(rng.uniform(0.1, 1, readings // 20), rng.integers(20, 80, readings // 20))[:readings]
    wanted, speed, heat, fan, cooling, rows = 0.0, 0.0, 0.0, 0.0, False, []
    for now in load:
        wanted += 0.1 * (now - wanted)
        power = 0.4 * speed + 2 * max(0.0, wanted - speed)
        speed += 0.2 * (wanted - speed)
        heat += 0.03 * (speed**2 - 0.4 * fan - heat)
        cooling = heat > (0.2 if cooling else 0.4)
        fan += 0.1 * (cooling - fan)
        rows.append((speed, power, speed**2, heat, np.exp(-50 * (speed - 0.6) ** 2), fan))
    return np.array(rows) + NOISE * rng.standard_normal((readings, len(SENSORS)))


def break_it(readings: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Break every fifth part of the readings in place; returns the kind of fault of each part, -1 where it is sound."""
    kinds = np.full(len(readings) // PART, -1)
    for k, number in enumerate(range(4, len(kinds), 5)):
        kinds[number], (a, b), sign = k % len(FAULTS), rng.permutation(len(SENSORS))[:2], rng.choice([-1, 1])
        part = readings[number * PART :][:PART]  # a view
        if FAULTS[kinds[number]] == "spike":
            part[PART // 2, a] += 0.3 * sign
        elif FAULTS[kinds[number]] == "stuck":
            part[:, a] = part[0, a]
        elif FAULTS[kinds[number]] == "offset":
            part[:, a] += 0.15 * sign
        else:
            part[:, [a, b]] = part[:, [b, a]]
    return kinds


def z_scores(readings: np.ndarray, window: int) -> np.ndarray:
    """Deviations of readings from the mean of those before, in their standard deviations."""
    before = np.lib.stride_tricks.sliding_window_view(readings, window, axis=0)[:-1]
    scores = (readings[window:] - before.mean(axis=-1)) / np.maximum(before.std(axis=-1), NOISE / 2)
    return np.concatenate([np.zeros((window, len(SENSORS))), scores])


def of_parts(deviations: np.ndarray) -> np.ndarray:
    """The score of each part: the mean square of the deviations of the worst sensor."""
    return np.square(deviations).reshape(-1, PART, len(SENSORS)).mean(axis=1).max(axis=1)


def auc(of: np.ndarray, kinds: np.ndarray, kind: int | None = None) -> float:
    """The probability that a part with a fault has a higher score than a sound one, which follows no fault."""
    sound = np.sort(of[(kinds < 0) & (np.roll(kinds, 1) < 0)])
    return float(np.searchsorted(sound, of[kinds >= 0 if kind is None else kinds == kind]).mean() / len(sound))


def picture(readings: np.ndarray, kinds: np.ndarray, deviations: dict[str, np.ndarray], path: Path) -> None:
    """Draw some readings, with the faults shaded, and both scores below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = slice(25 * PART, 50 * PART)
    figure, axes = plt.subplots(3, 1, figsize=(10, 5), sharex=True, height_ratios=(3, 1, 1))
    for name, values in zip(SENSORS, readings[shown].T):
        axes[0].plot(values, label=name, linewidth=0.8)
    axes[0].set_ylim(-0.1, 1.4)
    axes[0].legend(ncols=6, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1))
    for axis, (name, found) in zip(axes[1:], deviations.items()):
        axis.plot(np.abs(found[shown]).max(axis=1), color="black", linewidth=0.8)
        axis.set(ylabel=name)
    for k, kind in enumerate(kinds[25:50]):
        if kind >= 0:
            axes[0].text(k * PART, 1.25, FAULTS[kind], fontsize="small")
            for axis in axes:
                axis.axvspan(k * PART, (k + 1) * PART, color="gray", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer readings: shows that it runs")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    args = parser.parse_args()
    rng = np.random.default_rng(0)

    sound = machine(6_000 if args.quick else 20_000, rng)
    windows = np.lib.stride_tricks.sliding_window_view(sound, STEPS + 1, axis=0)[::4].transpose(0, 2, 1)
    model = cv.Model(
        nn.GRU(32) >> nn.Linear(len(SENSORS)), input_shape=(STEPS, len(SENSORS)), loss="mse", optimizer=cv.Adam(5e-3), batch_size=32,
        stream=True, seed=0,
    )  # fmt: skip
    history = model.fit(windows[:, :-1], windows[:, 1:], epochs=20, progress=False)
    print(f"error of the next reading {history['loss'][-1] ** 0.5:.4f}, of which {NOISE} is noise")

    readings = machine(6_000 if args.quick else 20_000, rng).astype("float32")
    kinds = break_it(readings, rng)
    s = model.stream()
    start = time.perf_counter()
    guesses = [s(reading) for reading in readings]  # of the next reading each
    seconds = time.perf_counter() - start
    print(f"{1e6 * seconds / len(readings):.1f} us a reading; the model takes {model.program.heap_bytes:,} bytes")

    errors = readings - np.concatenate([readings[:1], guesses[:-1]])
    usual = (model.predict(windows[:, :-1]) - windows[:, 1:]).std(axis=(0, 1))
    deviations = {
        "GRU": errors / usual,
        "z-score": max((z_scores(readings, n) for n in (8, 16, 32, 64)), key=lambda found: auc(of_parts(found), kinds)),
    }
    for name, found in deviations.items():
        each = ", ".join(f"{fault} {auc(of_parts(found), kinds, k):.3f}" for k, fault in enumerate(FAULTS))
        print(f"{name:7} AUC {auc(of_parts(found), kinds):.3f}: {each}")
    picture(readings, kinds, deviations, args.out / "anomalies.png")
    print(f"picture: {args.out / 'anomalies.png'}")


if __name__ == "__main__":
    main()
