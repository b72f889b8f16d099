"""Figures of a regression: errors, likelihoods, and the user's loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from structured_ensembles.common.devices import device_of
from structured_ensembles.common.gaussian import Gaussians, gaussian_nll, negative_log_density
from structured_ensembles.data.losses import LikeTargets, Loss, mean_loss
from structured_ensembles.ensemble import Ensemble


def compute_regression_figures(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Compute RMSE, that of the members, and their spread from outputs (members, samples, values).

    targets: (samples, values), or (samples,). Returns none if outputs and targets differ in size.
    """
    if outputs[0].numel() != targets.numel():
        return {}
    targets = targets.view_as(outputs[0])
    errors = [float(F.mse_loss(member, targets).sqrt()) for member in outputs]
    return {
        "rmse": float(F.mse_loss(outputs.mean(0), targets).sqrt()),
        "member_rmse": sum(errors) / len(errors),
        "spread": float(outputs.std(0, correction=0).mean()),
    }


def compute_gaussian_figures(gaussians: Gaussians, targets: Tensor) -> dict[str, float]:
    """Compute the figures of Gaussian heads: as above with the total deviation as spread, and of the distributions.

    nll: of the mixture, in nats for each value; nll_matched: of one Gaussian with its mean and deviation; member_nll.
    aleatoric, epistemic: the means of the deviation's two components. coverage_at_90, width_at_90: how many targets lie
    in an interval that should hold 90 % of them, and its mean width. targets: (samples, values) or (samples,).
    """
    targets = gaussians.fitting(targets)
    low, high = gaussians.interval(0.9)
    return {
        **compute_regression_figures(gaussians.means, targets),
        "spread": float(gaussians.deviation.mean()),
        "aleatoric": float(gaussians.aleatoric.mean()),
        "epistemic": float(gaussians.epistemic.mean()),
        "nll": float(gaussians.nll(targets).mean()),
        "nll_matched": float(gaussians.matched_nll(targets).mean()),
        "member_nll": float(negative_log_density(gaussians.means, gaussians.deviations, targets).mean()),
        "coverage_at_90": float(((low <= targets) & (targets <= high)).double().mean()),
        "width_at_90": float((high - low).mean()),
    }


@torch.no_grad()
def compute_loss_figures(ensemble: Ensemble, loss: Loss, outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Compute the user's loss of the members' mean outputs, and the mean of the members' own losses.

    outputs: (members, samples, …), as the ensemble returns them; targets: (samples, …). For Gaussian heads and
    `gaussian_nll` it is the likelihood of the mixture.
    """
    if ensemble.gaussian and loss is gaussian_nll:
        figures = compute_gaussian_figures(Gaussians.from_outputs(outputs), targets)
        return {"loss": figures["nll"], "member_loss": figures["member_nll"]}
    device = device_of(ensemble)  # the loss may hold tensors there, as in training
    outputs, targets = outputs.to(device), targets.to(device)
    if targets.is_floating_point():
        targets, loss = targets.to(outputs.dtype), LikeTargets(loss)
    ensemble_loss, member_loss = mean_loss(loss, outputs.mean(0)[None], targets), mean_loss(loss, outputs, targets)
    return {"loss": float(ensemble_loss), "member_loss": float(member_loss)}
