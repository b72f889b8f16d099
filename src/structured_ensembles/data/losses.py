"""Losses: that of the task or the user's, averaged over samples, for one network or for stacked members."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.common.gaussian import gaussian_nll
from structured_ensembles.data import Data
from structured_ensembles.data.target_scaling import Units, fit_units

Loss = Callable[[Tensor, Tensor], Tensor]
Reduction = Literal["mean", "none"]


def check_loss(loss: Any) -> None:
    """Raise a TypeError unless `loss` is a function, or None for that of the task."""
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of (outputs, targets), not {loss!r}")


def check_training_loss(loss: Any) -> None:
    """Raise an error unless `loss` is a function, or None, without parameters that would have to be trained."""
    check_loss(loss)
    holder = loss.func if isinstance(loss, partial) else loss
    holder = getattr(holder, "__self__", holder)  # of a bound method, its object
    if not isinstance(holder, nn.Module):
        return
    trainable = [f"{name} {tuple(value.shape)}" for name, value in holder.named_parameters() if value.requires_grad]
    if trainable:
        shown = ", ".join(trainable[:3]) + (", …" if len(trainable) > 3 else "")
        raise ValueError(
            f"loss must have no parameters to train, but has {shown}: only those of the networks are trained. Make "
            "them part of the network, whose outputs the loss then takes; or, if they are to stay as they are, freeze "
            "them: loss.requires_grad_(False)"
        )


def loss_for(data: Data, loss: Loss | None, units: Units | None = None) -> Loss:
    """Return the user's `loss(outputs, targets)` (a mean over the samples), or that of the data's task.

    units: those of the network's outputs, if they are not the targets'. The user's loss gets outputs in the units and
        the shape of the targets; the squared error and `gaussian_nll` get standardised targets.
    """
    if loss is gaussian_nll and data.task != "regression":
        raise ValueError("loss=gaussian_nll is for a regression: the targets of data are classes")
    if loss is None and data.task == "classification":
        return F.cross_entropy
    if loss is None or loss is gaussian_nll:
        task_loss = mean_squared_error if loss is None else loss
        return task_loss if units is None else lambda outputs, targets: task_loss(outputs, units.standardize(targets))
    return loss if data.task == "classification" else LikeTargets(loss, units)


def smoothed_cross_entropy(
    outputs: Tensor, targets: Tensor, smoothing: float = 0.0, reduction: Reduction = "mean"
) -> Tensor:
    """Compute the cross-entropy with label smoothing; outputs: (batch, classes).

    targets: labels (batch,), or probabilities (batch, classes) of blended samples; a network may have more outputs.
    reduction: over the samples; "none" gives the loss of each, (batch,).
    """
    if targets.is_floating_point():
        targets = F.pad(targets, (0, outputs.shape[1] - targets.shape[1]))
    return F.cross_entropy(outputs, targets, label_smoothing=smoothing, reduction=reduction)


def label_probabilities(labels: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Return labels (batch,) as probabilities (batch, classes), without the check that makes the host wait."""
    return (labels[:, None] == torch.arange(classes, device=labels.device)).to(dtype)


def choose_units(networks: Sequence[nn.Module], data: Data, loss: Loss | None) -> Units | None:
    """Choose the units in which networks learn the targets; None to learn them as they are, as with a user's loss."""
    is_default = loss is None or loss is gaussian_nll
    return fit_units(networks, data, gaussian=loss is gaussian_nll) if is_default else None


class LikeTargets(nn.Module):
    """A user's loss, which may be a module itself, called with outputs in the units and the shape of the targets.

    A column of outputs (batch, 1) minus a row of targets (batch,) broadcasts to a matrix, whose mean is meaningless: a
    loss that broadcasts gets a row. A loss that handles the column itself gets the column.
    """

    def __init__(self, loss: Loss, units: Units | None = None) -> None:
        super().__init__()
        self.loss, self.units = loss, units
        self.broadcasts: bool | None = None  # whether it broadcasts, tried when shapes first differ

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.units is not None:
            outputs = self.units.restore(outputs)
        if outputs.shape != targets.shape and outputs.numel() == targets.numel():
            if self.broadcasts is None:
                self.broadcasts = self._broadcasts(outputs.detach(), targets)
            if self.broadcasts:
                outputs = outputs.view_as(targets)
        return self.loss(outputs, targets)

    @torch.no_grad()
    def _broadcasts(self, outputs: Tensor, targets: Tensor) -> bool:
        """Tell whether the loss differs between outputs in their own shape and in that of the targets.

        Tried with the outputs, and with the targets in their place: if outputs are small beside the targets, an
        absolute error is about that of the targets either way.
        """
        for trial in (outputs, targets.view_as(outputs).to(outputs.dtype)):
            try:
                shaped = self.loss(trial.view_as(targets), targets)
            except Exception:
                return False
            try:
                with warnings.catch_warnings(action="ignore"):  # torch warns of the broadcast
                    if not torch.allclose(self.loss(trial, targets), shaped, equal_nan=True):
                        return True
            except Exception:
                return True
        return False


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute torch's squared error, but accept a column of outputs (batch, 1) with a row of targets (batch,)."""
    if outputs.numel() != targets.numel():
        raise ValueError(
            f"the model gives {tuple(outputs.shape[1:])} for a sample, but targets are {tuple(targets.shape[1:])}: a "
            "regression, as targets are floats; for classes give whole numbers, or task='classification'"
        )
    return F.mse_loss(outputs, targets.view_as(outputs))


def member_losses(loss: Loss, outputs: Tensor, targets: Tensor, members: int) -> Tensor:
    """Return the loss of each member, (members,), from outputs and targets grouped by member, (members * rows, …).

    Losses are at least float32, as in training.
    """
    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    pairs = zip(outputs.chunk(members), targets.chunk(members), strict=True)
    return torch.stack([_as_scalar(loss(member_outputs, member_targets)) for member_outputs, member_targets in pairs])


def mean_loss(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of stacked outputs (members, batch, …), all with the same targets (batch, …)."""
    if len(outputs) == 1:
        return _as_scalar(loss(outputs[0], targets))
    return torch.stack([_as_scalar(loss(member_outputs, targets)) for member_outputs in outputs]).mean()


def _as_scalar(cost: Tensor) -> Tensor:
    """Return a loss as a scalar; raise an error unless it is one number, as a tensor."""
    if not isinstance(cost, Tensor):
        raise TypeError(f"loss must return a tensor of one number, a mean over the samples, not {cost!r}")
    if cost.numel() != 1:
        raise ValueError(f"loss must give one number, a mean over the samples, not {tuple(cost.shape)}")
    return cost if cost.dim() == 0 else cost.reshape(())
