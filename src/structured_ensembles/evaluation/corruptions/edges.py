"""Edges of 8-bit images, distances to them, and histogram equalisation, as OpenCV defines them; for whole batches."""

import torch
import torch.nn.functional as F
from torch import Tensor

from structured_ensembles.evaluation.corruptions.filters import convolved, framed_by

SOBEL = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])
TANGENT = 13573 / 2**15  # of 22.5°, as OpenCV has it
STRAIGHT, DIAGONAL, KNIGHT = 1.0, 1.4, 2.1969  # steps of a 5×5 distance mask


def canny(images: Tensor, low: float, high: float) -> Tensor:
    """Detect edges, booleans (batch, height, width), in images (batch, height, width) of levels from 0 to 255.

    A pixel is an edge if its gradient (|x| + |y|) is a maximum across the edge, and above `high`; or above `low` and
    connected to such a pixel.
    """
    framed = framed_by(images, 1, 1, "edge")
    across, down = (_correlated(framed, kernel) for kernel in (SOBEL, SOBEL.T))
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
    possible = ridge & (magnitude > low)
    edges = possible & (magnitude > high)
    while True:  # follow edges until none grows
        grown = (F.max_pool2d(edges.float()[:, None], 3, 1, 1)[:, 0] > 0) & possible
        if torch.equal(grown, edges):
            return edges
        edges = grown


def distances(edges: Tensor, most: float) -> Tensor:
    """Compute the distance of each pixel to the nearest edge, at most `most`: (batch, height, width).

    The length of the shortest path of straight, diagonal and knight's steps, which stands for the Euclidean distance.
    """
    steps = [
        (row, column, {1: STRAIGHT, 2: DIAGONAL, 5: KNIGHT}[row**2 + column**2])
        for row in range(-2, 3)
        for column in range(-2, 3)
        if row**2 + column**2 in (1, 2, 5)
    ]
    height, width = edges.shape[-2:]
    found = torch.where(edges, 0.0, most)
    while True:
        framed = F.pad(found, (2, 2, 2, 2), value=most)
        nearer = found
        for row, column, length in steps:
            there = framed[:, 2 + row : 2 + row + height, 2 + column : 2 + column + width]
            nearer = torch.minimum(nearer, there + length)
        if torch.equal(nearer, found):
            return found
        found = nearer


def equalized(images: Tensor) -> Tensor:
    """Spread images (batch, height, width) of whole numbers from 0 to 255 so that all levels are equally frequent."""
    levels = images.long().flatten(1)
    ordered = levels.sort(1).values
    every = torch.arange(256, device=images.device).repeat(len(levels), 1)
    cumulated = torch.searchsorted(ordered, every, right=True)  # how many pixels are at most that bright
    lowest = cumulated.gather(1, ordered[:, :1])
    others = levels.shape[1] - lowest
    scale = torch.full_like(others, 255, dtype=torch.float32) / others.clamp_min(1)  # float32, where ties are decided
    table = ((cumulated - lowest) * scale).round().clamp_min(0)
    result = torch.where(others > 0, table.gather(1, levels), levels)
    return result.view_as(images).to(images.dtype)


def _correlated(framed: Tensor, kernel: Tensor) -> Tensor:
    """Correlate framed images (batch, height + 2, width + 2) with a kernel (3, 3)."""
    return convolved(framed[:, None], kernel)[:, 0, 1:-1, 1:-1]
