"""A network solves the heat equation: its loss contains the network's own derivatives.

u(x, t) is the temperature of a rod that is held at 0 at both ends and begins as sin(pi x).  A physics-informed network is
trained until du/dt = K d2u/dx2 holds at points redrawn in each step, together with the known values at the ends and at the
beginning.  `cv.gradient` builds the derivatives; the optimizer needs gradients of these, which are third derivatives.  The exact
solution is exp(-K pi^2 t) sin(pi x).  Needs ``pip install "calcvm[demo]"`` for the picture, out/heat.png.

    python examples/heat.py [--steps N] [--quick]

Source: Raissi, Perdikaris and Karniadakis 2019, Physics-informed neural networks.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

import calcvm as cv
from calcvm import nn

K = 0.1
INSIDE, EDGE = 256, 64  # points per step


def build(steps: int) -> cv.CalcGraph:
    """The paths learn, with the network at points inside and at the edge, and look, with the network anywhere."""
    net = nn.Linear(32) >> nn.Tanh() >> nn.Linear(32) >> nn.Tanh() >> nn.Linear(32) >> nn.Tanh() >> nn.Linear(1)
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 1)), g.placeholder("t", (None, 1))
    edge, known = g.placeholder("edge", (EDGE, 2)), g.placeholder("known", (EDGE, 1))
    with g.path("learn", backward=True) as learn:
        u = net.build(cv.concat((x, t)), training=True)
        total = cv.sum(u)
        u_t, u_x = cv.gradient(total, t), cv.gradient(total, x)
        u_xx = cv.gradient(cv.sum(u_x), x)
        equation = cv.mean(cv.square(u_t - K * u_xx))
        at_edge = cv.mean(cv.square(net.build(edge, training=True) - known))
        learn.minimize(equation + 10 * at_edge, cv.Adam(3e-3, schedule=cv.Cosine(steps)), output=u)
    with g.path("look") as look:
        look.output = net.build(cv.concat((x, t)), training=False).rename("temperature")
    return g


def edges(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Points (x, t) at the beginning and at both ends, and the temperature there."""
    x, t = rng.uniform(size=(2, EDGE))
    half, quarter = EDGE // 2, EDGE // 4
    t[:half] = 0
    x[half : half + quarter], x[half + quarter :] = 0, 1
    points = np.stack([x, t], axis=1).astype("float32")
    return points, np.where(t == 0, np.sin(np.pi * x), 0)[:, None].astype("float32")


def picture(grid: np.ndarray, u: np.ndarray, exact: np.ndarray, path: Path) -> None:
    """Draw the solution over x and t, and the rod at five times beside the exact solution."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (field, rods) = plt.subplots(1, 2, figsize=(10, 4))
    shown = field.imshow(u, origin="lower", extent=(0, 1, 0, 1), aspect="auto", cmap="inferno", vmin=0, vmax=1)
    field.set(xlabel="x", ylabel="t", title="temperature, by the network")
    figure.colorbar(shown)
    for k in np.linspace(0, len(grid) - 1, 5, dtype=int):
        (line,) = rods.plot(grid, u[k], label=f"t = {grid[k]:.2f}")
        rods.plot(grid, exact[k], "--", color=line.get_color())
    rods.set(xlabel="x", title="network, and exact (dashed)")
    rods.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--quick", action="store_true", help="fewer steps: shows that it runs, solves roughly")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    args = parser.parse_args()
    steps = 500 if args.quick else args.steps

    program = cv.compile(build(steps), batch_size=INSIDE)
    model = cv.CalcHeap(program.heap_bytes).create(program, seed=0)
    print(f"{len(program.rows)} rows, {program.heap_bytes:,} bytes")
    rng = np.random.default_rng(0)
    start = time.perf_counter()
    for step in range(steps):
        inside = rng.uniform(size=(2, INSIDE, 1)).astype("float32")
        loss = model.step(inside[0], inside[1], *edges(rng), path="learn")
        if (step + 1) % (steps // 5) == 0:
            print(f"step {step + 1}/{steps}  loss {loss:.2e}")
    seconds = time.perf_counter() - start

    grid = np.linspace(0, 1, 128, dtype="float32")
    t, x = np.meshgrid(grid, grid, indexing="ij")
    found = []
    for k in range(0, x.size, INSIDE):
        model["x"], model["t"] = (v.reshape(-1, 1)[k : k + INSIDE] for v in (x, t))
        model.forward("look")
        found.append(model["temperature"])
    u, exact = np.concatenate(found).reshape(x.shape), np.exp(-K * np.pi**2 * t) * np.sin(np.pi * x)
    print(f"{seconds / steps * 1e6:.0f} us a step; the largest error is {np.abs(u - exact).max():.4f}")
    picture(grid, u, exact, args.out / "heat.png")
    print(f"picture: {args.out / 'heat.png'}")


if __name__ == "__main__":
    main()
