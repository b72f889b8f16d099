"""Make the small networks that several rooms test with."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structured_ensembles as se


def network(seed: int, width: int = 8, dropout: float = 0.3) -> nn.Module:
    """Make a convolution, a batch norm and a linear layer for 8×8 digits, with weights drawn from `seed`."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, width, 3),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(36 * width, 10),
    )


class Sparse(nn.Module):
    """Look up pixels in an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 10))
        self.register_buffer("sparse", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = (15 * x.flatten(1)).long().clamp(0, 15)
        return F.embedding(places, self.table, sparse=True).mean(1)


class Viewing(nn.Module):
    """Flatten by `view`, which fails where a convolution's output is stored channels last."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu()).relu()
        result: Tensor = self.head(x.view(len(x), -1))
        return result


class Nested(nn.Module):
    """Keep layers in lists and dictionaries: one is called twice, one on tokens, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.GroupNorm(2, 8))
        self.blocks = nn.ModuleList([nn.ModuleDict({"depthwise": nn.Conv2d(8, 8, 3, padding=1, groups=8)})])
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2)
        self.twice = nn.Linear(8, 8)
        self.head = nn.Linear(4, 5, bias=False)
        self.unused = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x), inplace=True)
        x = x + self.blocks[0]["depthwise"](x)
        x = self.twice(self.twice(x.flatten(2).mT)).mT.unflatten(2, x.shape[2:])  # (batch, tokens, features)
        return self.head(self.up(x).mean((2, 3)))


def norms_of(network: nn.Module) -> list[nn.Module]:
    """List the batch norms of a network."""
    return [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]


def pruned(prune: float, in_channels: int = 3) -> nn.Module:
    """Extract a ResNet20 without the share `prune` of its channels, chosen at random."""
    torch.manual_seed(0)
    base = se.zoo.resnet20(in_channels=in_channels)
    traced = se.trace(base, torch.randn(2, in_channels, 8, 8))
    return se.extract(base, traced, se.select(traced, prune=prune, selection="random", members=1)[0])


def small_networks(count: int = 3, dropout: float = 0.0) -> list[nn.Module]:
    """Make networks of different widths for 8×8 digits."""
    made = []
    for number in range(count):
        torch.manual_seed(number)
        width = 8 + 4 * number
        made.append(
            nn.Sequential(
                nn.Conv2d(1, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Dropout(dropout),
                nn.Flatten(),
                nn.Linear(64 * width, 10),
            )
        )
    return made
