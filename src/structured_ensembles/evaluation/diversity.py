"""How much the members of an ensemble differ."""

import math

import torch
from torch import Tensor

from structured_ensembles.prediction.combination import entropy_of


def diversity(logits: Tensor) -> Tensor:
    """The paper's diversity of each sample, (samples,) from 0 to 100: the entropy of softmax(mean logits) over log C.

    logits: (members, samples, classes). It is the entropy of a prediction, large also where all members agree that they
    do not know; `disagreement_matrix` and the mutual information see the members alone.
    """
    classes = logits.shape[-1]
    if classes == 1:
        return torch.zeros(logits.shape[1], dtype=torch.float64)  # log C is 0, and so is the entropy
    return 100 * entropy_of(logits.double().mean(0).softmax(-1)) / math.log(classes)


def diversity_by_outcome(logits: Tensor, correct: Tensor) -> tuple[float, float]:
    """The mean diversity of correctly (CC) and of wrongly classified samples (WC); not a number where there are none.

    logits: (members, samples, classes). correct: booleans (samples,).
    """
    values = diversity(logits)
    return float(values[correct].mean()), float(values[~correct].mean())


def disagreement_matrix(logits: Tensor) -> Tensor:
    """The share of samples that two members classify differently, (members, members); logits as above."""
    labels = logits.argmax(-1)
    return torch.stack([(labels != own).double().mean(-1) for own in labels])
