"""Which pixels decide?  The gradient of each digit's score with respect to its image (Simonyan et al. 2014), as a path.

Needs ``pip install "calcvm[demo]"``.

    python examples/saliency.py [--quick] [--out FILE.png]
"""

from __future__ import annotations

import lenet

import calcvm as cv


def main() -> None:
    args = lenet.arguments(__doc__, "saliency.png")
    g, images, net = lenet.build()
    classes = g.placeholder("classes", (None,), "int64")
    with g.path("look"):
        scores = net.build(images, training=False)
        cv.saliency(scores, classes, images).rename("saliency")
    model, X, y = lenet.train(g, args.quick)

    chosen = [list(y).index(digit) for digit in range(10)]
    model["scans"], model["classes"] = X[chosen], y[chosen]
    model.run_round("look")
    maps = model["saliency"]
    rows = [
        ("scan", model["images"][:, 0], {"cmap": "gray"}),
        ("saliency", maps / maps.max(axis=(1, 2), keepdims=True), {"cmap": "inferno"}),
    ]
    lenet.sheet(args.out, rows, [f"score of {digit}" for digit in range(10)])


if __name__ == "__main__":
    main()
