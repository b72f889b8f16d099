"""How well probabilities are calibrated."""

import torch
from torch import Tensor

from structured_ensembles.evaluation.ranking import mean_over_ties


def expected_calibration_error(probabilities: Tensor, targets: Tensor, bins: int = 30) -> float:
    """ECE with equal bins (low, high]: probabilities (samples, classes), targets (samples,).

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
    each = enumerate(probabilities.double().T.contiguous())
    return float(torch.stack([_binned_gap(own, (targets == label).double(), bins) for label, own in each]).mean())


def adaptive_calibration_error(probabilities: Tensor, targets: Tensor, bins: int = 15) -> float:
    """Compute the ECE with bins of equally many samples: probabilities (samples, classes), targets (samples,).

    The samples in the order of their confidence are cut into `bins` parts; if these cannot be equal, the first ones
    have one sample more (Nixon et al. 2019, with the confidence of the predicted class). As in torch-uncertainty,
    except for samples of the same confidence: there, which of them falls into which bin is left to the sorting; here
    each counts with the mean accuracy of all of them, so that the order of the samples does not matter. More bins than
    samples leave some empty, which count nothing.
    """
    confidence, labels = probabilities.double().max(-1)
    order = confidence.argsort(stable=True)
    gaps = (confidence - mean_over_ties(confidence, (labels == targets).double()))[order]
    return float(sum(part.sum().abs() for part in gaps.tensor_split(bins)) / len(targets))


def _binned_gap(confidence: Tensor, correct: Tensor, bins: int) -> Tensor:
    """Compute the ECE, shape (), of confidences (samples,) and outcomes (samples,), 0 or 1."""
    # (low, high]: a confidence on an edge belongs to the bin below; 0 belongs to the first.
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=confidence.device)
    index = (torch.bucketize(confidence, edges, right=False) - 1).clamp(0, bins - 1)
    gaps = confidence.new_zeros(bins).index_add_(0, index, confidence - correct)
    return gaps.abs().sum() / len(confidence)


def negative_log_likelihood(probabilities: Tensor, targets: Tensor) -> float:
    """Mean over the samples, in nats; probabilities of zero count as the smallest positive float."""
    chosen = probabilities.double().gather(-1, targets[:, None]).squeeze(-1)
    return float(-chosen.clamp_min(torch.finfo(torch.float32).tiny).log().mean())


def brier_score(probabilities: Tensor, targets: Tensor) -> float:
    """Mean squared distance to the one-hot targets, summed over the classes."""
    truth = torch.nn.functional.one_hot(targets, probabilities.shape[-1])
    return float((probabilities.double() - truth).square().sum(-1).mean())
