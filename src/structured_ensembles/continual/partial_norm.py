"""Batch normalisation of which some channels are finished: they keep their statistics while the others learn theirs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class PartlyFrozenNorm(nn.Module):
    """In place of a batch norm during training: `past` channels are normalised by their running statistics.

    It has the norm's own tensors under the norm's own names. past: shape (channels,).
    """

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm, past: Tensor) -> None:
        super().__init__()
        self.eps, self.momentum = norm.eps, norm.momentum
        self.weight, self.bias = norm.weight, norm.bias
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        self.register_buffer("num_batches_tracked", norm.num_batches_tracked)
        self.register_buffer("past", past.to(norm.running_mean.device), persistent=False)  # type: ignore[union-attr]

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    past: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, …) to the same shape."""
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        result, mean, variance = _Normalize.apply(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.past, self.eps
        )
        with torch.no_grad():
            self.num_batches_tracked += 1
            share = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
            count = x.numel() // x.shape[1]
            unbiased = variance * (count / max(count - 1, 1))
            for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
                running.copy_(torch.where(self.past, running, torch.lerp(running, new, share)))
        return result


class _Normalize(torch.autograd.Function):
    """One pass for the statistics, one for the result, and one backward, as in torch's own kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor,
        running_variance: Tensor,
        past: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        others = [dim for dim in range(x.dim()) if dim != 1]
        batch_variance, batch_mean = torch.var_mean(x, others, correction=0)
        mean = torch.where(past, running_mean, batch_mean)
        variance = torch.where(past, running_variance, batch_variance)
        result = F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)
        ctx.save_for_backward(x, weight, mean, (variance + eps).rsqrt(), past)
        ctx.eps = eps
        ctx.mark_non_differentiable(batch_mean, batch_variance)
        return result, batch_mean, batch_variance

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_deviation, past = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], weight is not None, weight is not None]
        gradient = gradient.contiguous()
        for_x, for_weight, for_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, None, None, mean, inverse_deviation, True, ctx.eps, wanted
        )
        if wanted[0]:
            # The statistics of finished channels are constants: nothing flows through them.
            shape = [1, -1] + [1] * (x.dim() - 2)
            scale = inverse_deviation if weight is None else inverse_deviation * weight
            for_x = torch.where(past.view(shape), gradient * scale.view(shape), for_x)
        return for_x, for_weight, for_bias, None, None, None, None
