"""Freezing of the neurons of past tasks, whatever the optimizer does.

A task trains on a copy that has only the neurons of its mask. In that copy the entries of past neurons (their incoming
weights, bias, norm) are restored after every step; afterwards only the new neurons' entries are written into the shared
backbone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from structured_ensembles.continual.masks import FREE, Owners
from structured_ensembles.continual.partial_norm import PartlyFrozenNorm
from structured_ensembles.networks.resizing import Axis, Kept, kept_positions

Axes = Mapping[str, Sequence[Axis]]


def find_past_entries(backbone: nn.Module, axes: Axes, owners: Owners, kept: Kept) -> dict[str, Tensor]:
    """Find the entries of past neurons in each tensor of an extracted backbone, as masks that broadcast to its shape.

    axes, owners: of the full backbone. kept: the extracted neurons.
    """
    past = {}
    for name, tensor in _tensors(backbone).items():
        owned = [_kept_owners(axis, owners, kept) != FREE for axis in axes[name]]
        row = find_row_axis(backbone, name, axes[name])
        if not owned:
            past[name] = torch.tensor(owners.rest != FREE)
        elif row is not None:
            past[name] = _along(owned[row], row, tensor.dim())
        else:  # no single axis tells the owner of an entry: it is frozen where all its channels are past
            past[name] = torch.ones((), dtype=torch.bool)
            for dim, mask in enumerate(owned):
                past[name] = past[name] & _along(mask, dim, tensor.dim())
    return past


def freeze(backbone: nn.Module, past: Mapping[str, Tensor]) -> Callable[[], None]:
    """Freeze the past entries of an extracted backbone; return the function to call after every step.

    Fully frozen tensors get no gradient; past channels of a batch norm keep their statistics in the forward pass too.
    """
    for name, module in list(backbone.named_modules()):
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.zero_()  # a cumulative average (momentum=None) covers this task only
            past_channels = past[f"{name}.running_mean" if name else "running_mean"]
            if bool(past_channels.any()):
                parent, _, attribute = name.rpartition(".")
                setattr(backbone.get_submodule(parent), attribute, PartlyFrozenNorm(module, past_channels))
    tensors = _tensors(backbone)
    partly_frozen = []
    for name, mask in past.items():
        tensor = tensors[name]
        if isinstance(tensor, nn.Parameter) and bool(mask.all()):
            tensor.requires_grad_(False)
        elif bool(mask.any()) and tensor.is_floating_point():
            partly_frozen.append((tensor, mask.to(tensor.device), tensor.detach().clone()))

    @torch.no_grad()
    def restore() -> None:
        for tensor, mask, value in partly_frozen:
            torch.where(mask, value, tensor, out=tensor)

    return restore


@torch.no_grad()
def write_back(
    backbone: nn.Module,
    extracted: nn.Module,
    axes: Axes,
    owners: Owners,
    kept: Kept,
    past: Mapping[str, Tensor],
    seal: bool,
) -> None:
    """Write the new neurons' entries of an extracted backbone into the full one, in place.

    seal: also zero the weights from neurons outside `kept` into the new neurons. The task never used them; without
        them its neurons compute the same under every later mask.
    """
    learned = _tensors(extracted)
    for name, tensor in _tensors(backbone).items():
        if not tensor.is_floating_point():
            continue
        positions = [_positions(axis, kept) for axis in axes[name]]
        row = find_row_axis(backbone, name, axes[name])
        others = [axis for dim, axis in enumerate(axes[name]) if dim != row]
        if seal and row is not None and any(span.group in kept for axis in others for span in axis):
            new_rows = positions[row][owners.along(axes[name][row])[positions[row]] == FREE]
            tensor.index_fill_(row, new_rows.to(tensor.device), 0.0)
        mesh = tuple(_along(index, dim, tensor.dim()).to(tensor.device) for dim, index in enumerate(positions))
        mask = past[name].to(tensor.device)
        tensor[mesh] = torch.where(mask, tensor[mesh], learned[name])


def find_row_axis(backbone: nn.Module, name: str, axes: Sequence[Axis]) -> int | None:
    """Return the axis that indexes the neurons owning a tensor's entries; None if no single axis does."""
    parent, _, attribute = name.rpartition(".")
    module = backbone.get_submodule(parent)
    if attribute == "weight" and isinstance(module, nn.modules.conv._ConvTransposeNd):
        return 1
    if isinstance(module, nn.modules.conv._ConvNd | nn.Linear):
        return 0
    grouped = [dim for dim, axis in enumerate(axes) if any(span.group is not None for span in axis)]
    if len(grouped) > 1:
        return None
    return grouped[0] if grouped else 0 if axes else None


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name."""
    return dict([*module.named_parameters(), *module.named_buffers()])


def _positions(axis: Axis, kept: Kept) -> Tensor:
    """Return the kept positions along an axis, int64 (positions,)."""
    positions = kept_positions(axis, kept)
    return torch.arange(sum(span.size * span.block for span in axis)) if positions is None else positions


def _kept_owners(axis: Axis, owners: Owners, kept: Kept) -> Tensor:
    """Return the owners of the kept positions along an axis, (positions,)."""
    return owners.along(axis)[_positions(axis, kept)]


def _along(vector: Tensor, dim: int, dims: int) -> Tensor:
    """View a vector as a tensor of `dims` dimensions that broadcasts along `dim`."""
    return vector.view([-1 if axis == dim else 1 for axis in range(dims)])
