"""Augmentation: random crops and flips, for a whole batch at once; `batch_changes.py` has cutout and mixup."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from structured_ensembles.common.inputs import is_several
from structured_ensembles.data.drawing import Seed, draw

Augmentation = Literal["auto", "crop", "crop+flip", "crop+flip+cutout", "none"]


def resolve_augmentation(augmentation: Augmentation, shape: Any, task: str = "classification") -> Augmentation:
    """Resolve "auto" for inputs of `shape`: crops and flips for colour images of a classification, else "none".

    Grey images are mostly characters, which a flip turns into others. The targets of a regression may be positions in
    the image, or an image, and would not move along.
    """
    if is_several(shape):
        if augmentation not in ("auto", "none"):
            raise ValueError(f"augmentation must be 'auto' or 'none' for data of several inputs, not {augmentation!r}")
        return "none"
    if augmentation != "auto":
        return augmentation
    colour = len(shape) == 3 and shape[0] == 3 and min(shape[1:]) >= 16
    return "crop+flip" if colour and task == "classification" else "none"


def draw_crops(
    augmentation: Augmentation, shape: Any, samples: int, seed: Seed, device: torch.device | str = "cpu"
) -> Tensor | None:
    """Draw the offset (down, right) of each image's crop and whether it is flipped, (samples, 3); None without any.

    shape: of one image. The draws depend on `seed` alone, so that a resumed run and another device see the same images.
    """
    if augmentation == "none":
        return None
    if is_several(shape) or len(shape) != 3:
        raise ValueError(
            f"augmentation {augmentation!r} is for images (channels, height, width), not inputs of {shape}"
        )
    offsets = 2 * padding(shape[-2]) + 1
    down, right, flip = draw(seed, 3 * samples, device).view(3, samples)
    return torch.stack([down % offsets, right % offsets, flip % 2 * ("flip" in augmentation)], dim=1)


def padding(height: int) -> int:
    """Return the padding of images of this height, an eighth of it: 4 for 32×32, 8 for 64×64."""
    return max(1, height // 8)


def augment(images: Tensor, crops: Tensor | None) -> Tensor:
    """Zero-pad, crop and flip images (batch, c, h, w) by `crops` (batch, 3); return them as they are for None."""
    if crops is None:
        return images
    batch, _, height, width = images.shape
    down, right, flip = crops[:, :, None].unbind(1)
    columns = torch.arange(width, device=images.device).expand(batch, width)
    columns = torch.where(flip == 1, columns.flip(1), columns) + right
    rows = torch.arange(height, device=images.device) + down
    padded = F.pad(images, (padding(height),) * 4)
    samples = torch.arange(batch, device=images.device)[:, None, None]
    cropped = padded.permute(0, 2, 3, 1)[samples, rows[:, :, None], columns[:, None, :]]  # (batch, height, width, c)
    return cropped.permute(0, 3, 1, 2)
