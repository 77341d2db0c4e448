"""Show the twenty filters in the first layer of a trained LeNet, and their results on a scan.

Needs ``pip install "calcvm[demo]"``.

    python examples/filters.py [--quick] [--out FILE.png]
"""

from __future__ import annotations

import lenet
import numpy as np


def main() -> None:
    args = lenet.arguments(__doc__, "filters.png")
    g, images, net = lenet.build()
    with g.path("look"):
        net.layers[0].build(images, "conv2d_1", training=False).rename("maps")
    model, X, _ = lenet.train(g, args.quick)

    model["scans"] = X[:1]
    model.run_round("look")
    filters, maps = model.parameters["conv2d_1.weight"][:, 0], model["maps"][0]
    span, most = np.abs(filters).max(), np.abs(maps).max()
    rows = []
    for half in slice(0, 10), slice(10, 20):
        rows.append(("filter", filters[half], {"cmap": "RdBu_r", "vmin": -span, "vmax": span}))
        rows.append(("map", maps[half], {"cmap": "RdBu_r", "vmin": -most, "vmax": most}))
    lenet.sheet(args.out, rows)


if __name__ == "__main__":
    main()
