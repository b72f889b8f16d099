"""Inputs of a network: one tensor, a tuple of tensors (positional) or a dict of tensors (keyword arguments)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.common.outputs import pick_logits

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]  # each (batch, …)
Shape = tuple[int, ...] | tuple[tuple[int, ...], ...] | dict[str, tuple[int, ...]]  # of one sample


def call(network: nn.Module | Callable[..., Any], inputs: Inputs) -> Any:
    """Run a network on a batch; return its logits where it returns more than those, see `pick_logits`."""
    if isinstance(inputs, Tensor):
        return pick_logits(network(inputs))
    positional, keywords = call_arguments(inputs)
    return pick_logits(network(*positional, **keywords))


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments that a network gets for a batch."""
    if isinstance(inputs, dict):
        return (), inputs
    return inputs if isinstance(inputs, tuple) else (inputs,), {}


def batch_from(positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Return the batch that a network was called with: the inverse of `call_arguments`."""
    if positional and keywords:
        raise TypeError("several inputs must be all positional or all keyword arguments")
    if keywords:
        return dict(keywords)
    return positional[0] if len(positional) == 1 else positional


def map_inputs(function: Callable[..., Any], inputs: Any, *others: Any) -> Any:
    """Apply a function to each input of a batch (and the same one of `others`); return the same structure."""
    if isinstance(inputs, dict):
        return {name: function(value, *(other[name] for other in others)) for name, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(function(*values) for values in zip(inputs, *others, strict=True))
    return function(inputs, *others)


def tensors_in(inputs: Inputs) -> list[Tensor]:
    """List the inputs, in their order."""
    if isinstance(inputs, Tensor):
        return [inputs]
    return list(inputs.values() if isinstance(inputs, dict) else inputs)


def batch_size(inputs: Inputs) -> int:
    """Return the number of samples in a batch."""
    return len(tensors_in(inputs)[0])


def select_rows(inputs: Inputs, rows: Any) -> Any:
    """Select samples of a batch: `rows` is a slice or a tensor of indices."""
    return map_inputs(lambda tensor: tensor[rows], inputs)


def join_batches(batches: Sequence[Inputs]) -> Any:
    """Concatenate batches along the batch dimension."""
    return map_inputs(lambda *tensors: torch.cat(tensors), *batches)


def move_inputs(inputs: Inputs, device: torch.device | str) -> Any:
    """Move inputs to a device."""
    return map_inputs(lambda tensor: tensor.to(device), inputs)


def clone_inputs(inputs: Inputs) -> Any:
    """Copy inputs for one network, which may change them in place while others, or the caller, still need them."""
    return map_inputs(Tensor.clone, inputs)


def split_batch(inputs: Inputs, size: int) -> list[Any]:
    """Split a batch into batches of `size` samples; the last one may be smaller."""
    if isinstance(inputs, Tensor):
        return list(inputs.split(size))
    return [select_rows(inputs, slice(start, start + size)) for start in range(0, batch_size(inputs), size)]


def is_several(shape: Any) -> bool:
    """Tell whether an input shape, as `Data` and `Ensemble` have it, is of several inputs."""
    return isinstance(shape, dict) or (isinstance(shape, tuple) and any(isinstance(size, tuple) for size in shape))


def check_one_tensor(outputs: Any) -> Tensor:
    """Return a model's outputs, as `call` gives them; raise a TypeError unless they are one tensor."""
    if not isinstance(outputs, Tensor):
        name = type(outputs).__name__
        raise TypeError(
            f"model must return one tensor (batch, …), or several of which one is named 'logits', not a {name}: wrap "
            "it in a module that picks one"
        )
    return outputs
