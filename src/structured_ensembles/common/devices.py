"""Where to compute."""

import torch
from torch import Tensor, nn

Device = str | torch.device

_kept: dict[tuple[tuple[float, ...], torch.device, torch.dtype], Tensor] = {}


def constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """These values as a tensor, shape (values,), that stays where it is.

    A copy from the host makes a GPU wait and cannot be part of a CUDA graph, which needs its tensors to stay.
    """
    key = (values, device, dtype)
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    if traced or key not in _kept:
        with torch.inference_mode(False):
            made = torch.tensor(values, device=device, dtype=dtype)
        if traced or type(made) is not Tensor:  # what stands for a tensor while a program is traced is none later
            return made
        _kept[key] = made
    return _kept[key]


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed what draws on the CPU and on `device`; `torch.manual_seed` would seed every other GPU too."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's tensors are (the CPU for a model without any)."""
    tensors = (*model.parameters(), *model.buffers())
    return tensors[0].device if tensors else torch.device("cpu")


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
