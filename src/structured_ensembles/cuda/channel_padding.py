"""Convolutions whose widths are multiples of eight.

In bfloat16, GPUs take channels eight at a time, and cuDNN is slow where their number is another, such as the 4, 7 and
13 channels that a ResNet20 has after pruning four fifths. So while a graph trains, such layers get more channels. Their
weights are zero, those that read them too, and stay so, since their derivatives are dropped: the others never notice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.dropout import _DropoutNd

from structured_ensembles.channels import trace
from structured_ensembles.common.devices import device_of
from structured_ensembles.common.inputs import Inputs, call_arguments, map_inputs
from structured_ensembles.cuda.bf16_copies import padded, part
from structured_ensembles.cuda.faster import faster, hooked
from structured_ensembles.networks.copying import clone_model
from structured_ensembles.networks.resizing import kept_size
from structured_ensembles.tracing.fake_model import first_line

Shapes = Mapping[str, tuple[int, ...]]


class PaddingError(RuntimeError):
    """Channels of zeros cannot be added, or would change what the network computes; the message says why."""


def padded_shapes(
    network: nn.Module, example: Inputs, weights: Collection[str], norms: Collection[nn.Module]
) -> Shapes:
    """The shapes of those weights of convolutions that can have more channels: (outputs, inputs, height, width).

    weights: the names of weights that may be of another shape than the network says.
    norms: normalisations that take more channels than they have, and give zeros for the others.
    Raises `PaddingError` where it cannot be told.
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
    if all(weight.shape[0] % 8 == 0 for weight in own.values()):
        return {}
    try:
        graph = trace(network, example, coupled=True)
    except Exception as error:
        raise PaddingError(f"the network cannot be traced: {first_line(error)}") from error
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
    return {name: shape for name, shape in shapes.items() if shape != tuple(own[name].shape)}


def check_padding(network: nn.Module, example: Inputs, shapes: Shapes, norms: Collection[nn.Module]) -> None:
    """Raise `PaddingError` unless the network computes the same with weights of these shapes: tried, in float64.

    `trace` has seen it with fewer channels only. What looks at widths, or changes channels of zeros, is found out here.
    """
    if hooked(network):
        raise PaddingError("it has hooks, which would see the channels of zeros")
    names = [name for name, layer in network.named_modules() if isinstance(layer, nn.BatchNorm2d) and layer in norms]
    results = []
    try:
        trial = clone_model(network).double().train()
        for layer in trial.modules():
            if isinstance(layer, _DropoutNd):
                layer.eval()
        device = device_of(trial)
        inputs = map_inputs(
            lambda own: own.to(device, torch.float64 if own.is_floating_point() else own.dtype), example
        )
        for wide in ({}, shapes):
            values = {name: padded(own.detach(), wide.get(name)) for name, own in trial.named_parameters()}
            leaves = [value.requires_grad_() for value in values.values()]
            with faster([trial.get_submodule(name) for name in names], padded=True):
                outputs = functional_call(trial, values, *call_arguments(inputs), tie_weights=False)
            gradients = torch.autograd.grad(outputs.square().sum(), leaves, allow_unused=True, materialize_grads=True)
            sizes = [own.shape for own in trial.parameters()]
            results.append([outputs, *map(part, gradients, sizes)])
        same = all(torch.allclose(one, other, rtol=1e-6, atol=1e-9) for one, other in zip(*results, strict=True))
    except Exception as error:
        raise PaddingError(f"it fails with channels of zeros: {first_line(error)}") from error
    if not same:
        raise PaddingError("it computes something else with channels of zeros")
