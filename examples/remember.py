"""An agent balances a pole without seeing how fast it falls: it must remember.  An actor and a critic with GRUs, beside some without.

The environment is CartPole (Barto, Sutton and Anderson 1983), of which the agent reads the positions of cart and pole, but not their
velocities.  Proximal policy optimization on whole episodes, of unequal lengths: in each update one call trains the critic and the actor
in turn.  The actor decides step by step, with its state kept by the model.

Needs ``pip install "calcvm[plot]"`` for the picture, out/remember.png.

    python examples/remember.py [--quick] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

import calcvm as cv
from calcvm import nn

POLES, LONGEST, EPOCHS = 16, 200, 10  # episodes at once, pushes of an episode, steps of critic and actor per update
RATE, GAMMA, LAMBDA, CLIP, HIDDEN = 5e-3, 0.99, 0.95, 0.2, 32


class Poles:
    """Carts that are pushed to the left or right; what is seen of each is its place and the angle of its pole."""

    def reset(self, rng: np.random.Generator) -> np.ndarray:
        self.state = rng.uniform(-0.05, 0.05, (4, POLES))
        return self.seen()

    def seen(self) -> np.ndarray:
        return np.stack([self.state[0] / 2.4, self.state[2] / 0.2094395], axis=1).astype("float32")

    def push(self, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What is seen next, and which poles have fallen."""
        x, v, angle, spin = self.state
        sin, cos = np.sin(angle), np.cos(angle)
        force = (np.where(right, 10.0, -10.0) + 0.05 * spin**2 * sin) / 1.1
        twist = (9.8 * sin - cos * force) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        self.state = self.state + 0.02 * np.stack([v, force - 0.05 * twist * cos / 1.1, spin, twist])
        seen = self.seen()
        return seen, np.abs(seen).max(axis=1) > 1


def graph(memory: bool) -> cv.CalcGraph:
    """The paths critic and actor, which train on episodes, values of episodes, and predict, which scores both pushes for one step."""
    g = cv.CalcGraph()
    seen, step = g.placeholder("seen", (None, LONGEST, 2)), g.placeholder("step", (None, 2))
    seen.lengths = g.placeholder("lengths", (None,), "int64")
    action, before, gain, returns, share = (
        g.placeholder(name, (None, LONGEST)) for name in ("action", "before", "gain", "returns", "share")
    )
    critic, actor = (
        (nn.GRU(HIDDEN) if memory else nn.Linear(HIDDEN) >> nn.Tanh()) >> nn.Linear(HIDDEN) >> nn.Tanh() >> nn.Linear(n)
        for n in (1, 2)
    )
    with g.path("critic", backward=True) as path:
        value = critic.build(seen, "critic.", training=True)[:, :, 0]
        path.minimize(cv.sum(share * cv.square(value - returns)), cv.Adam(RATE, clip_norm=0.5), output=value)
    with g.path("actor", backward=True) as path:  # the clipped objective of Schulman et al. 2017
        log_p = cv.log_softmax(actor.build(seen, "actor.", training=True), axis=-1)
        ratio = cv.exp(cv.pick(log_p, action) - before)
        smaller = cv.minimum(ratio * gain, cv.clip(ratio, 1 - CLIP, 1 + CLIP) * gain)
        path.minimize(-cv.sum(share * smaller), cv.Adam(RATE, clip_norm=0.5), output=log_p)
    with g.path("values") as path:
        path.output = critic.build(seen, "critic.", training=False)[:, :, 0].rename("worth")
    with g.path("predict") as path:
        path.output = actor.build(step, "actor.", training=False)
    return g


