"""Copies of a model whose tensors are replaced on the way: how we work on a model without ever touching it.

Tracing needs a copy with fake tensors (no memory), the search a copy that shares the weights but owns its
normalisation statistics, extraction a copy with sliced weights. All three are one deep copy with other tensors in it.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Replace = Callable[[str, Tensor], Tensor]


def copy_with(model: nn.Module, parameter: Replace, buffer: Replace) -> nn.Module:
    """A deep copy of `model` in which every parameter and buffer is what the given function makes of it.

    The functions get the qualified name and the tensor, detached. `requires_grad` flags, training mode, hooks and
    attributes are those of the model; a tensor that has several names (shared weights) stays shared.
    """
    memo: dict[int, object] = {}
    for name, original in model.named_parameters():
        memo[id(original)] = nn.Parameter(parameter(name, original.detach()), requires_grad=original.requires_grad)
    for name, stored in model.named_buffers():
        memo[id(stored)] = buffer(name, stored.detach())
    for module in model.modules():
        # Tensors kept as plain attributes, such as the result of an old-style weight norm or remembered activations:
        # part of a graph, so that a deep copy would refuse them.
        kept = [value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")]
        for value in _tensors_in(kept):
            if id(value) not in memo:
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(model, memo)  # looks into the memo before it copies anything


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def clone_of(model: nn.Module) -> nn.Module:
    """A copy with tensors of its own."""
    return copy_with(model, parameter=lambda _, weight: weight.clone(), buffer=lambda _, value: value.clone())


def shadow_of(model: nn.Module) -> nn.Module:
    """A copy that shares the weights' storage, frozen, and owns its buffers: to run a model without changing it."""
    shadow = copy_with(model, parameter=lambda _, weight: weight, buffer=lambda _, value: value.clone())
    for weight in shadow.parameters():
        weight.requires_grad_(False)
    return shadow


def device_of(model: nn.Module) -> torch.device:
    """Where the model's tensors are (the CPU for a model without any)."""
    tensors = (*model.parameters(), *model.buffers())
    return tensors[0].device if tensors else torch.device("cpu")
