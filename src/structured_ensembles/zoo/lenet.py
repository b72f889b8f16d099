"""LeNet-5 (LeCun et al. 1998) with ReLU and max pooling."""

import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.networks.provenance import record_origin
from structured_ensembles.zoo.network import Network, check_sizes


class Backbone(Network):
    """Three 5×5 convolutions of 6, 16 and 120 channels, then a mean over height and width.

    On images of at least 28×28 only the first convolution is padded, as in LeNet-5. On smaller images all are: without
    padding nothing would be left of them.
    """

    def __init__(self, in_channels: int, bias: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 6, 5, padding=2, bias=bias)
        self.conv2 = nn.Conv2d(6, 16, 5, bias=bias)
        self.conv3 = nn.Conv2d(16, 120, 5, bias=bias)
        self.num_features = 120
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, in_channels, height, width) to features (batch, 120)."""
        pad = 2 if min(x.shape[2:]) < 28 else 0
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(F.pad(x, (pad,) * 4))), 2)
        return F.relu(self.conv3(F.pad(x, (pad,) * 4))).mean((2, 3))


class LeNet5(Network):
    """LeNet-5: the backbone and two linear layers."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.backbone = Backbone(in_channels, bias=True)
        self.fc1 = nn.Linear(120, 84)
        self.fc2 = nn.Linear(84, num_classes)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, in_channels, height, width) to logits (batch, num_classes)."""
        return self.fc2(F.relu(self.fc1(self.backbone(x))))


@record_origin
def lenet5(num_classes: int = 10, in_channels: int = 1) -> LeNet5:
    """Make a LeNet-5: 61,706 parameters for greyscale images and 10 classes."""
    check_sizes(num_classes=num_classes, in_channels=in_channels)
    return LeNet5(num_classes, in_channels)


@record_origin
def lenet5_backbone(in_channels: int = 1) -> Backbone:
    """Make LeNet-5's convolutions without biases: 50,550 parameters and 142 neurons for greyscale images."""
    check_sizes(in_channels=in_channels)
    return Backbone(in_channels, bias=False)