def play(model: cv.Model, poles: Poles, memory: bool, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """An episode with each pole, as data for the graph."""
    shape = (POLES, LONGEST)
    data = {
        "seen": np.zeros((*shape, 2), "float32"),
        "action": np.zeros(shape, int),
        "before": np.zeros(shape, "float32"),
    }
    lengths, up = np.zeros(POLES, int), np.ones(POLES, bool)
    model.reset_state()
    act = model.stream(batch=POLES) if memory else model.predict
    seen = poles.reset(rng)
    for t in range(LONGEST):
        scores = act(seen)
        p = 1 / (1 + np.exp(scores[:, 0] - scores[:, 1]))  # of a push to the right
        right = rng.uniform(size=POLES) < p
        data["seen"][:, t], data["action"][:, t] = seen, right
        data["before"][:, t] = np.log(np.where(right, p, 1 - p))
        lengths += up
        seen, fallen = poles.push(right)
        up &= ~fallen
        seen[~up] = 0
        if not up.any():
            break
    return {**data, "lengths": lengths, "up": up}


def advantages(values: np.ndarray, lengths: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Generalized advantages of pushes worth 0.1 each (Schulman et al. 2016); a fall ends them, the end of the time does not."""
    gains, gain = np.zeros_like(values), np.zeros(POLES)
    for t in reversed(range(LONGEST)):
        on = GAMMA * (up | (t < lengths - 1))
        after = values[:, min(t + 1, LONGEST - 1)]  # after the last push, the value of the state before it
        gain = np.where(t < lengths, 0.1 + on * after - values[:, t] + on * LAMBDA * gain, 0.0)
        gains[:, t] = gain
    return gains


def learn(memory: bool, most: int, seed: int) -> tuple[cv.Model, np.ndarray, np.ndarray]:
    """A model trained on so many decisions; the decisions before each update, and the mean return of its episodes."""
    model = cv.Model(graph(memory), batch_size=POLES, seed=seed)
    poles, rng, decisions, returns = Poles(), np.random.default_rng(seed), [0], []
    while decisions[-1] < most:
        data = play(model, poles, memory, rng)
        lengths, up = data["lengths"], data.pop("up")
        here = np.arange(LONGEST) < lengths[:, None]
        decisions.append(decisions[-1] + int(lengths.sum()))
        returns.append(lengths.mean())
        model["seen"], model["lengths"] = data["seen"], lengths
        model.forward("values")
        values = model["worth"]
        gains = advantages(values, lengths, up)
        data["returns"] = gains + values
        data["gain"] = (gains - gains[here].mean()) / (gains[here].std() + 1e-8)
        data["share"] = here / here.sum()
        for name, array in data.items():
            model[name] = array
        model.run_steps(EPOCHS, order=("critic", "actor"))
    return model, np.array(decisions[1:]), np.array(returns)


def picture(curves: dict[str, tuple[np.ndarray, np.ndarray]], angles: dict[str, np.ndarray], path: Path) -> None:
    """Draw the returns over the decisions, and the angles of a pole that each agent balances."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (returns, poles) = plt.subplots(1, 2, figsize=(10, 3.5))
    for name, (decisions, mean) in curves.items():
        returns.plot(decisions, mean, label=name)
    returns.set(xlabel="decisions", title=f"mean return of {POLES} episodes, at most {LONGEST}")
    returns.legend()
    for name, angle in angles.items():
        poles.plot(angle * 12, label=name)
    poles.set(xlabel="pushes", title="the pole at the end, degrees", ylim=(-13, 13))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="fewer decisions: shows that it runs and learns")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    args = parser.parse_args()
    curves, angles = {}, {}
    for name, memory in ("with memory", True), ("without", False):
        start = time.perf_counter()
        model, decisions, returns = learn(memory, 30_000 if args.quick else 60_000, args.seed)
        seconds = time.perf_counter() - start
        last = returns[-5:].mean()
        print(
            f"{name:11} mean return {last:5.1f} of at most {LONGEST}, after {decisions[-1]:,} decisions in {seconds:.1f} s"
        )
        data = play(model, Poles(), memory, np.random.default_rng(args.seed))
        curves[name], angles[name] = (decisions, returns), data["seen"][0, : data["lengths"][0], 1]
    picture(curves, angles, args.out / "remember.png")
    print(f"picture: {args.out / 'remember.png'}")


if __name__ == "__main__":
    main()
