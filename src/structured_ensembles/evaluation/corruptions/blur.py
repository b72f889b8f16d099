"""Blurs. Severities are those published for CIFAR-10-C, in pixels of 32×32 images; they grow with the images."""

import torch
from torch import Tensor

from structured_ensembles.evaluation.corruptions import filters
from structured_ensembles.evaluation.corruptions.filters import length_scale
from structured_ensembles.evaluation.corruptions.randomness import Draws


def gaussian_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Smoothing."""
    return filters.gaussian_blur(images, length_scale(images) * (0.4, 0.6, 0.7, 0.8, 1.0)[severity - 1])


def defocus_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """A point becomes a disc with a soft rim.

    The published discs are too small for a grid of pixels: a point three times, then five and nine pixels. We take the
    points for what they are, and round discs as large as the other two, which can grow with the images.
    """
    radius, rim = ((0.0, 0.4), (0.0, 0.5), (0.0, 0.6), (1.25, 0.2), (1.7, 0.1))[severity - 1]
    scale = length_scale(images)
    sharp = filters.convolved(images, _disc(scale * radius)) if radius else images
    return filters.gaussian_blur(sharp, scale * rim)


def motion_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """A streak, in a direction of each image's own within 45° of the horizontal."""
    radius, sigma = ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))[severity - 1]
    scale = length_scale(images)
    return filters.streaked(images, draws.uniform("direction", (), -45, 45), scale * sigma, scale * radius)


def zoom_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """The camera moves towards the scene: the mean over growing magnifications."""
    steps = (5, 10, 15, 20, 25)[severity - 1]
    total = 2 * images  # the image itself, and magnified by 1
    for step in range(1, steps + 1):
        total += filters.magnified(images, 1 + step / 100)
    return total / (steps + 2)


def glass_blur(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Frosted glass: smoothed, pixels exchanged with neighbours, smoothed again.

    The published settings in the order of how far they carry an image: a published 3 is our 1, a published 4 our 5.
    """
    sigma, rounds = ((0.4, 1), (0.25, 1), (0.05, 1), (0.4, 2), (0.25, 2))[severity - 1]
    order = _shuffled_neighbours(images, max(1, round(length_scale(images))), rounds, draws)
    smooth = filters.gaussian_blur(images, sigma).flatten(2)
    shuffled = smooth.gather(2, order[:, None].expand_as(smooth)).view_as(images)
    return filters.gaussian_blur(shuffled, sigma)


def _disc(radius: float, fine: int = 16) -> Tensor:
    """How much of each pixel a disc covers, (size, size), in all 1; by counting points of a fine grid."""
    reach = int(radius + 0.5)
    size = 2 * reach + 1
    line = (torch.arange(size * fine, dtype=torch.float64) + 0.5) / fine - size / 2
    inside = (line[:, None].square() + line.square() <= radius**2).double()
    covered = inside.unflatten(0, (size, fine)).unflatten(2, (size, fine)).sum((1, 3))
    return covered / covered.sum()


def _shuffled_neighbours(images: Tensor, reach: int, rounds: int, draws: Draws) -> Tensor:
    """Where every pixel comes from, (batch, height * width), when pixels swap places one after the other.

    From the last pixel to the first, each swaps with one at most `reach` away. Swaps that lie far enough apart do not
    touch: all pixels (row, column) of one 2·reach·row + column are swapped at once, which gives the same as one by one.
    """
    height, width = images.shape[-2:]
    rows, columns = torch.meshgrid(
        torch.arange(height - reach, reach, -1, device=images.device),
        torch.arange(width - reach, reach, -1, device=images.device),
        indexing="ij",
    )
    waves, order = (2 * reach * rows + columns).flatten().sort(descending=True, stable=True)
    counts = waves.unique_consecutive(return_counts=True)[1].tolist()
    places = (rows * width + columns).flatten()[order]
    source = torch.arange(height * width, device=images.device).repeat(len(images), 1)
    for turn in range(rounds):
        down, right = (
            draws.integers(f"{axis} {turn}", (len(places),), -reach, reach)[:, order] for axis in ("down", "right")
        )
        partners = places + down * width + right
        for own, other in zip(places.split(counts), partners.split(counts, 1), strict=True):
            moved = source[:, own]
            source[:, own] = source.gather(1, other)
            source.scatter_(1, other, moved)
    return source
