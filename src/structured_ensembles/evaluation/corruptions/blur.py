"""Blur corruptions, with CIFAR-10-C's severities in pixels of 32×32 images; lengths grow with the images."""

import torch
from torch import Tensor

from structured_ensembles.evaluation.corruptions import filters
from structured_ensembles.evaluation.corruptions.filters import length_scale
from structured_ensembles.evaluation.corruptions.randomness import Draws


def gaussian_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Smooth the image."""
    return filters.gaussian_blur(images, length_scale(images) * (0.4, 0.6, 0.7, 0.8, 1.0)[severity - 1])


def defocus_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Turn every point into a disc with a soft rim.

    Discs are of whole pixels, as published: a point at the first three severities, then five and nine pixels. They grow
    with the images, and are no smaller below 32 pixels, where there would be only points.
    """
    radius, rim = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))[severity - 1]
    scale = length_scale(images)
    blurred = filters.convolve(images, _disc(max(1.0, scale) * radius))
    return filters.gaussian_blur(blurred, scale * rim, "mirror", radius=max(1, round(scale)))


def motion_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Blur each image along a random direction within 45° of the horizontal."""
    radius, sigma = ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))[severity - 1]
    scale = length_scale(images)
    streaks = filters.streak(images, draws.uniform("direction", (), -45, 45), scale * sigma, scale * radius)
    return filters.quantize(streaks, rounded=True)


def zoom_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Take the mean over growing magnifications, as if the camera moved towards the scene.

    The first two severities have one magnification more than their settings say: NumPy's `arange(1, 1.06, 0.01)` ends
    with 1.06, which it should exclude, while `arange(1, 1.16, 0.01)` ends with 1.15. Its steps are `1.01 - 1` wide, a
    little more than 0.01: enough to make 33 pixels of 26 where 32.5 is rounded.
    """
    steps = (6, 11, 15, 20, 25)[severity - 1]
    total = filters.magnify(images, *(1 + step * (1.01 - 1) for step in range(1, steps + 1)))
    return (2 * images + total) / (steps + 2)  # also the image itself, and magnified by 1


def glass_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Imitate frosted glass: smooth, replace pixels by neighbours, smooth again.

    Severities are as published, though at the first three the image comes closer to the original.
    """
    sigma, rounds = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))[severity - 1]
    order = _copied_neighbours(images, max(1, round(length_scale(images))), rounds, draws)
    smooth = filters.quantize(filters.gaussian_blur(images, sigma)).flatten(2)
    shuffled = smooth.gather(2, order[:, None].expand_as(smooth)).view_as(images)
    return filters.gaussian_blur(shuffled, sigma)


def _disc(radius: float) -> Tensor:
    """Compute a disc kernel (size, size): equal weights of sum 1 for the pixels whose centres lie in the disc."""
    reach = int(radius)
    line = torch.arange(-reach, reach + 1, dtype=torch.float64)
    inside = (line[:, None].square() + line.square() <= radius**2).double()
    return inside / inside.sum()


def _copied_neighbours(images: Tensor, reach: int, rounds: int, draws: Draws) -> Tensor:
    """Compute the source of every pixel, (batch, height * width), when pixels copy neighbours in turn.

    From the last pixel to the first, each takes the value of one at most `reach` away. The published generator meant
    to swap the two: `x[a], x[b] = x[b], x[a]` does not, where x[a] is a view. The order matters only within reach: all
    pixels (row, column) of one (reach + 1)·row + column are done at once, which gives the same as one by one.
    """
    height, width = images.shape[-2:]
    rows, columns = torch.meshgrid(
        torch.arange(height - reach, reach, -1, device=images.device),
        torch.arange(width - reach, reach, -1, device=images.device),
        indexing="ij",
    )
    waves, order = ((reach + 1) * rows + columns).flatten().sort(descending=True, stable=True)
    counts = waves.unique_consecutive(return_counts=True)[1].tolist()
    pixels = (rows * width + columns).flatten()[order]
    source = torch.arange(height * width, device=images.device).repeat(len(images), 1)
    for turn in range(rounds):
        down, right = (
            draws.integers(f"{axis} {turn}", (len(pixels),), -reach, reach)[:, order] for axis in ("down", "right")
        )
        partners = pixels + down * width + right
        if reach == 1:  # no pixel reads one that has changed already
            source[:, pixels] = source.gather(1, partners)
            continue
        for wave, wave_partners in zip(pixels.split(counts), partners.split(counts, 1), strict=True):
            source[:, wave] = source.gather(1, wave_partners)
    return source
