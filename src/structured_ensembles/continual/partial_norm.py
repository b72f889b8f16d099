"""Batch norm with frozen channels, which keep their statistics while the others learn theirs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class PartlyFrozenNorm(nn.Module):
    """Stand-in for a batch norm during training: `past` channels are normalised by their running statistics.

    It shares the norm's tensors, under the same names. past: booleans (channels,).
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    new: Tensor

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm, past: Tensor) -> None:
        super().__init__()
        self.eps, self.momentum = norm.eps, norm.momentum
        self.weight, self.bias = norm.weight, norm.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        self.register_buffer("new", torch.nonzero(~past).flatten().to(self.running_mean.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (batch, channels, …); the shape stays."""
        if not self.training or len(self.new) == 0:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        result, mean, variance = _Normalize.apply(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.new, self.eps
        )
        with torch.no_grad():
            self.num_batches_tracked += 1
            share = self.momentum if self.momentum is not None else 1 / self.num_batches_tracked.to(mean.dtype)
            # Past channels keep their statistics to the bit: running + share · (running - running).
            self.running_mean.lerp_(mean, share)
            count = x.numel() // x.shape[1]
            unbiased = torch.ones_like(variance).index_fill_(0, self.new, count / max(count - 1, 1))  # as torch has it
            self.running_var.lerp_(variance * unbiased, share)
        return result


class _Normalize(torch.autograd.Function):
    """Normalisation of all channels by torch's evaluation kernels, with the extra terms of the new channels."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor,
        running_variance: Tensor,
        new: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        reduced = [dim for dim in range(x.dim()) if dim != 1]
        new_variance, new_mean = torch.var_mean(x.index_select(1, new), reduced, correction=0)
        mean = running_mean.index_copy(0, new, new_mean)
        variance = running_variance.index_copy(0, new, new_variance)
        result = F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)
        ctx.save_for_backward(x, weight, mean, variance, new)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, variance)
        return result, mean, variance

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, new = ctx.saved_tensors
        x_gradient, weight_gradient, bias_gradient = torch.ops.aten.native_batch_norm_backward(
            gradient.contiguous(), x, weight, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        # That treats all statistics as constants. Those of new channels are not: their gradient has two more terms.
        inverse = (variance[new] + ctx.eps).rsqrt()
        scale = (inverse if weight is None else inverse * weight[new]) / (x.numel() // x.shape[1])
        factor = scale * inverse * weight_gradient[new]
        offset = scale * bias_gradient[new] - factor * mean[new]
        shape = [1, -1] + [1] * (x.dim() - 2)
        x_gradient.index_add_(
            1, new, torch.addcmul(offset.view(shape), x.index_select(1, new), factor.view(shape)), alpha=-1
        )
        if weight is None:
            weight_gradient = bias_gradient = None
        return x_gradient, weight_gradient, bias_gradient, None, None, None, None
