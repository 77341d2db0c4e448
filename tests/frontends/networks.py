"""Networks of PyTorch as people write them, small: (module, example)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class First(nn.Module):
    """The first result of a module."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)[0]


class Last(nn.Module):
    """The state behind the last step of a recurrent module, to a linear layer."""

    def __init__(self, module, features):
        super().__init__()
        self.rnn, self.head = module, nn.Linear(features, 4)

    def forward(self, x):
        _, h = self.rnn(x)
        h = h[0] if isinstance(h, tuple) else h
        return self.head(torch.cat(h.unbind(0), 1))


class States(nn.Module):
    """A language model of characters, from states and to states."""

    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(20, 8), nn.LSTM(8, 6, 2, batch_first=True), nn.Linear(6, 20)

    def forward(self, ids, h, c):
        y, (h, c) = self.rnn(self.embedding(ids), (h, c))
        return self.head(y), h, c


class Encoder(nn.Module):
    def __init__(self, batch_first, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 24, 0.0, batch_first=batch_first, **options)
        self.turned, self.encoder = not batch_first, nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.encoder(x.transpose(0, 1)).mean(0) if self.turned else self.encoder(x).mean(1))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(16, 2, 24, 0.0, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5), persistent=False)

    def forward(self, x):
        return self.layer(x[:, :5], x[:, 5:], tgt_mask=self.mask)


class HandAttention(nn.Module):
    """With a mask that is part of the state dict."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("mask", torch.ones(6, 6).tril())

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = (f(x).view(n, t, 4, c // 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) / (c // 4) ** 0.5
        scores = scores.masked_fill(self.mask[:t, :t] == 0, float("-inf")).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).contiguous().view(n, t, c))


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm1, self.norm2, self.qkv, self.proj = (
            nn.LayerNorm(d),
            nn.LayerNorm(d),
            nn.Linear(d, 3 * d),
            nn.Linear(d, d),
        )
        self.fc, self.out, self.drop = nn.Linear(d, 4 * d), nn.Linear(4 * d, d), nn.Dropout(0.0)

    def forward(self, x):
        n, t, d = x.shape
        q, k, v = (y.view(n, t, 2, d // 2).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(d, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous().view(n, t, d)
        x = x + self.drop(self.proj(y))
        return x + self.drop(self.out(F.gelu(self.fc(self.norm2(x)))))


class GPT(nn.Module):
    """With tied weights."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe, self.blocks = (
            nn.Embedding(20, 16),
            nn.Embedding(8, 16),
            nn.ModuleList(Block(16) for _ in range(2)),
        )
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) * 0.1 + self.wpe(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 1, 16))
        self.places, self.block, self.head = nn.Parameter(torch.randn(1, 10, 16)), Block(16), nn.Linear(16, 5)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.block(x)[:, 0])


