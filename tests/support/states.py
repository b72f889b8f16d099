"""Copy and compare the tensors of two networks."""

import torch
from torch import nn


def weights(net: nn.Module) -> dict[str, torch.Tensor]:
    """Copy the state dict of a network."""
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Tell whether two state dicts have the same names and the same bits."""
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
