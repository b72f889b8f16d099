"""Ranking metrics: how well a score separates two kinds of samples."""

import math

import torch
from torch import Tensor


def auroc(scores: Tensor, positive: Tensor) -> float:
    """Compute the chance that a positive sample has a higher score than a negative one, ties counting half.

    scores: (samples,). positive: booleans (samples,). NaN if all samples are of one kind, or a score is NaN.
    """
    if bool(scores.isnan().any()):
        return math.nan
    values, index, counts = scores.double().unique(return_inverse=True, return_counts=True)
    positives = torch.zeros_like(values).index_add_(0, index, positive.double())
    negatives = counts - positives
    lower = negatives.cumsum(0) - negatives
    pairs = positives.sum() * negatives.sum()
    return float((positives * (lower + negatives / 2)).sum() / pairs)


def false_acceptance(known: Tensor, foreign: Tensor) -> float:
    """Compute the share of foreign samples accepted by the threshold that accepts 95 % of the known ones (FPR95).

    known, foreign: scores (samples,), low for samples to accept. NaN without samples of each kind, or if a score is.
    It is torch-uncertainty's `FPR95` with the known samples as positives, as in ODIN (Liang et al. 2018). OpenOOD and
    torch-uncertainty's own routine take the foreign ones as positives: `false_alarms`.
    """
    if len(known) == 0 or len(foreign) == 0 or bool(known.isnan().any()) or bool(foreign.isnan().any()):
        return math.nan
    accepted = math.ceil(0.95 * len(known) - 1e-9)  # the tolerance keeps a rounding error from asking for one more
    threshold = known.double().sort().values[max(accepted, 1) - 1]
    return float((foreign.double() <= threshold).double().mean())


def false_alarms(known: Tensor, foreign: Tensor) -> float:
    """Compute the share of known samples rejected when at least 95 % of the foreign ones are.

    known, foreign: scores (samples,), high for samples to reject. NaN without samples of each kind.
    """
    return false_acceptance(-foreign, -known)


def mean_over_ties(scores: Tensor, values: Tensor) -> Tensor:
    """Replace each value by the mean over the samples of the same score; scores, values and result: (samples,)."""
    distinct, index, counts = scores.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(distinct), dtype=values.dtype, device=values.device).index_add_(0, index, values)
    return (sums / counts)[index]
