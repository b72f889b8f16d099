"""Calibration metrics of probabilities: ECE and its variants, NLL, Brier score."""

import torch
from torch import Tensor

from structured_ensembles.evaluation.ranking import mean_over_ties


def expected_calibration_error(probabilities: Tensor, targets: Tensor, bins: int = 30) -> float:
    """Compute the ECE with bins of equal width (low, high]: probabilities (samples, classes), targets (samples,).

    The mean distance between confidence and accuracy over the bins, weighted by how many samples fall into each.
    """
    confidence, labels = probabilities.double().max(-1)
    return float(_binned_gap(confidence, (labels == targets).double(), bins))


def classwise_calibration_error(probabilities: Tensor, targets: Tensor, bins: int = 15) -> float:
    """Compute the mean ECE over the classes: probabilities (samples, classes), targets (samples,).

    For one class, the ECE compares its probability with how often it is the target (Kull et al. 2019). As in
    torch-uncertainty and torchmetrics, except for the edges: their bins are [low, high), ours (low, high] as for
    `expected_calibration_error`, so that a probability of exactly 1 shares the last bin.
    """
    by_class = enumerate(probabilities.double().T.contiguous())
    errors = [_binned_gap(confidence, (targets == label).double(), bins) for label, confidence in by_class]
    return float(torch.stack(errors).mean())


def adaptive_calibration_error(probabilities: Tensor, targets: Tensor, bins: int = 15) -> float:
    """Compute the ECE with bins of equally many samples: probabilities (samples, classes), targets (samples,).

    The samples, sorted by confidence, are cut into `bins` bins; if these cannot be equal, the first ones have one
    sample more (Nixon et al. 2019, with the confidence of the predicted class). As in torch-uncertainty,
    except for samples of the same confidence: there, which of them falls into which bin is left to the sorting; here
    each counts with the mean accuracy of all of them, so that the order of the samples does not matter. More bins than
    samples leave some empty, which count nothing.
    """
    confidence, labels = probabilities.double().max(-1)
    order = confidence.argsort(stable=True)
    gaps = (confidence - mean_over_ties(confidence, (labels == targets).double()))[order]
    return float(sum(bin_gaps.sum().abs() for bin_gaps in gaps.tensor_split(bins)) / len(targets))


def _binned_gap(confidence: Tensor, correct: Tensor, bins: int) -> Tensor:
    """Compute the ECE, shape (), of confidences (samples,) and outcomes (samples,), 0 or 1."""
    # (low, high]: a confidence on an edge belongs to the bin below; 0 belongs to the first.
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=confidence.device)
    index = (torch.bucketize(confidence, edges, right=False) - 1).clamp(0, bins - 1)
    gaps = confidence.new_zeros(bins).index_add_(0, index, confidence - correct)
    return gaps.abs().sum() / len(confidence)


def negative_log_likelihood(probabilities: Tensor, targets: Tensor) -> float:
    """Compute the mean NLL in nats; probabilities of zero count as the smallest positive float.

    probabilities: (samples, classes). targets: (samples,).
    """
    chosen = probabilities.double().gather(-1, targets[:, None]).squeeze(-1)
    return float(-chosen.clamp_min(torch.finfo(torch.float32).tiny).log().mean())


def brier_score(probabilities: Tensor, targets: Tensor) -> float:
    """Compute the mean squared distance to the one-hot targets, summed over the classes.

    probabilities: (samples, classes). targets: (samples,).
    """
    truth = torch.nn.functional.one_hot(targets, probabilities.shape[-1])
    return float((probabilities.double() - truth).square().sum(-1).mean())
