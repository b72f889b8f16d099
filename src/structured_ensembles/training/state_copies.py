"""Copies of a network's tensors, such as those of its best epoch: made, updated in place, restored."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from structured_ensembles.networks.state import all_tensors, fill, unsaved_buffers


def copy_state(network: nn.Module) -> dict[str, Tensor]:
    """Copy all parameters and buffers of a network, by name; those that a state dict leaves out, too."""
    return {name: tensor.detach().clone() for name, tensor in all_tensors(network).items()}


def restore_state(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load what `copy_state` returned into a network; a buffer that was not set then is unset again."""
    fill(network, tensors)
    for name in unsaved_buffers(network) - tensors.keys():
        owner, _, attribute = name.rpartition(".")
        network.get_submodule(owner)._buffers[attribute] = None


@torch.no_grad()
def update_copy(copy: dict[str, Tensor], network: nn.Module) -> None:
    """Overwrite a copy with the network's tensors, in a few kernels, whatever the number of tensors."""
    state = all_tensors(network)
    for name in copy.keys() - state.keys():  # a buffer that is not set any more
        del copy[name]
    for name, tensor in state.items():
        if name not in copy or copy[name].shape != tensor.shape:  # a buffer that is new, or has grown
            copy[name] = tensor.detach().clone()
    for dtype in {tensor.dtype for tensor in state.values()}:
        names = [name for name, tensor in state.items() if tensor.dtype == dtype]
        torch._foreach_copy_([copy[name] for name in names], [state[name] for name in names])
