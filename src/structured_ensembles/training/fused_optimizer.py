"""Checks for fused optimizer steps: one kernel for all parameters, several times as fast on a CPU.

On a CPU, in torch 2.13, that kernel is silently wrong where a parameter has gaps in memory, and in half precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def can_be_fused(parameter: Tensor) -> bool:
    """Tell whether the fused kernel computes a parameter's step correctly."""
    return (
        type(parameter) is nn.Parameter
        and parameter.device.type in ("cpu", "cuda")
        and parameter.dtype in (torch.float32, torch.float64)
        and not parameter.is_neg()
        and parameter.stride() == torch.empty_like(parameter, device="meta").stride()
    )


def check_gradient_layouts(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Turn fusing off where a gradient is sparse or has another memory layout than its parameter: a pre-step hook."""
    for group in optimizer.param_groups:
        group["fused"] = group["fused"] and all(
            parameter.grad is None or _same_layout(parameter, parameter.grad) for parameter in group["params"]
        )


def _same_layout(parameter: Tensor, gradient: Tensor) -> bool:
    """Tell whether a gradient is dense, with the strides of its parameter; those of axes of size 1 may differ."""
    if gradient.is_sparse:
        return False
    strides = zip(parameter.shape, parameter.stride(), gradient.stride(), strict=True)
    return all(size == 1 or of_parameter == of_gradient for size, of_parameter, of_gradient in strides)
