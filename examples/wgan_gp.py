"""A Wasserstein GAN with a gradient penalty draws digits: the critic's loss contains the norm of the critic's gradient.

The critic should be 1-Lipschitz.  Between scanned and drawn digits, a slope of its score other than 1 is penalized.  So its loss
has a gradient in it (`cv.gradient`), and training needs the gradient of that.  The critic has three turns for one of the generator, each
on another batch; one call of `fit` runs a whole epoch.  examples/gan.py is the same without a penalty, step by step.  Needs
``pip install "calcvm[demo]"``; some digits are in out/wgan_gp.png.

    python examples/wgan_gp.py [--epochs N] [--quick]

Source: Gulrajani et al. 2017, Improved training of Wasserstein GANs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from gan import BATCH, NOISE, judge

import calcvm as cv
from calcvm import nn
from calcvm.data import digits

PENALTY = 10.0  # its weight
ORDER = ("critic", "critic", "critic", "generator")


def build() -> cv.CalcGraph:
    """The paths critic and generator, which train their own parameters, and draw."""
    critic = nn.Linear(128) >> nn.LeakyReLU(0.2) >> nn.Linear(64) >> nn.LeakyReLU(0.2) >> nn.Linear(1)
    generator = nn.Linear(64) >> nn.LeakyReLU(0.2) >> nn.Linear(128) >> nn.LeakyReLU(0.2) >> nn.Linear(64) >> nn.Tanh()
    g = cv.CalcGraph()
    real, noise = g.placeholder("real", (None, 64)), g.placeholder("noise", (None, NOISE))
    share = g.placeholder("share", (None, 1))  # weight of the scanned digit in a mixture with a drawn one
    adam = cv.Adam(2e-4, beta1=0.0, beta2=0.9)
    with g.path("critic", backward=True) as path:
        fake = cv.stop_gradient(generator.build(noise, "generator.", training=True))
        between = share * real + (1 - share) * fake
        of_real, of_drawn, score = (critic.build(x, "critic.", training=True) for x in (real, fake, between))
        slope = cv.gradient(cv.sum(score), between)
        norm = cv.sqrt(cv.sum(cv.square(slope), axis=1))
        penalty = cv.mean(cv.square(norm - 1.0)).rename("penalty")
        distance = (cv.mean(of_real) - cv.mean(of_drawn)).rename("distance")
        path.minimize(PENALTY * penalty - distance, adam, parameters=g.parameters("critic."))
    with g.path("generator", backward=True) as path:
        of_drawn = critic.build(generator.build(noise, "generator.", training=True), "critic.", training=True)
        path.minimize(-cv.mean(of_drawn), adam, parameters=g.parameters("generator."))
    with g.path("draw") as path:
        path.output = generator.build(noise, "generator.", training=False).rename("drawn")
    return g


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=800)
    parser.add_argument("--quick", action="store_true", help="few epochs: shows that it runs, draws badly")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    args = parser.parse_args()
    epochs = 60 if args.quick else args.epochs

    X, y = digits()
    X = (X / 8 - 1).astype("float32")
    rng = np.random.default_rng(0)
    model = cv.Model(build(), batch_size=BATCH, keep=["penalty", "distance"], seed=0)
    start, n = time.perf_counter(), len(X)
    for epoch in range(epochs):
        noise, share = rng.standard_normal((n, NOISE), "float32"), rng.random((n, 1), "float32")
        model.fit({"real": X, "noise": noise, "share": share}, order=ORDER, progress=False)
        if (epoch + 1) % (epochs // 5) == 0:
            model["real"], model["noise"], model["share"] = X[:BATCH], noise[:BATCH], share[:BATCH]
            model.forward("critic")
            print(f"epoch {epoch + 1}/{epochs}  distance {model['distance']:.3f}  penalty {model['penalty']:.3f}")
    print(f"{int(model.hyper('critic')['t']):,} steps of the critic in {time.perf_counter() - start:.1f} s")

    judge(model, X, y, rng, args.out / "wgan_gp.png")


if __name__ == "__main__":
    main()
