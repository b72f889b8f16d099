"""Take channels out of a model: slice every parameter and buffer, and set the layers' sizes right."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from structured_ensembles.networks.copying import Replace, copy_with
from structured_ensembles.networks.provenance import remember_base


class Span(NamedTuple):
    """A stretch of a tensor axis: the channels of one group (or of none), `block` consecutive positions each."""

    group: str | None
    size: int
    block: int = 1


Axis = tuple[Span, ...]
Kept = Mapping[str, Sequence[int]]


def kept_positions(axis: Axis, kept: Kept) -> Tensor | None:
    """The positions of `axis` that are left, ascending, shape (left,); None if all are."""
    if not any(span.group in kept for span in axis):
        return None
    found, start = [], 0
    for span in axis:
        channels = np.array(kept.get(span.group or "", range(span.size)))
        found.append((start + channels[:, None] * span.block + np.arange(span.block)).ravel())
        start += span.size * span.block
    return torch.from_numpy(np.concatenate(found))


def kept_size(axis: Axis, counts: Mapping[str, int]) -> int:
    """How many positions of `axis` are left when `counts[group]` channels of each group are."""
    return sum(counts.get(span.group or "", span.size) * span.block for span in axis)


def shrink(model: nn.Module, axes: Mapping[str, Sequence[Axis]], kept: Kept) -> nn.Module:
    """A copy of `model` with only the `kept` channels of each group; `axes` maps every tensor's axes to groups."""

    def sliced(name: str, tensor: Tensor) -> Tensor:
        result = tensor
        for dim, axis in enumerate(axes[name]):
            positions = kept_positions(axis, kept)
            if positions is not None:
                result = result.index_select(dim, positions.to(tensor.device))
        if result is tensor:
            return tensor.clone()
        # Slicing may leave another order of strides than the original's, channels-last among them.
        return result.contiguous(memory_format=_memory_format(tensor))

    small = _copy_of_other_size(model, sliced)
    remember_base(small, model)
    return small


def resize(model: nn.Module, axes: Mapping[str, Sequence[Axis]], counts: Mapping[str, int]) -> nn.Module:
    """As `shrink`, but only the sizes are right: the tensors are empty."""
    return _copy_of_other_size(
        model, lambda name, tensor: tensor.new_empty([kept_size(axis, counts) for axis in axes[name]])
    )


def _copy_of_other_size(model: nn.Module, replace: Replace) -> nn.Module:
    small = copy_with(model, parameter=replace, buffer=replace)
    for module in small.modules():
        set_sizes(module)
    return small


def _memory_format(tensor: Tensor) -> torch.memory_format:
    if tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def set_sizes(module: nn.Module) -> None:
    """Make the attributes of a layer say what its tensors are.

    A weight that is computed (a parametrization) is left alone: its layer is never cut, and to look would be to
    compute.
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
            kept = [tensor for tensor in (module.weight, module.running_mean) if tensor is not None]
            module.num_features = len(kept[0]) if kept else module.num_features
        case nn.PReLU():
            module.num_parameters = len(module.weight)
