"""Named equations as users write them, each beside PyTorch: what tests of their values, gradients and rows run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Case:
    """shapes : of operands, None the batch, by name.  theirs : the same of PyTorch's tensors, in the order of the operands.

    numbers : operands that are numbers.  rows : rows that the forward has, and others that it has not.  classes : operands that
    are integers below this.  positive : operands drawn from [0.3, 1.3].
    """

    text: str
    shapes: dict[str, tuple[int | None, ...]]
    theirs: Callable[..., Any]
    numbers: dict[str, Any] = field(default_factory=dict)
    rows: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    classes: dict[str, int] = field(default_factory=dict)
    positive: tuple[str, ...] = ()
    graded: bool = True
    least: int = 1  # batch that theirs takes

    def values(self, batch: int, seed: int = 0) -> dict[str, np.ndarray]:
        """Those of operands without a batch are the same for every batch."""
        out = {}
        for k, (name, shape) in enumerate(self.shapes.items()):
            rng, sizes = np.random.default_rng((seed, k)), [batch if n is None else n for n in shape]
            if name in self.classes:
                out[name] = rng.integers(0, self.classes[name], sizes)
            else:
                out[name] = rng.uniform(0.3, 1.3, sizes) if name in self.positive else rng.standard_normal(sizes)
        return out


PRODUCTS = ("linear_fwd", "matmul_fwd", "conv_fwd", "conv_transpose_fwd")


def cases() -> dict[str, Case]:
    import torch
    import torch.nn.functional as f

    def windows(x, k, s=1, p=0, d=1, value=0.0):
        return f.pad(x, (p, p), value=value).unfold(-1, (k - 1) * d + 1, s)[..., ::d]

    return {
        # ------------------------------------------------------------ products
        "linear": Case(
            "y[b,o] = sum[i] x[b,i]*w[i,o] + v[o]", {"x": (None, 5), "w": (5, 6), "v": (6,)},
            lambda x, w, v: x @ w + v, rows=("linear_fwd",), without=("transpose_fwd", "add_fwd", "matmul_fwd"),
        ),
        "linear, bias before": Case(
            "y[b,t,o] = tanh(v[o] + sum[i] x[b,t,i]*w[i,o])", {"x": (None, 3, 5), "w": (5, 6), "v": (6,)},
            lambda x, w, v: torch.tanh(x @ w + v), rows=("linear_fwd",), without=("tanh_fwd", "add_fwd"),
        ),
        "linear, no bias": Case(
            "y[b,o] = sum[i] w[i,o]*x[b,i]", {"x": (None, 5), "w": (5, 6)}, lambda x, w: x @ w, rows=("linear_fwd",),
            without=("transpose_fwd",),
        ),
        "weights by outputs": Case(
            "y[b,t,o] = sum[i] x[b,t,i]*w[o,i] + v[o]", {"x": (None, 3, 5), "w": (6, 5), "v": (6,)},
            lambda x, w, v: f.linear(x, w, v), rows=("matmul_fwd",), without=("transpose_fwd",),
        ),
        "result turned": Case(
            "y[o,b] = sum[i] x[b,i]*w[i,o]", {"x": (None, 5), "w": (5, 6)}, lambda x, w: (x @ w).T, rows=("matmul_fwd",),
            without=("transpose_fwd",),
        ),
        "two summed axes": Case(
            "y[b,t,o] = sum[i,j] x[b,t,i,j]*w[i,j,o]", {"x": (None, 3, 4, 5), "w": (4, 5, 6)},
            lambda x, w: torch.einsum("btij,ijo->bto", x, w), rows=("linear_fwd",), without=("transpose_fwd",),
        ),
        "two result axes": Case(
            "y[b,p,q] = relu(sum[i] x[b,i]*w[i,p,q] + v[p,q])", {"x": (None, 4), "w": (4, 2, 3), "v": (2, 3)},
            lambda x, w, v: torch.relu(torch.einsum("bi,ipq->bpq", x, w) + v), rows=("linear_fwd",),
            without=("transpose_fwd", "add_fwd", "relu_fwd"),
        ),
        "channels first": Case(
            "y[b,o,t] = sum[c] w[o,c]*x[b,c,t]", {"x": (None, 4, 5), "w": (3, 4)},
            lambda x, w: torch.einsum("oc,bct->bot", w, x), rows=("matmul_fwd",), without=("transpose_fwd",),
        ),
        "gram matrix": Case(
            "y[i,j] = sum[b] x[b,i]*z[b,j]", {"x": (None, 4), "z": (None, 5)}, lambda x, z: x.T @ z, rows=("matmul_fwd",),
            without=("transpose_fwd",),
        ),
        "batched": Case(
            "y[b,i,k] = sum[j] x[b,i,j]*z[b,j,k]", {"x": (None, 3, 4), "z": (None, 4, 5)}, lambda x, z: x @ z,
            rows=("matmul_fwd",), without=("transpose_fwd",),
        ),
        "batched, both turned": Case(
            "y[b,i,k] = sum[j] x[b,j,i]*z[b,k,j]", {"x": (None, 4, 3), "z": (None, 5, 4)}, lambda x, z: x.mT @ z.mT,
            rows=("matmul_fwd",), without=("transpose_fwd",),
        ),
        "matrix times vector": Case(
            "y[b,i] = sum[j] x[b,i,j]*z[b,j]", {"x": (None, 3, 4), "z": (None, 4)},
            lambda x, z: torch.einsum("bij,bj->bi", x, z), rows=("matmul_fwd",),
        ),
        "dot products": Case(
            "y[b] = sum[i] x[b,i]*z[b,i]", {"x": (None, 5), "z": (None, 5)}, lambda x, z: (x * z).sum(-1), without=PRODUCTS,
        ),
        "bilinear": Case(
            "y[b,o] = sum[i,j] x[b,i]*w[i,j,o]*z[b,j] + v[o]", {"x": (None, 4), "w": (4, 5, 3), "z": (None, 5), "v": (3,)},
            lambda x, w, z, v: torch.einsum("bi,ijo,bj->bo", x, w, z) + v, rows=("matmul_fwd",), without=("sum_fwd",),
        ),
        "attention": Case(
            "s[b,h,t,u] = sum[e] q[b,t,h,e]*k[b,u,h,e]/sqrt(E); a[b,h,t,u] = exp(s[b,h,t,u])/sum[w] exp(s[b,h,t,w]);"
            "y[b,t,h,e] = sum[u] a[b,h,t,u]*v[b,u,h,e]",
            {"q": (None, 4, 2, 3), "k": (None, 5, 2, 3), "v": (None, 5, 2, 3)},
            lambda q, k, v: f.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2),
            rows=("matmul_fwd", "softmax_fwd"), without=("exp_fwd",),
        ),
        "sum of products": Case(
            "y[b,o] = sum[i] (x[b,i]*w[i,o] + x[b,i]^2*u[i,o])", {"x": (None, 4), "w": (4, 3), "u": (4, 3)},
            lambda x, w, u: x @ w + x**2 @ u, rows=("linear_fwd",),
        ),
        "mean of products": Case(
            "y[b,o] = mean[i] 2*x[b,i]*w[i,o]/exp(x[b,i])/z[b]", {"x": (None, 4), "w": (4, 3), "z": (None,)},
            lambda x, w, z: 2 * (x / x.exp()) @ w / 4 / z[:, None], rows=("linear_fwd",), positive=("z",),
        ),
        "outer product": Case(
            "y[b,i,j] = x[b,i]*z[b,j]", {"x": (None, 4), "z": (None, 5)}, lambda x, z: torch.einsum("bi,bj->bij", x, z),
            rows=("mul_fwd",), without=("transpose_fwd",),
        ),
        "pairwise distances": Case(
            "y[r,s] = sum[k] (x[r,k] - z[s,k])^2", {"x": (None, 4), "z": (5, 4)},
            lambda x, z: ((x[:, None] - z[None]) ** 2).sum(-1), rows=("sum_squares_fwd",), without=("square_fwd",),
        ),
        "diagonal": Case("y[b,i] = x[b,i,i]", {"x": (None, 4, 4)}, lambda x: torch.diagonal(x, 0, 1, 2)),
        "trace of a product": Case(
            "y[b] = sum[i] x[b,i,i]*w[i]", {"x": (None, 4, 4), "w": (4,)}, lambda x, w: torch.einsum("bii,i->b", x, w),
        ),
        "sum of one factor": Case(
            "y[b,o] = sum[i,j] x[b,i,j]*w[i,o]", {"x": (None, 3, 4), "w": (3, 5)},
            lambda x, w: torch.einsum("bij,io->bo", x, w), rows=("sum_fwd", "linear_fwd"),
        ),
        "moments": Case(
            "y[i] = prod[b<3] x[b,i]", {"x": (3, 5)}, lambda x: x.prod(0), rows=("mul_fwd",),
        ),
        # ------------------------------------------------------------ windows
        "conv1d": Case(
            "y[n,o,f] = relu(sum[t,c] x[n, o + t, c]*w[t,c,f] + v[f])", {"x": (None, 9, 3), "w": (3, 3, 4), "v": (4,)},
            lambda x, w, v: torch.relu(f.conv1d(x.mT, w.permute(2, 1, 0), v)).mT, rows=("conv_fwd",),
            without=("transpose_fwd", "add_fwd", "relu_fwd"),
        ),
        "conv1d, stride, padding, dilation": Case(
            "y[n,o,f] = sum[t,c] x[n, o*2 - 3 + t*2, c]*w[f,c,t]", {"x": (None, 11, 3), "w": (4, 3, 4)},
            lambda x, w: f.conv1d(x.mT, w, None, 2, 3, 2).mT, rows=("conv_fwd",), without=("transpose_fwd",),
        ),
        "conv2d": Case(
            "y[n,f,i,j] = tanh(sum[c,t,u] x[n, c, i - 1 + t, j - 1 + u]*w[f,c,t,u] + v[f])",
            {"x": (None, 3, 6, 7), "w": (4, 3, 3, 3), "v": (4,)},
            lambda x, w, v: torch.tanh(f.conv2d(x, w, v, padding=1)), rows=("conv_fwd",), without=("tanh_fwd", "add_fwd"),
        ),
        "conv2d, channels last": Case(
            "y[n,i,j,f] = sum[t,u,c] x[n, i*2 - 1 + t, j + u*2, c]*w[t,u,c,f] + v[f]",
            {"x": (None, 7, 8, 3), "w": (3, 2, 3, 4), "v": (4,)},
            lambda x, w, v: f.conv2d(f.pad(x.permute(0, 3, 1, 2), (0, 0, 1, 1)), w.permute(3, 2, 0, 1), v, (2, 1), 0, (1, 2)).permute(0, 2, 3, 1),
            rows=("conv_fwd",), without=("transpose_fwd", "add_fwd"),
        ),
        "conv2d, groups": Case(
            "y[n,i,j,g,f] = sum[t,u,c] x[n, i + t, j + u, g, c]*w[t,u,c,g,f]", {"x": (None, 5, 6, 2, 3), "w": (3, 2, 3, 2, 4)},
            lambda x, w: f.conv2d(x.flatten(3).permute(0, 3, 1, 2), w.permute(3, 4, 2, 0, 1).flatten(0, 1), groups=2).permute(0, 2, 3, 1).unflatten(3, (2, 4)),
            rows=("conv_fwd",), without=("transpose_fwd",),
        ),
        "depthwise": Case(
            "y[n,o,c] = sum[t] x[n, o + t - 1, c]*w[t,c] + v[c]", {"x": (None, 7, 5), "w": (3, 5), "v": (5,)},
            lambda x, w, v: f.conv1d(x.mT, w.T[:, None], v, padding=1, groups=5).mT, rows=("conv_fwd",), without=("transpose_fwd", "add_fwd"),
        ),
        "one signal": Case(
            "y[n,o] = sum[t] x[n, o + t]*w[t]", {"x": (None, 9), "w": (3,)},
            lambda x, w: f.conv1d(x[:, None], w[None, None])[:, 0], rows=("conv_fwd",), without=("transpose_fwd",),
        ),
        "conv3d": Case(
            "y[n,i,j,k,f] = sum[t,u,v,c] x[n, i + t, j + u, k + v, c]*w[t,u,v,c,f]", {"x": (None, 4, 3, 5, 2), "w": (2, 2, 3, 2, 3)},
            lambda x, w: f.conv3d(x.permute(0, 4, 1, 2, 3), w.permute(4, 3, 0, 1, 2)).permute(0, 2, 3, 4, 1), rows=("conv_fwd",),
        ),
        "four windows": Case(
            "y[n,i,j,k,l] = sum[t,u,v,w] x[n, i + t, j + u, k + v, l + w]*z[t,u,v,w]", {"x": (None, 2, 3, 2, 3), "z": (2, 2, 2, 2)},
            lambda x, z: (x.unfold(1, 2, 1).unfold(2, 2, 1).unfold(3, 2, 1).unfold(4, 2, 1) * z).sum((5, 6, 7, 8)), without=PRODUCTS,
        ),
        "separable weights": Case(
            "y[n,o,f] = sum[t,c] x[n, o + t, c]*u[t,f]*w[c,f]", {"x": (None, 7, 3), "u": (3, 4), "w": (3, 4)},
            lambda x, u, w: f.conv1d(x.mT, torch.einsum("tf,cf->fct", u, w)).mT, rows=("conv_fwd",),
        ),
        "conv of a part of it": Case(
            "y[n,o<3,f] = sum[t,c] x[n, o*2 + 1 + t, c]*w[t,c,f]", {"x": (None, 12, 2), "w": (2, 2, 3)},
            lambda x, w: f.conv1d(x.mT[..., 1:7], w.permute(2, 1, 0), stride=2).mT, rows=("slice_fwd", "conv_fwd"),
        ),
        "conv_transpose1d": Case(
            "y[n,i<9,f] = sum[t,c] x[n, (i + 1 - t)/2, c]*w[c,f,t] + v[f]", {"x": (None, 4, 3), "w": (3, 2, 4), "v": (2,)},
            lambda x, w, v: f.conv_transpose1d(x.mT, w, v, 2, 1, 1).mT, rows=("conv_transpose_fwd",), without=("transpose_fwd", "add_fwd"),
        ),
        "conv_transpose2d": Case(
            "y[n,i<6,j<5,f] = sum[t,u,c] x[n, (i - t)/2, (j + 1 - 2*u)/3, c]*w[t,u,f,c]", {"x": (None, 3, 2, 4), "w": (2, 2, 5, 4)},
            lambda x, w: f.pad(f.conv_transpose2d(x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1), None, (2, 3), (0, 1), (0, 1), 1, (1, 2)), (0, 0, 0, 0)).permute(0, 2, 3, 1),
            rows=("conv_transpose_fwd",), without=("transpose_fwd",),
        ),
        "convolution as mathematics has it": Case(
            "y[n,o<9] = sum[t] x[n, o - t]*w[t]", {"x": (None, 7), "w": (3,)},
            lambda x, w: f.conv1d(f.pad(x[:, None], (2, 2)), w.flip(0)[None, None])[:, 0], rows=("conv_transpose_fwd",),
        ),
        "correlation of two": Case(
            "y[n,t<3] = sum[o<5] x[n, o + t]*z[n,o]", {"x": (None, 7), "z": (None, 5)},
            lambda x, z: (x.unfold(1, 3, 1) * z[..., None]).sum(1),
        ),
        "max_pool": Case(
            "y[n,i,j,c] = max[t<3,u<2] x[n, i*2 - 1 + t, j*2 + u, c; -inf]", {"x": (None, 7, 6, 3)},
            lambda x: f.max_pool2d(x.permute(0, 3, 1, 2), (3, 2), 2, (1, 0)).permute(0, 2, 3, 1), rows=("max_pool_fwd",),
            without=("transpose_fwd", "maximum_fwd"),
        ),
        "max_pool, channels first": Case(
            "y[n,c,o] = max[t<3] x[n, c, o*2 + t]", {"x": (None, 3, 9)}, lambda x: f.max_pool1d(x, 3, 2), rows=("max_pool_fwd",),
        ),
        "min_pool": Case(
            "y[n,o] = min[t<3] x[n, o*2 + t]", {"x": (None, 9)}, lambda x: -f.max_pool1d(-x[:, None], 3, 2)[:, 0], rows=("max_pool_fwd",),
        ),
        "max with zeros beyond": Case(
            "y[n,o] = max[t<3] x[n, o + t - 1]", {"x": (None, 6)}, lambda x: windows(x, 3, 1, 1).amax(-1), rows=("maximum_fwd",),
        ),
        "max_pool of an expression": Case(
            "y[n,o,c] = max[t<3] relu(x[n, o*2 + t, c] - w[c])", {"x": (None, 9, 2), "w": (2,)},
            lambda x, w: f.max_pool1d(f.relu(x - w).mT, 3, 2).mT, rows=("max_pool_fwd",), without=("maximum_fwd",),
        ),
        "min_pool of a product": Case(
            "y[n,o,p] = min[t<2,u<2] x[n, o + t, p + u]*w[o + t, p + u]", {"x": (None, 4, 5), "w": (4, 5)},
            lambda x, w: -f.max_pool2d((-x*w)[:, None], 2, 1)[:, 0], rows=("max_pool_fwd",), without=("minimum_fwd",),
        ),
        "max of windows of an expression beyond the ends": Case(
            "y[n,o] = max[t<3] exp(x[n, o + t - 1])", {"x": (None, 6)},
            lambda x: f.max_pool1d(f.pad(x, (1, 1)).exp()[:, None], 3, 1)[:, 0], rows=("maximum_fwd",), without=("max_pool_fwd",),
        ),
        "max of windows and what else runs with them": Case(
            "y[n,o] = max[t<3] x[n, o + t]*w[t]", {"x": (None, 6), "w": (3,)},
            lambda x, w: (x.unfold(1, 3, 1)*w).amax(2), rows=("maximum_fwd",), without=("max_pool_fwd",),
        ),
        "avg_pool": Case(
            "y[n,i,c] = mean[t<2] x[n, i*2 + t, c]", {"x": (None, 8, 3)}, lambda x: f.avg_pool1d(x.mT, 2).mT, rows=("avg_pool_fwd",),
            without=("transpose_fwd",),
        ),
        "sum of a window": Case(
            "y[n,i,c] = sum[t<3] x[n, i + t - 1, c]", {"x": (None, 8, 3)}, lambda x: 3 * f.avg_pool1d(x.mT, 3, 1, 1).mT, rows=("avg_pool_fwd",),
        ),
        "weighted mean of a window": Case(
            "y[n,o] = mean[t] x[n, o + t]*w[t]", {"x": (None, 6), "w": (3,)},
            lambda x, w: (windows(x, 3) * w).mean(-1), rows=("conv_fwd",),
        ),
        "dilated mean": Case(
            "y[n,i] = mean[t<3] x[n, i + 2*t]", {"x": (None, 9)}, lambda x: windows(x, 3, 1, 0, 2).mean(-1), rows=("slice_fwd",),
            without=("avg_pool_fwd",),
        ),
        "largest of a window and of channels": Case(
            "y[n,o] = max[t<2,c] x[n, o*2 + t, c]", {"x": (None, 6, 3)}, lambda x: x.amax(2).unfold(1, 2, 2).amax(-1),
            rows=("max_pool_fwd", "max_fwd"),
        ),
        "a function of a window": Case(
            "y[n,o] = sum[t<3] tanh(x[n, o + t])*w[t]", {"x": (None, 6), "w": (3,)}, lambda x, w: (torch.tanh(windows(x, 3)) * w).sum(-1),
        ),
        "windows as an array": Case(
            "y[n,o,t<3] = x[n, o*2 + t]", {"x": (None, 9)}, lambda x: x.unfold(1, 3, 2), rows=("concat_many_fwd",),
        ),
        "variance of a window": Case(
            "y[n,o] = var[t<3] x[n, o + t]", {"x": (None, 6)}, lambda x: windows(x, 3).var(-1, correction=0), rows=("var_fwd",),
        ),
        "heat stencil": Case(
            "y[n,i] = x[n,i] + a*(x[n, i - 1] - 2*x[n,i] + x[n, i + 1])", {"x": (None, 8)},
            lambda x: x + 0.1 * (f.pad(x, (1, 0))[:, :-1] - 2 * x + f.pad(x, (0, 1))[:, 1:]), numbers={"a": 0.1},
        ),
        "every other, backwards, shifted": Case(
            "y[n,i<4] = x[n, 2*i + 1]*x[n, 7 - i]*x[n, i + 3]", {"x": (None, 8)}, lambda x: x[:, 1::2] * x.flip(1)[:, :4] * x[:, 3:7],
        ),
        "repeated elements": Case(
            "y[n,i<6] = x[n, i/2] + x[n, i//2] + x[n, 1]", {"x": (None, 3)},
            lambda x: torch.stack([x, 0 * x], -1).flatten(1) + x.repeat_interleave(2, 1) + x[:, 1:2],
        ),
        # ------------------------------------------------------------ reductions and softmax
        "softmax": Case(
            "y[r,j] = exp(x[r,j])/sum[k] exp(x[r,k])", {"x": (None, 5)}, lambda x: x.softmax(-1), rows=("softmax_fwd",), without=("exp_fwd",),
        ),
        "softmax, largest subtracted": Case(
            "m[r] = max[j] x[r,j]; e[r,j] = exp(x[r,j] - m[r]); y[r,j] = e[r,j]/sum[k] e[r,k]", {"x": (None, 5)},
            lambda x: x.softmax(-1), rows=("softmax_fwd",), without=("exp_fwd", "max_fwd", "sub_fwd"),
        ),
        "softmax of channels": Case(
            "y[n,c,i] = exp(x[n,c,i] - logsumexp[k] x[n,k,i])", {"x": (None, 4, 5)}, lambda x: x.softmax(1), rows=("softmax_fwd",), without=("exp_fwd",),
        ),
        "softmax over two": Case(
            "y[r,i,j] = exp(z*x[r,i,j])/sum[k,l] exp(z*x[r,k,l])", {"x": (None, 3, 4)}, lambda x: (2 * x.flatten(1)).softmax(-1).view_as(x),
            numbers={"z": 2}, rows=("softmax_fwd",),
        ),
        "log_softmax": Case(
            "y[r,j] = x[r,j] - log(sum[k] exp(x[r,k]))", {"x": (None, 5)}, lambda x: x.log_softmax(-1), rows=("log_softmax_fwd",), without=("exp_fwd", "log_fwd"),
        ),
        "log_softmax, largest subtracted": Case(
            "m[r] = max[k] x[r,k]; y[r,j] = x[r,j] - m[r] - log(sum[k] exp(x[r,k] - m[r]))", {"x": (None, 5)},
            lambda x: x.log_softmax(-1), rows=("log_softmax_fwd",), without=("max_fwd",),
        ),
        "logarithm of a softmax": Case(
            "p[r,j] = exp(x[r,j])/sum[k] exp(x[r,k]); y[r,j] = log(p[r,j])", {"x": (None, 5)}, lambda x: x.log_softmax(-1), rows=("log_softmax_fwd",),
        ),
        "logsumexp": Case(
            "y[r] = logsumexp[k] x[r,k] + log(sum[k] exp(2*x[r,k]))", {"x": (None, 5)}, lambda x: x.logsumexp(-1) + (2 * x).logsumexp(-1),
            rows=("logsumexp_fwd",), without=("exp_fwd", "max_fwd"),
        ),
        "variance over far axes": Case(
            "y[b,j] = var[i,k] x[b,i,j,k] + logsumexp[i,k] x[b,i,j,k]", {"x": (None, 2, 3, 4)},
            lambda x: x.var((1, 3), correction=0) + x.logsumexp((1, 3)), rows=("var_fwd", "logsumexp_fwd"), without=("mean_fwd",),
        ),
        # ------------------------------------------------------------ scans
        "running sum": Case(
            "y[b,i] = y[b, i - 1] + x[b,i]", {"x": (None, 6)}, lambda x: x.cumsum(1), rows=("cumsum_fwd",), without=("add_fwd",),
        ),
        "running sum from behind": Case(
            "y[b,i,c] = 2*x[b,i,c]*w[c] - 1 + y[b, i + 1, c]", {"x": (None, 6, 3), "w": (3,)},
            lambda x, w: (2 * x * w - 1).flip(1).cumsum(1).flip(1), rows=("reverse_cumsum_fwd",),
        ),
        "running sum in parts": Case(
            "s[b,j] = s[b, j - 1] + exp(x[b,j]); y[b,i] = s[b,i]/s[b,4] + s[b, i - 1]*(sum[k] s[b,k])", {"x": (None, 5)},
            lambda x: (s := x.exp().cumsum(1)) / s[:, 4:] + f.pad(s, (1, 0))[:, :-1] * s.sum(1, keepdim=True), rows=("cumsum_fwd",),
        ),
        "running sum of what does not run": Case(
            "y[b,i<4] = y[b, i - 1] + x[b]", {"x": (None,)}, lambda x: x[:, None] * torch.arange(1, 5), without=("cumsum_fwd",),
        ),
        "recurrence": Case(
            "y[b,i] = 2*y[b, i - 1] + x[b,i]", {"x": (None, 6)},
            lambda x: x @ torch.tensor([[2.0 ** (i - j) if j <= i else 0.0 for i in range(6)] for j in range(6)], dtype=x.dtype), rows=("equation",),
        ),
        "scan of every other": Case(
            "y[b,i] = y[b, i - 2] + x[b,i]", {"x": (None, 6)}, lambda x: x.unflatten(1, (3, 2)).cumsum(1).flatten(1), rows=("equation",),
        ),
        "gated scan, from behind": Case(
            "y[b,i,c] = sigmoid(g[b,i,c])*y[b, i + 1, c; 0.5] + x[b,i]", {"x": (None, 3), "g": (None, 3, 4)},
            lambda x, g: torch.stack([
                (y2 := g[:, 2].sigmoid() * 0.5 + x[:, 2:], y1 := g[:, 1].sigmoid() * y2 + x[:, 1:2], g[:, 0].sigmoid() * y1 + x[:, :1])[k]
                for k in (2, 1, 0)
            ], 1), rows=("equation",),
        ),
        "cross entropy": Case(
            "l[] = mean[r] (logsumexp[k] x[r,k] - x[r, t[r]])", {"x": (None, 5), "t": (None,)}, lambda x, t: f.cross_entropy(x, t),
            classes={"t": 5}, rows=("softmax_cross_entropy_fwd",),
        ),
        "negative log likelihood": Case(
            "l[r] = -(x[r, t[r]] - log(sum[k] exp(x[r,k])))", {"x": (None, 5), "t": (None,)}, lambda x, t: f.cross_entropy(x, t, reduction="none"),
            classes={"t": 5}, rows=("log_softmax_fwd", "pick_fwd"), without=("exp_fwd",),
        ),
        "layer norm": Case(
            "m[r] = mean[k] x[r,k]; y[r,j] = (x[r,j] - m[r])/sqrt(var[k] x[r,k] + eps)*g[j] + h[j]", {"x": (None, 6), "g": (6,), "h": (6,)},
            lambda x, g, h: f.layer_norm(x, (6,), g, h), numbers={"eps": 1e-5},
        ),
        "rms norm": Case(
            "y[r,j] = x[r,j]/sqrt(mean[k] x[r,k]^2 + 1e-5)*g[j]", {"x": (None, 6), "g": (6,)}, lambda x, g: f.rms_norm(x, (6,), g, 1e-5),
        ),
        "batch norm": Case(
            "m[c] = mean[b] x[b,c]; y[b,c] = (x[b,c] - m[c])/sqrt(mean[a] (x[a,c] - m[c])^2 + 1e-5)", {"x": (None, 4)},
            lambda x: f.batch_norm(x, None, None, training=True), least=2,
        ),
        "sums over far axes": Case(
            "y[b,j,m] = sum[i,k,n] x[b,i,j,k,m,n] + (max[k,n] x[b,0,j,k,m,n])*mean[i,k,n] x[b,i,j,k,m,n]", {"x": (None, 2, 3, 2, 3, 2)},
            lambda x: x.sum((1, 3, 5)) + x[:, 0].amax((2, 4)) * x.mean((1, 3, 5)),
        ),
        "four blocks": Case(
            "y[b,c,d,e] = sum[i,j,k,l] x[i,b,j,c,k,d,l,e]", {"x": (2, None, 3, 2, 2, 2, 3, 2)}, lambda x: x.sum((0, 2, 4, 6)),
        ),
        "argmax": Case(
            "y[b] = argmax[i] x[b,i] + (argmin[i] x[b,i])*10", {"x": (None, 5)}, lambda x: x.argmax(-1) + 10 * x.argmin(-1), graded=False,
        ),
        "product of many": Case(
            "y[b] = prod[i] x[b,i]", {"x": (None, 70)}, lambda x: x.prod(1), rows=("equation",),
        ),
        "numbers of the batch": Case(
            "y[i] = sum[b] x[b,i]*b", {"x": (None, 3)}, lambda x: (x * torch.arange(len(x))[:, None]).sum(0), rows=("equation",),
        ),
        "many places, backwards": Case(
            "y[b,t<100,c] = x[b, 5 - t, c]", {"x": (None, 8, 2)}, lambda x: f.pad(x[:, :6].flip(1), (0, 0, 0, 94)), rows=("equation",),
        ),
        "any and all": Case(
            "y[b] = where(any[i] (x[b,i] > 1), 1, 0) + where(all[i] (x[b,i] < 1 or not x[b,i] < 2), 2, 0)", {"x": (None, 5)},
            lambda x: (x > 1).any(-1) + 2.0 * ((x < 1) | (x >= 2)).all(-1), graded=False,
        ),
        # ------------------------------------------------------------ indexes from data, masks, whole arrays
        "pick": Case("y[r] = x[r, t[r]]", {"x": (None, 5), "t": (None,)}, lambda x, t: x.gather(1, t[:, None])[:, 0], classes={"t": 5}, rows=("pick_fwd",)),
        "pick in the middle": Case(
            "y[r,c] = x[r, t[r], c]", {"x": (None, 4, 3), "t": (None,)}, lambda x, t: torch.stack([a[i] for a, i in zip(x, t)]), classes={"t": 4},
            rows=("equation",), without=("matmul_fwd",),
        ),
        "embedding": Case(
            "y[b,s,c] = w[t[b,s], c]", {"w": (7, 4), "t": (None, 3)}, lambda w, t: f.embedding(t, w), classes={"t": 7}, rows=("equation",),
            without=("linear_fwd",),
        ),
        "large table": Case(
            "y[r,c] = w[t[r], c]", {"w": (5000, 3), "t": (None,)}, lambda w, t: w[t], classes={"t": 5000}, rows=("equation",), without=("linear_fwd",),
        ),
        "causal mask": Case(
            "y[b,i<5] = sum[j] where(j <= i, x[b,j], 0)", {"x": (None, 5)}, lambda x: x.cumsum(-1), rows=("where_fwd",),
        ),
        "cumulative sum": Case(
            "y[b,i<5] = sum[j] where(j <= i, 1, 0)*x[b,j]", {"x": (None, 5)}, lambda x: x.cumsum(-1), rows=("matmul_fwd",), without=("where_fwd",),
        ),
        "logaddexp": Case("y[b,i] = logaddexp(x[b,i], w[i])", {"x": (None, 5), "w": (5,)}, torch.logaddexp),
        "whole arrays": Case(
            "s = sigmoid(x); y = x*s + max(z, 0)", {"x": (None, 5), "z": (5,)}, lambda x, z: f.silu(x) + torch.relu(z),
        ),
        "whole arrays that broadcast": Case(
            "y = -x/z + 2^x - |z|^1.5 % 2", {"x": (None, 1, 4), "z": (3, 1)}, lambda x, z: -x / z + 2**x - z.abs() ** 1.5 % 2, positive=("z",),
        ),
        "functions": Case(
            "y[b] = sum[i] (exp(x[b,i]) + log(z[b,i])*sqrt(z[b,i]) - floor(x[b,i])*stop(x[b,i]) + z[b,i]^-2 + relu(x[b,i])*softplus(x[b,i]))",
            {"x": (None, 4), "z": (None, 4)},
            lambda x, z: (x.exp() + z.log() * z.sqrt() - x.floor() * x.detach() + z**-2 + torch.relu(x) * f.softplus(x)).sum(-1), positive=("z",),
        ),
        "numbers of indexes": Case(
            "y[b,i] = x[b,i]*(i + 1)/I + where(i % 2 == 0, x[b,i], i)", {"x": (None, 4)},
            lambda x: x * torch.arange(1, 5) / 4 + torch.where(torch.arange(4) % 2 == 0, x, torch.arange(4.0)),
        ),
        "copies": Case("y[i<3,b,j<2] = x[b]", {"x": (None,)}, lambda x: x[None, :, None].expand(3, -1, 2)),
        "copies for each sample": Case(
            "y[o,b<A] = v[o] + sum[a,i] x[a,i]", {"x": (None, 3), "v": (4,)},
            lambda x, v: (v + x.sum())[:, None].expand(-1, len(x)),
        ),
        "a scalar": Case("y[] = s*sum[b,i] x[b,i]^2", {"x": (None, 3), "s": ()}, lambda x, s: s * (x**2).sum(), rows=("sum_squares_fwd",)),
        "an array given": Case(
            "y[b,o] = sum[t] x[b, o + t]*k[t]", {"x": (None, 6)}, lambda x: (windows(x, 3) * torch.tensor([1.0, -2.0, 1.0])).sum(-1),
            numbers={"k": np.array([1.0, -2.0, 1.0])}, rows=("conv_fwd",),
        ),
    }  # fmt: skip
