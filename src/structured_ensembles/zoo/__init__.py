"""Networks: those of the paper, and a few more."""

from structured_ensembles.zoo.lenet import lenet5, lenet5_backbone
from structured_ensembles.zoo.mlp import mlp
from structured_ensembles.zoo.resnet import resnet18, resnet20, resnet32
from structured_ensembles.zoo.vgg import half_vgg11, half_vgg11_backbone, vgg11, vgg16
from structured_ensembles.zoo.wide_resnet import wrn28_10

__all__ = [
    "half_vgg11",
    "half_vgg11_backbone",
    "lenet5",
    "lenet5_backbone",
    "mlp",
    "resnet18",
    "resnet20",
    "resnet32",
    "vgg11",
    "vgg16",
    "wrn28_10",
]
