"""Removing channels from a model: every parameter and buffer is sliced, and the layers' size attributes updated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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


class NestedSpan(NamedTuple):
    """A stretch of a tensor axis with groups inside of a group, such as the features of attention heads.

    within: the groups along the `block` positions of each channel, the same for all channels.
    """

    group: str
    size: int
    block: int
    within: Axis


CUT_SIZES = "structured_ensembles_cut_sizes"  # holds the names of attributes with sizes that were cut
Axis = tuple[Span | NestedSpan, ...]
Kept = Mapping[str, Sequence[int]]
Attributes = Mapping[tuple[str, str], Axis]  # sizes that a layer keeps as a number, by its name and the attribute's


def kept_positions(axis: Axis, kept: Kept) -> Tensor | None:
    """Return the positions of `axis` that are kept, ascending, shape (kept,); None if all are."""
    if not any(group in kept for group in groups_along(axis)):
        return None
    return torch.from_numpy(_kept_array(axis, kept))


def _kept_array(axis: Axis, kept: Kept) -> np.ndarray:
    """Return the positions of `axis` that are kept, ascending."""
    positions, start = [], 0
    for span in axis:
        channels = np.array(kept.get(span.group or "", range(span.size)))
        inside = _kept_array(span.within, kept) if isinstance(span, NestedSpan) else np.arange(span.block)
        positions.append((start + channels[:, None] * span.block + inside).ravel())
        start += span.size * span.block
    return np.concatenate(positions)


def kept_size(axis: Axis, counts: Mapping[str, int]) -> int:
    """Count the positions of `axis` that are left when `counts[group]` channels of each group are."""
    total = 0
    for span in axis:
        inside = kept_size(span.within, counts) if isinstance(span, NestedSpan) else span.block
        total += counts.get(span.group or "", span.size) * inside
    return total


def groups_along(axis: Axis) -> set[str]:
    """Return the groups that have channels along an axis."""
    groups: set[str] = set()
    for span in axis:
        groups |= {span.group} if span.group is not None else set()
        groups |= groups_along(span.within) if isinstance(span, NestedSpan) else set()
    return groups


def channel_indices(axis: Axis, group: str) -> np.ndarray:
    """Return for every position of `axis` which channel of the group it belongs to, or -1; shape (positions,)."""
    pieces = []
    for span in axis:
        if span.group == group:
            pieces.append(np.repeat(np.arange(span.size), span.block))
        elif isinstance(span, NestedSpan):
            pieces.append(np.tile(channel_indices(span.within, group), span.size))
        else:
            pieces.append(np.full(span.size * span.block, -1))
    return np.concatenate(pieces)


def shrink(
    model: nn.Module, axes: Mapping[str, Sequence[Axis]], kept: Kept, attributes: Attributes | None = None
) -> nn.Module:
    """Copy `model` with only the `kept` channels of each group; `axes` maps every tensor's axes to groups.

    attributes: sizes that layers keep as numbers, such as the groups of a convolution.
    """

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
    set_attributes(small, attributes or {}, {name: len(channels) for name, channels in kept.items()})
    record_base_shapes(small, model)
    return small


def resize(
    model: nn.Module,
    axes: Mapping[str, Sequence[Axis]],
    counts: Mapping[str, int],
    attributes: Attributes | None = None,
) -> nn.Module:
    """Copy `model` with `counts[group]` channels of each group and uninitialised tensors: only the sizes matter."""
    small = _copy_resized(
        model, lambda name, tensor: tensor.new_empty([kept_size(axis, counts) for axis in axes[name]])
    )
    set_attributes(small, attributes or {}, counts)
    return small


def _copy_resized(model: nn.Module, replace: Replace) -> nn.Module:
    """Copy a model with tensors of other sizes, and update the size attributes of its layers."""
    small = copy_with(model, parameter=replace, buffer=replace)
    for module in small.modules():
        set_sizes(module)
    return small


def set_attributes(model: nn.Module, attributes: Attributes, counts: Mapping[str, int]) -> None:
    """Set the numbers that layers keep of their sizes, and note those that their tensors do not tell."""
    for (name, attribute), axis in attributes.items():
        module, size = model.get_submodule(name), kept_size(axis, counts)
        if getattr(module, attribute) != size:
            _note_cut_size(model, _qualified(name, attribute))
        setattr(module, attribute, size)
        set_sizes(module)


def _note_cut_size(model: nn.Module, qualified_name: str) -> None:
    """Note on a network that a size was cut which its tensors do not tell."""
    setattr(model, CUT_SIZES, tuple(dict.fromkeys((*getattr(model, CUT_SIZES, ()), qualified_name))))


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
    weight = module._parameters.get("weight")
    match module:
        case nn.RNNBase() if "weight_hh_l0" in module._parameters:
            input_weight, hidden_weight = module._parameters["weight_ih_l0"], module._parameters["weight_hh_l0"]
            assert input_weight is not None
            assert hidden_weight is not None
            module.input_size, module.hidden_size = input_weight.shape[1], hidden_weight.shape[1]
        case nn.modules.batchnorm._NormBase() if "weight" in module._parameters:
            tensors = [tensor for tensor in (weight, module.running_mean) if tensor is not None]
            module.num_features = len(tensors[0]) if tensors else module.num_features
        case _ if weight is None:
            return
        case nn.modules.conv._ConvTransposeNd():
            module.in_channels = weight.shape[0]
            module.out_channels = weight.shape[1] * module.groups
        case nn.modules.conv._ConvNd():
            if module.groups == module.in_channels > 1:  # depthwise
                module.groups = weight.shape[0] // (module.out_channels // module.in_channels)
            module.in_channels = weight.shape[1] * module.groups
            module.out_channels = weight.shape[0]
        case nn.Linear():
            module.out_features, module.in_features = weight.shape
        case nn.LayerNorm() | nn.RMSNorm():
            module.normalized_shape = tuple(weight.shape)
        case nn.GroupNorm():
            module.num_channels = len(weight)
        case nn.Embedding():
            module.embedding_dim = weight.shape[1]
        case nn.PReLU():
            module.num_parameters = len(weight)
        case _ if is_matrix_layer(module):
            module.nf = weight.shape[1]  # type: ignore[assignment]


def size_attributes(network: nn.Module) -> dict[str, int]:
    """Return the sizes that layers keep as numbers which their tensors do not tell, by qualified name.

    They are the groups of grouped convolutions, even of those that look like any other after a cut, and of group norms;
    the groups of a depthwise convolution its weight tells.
    """
    needed: set[str] = set()
    for name, module in network.named_modules():
        needed |= {_qualified(name, attribute) for attribute in getattr(module, CUT_SIZES, ())}
        if isinstance(module, nn.modules.conv._ConvNd) and 1 < module.groups < module.in_channels:
            needed.add(_qualified(name, "groups"))
        elif isinstance(module, nn.GroupNorm):
            needed.add(_qualified(name, "num_groups"))
    return {name: size for name, size in _group_counts(network).items() if name in needed}


def _group_counts(network: nn.Module) -> dict[str, int]:
    """Return the numbers of groups of all convolutions and group norms, by qualified name."""
    counts = {}
    for name, module in network.named_modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            counts[_qualified(name, "groups")] = module.groups
        elif isinstance(module, nn.GroupNorm):
            counts[_qualified(name, "num_groups")] = module.num_groups
    return counts


def _qualified(module: str, attribute: str) -> str:
    """Join the name of a module, "" for the network itself, and of an attribute."""
    return f"{module}.{attribute}" if module else attribute


def restore_size_attributes(network: nn.Module, attributes: Mapping[str, Any]) -> None:
    """Set the sizes that `size_attributes` returned; raise a ValueError for any other name or value."""
    known = _group_counts(network)
    for qualified_name, value in attributes.items():
        if qualified_name not in known or type(value) is not int or not 0 < value <= known[qualified_name]:
            raise ValueError(f"{qualified_name} cannot be {value!r} in this network")
        name, _, attribute = qualified_name.rpartition(".")
        if value != known[qualified_name]:
            _note_cut_size(network, qualified_name)
        setattr(network.get_submodule(name), attribute, value)


def is_matrix_layer(module: nn.Module) -> bool:
    """Tell whether a module is a `Conv1D` of transformers: a linear layer whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and "weight" in module._parameters
