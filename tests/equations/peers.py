"""Equations that PyTorch has as functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as tf


@dataclass
class Peer:
    text: str
    shapes: dict[str, tuple[int, ...]]
    torch: Callable[..., Any]
    parameters: dict[str, Any] = field(default_factory=dict)
    integers: dict[str, Any] = field(default_factory=dict)
    positive: bool = False


def turned(x: torch.Tensor) -> torch.Tensor:
    """Channels before the last axis, or after it again."""
    return x.transpose(1, 2)


def _linear(x: Any, w: Any, v: Any) -> Any:
    return x @ w + v


def _perceptron(x: Any, w: Any, v: Any, u: Any, t: Any) -> Any:
    return ((torch.tanh(x @ w + v) @ u - t) ** 2).mean()


LAYER_NORM = "m[r] = mean[n] x[r,n]; v[r] = mean[n] (x[r,n] - m[r])^2; i[r] = 1/sqrt(v[r] + 0.00001); y[r,n] = (x[r,n] - m[r])*i[r]*g[n] + b[n]"
BATCH_NORM = "m[c] = mean[r] x[r,c]; v[c] = mean[r] (x[r,c] - m[c])^2; i[c] = 1/sqrt(v[c] + 0.00001); y[r,c] = (x[r,c] - m[c])*i[c]*g[c] + b[c]"
SOFTMAX = "m[r] = {}; y[r,j] = exp(x[r,j] - m[r])/sum[k] exp(x[r,k] - m[r])"
ROWS = dict(x=(4, 6))
IDS = np.array([4, 0, 4])


def _cumulated(a: Any, x: Any) -> Any:
    out = [x[:, 0]]
    for k in range(1, x.shape[1]):
        out.append(a[:, k] * out[-1] + x[:, k])
    return torch.stack(out, 1)


def _logistic(x: Any) -> Any:
    out = [x[:, -1] * 0 + x[:, -1]]
    for k in range(x.shape[1] - 2, -1, -1):
        out.append(torch.tanh(out[-1]) * 2 + x[:, k])
    return torch.stack(out[::-1], 1)


def _heat(u: Any) -> Any:
    return tf.pad(u, (0, 1))[:, 1:] - 2 * u + tf.pad(u, (1, 0))[:, :-1]


PEERS = {
    "linear": Peer("y[b,o] = sum[i] x[b,i]*w[i,o] + v[o]", dict(x=(4, 5), w=(5, 6), v=(6,)), _linear),
    "tanh layer": Peer(
        "h[b,o] = tanh(sum[i] x[b,i]*w[i,o] + v[o]); y[b] = sum[o] h[b,o]*h[b,o]",
        dict(x=(4, 5), w=(5, 6), v=(6,)),
        lambda **k: (torch.tanh(_linear(**k)) ** 2).sum(1),
    ),
    "perceptron with its loss": Peer(
        "h[b,o] = tanh(sum[i] x[b,i]*w[i,o] + v[o]); p[b,c] = sum[o] h[b,o]*u[o,c]; y = mean[b,c] (p[b,c] - t[b,c])^2",
        dict(x=(4, 5), w=(5, 6), v=(6,), u=(6, 2), t=(4, 2)),
        _perceptron,
    ),
    "batched matmul": Peer("y[g,m,n] = sum[k] a[g,m,k]*b[g,k,n]", dict(a=(2, 3, 4), b=(2, 4, 5)), lambda a, b: a @ b),
    "bilinear": Peer(
        "y[b,o] = sum[i,j] x[b,i]*w[i,j,o]*z[b,j]",
        dict(x=(3, 4), w=(4, 5, 2), z=(3, 5)),
        lambda x, w, z: torch.einsum("bi,ijo,bj->bo", x, w, z),
    ),
    "conv1d": Peer(
        "y[n,o,f] = sum[t,c] x[n, o*s - p + t*d, c]*w[t,c,f]",
        dict(x=(2, 11, 4), w=(3, 4, 5)),
        lambda x, w: turned(tf.conv1d(turned(x), w.permute(2, 1, 0), stride=2, padding=1, dilation=2)),
        dict(s=2, p=1, d=2),
    ),
    "conv2d": Peer(
        "y[n,o,q,f] = sum[t,u,c] x[n, o*2 - 1 + t, q*2 - 1 + u, c]*w[t,u,c,f]",
        dict(x=(2, 7, 8, 3), w=(3, 3, 3, 4)),
        lambda x, w: tf.conv2d(x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1), stride=2, padding=1).permute(0, 2, 3, 1),
    ),
    "conv_transpose1d": Peer(
        "y[n,i<11,c] = sum[t,f] x[n, (i + 1 - t)/2, f]*w[t,c,f]",
        dict(x=(2, 6, 4), w=(3, 5, 4)),
        lambda x, w: turned(tf.conv_transpose1d(turned(x), w.permute(2, 1, 0), stride=2, padding=1)),
    ),
    "max_pool": Peer(
        "y[n,o,c] = max[t<3] x[n, o*2 - 1 + t, c; -inf]",
        dict(x=(2, 9, 4)),
        lambda x: turned(tf.max_pool1d(turned(x), 3, 2, 1)),
    ),
    "max_pool of squares": Peer(
        "y[n,o,q,c] = max[t<3,u<2] x[n, o*2 + t, q*2 + u, c; -inf]",
        dict(x=(2, 9, 8, 3)),
        lambda x: tf.max_pool2d(x.permute(0, 3, 1, 2), (3, 2), 2).permute(0, 2, 3, 1),
    ),
    "avg_pool, padding not counted": Peer(
        "k[o<5] = sum[t<3] where(0 <= o*2 - 1 + t and o*2 - 1 + t < 9, 1, 0); y[n,o,c] = sum[t<3] x[n, o*2 - 1 + t, c]/k[o]",
        dict(x=(2, 9, 4)),
        lambda x: turned(tf.avg_pool1d(turned(x), 3, 2, 1, count_include_pad=False)),
    ),
    "softmax, plain": Peer("y[r,j] = exp(x[r,j])/sum[k] exp(x[r,k])", ROWS, lambda x: x.softmax(1)),
    "softmax, max stopped": Peer(SOFTMAX.format("stop(max[k] x[r,k])"), ROWS, lambda x: x.softmax(1)),
    "softmax, max": Peer(SOFTMAX.format("max[k] x[r,k]"), ROWS, lambda x: x.softmax(1)),
    "softmax by logsumexp": Peer("y[r,j] = exp(x[r,j] - logsumexp[k] x[r,k])", ROWS, lambda x: x.softmax(1)),
    "log_softmax": Peer("y[r,j] = x[r,j] - logsumexp[k] x[r,k]", ROWS, lambda x: x.log_softmax(1)),
    "layer_norm": Peer(LAYER_NORM, dict(x=(4, 6), g=(6,), b=(6,)), lambda x, g, b: tf.layer_norm(x, (6,), g, b)),
    "layer_norm by var": Peer(
        "i[r] = 1/sqrt(var[n] x[r,n] + 0.00001); y[r,n] = (x[r,n] - mean[k] x[r,k])*i[r]*g[n] + b[n]",
        dict(x=(4, 6), g=(6,), b=(6,)),
        lambda x, g, b: tf.layer_norm(x, (6,), g, b),
    ),
    "batch_norm": Peer(
        BATCH_NORM, dict(x=(7, 3), g=(3,), b=(3,)), lambda x, g, b: tf.batch_norm(x, None, None, g, b, True)
    ),
    "rms_norm": Peer(
        "i[r] = 1/sqrt(mean[n] x[r,n]^2 + 0.00001); y[r,n] = x[r,n]*i[r]*g[n]",
        dict(x=(4, 6), g=(6,)),
        lambda x, g: x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-5) * g,
    ),
    "local response norm": Peer(
        "d[r,c] = 1 + 0.0001/5*sum[j<5] x[r, c - 2 + j]^2; y[r,c] = x[r,c]*d[r,c]^(-0.75)",
        dict(x=(4, 9)),
        lambda x: tf.local_response_norm(x[:, :, None], 5)[:, :, 0],
    ),
    "cumsum as a sum": Peer("y[r,i<6] = sum[j] where(j <= i, x[r,j], 0)", ROWS, lambda x: x.cumsum(1)),
    "cumsum": Peer("y[r,i] = y[r,i - 1] + x[r,i]", ROWS, lambda x: x.cumsum(1)),
    "cumsum from behind": Peer("y[r,i] = y[r,i + 1] + x[r,i]", ROWS, lambda x: x.flip(1).cumsum(1).flip(1)),
    "linear scan": Peer("y[r,i] = a[r,i]*y[r,i - 1] + x[r,i]", dict(a=(4, 6), x=(4, 6)), _cumulated),
    "scan that is not linear": Peer("y[r,i] = tanh(y[r,i + 1])*2 + x[r,i]", ROWS, _logistic),
    "pick": Peer(
        "y[r] = x[r, index[r]]",
        dict(x=(3, 5)),
        lambda x, index: x.gather(1, index[:, None])[:, 0],
        integers=dict(index=IDS),
    ),
    "embedding": Peer("y[r,c] = w[index[r], c]", dict(w=(5, 4)), lambda w, index: w[index], integers=dict(index=IDS)),
    "cross entropy of classes": Peer(
        "l[r] = logsumexp[k] x[r,k] - x[r, index[r]]; y = mean[r] l[r]",
        dict(x=(3, 5)),
        lambda x, index: tf.cross_entropy(x, index),
        integers=dict(index=IDS),
    ),
    "attention": Peer(
        "s[b,q,k] = sum[e] x[b,q,e]*z[b,k,e]/2; l[b,q] = logsumexp[k] s[b,q,k]; y[b,q,e] = sum[k] exp(s[b,q,k] - l[b,q])*w[b,k,e]",
        dict(x=(2, 3, 4), z=(2, 5, 4), w=(2, 5, 4)),
        lambda x, z, w: tf.scaled_dot_product_attention(x, z, w),
    ),
    "product": Peer("y[r] = prod[k] x[r,k]", dict(x=(3, 4)), lambda x: x.prod(1)),
    "product of two axes": Peer("y[r] = prod[k,j] x[k,r,j]", dict(x=(2, 3, 2)), lambda x: x.prod(0).prod(1)),
    "variance": Peer("y[r] = var[k,j] x[k,r,j]", dict(x=(2, 3, 4)), lambda x: x.var((0, 2), correction=0)),
    "minimum": Peer(
        "y[r] = min[k] x[k,r] + min(x[0,r], x[1,r])", dict(x=(4, 3)), lambda x: x.amin(0) + torch.minimum(x[0], x[1])
    ),
    "trace and an element": Peer(
        "y[b] = sum[i] x[b,i,i] + x[b,1,2]", dict(x=(2, 4, 4)), lambda x: torch.einsum("bii->b", x) + x[:, 1, 2]
    ),
    "heat": Peer("y[b,i<6] = u[b,i + 1] - 2*u[b,i] + u[b,i - 1]", dict(u=(2, 6)), _heat),
    "concat, transposed": Peer(
        "y[i<7,r] = where(i < 3, a[r,i], b[r,i - 3])", dict(a=(2, 3), b=(2, 4)), lambda a, b: torch.cat([a, b], 1).T
    ),
    "arrays as wholes": Peer(
        "y = x*g + exp(-v)", dict(x=(4, 6), g=(6,), v=(4, 1)), lambda x, g, v: x * g + torch.exp(-v)
    ),
    "distances": Peer(
        "y[r,s] = sqrt(sum[k] (x[r,k] - z[s,k])^2)",
        dict(x=(4, 5), z=(3, 5)),
        lambda x, z: torch.sqrt(((x[:, None] - z[None]) ** 2).sum(2)),
    ),
    "powers": Peer("y[i] = x[i]^z[i] + x[i]^3", dict(x=(5,), z=(5,)), lambda x, z: x**z + x**3, positive=True),
    "reversed, every second": Peer("y[i<3] = x[5 - 2*i]^2", dict(x=(6,)), lambda x: x.flip(0)[::2] ** 2),
    "guarded logarithm": Peer(
        "y[i] = where(x[i] > 0, log(x[i]), 0)",
        dict(x=(6,)),
        lambda x: torch.where(x > 0, torch.where(x > 0, x, 1.0).log(), 0.0),
    ),
    # as DeepDSL has them (arXiv 1701.02284)
    "DeepDSL: mean over a batch of log of picked": Peer(
        "p[n,c] = exp(x[n,c])/sum[k] exp(x[n,k]); y = -mean[n] log(p[n, index[n]])",
        dict(x=(3, 5)),
        lambda x, index: tf.nll_loss(x.log_softmax(1), index),
        integers=dict(index=IDS),
    ),
    "DeepDSL: pooling of a rectified convolution": Peer(
        "a[n,o,f] = relu(sum[t,c] x[n, o + t - 1, c]*w[t,c,f] + v[f]); y[n,q,f] = max[u<2] a[n, 2*q + u, f]",
        dict(x=(2, 8, 3), w=(3, 3, 4), v=(4,)),
        lambda x, w, v: turned(tf.max_pool1d(tf.conv1d(turned(x), w.permute(2, 1, 0), v, padding=1).relu(), 2)),
    ),
}
