"""Digital corruptions (contrast, saturation, pixelation, warping), with CIFAR-10-C's severities."""

import torch
import torch.nn.functional as F
from torch import Tensor

from structured_ensembles.evaluation.corruptions import filters
from structured_ensembles.evaluation.corruptions.filters import length_scale
from structured_ensembles.evaluation.corruptions.randomness import Draws


def contrast(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Shrink the contrast: move every channel towards its mean."""
    share = (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1]
    mean = images.mean((2, 3), keepdim=True)
    return mean + share * (images - mean)


def saturate(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Make colours paler at the first two severities, stronger at the others; grey images stay as they are.

    A grey pixel of a colour image counts as red of no saturation, as in the published generator: what is added to its
    saturation turns it reddish.
    """
    if images.shape[1] != 3:
        return images
    factor, added = ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2))[severity - 1]
    value = images.amax(1, keepdim=True)
    saturation = 1 - images.amin(1, keepdim=True) / value.clamp_min(1e-6)
    wanted = (factor * saturation + added).clamp_max(1.0)
    # The hue stays: all channels keep their distances to the largest, in proportion.
    changed = value - (value - images) * (wanted / saturation.clamp_min(1e-6))
    red = value * (1 - wanted * torch.tensor([0.0, 1.0, 1.0]).to(images)[:, None, None])
    return torch.where(saturation > 1e-6, changed, red)


def pixelate(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Make pixels fewer and larger: average over boxes, and enlarge again."""
    share = (0.95, 0.9, 0.85, 0.75, 0.65)[severity - 1] / max(1.0, length_scale(images)) ** 0.5
    rows, columns = (
        _averaging_weights(size, min(int(size * share), size - 1)).to(images) for size in images.shape[-2:]
    )
    across = filters.quantize(images @ columns.T, rounded=True)  # Pillow goes across first, and rounds in between
    return filters.quantize(rows @ across, rounded=True)


def elastic_transform(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Warp each image by a random affine map, then by smooth random displacements.

    The published affine maps grow smaller with the severity, so that images come closer to the original. The image is
    interpolated twice, as published.
    """
    amplitude, sigma, jitter = (
        (0.0, 1.0, 2.56),
        (1.6, 6.4, 2.24),
        (2.56, 1.92, 1.92),
        (3.2, 1.28, 1.60),
        (3.2, 0.96, 0.96),
    )[severity - 1]
    height, width = images.shape[-2:]
    scale = length_scale(images)
    rows, columns = torch.meshgrid(
        *(torch.arange(length, device=images.device, dtype=images.dtype) for length in (height, width)), indexing="ij"
    )
    grid = torch.stack((columns, rows), -1)  # (height, width, 2), as x and y
    corners = draws.uniform("corners", (3, 2), -scale * jitter, scale * jitter)
    warped = _sample(images, _affine_source(grid, corners, min(height, width) // 3), align_corners=True)
    bumps = filters.smooth_noise(
        draws.uniform("bumps", (2, height, width), -1, 1), sigma, scale, "symmetric", truncate=3.0
    )
    return _sample(warped, grid + scale * amplitude * bumps.permute(0, 2, 3, 1), align_corners=False)


def _sample(images: Tensor, points: Tensor, *, align_corners: bool) -> Tensor:
    """Sample images at `points` (batch, height, width, 2) in pixels, as x and y.

    Beyond the edge they are mirrored: at the middle of the last pixel (`align_corners`), or at its rim.
    """
    size = torch.tensor([images.shape[-1], images.shape[-2]]).to(images)
    inside = 2 * points / (size - 1) - 1 if align_corners else (2 * points + 1) / size - 1
    return F.grid_sample(images, inside, padding_mode="reflection", align_corners=align_corners)


def _affine_source(grid: Tensor, moves: Tensor, reach: int) -> Tensor:
    """Compute the source of each pixel (batch, height, width, 2) under the affine map that moves three corners.

    grid: (height, width, 2), as x and y. moves: (batch, 3, 2), of the corners (1, 1), (1, -1), (-1, -1) * reach.
    """
    centre = torch.tensor([grid.shape[1] // 2, grid.shape[0] // 2]).to(grid)
    # A point at (x, y) from the centre moves by shift + x · along_x + y · along_y; here that is inverted.
    shift = (moves[:, 0] + moves[:, 2]) / 2
    along_x, along_y = (moves[:, 1] - moves[:, 2]) / (2 * reach), (moves[:, 0] - moves[:, 1]) / (2 * reach)
    (xx, yx), (xy, yy) = (1 + along_x[:, 0], along_x[:, 1]), (along_y[:, 0], 1 + along_y[:, 1])
    determinant = (xx * yy - xy * yx)[:, None, None]
    x, y = ((grid - centre) - shift[:, None, None]).unbind(-1)
    xx, yx, xy, yy = (entry[:, None, None] for entry in (xx, yx, xy, yy))
    source = torch.stack(((yy * x - xy * y) / determinant, (xx * y - yx * x) / determinant), -1)
    return source + centre


def _averaging_weights(size: int, boxes: int) -> Tensor:
    """Compute weights (size, size) that replace every pixel of a line by the mean over its box."""
    box = ((torch.arange(size, dtype=torch.float64) + 0.5) * boxes / size).long()
    together = (box[:, None] == box).double()
    return together / together.sum(1, keepdim=True)
