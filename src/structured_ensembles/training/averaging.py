"""Averages of a member's weights over the last steps of its training (Izmailov et al. 2018, but of every step)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from structured_ensembles.data import Data
from structured_ensembles.training.engine import Member
from structured_ensembles.training.recalibration import layers_with_statistics, recalibrate_statistics
from structured_ensembles.training.state_copies import update_copy


def start_average(network: nn.Module) -> dict[str, Tensor]:
    """Copy the trained parameters, by name: where the average is kept, in place."""
    return {name: tensor.detach().clone() for name, tensor in network.named_parameters() if tensor.requires_grad}


@torch.no_grad()
def update_average(members: Sequence[Member], weight: float | Tensor) -> None:
    """Move the averages towards the members' parameters: average += weight · (parameter − average).

    weight: see `Recipe.averaging_weight`; a tensor without axes in a captured step.
    """
    averages = [tensor for member in members for tensor in member.average.values()]
    parameters: list[Tensor] = []
    for member in members:
        named = dict(member.network.named_parameters())
        parameters += [named[name] for name in member.average]
    if not averages:
        return
    differences = list(torch._foreach_sub(parameters, averages))
    torch._foreach_mul_(differences, weight)
    torch._foreach_add_(averages, differences)


@torch.no_grad()
def finish_average(member: Member, data: Data) -> None:
    """Set a member's network and best weights to the average, with statistics of batch norm measured for it."""
    parameters = dict(member.network.named_parameters())
    for name, tensor in member.average.items():
        parameters[name].copy_(tensor)
    if layers_with_statistics(member.network):
        recalibrate_statistics(member.network, data)
    update_copy(member.best, member.network)


def restore_average(average: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a checkpoint into an average; raise a ValueError unless they are those of this average."""
    if {name: tensor.shape for name, tensor in average.items()} != {
        name: tensor.shape for name, tensor in tensors.items()
    }:
        raise ValueError("its averages are not those of the networks' parameters")
    for name, tensor in tensors.items():
        average[name].copy_(tensor)
