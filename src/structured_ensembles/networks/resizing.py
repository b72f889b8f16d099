"""Removing channels from a model: every parameter and buffer is sliced, and the layers' size attributes updated."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from structured_ensembles.networks.copying import Replace, copy_with
from structured_ensembles.networks.provenance import record_base_shapes


class Span(NamedTuple):
    """A stretch of a tensor axis: the channels of one group (or of none), `block` consecutive positions per channel."""

    group: str | None
    size: int
    block: int = 1


Axis = tuple[Span, ...]
Kept = Mapping[str, Sequence[int]]


def kept_positions(axis: Axis, kept: Kept) -> Tensor | None:
    """Return the positions of `axis` that are kept, ascending, shape (kept,); None if all are."""
    if not any(span.group in kept for span in axis):
        return None
    positions, start = [], 0
    for span in axis:
        channels = np.array(kept.get(span.group or "", range(span.size)))
        positions.append((start + channels[:, None] * span.block + np.arange(span.block)).ravel())
        start += span.size * span.block
    return torch.from_numpy(np.concatenate(positions))


def kept_size(axis: Axis, counts: Mapping[str, int]) -> int:
    """Count the positions of `axis` that are left when `counts[group]` channels of each group are."""
    return sum(counts.get(span.group or "", span.size) * span.block for span in axis)


def shrink(model: nn.Module, axes: Mapping[str, Sequence[Axis]], kept: Kept) -> nn.Module:
    """Copy `model` with only the `kept` channels of each group; `axes` maps every tensor's axes to groups."""

    def slice_tensor(name: str, tensor: Tensor) -> Tensor:
        result = tensor
        for dim, axis in enumerate(axes[name]):
            positions = kept_positions(axis, kept)
            if positions is not None:
                result = result.index_select(dim, positions.to(tensor.device))
        if result is tensor:
            return tensor.clone()
        # Slicing may change the memory format, such as channels-last.
        return result.contiguous(memory_format=_memory_format(tensor))

    small = _copy_resized(model, slice_tensor)
    record_base_shapes(small, model)
    return small


def resize(model: nn.Module, axes: Mapping[str, Sequence[Axis]], counts: Mapping[str, int]) -> nn.Module:
    """Copy `model` with `counts[group]` channels of each group and uninitialised tensors: only the sizes matter."""
    return _copy_resized(model, lambda name, tensor: tensor.new_empty([kept_size(axis, counts) for axis in axes[name]]))


def _copy_resized(model: nn.Module, replace: Replace) -> nn.Module:
    """Copy a model with tensors of other sizes, and update the size attributes of its layers."""
    small = copy_with(model, parameter=replace, buffer=replace)
    for module in small.modules():
        set_sizes(module)
    return small


def _memory_format(tensor: Tensor) -> torch.memory_format:
    """Return whether a tensor is channels-last or contiguous, as torch names it."""
    if tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def set_sizes(module: nn.Module) -> None:
    """Set the size attributes of a layer, such as `in_channels`, to the sizes of its tensors.

    A layer whose weight is computed (a parametrization) is skipped: it is never cut, and reading the weight would
    compute it.
    """
    if "weight" not in module._parameters:
        return
    match module:
        case nn.modules.conv._ConvTransposeNd():
            module.in_channels = module.weight.shape[0]
            module.out_channels = module.weight.shape[1] * module.groups
        case nn.modules.conv._ConvNd():
            if module.groups == module.in_channels > 1:  # depthwise
                module.groups = module.weight.shape[0] // (module.out_channels // module.in_channels)
            module.in_channels = module.weight.shape[1] * module.groups
            module.out_channels = module.weight.shape[0]
        case nn.Linear():
            module.out_features, module.in_features = module.weight.shape
        case nn.modules.batchnorm._NormBase():
            tensors = [tensor for tensor in (module.weight, module.running_mean) if tensor is not None]
            module.num_features = len(tensors[0]) if tensors else module.num_features
        case nn.PReLU():
            module.num_parameters = len(module.weight)
