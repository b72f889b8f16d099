"""Residual networks for small images (He et al. 2016)."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.networks.provenance import record_origin
from structured_ensembles.zoo.network import Network, check_sizes


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut.

    Where the shape changes, the shortcut takes every second pixel and pads the channels with zeros (option A), or is a
    1×1 convolution (`projection`, option B).
    """

    def __init__(self, inputs: int, outputs: int, stride: int, projection: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.shortcut: nn.Module | None = None
        if projection and (stride != 1 or inputs != outputs):
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map activations (batch, inputs, height, width) to (batch, outputs, height / stride, width / stride)."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.shortcut is not None:
            x = self.shortcut(x)
        elif self.stride != 1:
            x = F.avg_pool2d(x, 1, self.stride)  # every second pixel; its gradient keeps the channels-last format
        if x.shape[1] != out.shape[1]:
            # Sizes come from the tensors, so that channels of the residual stream can be pruned too.
            x = F.pad(x, (0, 0, 0, 0, 0, out.shape[1] - x.shape[1]))
        return F.relu(out + x)


class ResNet(Network):
    """A 3×3 stem, stages that halve the resolution and double the channels, average pooling, one linear layer."""

    def __init__(
        self, blocks: Sequence[int], channels: int, num_classes: int, in_channels: int, projection: bool = False
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        inputs = channels
        self.stages = [f"layer{number}" for number in range(1, len(blocks) + 1)]
        for stage, name in enumerate(self.stages):
            outputs = channels * 2**stage
            first = Block(inputs, outputs, 2 if stage > 0 else 1, projection)
            others = [Block(outputs, outputs, 1, projection) for _ in range(blocks[stage] - 1)]
            self.add_module(name, nn.Sequential(first, *others))
            inputs = outputs
        self.fc = nn.Linear(inputs, num_classes)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, in_channels, height, width) to logits (batch, num_classes)."""
        x = F.relu(self.bn1(self.conv1(x)))
        for name in self.stages:
            x = getattr(self, name)(x)
        return self.fc(x.mean((2, 3)))


@record_origin
def resnet20(num_classes: int = 10, in_channels: int = 3, width: int = 1) -> ResNet:
    """Make a ResNet20: three blocks each of 16, 32, 64 channels times `width`; 269,722 parameters for 10 classes."""
    check_sizes(num_classes=num_classes, in_channels=in_channels, width=width)
    return ResNet((3, 3, 3), 16 * width, num_classes, in_channels)


@record_origin
def resnet32(num_classes: int = 10, in_channels: int = 3, width: int = 1) -> ResNet:
    """Make a ResNet32: ResNet20 with five blocks per stage; 476,504 parameters for 200 classes."""
    check_sizes(num_classes=num_classes, in_channels=in_channels, width=width)
    return ResNet((5, 5, 5), 16 * width, num_classes, in_channels)


@record_origin
def resnet18(num_classes: int = 10, in_channels: int = 3, width: int = 1) -> ResNet:
    """Make the usual ResNet18 for CIFAR: 64 to 512 channels times `width`, a 3×3 stem; 11,173,962 parameters."""
    check_sizes(num_classes=num_classes, in_channels=in_channels, width=width)
    return ResNet((2, 2, 2, 2), 64 * width, num_classes, in_channels, projection=True)
