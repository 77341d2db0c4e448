"""LeNet, trained on scikit-learn's digits, for the examples filters, saliency and grad_cam."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import calcvm as cv
from calcvm import nn
from calcvm.data import digits, train_test_split

BATCH = 32


def build() -> tuple[cv.CalcGraph, cv.Variable, nn.Layer]:
    """The graph with paths prepare, learn and predict, the images that the network sees, and the network."""
    net = cv.zoo.lenet()
    g = cv.CalcGraph()
    scans, target = g.placeholder("scans", (None, 1, 8, 8)), g.placeholder("target", (None,), "int64")
    with g.path("prepare"):
        images = cv.upsample(scans / 16, size=(28, 28), mode="linear")
    with g.path("learn", backward=True) as learn:
        scores = net.build(images, training=True)
        learn.minimize(cv.softmax_cross_entropy(scores, target), cv.Adam(1e-3), output=scores)
    with g.path("predict", adopt=False) as predict:
        predict.output = net.build(images, training=False)
        cv.accuracy(predict.output, target).rename("accuracy")
    return g, images, net


def train(g: cv.CalcGraph, quick: bool) -> tuple[cv.Model, np.ndarray, np.ndarray]:
    """Train; return the model, and held-out scans and labels."""
    X, y = digits()
    X_train, y_train, X_test, y_test = train_test_split(X.reshape(-1, 1, 8, 8), y, 0.2)
    model = cv.Model(g, batch_size=BATCH, seed=0)
    model.fit(X_train, y_train, epochs=2 if quick else 10, progress=not quick)
    print(f"accuracy {model.evaluate(X_test, y_test)['accuracy']:.3f} on {len(X_test)} scans held out")
    return model, X_test, y_test


def arguments(doc: str, picture: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few epochs: shows that it runs")
    parser.add_argument("--out", type=Path, default=Path("out") / picture, help="the picture")
    return parser.parse_args()


def sheet(path: Path, rows: list[tuple[str, np.ndarray, dict]], titles: Sequence[str] = ()) -> None:
    """Draw rows of images, each with its name and options of matplotlib's ``imshow``."""
    from matplotlib.figure import Figure

    n = len(rows[0][1])
    figure = Figure(figsize=(0.9 * n + 0.4, 0.95 * len(rows) + 0.3), layout="constrained")
    grid = figure.subplots(len(rows), n, squeeze=False)
    for axes, (name, images, how) in zip(grid, rows):
        axes[0].set_ylabel(name, fontsize=8)
        for axis, image in zip(axes, images):
            axis.imshow(image, interpolation="nearest", **how)
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
    for axis, title in zip(grid[0], titles):
        axis.set_title(title, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")
