"""How well probabilities are calibrated."""

import torch
from torch import Tensor


def expected_calibration_error(probabilities: Tensor, targets: Tensor, bins: int = 30) -> float:
    """ECE with equal bins (low, high]: probabilities (samples, classes), targets (samples,).

    The mean distance between confidence and accuracy over the bins, weighted by how many samples fall into each.
    """
    confidence, labels = probabilities.double().max(-1)
    correct = (labels == targets).double()
    # (low, high]: a confidence on an edge belongs to the bin below; 0 belongs to the first.
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=confidence.device)
    index = (torch.bucketize(confidence, edges, right=False) - 1).clamp(0, bins - 1)
    gaps = confidence.new_zeros(bins).index_add_(0, index, confidence - correct)
    return float(gaps.abs().sum() / len(targets))


def negative_log_likelihood(probabilities: Tensor, targets: Tensor) -> float:
    """Mean over the samples, in nats; probabilities of zero count as the smallest positive float."""
    chosen = probabilities.double().gather(-1, targets[:, None]).squeeze(-1)
    return float(-chosen.clamp_min(torch.finfo(torch.float32).tiny).log().mean())


def brier_score(probabilities: Tensor, targets: Tensor) -> float:
    """Mean squared distance to the one-hot targets, summed over the classes."""
    truth = torch.nn.functional.one_hot(targets, probabilities.shape[-1])
    return float((probabilities.double() - truth).square().sum(-1).mean())
