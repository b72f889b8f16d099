"""Check that an extracted network computes what the full one computes without the dropped channels."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import structured_ensembles as se
from structured_ensembles.common.inputs import call
from structured_ensembles.networks.resizing import Axis, NestedSpan


def random_subnets(graph: se.ChannelGraph, prune: float, members: int = 1, seed: int = 0) -> list[se.Subnet]:
    return se.select(graph, prune=prune, selection="random", members=members, seed=seed)


def without_channels(model: nn.Module, graph: se.ChannelGraph, subnet: se.Subnet) -> nn.Module:
    """Copy the full network and set the outgoing weights of every dropped channel to zero.

    The layers that read a group are those the graph names; which of their inputs are meant is worked out here anew. A
    group that is read by a product of activations (queries and keys) has no outgoing weights: what computes it is zero.
    """
    masked = copy.deepcopy(model)
    for name, size, kept in subnet.groups:
        dropped = torch.tensor([channel not in kept for channel in range(size)])
        group = graph[name]
        if group.products or "[groups]" in name:
            for producer in group.producers:
                _zero_rows(masked, graph, producer, name, dropped)
        for reader in group.consumers:
            for weight_name, axis in _read_weights(masked, reader):
                weight = dict(masked.named_parameters(remove_duplicate=False))[weight_name]
                with torch.no_grad():
                    weight.transpose(0, axis)[_positions(graph.axes[weight_name][axis], name, dropped)] = 0
    return masked


def _weight_name(model: nn.Module, layer: str) -> str:
    """Return the name of a layer's weight; a bare parameter is named itself."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return layer if layer in parameters else f"{layer}.weight"


def _read_weights(model: nn.Module, reader: str) -> list[tuple[str, int]]:
    """Return the weights of a layer that reads a group, each with the axis of its inputs."""
    parameter = _weight_name(model, reader)
    layer = None if parameter == reader else model.get_submodule(reader)
    if isinstance(layer, nn.RNNBase):
        return [(f"{reader}.{name}", 1) for name in layer._parameters if name.startswith("weight")]
    rows_are_inputs = isinstance(layer, nn.modules.conv._ConvTransposeNd) or type(layer).__name__ == "Conv1D"
    return [(parameter, 0 if rows_are_inputs else 1)]


def _zero_rows(model: nn.Module, graph: se.ChannelGraph, producer: str, name: str, dropped: Tensor) -> None:
    """Set what a layer computes for the dropped channels to zero: rows of its weight, and its bias."""
    weight_name = _weight_name(model, producer)
    for parameter_name in (weight_name, weight_name.replace("weight", "bias")):
        parameter = dict(model.named_parameters(remove_duplicate=False)).get(parameter_name)
        if parameter is None:
            continue
        layer = model.get_submodule(parameter_name.rpartition(".")[0])
        columns = isinstance(layer, nn.Embedding) or type(layer).__name__ == "Conv1D"
        axis = 1 if columns and parameter.dim() == 2 else 0
        with torch.no_grad():
            parameter.transpose(0, axis)[_positions(graph.axes[parameter_name][axis], name, dropped)] = 0


def _positions(axis: Axis, name: str, dropped: Tensor) -> Tensor:
    """Return which positions of an axis belong to dropped channels of a group."""
    pieces = []
    for span in axis:
        piece = dropped if span.group == name else torch.zeros(span.size, dtype=torch.bool)
        piece = piece.repeat_interleave(span.block)
        if isinstance(span, NestedSpan):
            piece = piece | _positions(span.within, name, dropped).repeat(span.size)
        pieces.append(piece)
    return torch.cat(pieces)


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw every parameter and statistic at random, in double precision: no zero, one or symmetry hides a mistake."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 1 / max(1, parameter[0].numel()) ** 0.5 if parameter.dim() > 1 else 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * spread)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_var is not None:
                module.running_mean.copy_(torch.randn(module.num_features, generator=generator) * 0.3)
                module.running_var.copy_(torch.rand(module.num_features, generator=generator) + 0.5)
    return model


def check_exact(model: nn.Module, example: Any, *, prune: float = 0.5, **options: Any) -> se.ChannelGraph:
    """Trace a network, extract two random subnets, compare their outputs; return the graph."""
    graph = se.trace(model, example, **options)
    for group in graph.groups:
        assert group.prunable or group.reason
    if not graph.prunable:
        return graph
    for subnet in random_subnets(graph, prune, members=2):
        small, masked = se.extract(model, graph, subnet), without_channels(model, graph, subnet)
        assert sum(p.numel() for p in small.parameters()) == graph.num_parameters(subnet.counts)
        for training in (False, True):
            if training and _is_random(model):
                continue
            with torch.no_grad():
                ours, theirs = (call(net.train(training), example) for net in (small, masked))
            for one, other in zip(_tensors(ours), _tensors(theirs), strict=True):
                torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
    return graph


def _tensors(outputs: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _is_random(model: nn.Module) -> bool:
    """Tell whether the network draws masks whose shape depends on the channels: dropout and stochastic depth."""
    names = {type(module).__name__ for module in model.modules()}
    return any("Dropout" in name or "Stochastic" in name for name in names)
