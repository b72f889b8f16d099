"""Cutout and mixup: changes of a whole batch after it was cropped and normalised, from tables drawn for an epoch.

Cutout (DeVries and Taylor 2017) sets a square of every image to zero, the mean colour. Mixup (Zhang et al. 2018) blends
each sample of a batch with the next one, inputs and labels alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from structured_ensembles.common.inputs import is_several
from structured_ensembles.data.augmentation import Augmentation
from structured_ensembles.data.dataset import Data
from structured_ensembles.data.drawing import Seed, draw
from structured_ensembles.data.losses import label_probabilities
from structured_ensembles.data.splits import Batch, IndexedSplit

HOLE = 2  # the side of a hole is the image's over this: 16 for 32×32


class BatchChanges:
    """Tables of an epoch's changes, one row for each member, at fixed addresses.

    holes: centres of the squares that are cut out, row and column, (members, samples, 2), in the order of the epoch.
    shares: of each sample in its own blend, the same for a whole batch, (members, batches). Both are None if not used.
    """

    def __init__(self, holes: Tensor | None, shares: Tensor | None, mixup: float = 0.0, classes: int = 0) -> None:
        self.holes, self.shares, self.mixup, self.classes = holes, shares, mixup, classes
        self.size: tuple[int, int] = (0, 0)  # height and width of an image

    def shuffle(self, seed: Seed) -> None:
        """Draw the changes of an epoch in place. seed: that of its crops, from which others are derived."""
        base = seed if isinstance(seed, tuple) else (seed,)
        if self.holes is not None:
            _, samples, _ = self.holes.shape
            rows, columns = draw((*base, 1), 2 * samples, self.holes.device).view(2, samples)
            height, width = self.size
            self.holes.copy_(torch.stack([rows % height, columns % width], dim=1))
        if self.shares is not None:
            self.shares.copy_(draw_shares(self.mixup, (*base, 2), self.shares.shape[1]))

    def apply(self, inputs: Any, targets: Tensor, first: int | Tensor, step: int | Tensor) -> Batch:
        """Change a batch of every member; return it with labels as probabilities if samples are blended.

        inputs: (members × size, …), targets: (members × size,), member by member. first: the batch's first sample in
        the order of the epoch. step: the number of the batch; both are numbers or tensors of shape (1,).
        """
        if self.holes is not None:
            members = len(self.holes)
            rows = first + torch.arange(len(targets) // members, device=targets.device)
            inputs = cut_out(inputs, self.holes[:, rows].flatten(0, 1))
        if self.shares is not None:
            members = len(self.shares)
            shares = self.shares[:, step].reshape(members, 1).expand(members, len(targets) // members).flatten()
            inputs, targets = mix(inputs, targets, shares, members, self.classes)
        return inputs, targets


def changes_for(
    augmentation: Augmentation, mixup: float, data: Data, samples: int, batches: int, device: torch.device
) -> BatchChanges | None:
    """Return the tables of one member's changes, or None if its batches stay as they are.

    augmentation: resolved, see `resolve_augmentation`. samples, batches: of an epoch.
    """
    cutout = augmentation.endswith("cutout")
    if not cutout and not mixup:
        return None
    holes = torch.zeros(1, samples, 2, dtype=torch.int64, device=device) if cutout else None
    shares = torch.ones(1, batches, device=device) if mixup else None
    changes = BatchChanges(holes, shares, mixup, data.num_classes or 0)
    changes.size = tuple(data.shape[-2:]) if cutout else (0, 0)
    return changes


def stack_changes(of_members: Sequence[BatchChanges]) -> BatchChanges:
    """Return the changes of several members at a time; the tables of each become views of the stacked ones."""
    first = of_members[0]
    holes, shares = (
        None if getattr(first, name) is None else torch.cat([getattr(changes, name) for changes in of_members])
        for name in ("holes", "shares")
    )
    for number, changes in enumerate(of_members):
        changes.holes = None if holes is None else holes[number : number + 1]
        changes.shares = None if shares is None else shares[number : number + 1]
    stacked = BatchChanges(holes, shares, first.mixup, first.classes)
    stacked.size = first.size
    return stacked


def check_mixup(mixup: float, data: Data, has_own_loss: bool) -> None:
    """Raise a ValueError unless samples of these data can be blended."""
    reasons = {
        "a regression, whose targets are not classes": data.task != "classification",
        "a loss of your own, which gets labels and not their blends": has_own_loss,
        "Data.from_loaders: let the loader blend": not isinstance(data.train, IndexedSplit),
        "data of several inputs": is_several(data.shape),
        "inputs that are ids": bool(data.ids),
    }
    for reason, holds in reasons.items():
        if mixup and holds:
            raise ValueError(f"mixup must be 0 for {reason}, not {mixup:g}")


def draw_shares(mixup: float, seed: Seed, count: int) -> Tensor:
    """Draw shares of the Beta distribution with both parameters `mixup`, (count,): by its inverse, on the CPU."""
    from scipy.special import betaincinv

    uniform = (draw(seed, count).double() + 0.5) / 2.0**63
    return torch.from_numpy(betaincinv(mixup, mixup, uniform.numpy())).float()


def cut_out(images: Tensor, holes: Tensor) -> Tensor:
    """Set a square of every image (batch, c, h, w) to zero, around holes (batch, 2), as far as it is in the image."""
    height, width = images.shape[-2:]
    side = math.ceil(min(height, width) / HOLE)
    rows = torch.arange(height, device=images.device) - holes[:, :1] + side // 2  # (batch, h), within the hole from 0
    columns = torch.arange(width, device=images.device) - holes[:, 1:] + side // 2
    within = ((rows >= 0) & (rows < side))[:, :, None] & ((columns >= 0) & (columns < side))[:, None, :]
    return images.clone().masked_fill_(within[:, None], 0)  # in place, which keeps the memory layout


def mix(inputs: Tensor, targets: Tensor, shares: Tensor, members: int, classes: int) -> tuple[Tensor, Tensor]:
    """Blend every sample with the next one of its member's batch, the last one with the first.

    inputs: (members × size, …). targets: labels (members × size,); the result has probabilities (…, classes).
    shares: of each sample in its own blend, (members × size,). Samples are in random order, so the next is any other.
    """
    size = len(targets) // members
    numbers = torch.arange(len(targets), device=targets.device)
    partners = numbers // size * size + (numbers + 1) % size
    factors = shares.to(inputs.dtype).view(-1, *[1] * (inputs.dim() - 1))
    mixed = inputs.mul(factors).add_(inputs[partners].mul_(1 - factors))
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    probabilities = label_probabilities(targets, classes, dtype)
    weights = shares.to(dtype)[:, None]
    return mixed, probabilities * weights + probabilities[partners] * (1 - weights)
