"""Where a captured step gets its batch from: tensors that stay where they are, and a counter on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from structured_ensembles.data.augmentation import Augmentation, augment, draw_crops
from structured_ensembles.data.dataset import Data
from structured_ensembles.data.drawing import Seed, shuffled
from structured_ensembles.data.splits import Batch, Split, TensorSplit, batch_sizes


class Feed(Protocol):
    """The batches of a split, one after the other."""

    sizes: tuple[int, ...]  # of the batches, as far as they are known beforehand; the most common first
    step: Tensor  # the number of the batch in its epoch, shape (1,)

    def epoch(self, seed: Seed | None) -> Iterator[int]:
        """Go through the split, in an order drawn from `seed` if there is one; gives the size of each batch."""
        ...

    def batch(self, size: int) -> Batch:
        """The current batch, as a network gets it: what a captured step begins with. Whoever takes it moves `step`."""
        ...


class TableFeed:
    """Of a split in memory: an order and the crops of a whole epoch, drawn on the device and cut by the counter.

    even: as many batches of nearly equal size, the first ones having one more; else the last one has what is left.
    step: a counter that several feeds of the same split share; by default the feed has its own.
    """

    def __init__(
        self,
        split: TensorSplit,
        data: Data,
        size: int,
        augmentation: Augmentation,
        dtype: torch.dtype,
        even: bool = False,
        step: Tensor | None = None,
    ) -> None:
        self.split, self.data, self.augmentation, self.dtype = split, data, augmentation, dtype
        self.batches = batch_sizes(len(split), size)
        if even:
            least, longer = divmod(len(split), len(self.batches))
            self.batches = [least + (number < longer) for number in range(len(self.batches))]
        self.starts = torch.tensor([0, *accumulate(self.batches)], device=split.index.device)
        self.sizes: tuple[int, ...] = tuple(size for size, _ in Counter(self.batches).most_common())
        self.step = torch.zeros(1, dtype=torch.int64, device=split.index.device) if step is None else step
        self.order = split.index.clone()
        self.crops = self._crops(0)

    def epoch(self, seed: Seed | None) -> Iterator[int]:
        self.step.zero_()
        if seed is not None:
            self.shuffle(seed, (*seed, 1) if isinstance(seed, tuple) else (seed, 1))
        yield from self.batches

    def shuffle(self, order: Seed, crops: Seed) -> None:
        """Draw the order of an epoch and its crops, each from a seed."""
        self.order.copy_(shuffled(self.split.index, order))
        if self.crops is not None:
            drawn = self._crops(crops)
            assert drawn is not None
            self.crops.copy_(drawn)

    def batch(self, size: int) -> Batch:
        places = self.starts[self.step] + torch.arange(size, device=self.step.device)
        rows = self.order[places]
        crops = None if self.crops is None else self.crops[places]
        return _ready(self.data, augment(self.split.inputs[rows], crops), self.split.targets[rows], self.dtype)

    def _crops(self, seed: Seed) -> Tensor | None:
        shape = tuple(self.split.inputs.shape[1:])
        return draw_crops(self.augmentation, shape, len(self.split), seed, self.step.device)


class StreamFeed:
    """Of a loader: each batch is copied to a place where the captured step finds it."""

    def __init__(self, split: Split, data: Data, size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.split, self.data, self.size, self.device, self.dtype = split, data, size, device, dtype
        self.places: dict[int, Batch] = {}  # by the size of the batch
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
        return _ready(self.data, *self.places[size], self.dtype)

    def _put(self, inputs: Tensor, targets: Tensor) -> None:
        size = len(inputs)
        if size in self.places:
            for place, given in zip(self.places[size], (inputs, targets), strict=True):
                if place.shape != given.shape:
                    raise ValueError(
                        f"the loader gives batches of shape {tuple(given.shape)} after {tuple(place.shape)}: a CUDA "
                        "graph needs them alike; train with engine='loop'"
                    )
                place.copy_(given, non_blocking=True)
        else:
            self.places[size] = (inputs.to(self.device, copy=True), targets.to(self.device, copy=True))


def feed_for(
    split: Split,
    data: Data,
    size: int,
    device: torch.device,
    *,
    augmentation: Augmentation = "none",
    dtype: torch.dtype = torch.float32,
    even: bool = False,
) -> Feed:
    """The batches of a split of `data`, in memory (then on the device) or streamed. even: see `TableFeed`."""
    if isinstance(split, TensorSplit):
        return TableFeed(split.to(device), data, size, augmentation, dtype, even)
    return StreamFeed(split, data, size, device, dtype)


def _ready(data: Data, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> Batch:
    return data.prepare(inputs, dtype), targets.to(dtype) if targets.is_floating_point() else targets
