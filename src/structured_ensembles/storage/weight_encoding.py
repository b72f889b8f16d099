"""Weights in fewer bits: float16, or int8 with one scale per output channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Storage = Literal["float32", "float16", "int8"]
SCALE = "#scale"  # suffix of the scales of a tensor stored as int8


def encode_tensor(name: str, tensor: Tensor, dtype: Storage) -> dict[str, Tensor]:
    """Convert a tensor to the type it is stored in; int8 comes with a scale per output channel."""
    if not tensor.is_floating_point() or tensor.dim() < 2 or not tensor.numel() or dtype == "float32":
        return {name: tensor.clone()}
    if dtype == "float16":
        half = tensor.half()
        return {name: half if bool(half.isfinite().all()) else tensor.float()}
    if not bool(tensor.isfinite().all()):  # such as a mask of -inf, which has no steps
        return {name: tensor.clone()}
    scale = tensor.float().flatten(1).abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    steps = (tensor.float() / scale.view(-1, *[1] * (tensor.dim() - 1))).round().clamp(-127, 127)
    return {name: steps.to(torch.int8), name + SCALE: scale}


def decode_tensors(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert stored weights back to the dtype of the vectors, which are stored as they are."""
    vector_dtypes = {tensor.dtype for name, tensor in stored.items() if tensor.dim() == 1 and not name.endswith(SCALE)}
    floats = [vector_dtype for vector_dtype in vector_dtypes if vector_dtype.is_floating_point]
    dtype = floats[0] if len(floats) == 1 else torch.float32
    restored = {}
    for name, tensor in stored.items():
        if name.endswith(SCALE):
            continue
        if name + SCALE in stored:
            if tensor.dim() < 2 or stored[name + SCALE].shape != tensor.shape[:1]:
                raise ValueError(f"{name} has {stored[name + SCALE].numel()} scales for the shape {list(tensor.shape)}")
            scale = stored[name + SCALE].view(-1, *[1] * (tensor.dim() - 1))
            restored[name] = (tensor.float() * scale).to(dtype)
        else:
            restored[name] = tensor.to(dtype) if tensor.dtype == torch.float16 else tensor
    return restored
