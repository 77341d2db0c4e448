"""Networks as published, as layers: ``cv.zoo.resnet18(classes=10)``.

All take ``classes``, ``width``, the channels of their first layer, by which all others grow and shrink, and ``size``, the
sides of the images that they are for; the channels of these are read off what they are given.
"""

from calcvm import hints
from calcvm.zoo.inception import googlenet
from calcvm.zoo.mobile import mobilenet_v2
from calcvm.zoo.plain import alexnet, lenet, overfeat, vgg11, vgg16, vgg19
from calcvm.zoo.residual import resnet18, resnet34, resnet50
from calcvm.zoo.unet import unet

__all__ = [
    "alexnet", "googlenet", "lenet", "mobilenet_v2", "overfeat", "resnet18", "resnet34", "resnet50", "unet", "vgg11",
    "vgg16", "vgg19",
]  # fmt: skip
hints.hint(globals(), __all__)
