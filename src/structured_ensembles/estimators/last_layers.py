"""The linear layers that compute a network's outputs: scaling their rows scales the outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from structured_ensembles.common.devices import device_of
from structured_ensembles.common.inputs import call
from structured_ensembles.methods.layers import find_called_layers
from structured_ensembles.networks.copying import clone_model, copy_for_trial, dtype_of

SAMPLES = 4  # random inputs on which the scaling is tried
TOLERANCE = 1e-2  # relative to the largest output: enough for float16


@torch.no_grad()
def find_last_layers(model: nn.Module, features: int, outputs: int) -> tuple[str, ...]:
    """Find the linear layers whose rows scale a model's outputs, one row each; empty if there are none.

    The scaling is tried, as an activation may follow, or a layer may share its weight with another.
    """
    generator = torch.Generator().manual_seed(0)
    example = torch.randn(SAMPLES, features, generator=generator).to(device_of(model), dtype_of(model))
    names = find_called_layers(model, example).last
    parameters = dict(model.named_parameters())
    for name in names:
        weight = parameters.get(f"{name}.weight")  # None if it is computed, such as by a parametrization
        if not isinstance(model.get_submodule(name), nn.Linear) or weight is None or len(weight) != outputs:
            return ()
    factors = torch.arange(1.0, outputs + 1)
    scaled = clone_model(model)
    scale_rows(scaled, names, factors)
    before, after = (call(copy_for_trial(one), example).double() for one in (model, scaled))
    difference = after - before * factors.to(before)
    return names if bool(difference.abs().max() <= TOLERANCE * after.abs().max()) else ()


@torch.no_grad()
def scale_rows(network: nn.Module, layers: Sequence[str], factors: Tensor) -> None:
    """Multiply the rows of linear layers, weights and biases, by factors (rows,), in place."""
    parameters = dict(network.named_parameters())
    for name in layers:
        for suffix, shape in (("weight", (-1, 1)), ("bias", (-1,))):
            if (parameter := parameters.get(f"{name}.{suffix}")) is not None:
                parameter.mul_(factors.to(parameter).view(shape))
