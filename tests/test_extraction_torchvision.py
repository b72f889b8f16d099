"""Extraction is exact for torchvision's networks.

Their classes are those of torchvision, with fewer repetitions: every kind of block occurs, once or twice.
`benchmarks/models.py` goes through the networks in full size; docs/models.md has what it found.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from tests.support.exactness import check_exact, randomize

torchvision = pytest.importorskip("torchvision")
models = torchvision.models


def mobilenet() -> nn.Module:
    """MobileNetV3 with one block of each kind: with and without expansion, gate, residual sum, ReLU and Hardswish."""
    block = partial(models.mobilenetv3.InvertedResidualConfig, dilation=1, width_mult=1.0)
    blocks = [
        block(16, 3, 16, 16, True, "RE", stride=2),
        block(16, 3, 72, 24, False, "RE", stride=2),
        block(24, 3, 88, 24, False, "RE", stride=1),
        block(24, 5, 96, 40, True, "HS", stride=2),
        block(40, 5, 240, 40, True, "HS", stride=1),
    ]
    return models.MobileNetV3(blocks, 128, num_classes=10)


def efficientnet() -> nn.Module:
    """EfficientNet with one block of each kind: with and without expansion, and with a residual sum."""
    block = models.efficientnet.MBConvConfig
    blocks = [block(1, 3, 1, 32, 16, 1), block(6, 3, 2, 16, 24, 2), block(6, 5, 2, 24, 40, 1)]
    return models.EfficientNet(blocks, dropout=0.2, num_classes=10, last_channel=128)


def convnext() -> nn.Module:
    block = models.convnext.CNBlockConfig
    return models.ConvNeXt([block(24, 48, 2), block(48, 96, 1), block(96, None, 1)], num_classes=10)


def regnet() -> nn.Module:
    parameters = models.regnet.BlockParams([1, 2], [16, 32], [8, 8], [1.0, 1.0], [2, 2], se_ratio=0.25)
    return models.RegNet(parameters, num_classes=10)


def googlenet() -> nn.Module:
    """GoogLeNet with its auxiliary heads; its width and depth cannot be chosen."""
    return models.googlenet(weights=None, init_weights=False, num_classes=10)


def densenet() -> nn.Module:
    return models.DenseNet(growth_rate=8, block_config=(2, 3, 2), num_init_features=16, bn_size=2, num_classes=10)


def resnet(block: type[nn.Module]) -> nn.Module:
    """Return a ResNet with a second block, which has no projection, in one of its four stages."""
    return models.ResNet(block, [1, 1, 2, 1], num_classes=10)


def swin() -> nn.Module:
    """Swin transformer of two stages, each with a block of plain and one of shifted windows."""
    return models.SwinTransformer(
        [4, 4], embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=10
    )


def vgg() -> nn.Module:
    """VGG whose classifier has hidden layers of 64 instead of 4,096 neurons, and reads two pixels per side."""
    network = models.VGG(models.vgg.make_layers([16, "M", 32, "M", 48, 48, "M"], batch_norm=True), num_classes=10)
    network.avgpool = nn.AdaptiveAvgPool2d(2)
    network.classifier = nn.Sequential(
        nn.Linear(48 * 4, 64), nn.ReLU(True), nn.Dropout(),
        nn.Linear(64, 64), nn.ReLU(True), nn.Dropout(),
        nn.Linear(64, 10),
    )  # fmt: skip
    return network


def vision_transformer() -> nn.Module:
    return models.VisionTransformer(
        image_size=32, patch_size=16, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=96, num_classes=10
    )


def shufflenet() -> nn.Module:
    """ShuffleNet with two blocks of stride 1, whose cuts meet within a channel, in the first of its three stages."""
    return models.ShuffleNetV2([3, 2, 1], [24, 44, 88, 96, 128], num_classes=10)


# How the model is made, one group that can be pruned (by the paper's rule) with its size, and what fixes other groups,
# in the words a user reads.
MODELS: dict[str, tuple[Callable[[], nn.Module], str, int, str]] = {
    "resnet18": (partial(resnet, models.resnet.BasicBlock), "layer1.0.conv1", 64, "residual sum"),
    "resnet50": (partial(resnet, models.resnet.Bottleneck), "layer3.1.conv2", 256, "residual sum"),
    "vgg": (vgg, "features.4", 32, ""),
    "densenet": (densenet, "features.denseblock2.denselayer3.conv2", 8, ""),
    "mobilenet_v3": (mobilenet, "features.4.block.0.0", 96, "residual sum"),
    "efficientnet": (efficientnet, "features.2.0.block.0.0", 96, "residual sum"),
    "convnext": (convnext, "features.1.0.block.3", 96, "layer norm"),
    "regnet_y": (regnet, "trunk_output.block1.block1-0.f.se.fc1", 8, "lies in a product"),
    "shufflenet_v2": (shufflenet, "conv5.0", 128, "sliced within a channel"),
    "vision_transformer": (vision_transformer, "encoder.layers.encoder_layer_0.mlp.0", 96, "layer norm"),
    "swin": (swin, "features.1.0.mlp.0", 96, "layer norm"),
    "googlenet": (googlenet, "inception4a.branch2.1.conv", 208, ""),
}
EXAMPLE = torch.randn(2, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", MODELS)
def test_extraction_is_exact_for_torchvision_networks(name: str) -> None:
    make, group, channels, expected_reason = MODELS[name]
    example = EXAMPLE[..., :32, :32] if name == "vision_transformer" else EXAMPLE
    graph = check_exact(randomize(make()), example)
    assert graph.prunable[group] == channels
    assert name != "vision_transformer" or any("in_proj_weight" in group for group in graph.prunable)
    reasons = [group.reason for group in graph.groups if group.reason]
    assert any("network's output" in reason for reason in reasons)
    assert any(expected_reason in reason for reason in reasons)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3", "googlenet"])
def test_extraction_is_exact_for_coupled_groups(name: str) -> None:
    graph = check_exact(randomize(MODELS[name][0]()), EXAMPLE, coupled=True)
    fixed = [group for group in graph.groups if not group.prunable]
    assert all("network's output" in str(group.reason) for group in fixed)  # the residual stream is offered as a whole
