"""Weights of a layer whose outputs are scaled by the members' factors, and the gradients of the factors."""

from __future__ import annotations

import torch
from torch import Tensor


def scale_weights(weight: Tensor, factors: Tensor) -> Tensor:
    """Return the members' weights (members, outputs, inputs, …), stored as the convolutions' kernels want them.

    weight: (outputs, inputs, …), which all members share. factors: (members, outputs).
    """
    outputs, inputs, *window = weight.shape
    result = weight.new_empty(len(factors), outputs, *window, inputs).movedim(-1, 2)
    return torch.mul(weight, factors.view(*factors.shape, *[1] * (weight.dim() - 1)), out=result)


def factor_gradient(of_weights: Tensor, weight: Tensor, dy: Tensor, bias: Tensor | None) -> Tensor:
    """Return the gradient of the factors, (members, outputs).

    of_weights: the gradient of the members' weights, (members, outputs, inputs, …). dy: that of the layer's outputs,
    (members × images, outputs, …). bias: (outputs,), which is scaled too.
    """
    with torch.autocast(weight.device.type, enabled=False):  # which would sum up in bfloat16
        gradient = (of_weights * weight).flatten(2).sum(2)
        if bias is None:
            return gradient
        sums = dy.unflatten(0, (len(of_weights), -1)).transpose(1, 2).flatten(2).sum(2, dtype=gradient.dtype)
        return gradient + sums * bias
