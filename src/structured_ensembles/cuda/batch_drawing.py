"""Draw the batches of all members in one kernel: look up, crop, flip and normalise the images, look up the labels.

Every member draws its own. In PyTorch that takes twenty small kernels for each, and a fleet is bound by the number of
its kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TypeGuard

import torch
from torch import Tensor

from structured_ensembles.common.devices import make_constant
from structured_ensembles.cuda.launch import empty, launch
from structured_ensembles.cuda.launch_grid import ceil_div
from structured_ensembles.data.augmentation import padding
from structured_ensembles.data.batch_changes import stack_changes
from structured_ensembles.data.feeds import MemberFeed, TableFeed
from structured_ensembles.data.normalization import Normalization
from structured_ensembles.data.splits import Batch

BLOCK = 1024  # pixels


def fits(feed: MemberFeed) -> TypeGuard[TableFeed]:
    """Tell whether `BatchDrawer` can replace `feed.batch`: pixels of labelled images, on a GPU with Triton."""
    if not isinstance(feed, TableFeed):
        return False
    inputs, targets = feed.split.inputs, feed.split.targets
    return (
        find_spec("triton") is not None
        and isinstance(inputs, Tensor)
        and inputs.is_cuda
        and inputs.dtype == torch.uint8
        and inputs.dim() == 4
        and inputs.is_contiguous()
        and targets.dtype == torch.int64
        and targets.dim() == 1
        and targets.is_contiguous()
        and feed.tables.dtype in (torch.float32, torch.bfloat16, torch.float16)
    )


class BatchDrawer:
    """Draws the batches that `feed.batch` returns, for the feeds of several members at a time.

    The feeds share a split and a counter of batches. Their tables become views of stacked ones.
    dtype, channels_last: of the images that are drawn; by default those of the feeds.
    """

    def __init__(
        self, feeds: Sequence[TableFeed], dtype: torch.dtype | None = None, channels_last: bool = False
    ) -> None:
        of_members = [feed.tables for feed in feeds]
        self.split, self.tables, self.members = feeds[0].split, of_members[0], len(feeds)
        self.dtype = self.tables.dtype if dtype is None else dtype
        self.channels_last = channels_last
        self.order = torch.stack([feed.order for feed in feeds])
        crops = [tables.crops for tables in of_members if tables.crops is not None]
        self.crops = torch.stack(crops) if crops else None
        changes = [tables.changes for tables in of_members if tables.changes is not None]
        self.changes = stack_changes(changes) if changes else None
        for number, feed in enumerate(feeds):
            feed.order = self.order[number]
            if self.crops is not None:
                feed.tables.crops = self.crops[number]

    def batch(self, size: int) -> Batch:
        """Return images (members × size, channels, height, width) and labels (members × size,), member by member.

        With mixup, labels are probabilities (members × size, classes).
        """
        from structured_ensembles.cuda.kernels.batch import draw_images

        stored, targets, normalization = self.split.inputs, self.split.targets, self.tables.data.normalization
        assert isinstance(stored, Tensor)
        assert normalization is None or isinstance(normalization, Normalization)
        _, channels, height, width = stored.shape
        moments = Normalization((0.0,), (1.0,)) if normalization is None else normalization
        mean, deviation = (
            values * channels if len(values) == 1 else values for values in (moments.mean, moments.deviation)
        )
        rows = self.members * size
        shape = (rows, channels, height, width)
        images = empty(*shape, like=stored, dtype=self.dtype, channels_last=self.channels_last)
        labels = empty(rows, like=stored, dtype=targets.dtype)
        crops = self.order if self.crops is None else self.crops  # without crops, a tensor that is not read
        launch(
            draw_images, (rows, ceil_div(channels * height * width, BLOCK)),
            stored, targets, self.order, crops, self.tables.starts, self.tables.step,
            *(make_constant(values, stored.device, torch.float32) for values in (mean, deviation)),
            images, labels, size, self.order.shape[1], channels, height, width, padding(height),
            CROPS=self.crops is not None, CHANNELS_LAST=self.channels_last, BLOCK=BLOCK,
        )  # fmt: skip
        if self.changes is None:
            return images, labels
        return self.changes.apply(images, labels, self.tables.starts[self.tables.step], self.tables.step)
