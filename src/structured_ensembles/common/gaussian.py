"""Gaussian heads: networks that give a mean and a variance for every value of a target, and ensembles of them.

A network for targets of `values` numbers ends in `2 * values` outputs: the means first, then as many raw variances, of
which softplus makes variances (Lakshminarayanan et al. 2017). `gaussian_nll` trains them; an ensemble of them is a
mixture of Gaussians, whose variance is the sum of two: the noise that the members see in the targets (aleatoric), and
the disagreement of their means for lack of data (epistemic).

model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))            # targets (samples,): one value
ensemble = se.structured_ensemble(model, data, loss=se.gaussian_nll)            # or se.train(…, loss=se.gaussian_nll)
ensemble.predict(x), ensemble.spread(x)                                         # mean and deviation of a target
gaussians = ensemble.distribution(x)
gaussians.aleatoric, gaussians.epistemic, gaussians.nll(y), gaussians.interval(0.9)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_VARIANCE = 1e-6  # in the units that networks learn in: bounds the likelihood of every sample


def moments(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a Gaussian head's raw outputs (…, 2 * values) to means and deviations, (…, values) each."""
    if outputs.shape[-1] % 2:
        raise ValueError(
            f"a Gaussian head gives a mean and a variance for every value, so an even number of outputs, not "
            f"{outputs.shape[-1]}"
        )
    means, raw = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).chunk(2, -1)
    return means, (F.softplus(raw) + MIN_VARIANCE).sqrt()


def gaussian_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the negative log-likelihood of targets under a Gaussian head, in nats; the mean over all values.

    outputs: (batch, 2 * values), the means first, then the raw variances. targets: (batch, values), or (batch,) for
    one value. As `loss=` of `train` or `structured_ensemble` it makes an ensemble that predicts distributions.
    """
    if outputs.numel() != 2 * targets.numel():
        raise ValueError(
            f"the model gives {tuple(outputs.shape[1:])} for a sample, but gaussian_nll needs a mean and a variance "
            f"for each value of a target {tuple(targets.shape[1:])}: twice as many outputs as values"
        )
    means, deviations = moments(outputs)
    return negative_log_density(means, deviations, targets.view_as(means)).mean()


def negative_log_density(means: Tensor, deviations: Tensor, targets: Tensor) -> Tensor:
    """Compute the negative log-density of Gaussians at the targets, in nats; the shapes broadcast."""
    return 0.5 * ((targets - means) / deviations).square() + deviations.log() + 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Gaussians:
    """Prediction of an ensemble with Gaussian heads: an equally weighted mixture of one Gaussian per member.

    means, deviations: (members, samples, values), in the units of the targets.
    """

    means: Tensor
    deviations: Tensor

    @classmethod
    def from_outputs(cls, outputs: Tensor) -> Gaussians:
        """Split an ensemble's outputs (members, samples, 2 * values) into means and deviations."""
        return cls(*outputs.chunk(2, -1))

    @property
    def mean(self) -> Tensor:
        """Return the mean of the mixture, (samples, values)."""
        return self.means.mean(0)

    @property
    def aleatoric(self) -> Tensor:
        """Return the noise in the targets as a deviation: the root of the members' mean variance, (samples, values)."""
        return self.deviations.square().mean(0).sqrt()

    @property
    def epistemic(self) -> Tensor:
        """Return the disagreement of the members: the deviation of their means, (samples, values)."""
        return self.means.std(0, correction=0)

    @property
    def deviation(self) -> Tensor:
        """Return the deviation of the mixture, (samples, values): its variance is aleatoric² + epistemic²."""
        return (self.aleatoric.square() + self.epistemic.square()).sqrt()

    def nll(self, targets: Any) -> Tensor:
        """Compute the mixture's negative log-likelihood of each value, in nats: (samples, values)."""
        member_nll = negative_log_density(self.means, self.deviations, self.fitting(targets))
        return math.log(len(member_nll)) - torch.logsumexp(-member_nll, 0)

    def matched_nll(self, targets: Any) -> Tensor:
        """Compute the NLL of one Gaussian with the mixture's mean and deviation, a common metric of deep ensembles."""
        return negative_log_density(self.mean, self.deviation, self.fitting(targets))

    def fitting(self, targets: Any) -> Tensor:
        """Reshape targets (samples,) or (samples, values), an array or a tensor, to the shape of the mean."""
        targets = torch.as_tensor(targets).to(self.means.dtype)
        if targets.numel() != self.means[0].numel():
            raise ValueError(
                f"targets must be {tuple(self.means.shape[1:])} as the predictions, not {tuple(targets.shape)}"
            )
        return targets.view_as(self.means[0])

    def interval(self, coverage: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return the ends (samples, values) of the interval that holds this share of the Gaussian of `matched_nll`."""
        if not 0 < coverage < 1:
            raise ValueError(f"coverage must be a share between 0 and 1, not {coverage!r}")
        multiple = math.sqrt(2) * float(torch.erfinv(torch.tensor(coverage, dtype=torch.float64)))
        mean, deviation = self.mean, self.deviation
        return mean - multiple * deviation, mean + multiple * deviation


def mean_and_spread(outputs: Tensor, gaussian: bool) -> tuple[Tensor, Tensor]:
    """Return the prediction of a regression and its deviation, (samples, …), from outputs (members, samples, …).

    Without Gaussian heads, the deviation is that of the members' outputs. With them, the outputs are means and then
    deviations, (members, samples, 2 * values), and the deviation is that of the mixture.
    """
    if not gaussian:
        return outputs.mean(0), outputs.std(0, correction=0)
    mixture = Gaussians.from_outputs(outputs)
    return mixture.mean, mixture.deviation
