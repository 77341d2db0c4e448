"""An agent learns to balance a pole, one decision at a time: proximal policy optimization, in plain Python around calcvm.

The environment is CartPole (Barto, Sutton and Anderson 1983, with gymnasium's numbers), implemented below; with
``--gymnasium`` it is gymnasium's.  Learning ends at a mean return of 475 over 100 episodes.  Then, if PyTorch is installed,
the same program learns with it from the same weights, for the same number of decisions, and the times are compared.

    python examples/agent.py [--seed N] [--gymnasium] [--quick]
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

import calcvm as cv
from calcvm import nn

ROLLOUT, EPOCHS, BATCH = 512, 4, 64  # decisions between updates, passes over them, decisions per step
RATE, DECISIONS = 1e-3, 200_000  # initial rate; most decisions
GAMMA, LAMBDA, CLIP, REWARD = 0.99, 0.95, 0.2, 0.01
SOLVED, LONGEST = 475, 500
HIDDEN = 32


class CartPole:
    """A pole on a cart that is pushed to the left (0) or right (1).  An episode ends when it falls, or after 500 pushes."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def reset(self) -> tuple[float, ...]:
        self.x, self.v, self.angle, self.spin = (self.random.uniform(-0.05, 0.05) for _ in range(4))
        return self.x, self.v, self.angle, self.spin

    def step(self, action: int) -> tuple[tuple[float, ...], bool]:
        """The next state, and whether the pole has fallen."""
        sin, cos = math.sin(self.angle), math.cos(self.angle)
        push = ((10.0 if action else -10.0) + 0.05 * self.spin * self.spin * sin) / 1.1
        twist = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos * cos / 1.1))
        self.x, self.v = self.x + 0.02 * self.v, self.v + 0.02 * (push - 0.05 * twist * cos / 1.1)
        self.angle, self.spin = self.angle + 0.02 * self.spin, self.spin + 0.02 * twist
        fallen = abs(self.x) > 2.4 or abs(self.angle) > 0.2094395
        return (self.x, self.v, self.angle, self.spin), fallen


class Gymnasium:
    """gymnasium's CartPole, with the interface of `CartPole`."""

    def __init__(self, seed: int):
        import gymnasium

        self.env, self.seed = gymnasium.make("CartPole-v1", max_episode_steps=10 * LONGEST), seed

    def reset(self) -> Any:
        state, _ = self.env.reset(seed=self.seed)
        self.seed = None  # type: ignore[assignment]  # only the first reset has a seed
        return state

    def step(self, action: int) -> tuple[Any, bool]:
        state, _, fallen, _, _ = self.env.step(action)
        return state, fallen


# ---------------------------------------------------------------- the agent's network, in two libraries
class Net(Protocol):
    """What an agent needs from a library: two scores and a value for a state, and a training step on a batch."""

    def predict(self, state: np.ndarray) -> np.ndarray: ...
    def step(self, *batch: np.ndarray) -> float: ...
    def set_rate(self, rate: float) -> None: ...


def body() -> nn.Sequential:
    return nn.Linear(HIDDEN) >> nn.Tanh() >> nn.Linear(HIDDEN) >> nn.Tanh() >> nn.Linear(3)


def graph() -> cv.CalcGraph:
    """The clipped objective of Schulman et al. 2017, and the error of the value."""
    g, net = cv.CalcGraph(), body()
    state = g.placeholder("state", (None, 4))
    action, before, gain, returns = (g.placeholder(name, (None,)) for name in ("action", "before", "gain", "returns"))
    with g.path("learn", backward=True) as learn:
        out = net.build(state)
        log_p, value = cv.log_softmax(out[:, 0:2]), cv.reshape(out[:, 2:3], (None,))
        ratio = cv.exp(cv.pick(log_p, action) - before)
        clipped = 1 - CLIP + cv.relu(ratio - (1 - CLIP)) - cv.relu(ratio - (1 + CLIP))
        a, b = ratio * gain, clipped * gain
        smaller = a - cv.relu(a - b)
        loss = 0.5 * cv.mean(cv.square(value - returns)) - cv.mean(smaller)
        learn.minimize(loss, cv.Adam(RATE, clip_norm=0.5), output=out)
    with g.path("predict") as predict:
        predict.output = net.build(state, training=False).rename("output")
    return g


class Ours:
    def __init__(self, seed: int):
        self.model = cv.Model(graph(), batch_size=BATCH, workers=1, seed=seed)
        self.model.set_weights(scaled(self.model.get_weights()))
        self.predict: Callable[[np.ndarray], np.ndarray] = self.model.predict
        self.step: Callable[..., float] = self.model.step

    def set_rate(self, rate: float) -> None:
        self.model.hyper["learning_rate"] = rate


