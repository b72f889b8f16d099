"""VGG (Simonyan and Zisserman 2015) without batch norm and biases, as in the paper."""

from collections.abc import Sequence

from torch import Tensor, nn

from structured_ensembles.networks.provenance import record_origin
from structured_ensembles.zoo.network import Network, WithHead, check_sizes

POOL = 0  # stands for 2×2 max pooling in a list of channel counts
VGG11 = (64, POOL, 128, POOL, 256, 256, POOL, 512, 512, POOL, 512, 512, POOL)
VGG16 = (64, 64, POOL, 128, 128, POOL, 256, 256, 256, POOL, 512, 512, 512, POOL, 512, 512, 512, POOL)
HALF_VGG11 = (32, POOL, 64, POOL, 128, 128, POOL, 256, 256, POOL, 256, 256, POOL)


def make_convolutions(channels: Sequence[int], inputs: int) -> nn.Sequential:
    """Stack 3×3 convolutions with ReLU, and pooling where `channels` has POOL."""
    layers: list[nn.Module] = []
    for outputs in channels:
        if outputs == POOL:
            # ceil_mode leaves a pixel of images smaller than 32×32 after five poolings
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        else:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.ReLU()]
            inputs = outputs
    return nn.Sequential(*layers)


class VGG(Network):
    """A VGG with torchvision's layers: convolutions, 7×7 adaptive pooling, three linear layers with dropout."""

    def __init__(self, channels: Sequence[int], num_classes: int, in_channels: int, dropout: float) -> None:
        super().__init__()
        self.features = make_convolutions(channels, in_channels)
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(max(channels) * 7 * 7, 4096, bias=False),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096, bias=False),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, num_classes, bias=False),
        )
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, in_channels, height, width) to logits (batch, num_classes)."""
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


class Backbone(Network):
    """Convolutions and global average pooling: features for the heads of continual learning."""

    def __init__(self, channels: Sequence[int], in_channels: int) -> None:
        super().__init__()
        self.features = make_convolutions(channels, in_channels)
        self.num_features = next(count for count in reversed(channels) if count != POOL)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, in_channels, height, width) to features (batch, num_features)."""
        return self.features(x).mean((2, 3))


@record_origin
def vgg11(num_classes: int = 10, in_channels: int = 3, dropout: float = 0.5) -> VGG:
    """Make a VGG11: 128,796,352 parameters for 10 classes."""
    check_sizes(num_classes=num_classes, in_channels=in_channels)
    return VGG(VGG11, num_classes, in_channels, dropout)


@record_origin
def vgg16(num_classes: int = 10, in_channels: int = 3, dropout: float = 0.5) -> VGG:
    """Make a VGG16: 134,289,088 parameters for 10 classes."""
    check_sizes(num_classes=num_classes, in_channels=in_channels)
    return VGG(VGG16, num_classes, in_channels, dropout)


@record_origin
def half_vgg11_backbone(in_channels: int = 3) -> Backbone:
    """Make the convolutions of a VGG11 of half the width: 2,304,864 parameters, 1,376 neurons."""
    check_sizes(in_channels=in_channels)
    return Backbone(HALF_VGG11, in_channels)


@record_origin
def half_vgg11(num_classes: int = 10, in_channels: int = 3) -> WithHead:
    """Make the half-VGG11 backbone with one linear layer."""
    check_sizes(num_classes=num_classes, in_channels=in_channels)
    backbone = half_vgg11_backbone(in_channels)
    return WithHead(backbone, backbone.num_features, num_classes)
