"""Random crops and flips, for a whole batch at once."""

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from structured_ensembles.data.splits import Seed

Augmentation = Literal["auto", "crop", "crop+flip", "none"]


def resolved(augmentation: Augmentation, shape: tuple[int, ...]) -> Augmentation:
    """What "auto" means for inputs of `shape`: crops and flips for colour images, nothing for anything else.

    Grey images are mostly characters, which a flip turns into others.
    """
    if augmentation != "auto":
        return augmentation
    return "crop+flip" if len(shape) == 3 and shape[0] == 3 and min(shape[1:]) >= 16 else "none"


def augment(images: Tensor, augmentation: Augmentation, seed: Seed) -> Tensor:
    """Zero-pad by an eighth of the size (4 for 32×32), crop at random, flip every second image: (batch, c, h, w) alike.

    The draws come from `seed` alone, so that a resumed run and another device see the same pictures.
    """
    if augmentation == "none":
        return images
    batch, _, height, width = images.shape
    rng = np.random.default_rng(seed)
    pad = max(1, height // 8)
    draws = torch.from_numpy(np.stack([rng.integers(0, 2 * pad + 1, batch), rng.integers(0, 2 * pad + 1, batch)]))
    flips = torch.from_numpy(rng.integers(0, 2, batch)) * (augmentation == "crop+flip")
    down, right = draws.to(images.device)
    columns = torch.arange(width, device=images.device).expand(batch, width)
    columns = torch.where(flips.to(images.device)[:, None] == 1, columns.flip(1), columns) + right[:, None]
    rows = torch.arange(height, device=images.device) + down[:, None]
    padded = F.pad(images, (pad,) * 4)
    samples = torch.arange(batch, device=images.device)[:, None, None]
    cropped = padded.permute(0, 2, 3, 1)[samples, rows[:, :, None], columns[:, None, :]]  # (batch, height, width, c)
    return cropped.permute(0, 3, 1, 2)
