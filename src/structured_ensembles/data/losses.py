"""The loss of a task: what a batch of outputs costs, averaged over its samples."""

import warnings
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.common.gaussian import gaussian_nll
from structured_ensembles.data import Data
from structured_ensembles.data.target_scaling import Units, units_for

Loss = Callable[[Tensor, Tensor], Tensor]


def loss_for(data: Data, loss: Loss | None, units: Units | None = None) -> Loss:
    """The user's `loss(outputs, targets)` (a mean over the samples), or the one of the data's task.

    units: those of the network's outputs, if they are not the targets'. The user's loss sees outputs as the targets
        are, in units and in shape; the squared error and `gaussian_nll` see both as the network gives them.
    """
    if loss is gaussian_nll and data.task != "regression":
        raise ValueError("loss=gaussian_nll is for a regression: the targets of data are classes")
    if loss is None and data.task == "classification":
        return F.cross_entropy
    if loss is None or loss is gaussian_nll:
        own = mean_squared_error if loss is None else loss
        return own if units is None else lambda outputs, targets: own(outputs, units.standard(targets))
    return loss if data.task == "classification" else LikeTargets(loss, units)


def learned_units(networks: Sequence[nn.Module], data: Data, loss: Loss | None) -> Units | None:
    """Choose the units in which networks learn the targets; None for the targets' own, as with a user's loss."""
    ours = loss is None or loss is gaussian_nll
    return units_for(networks, data, gaussian=loss is gaussian_nll) if ours else None


class LikeTargets(nn.Module):
    """Call a user's loss, which may be a module itself, with outputs in the units of the targets, and in their shape.

    A column of outputs (batch, 1) minus a row of targets (batch,) is a matrix, whose mean is no error at all: such a
    loss gets a row. One that takes the column apart itself gets the column.
    """

    def __init__(self, loss: Loss, units: Units | None = None) -> None:
        super().__init__()
        self.loss, self.units = loss, units
        self.broadcasts: bool | None = None  # found out when it matters

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.units is not None:
            outputs = self.units.restore(outputs)
        if outputs.shape != targets.shape and outputs.numel() == targets.numel():
            if self.broadcasts is None:
                self.broadcasts = self._tried(outputs.detach(), targets)
            if self.broadcasts:
                outputs = outputs.view_as(targets)
        return self.loss(outputs, targets)

    @torch.no_grad()
    def _tried(self, outputs: Tensor, targets: Tensor) -> bool:
        """Find out whether the loss of outputs as they are is another one than in the shape of the targets."""
        try:
            shaped = self.loss(outputs.view_as(targets), targets)
        except Exception:
            return False
        try:
            with warnings.catch_warnings(action="ignore"):  # torch's, of this very thing
                return not torch.allclose(self.loss(outputs, targets), shaped)
        except Exception:
            return True


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
