"""Edges of 8-bit images, distances to them, and histogram equalisation, as OpenCV defines them; for whole batches."""

import torch
import torch.nn.functional as F
from torch import Tensor

from structured_ensembles.evaluation.corruptions.filters import convolve, pad

SOBEL = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])
TANGENT = 13573 / 2**15  # of 22.5°, as OpenCV has it
STRAIGHT, DIAGONAL, KNIGHT = 1.0, 1.4, 2.1969  # steps of a 5×5 distance mask


def canny(images: Tensor, low: float, high: float) -> Tensor:
    """Detect edges, booleans (batch, height, width), in images (batch, height, width) of levels from 0 to 255.

    A pixel is an edge if its gradient (|x| + |y|) is a maximum across the edge, and above `high`; or above `low` and
    connected to such a pixel.
    """
    padded = pad(images, 1, 1, "edge")
    across, down = (_correlate(padded, kernel) for kernel in (SOBEL, SOBEL.T))
    magnitude = across.abs() + down.abs()
    around = F.pad(magnitude, (1, 1, 1, 1))
    height, width = images.shape[-2:]

    def neighbour(row: int, column: int) -> Tensor:
        return around[:, 1 + row : 1 + row + height, 1 + column : 1 + column + width]

    steep = down.abs() / across.abs().clamp_min(1e-6)
    sideways = (magnitude > neighbour(0, -1)) & (magnitude >= neighbour(0, 1))
    upright = (magnitude > neighbour(-1, 0)) & (magnitude >= neighbour(1, 0))
    falling = (magnitude > neighbour(-1, -1)) & (magnitude > neighbour(1, 1))
    rising = (magnitude > neighbour(-1, 1)) & (magnitude > neighbour(1, -1))
    slanted = torch.where((across < 0) != (down < 0), rising, falling)
    ridge = torch.where(steep < TANGENT, sideways, torch.where(steep > TANGENT + 2, upright, slanted))
    candidates = ridge & (magnitude > low)
    edges = candidates & (magnitude > high)
    while True:  # grow strong edges along weak ones until nothing changes
        grown = (F.max_pool2d(edges.float()[:, None], 3, 1, 1)[:, 0] > 0) & candidates
        if torch.equal(grown, edges):
            return edges
        edges = grown


def edge_distances(edges: Tensor, limit: float) -> Tensor:
    """Compute the distance of each pixel to the nearest edge, at most `limit`: (batch, height, width).

    The length of the shortest path of straight, diagonal and knight's steps, which stands for the Euclidean distance.
    """
    steps = [
        (row, column, {1: STRAIGHT, 2: DIAGONAL, 5: KNIGHT}[row**2 + column**2])
        for row in range(-2, 3)
        for column in range(-2, 3)
        if row**2 + column**2 in (1, 2, 5)
    ]
    height, width = edges.shape[-2:]
    nearest = torch.where(edges, 0.0, limit)
    while True:
        padded = F.pad(nearest, (2, 2, 2, 2), value=limit)
        nearer = nearest
        for row, column, length in steps:
            there = padded[:, 2 + row : 2 + row + height, 2 + column : 2 + column + width]
            nearer = torch.minimum(nearer, there + length)
        if torch.equal(nearer, nearest):
            return nearest
        nearest = nearer


def equalize(images: Tensor) -> Tensor:
    """Equalize the histogram of images (batch, height, width) of whole numbers from 0 to 255."""
    levels = images.long().flatten(1)
    ordered = levels.sort(1).values
    all_levels = torch.arange(256, device=images.device).repeat(len(levels), 1)
    cumulated = torch.searchsorted(ordered, all_levels, right=True)  # how many pixels are at most that bright
    lowest = cumulated.gather(1, ordered[:, :1])
    others = levels.shape[1] - lowest
    scale = torch.full_like(others, 255, dtype=torch.float32) / others.clamp_min(1)  # float32, where ties are decided
    table = ((cumulated - lowest) * scale).round().clamp_min(0)
    result = torch.where(others > 0, table.gather(1, levels), levels)
    return result.view_as(images).to(images.dtype)


def _correlate(padded: Tensor, kernel: Tensor) -> Tensor:
    """Correlate padded images (batch, height + 2, width + 2) with a kernel (3, 3)."""
    return convolve(padded[:, None], kernel)[:, 0, 1:-1, 1:-1]
