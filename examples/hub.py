"""A sensor hub: 1000 anomaly detectors that learn online in less than 1 MB, on a board with NumPy alone; its power fails on the way.

python examples/hub.py [--out FOLDER] writes the package that the board runs (extras ``edge`` and ``plot``), starts the board's process, kills
it, starts it again, and draws hub.png.  The board's process imports neither calcvm nor Numba.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np

SENSORS, READINGS, HIDDEN, RARE = 1000, 6, 3, 0.01


def readings(tick: int) -> tuple[np.ndarray, np.ndarray]:
    """What the sensors read, and which readings are anomalies: the six values of each sensor lie in its own plane."""
    planes = np.random.default_rng(0).standard_normal((SENSORS, 2, READINGS))
    rng = np.random.default_rng((1, tick))
    x = (rng.standard_normal((SENSORS, 1, 2)) @ planes)[:, 0] + 0.1 * rng.standard_normal((SENSORS, READINGS))
    odd = rng.random(SENSORS) < RARE
    x[odd] = 1.5 * rng.standard_normal((int(odd.sum()), READINGS))
    return x.astype(np.float32), odd


# ---------------------------------------------------------------- on the board
def board(folder: Path, ticks: int) -> None:
    """Score and learn each reading; keep all states in one file, which is whole at any time."""
    sys.path.insert(0, str(folder))
    from detector import Model

    model, file = Model(), folder / "states.bin"
    states, first = kept(file) if file.exists() else ([model.state] * SENSORS, 0)
    for tick in range(first, ticks):
        x, odd = readings(tick)
        scores, start = np.empty(SENSORS, np.float32), time.perf_counter()
        for k in range(SENSORS):
            model.state = states[k]
            scores[k] = model.step(x[k], x[k])  # how badly it is reconstructed, before it is learned from
            states[k] = model.state
        seconds = time.perf_counter() - start
        keep(file, states, tick + 1)
        print(json.dumps([tick, area(scores, odd), seconds]), flush=True)
    assert not {"calcvm", "numba", "llvmlite"} & {name.split(".")[0] for name in sys.modules}


def keep(file: Path, states: list[bytes], tick: int) -> None:
    data = tick.to_bytes(4, "little") + b"".join(states)
    new = file.with_suffix(".new")
    with open(new, "wb") as out:
        out.write(zlib.crc32(data).to_bytes(4, "little") + data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(new, file)


def kept(file: Path) -> tuple[list[bytes], int]:
    data = file.read_bytes()
    assert zlib.crc32(data[4:]) == int.from_bytes(data[:4], "little")
    states = data[8:]
    n = len(states) // SENSORS
    return [states[k * n : (k + 1) * n] for k in range(SENSORS)], int.from_bytes(data[4:8], "little")


def area(scores: np.ndarray, odd: np.ndarray) -> float:
    """How often an anomaly has a higher score than another reading."""
    return float((scores[odd][:, None] > scores[~odd]).mean())


# ---------------------------------------------------------------- on the PC
def export(folder: Path) -> None:
    import calcvm as cv
    from calcvm import nn

    net = nn.Linear(HIDDEN) >> nn.Linear(READINGS)
    model = cv.Model(net, input_shape=(READINGS,), loss="mse", optimizer=cv.Adam(1e-2), batch_size=1, seed=0, workers=1)
    pack = model.export(folder / "detector", target="linux-x86_64", name="detector", format="python", objective="size")
    size = SENSORS * pack.state[1]
    print(f"{SENSORS} detectors, {pack.state[1]} bytes each: {size:,} bytes; one heap of {pack.ram:,}")
    assert size + pack.ram < 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("out/hub"), help="where the package, the states and hub.png are"
    )
    parser.add_argument("--quick", action="store_true", help="fewer readings")
    parser.add_argument("--board", type=int, help="be the board for so many readings of each sensor")
    args = parser.parse_args()
    if args.board is not None:
        board(args.out, args.board)
        return
    ticks = 60 if args.quick else 400
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "states.bin").unlink(missing_ok=True)
    export(args.out)
    command = [sys.executable, __file__, "--out", str(args.out), "--board", str(ticks)]
    told: list[tuple[int, float, float]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE) as hub:
        for line in hub.stdout or ():
            told.append(json.loads(line))
            if len(told) == ticks // 2:
                hub.kill()  # the power fails
                break
    print(f"the power fails after {len(told)} readings of each sensor")
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    told += map(json.loads, done.stdout.splitlines())
    again = told[ticks // 2][0]
    print(
        f"it goes on with reading {again}: {len(told) - ticks} of them were learned from twice"
        if len(told) > ticks
        else f"it goes on with reading {again}"
    )
    tenth = ticks // 10
    for what, part in (("first", told[:tenth]), ("last", told[-tenth:])):
        print(
            f"an anomaly scores higher than another reading: {np.mean([a for _, a, _ in part]):.3f} of the pairs in the {what} tenth"
        )
    print(f"{min(s for *_, s in told) / SENSORS * 1e6:.2f} us to score and learn a reading")
    draw(told, ticks // 2, args.out / "hub.png")


def draw(told: list[tuple[int, float, float]], cut: int, file: Path) -> None:
    from matplotlib import pyplot as plt

    ticks, areas, _ = np.array(told).T
    smooth = np.convolve(areas, np.ones(10) / 10, "valid")
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    axes.plot(ticks, 100 * areas, ".", color="#b9c7d4", markersize=3)
    axes.plot(ticks[9:], 100 * smooth, color="#2f6f9f", label="mean of ten")
    axes.axvline(cut, color="#5b6672", linestyle=":", label="the power fails")
    axes.set(
        xlabel="readings of each of 1000 sensors", ylabel="anomalies that score higher, % of pairs", ylim=(45, 101)
    )
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    main()
