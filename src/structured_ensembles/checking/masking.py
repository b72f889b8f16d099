"""The full network without some of its channels: what an extracted network must compute.

This is worked out apart from extraction, which removes channels. Here nothing is removed: weights become zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from structured_ensembles.channels import ChannelGraph
from structured_ensembles.networks.copying import clone_model
from structured_ensembles.networks.resizing import Axis, NestedSpan, groups_along
from structured_ensembles.selection import Subnet


def without_channels(model: nn.Module, graph: ChannelGraph, subnet: Subnet) -> nn.Module:
    """Copy a network and set the outgoing weights of every channel that `subnet` drops to zero.

    A group that layers read loses its columns in their weights. A group that a product of two activations reads, such
    as queries and keys, becomes zero itself: in the weights and biases of the layers that compute it, and in norms.
    """
    masked = clone_model(model)
    for name, size, kept in subnet.groups:
        dropped = set(range(size)) - set(kept)
        for weight, dim in _read_weights(masked, graph, name):
            _zero(masked.get_parameter(weight), graph.axes[weight], dim, name, dropped)
        for weight, dim in _computing_weights(masked, graph, name) if graph[name].products else ():
            _zero(masked.get_parameter(weight), graph.axes[weight], dim, name, dropped)
    return masked


def _read_weights(model: nn.Module, graph: ChannelGraph, group: str) -> Iterator[tuple[str, int]]:
    """Yield the weights of the layers that read a group, each with the axis of its inputs."""
    for reader in graph[group].consumers:
        layer = dict(model.named_modules()).get(reader)
        if layer is None:  # a parameter that is used outside a layer: along one axis, or as the weight of F.linear
            dims = [dim for dim, axis in enumerate(graph.axes[reader]) if group in groups_along(axis)]
            yield reader, dims[0] if len(dims) == 1 else 1
        elif isinstance(layer, nn.RNNBase):
            yield from ((f"{reader}.{name}", 1) for name in layer._parameters if name.startswith("weight"))
        else:
            yield f"{reader}.weight" if reader else "weight", input_dim(layer)


def _computing_weights(model: nn.Module, graph: ChannelGraph, group: str) -> Iterator[tuple[str, int]]:
    """Yield the parameters that compute a group, and those of norms along it, each with the axis of its outputs."""
    modules = dict(model.named_modules())
    for producer in graph[group].producers:
        layer = modules.get(producer)
        weight = producer if layer is None else f"{producer}.weight" if producer else "weight"
        yield weight, 1 if isinstance(layer, nn.Embedding) else 1 - (1 if layer is None else input_dim(layer))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and group in groups_along(graph.axes[name][0]):
            yield name, 0


def input_dim(layer: nn.Module) -> int:
    """Return which axis of a layer's weight its inputs are: 1, or 0 for transposed convolutions and `Conv1D`."""
    transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd) or type(layer).__name__ == "Conv1D"
    return 0 if transposed else 1


@torch.no_grad()
def _zero(tensor: Tensor, axes: Sequence[Axis], dim: int, group: str, dropped: Collection[int]) -> None:
    """Set the slices of a tensor along `dim` that belong to dropped channels of a group to zero."""
    tensor.transpose(0, dim)[positions_of(axes[dim], group, dropped)] = 0


def positions_of(axis: Axis, group: str, channels: Collection[int]) -> list[int]:
    """List the positions along an axis that belong to some channels of a group.

    All that this file knows of how groups lie along an axis is here.
    """
    positions: list[int] = []
    start = 0
    for span in axis:
        for channel in range(span.size):
            first = start + channel * span.block
            if span.group == group and channel in channels:
                positions += range(first, first + span.block)
            elif isinstance(span, NestedSpan):
                positions += [first + position for position in positions_of(span.within, group, channels)]
        start += span.size * span.block
    return positions
