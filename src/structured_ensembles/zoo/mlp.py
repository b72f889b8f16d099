"""Multi-layer perceptrons."""

from collections.abc import Sequence

from torch import Tensor, nn

from structured_ensembles.common.checks import check_list, check_whole
from structured_ensembles.networks.provenance import record_origin
from structured_ensembles.zoo.network import Network, check_sizes


class MLP(Network):
    """Linear layers with ReLU between them, on flattened inputs of any shape."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(sizes[0], sizes[1])]
        for inputs, outputs in zip(sizes[1:-1], sizes[2:], strict=True):
            layers += [nn.ReLU(), nn.Linear(inputs, outputs)]
        self.layers = nn.Sequential(*layers)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (batch, …) to logits (batch, num_classes)."""
        return self.layers(x)


@record_origin
def mlp(in_features: int, num_classes: int = 10, hidden: Sequence[int] = (256, 256)) -> MLP:
    """Make a multi-layer perceptron; for a regression, `num_classes` is the number of values to predict."""
    check_sizes(in_features=in_features, num_classes=num_classes)
    check_list("hidden", hidden, "whole numbers")
    for size in hidden:
        check_whole("each of hidden", size)
    return MLP((in_features, *hidden, num_classes))