class Llama(nn.Module):
    """Rotary positions and grouped queries."""

    def __init__(self, d=16, heads=4, groups=2):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, d // heads
        self.embedding, self.norm1, self.norm2 = nn.Embedding(20, d), nn.RMSNorm(d), nn.RMSNorm(d)
        self.q, self.k, self.v = nn.Linear(d, d, False), nn.Linear(d, d // 2, False), nn.Linear(d, d // 2, False)
        self.o, self.gate, self.up, self.down = (
            nn.Linear(d, d, False),
            nn.Linear(d, 24, False),
            nn.Linear(d, 24, False),
            nn.Linear(24, d, False),
        )
        angles = torch.arange(8)[:, None] / 10000 ** (torch.arange(0, self.size, 2) / self.size)
        self.register_buffer("cos", torch.cat([angles, angles], 1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat([angles, angles], 1).sin(), persistent=False)

    def turned(self, x):
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def forward(self, ids):
        x = self.embedding(ids)
        n, t, d = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(n, t, -1, self.size).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(n, t, d))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Windows(nn.Module):
    """Attention in windows of an image that are shifted, with a bias for each relative place."""

    def __init__(self):
        super().__init__()
        self.patch, self.norm, self.qkv, self.proj = (
            nn.Conv2d(3, 8, 2, 2),
            nn.LayerNorm(8),
            nn.Linear(8, 24),
            nn.Linear(8, 8),
        )
        self.table, self.head = nn.Parameter(torch.randn(9, 2) * 0.1), nn.Linear(8, 5)
        at = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        self.register_buffer(
            "places", ((at[:, :, None] - at[:, None]) + 1).mul(torch.tensor([3, 1])[:, None, None]).sum(0).flatten()
        )

    def forward(self, x):
        x = self.patch(x).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        y = (
            torch.roll(self.norm(x), (-1, -1), (1, 2))
            .view(n, h // 2, 2, w // 2, 2, c)
            .permute(0, 1, 3, 2, 4, 5)
            .reshape(-1, 4, c)
        )
        q, k, v = self.qkv(y).reshape(y.shape[0], 4, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        bias = self.table[self.places].view(4, 4, 2).permute(2, 0, 1).unsqueeze(0)
        y = ((q @ k.transpose(-2, -1)) * 0.5 + bias).softmax(-1) @ v
        y = (
            self.proj(y.transpose(1, 2).reshape(-1, 4, c))
            .view(n, h // 2, w // 2, 2, 2, c)
            .permute(0, 1, 3, 2, 4, 5)
            .reshape(n, h, w, c)
        )
        return self.head((x + torch.roll(y, (1, 1), (1, 2))).mean([1, 2]))


class AutoEncoder(nn.Module):
    """Three outputs."""

    def __init__(self):
        super().__init__()
        self.encoder, self.mean, self.spread = nn.Linear(12, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 12), nn.Sigmoid())

    def forward(self, x):
        h = F.relu(self.encoder(x))
        mean, spread = self.mean(h), self.spread(h)
        return self.decoder(mean * torch.exp(0.5 * spread)), mean, spread


class WaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv1d(1, 6, 1), nn.Conv1d(6, 1, 1)
        self.filters = nn.ModuleList(nn.Conv1d(6, 6, 2, dilation=2**i) for i in range(3))
        self.gates = nn.ModuleList(nn.Conv1d(6, 6, 2, dilation=2**i) for i in range(3))

    def forward(self, x):
        h, skip = self.first(x), 0
        for i, (f, g) in enumerate(zip(self.filters, self.gates)):
            padded = F.pad(h, (2**i, 0))
            z = torch.tanh(f(padded)) * torch.sigmoid(g(padded))
            skip, h = skip + z, h + z
        return self.last(F.relu(skip))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.deep, self.out = (
            nn.Conv2d(3, 6, 3, padding=1),
            nn.Conv2d(6, 8, 3, padding=1),
            nn.Conv2d(12, 2, 3, padding=1),
        )
        self.up = nn.ConvTranspose2d(8, 6, 2, 2)

    def forward(self, x):
        a = F.relu(self.down(x))
        return self.out(torch.cat([self.up(F.relu(self.deep(F.max_pool2d(a, 2)))), a], 1))


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2, self.relu = (
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        kept = x if self.downsample is None else self.downsample(x)
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += kept
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.maxpool = (
            nn.Conv2d(3, 8, 7, 2, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.MaxPool2d(3, 2, 1),
        )
        self.layer1, self.layer2 = (
            nn.Sequential(Residual(8, 8, 1), Residual(8, 8, 1)),
            nn.Sequential(Residual(8, 12, 2)),
        )
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(12, 5)

    def forward(self, x):
        x = self.layer2(self.layer1(self.maxpool(F.relu(self.bn1(self.conv1(x))))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def convolution(inputs, outputs, kernel=3, stride=1, groups=1, activation=nn.ReLU6):
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), activation(inplace=True))


class MobileNet(nn.Module):
    def __init__(self):
        super().__init__()
        depthwise = convolution(8, 8, 3, 2, 8), convolution(8, 12, 1)
        self.features = nn.Sequential(convolution(3, 6, 3, 2), convolution(6, 8, 1), *depthwise)
        self.classifier = nn.Sequential(nn.Dropout(0.0), nn.Linear(12, 5))

    def forward(self, x):
        return self.classifier(self.features(x).mean([2, 3]))


class EfficientNet(nn.Module):
    """Channels weighed by what is in them."""

    def __init__(self):
        super().__init__()
        self.stem, self.reduce, self.expand, self.head = (
            convolution(3, 8, activation=nn.SiLU),
            nn.Conv2d(8, 4, 1),
            nn.Conv2d(4, 8, 1),
            nn.Linear(8, 5),
        )

    def forward(self, x):
        y = self.stem(x)
        y = y * torch.sigmoid(self.expand(F.silu(self.reduce(F.adaptive_avg_pool2d(y, 1)))))
        return self.head(F.avg_pool2d(y, 2).mean((2, 3)))


class ShuffleNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.branch, self.head = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1, groups=4),
            nn.Linear(8, 5),
        )

    def forward(self, x):
        a, b = self.stem(x).chunk(2, 1)
        x = torch.cat([a, F.relu(self.branch(b))], 1)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, -1, h, w)
        return self.head(F.interpolate(x, scale_factor=2, mode="nearest").mean([2, 3]))


class DenseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv0, self.norm1, self.conv1 = (
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.Conv2d(6, 4, 3, padding=1),
        )
        self.norm2, self.conv2, self.head = nn.BatchNorm2d(10), nn.Conv2d(10, 4, 1), nn.Linear(16, 5)

    def forward(self, x):
        x = self.conv0(x)
        x = torch.cat([x, self.conv1(F.relu(self.norm1(x)))], 1)
        x = F.avg_pool2d(self.conv2(F.relu(self.norm2(x))), 2)
        return self.head(F.adaptive_avg_pool2d(x, (2, 2)).flatten(1))


class ConvNeXt(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.depthwise, self.norm = (
            nn.Conv2d(3, 8, 4, 4),
            nn.Conv2d(8, 8, 7, padding=3, groups=8),
            nn.LayerNorm(8, eps=1e-6),
        )
        self.wide, self.narrow, self.scale, self.head = (
            nn.Linear(8, 32),
            nn.Linear(32, 8),
            nn.Parameter(torch.full((8, 1, 1), 0.1)),
            nn.Linear(8, 5),
        )

    def forward(self, x):
        x = self.stem(x)
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.narrow(F.gelu(self.wide(self.norm(y)))).permute(0, 3, 1, 2)
        return self.head((x + self.scale * y).mean([-2, -1]))


class SqueezeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.squeeze, self.one, self.three = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 1), nn.Conv2d(4, 6, 3, padding=1)
        self.classifier = nn.Sequential(nn.Conv2d(12, 5, 1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d((1, 1)))

    def forward(self, x):
        x = F.relu_(self.squeeze(x))
        return torch.flatten(self.classifier(torch.cat([self.one(x), self.three(x)], 1)), 1)


class WeightNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3, dilation=2))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(F.relu(self.conv(F.pad(x, (4, 0)))).amax(-1))


def networks():
    """All of them by name, always with the same weights."""
    torch.manual_seed(0)
    images, words = torch.randn(3, 3, 12, 12), torch.randint(0, 20, (3, 8))
    states = torch.zeros(2, 3, 6)
    return {
        "mlp": (nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.PReLU(), nn.Linear(8, 3)), torch.randn(3, 1, 4, 4)),
        "rnn": (Last(nn.RNN(5, 6, nonlinearity="relu", batch_first=True), 6), torch.randn(3, 7, 5)),
        "lstm": (Last(nn.LSTM(5, 6, 2, batch_first=True, bidirectional=True), 24), torch.randn(3, 7, 5)),
        "gru": (First(nn.GRU(5, 6, 2, batch_first=True)), torch.randn(3, 7, 5)),
        "states": (States(), (words, states, states)),
        "encoder": (Encoder(True), torch.randn(3, 6, 16)),
        "encoder, time first": (Encoder(False, norm_first=True, activation="gelu"), torch.randn(3, 6, 16)),
        "decoder": (Decoder(), torch.randn(3, 9, 16)),
        "attention by hand": (HandAttention(), torch.randn(3, 6, 16)),
        "gpt": (GPT(), words),
        "vit": (ViT(), images),
        "llama": (Llama(), words),
        "windows": (Windows(), torch.randn(3, 3, 8, 8)),
        "autoencoder": (AutoEncoder(), torch.randn(3, 12)),
        "generator": (nn.Sequential(nn.ConvTranspose2d(5, 8, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh()), torch.randn(3, 5, 1, 1)),
        "wavenet": (WaveNet(), torch.randn(3, 1, 20)),
        "unet": (UNet(), images),
        "resnet": (ResNet(), torch.randn(3, 3, 24, 24)),
        "mobilenet": (MobileNet(), images),
        "efficientnet": (EfficientNet(), images),
        "shufflenet": (ShuffleNet(), images),
        "densenet": (DenseNet(), images),
        "convnext": (ConvNeXt(), images),
        "squeezenet": (SqueezeNet(), images),
        "weight norm": (WeightNorm(), torch.randn(3, 4, 11)),
    }  # fmt: skip
