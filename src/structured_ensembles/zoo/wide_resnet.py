"""Wide residual networks (Zagoruyko & Komodakis 2016): batch norm and ReLU come before each convolution."""

import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.networks.provenance import record_origin
from structured_ensembles.zoo.network import Network, check_sizes


class PreactivationBlock(nn.Module):
    """Two 3×3 convolutions, each after batch norm and ReLU, and a shortcut: 1×1 where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        same_shape = inputs == outputs and stride == 1
        self.shortcut = None if same_shape else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations (batch, inputs, height, width) to (batch, outputs, height / stride, width / stride)."""
        activated = F.relu(self.bn1(x))
        if self.shortcut is not None:
            x = self.shortcut(activated)  # reads the activation, not x, as in the authors' code
        return x + self.conv2(F.relu(self.bn2(self.conv1(activated))))


class WideResNet(Network):
    """A 3×3 stem, three stages of 16, 32, 64 channels times `width`, average pooling, one linear layer."""

    def __init__(self, blocks: int, width: int, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        inputs = 16
        for stage in range(3):
            outputs = 16 * width * 2**stage
            first = PreactivationBlock(inputs, outputs, 2 if stage > 0 else 1)
            others = [PreactivationBlock(outputs, outputs, 1) for _ in range(blocks - 1)]
            self.add_module(f"layer{stage + 1}", nn.Sequential(first, *others))
            inputs = outputs
        self.bn = nn.BatchNorm2d(inputs)
        self.fc = nn.Linear(inputs, num_classes)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, in_channels, height, width) to logits (batch, num_classes)."""
        x = self.conv1(x)
        for stage in (1, 2, 3):
            x = getattr(self, f"layer{stage}")(x)
        return self.fc(F.relu(self.bn(x)).mean((2, 3)))


@record_origin
def wrn28_10(num_classes: int = 10, in_channels: int = 3, width: int = 10) -> WideResNet:
    """Make a WRN-28-10: 28 layers, ten times as wide as ResNet20; 36,479,194 parameters for 10 classes."""
    check_sizes(num_classes=num_classes, in_channels=in_channels, width=width)
    return WideResNet(4, width, num_classes, in_channels)
