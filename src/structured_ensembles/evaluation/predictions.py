"""An ensemble's outputs and the truth, in one pass over a split."""

import torch
from torch import Tensor

from structured_ensembles.data import Split
from structured_ensembles.ensemble import Ensemble


def predictions(ensemble: Ensemble, split: Split, batch_size: int = 512) -> tuple[Tensor, Tensor]:
    """Logits (members, samples, classes) and targets (samples, …), in the same order, on the CPU.

    One pass, because a streamed split may come in another order the next time.
    """
    outputs, truth = [], []
    for inputs, targets in split.batches(batch_size):
        outputs.append(ensemble.logits(inputs, batch_size))
        truth.append(targets.cpu())
    return torch.cat(outputs, dim=1), torch.cat(truth)
