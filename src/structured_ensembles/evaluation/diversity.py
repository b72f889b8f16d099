"""Diversity metrics of an ensemble's members."""

import math

import torch
from torch import Tensor

from structured_ensembles.prediction.combination import entropy_of


def compute_diversity(logits: Tensor) -> Tensor:
    """Compute the paper's diversity per sample, (samples,) from 0 to 100: entropy of softmax(mean logits) over log C.

    logits: (members, samples, classes). As the entropy of the prediction it is also large where all members agree on
    an unsure prediction; `disagreement_matrix` and the mutual information measure differences of members alone.
    """
    classes = logits.shape[-1]
    if classes == 1:
        return torch.zeros(logits.shape[1], dtype=torch.float64)  # log C is 0, and so is the entropy
    return 100 * entropy_of(logits.double().mean(0).softmax(-1)) / math.log(classes)


def diversity_by_outcome(logits: Tensor, correct: Tensor) -> tuple[float, float]:
    """Compute the mean diversity of correctly (CC) and of wrongly classified samples (WC); NaN where there are none.

    logits: (members, samples, classes). correct: booleans (samples,).
    """
    values = compute_diversity(logits)
    return float(values[correct].mean()), float(values[~correct].mean())


def disagreement_matrix(logits: Tensor) -> Tensor:
    """Compute the share of samples that two members classify differently, (members, members); logits as above."""
    labels = logits.argmax(-1)
    return torch.stack([(labels != member).double().mean(-1) for member in labels])
