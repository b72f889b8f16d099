"""Make networks and arrays as users bring them: recurrent, wrapped, partly frozen, with unsaved buffers."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_generator = np.random.default_rng(0)

ROWS = _generator.normal(size=(96, 10)).astype("f")

IMAGES = _generator.normal(size=(96, 3, 12, 12)).astype("f")

SEQUENCES = _generator.normal(size=(96, 7, 10)).astype("f")

LABELS = np.arange(96) % 4


def mlp(outputs: int = 4, *between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 16), *between, nn.ReLU(), nn.Linear(16, outputs))


class TimeFirst(nn.Module):
    """Run a transformer on (time, batch, features), PyTorch's default order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 16), nn.Linear(16, 4)
        self.inner = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.inner(self.first(x).transpose(0, 1)).mean(0))
        return result


class TwoViews(nn.Module):
    """Run the batch and its mirror image as one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        both = F.relu(self.second(F.relu(self.first(torch.cat([x, x.flip(-1)]))))).mean((2, 3))
        result: Tensor = self.last(both.unflatten(0, (2, -1)).mean(0))
        return result


class Frozen(nn.Module):
    """Run the backbone without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
        self.head = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.backbone(x)
        result: Tensor = self.head(features.mean((2, 3)))
        return result


class Auxiliary(nn.Module):
    """Run an auxiliary head in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3), nn.Linear(16, 4)
        self.aside = nn.Sequential(nn.Conv2d(16, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        features = F.relu(self.first(x))
        result: Tensor = self.last(features.mean((2, 3)))
        return result + 0.3 * self.aside(features).mean((2, 3)) if self.training else result


class Gained(nn.Module):
    """Keep a non-persistent buffer as wide as a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 16), nn.Linear(16, 4)
        self.register_buffer("gain", torch.linspace(1, 2, 16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(F.relu(self.first(x) * self.gain))
        return result


class Renamed(nn.Module):
    """Register the same layers under two names, as wrappers of another network do."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 3, 3), nn.ReLU())
        self.features, self.last, self.twice = self.net, nn.Linear(3, 4), twice

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        result: Tensor = self.last((self.net(x) if self.twice else x).mean((2, 3)))
        return result


class Tokens(nn.Module):
    """Classify text given as ids of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(self.words(x).mean(1))
        return result
