"""Where to compute."""

import torch
from torch import nn

from structured_ensembles.copying import device_of

Device = str | torch.device


def pick_device(device: Device, model: nn.Module) -> torch.device:
    """A device by name; "auto" is the model's own, or the GPU if the model is on the CPU and there is one."""
    if device != "auto":
        return torch.device(device)
    own = device_of(model)
    return torch.device("cuda") if own.type == "cpu" and torch.cuda.is_available() else own
