"""Train small networks for a few steps in one of the three ways a program is run: under NVIDIA's compute-sanitizer.

compute-sanitizer --tool memcheck|racecheck --error-exitcode 1 python tests/gpu/sanitize.py grid|graph|fleet
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2] / "src")]

import calcvm as cv  # noqa: E402
from calcvm import nn  # noqa: E402

BATCH, N_IN, N_OUT = 8, 6, 3


def graph(optimizer: cv.Optimizer) -> cv.CalcGraph:
    """A network of rows of most families: products, activations, dropout, a loss, an accuracy."""
    net = nn.Linear(9, regularizer=cv.L2(1e-3)) >> nn.ReLU() >> nn.Dropout(0.2) >> nn.Linear(7) >> nn.Tanh()
    return cv.build_graph(net >> nn.Linear(N_OUT), (N_IN,), "softmax_cross_entropy", optimizer)


def main(mode: str) -> None:
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((3 * BATCH + 1, N_IN)).astype(np.float32), rng.integers(0, N_OUT, 3 * BATCH + 1)
    losses = []
    for optimizer in (cv.Adam(1e-2, clip_norm=1.0), cv.SGD(0.05, momentum=0.9, nesterov=True)):
        how = {"mode": mode, "workers": 4} if mode == "grid" else {"mode": mode}
        program = cv.compile(graph(optimizer), batch_size=BATCH, device="cuda", **how)
        if mode == "fleet":
            fleet = cv.Fleet(4 * program.heap_bytes + 1024, device="cuda")
            for seed in range(4):
                fleet.add(program, data=(X, y), validation=slice(0, BATCH), seed=seed)
            fleet.fit(2, progress=False)
            losses += fleet.results.column("loss").tolist()
            continue
        # room for one of two: models are switched, too
        heap = cv.CalcHeap(program.heap_bytes, device="cuda")
        for model in [heap.create(program, seed=seed) for seed in range(2)]:
            model.step(X[:BATCH], y[:BATCH])
            model.run_steps(2)
            losses += model.fit(X, y, epochs=2, validation=0.25, progress=False)["loss"]
            model.predict(X)
    assert np.isfinite(losses).all(), losses
    print(f"{mode}: {len(losses)} losses, the last {losses[-1]:.6g}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["grid", "graph", "fleet"])
    main(parser.parse_args().mode)
