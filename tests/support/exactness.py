"""Check that an extracted network computes what the full one computes without the dropped channels."""

import copy

import torch
from torch import Tensor, nn

import structured_ensembles as se


def random_subnets(graph: se.ChannelGraph, prune: float, members: int = 1, seed: int = 0) -> list[se.Subnet]:
    return se.select(graph, prune=prune, selection="random", members=members, seed=seed)


def without_channels(model: nn.Module, graph: se.ChannelGraph, subnet: se.Subnet) -> nn.Module:
    """Copy the full network and set the outgoing weights of every dropped channel to zero.

    The layers that read a group are those the graph names; which of their inputs are meant is worked out here anew.
    """
    masked = copy.deepcopy(model)
    for name, size, kept in subnet.groups:
        dropped = torch.tensor([channel not in kept for channel in range(size)])
        for reader in graph[name].consumers:
            weight = masked.get_submodule(reader).weight
            transposed = isinstance(masked.get_submodule(reader), nn.modules.conv._ConvTransposeNd)
            axis = 0 if transposed else 1
            columns = []
            for span in graph.axes[f"{reader}.weight"][axis]:
                own = dropped if span.group == name else torch.zeros(span.size, dtype=torch.bool)
                columns.append(own.repeat_interleave(span.block))
            with torch.no_grad():
                weight.transpose(0, axis)[torch.cat(columns)] = 0
    return masked


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


def check_exact(model: nn.Module, example: Tensor, *, coupled: bool = False, prune: float = 0.5) -> se.ChannelGraph:
    """Trace a network, extract two random subnets, compare their outputs; return the graph."""
    graph = se.trace(model, example, coupled=coupled)
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
                ours, theirs = (net.train(training)(example) for net in (small, masked))
            for one, other in zip(_tensors(ours), _tensors(theirs), strict=True):
                torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
    return graph


def _tensors(outputs: object) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else [item for item in outputs if item is not None]


def _is_random(model: nn.Module) -> bool:
    """Tell whether the network draws masks whose shape depends on the channels: dropout and stochastic depth."""
    names = {type(module).__name__ for module in model.modules()}
    return any("Dropout" in name or "Stochastic" in name for name in names)
