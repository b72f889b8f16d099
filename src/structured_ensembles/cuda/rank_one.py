"""Weights of members that share one but for rank-one factors, and their gradients, in few kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def member_weights(weight: Tensor, of_inputs: Tensor, of_outputs: Tensor) -> Tensor:
    """Compute what `operations.rank_one_weights` does, stored as the convolutions' kernels want it.

    weight: (outputs, inputs, …). of_inputs: (members, inputs). of_outputs: (members, outputs).
    """
    factors = _factors(weight, of_inputs, of_outputs)
    members, outputs, inputs = factors.shape[:3]
    result = weight.new_empty(members, outputs, *weight.shape[2:], inputs).movedim(-1, 2)
    return torch.mul(weight, factors, out=result)  # in float32, and rounded to the type of the weight


def factor_gradients(
    gradient: Tensor, weight: Tensor, of_inputs: Tensor, of_outputs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the shared weight and of both factors, given that of all members' weights."""
    with torch.autocast(weight.device.type, enabled=False):  # which would sum up in bfloat16
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        of_weight = (gradient * _factors(weight, of_inputs, of_outputs)).sum(0)
        products = (gradient * weight).flatten(3).sum(3) if weight.dim() > 2 else gradient * weight
        by_input = torch.bmm(of_outputs[:, None], products)[:, 0]
        by_output = torch.bmm(products, of_inputs[:, :, None])[:, :, 0]
    return of_weight, by_input, by_output


def _factors(weight: Tensor, of_inputs: Tensor, of_outputs: Tensor) -> Tensor:
    """Return the factors of each weight, (members, outputs, inputs, …) with ones for the window."""
    factors = of_outputs[:, :, None] * of_inputs[:, None, :]
    return factors.view(*factors.shape, *[1] * (weight.dim() - 2))
