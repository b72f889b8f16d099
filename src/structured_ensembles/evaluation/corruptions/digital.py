"""What processing does to images. Severities are those published for CIFAR-10-C unless it is said otherwise."""

import torch
import torch.nn.functional as F
from torch import Tensor

from structured_ensembles.evaluation.corruptions import filters
from structured_ensembles.evaluation.corruptions.filters import length_scale
from structured_ensembles.evaluation.corruptions.randomness import Draws


def contrast(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Every channel is drawn towards its mean."""
    share = (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1]
    mean = images.mean((2, 3), keepdim=True)
    return mean + share * (images - mean)


def saturate(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Colours paler or stronger; what is grey has none, and stays as it is.

    The published settings in the order of how far they carry an image: a published 3 is our 1.
    """
    if images.shape[1] != 3:
        return images
    factor, added = ((1.5, 0.0), (0.3, 0.0), (0.1, 0.0), (2.0, 0.1), (2.5, 0.2))[severity - 1]
    value = images.amax(1, keepdim=True)
    saturation = 1 - images.amin(1, keepdim=True) / value.clamp_min(1e-6)
    wanted = (factor * saturation + added).clamp_max(1.0)
    # The hue stays: all channels keep their distances to the largest, in proportion.
    return value - (value - images) * (wanted / saturation.clamp_min(1e-6)) * (saturation > 1e-6)


def pixelate(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Fewer, larger pixels: averaged over boxes, and enlarged again."""
    share = (0.95, 0.9, 0.85, 0.75, 0.65)[severity - 1] / max(1.0, length_scale(images)) ** 0.5
    averages = (_averaging(size, min(int(size * share), size - 1)).to(images) for size in images.shape[-2:])
    return filters.resampled(images, *averages)


def elastic_transform(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Stretched like rubber: an affine map of each image's own, and smooth random displacements.

    The displacements are the published ones. The published affine maps grow smaller with the severity, so that images
    come closer to the original; ours start smaller and end at the published one.
    """
    amplitude, sigma, jitter = (
        (0.0, 1.0, 0.64),
        (1.6, 6.4, 0.80),
        (2.56, 1.92, 0.96),
        (3.2, 1.28, 0.96),
        (3.2, 0.96, 0.96),
    )[severity - 1]
    height, width = images.shape[-2:]
    scale = length_scale(images)
    rows, columns = torch.meshgrid(
        *(torch.arange(length, device=images.device, dtype=images.dtype) for length in (height, width)), indexing="ij"
    )
    grid = torch.stack((columns, rows), -1)  # (height, width, 2), as x and y
    bumps = filters.smooth_noise(draws.uniform("bumps", (2, height, width), -1, 1), sigma, scale)
    moves = _affine_displacement(grid, draws, min(height, width) // 3, scale * jitter)
    places = grid + moves + scale * amplitude * bumps.permute(0, 2, 3, 1)
    span = torch.tensor([width - 1, height - 1]).to(images)
    return F.grid_sample(images, 2 * places / span - 1, padding_mode="reflection", align_corners=True)


def _affine_displacement(grid: Tensor, draws: Draws, reach: int, jitter: float) -> Tensor:
    """How far (batch, height, width, 2) the affine map moves that moves three corners of the middle at random."""
    centre = grid.flatten(0, 1).mean(0)
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]]).to(grid) * reach  # (corner, xy) around the centre
    moves = draws.uniform("corners", (3, 2), -jitter, jitter)
    # moves = [corners, 1] @ coefficients: three corners settle the six numbers of an affine map.
    known = torch.cat((corners, torch.ones_like(corners[:, :1])), 1)
    coefficients = torch.linalg.solve(known, moves)  # (batch, 3, 2)
    around = torch.cat(((grid - centre).flatten(0, 1), grid.new_ones(grid.shape[0] * grid.shape[1], 1)), 1)
    return (around @ coefficients).unflatten(1, grid.shape[:2])


def _averaging(size: int, boxes: int) -> Tensor:
    """Weights (size, size) that replace every pixel of a line by the mean of those whose centres share its box."""
    box = ((torch.arange(size, dtype=torch.float64) + 0.5) * boxes / size).long()
    together = (box[:, None] == box).double()
    return together / together.sum(1, keepdim=True)
