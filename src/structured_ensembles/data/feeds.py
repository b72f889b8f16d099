"""Feeds: sources of batches for a captured step, tensors at fixed addresses and a counter on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from structured_ensembles.common.inputs import Inputs, map_inputs, move_inputs, select_rows, tensors_in
from structured_ensembles.data.augmentation import Augmentation
from structured_ensembles.data.dataset import Data
from structured_ensembles.data.drawing import Seed, shuffle
from structured_ensembles.data.epoch_tables import EpochTables, plan_batches, prepare_batch
from structured_ensembles.data.picture_files import PictureSplit
from structured_ensembles.data.splits import Batch, Split, TensorSplit


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
    """Feed of a split in memory: the order of a whole epoch is a table on the device, too, indexed by the counter."""

    irregular = False

    def __init__(self, split: TensorSplit, tables: EpochTables) -> None:
        self.split, self.tables = split, tables
        self.sizes, self.step = tables.sizes, tables.step
        self.order = split.index.clone()

    def for_member(self) -> TableFeed:
        """Return a feed of the same split, on the same counter, for one member's own order and crops."""
        return TableFeed(self.split, self.tables.for_member())

    def epoch(self, seed: Seed | None) -> Iterator[int]:
        self.step.zero_()
        if seed is not None:
            self.shuffle(seed, _seed_of_crops(seed))
        yield from self.tables.batches

    def shuffle(self, order: Seed, crops: Seed) -> None:
        """Draw the order of an epoch from a seed; from another its crops and changes."""
        self.order.copy_(shuffle(self.split.index, order))
        self.tables.shuffle(crops)

    def batch(self, size: int) -> Batch:
        rows = self.order[self.tables.positions(size)]
        return self.tables.prepare(select_rows(self.split.inputs, rows), self.split.targets[rows])


class PictureFeed:
    """Feed of pictures in files: order and crops are those of a `TableFeed`, the pictures are decoded ahead.

    Each batch is copied to tensors that the captured step reads, where it is cropped, flipped and normalised.
    """

    irregular = False

    def __init__(self, split: PictureSplit, tables: EpochTables) -> None:
        self.split, self.tables = split, tables
        self.sizes, self.step = tables.sizes, tables.step
        self.order = split.index
        largest, device = max(tables.batches), tables.step.device
        self.images = torch.zeros((largest, *split.inputs.shape), dtype=torch.uint8, device=device)
        self.labels = torch.zeros(largest, dtype=split.targets.dtype, device=device)
        self.members: list[PictureFeed] = []
        self.decoded: Iterator[Batch] | None = None  # the rest of this epoch

    def for_member(self) -> PictureFeed:
        """Return a feed of the same split, on the same counter; this feed's epochs then load its batches."""
        member = PictureFeed(self.split, self.tables.for_member())
        self.members.append(member)
        return member

    def epoch(self, seed: Seed | None) -> Iterator[int]:
        self.step.zero_()
        if seed is not None:
            self.shuffle(seed, _seed_of_crops(seed))
        elif not self.members:
            self._decode()
        feeds = self.members or [self]
        try:
            for size in self.tables.batches:
                for feed in feeds:
                    feed.load()
                yield size
        finally:
            for feed in feeds:
                feed.decoded = None

    def shuffle(self, order: Seed, crops: Seed) -> None:
        """Draw the order of an epoch from a seed; from another its crops and changes."""
        self.order = shuffle(self.split.index, order)
        self._decode()
        self.tables.shuffle(crops)

    def load(self) -> None:
        """Copy the next batch to where the step reads it; nothing for a member that has stopped."""
        if self.decoded is not None:
            images, labels = next(self.decoded)
            assert isinstance(images, Tensor)
            self.images[: len(labels)].copy_(images)
            self.labels[: len(labels)].copy_(labels)

    def batch(self, size: int) -> Batch:
        return self.tables.prepare(self.images[:size], self.labels[:size])

    def _decode(self) -> None:
        """Let the threads decode the batches of an epoch, from the first `load` on."""
        self.decoded = self.split.stream(self.order, self.tables.batches, self.step.device)


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
        return prepare_batch(self.data, *(self.irregular_batch or self.buffers[size]), self.dtype)

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
    if not isinstance(split, TensorSplit | PictureSplit):
        return StreamFeed(split, data, size, device, dtype)
    batches, step = plan_batches(len(split), size, even), torch.zeros(1, dtype=torch.int64, device=device)
    tables = EpochTables(data, sample_shape(split), batches, augmentation, mixup, dtype, step)
    return TableFeed(split.to(device), tables) if isinstance(split, TensorSplit) else PictureFeed(split, tables)


def sample_shape(split: TensorSplit | PictureSplit) -> Any:
    """Return the shape of a stored sample; of several inputs, a tuple or dict of shapes."""
    if isinstance(split, PictureSplit):
        return split.inputs.shape
    return map_inputs(lambda tensor: tuple(tensor.shape[1:]), split.inputs)


def _seed_of_crops(seed: Seed) -> Seed:
    """Derive the seed of an epoch's crops from that of its order."""
    return (*seed, 1) if isinstance(seed, tuple) else (seed, 1)
