"""Random modules of PyTorch: chains of views, products, windows and norms, beside PyTorch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn as T
from torch.nn import functional as F

import calcvm as cv
from tests.conftest import whole_of

BATCH = 3  # of the example; no other size is 3, so that the batch is known by its size
SIZES = (1, 2, 4, 5, 6)
EACH = [
    torch.tanh,
    torch.sigmoid,
    F.relu,
    F.gelu,
    F.silu,
    torch.sin,
    lambda x: x * 0.5 + 1,
    lambda x: x.abs() + x,
    lambda x: -x,
]


def fits(x):
    return x.numel() <= BATCH * 300 and x.ndim <= 5


class Random(T.Module):
    """A chain of random steps; each is tried on an example while the module is made."""

    def __init__(self, seed):
        super().__init__()
        self.rng, self.parts, self.steps, self.told = np.random.default_rng(seed), T.ModuleList(), [], []
        self.shape = tuple(int(n) for n in self.rng.choice(SIZES, self.rng.integers(1, 4)))
        x = torch.from_numpy(self.rng.standard_normal((BATCH, *self.shape)))
        self.example, kept = x, []
        x = self._step("linear", x, kept)
        for _ in range(self.rng.integers(4, 13)):
            name = str(self.rng.choice(STEPS))
            try:
                y = self._step(name, x, kept)
            except (RuntimeError, IndexError, ValueError, AssertionError):
                continue  # it does not fit
            x = y
        self.batch_axis = list(x.shape).index(BATCH)
        self.eval()

    def _step(self, name, x, kept):
        n, step = len(self.parts), getattr(self, f"make_{name}")(x, kept)
        if step is None:
            return x
        self.double().eval()
        with torch.no_grad():
            y = step(x, kept)
        if not fits(y) or BATCH not in y.shape or list(y.shape).count(BATCH) > 1 or not y.isfinite().all():
            del self.parts[n:]
            return x
        self.steps.append(step)
        self.told.append(name)
        kept.append(y)
        return y

    def forward(self, x):
        kept = []
        for step in self.steps:
            x = step(x, kept)
            kept.append(x)
        return x.movedim(self.batch_axis, 0).flatten(1) if x.ndim > 1 else x

    # ------------------------------------------------------------ steps: a function of the value and of those before
    def part(self, module):
        self.parts.append(module)
        return len(self.parts) - 1

    def axis(self, x, batch=False):
        axes = [k for k, n in enumerate(x.shape) if batch or n != BATCH]
        return int(self.rng.choice(axes))

    def make_each(self, x, kept):
        f = EACH[self.rng.integers(len(EACH))]
        return lambda x, kept: f(x)

    def make_permute(self, x, kept):
        order = [int(k) for k in self.rng.permutation(x.ndim)]
        return lambda x, kept: x.permute(order)

    def make_transpose(self, x, kept):
        a, b = self.axis(x, True), self.axis(x, True)
        return lambda x, kept: x.transpose(a, b)

    def make_split(self, x, kept):
        a = self.axis(x)
        parts = [k for k in (1, 2) if x.shape[a] % k == 0]
        k = int(self.rng.choice(parts))
        return lambda x, kept: x.unflatten(a, (k, -1) if k > 1 else (-1, 1))

    def make_merge(self, x, kept):
        a = int(self.rng.integers(x.ndim - 1))
        if BATCH in x.shape[a : a + 2]:  # and back
            sizes = [-1 if n == BATCH else n for n in x.shape[a : a + 2]]
            return lambda x, kept: torch.tanh(x.flatten(a, a + 1)).unflatten(a, sizes)
        return lambda x, kept: x.flatten(a, a + 1)

    def make_reshape(self, x, kept):
        if x.shape[0] != BATCH:
            return None
        rest = int(np.prod(x.shape[1:]))
        first = int(self.rng.choice([k for k in (1, 2, 4, 5) if rest % k == 0]))
        return lambda x, kept: x.reshape(x.shape[0], first, -1)

    def make_one(self, x, kept):
        a = int(self.rng.integers(x.ndim + 1))
        return lambda x, kept: x.unsqueeze(a)

    def make_squeeze(self, x, kept):
        ones = [k for k, n in enumerate(x.shape) if n == 1]
        a = int(self.rng.choice(ones))
        return lambda x, kept: x.squeeze(a)

    def make_slice(self, x, kept):
        a = self.axis(x)
        start = int(self.rng.integers(x.shape[a]))
        stop = int(self.rng.integers(start + 1, x.shape[a] + 1))
        return lambda x, kept: x.narrow(a, start, stop - start)

    def make_select(self, x, kept):
        a = self.axis(x)
        at = int(self.rng.integers(x.shape[a]))
        return (lambda x, kept: x.select(a, at)) if x.ndim > 2 else None

    def make_join(self, x, kept):
        a = self.axis(x)
        same = [k for k, y in enumerate(kept) if y.shape == x.shape]
        k = int(self.rng.choice(same))
        return lambda x, kept: torch.cat([x, kept[k] * 2], a)

    def make_stack(self, x, kept):
        a = int(self.rng.integers(x.ndim + 1))
        return lambda x, kept: torch.stack([x, x.sin()], a)

    def make_chunks(self, x, kept):
        a = self.axis(x)
        assert x.shape[a] % 2 == 0
        return lambda x, kept: (lambda p, q: p * torch.sigmoid(q))(*x.chunk(2, a))

    def make_flip(self, x, kept):
        a, shift = self.axis(x), int(self.rng.integers(1, 4))
        return (lambda x, kept: x.flip(a)) if shift == 1 else (lambda x, kept: x.roll(shift, a))

    def make_add(self, x, kept):
        same = [k for k, y in enumerate(kept) if y.shape == x.shape]
        k, by = int(self.rng.choice(same)), int(self.rng.integers(3))
        return lambda x, kept: (x + kept[k], x * kept[k].sigmoid(), x - 2 * kept[k])[by]

    def make_constant(self, x, kept):
        c = torch.from_numpy(self.rng.standard_normal([n if n != BATCH else 1 for n in x.shape]))
        by = int(self.rng.integers(3))
        return lambda x, kept: (x + c, x * c, torch.where(c > 0, x, x * 0.1))[by]

    def make_linear(self, x, kept):
        assert x.shape[-1] != BATCH
        k = self.part(T.Linear(x.shape[-1], int(self.rng.choice(SIZES)), bias=bool(self.rng.integers(2))))
        return lambda x, kept: self.parts[k](x)

    def make_norm(self, x, kept):
        assert x.shape[-1] not in (1, 2, BATCH)
        k = self.part(T.LayerNorm(x.shape[-1]) if self.rng.integers(2) else T.RMSNorm(x.shape[-1], eps=1e-5))
        return lambda x, kept: self.parts[k](x)

    def make_batch_norm(self, x, kept):
        assert x.shape[0] == BATCH and 2 < x.ndim < 5
        k = self.part((T.BatchNorm1d, T.BatchNorm2d)[x.ndim - 3](x.shape[1]))
        return lambda x, kept: self.parts[k](x)

    def make_softmax(self, x, kept):
        a = self.axis(x)
        return lambda x, kept: x.softmax(a) * 2

    def make_reduce(self, x, kept):
        a, keep, by = self.axis(x), bool(self.rng.integers(2)), int(self.rng.integers(3))
        assert keep or x.ndim > 2
        return lambda x, kept: (x.sum(a, keep), x.mean(a, keep), x.amax(a, keep))[by]

    def make_expand(self, x, kept):
        ones = [k for k, n in enumerate(x.shape) if n == 1]
        a = int(self.rng.choice(ones))
        return lambda x, kept: x.expand([2 if k == a else -1 for k in range(x.ndim)])

    def make_matmul(self, x, kept):
        assert x.ndim > 2 and BATCH not in x.shape[-2:]
        return lambda x, kept: x @ x.transpose(-1, -2) * 0.1

    def make_conv(self, x, kept):
        assert x.shape[0] == BATCH and 2 < x.ndim < 5 and min(x.shape[2:]) > 1
        c = int(self.rng.choice((1, 2, 4)))
        k = self.part((T.Conv1d, T.Conv2d)[x.ndim - 3](x.shape[1], c, 2, padding=1, groups=1))
        return lambda x, kept: self.parts[k](x)

    def make_pool(self, x, kept):
        assert x.shape[0] == BATCH and 2 < x.ndim < 5 and min(x.shape[2:]) > 1
        f = ((F.max_pool1d, F.avg_pool1d), (F.max_pool2d, F.avg_pool2d))[x.ndim - 3][self.rng.integers(2)]
        return lambda x, kept: f(x, 2)

    def make_attention(self, x, kept):
        assert x.shape[0] == BATCH and x.ndim == 3 and x.shape[2] % 2 == 0
        k = self.part(T.Linear(x.shape[2], 3 * x.shape[2]))
        causal = bool(self.rng.integers(2))

        def heads(y):
            return y.unflatten(2, (2, -1)).transpose(1, 2)

        def step(x, kept):
            q, key, v = map(heads, self.parts[k](x).chunk(3, 2))
            return F.scaled_dot_product_attention(q, key, v, is_causal=causal).transpose(1, 2).flatten(2)

        return step


STEPS = [name.removeprefix("make_") for name in vars(Random) if name.startswith("make_")]


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(500 if whole_of(metafunc) else 40))


def test_random_modules(seed):
    module = Random(seed)
    x = module.example
    net = cv.from_torch(module, x)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        wanted = module(x)
    target = rng.standard_normal(wanted.shape)
    model = cv.Model(
        net, input_shape=module.shape, loss="mse", optimizer=cv.SGD(0.1), batch_size=4, dtype="float64", seed=0
    )
    found, told = model.predict(x.numpy()), f"seed {seed}: {', '.join(module.told)}"
    assert abs(found - wanted.numpy()).max() <= 1e-9 * max(1, abs(wanted).max()), told
    optimizer = torch.optim.SGD(module.train().parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(module(x), torch.from_numpy(target))
        loss.backward()
        optimizer.step()
        assert model.step(x.numpy(), target) == pytest.approx(loss.item(), rel=1e-7), told
    state = module.state_dict()
    for name, array in model.state_dict().items():
        assert abs(array - state[name].numpy()).max() <= 1e-7 * max(1, abs(array).max()), f"{told}: {name}"
