"""Where one kernel can take the whole step of an optimizer, on a CPU several times as fast, and where it must not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def can_be_fused(own: Tensor) -> bool:
    """Whether a parameter is one that the kernel takes.

    On a CPU, in torch 2.13, it is silently wrong where a parameter has gaps in memory, and in half precision.
    """
    return (
        type(own) is nn.Parameter
        and own.device.type in ("cpu", "cuda")
        and own.dtype in (torch.float32, torch.float64)
        and not own.is_neg()
        and own.stride() == torch.empty_like(own, device="meta").stride()
    )


def look_at_derivatives(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before a step: go on without that kernel where a derivative is sparse, or lies otherwise than its parameter."""
    for group in optimizer.param_groups:
        group["fused"] = group["fused"] and all(own.grad is None or _alike(own, own.grad) for own in group["params"])


def _alike(one: Tensor, other: Tensor) -> bool:
    if other.is_sparse:
        return False
    pairs = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size == 1 or here == there for size, here, there in pairs)
