"""Base classes of the zoo's networks: Kaiming initialisation, and a backbone with a head."""

from torch import Tensor, nn

from structured_ensembles.common.checks import check_whole


def check_sizes(**sizes: int) -> None:
    """Raise a ValueError unless each of the arguments of a network is a whole number of at least 1."""
    for argument, size in sizes.items():
        check_whole(argument, size)


class Network(nn.Module):
    """A module that initialises all its layers itself (Kaiming)."""

    def reset_parameters(self) -> None:
        """Draw the weights of all layers again."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                if module.weight.is_meta:  # no values to draw, and PyTorch would take seconds over it
                    continue
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()


class WithHead(Network):
    """A backbone and one linear layer."""

    def __init__(self, backbone: nn.Module, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(num_features, num_classes)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, in_channels, height, width) to logits (batch, num_classes)."""
        return self.head(self.backbone(x))
