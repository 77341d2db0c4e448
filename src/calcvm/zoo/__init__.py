"""Published networks, as layers: ``cv.zoo.resnet18(classes=10)``.

Parameters of all: ``classes``; ``width``, the channels of the first layer, to which all others are proportional; ``size``,
the sides of the images in pixels.  The number of image channels follows from the input.
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
