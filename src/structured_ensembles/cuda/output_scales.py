"""Weights of a layer whose outputs are scaled by the members' factors, and the gradients of the factors."""

from __future__ import annotations

import torch
from torch import Tensor

from structured_ensembles.cuda.convolution import Window
from structured_ensembles.cuda.weight_gradient import weight_gradient


def scale_weights(weight: Tensor, factors: Tensor) -> Tensor:
    """Return the members' weights (members, outputs, inputs, …), stored as the convolutions' kernels want them.

    weight: (outputs, inputs, …), which all members share. factors: (members, outputs).
    """
    outputs, inputs, *window = weight.shape
    result = weight.new_empty(len(factors), outputs, *window, inputs).movedim(-1, 2)
    return torch.mul(weight, factors.view(*factors.shape, *[1] * (weight.dim() - 1)), out=result)


def factor_gradient(
    x: Tensor, dy: Tensor, scaled: Tensor, window: Window, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the gradient of the factors, (members, outputs), of a convolution.

    x: (members × images, inputs, height, width). dy: the gradient of its outputs. scaled: the members' weights. weight,
    bias: those that all members share, (outputs, inputs, …) and (outputs,); the bias is scaled too.
    """
    with torch.autocast(weight.device.type, enabled=False):  # which would sum up in bfloat16
        gradient = (weight_gradient(x, dy, scaled, window) * weight).flatten(2).sum(2)
        if bias is None:
            return gradient
        sums = dy.unflatten(0, (len(scaled), -1)).transpose(1, 2).flatten(2).sum(2, dtype=gradient.dtype)
        return gradient + sums * bias
