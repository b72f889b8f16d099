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
from structured_ensembles.data.batch_changes import changes_for
from structured_ensembles.data.dataset import Data
from structured_ensembles.data.drawing import Seed, shuffle
from structured_ensembles.data.picture_files import PictureSplit
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


def plan_batches(samples: int, size: int, even: bool = False) -> list[int]:
    """Return the sizes of all batches. even: as many, of nearly equal size; else the last has the remaining samples."""
    sizes = batch_sizes(samples, size)
    least, longer = divmod(samples, len(sizes))
    return [least + (number < longer) for number in range(len(sizes))] if even else sizes


class TableFeed:
    """Feed of a split in memory: order and crops of a whole epoch are tables on the device, indexed by the counter.

    even: see `plan_batches`.
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
        mixup: float = 0.0,
    ) -> None:
        self.split, self.data, self.size, self.augmentation = split, data, size, augmentation
        self.dtype, self.even, self.mixup = dtype, even, mixup
        self.batches = plan_batches(len(split), size, even)
        self.starts = torch.tensor([0, *accumulate(self.batches)], device=split.index.device)
        self.sizes: tuple[int, ...] = tuple(size for size, _ in Counter(self.batches).most_common())
        self.step = torch.zeros(1, dtype=torch.int64, device=split.index.device) if step is None else step
        self.order = split.index.clone()
        self.crops = self._crops(0)
        self.changes = changes_for(augmentation, mixup, data, len(split), len(self.batches), self.step.device)

    def epoch(self, seed: Seed | None) -> Iterator[int]:
        self.step.zero_()
        if seed is not None:
            self.shuffle(seed, (*seed, 1) if isinstance(seed, tuple) else (seed, 1))
        yield from self.batches

    def shuffle(self, order: Seed, crops: Seed) -> None:
        """Draw the order of an epoch from a seed; from another its crops, and its holes and shares derived from it."""
        self.order.copy_(shuffle(self.split.index, order))
        if self.crops is not None:
            drawn = self._crops(crops)
            assert drawn is not None
            self.crops.copy_(drawn)
        if self.changes is not None:
            self.changes.shuffle(crops)

    def for_member(self) -> TableFeed:
        """Return a feed of the same split, on the same counter, for one member's own order and crops."""
        return TableFeed(
            self.split, self.data, self.size, self.augmentation, self.dtype, self.even, self.step, self.mixup
        )

    def batch(self, size: int) -> Batch:
        positions = self.starts[self.step] + torch.arange(size, device=self.step.device)
        rows = self.order[positions]
        inputs = select_rows(self.split.inputs, rows)
        if self.crops is not None:
            inputs = augment(inputs, self.crops[positions])
        batch = _prepare(self.data, inputs, self.split.targets[rows], self.dtype)
        return batch if self.changes is None else self.changes.apply(*batch, self.starts[self.step], self.step)

    def _crops(self, seed: Seed) -> Tensor | None:
        shape = map_inputs(lambda tensor: tuple(tensor.shape[1:]), self.split.inputs)
        return draw_crops(self.augmentation, shape, len(self.split), seed, self.step.device)


class PictureFeed:
    """Feed of pictures in files: order and crops are those of a `TableFeed`, the pictures are decoded ahead.

    Each batch is copied to tensors that the captured step reads, where it is cropped, flipped and normalised.
    """

    irregular = False

    def __init__(
        self,
        split: PictureSplit,
        data: Data,
        size: int,
        augmentation: Augmentation,
        device: torch.device,
        dtype: torch.dtype,
        even: bool = False,
        step: Tensor | None = None,
        mixup: float = 0.0,
    ) -> None:
        self.split, self.data, self.size, self.augmentation = split, data, size, augmentation
        self.device, self.dtype, self.even, self.mixup = device, dtype, even, mixup
        self.batches = plan_batches(len(split), size, even)
        self.starts = torch.tensor([0, *accumulate(self.batches)], device=device)
        self.sizes: tuple[int, ...] = tuple(size for size, _ in Counter(self.batches).most_common())
        self.step = torch.zeros(1, dtype=torch.int64, device=device) if step is None else step
        self.crops = self._crops(0)
        self.changes = changes_for(augmentation, mixup, data, len(split), len(self.batches), device)
        self.order = split.index
        self.images = torch.zeros((max(self.batches), *split.inputs.shape), dtype=torch.uint8, device=device)
        self.labels = torch.zeros(max(self.batches), dtype=split.targets.dtype, device=device)
        self.members: list[PictureFeed] = []
        self.decoded: Iterator[Batch] | None = None  # the rest of this epoch

    def for_member(self) -> PictureFeed:
        """Return a feed of the same split, on the same counter; this feed's epochs then load its batches."""
        member = PictureFeed(
            self.split,
            self.data,
            self.size,
            self.augmentation,
            self.device,
            self.dtype,
            self.even,
            self.step,
            self.mixup,
        )
        self.members.append(member)
        return member

    def epoch(self, seed: Seed | None) -> Iterator[int]:
        self.step.zero_()
        if seed is not None:
            self.shuffle(seed, (*seed, 1) if isinstance(seed, tuple) else (seed, 1))
        elif not self.members:
            self._decode()
        feeds = self.members or [self]
        try:
            for size in self.batches:
                for feed in feeds:
                    feed.load()
                yield size
        finally:
            for feed in feeds:
                feed.decoded = None

    def shuffle(self, order: Seed, crops: Seed) -> None:
        """Draw the order of an epoch from a seed; from another its crops, and its holes and shares derived from it."""
        self.order = shuffle(self.split.index, order)
        self._decode()
        if self.crops is not None:
            drawn = self._crops(crops)
            assert drawn is not None
            self.crops.copy_(drawn)
        if self.changes is not None:
            self.changes.shuffle(crops)

    def load(self) -> None:
        """Copy the next batch to where the step reads it; nothing for a member that has stopped."""
        if self.decoded is not None:
            images, labels = next(self.decoded)
            assert isinstance(images, Tensor)
            self.images[: len(labels)].copy_(images)
            self.labels[: len(labels)].copy_(labels)

    def batch(self, size: int) -> Batch:
        images = self.images[:size]
        if self.crops is not None:
            positions = self.starts[self.step] + torch.arange(size, device=self.step.device)
            images = augment(images, self.crops[positions])
        batch = _prepare(self.data, images, self.labels[:size], self.dtype)
        return batch if self.changes is None else self.changes.apply(*batch, self.starts[self.step], self.step)

    def _decode(self) -> None:
        """Let the threads decode the batches of an epoch, from the first `load` on."""
        self.decoded = self.split.stream(self.order, self.batches, self.device)

    def _crops(self, seed: Seed) -> Tensor | None:
        return draw_crops(self.augmentation, self.split.inputs.shape, len(self.split), seed, self.device)


MemberFeed = TableFeed | PictureFeed  # of a member's own batches


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
    mixup: float = 0.0,
) -> Feed:
    """Return a feed of a split of `data`: on the device if it is in memory, else streamed. even: see `plan_batches`."""
    if isinstance(split, TensorSplit):
        return TableFeed(split.to(device), data, size, augmentation, dtype, even, mixup=mixup)
    if isinstance(split, PictureSplit):
        return PictureFeed(split, data, size, augmentation, device, dtype, even, mixup=mixup)
    return StreamFeed(split, data, size, device, dtype)


def _prepare(data: Data, inputs: Inputs, targets: Tensor, dtype: torch.dtype) -> Batch:
    """Convert a stored batch to what a network gets."""
    return data.prepare(inputs, dtype), targets.to(dtype) if targets.is_floating_point() else targets
