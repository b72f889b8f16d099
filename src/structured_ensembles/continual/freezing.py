"""Freezing: the neurons of past tasks never change, whatever the optimizer does.

A task trains on a copy that has only the neurons of its mask. In that copy the entries of past neurons (their incoming
weights, bias, normalisation) are put back after every step; afterwards the new neurons' entries, and no others, are
written into the shared backbone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from structured_ensembles.continual.masks import FREE, Owners
from structured_ensembles.continual.partial_norm import PartlyFrozenNorm
from structured_ensembles.networks.resizing import Axis, Kept, kept_positions

Axes = Mapping[str, Sequence[Axis]]


def past_entries(backbone: nn.Module, axes: Axes, owners: Owners, kept: Kept) -> dict[str, Tensor]:
    """Which entries of each tensor of a cut-out backbone belong to past neurons: masks that broadcast to its shape.

    axes, owners: of the whole backbone. kept: what was cut out.
    """
    found = {}
    for name, tensor in _tensors(backbone).items():
        owned = [_kept_owners(axis, owners, kept) != FREE for axis in axes[name]]
        row = row_axis(backbone, name, axes[name])
        if not owned:
            found[name] = torch.tensor(owners.rest != FREE)
        elif row is not None:
            found[name] = _along(owned[row], row, tensor.dim())
        else:  # no axis alone says whose an entry is: it is frozen where all its channels are past
            found[name] = torch.ones((), dtype=torch.bool)
            for dim, own in enumerate(owned):
                found[name] = found[name] & _along(own, dim, tensor.dim())
    return found


def freeze(backbone: nn.Module, past: Mapping[str, Tensor]) -> Callable[[], None]:
    """Prepare a cut-out backbone for training; returns what has to be called after every step.

    Tensors that are frozen as a whole get no gradient; finished channels of a batch norm keep their statistics in the
    forward pass too.
    """
    for name, module in list(backbone.named_modules()):
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.zero_()  # a cumulative average is one over this task
            own = past[f"{name}.running_mean" if name else "running_mean"]
            if bool(own.any()):
                parent, _, attribute = name.rpartition(".")
                setattr(backbone.get_submodule(parent), attribute, PartlyFrozenNorm(module, own))
    tensors = _tensors(backbone)
    guarded = []
    for name, mask in past.items():
        tensor = tensors[name]
        if isinstance(tensor, nn.Parameter) and bool(mask.all()):
            tensor.requires_grad_(False)
        elif bool(mask.any()) and tensor.is_floating_point():
            guarded.append((tensor, mask.to(tensor.device), tensor.detach().clone()))

    @torch.no_grad()
    def restore() -> None:
        for tensor, mask, value in guarded:
            torch.where(mask, value, tensor, out=tensor)

    return restore


@torch.no_grad()
def write_back(
    backbone: nn.Module,
    small: nn.Module,
    axes: Axes,
    owners: Owners,
    kept: Kept,
    past: Mapping[str, Tensor],
    seal: bool,
) -> None:
    """Write what a cut-out backbone has learned into the whole one: the entries of its new neurons.

    seal: also set the weights from neurons outside `kept` into the new neurons to zero. The task never saw them; now
        its neurons compute the same under every later mask.
    """
    learned = _tensors(small)
    for name, whole in _tensors(backbone).items():
        if not whole.is_floating_point():
            continue
        positions = [_positions(axis, kept) for axis in axes[name]]
        row = row_axis(backbone, name, axes[name])
        others = [axis for dim, axis in enumerate(axes[name]) if dim != row]
        if seal and row is not None and any(span.group in kept for axis in others for span in axis):
            new = positions[row][owners.along(axes[name][row])[positions[row]] == FREE]
            whole.index_fill_(row, new.to(whole.device), 0.0)
        mesh = tuple(_along(own, dim, whole.dim()).to(whole.device) for dim, own in enumerate(positions))
        mask = past[name].to(whole.device)
        whole[mesh] = torch.where(mask, whole[mesh], learned[name])


def row_axis(backbone: nn.Module, name: str, axes: Sequence[Axis]) -> int | None:
    """Which axis of a tensor counts the neurons that its entries belong to; None if no axis does so alone."""
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
    return dict([*module.named_parameters(), *module.named_buffers()])


def _positions(axis: Axis, kept: Kept) -> Tensor:
    positions = kept_positions(axis, kept)
    return torch.arange(sum(span.size * span.block for span in axis)) if positions is None else positions


def _kept_owners(axis: Axis, owners: Owners, kept: Kept) -> Tensor:
    return owners.along(axis)[_positions(axis, kept)]


def _along(vector: Tensor, dim: int, dims: int) -> Tensor:
    """A vector as a tensor of `dims` dimensions that broadcasts along `dim`."""
    return vector.view([-1 if own == dim else 1 for own in range(dims)])
