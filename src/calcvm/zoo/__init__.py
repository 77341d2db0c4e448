"""Published networks, as layers: ``cv.zoo.resnet18(classes=10)``.

Parameters of networks for images: ``classes``; ``width``, the channels of the first layer, to which all others are proportional;
``size``, the sides of the images in pixels.  The number of image channels follows from the input.  Those for sequences
have ``classes``, ``width``, the features of a step, and ``layers``.
"""

from calcvm import hints
from calcvm.zoo.inception import googlenet
from calcvm.zoo.mobile import mobilenet_v2
from calcvm.zoo.plain import alexnet, lenet, overfeat, vgg11, vgg16, vgg19
from calcvm.zoo.residual import resnet18, resnet34, resnet50
from calcvm.zoo.sequences import bert, char_lstm, gpt, seq2seq, tcn, transformer_classifier
from calcvm.zoo.unet import unet

IMAGES = (
    "alexnet", "googlenet", "lenet", "mobilenet_v2", "overfeat", "resnet18", "resnet34", "resnet50", "unet", "vgg11",
    "vgg16", "vgg19",
)  # fmt: skip
SEQUENCES = ("bert", "char_lstm", "gpt", "seq2seq", "tcn", "transformer_classifier")
__all__ = [
    "alexnet", "bert", "char_lstm", "googlenet", "gpt", "lenet", "mobilenet_v2", "overfeat", "resnet18", "resnet34", "resnet50",
    "seq2seq", "tcn", "transformer_classifier", "unet", "vgg11", "vgg16", "vgg19",
]  # fmt: skip
hints.hint(globals(), __all__)
