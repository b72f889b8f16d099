"""Devices: the one to compute on, seeding its generator, and constants that stay on it."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

Device = str | torch.device

_constants: dict[tuple[tuple[float, ...], torch.device, torch.dtype], Tensor] = {}


def make_constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return these values as a tensor, shape (values,), which is made once per device and dtype.

    A copy from the host would make the GPU wait, and a CUDA graph can hold neither the copy nor a tensor that is freed.
    """
    key = (values, device, dtype)
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    if traced or key not in _constants:
        with torch.inference_mode(False):
            tensor = torch.tensor(values, device=device, dtype=dtype)
        if traced or type(tensor) is not Tensor:  # a tracer's stand-in is useless once tracing is over
            return tensor
        _constants[key] = tensor
    return _constants[key]


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of `device`; `torch.manual_seed` would seed every other GPU too."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)


def fork_generators(device: torch.device) -> AbstractContextManager[None]:
    """Restore the random states of the CPU and of `device` at the end of a block."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first tensor; the CPU for a model without tensors."""
    for parameter in model.parameters():  # only the first is looked up: every prediction asks
        return parameter.device
    for buffer in model.buffers():
        return buffer.device
    return torch.device("cpu")


def pick_device(device: Device, model: nn.Module) -> torch.device:
    """Return a device by name; "auto" is the model's device, or a GPU, if there is one, for a model on the CPU."""
    try:
        picked = device_of(model) if device == "auto" else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda', 'cuda:1' or alike, not {device!r}") from error
    if device == "auto" and picked.type == "cpu" and torch.cuda.is_available():
        picked = torch.device("cuda")
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be 'auto' or 'cpu' here, where torch finds no GPU, not {str(device)!r}")
    if picked.type == "cuda" and picked.index is None:
        picked = torch.device("cuda", torch.cuda.current_device())
    return picked
