"""Convolutions whose widths are multiples of eight.

In bfloat16, GPUs take channels eight at a time, and cuDNN is slow where their number is another, such as the 4, 7 and
13 channels that a ResNet20 has after pruning four fifths. So while a graph trains, such layers get channels of zeros on
top. They stay zero, and the others never notice them: nothing leads to them, and nothing from them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from structured_ensembles.channels import trace
from structured_ensembles.copying import device_of
from structured_ensembles.shrinking import kept_size
from structured_ensembles.training.faster import faster
from structured_ensembles.training.halves import padded


def padded_shapes(
    network: nn.Module, example: Tensor, weights: Collection[str], norms: Collection[nn.Module]
) -> dict[str, tuple[int, ...]]:
    """The shapes of those weights of convolutions that get more channels: (outputs, inputs, height, width).

    weights: the names of weights that may be of another shape than the network says.
    norms: normalisations that take more channels than they have, and give zeros for the others.
    """
    layers = dict(network.named_modules())
    own = {
        f"{name}.weight": layer.weight
        for name, layer in layers.items()
        if type(layer) is nn.Conv2d
        and layer.groups == 1
        and layer.bias is None
        and layer.weight.is_contiguous(memory_format=torch.channels_last)
        and f"{name}.weight" in weights
    }
    watched = any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers.values())
    if watched or all(weight.shape[0] % 8 == 0 for weight in own.values()):
        return {}
    try:
        graph = trace(network, example, coupled=True)
    except Exception:  # it trains as it is
        return {}
    able = set(own)
    for name, layer in layers.items():
        if isinstance(layer, nn.BatchNorm2d) and layer in norms:
            able |= {f"{name}.{tensor}" for tensor in layer.state_dict()}
    # A group grows only where nothing but these tensors hold it, a position for each channel, and no other beside it.
    fixed = {
        span.group
        for name, axes in graph.axes.items()
        for axis in axes
        for span in axis
        if name not in able or len(axis) > 1 or span.block > 1
    }
    wide = {name: size + -size % 8 for name, size in graph.prunable.items() if name not in fixed}
    shapes = {name: tuple(kept_size(axis, wide) for axis in graph.axes[name]) for name in own}
    grown = {name: shape for name, shape in shapes.items() if shape != tuple(own[name].shape)}
    return grown if grown and _stays_finite(network, example, grown) else {}


def _stays_finite(network: nn.Module, example: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether zeros lead to numbers, and so do derivatives there: those of a square root would not."""
    trial = copy.deepcopy(network).train()
    weights = {name: padded(trial.get_parameter(name).detach(), shape) for name, shape in shapes.items()}
    leaves = [weight.requires_grad_() for weight in weights.values()]
    with faster([module for module in trial.modules() if isinstance(module, nn.BatchNorm2d)]):
        outputs = functional_call(trial, weights, (example.to(device_of(trial)),), tie_weights=False)
    found = torch.autograd.grad(outputs.square().sum(), leaves, allow_unused=True)
    return all(bool(slope.isfinite().all()) for slope in found if slope is not None)
