"""The loss of a task: what a batch of outputs costs, averaged over its samples."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from structured_ensembles.data import Data
from structured_ensembles.units import Units

Loss = Callable[[Tensor, Tensor], Tensor]


def loss_for(data: Data, loss: Loss | None, units: Units | None = None) -> Loss:
    """The user's `loss(outputs, targets)` (a mean over the samples), or the one of the data's task.

    units: those of the network's outputs, if they are not the targets'. The user's loss sees outputs as the targets
        are; the squared error sees both as the network gives them.
    """
    own = loss or (F.cross_entropy if data.task == "classification" else mean_squared_error)
    if units is None:
        return own
    if loss is None:
        return lambda outputs, targets: own(outputs, units.standard(targets))
    return lambda outputs, targets: own(units.restored(outputs), targets)


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """As torch's, but a column of outputs (batch, 1) may meet a row of targets (batch,)."""
    if outputs.numel() != targets.numel():
        raise ValueError(
            f"the model gives {tuple(outputs.shape[1:])} for a sample, but targets are {tuple(targets.shape[1:])}: a "
            "regression, as targets are floats; for classes give whole numbers, or task='classification'"
        )
    return F.mse_loss(outputs, targets.view_as(outputs))


def member_losses(loss: Loss, outputs: Tensor, targets: Tensor, members: int) -> Tensor:
    """The loss of each member, shape (members,), from rows grouped by member: (members * rows, …) and targets alike."""
    parts = zip(outputs.chunk(members), targets.chunk(members), strict=True)
    return torch.stack([_averaged(loss(own, target)) for own, target in parts])


def mean_loss(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of stacked outputs (members, batch, …), each compared with the same targets (batch, …)."""
    if len(outputs) == 1:
        return _averaged(loss(outputs[0], targets))
    return torch.stack([_averaged(loss(own, targets)) for own in outputs]).mean()


def _averaged(cost: Tensor) -> Tensor:
    if cost.numel() != 1:
        raise ValueError(f"loss must give one number, a mean over the samples, not {tuple(cost.shape)}")
    return cost if cost.dim() == 0 else cost.reshape(())
