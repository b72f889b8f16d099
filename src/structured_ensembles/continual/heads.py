"""Task heads, which map a backbone's features to the logits of one task."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from structured_ensembles.common.checks import check_choice
from structured_ensembles.common.devices import seed_generators
from structured_ensembles.networks.copying import copy_frozen

HeadKind = Literal["linear", "paper"]


class TaskNetwork(nn.Module):
    """Backbone with the head of one task."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, …) to logits (batch, classes of the task)."""
        return self.head(self.backbone(x))


class PaperHead(nn.Module):
    """Head of the authors' code: 49 copies of every feature, two hidden layers with dropout.

    On the 256 features of a half-VGG11 it has 98 million parameters, 43 times the backbone's.
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        inputs = 49 * features
        self.layers = nn.Sequential(
            nn.Linear(inputs, inputs // 2),
            nn.Dropout(0.25),
            nn.ReLU(),
            nn.Linear(inputs // 2, inputs // 4),
            nn.Dropout(0.25),
            nn.ReLU(),
            nn.Linear(inputs // 4, classes),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Map (batch, features) to logits (batch, classes)."""
        return self.layers(features[:, :, None].repeat(1, 1, 49).flatten(1))


def create_head(head: HeadKind, features: int, classes: int, seed: int) -> nn.Module:
    """Create a head whose weights depend only on `seed`."""
    check_choice("head", head, get_args(HeadKind))
    with torch.random.fork_rng(devices=[]):
        seed_generators(seed, torch.device("cpu"))
        return nn.Linear(features, classes) if head == "linear" else PaperHead(features, classes)


def count_features(backbone: nn.Module, example: Tensor) -> int:
    """Count the features that the backbone returns for a batch such as `example`; the backbone is not changed."""
    try:
        with torch.no_grad():
            features = copy_frozen(backbone).eval()(example)
    except RuntimeError as error:
        raise ValueError(f"backbone cannot take inputs of shape {tuple(example.shape[1:])}: {error}") from error
    if not isinstance(features, Tensor) or features.dim() != 2 or len(features) != len(example):
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(f"backbone must map (batch, …) to pooled features (batch, features), but gives {shape}")
    return features.shape[1]
