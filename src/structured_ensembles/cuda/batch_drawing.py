"""Draw a member's batch in one kernel: look up, crop, flip and normalise the images, look up the labels.

Every member draws its own. In PyTorch that takes twenty small kernels for each, and a fleet is bound by the number of
its kernels. With this one, a step of five ResNet20s takes 2.54 ms on an H200; when they shared one batch, drawn by
those twenty, it took 2.56 (fleet-own-batches-h200.json and fleet-h200.json in benchmarks/results).
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from structured_ensembles.common.devices import make_constant
from structured_ensembles.cuda.launch_grid import divided
from structured_ensembles.data.augmentation import padding
from structured_ensembles.data.feeds import TableFeed
from structured_ensembles.data.normalization import Normalization
from structured_ensembles.data.splits import Batch

BLOCK = 1024  # pixels


def fits(feed: TableFeed) -> bool:
    """Tell whether `drawn_batch` can replace `feed.batch`: pixels of labelled images, on a GPU with Triton."""
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


def drawn_batch(feed: TableFeed, size: int) -> Batch:
    """Return what `feed.batch(size)` returns: inputs (size, channels, height, width) and labels (size,)."""
    from structured_ensembles.cuda.kernels.batch import draw_images

    stored, targets, normalization = feed.split.inputs, feed.split.targets, feed.data.normalization
    assert isinstance(stored, Tensor)
    assert normalization is None or isinstance(normalization, Normalization)
    _, channels, height, width = stored.shape
    moments = Normalization((0.0,), (1.0,)) if normalization is None else normalization
    mean, deviation = (own * channels if len(own) == 1 else own for own in (moments.mean, moments.deviation))
    images = torch.empty(size, channels, height, width, dtype=feed.dtype, device=stored.device)
    labels = torch.empty(size, dtype=targets.dtype, device=stored.device)
    draw_images[size, divided(channels * height * width, BLOCK)](
        stored,
        targets,
        feed.order,
        feed.order if feed.crops is None else feed.crops,
        feed.starts,
        feed.step,
        *(make_constant(values, stored.device, torch.float32) for values in (mean, deviation)),
        images,
        labels,
        channels,
        height,
        width,
        padding(height),
        CROPS=feed.crops is not None,
        BLOCK=BLOCK,
    )
    return images, labels
