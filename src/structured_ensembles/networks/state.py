"""The state of a model: every tensor that its outputs may depend on, whether a state dict has it or not."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from structured_ensembles.common.devices import device_of


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state dict, without other values that a module may keep there."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's state and its non-persistent buffers: every tensor that its outputs may depend on."""
    state = saved_tensors(model)
    return state | {name: buffer for name, buffer in model.named_buffers() if name not in state}


def unsaved_buffers(model: nn.Module) -> set[str]:
    """Name the non-persistent buffers, which a state dict leaves out."""
    return {name for name, _ in model.named_buffers()} - set(saved_tensors(model))


def check_fits(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless tensors have the names and shapes of a model's state.

    A non-persistent buffer may be missing, or have another shape, such as a cache that grows.
    """
    optional = unsaved_buffers(model)
    expected = {(name, tensor.shape) for name, tensor in saved_tensors(model).items()}
    actual = {(name, tensor.shape) for name, tensor in tensors.items() if name not in optional}
    if differing := {name for name, _ in expected ^ actual}:
        raise ValueError(f"{min(differing)} has another shape, or is not in both")


@torch.no_grad()
def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into a model, in place, by the names of `all_tensors`; a non-persistent buffer without one stays.

    Raises a RuntimeError if the state has other names or shapes. A non-persistent buffer may have another shape than
    the model's, such as a cache that grows.
    """
    state = model.state_dict()  # carries the modules' versions, which some of them need to load it
    unsaved = {name: tensor for name, tensor in tensors.items() if name not in state}
    unknown = {name for name in unsaved if not _is_buffer(model, name)}
    missing = {name for name, value in state.items() if isinstance(value, Tensor)} - tensors.keys()
    if unknown or missing:
        raise RuntimeError(f"{min(unknown or missing)} is not in both")
    state.update({name: tensor for name, tensor in tensors.items() if name in state})
    model.load_state_dict(state)
    for name, tensor in unsaved.items():
        owner, _, attribute = name.rpartition(".")
        buffers = model.get_submodule(owner)._buffers
        buffer = buffers[attribute]
        if buffer is not None and buffer.shape == tensor.shape:
            buffer.copy_(tensor)
        else:
            buffers[attribute] = tensor.to(device_of(model), copy=True)


def _is_buffer(model: nn.Module, name: str) -> bool:
    """Tell whether a model has registered a buffer of this name, even if it is None."""
    owner, _, attribute = name.rpartition(".")
    return attribute in getattr(dict(model.named_modules()).get(owner), "_buffers", {})
