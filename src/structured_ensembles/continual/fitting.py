"""fit(): train the network of one task; every learner's tasks go through here."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.data import Data
from structured_ensembles.data.augmentation import augment, resolved
from structured_ensembles.data.splits import TensorSplit
from structured_ensembles.progress import progress
from structured_ensembles.training import Recipe


def fit(
    network: nn.Module,
    data: Data,
    recipe: Recipe,
    seed: tuple[int, ...],
    device: torch.device,
    *,
    after_step: Callable[[], None] | None = None,
    penalty: Callable[[], Tensor] | None = None,
    description: str = "train",
    quiet: bool = False,
) -> list[float]:
    """Train `network` in place, all epochs of the recipe, with the cross-entropy; returns the mean loss of each epoch.

    The optimizer is new, and randomness comes from `seed` alone. after_step: called after every step of the optimizer.
    penalty: added to the loss.
    """
    optimizer = recipe.optimizer_for(network)
    augmentation = resolved(recipe.augmentation, data.shape) if isinstance(data.train, TensorSplit) else "none"
    steps = data.num_batches("train", recipe.batch_size)
    losses = []
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        progress(description, recipe.epochs * steps, quiet) as advance,
    ):
        torch.manual_seed(derived(*seed))  # dropout
        network.train()
        for epoch in range(recipe.epochs):
            total = torch.zeros((), device=device)
            batches = data.train.batches(recipe.batch_size, (*seed, epoch), device)
            for step, (stored, targets) in enumerate(batches):
                inputs = data.prepare(augment(stored, augmentation, (*seed, epoch, step)))
                cost = F.cross_entropy(network(inputs), targets)
                loss = cost if penalty is None else cost + penalty()
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                if after_step is not None:
                    after_step()
                total += cost.detach()
                advance()
            losses.append(float(total) / steps)
            if not math.isfinite(losses[-1]):
                raise FloatingPointError(
                    f"the loss became {losses[-1]} in epoch {epoch + 1}: look for extremes in the task's data, "
                    f"or lower `rate` ({recipe.rate:g})"
                )
    network.eval()
    return losses


def derived(*seed: int) -> int:
    """One seed made of several numbers."""
    return int(np.random.default_rng(seed).integers(2**31))
