"""PyTorch's networks for ours, with the same weights."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn as T

from calcvm import nn


class Branches(T.Module):
    """Two branches, added, or joined along the channels."""

    def __init__(self, one, other, join=False):
        super().__init__()
        self.branch, self.other, self.join = one, other, join

    def forward(self, x):
        a, b = self.branch(x), self.other(x)
        return torch.cat([a, b], 1) if self.join else a + b


class Joined(T.ModuleList):
    def forward(self, x):
        return torch.cat([branch(x) for branch in self], 1)


def theirs_of(layer):
    """A layer of PyTorch's for ours, which finds its inputs' channels itself."""
    name = type(layer).__name__
    if isinstance(layer, nn.Sequential):
        return T.Sequential(*map(theirs_of, layer))
    if isinstance(layer, nn.Residual):
        return Branches(theirs_of(layer.branch), theirs_of(layer.shortcut or nn.Sequential()))
    if isinstance(layer, nn.Concat):
        return Joined(map(theirs_of, layer.branches))
    if name == "Conv2d":
        of = (layer.channels, layer.kernel, layer.stride, layer.padding, layer.dilation, layer.groups, layer.bias)
        return T.LazyConv2d(*of)
    if name == "ConvTranspose2d":
        return T.LazyConvTranspose2d(layer.channels, layer.kernel, layer.stride)
    if name == "MaxPool2d":
        return T.MaxPool2d(layer.kernel, layer.stride, layer.padding, ceil_mode=layer.ceil_mode)
    make = {
        "BatchNorm": T.LazyBatchNorm2d, "InstanceNorm": partial(T.LazyInstanceNorm2d, affine=True, track_running_stats=False), "Flatten": T.Flatten,
        "ReLU": T.ReLU, "ReLU6": T.ReLU6, "GlobalAvgPool": partial(T.AdaptiveAvgPool2d, 1), "Dropout": T.Identity,
    }  # fmt: skip
    if name in make:
        return make[name]()
    if name == "LeakyReLU":
        return T.LeakyReLU(layer.alpha)
    if name == "LocalResponseNorm":
        return T.LocalResponseNorm(layer.size, layer.alpha, layer.beta, layer.k)
    assert name == "Linear", name
    return T.LazyLinear(layer.units)


def without_dropout(layer):
    """Which draws other numbers than PyTorch's."""
    for inner in layer if isinstance(layer, nn.Sequential) else ():
        if isinstance(inner, nn.Dropout):
            inner.rate = 0.0
    return layer


def given(theirs):
    """Its parameters and buffers in the order of ours, linear weights as ours are."""
    states = [v.detach().numpy() for k, v in theirs.state_dict().items() if not k.endswith("num_batches_tracked")]
    return [v.T if v.ndim == 2 else v for v in states]


def ordered(model):
    """Parameters and buffers of a model layer by layer, as PyTorch lists them."""
    names = [*model.parameters, *model.buffers]
    rank = {"weight": 0, "scale": 0, "bias": 1, "shift": 1, "running_mean": 2, "running_var": 3}
    graph = [*model.program.info["parameters"]]
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in graph))
    return sorted(names, key=lambda n: (layers.index(n.rpartition(".")[0]), rank[n.rpartition(".")[2]]))


def start_alike(model, theirs):
    """Ours begins with the weights of theirs."""
    for name, value in zip(ordered(model), given(theirs), strict=True):
        (model.parameters if name in model.parameters else model.buffers)[name][...] = value
