"""A generative adversarial network draws digits: two networks in one graph, and each path trains one of them.

The critic learns to tell scanned digits from drawn ones; the generator learns to fool it.  At the end a classifier that has
only seen scanned digits classifies the drawn ones, some of which are in out/gan.png.  Needs ``pip install "calcvm[demo]"``.

    python examples/gan.py [--epochs N] [--quick]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

import calcvm as cv
from calcvm import nn
from calcvm.data import digits

NOISE, BATCH = 16, 64


def build() -> cv.CalcGraph:
    """The paths critic and generator, which train their own parameters, and draw."""
    critic = (
        nn.Linear(128) >> nn.LeakyReLU(0.2) >> nn.Dropout(0.3) >> nn.Linear(64) >> nn.LeakyReLU(0.2) >> nn.Linear(1)
    )
    generator = nn.Linear(64) >> nn.LeakyReLU(0.2) >> nn.Linear(128) >> nn.LeakyReLU(0.2) >> nn.Linear(64) >> nn.Tanh()
    g = cv.CalcGraph()
    real, noise = g.placeholder("real", (None, 64)), g.placeholder("noise", (None, NOISE))
    with g.path("critic", backward=True) as path:
        fake = cv.stop_gradient(generator.build(noise, "generator.", training=True))
        of_real, of_drawn = (critic.build(x, "critic.", training=True) for x in (real, fake))
        loss = cv.mean(cv.softplus(-of_real)) + cv.mean(cv.softplus(of_drawn))  # cross-entropy against 1 and 0
        path.minimize(loss, cv.Adam(1e-3, beta1=0.5), parameters=g.parameters("critic."))
    with g.path("generator", backward=True) as path:
        of_drawn = critic.build(generator.build(noise, "generator.", training=True), "critic.", training=True)
        path.minimize(cv.mean(cv.softplus(-of_drawn)), cv.Adam(1e-3, beta1=0.5), parameters=g.parameters("generator."))
    with g.path("draw") as path:
        path.output = generator.build(noise, "generator.", training=False).rename("drawn")
    return g


def picture(images: np.ndarray, path: Path) -> None:
    """Draw images (n, 64) in [-1, 1] as a sheet."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = len(images) // 16
    framed = np.pad(images[: rows * 16].reshape(rows, 16, 8, 8), [(0, 0), (0, 0), (1, 1), (1, 1)], constant_values=-1)
    sheet = framed.transpose(0, 2, 1, 3).reshape(rows * 10, 160)
    path.parent.mkdir(parents=True, exist_ok=True)
    plt.imsave(path, np.kron(sheet, np.ones((4, 4))), cmap="gray_r")


def judge(model: cv.Model, X: np.ndarray, y: np.ndarray, rng: np.random.Generator, path: Path) -> None:
    """Print how a classifier judges drawn digits, and write some of them into a picture."""
    images = []
    for _ in range(1024 // BATCH):
        model["noise"] = rng.standard_normal((BATCH, NOISE), "float32")
        model.forward("draw")
        images.append(model["drawn"])
    drawn = np.concatenate(images)
    classifier = cv.Model(
        nn.Linear(64) >> nn.ReLU() >> nn.Linear(10), input_shape=(64,), optimizer=cv.Adam(1e-3), batch_size=32, seed=1
    )
    classifier.fit(X, y, epochs=20, progress=False)
    for what, of in ("scanned", X), ("drawn", drawn), ("noise", rng.uniform(-1, 1, (1024, 64)).astype("float32")):
        sure = classifier.predict_proba(of).max(axis=1) > 0.9
        kinds = np.bincount(classifier.predict_classes(of)[sure], minlength=10)
        print(f"{what:8} a classifier is sure of {sure.mean():.2f}; of each digit {' '.join(map(str, kinds))}")
    picture(drawn[:128], path)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=600)
    parser.add_argument("--quick", action="store_true", help="few epochs: shows that it runs, draws badly")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    args = parser.parse_args()
    epochs = 60 if args.quick else args.epochs

    X, y = digits()
    X = (X / 8 - 1).astype("float32")
    rng = np.random.default_rng(0)
    model = cv.CalcHeap("1 MiB").create(cv.compile(build(), batch_size=BATCH), seed=0)
    start = time.perf_counter()
    for epoch in range(epochs):
        order = rng.permutation(len(X))
        for k in range(0, len(X) - BATCH + 1, BATCH):
            noise = rng.standard_normal((2, BATCH, NOISE), "float32")
            critic_loss = model.step(X[order[k : k + BATCH]], noise[0], path="critic")
            loss = model.step(noise[1], path="generator")
        if (epoch + 1) % (epochs // 6) == 0:
            print(f"epoch {epoch + 1}/{epochs}  critic {critic_loss:.3f}  generator {loss:.3f}")
    seconds = time.perf_counter() - start
    print(f"{2 * epochs * (len(X) // BATCH):,} steps in {seconds:.1f} s")

    judge(model, X, y, rng, args.out / "gan.png")


if __name__ == "__main__":
    main()
