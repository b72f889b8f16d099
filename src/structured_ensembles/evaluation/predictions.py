"""An ensemble's outputs and the truth, in one pass over a split."""

import torch
from torch import Tensor

from structured_ensembles.data import Split
from structured_ensembles.ensemble import Ensemble


def predictions(ensemble: Ensemble, split: Split, batch_size: int = 512) -> tuple[Tensor, Tensor]:
    """Logits (members, samples, classes) and targets (samples, …), in the same order, on the CPU.

    One pass, because a streamed split may come in another order the next time.
    """
    outputs, truth, done = torch.empty(0), torch.empty(0), 0
    for inputs, targets in split.batches(batch_size):
        logits = ensemble.logits(inputs, batch_size)
        if done == 0:
            # Room for all of it at once: small results kept between large batches would hold on to the batches' memory.
            outputs = logits.new_empty(len(logits), len(split), *logits.shape[2:])
            truth = torch.empty(len(split), *targets.shape[1:], dtype=targets.dtype)
        outputs[:, done : done + len(inputs)], truth[done : done + len(inputs)] = logits, targets.cpu()
        done += len(inputs)
    return outputs[:, :done], truth[:done]
