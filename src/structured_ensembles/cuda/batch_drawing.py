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
        and feed.dtype in (torch.float32, torch.bfloat16, torch.float16)
    )


class BatchDrawer:
    """Draws the batches that `feed.batch` returns, for the feeds of several members at a time.

    The feeds share a split and a counter of batches. Their tables become views of stacked ones.
    dtype, channels_last: of the images that are drawn; by default those of the feeds.
    """

    def __init__(
        self, feeds: Sequence[TableFeed], dtype: torch.dtype | None = None, channels_last: bool = False
    ) -> None:
        self.feed, self.members = feeds[0], len(feeds)
        self.dtype = self.feed.dtype if dtype is None else dtype
        self.order = torch.stack([feed.order for feed in feeds])
        self.crops = None if self.feed.crops is None else torch.stack([feed.crops for feed in feeds])  # type: ignore[misc]
        self.channels_last = channels_last
        changes = [feed.changes for feed in feeds if feed.changes is not None]
        self.changes = stack_changes(changes) if changes else None
        for number, feed in enumerate(feeds):
            feed.order = self.order[number]
            if self.crops is not None:
                feed.crops = self.crops[number]

    def batch(self, size: int) -> Batch:
        """Return images (members × size, channels, height, width) and labels (members × size,), member by member.

        With mixup, labels are probabilities (members × size, classes).
        """
        from structured_ensembles.cuda.kernels.batch import draw_images

        feed = self.feed
        stored, targets, normalization = feed.split.inputs, feed.split.targets, feed.data.normalization
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
        launch(
            draw_images, (rows, ceil_div(channels * height * width, BLOCK)),
            stored, targets, self.order, self.order if self.crops is None else self.crops, feed.starts, feed.step,
            *(make_constant(values, stored.device, torch.float32) for values in (mean, deviation)),
            images, labels, size, self.order.shape[1], channels, height, width, padding(height),
            CROPS=self.crops is not None, CHANNELS_LAST=self.channels_last, BLOCK=BLOCK,
        )  # fmt: skip
        return (
            (images, labels)
            if self.changes is None
            else self.changes.apply(images, labels, feed.starts[feed.step], feed.step)
        )
