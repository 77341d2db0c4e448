"""Which exercise does an arm do?  A GRU reads pieces of a smartwatch's recordings, of unequal lengths: real data of real people.

The data are seglearn's: accelerations and rotations while ten people did seven exercises of the shoulder (Burns et al. 2018).  The
recordings are cut into pieces of one to six seconds.  The network learns from seven people, and classifies three others.  Beside it:
the nearest neighbours of the pieces, each resampled to one length.

Needs ``pip install "calcvm[demo]" seglearn``.  Draws out/gestures.png.

    python examples/gestures.py [--quick] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import numpy as np

import calcvm as cv
from calcvm import nn

RATE, LONGEST, RESAMPLED = 25, 150, 32  # readings per second, readings of a piece, of a resampled one


def recordings() -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Readings (length, 6) of each recording, its exercise, its person."""
    found = importlib.util.find_spec("seglearn")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("gestures.py takes its data from seglearn: pip install seglearn")
    file = Path(found.submodule_search_locations[0]) / "data" / "watch_dataset.npy"
    data = np.load(file, allow_pickle=True).item()
    slower = [
        x[: len(x) // 2 * 2].reshape(-1, 2, 6).mean(axis=1) for x in data["X"]
    ]  # recorded at 50 readings per second
    return slower, np.array(data["y"], int), np.array(data["subject"], int)


def cut(
    whole: list[np.ndarray], kinds: np.ndarray, each: int, rng: np.random.Generator
) -> tuple[list[np.ndarray], np.ndarray]:
    """Pieces of each recording, anywhere in it, and their kinds."""
    pieces = []
    for x in whole:
        for n in rng.integers(RATE, LONGEST + 1, each):
            start = rng.integers(len(x) - n + 1)
            pieces.append(x[start : start + n])
    return pieces, np.repeat(kinds, each)


def resampled(pieces: list[np.ndarray]) -> np.ndarray:
    at = np.linspace(0, 1, RESAMPLED)
    return np.stack([np.concatenate([np.interp(at, np.linspace(0, 1, len(x)), v) for v in x.T]) for x in pieces])


def picture(shown: np.ndarray, seconds: np.ndarray, right: dict[str, np.ndarray], path: Path) -> None:
    """Draw a piece, and the accuracy by the length of the pieces."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (piece, by) = plt.subplots(1, 2, figsize=(10, 3.5))
    piece.plot(np.arange(len(shown)) / RATE, shown, linewidth=0.8)
    piece.set(xlabel="seconds", title="a piece of a recording, standardized")
    edges = np.arange(1, 7)
    for label, of in right.items():
        means = [of[(seconds >= a) & (seconds < a + 1)].mean() for a in edges[:-1]]
        by.plot(edges[:-1] + 0.5, means, "o-", label=label)
    by.set(xlabel="seconds of a piece", title="accuracy on people never seen", ylim=(None, 1))
    by.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer pieces and epochs: shows that it runs")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    args = parser.parse_args()
    from sklearn.neighbors import KNeighborsClassifier

    whole, kinds, people = recordings()
    known = people <= 7
    readings = np.concatenate([x for x, k in zip(whole, known) if k])
    mean, spread = readings.mean(axis=0), readings.std(axis=0)
    whole = [((x - mean) / spread).astype("float32") for x in whole]
    rng = np.random.default_rng(0)
    each = 4 if args.quick else 20
    X, y = cut([x for x, k in zip(whole, known) if k], kinds[known], each, rng)
    X_test, y_test = cut([x for x, k in zip(whole, known) if not k], kinds[~known], each, rng)
    print(
        f"{len(X)} pieces of 7 people to learn from, {len(X_test)} of 3 others; of {min(map(len, X))} to {max(map(len, X))} readings"
    )

    model = cv.Model(
        nn.GRU(32, return_sequences=False) >> nn.Dropout(0.3) >> nn.Linear(7), input_shape=(LONGEST, 6), lengths=True,
        loss="softmax_cross_entropy", optimizer=cv.AdamW(5e-3), batch_size=32, seed=0,
    )  # fmt: skip
    model.fit(X, y, epochs=10 if args.quick else 15, progress=False)
    neighbours = KNeighborsClassifier(5).fit(resampled(X), y)
    right = {
        "GRU": model.predict(X_test).argmax(axis=1) == y_test,
        "nearest neighbours": neighbours.predict(resampled(X_test)) == y_test,
    }
    for name, of in right.items():
        print(f"{name:18} accuracy {of.mean():.3f}")
    seconds = np.array([len(x) for x in X_test]) / RATE
    picture(max(X_test, key=len), seconds, right, args.out / "gestures.png")
    print(f"picture: {args.out / 'gestures.png'}")


if __name__ == "__main__":
    main()
