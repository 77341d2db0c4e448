"""Which part of a scan is evidence for a digit, and which for the next likely one?  Grad-CAM (Selvaraju et al. 2017), as a path.

Needs ``pip install "calcvm[demo]"``.

    python examples/grad_cam.py [--quick] [--out FILE.png]
"""

from __future__ import annotations

import lenet
import numpy as np

import calcvm as cv


def main() -> None:
    args = lenet.arguments(__doc__, "grad_cam.png")
    from matplotlib import colormaps

    g, images, net = lenet.build()
    classes = g.placeholder("classes", (None,), "int64")
    with g.path("look") as look:
        scores = net.build(images, training=False)
        maps = [op for op in look.operations if op.spec.name == "conv"][-1].outputs["y"]
        evidence = cv.reshape(cv.grad_cam(scores, classes, maps), (None, 1, 8, 8))
        cv.upsample(evidence, size=(28, 28), mode="linear").rename("evidence")
    model, X, y = lenet.train(g, args.quick)

    scores = model.predict(X)
    ranked = np.argsort(-scores, axis=1)
    first, second = np.take_along_axis(scores, ranked[:, :2], axis=1).T
    doubt = np.where(ranked[:, 0] == y, second - first, -np.inf)  # of right answers: larger is less sure
    chosen = [int(np.argmax(np.where(y == digit, doubt, -np.inf))) for digit in range(10)]
    found = []
    for classes in ranked[chosen, :2].T:
        model["scans"], model["classes"] = X[chosen], classes
        model.run_round("look")
        found.append(model["evidence"][:, 0])
    scans, most = model["images"][:, 0], np.max(found, axis=(0, 2, 3))[:, None, None]
    seen = [0.5 * scans[..., None] + 0.5 * colormaps["inferno"](heat / most)[..., :3] for heat in found]
    lenet.sheet(
        args.out,
        [("scan", scans, {"cmap": "gray"}), ("likely", seen[0], {}), ("next", seen[1], {})],
        [f"{first}, not {second}" for first, second in ranked[chosen, :2]],
    )


if __name__ == "__main__":
    main()
