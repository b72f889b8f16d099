"""Read small sets of real digits and photographs."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch import Tensor

import structured_ensembles as se


def few_digits() -> se.Data:
    """Return 300 of the digits, split into training and validation samples."""
    data = se.load_data("digits")
    return se.Data.from_arrays(data.train.inputs[:300], data.train.targets[:300], classes=10, name="few")


def photographs(size: int) -> Tensor:
    """Return square pieces of two photographs, (pieces, 3, size, size), with 8-bit values in [0, 1]."""
    pieces = []
    for picture in load_sample_images().images:
        pixels = torch.from_numpy(picture.copy()).permute(2, 0, 1)[None].float() / 255
        shrunk = F.interpolate(pixels, (3 * size, 4 * size), mode="area")[0]
        pieces.append(
            shrunk.unfold(1, size, size).unfold(2, size, size).permute(1, 2, 0, 3, 4).reshape(-1, 3, size, size)
        )
    return (torch.cat(pieces) * 255).round() / 255
