"""The full network without some of its channels: what an extracted network must compute.

This is worked out apart from extraction, which removes channels. Here nothing is removed: weights become zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from structured_ensembles.channels import ChannelGraph
from structured_ensembles.networks.copying import clone_model
from structured_ensembles.networks.resizing import Axis
from structured_ensembles.selection import Subnet


def without_channels(model: nn.Module, graph: ChannelGraph, subnet: Subnet) -> nn.Module:
    """Copy a network and set the outgoing weights of every channel that `subnet` drops to zero.

    A group that layers read loses its columns in their weights. A group that no layer reads, but a product of two
    activations, such as queries and keys, loses its rows in the weights and biases of the layers that compute it.
    """
    masked = clone_model(model)
    for name, size, kept in subnet.groups:
        dropped = sorted(set(range(size)) - set(kept))
        readers = graph[name].consumers
        for layer in readers or graph[name].producers:
            weight = f"{layer}.weight" if layer else "weight"
            module = masked.get_submodule(layer)
            side = input_dim(module) if readers else 1 - input_dim(module)
            _zero(masked.get_parameter(weight), graph.axes[weight], side, name, dropped)
            bias = f"{layer}.bias" if layer else "bias"
            if not readers and bias in graph.axes:
                _zero(masked.get_parameter(bias), graph.axes[bias], 0, name, dropped)
    return masked


def input_dim(layer: nn.Module) -> int:
    """Return which axis of a layer's weight its inputs are: 1, or 0 for transposed convolutions and `Conv1D`."""
    transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd) or type(layer).__name__ == "Conv1D"
    return 0 if transposed else 1


@torch.no_grad()
def _zero(tensor: Tensor, axes: Sequence[Axis], dim: int, group: str, dropped: Sequence[int]) -> None:
    """Set the slices of a tensor along `dim` that belong to dropped channels of a group to zero."""
    tensor.transpose(0, dim)[positions_of(axes[dim], group, dropped)] = 0


def positions_of(axis: Axis, group: str, channels: Sequence[int]) -> list[int]:
    """List the positions along an axis that belong to some channels of a group.

    All that this file knows of how groups lie along an axis is here.
    """
    positions: list[int] = []
    start = 0
    for span in axis:
        if span.group == group:
            for channel in channels:
                first = start + channel * span.block
                positions += range(first, first + span.block)
        start += span.size * span.block
    return positions
