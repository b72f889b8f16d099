"""Precision of forward and backward passes: what "auto" means on a device."""

from __future__ import annotations

from typing import Literal

import torch

Precision = Literal["auto", "float32", "bfloat16"]


def resolve_precision(precision: Precision, device: torch.device) -> Literal["float32", "bfloat16"]:
    """Return the precision of passes on a device: of "auto" bfloat16 on a GPU that has it, float32 elsewhere."""
    if precision != "auto":
        return precision
    has_bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if has_bfloat16 else "float32"
