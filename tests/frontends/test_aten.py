"""Each operator of PyTorch that has a counterpart, beside PyTorch: results and gradients, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import calcvm as cv
from calcvm.frontends.aten import ATEN
from tests.conftest import by_turns

A = torch.ops.aten
ROWS = (4, 6)  # shape of a sample, unless a case gives another
C, K = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6), torch.tensor([2, 0, 3])
MASK = C > 0.2


def normed(x, f):
    return f(x, torch.tensor([1.0, 2.0, 0.5, 1.5]).double(), torch.tensor([0.1, 0.2, 0.3, 0.4]).double())


def window(axes, f, size=7):
    return f, (4, *(size,) * axes)


def weights(*shape):
    return torch.linspace(-0.5, 0.5, int(np.prod(shape)), dtype=torch.float64).reshape(shape).sin()


def recurrent(f, gates, states, **more):
    def run(x):
        w = [weights(gates * 3, 6), weights(gates * 3, 3), weights(gates * 3), weights(gates * 3)] * 2
        start = [x.new_zeros(2, x.shape[0], 3) for _ in range(states)]
        y, *last = f(x, start if states > 1 else start[0], w, True, 1, 0.0, False, True, True)
        return torch.cat([y.flatten(1), *(h.transpose(0, 1).flatten(1) for h in last)], 1)

    return run


def heads(x):
    return x.unflatten(-1, (2, 3)).transpose(1, 2)


def changed(x):
    """By assignments to parts."""
    y = x * 2
    y[:, 1] += 1
    y[:, :, 1:3] *= x[:, :, 2:4]
    y[:, -1] = 0.5
    y[:, 2, 3].mul_(3)
    y[:, 0, 1:] = x.mean((1, 2))[:, None]
    return y


CASES = {
    **{name: (lambda x, f=name: getattr(torch, f)(x)) for name in (
        "abs atan ceil cos cosh erf erfc exp exp2 expm1 floor isnan logical_not neg relu round selu sigmoid sign sin sinh square tan tanh "
        "positive"
    ).split()},
    **{name: (lambda x, f=name: getattr(torch, f)(x.abs() + 0.5)) for name in "log log10 log1p log2 reciprocal rsqrt sqrt".split()},
    **{name: (lambda x, f=name: getattr(torch, f)(x.tanh() * 0.9)) for name in ("acos", "asin")},
    **{name: (lambda x, f=name: getattr(F, f)(x)) for name in "celu elu gelu hardsigmoid hardswish hardtanh mish relu6 silu softplus".split()},
    "log_sigmoid": F.logsigmoid,
    "add": lambda x: torch.add(x, C, alpha=2) + torch.add(x, x.square(), alpha=0.5) + 3 + x,
    "sub": lambda x: torch.sub(x, x.exp(), alpha=2) - C,
    "rsub": lambda x: torch.rsub(x, 2, alpha=3) + torch.rsub(x, C),
    "mul": lambda x: x * C * x * 2,
    "div": lambda x: x / (C + 3) + 1 / (x.exp() + 1) + torch.div(x * 7, 2, rounding_mode="floor") + torch.div(x * 7, 2, rounding_mode="trunc"),
    "remainder": lambda x: torch.remainder(x, 0.7),
    "pow": lambda x: x**2 + x.abs() ** 1.5 + 2**x,
    "maximum": lambda x: torch.maximum(x, C), "minimum": lambda x: torch.minimum(x, x.sin()),
    **{name: (lambda x, f=name: getattr(torch, f)(x, C) & getattr(torch, f)(x, 0.1)) for name in "eq ne lt le gt ge".split()},
    **{name: (lambda x, f=name: getattr(torch, f)(x > 0, x < 0.5)) for name in "logical_and logical_or logical_xor".split()},
    **{name: (lambda x, f=name: getattr(torch, f)(x > 0, MASK)) for name in "bitwise_and bitwise_or bitwise_xor".split()},
    "bitwise_not": lambda x: ~(x > 0),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2) + F.leaky_relu_(x * 2, 0.3),
    "clamp": lambda x: x.clamp(-0.5, 0.7) + x.clamp(max=0.2) + x.clamp(C),
    "clip": lambda x: x.clip(-0.5, 0.7), "clamp_min": lambda x: x.clamp_min(0.1), "clamp_max": lambda x: x.clamp_max(0.1),
    "prelu": lambda x: F.prelu(x, weights(4)), "glu": lambda x: F.glu(x) + F.glu(x, 1).sum(1, keepdim=True)[:, :, :3],
    "where": lambda x: torch.where(x > 0, x, C) + torch.where(MASK, x, 0.5),
    "masked_fill": lambda x: x.masked_fill(MASK, 3.0).masked_fill(x > 1, -1.0),
    "addcmul": lambda x: torch.addcmul(x, x, C, value=0.5), "addcdiv": lambda x: torch.addcdiv(x, x, C + 3, value=0.5),
    "lerp": lambda x: torch.lerp(x, x.exp(), 0.3),
    "to": lambda x: (x * 5).to(torch.int64).to(torch.float64) + x.to(torch.float64), "type_as": lambda x: (x > 0).type_as(x),
    "_to_copy": lambda x: A._to_copy(x > 0, dtype=torch.float64),
    # shapes
    "view": lambda x: x.view(-1, 2, 12), "reshape": lambda x: x.transpose(1, 2).reshape(x.shape[0], 3, 8), "_unsafe_view": lambda x: A._unsafe_view(x, [x.shape[0], 24]),
    "view_as": lambda x: x.view_as(x.square()), "reshape_as": lambda x: x.reshape_as(x.square()),
    "flatten": lambda x: x.flatten(1), "unflatten": lambda x: x.unflatten(2, (2, -1)), "unsqueeze": lambda x: x.unsqueeze(-1) + x.unsqueeze(1).permute(0, 2, 3, 1),
    "squeeze": lambda x: x.sum(2, keepdim=True).squeeze() + x.sum((1, 2), keepdim=True).squeeze(2),
    "permute": lambda x: x.permute(0, 2, 1), "transpose": lambda x: x.transpose(-1, -2).exp(), "swapaxes": lambda x: x.swapaxes(1, 2), "swapdims": lambda x: x.swapdims(1, 2),
    "t": lambda x: x.sum(1).t().flip(0).t(), "mT": lambda x: x.mT, "numpy_T": lambda x: x.sum(1).T.exp().T,
    "movedim": lambda x: x.movedim(1, 2), "moveaxis": lambda x: x.unflatten(2, (2, 3)).moveaxis((1, 3), (2, 1)),
    "contiguous": lambda x: x.transpose(1, 2).contiguous(), "clone": lambda x: x.clone(), "alias": lambda x: A.alias(x), "lift_fresh_copy": lambda x: A.lift_fresh_copy(x),
    "detach": lambda x: x.detach() * x, "select": lambda x: x[:, 1] + x.select(1, -1), "slice": lambda x: torch.cat([x[:, 1:3], x[:, ::2], x[:, -1:]], 1),
    "narrow": lambda x: x.narrow(2, 1, 3), "split": lambda x: torch.cat([y * k for k, y in enumerate(x.split(4, 2))], 2), "split_with_sizes": lambda x: x.split([1, 3], 1)[1],
    "chunk": lambda x: x.chunk(4, 2)[1].exp(), "unbind": lambda x: x.unbind(1)[2] * x.unbind(1)[0], "cat": lambda x: torch.cat([x, C.expand(x.shape[0], -1, -1), x], 1),
    "concat": lambda x: torch.concat([x, x], 2), "concatenate": lambda x: torch.concatenate([x, x], 2), "stack": lambda x: torch.stack([x, x * 2, x.exp()], -1),
    "expand": lambda x: x.unsqueeze(1).expand(-1, 3, -1, -1) * 2, "expand_as": lambda x: x.sum(1, keepdim=True).expand_as(x).flatten(1), "broadcast_to": lambda x: x.sum(2, keepdim=True).broadcast_to(x.shape).flatten(1),
    "repeat": lambda x: x.repeat(1, 2, 1) + x.sum(1, keepdim=True).repeat(1, 8, 1), "tile": lambda x: x.tile((1, 2, 1)), "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
    "flip": lambda x: x.flip(1, 2), "roll": lambda x: x.roll((1, -2), (1, 2)),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1), value=0.5).exp()[:, :, 1:] + F.pad(x, (-1, 3, 1, 0)), "constant_pad_nd": lambda x: A.constant_pad_nd(x, [1, 1], 2.0),
    **{f"reflection_pad{n}d": window(n, lambda x, n=n: getattr(A, f"reflection_pad{n}d")(x, [1, 2] * n), 4) for n in (1, 2, 3)},
    **{f"replication_pad{n}d": window(n, lambda x, n=n: getattr(A, f"replication_pad{n}d")(x, [1, 2] * n), 4) for n in (1, 2, 3)},
    "pixel_shuffle": window(2, lambda x: F.pixel_shuffle(x, 2)), "pixel_unshuffle": window(2, lambda x: F.pixel_unshuffle(x, 2), 6),
    "channel_shuffle": window(2, lambda x: F.channel_shuffle(x, 2)), "tril": lambda x: x.tril(), "triu": lambda x: x.triu(1),
    "select_scatter": changed, "slice_scatter": changed, "copy": changed,
    # constants whose size depends on the batch
    **{f"{f}{end}": (lambda x, f=f, end=end: x * 2 + {"": lambda: getattr(torch, f)(x.shape[0], 4, 6, dtype=x.dtype), "_like": lambda: getattr(torch, f"{f}_like")(x)}[end]()) for f in ("zeros", "ones") for end in ("", "_like")},
    "new_zeros": lambda x: torch.cat([x, x.new_zeros(x.shape[0], 2, 6)], 1), "new_ones": lambda x: torch.cat([x, x.new_ones(x.shape[0], 2, 6)], 1),
    "full": lambda x: x + torch.full((x.shape[0], 4, 1), 2.5), "new_full": lambda x: torch.cat([x.new_full((x.shape[0], 1, 6), 2.5), x], 1), "full_like": lambda x: torch.full_like(x, 2.0) * x,
    "fill": lambda x: A.fill(x, 2.0) + x,
    "empty": lambda x: torch.empty(x.shape[0], 4, 6).fill_(1.5) + x, "empty_like": lambda x: torch.empty_like(x).fill_(1.5) + x, "new_empty": lambda x: x.new_empty(x.shape[0], 1).fill_(2.0)[:, :, None] + x,
    # reductions
    **{name: (lambda x, f=name: getattr(torch, f)(x, 1) + getattr(torch, f)(x, -1, keepdim=True).flatten(1).sum(1, keepdim=True) + getattr(torch, f)(x, (1, 2))[:, None]) for name in "sum mean amax amin logsumexp".split()},
    "max": lambda x: x.max(1).values + torch.max(x, C).sum(1) + x.max(1).indices, "min": lambda x: x.min(2).values + x.min(2, keepdim=True)[1].squeeze(2),
    "argmax": lambda x: x.argmax(1) + x.argmax(1, keepdim=True).squeeze(1), "argmin": lambda x: x.argmin(-1),
    "var": lambda x: x.var(1) + x.var((1, 2), unbiased=False, keepdim=True).flatten(1), "std": lambda x: x.std(2) + x.std(-1, correction=0),
    "var_mean": lambda x: sum(torch.var_mean(x, 1)),
    "norm": lambda x: A.norm(x, 2, [1]), "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=1) + torch.linalg.vector_norm(x, 1, dim=1) + torch.linalg.vector_norm(x, torch.inf, dim=1),
    "frobenius_norm": lambda x: A.frobenius_norm(x, [1], False),
    "softmax": lambda x: x.softmax(-1) + x.softmax(1), "_softmax": lambda x: A._softmax(x, 1, False), "_safe_softmax": lambda x: A._safe_softmax(x, -1),
    "log_softmax": lambda x: x.log_softmax(1), "_log_softmax": lambda x: A._log_softmax(x, -1, False),
    "cumsum": lambda x: x.cumsum(1) + x.cumsum(-1), "cumprod": lambda x: x.cumprod(2), "topk": lambda x: sum(x.topk(2, 1)), "sort": lambda x: sum(x.sort(2, descending=True)),
    # places
    "embedding": lambda x: F.embedding((x.abs() * 2).clamp(max=4).long(), weights(5, 3)) + F.embedding(K, weights(5, 3)).sum(), "index_select": lambda x: x.index_select(1, K),
    "index": lambda x: x[:, K] + x[:, :, K - 1].sum(2, keepdim=True)[:, :3] + x[:, [1, 2, 3]], "gather": lambda x: x.gather(1, x.argsort(1)[:, :2]), "argsort": lambda x: x.argsort(1, descending=True), "one_hot": lambda x: F.one_hot((x > 0).long(), 3),
    # products
    "linear": lambda x: F.linear(x, weights(5, 6), weights(5)) + F.linear(x.transpose(1, 2), weights(5, 4)).transpose(1, 2)[:, :4, :5].sum(2, keepdim=True) + F.linear(x, weights(1, 6)),
    "matmul": lambda x: x @ x.transpose(1, 2) @ C + (x @ weights(6))[:, :, None],
    "bmm": lambda x: torch.bmm(x.transpose(1, 2), x), "mm": lambda x: torch.mm(x.flatten(1), weights(24, 5)), "mv": lambda x: torch.mv(x.flatten(1), weights(24)), "dot": lambda x: x * torch.dot(x.sum((0, 1)), weights(6)),
    "addmm": lambda x: torch.addmm(weights(5), x.flatten(1), weights(24, 5), beta=0.5, alpha=2), "baddbmm": lambda x: torch.baddbmm(weights(4, 4), x, x.transpose(1, 2), beta=0.5), "einsum": lambda x: torch.einsum("bij,kj->bik", x, weights(5, 6)),
    "_weight_norm": lambda x: F.linear(x, torch._weight_norm(x.mean((0, 1)) * weights(5, 6), weights(5, 1).exp(), 0)),
    # images
    **{f"conv{n}d": window(n, lambda x, n=n: getattr(F, f"conv{n}d")(x, weights(6, 2, *(3,) * n), weights(6), stride=2, padding=1, groups=2) + getattr(F, f"conv{n}d")(x, weights(6, 4, *(3,) * n), padding="same", dilation=2).mean()) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": window(n, lambda x, n=n: getattr(F, f"conv_transpose{n}d")(x, weights(4, 3, *(3,) * n), weights(6), stride=2, padding=1, output_padding=1, groups=2), 4) for n in (1, 2, 3)},
    **{f"max_pool{n}d": window(n, lambda x, n=n: getattr(F, f"max_pool{n}d")(x, 3, 2, 1, ceil_mode=True)) for n in (1, 2, 3)},
    **{f"avg_pool{n}d": window(n, lambda x, n=n: getattr(F, f"avg_pool{n}d")(x, 3, 2, 1, count_include_pad=False) + getattr(F, f"avg_pool{n}d")(x, 2).mean()) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": window(n, lambda x, n=n: getattr(F, f"adaptive_avg_pool{n}d")(x, 3) + getattr(F, f"adaptive_avg_pool{n}d")(x, 1)) for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": window(n, lambda x, n=n: getattr(F, f"adaptive_max_pool{n}d")(x, 3)) for n in (1, 2, 3)},
    **{f"upsample_nearest{n}d": window(n, lambda x, n=n: F.interpolate(x, scale_factor=2) + F.interpolate(x, size=(8,) * n), 4) for n in (1, 2, 3)},
    **{f"upsample_{mode}{n}d": window(n, lambda x, m=mode: F.interpolate(x, scale_factor=2, mode=m) + F.interpolate(x, size=(8,) * (x.ndim - 2), mode=m, align_corners=True), 4) for n, mode in ((1, "linear"), (2, "bilinear"), (3, "trilinear"))},
    # normalization
    "instance_norm": window(2, lambda x: normed(x, lambda x, w, b: F.instance_norm(x, None, None, w, b)), 3),
    "group_norm": window(2, lambda x: normed(x, lambda x, w, b: F.group_norm(x, 2, w, b)), 3), "layer_norm": lambda x: F.layer_norm(x, (6,), weights(6)) + F.layer_norm(x, (4, 6)),
    "rms_norm": lambda x: F.rms_norm(x, (6,), weights(6), 1e-5) + F.rms_norm(x, (6,)), "dropout": lambda x: F.dropout(x, 0.5, False), "feature_dropout": window(2, lambda x: F.dropout2d(x, 0.5, False)),
    # sequences
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(heads(x), heads(x.exp()), heads(x), is_causal=True) + F.scaled_dot_product_attention(heads(x), heads(x), heads(x), MASK[:, :4] | torch.eye(4, dtype=torch.bool)) + F.scaled_dot_product_attention(x, x, x, C[:, :4]).mean(),
    "lstm": recurrent(torch.lstm, 4, 2), "gru": recurrent(torch.gru, 3, 1), "rnn_tanh": recurrent(torch.rnn_tanh, 1, 1), "rnn_relu": recurrent(torch.rnn_relu, 1, 1),
}  # fmt: skip


class Case(torch.nn.Module):
    """A function of the input times a parameter; the mean is added, so that there is a gradient whatever the function is."""

    def __init__(self, f, shape):
        super().__init__()
        self.f, self.p = (
            f,
            torch.nn.Parameter(torch.linspace(0.5, 1.5, int(np.prod(shape)), dtype=torch.float64).reshape(shape)),
        )

    def forward(self, x):
        x = x * self.p
        y = self.f(x)
        y = y if y.dtype == torch.float64 else y.to(torch.float64)
        return y + x.flatten(1).mean(1).reshape(-1, *[1] * (y.ndim - 1))


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        by_turns(metafunc, 3, name=CASES)


def test_each_operator_beside_pytorch(name):
    f, shape = CASES[name] if isinstance(CASES[name], tuple) else (CASES[name], ROWS)
    module, rng = Case(f, shape), np.random.default_rng(0)
    x = rng.standard_normal((3, *shape))
    net = cv.from_torch(module, x)
    used = {node.name.removesuffix("_") for node in net._imported.nodes}
    assert name in used or name.removesuffix("_") in used
    with torch.no_grad():
        wanted = module(torch.from_numpy(x))
    model = cv.Model(net, input_shape=shape, loss="mse", optimizer=cv.SGD(1.0), batch_size=4, dtype="float64")
    found = model.predict(x)
    assert found.shape == wanted.shape
    assert abs(found - wanted.numpy()).max() <= 1e-12 * max(1, abs(wanted).max())
    target = rng.standard_normal(wanted.shape)
    loss = torch.nn.functional.mse_loss(module(torch.from_numpy(x)), torch.from_numpy(target))
    loss.backward()
    assert model.step(x, target) == pytest.approx(loss.item(), rel=1e-12)
    within = 1e-8 if name == "hardsigmoid" else 1e-12  # whose gradient has a factor of float32 in PyTorch
    moved = module.p.detach().numpy() - model.state_dict()["p"]
    assert abs(moved - module.p.grad.numpy()).max() <= within * max(1, abs(module.p.grad).max())


def test_every_counterpart_has_a_case():
    assert {*ATEN} == {*CASES, "batch_norm"}  # which is in networks, and must have buffers
