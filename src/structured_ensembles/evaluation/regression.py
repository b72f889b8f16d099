"""Figures of a regression: errors, likelihoods, and a loss of the user's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from structured_ensembles.common.devices import device_of
from structured_ensembles.common.gaussian import Gaussians, gaussian_nll, negative_log_density
from structured_ensembles.data.losses import LikeTargets, Loss, mean_loss
from structured_ensembles.ensemble import Ensemble


def regression_figures(outputs: Tensor, targets: Tensor) -> dict[str, float]:
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


def gaussian_figures(gaussians: Gaussians, targets: Tensor, coverage: float = 0.9) -> dict[str, float]:
    """Compute the same of Gaussian heads, with the total deviation as spread, and figures of the distributions.

    nll: of the mixture, in nats for each value; nll_matched: of one Gaussian with its mean and deviation; member_nll.
    aleatoric, epistemic: the mean of the two parts of the deviation. coverage_at_90, width_at_90: how many targets lie
    in an interval that should hold 90 % of them, and its mean width. targets: (samples, values) or (samples,).
    """
    targets = gaussians.fitting(targets)
    low, high = gaussians.interval(coverage)
    at = f"at_{100 * coverage:g}"
    return {
        **regression_figures(gaussians.means, targets),
        "spread": float(gaussians.deviation.mean()),
        "aleatoric": float(gaussians.aleatoric.mean()),
        "epistemic": float(gaussians.epistemic.mean()),
        "nll": float(gaussians.nll(targets).mean()),
        "nll_matched": float(gaussians.matched_nll(targets).mean()),
        "member_nll": float(negative_log_density(gaussians.means, gaussians.deviations, targets).mean()),
        f"coverage_{at}": float(((low <= targets) & (targets <= high)).double().mean()),
        f"width_{at}": float((high - low).mean()),
    }


@torch.no_grad()
def loss_figures(ensemble: Ensemble, loss: Loss, outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Compute the user's loss of the members' mean outputs, and the mean of the members' own losses.

    outputs: (members, samples, …), as the ensemble gives them; targets: (samples, …). Of Gaussian heads and
    `gaussian_nll` it is the likelihood of the mixture.
    """
    if ensemble.gaussian and loss is gaussian_nll:
        found = gaussian_figures(Gaussians.from_outputs(outputs), targets)
        return {"loss": found["nll"], "member_loss": found["member_nll"]}
    device = device_of(ensemble)  # where a loss may have tensors of its own, as in training
    outputs, targets = outputs.to(device), targets.to(device)
    if targets.is_floating_point():
        targets, loss = targets.to(outputs.dtype), LikeTargets(loss)
    together, each = mean_loss(loss, outputs.mean(0)[None], targets), mean_loss(loss, outputs, targets)
    return {"loss": float(together), "member_loss": float(each)}
