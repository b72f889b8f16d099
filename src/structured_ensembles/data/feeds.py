"""Feeds: sources of batches for a captured step, tensors at fixed addresses and a counter on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from structured_ensembles.common.inputs import Inputs, map_inputs, move_inputs, select_rows, tensors_in
from structured_ensembles.data.augmentation import Augmentation, augment, draw_crops
from structured_ensembles.data.dataset import Data
from structured_ensembles.data.drawing import Seed, shuffle
from structured_ensembles.data.splits import Batch, Split, TensorSplit, batch_sizes


class Feed(Protocol):
    """A source of the batches of a split, one after the other."""

    sizes: tuple[int, ...]  # of the batches that are known beforehand, the most common first
    step: Tensor  # the number of the batch in its epoch, shape (1,)

    @property
    def irregular(self) -> bool:
        """Tell whether the current batch has another shape than the captured one of the same size."""
        ...

    def epoch(self, seed: Seed | None) -> Iterator[int]:
        """Go through the split, in an order drawn from `seed` if there is one; yield the size of each batch."""
        ...

    def batch(self, size: int) -> Batch:
        """Return the current batch as a network gets it, in a captured step; the caller advances `step`."""
        ...


class TableFeed:
    """Feed of a split in memory: order and crops of a whole epoch are tables on the device, indexed by the counter.

    even: as many batches, of nearly equal size; else the last batch has the remaining samples.
    step: a counter that several feeds of the same split share; by default the feed has its own.
    """

    irregular = False

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
        self.order.copy_(shuffle(self.split.index, order))
        if self.crops is not None:
            drawn = self._crops(crops)
            assert drawn is not None
            self.crops.copy_(drawn)

    def batch(self, size: int) -> Batch:
        positions = self.starts[self.step] + torch.arange(size, device=self.step.device)
        rows = self.order[positions]
        inputs = select_rows(self.split.inputs, rows)
        if self.crops is not None:
            inputs = augment(inputs, self.crops[positions])
        return _prepare(self.data, inputs, self.split.targets[rows], self.dtype)

    def _crops(self, seed: Seed) -> Tensor | None:
        shape = map_inputs(lambda tensor: tuple(tensor.shape[1:]), self.split.inputs)
        return draw_crops(self.augmentation, shape, len(self.split), seed, self.step.device)


class StreamFeed:
    """Feed of a loader: each batch is copied to the tensors that the captured step reads.

    There is a buffer for each size. A batch of another shape than the first of its size, such as sentences padded to
    another length, is `irregular`, and is not copied to a buffer.
    """

    def __init__(self, split: Split, data: Data, size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.split, self.data, self.size, self.device, self.dtype = split, data, size, device, dtype
        self.buffers: dict[int, Batch] = {}  # by the size of the batch
        self.irregular_batch: Batch | None = None
        first = next(iter(split.batches(size, device=device)))
        self._store(*first)
        self.sizes: tuple[int, ...] = (len(first[1]),)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def irregular(self) -> bool:
        return self.irregular_batch is not None

    def epoch(self, seed: Seed | None) -> Iterator[int]:
        self.step.zero_()
        try:
            for inputs, targets in self.split.batches(self.size, seed):
                self._store(inputs, targets)
                yield len(targets)
        finally:
            self.irregular_batch = None

    def batch(self, size: int) -> Batch:
        return _prepare(self.data, *(self.irregular_batch or self.buffers[size]), self.dtype)

    def _store(self, inputs: Inputs, targets: Tensor) -> None:
        """Copy a batch to the buffer of its size; the first of a size becomes the buffer."""
        size, self.irregular_batch = len(targets), None
        if size not in self.buffers:
            copied = map_inputs(lambda tensor: tensor.to(self.device, copy=True), inputs)
            self.buffers[size] = (copied, targets.to(self.device, copy=True))
            return
        buffer_inputs, buffer_targets = self.buffers[size]
        buffers, tensors = [*tensors_in(buffer_inputs), buffer_targets], [*tensors_in(inputs), targets]
        if [buffer.shape for buffer in buffers] != [tensor.shape for tensor in tensors]:
            self.irregular_batch = move_inputs(inputs, self.device), targets.to(self.device)
            return
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)


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
    """Return a feed of a split of `data`: on the device if it is in memory, else streamed. even: see `TableFeed`."""
    if isinstance(split, TensorSplit):
        return TableFeed(split.to(device), data, size, augmentation, dtype, even)
    return StreamFeed(split, data, size, device, dtype)


def _prepare(data: Data, inputs: Inputs, targets: Tensor, dtype: torch.dtype) -> Batch:
    """Convert a stored batch to what a network gets."""
    return data.prepare(inputs, dtype), targets.to(dtype) if targets.is_floating_point() else targets
