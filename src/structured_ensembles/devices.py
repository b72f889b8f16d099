"""Where to compute."""

import torch
from torch import nn

from structured_ensembles.copying import device_of

Device = str | torch.device


def pick_device(device: Device, model: nn.Module) -> torch.device:
    """A device by name; "auto" is the model's own, or the GPU if the model is on the CPU and there is one."""
    try:
        found = device_of(model) if device == "auto" else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda', 'cuda:1' or alike, not {device!r}") from error
    if device == "auto" and found.type == "cpu" and torch.cuda.is_available():
        found = torch.device("cuda")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be 'auto' or 'cpu' here, where torch finds no GPU, not {str(device)!r}")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found
