"""Where a captured step gets its batch from: tensors that stay where they are, and a counter on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from structured_ensembles.data import Data
from structured_ensembles.data.augmentation import Augmentation, augment, draw_crops
from structured_ensembles.data.drawing import Seed, shuffled
from structured_ensembles.data.splits import Batch, Split, TensorSplit


class Feed(Protocol):
    """The batches of a split, one after the other."""

    sizes: tuple[int, ...]  # of the batches, as far as they are known beforehand
    step: Tensor  # the number of the batch in its epoch, shape (1,)

    def epoch(self, seed: Seed | None) -> Iterator[int]:
        """Go through the split, in an order drawn from `seed` if there is one; gives the size of each batch."""
        ...

    def batch(self, size: int) -> Batch:
        """The current batch, as a network gets it: what a captured step begins with. Whoever takes it moves `step`."""
        ...


class TableFeed:
    """Of a split in memory: an order and the crops of a whole epoch, drawn on the device and cut by the counter."""

    def __init__(
        self, split: TensorSplit, data: Data, size: int, augmentation: Augmentation, shape: tuple[int, ...]
    ) -> None:
        self.split, self.data, self.size, self.augmentation, self.shape = split, data, size, augmentation, shape
        full, rest = divmod(len(split), size)
        self.sizes: tuple[int, ...] = tuple(own for own, number in ((size, full), (rest, rest)) if number)
        self.step = torch.zeros(1, dtype=torch.int64, device=split.index.device)
        self.order = split.index.clone()
        self.crops = self._crops(0)

    def epoch(self, seed: Seed | None) -> Iterator[int]:
        self.step.zero_()
        if seed is not None:
            self.order.copy_(shuffled(self.split.index, seed))
            crops = self._crops((*seed, 1) if isinstance(seed, tuple) else (seed, 1))
            if self.crops is not None and crops is not None:
                self.crops.copy_(crops)
        for start in range(0, len(self.split), self.size):
            yield min(self.size, len(self.split) - start)

    def batch(self, size: int) -> Batch:
        places = self.step * self.size + torch.arange(size, device=self.step.device)
        rows = self.order[places]
        crops = None if self.crops is None else self.crops[places]
        return self.data.prepare(augment(self.split.inputs[rows], crops)), self.split.targets[rows]

    def _crops(self, seed: Seed) -> Tensor | None:
        return draw_crops(self.augmentation, self.shape, len(self.split), seed, self.step.device)


class StreamFeed:
    """Of a loader: each batch is copied to a place where the captured step finds it."""

    def __init__(self, split: Split, data: Data, size: int, device: torch.device) -> None:
        self.split, self.data, self.size, self.device = split, data, size, device
        self.places: dict[int, Batch] = {}
        first = next(iter(split.batches(size, device=device)))
        self._put(*first)
        self.sizes: tuple[int, ...] = (len(first[0]),)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)

    def epoch(self, seed: Seed | None) -> Iterator[int]:
        self.step.zero_()
        for inputs, targets in self.split.batches(self.size, seed):
            self._put(inputs, targets)
            yield len(inputs)

    def batch(self, size: int) -> Batch:
        inputs, targets = self.places[size]
        return self.data.prepare(inputs), targets

    def _put(self, inputs: Tensor, targets: Tensor) -> None:
        size = len(inputs)
        if size in self.places:
            for place, given in zip(self.places[size], (inputs, targets), strict=True):
                place.copy_(given, non_blocking=True)
        else:
            self.places[size] = (inputs.to(self.device, copy=True), targets.to(self.device, copy=True))


def feed_for(
    split: Split, data: Data, size: int, augmentation: Augmentation, shape: tuple[int, ...], device: torch.device
) -> Feed:
    if isinstance(split, TensorSplit):
        return TableFeed(split, data, size, augmentation, shape)
    return StreamFeed(split, data, size, device)
