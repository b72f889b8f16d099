"""How well a score tells two kinds of samples apart."""

import math

import torch
from torch import Tensor


def auroc(scores: Tensor, positive: Tensor) -> float:
    """The chance that a positive sample has a higher score than a negative one, ties counting half.

    scores: (samples,). positive: booleans (samples,). Not a number if there is only one kind.
    """
    values, index, counts = scores.double().unique(return_inverse=True, return_counts=True)
    positives = torch.zeros_like(values).index_add_(0, index, positive.double())
    negatives = counts - positives
    lower = negatives.cumsum(0) - negatives
    pairs = positives.sum() * negatives.sum()
    return float((positives * (lower + negatives / 2)).sum() / pairs)


def false_acceptance(own: Tensor, foreign: Tensor, kept: float = 0.95) -> float:
    """The share of foreign samples that pass when a threshold lets at least this share of one's own pass (FPR95).

    own, foreign: scores (samples,), low for what should pass. Not a number without samples of each kind.
    It is torch-uncertainty's `FPR95` with one's own samples as the positive ones, as ODIN (Liang et al. 2018) has it.
    OpenOOD and torch-uncertainty's own routine take the foreign ones as positive: `false_alarms`.
    """
    if len(own) == 0 or len(foreign) == 0:
        return float("nan")
    needed = math.ceil(kept * len(own) - 1e-9)  # whole samples; a rounding error must not ask for one more
    threshold = own.double().sort().values[max(needed, 1) - 1]
    return float((foreign.double() <= threshold).double().mean())


def false_alarms(own: Tensor, foreign: Tensor, detected: float = 0.95) -> float:
    """Compute the share of one's own samples rejected when at least this share of the foreign ones is.

    own, foreign: scores (samples,), high for what should be rejected. NaN without samples of each kind.
    """
    return false_acceptance(-foreign, -own, detected)


def mean_over_ties(scores: Tensor, values: Tensor) -> Tensor:
    """Replace each value by the mean over the samples of the same score; scores, values and result: (samples,)."""
    distinct, index, counts = scores.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(distinct), dtype=values.dtype, device=values.device).index_add_(0, index, values)
    return (sums / counts)[index]
