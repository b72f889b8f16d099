"""EpochTables: the crops and changes that are drawn for an epoch, on the device, and the counter that indexes them."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from structured_ensembles.common.inputs import Inputs
from structured_ensembles.data.augmentation import Augmentation, augment, draw_crops
from structured_ensembles.data.batch_changes import changes_for
from structured_ensembles.data.dataset import Data
from structured_ensembles.data.drawing import Seed
from structured_ensembles.data.preparation import prepare_targets
from structured_ensembles.data.splits import Batch, batch_sizes


def plan_batches(samples: int, size: int, even: bool = False) -> list[int]:
    """Return the sizes of all batches. even: as many, of nearly equal size; else the last has the remaining samples."""
    sizes = batch_sizes(samples, size)
    least, longer = divmod(samples, len(sizes))
    return [least + (number < longer) for number in range(len(sizes))] if even else sizes


class EpochTables:
    """Tables of one member's epochs at fixed addresses: a captured step reads them at the number of its batch.

    data: what the samples are of. shape: of one sample, as it is stored. batches: the sizes of an epoch's batches.
    step: the number of the current batch, shape (1,), which the tables of several members can share.
    starts: the first position of each batch in the epoch's order, (batches + 1,).
    crops: of each sample in that order, (samples, 3), or None. changes: cutout and mixup, or None.
    """

    def __init__(
        self,
        data: Data,
        shape: Any,
        batches: list[int],
        augmentation: Augmentation,
        mixup: float,
        dtype: torch.dtype,
        step: Tensor,
    ) -> None:
        self.data, self.shape, self.batches = data, shape, batches
        self.augmentation, self.mixup, self.dtype, self.step = augmentation, mixup, dtype, step
        self.starts = torch.tensor([0, *accumulate(batches)], device=step.device)
        self.sizes: tuple[int, ...] = tuple(size for size, _ in Counter(batches).most_common())
        self.crops = self._draw_crops(0)
        self.changes = changes_for(augmentation, mixup, data, sum(batches), len(batches), step.device)

    def for_member(self) -> EpochTables:
        """Return tables of the same batches, on the same counter, for one member's own crops and changes."""
        return EpochTables(self.data, self.shape, self.batches, self.augmentation, self.mixup, self.dtype, self.step)

    def shuffle(self, seed: Seed) -> None:
        """Draw the crops of an epoch in place, and its holes and shares, whose seeds are derived from this one."""
        if self.crops is not None:
            drawn = self._draw_crops(seed)
            assert drawn is not None
            self.crops.copy_(drawn)
        if self.changes is not None:
            self.changes.shuffle(seed)

    def positions(self, size: int) -> Tensor:
        """Return the positions of the current batch in the epoch's order, (size,)."""
        return self.starts[self.step] + torch.arange(size, device=self.step.device)

    def prepare(self, inputs: Inputs, targets: Tensor) -> Batch:
        """Crop, flip, normalise and change the current batch of stored samples."""
        if self.crops is not None:
            assert isinstance(inputs, Tensor)
            inputs = augment(inputs, self.crops[self.positions(len(targets))])
        inputs, targets = prepare_batch(self.data, inputs, targets, self.dtype)
        if self.changes is None:
            return inputs, targets
        return self.changes.apply(inputs, targets, self.starts[self.step], self.step)

    def _draw_crops(self, seed: Seed) -> Tensor | None:
        """Draw the crops of an epoch, (samples, 3); None without any."""
        return draw_crops(self.augmentation, self.shape, sum(self.batches), seed, self.step.device)


def prepare_batch(data: Data, inputs: Inputs, targets: Tensor, dtype: torch.dtype) -> Batch:
    """Convert a stored batch to what a network gets, and its loss."""
    return data.prepare(inputs, dtype), prepare_targets(targets, dtype)
