"""Sequential networks: LeNet, AlexNet, OverFeat, VGG."""

from __future__ import annotations

from calcvm import nn
from calcvm.init import Constant, Normal, XavierUniform
from calcvm.nn import Conv2d, Dropout, Flatten, Linear, LocalResponseNorm, MaxPool2d, ReLU, Sequential
from calcvm.zoo._scale import scaled

SMALL = Normal(0.0, 0.01)
DEPTHS = {"vgg11": (1, 1, 2, 2, 2), "vgg16": (2, 2, 3, 3, 3), "vgg19": (2, 2, 4, 4, 4)}


def lenet(classes: int = 10, width: int = 20, size: int = 28) -> Sequential:
    """Two convolutions of 5 by 5 with pooling, two linear layers: LeCun et al. 1998, in the version of Caffe."""
    of = scaled("lenet", classes, width, 20, size, 16)
    convolutions = Conv2d(of(20), 5) >> MaxPool2d(2) >> Conv2d(of(50), 5) >> MaxPool2d(2)
    return convolutions >> Flatten() >> Linear(of(500)) >> ReLU() >> Linear(classes)


def alexnet(classes: int = 1000, width: int = 96, size: int = 224) -> Sequential:
    """Krizhevsky, Sutskever and Hinton 2012.  The second, fourth and fifth convolution have two groups."""
    of = scaled("alexnet", classes, width, 96, size, 63)

    def conv(channels: int, kernel: int, bias: float, stride: int = 1, groups: int = 1) -> nn.Layer:
        padding = 2 if stride > 1 else kernel // 2
        halves = 2 * of(channels // 2)
        return Conv2d(
            halves, kernel, stride=stride, padding=padding, groups=groups, init=SMALL, bias_init=Constant(bias)
        )

    def normalized() -> Sequential:
        return ReLU() >> LocalResponseNorm(5, k=2.0) >> MaxPool2d(3, 2)

    features = conv(96, 11, 0.0, stride=4) >> normalized() >> conv(256, 5, 1.0, groups=2) >> normalized()
    features = features >> conv(384, 3, 0.0) >> ReLU() >> conv(384, 3, 1.0, groups=2) >> ReLU()
    features = features >> conv(256, 3, 1.0, groups=2) >> ReLU() >> MaxPool2d(3, 2)
    return features >> _head(classes, of(4096), of(4096), bias=1.0)


def overfeat(classes: int = 1000, width: int = 96, size: int = 231) -> Sequential:
    """Sermanet et al. 2014, the fast model."""
    of = scaled("overfeat", classes, width, 96, size, 71)
    features = Conv2d(of(96), 11, stride=4, init=SMALL) >> ReLU() >> MaxPool2d(2)
    features = features >> Conv2d(of(256), 5, init=SMALL) >> ReLU() >> MaxPool2d(2)
    for channels in (512, 1024, 1024):
        features = features >> Conv2d(of(channels), 3, padding=1, init=SMALL) >> ReLU()
    return features >> MaxPool2d(2) >> _head(classes, of(3072), of(4096))


def vgg11(classes: int = 1000, width: int = 64, size: int = 224) -> Sequential:
    """Simonyan and Zisserman 2015, configuration A."""
    return _vgg("vgg11", classes, width, size)


def vgg16(classes: int = 1000, width: int = 64, size: int = 224) -> Sequential:
    """Simonyan and Zisserman 2015, configuration D."""
    return _vgg("vgg16", classes, width, size)


def vgg19(classes: int = 1000, width: int = 64, size: int = 224) -> Sequential:
    """Simonyan and Zisserman 2015, configuration E."""
    return _vgg("vgg19", classes, width, size)


def _vgg(name: str, classes: int, width: int, size: int) -> Sequential:
    of = scaled(name, classes, width, 64, size, 32)
    layers: list[nn.Layer] = []
    for channels, depth in zip((64, 128, 256, 512, 512), DEPTHS[name]):
        for _ in range(depth):  # Glorot and Bengio's initialization, with which the authors need no pre-training
            layers += [Conv2d(of(channels), 3, padding=1, init=XavierUniform()), ReLU()]
        layers.append(MaxPool2d(2))
    return Sequential(*layers) >> _head(classes, of(4096), of(4096))


def _head(classes: int, *units: int, bias: float = 0.0) -> Sequential:
    """Linear layers with dropout."""
    layers: list[nn.Layer] = [Flatten()]
    for n in units:
        layers += [Linear(n, init=Normal(0.0, 0.005), bias_init=Constant(bias)), ReLU(), Dropout(0.5)]
    return Sequential(*layers, Linear(classes, init=SMALL))
