"""Combination rules: one prediction and its uncertainty from the outputs of an ensemble's members."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from structured_ensembles.common.inputs import Inputs, call, check_one_tensor
from structured_ensembles.prediction.description import format_uncertainty, format_uncertainty_line

Combine = Literal["mean", "logits", "vote"]
COMBINE = get_args(Combine)
FLOAT64_CHUNK = 4096  # samples that are computed in float64 at a time


@dataclass(frozen=True, repr=False)
class Uncertainty:
    """Three measures of an ensemble's uncertainty on each sample, shapes (samples,).

    entropy: of the combined prediction after temperature, in nats.
    mutual_information: between the class and the member, each member's prediction at the same temperature: the entropy
        of their mean minus their mean entropy. Never negative. Without a temperature it is the share of `entropy` that
        comes from the members' differences.
    disagreement: the share of pairs of members that name different classes.
    """

    entropy: Tensor
    mutual_information: Tensor
    disagreement: Tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.to_dict()[name]

    def __repr__(self) -> str:
        return format_uncertainty_line(self.to_dict())

    def __str__(self) -> str:
        return format_uncertainty(self.to_dict())

    def to_dict(self) -> dict[str, Tensor]:
        """Return the measures by name."""
        return dict(vars(self))


def member_outputs(network: nn.Module, inputs: Inputs) -> Tensor:
    """Run a network on inputs (batch, …); return the stacked outputs of its members, (members, batch, …).

    Most networks are one member. A network with the attribute `num_members` returns the outputs of so many, stacked;
    in training it may return fewer.
    """
    outputs = check_one_tensor(call(network, inputs))
    return outputs if hasattr(network, "num_members") else outputs[None]


def combine_logits(logits: Tensor, combine: Combine = "mean", temperature: float = 1.0) -> Tensor:
    """Combine the members' logits (members, samples, classes) to probabilities (samples, classes).

    temperature: of the combined prediction, not of the members; votes have none.
    """
    if combine != "vote" and temperature != 1:
        return (combine_logs(logits, combine) / temperature).softmax(-1)
    if combine == "mean":
        return logits.softmax(-1).mean(0)
    if combine == "logits":
        return logits.mean(0).softmax(-1)
    votes = nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype).mean(0)
    return votes.masked_fill(logits.isnan().any(-1).any(0)[:, None], torch.nan)  # argmax of NaN is 0


def combine_logs(logits: Tensor, combine: Combine = "mean") -> Tensor:
    """Combine to log-probabilities (samples, classes), which do not underflow; for the rules "mean" and "logits"."""
    if combine == "mean":
        return logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))
    return logits.mean(0).log_softmax(-1)


def exact_probabilities(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Combine by "mean" in float64, where confident probabilities (samples, classes) still differ from 1.

    Some samples at a time: all members' logits in float64 would take a lot of memory.
    """
    return torch.cat(
        [combine_logits(chunk.double(), "mean", temperature) for chunk in logits.split(FLOAT64_CHUNK, dim=1)]
    )


def uncertainty_of(logits: Tensor, temperature: float = 1.0, combine: Combine = "mean") -> Uncertainty:
    """Compute the uncertainty of each sample from the members' logits (members, samples, classes).

    temperature: of the combined prediction.
    combine: "logits" takes the entropy of the softmax of mean logits; the other rules that of the mean probabilities.
    """
    probabilities = (logits / temperature).softmax(-1)
    mean_entropy = entropy_of(probabilities.mean(0))
    entropy = mean_entropy if temperature == 1 else entropy_of(combine_logits(logits, "mean", temperature))
    members = len(logits)
    votes = nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).sum(0)  # (samples, classes)
    agreeing = (votes * (votes - 1)).sum(-1) / max(members * (members - 1), 1)
    disagreement = 1 - agreeing if members > 1 else torch.zeros_like(entropy)
    information = (mean_entropy - entropy_of(probabilities).mean(0)).clamp_min(0)  # rounding may make it negative
    if combine == "logits":
        entropy = entropy_of(combine_logits(logits, combine, temperature))
    return Uncertainty(entropy, information, disagreement.masked_fill(mean_entropy.isnan(), torch.nan))


def entropy_of(probabilities: Tensor) -> Tensor:
    """Compute the entropy over the last dimension, in nats."""
    return -torch.special.xlogy(probabilities, probabilities).sum(-1)
