"""Preparation of networks for a comparison: without randomness, with random weights, or with these perturbed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from structured_ensembles.networks.copying import clone_model, copy_with


def remove_randomness(network: nn.Module) -> nn.Module:
    """Set the rates of dropout, stochastic depth and the like to zero, in place; return the network.

    Rates are recognised by name: numbers in attributes of modules, and of their configurations, whose names speak of
    dropping; the `p` of modules that are named so. SpecAugment (wav2vec2) is turned off.
    """
    for module in network.modules():
        drops = any(word in type(module).__name__.lower() for word in ("drop", "stochasticdepth"))
        _set_rates(module, ["p"] if drops else [])
        if (config := vars(module).get("config")) is not None:
            _set_rates(config, [])
            if getattr(config, "apply_spec_augment", False):
                config.apply_spec_augment = False
    return network


def _set_rates(owner: Any, names: list[str]) -> None:
    """Set the attributes of these names, and those whose names speak of dropping, to zero if they are rates."""
    for name, value in list(vars(owner).items()):
        if (name in names or "drop" in name.lower()) and type(value) in (int, float) and 0 < value <= 1:
            setattr(owner, name, type(value)(0))


def copy_undrawn(network: nn.Module) -> nn.Module:
    """Copy a network to the CPU in double precision, its weights left for `randomize` to draw.

    Weights that nothing has written to take no memory yet: the peak of a trace is not that of a comparison.
    """

    def doubled(_: str, value: Tensor) -> Tensor:
        dtype = torch.complex128 if value.is_complex() else value.dtype
        return value.to("cpu", torch.float64 if value.is_floating_point() else dtype, copy=True)

    def undrawn(name: str, weight: Tensor) -> Tensor:
        is_float = weight.is_floating_point()
        return torch.empty_like(weight, dtype=torch.float64, device="cpu") if is_float else doubled(name, weight)

    return copy_with(network, parameter=undrawn, buffer=doubled)


@torch.no_grad()
def randomize(network: nn.Module, seed: int = 0) -> nn.Module:
    """Draw every parameter and batch norm statistic of a network on the CPU, in place and in float64; return it.

    A layer that starts at zero, such as the last norm of a residual block, would hide what is wrong with its inputs.
    Whole numbers stay, such as positions that a network keeps as a parameter.
    """
    generator = torch.Generator().manual_seed(seed)
    network.double()
    for parameter in filter(Tensor.is_floating_point, network.parameters()):
        # Deviation of a linear layer's outputs: that of its inputs
        deviation = max(1, parameter[0].numel()) ** -0.5 if parameter.dim() > 1 else 0.5
        parameter.normal_(0, deviation, generator=generator)  # in place: a layer of VGG's classifier has 800 MB
    for module in network.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None and module.running_var is not None:
            mean, variance = module.running_mean, module.running_var
            mean.copy_(torch.randn(mean.shape, generator=generator) * 0.3)
            variance.copy_(torch.rand(variance.shape, generator=generator) + 0.5)
    return network


@torch.no_grad()
def perturb_by_rounding(network: nn.Module, seed: int = 0) -> nn.Module:
    """Copy a network with every weight one rounding error larger or smaller, drawn at random.

    Its outputs differ from the network's by the noise of the network's own arithmetic.
    """
    generator = torch.Generator().manual_seed(seed)
    copied = clone_model(network)
    for parameter in copied.parameters():
        if parameter.is_floating_point():
            signs = torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
            parameter.addcmul_(
                parameter, signs.to(parameter.device, parameter.dtype), value=torch.finfo(parameter.dtype).eps
            )
    return copied
