"""Values, gradients and second derivatives of named equations beside PyTorch's in float64."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from tests.equations.derive import Derived
from tests.equations.peers import PEERS

RIGHT = 1e-9


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Of the largest element, or of 1."""
    return float(np.abs(got - want).max(initial=0) / max(1, np.abs(want).max(initial=0)))


@pytest.mark.parametrize("name", PEERS)
def test_an_equation_and_its_derivatives(name: str) -> None:
    peer, rng = PEERS[name], np.random.default_rng(len(name))
    values = {
        k: np.exp(n) if peer.positive else n for k, n in ((k, rng.normal(size=s)) for k, s in peer.shapes.items())
    }
    wrt = list(values)
    made = Derived(peer.text, {**values, **peer.integers}, peer.parameters, wrt)
    tensors = {k: torch.tensor(v, requires_grad=True) for k, v in values.items()}
    y = peer.torch(**tensors, **{k: torch.tensor(v) for k, v in peer.integers.items()})
    assert error(made.value(), y.detach().numpy()) < RIGHT
    seed = rng.normal(size=made.shape)
    dy = torch.tensor(seed, requires_grad=True)
    first = torch.autograd.grad(y, [tensors[k] for k in wrt], dy, create_graph=True)
    got = made.gradient(seed)
    for k, want in zip(wrt, first):
        assert error(got[k], want.detach().numpy()) < RIGHT, f"{k}: {made.first}"
    for k, gradient in zip(wrt, first):
        with_ = rng.normal(size=values[k].shape)
        made.derive_again(k, seed)
        got = made.second_gradient(seed, with_)
        by = [*(tensors[k] for k in wrt), dy]
        second = torch.autograd.grad(gradient, by, torch.tensor(with_), allow_unused=True, retain_graph=True)
        for other, want in zip([*wrt, made.seed], second):
            expected = np.zeros_like(got[other]) if want is None else want.numpy()
            assert error(got[other], expected) < RIGHT, f"{k} by {other}: {made.second}"