def scaled(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Scale the last weights down, so that both pushes are equally probable at first."""
    weights["linear_3.weight"] *= 0.01
    return weights


class Theirs:
    def __init__(self, weights: dict[str, np.ndarray]):
        import torch

        torch.set_num_threads(1)
        self.torch = torch
        layers: list[Any] = []
        for k in (1, 2, 3):
            w, b = weights[f"linear_{k}.weight"], weights[f"linear_{k}.bias"]
            layer = torch.nn.Linear(*w.shape)
            layer.weight.data.copy_(torch.from_numpy(w.T))
            layer.bias.data.copy_(torch.from_numpy(b))
            layers += [layer, torch.nn.Tanh()] if k < 3 else [layer]
        self.net = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.net.parameters(), RATE, fused=True)

    def predict(self, state: np.ndarray) -> np.ndarray:
        with self.torch.inference_mode():
            return self.net(self.torch.from_numpy(state)).numpy()

    def step(self, *batch: np.ndarray) -> float:
        state, action, before, gain, returns = map(self.torch.from_numpy, batch)
        out = self.net(state)
        log_p, value = self.torch.log_softmax(out[:, :2], 1), out[:, 2]
        ratio = (log_p.gather(1, action[:, None])[:, 0] - before).exp()
        smaller = self.torch.minimum(ratio * gain, ratio.clip(1 - CLIP, 1 + CLIP) * gain)
        loss = 0.5 * (value - returns).square().mean() - smaller.mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.optimizer.step()
        return loss.item()

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate


# ---------------------------------------------------------------- learning
def learn(net: Net, env: Any, seed: int, decisions: int, solved: float, told: bool) -> tuple[int, float, float, float]:
    """Learn; return the decisions made, the mean return of the last 100 episodes, seconds, and the part spent in updates."""
    draw, shuffled = random.Random(seed).random, np.random.default_rng(seed)
    states, one = np.zeros((ROLLOUT, 4), "float32"), np.zeros((1, 4), "float32")
    actions, before = np.zeros(ROLLOUT, "int64"), np.zeros(ROLLOUT, "float32")
    values, rewards, ends = [0.0] * (ROLLOUT + 1), [REWARD] * ROLLOUT, [False] * ROLLOUT
    last, pushes, done, updating = deque[int](maxlen=100), 0, 0, 0.0
    predict, start = net.predict, time.perf_counter()
    one[0] = env.reset()
    while done < decisions:
        for k in range(ROLLOUT):
            states[k] = one[0]
            left, right, values[k] = predict(one)[0].tolist()
            p = 1 / (1 + math.exp(left - right))  # of a push to the right
            action = draw() < p
            actions[k], before[k] = action, math.log(p if action else 1 - p)
            state, fallen = env.step(int(action))
            one[0] = state
            pushes += 1
            ends[k], rewards[k] = fallen or pushes == LONGEST, REWARD
            if ends[k]:
                if not fallen:  # the time ran out, not the balance: the value of later states counts
                    rewards[k] += GAMMA * float(predict(one)[0, 2])
                last.append(pushes)
                pushes = 0
                one[0] = env.reset()
        values[ROLLOUT] = float(predict(one)[0, 2])
        done += ROLLOUT
        update = time.perf_counter()
        gains, gain = np.zeros(ROLLOUT, "float32"), 0.0
        for k in reversed(range(ROLLOUT)):  # generalized advantages, Schulman et al. 2016
            on = 0.0 if ends[k] else GAMMA
            gain = rewards[k] + on * values[k + 1] - values[k] + on * LAMBDA * gain
            gains[k] = gain
        returns = gains + np.array(values[:ROLLOUT], "float32")
        gains = (gains - gains.mean()) / (gains.std() + 1e-8)
        net.set_rate(RATE * max(0.05, 1 - done / DECISIONS))
        data = states, actions, before, gains, returns
        for _ in range(EPOCHS):
            order = shuffled.permutation(ROLLOUT).reshape(-1, BATCH)
            for chosen in order:
                net.step(*(array[chosen] for array in data))
        updating += time.perf_counter() - update
        mean = sum(last) / max(len(last), 1)
        if told and done % (32 * ROLLOUT) == 0:
            print(f"{done:,} decisions: mean return of the last {len(last)} episodes {mean:.0f}")
        if len(last) == 100 and mean >= solved:
            break
    return done, mean, time.perf_counter() - start, updating


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gymnasium", action="store_true", help="take gymnasium's physics")
    parser.add_argument("--quick", action="store_true", help="few decisions: shows that it runs and learns")
    args = parser.parse_args()
    environment = Gymnasium if args.gymnasium else CartPole
    decisions, solved = (20 * ROLLOUT, LONGEST + 1) if args.quick else (DECISIONS, SOLVED)

    ours = Ours(args.seed)
    weights = ours.model.get_weights()
    print(f"the agent takes {ours.model.program.heap_bytes:,} bytes")
    warm = Ours(args.seed)
    learn(warm, environment(1), 1, 2 * ROLLOUT, solved, told=False)  # compiles
    done, mean, seconds, updating = learn(ours, environment(args.seed), args.seed, decisions, solved, told=True)
    one, calls = np.zeros((1, 4), "float32"), 100_000
    start = time.perf_counter()
    for _ in range(calls):
        ours.predict(one)
    predicting = done * (time.perf_counter() - start) / calls
    print(f"mean return {mean:.0f} after {done:,} decisions in {seconds:.2f} s, {1e6 * seconds / done:.1f} us each")
    print(
        f"of the time {(updating + predicting) / seconds:.0%} in calcvm: predict {predicting:.2f} s, updates {updating:.2f} s"
    )

    try:
        theirs = Theirs(weights)
    except ImportError:
        print("PyTorch is not installed: no comparison")
        return
    some = min(done, 20 * ROLLOUT)
    learn(Theirs(weights), environment(1), 1, 2 * ROLLOUT, solved, told=False)
    made, _, slow, _ = learn(theirs, environment(args.seed), args.seed, some, LONGEST + 1, told=False)
    ratio = (slow / made) / (seconds / done)
    print(f"PyTorch: {1e6 * slow / made:.0f} us a decision ({made:,} of them), {ratio:.1f} times as long")


if __name__ == "__main__":
    main()
