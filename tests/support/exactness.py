"""Check that an extracted network computes what the full one computes without the dropped channels."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import structured_ensembles as se
from structured_ensembles.checking.masking import without_channels
from structured_ensembles.common.inputs import call


def random_subnets(graph: se.ChannelGraph, prune: float, members: int = 1, seed: int = 0) -> list[se.Subnet]:
    return se.select(graph, prune=prune, selection="random", members=members, seed=seed)


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
