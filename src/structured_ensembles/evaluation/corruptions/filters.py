"""What blurs and weather are made of: smoothing, streaks, magnification, fractal clouds; for whole batches."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from structured_ensembles.evaluation.corruptions.randomness import Draws


def length_scale(images: Tensor) -> float:
    """What lengths given for 32×32 pixels are to be multiplied with.

    Less than in proportion, like the published severities, whose blurs grow 1.5 and 4 times from 32 to 64 and 224.
    Below 32 still less, because nothing blurs by less than half a pixel.
    """
    size = min(images.shape[-2:])
    return float((size / 32) ** (2 / 3 if size > 32 else 1 / 3))


def gaussian_blur(images: Tensor, sigma: float) -> Tensor:
    """Smooth images (…, height, width) with a Gaussian of this deviation in pixels."""
    weights = _gaussian(sigma)
    for axis in (-2, -1):
        images = _weighted_shifts(images, weights, axis)
    return images


def smooth_noise(noise: Tensor, sigma: float, scale: float) -> Tensor:
    """Noise (…, height, width) smoothed over scale * sigma pixels, yet as strong as noise smoothed over sigma.

    So that its bumps grow with the image and do not fade.
    """
    strength = sum(weight**2 for weight in _gaussian(sigma)) / sum(weight**2 for weight in _gaussian(scale * sigma))
    return strength * gaussian_blur(noise, scale * sigma)


def convolved(images: Tensor, kernel: Tensor) -> Tensor:
    """Images (batch, channels, height, width) under one small kernel (odd, odd): a sum of shifted images."""
    rows, columns = kernel.shape
    height, width = images.shape[-2:]
    framed = _framed(images, rows // 2, columns // 2)
    result = torch.zeros_like(images)
    for row, column in kernel.nonzero().tolist():
        result.add_(framed[..., row : row + height, column : column + width], alpha=float(kernel[row, column]))
    return result


def streaked(images: Tensor, degrees: Tensor, sigma: float, radius: float) -> Tensor:
    """Motion blur: every pixel is drawn out into half a Gaussian, in a direction of its image's own, shape (batch,).

    images: (batch, channels, height, width). radius: where the streak ends, in pixels; sigma: how it fades.
    """
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device)[None, :, None]
    columns = torch.arange(width, device=images.device)[None, None, :]
    angle = torch.deg2rad(degrees)[:, None, None]
    steps = range(min(round(radius), math.ceil(3.5 * sigma)) + 1)
    weights = [math.exp(-(step**2) / (2 * sigma**2)) for step in steps]
    flat, result = images.flatten(2), torch.zeros_like(images).flatten(2)
    for step, weight in zip(steps, weights, strict=True):
        down, right = (step * angle.sin()).round().long(), (step * angle.cos()).round().long()
        source = (rows + down).clamp(0, height - 1) * width + (columns + right).clamp(0, width - 1)
        index = source.flatten(1)[:, None].expand_as(flat)
        result.add_(flat.gather(2, index), alpha=weight / sum(weights))
    return result.view_as(images)


def magnified(images: Tensor, factor: float) -> Tensor:
    """Zoom into the middle of images (…, height, width), with linear interpolation."""
    return resampled(images, *(_magnification(size, factor).to(images) for size in images.shape[-2:]))


def resampled(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """New rows and columns as mixtures of the old: weights (new height, height) and (new width, width)."""
    return rows @ images @ columns.T


def clouds(draws: Draws, stream: str, size: tuple[int, int], decay: float) -> Tensor:
    """Fractal noise (batch, height, width) in [0,1], by repeated midpoint displacement on a torus (diamond-square).

    decay: how many times smaller the displacement is each time the grid is refined; large values make soft clouds.
    """
    side = 1 << max(1, math.ceil(math.log2(max(size))))
    noise = draws.uniform(stream, (side, side), -1.0, 1.0)
    field = torch.zeros_like(noise)
    step, amplitude = side, 1.0
    while step >= 2:
        half = step // 2
        corners = field[:, ::step, ::step]
        middle = corners + corners.roll(-1, 1)
        middle = (middle + middle.roll(-1, 2)) / 4
        centres = middle + amplitude * noise[:, half::step, half::step]
        field[:, half::step, half::step] = centres
        across = (centres + centres.roll(1, 1) + corners + corners.roll(-1, 2)) / 4
        along = (centres + centres.roll(1, 2) + corners + corners.roll(-1, 1)) / 4
        field[:, ::step, half::step] = across + amplitude * noise[:, ::step, half::step]
        field[:, half::step, ::step] = along + amplitude * noise[:, half::step, ::step]
        step, amplitude = half, amplitude / decay
    return stretched(field[:, : size[0], : size[1]])


def stretched(fields: Tensor) -> Tensor:
    """Every field (batch, height, width) spread to reach from 0 to 1."""
    low, high = fields.amin((1, 2), keepdim=True), fields.amax((1, 2), keepdim=True)
    return (fields - low) / (high - low).clamp_min(1e-6)


def _gaussian(sigma: float) -> list[float]:
    """Weights of the pixels within four deviations."""
    radius = math.ceil(4 * sigma - 0.5)
    weights = [math.exp(-(offset**2) / (2 * sigma**2)) for offset in range(-radius, radius + 1)]
    return [weight / sum(weights) for weight in weights]


def _weighted_shifts(images: Tensor, weights: list[float], axis: int) -> Tensor:
    radius, size = len(weights) // 2, images.shape[axis]
    framed = _framed(images, *((radius, 0) if axis == -2 else (0, radius)))
    result = framed.narrow(axis, 0, size) * weights[0]
    for offset, weight in enumerate(weights[1:], 1):
        result.add_(framed.narrow(axis, offset, size), alpha=weight)
    return result


def _framed(images: Tensor, rows: int, columns: int) -> Tensor:
    """Images (…, height, width) continued beyond their borders: mirrored, or where that is too little, by the edge."""
    fits = rows < images.shape[-2] and columns < images.shape[-1]
    batched = images.reshape(-1, 1, *images.shape[-2:])
    framed = F.pad(batched, (columns, columns, rows, rows), mode="reflect" if fits else "replicate")
    return framed.view(*images.shape[:-2], *framed.shape[-2:])


def _magnification(size: int, factor: float) -> Tensor:
    """Weights (size, size) that enlarge the middle of a line of `size` pixels."""
    centre = (size - 1) / 2
    positions = (torch.arange(size, dtype=torch.float64) - centre) / factor + centre
    left = positions.floor().clamp(0, size - 2).long()
    share = positions - left
    weights = torch.zeros(size, size, dtype=torch.float64)
    weights[torch.arange(size), left] = 1 - share
    weights[torch.arange(size), left + 1] += share
    return weights
