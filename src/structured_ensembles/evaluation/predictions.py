"""An ensemble's outputs and the truth, in one pass over a split."""

from collections.abc import Callable

import torch
from torch import Tensor

from structured_ensembles.common.devices import device_of
from structured_ensembles.data import Split
from structured_ensembles.data.dataset import as_floats
from structured_ensembles.ensemble import Ensemble

# Inputs (batch, …) as floats on the ensemble's device, targets, and the number of the first sample, to other inputs.
Change = Callable[[Tensor, Tensor, int], Tensor]


def predictions(
    ensemble: Ensemble, split: Split, batch_size: int = 512, change: Change | None = None
) -> tuple[Tensor, Tensor]:
    """Logits (members, samples, classes) and targets (samples, …), in the same order, on the CPU.

    One pass, because a streamed split may come in another order the next time.
    change: what happens to the inputs on their way, such as an attack.
    """
    outputs, truth, done = torch.empty(0), torch.empty(0), 0
    device = device_of(ensemble)
    for inputs, targets in split.batches(batch_size):
        if change is not None:
            assert isinstance(inputs, Tensor), "only images are changed"
            inputs = change(as_floats(inputs.to(device)), targets.to(device), done)  # noqa: PLW2901
        logits = ensemble.logits(inputs, batch_size)
        if done + len(targets) > len(truth):
            # Room for all of it at once: small results kept between large batches would hold on to the batches' memory.
            # A loader may give more samples than its data set has.
            room = max(len(split), done + len(targets), 2 * done)
            grown = logits.new_empty(len(logits), room, *logits.shape[2:])
            known = torch.empty(room, *targets.shape[1:], dtype=targets.dtype)
            if done:
                grown[:, :done], known[:done] = outputs[:, :done], truth[:done]
            outputs, truth = grown, known
        outputs[:, done : done + len(targets)], truth[done : done + len(targets)] = logits, targets.cpu()
        done += len(targets)
    return outputs[:, :done], truth[:done]
