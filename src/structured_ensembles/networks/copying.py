"""Copies of a model with other tensors in them, so that the user's model is never touched.

Tracing needs a copy with fake tensors (no memory), the search a copy that shares the weights but has its own batch norm
statistics, extraction a copy with sliced weights. All three are one deep copy whose tensors are replaced.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.networks.copy_settings import turn_off_cache_and_layer_drop
from structured_ensembles.networks.copyable import check_copyable
from structured_ensembles.networks.modes import encoders_with_nested_tensors

Replace = Callable[[str, Tensor], Tensor]


def copy_with(model: nn.Module, parameter: Replace, buffer: Replace) -> nn.Module:
    """Copy `model` deeply, with every parameter and buffer replaced by the result of a function.

    The functions get the qualified name and the detached tensor. `requires_grad` flags, training mode, hooks and
    attributes are those of the model; a tensor that has several names (shared weights) stays shared. A model whose
    copy would still use the model's layers is refused, see `check_copyable`.
    """
    check_copyable(model)
    with torch.inference_mode(False):  # tensors made under it could not be trained
        copied = _copy_with(model, parameter, buffer)
    for encoder in encoders_with_nested_tensors(copied.modules()):
        encoder.use_nested_tensor = False
    turn_off_cache_and_layer_drop(copied)
    return copied


def _copy_with(model: nn.Module, parameter: Replace, buffer: Replace) -> nn.Module:
    """Copy a checked model, see `copy_with`."""
    memo: dict[int, object] = {}
    for name, original in model.named_parameters():
        replaced = parameter(name, _without_inference(original.detach()))
        memo[id(original)] = nn.Parameter(replaced, requires_grad=original.requires_grad)
    for name, original_buffer in model.named_buffers():
        memo[id(original_buffer)] = buffer(name, _without_inference(original_buffer.detach()))
    for module in model.modules():
        # Tensors in plain attributes, such as the result of an old-style weight norm or stored activations, may belong
        # to an autograd graph, which deepcopy refuses.
        others = [value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")]
        for tensor in _tensors_in(others):
            if id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().clone()
    try:
        return copy.deepcopy(model, memo)  # takes what the memo has instead of copying it
    except TypeError as error:
        raise TypeError(
            f"model cannot be copied, as every member is: {_uncopyable(model, memo)} refuses copy.deepcopy ({error}). "
            "Keep it outside of the model, or give its class a __deepcopy__"
        ) from error


def _uncopyable(model: nn.Module, memo: Mapping[int, object]) -> str:
    """Name the attribute of a model that cannot be copied; the model itself if none alone is to blame."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in ("_parameters", "_buffers", "_modules"):
                try:
                    copy.deepcopy(value, dict(memo))
                except TypeError:
                    return f"its attribute {f'{name}.{attribute}' if name else attribute}"
    return "it"


def _without_inference(tensor: Tensor) -> Tensor:
    """Return a tensor that autograd may use: a copy of one that was made under `torch.inference_mode`."""
    return tensor.clone() if tensor.is_inference() else tensor


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def clone_model(model: nn.Module) -> nn.Module:
    """Copy a model and all its tensors."""
    return copy_with(model, parameter=lambda _, weight: weight.clone(), buffer=lambda _, value: value.clone())


def copy_frozen(model: nn.Module) -> nn.Module:
    """Copy a model to run it unchanged: the weights share their storage and are frozen, the buffers are copies."""
    copied = copy_with(model, parameter=lambda _, weight: weight, buffer=lambda _, value: value.clone())
    for weight in copied.parameters():
        weight.requires_grad_(False)
    return copied


def copy_for_trial(model: nn.Module) -> nn.Module:
    """Copy a model frozen, in evaluation mode and without hooks, for a trial run that must leave no trace in the model.

    Where a hook changes the model's outputs, those of the copy differ.
    """
    copied = copy_frozen(model).eval()
    clear_hooks(copied)
    return copied


def clear_hooks(model: nn.Module) -> None:
    """Remove the forward hooks of a copy; those of the original stay."""
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype that a model computes with: that of its first floating-point parameter."""
    for parameter in model.parameters():  # no generator expression: torch 2.6 cannot export one
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.float32
