"""Extraction is exact for torchvision's networks."""

import pytest
import torch

from tests.support.exactness import check_exact, randomize

torchvision = pytest.importorskip("torchvision")

VIT = {"image_size": 32, "patch_size": 16, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 96}
# Model, arguments, size of the example, and one group that can be pruned (by the paper's rule) with its size.
MODELS = [
    ("resnet18", {}, 64, "layer1.0.conv1", 64),
    ("resnet50", {}, 64, "layer3.2.conv2", 256),
    ("vgg11_bn", {"num_classes": 10}, 32, "features.4", 128),
    ("densenet121", {}, 64, "features.denseblock2.denselayer3.conv2", 32),
    ("mobilenet_v3_small", {}, 64, "features.4.block.0.0", 96),
    ("efficientnet_b0", {}, 64, "features.2.0.block.0.0", 96),
    ("convnext_tiny", {}, 64, "features.1.0.block.3", 384),
    ("regnet_y_400mf", {}, 64, "trunk_output.block1.block1-0.f.se.fc1", 8),
    ("shufflenet_v2_x1_0", {}, 64, "conv5.0", 1024),
    ("VisionTransformer", VIT, 32, "encoder.layers.encoder_layer_0.mlp.0", 96),
    ("swin_t", {}, 64, "features.1.0.mlp.0", 384),
    ("googlenet", {"init_weights": False}, 96, "inception4a.branch2.1.conv", 208),
]
# What fixes groups there, in the words a user reads.
REASONS = {
    "convnext_tiny": "layer norm",
    "regnet_y_400mf": "lies in a product",
    "shufflenet_v2_x1_0": "sliced within a channel",
    "VisionTransformer": "layer norm",
    "swin_t": "layer norm",
    "resnet50": "residual sum",
}


@pytest.mark.parametrize(("name", "arguments", "size", "group", "channels"), MODELS, ids=[row[0] for row in MODELS])
def test_extraction_is_exact_for_torchvision_networks(
    name: str, arguments: dict, size: int, group: str, channels: int
) -> None:
    weights = {} if name == "VisionTransformer" else {"weights": None}
    model = getattr(torchvision.models, name)(**weights, **arguments)
    example = torch.randn(2, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    graph = check_exact(randomize(model), example)
    assert graph.prunable[group] == channels
    assert name != "VisionTransformer" or any("in_proj_weight" in group for group in graph.prunable)
    reasons = [group.reason for group in graph.groups if group.reason]
    assert any("network's output" in reason for reason in reasons)
    if name in REASONS:
        assert any(REASONS[name] in reason for reason in reasons)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "googlenet"])
def test_extraction_is_exact_for_coupled_groups(name: str) -> None:
    arguments = {"init_weights": False} if name == "googlenet" else {}
    model = randomize(getattr(torchvision.models, name)(weights=None, **arguments))
    example = torch.randn(2, 3, 96, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    graph = check_exact(model, example, coupled=True)
    fixed = [group for group in graph.groups if not group.prunable]
    assert all("network's output" in str(group.reason) for group in fixed)  # the residual stream is offered as a whole
